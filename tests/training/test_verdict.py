"""Runs that have not learned are named, and those whose loss has exploded end with exit code 6."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from faults_runs import SMALL, TINY, tiny, weights
from refusals import refused

from finetune.cli.main import main
from finetune.evaluation.metrics import Counts
from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup, open_setup
from finetune.training.train import train
from finetune.training.verdict import refuse_exploded, warnings_of

LN_10 = math.log(10)


@pytest.fixture(scope="module")
def setup() -> TrainingSetup:
    """Of ten classes."""
    return open_setup(tiny(), device=torch.device("cpu"), notice=pytest.fail, progress=False)


def history_of(train_losses: list[float | None], val_losses: list[float]) -> list[dict[str, Any]]:
    losses = [("train", loss) for loss in train_losses] + [("val", loss) for loss in val_losses]
    return [
        {"step": step, "split": split, "loss": loss} for step, (split, loss) in enumerate(losses)
    ]


def results_of(accuracy: float, *, steps: int = 200, images: int = 500, classes: int = 10) -> Any:
    """The results of a network that gives wrong images the next class."""
    labels_N = torch.arange(images) % classes
    wrong_N = torch.arange(images) >= accuracy * images
    counts = Counts(classes)
    guesses_N = (labels_N + wrong_N) % classes
    counts.add(torch.nn.functional.one_hot(guesses_N, classes).float(), labels_N)
    return {"test": counts.result(), "steps": steps, "best_step": steps}


def verdict(
    setup: TrainingSetup, run: Path, results: Any, history: list[dict[str, Any]]
) -> list[str]:
    """Write the history, pass both checks, and return the warnings."""
    folder = RunDir(run)
    folder.open()
    for line in history:
        folder.log(line)
    folder.close()
    refuse_exploded(folder, setup, results)
    return warnings_of(setup, results, history)


@pytest.mark.parametrize(
    "results, train_losses, val_losses",
    [
        (results_of(0.9), [2.3, 0.5], [1.0, 0.4]),
        (results_of(0.1, steps=2), [LN_10, 2.31], [2.32]),  # two steps teach nothing
        (results_of(0.6), [2.3, 0.001], [1.0, 30.0]),  # overconfident, and it has learned
        (results_of(0.5), [2.3, 2.1], [1.5]),  # mixup and label smoothing: a high training loss
        (results_of(0.6), [2.3, None], [1.5]),  # the last steps were skipped
        (results_of(0.3), [], []),
    ],
)
def test_a_healthy_run_has_no_warning(
    setup: TrainingSetup, tmp_path: Path, results: Any, train_losses: Any, val_losses: Any
) -> None:
    assert verdict(setup, tmp_path / "run", results, history_of(train_losses, val_losses)) == []


@pytest.mark.parametrize(
    "key", ["optim.class_weights={'1': 1000}", "distill.teacher=embedded:vit_ti"]
)
def test_a_training_loss_of_another_scale_is_no_sign(
    setup: TrainingSetup, tmp_path: Path, key: str
) -> None:
    other = dataclasses.replace(setup, recipe=parse_recipe(TINY, overrides=[key]))
    results, history = {"steps": 200, "best_step": 200}, history_of([231.0, 230.0], [])
    assert verdict(other, tmp_path / "scaled", results, history) == []
    with refused("diverged.loss"):
        verdict(setup, tmp_path / "plain", results, history)


@pytest.mark.parametrize("accuracy, warns", [(0.48, True), (0.53, True), (0.62, False)])
def test_two_classes_at_chance(tmp_path: Path, accuracy: float, warns: bool) -> None:
    binary = open_setup(tiny(), device=torch.device("cpu"), notice=pytest.fail, progress=False)
    object.__setattr__(binary.source, "class_names", ["no", "yes"])
    results = results_of(accuracy, classes=2)
    lines = verdict(binary, tmp_path / "run", results, history_of([0.69], [0.68]))
    assert [f"{100 * accuracy:.2f} %" in line for line in lines] == [True] * warns


def test_one_class_for_all_images(setup: TrainingSetup, tmp_path: Path) -> None:
    counts = Counts(10)
    labels_N = torch.tensor([0] * 95 + [1] * 5)
    counts.add(torch.eye(10)[torch.zeros(100, dtype=torch.long)], labels_N)
    results = {"test": counts.result(), "steps": 200, "best_step": 200}
    (line,) = verdict(setup, tmp_path / "run", results, history_of([0.5], [0.4]))
    assert "all 100 images" in line


def test_a_loss_that_stays_far_above_a_guess(setup: TrainingSetup, tmp_path: Path) -> None:
    (line,) = verdict(setup, tmp_path / "run", results_of(0.3), history_of([2.3, 6.0], [1.0, 7.5]))
    assert "7.50" in line
    assert "optim.lr" in line


def test_an_exploded_loss_is_told_from_one_that_comes_down(
    setup: TrainingSetup, tmp_path: Path
) -> None:
    exploded = history_of([2.3, 60.0], [50.0, 40.0])
    with refused("diverged.loss", "40.00", "2.30", "optim.lr"):
        verdict(setup, tmp_path / "zeros", results_of(0.3), exploded)
    recipe = parse_recipe(TINY, overrides=["model.head_init=default"])
    other = open_setup(recipe, device=torch.device("cpu"), notice=pytest.fail, progress=False)
    assert len(verdict(other, tmp_path / "default", results_of(0.3), exploded)) == 1
    with refused("diverged.loss"):
        verdict(other, tmp_path / "rises", results_of(0.3), history_of([2.3, 60.0], [3.0, 40.0]))


@pytest.mark.usefixtures("no_pictures")
def test_a_run_whose_loss_explodes_ends_with_six_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(TINY)
    keys = ["optim.lr=30", "optim.clip_norm=null", "optim.warmup_steps=0"]
    assert main(["train", str(recipe), *keys, "--out", str(out), "--json"]) == 6
    said = capsys.readouterr()
    assert json.loads(said.out)["code"] == "diverged.loss"
    assert said.err.splitlines()[-1].startswith(f"{out}: training has diverged")
    results = json.loads((out / "results.json").read_text())
    assert len(results["warnings"]) == 1
    assert json.loads((out / "run.json").read_text())["status"] == "failed (6)"
    assert (out / "report.html").is_file()
    assert RunDir(out).verify(12) is None
    before = weights(out)
    assert main(["train", str(out), "--resume"]) == 6
    assert weights(out) == before


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.label_smoothing=0.3"],
        ["data.train=resize | mixup(0.8) | cutmix(1.0)", "data.micro_batch=null"],
        ["optim.steps=2", "optim.warmup_steps=0"],
    ],
    ids=["smoothing", "mixing", "two steps"],
)
def test_a_short_healthy_run_ends_without_a_warning(tmp_path: Path, overrides: list[str]) -> None:
    assert train(tiny(*SMALL, *overrides), tmp_path / "run")["warnings"] == []
