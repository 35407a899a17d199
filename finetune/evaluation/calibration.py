"""Temperature scaling: one number, fitted on validation, that calibrates confidences.

Dividing every logit by a temperature T changes no prediction and no accuracy, only how sure the
network says it is.
Source: Guo et al. 2017, On Calibration of Modern Neural Networks, section 4.2.
"""

# N images, B batch, K classes

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["HeldLogits", "fit_temperature"]

LOWEST, HIGHEST = 0.05, 20.0
_MOST_NUMBERS = 1 << 28  # logits held over all processes: 1 GiB of float32
_NUMBERS_AT_ONCE = 1 << 22  # logits taken to float64 at once: 32 MiB
_ITERATIONS = 60  # halving alone reaches 1e-16 of the range


class HeldLogits:
    """The logits of a split, kept on the host for `fit_temperature`.

    Args:
        num_images: of the whole split, over all processes.
        num_classes: K; where N*K is too much to hold, every n-th image is taken.
    """

    def __init__(self, num_images: int, num_classes: int) -> None:
        self.stride = max(1, -(-num_images * num_classes // _MOST_NUMBERS))
        self._shape = (-(-num_images // self.stride), num_classes)
        self._logits_NK: Tensor | None = None
        self._labels: list[Tensor] = []
        self._held = 0

    def add(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Keep a batch.

        Args:
            logits_BK: any floating type.
            labels_B: in [0, K).
            indices: (B,), places of the images in the split: they decide what is taken, so that it
                is the same on any number of processes.
        """
        taken = torch.from_numpy(np.flatnonzero(indices % self.stride == 0)).to(logits_BK.device)
        if self._logits_NK is None:
            # of all processes; of memory that is not written to the system gives none
            self._logits_NK = torch.empty(self._shape)
        self._logits_NK[self._held : self._held + len(taken)] = logits_BK[taken].float().cpu()
        self._held += len(taken)
        self._labels.append(labels_B[taken].cpu())

    def fit(self, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> float:
        """`fit_temperature` of what was kept; every process must call it."""
        if self._logits_NK is None:
            return fit_temperature(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long), total=total)
        held_NK = self._logits_NK[: self._held]
        return fit_temperature(held_NK, torch.cat(self._labels), total=total)


def fit_temperature(
    logits_NK: Tensor, labels_N: Tensor, *, total: Callable[[Tensor], Tensor] = lambda sums: sums
) -> float:
    """Find the temperature with the lowest cross-entropy.

    The cross-entropy is convex in 1/T, so Newton's method, kept between two bounds, finds the one
    minimum.

    Args:
        logits_NK: of this process; N may be 0.
        labels_N: in [0, K).
        total: adds a vector over processes.
    Returns: T between 0.05 and 20, rounded to 6 digits so that the order of addition over
        processes does not show; 1 where every image is right: the best T would be 0, and every
        confidence 100 %.
    """
    if not total((logits_NK.argmax(1) != labels_N).sum()[None]).any():
        return 1.0
    lowest, highest = 1 / HIGHEST, 1 / LOWEST
    scale = 1.0
    for _ in range(_ITERATIONS):
        slope, curvature = total(_derivatives(logits_NK, labels_N, scale)).tolist()
        if slope == 0:  # at the minimum, or every logit is equal and no T is better than 1
            break
        if slope > 0:
            highest = scale
        else:
            lowest = scale
        newton = scale - slope / curvature if curvature > 0 else lowest
        # a step that leaves the bounds would not come back: halve them instead
        step = newton if lowest < newton < highest else (lowest + highest) / 2
        if abs(step - scale) < 1e-12 * scale:
            break
        scale = step
    return float(f"{1 / scale:.6g}")


def _derivatives(logits_NK: Tensor, labels_N: Tensor, scale: float) -> Tensor:
    """First and second derivative by 1/T of the summed cross-entropy. Returns: (2,) float64."""
    sums = torch.zeros(2, dtype=torch.float64)
    rows = min(4096, max(1, _NUMBERS_AT_ONCE // logits_NK.shape[1]))
    for logits_BK, labels_B in zip(logits_NK.split(rows), labels_N.split(rows), strict=True):
        values_BK = logits_BK.double()
        probabilities_BK = (values_BK * scale).softmax(1)
        mean_B = (probabilities_BK * values_BK).sum(1)
        own_B = values_BK.gather(1, labels_B[:, None])[:, 0]
        sums[0] += (mean_B - own_B).sum()
        sums[1] += (probabilities_BK * (values_BK - mean_B[:, None]).square()).sum()
    return sums
