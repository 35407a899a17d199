"""Where decoded images are kept: GPU, RAM, cache file, or not at all.

Images are decoded once and kept as uint8. If a split does not fit anywhere, workers decode it in
every epoch, to the same pixels.
"""

# B batch, N images, C channels, H W pixels

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.cache import cache_path
from finetune.data.decode_split import (
    SMALL_SPLIT_BYTES,
    TIMEOUT_SECONDS,
    DecodedImage,
    DecodeOptions,
    decode_batches,
    estimate_common_size,
    estimate_decoded_bytes,
    readable_indices,
)
from finetune.data.device_prefetch import (
    PixelBatch,
    allocate_host_memory,
    as_dense,
    collate_ragged,
    prefetch_to_device,
)
from finetune.data.pixel_cache import DecodedSplit, decode_to_memory, decode_with_cache
from finetune.data.pixel_file import DecodedImages
from finetune.data.source import Split
from finetune.data.streaming.prefetch import build_prefetcher
from finetune.errors import DataError
from finetune.formatting import format_bytes
from finetune.host_resources import num_cores, total_memory_bytes
from finetune.log import logger
from finetune.transforms.sample_rng import to_device

__all__ = ["PixelStore", "build_pixel_store", "resolve_num_workers"]

_MAX_MEMORY_FRACTION = 0.4  # maximum share of the host's memory, for all its processes together
_MAX_DEVICE_FRACTION = 0.25  # maximum share of the device's free memory
_MAX_DECODE_WORKERS = 32
_UNREADABLE_HINT = (
    "finetune data scan lists all such images; fix them, or leave them out with "
    "data.unreadable=quarantine, and start again"
)


class PixelStore:
    """A split with its decoded images: in a tensor, in a cache file, or decoded on demand.

    Attributes:
        split: the labeled images, without quarantined ones.
        images: (N, H, W, C) uint8 on the device or in memory; or `DecodedImages` in a file or in
            memory; or None if images are decoded on demand. Read-only.
        device: device of the batches.
        common_size: (H, W) of images decoded on demand, from a sample; None if sizes differ.
        checksums: (N,) uint32, crc32 of the pixels of each image; None if decoded on demand.
    """

    def __init__(
        self,
        split: Split,
        images: Tensor | DecodedImages | None,
        *,
        num_workers: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
        bytes_per_image: int = 2**20,
        device: torch.device | None = None,
        common_size: tuple[int, int] | None = None,
        checksums: NDArray[np.uint32] | None = None,
    ) -> None:
        self.split = split
        self.images = images
        self.checksums = checksums
        self.device = device or (images.device if images is not None else torch.device("cpu"))
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self.bytes_per_image = bytes_per_image  # estimated size of a decoded image
        self.common_size = common_size
        self.prefetcher = build_prefetcher(
            split, num_workers=num_workers, timeout_seconds=timeout_seconds
        )

    def read_image(self, index: int) -> Tensor:
        """Return one image that was decoded before, (H, W, C) in host memory."""
        assert self.images is not None
        if isinstance(self.images, Tensor):
            return self.images[index].cpu()
        return self.images[index].permute(1, 2, 0)

    def read_batches(
        self, batches: Iterable[NDArray[np.int64]]
    ) -> Generator[PixelBatch, None, None]:
        """Yield the pixels of each batch of sample indices on the device, in order.

        A batch is valid until the next one is requested. It is (B, 3, H, W) if all images of the
        split have one size (for images decoded on demand: all images of the batch), else a
        RaggedBatch.

        Raises: DataError if an image file can no longer be read, or crashes the decoder;
            SetupError if a worker was killed or hangs.
        """
        images = self.images
        if isinstance(images, Tensor) and images.device.type == self.device.type:
            for indices in batches:
                pixels = images[to_device(indices, images.device)]
                yield pixels.permute(0, 3, 1, 2).contiguous()
            return
        with contextlib.closing(self._host_batches(batches)) as host_batches:
            yield from prefetch_to_device(host_batches, self.device)

    def _host_batches(
        self, batches: Iterable[NDArray[np.int64]]
    ) -> Generator[PixelBatch, None, None]:
        """Yield the pixels of each batch in host memory, valid until the next is requested."""
        if isinstance(self.images, Tensor):
            for indices in batches:
                shape = len(indices), *self.images.shape[1:]
                pixels = allocate_host_memory(math.prod(shape), self.device).view(shape)
                index = torch.from_numpy(indices)
                yield torch.index_select(self.images, 0, index, out=pixels)
        elif self.images is not None:
            for indices in batches:
                yield self.images.read_batch(indices, self.device)
        elif self.prefetcher is not None:
            with contextlib.closing(self.prefetcher.read_batches(batches)) as prefetched:
                for images in prefetched:
                    yield collate_ragged(
                        [image.permute(1, 2, 0).numpy() for image in images], self.device
                    )
        else:
            decoded = decode_batches(
                self.split,
                batches,
                num_workers=self.num_workers,
                timeout_seconds=self.timeout_seconds,
                bytes_per_image=self.bytes_per_image,
            )
            with contextlib.closing(decoded):
                for results in decoded:
                    arrays = [_pixels_of(result) for result in results]
                    yield as_dense(collate_ragged(arrays, self.device), self.common_size)


