"""Going on from a model of ours: the head of known classes, and what the run directory says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file

from finetune.recipe.load import Claim, Recipe, load_recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.run.record import finished
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

OLD_RUNS = Path(__file__).parents[1] / "run" / "old_runs"
OPEN = "head_init: null"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run on digits whose model is right about half of them; its recipe says zeros."""
    return shutil.copytree(OLD_RUNS / "finished", tmp_path / "first")


def going_on(run: Path, *overrides: str) -> Recipe:
    """The recipe of one step, so small that it changes nothing, from a run's model."""
    text = f"""
model: {{name: "{run}"}}
data: {{source: "embedded:digits", eval: resize}}
optim: {{lr: 1e-9, steps: 1}}
run: {{precision: fp32, threads: 1}}
"""
    return parse_recipe(text, overrides=overrides)


def head(run: Path) -> torch.Tensor:
    return load_file(run / "model" / "model.safetensors")["head.weight"]


def head_init(run: Path) -> str | None:
    return load_recipe(run / "recipe.yaml").model.head_init


def figures(run: Path) -> dict[str, Any]:
    results = RunDir(run).read_json("results.json")
    assert results is not None
    return dict(results)


def test_the_same_classes_keep_the_head(first: Path, tmp_path: Path) -> None:
    recipe, kept, new = going_on(first), tmp_path / "kept", tmp_path / "new"
    train(recipe, kept)
    train(going_on(first, "model.head_init=zeros"), new)
    assert figures(kept)["test"]["top1"] == figures(first)["test"]["top1"] > 0.5
    assert figures(new)["test"]["top1"] < figures(kept)["test"]["top1"]
    torch.testing.assert_close(head(kept), head(first), rtol=0, atol=1e-8)
    assert (head_init(first), head_init(kept), head_init(new)) == ("zeros", "keep", "zeros")
    # it is done, whether the recipe leaves the head open or names it
    for overrides in ([], ["model.head_init=keep"]):
        before = (kept / "recipe.yaml").read_bytes()
        train(going_on(first, *overrides), kept, resume=True)
        assert (kept / "recipe.yaml").read_bytes() == before
    claim = Claim(metric="test.top1", value=0.5, source="a test")
    train(recipe.model_copy(update={"claims": (claim,)}), kept, resume=True)
    assert (head_init(kept), len(load_recipe(kept / "recipe.yaml").claims)) == ("keep", 1)
    with refused("recipe.not_this_run", "model.head_init", "'keep'", "'zeros'"):
        train(going_on(first, "model.head_init=zeros"), kept, resume=True)


def test_fewer_classes_keep_their_rows(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(going_on(first, "data.classes=['8', '1']"), run)
    torch.testing.assert_close(head(run), head(first)[[1, 8]], rtol=0, atol=1e-8)


def test_an_open_recipe_is_that_of_an_older_run(first: Path, tmp_path: Path) -> None:
    text = (first / "recipe.yaml").read_text()
    recipe = parse_recipe(text.replace("head_init: zeros", OPEN))
    assert recipe.model.head_init is None
    assert finished(first, recipe)
    other = parse_recipe(text.replace("head_init: zeros", "head_init: default"))
    assert finished(first, other) is None
    stopped = shutil.copytree(OLD_RUNS / "stopped", tmp_path / "stopped")
    text = (stopped / "recipe.yaml").read_text()
    results = train(parse_recipe(text.replace("head_init: zeros", OPEN)), stopped, resume=True)
    assert results["steps"] == 40
    assert head_init(stopped) == "zeros"
