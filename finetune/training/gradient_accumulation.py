"""Gradient accumulation: forward and backward over the micro-batches of an optimizer step."""

# B batch, K classes

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finetune.data.loader import Batch

if TYPE_CHECKING:
    from finetune.training.trainer_state import TrainerState

__all__ = ["accumulate_gradients", "copy_statistics", "seed_dropout"]


def accumulate_gradients(
    trainer: TrainerState, num_micro_batches: int, micro_batches: Iterator[Batch]
) -> list[list[Tensor]]:
    """Run forward and backward on each micro-batch; ranks sync gradients after the last one.

    Args:
        trainer: network, loss and Accelerator; its parameters receive the gradients.
        num_micro_batches: length of `micro_batches`.
        micro_batches: this rank's share of the step.
    Returns: per micro-batch, the summed loss, the logits (B, K), the labels and, with distillation,
        the teacher's part of the loss; all detached.
    """
    accelerator, recipe = trainer.accelerator, trainer.recipe
    # DDP averages gradients over ranks; the loss is a mean over the global batch.
    share = accelerator.num_processes / recipe.data.batch_size
    recomputes = recipe.model.grad_checkpointing
    outputs = []
    for index, batch in enumerate(micro_batches):
        is_last = index == num_micro_batches - 1
        sync = contextlib.nullcontext() if is_last else accelerator.no_sync(trainer.model)
        seed_dropout(recipe.run.seed, trainer.counters.step, accelerator.process_index, index)
        with sync:
            loss_sum, logits_BK, *teacher_sum = trainer.forward(batch)
            # A loss that is not finite may have a finite gradient: NaN reaches all ranks.
            factor = torch.where(loss_sum.detach().isfinite(), share, float("nan"))
            with _keep_values(trainer.bn_stats if recomputes else ()):
                accelerator.backward(loss_sum * factor)
        tensors = [loss_sum, logits_BK, batch.labels_B, *teacher_sum]
        outputs.append([tensor.detach() for tensor in tensors])
    return outputs


def seed_dropout(*parts: int) -> None:
    """Seed dropout from (seed, step, rank, micro-batch): resuming needs no random state."""
    seed = 0
    for part in parts:
        seed = (seed ^ part) * 0x9E3779B97F4A7C15 % 2**63
        seed ^= seed >> 29
    torch.manual_seed(seed)


@contextlib.contextmanager
def _keep_values(statistics: Sequence[Tensor]) -> Iterator[None]:
    """Restore batch norm statistics: with checkpointing, backward updates them a second time."""
    saved = [statistic.clone() for statistic in statistics]
    yield
    copy_statistics(saved, statistics)


def copy_statistics(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    """Copy batch norm statistics into those of a network."""
    for statistic, value in zip(target, source, strict=True):
        statistic.copy_(value)
