"""The learning rate range test: its rates, where it stops, and that it leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe_texts import tiny_recipe_text

from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training import lr_range as module
from finetune.training.build_state import build_trainer_state
from finetune.training.lr_range import run_lr_range_test
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_plots")


RATES: dict[str, Any] = {"min_lr": 1e-4, "max_lr": 0.1, "num_steps": 6}
FROZEN = parse_recipe("""
model: {name: "embedded:vit_nano", freeze: backbone}
data: {source: "embedded:digits", train: resize, batch_size: 32}
optim: {name: adamw, lr: 1e-3, steps: 10}
run: {threads: 1, precision: fp32}
""")


def tiny_recipe(*overrides: str) -> Recipe:
    return parse_recipe(tiny_recipe_text(), overrides=overrides)


def test_lr_grows_by_a_constant_factor_and_the_loss_falls_then_rises() -> None:
    curve = run_lr_range_test(FROZEN, min_lr=1e-4, max_lr=1e2, num_steps=61)
    assert curve.lr[:3] == pytest.approx([1e-4, 1.2589e-4, 1.5849e-4], rel=1e-4)
    best = int(np.argmin(curve.smoothed))
    assert curve.loss[0] == curve.smoothed[0] == pytest.approx(np.log(10), abs=1e-6)
    assert 1e-2 < curve.lr[best] < 1
    assert curve.smoothed[best] < curve.smoothed[0] - 0.5
    assert curve.smoothed[-1] > curve.smoothed[best]
    assert curve.smoothed[1] == pytest.approx((0.9 * curve.loss[0] + curve.loss[1]) / 1.9)


@pytest.mark.parametrize("max_lr", [1e6, 1e30], ids=["explodes", "not finite"])
def test_stops_when_the_loss_explodes_or_is_not_finite(max_lr: float) -> None:
    curve = run_lr_range_test(FROZEN, min_lr=1e-2, max_lr=max_lr, num_steps=24)
    assert 1 < len(curve.lr) < 24
    assert max(curve.smoothed) < 4 * min(curve.smoothed)
    assert np.isfinite(curve.loss).all()


@pytest.mark.parametrize("freeze", ["none", "backbone"])
def test_range_test_is_reproducible_and_does_not_affect_training(
    tmp_path: Path, freeze: str
) -> None:
    recipe = tiny_recipe(f"model.freeze={freeze}", "model.dropout=0.1", "run.log_every=1")
    train(recipe, tmp_path / "before")
    curves = [run_lr_range_test(recipe, **RATES) for _ in range(2)]
    assert curves[0] == curves[1]
    assert curves[0] != run_lr_range_test(
        tiny_recipe(f"model.freeze={freeze}", "run.seed=1"), **RATES
    )
    train(recipe, tmp_path / "after")
    before, after = (
        [(line["split"], line["loss"]) for line in RunDir(tmp_path / name).read_metrics()]
        for name in ("before", "after")
    )
    assert len(before) >= 4
    assert before == after


def test_range_test_uses_the_training_loss() -> None:
    """Class weights apply, and micro-batches do not change the loss."""
    plain, weighted, accumulated = (
        run_lr_range_test(tiny_recipe("model.dropout=0", *overrides), **RATES).loss
        for overrides in ([], ["optim.class_weights={'0': 3}"], ["data.micro_batch=8"])
    )
    assert accumulated == pytest.approx(plain, abs=1e-6)
    assert weighted[0] > 1.1 * plain[0]


def test_frozen_backbone_uses_cached_features(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: list[TrainerState] = []

    def build(*args: Any) -> TrainerState:
        trainers.append(build_trainer_state(*args))
        return trainers[0]

    monkeypatch.setattr(module, "build_trainer_state", build)
    run_lr_range_test(FROZEN, **RATES)
    assert trainers[0].uses_cached_features
