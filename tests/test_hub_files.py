"""models/hub_files.py against a hub on loopback: versions, caches, and each refusal."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
from networks import (
    message,
    timm_folder,
)
from safetensors.torch import load_file

from finetune.models import hub_files
from finetune.models import weights as weights_module
from finetune.models.weights import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return timm_folder(tmp_path / "net")


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


def edit(folder: Path, section: str | None, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = config if section is None else config[section]
    target.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


class TestConfig:
    @pytest.mark.parametrize("key", sorted({*hub_files.CONTROL_ARGS} - {"num_classes"}))
    def test_nothing_steers_timms_loader(self, folder: Path, key: str) -> None:
        edit(folder, "model_args", **{key: "/somewhere/evil.pth"})
        text = message(folder)
        assert f"config.json: model_args.{key}" in text
        assert "weights_only" not in text

    def test_what_timm_writes_there_is_dropped(self, folder: Path) -> None:
        before = resolve(str(folder)).model_args
        edit(folder, "model_args", num_classes=7, in_chans=3)
        edit(folder, "pretrained_cfg", url="http://host/x.pth", file="/x.pth", hf_hub_id="a/b")
        found = resolve(str(folder))
        assert found.model_args == before
        assert not {"url", "file", "hf_hub_id"} & found.config.keys()

    @pytest.mark.parametrize(
        "key, value",
        [
            ("mean", [0.5, 0.5]),
            ("mean", [0.5, 0.5, float("nan")]),
            ("mean", 0.5),
            ("std", [0.5, 0.5, 0]),
            ("std", [0.5, "0.5", 0.5]),
            ("crop_pct", 0),
            ("crop_pct", "all"),
            ("crop_pct", float("inf")),
            ("input_size", [3, 32]),
            ("input_size", [3, 32.5, 32]),
            ("input_size", [1, 32, 32]),
            ("input_size", [3, 0, 32]),
            ("label_offset", "one"),
            ("classifier", 5),
        ],
    )
    def test_values_of_no_use(self, folder: Path, key: str, value: Any) -> None:
        edit(folder, "pretrained_cfg", **{key: value})
        assert f"config.json: {key}: " in message(folder)

    @pytest.mark.parametrize(
        "key, value",
        [
            ("model_args", [1]),
            ("pretrained_cfg", "here"),
            ("num_classes", "ten"),
            ("num_classes", -1),
            ("label_names", "ant"),
            ("label_names", [1, 2, 3]),
            ("label_names", ["ant", "bee"]),
            ("label_names", {"0": "ant", "1": "bee"}),
            ("model_args", {"img_size": "large"}),
        ],
    )
    def test_sections_of_no_use(self, folder: Path, key: str, value: Any) -> None:
        edit(folder, None, **{key: value})
        assert f"config.json: {key}" in message(folder)

    def test_a_tag_belongs_to_no_architecture(self, folder: Path) -> None:
        edit(folder, None, architecture="vit_tiny_patch16_224.nothing")
        assert resolve(str(folder)).architecture == "vit_tiny_patch16_224"
        edit(folder, None, architecture=["vit_tiny_patch16_224"])
        assert "does not know" in message(folder)

    @pytest.mark.parametrize("name", timm.list_pretrained()[::40])
    def test_timms_own_configurations_pass(self, name: str) -> None:
        entry = vars(timm.get_pretrained_cfg(name))
        checked = {key for key in hub_files.CHECKS if entry[key] is not None}
        assert checked
        assert all(hub_files.CHECKS[key][1](entry[key]) for key in checked)
