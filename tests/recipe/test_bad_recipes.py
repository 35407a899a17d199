"""Recipes that do not fit the data, the network or the machine: an error before a run starts.

One case for each stage that refuses a recipe; the other cases are tested beside the modules, such
as tests/recipe/test_schema.py for what is wrong in a recipe by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from networks import write_timm_folder

RECIPE = """\
model: {name: embedded:vit_nano}
data: {source: "embedded:digits"}
optim: {lr: 1e-3, steps: 4}
"""
BILLION_LAUGHS = "a0: &a0 [lol]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)
)


def write_truncated_model(path: Path) -> None:
    tensors = write_timm_folder(path) / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])


def bad_file(content: str | Callable[[Path], object], code: str, named: str) -> BadInput:
    return BadInput("train bad.yaml --out run", f"recipe.{code}", named, {"bad.yaml": content})


def bad_setup(code: str, named: str, *overrides: str) -> BadInput:
    return BadInput(
        ["train", "good.yaml", *overrides, "--dry-run", "--out", "run"],
        code,
        named,
        {"good.yaml": RECIPE, "damaged": write_truncated_model},
    )


FILES = {
    "a named pipe": bad_file(os.mkfifo, "not_a_recipe", "bad.yaml"),
    "a billion laughs": bad_file(BILLION_LAUGHS, "syntax", "bad.yaml:1"),
    "a Python object": bad_file(
        RECIPE.replace("1e-3", "!!python/object/apply:os.system [id]"), "syntax", "!!python/object"
    ),
    "several problems": bad_file(
        RECIPE.replace("lr", "learning_rate") + "run: {seed: x}\n", "unknown_key", "run.seed"
    ),
}
SETUPS = {
    "an override twice": bad_setup("recipe.conflict", "'optim.lr=1'", "optim.lr=1", "optim.lr=2"),
    "an image size that the patches do not divide": bad_setup(
        "recipe.wrong_size", "65 px", "model.image_size=65"
    ),
    "an unknown class": bad_setup("recipe.unknown_name", "'12'", "data.classes=['1', '12']"),
    "an unknown optimizer": bad_setup("recipe.unknown_name", "'adamv'", "optim.name=adamv"),
    "an unknown tracker": bad_setup("recipe.unknown_name", "'wandbb'", "run.trackers=[wandbb]"),
    "more processes than launched": bad_setup(
        "setup.wrong_processes", "3 processes", "run.num_processes=3"
    ),
    "a missing teacher": bad_setup(
        "weights.not_found", "distill.teacher", "distill.teacher=gone/run"
    ),
    "an unknown teacher": bad_setup(
        "weights.unknown_name", "distill.teacher", "distill.teacher=vit_tny"
    ),
    "a damaged teacher": bad_setup("weights.damaged", "distill.teacher", "distill.teacher=damaged"),
}


@parametrize_bad_inputs({**FILES, **SETUPS})
def test_recipes(bad: BadInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_bad_input(bad)
