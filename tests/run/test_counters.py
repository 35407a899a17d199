"""The best is remembered with its step, and evaluations without a better one are counted."""

from __future__ import annotations

import pytest

from finetune.run.checkpoint import Counters


@pytest.mark.parametrize("metric, better", [("val.top1", [0.2, 0.3]), ("val.loss", [0.3, 0.2])])
def test_the_best_is_strictly_better_in_the_metrics_own_direction(metric, better) -> None:
    counters = Counters(step=1)
    assert counters.note(metric, better[0])
    counters.step = 2
    assert counters.note(metric, better[1])
    assert not counters.note(metric, better[1])
    assert not counters.note(metric, better[0])
    assert (counters.best, counters.best_step, counters.stale) == (better[1], 2, 2)
