"""publish/repo_client.py: which calls are retried, for how long, and without tokens in messages."""

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

__all__ = ["folder", "hub", "sleep_durations"]  # fixtures


def call_whoami() -> Any:
    """Send one request to the hub, with retries."""
    repo_client = RepoClient("alice/net")
    return repo_client.call_with_retries("asking", repo_client.api.whoami)


class TestRetries:
    @pytest.mark.parametrize(
        "fault",
        [{"status": status} for status in (408, 425, 429, 500, 502, 503, 504, 599)]
        + [{"kind": kind} for kind in ("reset", "truncate")],
    )
    def test_temporary_failure_is_retried(self, hub: HubServer, fault: dict[str, Any]) -> None:
        hub.fail("whoami", **fault)
        assert call_whoami()["name"] == "alice"
        assert hub.count("whoami") == 2

    def test_invalid_json_is_retried(self, hub: HubServer) -> None:
        function = FailingFunction(json.JSONDecodeError("Expecting value", "<html>", 0))
        assert RepoClient("alice/net").call_with_retries("testing", function) == "done"
        assert function.calls == 2

    @pytest.mark.parametrize("status", [400, 404, 412])
    def test_permanent_error_is_not_retried(self, hub: HubServer, status: int) -> None:
        hub.fail("whoami", status=status)
        with pytest.raises(HfHubHTTPError):
            call_whoami()
        assert hub.count("whoami") == 1

    def test_invalid_request_is_not_retried(self, hub: HubServer) -> None:
        function = FailingFunction(httpx.LocalProtocolError("a bad header"))
        with pytest.raises(httpx.LocalProtocolError):
            RepoClient("alice/net").call_with_retries("testing", function)
        assert function.calls == 1

    def test_wrapped_temporary_failure_is_retried(self, hub: HubServer) -> None:
        wrapped = RuntimeError("Error while uploading")
        wrapped.__cause__ = TransientHubError("reset")
        assert (
            RepoClient("alice/net").call_with_retries("testing", FailingFunction(wrapped)) == "done"
        )

    def test_backoff_grows_and_ends(self, hub: HubServer, sleep_durations: list[float]) -> None:
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
    def test_retry_after_and_rate_limit_headers(
        self, hub: HubServer, sleep_durations: list[float], headers: dict[str, str], seconds: float
    ) -> None:
        hub.fail("whoami", status=429, headers=headers)
        call_whoami()
        assert sleep_durations == [seconds]

    def test_one_short_message(self, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
        hub.fail("whoami", times=4)
        call_whoami()
        shown = capsys.readouterr().err
        assert shown == "finetune: alice/net: the hub returned 503 (injected fault); trying again\n"

    def test_unresponsive_hub(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_durations: list[float]
    ) -> None:
        monkeypatch.setattr(client, "READ_TIMEOUT_SECONDS", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as server:
            point_clients_at(
                f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch, tmp_path, WRITE_TOKEN
            )
            with refused("hub.unreachable", "asking", 5, "ReadTimeout"):
                call_whoami()

    def test_echoed_token_is_redacted(
        self, hub: HubServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail("whoami", times=None, echo=True)
        with pytest.raises(HubError) as caught:
            call_whoami()
        assert "got Authorization Bearer ***" in str(caught.value)
        assert WRITE_TOKEN not in str(caught.value) + capsys.readouterr().err


class TestTranslateErrors:
    def test_permanent_error_becomes_one_error(self, hub: HubServer) -> None:
        hub.fail("whoami", status=418, echo=True)
        repo_client = RepoClient("alice/net")
        with refused("hub.out_of_order", 418) as caught, repo_client.translate_errors():
            repo_client.call_with_retries("asking", repo_client.api.whoami)
        assert WRITE_TOKEN not in str(caught.value)
        shown = "".join(traceback.format_exception(caught.value))
        assert "***" in shown
        assert WRITE_TOKEN not in shown

    def test_translates_hub_errors_only(self, hub: HubServer) -> None:
        repo_client = RepoClient("alice/net")
        with refused("hub.out_of_order", "alice/net", "reset"), repo_client.translate_errors():
            raise TransientHubError("reset")
        with pytest.raises(ZeroDivisionError), repo_client.translate_errors():
            raise ZeroDivisionError

    @pytest.mark.parametrize("token", ["hf_zoë", "hf_line\u2028x"])
    def test_token_that_is_invalid_in_a_header(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", token)
        repo_client = RepoClient("alice/net")
        with refused("hub.unreachable", "alice/net") as caught, repo_client.translate_errors():
            repo_client.call_with_retries("asking", repo_client.api.whoami)
        assert token not in str(caught.value)
        assert token[:7] not in "".join(traceback.format_exception(caught.value))

    def test_invalid_hub_address(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_durations: list[float]
    ) -> None:
        point_clients_at("ftp://127.0.0.1", monkeypatch, tmp_path, WRITE_TOKEN)
        repo_client = RepoClient("alice/net")
        with refused("hub.unreachable", "UnsupportedProtocol"), repo_client.translate_errors():
            repo_client.call_with_retries("asking", repo_client.api.whoami)
        assert sleep_durations == []

    def test_retry_command_redacts_a_token(self, hub: HubServer) -> None:
        repo_client = RepoClient(
            "alice/net", retry_command=f"finetune push x alice/net --message {WRITE_TOKEN}"
        )
        assert str(repo_client.error_with_retry_command("broken")).endswith("--message ***")


class TestToken:
    def test_offline(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with refused("hub.offline", "HF_HUB_OFFLINE"):
            RepoClient("alice/net")

    def test_missing_token(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with refused("hub.no_token", "hf auth login", "HF_TOKEN"):
            RepoClient("alice/net")

    def test_token_from_environment_or_login(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert (RepoClient("alice/net").token, RepoClient("alice/net").token_source) == (
            WRITE_TOKEN,
            "HF_TOKEN",
        )
        monkeypatch.delenv("HF_TOKEN")
        path = Path(constants.HF_TOKEN_PATH)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hf_ofthelogin\n")
        repo_client = RepoClient("alice/net")
        assert (repo_client.token, repo_client.token_source) == ("hf_ofthelogin", "the login")


def test_retries_inside_huggingface_hub_are_logged_in_one_line(
    hub: HubServer, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.fail("PUT /lfs-upload", times=3)
    push(folder, "alice/net")
    assert capfd.readouterr().err.count("\n") == 1
    assert hub.count("PUT /lfs-upload") == 4


@pytest.mark.parametrize("fault_options", [{"retry_after": 86400}, {}])
@pytest.mark.parametrize(
    "request_pattern", ["POST .*/preupload/", "PUT /lfs-upload/", "GET .*/tree"]
)
def test_wait_is_capped_even_if_the_hub_requests_a_day(
    hub: HubServer,
    sleep_durations: list[float],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_pattern: str,
    fault_options: dict[str, int],
) -> None:
    # waits of our retries and of huggingface_hub's; the request decides which of them retries
    waits: list[float] = sleep_durations
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=waits.append))
    hub.fail(request_pattern, status=429, times=2, **fault_options)
    push(folder, "alice/net")
    assert len(waits) == 2
    assert max(waits) <= client.MAX_WAIT_SECONDS + 1
