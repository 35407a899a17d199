"""Errors across ranks: all processes of a launch end together, and the cause is printed once.

No process outlives its launcher, and no rank waits forever for another: a rank that fails writes
its error to a shared store, and the others read it when their connection breaks.

torch's `@record` does not replace this. It writes a rank's error to a file for the launcher's
report; the other ranks still end with an error of gloo or NCCL about a lost connection. That error
would be printed next to the cause, and rank 0 would record it in run.json instead of the cause.
srun prints no such report.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from finetune.errors import (
    DivergedError,
    FinetuneError,
    Interrupted,
    RecipeError,
    SetupError,
    is_lost_connection,
)
from finetune.training.launcher import Launcher

__all__ = ["RankErrors", "error_from_rank"]

POLL_SECONDS = 0.5
STORE_TIMEOUT_SECONDS = 3.0  # a store on this machine or network answers in milliseconds
LINGER_SECONDS = 5.0  # other ranks wait this long for rank 0 to write run.json


class RankErrors:
    """Share the cause of a failure between ranks, so that one message names it.

    The ranks write to the store of the launcher (or of rank 0), which outlives their connections.

    Args:
        rank, world_size: index of this process and number of processes.
        launch_id: number of this launch, the same on every rank; other launches may share the
            store.
        timeout_seconds: timeout of collectives and of the store, shown in messages.
        launcher: launcher of this process; once it has ended, the store is not used.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        launch_id: int,
        timeout_seconds: float,
        launcher: Launcher | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._launcher = launcher
        self._timeout_seconds = timeout_seconds
        self._prefix = f"finetune/{launch_id}"
        self._known_cause: BaseException | None = None
        self._store: torch.distributed.TCPStore | None = None
        if world_size > 1 and "MASTER_ADDR" in os.environ:
            self._store = torch.distributed.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=timeout_seconds),
            )

    @contextlib.contextmanager
    def report_cause(self) -> Iterator[None]:
        """Report an error of the block to the other ranks.

        Raises: the error of the block; if that is only a lost connection, the error of the rank
            that failed first.
        """
        try:
            yield
        except BaseException as error:
            cause = self._find_cause(error)
            if cause is error:
                raise
            raise cause from error

    @contextlib.contextmanager
    def end_rank_0_first(self) -> Iterator[None]:
        """If all ranks fail with the same error, let rank 0 print it and end first.

        The launcher kills the other ranks as soon as one ends. Errors are shared in the same way as
        by `report_cause`.
        """
        try:
            with self.report_cause():
                yield
        except BaseException as error:
            if self.world_size > 1 and self.rank == 0:
                self._call_store(lambda store: store.set(f"{self._prefix}/ended", "0"))
            elif self.world_size > 1 and _ends_every_rank(error):
                self._wait_until(lambda: self._read_key("ended") is not None, LINGER_SECONDS)
                time.sleep(POLL_SECONDS)  # until rank 0 has printed its message
            raise

    def _find_cause(self, error: BaseException) -> BaseException:
        if self.world_size == 1 or error is self._known_cause or isinstance(error, GeneratorExit):
            return error
        self._known_cause = (
            self._cause_of_lost_connection(error) if is_lost_connection(error) else error
        )
        if self._known_cause is error and not getattr(error, "printed_by_other_rank", False):
            self._publish_error(error)
        return self._known_cause

    def _publish_error(self, error: BaseException) -> None:
        """Write an error to the store; ranks that fail later do not print the same error."""
        public_error = (
            error if isinstance(error, FinetuneError) else FinetuneError(type(error).__name__)
        )
        report = {
            "rank": self.rank,
            "exit_code": getattr(error, "exit_code", 1),
            "code": public_error.code,
            "message": str(public_error),
            "signal": getattr(error, "signal_number", 0),
        }
        first = self._publish_if_first(report)
        already_reported = first["rank"] != self.rank and first["message"] == report["message"]
        if already_reported and not _ends_every_rank(error):  # rank 0 prints shared errors
            error.printed_by_other_rank = True  # type: ignore[attr-defined]

    def _publish_if_first(self, report: dict[str, Any]) -> dict[str, Any]:
        """Write a report unless another rank has written one. Returns: the first report."""
        text = json.dumps(report)
        answer = self._call_store(
            lambda store: store.compare_set(f"{self._prefix}/cause", "", text)
        )
        first: dict[str, Any] = report if answer is None else json.loads(answer)
        return first

    def _cause_of_lost_connection(self, lost: BaseException) -> FinetuneError:
        """Return the error behind a lost connection.

        That is the error of another rank, or an error that names the ranks that do not answer.
        """
        self._call_store(lambda store: store.set(f"{self._prefix}/lost/{self.rank}", "1"))
        others = [rank for rank in range(self.world_size) if rank != self.rank]

        def silent_ranks() -> list[int]:
            return [rank for rank in others if self._read_key(f"lost/{rank}") is None]

        self._wait_until(
            lambda: self._read_key("cause") is not None or not silent_ranks(), STORE_TIMEOUT_SECONDS
        )
        missing = silent_ranks() or others
        ranks = f"rank{'s'[: len(missing) - 1]} {', '.join(map(str, missing))} of {self.world_size}"
        reason = "ended without an error message: killed by a signal, or out of memory"
        if "timed out" in str(lost).lower():
            limit = f"{self._timeout_seconds:g} seconds (run.timeout_seconds)"
            reason = f"no answer within {limit}: hanging, or disconnected from the network"
        report = {
            "rank": self.rank,
            "exit_code": SetupError.exit_code,
            "code": "setup.lost_process",
            "message": f"{ranks}: {reason}; continue with --resume",
            "signal": 0,
        }
        first = self._publish_if_first(report)
        if first["signal"]:
            stopped = Interrupted(first["message"], first["signal"])
            stopped.printed_by_other_rank = self.rank != 0
            return stopped
        error = error_from_rank(first["message"], first["exit_code"], first["code"])
        error.printed_by_other_rank = first["rank"] != self.rank
        return error

    def _read_key(self, key: str) -> str | None:
        name = f"{self._prefix}/{key}"

        def read(store: torch.distributed.TCPStore) -> str | None:
            return store.get(name).decode() if store.check([name]) else None

        return self._call_store(read)

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._store is not None and not condition() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _call_store(self, request: Callable[[torch.distributed.TCPStore], Any]) -> Any:
        """Send a request to the store. Returns: its answer; None if the store does not answer."""
        answers: list[Any] = []
        store = self._store
        if store is None or (self._launcher is not None and self._launcher.has_ended):
            return None

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the process of the store has ended
                answers.append(request(store))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(STORE_TIMEOUT_SECONDS)
        if not answers:
            self._store = None  # from now on, each rank prints its own error
            return None
        return answers[0].decode() if isinstance(answers[0], bytes) else answers[0]


def error_from_rank(message: str, exit_code: int, code: str) -> FinetuneError:
    """Rebuild another rank's error on this rank; it is marked as printed by that rank."""
    error = FinetuneError(message, code=code)
    error.exit_code, error.printed_by_other_rank = exit_code, True
    return error


def _ends_every_rank(error: BaseException) -> bool:
    """True if every rank ends with this error, or if another rank failed and prints it."""
    is_shared = isinstance(error, (Interrupted, DivergedError, RecipeError))
    return is_shared or getattr(error, "printed_by_other_rank", False)
