"""Weights and cached features that are pickles: their code never runs, under any file name.

tests/faults/test_pickles.py tests them in runs, checkpoints, recipes and on the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from malicious_pickles import (
    PICKLE_FORMATS,
    UNSAFE_ADVICE,
    CommandRunner,
    canary,
    image_path,
    malicious_files,
    runner,
)
from networks import write_timm_folder

from finetune.evaluation.feature_cache import read_cached_features

__all__ = ["canary", "image_path", "runner"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHT_FILE_NAMES = (
    "w.pt",
    "w.pth",
    "w.bin",
    "w.tar",
    "w.ckpt",
    "w.safetensors",
    "w.npz",
    "w.npy",
    "w.pkl",
)


def test_control_every_pickle_runs_code_when_loaded_unsafely(canary: Path) -> None:
    """The control: the other tests would also pass with pickles that do nothing."""
    unsafe_options = {"weights" + "_only": False}, {"allow" + "_pickle": True}

    def load_with_torch(content: bytes) -> object:
        path = canary.with_name("w.tar")  # torch reads its oldest format only from files
        path.write_bytes(content)
        return torch.load(path, **unsafe_options[0])

    def load_with_numpy(content: bytes) -> object:
        loaded = np.load(io.BytesIO(content), **unsafe_options[1])
        return loaded["x"] if hasattr(loaded, "files") else loaded

    readers: list[Callable[[bytes], object]] = [pickle.loads, load_with_torch, load_with_numpy]
    readers.append(lambda content: joblib.load(io.BytesIO(content)))
    for pickle_format, content in malicious_files(canary).items():
        if pickle_format == "npz of a pickle":  # NumPy reads such a member as bytes
            continue
        for reader in readers:
            with contextlib.suppress(Exception):
                reader(content)
        assert canary.exists(), pickle_format
        canary.unlink()


@pytest.mark.parametrize("pickle_format", PICKLE_FORMATS)
def test_pickles_under_every_weight_name(
    pickle_format: str,
    runner: CommandRunner,
    image_path: Path,
    tmp_path: Path,
) -> None:
    content = malicious_files(runner.canary)[pickle_format]
    shutil.copy(write_timm_folder(tmp_path / "net") / "config.json", "config.json")
    for name in WEIGHT_FILE_NAMES:
        Path(name).write_bytes(content)
        text = runner("predict", name, image_path)
        assert name in text


def test_pickles_in_the_feature_cache(
    runner: CommandRunner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, key = tmp_path / "features", "0" * 64
    folder.mkdir()
    for pickle_format in PICKLE_FORMATS:
        content = malicious_files(runner.canary)[pickle_format]
        path = folder / f"{key}-{hashlib.sha256(key.encode() + content).hexdigest()}.npy"
        path.write_bytes(content)
        assert read_cached_features(folder, key, num_images=1) is None, pickle_format
        assert not runner.canary.exists(), pickle_format
        path.unlink(missing_ok=True)
    messages = capsys.readouterr().err
    assert messages.count("is damaged") == len(PICKLE_FORMATS)
    assert not UNSAFE_ADVICE.search(messages), messages
