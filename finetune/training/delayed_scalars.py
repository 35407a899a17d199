"""Read numbers from a GPU without waiting for them: each number arrives one step later."""

from __future__ import annotations

import collections

import torch
from torch import Tensor

__all__ = ["DelayedScalars"]


class DelayedScalars:
    """Read one number per step from the device: one step later on a GPU, immediately elsewhere.

    `Tensor.item()` synchronizes with the GPU, which would then idle while the host prepares the
    next step.

    Args:
        device: device of the tensors.
        delayed: True to read one step later; None: delayed on a GPU, not elsewhere.
    """

    def __init__(self, device: torch.device, *, delayed: bool | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._delay_steps = int(self._on_gpu if delayed is None else delayed)
        self._pending: collections.deque[tuple[Tensor, torch.cuda.Event | None]]
        self._pending = collections.deque()

    def send(self, value: Tensor) -> None:
        """Start to copy a one-element tensor to the host."""
        value = value.detach().reshape(())
        if not self._on_gpu:
            self._pending.append((value.clone(), None))
            return
        on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
        on_host.copy_(value, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._pending.append((on_host, copied))

    def receive(self, *, wait: bool = False) -> list[float]:
        """Return the numbers that have arrived since the last call, oldest first.

        Args:
            wait: True to wait for the copies that are not finished, and return all numbers.
        """
        num_delayed = 0 if wait else self._delay_steps
        numbers = []
        while len(self._pending) > num_delayed:
            value, copied = self._pending.popleft()
            if copied is not None:
                copied.synchronize()  # hardly waits: the copy is from the previous step
            numbers.append(float(value))
        return numbers
