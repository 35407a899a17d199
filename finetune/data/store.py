"""Where decoded pixels live: on the device, in memory, or still in their files.

Images that fit are decoded once and kept as uint8; larger sets are decoded by workers in every
epoch, to the same pixels.
"""

# B batch, N images, C channels, H W pixels

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from finetune.data.scan import decoded_bytes, load_images, readable
from finetune.data.sources import Split
from finetune.data.workers import POLL_SECONDS, Desk
from finetune.errors import DataError

__all__ = ["Store", "open_store"]

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_SHARE = 0.4  # of the host's memory, over all processes on it
_DEVICE_SHARE = 0.25  # of what is free on the device
TIMEOUT_SECONDS = 900.0


class _Decoded(Dataset[Tensor | str]):
    """Decodes one image in a worker; a failure travels as text and must not kill the loader."""

    def __init__(self, split: Split, desk: Desk) -> None:
        self.split = split
        self.desk = desk

    def __getitem__(self, index: int) -> Tensor | str:
        with self.desk.at_work(int(index)):
            try:
                return _to_chw(self.split.read(int(index)))
            except DataError as error:
                return str(error)


def _to_chw(image: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def _packed(images: list[Tensor | str]) -> tuple[Tensor, list[torch.Size]] | str:
    """Collate a batch into one tensor: each one that a worker sends costs a file descriptor."""
    for image in images:
        if isinstance(image, str):
            return image
    whole = [image for image in images if isinstance(image, Tensor)]
    return torch.cat([image.reshape(-1) for image in whole]), [image.shape for image in whole]


def _unpacked(packed: tuple[Tensor, list[torch.Size]] | str) -> list[Tensor]:
    if isinstance(packed, str):
        raise DataError(packed)
    flat, shapes = packed
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Store:
    """Where a split's pixels live: one tensor, a list of tensors, or still in their files.

    Attributes:
        split: the labelled items, without those in quarantine.
        images: (N, H, W, C) uint8 when all have one size, a list of (C, H, W) when not, or None.
    """

    def __init__(
        self,
        split: Split,
        images: Tensor | list[Tensor] | None,
        *,
        workers: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.split = split
        self.images = images
        self.workers = workers
        self.timeout_seconds = timeout_seconds

    def read_all(
        self, batches: Iterable[NDArray[np.int64]]
    ) -> Generator[Tensor | list[Tensor], None, None]:
        """Yield the pixels of each batch of sample indices, in order.

        Raises: DataError if an image that lives in a file cannot be read any more, or crashes the
            decoder; SetupError if a worker was killed or hangs.
        """
        if isinstance(self.images, Tensor):
            for indices in batches:
                chosen = self.images[torch.from_numpy(indices).to(self.images.device)]
                yield chosen.permute(0, 3, 1, 2).contiguous()
        elif self.images is not None:
            for indices in batches:
                yield [self.images[i] for i in indices]
        else:
            desk = Desk(self.workers)
            loader = DataLoader(
                _Decoded(self.split, desk),
                batch_sampler=(indices.tolist() for indices in batches),
                num_workers=self.workers,
                collate_fn=_packed,
                worker_init_fn=desk.sit_down,
                prefetch_factor=2 if self.workers else None,
                timeout=POLL_SECONDS if self.workers else 0,
                # An iterator draws a seed when it is made: never from the global generator.
                generator=torch.Generator(),
            )
            read = desk.watched(
                loader, name_of=self.split.name_of, timeout_seconds=self.timeout_seconds
            )
            with contextlib.closing(read):
                yield from map(_unpacked, read)


def open_store(
    split: Split,
    *,
    keep: str,
    device: torch.device,
    workers: int,
    unreadable: Literal["stop", "quarantine"],
    local_processes: int,
    progress: bool,
    notice: Callable[[str], None],
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Store:
    """Decode a split once and keep it where there is room, or check it and leave it in its files.

    Args:
        split: labelled items.
        keep: "device", "memory", "none", or "auto" for the first that has room.
        device: where training runs.
        workers: threads that decode now, and processes that decode later if nothing is kept.
        unreadable: "stop" or "quarantine".
        local_processes: processes that share this host's memory.
        progress: show a progress bar.
        notice: told where the pixels went when that is not what was asked.
        timeout_seconds: for which a batch is waited for before a worker counts as hanging.
    Returns: the store.
    Raises: DataError listing every image that cannot be read.
    """
    needed = decoded_bytes(split)
    fits = needed < _host_memory() * _MEMORY_SHARE / local_processes
    if keep == "none" or (keep == "auto" and not fits):
        if keep == "auto":
            notice(
                f"{split.name}: about {needed / 2**30:.1f} GiB decoded do not fit in memory; "
                f"{workers} workers decode it in every epoch"
            )
        kept = readable(split, workers=workers, unreadable=unreadable, progress=progress)
        return Store(split.subset(kept), None, workers=workers, timeout_seconds=timeout_seconds)
    images, kept = load_images(split, workers=workers, unreadable=unreadable, progress=progress)
    if len(kept) < len(split):
        split = split.subset(kept)
    if isinstance(images, list):
        return Store(split, [_to_chw(image) for image in images])
    tensor = torch.from_numpy(images)
    if device.type == "cuda" and keep in ("auto", "device"):
        free, _ = torch.cuda.mem_get_info(device)
        if keep == "device" or tensor.numel() < free * _DEVICE_SHARE:
            tensor = tensor.to(device)
    return Store(split, tensor)


def _host_memory() -> int:
    """Bytes of memory that this machine, or the container around us, has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _CGROUP / name
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            memory = min(memory, int(text))
    return memory
