"""The confusion matrix as the pairs of classes that occur, and its form in results.json.

No torch here: reports are made without it.
"""

# K classes, M pairs of classes that occur

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DENSE_CLASSES", "Confusion", "read_confusion"]

DENSE_CLASSES = 1000  # beyond it "confusion" lists the pairs that occur: no K x K matrix is made


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix as the pairs of classes that occur.

    Attributes:
        true_M, said_M: true and predicted class, in ascending order.
        count_M: images of each pair, at least 1.
        num_classes: K.
    """

    true_M: NDArray[np.int64]
    said_M: NDArray[np.int64]
    count_M: NDArray[np.int64]
    num_classes: int

    @property
    def support_K(self) -> NDArray[np.int64]:
        """Images of each true class."""
        return self._sums(self.true_M, self.count_M)

    @property
    def predicted_K(self) -> NDArray[np.int64]:
        """Images that were taken for each class."""
        return self._sums(self.said_M, self.count_M)

    @property
    def hits_K(self) -> NDArray[np.int64]:
        """Images of each class that were taken for it."""
        return self._sums(self.true_M, np.where(self.true_M == self.said_M, self.count_M, 0))

    def _sums(self, class_M: NDArray[np.int64], count_M: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(class_M, count_M, minlength=self.num_classes).astype(np.int64)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Confusion:
        """Take a matrix, a row per true class and a column per predicted one."""
        counts_KK = np.array(rows, dtype=np.int64).reshape(len(rows), len(rows))
        true_M, said_M = np.nonzero(counts_KK)
        return cls(true_M, said_M, counts_KK[true_M, said_M], num_classes=len(rows))

    def most_confused(self, limit: int) -> list[tuple[int, int, int]]:
        """Return the pairs of different classes with the most images: true, predicted, count."""
        rows = np.flatnonzero(self.true_M != self.said_M)
        # stable: equal counts stay in the order of the classes
        rows = rows[np.argsort(-self.count_M[rows], kind="stable")][:limit]
        columns = (self.true_M, self.said_M, self.count_M)
        return list(zip(*(column[rows].tolist() for column in columns), strict=True))

    def classes_to_show(self, limit: int) -> NDArray[np.int64]:
        """Return some classes in order: of the most confused pairs, then those with most images."""
        pairs = self.most_confused(10 * limit)
        confused = (index for true, said, _ in pairs for index in (true, said))
        frequent = np.argsort(-self.support_K, kind="stable")[:limit].tolist()
        return np.sort(list(dict.fromkeys([*confused, *frequent]))[:limit])

    def dense(self, classes: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the matrix, a row per true class, of some classes in this order or of all."""
        classes = np.arange(self.num_classes) if classes is None else classes
        place_K = np.full(self.num_classes, -1)
        place_K[classes] = np.arange(len(classes))
        rows_M, columns_M = place_K[self.true_M], place_K[self.said_M]
        shown_M = (rows_M >= 0) & (columns_M >= 0)
        counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
        counts[rows_M[shown_M], columns_M[shown_M]] = self.count_M[shown_M]
        return counts

    def to_json(self) -> list[list[int]] | dict[str, list[int]]:
        """Return the content of "confusion" in results.json, which `read_confusion` reads."""
        if self.num_classes <= DENSE_CLASSES:
            rows: list[list[int]] = self.dense().tolist()
            return rows
        columns = {"true": self.true_M, "said": self.said_M, "count": self.count_M}
        return {name: column.tolist() for name, column in columns.items()}


def read_confusion(result: Mapping[str, Any]) -> Confusion | None:
    """Read the confusion matrix of a split's figures, as a matrix or as a list of pairs.

    Args:
        result: such as "test" of results.json; it may be damaged.
    Returns: None where there is no such matrix.
    """
    confusion, per_class = result.get("confusion"), result.get("per_class")
    if isinstance(confusion, list):
        if not all(_are_counts(row, length=len(confusion)) for row in confusion):
            return None
        return Confusion.of(confusion)
    if not isinstance(confusion, dict) or not isinstance(per_class, list):
        return None
    columns = [confusion.get(name) for name in ("true", "said", "count")]
    if not all(_are_counts(column, length=len(columns[0] or ())) for column in columns):
        return None
    true_M, said_M, count_M = (np.array(column, dtype=np.int64) for column in columns)
    if max(true_M.max(initial=0), said_M.max(initial=0)) >= len(per_class):
        return None
    return Confusion(true_M, said_M, count_M, num_classes=len(per_class))


def _are_counts(values: Any, *, length: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == length
        and all(type(value) is int and 0 <= value < 1 << 53 for value in values)
    )
