"""models/weights.py: every source of weights, and one message for each way it can go wrong."""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import WeightsError
from finetune.models import weights as weights_module
from finetune.models.weights import locate, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL)


@pytest.fixture
def folder(tmp_path: Path, network: torch.nn.Module) -> Path:
    """A network as timm's hub format keeps it."""
    top = tmp_path / "net"
    top.mkdir()
    save_file(network.state_dict(), top / "model.safetensors")
    config: dict[str, Any] = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "label_names": ["ant", "bee", "cat"],
        "model_args": SMALL,
        "pretrained_cfg": {
            "num_classes": 3,
            "input_size": [3, 32, 32],
            "fixed_input_size": True,
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "classifier": "head",
            "first_conv": "patch_embed.proj",
            "license": "mit",
        },
    }
    (top / "config.json").write_text(json.dumps(config))
    return top


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def message(name: object, **kwargs: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        resolve(str(name), **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


class TestFolder:
    def test_everything_is_read(self, folder: Path, network: torch.nn.Module) -> None:
        found = resolve(str(folder))
        assert found.architecture == "vit_tiny_patch16_224"
        assert found.model_args == SMALL
        assert found.config["mean"] == [0.1, 0.2, 0.3]
        assert found.class_names == ["ant", "bee", "cat"]
        assert found.provenance["license"] == "mit"
        expected = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert found.provenance["sha256"] == expected
        assert found.state is not None
        own = network.state_dict()
        assert found.state.keys() == own.keys()
        assert all(torch.equal(found.state[k], own[k]) for k in own)

    def test_timms_own_prefix_for_folders(self, folder: Path) -> None:
        assert resolve(f"local-dir:{folder}").model_args == SMALL

    def test_a_run_directory_stands_for_its_model(self, tmp_path: Path, folder: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        (run / "run.json").write_text("{}")
        assert "no model/ yet" in message(run)
        folder.rename(run / "model")
        assert locate(str(run)) == run / "model"
        assert resolve(str(run)).class_names == ["ant", "bee", "cat"]

    def test_without_weights_only_the_configuration_is_read(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        found = resolve(str(folder), pretrained=False)
        assert found.state is None
        assert found.model_args == SMALL
        assert "no weights beside config.json" in message(folder)

    @pytest.mark.parametrize(
        "names, expected",
        [
            ({"0": "ant", "1": "bee", "2": "cat"}, ["ant", "bee", "cat"]),
            ({"0": "ant", "2": "bee"}, None),
            ([], None),
        ],
    )
    def test_class_names_in_other_forms(
        self, folder: Path, names: Any, expected: list[str] | None
    ) -> None:
        edit(folder, label_names=names)
        assert resolve(str(folder)).class_names == expected

    def test_an_old_flat_configuration(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        flat = {"architecture": config["architecture"], **config["pretrained_cfg"]}
        (folder / "config.json").write_text(json.dumps(flat))
        found = resolve(str(folder))
        assert found.config["std"] == [0.4, 0.5, 0.6]
        assert found.config["num_classes"] == 3

    def test_configurations_that_are_of_no_use(self, folder: Path) -> None:
        edit(folder, architecture="vit_tinny_patch16_224")
        assert "did you mean 'vit_tiny_patch16_224'" in message(folder)
        (folder / "config.json").write_text('{"architectures": ["ViTForImageClassification"]}')
        assert "transformers" in message(folder)
        (folder / "config.json").write_text("{")
        assert "not JSON" in message(folder)
        (folder / "config.json").unlink()
        assert "no config.json" in message(folder)


class TestNames:
    def test_unknown_names_suggest_the_nearest(self) -> None:
        assert "'vit_base_patch16_224'" in message("vit_bse_patch16_224")
        text = message("vit_base_patch16_224.augreg_in21")
        assert "vit_base_patch16_224.augreg_in21k" in text
        text = message("vit_bse_patch16_224.augreg_in21k")
        assert "did you mean 'vit_base_patch16_224.augreg_in21k'" in text
        assert "hf-hub:" in message("nothing_like_it_at_all_1234")

    def test_local_names_and_repositories_are_told_apart(self) -> None:
        assert "no such file or folder" in message("./missing")
        assert "no such file or folder" in message("missing.safetensors")
        assert "hf-hub:google/vit" in message("google/vit")
        assert "embedded:nothing" in message("embedded:nothing")

    def test_embedded_weights_are_package_data(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = folder.parent / "package"
        (package / "embedded").mkdir(parents=True)
        folder.rename(package / "embedded" / "net")
        monkeypatch.setattr(weights_module.resources, "files", lambda _: package)
        assert resolve("embedded:net").provenance["source"] == "embedded:net"
        assert "did you mean 'net'" in message("embedded:nett")

    def test_an_architecture_without_weights(self) -> None:
        assert resolve("test_vit4", pretrained=False).config["input_size"]
        name = next(n for n in timm.list_models() if not timm.list_pretrained(f"{n}*"))
        assert "no pretrained weights" in message(name)

    def test_imagenets_class_names_are_distinct(self) -> None:
        names = weights_module._imagenet_names(1000)
        assert names is not None
        assert len(set(names)) == 1000
        assert names[0].startswith("tench")
        assert weights_module._imagenet_names(7) is None


class TestFiles:
    def test_safetensors_with_a_configuration_beside(self, folder: Path) -> None:
        assert resolve(str(folder / "model.safetensors")).class_names == ["ant", "bee", "cat"]

    def test_safetensors_alone_need_an_architecture(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        path = folder / "model.safetensors"
        assert "model.args.architecture" in message(path)
        found = resolve(str(path), args={"architecture": "vit_tiny_patch16_224"})
        assert found.architecture == "vit_tiny_patch16_224"
        text = message(path, args={"architecture": "vit_tiny_patch16_24"})
        assert "did you mean 'vit_tiny_patch16_224'" in text

    def test_a_suffix_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "weights.h5").write_bytes(b"x")
        assert "not a weights file" in message(tmp_path / "weights.h5")


class Runs:
    """A pickle that would create a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


class TestDamage:
    def test_a_web_page(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"\n<!DOCTYPE html><html></html>")
        assert "web page" in message(folder)

    def test_an_lfs_pointer(self, folder: Path) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
        (folder / "model.safetensors").write_bytes(pointer)
        assert "LFS pointer" in message(folder)

    @pytest.mark.parametrize("kept", [0, 5, 8, 200, 0.5, 0.999])
    def test_truncation(self, folder: Path, kept: float) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        count = int(kept * len(content)) if isinstance(kept, float) else kept
        path.write_bytes(content[:count])
        assert ("is empty" if kept == 0 else "truncated") in message(folder)
        if count > 200:
            assert f"{count} of {len(content)} bytes" in message(folder)

    def test_rubbish(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes(range(8)) + b"rubbish" * 100)
        assert "truncated or damaged" in message(folder)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_numbers_that_are_none(self, folder: Path, value: float) -> None:
        state = load_file(folder / "model.safetensors")
        state["blocks.0.attn.qkv.bias"][[1, 4]] = value
        save_file(state, folder / "model.safetensors")
        assert "'blocks.0.attn.qkv.bias' holds 2 NaN" in message(folder)

    def test_pickled_weights_are_read_without_running_them(
        self, folder: Path, network: torch.nn.Module
    ) -> None:
        (folder / "model.safetensors").unlink()
        torch.save({"state_dict": network.state_dict()}, folder / "pytorch_model.bin")
        found = resolve(str(folder))
        assert found.state is not None
        assert torch.equal(found.state["head.weight"], network.state_dict()["head.weight"])

    @pytest.mark.parametrize("zipped", [True, False])
    def test_pickled_code_is_refused(self, folder: Path, zipped: bool) -> None:
        (folder / "model.safetensors").unlink()
        made = folder / "made"
        path = folder / "pytorch_model.bin"
        torch.save({"x": Runs(made)}, path, _use_new_zipfile_serialization=zipped)
        assert "refused" in message(folder)
        assert not made.exists()
        path.write_bytes(pickle.dumps(Runs(made)))
        message(folder)
        assert not made.exists()

    def test_truncated_pickle(self, folder: Path, network: torch.nn.Module) -> None:
        (folder / "model.safetensors").unlink()
        path = folder / "pytorch_model.bin"
        torch.save(network.state_dict(), path)
        path.write_bytes(path.read_bytes()[:2000])
        assert "truncated" in message(folder)

    def test_archives_of_objects_are_refused(self, tmp_path: Path) -> None:
        made = tmp_path / "made"
        np.savez(tmp_path / "code.npz", x=np.array([Runs(made)], dtype=object))
        assert "Python objects" in message(tmp_path / "code.npz")
        assert not made.exists()

    def test_archives_of_something_else(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "other.npz", x=np.zeros(3))
        assert "embedding/kernel" in message(tmp_path / "other.npz")
        whole = (tmp_path / "other.npz").read_bytes()
        (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
        assert "truncated" in message(tmp_path / "half.npz")


class Hub(ThreadingHTTPServer):
    """The hub's file route on loopback: HEAD and GET of /owner/name/resolve/revision/file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.requests: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        repository, _, rest = self.path.lstrip("/").partition("/resolve/")
        revision, _, filename = rest.partition("/")
        path = self.server.folder / filename
        wrong = None
        if repository != "someone/net":
            wrong = "GatedRepo" if "gated" in repository else "RepoNotFound"
        elif revision not in ("main", "v1", COMMIT):
            wrong = "RevisionNotFound"
        elif not path.is_file():
            wrong = "EntryNotFound"
        content = b"" if wrong else path.read_bytes()
        self.send_response({None: 200, "GatedRepo": 403}.get(wrong, 404))
        if wrong:
            self.send_header("X-Error-Code", wrong)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    set_offline(monkeypatch, False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def set_offline(monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)


class TestHub:
    def test_a_repository_is_read_at_one_commit(self, hub: Hub, folder: Path) -> None:
        found = resolve("hf-hub:someone/net@v1")
        local = resolve(str(folder))
        assert found.state is not None
        assert local.state is not None
        assert all(torch.equal(found.state[k], local.state[k]) for k in local.state)
        assert found.class_names == local.class_names
        assert found.provenance["revision"] == COMMIT
        assert found.provenance["sha256"] == local.provenance["sha256"]
        weights = [r for r in hub.requests if "model.safetensors" in r]
        assert weights
        assert all(COMMIT in r for r in weights)

    def test_pickled_weights_are_the_second_choice(self, hub: Hub, folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        assert "no weights file" in message("hf-hub:someone/net")
        torch.save(state, folder / "pytorch_model.bin")
        assert resolve("hf-hub:someone/net").provenance["file"] == "pytorch_model.bin"

    def test_a_warm_cache_needs_no_request(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        first = resolve("hf-hub:someone/net")
        set_offline(monkeypatch, True)
        hub.requests.clear()
        again = resolve("hf-hub:someone/net")
        assert hub.requests == []
        assert again.provenance == first.provenance

    def test_a_warm_cache_serves_when_the_hub_does_not_answer(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = resolve("hf-hub:someone/net")
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's retries
        nobody = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", nobody)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        assert resolve("hf-hub:someone/net").provenance == first.provenance
        assert "not in the cache" in message("hf-hub:someone/other")

    def test_a_cold_cache_offline(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        set_offline(monkeypatch, True)
        text = message("hf-hub:someone/net")
        assert "no network" in text
        assert "not in the cache" in text
        assert hub.requests == []

    def test_wrong_names(self, hub: Hub, folder: Path) -> None:
        assert "no such repository" in message("hf-hub:nobody/net")
        assert "no such revision" in message("hf-hub:someone/net@v2")
        assert "access must be granted" in message("hf-hub:gated/net")
        assert "owner/name" in message("hf-hub:a/b/c")
        (folder / "config.json").unlink()
        assert "no file config.json" in message("hf-hub:someone/net")

    def test_registry_names_come_by_the_same_road(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = timm.get_pretrained_cfg("vit_tiny_patch16_224")
        assert entry is not None
        monkeypatch.setattr(entry, "hf_hub_id", "someone/net")
        monkeypatch.setattr(weights_module.timm, "get_pretrained_cfg", lambda _: entry)
        found = resolve("vit_tiny_patch16_224")
        assert found.state is not None
        assert found.provenance["repository"] == "someone/net"
        assert found.provenance["revision"] == COMMIT
        assert not any("config.json" in r for r in hub.requests)
        assert not {"hf_hub_id", "url", "file"} & found.config.keys()
