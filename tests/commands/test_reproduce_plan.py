"""Plan files: finding, loading, and checking them before training."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_files import PLAN, write_plan
from refusals import refused

from finetune.commands.reproduce_plan import (
    PlanEntry,
    check_plan_recipes,
    find_plan,
    load_entry_recipe,
    load_plan,
    to_smoke_plan,
)
from finetune.errors import RecipeError
from finetune.recipe.load import load_recipe

DIRECTION = "{question: q, source: s, run: plain, metric: val.loss"


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return write_plan(tmp_path)


def test_plan_is_found_by_its_folder_name(plan: str, tmp_path: Path) -> None:
    root = tmp_path / "recipes"
    assert find_plan("grids", root) == Path(plan)
    assert find_plan(plan) == Path(plan)
    with refused("recipe.not_found", "grid: ", "'grids'"):
        find_plan("grid", root)
    assert find_plan(str(Path(plan).parent)) == Path(plan)
    with refused("recipe.not_found", "nowhere", "repository"):
        find_plan("grids", tmp_path / "nowhere")
    other = root / "more" / "grids"
    other.mkdir(parents=True)
    (other / "plan.yaml").write_text(PLAN)
    with refused("recipe.unknown_name", "grids: ", "plan.yaml"):
        find_plan("grids", root)


@pytest.mark.parametrize(
    "old,new,expected",
    [
        ("small.yaml\n", "smal.yaml\n", "smal.yaml"),
        ("title", "titel", "titel"),
        ("[0.1, 0.3, 0.2]", "0.1", "grid.optim.lr: expected a list"),
        ("data.val_fraction=0", "data.val_fracton=0", "did you mean"),
        ("name: plain", "name: chosen", "two runs are called 'chosen'"),
        ("seeds: [3, 4]", "seeds: []", "seeds: the list is empty"),
        ("seeds: [3, 4]", "seeds: [3, 3]", "seeds: the list contains a duplicate"),
        ("[0.1, 0.3, 0.2]", "[1e-3, 0.001]", "contains a duplicate value"),
        ("optim.lr:", "optim.lrr:", "did you mean"),
        ("[0, 0.5]", "[0, much]", r"optim.weight_decay.*much"),
        (
            "optim.lr: [0.1, 0.3, 0.2]",
            "data.train: [resize | flip, resize  flip]",
            "would have the same folder",
        ),
        ("name: plain", "name: ../plain", "a folder name"),
        ("name: plain", "name: a/b", "a folder name"),
        (PLAN[PLAN.index("runs:") : PLAN.index("smoke")], "runs: []\n", "runs"),
        (PLAN, "", "add a title and runs"),
        ("    seeds: [3, 4]", "    probe: {}\n    seeds: [3, 4]", "probe: cannot have a grid"),
        ("name: plain", "name: plain\n    probe: {expected: [[0, 1]]}", "for each of the shots"),
        ("name: plain", "name: plain\n    probe: {draws: 0}", "draws"),
        (
            "    final: [data.val_fraction=0]",
            "    final: ['data.source=folder:a']",
            "about its own data",
        ),
        ("name: plain", "name: plain\n    probe: {}", "data.source, not optim.steps; remove"),
        ("smoke", f"directions: [{DIRECTION}, below: plan}}]\nsmoke", "did you mean 'plain'"),
        ("smoke", f"directions: [{DIRECTION}}}]\nsmoke", "give trend or below"),
    ],
)
def test_invalid_plans_are_refused_before_training(
    plan: str, old: str, new: str, expected: str
) -> None:
    text = Path(plan).read_text()
    assert old in text
    Path(plan).write_text(text.replace(old, new))
    with pytest.raises(RecipeError, match=expected):
        check_plan_recipes(load_plan(plan), Path(plan))


def test_grid_values_become_overrides() -> None:
    values = [None, "null", 0.03, "resize | flip", [1, 2], True]
    entry = PlanEntry(name="a", recipe="b.yaml", grid={"run.note": values})
    overrides = [change for (change,) in entry.grid_combinations()]
    assert overrides == [
        "run.note=null",
        'run.note="null"',
        "run.note=0.03",
        "run.note=resize | flip",
        "run.note=[1, 2]",
        "run.note=true",
    ]
    assert entry.combination_folder(overrides[3:4]) == "note=resize-flip"
    two_keys = PlanEntry(name="a", recipe="b.yaml", grid={"a.x": [1], "b.x": [2]})
    assert two_keys.combination_folder(next(two_keys.grid_combinations())) == "a.x=1,b.x=2"


def test_smoke_plan_uses_two_values_and_two_seeds(plan: str) -> None:
    chosen, plain = to_smoke_plan(load_plan(plan)).runs
    assert len(list(chosen.grid_combinations())) == 4
    assert (chosen.seeds, plain.seeds) == ((3, 4), (0,))


def test_sources_replaces_the_recipes_source(plan: str) -> None:
    path, loaded = Path(plan), load_plan(plan)
    copies = {"embedded:digits": "parquet:copy", "hub:owner/name": "folder:other"}
    plain = loaded.runs[1]
    assert load_entry_recipe(plain, path, sources=copies).data.source == "parquet:copy"
    overrides = ["data.source=a"]
    assert (
        load_entry_recipe(plain, path, extra_overrides=overrides, sources=copies).data.source == "a"
    )
    check_plan_recipes(loaded, path, (), {"embedded:digits": "parquet:copy"})
    with refused("recipe.wrong_value", "--data", "'hub:owner/name'", "digits"):
        check_plan_recipes(loaded, path, (), copies)


def test_a_secret_in_a_plan_is_refused(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-value-of-wandb")
    path = Path(plan)
    path.write_text(path.read_text().replace("title: ", "title: a-secret-value-of-wandb "))
    with refused("recipe.holds_secret", plan):
        load_plan(plan)


SHIPPED_PLANS = sorted((Path(__file__).parents[2] / "recipes").rglob("plan.yaml"))


@pytest.mark.parametrize("path", SHIPPED_PLANS, ids=[path.parent.name for path in SHIPPED_PLANS])
def test_shipped_plans_load(path: Path) -> None:
    shipped = load_plan(path)
    assert len(SHIPPED_PLANS) >= 6
    assert f"finetune reproduce {path.parent.name}" in path.read_text().splitlines()[0]
    for plan in (shipped, to_smoke_plan(shipped)):
        for entry in plan.runs:
            load_recipe(path.parent / entry.recipe, entry.overrides)
