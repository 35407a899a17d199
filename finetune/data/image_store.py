"""The place of decoded pixels: on the device, in memory, in a file; or nowhere, decoded as needed.

Images are decoded once and kept as uint8; sets for which there is no room are decoded by workers in
every epoch, to the same pixels.
"""

# B batch, N images, C channels, H W pixels

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.decode_all import (
    SMALL_BYTES,
    TIMEOUT_SECONDS,
    decoded_bytes,
    expected_size,
    readable,
)
from finetune.data.device_copy import Pixels, copy_ahead, host_memory, of_one_size, pack
from finetune.data.image_cache import Decoded, How, cached_images, decode_images
from finetune.data.pixel_file import Images
from finetune.data.shared_memory import Put, Slots
from finetune.data.source import Split
from finetune.data.streaming.prefetch import is_streamed, prefetch_of
from finetune.data.worker_pool import WorkerStatus, spread
from finetune.errors import DataError
from finetune.files import cache_folder
from finetune.processes import num_cores, total_bytes
from finetune.text import byte_size
from finetune.transforms.ragged import Ragged
from finetune.transforms.random import on_device

__all__ = ["Store", "num_workers", "open_store"]

_MEMORY_SHARE = 0.4  # of the host's memory, over all processes on it
_DEVICE_SHARE = 0.25  # of what is free on the device
_AHEAD = 3  # batches for each worker: it need not wait for another whose batch comes first
_SPREAD_OF_SIZES = 4  # how much more than the mean a batch may take; memory is only promised
_MOST = 32  # processes that decode at once
_REMEDY = (
    "finetune data scan lists all such images; mend them, or leave them out with "
    "data.unreadable: quarantine, and begin anew"
)


