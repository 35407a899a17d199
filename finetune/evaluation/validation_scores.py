"""Scores of the validation images, saved with the model, so that thresholds can be computed later.

An entry of config.json has two scores of each image: the log-odds of the prediction, for
`evaluation.selective`, and the nonconformity of the true class, for `evaluation.conformal`. They
are computed from the logits without temperature. The key "unknown_class" of the entry belongs to
`evaluation.unknown_classes`.
"""

# N images, B batch, K classes

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.errors import WeightsError

__all__ = ["ValidationScores", "decode_array", "encode_array", "log_odds", "nonconformity"]

# Of a larger split, every n-th image is kept: more would hardly lower the bounds.
MAX_KEPT_IMAGES = 10_000
_DTYPES = {"log_odds": "<f4", "nonconformity": "<f4", "label": "<u4"}


@dataclass(frozen=True, eq=False)
class ValidationScores:
    """Scores of the validation images.

    Attributes:
        log_odds: (N,) float32, see the function `log_odds`.
        nonconformity: (N,) float32, of the true class, see the function `nonconformity`; 0 if and
            only if the image was classified correctly.
        label: (N,), class indices.
        split: the split of the images, "val" for a run.
    """

    log_odds: NDArray[np.float32]
    nonconformity: NDArray[np.float32]
    label: NDArray[np.int64]
    split: str

    def __len__(self) -> int:
        return len(self.label)

    @classmethod
    def from_results(
        cls, results: Mapping[str, NDArray[Any]], labels: NDArray[np.int64], *, split: str
    ) -> ValidationScores:
        """Convert the result of `ImageResults.compute`.

        Args:
            results: arrays (N,).
            labels: class indices of all images of the split.
            split: name of the split.
        """
        rows = slice(None, None, max(1, -(-len(results["index"]) // MAX_KEPT_IMAGES)))
        kept = {name: column[rows] for name, column in results.items()}
        nonconformities = np.where(kept["top1"], 0, kept["loss"])
        return cls(
            log_odds(torch.from_numpy(kept["confidence"])).numpy(),
            nonconformities.astype(np.float32),
            labels[kept["index"]],
            split,
        )

    def to_config(self) -> dict[str, Any]:
        """Return the entry of config.json: the split, and little-endian arrays as base64."""
        arrays = {name: encode_array(getattr(self, name), dtype) for name, dtype in _DTYPES.items()}
        return {"split": self.split, **arrays}

    @classmethod
    def from_config(
        cls, entry: Mapping[str, Any], *, num_classes: int, source: str
    ) -> ValidationScores:
        """Read the entry of an untrusted config.json.

        Args:
            entry: the result of `to_config`.
            num_classes: K.
            source: name of the model as the user gave it, for messages.
        Raises: WeightsError if the entry is not valid.
        """
        try:
            odds, scores, labels = (decode_array(entry[name], _DTYPES[name]) for name in _DTYPES)
            is_valid = (
                len(odds) == len(scores) == len(labels)
                and isinstance(entry["split"], str)
                and not (np.isnan(odds) | ~(scores >= 0) | (labels >= num_classes)).any()
            )
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise WeightsError(
                f"{source}: config.json: validation_scores is not valid; compute the scores again: "
                f"finetune eval {source} --fit-temperature",
                code="weights.wrong_config",
            )
        return cls(odds, scores, labels.astype(np.int64), entry["split"])


def encode_array(values: NDArray[Any], dtype: str) -> str:
    """Encode an array as base64, as numbers of a NumPy dtype."""
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def decode_array(text: str, dtype: str) -> NDArray[Any]:
    """Decode the result of `encode_array` as a flat array. Raises: ValueError or TypeError."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).copy()


def log_odds(confidence_B: Tensor) -> Tensor:
    """Convert the softmax confidence of the predicted class to log-odds, which do not round to 1.

    Args:
        confidence_B: (B,) float64.
    Returns: (B,) float32; infinite if the confidence is 1.
    """
    return torch.logit(confidence_B).float()


def nonconformity(probabilities_BK: Tensor) -> Tensor:
    """Compute the nonconformity of each class: the loss if it were true, but 0 for the prediction.

    Args:
        probabilities_BK: softmax without temperature, float64.
    Returns: (B, K) float32.
    """
    scores_BK = -probabilities_BK.log()
    return scores_BK.scatter(1, probabilities_BK.argmax(1, keepdim=True), 0.0).float()
