"""Learning rate range test: train a few steps at a rising learning rate and record the loss."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np

from finetune.log import quiet
from finetune.models.freeze import set_train_mode
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.accelerator import create_accelerator
from finetune.training.build_state import build_trainer_state
from finetune.training.lr_schedule import set_lr
from finetune.training.setup import build_setup

__all__ = ["LrRangeCurve", "run_lr_range_test"]

_SMOOTHING = 0.9  # decay of the loss's EMA
_DIVERGED_FACTOR = 4.0  # the test ends above this many times the lowest smoothed loss


@dataclass(frozen=True)
class LrRangeCurve:
    """The curve of a range test, one value per step.

    Attributes:
        lr: the learning rates, rising by a constant factor.
        loss: the loss of the step's batch, before the update.
        smoothed: bias-corrected EMA of `loss`.
    """

    lr: list[float]
    loss: list[float]
    smoothed: list[float]

    @property
    def lr_at_min_loss(self) -> float:
        """The learning rate with the lowest smoothed loss."""
        return min(zip(self.smoothed, self.lr, strict=True))[1]


@quiet()
def run_lr_range_test(
    recipe: Recipe, *, min_lr: float, max_lr: float, num_steps: int
) -> LrRangeCurve:
    """Train from scratch for a few steps while the learning rate rises from `min_lr` to `max_lr`.

    Nothing is written except the cache of decoded images and features.

    Args:
        recipe: its optimizer and batch size are used; its learning rate, schedule and length are
            not.
        num_steps: length of the test; it ends early if the loss diverges.
    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-range-") as folder:
        accelerator = create_accelerator(recipe.run)
        setup = build_setup(recipe, device=accelerator.device, show_progress=False)
        trainer = build_trainer_state(setup, accelerator, RunDir(folder))
        model, optimizer = trainer.model, trainer.optimizer
        loader = trainer.build_train_loader()
        set_train_mode(model)
        curve, mean = LrRangeCurve([], [], []), 0.0
        rates = np.geomspace(min_lr, max_lr, num_steps).tolist()
        for lr, (_, batches) in zip(
            rates, loader.train_steps(trainer.setup.sampler, range(num_steps)), strict=True
        ):
            total = 0.0
            for batch in batches:
                loss = trainer.forward(batch)[0] / recipe.data.batch_size
                accelerator.backward(loss)
                total += loss.item()
            set_lr(optimizer.optimizer, lr)
            optimizer.step()
            optimizer.zero_grad()
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * total
            smoothed = mean / (1 - _SMOOTHING ** (len(curve.lr) + 1))
            # `not <=` rather than `>`: also true for NaN
            if not smoothed <= _DIVERGED_FACTOR * min([smoothed, *curve.smoothed]):
                break
            curve.lr.append(lr)
            curve.loss.append(total)
            curve.smoothed.append(smoothed)
    return curve
