"""Signals that stop a run: after SIGTERM, SIGINT, SIGUSR1 or SIGHUP it saves a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from finetune.errors import Interrupted
from finetune.log import redirect_closed_terminal
from finetune.process_lifecycle import stop_signals
from finetune.training.launcher import Launcher

__all__ = ["StopSignals"]


class _SignalReceived(BaseException):
    """Raised for a signal in `raise_immediately`; `except Exception` does not catch it."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def as_interrupted(self) -> Interrupted:
        """Return the error that callers of `raise_immediately` get."""
        return Interrupted(str(self), self.signal_number)


class StopSignals:
    """Turn the first stop signal into a request to stop; the second one ends the process.

    Args:
        launcher: launcher of this process; None without one. Its end counts as a first SIGTERM, but
            never as the second signal. Slurm and terminals also send each signal to the launcher,
            and the launcher passes it on to this process: that copy does not count as the second
            signal either.
    """

    def __init__(self, launcher: Launcher | None = None) -> None:
        self.received: int = 0
        self._launcher = launcher
        self._may_be_passed_on = launcher is not None
        self._message: str | None = None  # error message; None while signals are deferred
        # True once a signal was raised in the block; it may cause a later error in the block
        self._has_raised = False
        self._previous_handlers: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread receives signals
        for number in stop_signals():
            self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    @contextlib.contextmanager
    def raise_immediately(self, message: str) -> Iterator[None]:
        """Let a signal interrupt the block immediately; for code that may be left at any point.

        Blocks can be nested, also with `deferred`.

        Args:
            message: text of the `Interrupted` error.
        Raises: Interrupted after a signal, even if code in the block replaced the exception or
            dropped it: C code and `__del__` may swallow what a signal handler raises.
        """
        outer = self._message, self._has_raised
        self._message, self._has_raised = message, False
        try:
            self._raise_if_received()
            yield
            self._raise_if_received()
        except _SignalReceived as error:
            raise error.as_interrupted() from None
        except Exception as error:
            # Keep the error if there was no signal, or only a deferred one.
            if self._has_raised and not isinstance(error, Interrupted):
                raise Interrupted(message, self.received) from error
            raise
        finally:
            self._message, self._has_raised = outer

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record signals inside the block, in `received`; raise after the block."""
        outer, self._message = self._message, None
        try:
            yield
        finally:
            self._message = outer
        self._raise_if_received()

    def _raise_if_received(self) -> None:
        if self.received and self._message is not None:
            self._has_raised = True
            raise _SignalReceived(self._message, self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked worker that is still starting
            os._exit(128 + number)
        if number == signal.SIGHUP:
            redirect_closed_terminal()
        launcher_gone = self._launcher is not None and self._launcher.consume_signal()
        if self.received:
            if launcher_gone:
                return
            if self._may_be_passed_on and number == self.received:
                self._may_be_passed_on = False
                return
            os._exit(128 + number)
        self.received = number
        self._raise_if_received()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if isinstance(error, _SignalReceived):  # raised between the end of the block and here
            raise error.as_interrupted() from None
