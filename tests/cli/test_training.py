"""`finetune train` and `finetune start`: arguments, run directories, and printed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from doubles import Double, replace_module
from plan_files import PLAN

from finetune.cli.main import main
from finetune.recipe.load import load_recipe

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

RESULTS = {
    "val": {"top1": 0.5, "loss": 1.25, "examples": 10, "per_class": [1, 2]},
    "test": {"top1": 0.75, "loss": float("nan"), "examples": 20},
    "claims": [{"metric": "test.top1", "verdict": "met", "measured": 0.75}],
}

pytestmark = pytest.mark.usefixtures("workspace")


@pytest.fixture
def train(monkeypatch: Patch) -> Double:
    """A double of the function that trains."""
    double = Double(RESULTS)
    replace_module(monkeypatch, "finetune.training.train", train=double)
    return double


def test_arguments(train: Double) -> None:
    assert main(["train", "mine.yaml", "optim.lr=0.5", "--out", "here", "--resume"]) == 0
    ((args, kwargs),) = train.calls
    assert args == (load_recipe("mine.yaml", ["optim.lr=0.5"]), Path("here"))
    assert kwargs.pop("seconds_before") > 0
    assert kwargs == {"resume": True, "branch_from": None, "dry_run": False}


def test_options_may_precede_arguments(train: Double) -> None:
    assert main(["train", "--out", "here", "mine.yaml", "--dry-run", "run.seed=1"]) == 0
    args, kwargs = train.calls[0]
    assert args[0].run.seed == 1
    assert kwargs["dry_run"] is True


def test_the_run_has_the_name_of_the_recipe(train: Double) -> None:
    assert main(["train", "mine.yaml"]) == 0
    assert train.calls[0][0][1] == Path("runs/mine")


def test_a_run_directory_is_resumed_with_its_own_recipe(train: Double) -> None:
    run = Path("runs/x")
    assert main(["train", "runs/x", "--resume"]) == 0
    assert main(["train", "runs/x/recipe.yaml", "--resume"]) == 0
    assert [call[0][1] for call in train.calls] == [run, run]
    check_bad_input(
        BadInput("train runs/x", "recipe.not_a_recipe", "finetune train runs/x --resume")
    )


def test_a_run_that_stopped_before_it_had_a_recipe_is_started_again(
    train: Double, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".lock").touch()
    for options in ([], ["--resume"]):
        assert main(["train", str(tmp_path), *options]) == 2
        assert f"finetune train RECIPE --out {tmp_path}" in capsys.readouterr().err
    (tmp_path / "run.json").touch()
    assert main(["train", str(tmp_path), "--resume"]) == 2
    assert f"{tmp_path / 'recipe.yaml'}: the file is missing" in capsys.readouterr().err
    assert not train.calls


def test_text(train: Double, capsys: Captured) -> None:
    assert main(["train", "mine.yaml"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "test: accuracy 75.00 % (95 % interval 53.1–88.8 %), loss nan, "
        "on 20 images (too few to judge by)",
        "val: accuracy 50.00 % (95 % interval 23.7–76.3 %), loss 1.2500, "
        "on 10 images (too few to judge by)",
        "claim test.top1: met: measured 75.00 %",
        "next: finetune predict runs/mine IMAGE",
        "next: finetune demo runs/mine",
        "run: runs/mine",
    ]


def test_json(train: Double, capsys: Captured) -> None:
    assert main(["train", "mine.yaml", "--json"]) == 0
    results: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert results["val"] == RESULTS["val"]
    assert results["test"]["loss"] is None  # JSON has no NaN


PHOTOS = {"photos/cat/1.png": b"", "photos/dog/1.png": b""}
WRONG_ARGUMENTS = {
    "an override without a section": BadInput(
        "train mine.yaml lr=3", "recipe.unknown_key", "'optim.lr=3'"
    ),
    "a URL": BadInput(
        "train https://example.org/r.yaml", "recipe.not_a_recipe", "https://example.org/r.yaml"
    ),
    "a mistyped folder of images": BadInput("train photso", "recipe.not_found", "'photos'", PHOTOS),
    "a mistyped folder in a folder": BadInput(
        "train photos/ct", "recipe.not_found", "'photos/cat'", PHOTOS
    ),
    "a mistyped recipe": BadInput("train mien.yaml", "recipe.not_found", "'mine.yaml'"),
    "a mistyped recipe in a folder": BadInput(
        "train recipes/tables/grids/smal.yaml",
        "recipe.not_found",
        "'recipes/tables/grids/small.yaml'",
    ),
    "a mistyped recipe without its suffix": BadInput("train mine", "recipe.not_found", "mine.yaml"),
    "a name like no other": BadInput("train qqqqqq", "recipe.not_found", "recipes list"),
    "a plan": BadInput(
        "train recipes/tables/grids/plan.yaml",
        "recipe.not_a_recipe",
        "finetune reproduce grids",
    ),
    "a plan in another folder": BadInput(
        "train other/plan.yaml",
        "recipe.not_a_recipe",
        "finetune reproduce other/plan.yaml",
        {"other/plan.yaml": PLAN},
    ),
    "a spreadsheet": BadInput(
        "train t.xlsx", "data.wrong_format", "then give t.csv", {"t.xlsx": b"PK"}
    ),
    "a spreadsheet as CSV": BadInput(
        "train csv:t.ods", "data.wrong_format", "then give t.csv", {"t.ods": b"PK"}
    ),
    "an archive": BadInput(
        "train 'my photos.zip'",
        "data.wrong_format",
        "python -m zipfile -e 'my photos.zip' 'my photos'",
        {"my photos.zip": b"PK"},
    ),
    "a compressed tar": BadInput(
        "train p.tar.gz", "data.wrong_format", "python -m tarfile -e p.tar.gz p", {"p.tar.gz": b""}
    ),
    "start: a mistyped folder": BadInput("start photso", "data.not_found", "'photos'", PHOTOS),
    "an output in the images": BadInput(
        "train d --out d/run", "recipe.conflict", "folder of images d", {"d": Path.mkdir}
    ),
    "a search in the images": BadInput(
        "train d --minutes 9 --out d/r/x",
        "recipe.conflict",
        "folder of images d",
        {"d": Path.mkdir},
    ),
    "start: an image": BadInput("start a.png", "data.wrong_source", "a.png"),
}


@parametrize_bad_inputs(WRONG_ARGUMENTS)
def test_a_wrong_argument_is_refused_before_training(bad: BadInput, train: Double) -> None:
    check_bad_input(bad)
    assert train.calls == []


def test_an_error_names_what_the_user_typed(train: Double, capsys: Captured) -> None:
    for typed in ("photso", "qqqqqq"):
        assert main(["train", typed]) == 2
        assert capsys.readouterr().err.startswith(f"{typed}: ")
    Path("photos").mkdir()
    assert main(["start", "photso"]) == 3
    assert capsys.readouterr().err.startswith("photso: ")


def test_an_error_of_a_plan_names_none_of_its_keys(train: Double, capsys: Captured) -> None:
    assert main(["train", "recipes/tables/grids/plan.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "smoke" not in line
