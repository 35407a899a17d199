"""The page beside the recipes: every figure with its seeds, machine and commit, and the hashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from page_runs import measured_of, write_all, write_plan
from refusals import refused

from finetune.commands.reproduce_measured import run_hash
from finetune.commands.reproduce_page import page_of
from finetune.commands.reproduce_plan import load_plan
from finetune.errors import RecipeError

ELSEWHERE = {
    "run": "whole",
    "program": "another 1.0",
    "command": "another --lr 1",
    "on": "A GPU",
    "seeds": [0, 1],
    "top1": [0.5, 0.52],
    "seconds": [30.0, 32.0],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_plan(tmp_path)


def page(path: Path, **given: str) -> str:
    plan = load_plan(path)
    folder = path.parents[2] / "runs"
    if not folder.exists():
        write_all(path.parents[2], path)
    return page_of(plan, path, measured_of(plan, folder), **given)


def test_the_page(path: Path) -> None:
    text = page(path)
    assert "`finetune reproduce tables --page recipes/README.md` writes this page" in text
    (whole,) = [line for line in text.splitlines() if line.startswith("| `whole` |")]
    assert "| 55.00 ± 7.07 on 100 test images | 0, 1 | 13 ± 1 | A GPU, 0123456+changes |" in whole
    (less,) = [line for line in text.splitlines() if line.startswith("| `less` |")]
    assert "| test.top1: 30.00 % to 45.00 %; met by 1 of 2 |" in less
    assert "hub:owner/images, a copy" in less
    (few,) = [line for line in text.splitlines() if line.startswith("| `few`: ")]
    assert "| 15.00 ± 7.07 (expected 10.0 to 20.0) | 40.00 ± 14.14 (expected 30.0 to 40.0) |" in few
    assert "| [`tables/small.yaml`](tables/small.yaml) |" in text
    assert "| a table, number 4 |" in text
    for run in sorted((path.parents[2] / "runs").iterdir()):
        assert f"| `{run.name}` | A GPU | 0123456+changes | `{run_hash(run)}` |" in text
    assert "5 with python 3.11.7, torch 2.14.1." in text
    assert "copies/images" not in text, "where a copy lies is nobody's business"


def test_what_the_run_expected_counts_not_what_the_plan_says_now(path: Path) -> None:
    page(path)
    path.write_text(path.read_text().replace("[0.3, 0.45]", "[0.3, 0.9]"))
    assert "30.00 % to 45.00 %; met by 1 of 2" in page(path)


def test_a_notice_leads_and_nothing_is_judged(path: Path) -> None:
    text = page(path, notice="Not the experiment.")
    assert text.splitlines()[2] == "**Not the experiment.**"
    assert "test.top1: 30.00 % to 45.00 % |" in text


def test_notes_of_the_runs_stand_on_the_page(path: Path) -> None:
    write_all(path.parents[2], path)
    for name in ("whole-s0", "whole-s1"):
        recipe = path.parents[2] / "runs" / name / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("note: null", "note: copies of 30 dB"))
    text = page(path)
    assert text.count("copies of 30 dB") == 1
    assert "by a run, `whole`" in text, "a note makes it no other training"


def test_other_programs_stand_beside(path: Path) -> None:
    assert "## Beside other programs" not in page(path)
    (path.parent / "elsewhere.json").write_text(json.dumps({"rows": [ELSEWHERE]}))
    text = page(path)
    assert (
        "| `whole` | another 1.0 | 51.00 ± 1.41 | 55.00 ± 7.07 | 31 ± 1 | – | 0, 1 | A GPU |"
        in text
    )
    assert "```bash\nanother --lr 1\n```" in text
    wrong = {**ELSEWHERE, "sead": [0]}
    (path.parent / "elsewhere.json").write_text(json.dumps({"rows": [wrong]}))
    with pytest.raises(RecipeError, match="sead"):
        page(path)


@pytest.mark.parametrize("changes", [{"top1": [0.5]}, {"seconds": [1.0]}, {"run": "hole"}])
def test_a_row_that_does_not_fit_is_refused(path: Path, changes: dict[str, object]) -> None:
    (path.parent / "elsewhere.json").write_text(json.dumps({"rows": [{**ELSEWHERE, **changes}]}))
    with refused("recipe.wrong_value", "elsewhere.json", "row 1"):
        page(path)


def test_earlier_figures_are_taken_over(path: Path) -> None:
    (path.parent / "earlier.md").write_text("A figure of old: 12.34\n")
    assert "## Earlier runs\n\nA figure of old: 12.34\n" in page(path)
