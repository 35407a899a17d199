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
from networks import write_timm_folder
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.models.weights import read as tensors
from finetune.models.weights.read import read_tensors
from finetune.models.weights.resolve import resolve_weights

MUCH = 80 * 2**20  # bytes, more than is read of any archive that is nothing but zeros


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_timm_folder(tmp_path / "net")


class Runs:
    """A pickle that would create a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


class TestDamage:
    """Beside the rows of tests/faults/test_bad_weights.py, which go through the command line."""

    @pytest.mark.parametrize("count", [5, 8, 200, -40])
    def test_truncation(self, folder: Path, count: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:count])
        with refused("weights.damaged", path.name):
            read_tensors(path)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_numbers_that_are_none(self, folder: Path, value: float) -> None:
        state = load_file(folder / "model.safetensors")
        state["blocks.0.attn.qkv.bias"][[1, 4]] = value
        save_file(state, folder / "model.safetensors")
        with refused("weights.not_finite", "'blocks.0.attn.qkv.bias'", " 2 "):
            resolve_weights(str(folder))

    def test_pickled_weights_are_read_without_running_them(self, folder: Path) -> None:
        own = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save({"state_dict": own}, folder / "pytorch_model.bin")
        weights = resolve_weights(str(folder))
        assert weights.state is not None
        assert torch.equal(weights.state["head.weight"], own["head.weight"])

    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    @pytest.mark.parametrize("kind", ["zipped", "legacy", "plain"])
    def test_pickled_code_is_refused(self, tmp_path: Path, kind: str) -> None:
        target, path = tmp_path / "target", tmp_path / "w.bin"
        if kind == "plain":
            path.write_bytes(pickle.dumps(Runs(target)))
        else:
            zipped = kind == "zipped"
            torch.save({"x": Runs(target)}, path, _use_new_zipfile_serialization=zipped)
        with refused("weights.unsafe", "w.bin", ".safetensors") as caught:
            read_tensors(path)
        assert "weights_only" not in str(caught.value)
        assert not target.exists()

    def test_archives_of_objects_are_refused(self, tmp_path: Path) -> None:
        target = tmp_path / "target"
        np.savez(tmp_path / "code.npz", x=np.array([Runs(target)], dtype=object))
        with refused("weights.unsafe", "code.npz") as caught:
            read_tensors(tmp_path / "code.npz")
        assert "allow_pickle" not in str(caught.value)
        assert not target.exists()

    def test_archives_that_are_none(self, tmp_path: Path) -> None:
        (tmp_path / "x.npz").write_text("plain text")
        with refused("weights.wrong_format", "x.npz") as caught:
            read_tensors(tmp_path / "x.npz")
        assert "pickle" not in str(caught.value)

    def test_a_link_to_itself(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.symlink_to(path)
        with refused("weights.unreadable", path.name):
            read_tensors(path)


@contextmanager
def within(mebibytes: int) -> Iterator[None]:
    """Bound the memory that Python and NumPy allocate meanwhile."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert peak < mebibytes, f"{peak:.0f} MiB"


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
        monkeypatch.setattr(zipfile.ZipFile, "open", lambda *args: unpacked.append(args))
        monkeypatch.setattr(tensors, "load_state_dict", lambda *a, **kw: unpacked.append(a))
        with within(1), refused("weights.too_large", archive.name, f"{archive.stat().st_size:,}"):
            read_tensors(archive)
        assert unpacked == []

    def test_members_that_are_the_same_bytes_count_each(self, tmp_path: Path) -> None:
        path = packed(tmp_path / "w.npz", zipfile.ZIP_DEFLATED, a=np.zeros(2**20, np.uint8))
        content = path.read_bytes()
        start, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
        tail = struct.pack("<4H2I", 0, 0, 200, 200, 200 * (end - start), start)
        whole = content[:start] + 200 * content[start:end] + b"PK\x05\x06" + tail + b"\0\0"
        path.write_bytes(whole)
        with refused("weights.too_large", f"{200 * (2**20 + 128):,} bytes"):
            read_tensors(path)

    def test_a_size_that_lies(self, archive: Path) -> None:
        """Unpacking ends at the size in the directory."""
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
        with refused("weights.damaged", archive.name):
            read_tensors(archive)

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_methods_that_unpack_without_a_bound(self, archive: Path, method: int) -> None:
        packed(archive, method, a=np.zeros(2**20, np.uint8))
        with refused("weights.wrong_format", archive.name):
            read_tensors(archive)

    def test_zeros_among_weights_are_read(self, archive: Path) -> None:
        head = np.zeros(2**22, np.uint8)
        packed(archive, zipfile.ZIP_DEFLATED, head=head)
        assert head.size > tensors.MAX_UNPACK_RATIO * archive.stat().st_size
        assert torch.equal(read_tensors(archive)["head"], torch.from_numpy(head))
        rest = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8)
        packed(archive, zipfile.ZIP_DEFLATED, head=np.zeros(MUCH, np.uint8), rest=rest)
        assert read_tensors(archive)["head"].shape == (MUCH,)

    def test_a_header_that_safetensors_would_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 2**31))
            file.truncate(2**31 + 8)  # sparse
        with within(1), refused("weights.damaged", path.name):
            read_tensors(path)

    @pytest.mark.parametrize("numbers", [2**25, 2**45])
    def test_a_number_that_is_repeated(self, tmp_path: Path, numbers: int) -> None:
        torch.save({"a": torch.zeros(1).expand(numbers)}, tmp_path / "w.pth")
        with refused("weights.too_large", "'a'", f"{4 * numbers:,} bytes"):
            read_tensors(tmp_path / "w.pth")
        torch.save({"a": torch.ones(3).expand(5, 3)}, tmp_path / "w.pth")
        assert torch.equal(read_tensors(tmp_path / "w.pth")["a"], torch.ones(5, 3))

    @pytest.mark.filterwarnings("ignore")
    def test_tensors_without_numbers(self, tmp_path: Path) -> None:
        for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
            torch.save({"a": tensor}, tmp_path / "w.pth")
            with refused("weights.wrong_format", "'a'"):
                read_tensors(tmp_path / "w.pth")
