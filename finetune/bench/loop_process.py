"""Run each measured loop in its own process, which waits while another one works.

This isolates the settings of one library from another, and gives each loop its own start-up time
and peak memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final

from finetune import process_lifecycle
from finetune.errors import FinetuneError, SetupError, is_out_of_memory
from finetune.log import forward_messages, logger
from finetune.process_lifecycle import die_with_parent

__all__ = ["LoopProcess", "ProgressReporter"]

_REPORT_INTERVAL_SECONDS = 0.2  # between two progress reports: each one wakes the parent process
_START_METHOD: Final = "spawn"  # inherits no state from this process
_EXIT_TIMEOUT_SECONDS = 10.0  # for a process to end after SIGTERM


class ProgressReporter:
    """Sends the progress and log messages of a measured process to its parent process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps = 0
        self._reported = 0.0

    def tick(self) -> None:
        """Count a step."""
        self._steps += 1
        if (now := time.perf_counter()) - self._reported > _REPORT_INTERVAL_SECONDS:
            self._reported = now
            self.flush()

    def flush(self) -> None:
        """Report the steps since the last report."""
        if self._steps:
            self._connection.send(("steps", self._steps))
            self._steps = 0


class LoopProcess:
    """A process that holds one object; `call` runs the object's methods there.

    Args:
        name: name of the loop, for messages.
        loop_class: class of the object, at module level; it is called with a `ProgressReporter`,
            `arguments`, and `folder`, a temporary folder for its files.
        arguments: keyword arguments for `loop_class`.
        on_steps: called in this process with the number of new steps.
    """

    def __init__(
        self,
        name: str,
        loop_class: type,
        arguments: dict[str, Any],
        *,
        on_steps: Callable[[int], None],
    ) -> None:
        self.name = name
        self._steps = on_steps
        self._folder = tempfile.TemporaryDirectory(prefix="finetune-bench-")
        context = multiprocessing.get_context(_START_METHOD)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_calls,
            # the class by name, so that the process imports the libraries itself, as a command does
            args=(
                theirs,
                f"{loop_class.__module__}:{loop_class.__qualname__}",
                {**arguments, "folder": self._folder.name},
            ),
            name=f"bench {name}",
        )
        # An interrupt from the terminal reaches every process; only this one handles it.
        with _ignore_interrupts():
            self._process.start()
        theirs.close()

    def __enter__(self) -> LoopProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.terminate()  # no result is needed any more
        self._process.join(_EXIT_TIMEOUT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._folder.cleanup()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the object in the process, and wait for the result.

        Raises: the FinetuneError that the method raised; RuntimeError for any other exception, with
            the remote traceback as its cause; SetupError if the process was killed.
        """
        try:
            self._connection.send((method, arguments))
            while True:
                kind, value = self._connection.recv()
                if kind == "answer":
                    return value
                if kind == "error":
                    raise _rebuild_error(self.name, *value)
                if kind == "steps":
                    self._steps(value)
                else:
                    logger.log(*value)
        except (EOFError, ConnectionError) as error:
            self._process.join(_EXIT_TIMEOUT_SECONDS)
            raise SetupError(
                f"{self.name}: the process ended with code {self._process.exitcode}; -9 usually "
                "means out of memory: reduce data.batch_size",
                code="setup.worker_ended",
            ) from error


class _RemoteTraceback(Exception):
    """Cause of an exception: the traceback in the other process, as text."""


def _rebuild_error(
    name: str, kind: str, message: str, exit_code: int | None, code: str | None, trace: str
) -> Exception:
    """Rebuild an exception that another process raised."""
    error: Exception = RuntimeError(f"{name}: {kind}: {message}")
    if exit_code is not None:
        error = FinetuneError(message, code=code)
        error.exit_code = exit_code
    elif kind == MemoryError.__name__:
        error = SetupError(f"{name}: out of memory; reduce data.batch_size", code="setup.memory")
    error.__cause__ = _RemoteTraceback(trace)
    return error


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore SIGINT in the block; processes started in it inherit this."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # signals can be set in the main thread only
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@process_lifecycle.defer_garbage_collection()
def _serve_calls(connection: Connection, class_name: str, arguments: dict[str, Any]) -> None:
    """Body of the process: create the object, then serve calls until the parent closes the pipe."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Do not pass this process's start method on to its own workers.
    multiprocessing.set_start_method(None, force=True)
    with contextlib.suppress(OSError):  # in case standard error is closed
        os.dup2(2, 1)  # libraries print to stderr
    if "WORLD_SIZE" not in os.environ:
        # Measure one device: a loop that finds several would use all of them.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    forward_messages(lambda message: connection.send(("message", message)))
    line, subject = ProgressReporter(connection), None
    with contextlib.suppress(EOFError, ConnectionError, SystemExit):  # the parent has ended
        while True:
            method, keywords = connection.recv()
            try:
                if subject is None:
                    subject = pkgutil.resolve_name(class_name)(line, **arguments)
                answer = ("answer", getattr(subject, method)(**keywords))
            except Exception as error:
                ends = [getattr(error, name, None) for name in ("exit_code", "code")]
                kind = (MemoryError if is_out_of_memory(error) else type(error)).__name__
                answer = ("error", (kind, str(error), *ends, traceback.format_exc()))
            # start-up ends with the first reply
            process_lifecycle.resume_garbage_collection()
            line.flush()
            connection.send(answer)
    os._exit(0)  # nothing to save, and the teardown of the libraries takes seconds
