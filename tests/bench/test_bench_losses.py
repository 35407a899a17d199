"""Curves of the fast path beside those of the plain one: the same images, the same draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.bench.studies import Curve, compared
from finetune.recipe.load import Recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

RECIPE = """
model: {name: vit_tiny_patch16_224, pretrained: false, image_size: 16,
        args: {patch_size: 4, embed_dim: 32, depth: 1, num_heads: 2}}
data: {source: "embedded:digits", batch_size: 8, micro_batch: 4, train: resize | flip}
optim: {name: adamw, lr: 1e-2, steps: 12, schedule: constant}
run: {precision: fp32, log_every: 3, test: false}
"""


class Told:
    """Counts what a process would be told."""

    def __init__(self) -> None:
        self.steps = 0

    def tick(self) -> None:
        self.steps += 1

    def notice(self, message: str) -> None:
        pytest.fail(message)


def curve(recipe: Recipe, folder: Path) -> dict[str, Any]:
    told = Told()
    found = Curve(told, recipe=recipe, folder=str(folder)).losses(steps=6, every=3)
    assert told.steps == 6
    return found


@pytest.mark.usefixtures("no_pictures")
def test_the_losses_are_those_of_train(tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE)
    found = curve(recipe, tmp_path)
    assert (found["precision"], found["compiled"]) == ("fp32", False)
    train(recipe, tmp_path / "run")
    lines = [line for line in RunDir(tmp_path / "run").history() if line["split"] == "train"]
    assert found["losses"] == [line["loss"] for line in lines[:2]]


def test_bf16_stays_near_float32_and_another_seed_does_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    overrides = {"plain": [], "bf16": ["run.precision=bf16"], "seed": ["run.seed=1"]}
    found = {
        name: curve(parse_recipe(RECIPE, overrides=words), tmp_path / name)
        for name, words in overrides.items()
    }
    near = compared(found["bf16"], found["plain"], every=3)
    far = compared(found["seed"], found["plain"], every=3)
    assert [row["step"] for row in near["rows"]] == [3, 6]
    assert near["precision"] == "bf16"
    assert 0 < near["largest"] < 0.02 < far["largest"]
    for row in near["rows"]:
        assert row["difference"] == row["loss"] - row["plain"]
