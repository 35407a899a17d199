"""publish/push.py against a hub on loopback: pushes with and without faults."""

from __future__ import annotations

import importlib.util
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_fixtures import (
    CARD,
    OTHER_TOKEN,
    WRITE_TOKEN,
    folder,
    hub,
    send_signals_after,
    sleep_durations,
    upload_in_subprocess,
    weight_bytes,
    write_model_folder,
)
from hub_server import HubServer
from huggingface_hub import HfApi, constants
from refusals import refused

from finetune.cli.main import main
from finetune.errors import FinetuneError, HubError, WeightsError
from finetune.hub import client
from finetune.hub.client import WRITE_TIMEOUT_SECONDS
from finetune.publish import push as push_module
from finetune.publish import upload
from finetune.publish.push import push

__all__ = ["folder", "hub", "sleep_durations"]  # fixtures

NAMES = {"README.md", "config.json", "model.safetensors"}
# One request of each kind in a first push, in order.
CALLS = {
    "whoami": "GET /api/whoami",
    "info": r"GET /api/models/alice/net(\?|$)",
    "card": "POST /api/validate-yaml",
    "create": "POST /api/repos/create",
    "branch": "GET /api/models/alice/net/revision",
    "tree": "GET /api/models/alice/net/tree",
    "preupload": "POST .*/preupload/",
    "batch": "POST .*/objects/batch",
    "upload": "PUT /lfs-upload/",
    "verify": "POST .*/objects/verify",
    "commit": "POST .*/commit/",
}
# Additional requests for an existing repository and a new branch.
MORE_CALLS = {
    "auth": "GET .*/auth-check/write",
    "refs": "GET /api/models/alice/net/refs",
    "new branch": "POST .*/branch/",
}


