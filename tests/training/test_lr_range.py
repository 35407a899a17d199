"""The learning rate range test: its rates, its end, and that nothing of it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe_texts import tiny_text

from finetune.recipe.load import Recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training import lr_range as module
from finetune.training.build_state import build_trainer_state
from finetune.training.lr_range import lr_range
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")


RATES = {"lowest": 1e-4, "highest": 0.1, "steps": 6}
FROZEN = parse_recipe("""
model: {name: "embedded:vit_nano", freeze: backbone}
data: {source: "embedded:digits", train: resize, batch_size: 32}
optim: {name: adamw, lr: 1e-3, steps: 10}
run: {threads: 1, precision: fp32}
""")


def tiny(*overrides: str) -> Recipe:
    return parse_recipe(tiny_text(), overrides=overrides)


def test_the_rate_rises_by_a_constant_factor_and_the_loss_falls_then_rises() -> None:
    curve = lr_range(FROZEN, lowest=1e-4, highest=1e2, steps=61)
    assert curve.lr[:3] == pytest.approx([1e-4, 1.2589e-4, 1.5849e-4], rel=1e-4)
    place = int(np.argmin(curve.smoothed))
    assert curve.loss[0] == curve.smoothed[0] == pytest.approx(np.log(10), abs=1e-6)
    assert 1e-2 < curve.lr[place] < 1
    assert curve.smoothed[place] < curve.smoothed[0] - 0.5
    assert curve.smoothed[-1] > curve.smoothed[place]
    assert curve.smoothed[1] == pytest.approx((0.9 * curve.loss[0] + curve.loss[1]) / 1.9)


@pytest.mark.parametrize("highest", [1e6, 1e30], ids=["explodes", "is no number"])
def test_it_ends_where_the_loss_explodes_or_is_no_number(highest: float) -> None:
    curve = lr_range(FROZEN, lowest=1e-2, highest=highest, steps=24)
    assert 1 < len(curve.lr) < 24
    assert max(curve.smoothed) < 4 * min(curve.smoothed)
    assert np.isfinite(curve.loss).all()


@pytest.mark.parametrize("freeze", ["none", "backbone"])
def test_it_is_repeatable_and_changes_no_training(tmp_path: Path, freeze: str) -> None:
    recipe = tiny(f"model.freeze={freeze}", "model.dropout=0.1", "run.log_every=1")
    train(recipe, tmp_path / "before")
    curves = [lr_range(recipe, **RATES) for _ in range(2)]
    assert curves[0] == curves[1]
    assert curves[0] != lr_range(tiny(f"model.freeze={freeze}", "run.seed=1"), **RATES)
    train(recipe, tmp_path / "after")
    before, after = (
        [(line["split"], line["loss"]) for line in RunDir(tmp_path / name).history()]
        for name in ("before", "after")
    )
    assert len(before) >= 4
    assert before == after


def test_the_loss_is_that_of_a_training_step() -> None:
    """Its class weights count, and a step is the same in however many parts."""
    plain, weighted, cut = (
        lr_range(tiny("model.dropout=0", *overrides), **RATES).loss
        for overrides in ([], ["optim.class_weights={'0': 3}"], ["data.micro_batch=8"])
    )
    assert cut == pytest.approx(plain, abs=1e-6)
    assert weighted[0] > 1.1 * plain[0]


def test_a_frozen_backbone_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[TrainerState] = []

    def build(*args: Any) -> TrainerState:
        built.append(build_trainer_state(*args))
        return built[0]

    monkeypatch.setattr(module, "build_trainer_state", build)
    lr_range(FROZEN, **RATES)
    assert built[0].gives_features
