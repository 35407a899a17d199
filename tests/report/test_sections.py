"""Rows of a run's page that its reviewed text (run_page.txt) does not show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from report_runs import metric_lines, run_results, split_results, write_and_read_run

from finetune.report.run_data import Run
from finetune.report.sections import (
    claim_rows,
    class_rows,
    confused_pair_rows,
    data_rows,
    headline_tiles,
    provenance_rows,
    run_status,
    speed_section,
    training_images_per_second,
)


@pytest.fixture
def done(tmp_path: Path) -> Run:
    return write_and_read_run(tmp_path / "run")


def unfinished(path: Path, said: str = "running", **changes: Any) -> Run:
    return write_and_read_run(path / "run", status=said, **changes)


class TestStatus:
    def test_done(self, done: Run) -> None:
        assert run_status(done) == {"kind": "done", "text": "done"}

    @pytest.mark.parametrize(
        "said, kind",
        [("running", "running"), ("failed (6)", "failed"), ("stopped (143)", "failed")],
    )
    def test_not_done(self, tmp_path: Path, said: str, kind: str) -> None:
        found = run_status(unfinished(tmp_path, said, metrics=metric_lines(steps=20)))
        assert found["kind"] == kind
        assert "20 of 40 steps" in found["text"]
        assert found["text"].startswith(said)

    def test_at_the_very_end_it_is_done(self, done: Run) -> None:
        done.record["status"] = "running"
        assert run_status(done)["kind"] == "done"
        done.results["steps"] = 80  # of an earlier run in this folder
        assert run_status(done)["kind"] == "running"


class TestHeadline:
    def test_an_unfinished_run_shows_the_last_lines(self, tmp_path: Path) -> None:
        tiles = headline_tiles(unfinished(tmp_path, metrics=metric_lines(steps=30)))
        found = {tile["label"]: (tile["value"], tile["note"]) for tile in tiles}
        on = "at step 20, on 145 images, 95\u202f% interval 32.4–48.1\u202f%"
        assert found["Validation top-1"] == ("40.00\u202f%", on)
        assert found["Training loss"] == ("1.1000", "at step 30")
        assert "Kept step" not in found


class TestClasses:
    def test_every_class_with_its_gaps(self, done: Run) -> None:
        rows = class_rows(done, "test")
        assert len(rows) == 10
        known = {"name": "0", "support": 40, "recall": 0.75, "precision": 0.5, "f1": 0.6}
        assert rows[0] == {**known, "interval": "59.8–85.8\u202f%"}
        assert rows[-1]["recall"] is None

    def test_the_worst_pairs_come_first(self, done: Run) -> None:
        pairs = confused_pair_rows(done, "test")
        assert len(pairs) == 12
        share = 17 / (33 + 17 + 8)
        assert pairs[0] == {"true": "3", "predicted": "5", "count": 17, "share": share}
        assert [pair["count"] for pair in pairs[1:]] == [1] * 11

    @pytest.mark.parametrize("broken", [None, 5, [[1, 2]], [[1, None], [0, 1]], [1], [[math.nan]]])
    def test_no_matrix_that_is_not_square(self, done: Run, broken: Any) -> None:
        done.results["test"] = {**split_results(), "confusion": broken, "per_class": None}
        assert confused_pair_rows(done, "test") == []
        assert class_rows(done, "test") == []


class TestClaims:
    def test_a_damaged_answer_breaks_nothing(self, tmp_path: Path) -> None:
        outcome = run_results(claims=[None, {}, {"metric": 5, "between": 3, "measured": math.nan}])
        rows = claim_rows(write_and_read_run(tmp_path / "run", results=outcome))
        assert [row["verdict"] for row in rows] == ["not measured"] * 2
        assert rows[1]["reported"] == "–"


class TestSpeed:
    def test_rates_time_and_share(self, done: Run) -> None:
        found = speed_section(done)
        assert training_images_per_second(done) == 525.0  # the median of 510, 520, 530, 540
        spent = 400 / 520 + 400 / 540
        assert found["share"] == [
            ("training", pytest.approx(1 - spent / 10)),
            ("validation", pytest.approx(spent / 10)),
        ]

    def test_without_lines_there_are_dashes(self, tmp_path: Path) -> None:
        found = speed_section(write_and_read_run(tmp_path / "run", metrics=[]))
        assert dict(found["rows"])["Training"] == "–"
        assert found["share"] == []


class TestFacts:
    def test_data_without_validation(self, tmp_path: Path) -> None:
        run = unfinished(tmp_path, metrics=metric_lines(validate=False))
        rows = dict(data_rows(run))
        assert rows["Who chose the weights"].startswith("nobody: there is no validation split")
        assert rows["Test"] == "not read"

    def test_skipped_steps_and_images_left_out_are_said(self, done: Run) -> None:
        done.results["skipped_steps"] = 2
        done.plan["images_read"] = 1290
        rows = dict(data_rows(done))
        assert rows["Skipped steps"].startswith("2, ")
        assert rows["Read of train"].startswith("1,290")

    def test_provenance_leaves_out_what_is_not_known(self, done: Run) -> None:
        rows = dict(provenance_rows(done))
        assert "Weights license" not in rows
        assert "None" not in "".join(rows.values())
