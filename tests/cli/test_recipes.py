"""`finetune recipes`: list, check, help and schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from recipe_texts import BASE_RECIPE

from finetune.cli.main import main

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: Patch) -> None:
    """A working directory with one recipe."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(BASE_RECIPE)


def test_list(capsys: Captured) -> None:
    Path("recipes").mkdir()
    Path("recipes/a.yaml").write_text(BASE_RECIPE)
    assert main(["recipes", "list"]) == 0
    assert capsys.readouterr().out == "recipes/a.yaml  vit_tiny on embedded:digits\n"
    assert main(["recipes", "list", ".", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["recipes", "list", "nowhere"]) == 2


def test_check_prints_every_problem_of_every_file(capsys: Captured) -> None:
    Path("bad.yaml").write_text(BASE_RECIPE.replace("lr", "learning_rate").replace("name", "nam"))
    assert main(["recipes", "check", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "mine.yaml: ok\n"
    assert main(["recipes", "check", "bad.yaml", "mine.yaml", "nowhere.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "bad.yaml: not valid",
        "mine.yaml: ok",
        "nowhere.yaml: not valid",
    ]
    problems = captured.err.splitlines()
    assert [line.split(":")[0] for line in problems] == ["bad.yaml"] * 2 + ["nowhere.yaml"]
    assert main(["recipes", "check", "bad.yaml", "--json"]) == 2
    (row,) = json.loads(capsys.readouterr().out)
    assert row["valid"] is False
    assert row["problems"] == problems[:2]


def test_help_of_keys(capsys: Captured) -> None:
    assert main(["recipes", "help"]) == 0
    assert "optim.warmup_steps  (whole number; default 0)" in capsys.readouterr().out
    assert main(["recipes", "help", "data.train"]) == 0
    assert "random_erasing(" in capsys.readouterr().out
    assert main(["recipes", "help", "model.name"]) == 0
    assert "transformers:owner/name" in capsys.readouterr().out
    assert main(["recipes", "help", "optim.lr", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["required"] is True


@pytest.mark.parametrize("topic", ["mixup", "data.train.mixup"])
def test_help_of_an_operation(topic: str, capsys: Captured) -> None:
    assert main(["recipes", "help", topic]) == 0
    out = capsys.readouterr().out
    assert "mixup(alpha=1.0)" in out
    assert "cutmix(" not in out
    assert "data.train" in out
    assert main(["recipes", "help", topic, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["operation"] == "mixup"
    assert row["signature"] == "mixup(alpha=1.0)"


@parametrize_bad_inputs(
    {
        "a key without its section": BadInput(
            "recipes help lr", "recipe.unknown_key", "'optim.lr'"
        ),
        "a mistyped operation": BadInput(
            "recipes help rand_augmnt", "recipe.unknown_key", "'rand_augment'"
        ),
        "a topic": BadInput("recipes help transforms", "recipe.unknown_key", "'data.train'"),
        "a topic with a key": BadInput("recipes help lora", "recipe.unknown_key", "model.adapter"),
    }
)
def test_help_of_an_unknown_topic_names_the_nearest(bad: BadInput) -> None:
    message = check_bad_input(bad)
    assert message.count("see: ") == 1


def test_schema(capsys: Captured) -> None:
    assert main(["recipes", "schema"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["title"] == "finetune recipe"
    assert main(["recipes", "schema", "--json"]) == 0
    assert capsys.readouterr().out == text
