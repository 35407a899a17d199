"""Temperature scaling: calibrate confidences with one number, fitted on the validation split.

Dividing all logits by a temperature T changes the confidences, but no prediction and no accuracy.
Source: Guo et al. 2017, On Calibration of Modern Neural Networks, section 4.2.
"""

# N images, B batch, K classes

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["TemperatureFitter", "fit_temperature"]

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
MAX_KEPT_LOGITS = 1 << 27  # over all processes: 512 MiB of float32
LOGITS_PER_CHUNK = 1 << 22  # 32 MiB of float64
_MAX_ITERATIONS = 60  # bisection alone reaches 1e-16 of the range
_HASH_MULTIPLIER = 2654435761  # 2**32 divided by the golden ratio
_NUM_FOLDS = 5  # of the cross-validation that decides whether a temperature is kept


class TemperatureFitter:
    """Keep the logits of a split in host memory and fit one temperature over all processes.

    Args:
        num_images: size of the whole split, over all processes.
        num_classes: K. If num_images * num_classes exceeds `MAX_KEPT_LOGITS`, only every
            `stride`-th image is kept, so that the kept logits fit.
    """

    def __init__(self, num_images: int, num_classes: int) -> None:
        self.stride = max(1, -(-num_images * num_classes // MAX_KEPT_LOGITS))
        self._shape = (-(-num_images // self.stride), num_classes)
        self._logits_NK: Tensor | None = None
        self._labels: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._num_kept = 0

    def update(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Keep a batch.

        Args:
            logits_BK: logits of any floating-point dtype.
            labels_B: class indices in [0, K).
            indices: (B,), positions of the images in the split. They decide which images are kept,
                and their cross-validation fold, so both are the same for any number of processes.
        """
        kept = torch.from_numpy(np.flatnonzero(indices % self.stride == 0)).to(logits_BK.device)
        if self._logits_NK is None:
            # large enough for the images of all processes; unwritten pages cost no memory
            self._logits_NK = torch.empty(self._shape)
        self._logits_NK[self._num_kept : self._num_kept + len(kept)] = logits_BK[kept].float().cpu()
        self._num_kept += len(kept)
        self._labels.append(labels_B[kept].cpu())
        self._positions.append(torch.from_numpy(indices[kept.cpu().numpy()] // self.stride))

    def compute(self, accelerator: Accelerator) -> float:
        """Fit the temperature to the kept logits; all processes must call this.

        Returns: same as `fit_temperature`.
        """

        def all_reduce(sums: Tensor) -> Tensor:
            sums = sums.to(accelerator.device)
            return torch.as_tensor(accelerator.reduce(sums, "sum")).cpu()

        if self._logits_NK is None:  # this process has no images
            empty = torch.zeros(0, dtype=torch.long)
            return fit_temperature(
                torch.zeros(0, self._shape[1]), empty, positions_N=empty, all_reduce=all_reduce
            )
        return fit_temperature(
            self._logits_NK[: self._num_kept],
            torch.cat(self._labels),
            positions_N=torch.cat(self._positions),
            all_reduce=all_reduce,
        )


def fit_temperature(
    logits_NK: Tensor,
    labels_N: Tensor,
    *,
    positions_N: Tensor | None = None,
    all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> float:
    """Find the temperature with the lowest cross-entropy, if it generalizes to other images.

    On a few validation images that are nearly all correct, the best temperature is far too low for
    new images. So it is kept only if 5-fold cross-validation on the same images confirms it:
    temperatures fitted to the other folds must give a lower cross-entropy, over all folds, than
    T = 1.

    Args:
        logits_NK: logits of the images of this process; N may be 0.
        labels_N: class indices in [0, K).
        positions_N: positions of the images in the split, which decide their fold; 0 … N - 1 by
            default.
        all_reduce: function that sums a tensor over processes.
    Returns: T between 0.05 and 20, rounded to 6 digits, so that it does not depend on the order in
        which processes are summed; 1 if cross-validation does not confirm it, or if every
        prediction is correct, because the optimum would be 0, with every confidence at 100 %.
    """
    if not all_reduce((logits_NK.argmax(1) != labels_N).sum()[None]).any():
        return 1.0
    if positions_N is None:
        positions_N = torch.arange(len(labels_N))
    # hashed: in a split that is sorted by class, every 5th image could be of the same class
    folds_N = ((positions_N * _HASH_MULTIPLIER) >> 16) % _NUM_FOLDS
    held_out_losses = torch.zeros(2, dtype=torch.float64)  # with T fitted to the other folds; T = 1
    for fold in range(_NUM_FOLDS):
        inside_N = folds_N == fold
        temperature = _minimize_loss(logits_NK, labels_N, ~inside_N, all_reduce)
        for values_BK, labels_B in _chunks(logits_NK, labels_N, inside_N):
            for column, divisor in enumerate((temperature, 1.0)):
                held_out_losses[column] += cross_entropy(
                    values_BK / divisor, labels_B, reduction="sum"
                )
    fitted_loss, unscaled_loss = all_reduce(held_out_losses).tolist()
    if fitted_loss >= unscaled_loss:
        return 1.0
    all_N = torch.ones_like(labels_N, dtype=torch.bool)
    return float(f"{_minimize_loss(logits_NK, labels_N, all_N, all_reduce):.6g}")


def _chunks(
    logits_NK: Tensor, labels_N: Tensor, included_N: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the included logits in float64 and their labels, a few rows at a time.

    A copy of all of them would need more memory than the logits themselves.
    """
    chunk_size = min(4096, max(1, LOGITS_PER_CHUNK // logits_NK.shape[1]))
    parts = (tensor.split(chunk_size) for tensor in (logits_NK, labels_N, included_N))
    for logits_BK, labels_B, included_B in zip(*parts, strict=True):
        yield logits_BK[included_B].double(), labels_B[included_B]


def _minimize_loss(
    logits_NK: Tensor,
    labels_N: Tensor,
    included_N: Tensor,
    all_reduce: Callable[[Tensor], Tensor],
) -> float:
    """Return the temperature, between 0.05 and 20, with the lowest cross-entropy.

    The cross-entropy is convex in 1/T, so Newton's method between two bounds finds the minimum.
    """
    lower_bound, upper_bound = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    inverse_temperature = 1.0
    for _ in range(_MAX_ITERATIONS):
        slope, curvature = all_reduce(
            _loss_derivatives(logits_NK, labels_N, included_N, inverse_temperature)
        ).tolist()
        if slope == 0:  # at the minimum, or all logits are equal and every T is equally good
            break
        if slope > 0:
            upper_bound = inverse_temperature
        else:
            lower_bound = inverse_temperature
        newton = inverse_temperature - slope / curvature if curvature > 0 else lower_bound
        # a Newton step outside the bounds may diverge: bisect instead
        step = newton if lower_bound < newton < upper_bound else (lower_bound + upper_bound) / 2
        if abs(step - inverse_temperature) < 1e-12 * inverse_temperature:
            break
        inverse_temperature = step
    return 1 / inverse_temperature


def _loss_derivatives(
    logits_NK: Tensor, labels_N: Tensor, included_N: Tensor, inverse_temperature: float
) -> Tensor:
    """Compute d/d(1/T) and d²/d(1/T)² of the summed cross-entropy. Returns: (2,) float64."""
    sums = torch.zeros(2, dtype=torch.float64)
    for values_BK, labels_B in _chunks(logits_NK, labels_N, included_N):
        probabilities_BK = (values_BK * inverse_temperature).softmax(1)
        mean_B = (probabilities_BK * values_BK).sum(1)
        label_logit_B = values_BK.gather(1, labels_B[:, None])[:, 0]
        sums[0] += (mean_B - label_logit_B).sum()
        sums[1] += (probabilities_BK * (values_BK - mean_B[:, None]).square()).sum()
    return sums
