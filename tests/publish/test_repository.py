"""publish/repo_client.py: which calls are repeated, for how long, and no token in a message."""

from __future__ import annotations

import json
import socket
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_fixtures import WRITE_TOKEN, FailingFunction, folder, hub, sleep_durations
from hub_server import HubServer, point_clients_at
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http
from refusals import refused

from finetune.errors import HubError
from finetune.hub import client
from finetune.hub.client import TransientHubError, httpx
from finetune.publish.push import push
from finetune.publish.repo_client import RepoClient

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

__all__ = ["folder", "hub", "sleep_durations"]  # fixtures


def ask() -> Any:
    """One question to the hub."""
    found = RepoClient("alice/net")
    return found.call_with_retries("asking", found.api.whoami)


class TestCall:
    @pytest.mark.parametrize(
        "fault",
        [{"status": status} for status in (408, 425, 429, 500, 502, 503, 504, 599)]
        + [{"kind": kind} for kind in ("reset", "truncate")],
    )
    def test_an_answer_that_may_pass(self, hub: HubServer, fault: dict[str, Any]) -> None:
        hub.fail("whoami", **fault)
        assert ask()["name"] == "alice"
        assert hub.count("whoami") == 2

    def test_an_answer_that_is_no_json(self, hub: HubServer) -> None:
        function = FailingFunction(json.JSONDecodeError("Expecting value", "<html>", 0))
        assert RepoClient("alice/net").call_with_retries("testing", function) == "done"
        assert function.calls == 2

    @pytest.mark.parametrize("status", [400, 404, 412])
    def test_a_definite_answer(self, hub: HubServer, status: int) -> None:
        hub.fail("whoami", status=status)
        with pytest.raises(HfHubHTTPError):
            ask()
        assert hub.count("whoami") == 1

    def test_a_request_that_cannot_be_sent(self, hub: HubServer) -> None:
        function = FailingFunction(httpx.LocalProtocolError("a bad header"))
        with pytest.raises(httpx.LocalProtocolError):
            RepoClient("alice/net").call_with_retries("testing", function)
        assert function.calls == 1

    def test_the_cause_of_a_wrapped_error_counts(self, hub: HubServer) -> None:
        wrapped = RuntimeError("Error while uploading")
        wrapped.__cause__ = TransientHubError("reset")
        assert (
            RepoClient("alice/net").call_with_retries("testing", FailingFunction(wrapped)) == "done"
        )

    def test_the_waits_grow_and_end(self, hub: HubServer, sleep_durations: list[float]) -> None:
        function = FailingFunction(*[TransientHubError("reset") for _ in range(9)])
        with pytest.raises(HubError) as caught:
            RepoClient("alice/net", retry_command="finetune push x alice/net").call_with_retries(
                "testing this", function
            )
        assert function.calls == client.MAX_TRIES == 5
        assert sleep_durations == [0.5, 1.0, 2.0, 4.0]
        assert str(caught.value) == (
            "alice/net: testing this failed 5 times: reset; nothing is lost, push again with: "
            "finetune push x alice/net"
        )
        assert caught.value.__cause__ is None
        assert caught.value.exit_code == 7

    @pytest.mark.parametrize(
        "headers, seconds",
        [
            ({"Retry-After": "7"}, 7.0),
            ({"Retry-After": "0"}, 0.0),
            ({"Retry-After": "86400"}, client.MAX_WAIT_SECONDS),
            ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.5),
            ({"RateLimit": '"api";r=0;t=25'}, 25.0),
            ({"RateLimit": '"api";r=0;t=86400'}, client.MAX_WAIT_SECONDS),
            ({"RateLimit": '"api";r=9;t=25'}, 0.5),
        ],
    )
    def test_the_hub_says_when(
        self, hub: HubServer, sleep_durations: list[float], headers: dict[str, str], seconds: float
    ) -> None:
        hub.fail("whoami", status=429, headers=headers)
        ask()
        assert sleep_durations == [seconds]

    def test_one_short_notice(self, hub: HubServer, capsys: Captured) -> None:
        hub.fail("whoami", times=4)
        ask()
        shown = capsys.readouterr().err
        assert shown == "finetune: alice/net: the hub returned 503 (injected fault); trying again\n"

    def test_a_silent_hub(
        self, tmp_path: Path, monkeypatch: Patch, sleep_durations: list[float]
    ) -> None:
        monkeypatch.setattr(client, "READ_TIMEOUT_SECONDS", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            point_clients_at(
                f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch, tmp_path, WRITE_TOKEN
            )
            with refused("hub.unreachable", "asking", 5, "ReadTimeout"):
                ask()

    def test_an_echoed_token_is_not_told(self, hub: HubServer, capsys: Captured) -> None:
        hub.fail("whoami", times=None, echo=True)
        with pytest.raises(HubError) as caught:
            ask()
        assert "got Authorization Bearer ***" in str(caught.value)
        assert WRITE_TOKEN not in str(caught.value) + capsys.readouterr().err


class TestExplained:
    def test_a_definite_answer_becomes_one_error(self, hub: HubServer) -> None:
        hub.fail("whoami", status=418, echo=True)
        found = RepoClient("alice/net")
        with refused("hub.out_of_order", 418) as caught, found.translate_errors():
            found.call_with_retries("asking", found.api.whoami)
        assert WRITE_TOKEN not in str(caught.value)
        shown = "".join(traceback.format_exception(caught.value))
        assert "***" in shown
        assert WRITE_TOKEN not in shown

    def test_faults_and_mistakes(self, hub: HubServer) -> None:
        found = RepoClient("alice/net")
        with refused("hub.out_of_order", "alice/net", "reset"), found.translate_errors():
            raise TransientHubError("reset")
        with pytest.raises(ZeroDivisionError), found.translate_errors():
            raise ZeroDivisionError

    @pytest.mark.parametrize("token", ["hf_zoë", "hf_line\u2028x"])
    def test_a_token_that_no_header_can_hold(
        self, hub: HubServer, monkeypatch: Patch, token: str
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", token)
        found = RepoClient("alice/net")
        with refused("hub.unreachable", "alice/net") as caught, found.translate_errors():
            found.call_with_retries("asking", found.api.whoami)
        assert token not in str(caught.value)
        assert token[:7] not in "".join(traceback.format_exception(caught.value))

    def test_an_address_that_is_none(
        self, tmp_path: Path, monkeypatch: Patch, sleep_durations: list[float]
    ) -> None:
        point_clients_at("ftp://127.0.0.1", monkeypatch, tmp_path, WRITE_TOKEN)
        found = RepoClient("alice/net")
        with refused("hub.unreachable", "UnsupportedProtocol"), found.translate_errors():
            found.call_with_retries("asking", found.api.whoami)
        assert sleep_durations == []

    def test_a_command_line_with_a_token_in_it(self, hub: HubServer) -> None:
        found = RepoClient(
            "alice/net", retry_command=f"finetune push x alice/net --message {WRITE_TOKEN}"
        )
        assert str(found.error_with_retry_command("broken")).endswith("--message ***")


class TestToken:
    def test_offline(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with refused("hub.offline", "HF_HUB_OFFLINE"):
            RepoClient("alice/net")

    def test_none(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with refused("hub.no_token", "hf auth login", "HF_TOKEN"):
            RepoClient("alice/net")

    def test_of_the_environment_or_the_login(self, hub: HubServer, monkeypatch: Patch) -> None:
        assert (RepoClient("alice/net").token, RepoClient("alice/net").token_source) == (
            WRITE_TOKEN,
            "HF_TOKEN",
        )
        monkeypatch.delenv("HF_TOKEN")
        path = Path(constants.HF_TOKEN_PATH)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hf_ofthelogin\n")
        found = RepoClient("alice/net")
        assert (found.token, found.token_source) == ("hf_ofthelogin", "the login")


def test_the_clients_own_retries_are_told_in_one_line(
    hub: HubServer, folder: Path, capfd: Captured
) -> None:
    hub.fail("PUT /lfs-upload", times=3)
    push(folder, "alice/net")
    assert capfd.readouterr().err.count("\n") == 1
    assert hub.count("PUT /lfs-upload") == 4


@pytest.mark.parametrize("asked", [{"retry_after": 86400}, {}])
@pytest.mark.parametrize("request_of", ["POST .*/preupload/", "PUT /lfs-upload/", "GET .*/tree"])
def test_the_client_does_not_wait_for_a_day_because_it_is_told_so(
    hub: HubServer,
    sleep_durations: list[float],
    folder: Path,
    monkeypatch: Patch,
    request_of: str,
    asked: dict[str, int],
) -> None:
    waits: list[float] = (
        sleep_durations  # ours and the client's own: which of them retries depends on it
    )
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=waits.append))
    hub.fail(request_of, status=429, times=2, **asked)
    push(folder, "alice/net")
    assert len(waits) == 2
    assert max(waits) <= client.MAX_WAIT_SECONDS + 1
