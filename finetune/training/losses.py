"""The loss of a recipe: cross-entropy, with class weights, focused on hard images, or adjusted.

Every image's loss depends on that image alone, so that the sum over a batch is the same however it
is cut into micro-batches and spread over processes.
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from finetune.data.splits import check_classes
from finetune.recipe.load import OptimSection

__all__ = ["Loss", "loss_of"]


@dataclass(frozen=True)
class Loss:
    """The loss summed over the images of a batch.

    Attributes:
        label_smoothing: share of each target that is spread over all classes.
        focal_gamma: power of 1 - p by which the share of a class with probability p counts.
        weight_K: factor of each class's share of the targets; None: 1.
        prior_K: what is added to the logits; None: nothing.
    Source: Lin et al. 2017, "Focal loss for dense object detection", equation 5; Menon et al. 2021,
        "Long-tail learning via logit adjustment", equation 10.
    """

    label_smoothing: float = 0.0
    focal_gamma: float = 0.0
    weight_K: Tensor | None = None
    prior_K: Tensor | None = None

    def __call__(self, logits_BK: Tensor, labels_B: Tensor, targets_BK: Tensor | None) -> Tensor:
        """Return the sum over the images.

        Args:
            logits_BK: float32.
            labels_B: class indices.
            targets_BK: class weights of images that are mixed; None: the labels.
        """
        if self.prior_K is not None:
            logits_BK = logits_BK + self.prior_K
        if not self.focal_gamma:
            return cross_entropy(
                logits_BK,
                labels_B if targets_BK is None else targets_BK,
                self.weight_K,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )
        num_classes = logits_BK.shape[1]
        if targets_BK is None:
            targets_BK = one_hot(labels_B, num_classes).to(logits_BK.dtype)
        even = self.label_smoothing / num_classes
        shares_BK = targets_BK * (1 - self.label_smoothing) + even
        if self.weight_K is not None:
            shares_BK = shares_BK * self.weight_K
        log_probs_BK = logits_BK.log_softmax(1)
        # 1 - p, kept from 0, where a power below 1 is steeper than any number
        rest_BK = (-log_probs_BK.expm1()).clamp(min=torch.finfo(log_probs_BK.dtype).eps)
        return -(shares_BK * rest_BK**self.focal_gamma * log_probs_BK).sum()


def loss_of(
    optim: OptimSection, counts_K: NDArray[np.int64], names: Sequence[str], device: torch.device
) -> Loss:
    """Make the loss of a recipe, on a device.

    Args:
        counts_K: images of each class in an epoch. Balanced weights are scikit-learn's of these,
            whose mean over the images is 1; a class without images counts as one that has one.
        names: of the classes.
    Raises: RecipeError for weights of a class that is not there.
    """
    weights, total, counted_K = optim.class_weights, counts_K.sum(), np.maximum(counts_K, 1)
    weight_K, prior_K = None, optim.logit_adjustment * np.log(counted_K / max(total, 1))
    if weights == "balanced":
        weight_K = total / ((counts_K > 0).sum() * counted_K)
    elif weights is not None:
        check_classes(weights, names, key="optim.class_weights", source="the data")
        weight_K = np.array([weights.get(name, 1.0) for name in names])
    weight, prior = (
        None if values_K is None else torch.from_numpy(values_K).to(device, torch.float32)
        for values_K in (weight_K, prior_K if optim.logit_adjustment else None)
    )
    return Loss(optim.label_smoothing, optim.focal_gamma, weight, prior)
