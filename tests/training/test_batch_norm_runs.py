"""Runs with batch norm over all processes, or by pretrained statistics; channels last on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from faults_runs import killed_before, losses, weights
from networks import saved
from ranks import command, two_ranks
from refusals import refused
from safetensors.torch import load_file

from finetune.commands.evaluate import evaluate_model
from finetune.data.image_store import Store
from finetune.errors import DataError
from finetune.recipe.load import Recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training.stages import stage_recipes
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = """
model: {name: test_efficientnet, pretrained: false, image_size: 32}
data:
  source: embedded:digits
  train: resize | random_crop(padding=2)
  eval: resize
  batch_size: 17
  num_train: 160
  val_fraction: 0.2
  num_test: 64
optim: {name: sgd, lr: 3e-3, steps: 20} # adamw would enlarge gradients near zero
run: {precision: fp32, log_every: 1, eval_every: 10, threads: 1}
"""
SYNC = "model.sync_bn=true"


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


def on_two(folder: Path, *overrides: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    two_ranks(command, "train", str(path), *overrides, "--out", str(folder / "two"))
    return folder / "two"


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Of 17 images a step, one rank has 8 and the other 9."""
    one, results = tmp_path / "one", train(recipe(), tmp_path / "one")
    two = on_two(tmp_path, SYNC, "optim.ema_decay=0.9")
    assert len(losses(one)) == 20
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    last = RunDir(two).folder(20)
    trained = (RunDir(one).folder(20) / "model.safetensors", last / "model.safetensors")
    expected, found = (load_file(path) for path in trained)
    assert found.keys() == expected.keys() == load_file(last / "ema.safetensors").keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5, msg=key)
    measured = evaluate_model(str(two), split="test")
    written = json.loads((two / "results.json").read_text())["test"]
    assert measured["confusion"] == written["confusion"]
    model = timm.create_model(f"local-dir:{two / 'model'}", pretrained=True)
    assert model.state_dict().keys() == expected.keys()
    assert results["test"]["loss"] > 0


@pytest.mark.slow
def test_without_it_they_drift_apart(tmp_path: Path) -> None:
    train(recipe(), tmp_path / "one")
    two = on_two(tmp_path, "optim.ema_decay=0.5")
    assert np.abs(np.subtract(losses(two), losses(tmp_path / "one"))).max() > 1e-4
    lines = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    best = json.loads((two / "results.json").read_text())["best_step"]
    (validated,) = (line for line in lines if (line["split"], line["step"]) == ("val", best))
    measured = evaluate_model(str(two), split="val")
    assert validated["loss"] == pytest.approx(measured["loss"], abs=1e-6), "all ranks had one EMA"


@pytest.mark.faults
def test_two_ranks_compute_micro_batches_anew_alike(tmp_path: Path) -> None:
    plain, again = tmp_path / "plain", tmp_path / "again"
    for folder, choice in ((plain, "false"), (again, "true")):
        folder.mkdir()
        on_two(folder, SYNC, "data.micro_batch=3", f"model.grad_checkpointing={choice}")
    assert len(losses(plain / "two")) == 20
    assert losses(again / "two") == pytest.approx(losses(plain / "two"), abs=1e-5)


def test_one_process_trains_the_same_bits(tmp_path: Path) -> None:
    train(recipe("optim.steps=4"), tmp_path / "one")
    train(recipe("optim.steps=4", SYNC), tmp_path / "same")
    assert losses(tmp_path / "same") == losses(tmp_path / "one")
    assert weights(tmp_path / "same") == weights(tmp_path / "one")


def test_activations_computed_anew_are_counted_once(tmp_path: Path) -> None:
    ends = []
    for choice in ("false", "true"):
        words = (f"model.grad_checkpointing={choice}", "optim.steps=2", "run.test=false")
        train(recipe(*words, "data.micro_batch=9"), tmp_path / choice)
        ends.append(load_file(RunDir(tmp_path / choice).folder(2) / "model.safetensors"))
    for key, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][key], tensor, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("key", ["data.batch_size", "data.micro_batch"])
def test_a_lone_image_is_refused(tmp_path: Path, key: str) -> None:
    with refused("recipe.wrong_value", "more than one image", "model.freeze_bn"):
        train(recipe("model.name=test_resnet", f"{key}=1", "run.test=false"), tmp_path / "run")


def test_pretrained_statistics_stay(tmp_path: Path) -> None:
    """And what is resumed with channels last ends with the same bits."""
    name = saved(tmp_path, "resnet")
    words = (f"model.name={name}", "model.pretrained=true", "model.freeze_bn=true")
    words += (
        "optim.name=adamw",
        "optim.lr=1e-3",
        "optim.steps=8",
        "run.eval_every=4",
        "run.save_every=2",
    )
    train(recipe(*words), tmp_path / "whole")
    before = load_file(Path(name) / "model.safetensors")
    after = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    kept = {key for key, tensor in before.items() if torch.equal(tensor, after[key])}
    assert kept == {key for key in before if "running" in key or "num_batches" in key}
    killed_before(6, recipe(*words), tmp_path / "run")
    train(recipe(*words), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_stages_of_the_head_alone_leave_the_keys_out() -> None:
    stages = "optim.stages=[{freeze: backbone, steps: 1}, {freeze: 1, steps: 1}]"
    frozen = recipe(stages, "model.pretrained=true", "model.freeze_bn=true")
    assert [stage.model.sync_bn for stage in stage_recipes(recipe(stages, SYNC))] == [False, True]
    assert [stage.model.freeze_bn for stage in stage_recipes(frozen)] == [False, True]


def test_a_step_that_cannot_be_taken_leaves_no_trace(tmp_path: Path, monkeypatch: Any) -> None:
    """Its second micro-batch does not come; the first has changed the running statistics."""
    short = recipe("data.batch_size=16", "data.micro_batch=8", "optim.steps=4", "run.test=false")
    train(short, tmp_path / "whole")
    read_all = Store.read_all

    def broken(self: Store, batches: Any) -> Any:
        for number, batch in enumerate(read_all(self, batches)):
            if number == 5 and self.split.name == "train":
                raise DataError(
                    "a.png: no such file; restore it and run again", code="data.not_found"
                )
            yield batch

    monkeypatch.setattr(Store, "read_all", broken)
    with refused("data.not_found", "a.png"):
        train(short, tmp_path / "run")
    monkeypatch.undo()
    assert RunDir(tmp_path / "run").steps() == [2]
    train(short, tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
