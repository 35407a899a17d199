"""Errors across ranks: all processes of a launch end together, and the cause is printed once.

No worker outlives the process that started it, and no rank waits for ever for another: a rank
that fails writes its error into a store, which the others read when their connection breaks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.errors import DivergedError, FinetuneError, Interrupted, RecipeError, SetupError

__all__ = ["Launcher", "RankErrors", "error_of_rank"]

POLL_SECONDS = 0.5
JOIN_SECONDS = 5.0  # for a process that waits for others in C, where no handler runs
ANSWER_SECONDS = 3.0  # a store on the same machine or the next answers in milliseconds
LINGER_SECONDS = 5.0  # for rank 0 to finish the record before a launcher ends it

_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun")
_LAUNCHER_MODULES = ("accelerate.commands.launch", "torch.distributed.run")
_LOST = re.compile(r"gloo|nccl|closed by peer|reset by peer|timed out waiting", re.IGNORECASE)


class Launcher:
    """The process that started this one for a rank: when it ends, this one gets SIGTERM.

    Attributes:
        gone: it has ended.
        joined: set it once the ranks are connected; before, a process may wait in C, where no
            handler runs, and is ended.
    """

    def __init__(self, parent: int) -> None:
        self.gone = False
        self.joined = False
        self._parent = parent
        self._signalled = False
        threading.Thread(target=self._watch, daemon=True, name="launcher").start()

    @classmethod
    def of_this_process(cls) -> Launcher | None:
        """Watch the launcher. Returns: None for a process that was started by hand."""
        parent = os.getppid()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            orphan = parent == 1 and not _is_launcher(parent)
            return cls(-1 if orphan else parent)
        return cls(parent) if _is_launcher(parent) else None

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(POLL_SECONDS)
        self.gone = self._signalled = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(JOIN_SECONDS)
        if not self.joined:
            os._exit(128 + signal.SIGTERM)

    def take_signal(self) -> bool:
        """True, once, for the handler of the signal that was sent from here."""
        signalled, self._signalled = self._signalled, False
        return signalled


def _is_launcher(process: int) -> bool:
    """True if a process is torchrun or `accelerate launch`, by its command line."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(Path(word).name in _LAUNCHERS or word in _LAUNCHER_MODULES for word in words[:4])


