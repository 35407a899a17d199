"""Batches come to the device in order, two ahead, each in one copy, with the pixels they had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import make_parquet, png
from torch import Tensor

from finetune.data import device_copy, image_store, pixel_file
from finetune.data.device_copy import Pixels, copy_ahead, of_one_size, pack
from finetune.data.image_cache import How, decode_images
from finetune.data.image_store import Store
from finetune.data.source import open_source
from finetune.transforms.ragged import Ragged

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def images(number: int, *, alike: bool) -> list[np.ndarray]:
    generator = np.random.default_rng(number)
    sizes = [(4, 3 if alike else 3 + image) for image in range(4)]
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize("alike", [True, False])
def test_batches_come_in_order_two_ahead(alike: bool) -> None:
    asked: list[int] = []

    def batches() -> Iterator[Pixels]:
        for number in range(5):
            asked.append(number)
            batch = pack(images(number, alike=alike), CPU)
            yield of_one_size(batch, (4, 3) if alike else None)
            batch.pixels.zero_()  # as a slot that is used again

    for number, found in enumerate(copy_ahead(batches(), CPU, ahead=2)):
        assert asked == list(range(min(number + 3, 5)))
        assert isinstance(found, torch.Tensor) == alike
        for mine, other in zip(found, images(number, alike=alike), strict=True):
            np.testing.assert_array_equal(mine.permute(1, 2, 0).numpy(), other)
    assert asked == list(range(5))


def test_on_a_cpu_nothing_is_read_before_it_is_needed() -> None:
    asked: list[int] = []

    def batches() -> Iterator[Pixels]:
        for number in range(3):
            asked.append(number)
            yield pack(images(number, alike=False), CPU)

    for number, _ in enumerate(copy_ahead(batches(), CPU)):
        assert asked == list(range(number + 1))
    assert asked == [0, 1, 2]


def test_nothing_stays_nothing_and_an_error_comes_through() -> None:
    assert list(copy_ahead([], CPU)) == []

    def broken() -> Iterator[Pixels]:
        yield pack(images(0, alike=False), CPU)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(copy_ahead(broken(), CPU))


def test_a_size_that_one_image_lost_is_not_taken_for_granted() -> None:
    alike, differing = (pack(images(0, alike=each), CPU) for each in (True, False))
    assert isinstance(of_one_size(alike, (4, 3)), torch.Tensor)
    assert isinstance(of_one_size(alike, None), Ragged)
    assert isinstance(of_one_size(differing, (4, 3)), Ragged)


class _Gpu:
    """In the place of a GPU: notes what is copied to it, and what of that lies in pinned memory."""

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
        for module in (device_copy, image_store, pixel_file):
            monkeypatch.setattr(module, "host_memory", self.host_memory)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: self.is_pinned(tensor))
        monkeypatch.setattr(torch.Tensor, "to", copy)

    def host_memory(self, num_bytes: int, device: torch.device) -> Tensor:
        assert device == GPU
        self._pinned.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._pinned[-1]

    def is_pinned(self, tensor: Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return place in {each.untyped_storage().data_ptr() for each in self._pinned}

    def record(self, stream: _Gpu) -> None: ...

    def wait_event(self, event: _Gpu) -> None: ...


def branch_of(branch: str, folder: Path, tmp_path: Path) -> Store:
    """A store for a GPU whose pixels lie where the name says; two of them have one size."""
    if branch == "streamed":
        images = [{"bytes": png(number, (5, 4 + number)), "path": None} for number in range(9)]
        make_parquet(tmp_path / "train-0.parquet", [0] * 5 + [1] * 4, images=images)
        split = open_source(f"parquet:{tmp_path}", streaming=True).splits["train"]
        return Store(split, None, workers=1, device=GPU)
    digits, photos = open_source("embedded:digits"), open_source(f"folder:{folder}")
    split = (digits if branch in ("memory", "file") else photos).splits["test"]
    if branch in ("workers", "none"):
        return Store(split, None, workers=2 if branch == "workers" else 0, device=GPU)
    how = How(0, "stop", progress=False, timeout_seconds=60.0)
    images, _ = decode_images(split, how, num_bytes=10**6)
    return Store(split, images.whole() if branch == "memory" else images, device=GPU)


@pytest.mark.parametrize("branch", ["memory", "file", "ragged", "streamed", "workers", "none"])
def test_pixels_come_from_pinned_memory_in_one_copy(
    branch: str, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = branch_of(branch, image_folder, tmp_path)
    gpu = _Gpu(monkeypatch)
    order = [np.arange(start, start + 5) for start in range(4)]
    for number, pixels in enumerate(store.read_all(iter(order))):
        assert gpu.copied == [True] * min(number + 3, len(order))
        assert isinstance(pixels, Ragged) == (branch not in ("memory", "file"))
        for index, image in zip(order[number].tolist(), pixels, strict=True):
            found = image.permute(1, 2, 0).numpy()
            np.testing.assert_array_equal(found, store.split.read(index))
    assert gpu.copied == [True] * 4
