"""hub/client.py: how long calls wait, what is retried, and what the errors say."""

from __future__ import annotations

import logging
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from hub_fixtures import WRITE_TOKEN, hub, sleep_durations
from hub_server import HubServer, point_clients_at
from huggingface_hub import HfApi, close_session, get_session
from logs import forget_warnings, logged
from refusals import refused

from finetune.data.streaming.shard_file import RemoteFile
from finetune.errors import DataError, WeightsError
from finetune.hub import client
from finetune.hub.client import (
    TransientHubError,
    call_hub,
    hub_errors,
    redact,
    retry,
    user_error,
)

__all__ = ["hub", "sleep_durations"]  # fixtures


def call_whoami() -> Any:
    """Send one request to the hub, with retries."""
    return call_hub("alice/net", HfApi().whoami)


class TestRetries:
    @pytest.mark.parametrize(
        "fault",
        [{"status": status} for status in (408, 425, 429, 500, 503, 599)]
        + [{"kind": kind} for kind in ("reset", "truncate")],
    )
    def test_temporary_failure_is_retried(
        self, hub: HubServer, fault: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail("whoami", times=2, **fault)
        assert call_whoami()["name"] == "alice"
        assert hub.count("whoami") == 3
        assert capsys.readouterr().err.count("trying again") == 2

    @pytest.mark.parametrize("status", [400, 404, 412])
    def test_permanent_error_is_not_retried(self, hub: HubServer, status: int) -> None:
        hub.fail("whoami", status=status)
        with refused("hub.out_of_order", status):
            call_whoami()
        assert hub.count("whoami") == 1

    def test_waits_grow_and_end(self, hub: HubServer, sleep_durations: list[float]) -> None:
        hub.fail("whoami", times=None)
        with refused("hub.out_of_order", "alice/net", 503, "try again later"):
            call_whoami()
        assert sleep_durations == [0.5, 1.0, 2.0, 4.0]

    def test_gives_up_early_if_the_hub_is_unreachable(
        self, hub: HubServer, sleep_durations: list[float]
    ) -> None:
        hub.stop()
        with refused("hub.unreachable", "ConnectError"):
            call_whoami()
        assert sleep_durations == [0.5]

    @pytest.mark.parametrize(
        "headers, seconds",
        [
            ({"Retry-After": "7"}, 7.0),
            ({"Retry-After": "0"}, 0.0),
            ({"Retry-After": "86400"}, client.MAX_WAIT_SECONDS),
            ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.5),
            ({"RateLimit": '"api";r=0;t=25'}, 25.0),
            ({"RateLimit": '"api";r=9;t=25'}, 0.5),
        ],
    )
    def test_waits_as_the_hub_asks(
        self, hub: HubServer, sleep_durations: list[float], headers: dict[str, str], seconds: float
    ) -> None:
        hub.fail("whoami", status=429, headers=headers)
        call_whoami()
        assert sleep_durations == [seconds]

    def test_hub_that_does_not_respond(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is given up in time, and each try is logged while it waits, and when it fails."""
        monkeypatch.setattr(client, "READ_TIMEOUT_SECONDS", 0.2)
        monkeypatch.setattr(client, "SILENT_SECONDS", 0.1)
        monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
        forget_warnings()
        with socket.create_server(("127.0.0.1", 0)) as server, logged() as messages:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            point_clients_at(url, monkeypatch, tmp_path, WRITE_TOKEN)

            def call() -> Any:
                with hub_errors("alice/net"):
                    return HfApi().whoami()

            with pytest.raises(TransientHubError, match="ReadTimeout"):
                retry("alice/net", call, max_seconds=0.7)
        host = url.removeprefix("http://")
        waits = [message for message in messages if message.startswith(f"waiting for {host}")]
        assert 2 <= len(waits) < client.MAX_TRIES
        assert len(messages) == 2 * len(waits) - 1

    def test_keeps_the_client_of_the_program(self, hub: HubServer) -> None:
        session = get_session()
        call_whoami()
        call_whoami()
        assert get_session() is session
        assert len(session.event_hooks["request"]) == 2, "the library's own, and the time limit"


class TestErrors:
    @pytest.mark.parametrize(
        "proxy, named",
        [
            ("socks5://127.0.0.1:9", "pip install socksio"),
            ("foo://me:word@127.0.0.1:9", "foo://***@127.0.0.1:9"),
            ("http://127.0.0.1:port", "port"),
        ],
    )
    def test_unusable_proxy(self, proxy: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
        close_session()
        monkeypatch.setitem(sys.modules, "socksio", None)
        monkeypatch.setenv("ALL_PROXY", proxy)
        with refused("setup.proxy", "ALL_PROXY", named):
            call_whoami()
        with refused("setup.proxy", "ALL_PROXY", named):
            RemoteFile.open_url("http://127.0.0.1:9/x.tar")

    @pytest.mark.parametrize(
        "error_class, noun", [(WeightsError, "repository"), (DataError, "data set")]
    )
    def test_missing_repository_and_revision(
        self, hub: HubServer, error_class: Any, noun: str
    ) -> None:
        hub.add_repo("alice/net")
        options = {"not_found_error": error_class, "repo_noun": noun}
        family = error_class.code
        with (
            refused(f"{family}.not_found", f"here: no such {noun}"),
            hub_errors("here", None, **options),
        ):
            HfApi().model_info("alice/other")
        with (
            refused(f"{family}.not_found", "no such revision; remove '@v7'"),
            hub_errors("here", "v7", **options),
        ):
            HfApi().model_info("alice/net", revision="v7")

    def test_wrong_token(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        with refused("hub.forbidden", "rejects the token from HF_TOKEN"):
            call_whoami()

    @pytest.mark.parametrize("token", ["hf_zoë", "hf_line\u2028x"])
    def test_token_that_is_invalid_in_a_header(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", token)
        with refused("hub.forbidden", "HF_TOKEN", "copy it again") as caught:
            call_whoami()
        assert token not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize(
        "body", [b"null", b"[]", b"7", b"<html>", b"[" * 200_000], ids=lambda body: body[:6]
    )
    def test_response_of_another_shape(self, hub: HubServer, body: bytes) -> None:
        hub.fail("GET /api/models", status=200, body=body)
        with refused("hub.wrong_answer", "here", "HF_ENDPOINT"), hub_errors("here"):
            HfApi().model_info("alice/net")

    def test_errors_that_libraries_have_wrapped(self, hub: HubServer) -> None:
        hub.fail("GET /api", kind="reset")
        with pytest.raises(Exception, match="disconnected") as caught:
            get_session().get(f"{hub.url}/api/models/alice/net")
        outer = RuntimeError("could not build")
        outer.__context__ = caught.value
        assert isinstance(user_error(outer, "here"), TransientHubError)
        assert user_error(RuntimeError("could not build"), "here") is None

    def test_other_errors_pass(self, hub: HubServer) -> None:
        with pytest.raises(ZeroDivisionError), hub_errors("here"):
            raise ZeroDivisionError

    @pytest.mark.parametrize("status", [418, 503])
    def test_token_that_the_hub_repeats(
        self, hub: HubServer, status: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail("whoami", status=status, times=None, echo=True)
        with refused("hub.out_of_order", status, "***") as caught:
            call_whoami()
        shown = "".join(traceback.format_exception(caught.value)) + capsys.readouterr().err
        assert WRITE_TOKEN not in shown


class TestRedact:
    @pytest.mark.parametrize(
        "text",
        [
            f"got Authorization: Bearer {WRITE_TOKEN}",
            f"the token {WRITE_TOKEN} is not mine",
            "{'authorization': 'Bearer other', 'x': '" + WRITE_TOKEN + "'}",
            "another one: hf_AbCdEfGhIjKlMnOpQrStUvWx",
        ],
    )
    @pytest.mark.usefixtures("hub")
    def test_removes_tokens(self, text: str) -> None:
        redacted = redact(text)
        assert "***" in redacted
        for secret in (WRITE_TOKEN, "other'", "hf_Ab"):
            assert secret not in redacted

    def test_one_line_of_limited_length(self) -> None:
        redacted = redact("a\n\n  b\t" + "c" * 5000)
        assert redacted.startswith("a b c")
        assert len(redacted) == 300


def test_log_lines_of_the_library_show_no_signed_urls() -> None:
    [handler] = logging.getLogger("huggingface_hub").handlers
    arguments = ("https://store/file?Signature=secret",)
    record = logging.LogRecord("huggingface_hub.x", 30, "", 0, "from %s: dropped", arguments, None)
    assert handler.filter(record)
    assert record.getMessage() == "from https://store/file?***: dropped"
