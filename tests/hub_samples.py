"""What the tests of the push side share: a hub with users, a small model folder, quick retries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import HubServer, point_at
from huggingface_hub import constants
from huggingface_hub.utils import _http
from safetensors.torch import save

from finetune.hub import calls as hub_calls

WRITE, READ, OTHER = "hf_writewritewrite", "hf_readreadread", "hf_otherother"
CARD = "---\nlibrary_name: timm\nlicense: mit\ntags: [timm]\n---\n# A small model\n"


def weights(value: float) -> bytes:
    return save({"head.weight": torch.full((4, 4), value)}, metadata={"format": "pt"})


def model_folder(folder: Path, *, value: float = 1.0, **files: str) -> Path:
    """A folder that looks like a model; extra files by name, with "__" for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architecture": "test_vit"}))
    (folder / "model.safetensors").write_bytes(weights(value))
    (folder / "README.md").write_text(CARD)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited for; nothing waits."""
    seconds: list[float] = []
    clock = SimpleNamespace(sleep=seconds.append)
    monkeypatch.setattr(hub_calls, "time", clock)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
    return seconds


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> Iterator[HubServer]:
    """A hub on loopback that alice may write to, and this process's clients pointed at it."""
    with HubServer() as hub:
        hub.add_user("alice", token=WRITE, orgs=("zoo",))
        hub.add_user("alice", token=READ, role="read")
        hub.add_user("bob", token=OTHER)
        point_at(hub, monkeypatch, tmp_path / "home", WRITE)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub
        assert hub.mistakes == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "net")
