"""Run a check on many random examples, the same ones in every run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, seed, settings

__all__ = ["NUM_EXAMPLES", "SCALARS", "VALUES", "fuzz"]

MAX_SECONDS = 20.0  # for one example, on a busy machine
NUM_EXAMPLES = 6000

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([-1, 0, 2**31, 2**53 + 1, 10**400, 1e308]),
    st.sampled_from(["nan", "1e3", "~", "&a", "*a", "!!x", "done", "running", "fp32"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)


def fuzz(
    strategy: Any, num_examples: int, try_example: Callable[[Any], object]
) -> tuple[int, int, float]:
    """Try random examples.

    Args:
        strategy: the hypothesis strategy.
        num_examples: number of examples.
        try_example: function that returns True for an accepted example, False for a refused one.
    Returns: the number of tried examples, the number of accepted examples, and the longest CPU
        time of an example in seconds.
    """
    tried, accepted, longest = 0, 0, 0.0

    @seed(5)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check_one(example: Any) -> None:
        nonlocal tried, accepted, longest
        started = time.process_time()  # a busy machine is not a slow parser
        accepted += bool(try_example(example))
        tried += 1
        longest = max(longest, time.process_time() - started)

    check_one()
    assert tried >= num_examples // 2
    assert longest < MAX_SECONDS
    return tried, accepted, longest
