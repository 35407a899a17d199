"""publish/push.py against a hub on loopback: what a push commits, and what it does after faults."""

from __future__ import annotations

import importlib.util
import json
import shlex
import tempfile
import threading
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
    sleep_durations,
    upload_in_fork,
    weight_bytes,
    write_model_folder,
)
from hub_server import HubServer, wait_until
from huggingface_hub import HfApi, constants
from refusals import refused

from finetune.cli.main import main
from finetune.errors import FinetuneError, HubError, WeightsError
from finetune.model_checksums import add_checksums
from finetune.publish import push as push_module
from finetune.publish.push import push
from finetune.publish.upload import UploadJob

__all__ = ["folder", "hub", "sleep_durations", "upload_in_fork"]  # fixtures
pytestmark = pytest.mark.usefixtures("upload_in_fork")

NAMES = {"README.md", "config.json", "model.safetensors"}
# One request of each kind in a first push, in order.
CALLS = {
    "whoami": "GET /api/whoami",
    "info": r"GET /api/models/alice/net(\?|$)",
    "card": "POST /api/validate-yaml",
    "create": "POST /api/repos/create",
    "branch": "GET /api/models/alice/net/revision",
    "preupload": "POST .*/preupload/",
    "batch": "POST .*/objects/batch",
    "upload": "PUT /lfs-upload/",
    "verify": "POST .*/objects/verify",
    "commit": "POST .*/commit/",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


def files_on_hub(
    hub: HubServer, name: str = "alice/net", revision: str = "main"
) -> dict[str, bytes]:
    files = hub.files(name, revision)
    return {key: value for key, value in files.items() if key != ".gitattributes"}


def failed_push(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command; it must fail with one message and never print the token."""
    assert main(["push", *arguments]) == 7
    shown = capfd.readouterr()
    assert WRITE_TOKEN not in shown.out + shown.err
    assert "Traceback" not in shown.err
    return shown.err.strip().splitlines()[-1]


class TestPush:
    def test_first_push_creates_a_public_repository(self, hub: HubServer, folder: Path) -> None:
        result = push(folder, "alice/net")
        assert files_on_hub(hub) == contents(folder)
        first, _initial = hub.commits("alice/net")
        assert result == {
            "repository": "alice/net",
            "url": f"{hub.url}/alice/net",
            "commit": first,
            "changed": True,
            "revision": "main",
            "files": sorted(NAMES),
            "deleted": [],
        }
        assert HfApi().model_info("alice/net", token=False).private is False

    def test_an_upload_address_for_another_file_is_refused(
        self, hub: HubServer, folder: Path
    ) -> None:
        other = {"oid": "0", "size": 1, "actions": {"upload": {"href": f"{hub.url}/elsewhere"}}}
        body = json.dumps({"objects": [other]}).encode()
        hub.fail("lfs/objects/batch", status=200, body=body)
        with refused("hub.wrong_answer", "alice/net"):
            push(folder, "alice/net")
        assert hub.count("PUT ") == 0
        assert files_on_hub(hub) == {}

    def test_what_was_checked_is_sent(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def change_and_upload(job: UploadJob) -> dict[str, Any]:
            for name in NAMES:
                (folder / name).write_bytes(b"written after the checks")
            return upload(job)

        upload, checked = push_module._upload, contents(folder)
        monkeypatch.setattr(push_module, "_upload", change_and_upload)
        push(folder, "alice/net")
        assert files_on_hub(hub) == checked

    def test_a_missing_temporary_folder_is_named(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with refused("setup.not_writable", "TMPDIR"):
            push(folder, "alice/net")

    def test_weights_exchanged_after_the_first_check_are_refused(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def exchange_weights(*_: Any, **__: Any) -> None:
            (folder / "model.safetensors").write_bytes(weight_bytes(value=2.0))

        config = add_checksums(json.loads((folder / "config.json").read_text()), folder)
        (folder / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(push_module, "check_rights", exchange_weights)
        with refused("weights.damaged", folder, "model.safetensors"):
            push(folder, "alice/net")
        assert not hub.count(CALLS["commit"])

    def test_an_export_without_its_certificate_is_not_sent(
        self, hub: HubServer, folder: Path
    ) -> None:
        (folder / "model.onnx").write_bytes(b"from elsewhere")
        assert push(folder, "alice/net")["files"] == sorted(NAMES)

    def test_push_sends_only_changed_files(self, hub: HubServer, folder: Path) -> None:
        first = push(folder, "alice/net")
        sent = hub.count("POST .*/(commit|preupload)/")
        assert push(folder, "alice/net") == {**first, "changed": False}
        assert hub.count("POST .*/(commit|preupload)/") == sent
        assert hub.commits("alice/net")[0] == first["commit"]
        (folder / "README.md").write_text(CARD + "More.\n")
        assert push(folder, "alice/net")["changed"]
        assert hub.count("PUT ") == 1
        assert files_on_hub(hub) == contents(folder)

    def test_second_push_replaces_model_files_and_keeps_user_files(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        first = write_model_folder(tmp_path / "a", results__json="{}")
        (first / "reliability.png").write_bytes(b"\x89PNG old")
        push(first, "alice/net")
        mine = {"LICENSE": b"mine", "cat.jpg": b"a cat", "old/pytorch_model.bin": b"kept"}
        stale = ("pytorch_model.bin", "weights.npz", "model.safetensors.index.json")
        stale += ("preprocessor_config.json", "model.onnx", "certificate.json")
        preferred = dict.fromkeys((*stale, "adapter/adapter_config.json"), b"stale")
        hub.commit("alice/net", {**mine, **preferred})
        attributes = hub.files("alice/net")[".gitattributes"]
        before = len(hub.commits("alice/net"))

        second = write_model_folder(tmp_path / "b", value=2.0)
        result = push(second, "alice/net")
        assert len(hub.commits("alice/net")) == before + 1
        assert result["commit"] == hub.commits("alice/net")[0]
        assert set(result["deleted"]) == {*preferred, "reliability.png", "results.json"}
        assert files_on_hub(hub) == {**mine, **contents(second)}
        assert hub.files("alice/net")[".gitattributes"] == attributes

    def test_push_deletes_other_weights_even_if_nothing_changed(
        self, hub: HubServer, folder: Path
    ) -> None:
        push(folder, "alice/net")
        hub.commit("alice/net", {"pytorch_model.bin": b"a loader might take these"})
        assert push(folder, "alice/net")["deleted"] == ["pytorch_model.bin"]
        assert files_on_hub(hub) == contents(folder)

    def test_private_repository_stays_private(self, hub: HubServer, folder: Path) -> None:
        push(folder, "alice/net", private=True)
        assert hub.store.repository("alice/net").private
        push(write_model_folder(folder, value=3.0), "alice/net")
        assert hub.store.repository("alice/net").private, "a push does not publish what is private"
        assert files_on_hub(hub)["model.safetensors"] == weight_bytes(3.0)

    def test_push_to_a_new_branch_leaves_main_unchanged(self, hub: HubServer, folder: Path) -> None:
        result = push(folder, "alice/net", revision="trial/a")
        assert result["revision"] == "trial/a"
        assert hub.commits("alice/net", "trial/a")[0] == result["commit"]
        assert files_on_hub(hub, revision="trial/a") == contents(folder)
        assert files_on_hub(hub) == {}
        assert push(write_model_folder(folder, value=2.0), "alice/net", revision="trial/a")[
            "changed"
        ]
        assert files_on_hub(hub, revision="trial/a") == contents(folder)

    def test_push_command_with_a_message(
        self, hub: HubServer, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["push", str(folder), "alice/net", "--message", "Better\n\nmuch better"]
        assert main(arguments) == 0
        [commit, _initial] = hub.store.repository("alice/net").history("main")
        assert commit.title == "Better"
        assert capfd.readouterr().out == f"{hub.url}/alice/net\ncommit {commit.sha}\n"
        assert main(arguments) == 0
        assert "no new commit" in capfd.readouterr().out

    @pytest.mark.skipif(importlib.util.find_spec("hf_xet") is None, reason="needs hf_xet")
    def test_hub_without_xet_storage(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HF_HUB_DISABLE_XET")
        assert push(folder, "alice/net")["changed"]
        assert files_on_hub(hub) == contents(folder)


class TestFaults:
    @pytest.mark.parametrize(
        "fault",
        [
            pytest.param({"status": 503, "retry_after": 0}, marks=pytest.mark.faults),
            pytest.param({"kind": "reset"}, marks=pytest.mark.faults),
            {"kind": "lost"},
        ],
    )
    def test_one_fault_at_every_request_makes_one_commit(
        self, hub: HubServer, folder: Path, fault: dict[str, Any], capfd: Any
    ) -> None:
        for pattern in CALLS.values():
            hub.fail(pattern, **fault)
        result = push(folder, "alice/net", private=True)
        assert not any(fault.times for fault in hub.faults), "a fault was not met"
        assert hub.commits("alice/net")[0] == result["commit"]
        assert len(hub.commits("alice/net")) == 2, "one commit on top of the hub's own"
        assert hub.store.repository("alice/net").private
        assert files_on_hub(hub) == contents(folder)
        assert WRITE_TOKEN not in capfd.readouterr().err

    @pytest.mark.parametrize(
        "call",
        ["create", "branch", pytest.param("batch", marks=pytest.mark.faults), "commit"],  # 25 s
    )
    def test_permanent_fault(
        self, hub: HubServer, folder: Path, call: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail(CALLS[call], times=None, retry_after=0, echo=True)
        message = failed_push(capfd, str(folder), "alice/net", "--private", "--message", "it's")
        assert "the hub returned 503" in message
        command = shlex.split(message.split("nothing is lost, push again with: ")[1])
        assert command == [
            *("finetune", "push", str(folder), "alice/net"),
            *("--private", "--message", "it's"),
        ]
        hub.faults.clear()
        assert main(command[1:]) == 0
        assert files_on_hub(hub) == contents(folder)

    @pytest.mark.parametrize("kind", ["lost", "truncate"])
    def test_lost_responses_to_the_commit(self, hub: HubServer, folder: Path, kind: str) -> None:
        hub.fail(CALLS["commit"], kind=kind, times=None)
        result = push(folder, "alice/net")
        assert hub.count(CALLS["commit"]) == 1
        assert result["changed"]
        assert [result["commit"]] == hub.commits("alice/net")[:-1]

    def test_branch_moves_during_the_push(self, hub: HubServer, folder: Path) -> None:
        hub.fail(CALLS["commit"], kind="slow")
        theirs = {"a.jpg": b"a picture", "model.safetensors": b"theirs"}

        def commit() -> None:
            wait_until(lambda: hub.count(CALLS["commit"]), seconds=30)
            hub.commit("alice/net", theirs)

        thread = threading.Thread(target=commit)
        thread.start()
        result = push(folder, "alice/net")
        thread.join()
        assert result["commit"] == hub.commits("alice/net")[0]
        assert len(hub.commits("alice/net")) == 3
        assert files_on_hub(hub) == {**contents(folder), "a.jpg": b"a picture"}

    @pytest.mark.parametrize(
        "call, status, words",
        [
            ("commit", 412, "the branch moved during the push"),
            ("commit", 403, "***"),
            ("upload", 403, "the hub returned 403"),
        ],
    )
    def test_refused_request(
        self,
        hub: HubServer,
        folder: Path,
        call: str,
        status: int,
        words: str,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        hub.fail(CALLS[call], status=status, times=None, echo=True)
        assert words in failed_push(capfd, str(folder), "alice/net")
        assert files_on_hub(hub) == {}
        if status == 403:
            assert hub.count(CALLS[call]) == 1, "a rejected request is not retried"


class TestRefused:
    """A push that cannot succeed fails before it creates anything."""

    @pytest.mark.parametrize("status", ["running", "failed (1)", "stopped (143)"])
    def test_unfinished_run(self, hub: HubServer, tmp_path: Path, status: str) -> None:
        write_model_folder(tmp_path / "run" / "model")
        (tmp_path / "run" / "run.json").write_text(f'{{"status": "{status}"}}')
        with refused("checkpoint.not_finished", "--resume", status):
            push(tmp_path / "run", "alice/net")
        assert not hub.requests

    def test_run_and_folder_without_a_model(self, hub: HubServer, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "nowhere"):
            with refused("weights.not_found", "config.json", "model.safetensors"):
                push(path, "alice/net")
        (tmp_path / "run.json").write_text('{"status": "done"}')
        with refused("checkpoint.not_finished", "model/"):
            push(tmp_path, "alice/net")

    @pytest.mark.parametrize(
        "spoil, kind",
        [
            (lambda f: (f / "README.md").write_text(f"{CARD}{WRITE_TOKEN}"), HubError),
            (lambda f: (f / "README.md").write_text("---\nlicense: none-such\n---\n"), HubError),
            (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04 pickled"), WeightsError),
            (lambda f: (f / "config.json").unlink(), WeightsError),
            (
                lambda f: (f / "config.json").write_text(json.dumps({"checksums": {}})),
                WeightsError,
            ),
            (
                lambda f: (f / "README.md").write_text(
                    f"{CARD}- model.safetensors: sha256 `{'0' * 64}`\n"
                ),
                WeightsError,
            ),
            (
                lambda f: (f / "results.json").write_text(json.dumps({"model_sha256": "0" * 64})),
                WeightsError,
            ),
        ],
        ids=[
            *("token", "license", "pickle", "incomplete", "changed", "card of other weights"),
            "results of other weights",
        ],
    )
    def test_invalid_model(
        self,
        hub: HubServer,
        folder: Path,
        spoil: Callable[[Path], object],
        kind: type[FinetuneError],
    ) -> None:
        spoil(folder)
        with pytest.raises(kind):
            push(folder, "alice/net")
        assert ("model", "alice/net") not in hub.store.repositories

    def test_invalid_name_or_missing_rights(
        self, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with refused("recipe.wrong_value", "'net'"):
            push(folder, "net")
        monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
        with refused("hub.forbidden", "'alice'", "bob"):
            push(folder, "alice/net")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with refused("hub.offline", "HF_HUB_OFFLINE"):
            push(folder, "alice/net")
        assert not hub.count("POST")
