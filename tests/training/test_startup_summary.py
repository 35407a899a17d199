"""The first log lines of a run: setup warnings and the summary."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_runs import tiny_recipe
from recipe_texts import tiny_recipe_text

from finetune.recipe.load import parse_recipe
from finetune.training.sanity import check_setup
from finetune.training.setup import TrainingSetup, build_setup
from finetune.training.train import train

RECIPE = tiny_recipe_text("batch_size: 32, val_fraction: 0.1", optim="lr: 1e-3, epochs: 12")


def make_setup(*overrides: str) -> TrainingSetup:
    return build_setup(
        parse_recipe(RECIPE, overrides=overrides),
        device=torch.device("cpu"),
        show_progress=False,
    )


@pytest.mark.parametrize("length", [["optim.steps=82", "optim.epochs=null"], ["optim.epochs=2"]])
@pytest.mark.parametrize(
    "key, value, suggestion",
    [
        ("warmup_steps", 83, "optim.warmup_steps=8"),
        ("warmup_steps", 82, "optim.warmup_steps=8"),
        ("warmup_epochs", 2.1, "optim.warmup_epochs=0.197"),
    ],
)
def test_warns_if_warmup_takes_the_whole_run(
    length: list[str], key: str, value: float, suggestion: str
) -> None:
    setup = make_setup(*length, f"optim.{key}={value}")
    assert (setup.num_steps, setup.warmup_steps) == (82, 82)
    (line,) = check_setup(setup)
    for name in (f"optim.{key}", "82", suggestion):
        assert name in line


def test_warmup_is_recomputed_for_another_run_length() -> None:
    setup = make_setup("optim.epochs=null", "optim.steps=60", "optim.warmup_steps=80")
    longer = make_setup("optim.epochs=null", "optim.steps=100", "optim.warmup_steps=80")
    assert [setup.lr_at(step, total_steps=100) for step in range(100)] == list(
        map(longer.lr_at, range(100))
    )


def test_no_warnings_for_a_large_enough_run() -> None:
    assert check_setup(make_setup("optim.warmup_steps=40")) == []


@pytest.mark.parametrize(
    "key, others",
    [
        ("optim.warmup_lr=1e-5", ["optim.warmup_steps=0"]),
        ("optim.min_lr=1e-5", ["optim.schedule=constant"]),
        ("optim.step_factor=0.5", []),
        ("optim.decay_ratio=0.5", []),
        ("optim.layer_decay=0.7", ["model.freeze=backbone"]),
        ("optim.momentum=0.5", []),
    ],
)
def test_warns_about_a_key_without_effect(key: str, others: list[str]) -> None:
    (line,) = check_setup(make_setup(key, *others))
    assert line.startswith(f"{key.partition('=')[0]}: has no effect, because ")


def test_warns_about_few_images_and_few_steps_with_a_fix(image_folder: Path) -> None:
    setup = make_setup(f"data.source=folder:{image_folder}", "data.batch_size=16", "optim.epochs=2")
    images = len(setup.source.splits["val"])
    steps, val, test = check_setup(setup)
    assert f"only {setup.num_steps} steps" in steps
    epochs = int(steps.partition("optim.epochs=")[2].split()[0])
    assert make_setup(
        f"data.source=folder:{image_folder}", "data.batch_size=16", f"optim.epochs={epochs}"
    ).num_steps in range(50, 53)
    assert val.startswith(f"{images} validation image")
    assert "val_fraction" not in val  # no fraction of 24 images gives 30
    assert test.startswith("12 test images")
    assert "optim.steps" in check_setup(make_setup("optim.epochs=null", "optim.steps=49"))[0]


def test_suggests_val_fraction_only_if_it_would_help() -> None:
    setup = make_setup("data.val_fraction=0.01")
    (line,) = check_setup(setup)
    fraction = float(line.partition("data.val_fraction=")[2].split()[0])
    assert check_setup(make_setup(f"data.val_fraction={fraction}")) == []
    # A validation split that the dataset provides: val_fraction cannot change it.
    val = setup.source.splits["val"]
    provided_val = dataclasses.replace(val, images=copy.copy(val.images))
    source = dataclasses.replace(setup.source, splits={**setup.source.splits, "val": provided_val})
    (line,) = check_setup(dataclasses.replace(setup, source=source))
    assert line.endswith("add images")


def test_warns_about_copies_in_the_training_images() -> None:
    setup = make_setup()
    train_split = setup.source.splits["train"]
    indices = np.r_[np.arange(len(train_split)), 7]
    splits = {**setup.source.splits, "train": train_split.subset(indices)}
    source = dataclasses.replace(setup.source, splits=splits)
    (line,) = check_setup(dataclasses.replace(setup, source=source))
    assert f"split 'train': 1 of {len(indices)} images" in line


def test_warns_about_a_class_ten_times_rarer_than_the_largest() -> None:
    setup = make_setup()
    train_split = setup.source.splits["train"]
    threes = np.flatnonzero(train_split.labels == 3)

    def with_threes(num_threes: int) -> list[str]:
        indices = np.setdiff1d(np.arange(len(train_split)), threes[num_threes:])
        splits = {**setup.source.splits, "train": train_split.subset(indices)}
        source = dataclasses.replace(setup.source, splits=splits)
        return check_setup(dataclasses.replace(setup, source=source))

    largest_class = np.bincount(train_split.labels).max()
    assert with_threes(-(-largest_class // 10)) == []
    (line,) = with_threes(5)
    assert "'3' has 5 training images" in line


@pytest.mark.usefixtures("no_plots")
def test_run_logs_summary_first_and_early_stopping_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_improvement = ["optim.lr=1e-30", "run.best=val.loss", "run.eval_every=2", "run.patience=2"]
    train(tiny_recipe(*no_improvement, "data.micro_batch=auto"), tmp_path / "run")
    lines = [line.removeprefix("finetune: ") for line in capsys.readouterr().err.splitlines()]
    first_words = ["network", "images", "classes", "training", "device", "auto", "output"]
    assert [line.split()[0] for line in lines[: len(first_words)]] == first_words
    assert "1,297 train, 145 val, 355 test" in lines[1]
    assert "12 steps of 64 images" in lines[3]
    assert "data.micro_batch is 64" in lines[5]
    assert lines[6].endswith(str(tmp_path / "run"))
    (early,) = (line for line in lines if line.startswith("stopped early"))
    assert "step 6 of 12" in early
    assert "run.patience=2" in early
    assert "of step 6 " in early  # as good as the first evaluation


@pytest.mark.usefixtures("no_plots")
def test_dry_run_warns_about_few_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_recipe(), tmp_path / "run", dry_run=True)
    assert "only 12 steps" in capsys.readouterr().err
