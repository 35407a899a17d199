"""What the device says about a step, heard by the host when it has arrived: nobody waits for it."""

from __future__ import annotations

import collections

import torch
from torch import Tensor

__all__ = ["Echo"]


class Echo:
    """A small tensor of each step, read one step later on a GPU and at once elsewhere.

    Reading a number from a GPU at once would let it run dry while the host prepares the next step.

    Args:
        device: on which the tensors are.
        late: whether they are heard one step later; None: on a GPU.
    """

    def __init__(self, device: torch.device, *, late: bool | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._behind = int(self._on_gpu if late is None else late)
        self._waiting: collections.deque[tuple[Tensor, torch.cuda.Event | None]]
        self._waiting = collections.deque()

    def say(self, value: Tensor) -> None:
        """Send a tensor of one number to the host."""
        value = value.detach().reshape(())
        if not self._on_gpu:
            self._waiting.append((value.clone(), None))
            return
        on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
        on_host.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._waiting.append((on_host, arrived))

    def heard(self, *, all_of_it: bool = False) -> list[float]:
        """What has arrived since it was asked last, oldest first.

        Args:
            all_of_it: wait for what is still under way.
        """
        behind = 0 if all_of_it else self._behind
        found = []
        while len(self._waiting) > behind:
            value, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()  # of the step before: it has long arrived
            found.append(float(value))
        return found
