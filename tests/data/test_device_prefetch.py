"""Batches reach the device in order, two ahead, each in one copy, with unchanged pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_datasets import random_png, write_parquet
from torch import Tensor

from finetune.data import device_prefetch, pixel_file, pixel_store
from finetune.data.decode_split import DecodeOptions
from finetune.data.device_prefetch import PixelBatch, as_dense, collate_ragged, prefetch_to_device
from finetune.data.open_source import open_source
from finetune.data.pixel_cache import decode_to_memory
from finetune.data.pixel_store import PixelStore
from finetune.transforms.ragged import RaggedBatch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def images(number: int, *, same_size: bool) -> list[np.ndarray]:
    generator = np.random.default_rng(number)
    sizes = [(4, 3 if same_size else 3 + image) for image in range(4)]
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize("same_size", [True, False])
def test_prefetches_two_batches_in_order(same_size: bool) -> None:
    requested: list[int] = []

    def batches() -> Iterator[PixelBatch]:
        for number in range(5):
            requested.append(number)
            batch = collate_ragged(images(number, same_size=same_size), CPU)
            yield as_dense(batch, (4, 3) if same_size else None)
            batch.pixels.zero_()  # as if its buffer were reused

    for number, batch_on_device in enumerate(prefetch_to_device(batches(), CPU, num_prefetch=2)):
        assert requested == list(range(min(number + 3, 5)))
        assert isinstance(batch_on_device, torch.Tensor) == same_size
        for image, expected in zip(
            batch_on_device, images(number, same_size=same_size), strict=True
        ):
            np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), expected)
    assert requested == list(range(5))


def test_reads_no_batch_ahead_on_a_cpu() -> None:
    requested: list[int] = []

    def batches() -> Iterator[PixelBatch]:
        for number in range(3):
            requested.append(number)
            yield collate_ragged(images(number, same_size=False), CPU)

    for number, _ in enumerate(prefetch_to_device(batches(), CPU)):
        assert requested == list(range(number + 1))
    assert requested == [0, 1, 2]


def test_handles_no_batches_and_propagates_errors() -> None:
    assert list(prefetch_to_device([], CPU)) == []

    def broken() -> Iterator[PixelBatch]:
        yield collate_ragged(images(0, same_size=False), CPU)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(prefetch_to_device(broken(), CPU))


def test_as_dense_keeps_batches_of_differing_sizes_ragged() -> None:
    uniform, differing = (
        collate_ragged(images(0, same_size=same_size), CPU) for same_size in (True, False)
    )
    assert isinstance(as_dense(uniform, (4, 3)), torch.Tensor)
    assert isinstance(as_dense(uniform, None), RaggedBatch)
    assert isinstance(as_dense(differing, (4, 3)), RaggedBatch)


class _FakeGpu:
    """Stands in for a GPU: records each copy to it, and whether it came from pinned memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[bool] = []
        self._pinned: list[Tensor] = []
        to = torch.Tensor.to

        def copy(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args[0] != GPU:
                return to(tensor, *args, **kwargs)
            self.copied.append(self.is_pinned(tensor) and kwargs.get("non_blocking", False))
            return tensor.clone()

        for name in ("Stream", "Event", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: self)
        for module in (device_prefetch, pixel_store, pixel_file):
            monkeypatch.setattr(module, "allocate_host_memory", self.host_memory)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: self.is_pinned(tensor))
        monkeypatch.setattr(torch.Tensor, "to", copy)

    def host_memory(self, num_bytes: int, device: torch.device) -> Tensor:
        assert device == GPU
        self._pinned.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._pinned[-1]

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address in {pinned.untyped_storage().data_ptr() for pinned in self._pinned}

    def record(self, stream: _FakeGpu) -> None: ...

    def wait_event(self, event: _FakeGpu) -> None: ...


def build_store(storage: str, folder: Path, tmp_path: Path) -> PixelStore:
    """Return a store for a GPU that keeps its pixels in `storage`; two kinds have one size."""
    if storage == "streamed":
        images = [
            {"bytes": random_png(number, (5, 4 + number)), "path": None} for number in range(9)
        ]
        write_parquet(tmp_path / "train-0.parquet", [0] * 5 + [1] * 4, images=images)
        split = open_source(f"parquet:{tmp_path}", streaming=True).splits["train"]
        return PixelStore(split, None, num_workers=1, device=GPU)
    digits, photos = open_source("embedded:digits"), open_source(f"folder:{folder}")
    split = (digits if storage in ("memory", "file") else photos).splits["test"]
    if storage in ("workers", "none"):
        return PixelStore(split, None, num_workers=2 if storage == "workers" else 0, device=GPU)
    options = DecodeOptions(0, "stop", progress=False, timeout_seconds=60.0)
    images, _ = decode_to_memory(split, options, num_bytes=10**6)
    return PixelStore(split, images.as_tensor() if storage == "memory" else images, device=GPU)


@pytest.mark.parametrize("storage", ["memory", "file", "ragged", "streamed", "workers", "none"])
def test_copies_pixels_from_pinned_memory_in_one_copy(
    storage: str, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = build_store(storage, image_folder, tmp_path)
    gpu = _FakeGpu(monkeypatch)
    order = [np.arange(start, start + 5) for start in range(4)]
    for number, pixels in enumerate(store.read_batches(iter(order))):
        assert gpu.copied == [True] * min(number + 3, len(order))
        assert isinstance(pixels, RaggedBatch) == (storage not in ("memory", "file"))
        for index, image in zip(order[number].tolist(), pixels, strict=True):
            pixels_HWC = image.permute(1, 2, 0).numpy()
            np.testing.assert_array_equal(pixels_HWC, store.split.decode(index))
    assert gpu.copied == [True] * 4
