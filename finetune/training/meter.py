"""A run's sums since the last log line, and the signals that stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from finetune.console import leave_closed_terminal
from finetune.errors import Interrupted
from finetune.processes import stop_signals
from finetune.training.distributed import Launcher

__all__ = ["Meter", "StopSignals"]


class Meter:
    """Sums over the images since the last log line, kept on the device until it is written."""

    def __init__(
        self, device: torch.device, seconds_before: float, *, distills: bool = False
    ) -> None:
        """Start the clock; `seconds_before` is what earlier parts of a resumed run took."""
        self._device = device
        self._num_sums = 4 + distills
        self._is_multilabel = False  # as the labels are that are counted
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # it has no float64
        self._started = time.perf_counter() - seconds_before
        self._restart()

    def _restart(self) -> None:
        self._sums = torch.zeros(self._num_sums, dtype=self._dtype, device=self._device)
        self._since = time.perf_counter()

    def add(
        self,
        loss_sum: Tensor,
        logits_BK: Tensor,
        labels_B: Tensor,
        *teacher_sum: Tensor,
        counts: Tensor,
    ) -> None:
        """Count one micro-batch of this rank if `counts`, on the device, is true."""
        self._is_multilabel = labels_B.ndim == 2
        if self._is_multilabel:
            said_BK, true_BK = logits_BK > 0, labels_B > 0
            good = (said_BK & true_BK).sum(), said_BK.sum() + true_BK.sum()
        else:
            ranked = logits_BK.topk(min(5, logits_BK.shape[1]), dim=1).indices
            hits = ranked == labels_B[:, None]
            good = hits[:, 0].sum(), hits.sum()
        images = torch.full_like(loss_sum, len(labels_B))
        sums = (loss_sum, *good, images, *teacher_sum)
        stacked = torch.stack([each.to(self._dtype) for each in sums])
        self._sums += torch.where(counts, stacked, 0)

    @property
    def seconds(self) -> float:
        """Time spent on the run, with its earlier parts."""
        return time.perf_counter() - self._started

    def sums(self) -> Tensor:
        """Loss, top-1 hits, top-5 hits and images of this rank, to be summed over ranks: (4,).

        With a teacher, its part of the loss comes fifth. Of several labels an image the second is
        those said rightly, at a threshold of 0.5, and the third those said and those true.
        """
        return self._sums.clone()

    def take_over(self, sums: list[float]) -> None:
        """Go on from the sums that a checkpoint kept between two log lines."""
        self._sums += torch.tensor(sums, dtype=self._dtype, device=self._device)

    def line(self, sums: Tensor, *, step: int, samples_seen: int, lr: float) -> dict[str, Any]:
        """Make the log line from the sums over all ranks, and start anew."""
        # The one device-to-host copy per log line.
        loss, top1, top5, images, *teacher = sums.tolist()
        good = {"top1": top1 / max(images, 1.0), "top5": top5 / max(images, 1.0)}
        if self._is_multilabel:
            good = {"micro_f1": 2 * top1 / max(top5, 1.0)}
        elapsed = time.perf_counter() - self._since
        self._restart()
        counted = max(images, 1.0)
        return {
            "step": step,
            "samples_seen": samples_seen,
            "split": "train",
            "loss": loss / counted if images else None,
            **{key: value if images else None for key, value in good.items()},
            **({"distill_loss": teacher[0] / counted if images else None} if teacher else {}),
            "lr": lr,
            "images_per_second": round(images / elapsed, 2),
            "seconds": round(self.seconds, 3),
        }

    def pause(self) -> float:
        """Note the moment at which something other than training begins."""
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        """Leave the time since `paused_at` out of the images per second."""
        self._since += time.perf_counter() - paused_at


class _Signalled(BaseException):
    """A signal on its way to the edge of `at_once`; no `except Exception` catches it."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def as_interrupted(self) -> Interrupted:
        """The error that callers of `at_once` see."""
        return Interrupted(str(self), self.signal_number)


class StopSignals:
    """Turns the first stop signal into a request; the second one ends the process at once.

    Args:
        launcher: its end is a request like SIGTERM, and never the second one; nor is the signal
            that it passes on, which Slurm or a terminal has sent to both.
    """

    def __init__(self, launcher: Launcher | None = None) -> None:
        self.received: int = 0
        self._launcher = launcher
        self._passes_on = launcher is not None
        self._message: str | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._handle)
        return self

    @contextlib.contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Let a signal end the block as soon as it comes: there is nothing to save.

        Args:
            message: of the `Interrupted` that it ends with.
        Raises: Interrupted, also where something else came of the signal, or nothing at all: code
            in C, and what clears up when an object goes, may drop what a handler raises.
        """
        try:
            self._message = message
            self._raise_received(message)
            yield
            self._raise_received(message)
        except _Signalled as error:
            raise error.as_interrupted() from None
        except Exception as error:
            if self.received and not isinstance(error, Interrupted):
                raise Interrupted(message, self.received) from error
            raise
        finally:
            self._message = None

    def _raise_received(self, message: str) -> None:
        if self.received:
            raise _Signalled(message, self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that is still starting, with nothing to save
            os._exit(128 + number)
        if number == signal.SIGHUP:
            leave_closed_terminal()
        launcher_gone = self._launcher is not None and self._launcher.take_signal()
        if self.received:
            if launcher_gone:
                return
            if self._passes_on and number == self.received:
                self._passes_on = False
                return
            os._exit(128 + number)
        self.received = number
        if self._message is not None:
            raise _Signalled(self._message, number)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, _Signalled):  # it came between the end of a block and of `at_once`
            raise error.as_interrupted() from None
