"""The worst mistakes: wrong predictions only, in an order that batches do not change."""

from __future__ import annotations

import numpy as np
import torch

from finetune.evaluation.metrics import Mistakes, worst


def collected(logits: torch.Tensor, labels: torch.Tensor, *, limit: int, batch: int) -> list[dict]:
    mistakes = Mistakes(limit)
    for start in range(0, len(labels), batch):
        part = slice(start, start + batch)
        mistakes.add(logits[part], labels[part], np.arange(len(labels))[part])
    return mistakes.worst


def test_only_wrong_ones_and_the_largest_loss_first() -> None:
    logits = torch.tensor([[9.0, 0, 0], [4.0, 0, 0], [0, 0, 1.0], [7.0, 0, 0]])
    labels = torch.tensor([0, 1, 1, 2])
    found = collected(logits, labels, limit=5, batch=4)
    assert [one["index"] for one in found] == [3, 1, 2]
    losses = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    assert [one["loss"] for one in found] == [float(losses[i]) for i in (3, 1, 2)]
    assert [(one["label"], one["predicted"]) for one in found] == [(2, 0), (1, 0), (1, 2)]
    assert found[0]["confidence"] == float(logits[3].double().softmax(0)[0])


def test_batches_and_ties_do_not_change_the_list() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 4, generator=generator).repeat(2, 1)  # each one twice
    labels = torch.randint(4, (60,), generator=generator).repeat(2)
    whole = collected(logits, labels, limit=10, batch=120)
    assert len(whole) == 10
    assert whole == collected(logits, labels, limit=10, batch=7)
    halves = [collected(logits[i::2], labels[i::2], limit=10, batch=50) for i in (0, 1)]
    for i, half in enumerate(halves):
        for one in half:
            one["index"] = one["index"] * 2 + i
    assert worst([*halves[0], *halves[1]], 10) == whole


def test_no_images_and_no_mistakes_are_no_error() -> None:
    mistakes = Mistakes(3)
    mistakes.add(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), np.zeros(0, dtype=np.int64))
    mistakes.add(torch.eye(4), torch.arange(4), np.arange(4))
    assert mistakes.worst == []
