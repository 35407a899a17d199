"""Multi-label runs: equivalent, resumed, evaluated and reported."""

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
from refusals import refused

from finetune.commands.evaluate import evaluate_model, format_evaluation, write_evaluation
from finetune.models.build import build_model
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.sanity import check_results, check_setup
from finetune.training.setup import build_setup
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe_text(
    "task: multilabel, train: resize | random_crop(padding=2) | mixup(0.8), eval: resize, "
    "batch_size: 24, val_fraction: 0.2, num_test: 64",
    source="embedded:digit_pairs",
    optim="lr: 1e-3, steps: 12, ema_decay: 0.5, label_smoothing: 0.1, asymmetric_loss: {clip: 0}",
    run="precision: fp32, log_every: 1, eval_every: 6, save_every: 3",
)
METRICS = ("loss", "map", "macro_f1", "micro_f1")


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("multilabel") / "run"
    return out, train(make_recipe(), out)


def test_results_log_model_and_record_agree(finished_run: tuple[Path, dict[str, Any]]) -> None:
    out, results = finished_run
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    val_lines = {line["step"]: line for line in lines if line["split"] == "val"}
    best = max(val_lines.values(), key=lambda line: line["map"])
    assert results["best_step"] == best["step"]
    assert [results["val"][key] for key in METRICS] == [best[key] for key in METRICS]
    assert "temperature" not in results
    assert len(results["thresholds"]) == len(results["test"]["per_class"]) == 10
    assert results["test"]["examples"] == 64
    assert {"labels", "predicted", "name"} <= results["test"]["mistakes"][0].keys()
    train_lines = [line for line in lines if line["split"] == "train"]
    assert all(0 <= line["micro_f1"] <= 1 and "top1" not in line for line in train_lines)
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["calibration"] == {"thresholds": results["thresholds"], "split": "val"}
    plan = json.loads((out / "run.json").read_text())["plan"]
    assert plan["task"] == "multilabel"
    assert plan["images"]["train"] < sum(plan["class_images"]) < 2 * plan["images"]["train"]


def test_evaluate_reproduces_the_runs_metrics(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, results = finished_run
    evaluated = evaluate_model(str(out))
    assert [evaluated[key] for key in METRICS] == [results["test"][key] for key in METRICS]
    assert evaluated["mistakes"] == results["test"]["mistakes"]
    val = evaluate_model(str(out), split="val")
    assert [val[key] for key in METRICS] == [results["val"][key] for key in METRICS]
    full_test = evaluate_model(str(out / "model"), data="embedded:digit_pairs")
    assert full_test["examples"] == 355
    assert "threshold" in format_evaluation(full_test)
    file_names = write_evaluation(full_test, tmp_path / "figures")
    assert [Path(name).name for name in file_names] == ["results.json", "per_class.csv"]
    header = (tmp_path / "figures" / "per_class.csv").read_text().splitlines()[0]
    assert header == "class,support,recall,precision,f1,ap,threshold"
    with refused("recipe.conflict", "--fit-temperature"):
        evaluate_model(str(out), fit_temperature=True)


def test_killed_run_resumes_bit_exactly(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    results = train_killed_and_resumed(11, make_recipe(), tmp_path / "run")
    check_same_run(tmp_path / "run", finished_run[0])
    assert results["thresholds"] == finished_run[1]["thresholds"]


def test_two_ranks_give_the_losses_and_metrics_of_one(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    out = tmp_path / "two"
    run_two_ranks(run_rank_command, "train", str(path), "data.micro_batch=5", "--out", str(out))
    assert read_train_losses(out) == pytest.approx(read_train_losses(finished_run[0]), abs=1e-5)
    results = json.loads((out / "results.json").read_text())
    for split in ("val", "test"):
        actual, expected = (
            [metrics[split][key] for key in METRICS] for metrics in (results, finished_run[1])
        )
        assert actual == pytest.approx(expected, abs=1e-4)
    assert results["thresholds"] == pytest.approx(finished_run[1]["thresholds"], abs=1e-4)
    assert results["test"]["examples"] == 64


@pytest.mark.faults  # test_frozen_backbone.py compares one-label runs
def test_training_on_features_matches_training_on_images(tmp_path: Path) -> None:
    overrides = ["model.freeze=backbone", "optim.asymmetric_loss=null"]
    overrides += ["optim.steps=8", "data.val_fraction=0"]
    results = train(make_recipe(*overrides, "data.train=resize"), tmp_path / "features")
    assert "thresholds" not in results
    assert {row["threshold"] for row in results["test"]["per_class"]} == {0.5}
    # flip(0) counts as random but changes no pixel
    train(make_recipe(*overrides, "data.train=resize | flip(0)"), tmp_path / "images")
    assert read_train_losses(tmp_path / "features") == pytest.approx(
        read_train_losses(tmp_path / "images"), abs=1e-5
    )


def test_head_rows_are_kept_only_for_the_same_task(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    model, names = str(finished_run[0] / "model"), [str(digit) for digit in range(9, -1, -1)]
    saved = build_model(model)
    assert saved.multilabel
    assert saved.thresholds == finished_run[1]["thresholds"]

    def head_weight(*, multilabel: bool) -> torch.Tensor:
        settings = {"class_names": names, "head_init": None, "multilabel": multilabel}
        built = build_model(model, num_classes=10, **settings)
        assert built.multilabel is multilabel
        return built.model.head.weight.detach()

    assert torch.equal(head_weight(multilabel=True), saved.model.head.weight.flip(0))
    assert not head_weight(multilabel=False).any()
    with refused("recipe.conflict", "model.head_init"):
        build_model(model, num_classes=10, class_names=names, head_init="keep")


def test_warns_at_chance_level_map_and_high_losses(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    setup = build_setup(make_recipe(), device=torch.device("cpu"), show_progress=False)
    rows = [{"support": 12}] * 10
    test = {"map": 0.25, "examples": 64, "per_class": rows, "loss": 0.5}
    results = {**finished_run[1], "steps": 50, "test": test}
    (line,) = check_results(setup, results, [])
    assert "random ranking: 23.58" in line
    assert check_results(setup, {**results, "test": {**test, "map": 0.5}}, []) == []
    high_losses = [{"split": split, "loss": 1.5} for split in ("train", "val")]
    (line,) = check_results(setup, results, high_losses)
    assert "far above that of random guessing, 0.69" in line


def test_rare_class_warning_does_not_suggest_class_weights() -> None:
    setup = build_setup(make_recipe(), device=torch.device("cpu"), show_progress=False)
    labels = setup.source.splits["train"].labels.copy()
    labels[np.cumsum(labels[:, 8]) > 3, 8] = 0
    lines = check_setup(setup.with_num_samples(len(labels), labels))
    (line,) = [line for line in lines if "'8' has 3 training images" in line]
    assert "class_weights" not in line
