"""`optim.stages`: train the head first, then everything; each stage resumes like a normal run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import (
    check_child_success,
    check_same_run,
    read_train_losses,
    run_command_in_child,
    train_until_killed,
)
from logs import logged
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file
from small_datasets import random_png, write_file, write_image_folder

from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir, resume_command
from finetune.training.setup import TrainingSetup
from finetune.training.stages import stage_folder, stage_recipes
from finetune.training.train import _read_stage_weights, train

pytestmark = pytest.mark.usefixtures("no_plots")

STAGES = "stages: [{freeze: backbone, steps: 8, lr: 3e-2, train: resize}]"
TRAIN_ALL_FIRST = "optim.stages=[{freeze: none, steps: 8, lr: 1e-2}]"
RECIPE = tiny_recipe_text(
    "train: resize | random_crop(padding=2), eval: resize, batch_size: 16, num_train: 160, "
    "num_test: 50",
    optim=f"lr: 3e-3, steps: 6, ema_decay: 0.5, {STAGES}",
    run="precision: fp32, log_every: 1, eval_every: 2, save_every: 2, keep_checkpoints: 9",
)


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An undisturbed run, and its messages."""
    out, lines = tmp_path_factory.mktemp("whole") / "run", list[str]()
    with logged(lines):
        train(make_recipe(), out)
    return out, lines


