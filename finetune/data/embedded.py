"""The embedded datasets: scikit-learn's handwritten digits, and pairs of them."""

from __future__ import annotations

import numpy as np

from finetune.data.encoded_images import ArrayImages
from finetune.data.multilabel import indicator_matrix
from finetune.data.source import Source, Split
from finetune.errors import DataError

__all__ = ["open_embedded"]


def open_embedded(source: str, name: str, *, multilabel: bool) -> Source:
    """Open scikit-learn's digits: 8x8 pixels, scaled from 0..16 to 0..255, gray as RGB.

    The test split is every fifth image of each class, in scikit-learn's order. In digit_pairs, each
    digit of a split is the left half of exactly one pair, and the right half of exactly one pair.

    Args:
        source: source string, for error messages and as the name of the dataset.
        name: "digits" or "digit_pairs".
        multilabel: True for digit_pairs, whose images have several labels; False for digits.
    Raises: DataError if `multilabel` does not match the dataset.
    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn.datasets import load_digits

    if multilabel != (name == "digit_pairs"):
        mismatch = (
            "one label; use embedded:digit_pairs"
            if multilabel
            else "several labels; set data.task=multilabel"
        )
        raise DataError(f"{source}: its images have {mismatch}", code="data.wrong_labels")
    gray, labels = load_digits(return_X_y=True)
    pixels = np.rint(gray.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    images = ArrayImages(np.repeat(pixels, 3, axis=3), "digits")
    labels = labels.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    rows_of = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
    class_names = [str(digit) for digit in range(10)]
    description = (
        "scikit-learn's handwritten digits, 8x8 gray; test is every fifth image of each class"
    )
    if not multilabel:
        splits = {
            split: Split(split, labels[rows], images, rows) for split, rows in rows_of.items()
        }
        return Source(source, splits, class_names, description)
    splits = {}
    for split, rows in rows_of.items():
        right = rows[np.argsort(np.random.PCG64(len(rows)).random_raw(len(rows)), kind="stable")]
        pairs = np.repeat(np.concatenate([pixels[rows], pixels[right]], axis=2), 3, axis=3)
        indices = np.tile(np.arange(len(rows)), 2)
        labels_NK = indicator_matrix(
            indices, np.concatenate([labels[rows], labels[right]]), len(rows), 10
        )
        splits[split] = Split(split, labels_NK, ArrayImages(pairs, f"digit_pairs {split}"))
    return Source(source, splits, class_names, f"pairs of {description}")
