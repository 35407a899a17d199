"""models/tensors.py: files that are damaged, or that would run code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import (
    message,
    timm_folder,
)
from safetensors.torch import load_file, save_file

from finetune.models.weights import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return timm_folder(tmp_path / "net")


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

    def test_pickled_weights_are_read_without_running_them(self, folder: Path) -> None:
        own = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save({"state_dict": own}, folder / "pytorch_model.bin")
        found = resolve(str(folder))
        assert found.state is not None
        assert torch.equal(found.state["head.weight"], own["head.weight"])

    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    @pytest.mark.parametrize("zipped", [True, False])
    def test_pickled_code_is_refused(self, folder: Path, zipped: bool) -> None:
        (folder / "model.safetensors").unlink()
        made = folder / "made"
        path = folder / "pytorch_model.bin"
        torch.save({"x": Runs(made)}, path, _use_new_zipfile_serialization=zipped)
        text = message(folder)
        assert "refused" in text
        assert "weights_only" not in text
        assert not made.exists()
        path.write_bytes(pickle.dumps(Runs(made)))
        message(folder)
        assert not made.exists()

    def test_truncated_pickle(self, folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        path = folder / "pytorch_model.bin"
        torch.save(state, path)
        path.write_bytes(path.read_bytes()[:2000])
        assert "truncated" in message(folder)

    def test_archives_of_objects_are_refused(self, tmp_path: Path) -> None:
        made = tmp_path / "made"
        np.savez(tmp_path / "code.npz", x=np.array([Runs(made)], dtype=object))
        text = message(tmp_path / "code.npz")
        assert "Python objects" in text
        assert "allow_pickle" not in text
        assert not made.exists()

    def test_archives_of_something_else(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "other.npz", x=np.zeros(3))
        assert "embedding/kernel" in message(tmp_path / "other.npz")
        whole = (tmp_path / "other.npz").read_bytes()
        (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
        assert "truncated" in message(tmp_path / "half.npz")

    def test_archives_that_are_none(self, tmp_path: Path) -> None:
        path = tmp_path / "x.npz"
        path.write_text("plain text")
        text = message(path)
        assert "not a NumPy archive" in text
        assert "pickle" not in text

    def test_files_that_cannot_be_opened(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.unlink()
        path.symlink_to(path)
        assert "model.safetensors: cannot be read" in message(folder)
        path.unlink()
        path.mkdir()
        assert "model.safetensors: cannot be read" in message(folder)
