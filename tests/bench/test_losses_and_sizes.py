"""Bench studies: losses against those of the plain path, and datasets of other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import StepCounter
from ranks import fork_context
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.bench.losses_and_sizes import (
    LOSSES_EVERY,
    REFERENCE_OVERRIDES,
    DatasetSizeLoop,
    LossCurveLoop,
    compare_losses,
    study_losses,
    study_sizes,
)
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

FLIPPED = tiny_recipe_text(
    "batch_size: 8, micro_batch: 4, train: resize | flip",
    optim="name: adamw, lr: 1e-2, steps: 12, schedule: constant",
    run="precision: fp32, log_every: 3, test: false",
)
FORTY = tiny_recipe_text(
    "num_train: 40, val_fraction: 0, batch_size: 8",
    optim="name: adamw, lr: 1e-3, steps: 100, schedule: constant",
    run="precision: fp32, test: false",
)
FORTY_BF16 = FORTY.replace("fp32", "bf16")


def record_losses(recipe: Recipe, folder: Path) -> dict[str, Any]:
    recorder = StepCounter()
    found = LossCurveLoop(recorder, recipe=recipe, folder=str(folder)).losses(steps=6, every=3)
    assert recorder.steps == 6
    return found


@pytest.mark.usefixtures("no_pictures")
def test_losses_match_train(tmp_path: Path) -> None:
    recipe = parse_recipe(FLIPPED)
    found = record_losses(recipe, tmp_path)
    assert (found["precision"], found["compiled"]) == ("fp32", False)
    train(recipe, tmp_path / "run")
    lines = [line for line in RunDir(tmp_path / "run").read_metrics() if line["split"] == "train"]
    assert found["losses"] == [line["loss"] for line in lines[:2]]


def test_bf16_stays_near_float32_and_another_seed_does_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    overrides = {"plain": [], "bf16": ["run.precision=bf16"], "seed": ["run.seed=1"]}
    found = {
        name: record_losses(parse_recipe(FLIPPED, overrides=changes), tmp_path / name)
        for name, changes in overrides.items()
    }
    near = compare_losses(found["bf16"], found["plain"], every=3)
    far = compare_losses(found["seed"], found["plain"], every=3)
    assert [row["step"] for row in near["rows"]] == [3, 6]
    assert near["precision"] == "bf16"
    assert 0 < near["largest"] < 0.02 < far["largest"]
    for row in near["rows"]:
        assert row["difference"] == row["loss"] - row["plain"]


@pytest.fixture(scope="module")
def size_loop(tmp_path_factory: pytest.TempPathFactory) -> DatasetSizeLoop:
    folder = str(tmp_path_factory.mktemp("grown"))
    loop = DatasetSizeLoop(StepCounter(), recipe=parse_recipe(FORTY), folder=folder)
    loop.prepare()
    return loop


@pytest.mark.parametrize("images", [10, 40, 1003])
def test_resized_dataset_repeats_the_images(size_loop: DatasetSizeLoop, images: int) -> None:
    stored = size_loop.loader.store.images
    assert isinstance(stored, torch.Tensor)
    mapped = size_loop._memory_mapped(stored, images)
    assert mapped.shape == (images, *stored.shape[1:])
    for index in {0, images // 2, images - 1}:
        assert torch.equal(mapped[index], stored[index % len(stored)])
    before, steps = size_loop.setup.num_samples, size_loop.trainer.counters.step
    found = size_loop.train_on_size(images=images, warmup=1, steps=2)
    assert (found["images"], size_loop.setup.num_samples) == (images, before)
    assert found["rate"] > 0
    # labels, rows and order, each of 8 bytes
    assert 24 * images <= found["own_bytes"] < 24 * images + 50_000
    assert size_loop.trainer.counters.step == steps + 4
    assert size_loop.loader.store.images is stored


def test_mixed_image_sizes_are_unsupported(
    size_loop: DatasetSizeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_loop.loader.store, "images", [torch.zeros(3, 8, 8, dtype=torch.uint8)])
    with refused("recipe.unsupported", "--images", "several sizes"):
        size_loop.train_on_size(images=10, warmup=1, steps=1)


# In separate processes; test_run.py covers the studies with doubles.


@pytest.fixture
def forked_loop_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the bench processes from this one, which has imported everything."""
    monkeypatch.setattr(
        "finetune.bench.loop_process._START_METHOD", fork_context.get_start_method()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_loop_processes")
def test_study_losses() -> None:
    recipe, plain = (
        parse_recipe(FORTY_BF16),
        parse_recipe(FORTY, overrides=[*REFERENCE_OVERRIDES]),
    )
    found = study_losses(recipe, plain, steps=2 * LOSSES_EVERY)
    assert [row["step"] for row in found["rows"]] == [LOSSES_EVERY, 2 * LOSSES_EVERY]
    assert 0 < found["largest"] < 0.05
    assert (found["precision"], found["compiled"]) == ("bf16", False)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_loop_processes")
def test_study_sizes() -> None:
    found = study_sizes(parse_recipe(FORTY_BF16), [2000, 20], warmup=1, steps=2, repeats=2)
    assert [row["images"] for row in found["rows"]] == [20, 2000]
    for row in found["rows"]:
        assert 0 < row["train"]["min"] <= row["train"]["median"] <= row["train"]["max"]
    assert 24 <= found["per_image"] < 40
