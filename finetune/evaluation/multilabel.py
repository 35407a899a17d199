"""Multi-label metrics: average precision, F1, and the threshold of each class.

All logits are kept in host memory, 4 bytes per image and class on each process.
"""

# N images, B batch, K classes

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from finetune.errors import DataError, DivergedError
from finetune.evaluation.metrics import mean_ignoring_none, per_class_rates

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DEFAULT_THRESHOLD",
    "MultilabelMetrics",
    "chance_mean_average_precision",
    "sigmoid_probabilities",
]

DEFAULT_THRESHOLD = 0.5  # for a class without a fitted threshold
_CHUNK_ROWS = 1 << 14  # images converted to float64 per chunk


def sigmoid_probabilities(logits_NK: Tensor) -> NDArray[np.float64]:
    """Compute sigmoid(logits) in float64 on the host, to compare with thresholds."""
    return logits_NK.detach().cpu().double().sigmoid().numpy()


class MultilabelMetrics:
    """Accumulate the logits of a split and compute multi-label metrics from them.

    Args:
        labels_NK: labels of the whole split, 0 or 1, on any device.
        thresholds: K probabilities; a class is predicted if its probability reaches its threshold.
            If None, the thresholds with the best F1 on this split are fitted.
    """

    def __init__(self, labels_NK: Tensor, thresholds: Sequence[float] | None = None) -> None:
        self._labels_NK = labels_NK.cpu().numpy()
        self._logit_batches: list[Tensor] = []
        self.thresholds = None if thresholds is None else [float(each) for each in thresholds]

    def update(self, logits_BK: Tensor, *_: object) -> None:
        """Keep the logits of a batch; batches must come in the order of the split."""
        self._logit_batches.append(logits_BK.float().cpu())

    def compute(self, accelerator: Accelerator) -> dict[str, Any]:
        """Compute the metrics over all processes; each holds one contiguous part of the split.

        Returns: "loss", the mean binary cross-entropy over images and classes in nats; "map", the
            mean average precision over the classes that occur; "macro_f1", the mean F1 over the
            classes where it is not None; "micro_f1", over all labels together; "examples"; and
            "per_class". In "per_class", "ap" and "recall" are None for a class without images,
            "precision" for a class that was never predicted, "f1" if recall and precision are None.
        Raises: DivergedError if a logit is not finite; DataError if no image has a label.
        """
        labels_NK, logits_NK = self._labels_NK, self._gather_logits(accelerator)
        if not labels_NK.any():
            message = "evaluation: no image of the split has a label; add labeled images"
            raise DataError(message, code="data.no_labels")
        num_bad = int((~logits_NK.isfinite().all(1)).sum())
        if num_bad:
            raise DivergedError(
                f"evaluation: the outputs of {num_bad} of {len(logits_NK)} images are not finite; "
                "lower optim.lr, set optim.clip_norm or use run.precision=fp32",
                code="diverged.outputs",
            )
        scores_NK = sigmoid_probabilities(logits_NK)
        self._losses_N = _loss_per_image(logits_NK, labels_NK)
        ap_and_thresholds = [
            _average_precision_and_threshold(column_N, scores_NK[:, k])
            for k, column_N in enumerate(labels_NK.T)
        ]
        if self.thresholds is None:
            self.thresholds = [threshold for _, threshold in ap_and_thresholds]
        self._predicted_NK = scores_NK >= np.array(self.thresholds)
        true_positives_NK = self._predicted_NK & (labels_NK == 1)
        support_K = labels_NK.sum(axis=0, dtype=np.int64)
        num_predicted_K = self._predicted_NK.sum(axis=0)
        rows = per_class_rates(support_K, num_predicted_K, true_positives_NK.sum(axis=0))
        for row, (ap, _), threshold in zip(rows, ap_and_thresholds, self.thresholds, strict=True):
            row |= {"ap": ap, "threshold": threshold}
        num_labels = int(support_K.sum() + num_predicted_K.sum())
        return {
            "loss": math.fsum(self._losses_N) / len(labels_NK),
            "map": mean_ignoring_none(row["ap"] for row in rows),
            "macro_f1": mean_ignoring_none(row["f1"] for row in rows),
            "micro_f1": 2 * int(true_positives_NK.sum()) / num_labels,
            "examples": len(labels_NK),
            "per_class": rows,
        }

    def top_losses(self, limit: int) -> list[dict[str, Any]]:
        """Return the wrong predictions with the largest loss; call `compute` first.

        A prediction is wrong unless it has exactly the labels of the image.

        Returns: {"index", "labels", "predicted", "loss"} for each image; "labels" and "predicted"
            are class indices.
        """
        wrong = np.flatnonzero((self._predicted_NK != self._labels_NK).any(axis=1))
        order = wrong[np.argsort(-self._losses_N[wrong], kind="stable")][:limit]
        return [
            {
                "index": index,
                "labels": np.flatnonzero(self._labels_NK[index]).tolist(),
                "predicted": np.flatnonzero(self._predicted_NK[index]).tolist(),
                "loss": float(self._losses_N[index]),
            }
            for index in order.tolist()
        ]

    def _gather_logits(self, accelerator: Accelerator) -> Tensor:
        """Concatenate the logits of all processes; each holds a slice, so they stay in order."""
        own_NK = torch.cat([torch.zeros(0, self._labels_NK.shape[1]), *self._logit_batches])
        self._logit_batches.clear()
        if accelerator.num_processes == 1:
            return own_NK
        own_NK = own_NK.to(accelerator.device)
        sizes = torch.as_tensor(accelerator.gather(torch.tensor([len(own_NK)]).to(own_NK.device)))
        padded_NK = accelerator.pad_across_processes(own_NK, dim=0)
        parts = torch.as_tensor(accelerator.gather(padded_NK)).cpu().split(len(padded_NK))
        return torch.cat([part[:n] for part, n in zip(parts, sizes.tolist(), strict=True)])


