"""Batches of features in the place of images; the samples of each step are those of `Loader`."""

# B batch, N images, D width

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.image_store import Store
from finetune.data.loader import Batch, Loader, Sampler
from finetune.data.source import Split
from finetune.transforms.random import on_device

__all__ = ["AnyLoader", "FeatureLoader"]

_DEVICE_SHARE = 0.25  # of what is free on the device


class FeatureLoader:
    """Makes batches of a split from the features of its images.

    Args:
        values_ND: their features, float32, which may be read-only.
        device: of the batches; it holds all the features if it has room.

    Attributes:
        store: the split, whose pixels are never read.
        labels: (N,) int64 on the device, or (N, K) uint8; see `Batch`.
    """

    def __init__(
        self,
        split: Split,
        values_ND: NDArray[np.float32],
        *,
        num_classes: int,
        device: torch.device,
    ) -> None:
        self.store = Store(split, None)
        self.num_classes = num_classes
        self.device = device
        self.labels = torch.from_numpy(np.array(split.labels)).to(device)
        self._values_ND: NDArray[np.float32] | Tensor = values_ND
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if values_ND.nbytes < free * _DEVICE_SHARE:
                self._values_ND = torch.from_numpy(np.array(values_ND)).to(device)

    def train(
        self,
        sampler: Sampler,
        steps: range,
        *,
        rank: int = 0,
        world: int = 1,
        micro_batch: int | None = None,
    ) -> Generator[tuple[int, Iterator[Batch]], None, None]:
        """Yield each step's number of micro-batches, and the micro-batches; see `Loader.train`."""
        for step in steps:
            plan = sampler.micro_batches(step, rank=rank, world=world, micro_batch=micro_batch)
            yield len(plan), (self._batch(indices) for _, indices in plan)

    def once(self, *, rank: int = 0, world: int = 1, batch_size: int = 256) -> Iterator[Batch]:
        """Yield this rank's share, each image exactly once over all ranks; see `Loader.once`."""
        total = len(self.labels)
        first, last = total * rank // world, total * (rank + 1) // world
        for start in range(first, last, batch_size):
            yield self._batch(np.arange(start, min(start + batch_size, last)))

    def rows(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the features of some images by their places in the split, (B, D) on the device."""
        if isinstance(self._values_ND, Tensor):
            return self._values_ND[on_device(indices, self.device)]
        return on_device(np.array(self._values_ND[indices]), self.device)

    def _batch(self, indices: NDArray[np.int64]) -> Batch:
        labels_B = self.labels[on_device(indices, self.device)]
        return Batch(self.rows(indices), labels_B, indices=indices)


AnyLoader: TypeAlias = Loader | FeatureLoader