def test_first_stage_trains_the_head_on_features(
    whole_run: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run, lines = whole_run
    assert any("each step computes only the classifier" in line for line in lines)
    first = stage_folder(run, 1)
    assert len(read_train_losses(first)) == 8
    assert len(read_train_losses(run)) == 6
    head = load_file(first / "model" / "model.safetensors")
    first_results = json.loads((first / "results.json").read_text())
    assert "test" not in first_results, "the test split is used only once, at the end"
    assert "test" in json.loads((run / "results.json").read_text())
    train(make_recipe("optim.stages=[]", "optim.steps=2"), tmp_path / "plain")
    without_stages = load_file(
        RunDir(tmp_path / "plain").checkpoint_folder(2) / "model.safetensors"
    )
    with_stages = load_file(RunDir(run).checkpoint_folder(2) / "model.safetensors")
    assert not torch.equal(without_stages["head.weight"], with_stages["head.weight"])
    chance_loss = pytest.approx(math.log(10), abs=1e-5)  # loss of a zero-initialized head
    assert read_train_losses(tmp_path / "plain")[0] == chance_loss != read_train_losses(run)[0]
    assert head["head.weight"].any()
    record = json.loads((run / "run.json").read_text())
    plain_record = json.loads((tmp_path / "plain" / "run.json").read_text())
    assert record["plan"]["weights"] == plain_record["plan"]["weights"], (
        "the same pretrained weights"
    )


@pytest.mark.parametrize("split", ["added", pytest.param("changed", marks=pytest.mark.faults)])
def test_what_changes_during_the_stages_is_said(tmp_path: Path, split: str) -> None:
    """The training after the stages uses it; the stages use neither test images nor teacher."""
    source, teacher = tmp_path / "data", f"distill.teacher={tmp_path / 'teacher'}"
    write_image_folder(source, {"train/a": 4, "train/b": 4, "test/a": 2, "test/b": 2})
    if split == "added":
        shutil.move(source / "test", tmp_path / "test")
    data = (f"data.source=folder:{source}", "data.num_train=null", "data.num_test=null")
    short = (*data, "data.batch_size=4", "optim.steps=1")
    for seed in (1, 2):
        teacher_recipe = make_recipe("optim.stages=[]", f"run.seed={seed}", *short)
        train(teacher_recipe, tmp_path / f"teacher{seed}")
    (tmp_path / "teacher1").rename(tmp_path / "teacher")
    train_until_killed(5, make_recipe(*short, teacher), tmp_path / "run")
    shutil.rmtree(tmp_path / "teacher")
    (tmp_path / "teacher2").rename(tmp_path / "teacher")
    if split == "added":
        shutil.move(tmp_path / "test", source / "test")
    else:
        write_file(source / "test" / "a" / "0.png", random_png(99))
    lines: list[str] = []
    changed = make_recipe(*short, teacher, "optim.lr=1e-3")
    with logged(lines):
        train(changed, tmp_path / "run", resume=True)
    (said,) = {line for line in lines if "changed since the first stage started" in line}
    for part in ("optim.lr (", "images or labels", "teacher"):
        assert part in said


def test_an_image_that_changes_before_the_main_training_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "test" / "a" / "0.png"
    write_image_folder(tmp_path, {"train/a": 4, "train/b": 4, "test/a": 2, "test/b": 2})

    def change(stage: Path) -> dict[str, torch.Tensor]:
        write_file(image, random_png(99))
        return _read_stage_weights(stage)

    monkeypatch.setattr("finetune.training.train._read_stage_weights", change)
    data = (f"data.source=folder:{tmp_path}", "data.num_train=null", "data.num_test=null")
    lines: list[str] = []
    with logged(lines):
        train(make_recipe(*data, "data.batch_size=4", "optim.steps=1"), tmp_path / "run")
    assert sum("first stage started: images or labels;" in line for line in lines) == 1


def test_a_stage_that_trains_the_head_has_no_layer_decay() -> None:
    """It would have no effect, and each run would warn about it."""
    stages = "optim.stages=[{freeze: backbone, steps: 8}, {freeze: none, steps: 8}]"
    recipes = stage_recipes(make_recipe("optim.layer_decay=0.7", stages))
    assert [recipe.optim.layer_decay for recipe in recipes] == [None, 0.7]


def test_second_stage_starts_from_the_first_stages_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial_weights: list[dict[str, torch.Tensor]] = []
    with_num_samples = TrainingSetup.with_num_samples

    def recording_with_num_samples(self: TrainingSetup, *images: Any) -> TrainingSetup:
        initial_weights.append({k: v.clone() for k, v in self.built.model.state_dict().items()})
        return with_num_samples(self, *images)

    monkeypatch.setattr(TrainingSetup, "with_num_samples", recording_with_num_samples)
    train(make_recipe("optim.steps=1", "run.test=false"), tmp_path / "run")
    first_stage = load_file(stage_folder(tmp_path / "run", 1) / "model" / "model.safetensors")
    assert not initial_weights[0]["head.weight"].any()
    for key, tensor in first_stage.items():
        assert torch.equal(initial_weights[-1][key], tensor), key


@pytest.mark.parametrize(
    "step,overrides",
    [
        (5, []),  # during the first stage
        (8 + 4, []),
        pytest.param(
            8 + 4,
            ["model.freeze=backbone", "data.train=resize", TRAIN_ALL_FIRST],
            marks=pytest.mark.faults,
        ),
    ],
)
def test_killed_run_resumes_bit_exactly(
    whole_run: tuple[Path, list[str]], tmp_path: Path, step: int, overrides: list[str]
) -> None:
    recipe, whole = make_recipe(*overrides), whole_run[0]
    if overrides:
        whole = tmp_path / "whole"
        train(recipe, whole)
    train_until_killed(step, recipe, tmp_path / "run")
    with refused("setup.run_exists", f"--out {tmp_path / 'run-2'}"):
        train(recipe, tmp_path / "run")
    # the run directory has its whole recipe from the first stage on
    check_child_success(run_command_in_child("train", tmp_path / "run", "--resume"))
    check_same_run(tmp_path / "run", whole)
    first = [stage_folder(run, 1) for run in (tmp_path / "run", whole)]
    assert read_train_losses(first[0]) == read_train_losses(first[1])


def test_a_stage_that_the_recipe_no_longer_has_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_until_killed(5, make_recipe(), tmp_path / "run")
    with refused("setup.run_exists"):
        train(make_recipe("optim.stages=[]"), tmp_path / "run")
    train(make_recipe("optim.stages=[]"), tmp_path / "run", resume=True)
    assert "a stage of this run was trained, but the recipe has no optim.stages" in caplog.text


@pytest.mark.faults
def test_two_ranks_give_the_losses_of_one(
    whole_run: tuple[Path, list[str]], tmp_path: Path
) -> None:
    recipe, two = tmp_path / "recipe.yaml", tmp_path / "two"
    recipe.write_text(RECIPE)
    run_two_ranks(run_rank_command, "train", str(recipe), "--out", str(two))
    for one, other in ((whole_run[0], two), (stage_folder(whole_run[0], 1), stage_folder(two, 1))):
        assert read_train_losses(other) == pytest.approx(read_train_losses(one), abs=1e-5)


def test_adapter_run_starts_with_the_trained_head(tmp_path: Path) -> None:
    text = """
model: {name: embedded:vit_nano, image_size: 16, adapter: {rank: 2, targets: [qkv]}}
data:
  {source: "embedded:digits", train: resize, eval: resize, batch_size: 8, num_train: 60}
optim: {lr: 1e-3, steps: 2, stages: [{freeze: backbone, steps: 10, lr: 3e-2}]}
run: {precision: fp32, log_every: 1, threads: 1, test: false}
"""
    train(parse_recipe(text), tmp_path / "run")
    first = read_train_losses(stage_folder(tmp_path / "run", 1))
    assert read_train_losses(tmp_path / "run")[0] < first[0]
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_config.json").is_file()


def test_dry_run_checks_every_stage_and_writes_nothing(tmp_path: Path) -> None:
    plan = train(make_recipe(), tmp_path / "run", dry_run=True)
    assert plan["steps"] == 6
    assert not (tmp_path / "run").exists()
    invalid = make_recipe("optim.stages=[{freeze: 7, steps: 1}]")
    with refused("recipe.wrong_value", "model.freeze", "7"):
        train(invalid, tmp_path / "run", dry_run=True)


def test_folder_with_foreign_files_under_stages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "stages" / "1").mkdir(parents=True)
    (tmp_path / "run" / "stages" / "1" / "mine.txt").touch()
    with refused("setup.not_a_run", "stages"):
        train(make_recipe(), tmp_path / "run")


def test_commands_for_a_stage_continue_the_whole_run(tmp_path: Path) -> None:
    stage = stage_folder(tmp_path / "run", 1)
    assert resume_command(stage).endswith("run/stages/1 --resume")  # a run of its own
    stage.mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").touch()
    assert resume_command(stage) == f"finetune train {tmp_path / 'run'} --resume"
    (tmp_path / "run" / "recipe.yaml").write_text("source: tar:https://host/x.tar?***")
    assert resume_command(stage).endswith("/run --resume data.source=ADDRESS")
