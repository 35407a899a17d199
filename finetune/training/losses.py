"""Loss functions: cross-entropy with class weights, focal loss and logit adjustment.

Multi-label recipes use binary cross-entropy or the asymmetric loss.

The loss of an image does not depend on other images, so the sum over a batch is the same for any
number of micro-batches and processes.
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

from finetune.data.splits import check_class_names
from finetune.recipe.load import OptimSection

__all__ = ["AnyLoss", "ClassificationLoss", "MultilabelLoss", "build_loss", "check_class_weights"]


@dataclass(frozen=True)
class ClassificationLoss:
    """Cross-entropy summed over the images of a batch, with optional weights and focal factor.

    Attributes:
        label_smoothing: share of each target that is distributed evenly over all classes.
        focal_gamma: exponent of the focal factor: a class with predicted probability p gets the
            weight (1 - p) ** focal_gamma.
        class_weight_K: weight of each class; None for equal weights.
        logit_offset_K: logit adjustment, added to the logits; None for no adjustment.
    Source: Lin et al. 2017, "Focal loss for dense object detection", equation 5; Menon et al. 2021,
        "Long-tail learning via logit adjustment", equation 10.
    """

    label_smoothing: float = 0.0
    focal_gamma: float = 0.0
    class_weight_K: Tensor | None = None
    logit_offset_K: Tensor | None = None

    def __call__(self, logits_BK: Tensor, labels_B: Tensor, targets_BK: Tensor | None) -> Tensor:
        """Return the loss summed over the images.

        Args:
            logits_BK: float32 logits.
            labels_B: class indices.
            targets_BK: soft targets of mixed images; None uses the labels.
        """
        if self.logit_offset_K is not None:
            logits_BK = logits_BK + self.logit_offset_K
        if not self.focal_gamma:
            return cross_entropy(
                logits_BK,
                labels_B if targets_BK is None else targets_BK,
                self.class_weight_K,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )
        num_classes = logits_BK.shape[1]
        if targets_BK is None:
            targets_BK = one_hot(labels_B, num_classes).to(logits_BK.dtype)
        smoothing = self.label_smoothing / num_classes
        weights_BK = targets_BK * (1 - self.label_smoothing) + smoothing
        if self.class_weight_K is not None:
            weights_BK = weights_BK * self.class_weight_K
        log_probs_BK = logits_BK.log_softmax(1)
        # 1 - p, clamped to eps: at 0, the gradient of a power below 1 is infinite
        one_minus_p_BK = (-log_probs_BK.expm1()).clamp(min=torch.finfo(log_probs_BK.dtype).eps)
        return -(weights_BK * one_minus_p_BK**self.focal_gamma * log_probs_BK).sum()


@dataclass(frozen=True)
class MultilabelLoss:
    """Multi-label loss: the mean over the classes, summed over the images.

    Attributes:
        label_smoothing: share of each target that is distributed evenly over all classes, as in
            timm's BinaryCrossEntropy.
        asymmetric: (gamma_neg, gamma_pos, clip); None for binary cross-entropy.
    Source: Ridnik et al. 2021, "Asymmetric loss for multi-label classification", equations 5 and 7.
    """

    label_smoothing: float = 0.0
    asymmetric: tuple[float, float, float] | None = None

    def __call__(self, logits_BK: Tensor, labels_BK: Tensor, targets_BK: Tensor | None) -> Tensor:
        """Return the loss summed over the images.

        Args:
            logits_BK: float32 logits.
            labels_BK: labels, 0 or 1.
            targets_BK: soft targets of mixed images, in 0…1; None uses the labels.
        """
        num_classes = logits_BK.shape[1]
        targets_BK = labels_BK.to(logits_BK.dtype) if targets_BK is None else targets_BK
        targets_BK = targets_BK * (1 - self.label_smoothing) + self.label_smoothing / num_classes
        if self.asymmetric is None:
            losses = binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="sum")
            return losses / num_classes
        gamma_neg, gamma_pos, clip = self.asymmetric
        eps = torch.finfo(logits_BK.dtype).eps  # at 0, the gradient of a power below 1 is infinite
        probs_BK = logits_BK.sigmoid()
        shifted_BK = (probs_BK - clip).clamp(min=eps)
        rest_BK = (1 - probs_BK).clamp(min=eps)
        log_rest_BK = (1 - shifted_BK).log() if clip else logsigmoid(-logits_BK)
        terms_BK = targets_BK * rest_BK**gamma_pos * logsigmoid(logits_BK)
        terms_BK = terms_BK + (1 - targets_BK) * shifted_BK**gamma_neg * log_rest_BK
        return -terms_BK.sum() / num_classes


AnyLoss: TypeAlias = ClassificationLoss | MultilabelLoss


def check_class_weights(optim: OptimSection, class_names: Sequence[str]) -> None:
    """Raise RecipeError if `optim.class_weights` names an unknown class."""
    weights = optim.class_weights
    if weights is not None and weights != "balanced":
        check_class_names(weights, class_names, key="optim.class_weights", source="the data")


def build_loss(
    optim: OptimSection,
    counts_K: NDArray[np.int64],
    class_names: Sequence[str],
    device: torch.device,
    *,
    multilabel: bool = False,
) -> AnyLoss:
    """Build the loss of a recipe on a device.

    Args:
        counts_K: images of each class in an epoch. "balanced" class weights are scikit-learn's,
            whose mean over the images is 1; a class without images counts as if it had one.
        multilabel: True if an image can have any number of labels.
    """
    if multilabel:
        section = optim.asymmetric_loss
        gammas = None if section is None else (section.gamma_neg, section.gamma_pos, section.clip)
        return MultilabelLoss(optim.label_smoothing, gammas)
    weights, total, safe_counts_K = optim.class_weights, counts_K.sum(), np.maximum(counts_K, 1)
    class_weight_K = None
    logit_offset_K = optim.logit_adjustment * np.log(safe_counts_K / max(total, 1))
    if weights == "balanced":
        class_weight_K = total / ((counts_K > 0).sum() * safe_counts_K)
    elif weights is not None:
        class_weight_K = np.array([weights.get(name, 1.0) for name in class_names])
    class_weight, logit_offset = (
        None if values_K is None else torch.from_numpy(values_K).to(device, torch.float32)
        for values_K in (class_weight_K, logit_offset_K if optim.logit_adjustment else None)
    )
    return ClassificationLoss(optim.label_smoothing, optim.focal_gamma, class_weight, logit_offset)
