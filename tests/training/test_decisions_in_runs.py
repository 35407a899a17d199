"""A run with decisions and groups: what is recorded, and where the test metrics mention it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from logs import logged
from recipe_texts import recipe_error, tiny_recipe_text
from refusals import refused

from finetune.cli.output import format_results
from finetune.commands.evaluate import evaluate_model, format_evaluation
from finetune.commands.probe import format_probe, probe_model
from finetune.data.from_recipe import open_data
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.report.run_data import read_run
from finetune.report.sections import data_rows, headline_tiles
from finetune.run.directory import RunDir
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

DECISIONS = """action,split,index,given,label
drop,train,0,0,
relabel,train,1,1,7
drop,test,0,,
drop,test,1,,
relabel,test,2,,7
merge,,,8,9
"""


def make_recipe(*overrides: str) -> Recipe:
    text = tiny_recipe_text("eval: resize, decisions: decisions.csv", optim="lr: 3e-3, steps: 2")
    text += "claims: [{metric: test.top1, value: 0.9, source: a paper}]\n"
    return parse_recipe(text, overrides=overrides)


@pytest.fixture(autouse=True)
def write_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decisions.csv").write_text(DECISIONS)


def test_a_run_reports_decisions_wherever_it_reports_test_metrics(tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = train(make_recipe("data.decisions_on_test=true"), run)
    changes = {"dropped": 2, "relabeled": 1}
    assert results["test"]["decisions"] == changes
    assert results["test"]["examples"] == 353
    assert "decisions" not in results["val"]
    record = RunDir(run).read_json("run.json") or {}
    assert record["plan"]["decisions"] == {
        "splits": {"train": {"dropped": 1, "relabeled": 1}, "test": changes},
        "merged": {"8": "9"},
        "not_applied": 0,
    }
    assert load_recipe(run / "recipe.yaml").data.decisions == str(tmp_path / "decisions.csv")
    evaluated = evaluate_model(str(run))
    assert (evaluated["decisions"], evaluated["data_changed"]) == (changes, False)
    probed = probe_model(str(run), shots=(1,), seeds=1)
    note = "2 dropped, 1 relabeled"
    texts = {
        "results": format_results(results),
        "claim": results["claims"][0]["how"],
        "eval": format_evaluation(evaluated),
        "probe": format_probe(probed),
        "card": (run / "model" / "README.md").read_text(),
        "report": str([tile["note"] for tile in headline_tiles(read_run(run))]),
        "report, data": dict(data_rows(read_run(run)))["Test"],
    }
    assert [name for name, text in texts.items() if note not in text] == []
    published = (run / "model" / "recipe.yaml").read_text()
    assert "decisions: decisions.csv" in published
    assert str(tmp_path) not in published


def test_validation_and_folds_keep_groups_together(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(make_recipe(r"data.group='row (\d\d)'", "data.decisions=null"), run)
    recipe = load_recipe(run / "recipe.yaml")
    splits = open_data(recipe.data, recipe.run.seed).splits
    in_train, in_val, in_test = ({*splits[name].groups} for name in ("train", "val", "test"))
    assert in_train & in_val <= {""}  # rows 0 to 9 have no group
    assert len(in_val) > 5
    warnings = RunDir(run).read_json("run.json")["leakage"]
    for groups, warning in zip((in_train, in_val), warnings, strict=True):
        assert f"{len((groups & in_test) - {''})} groups" in warning
    with refused("data.too_few_images", "data.group"):
        probe_model(str(run), shots=(1,), seeds=1, folds=120)  # 90 groups and 10 single images


def test_a_run_leaves_the_test_split_alone_by_default(tmp_path: Path) -> None:
    with logged() as messages:
        results = train(make_recipe(), tmp_path / "run")
    assert (results["test"]["examples"], results["test"].get("decisions")) == (355, None)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["plan"]["decisions"]["not_applied"] == 3
    assert any("decisions_on_test" in message for message in messages)
    (tmp_path / "decisions.csv").write_text(DECISIONS.replace("relabel,train,1,1,7", ""))
    with refused("data.changed", "train"):
        train(make_recipe(), tmp_path / "run", resume=True)


def test_refuses_keys_that_need_others() -> None:
    text = tiny_recipe_text("eval: resize, decisions_on_test: true")
    assert "data.decisions_on_test" in recipe_error("conflict", text)
    text = tiny_recipe_text("decisions: d.csv, streaming: true", source="parquet:data")
    assert "data.decisions" in recipe_error("conflict", text)
