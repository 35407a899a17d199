"""models/weights/read.py: files that are damaged or would exhaust memory.

Files that would run code are tested in test_pickled_weights.py.
"""

from __future__ import annotations

import json
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
from logs import logged
from networks import write_timm_folder
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.models.weights import read as read_module
from finetune.models.weights.read import read_tensors
from finetune.models.weights.resolve import resolve_weights

ALLOWED_BYTES = 5 * 2**20  # of an archive of zeros; 64 MiB outside of the tests
MANY_BYTES = 6 * 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_timm_folder(tmp_path / "net")


def write_weights(path: Path, value: Any) -> None:
    if path.suffix == ".npz":
        np.savez(path, **value)
    else:
        torch.save(value, path)


def edit_header(path: Path, **changes: Any) -> None:
    """Change an entry of the header of a safetensors file; the tensors after it stay."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + size])
    entries["cls_token"].update(changes)
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


class TestDamage:
    @pytest.mark.parametrize("count", [5, 8, 200, -40])
    def test_truncated_files(self, folder: Path, count: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:count])
        with refused("weights.damaged", path.name):
            read_tensors(path)

    @pytest.mark.parametrize(
        "changes",
        [
            {"dtype": "X9"},
            {"shape": [1, 1, 999]},
            {"shape": [-1, 1, 1]},
            {"data_offsets": [0, 10**15]},
            {"data_offsets": ["a", "b"]},
        ],
    )
    def test_wrong_entries_of_a_safetensors_header(
        self, folder: Path, changes: dict[str, Any]
    ) -> None:
        edit_header(folder / "model.safetensors", **changes)
        with refused("weights.damaged", "model.safetensors"):
            read_tensors(folder / "model.safetensors")

    @pytest.mark.parametrize(
        "name, content, code",
        [
            ("w.safetensors", b"", "empty"),
            ("w.safetensors", b"these are my weights, honestly " * 9, "damaged"),
            ("w.safetensors", b"<!DOCTYPE html><html></html>", "wrong_format"),
            ("w.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "wrong_format"),
            ("w.safetensors", b"\xff" * 8 + b"{}", "damaged"),  # a header of exabytes
            ("w.safetensors", struct.pack("<Q", 2) + b"[]", "damaged"),
            ("w.safetensors", struct.pack("<Q", 2) + b"{}", "empty"),
            ("w.safetensors", struct.pack("<Q", 200_000) + b"[" * 200_000, "damaged"),
            ("w.pth", b"hello" * 99, "damaged"),
            ("w.tar", b"hello" * 200, "damaged"),
            ("w.bin", b"", "empty"),
            ("w.pth", b"PK\x05\x06" + bytes(18), "unsafe"),  # an empty archive
            ("w.npz", b"hello", "wrong_format"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_files_of_other_content(
        self, tmp_path: Path, name: str, content: bytes, code: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with refused(f"weights.{code}", name):
            read_tensors(tmp_path / name)

    @pytest.mark.parametrize(
        "name, value, code",
        [
            ("w.pt", {"a": 1}, "empty"),
            ("w.pt", [1, 2], "damaged"),
            ("w.pt", torch.zeros(2), "damaged"),
            ("w.npz", {}, "empty"),
            ("w.npz", {"a": np.array(["x"])}, "empty"),
        ],
    )
    def test_files_without_named_tensors(
        self, tmp_path: Path, name: str, value: Any, code: str
    ) -> None:
        write_weights(tmp_path / name, value)
        with refused(f"weights.{code}", name):
            read_tensors(tmp_path / name)

    @pytest.mark.parametrize(
        "name, value", [("w.pt", {"a": torch.zeros(999)}), ("w.npz", {"a": np.zeros(999)})]
    )
    def test_half_an_archive(self, tmp_path: Path, name: str, value: Any) -> None:
        write_weights(tmp_path / name, value)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with refused("weights.damaged", name):
            read_tensors(tmp_path / name)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_rejects_nan_and_infinity(self, folder: Path, value: float) -> None:
        state = load_file(folder / "model.safetensors")
        state["blocks.0.attn.qkv.bias"][[1, 4]] = value
        save_file(state, folder / "model.safetensors")
        with refused("weights.not_finite", "'blocks.0.attn.qkv.bias'", " 2 "):
            resolve_weights(str(folder))

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
    def test_rejects_quantized_weights(self, folder: Path, dtype: torch.dtype) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["head.weight"] = tensors["head.weight"].to(dtype)
        save_file(tensors, path)
        with refused("weights.unsupported", path.name, "head.weight", dtype):
            read_tensors(path)

    def test_reads_pickled_weights(self, folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save({"state_dict": state}, folder / "pytorch_model.bin")
        weights = resolve_weights(str(folder))
        assert weights.state is not None
        assert torch.equal(weights.state["head.weight"], state["head.weight"])

    def test_names_the_entry_that_is_used(self, tmp_path: Path) -> None:
        states = {
            "state_dict": {"w": torch.zeros(2)},
            "state_dict_ema": {"module.w": torch.ones(2)},
        }
        torch.save({**states, "epoch": 3}, tmp_path / "a.pth")
        with logged() as messages:
            tensors = read_tensors(tmp_path / "a.pth")
        assert torch.equal(tensors["w"], torch.ones(2))
        assert messages == [
            "a.pth: has weights in state_dict_ema, state_dict; state_dict_ema is used"
        ]

    def test_rejects_a_tensor_with_and_without_a_prefix(self, tmp_path: Path) -> None:
        torch.save({"w": torch.zeros(2), "module.w": torch.ones(2)}, tmp_path / "a.pth")
        with refused("weights.other_names", "a.pth", "module."):
            read_tensors(tmp_path / "a.pth")

    def test_rejects_a_symlink_to_itself(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.symlink_to(path)
        with refused("weights.unreadable", path.name):
            read_tensors(path)


@contextmanager
def limited_memory(max_mebibytes: int) -> Iterator[None]:
    """Fail if Python and NumPy allocate more than this meanwhile."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert peak < max_mebibytes, f"{peak:.0f} MiB"


