"""Best checkpoint and early stopping: `run.best` and `run.patience`."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["Counters"]


@dataclasses.dataclass
class Counters:
    """The counters of a run; every checkpoint saves them as state.json.

    Attributes:
        step: number of optimizer steps done, including skipped ones.
        best: the best value so far of the metric `run.best`; None before the first evaluation.
        best_step: the last step that reached `best`; None before the first evaluation.
        stale: number of evaluations since `best` last improved, for early stopping.
        skipped: number of steps skipped because the gradient was not finite.
        skipped_in_row: number of skipped steps since the last step that was not skipped.
        seconds: training time so far, including the time before a resume.
        pending: sums of `TrainMeter` since the last log line.
        scaler: state of the fp16 loss scaler; None in another precision.
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

    def update_best(self, metric: str, value: float) -> bool:
        """Update the best value and the patience counter after an evaluation.

        Ties go to the later step: small validation sets give many ties, and weights trained longer
        at a lower learning rate are better. A tie does not reset the patience counter.

        Args:
            metric: name of the metric, the value of `run.best`.
            value: value of the metric; for "last", the step.
        Returns: True if the value is the best so far.
        """
        gain = math.inf
        if self.best is not None:
            gain = self.best - value if metric.endswith("loss") else value - self.best
        self.stale = 0 if gain > 0 else self.stale + 1
        if gain >= 0:
            self.best, self.best_step = value, self.step
        return gain >= 0

    def should_stop_early(self, patience: int | None) -> bool:
        """True if `patience` evaluations in a row brought no improvement; None never stops."""
        return patience is not None and self.stale >= patience
