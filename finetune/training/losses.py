"""The loss of a recipe: cross-entropy, with class weights, focused on hard images, or adjusted.

Of several labels an image it is binary cross-entropy, or the asymmetric loss.

Every image's loss depends on that image alone, so that the sum over a batch is the same however it
is cut into micro-batches and spread over processes.
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, one_hot

from finetune.data.splits import check_classes
from finetune.recipe.load import OptimSection

__all__ = ["AnyLoss", "Loss", "MultilabelLoss", "loss_of"]


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


@dataclass(frozen=True)
class MultilabelLoss:
    """The loss of several labels: of each image the mean over the classes, summed over the images.

    Attributes:
        label_smoothing: share of each target that is spread over all classes, as timm's
            BinaryCrossEntropy does it.
        asymmetric: gamma_neg, gamma_pos and clip; None: binary cross-entropy.
    Source: Ridnik et al. 2021, "Asymmetric loss for multi-label classification", equations 5 and 7.
    """

    label_smoothing: float = 0.0
    asymmetric: tuple[float, float, float] | None = None

    def __call__(self, logits_BK: Tensor, labels_BK: Tensor, targets_BK: Tensor | None) -> Tensor:
        """Return the sum over the images.

        Args:
            logits_BK: float32.
            labels_BK: 0 or 1.
            targets_BK: shares of 1 of images that are mixed; None: the labels.
        """
        num_classes = logits_BK.shape[1]
        targets_BK = labels_BK.to(logits_BK.dtype) if targets_BK is None else targets_BK
        targets_BK = targets_BK * (1 - self.label_smoothing) + self.label_smoothing / num_classes
        if self.asymmetric is None:
            losses = binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="sum")
            return losses / num_classes
        gamma_neg, gamma_pos, clip = self.asymmetric
        eps = torch.finfo(logits_BK.dtype).eps  # where a power below 1 is steeper than any number
        chance_BK = logits_BK.sigmoid()
        clipped_BK = (chance_BK - clip).clamp(min=eps)
        rest_BK = (1 - chance_BK).clamp(min=eps)
        log_rest_BK = (1 - clipped_BK).log() if clip else logsigmoid(-logits_BK)
        gain_BK = targets_BK * rest_BK**gamma_pos * logsigmoid(logits_BK)
        gain_BK = gain_BK + (1 - targets_BK) * clipped_BK**gamma_neg * log_rest_BK
        return -gain_BK.sum() / num_classes


AnyLoss: TypeAlias = Loss | MultilabelLoss


def loss_of(
    optim: OptimSection,
    counts_K: NDArray[np.int64],
    names: Sequence[str],
    device: torch.device,
    *,
    multilabel: bool = False,
) -> AnyLoss:
    """Make the loss of a recipe, on a device.

    Args:
        counts_K: images of each class in an epoch. Balanced weights are scikit-learn's of these,
            whose mean over the images is 1; a class without images counts as one that has one.
        multilabel: an image has any number of labels.
    Raises: RecipeError for weights of a class that is not there.
    """
    if multilabel:
        section = optim.asymmetric_loss
        gammas = None if section is None else (section.gamma_neg, section.gamma_pos, section.clip)
        return MultilabelLoss(optim.label_smoothing, gammas)
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
