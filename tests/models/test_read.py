"""models/weights/read.py: files that are damaged, or that would run code."""

from __future__ import annotations

import pickle
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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

from finetune.errors import WeightsError
from finetune.models.weights import read as tensors
from finetune.models.weights.read import read_tensors
from finetune.models.weights.resolve import resolve

MUCH = 80 * 2**20  # bytes, more than is read of any archive that is nothing but zeros


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


@contextmanager
def within(mebibytes: int) -> Iterator[None]:
    """Hold what Python and NumPy take meanwhile below a bound."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert peak < mebibytes, f"{peak:.0f} MiB"


def refused(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        read_tensors(path)
    return str(caught.value)


def packed(path: Path, method: int, **arrays: np.ndarray) -> Path:
    """An archive of weights as NumPy or torch writes it, its members packed by another method."""
    plain = path.with_name("plain")
    if path.suffix == ".npz":
        with plain.open("wb") as file:
            np.savez(file, **arrays)
    else:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", method) as target:
        for member in source.infolist():
            with source.open(member) as old, target.open(member.filename, "w") as new:
                shutil.copyfileobj(old, new, 2**20)
    plain.unlink()
    return path


@pytest.fixture(params=["w.npz", "w.pth"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


class TestMoreThanThereIs:
    """Files of a few bytes that ask for memory without end."""

    def test_archives_that_unpack_to_far_more_stay_packed(
        self, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        packed(archive, zipfile.ZIP_DEFLATED, a=np.zeros(MUCH, np.uint8))
        assert archive.stat().st_size < MUCH / 500
        unpacked: list[object] = []
        monkeypatch.setattr(zipfile.ZipFile, "open", lambda *given: unpacked.append(given))
        monkeypatch.setattr(tensors, "load_state_dict", lambda *a, **kw: unpacked.append(a))
        with within(1):
            assert "would unpack from" in refused(archive)
        assert unpacked == []

    def test_members_that_are_the_same_bytes_count_each(self, tmp_path: Path) -> None:
        path = packed(tmp_path / "w.npz", zipfile.ZIP_DEFLATED, a=np.zeros(2**20, np.uint8))
        content = path.read_bytes()
        start, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
        tail = struct.pack("<4H2I", 0, 0, 200, 200, 200 * (end - start), start)
        whole = content[:start] + 200 * content[start:end] + b"PK\x05\x06" + tail + b"\0\0"
        path.write_bytes(whole)
        assert f"to {200 * (2**20 + 128):,} bytes" in refused(path)

    def test_a_size_that_lies(self, archive: Path) -> None:
        """What is unpacked ends where the directory says, and does not go on."""
        rest = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8)  # no bomb by its ratio
        packed(archive, zipfile.ZIP_DEFLATED, a=np.zeros(MUCH, np.uint8), b=rest)
        content = bytearray(archive.read_bytes())
        with zipfile.ZipFile(archive) as opened:
            (large,) = [i for i in opened.infolist() if i.file_size >= MUCH]
        place = content.index(large.filename.encode(), content.index(b"PK\x01\x02"))
        content[place - 22 : place - 18] = struct.pack("<I", 1000)
        archive.write_bytes(content)
        with zipfile.ZipFile(archive) as opened:
            assert opened.getinfo(large.filename).file_size == 1000
        assert "truncated or damaged" in refused(archive)

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_methods_that_unpack_without_a_bound(self, archive: Path, method: int) -> None:
        packed(archive, method, a=np.zeros(2**20, np.uint8))
        assert "packed in a way" in refused(archive)

    def test_zeros_among_weights_are_read(self, archive: Path) -> None:
        head = np.zeros(2**22, np.uint8)
        packed(archive, zipfile.ZIP_DEFLATED, head=head)
        assert head.size > tensors.LARGEST_RATIO * archive.stat().st_size
        assert torch.equal(read_tensors(archive)["head"], torch.from_numpy(head))
        rest = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8)
        packed(archive, zipfile.ZIP_DEFLATED, head=np.zeros(MUCH, np.uint8), rest=rest)
        assert read_tensors(archive)["head"].shape == (MUCH,)

    def test_a_header_that_safetensors_would_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 2**31))
            file.truncate(2**31 + 8)  # sparse
        with within(1):
            assert "a header of 2,147,483,648 bytes" in refused(path)

    @pytest.mark.parametrize("numbers", [2**25, 2**45])
    def test_a_number_that_is_repeated(self, tmp_path: Path, numbers: int) -> None:
        torch.save({"a": torch.zeros(1).expand(numbers)}, tmp_path / "w.pth")
        assert f"repeats few numbers up to {4 * numbers:,} bytes" in refused(tmp_path / "w.pth")
        torch.save({"a": torch.ones(3).expand(5, 3)}, tmp_path / "w.pth")
        assert torch.equal(read_tensors(tmp_path / "w.pth")["a"], torch.ones(5, 3))

    @pytest.mark.filterwarnings("ignore")
    def test_tensors_without_numbers(self, tmp_path: Path) -> None:
        for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
            torch.save({"a": tensor}, tmp_path / "w.pth")
            assert "sparse or has no numbers" in refused(tmp_path / "w.pth")
