"""Figures of several labels for an image: average precision, F1, and the threshold of each class.

The scores of all images are held at once, 4 bytes an image and class on each process.
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
from finetune.evaluation.metrics import mean_known, rates

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["DEFAULT_THRESHOLD", "LabelScores", "chance_map", "probabilities"]

DEFAULT_THRESHOLD = 0.5  # of a class whose own was not fitted
_ROWS = 1 << 14  # images taken to float64 at once


def probabilities(logits_NK: Tensor) -> NDArray[np.float64]:
    """Return sigmoid(logits) in float64 on the host, which thresholds are compared with."""
    return logits_NK.detach().cpu().double().sigmoid().numpy()


class LabelScores:
    """The logits of a split, and what they say of its labels.

    Args:
        labels_NK: of the whole split, 0 or 1, on any device.
        thresholds: K probabilities from which on a class is said; None: those that are best here.
    """

    def __init__(self, labels_NK: Tensor, thresholds: Sequence[float] | None = None) -> None:
        self._labels_NK = labels_NK.cpu().numpy()
        self._batches: list[Tensor] = []
        self.thresholds = None if thresholds is None else [float(each) for each in thresholds]

    def add(self, logits_BK: Tensor, *_: object) -> None:
        """Keep a batch; the batches come in the order of the split, whose labels are known."""
        self._batches.append(logits_BK.float().cpu())

    def figures(self, accelerator: Accelerator) -> dict[str, Any]:
        """Measure what all processes have kept, each a part of the split in its order.

        Returns: "loss", the mean binary cross-entropy over images and classes in nats; "map", the
            mean of the average precision of the classes that occur; "macro_f1", the mean of the
            other classes' F1; "micro_f1", of all labels together; "examples"; and "per_class", in
            which "ap" and "recall" are None for a class without an image, "precision" for one that
            is never said, "f1" for one that is neither.
        Raises: DivergedError if a logit is not finite; DataError if no image has a label.
        """
        labels_NK, logits_NK = self._labels_NK, self._gathered(accelerator)
        if not labels_NK.any():
            message = "evaluation: no image of the split has a label; add some that have"
            raise DataError(message, code="data.no_labels")
        bad = int((~logits_NK.isfinite().all(1)).sum())
        if bad:
            raise DivergedError(
                f"evaluation: {bad} of {len(logits_NK)} samples have outputs that are not finite; "
                "lower optim.lr, set optim.clip_norm or use run.precision=fp32",
                code="diverged.outputs",
            )
        scores_NK = probabilities(logits_NK)
        self._losses_N = _losses(logits_NK, labels_NK)
        pairs = [_rated(column_N, scores_NK[:, k]) for k, column_N in enumerate(labels_NK.T)]
        if self.thresholds is None:
            self.thresholds = [threshold for _, threshold in pairs]
        self._said_NK = scores_NK >= np.array(self.thresholds)
        hits_NK = self._said_NK & (labels_NK == 1)
        support_K, predicted_K = labels_NK.sum(axis=0, dtype=np.int64), self._said_NK.sum(axis=0)
        rows = rates(support_K, predicted_K, hits_NK.sum(axis=0))
        for row, (ap, _), threshold in zip(rows, pairs, self.thresholds, strict=True):
            row |= {"ap": ap, "threshold": threshold}
        marks = int(support_K.sum() + predicted_K.sum())
        return {
            "loss": math.fsum(self._losses_N) / len(labels_NK),
            "map": mean_known(row["ap"] for row in rows),
            "macro_f1": mean_known(row["f1"] for row in rows),
            "micro_f1": 2 * int(hits_NK.sum()) / marks,
            "examples": len(labels_NK),
            "per_class": rows,
        }

    def mistakes(self, limit: int) -> list[dict[str, Any]]:
        """Return the images whose labels were not said exactly, those with the largest loss first.

        After `figures`. Returns: {"index", "labels", "predicted", "loss"} each; of the classes
            their indices.
        """
        wrong = np.flatnonzero((self._said_NK != self._labels_NK).any(axis=1))
        order = wrong[np.argsort(-self._losses_N[wrong], kind="stable")][:limit]
        return [
            {
                "index": index,
                "labels": np.flatnonzero(self._labels_NK[index]).tolist(),
                "predicted": np.flatnonzero(self._said_NK[index]).tolist(),
                "loss": float(self._losses_N[index]),
            }
            for index in order.tolist()
        ]

    def _gathered(self, accelerator: Accelerator) -> Tensor:
        """The logits of all processes; each has a slice of the split, so they are in its order."""
        own_NK = torch.cat([torch.zeros(0, self._labels_NK.shape[1]), *self._batches])
        self._batches.clear()
        if accelerator.num_processes == 1:
            return own_NK
        own_NK = own_NK.to(accelerator.device)
        sizes = torch.as_tensor(accelerator.gather(torch.tensor([len(own_NK)]).to(own_NK.device)))
        padded_NK = accelerator.pad_across_processes(own_NK, dim=0)
        parts = torch.as_tensor(accelerator.gather(padded_NK)).cpu().split(len(padded_NK))
        return torch.cat([part[:n] for part, n in zip(parts, sizes.tolist(), strict=True)])


def _losses(logits_NK: Tensor, labels_NK: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The binary cross-entropy of each image, the mean over its classes, in float64."""
    pairs = zip(logits_NK.split(_ROWS), torch.from_numpy(labels_NK).split(_ROWS), strict=True)
    losses = [
        binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none").mean(1)
        for logits, labels in pairs
    ]
    return torch.cat(losses).numpy()


def _rated(
    labels_N: NDArray[np.uint8], scores_N: NDArray[np.float64]
) -> tuple[float | None, float]:
    """Average precision of a class, and the threshold of its largest F1.

    The threshold lies halfway between two scores, so that rounding elsewhere moves no image.

    Returns: None and DEFAULT_THRESHOLD for a class without an image.
    """
    from sklearn.metrics import precision_recall_curve  # half a second

    if not labels_N.any():
        return None, DEFAULT_THRESHOLD
    precision, recall, scores = precision_recall_curve(labels_N, scores_N)
    ap = -float(np.sum(np.diff(recall) * precision[:-1]))
    sums = precision + recall
    f1 = np.divide(2 * precision * recall, sums, out=np.zeros_like(sums), where=sums > 0)[:-1]
    best = len(f1) - 1 - int(f1[::-1].argmax())  # of equals the highest threshold
    below = scores[best - 1] if best else 0.0
    return ap, float((below + scores[best]) / 2)


def chance_map(supports: Sequence[int], images: int) -> tuple[float, float]:
    """Return the mAP of scores that know nothing: its expectation, and about how far it spreads.

    Args:
        supports: images of each class.
    Returns: the mean, and a standard deviation.
    Source: Bestgen 2015, "Exact expected average precision of the random baseline".
    """
    harmonic = math.fsum(1 / rank for rank in range(1, images + 1))
    rest = max(images - 1, 1)
    present = [support for support in supports if support]
    means = [((n - 1) / rest * (images - harmonic) + harmonic) / images for n in present]
    # as of the share of n draws that hit
    variances = [share * (1 - share) / n for n in present for share in [n / images]]
    return math.fsum(means) / len(present), math.sqrt(math.fsum(variances)) / len(present)
