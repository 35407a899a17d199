"""Studies of a bench: losses beside those of the plain path, and sets of other sizes."""

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


def curve(recipe: Recipe, folder: Path) -> dict[str, Any]:
    recorder = StepCounter()
    found = LossCurveLoop(recorder, recipe=recipe, folder=str(folder)).losses(steps=6, every=3)
    assert recorder.steps == 6
    return found


@pytest.mark.usefixtures("no_pictures")
def test_the_losses_are_those_of_train(tmp_path: Path) -> None:
    recipe = parse_recipe(FLIPPED)
    found = curve(recipe, tmp_path)
    assert (found["precision"], found["compiled"]) == ("fp32", False)
    train(recipe, tmp_path / "run")
    lines = [line for line in RunDir(tmp_path / "run").read_metrics() if line["split"] == "train"]
    assert found["losses"] == [line["loss"] for line in lines[:2]]


def test_bf16_stays_near_float32_and_another_seed_does_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    overrides = {"plain": [], "bf16": ["run.precision=bf16"], "seed": ["run.seed=1"]}
    found = {
        name: curve(parse_recipe(FLIPPED, overrides=words), tmp_path / name)
        for name, words in overrides.items()
    }
    near = compare_losses(found["bf16"], found["plain"], every=3)
    far = compare_losses(found["seed"], found["plain"], every=3)
    assert [row["step"] for row in near["rows"]] == [3, 6]
    assert near["precision"] == "bf16"
    assert 0 < near["largest"] < 0.02 < far["largest"]
    for row in near["rows"]:
        assert row["difference"] == row["loss"] - row["plain"]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> DatasetSizeLoop:
    folder = str(tmp_path_factory.mktemp("grown"))
    made = DatasetSizeLoop(StepCounter(), recipe=parse_recipe(FORTY), folder=folder)
    made.prepare()
    return made


@pytest.mark.parametrize("images", [10, 40, 1003])
def test_all_images_of_the_larger_set_are_there(grown: DatasetSizeLoop, images: int) -> None:
    own = grown.loader.store.images
    assert isinstance(own, torch.Tensor)
    mapped = grown._memory_mapped(own, images)
    assert mapped.shape == (images, *own.shape[1:])
    for place in {0, images // 2, images - 1}:
        assert torch.equal(mapped[place], own[place % len(own)])
    before, steps = grown.setup.num_samples, grown.trainer.counters.step
    found = grown.train_on_size(images=images, warmup=1, steps=2)
    assert (found["images"], grown.setup.num_samples) == (images, before)
    assert found["rate"] > 0
    # labels, rows and order, each of 8 bytes
    assert 24 * images <= found["own_bytes"] < 24 * images + 50_000
    assert grown.trainer.counters.step == steps + 4
    assert grown.loader.store.images is own


def test_images_of_several_sizes_cannot_be_one_file(
    grown: DatasetSizeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grown.loader.store, "images", [torch.zeros(3, 8, 8, dtype=torch.uint8)])
    with refused("recipe.unsupported", "--images", "several sizes"):
        grown.train_on_size(images=10, warmup=1, steps=1)


# In processes of their own; test_run.py has them with doubles.


@pytest.fixture
def quick_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the processes of bench where everything has been imported."""
    monkeypatch.setattr(
        "finetune.bench.loop_process._START_METHOD", fork_context.get_start_method()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_hosts")
def test_the_same_steps_in_two_ways() -> None:
    recipe, plain = (
        parse_recipe(FORTY_BF16),
        parse_recipe(FORTY, overrides=[*REFERENCE_OVERRIDES]),
    )
    found = study_losses(recipe, plain, steps=2 * LOSSES_EVERY)
    assert [row["step"] for row in found["rows"]] == [LOSSES_EVERY, 2 * LOSSES_EVERY]
    assert 0 < found["largest"] < 0.05
    assert (found["precision"], found["compiled"]) == ("bf16", False)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_hosts")
def test_sets_of_two_sizes() -> None:
    found = study_sizes(parse_recipe(FORTY_BF16), [2000, 20], warmup=1, steps=2, repeats=2)
    assert [row["images"] for row in found["rows"]] == [20, 2000]
    for row in found["rows"]:
        assert 0 < row["train"]["min"] <= row["train"]["median"] <= row["train"]["max"]
    assert 24 <= found["per_image"] < 40
