"""Exact counts of an evaluation, and mean and spread over seeds.

Everything is an integer, losses and confidences included (fixed point), so that the figures do not
depend on how the samples were split over batches and processes: addition of integers has no order.
"""

# N images, B batch, K classes, M pairs of classes that occur

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.errors import DataError, DivergedError
from finetune.evaluation.confusion import Confusion

__all__ = ["NUM_BINS", "Counts", "Mistakes", "mean_known", "mean_std", "rates", "worst"]

NUM_BINS = 15  # calibration bins of equal width, as in Guo et al. 2017
_FRACTION_BITS = 40  # of a loss or a confidence: 1e-12, and room for 8 million samples in a batch
_ONE = 1 << _FRACTION_BITS
_LARGEST_LOSS = float(1 << 31)  # beyond it a loss is as good as infinite
_SUMS = 1 + NUM_BINS  # loss, confidence of each bin
_HEAD = 4  # examples, samples with bad logits, samples with bad labels, top-5 hits


class Counts:
    """Sums over the samples of a split, and the pair of classes of each.

    They are merged over processes by adding `tensor()` and joining `pairs()`. `add` only queues
    work on the device; nothing is copied to the host before `result`. Memory is 8 bytes an image.

    Args:
        num_classes: K.
        device: where the sums live; the device of the logits.
    """

    def __init__(self, num_classes: int, *, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        if device.type == "mps":  # it has no float64
            device = torch.device("cpu")
        self.num_classes = num_classes
        size = _HEAD + 2 * _SUMS + 2 * NUM_BINS
        self._all = torch.zeros(size, dtype=torch.int64, device=device)
        self._pairs: list[Tensor] = []
        self._bind()

    def add(self, logits_BK: Tensor, labels_B: Tensor) -> None:
        """Count a batch; B may be 0.

        Args:
            logits_BK: any floating type; taken to float64 here.
            labels_B: integers in [0, K).
        """
        num_classes, device = self.num_classes, self._all.device
        logits_BK = logits_BK.detach().to(device, torch.float64)
        labels_B = labels_B.to(device, torch.int64)
        if logits_BK.shape != (len(labels_B), num_classes):
            raise ValueError(
                f"logits {tuple(logits_BK.shape)} do not fit {len(labels_B)} labels of "
                f"{num_classes} classes"
            )
        if not len(labels_B):
            return
        label_ok_B = (labels_B >= 0) & (labels_B < num_classes)
        labels_B = labels_B.clamp(0, num_classes - 1)
        log_probs_BK = logits_BK.log_softmax(1)
        losses_B = -log_probs_BK.gather(1, labels_B[:, None])[:, 0]
        # a NaN is the largest and the smallest of its row
        finite_B = logits_BK.amax(1).isfinite() & logits_BK.amin(1).isfinite()
        finite_B &= losses_B < _LARGEST_LOSS
        ok_B = label_ok_B & finite_B
        one_B = ok_B.long()

        ranks_B, predicted_B = _rank(logits_BK, labels_B)
        self._head += torch.stack(
            [
                one_B.sum(),
                (~finite_B).sum(),
                (~label_ok_B).sum(),
                (one_B * (ranks_B < min(5, num_classes))).sum(),
            ]
        )
        confidence_B = torch.where(ok_B, log_probs_BK.amax(1).exp(), 0.5)
        bins_B = ((confidence_B * NUM_BINS).ceil().long() - 1).clamp(0, NUM_BINS - 1)
        self._bin_counts.index_add_(0, bins_B, one_B)
        self._bin_correct.index_add_(0, bins_B, one_B * (ranks_B == 0))
        self._pairs.append(torch.where(ok_B, labels_B * num_classes + predicted_B, -1))
        self._add_fixed(torch.zeros_like(bins_B), torch.where(ok_B, losses_B, 0.0), one_B)
        self._add_fixed(1 + bins_B, confidence_B, one_B)

    def tensor(self) -> Tensor:
        """All sums as one int64 vector, to be added over processes and given to `load`."""
        return self._all

    def pairs(self) -> Tensor:
        """Return the pair of classes of each sample, (N,) int64, to be joined over processes.

        It is true * K + predicted; -1 is no image: a sample that was refused, or the filling of a
        gather.
        """
        return torch.cat([self._all[:0], *self._pairs])

    def load(self, sums: Tensor, pairs_N: Tensor) -> Counts:
        """Replace sums and pairs, for instance by those of all processes; returns itself."""
        if sums.shape != self._all.shape or sums.dtype != torch.int64:
            raise ValueError(f"expected {tuple(self._all.shape)} int64, got {tuple(sums.shape)}")
        self._all, self._pairs = sums.clone(), [pairs_N.clone()]
        self._bind()
        return self

    def result(self) -> dict[str, Any]:
        """Figures as plain numbers and lists, ready for JSON.

        "loss" is the mean cross-entropy in nats; "top5" counts the best min(5, K) classes, so it
        is 1 for K <= 5; "ece" is the expected calibration error over 15 equal bins of the
        confidence; "confusion" has a row per true class and a column per predicted one, and beyond
        1,000 classes lists the pairs that occur as "true", "said" and "count". In "per_class",
        "recall" is None for a class without examples, "precision" for one that was never predicted,
        "f1" for one that is neither; "balanced_accuracy" and "macro_f1" are the means of the other
        recalls and F1s. "calibration" is the reliability diagram: of each bin of the
        confidence its bounds, number of images, accuracy and mean confidence.
        Among equal logits the lower class index comes first.

        Raises: DivergedError if a logit or a loss was not finite; DataError if a label was out of
            range or there are no examples.
        """
        examples, bad_logits, bad_labels, top5 = self._head.tolist()
        if bad_labels:
            raise DataError(
                f"evaluation: {bad_labels} labels are outside 0…{self.num_classes - 1}; "
                "check that the model has the classes of the data",
                code="data.wrong_labels",
            )
        if bad_logits:
            raise DivergedError(
                f"evaluation: {bad_logits} of {examples + bad_logits} samples have outputs that "
                "are not finite; lower optim.lr, set optim.clip_norm or use run.precision=fp32",
                code="diverged.outputs",
            )
        if not examples:
            raise DataError("evaluation: the split has no examples", code="data.empty")
        confusion = self._confusion()
        whole, fraction = self._whole.tolist(), self._fraction.tolist()
        sums = [w * _ONE + f for w, f in zip(whole, fraction, strict=True)]  # Python integers
        correct, counts = self._bin_correct.tolist(), self._bin_counts.tolist()
        per_class = rates(confusion.support_K, confusion.predicted_K, confusion.hits_K)
        gaps = sum(abs(c * _ONE - total) for c, total in zip(correct, sums[1:], strict=True))
        return {
            "loss": sums[0] / (_ONE * examples),
            "top1": int(confusion.hits_K.sum()) / examples,
            "top5": top5 / examples,
            "ece": gaps / (_ONE * examples),
            "balanced_accuracy": mean_known(row["recall"] for row in per_class),
            "macro_f1": mean_known(row["f1"] for row in per_class),
            "examples": examples,
            "per_class": per_class,
            "confusion": confusion.to_json(),
            "calibration": [
                {
                    "low": place / NUM_BINS,
                    "high": (place + 1) / NUM_BINS,
                    "count": count,
                    "accuracy": right / count if count else None,
                    "confidence": total / (_ONE * count) if count else None,
                }
                for place, (count, right, total) in enumerate(
                    zip(counts, correct, sums[1:], strict=True)
                )
            ],
        }

    def _bind(self) -> None:
        """Name the parts of the vector; they are views of it."""
        sizes = [_HEAD, _SUMS, _SUMS, NUM_BINS, NUM_BINS]
        (
            self._head,
            self._whole,
            self._fraction,
            self._bin_counts,
            self._bin_correct,
        ) = self._all.split(sizes)

    def _confusion(self) -> Confusion:
        """Count the pairs."""
        pairs_N = self.pairs()
        pairs_M, count_M = pairs_N[pairs_N >= 0].unique(return_counts=True)
        true_M, said_M = (pairs_M // self.num_classes), pairs_M % self.num_classes
        true_M, said_M, count_M = (column.cpu().numpy() for column in (true_M, said_M, count_M))
        return Confusion(true_M, said_M, count_M, num_classes=self.num_classes)

    def _add_fixed(self, slots_B: Tensor, values_B: Tensor, one_B: Tensor) -> None:
        """Add non-negative values to the fixed-point sums, exactly whatever the order."""
        whole_B = values_B.floor()
        fraction_B = ((values_B - whole_B) * _ONE).round().long()
        self._whole.index_add_(0, slots_B, whole_B.long() * one_B)
        self._fraction.index_add_(0, slots_B, fraction_B * one_B)
        # carry, so that the fractions cannot overflow
        self._whole += self._fraction >> _FRACTION_BITS
        self._fraction &= _ONE - 1


def mean_std(values: Iterable[float]) -> tuple[float, float | None, int]:
    """Mean, sample standard deviation (n - 1; None for a single value) and n."""
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("mean_std needs at least one value")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return mean, None, 1
    squares = math.fsum((number - mean) ** 2 for number in numbers)
    return mean, math.sqrt(squares / (len(numbers) - 1)), len(numbers)


def _rank(logits_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each label among the classes (0: the prediction) and the predicted class.

    Counting gives the same answer on every device, where the order of topk among equal values
    is undefined.
    """
    own_B1 = logits_BK.gather(1, labels_B[:, None])
    classes_K = torch.arange(logits_BK.shape[1], device=logits_BK.device)
    ahead_BK = (logits_BK > own_B1) | ((logits_BK == own_B1) & (classes_K < labels_B[:, None]))
    best_B1 = logits_BK.amax(1, keepdim=True)
    # the first class with the largest logit; class 0 when a NaN leaves none
    predicted_B = (logits_BK == best_B1).byte().argmax(1)
    return ahead_BK.sum(1, dtype=torch.int32), predicted_B


def rates(
    support_K: NDArray[np.int64], predicted_K: NDArray[np.int64], hits_K: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Return support, recall, precision and F1 of each class; None where nothing is divided by.

    Args:
        support_K, predicted_K: images that have a class, and those of which it is said.
        hits_K: images with both.
    """
    counts = zip(hits_K.tolist(), support_K.tolist(), predicted_K.tolist(), strict=True)
    return [
        {
            "support": s,
            "recall": h / s if s else None,
            "precision": h / p if p else None,
            "f1": 2 * h / (s + p) if s + p else None,
        }
        for h, s, p in counts
    ]


def mean_known(values: Iterable[float | None]) -> float:
    """Return the mean of what is known; some class is, in a split with images."""
    return statistics.fmean(value for value in values if value is not None)


Mistake = dict[str, Any]


class Mistakes:
    """Collects the wrong predictions with the largest losses of one process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.worst: list[Mistake] = []

    def add(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Look at a batch.

        Args:
            logits_BK: finite; any floating type.
            labels_B: in [0, K).
            indices: (B,), places of the images in the split.
        """
        log_probs_BK = logits_BK.double().log_softmax(1)
        losses_B = -log_probs_BK.gather(1, labels_B[:, None])[:, 0]
        confidence_B, predicted_B = log_probs_BK.max(1)
        losses_B = torch.where(predicted_B == labels_B, -1.0, losses_B)
        # a stable order, so that equal losses come by their place in the split
        order = losses_B.argsort(descending=True, stable=True)[: self.limit]
        columns = (labels_B, predicted_B, confidence_B.exp(), losses_B)
        values = zip(*(column[order].tolist() for column in columns), strict=True)
        rows = zip(indices[order.numpy()].tolist(), values, strict=True)
        names = ("index", "label", "predicted", "confidence", "loss")
        found = [dict(zip(names, (index, *row), strict=True)) for index, row in rows if row[-1] > 0]
        self.worst = worst([*self.worst, *found], self.limit)


def worst(mistakes: Iterable[Mistake], limit: int) -> list[Mistake]:
    """The `limit` mistakes with the largest loss, for instance of all processes together."""
    return sorted(mistakes, key=lambda one: (-one["loss"], one["index"]))[:limit]
