"""Two ranks as threads of one process: for collectives of small tensors, without a launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

TIMEOUT_SECONDS = 30.0


class LockstepAccelerator:
    """The collectives of an Accelerator, between two threads."""

    device = torch.device("cpu")
    num_processes = 2

    def __init__(self, rank: int, shared: dict[int, Tensor], barrier: threading.Barrier) -> None:
        self._rank, self._shared, self._barrier = rank, shared, barrier

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._shared[self._rank] = tensor
        self._barrier.wait(TIMEOUT_SECONDS)
        tensors = [self._shared[0], self._shared[1]]
        self._barrier.wait(TIMEOUT_SECONDS)
        return tensors

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        first, second = self._exchange(tensor)
        return first + second

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor))

    def pad_across_processes(self, tensor: Tensor, dim: int = 0, pad_index: int = 0) -> Tensor:
        assert tensor.ndim == 1
        assert dim == 0
        longest = max(len(each) for each in self._exchange(tensor))
        return pad(tensor, (0, longest - len(tensor)), value=pad_index)


def run_in_lockstep(work: Callable[[int, Any], Any]) -> Any:
    """Call `work(rank, accelerator)` on both ranks. Returns: the result, the same on both."""
    shared: dict[int, Tensor] = {}
    barrier = threading.Barrier(2)
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        results[rank] = work(rank, LockstepAccelerator(rank, shared, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert results[0] == results[1]
    return results[0]
