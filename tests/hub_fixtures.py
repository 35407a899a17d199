"""Fixtures for push tests: a hub with users, a small model folder, retries without waits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_runs import fork_process
from hub_server import HubServer, point_clients_at, wait_until
from huggingface_hub import constants
from safetensors.torch import save

from finetune.hub import client
from finetune.publish import push as push_module
from finetune.publish import upload

WRITE_TOKEN, READ_TOKEN, OTHER_TOKEN = "hf_writewritewrite", "hf_readreadread", "hf_otherother"
CARD = "---\nlibrary_name: timm\nlicense: mit\ntags: [timm]\n---\n# A small model\n"


def weight_bytes(value: float) -> bytes:
    return save({"head.weight": torch.full((4, 4), value)}, metadata={"format": "pt"})


def write_model_folder(folder: Path, *, value: float = 1.0, **files: str) -> Path:
    """Write a folder that looks like a model; `files` adds files, with "__" for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architecture": "test_vit"}))
    (folder / "model.safetensors").write_bytes(weight_bytes(value))
    (folder / "README.md").write_text(CARD)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture
def sleep_durations(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace sleeps between retries; returns the list of their durations in seconds."""
    seconds: list[float] = []
    monkeypatch.setattr(
        client, "time", SimpleNamespace(sleep=seconds.append, monotonic=time.monotonic)
    )
    return seconds


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_durations: list[float]
) -> Iterator[HubServer]:
    """A hub on loopback with a user alice; the hub clients of this process use it."""
    with HubServer() as hub:
        hub.add_user("alice", token=WRITE_TOKEN, orgs=("zoo",))
        hub.add_user("alice", token=READ_TOKEN, role="read")
        hub.add_user("bob", token=OTHER_TOKEN)
        point_clients_at(hub, monkeypatch, tmp_path / "home", WRITE_TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # for subprocesses
        yield hub
        assert hub.server_errors == []


class ForkedUpload:
    """The upload process of a push, as `subprocess.Popen`, without its imports."""

    def __init__(self, command: list[str], **_: Any) -> None:
        job, stdin = os.pipe()
        stdout, reports = os.pipe()

        def work() -> None:
            os.setsid()
            os.close(stdin)
            os.dup2(job, 0)
            os.dup2(reports, 1)
            sys.stdin = os.fdopen(0)
            upload.main()

        self.pid = fork_process(work, 2)
        self.returncode: int | None = None
        os.close(job)
        os.close(reports)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> ForkedUpload:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()


@pytest.fixture
def upload_in_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the upload process from this one; real ranks start it as it is."""
    started = SimpleNamespace(Popen=ForkedUpload, PIPE=push_module.subprocess.PIPE)
    monkeypatch.setattr(push_module, "subprocess", started)


@contextlib.contextmanager
def send_signals_after(
    hub: HubServer, pattern: str, signals: list[signal.Signals]
) -> Iterator[None]:
    """Send signals to this process, one after another, after a matching request to the hub."""
    stopped = threading.Event()

    def send() -> None:
        wait_until(lambda: stopped.is_set() or hub.count(pattern), seconds=30)
        for signal_number in signals:
            stopped.wait(0.5)
            if not stopped.is_set():
                os.kill(os.getpid(), signal_number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "net")
