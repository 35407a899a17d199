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
        trainer: the training state; the parameters of its network receive the gradients.
        num_micro_batches: length of `micro_batches`.
        micro_batches: this rank's micro-batches of the step.
    Returns: for each micro-batch a list of detached tensors: the summed loss, the logits (B, K),
        the labels and, with distillation, the summed distillation loss.
    """
    accelerator, recipe = trainer.accelerator, trainer.recipe
    # DDP averages gradients over ranks, but the loss must be the mean over the global batch.
    share = accelerator.num_processes / recipe.data.batch_size
    recomputes = recipe.model.grad_checkpointing
    outputs = []
    for index, batch in enumerate(micro_batches):
        is_last = index == num_micro_batches - 1
        sync = contextlib.nullcontext() if is_last else accelerator.no_sync(trainer.model)
        seed_dropout(recipe.run.seed, trainer.counters.step, accelerator.process_index, index)
        with sync:
            loss_sum, logits_BK, *teacher_sum = trainer.forward(batch)
            # A non-finite loss may have finite gradients: NaN makes every rank skip the step.
            factor = torch.where(loss_sum.detach().isfinite(), share, float("nan"))
            with _keep_values(trainer.bn_stats if recomputes else ()):
                accelerator.backward(loss_sum * factor)
        tensors = [loss_sum, logits_BK, batch.labels_B, *teacher_sum]
        outputs.append([tensor.detach() for tensor in tensors])
    return outputs


def seed_dropout(*parts: int) -> None:
    """Seed dropout from (seed, step, rank, micro-batch), so that resuming needs no RNG state."""
    seed = 0
    for part in parts:
        seed = (seed ^ part) * 0x9E3779B97F4A7C15 % 2**63
        seed ^= seed >> 29
    torch.manual_seed(seed)


@contextlib.contextmanager
def _keep_values(statistics: Sequence[Tensor]) -> Iterator[None]:
    """Restore batch norm statistics: activation checkpointing updates them again in backward."""
    saved = [statistic.clone() for statistic in statistics]
    yield
    copy_statistics(saved, statistics)


def copy_statistics(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    """Copy batch norm statistics from `source` to `target`."""
    for statistic, value in zip(target, source, strict=True):
        statistic.copy_(value)
