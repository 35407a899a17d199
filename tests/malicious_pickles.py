"""Pickles that run code when loaded, in every format, and a command that must not load one.

Each of them creates a file, the canary. The first test of tests/models/test_pickled_weights.py
shows that all of them work; no other test may trigger one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from PIL import Image

from finetune.cli import main as cli

__all__ = [
    "PICKLE_FORMATS",
    "UNSAFE_ADVICE",
    "CommandRunner",
    "MaliciousPickle",
    "canary",
    "image_path",
    "malicious_files",
    "runner",
    "to_bytes",
]

# Texts of library messages that advise how to load such a file anyway.
UNSAFE_ADVICE = re.compile(
    r"weights_only|allow_pickle|trust_remote|add_safe_globals|trust the source|trust it", re.I
)


class MaliciousPickle:
    """An object whose pickle creates the canary when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (open, (str(self.canary), "w"))


def to_bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def tar_of_pickles(pickled: bytes) -> bytes:
    """Return the oldest format of torch."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("pickle", "tensors", "storages", "sys_info"):
            member = tarfile.TarInfo(name)
            member.size = len(pickled)
            archive.addfile(member, io.BytesIO(pickled))
    return stream.getvalue()


def npz_with_pickle(pickled: bytes) -> bytes:
    """Return an npz archive whose member is a pickle instead of an array."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", pickled)
    return stream.getvalue()


def malicious_files(canary: Path) -> dict[str, bytes]:
    """Return the same malicious object in every file format that can hold pickles."""
    malicious = MaliciousPickle(canary)
    tensors = {"head.weight": torch.zeros(2, 2), "trap": malicious}
    objects = np.array([malicious], dtype=object)
    save_legacy = functools.partial(torch.save, _use_new_zipfile_serialization=False)
    return {
        "protocol 0": pickle.dumps(malicious, 0),
        "protocol 2": pickle.dumps(malicious, 2),
        "protocol 4": pickle.dumps(malicious, 4),
        "torch zip": to_bytes(lambda stream: torch.save(tensors, stream)),
        "torch zip, no tensors": to_bytes(lambda stream: torch.save(malicious, stream)),
        "torch before 1.6": to_bytes(lambda stream: save_legacy(tensors, stream)),
        "torch tar": tar_of_pickles(pickle.dumps(malicious, 2)),
        "npy of objects": to_bytes(lambda stream: np.save(stream, objects)),
        "npz of objects": to_bytes(lambda stream: np.savez(stream, x=objects)),
        "npz of a pickle": npz_with_pickle(pickle.dumps(malicious, 2)),
        "joblib": to_bytes(lambda stream: joblib.dump(malicious, stream)),
    }


PICKLE_FORMATS = tuple(malicious_files(Path("canary")))


class CommandRunner:
    """Runs commands and checks that no pickle was loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary
        self.count = 0

    def __call__(self, *arguments: object, codes: tuple[int, ...] = (4,)) -> str:
        """Run a command. Returns: standard output and error."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = cli.main([str(argument) for argument in arguments])
        text = output.getvalue()
        self.count += 1
        assert not self.canary.exists(), arguments
        assert code in codes, f"{arguments}: {code}\n{text}"
        assert not re.search("Traceback|internal error", text), text
        assert not UNSAFE_ADVICE.search(text), text
        return text


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def runner(
    canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandRunner]:
    # environment variables that turn safe defaults of the libraries off
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("HF_DATASETS_TRUST_REMOTE_CODE", "1")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    command_runner = CommandRunner(canary)
    yield command_runner
    assert not canary.exists()


@pytest.fixture
def image_path(tmp_path: Path) -> Path:
    Image.new("RGB", (18, 18), (9, 90, 200)).save(tmp_path / "a.png")
    return tmp_path / "a.png"
