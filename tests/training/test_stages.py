"""`optim.stages`: the head first, then all; each stage a run that is resumed as any other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from faults_runs import killed_before, losses, weights
from ranks import command, two_ranks
from recipe_texts import tiny_text
from refusals import refused
from safetensors.torch import load_file

from finetune.recipe.load import Recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup
from finetune.training.stages import folder_of
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

STAGES = "stages: [{freeze: backbone, steps: 8, lr: 3e-2, train: resize}]"
ALL_FIRST = "optim.stages=[{freeze: none, steps: 8, lr: 1e-2}]"
RECIPE = tiny_text(
    "train: resize | random_crop(padding=2), eval: resize, batch_size: 32, num_train: 320, "
    "num_test: 100",
    optim=f"lr: 3e-3, steps: 6, ema_decay: 0.5, {STAGES}",
    run="precision: fp32, log_every: 1, eval_every: 2, save_every: 2",
)


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def test_the_head_is_trained_from_features_and_then_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = "run.keep_checkpoints=9"
    results = train(recipe(every), tmp_path / "run")
    assert "it alone is computed at each step" in capsys.readouterr().err
    first = folder_of(tmp_path / "run", 1)
    assert len(losses(first)) == 8
    assert len(losses(tmp_path / "run")) == 6
    head = load_file(first / "model" / "model.safetensors")
    kept = json.loads((first / "results.json").read_text())
    assert "test" not in kept, "read once, at the end"
    assert "test" in results
    train(recipe("optim.stages=[]", every), tmp_path / "plain")
    start = load_file(RunDir(tmp_path / "plain").folder(2) / "model.safetensors")
    begun = load_file(RunDir(tmp_path / "run").folder(2) / "model.safetensors")
    assert not torch.equal(start["head.weight"], begun["head.weight"])
    guess = pytest.approx(math.log(10), abs=1e-5)  # of a head of zeros
    assert losses(tmp_path / "plain")[0] == guess != losses(tmp_path / "run")[0]
    assert head["head.weight"].any()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    before = json.loads((tmp_path / "plain" / "run.json").read_text())
    assert record["plan"]["weights"] == before["plan"]["weights"], "of the same origin"


def test_it_begins_with_the_weights_of_the_stage_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    look = TrainingSetup.with_num_samples

    def looked(self: TrainingSetup, *images: Any) -> TrainingSetup:
        seen.append({k: v.clone() for k, v in self.built.model.state_dict().items()})
        return look(self, *images)

    monkeypatch.setattr(TrainingSetup, "with_num_samples", looked)
    train(recipe(), tmp_path / "run")
    ended = load_file(folder_of(tmp_path / "run", 1) / "model" / "model.safetensors")
    assert not seen[0]["head.weight"].any()
    for key, tensor in ended.items():
        assert torch.equal(seen[-1][key], tensor), key


@pytest.mark.parametrize(
    "step,overrides",
    [
        (5, ["optim.layer_decay=0.7"]),  # in the first stage
        (8 + 4, []),
        (8 + 4, ["model.freeze=backbone", "data.train=resize", ALL_FIRST]),
    ],
)
def test_a_killed_run_is_resumed_to_the_bit(
    tmp_path: Path, step: int, overrides: list[str]
) -> None:
    chosen = recipe(*overrides)
    train(chosen, tmp_path / "whole")
    killed_before(step, chosen, tmp_path / "run")
    train(chosen, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    first = [folder_of(tmp_path / name, 1) for name in ("run", "whole")]
    assert losses(first[0]) == losses(first[1])


def test_two_ranks_train_the_same(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    train(recipe(), tmp_path / "one")
    two_ranks(command, "train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "two"))
    for place in (tmp_path, tmp_path / "stages"):
        one, two = (
            folder_of(tmp_path / n, 1) if place.name == "stages" else tmp_path / n
            for n in ("one", "two")
        )
        assert losses(two) == pytest.approx(losses(one), abs=1e-5)


def test_an_adapter_begins_with_a_trained_head(tmp_path: Path) -> None:
    text = """
model: {name: embedded:vit_nano, adapter: {rank: 2}}
data: {source: "embedded:digits", train: resize, eval: resize, batch_size: 16, num_train: 160}
optim: {lr: 1e-3, steps: 2, stages: [{freeze: backbone, steps: 20, lr: 3e-2}]}
run: {precision: fp32, log_every: 1, threads: 1, test: false}
"""
    train(parse_recipe(text), tmp_path / "run")
    first = losses(folder_of(tmp_path / "run", 1))
    assert losses(tmp_path / "run")[0] < first[0]
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_config.json").is_file()


def test_a_dry_run_looks_at_every_stage_and_writes_nothing(tmp_path: Path) -> None:
    plan = train(recipe(), tmp_path / "run", dry_run=True)
    assert plan["steps"] == 6
    assert not (tmp_path / "run").exists()
    wrong = recipe("optim.stages=[{freeze: 7, steps: 1}]")
    with refused("recipe.wrong_value", "model.freeze", "7"):
        train(wrong, tmp_path / "run", dry_run=True)


def test_a_folder_with_stages_of_others_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "run" / "stages" / "1").mkdir(parents=True)
    (tmp_path / "run" / "stages" / "1" / "mine.txt").touch()
    with refused("setup.not_a_run", "mine.txt"):
        train(recipe(), tmp_path / "run")
