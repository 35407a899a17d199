"""publish/push.py against a hub on loopback: what a push leaves there, whatever happens to it."""

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

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
NAMES = {"README.md", "config.json", "model.safetensors"}
# One request of each kind that a first push makes, in the order in which it makes them.
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
# What comes on top when there is the repository already, and a new branch is asked for.
MORE_CALLS = {
    "auth": "GET .*/auth-check/write",
    "refs": "GET /api/models/alice/net/refs",
    "new branch": "POST .*/branch/",
}


# A process that sends, with a mistake in it.
MISTAKEN = """
import sys
sys.path[:] = sys.argv[1:]
from finetune.publish import push as push_module
from finetune.publish import upload
upload.upload_and_commit = lambda job, report: 1 / 0
upload.main()
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


def on_hub(hub: HubServer, name: str = "alice/net", revision: str = "main") -> dict[str, bytes]:
    files = hub.files(name, revision)
    return {key: value for key, value in files.items() if key != ".gitattributes"}


def failed_push(capsys: Captured, *arguments: str, code: int = 7, token: str = WRITE_TOKEN) -> str:
    """Run the verb; it must fail with one message and nothing else, and keep the token secret."""
    assert main(["push", *arguments]) == code
    shown = capsys.readouterr()
    assert token not in shown.out + shown.err
    assert "Traceback" not in shown.err
    lines = [line for line in shown.err.splitlines() if not line.startswith("finetune: ")]
    assert len(lines) == 1, shown.err
    return lines[0]


class TestPush:
    def test_the_first_push_creates_a_public_repository(self, hub: HubServer, folder: Path) -> None:
        found = push(folder, "alice/net")
        assert on_hub(hub) == contents(folder)
        first, initial = hub.commits("alice/net")
        assert found == {
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

    def test_unchanged_content_makes_no_commit(self, hub: HubServer, folder: Path) -> None:
        first = push(folder, "alice/net")
        sent = hub.count("POST .*/(commit|preupload)/")
        again = push(folder, "alice/net")
        assert again == {**first, "changed": False}
        assert hub.count("POST .*/(commit|preupload)/") == sent
        assert hub.commits("alice/net")[0] == first["commit"]

    def test_a_second_push_replaces_everything_and_keeps_what_is_the_users(
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
        found = push(second, "alice/net")
        assert len(hub.commits("alice/net")) == before + 1
        assert found["changed"]
        assert found["commit"] == hub.commits("alice/net")[0]
        assert set(found["deleted"]) == {*preferred, "reliability.png", "results.json"}
        assert on_hub(hub) == {**mine, **contents(second)}
        assert hub.files("alice/net")[".gitattributes"] == attributes

    def test_other_weights_go_though_nothing_else_has_changed(
        self, hub: HubServer, folder: Path
    ) -> None:
        push(folder, "alice/net")
        hub.commit("alice/net", {"pytorch_model.bin": b"a loader might take these"})
        found = push(folder, "alice/net")
        assert found["changed"]
        assert found["deleted"] == ["pytorch_model.bin"]
        assert on_hub(hub) == contents(folder)

    def test_one_changed_file_is_all_that_is_sent(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net")
        uploads = hub.count("PUT ")
        (folder / "README.md").write_text(CARD + "More.\n")
        assert push(folder, "alice/net")["changed"]
        assert hub.count("PUT ") == uploads == 1
        assert on_hub(hub) == contents(folder)

    def test_private_repositories(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net", private=True)
        assert hub.store.repository("alice/net").private
        push(write_model_folder(folder, value=3.0), "alice/net")
        assert hub.store.repository("alice/net").private, "a push does not publish what is private"
        assert on_hub(hub)["model.safetensors"] == weight_bytes(3.0)

    def test_a_public_repository_is_not_taken_for_a_private_one(
        self, hub: HubServer, folder: Path, capsys: Captured
    ) -> None:
        hub.add_repo("alice/net", {"LICENSE": b"mine"})
        before = hub.commits("alice/net")
        message = failed_push(capsys, str(folder), "alice/net", "--private")
        assert message.startswith("alice/net: is public already")
        assert hub.commits("alice/net") == before
        assert not hub.count("POST")

    def test_one_that_turned_public_meanwhile_is_noticed_too(
        self, hub: HubServer, folder: Path, monkeypatch: Patch
    ) -> None:
        create = upload._create_repo_and_branch

        def overtaken(*args: Any, **options: Any) -> None:
            hub.add_repo("alice/net")
            create(*args, **options)

        monkeypatch.setattr(upload, "_create_repo_and_branch", overtaken)
        with refused("hub.public", "alice/net"):
            push(folder, "alice/net", private=True)
        assert on_hub(hub) == {}

    def test_a_branch_is_created_and_main_is_left_alone(self, hub: HubServer, folder: Path) -> None:
        found = push(folder, "alice/net", revision="trial/a")
        assert found["revision"] == "trial/a"
        assert hub.commits("alice/net", "trial/a")[0] == found["commit"]
        assert on_hub(hub, revision="trial/a") == contents(folder)
        assert on_hub(hub) == {}
        again = push(write_model_folder(folder, value=2.0), "alice/net", revision="trial/a")
        assert again["changed"]
        assert on_hub(hub, revision="trial/a") == contents(folder)

    def test_the_organisations_of_the_user(self, hub: HubServer, folder: Path) -> None:
        assert push(folder, "zoo/net")["url"].endswith("/zoo/net")
        assert on_hub(hub, "zoo/net") == contents(folder)

    def test_the_message(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net", message="Better\n\nmuch better")
        assert HfApi().list_repo_commits("alice/net")[0].title == "Better"
        push(write_model_folder(folder, value=2.0), "alice/net", message=" ")
        assert "finetune" in HfApi().list_repo_commits("alice/net")[0].title

    def test_the_verb(self, hub: HubServer, folder: Path, capsys: Captured) -> None:
        assert main(["push", str(folder), "alice/net"]) == 0
        shown = capsys.readouterr()
        assert shown.out.splitlines()[0] == f"{hub.url}/alice/net"
        assert hub.commits("alice/net")[0] in shown.out
        assert WRITE_TOKEN not in shown.out + shown.err


class TestRun:
    @pytest.mark.parametrize("status", ["running", "failed (1)", "stopped (143)"])
    def test_a_run_that_is_not_done(self, hub: HubServer, tmp_path: Path, status: str) -> None:
        write_model_folder(tmp_path / "run" / "model")
        (tmp_path / "run" / "run.json").write_text(f'{{"status": "{status}"}}')
        with refused("checkpoint.not_finished", "--resume", status):
            push(tmp_path / "run", "alice/net")
        assert not hub.requests

    def test_a_run_without_a_model(self, hub: HubServer, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"status": "done"}')
        with refused("checkpoint.not_finished", "model/"):
            push(tmp_path, "alice/net")

    def test_a_folder_that_is_no_model(self, hub: HubServer, tmp_path: Path) -> None:
        with refused("weights.not_found", "config.json", "model.safetensors"):
            push(tmp_path, "alice/net")
        with pytest.raises(WeightsError):
            push(tmp_path / "nowhere", "alice/net")


class TestFaults:
    @pytest.mark.parametrize("kind", ["503", "429", "reset", "lost"])
    @pytest.mark.parametrize("call", CALLS)
    def test_one_that_passes(
        self, hub: HubServer, folder: Path, call: str, kind: str, capfd: Any
    ) -> None:
        fault = {"status": int(kind)} if kind.isdigit() else {"kind": kind}
        hub.fail(CALLS[call], times=1, **fault)
        found = push(folder, "alice/net", private=True)
        assert hub.faults[0].times == 0, "the fault was not met"
        assert found["changed"]
        assert hub.commits("alice/net")[0] == found["commit"]
        assert len(hub.commits("alice/net")) == 2, "one commit on top of the hub's own"
        assert hub.store.repository("alice/net").private
        assert on_hub(hub) == contents(folder)
        shown = capfd.readouterr().err
        assert shown.count("trying again") <= 1
        assert WRITE_TOKEN not in shown

    @pytest.mark.parametrize("call", MORE_CALLS)
    def test_one_that_passes_with_a_repository_and_a_new_branch(
        self, hub: HubServer, folder: Path, call: str
    ) -> None:
        for kind in ("status", "reset", "lost"):
            hub.add_repo("alice/net")
            hub.fail(MORE_CALLS[call], kind=kind)
            assert push(folder, "alice/net", revision="trial")["changed"]
            assert hub.faults[-1].times == 0
            assert len(hub.commits("alice/net", "trial")) == 2

    def test_several_kinds_in_one_push(self, hub: HubServer, folder: Path) -> None:
        for pattern in CALLS.values():
            hub.fail(pattern, status=500, times=2)
        assert push(folder, "alice/net")["changed"]
        assert len(hub.commits("alice/net")) == 2

    # an object that is there already is not verified again, so that a second try goes on
    @pytest.mark.parametrize("call", [call for call in CALLS if call != "verify"])
    def test_one_that_lasts(
        self, hub: HubServer, folder: Path, call: str, capsys: Captured
    ) -> None:
        hub.fail(CALLS[call], times=None, echo=True)
        before = contents(folder)
        arguments = [str(folder), "alice/net", "--private"]
        message = failed_push(capsys, *arguments)
        command = shlex.join(["finetune", "push", *arguments])
        assert message.endswith(f"nothing is lost, push again with: {command}")
        assert "the hub returned 503" in message
        tries = 6 if call == "upload" else client.MAX_TRIES  # which huggingface_hub repeats itself
        assert hub.count(CALLS[call]) == tries
        assert contents(folder) == before
        hub.faults.clear()
        assert main(shlex.split(message.split("push again with: ")[1])[1:]) == 0
        assert on_hub(hub) == before

    def test_a_command_that_needs_quotes(
        self, hub: HubServer, tmp_path: Path, capsys: Captured
    ) -> None:
        odd = write_model_folder(tmp_path / "my model; rm")
        hub.fail("whoami", times=None)
        arguments = [str(odd), "alice/net", "--revision", "b", "--message", "it's better"]
        message = failed_push(capsys, *arguments)
        assert shlex.split(message.split("push again with: ")[1]) == [
            "finetune",
            "push",
            *arguments,
        ]

    @pytest.mark.parametrize("kind", ["lost", "truncate"])
    def test_a_lost_answer_to_each_of_the_commits(
        self, hub: HubServer, folder: Path, kind: str
    ) -> None:
        hub.fail(CALLS["commit"], kind=kind, times=None)
        found = push(folder, "alice/net")
        assert hub.count(CALLS["commit"]) == 1
        assert found["changed"]
        assert found["commit"] == hub.commits("alice/net")[0]
        assert len(hub.commits("alice/net")) == 2

    def test_a_commit_that_arrives_after_all(
        self, hub: HubServer, folder: Path, monkeypatch: Patch
    ) -> None:
        """The answer is lost, and the first look still finds the old head."""
        head = upload._read_branch
        old: list[Any] = []

        def late(*args: Any, **options: Any) -> Any:
            old.append(head(*args, **options))
            return old[0] if len(old) == 2 else old[-1]

        monkeypatch.setattr(upload, "_read_branch", late)
        hub.fail(CALLS["commit"], kind="lost")
        found = push(folder, "alice/net")
        assert len(old) > 1
        assert len(hub.commits("alice/net")) == 2
        assert found["commit"] == hub.commits("alice/net")[0]

    def test_the_head_moves_meanwhile(
        self, hub: HubServer, folder: Path, monkeypatch: Patch
    ) -> None:
        send, others = upload._Committer._send_changes, iter(["a.jpg", "b.jpg"])

        def overtaken(*args: Any, **options: Any) -> Any:
            if name := next(others, None):
                hub.commit("alice/net", {name: b"a picture", "model.safetensors": b"theirs"})
            return send(*args, **options)

        monkeypatch.setattr(upload._Committer, "_send_changes", overtaken)
        found = push(folder, "alice/net")
        assert found["commit"] == hub.commits("alice/net")[0]
        assert len(hub.commits("alice/net")) == 4
        assert on_hub(hub) == {**contents(folder), "a.jpg": b"a picture", "b.jpg": b"a picture"}

    @pytest.mark.parametrize(
        "call, status, words",
        [
            ("commit", 412, ("the branch moved during the push", "push again with")),
            ("commit", 403, ("the hub returned 403", "***")),
            ("upload", 403, ("the hub returned 403",)),
            ("gone", 0, ("the hub cannot be reached", "push again with")),
        ],
    )
    def test_what_is_said_of_it(
        self, hub: HubServer, folder: Path, call: str, status: int, words: Any, capsys: Captured
    ) -> None:
        if call == "gone":
            hub.stop()
        else:
            hub.fail(CALLS[call], status=status, times=None, echo=status == 403)
        message = failed_push(capsys, str(folder), "alice/net")
        assert all(word in message for word in words)
        if (call, status) == ("commit", 403):
            assert hub.count(CALLS[call]) == 1, "a refusal is not tried again"

    def test_tracebacks_do_not_quote_the_server(
        self, hub: HubServer, folder: Path, capsys: Captured
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
    def with_xet(self, hub: HubServer, monkeypatch: Patch) -> None:
        if importlib.util.find_spec("hf_xet") is None:
            pytest.skip("hf_xet is not installed")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)

    @pytest.mark.usefixtures("with_xet")
    def test_a_server_without_it_gets_plain_lfs(
        self, hub: HubServer, folder: Path, capfd: Captured
    ) -> None:
        assert push(folder, "alice/net")["changed"]
        assert hub.count("xet-write-token")
        assert on_hub(hub) == contents(folder)
        shown = capfd.readouterr().err
        assert "HF_HUB_DISABLE_XET=1" in shown
        assert WRITE_TOKEN not in shown

    @pytest.mark.usefixtures("with_xet")
    def test_it_is_asked_once_whatever_else_fails(self, hub: HubServer, folder: Path) -> None:
        hub.fail(CALLS["commit"], times=2)
        assert push(folder, "alice/net")["changed"]
        assert hub.count("xet-write-token") == 1
        assert len(hub.commits("alice/net")) == 2

    @pytest.mark.usefixtures("with_xet")
    def test_without_either_the_message_names_the_switch(
        self, hub: HubServer, folder: Path, monkeypatch: Patch
    ) -> None:
        def broken(*args: Any, **options: Any) -> None:
            raise RuntimeError("Data processing error: shard")

        monkeypatch.setattr(HfApi, "preupload_lfs_files", broken)
        with refused("hub.upload", "HF_HUB_DISABLE_XET=1", "shard"):
            push(folder, "alice/net")

    @pytest.mark.parametrize("size, bar", [(10**9, False), (1, True)])
    def test_bars_are_for_what_takes_a_while(
        self,
        hub: HubServer,
        folder: Path,
        monkeypatch: Patch,
        capfd: Captured,
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

    def test_switched_off_it_is_not_asked(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net")
        assert not hub.count("xet")


class TestOrder:
    """A push that cannot work is refused before anything is created."""

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
    def test_nothing_is_created(
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

    def test_rights_and_names(self, hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
        with refused("recipe.wrong_value", "'alice/net'"):
            push(folder, "net")
        monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
        with refused("hub.forbidden", "'alice'", "bob"):
            push(folder, "alice/net")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with refused("hub.offline", "HF_HUB_OFFLINE"):
            push(folder, "alice/net")
        assert not hub.count("POST")

    def test_waiting_is_bounded(
        self, hub: HubServer, folder: Path, sleep_durations: list[float]
    ) -> None:
        hub.fail(CALLS["create"], status=429, times=1, retry_after=7)
        hub.fail(CALLS["card"], status=429, times=1, retry_after=36000)
        assert push(folder, "alice/net")["changed"]
        assert sleep_durations == [client.MAX_WAIT_SECONDS, 7.0]


class TestApart:
    """The process that sends."""

    @pytest.fixture(autouse=True)
    def apart(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(push_module, "upload_in_subprocess", upload_in_subprocess)

    def test_its_answer(self, hub: HubServer, folder: Path) -> None:
        found = push(folder, "alice/net")
        assert found["commit"] == hub.commits("alice/net")[0]
        assert on_hub(hub) == contents(folder)
        assert not push(folder, "alice/net")["changed"]

    def test_its_errors(self, hub: HubServer, folder: Path) -> None:
        hub.fail(CALLS["commit"], status=403, times=None, echo=True)
        again = f"finetune push {folder} alice/net"
        with refused("hub.forbidden", "403", "***", again) as caught:
            push(folder, "alice/net")
        assert WRITE_TOKEN not in str(caught.value)

    def test_its_mistakes(self, hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
        monkeypatch.setattr(push_module, "_UPLOAD_PROGRAM", MISTAKEN)
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
            push(folder, "alice/net")
        assert "Traceback" in str(caught.value)

    def test_its_death(self, hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
        killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        monkeypatch.setattr(push_module, "_UPLOAD_PROGRAM", killed)
        with refused("hub.push_crashed", "SIGKILL", "alice/net"):
            push(folder, "alice/net")
        assert not hub.count("POST /api/repos/create")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
    @pytest.mark.parametrize("times", [1, 2])
    def test_signals(
        self, hub: HubServer, folder: Path, capfd: Captured, times: int, number: signal.Signals
    ) -> None:
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        hub.fail("/preupload/", kind="hang", times=None)
        with send_signals_after(hub, "/preupload/", [number] * times):
            assert main(["push", str(folder), "alice/net"]) == 128 + number
        assert {n: signal.getsignal(n) for n in before} == before
        shown = capfd.readouterr().err
        assert "stopping after the current request; interrupt again to stop now" in shown
        assert "stopped before the commit: the new repository is empty; push again with" in shown
        assert on_hub(hub) == {}

    def test_a_commit_in_flight_is_finished(
        self, hub: HubServer, folder: Path, capfd: Captured
    ) -> None:
        hub.fail(CALLS["commit"], kind="slow")
        with send_signals_after(hub, CALLS["commit"], [signal.SIGINT]):
            assert main(["push", str(folder), "alice/net"]) == 130
        assert f"holds the whole commit {hub.commits('alice/net')[0]}" in capfd.readouterr().err
        assert on_hub(hub) == contents(folder)

    def test_a_commit_in_flight_at_the_second_signal(
        self, hub: HubServer, folder: Path, capfd: Captured
    ) -> None:
        hub.fail(CALLS["commit"], kind="hang")
        began = time.monotonic()
        with send_signals_after(hub, CALLS["commit"], [signal.SIGINT] * 2):
            assert main(["push", str(folder), "alice/net"]) == 130
        assert time.monotonic() - began < WRITE_TIMEOUT_SECONDS / 2, (
            "the hub's answer was waited for"
        )
        assert "holds nothing of it yet, and may still take the whole" in capfd.readouterr().err
        assert on_hub(hub) == {}

    def test_it_is_never_silent(
        self, hub: HubServer, folder: Path, monkeypatch: Patch, capfd: Captured
    ) -> None:
        monkeypatch.setattr(push_module, "PROGRESS_SECONDS", 0.3)
        hub.fail(CALLS["commit"], kind="slow")
        push(folder, "alice/net")
        assert re.search(
            r"alice/net: committing, \d+ s so far; Ctrl-C stops", capfd.readouterr().err
        )
