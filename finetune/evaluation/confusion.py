"""Sparse confusion matrix, and its JSON form in results.json.

This module does not import torch, so that reports start fast.
"""

# K classes, M non-zero cells of the matrix

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_DENSE_CLASSES", "ConfusionMatrix", "parse_confusion_matrix"]

MAX_DENSE_CLASSES = 1000  # with more classes, results.json lists the non-zero cells instead


@dataclass(frozen=True)
class ConfusionMatrix:
    """A sparse confusion matrix: one entry for each non-zero cell.

    Attributes:
        true_M, predicted_M: true and predicted class of each cell, sorted by both.
        count_M: number of images in each cell, at least 1.
        num_classes: K.
    """

    true_M: NDArray[np.int64]
    predicted_M: NDArray[np.int64]
    count_M: NDArray[np.int64]
    num_classes: int

    @property
    def support_K(self) -> NDArray[np.int64]:
        """Number of images of each true class."""
        return self._count_by_class(self.true_M, self.count_M)

    @property
    def num_predicted_K(self) -> NDArray[np.int64]:
        """Number of images that were predicted as each class."""
        return self._count_by_class(self.predicted_M, self.count_M)

    @property
    def true_positives_K(self) -> NDArray[np.int64]:
        """Number of correctly predicted images of each class."""
        return self._count_by_class(
            self.true_M, np.where(self.true_M == self.predicted_M, self.count_M, 0)
        )

    def _count_by_class(
        self, class_M: NDArray[np.int64], count_M: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return np.bincount(class_M, count_M, minlength=self.num_classes).astype(np.int64)

    @classmethod
    def from_dense(cls, rows: Sequence[Sequence[int]]) -> ConfusionMatrix:
        """Build from a dense matrix: a row per true class, a column per predicted class."""
        counts_KK = np.array(rows, dtype=np.int64).reshape(len(rows), len(rows))
        true_M, predicted_M = np.nonzero(counts_KK)
        return cls(true_M, predicted_M, counts_KK[true_M, predicted_M], num_classes=len(rows))

    def most_confused_pairs(self, limit: int) -> list[tuple[int, int, int]]:
        """Return the largest off-diagonal cells as (true, predicted, count)."""
        rows = np.flatnonzero(self.true_M != self.predicted_M)
        # stable sort: equal counts stay in class order
        rows = rows[np.argsort(-self.count_M[rows], kind="stable")][:limit]
        columns = (self.true_M, self.predicted_M, self.count_M)
        return list(zip(*(column[rows].tolist() for column in columns), strict=True))

    def select_classes(self, limit: int) -> NDArray[np.int64]:
        """Select up to `limit` classes: the most confused, then the most frequent.

        Returns: class indices in ascending order.
        """
        pairs = self.most_confused_pairs(10 * limit)
        confused = (index for true, predicted, _ in pairs for index in (true, predicted))
        frequent = np.argsort(-self.support_K, kind="stable")[:limit].tolist()
        return np.sort(list(dict.fromkeys([*confused, *frequent]))[:limit])

    def to_dense(self, classes: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the dense matrix, a row per true class, of all classes or of the given ones."""
        classes = np.arange(self.num_classes) if classes is None else classes
        position_K = np.full(self.num_classes, -1)
        position_K[classes] = np.arange(len(classes))
        rows_M, columns_M = position_K[self.true_M], position_K[self.predicted_M]
        selected_M = (rows_M >= 0) & (columns_M >= 0)
        counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
        counts[rows_M[selected_M], columns_M[selected_M]] = self.count_M[selected_M]
        return counts

    def to_json(self) -> list[list[int]] | dict[str, list[int]]:
        """Return the value of "confusion" in results.json, which `parse_confusion_matrix` reads."""
        if self.num_classes <= MAX_DENSE_CLASSES:
            rows: list[list[int]] = self.to_dense().tolist()
            return rows
        columns = {"true": self.true_M, "predicted": self.predicted_M, "count": self.count_M}
        return {name: column.tolist() for name, column in columns.items()}


def parse_confusion_matrix(metrics: Mapping[str, Any]) -> ConfusionMatrix | None:
    """Parse the confusion matrix in a split's metrics, in its dense or its sparse form.

    Args:
        metrics: a split's metrics, such as "test" of results.json; they may be damaged.
    Returns: the matrix, or None if it is missing or invalid.
    """
    confusion, per_class = metrics.get("confusion"), metrics.get("per_class")
    if isinstance(confusion, list):
        if not all(_is_count_list(row, length=len(confusion)) for row in confusion):
            return None
        return ConfusionMatrix.from_dense(confusion)
    if not isinstance(confusion, dict) or not isinstance(per_class, list):
        return None
    columns = [confusion.get(name) for name in ("true", "predicted", "count")]
    if not all(_is_count_list(column, length=len(columns[0] or ())) for column in columns):
        return None
    true_M, predicted_M, count_M = (np.array(column, dtype=np.int64) for column in columns)
    if max(true_M.max(initial=0), predicted_M.max(initial=0)) >= len(per_class):
        return None
    return ConfusionMatrix(true_M, predicted_M, count_M, num_classes=len(per_class))


def _is_count_list(values: Any, *, length: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == length
        and all(type(value) is int and 0 <= value < 1 << 53 for value in values)
    )