class Store:
    """A split with its pixels: one tensor, images in a file, or none that are decoded yet.

    Attributes:
        split: the labelled items, without those in quarantine.
        images: (N, H, W, C) uint8 on the device or in memory; or a file that is read; or None.
            Never to be written to.
        device: where batches are brought.
        size: (H, W) that images have which are not kept, by a sample; None where they differ.
    """

    def __init__(
        self,
        split: Split,
        images: Tensor | Images | None,
        *,
        workers: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
        image_bytes: int = 2**20,
        device: torch.device | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        self.split = split
        self.images = images
        self.device = device or (images.device if images is not None else torch.device("cpu"))
        self.workers = workers
        self.timeout_seconds = timeout_seconds
        self.image_bytes = image_bytes  # about as many as a decoded image takes
        self.size = size
        self.prefetch = prefetch_of(split, workers=workers, timeout_seconds=timeout_seconds)

    def read_all(self, batches: Iterable[NDArray[np.int64]]) -> Generator[Pixels, None, None]:
        """Yield the pixels of each batch of sample indices on the device, in order.

        They may be gone when the next batch is asked for. They are (B, 3, H, W) if all images of
        the split have one size; of images that are not kept, if those of the batch do.

        Raises: DataError if an image that lives in a file cannot be read any more, or crashes the
            decoder; SetupError if a worker was killed or hangs.
        """
        images = self.images
        if isinstance(images, Tensor) and images.device.type == self.device.type:
            for indices in batches:
                chosen = images[on_device(indices, images.device)]
                yield chosen.permute(0, 3, 1, 2).contiguous()
            return
        with contextlib.closing(self._on_host(batches)) as read:
            yield from copy_ahead(read, self.device)

    def _on_host(self, batches: Iterable[NDArray[np.int64]]) -> Generator[Pixels, None, None]:
        """Yield the pixels of each batch; they may be gone when the next one is asked for."""
        if isinstance(self.images, Tensor):
            for indices in batches:
                shape = len(indices), *self.images.shape[1:]
                chosen = host_memory(math.prod(shape), self.device).view(shape)
                index = torch.from_numpy(indices)
                yield torch.index_select(self.images, 0, index, out=chosen)
        elif self.images is not None:
            for indices in batches:
                yield self.images.batch(indices, self.device)
        elif self.prefetch is not None:
            with contextlib.closing(self.prefetch.read_all(batches)) as read_ahead:
                for images in read_ahead:
                    yield pack([image.permute(1, 2, 0).numpy() for image in images], self.device)
        elif self.workers:
            with contextlib.closing(self._from_workers(batches)) as read:
                for packed in read:
                    yield of_one_size(packed, self.size)
        else:
            for indices in batches:
                try:
                    decoded = [self.split.read(index) for index in indices.tolist()]
                except DataError as error:
                    raise DataError(f"{error}; {_REMEDY}", code=error.code) from error
                yield of_one_size(pack(decoded, self.device), self.size)

    def _from_workers(self, batches: Iterable[NDArray[np.int64]]) -> Generator[Ragged, None, None]:
        """Batches that worker processes decode, some for each of them ahead.

        They are there until the next batch is asked for.
        """
        coming = iter(batches)
        first = next(coming, None)
        if first is None:
            return
        status = WorkerStatus(self.workers)
        # One more than are under way: the one that is looked at. A batch may be one image larger.
        largest = (len(first) + 1) * self.image_bytes * _SPREAD_OF_SIZES
        slots = Slots(self.workers * _AHEAD + 1, largest)

        def decode(index: int, room: NDArray[np.uint8]) -> NDArray[np.uint8]:
            with status.decoding(index):
                return self.split.read(index, room)

        def decode_all(task: tuple[int, NDArray[np.int64]]) -> tuple[int, Put | str]:
            slot, indices = task
            try:
                reads = (functools.partial(decode, index) for index in indices.tolist())
                return slot, slots.put(slot, reads)
            except DataError as error:  # must not kill the worker
                return slot, str(error)

        tasks = zip(itertools.cycle(range(slots.number)), itertools.chain([first], coming))
        read = spread(
            decode_all,
            tasks,
            status=status,
            workers=self.workers,
            name_of=self.split.name_of,
            timeout_seconds=self.timeout_seconds,
            ahead=_AHEAD,
        )
        with contextlib.closing(read):
            for slot, put in read:
                if isinstance(put, str):
                    raise DataError(f"{put}; {_REMEDY}", code="data.unreadable")
                yield slots.take(slot, put)


def num_workers(wanted: int | Literal["auto"], local_processes: int) -> int:
    """Return the number of decoding processes: `auto` shares out the host's cores.

    Args:
        local_processes: of training, on this host.
    """
    if wanted != "auto":
        return wanted
    return min(max(num_cores() // local_processes, 1), _MOST)


def open_store(
    split: Split,
    *,
    keep: str,
    device: torch.device,
    workers: int | Literal["auto"],
    unreadable: Literal["stop", "quarantine"],
    local_processes: int,
    progress: bool,
    notice: Callable[[str], None],
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Store:
    """Decode a split once and keep it where there is room, or check it and leave it in its files.

    Args:
        keep: "device" or "memory" (both kept on disk, too, and read from there, unless the set is
            small or the disk has no room), "none", or "auto" for the first that has room.
        workers: processes that decode, or "auto", see `num_workers`; a set that is kept is decoded
            by at least as many as there are cores. 0 for none.
        unreadable: "stop" or "quarantine".
        local_processes: processes that share this host's memory.
        notice: told if the pixels are kept in another place than `keep` says.
        timeout_seconds: for which a batch is waited for before a worker counts as hanging.
    Returns: the store.
    Raises: DataError listing every image that cannot be read, or if there is no memory for what is
        to be kept; SetupError if a process that decodes was killed or hangs.
    """
    workers = num_workers(workers, local_processes)
    if is_streamed(split):  # what cannot be read shows when it is read
        return Store(split, None, workers=workers, timeout_seconds=timeout_seconds, device=device)
    needed, memory = decoded_bytes(split), total_bytes()
    size = f"{split.name}: about {byte_size(needed)} decoded"
    how = How(workers, unreadable, progress, timeout_seconds)
    decoded: Decoded | str = ""
    if keep != "none" and needed >= SMALL_BYTES:
        everybody = min(max(workers * local_processes, num_cores()), _MOST) if workers else 0
        by_all = dataclasses.replace(how, workers=everybody)
        decoded = cached_images(split, by_all, num_bytes=needed, tell=notice)
    if isinstance(decoded, str):
        unkept = f" are not kept on disk ({decoded})" if decoded else ""
        if keep == "auto" and needed >= memory * _MEMORY_SHARE / local_processes:
            both = f"{unkept} and" if unkept else ""
            notice(f"{size}{both} do not fit in memory; {workers} workers decode it in every epoch")
            keep = "none"
        elif unkept:
            notice(f"{size}{unkept}, so the next run decodes them again")
        if keep == "none":
            return _undecoded(split, how, num_bytes=needed, device=device)
        if needed > memory:
            raise DataError(f"{size} do not fit in memory; set data.keep: none", code="data.memory")
        decoded = decode_images(split, how, num_bytes=needed)
    elif needed >= memory * _MEMORY_SHARE:
        place = cache_folder("pixels")
        notice(f"{size} do not fit in memory; they are read from {place} as needed")
    images, indices = decoded
    split = split.subset(indices) if len(indices) < len(split) else split
    return Store(split, _placed(images, keep, device), device=device)


def _undecoded(split: Split, how: How, *, num_bytes: int, device: torch.device) -> Store:
    """A store that keeps nothing; what cannot be read stops the run when it is needed.

    To leave them out, all are decoded once: an epoch's length is known before its first step.
    """
    image_bytes = -(-num_bytes // max(len(split), 1))
    if how.unreadable == "quarantine":
        split = split.subset(readable(split, **dataclasses.asdict(how)))
    return Store(
        split,
        None,
        workers=how.workers,
        timeout_seconds=how.timeout_seconds,
        image_bytes=image_bytes,
        device=device,
        size=expected_size(split),
    )


def _placed(images: Images, keep: str, device: torch.device) -> Tensor | Images:
    """Images as a store has them, on the device where they are to be there or there is room."""
    if images.size is None:
        return images
    if device.type == "cuda" and keep in ("auto", "device"):
        free, _ = torch.cuda.mem_get_info(device)
        if keep == "device" or images.num_bytes < free * _DEVICE_SHARE:
            return images.to(device)
    return images.whole() if images.is_in_memory else images
