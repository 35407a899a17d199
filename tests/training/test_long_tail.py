"""Runs on classes of which some are rare: alike however they are computed, resumed, and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_runs import killed_before, losses, weights
from ranks import command, two_ranks
from samples import make_folder

from finetune.cli.main import main
from finetune.console import say_nothing
from finetune.recipe.load import Recipe, parse_recipe
from finetune.report.run_data import read_run
from finetune.report.sections import data_rows, headline
from finetune.training.banner import size_notices
from finetune.training.setup import open_setup
from finetune.training.train import train
from finetune.training.training_images import augmented, one_of_each

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = """
model: {name: embedded:vit_nano}
data:
  source: embedded:digits
  long_tail: 100
  sampling: square_root
  train: resize | random_crop(padding=2) | mixup(0.8)
  eval: resize
  batch_size: 12
  val_fraction: 0.05
  num_test: 64
optim: {lr: 1e-3, steps: 8, class_weights: balanced, focal_gamma: 1, ema_decay: 0.5}
run: {precision: fp32, log_every: 1, eval_every: 4, save_every: 2, threads: 1}
"""


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


BEST = "run.best=val.balanced_accuracy"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("long_tail") / "run"
    return out, train(recipe(BEST), out)


def test_the_record_says_how_often_images_come(whole: tuple[Path, dict[str, Any]]) -> None:
    plan = json.loads((whole[0] / "run.json").read_text())["plan"]
    images, draws = np.array(plan["class_images"]), np.array(plan["class_draws"])
    assert images[9] == 1
    assert images[0] > 50
    assert images.sum() == draws.sum() == plan["images_read"]
    assert draws[9] / images[9] > 5 > 1 > draws[0] / images[0]
    run = read_run(whole[0])
    rows = dict(data_rows(run))
    assert "'9' has 1 training image" in rows["Rare classes"]
    assert rows["Sampling"].startswith(f"square_root: an image of '9' comes {draws[9]} times")
    tiles = {tile["label"]: tile for tile in headline(run)}
    assert "macro F1" in tiles["Balanced accuracy"]["note"]
    card = (whole[0] / "model" / "README.md").read_text()
    assert "type: balanced_accuracy" in card
    assert "| balanced accuracy | macro F1 |" in card


def test_the_best_is_that_of_the_balanced_accuracy(whole: tuple[Path, dict[str, Any]]) -> None:
    lines = map(json.loads, (whole[0] / "metrics.jsonl").read_text().splitlines())
    validated = {line["step"]: line for line in lines if line["split"] == "val"}
    best = whole[1]["best_step"]
    values = {step: line["balanced_accuracy"] for step, line in validated.items()}
    assert values[best] == max(values.values()) == whole[1]["val"]["balanced_accuracy"]


def test_a_killed_run_is_resumed_to_the_bit(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    killed_before(6, recipe(BEST), tmp_path / "run")
    train(recipe(BEST), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(whole[0])
    assert weights(tmp_path / "run") == weights(whole[0])


def test_two_ranks_train_the_same(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    two_ranks(command, "train", str(path), BEST, "--out", str(tmp_path / "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(whole[0]), abs=1e-5)


def test_features_are_trained_as_images_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ["data.train=resize", "model.freeze=backbone", "data.sampling=class_balanced"]
    plain += ["optim.class_weights={'9': 3}", "optim.steps=4"]
    train(recipe(*plain), tmp_path / "features")
    monkeypatch.setattr(
        "finetune.training.frozen_backbone._reason_for_images", lambda *_: "for a test"
    )
    train(recipe(*plain), tmp_path / "images")
    assert losses(tmp_path / "features") == pytest.approx(losses(tmp_path / "images"), abs=1e-5)


def test_training_images_are_shown_as_they_come() -> None:
    setup = open_setup(
        recipe("data.sampling=class_balanced", "optim.class_weights=null"),
        device=torch.device("cpu"),
        notice=say_nothing,
        progress=False,
    )
    split = setup.source.splits["train"]
    common = one_of_each(split, 10)[0]
    assert common not in setup.sampler.order(0) or common not in setup.sampler.order(1)
    shown = augmented(setup, split, [common], one_size=True, epochs=3)[0].epochs
    assert len({view.tobytes() for view in shown}) == 3


def test_images_that_cannot_be_read_are_not_drawn() -> None:
    """Neither by the sampling, nor are they counted by the loss and the plan."""
    setup = open_setup(recipe(), device=torch.device("cpu"), notice=say_nothing, progress=False)
    labels = setup.source.splits["train"].labels
    kept = np.flatnonzero((labels != 0) | (np.arange(len(labels)) % 2 == 0))
    fewer = setup.with_num_samples(len(kept), labels[kept])
    order = fewer.sampler.order(0)
    assert len(order) == len(kept) > order.max()
    drawn = np.bincount(labels[kept][order], minlength=10)
    assert drawn.tolist() == fewer.plan()["class_draws"] != setup.plan()["class_draws"]
    assert fewer.make_loss().weight_K is not None
    assert not torch.equal(fewer.make_loss().weight_K, setup.make_loss().weight_K)


def test_what_is_rare_is_said_and_the_remedy_only_where_there_is_none() -> None:
    def line(*overrides: str) -> str:
        found = size_notices(
            open_setup(
                recipe(*overrides),
                device=torch.device("cpu"),
                notice=say_nothing,
                progress=False,
            )
        )
        return next(line for line in found if "'9'" in line)

    none = ["data.sampling=null", "optim.class_weights=null", "optim.focal_gamma=0"]
    assert "optim.class_weights=balanced" in line(*none)
    assert "optim.class_weights" not in line(*none, "optim.logit_adjustment=1")


def test_data_info_names_a_rare_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_folder(tmp_path / "photos", {"train/ant": 21, "train/bee": 2})
    assert main(["data", "info", source]) == 0
    assert "imbalance: 'bee' has 2 training images and 'ant' 21" in capsys.readouterr().out
