"""The samples of step s on rank r, and the batches made of them.

Training is one endless stream: epoch after epoch, each in its own order. Step s takes positions
[s*B, (s+1)*B) of it, and every rank a slice of those. So there is no sampler state and no padding,
each sample comes exactly once per epoch, and any step can be reached at any number of processes.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.device_copy import Pixels
from finetune.data.image_store import Store
from finetune.data.sampling import ClassSampling
from finetune.data.streaming.shuffle import Lanes
from finetune.errors import RecipeError
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.random import on_device, sample_keys

__all__ = ["Batch", "Loader", "Sampler", "crosses_epoch", "shares_of_classes"]


def crosses_epoch(step: int, *, batch_size: int, num_samples: int) -> bool:
    """True if the `step`-th optimiser step (counted from 1) completes an epoch."""
    return step * batch_size // num_samples > (step - 1) * batch_size // num_samples


@dataclass(eq=False)
class Sampler:
    """The samples of each step and rank, computed from the seed; it has no state to save.

    Attributes:
        num_samples: images in the training split.
        batch_size: images per optimiser step over all processes.
        unit: 2 when images are mixed in pairs, so that a pair stays on one rank, else 1.
        lanes: how images that come in row groups are mixed; None: any image at any place.
        sampling: draws rare classes more often, from the same seed; None: each image once an epoch.
    """

    num_samples: int
    _: KW_ONLY
    batch_size: int
    seed: int
    unit: int = 1
    lanes: Lanes | None = None
    sampling: ClassSampling | None = None
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the images of an epoch, (num_samples,): each once, or what `sampling` draws."""
        return self._draws(epoch) % self.num_samples

    def _draws(self, epoch: int) -> NDArray[np.int64]:
        """As `order`; where an image comes again, num_samples more, which gives it a key anew."""
        if epoch not in self._orders:
            # A batch touches two epochs, or more when it is larger than the data set.
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            if self.sampling is not None:
                order = self.sampling.draws(epoch)
            elif self.lanes is None:
                generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
                order = generator.permutation(self.num_samples)
            else:
                sizes = {"batch_size": self.batch_size, "unit": self.unit}
                order = self.lanes.order(self.seed, epoch, **sizes)
            self._orders[epoch] = order
        return self._orders[epoch]

    def micro_batches(
        self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int | None = None
    ) -> list[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
        """Return the samples of one rank in one step (counted from 0), in micro-batches.

        Args:
            step: number of optimiser steps done before.
            rank, world: this process and how many there are.
            micro_batch: largest number of images at once, one image (or pair) more if the shares
                are uneven; None for the whole share.
        Returns: for each micro-batch the keys of its augmentation (B,) uint64 and its sample
            indices (B,) int64; the number of micro-batches is the same on every rank.
        Raises: RecipeError if there is less than one image (or pair) for each process.
        """
        units = self.batch_size // self.unit
        if units < world:
            raise RecipeError(
                f"data.batch_size: {self.batch_size} is too small for {world} processes; "
                f"set at least {world * self.unit}",
                code="recipe.wrong_value",
            )
        share = -(-units // world)
        at_once = max((micro_batch or self.batch_size) // self.unit, 1)
        chunks = min(-(-share // at_once), units // world)
        edges = [
            units * (rank * chunks + i) // (world * chunks) * self.unit for i in range(chunks + 1)
        ]
        if rank == world - 1:
            edges[-1] = self.batch_size
        return [self._at(step, first, last) for first, last in itertools.pairwise(edges)]

    def _at(self, step: int, first: int, last: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return positions `first`..`last` of a step's global batch, as (keys, indices)."""
        positions = np.arange(step * self.batch_size + first, step * self.batch_size + last)
        epochs, places = np.divmod(positions, self.num_samples)
        indices, keys = np.empty_like(places), np.empty(len(places), dtype=np.uint64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            draws = self._draws(epoch)[places[chosen]]
            indices[chosen] = draws % self.num_samples
            keys[chosen] = sample_keys(self.seed, epoch, draws)
        return keys, indices


def shares_of_classes(labels_B: Tensor, num_classes: int) -> Tensor:
    """Return labels as float32, (B, K): 1 for each class of an image, and else 0."""
    if labels_B.ndim == 2:
        return labels_B.float()
    return torch.nn.functional.one_hot(labels_B, num_classes).to(torch.float32)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all loaders of a device: cuBLAS keeps 32 MiB for each stream."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class Batch:
    """One batch of the network's input.

    Attributes:
        images_BCHW: normalised pixels on the device.
        labels_B: class indices; fewer than images if some images only keep the ranks in step. Where
            an image has any number of labels, (B, K) uint8, 1 for each of its classes.
        targets_BK: class weights if images are mixed, else None.
        indices: (B,), places in the split of the images that have a label.
    """

    images_BCHW: Tensor
    labels_B: Tensor
    targets_BK: Tensor | None = None
    indices: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class Loader:
    """Makes batches of a split: for training those of each step, for evaluation each image once."""

    def __init__(
        self,
        store: Store,
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
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = _side_stream(device)
            self._side.wait_stream(torch.cuda.current_stream(device))  # for pixels and labels

    def train(
        self,
        sampler: Sampler,
        steps: range,
        *,
        rank: int = 0,
        world: int = 1,
        micro_batch: int | None = None,
    ) -> Generator[tuple[int, Iterator[Batch]], None, None]:
        """Yield each step's number of micro-batches, and an iterator that makes them.

        Args: as for `Sampler.micro_batches`; `steps` are those still to be done.
        Closing the generator ends the workers, once no micro-batch is held.
        """
        plans = (
            sampler.micro_batches(step, rank=rank, world=world, micro_batch=micro_batch)
            for step in steps
        )
        read_ahead, current = itertools.tee(plans)  # workers are ahead of the step that is made
        pixels = self.store.read_all(indices for plan in read_ahead for _, indices in plan)
        for plan in current:
            yield len(plan), (self._make(self._train_batch, pixels, *each) for each in plan)

    def _make(
        self, make: Callable[..., Batch], pixels: Iterator[Pixels], *arguments: NDArray[Any]
    ) -> Batch:
        """Make a batch; on a GPU in a side stream, parallel to the network's computation.

        Making a batch waits for small copies; in the main stream it would wait for the network.
        """
        if self._side is None:
            return make(next(pixels), *arguments)
        main = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            batch = make(next(pixels), *arguments)
        main.wait_stream(self._side)
        for tensor in (batch.images_BCHW, batch.labels_B, batch.targets_BK):
            if tensor is not None:
                tensor.record_stream(main)  # it was allocated in the side stream
        return batch

    def _train_batch(
        self, pixels: Pixels, keys: NDArray[np.uint64], indices: NDArray[np.int64]
    ) -> Batch:
        images = self.pipeline(pixels, keys=keys, dtype=self.dtype, device=self.device)
        labels = self.labels[on_device(indices, self.device)]
        if not self.pipeline.mixes:
            return Batch(images, labels, indices=indices)
        places = np.arange(len(labels))
        partner = on_device(np.where(places ^ 1 < len(places), places ^ 1, places), self.device)
        targets = shares_of_classes(labels, self.num_classes)
        images, targets = self.pipeline.mix(images, targets, keys, partner)
        return Batch(images, labels, targets, indices)

    def once(self, *, rank: int = 0, world: int = 1, batch_size: int = 256) -> Iterator[Batch]:
        """Yield this rank's share of the split, each image exactly once over all ranks.

        Every rank yields the same number of batches, since the ranks of a sharded network compute
        in step; a rank without images left yields the first image without a label.
        """
        total = len(self.labels)
        largest_share = -(-total // world)
        first, last = total * rank // world, total * (rank + 1) // world
        starts = range(first, first + largest_share, batch_size)
        batches = [np.arange(start, min(start + batch_size, last)) for start in starts]
        padded = [batch if len(batch) else np.zeros(1, dtype=np.int64) for batch in batches]
        with contextlib.closing(self.store.read_all(padded)) as pixels:
            for batch in batches:
                yield self._make(self._eval_batch, pixels, batch)

    def _eval_batch(self, pixels: Pixels, indices: NDArray[np.int64]) -> Batch:
        keys = None
        if self.pipeline.random:  # a corruption, which is the same for every model and run
            keys = sample_keys(0, 0, indices if len(indices) else [0])
        images = self.pipeline(pixels, keys=keys, dtype=torch.float32, device=self.device)
        labels = self.labels[on_device(indices, self.device)]
        return Batch(images, labels, indices=indices)
