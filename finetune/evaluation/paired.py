"""Compare two models on the same images: McNemar's test, intervals, slices, and limits for CI.

Every function works on one value per image and model. This module does not import torch, so that
the command line checks `--fail-if` at once.
"""

# N images

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.errors import RecipeError
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES
from finetune.formatting import TOO_FEW_IMAGES_NOTE, format_percent, pluralize

__all__ = [
    "MIN_SLICE_IMAGES",
    "FailCondition",
    "compare_correct",
    "compare_loss",
    "describe_difference",
    "format_p_value",
    "mcnemar_test",
    "paired_interval",
    "parse_fail_condition",
    "quartile_slices",
    "rank_slices",
]

MIN_SLICE_IMAGES = 10  # a smaller slice is not tested: it would weaken the tests of the others
_Z = 1.959963984540054  # 95 % of a normal distribution is within this many standard deviations
_ALPHA = 0.05
_PERCENT_METRICS = ("top1", "top5")
_CONDITION = re.compile(r"\s*(top1|top5|loss)\s+(drops|rises)\s+(\d+(?:\.\d+)?)\s*")


def mcnemar_test(fixed: int, broken: int) -> tuple[float, float]:
    """Test whether two models have the same accuracy, by the images that only one has right.

    The exact test raises fewer false alarms than it promises, because counts are discrete. The
    mid-p value counts half of the probability of the observed result, and keeps the promise on
    average.

    Args:
        fixed: number of images that only the second model classifies correctly.
        broken: number of images that only the first model classifies correctly.
    Returns: the mid-p value and the exact p value, both two-sided.
    Source: McNemar 1947; Fagerland, Lydersen and Laake 2013, "The McNemar test for binary
        matched-pairs data: mid-p and asymptotic are better than exact conditional".
    """
    from scipy.stats import binom, binomtest  # takes half a second to import

    total = fixed + broken
    if not total:
        return 1.0, 1.0
    exact = float(binomtest(fixed, total).pvalue)
    mid_p = 1.0 if fixed == broken else exact - float(binom.pmf(fixed, total, 0.5))
    return mid_p, exact


def paired_interval(fixed: int, broken: int, num_images: int) -> tuple[float, float]:
    """Compute the 95 % interval of the difference of two accuracies on the same images.

    Args:
        fixed, broken: see `mcnemar_test`.
        num_images: number of images, at least 1.
    Returns: the lower and upper bound of second minus first accuracy, between -1 and 1.
    Source: Bonett and Price 2012, "Adjusted Wald confidence interval for a difference of binomial
        proportions based on paired data".
    """
    fixed_share, broken_share = ((n + 1) / (num_images + 2) for n in (fixed, broken))
    middle = fixed_share - broken_share
    reach = _Z * math.sqrt((fixed_share + broken_share - middle**2) / (num_images + 2))
    return max(middle - reach, -1.0), min(middle + reach, 1.0)


def compare_correct(first_N: NDArray[np.bool_], second_N: NDArray[np.bool_]) -> dict[str, Any]:
    """Compare which images two models classify correctly.

    Returns: {"a", "b"} (accuracies), "difference" (b minus a), "interval" (its 95 % interval),
        "fixed", "broken", "p_value" (mid-p) and "p_value_exact", see `mcnemar_test`.
    """
    num_images = len(first_N)
    fixed, broken = int((second_N & ~first_N).sum()), int((first_N & ~second_N).sum())
    mid_p, exact = mcnemar_test(fixed, broken)
    return {
        "a": int(first_N.sum()) / num_images,
        "b": int(second_N.sum()) / num_images,
        "difference": (fixed - broken) / num_images,
        "interval": list(paired_interval(fixed, broken, num_images)),
        "fixed": fixed,
        "broken": broken,
        "p_value": mid_p,
        "p_value_exact": exact,
    }


def compare_loss(first_N: NDArray[np.float64], second_N: NDArray[np.float64]) -> dict[str, Any]:
    """Compare the losses of two models, with a paired t-test.

    Returns: the keys "a", "b", "difference", "interval" and "p_value" of `compare_correct`. The
        last two are None for a single image.
    """
    from scipy.stats import ttest_rel

    gaps_N = second_N - first_N
    difference, interval, p_value = float(gaps_N.mean()), None, None
    if len(gaps_N) > 1 and np.ptp(gaps_N) == 0:  # no variance: the t-test divides by it
        interval, p_value = [difference, difference], float(difference == 0)
    elif len(gaps_N) > 1:
        test = ttest_rel(second_N, first_N)
        bounds = test.confidence_interval(1 - _ALPHA)
        interval, p_value = [float(bounds.low), float(bounds.high)], float(test.pvalue)
    return {
        "a": float(first_N.mean()),
        "b": float(second_N.mean()),
        "difference": difference,
        "interval": interval,
        "p_value": p_value,
    }


