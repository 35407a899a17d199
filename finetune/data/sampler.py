"""Sampler: compute the images of each step from the seed and the step number.

The epochs, each in its own order, form one endless sequence. Step s takes positions [s*B, (s+1)*B)
of this sequence, for batch size B, and each rank takes a slice of them. So the sampler has no state
and no padding, and a run can resume at any step with any number of processes. Each image occurs
exactly once per epoch, unless `data.sampling` draws rare classes more often.
"""

from __future__ import annotations

import itertools
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
from numpy.typing import NDArray

from finetune.data.class_balance import ClassSampler
from finetune.data.streaming.shuffle import ShuffleStreams
from finetune.errors import RecipeError
from finetune.transforms.sample_rng import sample_keys

__all__ = ["DistributedBatchSampler", "completes_epoch"]


def completes_epoch(step: int, *, batch_size: int, num_samples: int) -> bool:
    """True if the `step`-th optimizer step (counted from 1) completes an epoch."""
    return step * batch_size // num_samples > (step - 1) * batch_size // num_samples


@dataclass(eq=False)
class DistributedBatchSampler:
    """Samples of each step and rank, computed from the seed; it has no state to save.

    Attributes:
        num_samples: images in the training split.
        batch_size: images per optimizer step over all processes.
        group_size: 2 if images are mixed in pairs, so that a pair stays on one rank, else 1.
        shuffle_streams: shuffle by row group, for streamed images; None for a full permutation.
        class_sampler: draws rare classes more often, from the same seed; None to draw each image
            once per epoch.
    """

    num_samples: int
    _: KW_ONLY
    batch_size: int
    seed: int
    group_size: int = 1
    shuffle_streams: ShuffleStreams | None = None
    class_sampler: ClassSampler | None = None
    _draws_by_epoch: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False
    )

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Return the image indices of an epoch, (num_samples,): each once, or as drawn by class."""
        return self._epoch_draws(epoch) % self.num_samples

    def _epoch_draws(self, epoch: int) -> NDArray[np.int64]:
        """Return `epoch_order`, plus num_samples for each repeat: each draw needs its own key."""
        if epoch not in self._draws_by_epoch:
            # A batch may span two epochs, or more if it is larger than the split.
            self._draws_by_epoch = {e: o for e, o in self._draws_by_epoch.items() if e >= epoch - 1}
            if self.class_sampler is not None:
                order = self.class_sampler.epoch_draws(epoch)
            elif self.shuffle_streams is None:
                generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
                order = generator.permutation(self.num_samples)
            else:
                options = {"batch_size": self.batch_size, "group_size": self.group_size}
                order = self.shuffle_streams.epoch_order(self.seed, epoch, **options)
            self._draws_by_epoch[epoch] = order
        return self._draws_by_epoch[epoch]

    def check_world_size(self, world_size: int) -> None:
        """Raise RecipeError if a process would get less than one image (or pair) per step.

        Args:
            world_size: number of processes.
        """
        if self.batch_size // self.group_size < world_size:
            raise RecipeError(
                f"data.batch_size: {self.batch_size} is too small for {world_size} processes; "
                f"set at least {world_size * self.group_size}",
                code="recipe.wrong_value",
            )

    def micro_batches(
        self, step: int, *, rank: int = 0, world_size: int = 1, micro_batch_size: int | None = None
    ) -> list[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
        """Return the samples of one rank in one step (counted from 0), in micro-batches.

        Args:
            step: index of the optimizer step.
            rank, world_size: rank of this process and number of processes.
            micro_batch_size: maximum images per micro-batch; exceeded by one image (or pair) if the
                batch does not divide evenly among the ranks. None for a single micro-batch.
        Returns: for each micro-batch its augmentation keys (B,) uint64 and its sample indices (B,)
            int64; every rank has the same number of micro-batches.
        Raises: RecipeError if a process would get less than one image (or pair).
        """
        self.check_world_size(world_size)
        num_groups = self.batch_size // self.group_size
        max_groups_per_rank = -(-num_groups // world_size)
        groups_per_micro_batch = max((micro_batch_size or self.batch_size) // self.group_size, 1)
        num_micro_batches = min(
            -(-max_groups_per_rank // groups_per_micro_batch), num_groups // world_size
        )
        num_parts = world_size * num_micro_batches
        first_part = rank * num_micro_batches
        edges = [
            num_groups * part // num_parts * self.group_size
            for part in range(first_part, first_part + num_micro_batches + 1)
        ]
        if rank == world_size - 1:
            edges[-1] = self.batch_size
        return [self._slice_step(step, first, last) for first, last in itertools.pairwise(edges)]

    def _slice_step(
        self, step: int, first: int, last: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return positions [first, last) of a step's global batch, as (keys, indices)."""
        positions = np.arange(step * self.batch_size + first, step * self.batch_size + last)
        epochs, offsets = np.divmod(positions, self.num_samples)
        indices, keys = np.empty_like(offsets), np.empty(len(offsets), dtype=np.uint64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            draws = self._epoch_draws(epoch)[offsets[in_epoch]]
            indices[in_epoch] = draws % self.num_samples
            keys[in_epoch] = sample_keys(self.seed, epoch, draws)
        return keys, indices
