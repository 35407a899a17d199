"""A run on a subset of classes and images: every command that reads it uses the same subset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_texts import tiny_recipe_text
from refusals import refused
from small_datasets import write_parquet

from finetune import Classifier
from finetune.commands.evaluate import evaluate_model
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.report.run_data import read_run
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

DATA_KEYS = "classes: ['7', '3', '5'], num_val: 12, num_test: 30"


def make_recipe(*overrides: str) -> Recipe:
    text = tiny_recipe_text(DATA_KEYS + ", eval: resize", optim="lr: 3e-3, steps: 4")
    return parse_recipe(text, overrides=overrides)


def test_train_evaluate_predict_and_report_use_the_same_classes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = train(make_recipe(), run)
    names = ["3", "5", "7"]
    assert (results["val"]["examples"], results["test"]["examples"]) == (12, 30)
    assert [row["support"] for row in results["test"]["per_class"]] == [10, 10, 10]
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["label_names"] == names
    assert Classifier.load(str(run)).class_names == names
    data = load_recipe(run / "recipe.yaml").data
    assert (data.classes, data.num_val, data.num_test) == (("7", "3", "5"), 12, 30)
    for split in ("val", "test"):
        evaluated = evaluate_model(str(run), split=split)
        assert evaluated["class_names"] == names
        assert evaluated["top1"] == results[split]["top1"]
        assert evaluated["examples"] == results[split]["examples"]
    assert read_run(run).recipe == load_recipe(run / "recipe.yaml")
    record = json.loads((run / "run.json").read_text())
    assert record["plan"]["images"]["test"] == 30
    assert record["plan"]["classes"] == 3
    assert train(make_recipe(), run, resume=True) == results
    with refused("recipe.not_this_run", "data.classes"):
        train(make_recipe("data.classes=['7', '3', '6']"), run, resume=True)
    with refused("recipe.not_this_run", "data.num_val"):
        train(make_recipe("data.num_val=13"), run, resume=True)


def test_streaming_selects_the_same_classes_and_images(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [0, 1, 2] * 8, names=["ant", "bee", "cat"])
    keys = "classes: [cat, ant], num_test: 6, eval: resize, batch_size: 4"
    results = []
    for streaming in ("true", "false"):
        data, source = f"{keys}, streaming: {streaming}", f"parquet:{tmp_path}"
        text = tiny_recipe_text(data, source=source, optim="lr: 3e-3, steps: 3")
        results.append(train(parse_recipe(text), tmp_path / streaming)["test"])
        config = json.loads((tmp_path / streaming / "model" / "config.json").read_text())
        assert config["label_names"] == ["ant", "cat"]
    assert [row["support"] for row in results[0]["per_class"]] == [3, 3]
    assert results[0]["examples"] == results[1]["examples"] == 6