def _pixels_of(image: DecodedImage | DataError) -> NDArray[np.uint8]:
    """Return the pixels, (H, W, 3). Raises: DataError if the image is unreadable."""
    if isinstance(image, DataError):
        if image.code == "data.changed":
            raise image
        raise DataError(f"{image}; {_UNREADABLE_HINT}", code=image.code) from image
    return image.pixels


def resolve_num_workers(workers: int | Literal["auto"], local_world_size: int) -> int:
    """Return the number of decoding workers; "auto" divides the host's cores among its ranks.

    Args:
        workers: the number, or "auto".
        local_world_size: training processes on this host.
    """
    if workers != "auto":
        return workers
    return min(max(num_cores() // local_world_size, 1), _MAX_DECODE_WORKERS)


def build_pixel_store(
    split: Split,
    *,
    keep: str,
    device: torch.device,
    num_workers: int | Literal["auto"],
    unreadable: Literal["stop", "quarantine"],
    local_world_size: int,
    progress: bool,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> PixelStore:
    """Decode a split once and keep it where it fits, else decode it on demand.

    Args:
        keep: where to keep the images: "device", "memory", "none" (decode on demand), or "auto" for
            the first that fits. All but "none" also use a cache file, unless the split is small or
            does not fit on the disk.
        num_workers: decoding processes, 0 to decode in this process, or "auto" (see
            `resolve_num_workers`). If not 0, at least one process per core, up to a limit,
            decodes the images for a cache file.
        unreadable: see `DecodeOptions`.
        local_world_size: processes that share this host's memory.
        timeout_seconds: longest wait for a batch before a worker counts as hanging.
    Raises: DataError listing all unreadable images (if `unreadable` is "stop" and images are not
        decoded on demand), for an image that changes meanwhile, or if the images do not fit in
        memory but `keep` forbids decoding on demand; SetupError if a decoding process was killed or
        hangs.
    """
    num_workers = resolve_num_workers(num_workers, local_world_size)
    if split.is_streamed:  # an unreadable image raises when it is read
        return PixelStore(
            split, None, num_workers=num_workers, timeout_seconds=timeout_seconds, device=device
        )
    _ = split.digests  # recorded here, so that decoding stops at an image that changes later
    num_bytes, memory_bytes = estimate_decoded_bytes(split), total_memory_bytes()
    label = f"{split.name}: about {format_bytes(num_bytes)} of decoded images"
    options = DecodeOptions(num_workers, unreadable, progress, timeout_seconds)
    decoded: DecodedSplit | str = ""
    if keep != "none" and num_bytes >= SMALL_SPLIT_BYTES:
        most_workers = (
            min(max(num_workers * local_world_size, num_cores()), _MAX_DECODE_WORKERS)
            if num_workers
            else 0
        )
        cache_options = dataclasses.replace(options, num_workers=most_workers)
        decoded = decode_with_cache(split, cache_options, num_bytes=num_bytes)
    if isinstance(decoded, str):
        uncached = f" cannot be cached on disk ({decoded})" if decoded else ""
        if keep == "auto" and num_bytes >= memory_bytes * _MAX_MEMORY_FRACTION / local_world_size:
            reasons = f"{uncached} and" if uncached else ""
            logger.info(
                f"{label}{reasons} do not fit in memory; {num_workers} workers decode them in "
                "every epoch"
            )
            keep = "none"
        elif uncached:
            logger.info(f"{label}{uncached}, so the next run decodes them again")
        if keep == "none":
            return _on_demand_store(split, options, num_bytes=num_bytes, device=device)
        if num_bytes > memory_bytes:
            raise DataError(f"{label} do not fit in memory; set data.keep=none", code="data.memory")
        decoded = decode_to_memory(split, options, num_bytes=num_bytes)
    elif num_bytes >= memory_bytes * _MAX_MEMORY_FRACTION:
        folder = cache_path("pixels")
        logger.info(f"{label} do not fit in memory; they are read from {folder} on demand")
    images, indices = decoded
    split = split.subset(indices) if len(indices) < len(split) else split
    kept = _move_to_device(images, keep, device)
    return PixelStore(split, kept, device=device, checksums=images.checksums)


def _on_demand_store(
    split: Split, options: DecodeOptions, *, num_bytes: int, device: torch.device
) -> PixelStore:
    """Build a store that decodes images on demand; reading an unreadable image stops the run.

    With "quarantine", decodes all images once to exclude the unreadable ones, because the length of
    an epoch must be known before its first step.
    """
    bytes_per_image = -(-num_bytes // max(len(split), 1))
    if options.unreadable == "quarantine":
        split = split.subset(readable_indices(split, options))
    return PixelStore(
        split,
        None,
        num_workers=options.num_workers,
        timeout_seconds=options.timeout_seconds,
        bytes_per_image=bytes_per_image,
        device=device,
        common_size=estimate_common_size(split),
    )


def _move_to_device(
    images: DecodedImages, keep: str, device: torch.device
) -> Tensor | DecodedImages:
    """Move the images to the GPU if requested or if they fit."""
    if images.common_size is None:
        return images
    if device.type == "cuda" and keep in ("auto", "device"):
        free, _ = torch.cuda.mem_get_info(device)
        if keep == "device" or images.pixel_bytes < free * _MAX_DEVICE_FRACTION:
            return images.to(device)
    return images.as_tensor() if images.is_in_memory else images
