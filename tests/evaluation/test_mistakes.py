"""Top losses: only wrong predictions, in an order that does not depend on batches."""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator
from lockstep import run_in_lockstep

from finetune.evaluation.metrics import TopLosses


def collect_top_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    limit: int,
    batch_size: int,
    rank: int = 0,
    accelerator: Accelerator | None = None,
) -> list[dict]:
    """Return the top losses; a rank of two has every second image."""
    accelerator = accelerator or Accelerator(cpu=True)
    indices = np.arange(len(labels))[rank :: accelerator.num_processes]
    top_losses = TopLosses(limit)
    for start in range(0, len(indices), batch_size):
        batch = indices[start : start + batch_size]
        top_losses.update(logits[batch], labels[batch], batch)
    return top_losses.compute(accelerator)


def test_only_mistakes_in_order_of_decreasing_loss() -> None:
    logits = torch.tensor([[9.0, 0, 0], [4.0, 0, 0], [0, 0, 1.0], [7.0, 0, 0]])
    labels = torch.tensor([0, 1, 1, 2])
    mistakes = collect_top_losses(logits, labels, limit=5, batch_size=4)
    assert [mistake["index"] for mistake in mistakes] == [3, 1, 2]
    losses = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    assert [mistake["loss"] for mistake in mistakes] == [float(losses[i]) for i in (3, 1, 2)]
    assert [(mistake["label"], mistake["predicted"]) for mistake in mistakes] == [
        (2, 0),
        (1, 0),
        (1, 2),
    ]
    assert mistakes[0]["confidence"] == float(logits[3].double().softmax(0)[0])


def test_order_does_not_depend_on_batches_or_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 4, generator=generator).repeat(2, 1)  # every image twice
    labels = torch.randint(4, (60,), generator=generator).repeat(2)
    expected = collect_top_losses(logits, labels, limit=10, batch_size=120)
    assert len(expected) == 10
    assert expected == collect_top_losses(logits, labels, limit=10, batch_size=7)
    assert expected == run_in_lockstep(
        lambda rank, accelerator: collect_top_losses(
            logits, labels, limit=10, batch_size=50, rank=rank, accelerator=accelerator
        )
    )


def test_no_images_and_no_mistakes_give_an_empty_list() -> None:
    mistakes = TopLosses(3)
    mistakes.update(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), np.zeros(0, dtype=np.int64)
    )
    mistakes.update(torch.eye(4), torch.arange(4), np.arange(4))
    assert mistakes.compute(Accelerator(cpu=True)) == []
