"""The checkpoints of a run: written in the background, the last and the best of them kept.

Training goes on while a snapshot on the host is written. One is written at a time, and what goes
wrong with it ends the run at the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from finetune.run.checkpoint import Snapshot
from finetune.run.directory import RunDir
from finetune.run.validation import load_json

__all__ = ["Keeper"]


class Keeper:
    """Writes snapshots as checkpoints.

    Args:
        run: opened by this process.
        newest: how many of the last checkpoints stay, each with the best one that it knows.
    """

    def __init__(self, run: RunDir, *, newest: int) -> None:
        self._run = run
        self._newest = newest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the last checkpoint be finished, whatever ends the run; the run's error is the one.

        Raises: SetupError if a checkpoint cannot be written.
        """
        try:
            yield
        except BaseException:
            if self._writing is not None:
                self._writing.exception()  # waits
            raise
        else:
            self.wait()
        finally:
            self._thread.shutdown()

    def write(self, step: int, snapshot: Snapshot) -> None:
        """Begin to write a checkpoint, once the one before it is there.

        Args:
            step: number of optimiser steps done.
            snapshot: nobody else changes it.
        Raises: SetupError if the one before could not be written.
        """
        self.wait()
        self._writing = self._thread.submit(self._publish, step, snapshot)

    def wait(self) -> None:
        """Wait until everything is written. Raises: SetupError if it could not be."""
        self._look(done=False)

    def look(self) -> None:
        """Raise what has gone wrong by now; wait for nothing."""
        self._look(done=True)

    def _look(self, *, done: bool) -> None:
        writing = self._writing
        if writing is not None and (writing.done() or not done):
            self._writing = None
            writing.result()

    def _publish(self, step: int, snapshot: Snapshot) -> None:
        run = self._run
        run.save(step, snapshot.write, needed=snapshot.num_bytes())
        newest = run.steps()[-self._newest :]
        run.prune({*newest, *(best for step in newest if (best := _best_step(run, step)))})


def _best_step(run: RunDir, step: int) -> int | None:
    """The step whose checkpoint holds the best weights, as the one of `step` knows it."""
    try:
        best = load_json(run.folder(step) / "state.json")["best_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # an older checkpoint was damaged; a resume would pass it over, and its best
    return best if isinstance(best, int) else None
