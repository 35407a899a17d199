"""hub/calls.py: what is tried again, how long it waits, and that no token is ever told."""

from __future__ import annotations

import json
import socket
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_samples import WRITE, folder, hub, slept
from hub_server import HubServer, point_at
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http

from finetune.errors import HubError
from finetune.hub import calls as hub_calls
from finetune.hub.calls import Fault, Hub, clean, status_of
from finetune.publish.push import push

__all__ = ["folder", "hub", "slept"]  # fixtures


class Answer(Exception):
    """An error with what the client's own carry."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"answered {status}")
        self.response = SimpleNamespace(
            status_code=status,
            headers={key.replace("_", "-"): value for key, value in headers.items()},
            reason_phrase="Words",
        )


class TransportError(Exception):
    """Like httpx's, by its name."""


class LocalProtocolError(TransportError):
    """Like httpx's for a request that can never be sent."""


class Failing:
    """A function that raises what it is given, one after another, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


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
        found = clean("a\n\n  b\t" + "c" * 5000 + WRITE, WRITE)
        assert found.startswith("a b c")
        assert len(found) == 300


class TestCall:
    @pytest.mark.parametrize(
        "error",
        [
            *[Answer(status) for status in (408, 425, 429, 500, 502, 503, 504, 599)],
            TransportError("connection reset"),
            json.JSONDecodeError("Expecting value", "<html>", 0),
        ],
        ids=str,
    )
    def test_what_may_pass_is_tried_again(self, hub: HubServer, error: Exception) -> None:
        function = Failing(error)
        assert Hub("alice/net").call("testing", function) == "done"
        assert function.calls == 2

    @pytest.mark.parametrize(
        "error",
        [Answer(400), Answer(404), Answer(412), LocalProtocolError("a bad header")],
        ids=str,
    )
    def test_what_will_not_pass_is_not(self, hub: HubServer, error: Exception) -> None:
        function = Failing(error)
        with pytest.raises(type(error)):
            Hub("alice/net").call("testing", function)
        assert function.calls == 1

    def test_the_cause_of_a_wrapped_error_counts(self, hub: HubServer) -> None:
        wrapped = RuntimeError("Error while uploading")
        wrapped.__cause__ = TransportError("reset")
        assert Hub("alice/net").call("testing", Failing(wrapped)) == "done"

    def test_the_waits_grow_and_end(self, hub: HubServer, slept: list[float]) -> None:
        function = Failing(*[TransportError("reset")] * 9)
        with pytest.raises(HubError) as caught:
            Hub("alice/net", again="finetune push x alice/net").call("testing this", function)
        assert function.calls == hub_calls.TRIES == 5
        assert slept == [1.0, 2.0, 4.0, 8.0]
        assert str(caught.value) == (
            "alice/net: testing this failed 5 times: the hub cannot be reached (TransportError: "
            "reset); nothing is lost, push again with: finetune push x alice/net"
        )
        assert caught.value.__cause__ is None
        assert caught.value.exit_code == 7

    @pytest.mark.parametrize(
        "headers, seconds",
        [
            ({"retry_after": "7"}, 7.0),
            ({"retry_after": "0"}, 0.0),
            ({"retry_after": "86400"}, 60.0),
            ({"retry_after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
            ({"ratelimit": '"api";r=0;t=25'}, 25.0),
            ({"ratelimit": '"api";r=9;t=25'}, 1.0),
        ],
    )
    def test_the_hub_says_when(
        self, hub: HubServer, slept: list[float], headers: dict[str, str], seconds: float
    ) -> None:
        assert Hub("alice/net").call("testing", Failing(Answer(429, **headers))) == "done"
        assert slept == [seconds]

    def test_one_short_notice(self, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
        found = Hub("alice/net")
        for _ in range(2):
            found.call("testing", Failing(Answer(503), Answer(500)))
        shown = capsys.readouterr().err
        assert shown == "finetune: alice/net: the hub answered 503 (Words); trying again\n"

    def test_a_hub_that_says_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]
    ) -> None:
        monkeypatch.setattr(hub_calls, "ANSWER_SECONDS", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            point_at(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch, tmp_path, WRITE)
            found = Hub("alice/net")
            before = get_session().timeout
            with pytest.raises(HubError, match=r"asking failed 5 times: .*ReadTimeout"):
                found.call("asking", found.api.whoami)
            assert get_session().timeout == before

    def test_an_echoed_token_is_not_told(
        self, hub: HubServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail("whoami", times=None, echo=True)
        found = Hub("alice/net")
        with pytest.raises(HubError) as caught:
            found.call("asking", found.api.whoami)
        assert "got Authorization Bearer ***" in str(caught.value)
        assert WRITE not in str(caught.value) + capsys.readouterr().err


class TestExplained:
    def test_a_definite_answer_becomes_one_error(self, hub: HubServer) -> None:
        hub.fail("whoami", status=418, echo=True)
        found = Hub("alice/net")
        with pytest.raises(HubError, match="the hub answered 418") as caught, found.explained():
            found.call("asking", found.api.whoami)
        assert WRITE not in str(caught.value)
        shown = "".join(traceback.format_exception(caught.value))
        assert "***" in shown
        assert WRITE not in shown

    def test_faults_and_mistakes(self, hub: HubServer) -> None:
        found = Hub("alice/net")
        with pytest.raises(HubError, match="alice/net: reset; try again"), found.explained():
            raise Fault("reset")
        with pytest.raises(ZeroDivisionError), found.explained():
            raise ZeroDivisionError

    @pytest.mark.parametrize("token", ["hf_zoë", "hf_line\u2028x"])
    def test_a_token_that_no_header_can_hold(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", token)
        found = Hub("alice/net")
        with pytest.raises(HubError, match="cannot be reached") as caught, found.explained():
            found.call("asking", found.api.whoami)
        assert token not in str(caught.value)
        assert token[:7] not in "".join(traceback.format_exception(caught.value))

    def test_an_address_that_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]
    ) -> None:
        point_at("ftp://127.0.0.1", monkeypatch, tmp_path, WRITE)
        found = Hub("alice/net")
        with pytest.raises(HubError, match="UnsupportedProtocol"), found.explained():
            found.call("asking", found.api.whoami)
        assert slept == []

    def test_a_command_line_with_a_token_in_it(self, hub: HubServer) -> None:
        found = Hub("alice/net", again=f"finetune push x alice/net --message {WRITE}")
        assert str(found.failure("broken")).endswith("--message ***")


class TestToken:
    def test_offline(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set.*unset it"):
            Hub("alice/net")

    def test_none(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(HubError, match="no token for the hub; log in with `hf auth login`"):
            Hub("alice/net")

    def test_of_the_environment_or_the_login(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert (Hub("alice/net").token, Hub("alice/net").token_source) == (WRITE, "HF_TOKEN")
        monkeypatch.delenv("HF_TOKEN")
        path = Path(constants.HF_TOKEN_PATH)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hf_ofthelogin\n")
        found = Hub("alice/net")
        assert (found.token, found.token_source) == ("hf_ofthelogin", "the login")


def test_the_status_of_an_error() -> None:
    assert status_of(Answer(404)) == 404
    assert status_of(ValueError("no answer")) is None
    assert issubclass(HfHubHTTPError, OSError)  # what callers catch beside it


def test_the_clients_own_retries_are_told_in_one_line(
    hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils import http_backoff

    hub.fail("GET /api/whoami", times=3)
    found = Hub("alice/net")
    answer: Any = found.once(
        http_backoff,
        "GET",
        f"{hub.url}/api/whoami-v2",
        headers={"authorization": f"Bearer {WRITE}"},
    )
    assert answer.json()["name"] == "alice"
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("asked", [{"retry_after": 86400}, {}])
@pytest.mark.parametrize("request_of", ["POST .*/preupload/", "PUT /lfs-upload/", "GET .*/tree"])
def test_the_client_does_not_wait_for_a_day_because_it_is_told_so(
    hub: HubServer,
    slept: list[float],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_of: str,
    asked: dict[str, int],
) -> None:
    waits: list[float] = slept  # ours and the client's own: which of them retries depends on it
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=waits.append))
    hub.fail(request_of, status=429, times=2, **asked)
    push(folder, "alice/net")
    assert len(waits) == 2
    assert max(waits) <= hub_calls.LONGEST_WAIT_SECONDS + 1
    assert "send" not in vars(get_session())