def _loss_per_image(logits_NK: Tensor, labels_NK: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Compute the binary cross-entropy of each image, averaged over classes, in float64."""
    pairs = zip(
        logits_NK.split(_CHUNK_ROWS), torch.from_numpy(labels_NK).split(_CHUNK_ROWS), strict=True
    )
    losses = [
        binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none").mean(1)
        for logits, labels in pairs
    ]
    return torch.cat(losses).numpy()


def _average_precision_and_threshold(
    labels_N: NDArray[np.uint8], scores_N: NDArray[np.float64]
) -> tuple[float | None, float]:
    """Compute the average precision of a class, and the threshold with the largest F1.

    The threshold is halfway between two scores, so rounding on another device changes no
    prediction.

    Returns: (average precision, threshold); (None, DEFAULT_THRESHOLD) for a class without images.
    """
    from sklearn.metrics import precision_recall_curve  # slow to import: half a second

    if not labels_N.any():
        return None, DEFAULT_THRESHOLD
    precision, recall, scores = precision_recall_curve(labels_N, scores_N)
    ap = -float(np.sum(np.diff(recall) * precision[:-1]))
    sums = precision + recall
    f1 = np.divide(2 * precision * recall, sums, out=np.zeros_like(sums), where=sums > 0)[:-1]
    best = len(f1) - 1 - int(f1[::-1].argmax())  # the highest threshold wins a tie
    below = scores[best - 1] if best else 0.0
    return ap, float((below + scores[best]) / 2)


def chance_mean_average_precision(supports: Sequence[int], num_images: int) -> tuple[float, float]:
    """Compute the expected mAP of random scores, and its approximate standard deviation.

    Args:
        supports: number of images of each class.
    Returns: the mean and the standard deviation.
    Source: Bestgen 2015, "Exact expected average precision of the random baseline".
    """
    harmonic = math.fsum(1 / rank for rank in range(1, num_images + 1))
    num_others = max(num_images - 1, 1)
    present = [support for support in supports if support]
    means = [
        ((n - 1) / num_others * (num_images - harmonic) + harmonic) / num_images for n in present
    ]
    # variance of the share of hits among n random draws
    variances = [share * (1 - share) / n for n in present for share in [n / num_images]]
    return math.fsum(means) / len(present), math.sqrt(math.fsum(variances)) / len(present)
