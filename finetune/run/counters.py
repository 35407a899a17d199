"""What a checkpoint remembers besides tensors."""

from __future__ import annotations

import dataclasses

__all__ = ["Counters"]


@dataclasses.dataclass
class Counters:
    """The numbers of a run under way.

    Attributes:
        step: optimiser steps done, with skipped ones.
        best: the best value of `run.best` so far, and the step it was found at.
        stale: evaluations since then.
        skipped, skipped_in_row: steps left out because a gradient was not finite.
        seconds: time spent.
        pending: what the meter has summed since the last log line.
        scaler: fp16's loss scale.
    """

    step: int = 0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    seconds: float = 0.0
    pending: list[float] = dataclasses.field(default_factory=list)
    scaler: dict[str, float] | None = None

    def note(self, metric: str, value: float) -> bool:
        """Take an evaluation into account. Returns: whether it is the best so far."""
        lower_is_better = metric.endswith("loss")
        if self.best is None or (value < self.best if lower_is_better else value > self.best):
            self.best, self.best_step, self.stale = value, self.step, 0
            return True
        self.stale += 1
        return False
