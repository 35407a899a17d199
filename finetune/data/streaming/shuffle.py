"""Shuffle streamed images by row group, so that each process reads its own row groups.

Each epoch shuffles the row groups and cuts this sequence into equal streams. Each stream fills a
fixed range of positions in the global batch. A process takes neighboring positions, hence
neighboring streams: each process reads its own row groups, and the samples of a step are the same
for any number of processes. A stream draws images in random order from a few open row groups, and
opens the next row group when one is used up. So an epoch starts by reading one row group per stream
and then reads row groups at an even rate.
"""

# N samples

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.data.source import Split
from finetune.data.streaming.streamed_images import StreamedImages

__all__ = ["ShuffleStreams", "build_shuffle_streams"]

MAX_STREAMS = 64  # also the maximum number of processes that read different streams
MAX_OPEN_GROUPS = 8  # row groups per stream
MAX_OPEN_BYTES = 2**30  # limit for the encoded images in the open row groups of all streams


@dataclass(frozen=True, eq=False)
class ShuffleStreams:
    """Computes the sample order of each epoch.

    Attributes:
        groups_N: row group index of each sample.
        num_streams: number of streams; if the world size divides it, no two processes read the same
            stream.
        num_open_groups: number of row groups from which a stream draws at the same time.
    """

    groups_N: NDArray[np.int32]
    num_streams: int
    num_open_groups: int

    def epoch_order(
        self, seed: int, epoch: int, *, batch_size: int, group_size: int
    ) -> NDArray[np.int64]:
        """Return the permutation of an epoch.

        Args:
            batch_size: images per step over all processes; the position in a batch determines the
                stream.
            group_size: images that stay together on one process: 2 if images are mixed in pairs.
        Returns: (N,) sample indices.
        """
        num_samples = len(self.groups_N)
        generator = np.random.Generator(np.random.PCG64([seed, epoch]))
        grouped_N, turns_N = self._shuffle_groups(generator)
        slots_N = (epoch * num_samples + np.arange(num_samples)) % batch_size
        edges = (
            np.arange(self.num_streams)
            * (batch_size // group_size)
            // self.num_streams
            * group_size
        )
        stream_of_slot_N = np.searchsorted(edges, slots_N, side="right") - 1
        counts = np.bincount(stream_of_slot_N, minlength=self.num_streams)
        streams_N = np.repeat(np.arange(self.num_streams), counts)
        # Neighboring streams share one row group. Every other stream runs backwards, so that both
        # need the shared group at the same time and it is read once.
        turns_N = np.where(streams_N % 2 == 0, turns_N, -turns_N)
        first_turns = np.full(self.num_streams, np.iinfo(np.int64).max)
        np.minimum.at(first_turns, streams_N, turns_N)
        times_N = (
            turns_N - first_turns[streams_N] + self.num_open_groups * generator.random(num_samples)
        )
        # one sort for all streams: the offset is larger than any time, so streams stay separate
        stream_offset = float(turns_N.max() - turns_N.min() + 1 + self.num_open_groups)
        sequence_N = grouped_N[np.argsort(streams_N * stream_offset + times_N, kind="stable")]
        order_N = np.empty(num_samples, dtype=np.int64)
        order_N[_stable_argsort(stream_of_slot_N, self.num_streams)] = sequence_N
        return order_N

    def _shuffle_groups(
        self, random: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shuffle the row groups, and the samples in each row group.

        Returns: (N,) sample indices, and (N,) the position of each sample's row group among the
            shuffled row groups.
        """
        present = np.bincount(self.groups_N) > 0
        turn_of_group = np.zeros(len(present), dtype=np.int64)
        turn_of_group[present] = random.permutation(int(present.sum()))
        # a row group that two streams share is split at random
        shuffled_N = random.permutation(len(self.groups_N))
        turns_N = turn_of_group[self.groups_N[shuffled_N]]
        by_turn_N = _stable_argsort(turns_N, int(present.sum()))
        return shuffled_N[by_turn_N], turns_N[by_turn_N]


def _stable_argsort(values_N: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Return a stable argsort of integers below a limit; sorting as uint16 is ten times faster."""
    return np.argsort(values_N.astype(np.uint16) if limit <= 2**16 else values_N, kind="stable")


def build_shuffle_streams(split: Split) -> ShuffleStreams | None:
    """Build the shuffle of a streamed split; None for any other split.

    The result depends only on the data, not on the machine.
    """
    images = split.images
    if not isinstance(images, StreamedImages):
        return None
    groups_N = images.group_indices(split.image_rows)
    images_per_group = np.bincount(groups_N, minlength=len(images.group_starts) - 1)
    lengths = np.maximum(np.diff(images.group_starts), 1)
    num_bytes = (images.group_num_bytes() * images_per_group // lengths)[images_per_group > 0]
    max_open_groups = max(1, MAX_OPEN_BYTES // max(1, int(num_bytes.mean())))
    num_streams = min(MAX_STREAMS, 2 ** (int(max_open_groups).bit_length() - 1))
    return ShuffleStreams(
        groups_N, num_streams, min(MAX_OPEN_GROUPS, max(1, max_open_groups // num_streams))
    )
