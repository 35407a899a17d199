"""Runs on long-tailed classes: equivalent, resumed and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_runs import check_same_run, read_train_losses, train_killed_and_resumed
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from small_datasets import write_image_folder

from finetune.cli.main import main
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.report.run_data import read_run
from finetune.report.sections import data_rows, headline_tiles
from finetune.training.sanity import check_setup
from finetune.training.setup import build_setup
from finetune.training.train import train
from finetune.training.training_images import augment_images, pick_one_per_class

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe_text(
    "long_tail: 100, sampling: square_root, train: resize | random_crop(padding=2) | mixup(0.8), "
    "eval: resize, batch_size: 12, val_fraction: 0.05, num_test: 64",
    optim="lr: 1e-3, steps: 8, class_weights: balanced, focal_gamma: 1, ema_decay: 0.5",
    run="precision: fp32, log_every: 1, eval_every: 4, save_every: 2",
)


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


BEST_BY_BALANCED_ACCURACY = "run.best=val.balanced_accuracy"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("long_tail") / "run"
    return out, train(make_recipe(BEST_BY_BALANCED_ACCURACY), out)


def test_record_report_and_card_show_class_counts_and_draws(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    plan = json.loads((finished_run[0] / "run.json").read_text())["plan"]
    images, draws = np.array(plan["class_images"]), np.array(plan["class_draws"])
    assert images[9] == 1
    assert images[0] > 50
    assert images.sum() == draws.sum() == plan["images_read"]
    assert draws[9] / images[9] > 5 > 1 > draws[0] / images[0]
    run = read_run(finished_run[0])
    rows = dict(data_rows(run))
    assert "'9' has 1 training image" in rows["Rare classes"]
    assert rows["Sampling"].startswith(f"square_root: an image of '9' is drawn {draws[9]} times")
    tiles = {tile["label"]: tile for tile in headline_tiles(run)}
    assert "macro F1" in tiles["Balanced accuracy"]["note"]
    card = (finished_run[0] / "model" / "README.md").read_text()
    assert "type: balanced_accuracy" in card
    assert "| balanced accuracy | macro F1 |" in card


def test_best_step_has_the_highest_balanced_accuracy(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    lines = map(json.loads, (finished_run[0] / "metrics.jsonl").read_text().splitlines())
    val_lines = {line["step"]: line for line in lines if line["split"] == "val"}
    best = finished_run[1]["best_step"]
    values = {step: line["balanced_accuracy"] for step, line in val_lines.items()}
    assert values[best] == max(values.values()) == finished_run[1]["val"]["balanced_accuracy"]


def test_killed_run_resumes_bit_exactly(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    train_killed_and_resumed(6, make_recipe(BEST_BY_BALANCED_ACCURACY), tmp_path / "run")
    check_same_run(tmp_path / "run", finished_run[0])


@pytest.mark.faults
def test_two_ranks_give_the_losses_of_one(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    run_two_ranks(
        run_rank_command,
        "train",
        str(path),
        BEST_BY_BALANCED_ACCURACY,
        "--out",
        str(tmp_path / "two"),
    )
    assert read_train_losses(tmp_path / "two") == pytest.approx(
        read_train_losses(finished_run[0]), abs=1e-5
    )


@pytest.mark.faults  # test_frozen_backbone.py compares one-label runs
def test_training_on_features_matches_training_on_images(tmp_path: Path) -> None:
    overrides = ["model.freeze=backbone", "data.sampling=class_balanced"]
    overrides += ["optim.class_weights={'9': 3}", "optim.steps=4"]
    train(make_recipe(*overrides, "data.train=resize"), tmp_path / "features")
    # flip(0) counts as random but changes no pixel
    train(make_recipe(*overrides, "data.train=resize | flip(0)"), tmp_path / "images")
    assert read_train_losses(tmp_path / "features") == pytest.approx(
        read_train_losses(tmp_path / "images"), abs=1e-5
    )


def test_augmented_previews_work_for_an_image_missing_from_an_epoch() -> None:
    setup = build_setup(
        make_recipe("data.sampling=class_balanced", "optim.class_weights=null"),
        device=torch.device("cpu"),
        show_progress=False,
    )
    split = setup.source.splits["train"]
    index = pick_one_per_class(split, 10)[0]
    assert index not in setup.sampler.epoch_order(0) or index not in setup.sampler.epoch_order(1)
    views = augment_images(setup, split, [index], same_size=True, num_epochs=3)[0].trained
    assert len({view.tobytes() for view in views}) == 3


def test_unreadable_images_are_not_sampled() -> None:
    """The sampler, the loss and the plan all ignore unreadable images."""
    setup = build_setup(make_recipe(), device=torch.device("cpu"), show_progress=False)
    labels = setup.source.splits["train"].labels
    readable = np.flatnonzero((labels != 0) | (np.arange(len(labels)) % 2 == 0))
    shortened = setup.with_num_samples(len(readable), labels[readable])
    order = shortened.sampler.epoch_order(0)
    assert len(order) == len(readable) > order.max()
    draws_per_class = np.bincount(labels[readable][order], minlength=10)
    assert (
        draws_per_class.tolist() == shortened.plan()["class_draws"] != setup.plan()["class_draws"]
    )
    assert shortened.build_loss().class_weight_K is not None
    assert not torch.equal(shortened.build_loss().class_weight_K, setup.build_loss().class_weight_K)


def test_rare_class_warning_suggests_class_weights_only_without_a_remedy() -> None:
    def warning(*overrides: str) -> str:
        found = check_setup(
            build_setup(
                make_recipe(*overrides),
                device=torch.device("cpu"),
                show_progress=False,
            )
        )
        return next(warning for warning in found if "'9'" in warning)

    no_remedy = ["data.sampling=null", "optim.class_weights=null", "optim.focal_gamma=0"]
    assert "optim.class_weights=balanced" in warning(*no_remedy)
    assert "optim.class_weights" not in warning(*no_remedy, "optim.logit_adjustment=1")


def test_data_info_reports_a_rare_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_image_folder(tmp_path / "photos", {"train/ant": 21, "train/bee": 2})
    assert main(["data", "info", source]) == 0
    assert "imbalance: 'bee' has 2 training images and 'ant' 21" in capsys.readouterr().out
