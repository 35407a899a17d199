"""Batch norm in training: synchronized over ranks, frozen, and restored after a failed step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from forked_runs import read_train_losses, read_weights
from networks import save_random_network
from ranks import run_rank_command, run_two_ranks
from refusals import refused
from safetensors.torch import load_file

from finetune.commands.evaluate import evaluate_model
from finetune.data.pixel_store import PixelStore
from finetune.errors import DataError
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.stages import stage_recipes
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

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
optim: {name: sgd, lr: 3e-3, steps: 6} # adamw would amplify rounding in gradients near zero
run: {precision: fp32, log_every: 1, eval_every: 3, threads: 1}
"""
SYNC = "model.sync_bn=true"


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


def train_on_two_ranks(folder: Path, *overrides: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    run_two_ranks(run_rank_command, "train", str(path), *overrides, "--out", str(folder / "two"))
    return folder / "two"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    train(make_recipe(), out)
    return out


def test_sync_bn_makes_two_ranks_match_one(one: Path, tmp_path: Path) -> None:
    """The ranks get 8 and 9 of the 17 images per step."""
    two = train_on_two_ranks(tmp_path, SYNC, "optim.ema_decay=0.9")
    assert len(read_train_losses(one)) == 6
    assert read_train_losses(two) == pytest.approx(read_train_losses(one), abs=1e-5)
    last = RunDir(two).checkpoint_folder(6)
    trained = (RunDir(one).checkpoint_folder(6) / "model.safetensors", last / "model.safetensors")
    expected, actual = (load_file(path) for path in trained)
    assert actual.keys() == expected.keys() == load_file(last / "ema.safetensors").keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=0, atol=1e-5, msg=key)
    evaluated = evaluate_model(str(two), split="test")
    reported = json.loads((two / "results.json").read_text())["test"]
    assert evaluated["confusion"] == reported["confusion"]
    model = timm.create_model(f"local-dir:{two / 'model'}", pretrained=True)
    assert model.state_dict().keys() == expected.keys()


@pytest.mark.slow
def test_without_sync_bn_two_ranks_diverge_from_one(one: Path, tmp_path: Path) -> None:
    two = train_on_two_ranks(tmp_path, "optim.ema_decay=0.5")
    assert np.abs(np.subtract(read_train_losses(two), read_train_losses(one))).max() > 1e-4
    lines = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    best = json.loads((two / "results.json").read_text())["best_step"]
    (validated,) = (line for line in lines if (line["split"], line["step"]) == ("val", best))
    evaluated = evaluate_model(str(two), split="val")
    assert validated["loss"] == pytest.approx(evaluated["loss"], abs=1e-6), (
        "all ranks share one EMA"
    )


@pytest.mark.faults
def test_two_ranks_with_grad_checkpointing_and_sync_bn_match_without_checkpointing(
    tmp_path: Path,
) -> None:
    plain, recomputed = tmp_path / "plain", tmp_path / "again"
    for folder, grad_checkpointing in ((plain, "false"), (recomputed, "true")):
        folder.mkdir()
        train_on_two_ranks(
            folder, SYNC, "data.micro_batch=3", f"model.grad_checkpointing={grad_checkpointing}"
        )
    assert len(read_train_losses(plain / "two")) == 6
    assert read_train_losses(recomputed / "two") == pytest.approx(
        read_train_losses(plain / "two"), abs=1e-5
    )


def test_sync_bn_changes_nothing_on_one_process(one: Path, tmp_path: Path) -> None:
    train(make_recipe(SYNC), tmp_path / "same")
    assert read_train_losses(tmp_path / "same") == read_train_losses(one)
    assert read_weights(tmp_path / "same") == read_weights(one)


def test_grad_checkpointing_updates_running_stats_once_per_batch(tmp_path: Path) -> None:
    final_weights = []
    for grad_checkpointing in ("false", "true"):
        overrides = (
            f"model.grad_checkpointing={grad_checkpointing}",
            "optim.steps=2",
            "run.test=false",
        )
        train(make_recipe(*overrides, "data.micro_batch=9"), tmp_path / grad_checkpointing)
        final_weights.append(
            load_file(
                RunDir(tmp_path / grad_checkpointing).checkpoint_folder(2) / "model.safetensors"
            )
        )
    for key, tensor in final_weights[0].items():
        torch.testing.assert_close(final_weights[1][key], tensor, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("key", ["data.batch_size", "data.micro_batch"])
def test_batch_of_one_image_is_refused(tmp_path: Path, key: str) -> None:
    with refused("recipe.wrong_value", "more than one image", "model.freeze_bn"):
        train(make_recipe("model.name=test_resnet", f"{key}=1", "run.test=false"), tmp_path / "run")


def test_freeze_bn_keeps_pretrained_running_stats(tmp_path: Path) -> None:
    name = save_random_network(tmp_path, "resnet")
    overrides = (f"model.name={name}", "model.pretrained=true", "model.freeze_bn=true")
    overrides += ("optim.name=adamw", "optim.lr=1e-3", "optim.steps=4", "run.test=false")
    train(make_recipe(*overrides), tmp_path / "run")
    before = load_file(Path(name) / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    unchanged = {key for key, tensor in before.items() if torch.equal(tensor, after[key])}
    assert unchanged == {key for key in before if "running" in key or "num_batches" in key}


def test_head_only_stages_drop_sync_bn_and_freeze_bn() -> None:
    stages = "optim.stages=[{freeze: backbone, steps: 1}, {freeze: 1, steps: 1}]"
    frozen = make_recipe(stages, "model.pretrained=true", "model.freeze_bn=true")
    assert [stage.model.sync_bn for stage in stage_recipes(make_recipe(stages, SYNC))] == [
        False,
        True,
    ]
    assert [stage.model.freeze_bn for stage in stage_recipes(frozen)] == [False, True]


def test_failed_step_restores_running_stats(tmp_path: Path, monkeypatch: Any) -> None:
    """The second micro-batch fails after the first has changed the running statistics."""
    short = make_recipe(
        "data.batch_size=16", "data.micro_batch=8", "optim.steps=4", "run.test=false"
    )
    train(short, tmp_path / "whole")
    read_all = PixelStore.read_batches

    def broken(self: PixelStore, batches: Any) -> Any:
        for number, batch in enumerate(read_all(self, batches)):
            if number == 5 and self.split.name == "train":
                raise DataError(
                    "a.png: no such file; restore it and run again", code="data.not_found"
                )
            yield batch

    monkeypatch.setattr(PixelStore, "read_batches", broken)
    with refused("data.not_found", "a.png"):
        train(short, tmp_path / "run")
    monkeypatch.undo()
    assert RunDir(tmp_path / "run").checkpoint_steps() == [2]
    train(short, tmp_path / "run", resume=True)
    assert read_weights(tmp_path / "run") == read_weights(tmp_path / "whole")
