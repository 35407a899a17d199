"""The first lines of a run, and its warm-up where the run is short."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from faults_runs import tiny
from recipe_texts import tiny_text

from finetune.recipe.load import parse_recipe
from finetune.training.banner import size_notices
from finetune.training.setup import TrainingSetup, open_setup
from finetune.training.train import _Forecast, _postfix, train

RECIPE = tiny_text("batch_size: 32, val_fraction: 0.1", optim="lr: 1e-3, epochs: 12")


def setup_of(*overrides: str) -> TrainingSetup:
    return open_setup(
        parse_recipe(RECIPE, overrides=overrides),
        device=torch.device("cpu"),
        notice=lambda line: None,
        progress=False,
    )


@pytest.mark.parametrize("length", [["optim.steps=82", "optim.epochs=null"], ["optim.epochs=2"]])
@pytest.mark.parametrize(
    "key, value, shorter",
    [
        ("warmup_steps", 83, "optim.warmup_steps=8"),
        ("warmup_steps", 82, "optim.warmup_steps=8"),
        ("warmup_epochs", 2.1, "optim.warmup_epochs=0.197"),
    ],
)
def test_a_run_that_is_all_warmup_is_named(
    length: list[str], key: str, value: float, shorter: str
) -> None:
    setup = setup_of(*length, f"optim.{key}={value}")
    assert (setup.steps, setup.warmup_steps) == (82, 82)
    (line,) = size_notices(setup)
    for named in (f"optim.{key}", "82", shorter):
        assert named in line


def test_another_length_has_its_own_warmup() -> None:
    setup = setup_of("optim.epochs=null", "optim.steps=60", "optim.warmup_steps=80")
    longer = setup_of("optim.epochs=null", "optim.steps=100", "optim.warmup_steps=80")
    assert [setup.lr(step, steps=100) for step in range(100)] == list(map(longer.lr, range(100)))


def test_a_run_that_is_large_enough_has_no_notice() -> None:
    assert size_notices(setup_of("optim.warmup_steps=40")) == []


@pytest.mark.parametrize(
    "key, others",
    [
        ("optim.warmup_lr=1e-5", ["optim.warmup_steps=0"]),
        ("optim.min_lr=1e-5", ["optim.schedule=constant"]),
        ("optim.step_factor=0.5", []),
        ("optim.layer_decay=0.7", ["model.freeze=backbone"]),
        ("optim.momentum=0.5", []),
    ],
)
def test_a_key_that_changes_nothing_is_said(key: str, others: list[str]) -> None:
    (line,) = size_notices(setup_of(key, *others))
    assert line.startswith(f"{key.partition('=')[0]}: changes nothing, as ")


def test_few_images_and_few_steps_are_named_with_a_remedy(image_folder: Path) -> None:
    setup = setup_of(f"data.source=folder:{image_folder}", "data.batch_size=16", "optim.epochs=2")
    images = len(setup.source.splits["val"])
    steps, val, test = size_notices(setup)
    assert f"only {setup.steps} steps" in steps
    epochs = int(steps.partition("optim.epochs=")[2].split()[0])
    assert setup_of(
        f"data.source=folder:{image_folder}", "data.batch_size=16", f"optim.epochs={epochs}"
    ).steps in range(50, 53)
    assert val.startswith(f"{images} validation image")
    assert "val_fraction" not in val  # 24 images give no 30
    assert test.startswith("12 test images")
    assert "optim.steps" in size_notices(setup_of("optim.epochs=null", "optim.steps=49"))[0]


def test_a_share_for_validation_is_named_where_it_would_help() -> None:
    setup = setup_of("data.val_fraction=0.01")
    (line,) = size_notices(setup)
    share = float(line.partition("data.val_fraction=")[2].split()[0])
    assert size_notices(setup_of(f"data.val_fraction={share}")) == []
    val = setup.source.splits["val"]  # as one that the data brings along, which is left as it is
    own = dataclasses.replace(val, items=copy.copy(val.items))
    source = dataclasses.replace(setup.source, splits={**setup.source.splits, "val": own})
    (line,) = size_notices(dataclasses.replace(setup, source=source))
    assert line.endswith("add images")


def test_a_rare_class_is_named_beside_the_commonest() -> None:
    setup = setup_of()
    train_split = setup.source.splits["train"]
    threes = np.flatnonzero(train_split.labels == 3)

    def with_threes(number: int) -> list[str]:
        kept = np.setdiff1d(np.arange(len(train_split)), threes[number:])
        splits = {**setup.source.splits, "train": train_split.subset(kept)}
        source = dataclasses.replace(setup.source, splits=splits)
        return size_notices(dataclasses.replace(setup, source=source))

    most = np.bincount(train_split.labels).max()
    assert with_threes(-(-most // 10)) == []
    (line,) = with_threes(5)
    assert "'3' has 5 training images" in line


@pytest.mark.usefixtures("no_pictures")
def test_the_first_and_last_lines_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = ["optim.lr=1e-30", "run.best=val.loss", "run.eval_every=2", "run.patience=2"]
    train(tiny(*still, "data.micro_batch=auto"), tmp_path / "run")
    lines = [line.removeprefix("finetune: ") for line in capsys.readouterr().err.splitlines()]
    words = ["network", "images", "classes", "training", "device", "auto", "output"]
    assert [line.split()[0] for line in lines[: len(words)]] == words
    assert "1,297 train, 145 val, 355 test" in lines[1]
    assert "12 steps of 64 images" in lines[3]
    assert "data.micro_batch is 64" in lines[5]
    assert lines[6].endswith(str(tmp_path / "run"))
    (early,) = (line for line in lines if line.startswith("stopped early"))
    assert "step 6 of 12" in early
    assert "run.patience=2" in early
    assert "of step 6 " in early  # which is as good as the first


@pytest.mark.usefixtures("no_pictures")
def test_a_dry_run_names_what_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(), tmp_path / "run", dry_run=True)
    assert "only 12 steps" in capsys.readouterr().err


def test_the_time_to_come_is_told_once_and_only_of_a_long_run() -> None:
    forecast = _Forecast(100)
    lines = {step: forecast.after(step, 60.0 + 4 * step) for step in range(1, 20)}
    ((step, line),) = ((step, line) for step, line in lines.items() if line)
    assert step == 4  # three steps and ten seconds after the first, which may compile
    assert "6 min 24 s" in line
    assert "96 steps" in line
    short = _Forecast(100)
    assert not any(short.after(step, 0.09 * step) for step in range(1, 101))


@pytest.mark.parametrize(
    "rate, shown", [(0.534, "0.53"), (7.25, "7.2"), (12.3, "12"), (1234, "1,234")]
)
def test_a_rate_below_ten_has_decimals(rate: float, shown: str) -> None:
    assert _postfix({"loss": 1.0, "lr": 1e-3, "images_per_second": rate})["img/s"] == shown
