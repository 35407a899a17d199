"""Loader of precomputed features, with the same samples in each step as `ImageLoader`."""

# B batch, N images, D width, K classes

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.loader import Batch, ImageLoader
from finetune.data.pixel_store import PixelStore
from finetune.data.sampler import DistributedBatchSampler
from finetune.data.source import Split
from finetune.transforms.sample_rng import to_device

__all__ = ["AnyLoader", "FeatureLoader"]

_MAX_DEVICE_FRACTION = 0.25  # maximum share of the device's free memory


class FeatureLoader:
    """Builds batches of a split from the features of its images.

    Args:
        features_ND: features of the images, float32, may be read-only.
        device: device of the batches; all features are kept on it if they fit.

    Attributes:
        store: the split, as a `PixelStore` whose pixels are never read.
        labels: labels of the split on the device: (N,) int64, or (N, K) uint8 if multi-label.
    """

    def __init__(
        self,
        split: Split,
        features_ND: NDArray[np.float32],
        *,
        num_classes: int,
        device: torch.device,
    ) -> None:
        self.store = PixelStore(split, None)
        self.num_classes = num_classes
        self.device = device
        self.labels = torch.from_numpy(np.array(split.labels)).to(device)
        self._features_ND: NDArray[np.float32] | Tensor = features_ND
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if features_ND.nbytes < free * _MAX_DEVICE_FRACTION:
                self._features_ND = torch.from_numpy(np.array(features_ND)).to(device)

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

        See `ImageLoader.train_steps`.
        """
        for step in steps:
            plan = sampler.micro_batches(
                step, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size
            )
            yield len(plan), (self._build_batch(indices) for _, indices in plan)

    def eval_batches(
        self, *, rank: int = 0, world_size: int = 1, batch_size: int = 256
    ) -> Iterator[Batch]:
        """Yield the batches of this rank; over all ranks, each image occurs exactly once.

        See `ImageLoader.eval_batches`.
        """
        total = len(self.labels)
        first, last = total * rank // world_size, total * (rank + 1) // world_size
        for start in range(first, last, batch_size):
            yield self._build_batch(np.arange(start, min(start + batch_size, last)))

    def get_features(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the features of the images at these indices of the split, (B, D) on the device."""
        if isinstance(self._features_ND, Tensor):
            return self._features_ND[to_device(indices, self.device)]
        return to_device(np.array(self._features_ND[indices]), self.device)

    def _build_batch(self, indices: NDArray[np.int64]) -> Batch:
        labels_B = self.labels[to_device(indices, self.device)]
        return Batch(self.get_features(indices), labels_B, indices=indices)


AnyLoader: TypeAlias = ImageLoader | FeatureLoader
