"""Exact classification metrics, and mean and standard deviation over seeds.

All sums are integers; losses and confidences are in fixed point. Integer sums do not depend on the
order of addition, so the metrics are identical for any batch size and number of processes.
"""

# N images, B batch, K classes, M non-zero cells of the confusion matrix

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.errors import DataError, DivergedError
from finetune.evaluation.confusion import ConfusionMatrix

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "NUM_BINS",
    "ClassificationMetrics",
    "ImageResults",
    "Metric",
    "TopLosses",
    "gather_rows",
    "mean_ignoring_none",
    "mean_std",
    "per_class_rates",
]

NUM_BINS = 15  # calibration bins of equal width, as in Guo et al. 2017
_FIXED_POINT_BITS = 40  # resolution 1e-12; no overflow up to 8 million images in a batch
_FIXED_POINT_ONE = 1 << _FIXED_POINT_BITS
_MAX_LOSS = float(1 << 31)  # a larger loss counts as infinite
_NUM_FIXED_POINT_SUMS = 1 + NUM_BINS  # loss, and confidence of each bin
_NUM_COUNTERS = 4  # examples, images with bad logits, images with bad labels, top-5 hits
_STATE_SIZES = [_NUM_COUNTERS, _NUM_FIXED_POINT_SUMS, _NUM_FIXED_POINT_SUMS, NUM_BINS, NUM_BINS]