def quartile_slices(values_N: NDArray[np.float64], text: str) -> dict[str, NDArray[np.bool_]]:
    """Cut images into four slices of about equal size by a value.

    Args:
        values_N: for example the brightness of each image; rounded to whole numbers.
        text: name of a slice, with {low} and {high}.
    Returns: the images of each slice, (N,), by name; empty if all values are equal.
    """
    rounded_N = np.round(values_N).astype(np.int64)
    edges = np.unique(np.quantile(rounded_N, [0.25, 0.5, 0.75], method="inverted_cdf"))
    bins_N = np.searchsorted(edges, rounded_N)
    members = [bins_N == index for index in np.unique(bins_N)]
    if len(members) < 2:
        return {}
    return {
        text.format(low=rounded_N[each_N].min(), high=rounded_N[each_N].max()): each_N
        for each_N in members
    }


def rank_slices(
    slices: Mapping[str, Mapping[str, NDArray[np.bool_]]],
    first_N: NDArray[np.bool_],
    second_N: NDArray[np.bool_],
) -> tuple[list[dict[str, Any]], int]:
    """Compare two models on slices of the images, the largest difference first.

    Slices that remain significant after the correction come first, ordered by the difference that
    the images support: the bound of the 95 % interval that is nearer to 0. A large difference on
    few images may thus come after a smaller one on many. The other slices follow by p value.

    Args:
        slices: for each kind, such as "class", the images of each slice, (N,), by name.
        first_N, second_N: whether each model classifies an image correctly.
    Returns: for each slice a dict with "kind", "name", "images", the keys of `compare_correct`, and
        "p_adjusted" (Benjamini and Hochberg's correction of "p_value" for the number of slices);
        and the number of slices that are too small.
    """
    from scipy.stats import false_discovery_control

    rows, num_small = [], 0
    for kind, by_name in slices.items():
        for name, members_N in by_name.items():
            if (num_images := int(members_N.sum())) < MIN_SLICE_IMAGES:
                num_small += 1
                continue
            compared = compare_correct(first_N[members_N], second_N[members_N])
            rows.append({"kind": kind, "name": name, "images": num_images, **compared})
    if rows:
        adjusted = false_discovery_control([row["p_value"] for row in rows])
        for row, p_adjusted in zip(rows, adjusted.tolist(), strict=True):
            row["p_adjusted"] = p_adjusted
    return sorted(rows, key=_rank), num_small


def _rank(row: Mapping[str, Any]) -> tuple[bool, float]:
    low, high = row["interval"]
    is_significant = row["p_adjusted"] < _ALPHA
    return not is_significant, -max(low, -high) if is_significant else row["p_value"]


@dataclass(frozen=True)
class FailCondition:
    """A limit on the change of a metric from the first model to the second.

    Attributes:
        text: the condition as the user wrote it.
        metric: top1, top5 or loss.
        sign: -1 if the metric must not drop, 1 if it must not rise.
        limit: the largest change that is accepted: percentage points, or nats for the loss.
    """

    text: str
    metric: str
    sign: int
    limit: float

    def violation(self, compared: Mapping[str, Any], num_images: int) -> str | None:
        """Describe the change if it exceeds the limit; None if it does not.

        Args:
            compared: the result of `compare_correct` or `compare_loss` for the metric.
            num_images: number of compared images.
        """
        scale = 100 if self.metric in _PERCENT_METRICS else 1
        change = self.sign * scale * compared["difference"]
        if round(change - self.limit, 9) <= 0:  # 0.5 points may be 0.5000000000000004
            return None
        verb = "drops" if self.sign < 0 else "rises"
        unit = " points" if scale == 100 else ""
        return (
            f"{self.metric} {verb} by {change:.4g}{unit}, "
            f"{describe_difference(self.metric, compared, num_images)}"
        )


def parse_fail_condition(text: str) -> FailCondition:
    """Parse a condition such as "top1 drops 0.5".

    Raises: RecipeError for another text.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise RecipeError(
            f"--fail-if: '{text}' is not a condition; write a metric (top1, top5 or loss), drops "
            'or rises, and a number (points, or nats for the loss), such as "top1 drops 0.5"',
            code="recipe.wrong_value",
        )
    metric, verb, limit = match.groups()
    return FailCondition(text.strip(), metric, -1 if verb == "drops" else 1, float(limit))


def describe_difference(metric: str, compared: Mapping[str, Any], num_images: int) -> str:
    """Format both values of a metric with the interval and the p value of their difference."""
    percent = metric in _PERCENT_METRICS
    scale, digits, unit = (100, 2, " points") if percent else (1, 4, "")
    values = [
        format_percent(compared[key]) if percent else f"{compared[key]:.4f}" for key in ("a", "b")
    ]
    notes = []
    if compared["interval"] is not None:
        low, high = (scale * bound for bound in compared["interval"])
        notes.append(f"95 % interval of the change {low:+.{digits}f} to {high:+.{digits}f}{unit}")
        notes.append(f"p {format_p_value(compared['p_value'])}")
    notes.append(pluralize(num_images, "image"))
    if num_images < TOO_FEW_IMAGES:
        notes.append(TOO_FEW_IMAGES_NOTE)
    return f"from {values[0]} to {values[1]} ({', '.join(notes)})"


def format_p_value(value: float) -> str:
    """Format a p value as `= 0.021` or `< 0.001`."""
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
