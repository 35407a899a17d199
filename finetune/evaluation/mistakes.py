"""The worst mistakes of an evaluation: wrong predictions, the most confident ones first."""

# B batch, K classes

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Mistakes", "worst"]

Mistake = dict[str, Any]


class Mistakes:
    """Collects the wrong predictions with the largest losses of one process.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.found: list[Mistake] = []

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
        most = min(self.limit, len(labels_B))
        # a stable order, so that equal losses come by their place in the split
        order = losses_B.argsort(descending=True, stable=True)[:most]
        columns = (losses_B, labels_B, predicted_B, confidence_B.exp())
        rows = zip(order.tolist(), *(column[order].tolist() for column in columns), strict=True)
        self.found = worst(
            [
                *self.found,
                *(
                    {
                        "index": int(indices[place]),
                        "label": label,
                        "predicted": predicted,
                        "confidence": confidence,
                        "loss": loss,
                    }
                    for place, loss, label, predicted, confidence in rows
                    if loss > 0
                ),
            ],
            self.limit,
        )


def worst(mistakes: Iterable[Mistake], limit: int) -> list[Mistake]:
    """The `limit` mistakes with the largest loss, for instance of all processes together."""
    return sorted(mistakes, key=lambda one: (-one["loss"], one["index"]))[:limit]
