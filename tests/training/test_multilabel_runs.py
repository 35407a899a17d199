"""Runs on several labels an image: alike however they are computed, resumed, measured and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_runs import killed_before, losses, weights
from ranks import command, two_ranks
from recipe_texts import tiny_text
from refusals import refused

from finetune.commands.evaluate import describe, evaluate_model, write_results
from finetune.console import say_nothing
from finetune.models.build import build
from finetune.recipe.load import Recipe, parse_recipe
from finetune.training.banner import size_notices
from finetune.training.setup import open_setup
from finetune.training.train import train
from finetune.training.verdict import warnings_of

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = tiny_text(
    "task: multilabel, train: resize | random_crop(padding=2) | mixup(0.8), eval: resize, "
    "batch_size: 24, val_fraction: 0.2, num_test: 64",
    source="embedded:digit_pairs",
    optim="lr: 1e-3, steps: 12, ema_decay: 0.5, label_smoothing: 0.1, asymmetric_loss: {clip: 0}",
    run="precision: fp32, log_every: 1, eval_every: 6, save_every: 3",
)
FIGURES = ("loss", "map", "macro_f1", "micro_f1")


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("multilabel") / "run"
    return out, train(recipe(), out)


def test_a_run_tells_what_it_measured(whole: tuple[Path, dict[str, Any]]) -> None:
    out, results = whole
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    validated = {line["step"]: line for line in lines if line["split"] == "val"}
    best = max(validated.values(), key=lambda line: line["map"])
    assert results["best_step"] == best["step"]
    assert [results["val"][key] for key in FIGURES] == [best[key] for key in FIGURES]
    assert "temperature" not in results
    assert len(results["thresholds"]) == len(results["test"]["per_class"]) == 10
    assert results["test"]["examples"] == 64
    assert {"labels", "predicted", "name"} <= results["test"]["mistakes"][0].keys()
    trained = [line for line in lines if line["split"] == "train"]
    assert all(0 <= line["micro_f1"] <= 1 and "top1" not in line for line in trained)
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["calibration"] == {"thresholds": results["thresholds"], "split": "val"}
    plan = json.loads((out / "run.json").read_text())["plan"]
    assert plan["task"] == "multilabel"
    assert plan["images"]["train"] < sum(plan["class_images"]) < 2 * plan["images"]["train"]


def test_eval_measures_as_the_run_did(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, results = whole
    again = evaluate_model(str(out))
    assert [again[key] for key in FIGURES] == [results["test"][key] for key in FIGURES]
    assert again["mistakes"] == results["test"]["mistakes"]
    val = evaluate_model(str(out), split="val")
    assert [val[key] for key in FIGURES] == [results["val"][key] for key in FIGURES]
    other = evaluate_model(str(out / "model"), data="embedded:digit_pairs")
    assert other["examples"] == 355
    assert "threshold" in describe(other)
    written = write_results(other, tmp_path / "figures")
    assert [Path(name).name for name in written] == ["results.json", "per_class.csv"]
    head = (tmp_path / "figures" / "per_class.csv").read_text().splitlines()[0]
    assert head == "class,support,recall,precision,f1,ap,threshold"
    with refused("recipe.conflict", "--fit-temperature"):
        evaluate_model(str(out), fit_temperature=True)


def test_a_killed_run_is_resumed_to_the_bit(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    killed_before(11, recipe(), tmp_path / "run")
    results = train(recipe(), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(whole[0])
    assert weights(tmp_path / "run") == weights(whole[0])
    assert results["thresholds"] == whole[1]["thresholds"]


def test_two_ranks_train_and_measure_the_same(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    out = tmp_path / "two"
    two_ranks(command, "train", str(path), "data.micro_batch=5", "--out", str(out))
    assert losses(out) == pytest.approx(losses(whole[0]), abs=1e-5)
    results = json.loads((out / "results.json").read_text())
    for split in ("val", "test"):
        own, theirs = ([one[split][key] for key in FIGURES] for one in (results, whole[1]))
        assert own == pytest.approx(theirs, abs=1e-4)
    assert results["thresholds"] == pytest.approx(whole[1]["thresholds"], abs=1e-4)
    assert results["test"]["examples"] == 64


def test_features_are_trained_as_images_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ["data.train=resize", "model.freeze=backbone", "optim.asymmetric_loss=null"]
    plain += ["optim.steps=8", "data.val_fraction=0"]
    results = train(recipe(*plain), tmp_path / "features")
    assert "thresholds" not in results
    assert {row["threshold"] for row in results["test"]["per_class"]} == {0.5}
    monkeypatch.setattr(
        "finetune.training.frozen_backbone._reason_for_images", lambda *_: "for a test"
    )
    train(recipe(*plain), tmp_path / "images")
    assert losses(tmp_path / "features") == pytest.approx(losses(tmp_path / "images"), abs=1e-5)


def test_rows_of_a_head_are_kept_only_where_they_mean_the_same(
    whole: tuple[Path, dict[str, Any]],
) -> None:
    model, names = str(whole[0] / "model"), [str(digit) for digit in range(9, -1, -1)]
    saved = build(model)
    assert saved.multilabel
    assert saved.thresholds == whole[1]["thresholds"]

    def head(*, multilabel: bool) -> torch.Tensor:
        settings = {"class_names": names, "head_init": None, "multilabel": multilabel}
        built = build(model, num_classes=10, **settings)
        assert built.multilabel is multilabel
        return built.model.head.weight.detach()

    assert torch.equal(head(multilabel=True), saved.model.head.weight.flip(0))
    assert not head(multilabel=False).any()
    with refused("recipe.conflict", "model.head_init"):
        build(model, num_classes=10, class_names=names, head_init="keep")


def test_a_run_that_learned_nothing_is_told(whole: tuple[Path, dict[str, Any]]) -> None:
    setup = open_setup(recipe(), device=torch.device("cpu"), notice=say_nothing, progress=False)
    rows = [{"support": 12}] * 10
    test = {"map": 0.25, "examples": 64, "per_class": rows, "loss": 0.5}
    results = {**whole[1], "steps": 50, "test": test}
    (line,) = warnings_of(setup, results, [])
    assert "that of a random order 23.58" in line
    assert warnings_of(setup, {**results, "test": {**test, "map": 0.5}}, []) == []
    high = [{"split": split, "loss": 1.5} for split in ("train", "val")]
    (line,) = warnings_of(setup, results, high)
    assert "far above the 0.69 of guessing" in line


def test_a_rare_class_is_told_without_what_is_refused() -> None:
    setup = open_setup(recipe(), device=torch.device("cpu"), notice=say_nothing, progress=False)
    labels = setup.source.splits["train"].labels.copy()
    labels[np.cumsum(labels[:, 8]) > 3, 8] = 0
    lines = size_notices(setup.with_num_samples(len(labels), labels))
    (line,) = [line for line in lines if "'8' has 3 training images" in line]
    assert "class_weights" not in line
