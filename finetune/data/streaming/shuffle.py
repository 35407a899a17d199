"""The order of an epoch of images in row groups: mixed, while each process reads its own groups.

The row groups of an epoch are put in a random order and laid end to end; lanes are equal shares of
that. A global batch takes its positions from the lanes in turn, so that the processes, which take
neighbouring positions, take neighbouring lanes: each reads its own row groups, and the samples of a
step are the same for any number of processes. Within a lane, some row groups are open at a time and
give their images in random order; a new one opens when an old one ends, so that an epoch begins
with one row group a lane and row groups are read at an even rate.
"""

# N samples, L lanes

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.data.source import Split
from finetune.data.streaming.row_groups import ShardItems

__all__ = ["Lanes", "lanes_of"]

MOST_LANES = 64  # so many processes can share the reading without overlap
MOST_OPEN = 8  # row groups of one lane
OPEN_BYTES = 2**30  # of the images in the open row groups of all lanes together


@dataclass(frozen=True, eq=False)
class Lanes:
    """The mixing of an epoch's samples.

    Attributes:
        groups_N: the row group of each sample.
        lanes: how many lanes; a number of processes that divides it reads without overlap.
        window: row groups that are open in a lane at a time.
    """

    groups_N: NDArray[np.int32]
    lanes: int
    window: int

    def order(self, seed: int, epoch: int, *, batch_size: int, unit: int) -> NDArray[np.int64]:
        """Return the permutation of an epoch.

        Args:
            batch_size: images per step over all processes; the position in a batch decides on the
                lane.
            unit: images that stay together on a process.
        Returns: (N,).
        """
        num_samples = len(self.groups_N)
        random = np.random.Generator(np.random.PCG64([seed, epoch]))
        chain_N, turns_N = self._chain(random)
        slots_N = (epoch * num_samples + np.arange(num_samples)) % batch_size
        edges = np.arange(self.lanes) * (batch_size // unit) // self.lanes * unit
        lane_of_place_N = np.searchsorted(edges, slots_N, side="right") - 1
        counts = np.bincount(lane_of_place_N, minlength=self.lanes)
        lanes_N = np.repeat(np.arange(self.lanes), counts)
        # Two lanes share one row group. Every other lane goes backwards, so that both need it at
        # the same time and it is read once.
        turns_N = np.where(lanes_N % 2 == 0, turns_N, -turns_N)
        firsts = np.full(self.lanes, np.iinfo(np.int64).max)
        np.minimum.at(firsts, lanes_N, turns_N)
        times_N = turns_N - firsts[lanes_N] + self.window * random.random(num_samples)
        # lane by lane in one sort: no time reaches the number of row groups and one window more
        behind = float(turns_N.max() - turns_N.min() + 1 + self.window)
        sequence_N = chain_N[np.argsort(lanes_N * behind + times_N, kind="stable")]
        order_N = np.empty(num_samples, dtype=np.int64)
        order_N[_stable(lane_of_place_N, self.lanes)] = sequence_N
        return order_N

    def _chain(self, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Order all samples by row group, the groups in random order.

        Returns: (N,) the samples, and (N,) the turns of their row groups.
        """
        present = np.bincount(self.groups_N) > 0
        turn_of_group = np.zeros(len(present), dtype=np.int64)
        turn_of_group[present] = random.permutation(int(present.sum()))
        shuffled_N = random.permutation(len(self.groups_N))  # a lane takes a random part of a group
        turns_N = turn_of_group[self.groups_N[shuffled_N]]
        by_turn_N = _stable(turns_N, int(present.sum()))
        return shuffled_N[by_turn_N], turns_N[by_turn_N]


def _stable(values_N: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Sort numbers below a limit; small ones by their digits, which costs a tenth of comparing."""
    return np.argsort(values_N.astype(np.uint16) if limit <= 2**16 else values_N, kind="stable")


def lanes_of(split: Split) -> Lanes | None:
    """Return the lanes of a streamed split; None for any other.

    They depend on the data alone, not on the machine, and so does the order.
    """
    items = split.items
    if not isinstance(items, ShardItems):
        return None
    groups_N = items.group_of(split.item_rows)
    held = np.bincount(groups_N, minlength=len(items.starts) - 1)
    lengths = np.maximum(np.diff(items.starts), 1)
    num_bytes = (items.num_bytes() * held // lengths)[held > 0]
    room = max(1, OPEN_BYTES // max(1, int(num_bytes.mean())))
    lanes = min(MOST_LANES, 2 ** (int(room).bit_length() - 1))
    return Lanes(groups_N, lanes, min(MOST_OPEN, max(1, room // lanes)))
