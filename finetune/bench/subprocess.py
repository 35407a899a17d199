"""A process for each loop that is measured; it waits while another one works.

So no library's settings reach another, and each one's start and peak of memory are its own.
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

from finetune import processes
from finetune.errors import FinetuneError, SetupError, is_of_memory
from finetune.processes import end_with_parent

__all__ = ["Host", "Line"]

_EVERY_SECONDS = 0.2  # between two reports of progress: each one wakes the other process
_START: Final = "spawn"  # with nothing of this process
_PATIENCE_SECONDS = 10.0  # for a process to end when it is asked to


class Line:
    """The progress and notices of a measured process, on the way to the one that asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps = 0
        self._reported = 0.0

    def tick(self) -> None:
        """Count a step."""
        self._steps += 1
        if (now := time.perf_counter()) - self._reported > _EVERY_SECONDS:
            self._reported = now
            self.flush()

    def flush(self) -> None:
        """Report the steps since the last report."""
        if self._steps:
            self._connection.send(("steps", self._steps))
            self._steps = 0

    def notice(self, message: str) -> None:
        """Tell the user one line."""
        self._connection.send(("notice", message))


class Host:
    """A process with one object in it, whose methods are called from here.

    Args:
        name: of the loop, for messages.
        make: the object's class, of a module; it gets a `Line`, the arguments, and a "folder" for
            its files, which is removed in the end.
        arguments: by keyword.
        steps: told how many steps were done.
        notice: told what the user should know.
    """

    def __init__(
        self,
        name: str,
        make: type,
        arguments: dict[str, Any],
        *,
        steps: Callable[[int], None],
        notice: Callable[[str], None],
    ) -> None:
        self.name = name
        self._steps = steps
        self._notice = notice
        self._folder = tempfile.TemporaryDirectory(prefix="finetune-bench-")
        context = multiprocessing.get_context(_START)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_answer,
            # by name: what it is made of is imported there, as a command would
            args=(
                theirs,
                f"{make.__module__}:{make.__qualname__}",
                {**arguments, "folder": self._folder.name},
            ),
            name=f"bench {name}",
        )
        # An interrupt from the terminal reaches every process; this one alone handles it.
        with _interrupts_ignored():
            self._process.start()
        theirs.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.terminate()  # it waits for a question, or for what nobody wants any more
        self._process.join(_PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._folder.cleanup()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the object there, and wait for its answer.

        Raises: FinetuneError as it was raised there; SetupError if the process was killed;
            RuntimeError for any other error, with its traceback as the cause.
        """
        try:
            self._connection.send((method, arguments))
            while True:
                kind, value = self._connection.recv()
                if kind == "answer":
                    return value
                if kind == "error":
                    raise _as_here(self.name, *value)
                (self._steps if kind == "steps" else self._notice)(value)
        except (EOFError, ConnectionError) as error:
            self._process.join(_PATIENCE_SECONDS)
            raise SetupError(
                f"{self.name}: its process ended with code {self._process.exitcode}; -9 is most "
                "often a machine out of memory: a smaller data.batch_size needs less",
                code="setup.worker_ended",
            ) from error


class _Elsewhere(Exception):
    """The traceback of another process, as text."""


def _as_here(
    name: str, kind: str, message: str, exit_code: int | None, code: str | None, trace: str
) -> Exception:
    """An error of another process as one of this."""
    error: Exception = RuntimeError(f"{name}: {kind}: {message}")
    if exit_code is not None:
        error = FinetuneError(message, code=code)
        error.exit_code = exit_code
    elif kind == MemoryError.__name__:
        error = SetupError(
            f"{name}: out of memory; a smaller data.batch_size needs less", code="setup.memory"
        )
    error.__cause__ = _Elsewhere(trace)
    return error


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Start processes that ignore the terminal's interrupt, also before their first line."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # in another thread than the main one there is nothing to set
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@processes.defer_garbage_collection()
def _answer(connection: Connection, make: str, arguments: dict[str, Any]) -> None:
    """Be the other process: make the object, then answer until nobody asks any more."""
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # The way in which this process was started would else be that of its own workers.
    multiprocessing.set_start_method(None, force=True)
    with contextlib.suppress(OSError):  # standard error was closed
        os.dup2(2, 1)  # what libraries print is no answer
    if "WORLD_SIZE" not in os.environ:
        # One process is measured; a loop that finds several devices would spread over them.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    line, subject = Line(connection), None
    with contextlib.suppress(EOFError, ConnectionError, SystemExit):  # the one that asked has ended
        while True:
            method, keywords = connection.recv()
            try:
                if subject is None:
                    subject = pkgutil.resolve_name(make)(line, **arguments)
                answer = ("answer", getattr(subject, method)(**keywords))
            except Exception as error:
                ends = [getattr(error, name, None) for name in ("exit_code", "code")]
                kind = (MemoryError if is_of_memory(error) else type(error)).__name__
                answer = ("error", (kind, str(error), *ends, traceback.format_exc()))
            # the first answer ends the start, whatever is measured
            processes.resume_garbage_collection()
            line.flush()
            connection.send(answer)
    os._exit(0)  # nothing is kept: taking the libraries down would only cost seconds