def write_compressed(path: Path, method: int, **arrays: np.ndarray) -> Path:
    """Write weights as NumPy or torch does, but with another compression method."""
    uncompressed = path.with_name("plain")
    if path.suffix == ".npz":
        with uncompressed.open("wb") as file:
            np.savez(file, **arrays)
    else:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, uncompressed)
    with zipfile.ZipFile(uncompressed) as source, zipfile.ZipFile(path, "w", method) as target:
        for member in source.infolist():
            with source.open(member) as reader, target.open(member.filename, "w") as writer:
                shutil.copyfileobj(reader, writer, 2**20)
    uncompressed.unlink()
    return path


@pytest.fixture(params=["w.npz", "w.pth"])
def archive_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


class TestMemoryBombs:
    """Small files that would use an enormous amount of memory."""

    @pytest.fixture(autouse=True)
    def small_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert 10 * ALLOWED_BYTES < read_module.ALWAYS_ALLOWED_BYTES < 100 * 2**20
        monkeypatch.setattr(read_module, "ALWAYS_ALLOWED_BYTES", ALLOWED_BYTES)

    def test_does_not_unpack_archives_of_extreme_ratio(
        self, archive_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_compressed(archive_path, zipfile.ZIP_DEFLATED, a=np.zeros(MANY_BYTES, np.uint8))
        assert archive_path.stat().st_size < MANY_BYTES / 500
        calls: list[object] = []
        monkeypatch.setattr(zipfile.ZipFile, "open", lambda *args: calls.append(args))
        monkeypatch.setattr(torch, "load", lambda *a, **kw: calls.append(a))
        with (
            limited_memory(1),
            refused("weights.too_large", archive_path.name, f"{archive_path.stat().st_size:,}"),
        ):
            read_tensors(archive_path)
        assert calls == []

    def test_counts_overlapping_members_separately(self, tmp_path: Path) -> None:
        path = write_compressed(
            tmp_path / "w.npz", zipfile.ZIP_DEFLATED, a=np.zeros(2**20, np.uint8)
        )
        content = path.read_bytes()
        start, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
        directory_end = struct.pack("<4H2I", 0, 0, 200, 200, 200 * (end - start), start)
        forged = (
            content[:start] + 200 * content[start:end] + b"PK\x05\x06" + directory_end + b"\0\0"
        )
        path.write_bytes(forged)
        with refused("weights.too_large", f"{200 * (2**20 + 128):,} bytes"):
            read_tensors(path)

    def test_a_wrong_size_in_the_directory(self, archive_path: Path) -> None:
        """Unpacking stops at the size in the zip directory."""
        # keeps the compression ratio low
        random_values = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8)
        write_compressed(
            archive_path, zipfile.ZIP_DEFLATED, a=np.zeros(MANY_BYTES, np.uint8), b=random_values
        )
        content = bytearray(archive_path.read_bytes())
        with zipfile.ZipFile(archive_path) as opened:
            (large_member,) = [info for info in opened.infolist() if info.file_size >= MANY_BYTES]
        name_offset = content.index(large_member.filename.encode(), content.index(b"PK\x01\x02"))
        content[name_offset - 22 : name_offset - 18] = struct.pack("<I", 1000)
        archive_path.write_bytes(content)
        with zipfile.ZipFile(archive_path) as opened:
            assert opened.getinfo(large_member.filename).file_size == 1000
        with refused("weights.damaged", archive_path.name):
            read_tensors(archive_path)

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_rejects_unbounded_compression_methods(self, archive_path: Path, method: int) -> None:
        write_compressed(archive_path, method, a=np.zeros(2**20, np.uint8))
        with refused("weights.wrong_format", archive_path.name):
            read_tensors(archive_path)

    def test_reads_zeros_among_weights(self, archive_path: Path) -> None:
        head = np.zeros(2**22, np.uint8)
        write_compressed(archive_path, zipfile.ZIP_DEFLATED, head=head)
        assert head.size > read_module.MAX_UNPACK_RATIO * archive_path.stat().st_size
        assert torch.equal(read_tensors(archive_path)["head"], torch.from_numpy(head))
        random_values = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8)
        write_compressed(
            archive_path,
            zipfile.ZIP_DEFLATED,
            head=np.zeros(MANY_BYTES, np.uint8),
            random_values=random_values,
        )
        assert read_tensors(archive_path)["head"].shape == (MANY_BYTES,)

    def test_rejects_a_huge_safetensors_header(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 2**31))
            file.truncate(2**31 + 8)  # sparse
        with limited_memory(1), refused("weights.damaged", path.name):
            read_tensors(path)

    @pytest.mark.parametrize("num_values", [2**25, 2**45])
    def test_rejects_a_huge_expanded_tensor(self, tmp_path: Path, num_values: int) -> None:
        torch.save({"a": torch.zeros(1).expand(num_values)}, tmp_path / "w.pth")
        with refused("weights.too_large", "'a'", f"{4 * num_values:,} bytes"):
            read_tensors(tmp_path / "w.pth")
        torch.save({"a": torch.ones(3).expand(5, 3)}, tmp_path / "w.pth")
        assert torch.equal(read_tensors(tmp_path / "w.pth")["a"], torch.ones(5, 3))

    @pytest.mark.filterwarnings("ignore")
    def test_rejects_sparse_and_meta_tensors(self, tmp_path: Path) -> None:
        for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
            torch.save({"a": tensor}, tmp_path / "w.pth")
            with refused("weights.wrong_format", "'a'"):
                read_tensors(tmp_path / "w.pth")
