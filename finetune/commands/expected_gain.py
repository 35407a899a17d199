"""How much an untried configuration may gain, from its recorded accuracies on other image sets.

Each recorded image set predicts how much better or worse than the first configuration another one
is, as a log-odds ratio of the accuracies. Sets that predict the measured configurations well count
more. The gain is the expected improvement over the best measured configuration.

Sources: Jones et al. 1998, "Efficient global optimization of expensive black-box functions"
(expected improvement); Wistuba et al. 2016, "Two-stage transfer surrogate model for automatic
hyperparameter optimization" (image sets weighted by similarity).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

__all__ = ["expected_gains", "log_odds_ratio"]

_SIMILARITY_SCALE = 0.5  # of the differences between recorded and measured log-odds ratios
_MAX_DIFFERENCE = 1.5  # larger ones, as of a run that failed to learn, count as this
_SPREAD = 0.2  # standard deviation of the log-odds ratio on new images
_MARGIN = 0.005  # keeps the log-odds of 0 and 1 finite


def log_odds_ratio(accuracy: float, other: float) -> float:
    """Return the difference of the log-odds of two accuracies."""
    return _log_odds(accuracy) - _log_odds(other)


def _log_odds(accuracy: float) -> float:
    return math.log((accuracy + _MARGIN) / (1 - accuracy + _MARGIN))


def expected_gains(
    recorded: Mapping[str, Mapping[str, float]], first: str, measured: Mapping[str, float]
) -> dict[str, float]:
    """Return the expected gain of each configuration, as a log-odds ratio.

    Args:
        recorded: accuracies by configuration and image set; 0 is expected from one without any.
        first: the configuration that the others are compared with.
        measured: log-odds ratios of the measured configurations on the new images.
    """
    first_accuracies = recorded[first]
    ratios = {
        name: {
            image_set: log_odds_ratio(accuracy, first_accuracies[image_set])
            for image_set, accuracy in accuracies.items()
            if image_set in first_accuracies
        }
        for name, accuracies in recorded.items()
    }
    weights = {}
    for image_set in first_accuracies:
        differences = [
            ratios[name][image_set] - ratio
            for name, ratio in measured.items()
            if image_set in ratios[name]
        ]
        distance = sum(min(abs(each), _MAX_DIFFERENCE) ** 2 for each in differences)
        weights[image_set] = math.exp(-distance / (2 * _SIMILARITY_SCALE**2))
    best = max(measured.values(), default=0.0)
    improvements = {
        name: {each: _expected_improvement(ratio - best) for each, ratio in predicted.items()}
        for name, predicted in ratios.items()
    }
    return {name: _weighted_mean(values, weights) for name, values in improvements.items()}


def _weighted_mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted mean of some values; 0 without values."""
    total = sum(weights[each] for each in values)
    return sum(weights[each] * value for each, value in values.items()) / total if total else 0.0


def _expected_improvement(mean: float) -> float:
    """Return the expected positive part of a log-odds ratio, normal with _SPREAD."""
    z = mean / _SPREAD
    return _SPREAD * (z * NormalDist().cdf(z) + NormalDist().pdf(z))