class Metric(Protocol):
    """A metric of a split, updated batch by batch and then computed over all processes."""

    def update(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Add a batch of this process; `indices` are the images' positions in the split."""

    def compute(self, accelerator: Accelerator) -> Any:
        """Compute the result over all processes; each of them must call this."""


class ClassificationMetrics:
    """Single-label classification metrics: loss, accuracies, calibration and confusion matrix.

    `update` only queues work on the device; nothing is copied to the host before `compute`. Needs 8
    bytes of memory per image.

    Args:
        num_classes: K.
        device: device of the sums; use the device of the logits.
        temperature: number by which all logits are divided.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        device: torch.device | str = "cpu",
        temperature: float = 1.0,
    ) -> None:
        device = torch.device(device)
        if device.type == "mps":  # MPS has no float64
            device = torch.device("cpu")
        self.num_classes = num_classes
        self.device = device
        self._temperature = temperature
        self._state = torch.zeros(sum(_STATE_SIZES), dtype=torch.int64, device=device)
        # views of the state, which one reduction sums over processes
        (
            self._counters,
            self._whole_sums,
            self._fraction_sums,
            self._bin_counts,
            self._bin_correct,
        ) = self._state.split(_STATE_SIZES)
        self._class_pairs: list[Tensor] = []  # true * K + predicted; -1 for bad labels or logits

    def update(
        self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64] | None = None
    ) -> None:
        """Add a batch; B may be 0.

        Args:
            logits_BK: logits of any floating-point dtype; converted to float64 here.
            labels_B: class indices in [0, K).
            indices: not used.
        """
        num_classes = self.num_classes
        logits_BK = logits_BK.detach().to(self.device, torch.float64) / self._temperature
        labels_B = labels_B.to(self.device, torch.int64)
        if logits_BK.shape != (len(labels_B), num_classes):
            raise ValueError(
                f"logits {tuple(logits_BK.shape)} do not fit {len(labels_B)} labels of "
                f"{num_classes} classes"
            )
        if not len(labels_B):
            return
        is_label_valid_B = (labels_B >= 0) & (labels_B < num_classes)
        labels_B = labels_B.clamp(0, num_classes - 1)
        log_probs_BK = logits_BK.log_softmax(1)
        losses_B = -log_probs_BK.gather(1, labels_B[:, None])[:, 0]
        # amax and amin of a row with a NaN are NaN
        is_finite_B = logits_BK.amax(1).isfinite() & logits_BK.amin(1).isfinite()
        is_finite_B &= losses_B < _MAX_LOSS
        is_valid_B = is_label_valid_B & is_finite_B
        valid_B = is_valid_B.long()

        ranks_B, predicted_B = _rank_labels(logits_BK, labels_B)
        self._counters += torch.stack(
            [
                valid_B.sum(),
                (~is_finite_B).sum(),
                (~is_label_valid_B).sum(),
                (valid_B * (ranks_B < min(5, num_classes))).sum(),
            ]
        )
        confidence_B = torch.where(is_valid_B, log_probs_BK.amax(1).exp(), 0.5)
        bins_B = ((confidence_B * NUM_BINS).ceil().long() - 1).clamp(0, NUM_BINS - 1)
        self._bin_counts.index_add_(0, bins_B, valid_B)
        self._bin_correct.index_add_(0, bins_B, valid_B * (ranks_B == 0))
        self._class_pairs.append(torch.where(is_valid_B, labels_B * num_classes + predicted_B, -1))
        self._add_fixed_point(
            torch.zeros_like(bins_B), torch.where(is_valid_B, losses_B, 0.0), valid_B
        )
        self._add_fixed_point(1 + bins_B, confidence_B, valid_B)

    def compute(self, accelerator: Accelerator | None = None) -> dict[str, Any]:
        """Compute the metrics as plain numbers and lists, ready for JSON.

        Args:
            accelerator: accelerator that sums over the processes; None for the images of this
                process only.
        Returns: a dict with these keys.

        "loss" is the mean cross-entropy in nats. "top5" counts the best min(5, K) classes, so it
        is 1 for K <= 5. "ece" is the expected calibration error over 15 confidence bins of equal
        width. "confusion" has a row per true class and a column per predicted class; beyond 1,000
        classes it lists the non-zero cells as "true", "predicted" and "count". In "per_class",
        "recall" is None for a class without examples, "precision" for a class that was never
        predicted, "f1" if both are None; "balanced_accuracy" and "macro_f1" are the mean
        recall and F1 over the classes where they are not None. "calibration" is the reliability
        diagram: the bounds, number of images, accuracy and mean confidence of each bin.
        Among equal logits, the lower class index comes first.

        Raises: DivergedError if a logit or a loss was not finite; DataError if a label was out of
            range or the split has no examples.
        """
        state, pairs_N = self._state, torch.cat([self._state[:0], *self._class_pairs])
        if accelerator is not None:
            device = accelerator.device
            state = torch.as_tensor(accelerator.reduce(state.to(device), "sum"))
            # ranks may have different numbers of images; -1 is ignored
            padded_N = accelerator.pad_across_processes(pairs_N.to(device), dim=0, pad_index=-1)
            pairs_N = torch.as_tensor(accelerator.gather(padded_N))
        counters, whole_sums, fraction_sums, bin_counts, bin_correct = state.split(_STATE_SIZES)
        examples, bad_logits, bad_labels, top5 = counters.tolist()
        if bad_labels:
            raise DataError(
                f"evaluation: {bad_labels} labels are outside 0…{self.num_classes - 1}; "
                "check that the model was trained on the classes of the data",
                code="data.wrong_labels",
            )
        if bad_logits:
            raise DivergedError(
                f"evaluation: the outputs of {bad_logits} of {examples + bad_logits} images are "
                "not finite; lower optim.lr, set optim.clip_norm or use run.precision=fp32",
                code="diverged.outputs",
            )
        if not examples:
            raise DataError("evaluation: the split has no images; add some", code="data.empty")
        matrix = self._confusion_matrix(pairs_N)
        wholes, fractions = whole_sums.tolist(), fraction_sums.tolist()
        # Python integers cannot overflow
        sums = [w * _FIXED_POINT_ONE + f for w, f in zip(wholes, fractions, strict=True)]
        correct, counts = bin_correct.tolist(), bin_counts.tolist()
        per_class = per_class_rates(
            matrix.support_K, matrix.num_predicted_K, matrix.true_positives_K
        )
        total_gap = sum(
            abs(c * _FIXED_POINT_ONE - total) for c, total in zip(correct, sums[1:], strict=True)
        )
        return {
            "loss": sums[0] / (_FIXED_POINT_ONE * examples),
            "top1": int(matrix.true_positives_K.sum()) / examples,
            "top5": top5 / examples,
            "ece": total_gap / (_FIXED_POINT_ONE * examples),
            "balanced_accuracy": mean_ignoring_none(row["recall"] for row in per_class),
            "macro_f1": mean_ignoring_none(row["f1"] for row in per_class),
            "examples": examples,
            "per_class": per_class,
            "confusion": matrix.to_json(),
            "calibration": [
                {
                    "low": bin_index / NUM_BINS,
                    "high": (bin_index + 1) / NUM_BINS,
                    "count": count,
                    "accuracy": num_correct / count if count else None,
                    "confidence": total / (_FIXED_POINT_ONE * count) if count else None,
                }
                for bin_index, (count, num_correct, total) in enumerate(
                    zip(counts, correct, sums[1:], strict=True)
                )
            ],
        }

    def _confusion_matrix(self, pairs_N: Tensor) -> ConfusionMatrix:
        """Count the pairs true * K + predicted; -1 is padding, or a bad label or bad logits."""
        pairs_M, count_M = pairs_N[pairs_N >= 0].unique(return_counts=True)
        true_M, predicted_M = (pairs_M // self.num_classes), pairs_M % self.num_classes
        true_M, predicted_M, count_M = (
            column.cpu().numpy() for column in (true_M, predicted_M, count_M)
        )
        return ConfusionMatrix(true_M, predicted_M, count_M, num_classes=self.num_classes)

    def _add_fixed_point(self, slots_B: Tensor, values_B: Tensor, valid_B: Tensor) -> None:
        """Add non-negative values to the fixed-point sums; exact in any order."""
        whole_B = values_B.floor()
        fraction_B = ((values_B - whole_B) * _FIXED_POINT_ONE).round().long()
        self._whole_sums.index_add_(0, slots_B, whole_B.long() * valid_B)
        self._fraction_sums.index_add_(0, slots_B, fraction_B * valid_B)
        # carry, so the fractions cannot overflow
        self._whole_sums += self._fraction_sums >> _FIXED_POINT_BITS
        self._fraction_sums &= _FIXED_POINT_ONE - 1


def mean_std(values: Iterable[float]) -> tuple[float, float | None, int]:
    """Compute the mean, the sample standard deviation (n - 1; None for one value) and n."""
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("mean_std needs at least one value")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return mean, None, 1
    squares = math.fsum((number - mean) ** 2 for number in numbers)
    return mean, math.sqrt(squares / (len(numbers) - 1)), len(numbers)


def _rank_labels(logits_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rank of each label among the logits (0 is the best) and the predicted class.

    Counting larger logits gives the same result on every device; topk orders ties arbitrarily.
    """
    label_logit_B1 = logits_BK.gather(1, labels_B[:, None])
    classes_K = torch.arange(logits_BK.shape[1], device=logits_BK.device)
    ahead_BK = (logits_BK > label_logit_B1) | (
        (logits_BK == label_logit_B1) & (classes_K < labels_B[:, None])
    )
    best_B1 = logits_BK.amax(1, keepdim=True)
    # the first class with the largest logit; class 0 if the row has a NaN
    predicted_B = (logits_BK == best_B1).byte().argmax(1)
    return ahead_BK.sum(1, dtype=torch.int32), predicted_B


def per_class_rates(
    support_K: NDArray[np.int64],
    num_predicted_K: NDArray[np.int64],
    true_positives_K: NDArray[np.int64],
) -> list[dict[str, Any]]:
    """Compute support, recall, precision and F1 of each class; None if the denominator is 0.

    Args:
        support_K: number of images of each class.
        num_predicted_K: number of images predicted as each class.
        true_positives_K: number of images of each class that were predicted as it.
    """
    counts = zip(
        true_positives_K.tolist(), support_K.tolist(), num_predicted_K.tolist(), strict=True
    )
    return [
        {
            "support": support,
            "recall": hits / support if support else None,
            "precision": hits / predicted if predicted else None,
            "f1": 2 * hits / (support + predicted) if support + predicted else None,
        }
        for hits, support, predicted in counts
    ]


def mean_ignoring_none(values: Iterable[float | None]) -> float:
    """Compute the mean of the values that are not None; there must be at least one."""
    return statistics.fmean(value for value in values if value is not None)


Mistake = dict[str, Any]
_MISTAKE_KEYS = ("index", "label", "predicted", "confidence", "loss")


class TopLosses:
    """Collect the wrong predictions with the largest losses.

    Args:
        limit: number of wrong predictions to keep.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._mistakes: list[Mistake] = []  # of this process

    def update(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Add a batch.

        Args:
            logits_BK: finite logits of any floating-point dtype.
            labels_B: class indices in [0, K).
            indices: (B,), positions of the images in the split.
        """
        log_probs_BK = logits_BK.double().log_softmax(1)
        losses_B = -log_probs_BK.gather(1, labels_B[:, None])[:, 0]
        confidence_B, predicted_B = log_probs_BK.max(1)
        losses_B = torch.where(predicted_B == labels_B, -1.0, losses_B)
        # stable sort: equal losses stay in the order of the split
        order = losses_B.argsort(descending=True, stable=True)[: self.limit]
        columns = (labels_B, predicted_B, confidence_B.exp(), losses_B)
        values = zip(*(column[order].tolist() for column in columns), strict=True)
        rows = zip(indices[order.numpy()].tolist(), values, strict=True)
        mistakes = [
            dict(zip(_MISTAKE_KEYS, (index, *row), strict=True))
            for index, row in rows
            if row[-1] > 0
        ]
        self._mistakes = self._select([*self._mistakes, *mistakes])

    def compute(self, accelerator: Accelerator) -> list[Mistake]:
        """Return the mistakes with the largest losses over all processes, largest loss first.

        Returns: {"index", "label", "predicted", "confidence", "loss"} for each image.
        """
        if accelerator.num_processes == 1:
            return self._mistakes
        # one tensor of the same shape on every rank; float64 represents every index exactly
        table = torch.full((self.limit, len(_MISTAKE_KEYS)), -1.0, dtype=torch.float64)
        for row, mistake in enumerate(self._mistakes):
            table[row] = torch.tensor(list(mistake.values()), dtype=torch.float64)
        rows = torch.as_tensor(accelerator.gather(table.to(accelerator.device))).tolist()
        return self._select(
            {"index": int(row[0]), "label": int(row[1]), "predicted": int(row[2])}
            | {"confidence": row[3], "loss": row[4]}
            for row in rows
            if row[0] >= 0
        )

    def _select(self, mistakes: Iterable[Mistake]) -> list[Mistake]:
        largest_first = sorted(mistakes, key=lambda mistake: (-mistake["loss"], mistake["index"]))
        return largest_first[: self.limit]


def gather_rows(batches: Sequence[Tensor], accelerator: Accelerator) -> Tensor:
    """Gather the rows of all processes, sorted by their first column, the index of the image.

    Args:
        batches: rows of this process, of any number each; all have the same columns.
    """
    rows = torch.cat(list(batches))
    if accelerator.num_processes > 1:
        padded = accelerator.pad_across_processes(rows.to(accelerator.device), dim=0, pad_index=-1)
        rows = torch.as_tensor(accelerator.gather(padded)).cpu()
    rows = rows[rows[:, 0] >= 0]  # without padding
    return rows[rows[:, 0].argsort()]


class ImageResults:
    """Collect the result of every image of a single-label split, to compare models image by image.

    Needs 48 bytes of memory per image.
    """

    def __init__(self) -> None:
        self._columns_B6 = [torch.zeros(0, 6, dtype=torch.float64)]  # of this process

    def update(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Add a batch; the arguments are those of `TopLosses.update`."""
        log_probs_BK = logits_BK.double().log_softmax(1)
        ranks_B, predicted_B = _rank_labels(logits_BK, labels_B)
        columns = (
            torch.from_numpy(indices),
            predicted_B,
            ranks_B == 0,
            ranks_B < 5,
            -log_probs_BK.gather(1, labels_B[:, None])[:, 0],
            log_probs_BK.amax(1).exp(),
        )
        # float64 represents every index exactly
        self._columns_B6.append(torch.stack([column.double() for column in columns], dim=1))

    def compute(self, accelerator: Accelerator) -> dict[str, NDArray[Any]]:
        """Return the results over all processes, in the order of the split.

        Returns: arrays (N,): "index", "predicted", "top1" and "top5" (whether the label is the best
            class, or among the best five), "loss" and "confidence".
        """
        table_N6 = gather_rows(self._columns_B6, accelerator)
        dtypes = {"index": int, "predicted": int, "top1": bool, "top5": bool}
        names = ("index", "predicted", "top1", "top5", "loss", "confidence")
        return {
            name: column.numpy().astype(dtypes.get(name, np.float64))
            for name, column in zip(names, table_N6.T, strict=True)
        }