class RankErrors:
    """Tells the other ranks of a launch why this one ends, so that one message names the cause.

    The ranks write into the store of the launcher (or of rank 0), which outlives connections.

    Args:
        rank, world: this process and how many there are.
        number: of this launch, the same on every rank; other launches may share the store.
        timeout_seconds: for which a rank waits for the others, for the message.
        launcher: when it has gone, so has the store.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        number: int,
        timeout_seconds: float,
        launcher: Launcher | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self._launcher = launcher
        self._timeout_seconds = timeout_seconds
        self._prefix = f"finetune/{number}"
        self._explained: BaseException | None = None
        self._store: torch.distributed.TCPStore | None = None
        if world > 1 and "MASTER_ADDR" in os.environ:
            self._store = torch.distributed.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=timeout_seconds),
            )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Tell the others why this rank ends, or find out what ended the connection to them."""
        try:
            yield
        except BaseException as error:
            cause = self._explain(error)
            if cause is error:
                raise
            raise cause from error

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Let rank 0 end first where all end alike: a launcher ends the others when one has ended.

        Its errors are `explained`.
        """
        try:
            with self.explained():
                yield
        except BaseException as error:
            if self.world > 1 and self.rank == 0:
                self._ask(lambda store: store.set(f"{self._prefix}/ended", "0"))
            elif self.world > 1 and _is_shared(error):
                self._wait_for(lambda: self._read("ended") is not None, LINGER_SECONDS)
                time.sleep(POLL_SECONDS)  # until it has printed its message
            raise

    def _explain(self, error: BaseException) -> BaseException:
        if self.world == 1 or error is self._explained or isinstance(error, GeneratorExit):
            return error
        self._explained = self._cause_of(error) if _is_lost(error) else error
        if self._explained is error and not getattr(error, "printed_elsewhere", False):
            self._report(error)
        return self._explained

    def _report(self, error: BaseException) -> None:
        """Write an error into the store; a rank that fails alike later need not print it."""
        ours = error if isinstance(error, FinetuneError) else FinetuneError(type(error).__name__)
        report = {
            "rank": self.rank,
            "exit_code": getattr(error, "exit_code", 1),
            "code": ours.code,
            "message": str(ours),
            "signal": getattr(error, "signal_number", 0),
        }
        first = self._first(report)
        elsewhere = first["rank"] != self.rank and first["message"] == report["message"]
        if elsewhere and not _is_shared(error):  # rank 0 prints those
            error.printed_elsewhere = True  # type: ignore[attr-defined]

    def _first(self, report: dict[str, Any]) -> dict[str, Any]:
        """Write a report unless another rank has written one. Returns: the one that counts."""
        text = json.dumps(report)
        answer = self._ask(lambda store: store.compare_set(f"{self._prefix}/cause", "", text))
        first: dict[str, Any] = report if answer is None else json.loads(answer)
        return first

    def _cause_of(self, lost: BaseException) -> FinetuneError:
        """The error of a rank that has lost the others: theirs, or that they do not answer."""
        self._ask(lambda store: store.set(f"{self._prefix}/lost/{self.rank}", "1"))
        others = [rank for rank in range(self.world) if rank != self.rank]

        def silent() -> list[int]:
            return [rank for rank in others if self._read(f"lost/{rank}") is None]

        self._wait_for(lambda: self._read("cause") is not None or not silent(), ANSWER_SECONDS)
        missing = silent() or others
        named = f"rank{'s'[: len(missing) - 1]} {', '.join(map(str, missing))} of {self.world}"
        why = "ended without a word: by a signal, or because memory ran out"
        if "timed out" in str(lost).lower():
            limit = f"{self._timeout_seconds:g} seconds (run.timeout_seconds)"
            why = f"no answer within {limit}: hanging, or cut off from the network"
        report = {
            "rank": self.rank,
            "exit_code": SetupError.exit_code,
            "code": "setup.lost_process",
            "message": f"{named}: {why}; continue with --resume",
            "signal": 0,
        }
        first = self._first(report)
        if first["signal"]:
            stopped = Interrupted(first["message"], first["signal"])
            stopped.printed_elsewhere = self.rank != 0
            return stopped
        error = error_of_rank(first["message"], first["exit_code"], first["code"])
        error.printed_elsewhere = first["rank"] != self.rank
        return error

    def _read(self, key: str) -> str | None:
        name = f"{self._prefix}/{key}"

        def read(store: torch.distributed.TCPStore) -> str | None:
            return store.get(name).decode() if store.check([name]) else None

        return self._ask(read)

    def _wait_for(self, holds: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._store is not None and not holds() and time.monotonic() < until:
            time.sleep(0.1)

    def _ask(self, work: Callable[[torch.distributed.TCPStore], Any]) -> Any:
        """Do something with the store. Returns: None where it does not answer, as after a cut."""
        answer: list[Any] = []
        store = self._store
        if store is None or (self._launcher is not None and self._launcher.gone):
            return None

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store ended with its process
                answer.append(work(store))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS)
        if not answer:
            self._store = None  # from now on each rank prints its own error
            return None
        return answer[0].decode() if isinstance(answer[0], bytes) else answer[0]


def error_of_rank(message: str, exit_code: int, code: str) -> FinetuneError:
    """The error of another rank as one of this; it prints it itself, unless told otherwise."""
    error = FinetuneError(message, code=code)
    error.exit_code, error.printed_elsewhere = exit_code, True
    return error


def _is_shared(error: BaseException) -> bool:
    """True if every rank ends with this error, or only because another one did."""
    alike = isinstance(error, (Interrupted, DivergedError, RecipeError))
    return alike or getattr(error, "printed_elsewhere", False)


def _is_lost(error: BaseException) -> bool:
    """True if the connection to the other ranks has failed, or they took too long."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
