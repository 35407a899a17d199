"""Build batches of a split on the device: images after the transforms, and labels.

The sampler chooses the images of a training step; evaluation reads each image once.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.device_prefetch import PixelBatch
from finetune.data.pixel_store import PixelStore
from finetune.data.sampler import DistributedBatchSampler
from finetune.transforms.mixing import partner_rows
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.sample_rng import sample_keys, to_device

__all__ = ["Batch", "ImageLoader", "one_hot_targets"]


def one_hot_targets(labels_B: Tensor, num_classes: int) -> Tensor:
    """Return labels as float32 (B, K): 1 for each class of an image, else 0."""
    if labels_B.ndim == 2:
        return labels_B.float()
    return torch.nn.functional.one_hot(labels_B, num_classes).to(torch.float32)


@functools.cache
def _get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device, shared by all loaders: cuBLAS keeps 32 MiB per stream."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class Batch:
    """One batch of model inputs and labels.

    Attributes:
        images_BCHW: normalized pixels on the device.
        labels_B: class indices; none for the padding images at the end, which give every rank the
            same number of batches. Multi-label: (B, K) uint8, 1 for each class of an image.
        targets_BK: soft targets with mixup or cutmix, else None.
        indices: indices of the labeled images in the split, (B,).
    """

    images_BCHW: Tensor
    labels_B: Tensor
    targets_BK: Tensor | None = None
    indices: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class ImageLoader:
    """Builds the batches of training steps, or one pass over a split for evaluation."""

    def __init__(
        self,
        store: PixelStore,
        pipeline: Pipeline,
        *,
        num_classes: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.store = store
        self.pipeline = pipeline
        self.num_classes = num_classes
        self.device = device
        self.dtype = dtype
        self.labels = torch.from_numpy(np.array(store.split.labels)).to(device)
        self._side_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side_stream = _get_side_stream(device)
            # wait for pixels and labels
            self._side_stream.wait_stream(torch.cuda.current_stream(device))

    def train_steps(
        self,
        sampler: DistributedBatchSampler,
        steps: range,
        *,
        rank: int = 0,
        world_size: int = 1,
        micro_batch_size: int | None = None,
    ) -> Generator[tuple[int, Iterator[Batch]], None, None]:
        """Yield for each step the number of micro-batches, and an iterator over them.

        After this generator is closed, the workers stop as soon as the last micro-batch iterator is
        garbage-collected.

        Args:
            sampler: the sampler that chooses the images of each step.
            steps: the remaining steps of the run.
            rank, world_size, micro_batch_size: see `DistributedBatchSampler.micro_batches`.
        """
        plans = (
            sampler.micro_batches(
                step, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size
            )
            for step in steps
        )
        plans_ahead, current = itertools.tee(plans)  # workers read ahead of the current step
        pixels = self.store.read_batches(indices for plan in plans_ahead for _, indices in plan)
        for plan in current:
            yield (
                len(plan),
                (
                    self._build_batch(self._train_batch, pixels, *micro_batch_plan)
                    for micro_batch_plan in plan
                ),
            )

    def _build_batch(
        self, build: Callable[..., Batch], pixels: Iterator[PixelBatch], *arguments: NDArray[Any]
    ) -> Batch:
        """Build a batch; on a GPU in a side stream, which overlaps with the model's computation.

        Building a batch waits for small copies. In the main stream, these would wait for the model.
        """
        if self._side_stream is None:
            return build(next(pixels), *arguments)
        main = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side_stream):
            batch = build(next(pixels), *arguments)
        main.wait_stream(self._side_stream)
        for tensor in (batch.images_BCHW, batch.labels_B, batch.targets_BK):
            if tensor is not None:
                tensor.record_stream(main)  # allocated in the side stream
        return batch

    def _train_batch(
        self, pixels: PixelBatch, keys: NDArray[np.uint64], indices: NDArray[np.int64]
    ) -> Batch:
        images = self.pipeline(pixels, keys=keys, dtype=self.dtype, device=self.device)
        labels = self.labels[to_device(indices, self.device)]
        if not self.pipeline.has_mixing:
            return Batch(images, labels, indices=indices)
        partners = to_device(partner_rows(len(labels)), self.device)
        targets = one_hot_targets(labels, self.num_classes)
        images, targets = self.pipeline.mix_batch(images, targets, keys, partners)
        return Batch(images, labels, targets, indices)

    def eval_batches(
        self, *, rank: int = 0, world_size: int = 1, batch_size: int = 256
    ) -> Iterator[Batch]:
        """Yield the batches of this rank; over all ranks, each labeled image occurs once.

        Every rank yields the same number of batches, because the ranks of a sharded model must run
        in step. A rank that has no images left yields the split's first image, without a label.
        """
        total = len(self.labels)
        max_share = -(-total // world_size)
        first, last = total * rank // world_size, total * (rank + 1) // world_size
        starts = range(first, first + max_share, batch_size)
        batches = [np.arange(start, min(start + batch_size, last)) for start in starts]
        padded = [batch if len(batch) else np.zeros(1, dtype=np.int64) for batch in batches]
        with contextlib.closing(self.store.read_batches(padded)) as pixels:
            for batch in batches:
                yield self._build_batch(self._eval_batch, pixels, batch)

    def _eval_batch(self, pixels: PixelBatch, indices: NDArray[np.int64]) -> Batch:
        keys = None
        if self.pipeline.is_random:  # an image corruption: the same for every model and run
            keys = sample_keys(0, 0, indices if len(indices) else [0])
        images = self.pipeline(pixels, keys=keys, dtype=torch.float32, device=self.device)
        labels = self.labels[to_device(indices, self.device)]
        return Batch(images, labels, indices=indices)
