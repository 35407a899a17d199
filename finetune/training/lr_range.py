"""The learning rate range test: a few steps at a rising rate show which rates a run can take."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np

from finetune.console import say_nothing
from finetune.models.head import set_train_mode
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import dtype_of
from finetune.training.build_state import build_trainer_state
from finetune.training.launch import launch
from finetune.training.optim import set_lr
from finetune.training.setup import open_setup

__all__ = ["LrRange", "lr_range"]

_SMOOTHING = 0.9  # of the running mean of the loss
_EXPLODED = 4.0  # times the least loss so far


@dataclass(frozen=True)
class LrRange:
    """The curve of a range test, a value a step.

    Attributes:
        lr: the learning rates, rising by a constant factor.
        loss: of the step's batch before the step.
        smoothed: the running mean of `loss`.
    """

    lr: list[float]
    loss: list[float]
    smoothed: list[float]

    @property
    def least(self) -> float:
        """The learning rate at which the smoothed loss was least."""
        return min(zip(self.smoothed, self.lr, strict=True))[1]


def lr_range(recipe: Recipe, *, lowest: float, highest: float, steps: int) -> LrRange:
    """Train anew for a few steps, at a rate that rises from `lowest` to `highest`.

    Nothing is written, and nothing of it stays but the cache of decoded images and features.

    Args:
        recipe: its optimiser and batch size are used; its rate, schedule and length are not.
        steps: of the test; it ends early where the loss explodes.
    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-range-") as folder:
        accelerator = launch(recipe.run)
        setup = open_setup(recipe, device=accelerator.device, notice=say_nothing, progress=False)
        trainer = build_trainer_state(setup, accelerator, RunDir(folder))
        model, optimizer = trainer.model, trainer.optimizer
        train = setup.source.splits["train"]
        loader = trainer.loader(train, train=True, dtype=dtype_of(accelerator))
        labels = loader.store.split.labels
        trainer.setup = setup = setup.with_num_samples(len(labels), labels)
        set_train_mode(model)
        curve, mean = LrRange([], [], []), 0.0
        rates = np.geomspace(lowest, highest, steps).tolist()
        for lr, (_, batches) in zip(rates, loader.train(setup.sampler, range(steps)), strict=True):
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
            if not smoothed <= _EXPLODED * min([smoothed, *curve.smoothed]):  # it may be no number
                break
            curve.lr.append(lr)
            curve.loss.append(total)
            curve.smoothed.append(smoothed)
    return curve
