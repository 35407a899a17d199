"""hub/client.py: limits of retries and responses, redaction, and errors of the HTTP client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_fixtures import FailingFunction
from hub_server import HubServer, point_clients_at
from huggingface_hub import HfApi, close_session, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http
from refusals import refused

from finetune.errors import DataError, HubError, WeightsError
from finetune.hub import client
from finetune.hub.client import (
    TransientHubError,
    expect_json,
    http_status,
    is_connection_error,
    monitor_requests,
    permanent_hub_error,
    redact,
    retry,
)

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture
def recorded_waits(monkeypatch: Patch) -> list[float]:
    """Seconds of each wait; no test really waits."""
    seconds: list[float] = []
    monkeypatch.setattr(client.time, "sleep", seconds.append)
    return seconds


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_repo("someone/net", {"a.txt": b"one"})
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        yield hub


class TestRedact:
    @pytest.mark.parametrize(
        "text",
        [
            "got Authorization: Bearer s3cret-token",
            "the token s3cret-token is not mine",
            "{'authorization': 'Bearer other', 'x': 's3cret-token'}",
            "another one: hf_AbCdEfGhIjKl, and s3cret-token",
        ],
    )
    def test_removes_tokens(self, text: str) -> None:
        redacted = redact(text, "s3cret-token")
        assert "***" in redacted
        for secret in ("s3cret", "other'", "hf_Ab"):
            assert secret not in redacted

    def test_keeps_text_without_tokens(self) -> None:
        text = "hf_hub_download found no hf_xet; the bearer of bad news"
        assert redact(text, None) == text.replace("bearer of", "Bearer ***")

    def test_returns_one_line_of_limited_length(self) -> None:
        redacted = redact("a\n\n  b\t" + "c" * 5000 + "s3cret-token", "s3cret-token")
        assert redacted.startswith("a b c")
        assert len(redacted) == 300


class TestRetry:
    def test_doubles_each_wait(self, recorded_waits: list[float]) -> None:
        assert (
            retry("a thing", FailingFunction(*[TransientHubError("busy") for _ in range(3)]))
            == "done"
        )
        assert recorded_waits == [0.5, 1.0, 2.0]

    @pytest.mark.parametrize("has_copy, expected_calls", [(False, 2), (True, 1)])
    def test_gives_up_early_if_the_hub_is_unreachable(
        self, recorded_waits: list[float], has_copy: bool, expected_calls: int
    ) -> None:
        function = FailingFunction(
            *[TransientHubError("refused", is_unreachable=True) for _ in range(9)]
        )
        with pytest.raises(TransientHubError):
            retry("a thing", function, has_copy=has_copy)
        assert function.calls == expected_calls
        assert sum(recorded_waits) < 1


class TestMonitorRequests:
    def test_raises_faults_immediately(self, hub: HubServer) -> None:
        url = f"{hub.url}/api/models/someone/net"
        hub.fail("GET /api/models", status=429, retry_after=7)
        with monitor_requests() as monitor:
            with pytest.raises(TransientHubError, match="429") as caught:
                get_session().get(url)
            assert caught.value.retry_after_seconds == 7
            assert monitor.last_error is caught.value
            assert get_session().get(url).status_code == 200
        hub.stop()
        with monitor_requests(), pytest.raises(TransientHubError) as unreachable:
            get_session().get(url)
        assert unreachable.value.is_unreachable

    def test_ignores_other_threads_unless_requested(self, hub: HubServer) -> None:
        url = f"{hub.url}/api/models/someone/net"
        results: list[object] = []

        def send_request() -> None:
            try:
                results.append(get_session().get(url).status_code)
            except TransientHubError as error:
                results.append(error)

        for all_threads in (False, True):
            hub.fail("GET /api/models")
            with monitor_requests(all_threads=all_threads):
                thread = threading.Thread(target=send_request)
                thread.start()
                thread.join()
        assert results[0] == 503
        assert isinstance(results[1], TransientHubError)

    def test_ignores_other_servers(self, hub: HubServer) -> None:
        with HubServer() as other_hub:
            other_hub.fail(".", times=None)
            with monitor_requests() as monitor:
                assert get_session().get(f"{other_hub.url}/statistics").status_code == 503
            assert monitor.last_error is None

    def test_installs_its_client_through_the_client_factory(self, hub: HubServer) -> None:
        with monitor_requests():
            session = get_session()
            assert isinstance(session, client._BoundedClient)
        close_session()  # as huggingface_hub does after a failed connection
        hub.fail("GET /api/models")
        with monitor_requests(), pytest.raises(TransientHubError):
            get_session().get(f"{hub.url}/api/models/someone/net")

    def test_keeps_a_client_factory_of_the_program(
        self, hub: HubServer, monkeypatch: Patch
    ) -> None:
        close_session()
        monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", lambda: client.httpx.Client())
        with monitor_requests():
            assert type(get_session()) is client.httpx.Client
        close_session()

    def test_remembers_a_permanent_error(self, hub: HubServer) -> None:
        with monitor_requests() as monitor:
            assert monitor.permanent_error() is None
            get_session().get(f"{hub.url}/api/models/someone/other")
            assert isinstance(monitor.permanent_error(), HfHubHTTPError)

    def test_is_connection_error_follows_the_context(self, hub: HubServer) -> None:
        hub.fail("GET /api", kind="reset")
        with pytest.raises(Exception, match="disconnected") as caught:
            get_session().get(f"{hub.url}/api/models/someone/net")
        outer = RuntimeError("could not build")
        outer.__context__ = caught.value
        assert is_connection_error(outer)
        assert not is_connection_error(RuntimeError("could not build"))
        assert not is_connection_error(None)


class TestResponses:
    @pytest.mark.parametrize(
        "body, problem",
        [
            (b"null", "TypeError"),
            (b"[]", "TypeError"),
            (b"7", "TypeError"),
            (b"[" * 200_000, "nested more than 50 levels"),
            (b'{"a":' * 60 + b"1" + b"}" * 60, "nested more than 50 levels"),
        ],
        ids=["null", "list", "number", "deep", "deep object"],
    )
    def test_rejects_json_of_another_shape(self, hub: HubServer, body: bytes, problem: str) -> None:
        hub.fail("GET /api/models", status=200, body=body)
        with (
            refused("hub.wrong_answer", problem, "HF_ENDPOINT"),
            monitor_requests(),
            expect_json("a thing"),
        ):
            HfApi().model_info("someone/net")

    def test_rejects_a_too_large_response(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(client, "MAX_RESPONSE_BYTES", 1 << 20)
        hub.fail("GET /api/models", status=200, body=b" " * (2 << 20))
        with refused("hub.wrong_answer", "more than 1 MiB"), monitor_requests():
            HfApi().model_info("someone/net")

    @pytest.mark.parametrize("body", [b"null", b"[1]", b'{"errors": [1]}', b'{"errors": 5}'])
    def test_an_error_response_of_another_shape_keeps_its_status(
        self, hub: HubServer, body: bytes
    ) -> None:
        hub.fail("GET /api/models", status=418, body=body)
        with monitor_requests(), pytest.raises(HfHubHTTPError) as caught:
            HfApi().model_info("someone/net")
        assert http_status(caught.value) == 418

    def test_brackets_in_strings_do_not_count_as_nesting(self, hub: HubServer) -> None:
        body = json.dumps({"id": "someone/net", "sha": "[" * 500 + '\\"{', "siblings": []}).encode()
        hub.fail("GET /api/models", status=200, body=body)
        with monitor_requests():
            assert HfApi().model_info("someone/net").sha == "[" * 500 + '\\"{'

    def test_does_not_retry_a_redirect_loop(
        self, hub: HubServer, recorded_waits: list[float]
    ) -> None:
        hub.fail("GET /api/models", status=302, times=None, headers={"Location": "/api/models/x/y"})
        with monitor_requests(), pytest.raises(client.httpx.TooManyRedirects) as caught:
            retry("a thing", lambda: HfApi().model_info("someone/net"))
        assert recorded_waits == []
        with refused("hub.wrong_answer", "redirects endlessly"):
            raise (
                permanent_hub_error(caught.value, "here", None, not_found_error=DataError)
                or AssertionError
            )


class TestPermanentHubError:
    def http_error(self, hub: HubServer, path: str, **headers: str) -> Exception:
        with pytest.raises(HfHubHTTPError) as caught:
            hf_raise_for_status(get_session().get(hub.url + path, headers=headers))
        return caught.value

    def test_error_types_and_messages(self, hub: HubServer, monkeypatch: Patch) -> None:
        missing = self.http_error(hub, "/api/models/someone/other")
        for error_class, repo_noun in ((WeightsError, "repository"), (DataError, "data set")):
            error = permanent_hub_error(
                missing, "here", None, not_found_error=error_class, repo_noun=repo_noun
            )
            assert type(error) is error_class
            assert f"here: no such {repo_noun}, or it is private" in str(error)
        revision = self.http_error(hub, "/api/models/someone/net/revision/v7")
        assert "no such revision" in str(
            permanent_hub_error(revision, "here", "v7", not_found_error=DataError)
        )
        assert permanent_hub_error(ValueError("x"), "here", None, not_found_error=DataError) is None
        assert permanent_hub_error(None, "here", None, not_found_error=DataError) is None
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        headers = {"authorization": "Bearer hf_wrongWrong1234"}
        wrong_token = self.http_error(hub, "/api/models/someone/net", **headers)
        error = permanent_hub_error(wrong_token, "here", None, not_found_error=DataError)
        assert type(error) is HubError
        assert "rejects the token in HF_TOKEN (401)" in str(error)
