"""hub/download.py against a local hub: revisions, the cache, every fault and every error."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
from hub_server import HubServer, point_clients_at
from hub_store import git_sha1
from logs import logged
from networks import weights_error_message, write_timm_folder
from ranks import fork_context
from refusals import refused
from safetensors.torch import load_file

from finetune.errors import HubError
from finetune.hub import client
from finetune.hub.download import download_hub_file, verify_checksum
from finetune.model_checksums import add_checksums
from finetune.models.weights import resolve as weights_module
from finetune.models.weights.resolve import resolve_weights
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
REPO = "someone/net"
TOKEN = "hf_aliceAlice1234"
CONFIG_REQUEST, WEIGHTS_REQUEST = r"GET /someone/net/resolve/.*/config\.json", r"GET /cdn/"
HEAD_REQUEST = r"HEAD /someone/net/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_timm_folder(tmp_path / "net")


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: Patch) -> Iterator[HubServer]:
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    with HubServer() as hub:
        hub.add_repo(REPO, folder_content(folder))
        hub.tag(REPO, "v1")
        hub.add_user("someone", token=TOKEN)
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.server_errors == []


def set_offline(monkeypatch: Patch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def hub_error_message(name: str) -> str:
    with pytest.raises(HubError) as caught:
        resolve_weights(name)
    assert caught.value.exit_code == 7
    message = str(caught.value)
    assert "\n" not in message
    return message


def cached_blob(hub: HubServer, filename: str) -> Path:
    """Return the path of the cached content of a file."""
    return download_hub_file(REPO, filename, None).path.resolve()


class TestRevisions:
    def test_reads_a_repository_at_one_commit(self, hub: HubServer, folder: Path) -> None:
        [commit, _] = hub.commits(REPO)
        hub.commit(REPO, {"config.json": b"broken since"})
        from_hub = resolve_weights(f"hf-hub:{REPO}@v1")
        from_folder = resolve_weights(str(folder))
        assert from_hub.state is not None
        assert from_folder.state is not None
        assert all(
            torch.equal(from_hub.state[name], from_folder.state[name]) for name in from_folder.state
        )
        assert from_hub.class_names == from_folder.class_names
        assert from_hub.provenance == {
            "source": f"hf-hub:{REPO}@v1",
            "repository": REPO,
            "revision": commit,
            "file": "model.safetensors",
            "sha256": from_folder.provenance["sha256"],
            "license": from_folder.provenance["license"],
        }
        weight_requests = [path for _, path in hub.requests if path.endswith("model.safetensors")]
        assert weight_requests
        assert all(commit in path for path in weight_requests)

    def test_branches_and_commits(self, hub: HubServer) -> None:
        [old, _] = hub.commits(REPO)
        new = hub.commit(REPO, {"README.md": b"newer"}, revision="main")
        names = {f"hf-hub:{REPO}": new, f"hf-hub:{REPO}@main": new, f"hf-hub:{REPO}@{old}": old}
        for name, commit in names.items():
            assert resolve_weights(name).provenance["revision"] == commit

    def test_falls_back_to_pickled_weights(self, hub: HubServer, folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        hub.commit(REPO, {"model.safetensors": None})
        assert "no weights file" in weights_error_message(f"hf-hub:{REPO}")
        torch.save(state, folder / "pytorch_model.bin")
        hub.commit(REPO, {"pytorch_model.bin": (folder / "pytorch_model.bin").read_bytes()})
        assert resolve_weights(f"hf-hub:{REPO}").provenance["file"] == "pytorch_model.bin"
        config = json.loads((folder / "config.json").read_text())
        checked = json.dumps(add_checksums(config, folder)).encode()
        hub.commit(REPO, {"config.json": checked})  # of the removed model.safetensors
        assert "none of pytorch_model.bin" in weights_error_message(f"hf-hub:{REPO}")

    def test_timm_names_use_the_same_download(self, hub: HubServer, monkeypatch: Patch) -> None:
        entry = timm.get_pretrained_cfg("vit_tiny_patch16_224")
        assert entry is not None
        monkeypatch.setattr(entry, "hf_hub_id", REPO)
        monkeypatch.setattr(weights_module.timm, "get_pretrained_cfg", lambda _: entry)
        hub.fail(WEIGHTS_REQUEST, kind="corrupt")
        weights = resolve_weights("vit_tiny_patch16_224")
        assert weights.state is not None
        assert weights.provenance["repository"] == REPO
        assert weights.provenance["revision"] == hub.commits(REPO)[0]
        assert hub.count(r"config\.json") == 0
        assert not {"hf_hub_id", "url", "file"} & weights.config.keys()


class TestCache:
    def test_offline_uses_the_cache(
        self, hub: HubServer, monkeypatch: Patch, capsys: Capture
    ) -> None:
        first = resolve_weights(f"hf-hub:{REPO}")
        assert capsys.readouterr().err == ""
        set_offline(monkeypatch)
        hub.requests.clear()
        assert resolve_weights(f"hf-hub:{REPO}").provenance == first.provenance
        assert resolve_weights(f"hf-hub:{REPO}").provenance == first.provenance
        assert hub.requests == []
        messages = [
            line for line in capsys.readouterr().err.splitlines() if "using revision" in line
        ]
        assert len(messages) == 1
        assert str(first.provenance["revision"]) in messages[0]
        assert "HF_HUB_OFFLINE is set" in messages[0]

    def test_uses_the_cache_if_the_hub_is_down(self, hub: HubServer, capsys: Capture) -> None:
        first = resolve_weights(f"hf-hub:{REPO}@v1")
        hub.stop()
        started = time.monotonic()
        assert resolve_weights(f"hf-hub:{REPO}@v1").provenance == first.provenance
        assert time.monotonic() - started < 3
        messages = [line for line in capsys.readouterr().err.splitlines() if line]
        assert "the hub cannot be reached" in messages[-1]
        assert f"using revision {first.provenance['revision']} from the cache" in messages[-1]

    def test_uses_the_cache_if_the_hub_returns_errors(
        self, hub: HubServer, capsys: Capture
    ) -> None:
        first = resolve_weights(f"hf-hub:{REPO}")
        hub.fail(".", status=503, times=None)
        assert resolve_weights(f"hf-hub:{REPO}").provenance == first.provenance
        assert "the hub returned 503 (injected fault); using revision" in capsys.readouterr().err

    def test_fails_without_cache_and_hub(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.5)  # the real value
        hub.stop()
        started = time.monotonic()
        message = hub_error_message(f"hf-hub:{REPO}")
        assert time.monotonic() - started < 4
        assert "the hub cannot be reached" in message
        set_offline(monkeypatch)
        message = hub_error_message(f"hf-hub:{REPO}")
        assert "HF_HUB_OFFLINE is set" in message
        assert "not in the cache" in message

    def test_remembers_missing_files_offline(
        self, hub: HubServer, folder: Path, monkeypatch: Patch
    ) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "w.bin")
        weights = (folder / "w.bin").read_bytes()
        hub.commit(REPO, {"model.safetensors": None, "pytorch_model.bin": weights})
        first = resolve_weights(f"hf-hub:{REPO}")
        set_offline(monkeypatch)
        assert resolve_weights(f"hf-hub:{REPO}").provenance == first.provenance

    @pytest.mark.slow
    def test_three_processes_download_once(self, hub: HubServer, tmp_path: Path) -> None:
        options = {"target": download, "args": (hub.url, tmp_path / "cold")}
        processes = [fork_context.Process(**options) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert hub.count(CONFIG_REQUEST) == 1
        assert hub.count(WEIGHTS_REQUEST) == 1
        assert hub.count(HEAD_REQUEST) >= 3


def download(url: str, home: Path) -> None:
    """Download in a separate process."""
    with Patch.context() as patch:
        point_clients_at(url, patch, home)
        resolve_weights(f"hf-hub:{REPO}")


class TestTransientFaults:
    @pytest.mark.parametrize("endpoint", [HEAD_REQUEST, CONFIG_REQUEST, WEIGHTS_REQUEST])
    @pytest.mark.parametrize("fault", [{"status": 503, "times": 2}, {"kind": "reset"}])
    def test_retries_after_a_fault(
        self, hub: HubServer, endpoint: str, fault: dict[str, Any]
    ) -> None:
        hub.fail(endpoint, **fault)
        assert resolve_weights(f"hf-hub:{REPO}").state is not None
        assert hub.faults[0].times == 0

    def test_resumes_after_a_lost_connection(self, hub: HubServer, capfd: Capture) -> None:
        hub.fail(WEIGHTS_REQUEST, kind="truncate")
        assert resolve_weights(f"hf-hub:{REPO}").state is not None
        assert hub.count(WEIGHTS_REQUEST) == 2

    @pytest.mark.parametrize("endpoint", [HEAD_REQUEST, CONFIG_REQUEST, WEIGHTS_REQUEST])
    @pytest.mark.parametrize("kind", ["status", "reset", "truncate"])
    def test_fails_if_the_fault_is_permanent(
        self, hub: HubServer, endpoint: str, kind: str, monkeypatch: Patch
    ) -> None:
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        if (endpoint, kind) == (HEAD_REQUEST, "truncate"):
            pytest.skip("the response to HEAD has no body")
        hub.fail(endpoint, kind=kind, times=None)
        message = hub_error_message(f"hf-hub:{REPO}")
        assert message.startswith(f"hf-hub:{REPO}")
        assert "could not be fetched" in message
        assert "try again later" in message
        assert hub.count(endpoint) >= client.MAX_TRIES


class TestCorruptBytes:
    """The same length but other content: only the checksum detects it."""

    @pytest.mark.parametrize("endpoint", [CONFIG_REQUEST, WEIGHTS_REQUEST])
    def test_fetches_corrupt_bytes_again(
        self, hub: HubServer, folder: Path, endpoint: str, capsys: Capture
    ) -> None:
        hub.fail(endpoint, kind="corrupt", times=2)
        from_hub, from_folder = resolve_weights(f"hf-hub:{REPO}"), resolve_weights(str(folder))
        assert from_hub.state is not None
        assert from_folder.state is not None
        assert all(
            torch.equal(from_hub.state[name], from_folder.state[name]) for name in from_folder.state
        )
        assert from_hub.provenance["sha256"] == from_folder.provenance["sha256"]
        assert hub.count(endpoint) == 3
        assert "arrived with a wrong checksum; trying again" in capsys.readouterr().err

    @pytest.mark.parametrize("endpoint", [CONFIG_REQUEST, WEIGHTS_REQUEST])
    def test_fails_if_bytes_stay_corrupt(
        self, hub: HubServer, tmp_path: Path, endpoint: str
    ) -> None:
        hub.fail(endpoint, kind="corrupt", times=None)
        assert "arrived with a wrong checksum" in hub_error_message(f"hf-hub:{REPO}")
        remaining_blobs = [
            path for path in (tmp_path / "home/hub").rglob("blobs/*") if path.is_file()
        ]
        valid_contents = set(hub.files(REPO).values())
        assert all(path.read_bytes() in valid_contents for path in remaining_blobs)

    @pytest.mark.parametrize("filename", ["config.json", "model.safetensors"])
    def test_detects_and_replaces_corrupt_cached_files(
        self, hub: HubServer, folder: Path, filename: str, monkeypatch: Patch
    ) -> None:
        blob = cached_blob(hub, filename)
        resolve_weights(f"hf-hub:{REPO}")
        damaged = bytearray(blob.read_bytes())
        damaged[-5] ^= 1
        blob.write_bytes(damaged)
        with monkeypatch.context() as patch:
            set_offline(patch)
            message = weights_error_message(f"hf-hub:{REPO}")
            assert f"{filename} in the cache is damaged" in message
            assert f"delete {blob}, or run again" in message
        sha256 = resolve_weights(str(folder)).provenance["sha256"]
        assert resolve_weights(f"hf-hub:{REPO}").provenance["sha256"] == sha256
        assert blob.read_bytes() == (folder / filename).read_bytes()
        blob.write_bytes(damaged)
        hub.stop()
        assert "in the cache is damaged" in weights_error_message(f"hf-hub:{REPO}")

    def test_without_symlinks(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_SYMLINKS", True)
        monkeypatch.setattr(
            "huggingface_hub.file_download.are_symlinks_supported", lambda *_: False
        )
        download_hub_file(REPO, "config.json", None)
        lines: list[str] = []
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with logged(lines):
            path = download_hub_file(REPO, "config.json", None).path
        assert any(f"{path}: cannot be compared with the Hub's hash" in line for line in lines)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        path.unlink()
        hub.fail(CONFIG_REQUEST, kind="corrupt", times=None)
        with refused("hub.out_of_order", "checksum"):
            download_hub_file(REPO, "config.json", None)


class TestErrors:
    def test_messages_distinguish_four_causes(self, hub: HubServer, monkeypatch: Patch) -> None:
        messages = {
            weights_error_message("hf-hub:nobody/net"),
            weights_error_message(f"hf-hub:{REPO}@v2"),
        }
        hub.commit(REPO, {"config.json": None})
        messages.add(weights_error_message(f"hf-hub:{REPO}"))
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        messages.add(hub_error_message(f"hf-hub:{REPO}"))
        expected_texts = (
            "nobody/net: no such repository, or it is private; check the name, or log in with",
            "@v2: no such revision; remove '@v2' to use the newest",
            "no file config.json",
            "the hub rejects the token from HF_TOKEN (401); create a new one and run "
            "`hf auth login`, or remove it",
        )
        for expected in expected_texts:
            assert len([message for message in messages if expected in message]) == 1, expected

    def test_a_wrong_token_is_an_error_despite_a_cached_copy(
        self, hub: HubServer, monkeypatch: Patch
    ) -> None:
        resolve_weights(f"hf-hub:{REPO}")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        assert "rejects the token from HF_TOKEN" in hub_error_message(f"hf-hub:{REPO}")

    def test_private_repository(self, hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
        hub.add_repo("someone/secret", folder_content(folder), private=True)
        assert "or it is private; check the name, or log in" in weights_error_message(
            "hf-hub:someone/secret"
        )
        hub.add_user("other", token="hf_otherOther1234")
        monkeypatch.setenv("HF_TOKEN", "hf_otherOther1234")
        assert "check the permissions of your token" in weights_error_message(
            "hf-hub:someone/secret"
        )
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert resolve_weights("hf-hub:someone/secret").state is not None

    def test_gated_repository(self, hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
        hub.add_repo("someone/gated", folder_content(folder), gated=True)
        assert "this is a gated repository" in hub_error_message("hf-hub:someone/gated")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert resolve_weights("hf-hub:someone/gated").state is not None

    @pytest.mark.parametrize("url", ["localhost:8", "{cdn}/elsewhere"])
    def test_rejects_a_server_that_is_not_a_hub(
        self, hub: HubServer, url: str, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        point_clients_at(url.format(cdn=hub.cdn), monkeypatch, tmp_path / "other")
        assert "check HF_ENDPOINT" in hub_error_message(f"hf-hub:{REPO}")

    def test_xet_error_names_the_environment_variable(
        self, hub: HubServer, monkeypatch: Patch
    ) -> None:
        pytest.importorskip("hf_xet")
        hub.xet = True
        assert "HF_HUB_DISABLE_XET=1" in hub_error_message(f"hf-hub:{REPO}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        assert resolve_weights(f"hf-hub:{REPO}").state is not None


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_never_trains_on_corrupt_weights(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """A run whose weights first arrived corrupt equals a run from the local weights, bit by bit."""
    recipe_text = """
    model: {name: NAME}
    data: {source: "embedded:digits", train: resize, eval: resize, batch_size: 32}
    optim: {name: sgd, lr: 0.01, steps: 2}
    run: {precision: fp32, threads: 1, log_every: 1}
    """
    hub.fail(WEIGHTS_REQUEST, kind="corrupt", times=2)
    final_weights = []
    for number, name in enumerate((f"hf-hub:{REPO}@v1", str(folder))):
        run = tmp_path / str(number)
        train(parse_recipe(recipe_text.replace("NAME", json.dumps(name))), run)
        final_weights.append((run / "model" / "model.safetensors").read_bytes())
        record = json.loads((run / "run.json").read_text())
        assert resolve_weights(str(folder)).provenance["sha256"] in json.dumps(record)
    assert hub.count(WEIGHTS_REQUEST) == 3
    assert final_weights[0] == final_weights[1]
    assert hub.commits(REPO)[0] in (tmp_path / "0" / "run.json").read_text()


class TestVerifyChecksum:
    @pytest.mark.parametrize("name", ["sha256", "git"])
    def test_by_the_file_name_in_the_cache(self, tmp_path: Path, name: str) -> None:
        content = b"some bytes"
        sha256 = hashlib.sha256(content).hexdigest()
        blob = tmp_path / (sha256 if name == "sha256" else git_sha1(content))
        blob.write_bytes(content)
        link = tmp_path / "file"
        link.symlink_to(blob.name)
        assert verify_checksum(link) == (sha256 if name == "sha256" else "")
        blob.write_bytes(b"some Bytes")
        assert verify_checksum(link) is None
        assert verify_checksum(blob) == ""  # without a symlink the checksum is unknown
        assert verify_checksum(blob, etag=blob.name) is None

    def test_a_link_to_another_file_of_the_cache(self, tmp_path: Path) -> None:
        blobs = {}
        for content in (b"mine", b"other"):
            sha256 = hashlib.sha256(content).hexdigest()
            (tmp_path / sha256).write_bytes(content)
            blobs[content] = sha256
        link = tmp_path / "file"
        link.symlink_to(blobs[b"other"])
        assert verify_checksum(link, etag=blobs[b"mine"]) is None
        assert verify_checksum(link, etag=blobs[b"other"]) == blobs[b"other"]