# An upload process with a bug.
BUGGY_PROGRAM = """
import sys
sys.path[:] = sys.argv[1:]
from finetune.publish import push as push_module
from finetune.publish import upload
upload.upload_and_commit = lambda job, report: 1 / 0
upload.main()
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


def files_on_hub(
    hub: HubServer, name: str = "alice/net", revision: str = "main"
) -> dict[str, bytes]:
    files = hub.files(name, revision)
    return {key: value for key, value in files.items() if key != ".gitattributes"}


def failed_push(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 7, token: str = WRITE_TOKEN
) -> str:
    """Run the command; it must fail with exactly one message and never print the token."""
    assert main(["push", *arguments]) == code
    shown = capsys.readouterr()
    assert token not in shown.out + shown.err
    assert "Traceback" not in shown.err
    lines = [line for line in shown.err.splitlines() if not line.startswith("finetune: ")]
    assert len(lines) == 1, shown.err
    return lines[0]


class TestPush:
    def test_first_push_creates_a_public_repository(self, hub: HubServer, folder: Path) -> None:
        result = push(folder, "alice/net")
        assert files_on_hub(hub) == contents(folder)
        first, initial = hub.commits("alice/net")
        assert result == {
            "repository": "alice/net",
            "url": f"{hub.url}/alice/net",
            "commit": first,
            "changed": True,
            "revision": "main",
            "files": sorted(NAMES),
            "deleted": [],
        }
        assert initial != first
        assert HfApi().model_info("alice/net", token=False).private is False

    def test_unchanged_files_make_no_commit(self, hub: HubServer, folder: Path) -> None:
        first = push(folder, "alice/net")
        sent = hub.count("POST .*/(commit|preupload)/")
        repeated = push(folder, "alice/net")
        assert repeated == {**first, "changed": False}
        assert hub.count("POST .*/(commit|preupload)/") == sent
        assert hub.commits("alice/net")[0] == first["commit"]

    def test_second_push_replaces_model_files_and_keeps_user_files(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        first = write_model_folder(tmp_path / "a", results__json="{}")
        (first / "reliability.png").write_bytes(b"\x89PNG old")
        push(first, "alice/net")
        mine = {"LICENSE": b"mine", "cat.jpg": b"a cat", "old/pytorch_model.bin": b"kept"}
        stale = ("pytorch_model.bin", "weights.npz", "model.safetensors.index.json")
        preferred = dict.fromkeys((*stale, "preprocessor_config.json"), b"stale")
        hub.commit("alice/net", {**mine, **preferred})
        attributes = hub.files("alice/net")[".gitattributes"]
        before = len(hub.commits("alice/net"))

        second = write_model_folder(tmp_path / "b", value=2.0)
        result = push(second, "alice/net")
        assert len(hub.commits("alice/net")) == before + 1
        assert result["changed"]
        assert result["commit"] == hub.commits("alice/net")[0]
        assert set(result["deleted"]) == {*preferred, "reliability.png", "results.json"}
        assert files_on_hub(hub) == {**mine, **contents(second)}
        assert hub.files("alice/net")[".gitattributes"] == attributes

    def test_push_deletes_other_weights_even_if_nothing_changed(
        self, hub: HubServer, folder: Path
    ) -> None:
        push(folder, "alice/net")
        hub.commit("alice/net", {"pytorch_model.bin": b"a loader might take these"})
        result = push(folder, "alice/net")
        assert result["changed"]
        assert result["deleted"] == ["pytorch_model.bin"]
        assert files_on_hub(hub) == contents(folder)

    def test_push_uploads_only_changed_files(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net")
        uploads = hub.count("PUT ")
        (folder / "README.md").write_text(CARD + "More.\n")
        assert push(folder, "alice/net")["changed"]
        assert hub.count("PUT ") == uploads == 1
        assert files_on_hub(hub) == contents(folder)

    def test_private_repository_stays_private(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net", private=True)
        assert hub.store.repository("alice/net").private
        push(write_model_folder(folder, value=3.0), "alice/net")
        assert hub.store.repository("alice/net").private, "a push does not publish what is private"
        assert files_on_hub(hub)["model.safetensors"] == weight_bytes(3.0)

    def test_private_push_rejects_a_public_repository(
        self, hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.add_repo("alice/net", {"LICENSE": b"mine"})
        before = hub.commits("alice/net")
        message = failed_push(capsys, str(folder), "alice/net", "--private")
        assert message.startswith("alice/net: is public already")
        assert hub.commits("alice/net") == before
        assert not hub.count("POST")

    def test_private_push_rejects_a_repository_that_becomes_public(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = upload._create_repo_and_branch

        def interrupted_by_other_commit(*args: Any, **options: Any) -> None:
            hub.add_repo("alice/net")
            create(*args, **options)

        monkeypatch.setattr(upload, "_create_repo_and_branch", interrupted_by_other_commit)
        with refused("hub.public", "alice/net"):
            push(folder, "alice/net", private=True)
        assert files_on_hub(hub) == {}

    def test_push_to_a_new_branch_leaves_main_unchanged(self, hub: HubServer, folder: Path) -> None:
        result = push(folder, "alice/net", revision="trial/a")
        assert result["revision"] == "trial/a"
        assert hub.commits("alice/net", "trial/a")[0] == result["commit"]
        assert files_on_hub(hub, revision="trial/a") == contents(folder)
        assert files_on_hub(hub) == {}
        repeated = push(write_model_folder(folder, value=2.0), "alice/net", revision="trial/a")
        assert repeated["changed"]
        assert files_on_hub(hub, revision="trial/a") == contents(folder)

    def test_push_to_an_organization(self, hub: HubServer, folder: Path) -> None:
        assert push(folder, "zoo/net")["url"].endswith("/zoo/net")
        assert files_on_hub(hub, "zoo/net") == contents(folder)

    def test_commit_message(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net", message="Better\n\nmuch better")
        assert HfApi().list_repo_commits("alice/net")[0].title == "Better"
        push(write_model_folder(folder, value=2.0), "alice/net", message=" ")
        assert "finetune" in HfApi().list_repo_commits("alice/net")[0].title

    def test_push_command(
        self, hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["push", str(folder), "alice/net"]) == 0
        shown = capsys.readouterr()
        assert shown.out.splitlines()[0] == f"{hub.url}/alice/net"
        assert hub.commits("alice/net")[0] in shown.out
        assert WRITE_TOKEN not in shown.out + shown.err


class TestRun:
    @pytest.mark.parametrize("status", ["running", "failed (1)", "stopped (143)"])
    def test_unfinished_run_is_rejected(self, hub: HubServer, tmp_path: Path, status: str) -> None:
        write_model_folder(tmp_path / "run" / "model")
        (tmp_path / "run" / "run.json").write_text(f'{{"status": "{status}"}}')
        with refused("checkpoint.not_finished", "--resume", status):
            push(tmp_path / "run", "alice/net")
        assert not hub.requests

    def test_run_without_a_model(self, hub: HubServer, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"status": "done"}')
        with refused("checkpoint.not_finished", "model/"):
            push(tmp_path, "alice/net")

    def test_folder_without_a_model(self, hub: HubServer, tmp_path: Path) -> None:
        with refused("weights.not_found", "config.json", "model.safetensors"):
            push(tmp_path, "alice/net")
        with pytest.raises(WeightsError):
            push(tmp_path / "nowhere", "alice/net")


class TestFaults:
    @pytest.mark.parametrize("kind", ["503", "429", "reset", "lost"])
    @pytest.mark.parametrize("call", CALLS)
    def test_temporary_fault_is_retried(
        self, hub: HubServer, folder: Path, call: str, kind: str, capfd: Any
    ) -> None:
        fault = {"status": int(kind)} if kind.isdigit() else {"kind": kind}
        hub.fail(CALLS[call], times=1, **fault)
        result = push(folder, "alice/net", private=True)
        assert hub.faults[0].times == 0, "the fault was not met"
        assert result["changed"]
        assert hub.commits("alice/net")[0] == result["commit"]
        assert len(hub.commits("alice/net")) == 2, "one commit on top of the hub's own"
        assert hub.store.repository("alice/net").private
        assert files_on_hub(hub) == contents(folder)
        shown = capfd.readouterr().err
        assert shown.count("trying again") <= 1
        assert WRITE_TOKEN not in shown

    @pytest.mark.parametrize("call", MORE_CALLS)
    def test_temporary_fault_with_an_existing_repository_and_a_new_branch(
        self, hub: HubServer, folder: Path, call: str
    ) -> None:
        for kind in ("status", "reset", "lost"):
            hub.add_repo("alice/net")
            hub.fail(MORE_CALLS[call], kind=kind)
            assert push(folder, "alice/net", revision="trial")["changed"]
            assert hub.faults[-1].times == 0
            assert len(hub.commits("alice/net", "trial")) == 2

    def test_faults_at_every_request(self, hub: HubServer, folder: Path) -> None:
        for pattern in CALLS.values():
            hub.fail(pattern, status=500, times=2)
        assert push(folder, "alice/net")["changed"]
        assert len(hub.commits("alice/net")) == 2

    # without verify: an object that exists already is not verified again, so a retry succeeds
    @pytest.mark.parametrize("call", [call for call in CALLS if call != "verify"])
    def test_permanent_fault(
        self, hub: HubServer, folder: Path, call: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(CALLS[call], times=None, echo=True)
        before = contents(folder)
        arguments = [str(folder), "alice/net", "--private"]
        message = failed_push(capsys, *arguments)
        command = shlex.join(["finetune", "push", *arguments])
        assert message.endswith(f"nothing is lost, push again with: {command}")
        assert "the hub returned 503" in message
        # huggingface_hub repeats this one itself
        tries = 6 if call == "upload" else client.MAX_TRIES
        assert hub.count(CALLS[call]) == tries
        assert contents(folder) == before
        hub.faults.clear()
        assert main(shlex.split(message.split("push again with: ")[1])[1:]) == 0
        assert files_on_hub(hub) == before

    def test_retry_command_is_quoted(
        self, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        quoted_folder = write_model_folder(tmp_path / "my model; rm")
        hub.fail("whoami", times=None)
        arguments = [str(quoted_folder), "alice/net", "--revision", "b", "--message", "it's better"]
        message = failed_push(capsys, *arguments)
        assert shlex.split(message.split("push again with: ")[1]) == [
            "finetune",
            "push",
            *arguments,
        ]

    @pytest.mark.parametrize("kind", ["lost", "truncate"])
    def test_lost_responses_to_the_commit(self, hub: HubServer, folder: Path, kind: str) -> None:
        hub.fail(CALLS["commit"], kind=kind, times=None)
        result = push(folder, "alice/net")
        assert hub.count(CALLS["commit"]) == 1
        assert result["changed"]
        assert result["commit"] == hub.commits("alice/net")[0]
        assert len(hub.commits("alice/net")) == 2

    def test_commit_that_arrives_late(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The response is lost, and the first check still finds the old commit."""
        read_branch = upload._read_branch
        heads: list[Any] = []

        def read_stale_branch(*args: Any, **options: Any) -> Any:
            heads.append(read_branch(*args, **options))
            return heads[0] if len(heads) == 2 else heads[-1]

        monkeypatch.setattr(upload, "_read_branch", read_stale_branch)
        hub.fail(CALLS["commit"], kind="lost")
        result = push(folder, "alice/net")
        assert len(heads) > 1
        assert len(hub.commits("alice/net")) == 2
        assert result["commit"] == hub.commits("alice/net")[0]

    def test_branch_moves_during_the_push(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send, others = upload._Committer._send_changes, iter(["a.jpg", "b.jpg"])

        def interrupted_by_other_commit(*args: Any, **options: Any) -> Any:
            if name := next(others, None):
                hub.commit("alice/net", {name: b"a picture", "model.safetensors": b"theirs"})
            return send(*args, **options)

        monkeypatch.setattr(upload._Committer, "_send_changes", interrupted_by_other_commit)
        result = push(folder, "alice/net")
        assert result["commit"] == hub.commits("alice/net")[0]
        assert len(hub.commits("alice/net")) == 4
        assert files_on_hub(hub) == {
            **contents(folder),
            "a.jpg": b"a picture",
            "b.jpg": b"a picture",
        }

    @pytest.mark.parametrize(
        "call, status, words",
        [
            ("commit", 412, ("the branch moved during the push", "push again with")),
            ("commit", 403, ("the hub returned 403", "***")),
            ("upload", 403, ("the hub returned 403",)),
            ("gone", 0, ("the hub cannot be reached", "push again with")),
        ],
    )
    def test_fault_messages(
        self,
        hub: HubServer,
        folder: Path,
        call: str,
        status: int,
        words: Any,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if call == "gone":
            hub.stop()
        else:
            hub.fail(CALLS[call], status=status, times=None, echo=status == 403)
        message = failed_push(capsys, str(folder), "alice/net")
        assert all(word in message for word in words)
        if (call, status) == ("commit", 403):
            assert hub.count(CALLS[call]) == 1, "a rejected request is not retried"

    def test_tracebacks_redact_the_token(
        self, hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for pattern, status in (("whoami", 503), ("create", 403), ("commit", 400)):
            hub.faults.clear()
            hub.fail(CALLS[pattern], status=status, times=None, echo=True)
            assert main(["push", str(folder), "alice/net", "--debug"]) == 7
            shown = capsys.readouterr().err
            assert "Traceback" in shown
            assert "***" in shown
            assert WRITE_TOKEN not in shown


class TestXet:
    @pytest.fixture
    def with_xet(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        if importlib.util.find_spec("hf_xet") is None:
            pytest.skip("hf_xet is not installed")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)

    @pytest.mark.usefixtures("with_xet")
    def test_server_without_xet_gets_plain_lfs(
        self, hub: HubServer, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert push(folder, "alice/net")["changed"]
        assert hub.count("xet-write-token")
        assert files_on_hub(hub) == contents(folder)
        shown = capfd.readouterr().err
        assert "HF_HUB_DISABLE_XET=1" in shown
        assert WRITE_TOKEN not in shown

    @pytest.mark.usefixtures("with_xet")
    def test_xet_is_requested_once_despite_other_faults(self, hub: HubServer, folder: Path) -> None:
        hub.fail(CALLS["commit"], times=2)
        assert push(folder, "alice/net")["changed"]
        assert hub.count("xet-write-token") == 1
        assert len(hub.commits("alice/net")) == 2

    @pytest.mark.usefixtures("with_xet")
    def test_upload_failure_suggests_disabling_xet(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any, **options: Any) -> None:
            raise RuntimeError("Data processing error: shard")

        monkeypatch.setattr(HfApi, "preupload_lfs_files", broken)
        with refused("hub.upload", "HF_HUB_DISABLE_XET=1", "shard"):
            push(folder, "alice/net")

    @pytest.mark.parametrize("size, bar", [(10**9, False), (1, True)])
    def test_progress_bar_only_for_large_uploads(
        self,
        hub: HubServer,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        size: int,
        bar: bool,
    ) -> None:
        monkeypatch.setattr(upload, "PROGRESS_BAR_MIN_BYTES", size)
        hub.fail(CALLS["upload"], status=403)
        with pytest.raises(HubError):
            push(folder, "alice/net")
        shown = capfd.readouterr().err
        assert ("B/s]" in shown) is bar
        assert not bar or shown.endswith("\n"), "the message after it begins a new line"

    def test_disabled_xet_is_not_requested(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net")
        assert not hub.count("xet")


class TestOrder:
    """A push that cannot succeed fails before it creates anything."""

    @pytest.mark.parametrize(
        "spoil, kind",
        [
            (lambda f: (f / "README.md").write_text(f"{CARD}{WRITE_TOKEN}"), HubError),
            (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), HubError),
            (lambda f: (f / "README.md").write_text("---\nlicense: none-such\n---\n"), HubError),
            (lambda f: (f / "config.json").unlink(), WeightsError),
        ],
        ids=["token", "yaml", "license", "incomplete"],
    )
    def test_invalid_model_creates_nothing(
        self,
        hub: HubServer,
        folder: Path,
        spoil: Callable[[Path], object],
        kind: type[FinetuneError],
    ) -> None:
        spoil(folder)
        with pytest.raises(kind):
            push(folder, "alice/net")
        assert not hub.count("POST .*(create|commit|preupload)")
        assert ("model", "alice/net") not in hub.store.repositories

    def test_invalid_name_or_missing_rights_create_nothing(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with refused("recipe.wrong_value", "'alice/net'"):
            push(folder, "net")
        monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
        with refused("hub.forbidden", "'alice'", "bob"):
            push(folder, "alice/net")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with refused("hub.offline", "HF_HUB_OFFLINE"):
            push(folder, "alice/net")
        assert not hub.count("POST")

    def test_wait_between_retries_is_bounded(
        self, hub: HubServer, folder: Path, sleep_durations: list[float]
    ) -> None:
        hub.fail(CALLS["create"], status=429, times=1, retry_after=7)
        hub.fail(CALLS["card"], status=429, times=1, retry_after=36000)
        assert push(folder, "alice/net")["changed"]
        assert sleep_durations == [client.MAX_WAIT_SECONDS, 7.0]


class TestUploadSubprocess:
    """The subprocess that uploads."""

    @pytest.fixture(autouse=True)
    def real_subprocess(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(push_module, "upload_in_subprocess", upload_in_subprocess)

    def test_result(self, hub: HubServer, folder: Path) -> None:
        result = push(folder, "alice/net")
        assert result["commit"] == hub.commits("alice/net")[0]
        assert files_on_hub(hub) == contents(folder)
        assert not push(folder, "alice/net")["changed"]

    def test_hub_error(self, hub: HubServer, folder: Path) -> None:
        hub.fail(CALLS["commit"], status=403, times=None, echo=True)
        repeated = f"finetune push {folder} alice/net"
        with refused("hub.forbidden", "403", "***", repeated) as caught:
            push(folder, "alice/net")
        assert WRITE_TOKEN not in str(caught.value)

    def test_bug_keeps_its_traceback(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(push_module, "_UPLOAD_PROGRAM", BUGGY_PROGRAM)
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
            push(folder, "alice/net")
        assert "Traceback" in str(caught.value)

    def test_killed_subprocess(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        monkeypatch.setattr(push_module, "_UPLOAD_PROGRAM", killed)
        with refused("hub.push_crashed", "SIGKILL", "alice/net"):
            push(folder, "alice/net")
        assert not hub.count("POST /api/repos/create")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
    @pytest.mark.parametrize("times", [1, 2])
    def test_signals_before_the_commit(
        self,
        hub: HubServer,
        folder: Path,
        capfd: pytest.CaptureFixture[str],
        times: int,
        number: signal.Signals,
    ) -> None:
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        hub.fail("/preupload/", kind="hang", times=None)
        with send_signals_after(hub, "/preupload/", [number] * times):
            assert main(["push", str(folder), "alice/net"]) == 128 + number
        assert {n: signal.getsignal(n) for n in before} == before
        shown = capfd.readouterr().err
        assert "stopping after the current request; interrupt again to stop now" in shown
        assert "stopped before the commit: the new repository is empty; push again with" in shown
        assert files_on_hub(hub) == {}

    def test_signal_lets_a_commit_in_flight_finish(
        self, hub: HubServer, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(CALLS["commit"], kind="slow")
        with send_signals_after(hub, CALLS["commit"], [signal.SIGINT]):
            assert main(["push", str(folder), "alice/net"]) == 130
        assert f"holds the whole commit {hub.commits('alice/net')[0]}" in capfd.readouterr().err
        assert files_on_hub(hub) == contents(folder)

    def test_second_signal_abandons_a_commit_in_flight(
        self, hub: HubServer, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(CALLS["commit"], kind="hang")
        started = time.monotonic()
        with send_signals_after(hub, CALLS["commit"], [signal.SIGINT] * 2):
            assert main(["push", str(folder), "alice/net"]) == 130
        assert time.monotonic() - started < WRITE_TIMEOUT_SECONDS / 2, (
            "waited for the response of the hub"
        )
        assert "holds nothing of it yet, and may still take the whole" in capfd.readouterr().err
        assert files_on_hub(hub) == {}

    def test_logs_progress_during_a_slow_commit(
        self,
        hub: HubServer,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(push_module, "PROGRESS_SECONDS", 0.3)
        hub.fail(CALLS["commit"], kind="slow")
        push(folder, "alice/net")
        assert re.search(
            r"alice/net: committing, \d+ s so far; Ctrl-C stops", capfd.readouterr().err
        )
