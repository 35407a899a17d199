"""Learning rate schedule: a pure function of the step.

A resumed run, or a run with a different number of processes, follows the same curve without
scheduler state.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

__all__ = ["decay_start_step", "lr_at", "set_lr"]


def lr_at(
    step: int,
    *,
    lr: float,
    schedule: str,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
    step_every: int | None = None,
    step_factor: float = 0.1,
    decay_ratio: float = 0.2,
) -> float:
    """Return the learning rate of one optimizer step.

    The warm-up is linear from `warmup_lr` at step 0 to `lr` at step `warmup_steps`. Linear and
    cosine decay start at `warmup_steps` and would reach `min_lr` at step `total_steps`, one past
    the last step. "wsd" (warm-up, stable, decay) keeps `lr` until `decay_start_step`, and decays
    linearly from there.
    If the warm-up takes all steps, the learning rate only rises. "step" multiplies it by
    `step_factor` every `step_every` steps, counted from step 0 including the warm-up, and never
    goes below `min_lr`.

    Args:
        step: 0-based index of the optimizer step; beyond `total_steps`, the last value is kept.
        lr: the peak learning rate.
        schedule: "constant", "linear", "cosine", "wsd", or "step", which needs `step_every`.
        total_steps: optimizer steps of the whole run.
        warmup_steps: optimizer steps of the linear warm-up, 0 for none; at most `total_steps`.
        warmup_lr: learning rate of step 0 if the run has a warm-up.
        min_lr: final learning rate of the decay; "constant" ignores it.
        step_every: optimizer steps between two drops of "step".
        step_factor: factor of each drop.
        decay_ratio: share of all steps in which "wsd" decays.
    Source: vision_transformer, vit_jax/utils.py, create_learning_rate_schedule (its linear decay
        ends at min_lr = 1e-5, its cosine at 0, its warm-up starts at 0). "wsd": torchtitan,
        components/lr_scheduler.py, linear_warmup_stable_decay (Hu et al. 2024, MiniCPM).
    """
    if step < warmup_steps:
        return warmup_lr + (lr - warmup_lr) * (step / warmup_steps)
    if schedule == "constant":
        return lr
    if schedule == "step":
        return max(min_lr, lr * step_factor ** (step // (step_every or 1)))
    start = warmup_steps
    if schedule == "wsd":
        start = decay_start_step(total_steps, warmup_steps=warmup_steps, decay_ratio=decay_ratio)
        if step < start:
            return lr
    decay_steps = total_steps - start
    progress = min(1.0, (step - start) / decay_steps) if decay_steps else 1.0
    remaining = (
        0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    )
    return min_lr + (lr - min_lr) * remaining


def decay_start_step(total_steps: int, *, warmup_steps: int, decay_ratio: float) -> int:
    """Return the number of steps before the decay of "wsd". Args: same as for `lr_at`."""
    return max(warmup_steps, total_steps - round(total_steps * decay_ratio))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group to `lr` times the group's "lr_scale"."""
    for group in optimizer.param_groups:
        group_lr = lr * group.get("lr_scale", 1.0)
        if hasattr(group["lr"], "fill_"):  # capturable optimizers keep a tensor
            group["lr"].fill_(group_lr)
        else:
            group["lr"] = group_lr
