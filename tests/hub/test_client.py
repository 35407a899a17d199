"""hub/client.py: the bounds of retries and answers, the notices, and what the client is shown."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_samples import Failing
from hub_server import HubServer, point_at
from huggingface_hub import HfApi, close_session, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http
from refusals import refused

from finetune.errors import DataError, HubError, WeightsError
from finetune.hub import client
from finetune.hub.client import (
    Fault,
    clean,
    refusal,
    retried,
    say_once,
    status_of,
    understood,
    was_cut,
    watching,
)

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture
def waits(monkeypatch: Patch) -> list[float]:
    """The seconds of each wait; nothing waits."""
    found: list[float] = []
    monkeypatch.setattr(client.time, "sleep", found.append)
    monkeypatch.setattr(client, "_said", set())
    return found


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_repo("someone/net", {"a.txt": b"one"})
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub


class TestClean:
    @pytest.mark.parametrize(
        "text",
        [
            "got Authorization: Bearer s3cret-token",
            "the token s3cret-token is not mine",
            "{'authorization': 'Bearer other', 'x': 's3cret-token'}",
            "another one: hf_AbCdEfGhIjKl, and s3cret-token",
        ],
    )
    def test_tokens(self, text: str) -> None:
        found = clean(text, "s3cret-token")
        assert "***" in found
        for secret in ("s3cret", "other'", "hf_Ab"):
            assert secret not in found

    def test_what_is_no_token_stays(self) -> None:
        text = "hf_hub_download found no hf_xet; the bearer of bad news"
        assert clean(text, None) == text.replace("bearer of", "Bearer ***")

    def test_one_bounded_line(self) -> None:
        found = clean("a\n\n  b\t" + "c" * 5000 + "s3cret-token", "s3cret-token")
        assert found.startswith("a b c")
        assert len(found) == 300


class TestRetried:
    def test_each_wait_is_twice_the_one_before(self, waits: list[float]) -> None:
        assert retried("a thing", Failing(*[Fault("busy") for _ in range(3)])) == "done"
        assert waits == [0.5, 1.0, 2.0]

    @pytest.mark.parametrize("has_copy, calls", [(False, 2), (True, 1)])
    def test_nobody_there(self, waits: list[float], has_copy: bool, calls: int) -> None:
        call = Failing(*[Fault("refused", unreachable=True) for _ in range(9)])
        with pytest.raises(Fault):
            retried("a thing", call, has_copy=has_copy)
        assert call.calls == calls
        assert sum(waits) < 1

    def test_one_rank_tells(self, waits: list[float], monkeypatch: Patch, capsys: Captured) -> None:
        say_once("here")
        say_once("here")
        monkeypatch.setenv("RANK", "1")
        say_once("there")
        assert capsys.readouterr().err == "finetune: here\n"


class TestWatching:
    def test_a_fault_leaves_at_once(self, hub: HubServer) -> None:
        url = f"{hub.url}/api/models/someone/net"
        hub.fail("GET /api/models", status=429, retry_after=7)
        with watching() as watch:
            with pytest.raises(Fault, match="429") as caught:
                get_session().get(url)
            assert caught.value.seconds == 7
            assert watch.fault is caught.value
            assert get_session().get(url).status_code == 200
        hub.stop()
        with watching(), pytest.raises(Fault) as gone:
            get_session().get(url)
        assert gone.value.unreachable

    def test_other_threads_are_left_alone(self, hub: HubServer) -> None:
        url = f"{hub.url}/api/models/someone/net"
        seen: list[object] = []

        def ask() -> None:
            try:
                seen.append(get_session().get(url).status_code)
            except Fault as fault:
                seen.append(fault)

        for everywhere in (False, True):
            hub.fail("GET /api/models")
            with watching(everywhere=everywhere):
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join()
        assert seen[0] == 503
        assert isinstance(seen[1], Fault)

    def test_other_servers_are_left_alone(self, hub: HubServer) -> None:
        with HubServer() as other:
            other.fail(".", times=None)
            with watching() as watch:
                assert get_session().get(f"{other.url}/statistics").status_code == 503
            assert watch.fault is None

    def test_the_client_is_built_by_huggingface_hubs_factory(self, hub: HubServer) -> None:
        with watching():
            session = get_session()
            assert isinstance(session, client._Client)
        close_session()  # as it does itself after a connection that failed
        hub.fail("GET /api/models")
        with watching(), pytest.raises(Fault):
            get_session().get(f"{hub.url}/api/models/someone/net")

    def test_a_factory_of_the_program_stays(self, hub: HubServer, monkeypatch: Patch) -> None:
        close_session()
        monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", lambda: client.httpx.Client())
        with watching():
            assert type(get_session()) is client.httpx.Client
        close_session()

    def test_a_refusal_is_remembered(self, hub: HubServer) -> None:
        with watching() as watch:
            assert watch.refusal() is None
            get_session().get(f"{hub.url}/api/models/someone/other")
            assert isinstance(watch.refusal(), HfHubHTTPError)

    def test_what_lies_behind_an_error(self, hub: HubServer) -> None:
        hub.fail("GET /api", kind="reset")
        with pytest.raises(Exception, match="disconnected") as caught:
            get_session().get(f"{hub.url}/api/models/someone/net")
        outer = RuntimeError("could not build")
        outer.__context__ = caught.value
        assert was_cut(outer)
        assert not was_cut(RuntimeError("could not build"))
        assert not was_cut(None)


class TestAnswers:
    @pytest.mark.parametrize(
        "body, problem",
        [
            (b"null", "TypeError"),
            (b"[]", "TypeError"),
            (b"7", "TypeError"),
            (b"[" * 200_000, "nested more than 50 deep"),
            (b'{"a":' * 60 + b"1" + b"}" * 60, "nested more than 50 deep"),
        ],
        ids=["null", "list", "number", "deep", "deep object"],
    )
    def test_of_another_shape(self, hub: HubServer, body: bytes, problem: str) -> None:
        hub.fail("GET /api/models", status=200, body=body)
        with (
            refused("hub.wrong_answer", problem, "HF_ENDPOINT"),
            watching(),
            understood("a thing"),
        ):
            HfApi().model_info("someone/net")

    def test_too_large(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)
        hub.fail("GET /api/models", status=200, body=b" " * (2 << 20))
        with refused("hub.wrong_answer", "more than 1 MiB"), watching():
            HfApi().model_info("someone/net")

    @pytest.mark.parametrize("body", [b"null", b"[1]", b'{"errors": [1]}', b'{"errors": 5}'])
    def test_a_refusal_of_another_shape_keeps_its_status(self, hub: HubServer, body: bytes) -> None:
        hub.fail("GET /api/models", status=418, body=body)
        with watching(), pytest.raises(HfHubHTTPError) as caught:
            HfApi().model_info("someone/net")
        assert status_of(caught.value) == 418

    def test_brackets_in_texts_do_not_count(self, hub: HubServer) -> None:
        body = json.dumps({"id": "someone/net", "sha": "[" * 500 + '\\"{', "siblings": []}).encode()
        hub.fail("GET /api/models", status=200, body=body)
        with watching():
            assert HfApi().model_info("someone/net").sha == "[" * 500 + '\\"{'

    def test_a_circle_of_redirects_ends_at_once(self, hub: HubServer, waits: list[float]) -> None:
        hub.fail("GET /api/models", status=302, times=None, headers={"Location": "/api/models/x/y"})
        with watching(), pytest.raises(client.httpx.TooManyRedirects) as caught:
            retried("a thing", lambda: HfApi().model_info("someone/net"))
        assert waits == []
        with refused("hub.wrong_answer", "from one address to another"):
            raise refusal(caught.value, "here", None, missing=DataError) or AssertionError


class TestRefusal:
    def error(self, hub: HubServer, path: str, **headers: str) -> Exception:
        with pytest.raises(HfHubHTTPError) as caught:
            hf_raise_for_status(get_session().get(hub.url + path, headers=headers))
        return caught.value

    def test_kinds(self, hub: HubServer, monkeypatch: Patch) -> None:
        missing = self.error(hub, "/api/models/someone/other")
        for kind, noun in ((WeightsError, "repository"), (DataError, "data set")):
            found = refusal(missing, "here", None, missing=kind, noun=noun)
            assert type(found) is kind
            assert f"here: no such {noun}, or it is private" in str(found)
        revision = self.error(hub, "/api/models/someone/net/revision/v7")
        assert "no such revision" in str(refusal(revision, "here", "v7", missing=DataError))
        assert refusal(ValueError("x"), "here", None, missing=DataError) is None
        assert refusal(None, "here", None, missing=DataError) is None
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        headers = {"authorization": "Bearer hf_wrongWrong1234"}
        wrong = self.error(hub, "/api/models/someone/net", **headers)
        found = refusal(wrong, "here", None, missing=DataError)
        assert type(found) is HubError
        assert "refuses the token in HF_TOKEN (401)" in str(found)
