"""Post-training checks: warn about runs that learned nothing; exit with code 6 on divergence."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import SMALL_OVERRIDES, TINY_RECIPE, read_weights, tiny_recipe
from logs import logging_nothing
from refusals import refused

from finetune.cli.main import main
from finetune.evaluation.metrics import ClassificationMetrics
from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.training.sanity import check_results, check_setup, raise_if_diverged
from finetune.training.setup import TrainingSetup, build_setup
from finetune.training.train import train

LN_10 = math.log(10)


@pytest.fixture(scope="module")
def setup() -> TrainingSetup:
    """A training setup with ten classes."""
    with logging_nothing():
        return build_setup(tiny_recipe(), device=torch.device("cpu"), show_progress=False)


def make_history(train_losses: list[float | None], val_losses: list[float]) -> list[dict[str, Any]]:
    losses = [("train", loss) for loss in train_losses] + [("val", loss) for loss in val_losses]
    return [
        {"step": step, "split": split, "loss": loss} for step, (split, loss) in enumerate(losses)
    ]


def make_results(accuracy: float, *, steps: int = 200, images: int = 500, classes: int = 10) -> Any:
    """Return results with this accuracy; each wrong prediction is the next class."""
    labels_N = torch.arange(images) % classes
    wrong_N = torch.arange(images) >= accuracy * images
    metrics = ClassificationMetrics(classes)
    predictions_N = (labels_N + wrong_N) % classes
    metrics.update(torch.nn.functional.one_hot(predictions_N, classes).float(), labels_N)
    return {"test": metrics.compute(), "steps": steps, "best_step": steps}


def check_run(
    setup: TrainingSetup, run: Path, results: Any, history: list[dict[str, Any]]
) -> list[str]:
    """Write the history, pass both checks, and return the warnings."""
    folder = RunDir(run)
    folder.open()
    for line in history:
        folder.append_metrics(line)
    folder.close()
    raise_if_diverged(folder, setup, results)
    return check_results(setup, results, history)


def test_warns_about_an_ema_too_slow_for_the_run(setup: TrainingSetup) -> None:
    def warnings(*overrides: str, best_step: int = 100) -> list[str]:
        changed = dataclasses.replace(setup, recipe=tiny_recipe(*overrides))
        results = {**make_results(0.1), "best_step": best_step}
        lines = [*check_setup(changed), *check_results(changed, results, [])]
        return [line for line in lines if "optim.ema_warmup=true" in line]

    slow = ("optim.ema_decay=0.9999", "optim.ema_warmup=false")
    assert setup.num_steps == 12
    assert len(warnings(*slow)) == 3  # also instead of the usual advice for a chance-level run
    assert warnings(*slow, "optim.ema_decay=0.8") == []
    assert len(warnings(*slow, "optim.ema_decay=0.8", best_step=3)) == 2  # it stopped early
    assert warnings("optim.ema_decay=0.9999") == []


@pytest.mark.parametrize(
    "results, train_losses, val_losses",
    [
        (make_results(0.9), [2.3, 0.5], [1.0, 0.4]),
        (make_results(0.1, steps=2), [LN_10, 2.31], [2.32]),  # too short to learn anything
        (make_results(0.6), [2.3, 0.001], [1.0, 30.0]),  # overconfident, but it has learned
        (make_results(0.5), [2.3, 2.1], [1.5]),  # mixup and label smoothing: a high training loss
        (make_results(0.6), [2.3, None], [1.5]),  # the last steps were skipped
        (make_results(0.3), [], []),
    ],
)
def test_healthy_run_has_no_warnings(
    setup: TrainingSetup, tmp_path: Path, results: Any, train_losses: Any, val_losses: Any
) -> None:
    assert check_run(setup, tmp_path / "run", results, make_history(train_losses, val_losses)) == []


@pytest.mark.parametrize(
    "key", ["optim.class_weights={'1': 1000}", "distill.teacher=embedded:vit_ti"]
)
def test_weighted_training_loss_does_not_count_as_divergence(
    setup: TrainingSetup, tmp_path: Path, key: str
) -> None:
    scaled = dataclasses.replace(setup, recipe=parse_recipe(TINY_RECIPE, overrides=[key]))
    results, history = {"steps": 200, "best_step": 200}, make_history([231.0, 230.0], [])
    assert check_run(scaled, tmp_path / "scaled", results, history) == []
    with refused("diverged.loss"):
        check_run(setup, tmp_path / "plain", results, history)


@pytest.mark.parametrize("accuracy, warns", [(0.48, True), (0.53, True), (0.62, False)])
def test_warns_about_chance_level_with_two_classes(
    tmp_path: Path, accuracy: float, warns: bool
) -> None:
    with logging_nothing():
        binary = build_setup(tiny_recipe(), device=torch.device("cpu"), show_progress=False)
    object.__setattr__(binary.source, "class_names", ["no", "yes"])
    results = make_results(accuracy, classes=2)
    lines = check_run(binary, tmp_path / "run", results, make_history([0.69], [0.68]))
    assert [f"{100 * accuracy:.2f} %" in line for line in lines] == [True] * warns


def test_warns_if_all_predictions_are_one_class(setup: TrainingSetup, tmp_path: Path) -> None:
    metrics = ClassificationMetrics(10)
    labels_N = torch.tensor([0] * 95 + [1] * 5)
    metrics.update(torch.eye(10)[torch.zeros(100, dtype=torch.long)], labels_N)
    results = {"test": metrics.compute(), "steps": 200, "best_step": 200}
    (line,) = check_run(setup, tmp_path / "run", results, make_history([0.5], [0.4]))
    assert "all 100 images" in line


def test_warns_about_a_loss_far_above_chance(setup: TrainingSetup, tmp_path: Path) -> None:
    (line,) = check_run(
        setup, tmp_path / "run", make_results(0.3), make_history([2.3, 6.0], [1.0, 7.5])
    )
    assert "7.50" in line
    assert "optim.lr" in line


def test_rising_loss_is_divergence_but_a_high_first_loss_is_not(
    setup: TrainingSetup, tmp_path: Path
) -> None:
    exploded = make_history([2.3, 60.0], [50.0, 40.0])
    with refused("diverged.loss", "40.00", "2.30", "optim.lr"):
        check_run(setup, tmp_path / "zeros", make_results(0.3), exploded)
    recipe = parse_recipe(TINY_RECIPE, overrides=["model.head_init=default"])
    with logging_nothing():
        default_init = build_setup(recipe, device=torch.device("cpu"), show_progress=False)
    assert len(check_run(default_init, tmp_path / "default", make_results(0.3), exploded)) == 1
    with refused("diverged.loss"):
        check_run(
            default_init,
            tmp_path / "rises",
            make_results(0.3),
            make_history([2.3, 60.0], [3.0, 40.0]),
        )


@pytest.mark.usefixtures("no_plots")
def test_diverged_run_exits_with_6_and_keeps_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(TINY_RECIPE)
    overrides = ["optim.lr=30", "optim.clip_norm=null", "optim.warmup_steps=0"]
    assert main(["train", str(recipe), *overrides, "--out", str(out), "--json"]) == 6
    captured = capsys.readouterr()
    assert json.loads(captured.out)["code"] == "diverged.loss"
    assert captured.err.splitlines()[-1].startswith(f"{out}: training has diverged")
    results = json.loads((out / "results.json").read_text())
    assert len(results["warnings"]) == 1
    assert json.loads((out / "run.json").read_text())["status"] == "failed (6)"
    assert (out / "report.html").is_file()
    assert RunDir(out).verify_checkpoint(12) is None
    before = read_weights(out)
    assert main(["train", str(out), "--resume"]) == 6
    assert read_weights(out) == before


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.label_smoothing=0.3"],
        ["data.train=resize | mixup(0.8) | cutmix(1.0)", "data.micro_batch=null"],
        ["optim.steps=2", "optim.warmup_steps=0"],
    ],
    ids=["smoothing", "mixing", "two steps"],
)
def test_short_healthy_run_has_no_warnings(tmp_path: Path, overrides: list[str]) -> None:
    assert train(tiny_recipe(*SMALL_OVERRIDES, *overrides), tmp_path / "run")["warnings"] == []
