from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import figures, make_run, results

from finetune.report.comparison import (
    FIGURES,
    claims_beside,
    differing_keys,
    group_rows,
    groups,
    run_rows,
)
from finetune.report.run_data import Run, read_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two seeds of one recipe, and one of another with a higher learning rate."""
    made = []
    for name, seed, lr, top1 in (
        ("a-s0", 0, 0.001, 0.7),
        ("a-s1", 1, 0.001, 0.8),
        ("b", 0, 0.1, 0.9),
    ):
        outcome = results(test=figures(top1=top1))
        overrides = (f"run.seed={seed}", f"optim.lr={lr}", f"data.workers={seed}")
        made.append(read_run(make_run(tmp_path / name, *overrides, outcome=outcome)))
    return made


class TestGroups:
    def test_seeds_of_a_recipe_are_one_group(self, runs: list[Run]) -> None:
        found = groups(runs)
        assert [(group.name, len(group.runs)) for group in found] == [("a", 2), ("b", 1)]

    def test_two_recipes_of_one_name_are_told_apart(self, tmp_path: Path) -> None:
        made = [
            read_run(make_run(tmp_path / folder / "run", f"optim.lr={lr}"))
            for folder, lr in (("x", 0.1), ("y", 0.2))
        ]
        assert [group.name for group in groups(made)] == ["run (1)", "run (2)"]

    @pytest.mark.parametrize(
        "names, shared",
        [
            (["nano-s0", "nano-s1"], "nano"),
            (["nano_seed0", "nano_seed1"], "nano"),
            (["nano-s1", "nano-s10"], "nano"),
            (["nano_32", "nano_32b"], "nano_32"),
            (["0", "1"], "0"),
            (["classes0", "classes1"], "classes"),
        ],
    )
    def test_the_name_is_what_they_share(
        self, tmp_path: Path, names: list[str], shared: str
    ) -> None:
        made = [
            read_run(make_run(tmp_path / name, f"run.seed={n}")) for n, name in enumerate(names)
        ]
        assert [group.name for group in groups(made)] == [shared]


class TestRows:
    def test_only_keys_that_differ_and_matter(self, runs: list[Run]) -> None:
        assert differing_keys(runs) == [("optim.lr", ["0.001", "0.001", "0.1"])]
        assert differing_keys(runs[:2]) == []

    def test_mean_and_spread(self, runs: list[Run]) -> None:
        rows, scale = group_rows(groups(runs))
        top1 = [label for *_, label in FIGURES].index("Test top-1")
        assert rows[0]["cells"][top1] == "75.00 ± 7.07\u202f%"
        assert rows[1]["cells"][top1] == "90.00\u202f%"
        assert [row["n"] for row in rows] == [2, 1]
        assert scale == ("70\u202f%", "90\u202f%")
        assert rows[0]["dots"] == pytest.approx([0, 50])
        assert rows[1]["dots"] == pytest.approx([100])

    def test_nothing_measured(self, tmp_path: Path) -> None:
        made = [read_run(make_run(tmp_path / "a", status="running"))]
        rows, scale = group_rows(groups(made))
        assert scale is None
        assert set(rows[0]["cells"]) == {"–"}
        assert run_rows(groups(made), made)[0]["status"] == "running"

    def test_a_row_per_run(self, runs: list[Run]) -> None:
        rows = run_rows(groups(runs), runs)
        assert [row["name"] for row in rows] == ["a-s0", "a-s1", "b"]
        assert [row["color"] for row in rows] == [1, 1, 2]
        assert [row["keys"] for row in rows] == [["0.001"], ["0.001"], ["0.1"]]
        assert [row["seed"] for row in rows] == ["0", "1", "0"]
        assert rows[0]["figures"][0] == ("70.00\u202f%", 0.7)
        assert rows[0]["time"] == "10.0\u202fs"


class TestClaims:
    def test_side_by_side(self, runs: list[Run]) -> None:
        runs[1].results["claims"] = []
        rows = claims_beside(runs)
        assert len(rows) == 5
        first = rows[0]
        assert (first["what"], first["source"]) == ("test.top1", "table 1")
        assert [answer and answer["verdict"] for answer in first["answers"]] == ["met", None, "met"]
