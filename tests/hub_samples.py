"""Shared by the tests of a push: a hub with users, a small model folder, quick retries."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hub_server import HubServer, point_at, wait_until
from huggingface_hub import constants
from huggingface_hub.utils import _http
from safetensors.torch import save

from finetune.hub import client
from finetune.publish import push as push_module
from finetune.publish import upload

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


class Failing:
    """A function that raises what it is given, one after another, then answers."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return "done"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited for; nothing waits."""
    seconds: list[float] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=seconds.append, monotonic=lambda: 0))
    monkeypatch.setattr(client, "_said", set())
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
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # of processes of their own
        monkeypatch.setattr(push_module, "send_apart", send_here)
        yield hub
        assert hub.mistakes == []


send_apart = push_module.send_apart


def send_here(hub: Any, job: upload.Job) -> dict[str, Any]:
    """Carry out a push in this process: quicker, and what a test replaces is in use."""
    return upload.send(job, lambda report: None)


@contextlib.contextmanager
def signals_at(hub: HubServer, pattern: str, numbers: list[signal.Signals]) -> Iterator[None]:
    """Send signals to this process, one after another, once the hub was asked for something."""
    ended = threading.Event()

    def send() -> None:
        wait_until(lambda: ended.is_set() or hub.count(pattern), seconds=30)
        for number in numbers:
            ended.wait(0.5)
            if not ended.is_set():
                os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "net")
