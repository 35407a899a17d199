"""Claims are answered by runs of the recipe, by smaller ones, or stay open; and directions."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runs import measured_of, write_all, write_plan

from finetune.commands.reproduce_claims import claims_table, directions_table
from finetune.commands.reproduce_measured import Measured
from finetune.commands.reproduce_plan import Plan, load_plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_plan(tmp_path)


@pytest.fixture
def plan(path: Path) -> Plan:
    return load_plan(path)


@pytest.fixture
def measured(tmp_path: Path, path: Path, plan: Plan) -> list[Measured]:
    return measured_of(plan, write_all(tmp_path, path))


def cells(lines: list[str]) -> list[list[str]]:
    """The rows of a table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_run_of_the_recipe_answers_and_a_smaller_one_does_not(
    path: Path, measured: list[Measured]
) -> None:
    rows = cells(claims_table(path.parents[1], path, measured, ""))
    top1 = [row for row in rows if row[1] == "test.top1"]
    assert [row[4:6] for row in top1] == [
        ["by a run, `whole`: met by 1 of 2", "55.00 ± 7.07 % (2 runs)"],
        ["by a smaller run, `less`", "47.50 ± 10.61 % (2 runs)"],
    ]
    assert top1[0][6] == "–"
    assert "4 epochs" in top1[1][6]
    assert "num_train" not in top1[1][6]
    assert {row[2] for row in rows} == {"a table"}, "what was expected is no source's claim"
    (trend,) = [row for row in rows if row[1].startswith("val.loss") and "`whole`" in row[4]]
    assert trend[4:6] == ["by a run, `whole`: met by 2 of 2", "+0.0500 ± 0.0000 an epoch (2 runs)"]


def test_without_a_run_a_claim_is_open(path: Path) -> None:
    rows = cells(claims_table(path.parents[1], path, [], ""))
    assert [row[4] for row in rows] == ["open", "open"]
    assert all("hub:owner/images" in row[6] for row in rows)
    earlier = "`recipes/tables/small.yaml` was run once"
    rows = cells(claims_table(path.parents[1], path, [], earlier))
    assert [row[4] for row in rows] == ["open; for an earlier run see below"] * 2


def test_a_reported_figure_is_a_claim_of_its_plan(path: Path) -> None:
    text = path.read_text().replace("{name: whole,", '{name: whole, reported: "0.6",')
    path.write_text(text)
    (row,) = [row for row in cells(claims_table(path.parents[1], path, [], "")) if "0.6" in row]
    assert row[:5] == ["`tables: whole`", "reported", "its plan", "0.6", "open"]


def test_directions_are_answered_for_each_seed(plan: Plan, measured: list[Measured]) -> None:
    rises, worse = cells(directions_table(plan.directions, measured))
    assert rises[3] == "yes for 2 of 2 seeds"
    assert rises[4].startswith("val.loss, slope an epoch: +0.0750 ±")
    # seed 0: 0.4 and 0.5; seed 1: 0.55, above the 0.5 of the other seed, and 0.6
    assert worse[2:4] == ["yes", "yes for 2 of 2 seeds"]
    assert worse[4] == "test.top1: 47.50 ± 10.61 % and 55.00 ± 7.07 %"
    assert worse[5] == "`less`, `whole`"


def test_a_falling_loss_does_not_rise(tmp_path: Path, plan: Plan, measured: list[Measured]) -> None:
    for name in ("less-s0", "less-s1"):
        log = tmp_path / "runs" / name / "metrics.jsonl"
        lines = log.read_text().splitlines()[:2]
        log.write_text("\n".join([*lines, *(lines[1].replace("20", n) for n in ("30", "40"))]))
        log.write_text(log.read_text().replace('"step": 40, "split": "val", "loss": 0.8', LAST))
    rises, _ = cells(directions_table(plan.directions, measured))
    assert rises[3] == "yes for 0 of 2 seeds"


LAST = '"step": 40, "split": "val", "loss": 0.1'


def test_a_direction_stays_open_without_its_runs(plan: Plan, measured: list[Measured]) -> None:
    rises, worse = cells(directions_table(plan.directions, measured[1:]))
    assert (rises[3], worse[3]) == ("yes for 2 of 2 seeds", "open")
    assert [row[3] for row in cells(directions_table(plan.directions, []))] == ["open"] * 2
