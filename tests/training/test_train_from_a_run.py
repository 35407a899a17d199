"""Fine-tuning from the model of a previous run: head initialization and the recorded recipe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file

from finetune.recipe.load import Claim, load_recipe, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.run.record import read_finished_results
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

DATA = "{source: embedded:digits, train: resize, eval: resize, num_train: 400, num_test: 100}"
TINY = f"""
model: {{name: embedded:vit_nano, image_size: 16, freeze: backbone}}
data: {DATA}
optim: {{name: adamw, lr: 2e-2, steps: 60}}
run: {{precision: fp32, threads: 1, log_every: 50, best: val.loss}}
"""
UNSET_HEAD_INIT = "head_init: null"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits whose model gets more than half of them right."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(parse_recipe(TINY), run)
    return run


@pytest.fixture
def previous_run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run; its recipe says `head_init: zeros`."""
    return shutil.copytree(finished, tmp_path / "first")


def continued_recipe(run: Path, *overrides: str) -> Recipe:
    """A recipe for one step from a run's model, with a learning rate too small to matter."""
    text = f"""
model: {{name: "{run}"}}
data: {DATA}
optim: {{lr: 1e-9, steps: 1}}
run: {{precision: fp32, threads: 1}}
"""
    return parse_recipe(text, overrides=overrides)


def head_weight(run: Path) -> torch.Tensor:
    return load_file(run / "model" / "model.safetensors")["head.weight"]


def head_init(run: Path) -> str | None:
    return load_recipe(run / "recipe.yaml").model.head_init


def read_results(run: Path) -> dict[str, Any]:
    results = RunDir(run).read_json("results.json")
    assert results is not None
    return dict(results)


def test_head_is_kept_for_the_same_classes(previous_run: Path, tmp_path: Path) -> None:
    recipe, kept, reinitialized = (
        continued_recipe(previous_run),
        tmp_path / "kept",
        tmp_path / "new",
    )
    train(recipe, kept)
    train(continued_recipe(previous_run, "model.head_init=zeros"), reinitialized)
    assert read_results(kept)["test"]["top1"] == read_results(previous_run)["test"]["top1"] > 0.5
    assert read_results(reinitialized)["test"]["top1"] < read_results(kept)["test"]["top1"]
    torch.testing.assert_close(head_weight(kept), head_weight(previous_run), rtol=0, atol=1e-8)
    assert (head_init(previous_run), head_init(kept), head_init(reinitialized)) == (
        "zeros",
        "keep",
        "zeros",
    )
    # the run counts as finished whether the recipe leaves head_init unset or names it
    for overrides in ([], ["model.head_init=keep"]):
        before = (kept / "recipe.yaml").read_bytes()
        train(continued_recipe(previous_run, *overrides), kept, resume=True)
        assert (kept / "recipe.yaml").read_bytes() == before
    claim = Claim(metric="test.top1", value=0.5, source="a test")
    train(recipe.model_copy(update={"claims": (claim,)}), kept, resume=True)
    assert (head_init(kept), len(load_recipe(kept / "recipe.yaml").claims)) == ("keep", 1)
    with refused("recipe.not_this_run", "model.head_init", "'keep'", "'zeros'"):
        train(continued_recipe(previous_run, "model.head_init=zeros"), kept, resume=True)


def test_head_rows_are_kept_for_a_subset_of_classes(previous_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["data.classes=['8', '1']", "data.num_train=null", "data.num_test=null"]
    train(continued_recipe(previous_run, *overrides), run)
    torch.testing.assert_close(
        head_weight(run), head_weight(previous_run)[[1, 8]], rtol=0, atol=1e-8
    )


def test_unset_head_init_matches_runs_with_zeros(previous_run: Path, tmp_path: Path) -> None:
    text = (previous_run / "recipe.yaml").read_text()
    recipe = parse_recipe(text.replace("head_init: zeros", UNSET_HEAD_INIT))
    assert recipe.model.head_init is None
    assert read_finished_results(previous_run, recipe)
    changed = parse_recipe(text.replace("head_init: zeros", "head_init: default"))
    assert read_finished_results(previous_run, changed) is None
    results = train(
        parse_recipe(text.replace("head_init: zeros", UNSET_HEAD_INIT)), previous_run, resume=True
    )
    assert results["steps"] == 60
    assert head_init(previous_run) == "zeros"
