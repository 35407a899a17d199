"""Report rows that the reviewed page text (run_page.txt) does not cover."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import metric_lines, run_results, write_and_read_run

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
def finished_run(tmp_path: Path) -> Run:
    return write_and_read_run(tmp_path / "run")


def write_unfinished_run(path: Path, status: str = "running", **changes: Any) -> Run:
    return write_and_read_run(path / "run", status=status, **changes)


class TestStatus:
    def test_finished_run_is_done(self, finished_run: Run) -> None:
        assert run_status(finished_run) == {"kind": "done", "text": "done"}

    @pytest.mark.parametrize(
        "status, kind",
        [("running", "running"), ("failed (6)", "failed"), ("stopped (143)", "failed")],
    )
    def test_unfinished_run_shows_its_progress(
        self, tmp_path: Path, status: str, kind: str
    ) -> None:
        found = run_status(write_unfinished_run(tmp_path, status, metrics=metric_lines(steps=20)))
        assert found["kind"] == kind
        assert "20 of 40 steps" in found["text"]
        assert found["text"].startswith(status)

    def test_run_with_complete_results_is_done(self, finished_run: Run) -> None:
        finished_run.record.update(status="running", model_sha256="0" * 64)
        assert run_status(finished_run)["kind"] == "done"
        del finished_run.record["model_sha256"]  # it continues with another length
        assert run_status(finished_run)["kind"] == "running"


class TestHeadlineTiles:
    def test_unfinished_run_shows_the_last_logged_values(self, tmp_path: Path) -> None:
        tiles = headline_tiles(write_unfinished_run(tmp_path, metrics=metric_lines(steps=30)))
        found = {tile["label"]: (tile["value"], tile["note"]) for tile in tiles}
        note = "at step 20, on 145 images, 95\u202f% interval 32.4–48.1\u202f%"
        assert found["Validation top-1"] == ("40.00\u202f%", note)
        assert found["Training loss"] == ("1.1000", "at step 30")
        assert "Kept step" not in found


class TestClasses:
    def test_every_class_including_undefined_values(self, finished_run: Run) -> None:
        rows = class_rows(finished_run, "test")
        assert len(rows) == 10
        expected = {"name": "0", "support": 40, "recall": 0.75, "precision": 0.5, "f1": 0.6}
        assert rows[0] == {**expected, "interval": "59.8–85.8\u202f%"}
        assert rows[-1]["recall"] is None

    def test_most_confused_pairs_come_first(self, finished_run: Run) -> None:
        pairs = confused_pair_rows(finished_run, "test")
        assert len(pairs) == 12
        share = 17 / (33 + 17 + 8)
        assert pairs[0] == {"true": "3", "predicted": "5", "count": 17, "share": share}
        assert [pair["count"] for pair in pairs[1:]] == [1] * 11


class TestClaims:
    def test_incomplete_claims_are_not_measured(self, tmp_path: Path) -> None:
        results = run_results(claims=[{}, {"metric": "val.loss", "measured": None}])
        rows = claim_rows(write_and_read_run(tmp_path / "run", results=results))
        assert [row["verdict"] for row in rows] == ["not measured"] * 2
        assert rows[1]["reported"] == "–"


class TestSpeed:
    def test_training_rate_and_time_shares(self, finished_run: Run) -> None:
        found = speed_section(finished_run)
        assert training_images_per_second(finished_run) == 525.0  # the median of 510, 520, 530, 540
        spent = 400 / 520 + 400 / 540
        assert found["share"] == [
            ("training", pytest.approx(1 - spent / 10)),
            ("validation", pytest.approx(spent / 10)),
        ]

    def test_without_metrics_rates_are_dashes(self, tmp_path: Path) -> None:
        found = speed_section(write_and_read_run(tmp_path / "run", metrics=[]))
        assert dict(found["rows"])["Training"] == "–"
        assert found["share"] == []


class TestDataAndProvenance:
    def test_data_without_validation(self, tmp_path: Path) -> None:
        run = write_unfinished_run(tmp_path, metrics=metric_lines(validate=False))
        rows = dict(data_rows(run))
        assert rows["Weight selection"].startswith("none: there is no validation split")
        assert rows["Test"] == "not evaluated"

    def test_skipped_steps_and_images_are_reported(self, finished_run: Run) -> None:
        finished_run.results["skipped_steps"] = 2
        finished_run.plan["images_read"] = 1290
        rows = dict(data_rows(finished_run))
        assert rows["Skipped steps"].startswith("2, ")
        assert rows["Readable train images"].startswith("1,290")

    def test_provenance_omits_unknown_values(self, finished_run: Run) -> None:
        rows = dict(provenance_rows(finished_run))
        assert "Weights license" not in rows
        assert "Branched from" not in rows
        assert "None" not in "".join(rows.values())

    def test_provenance_names_the_run_that_it_branched_from(self, finished_run: Run) -> None:
        record = {**finished_run.record, "branched_from": {"run": "0a1b", "step": 16}}
        rows = dict(provenance_rows(replace(finished_run, record=record)))
        assert rows["Branched from"] == "run 0a1b, step 16"
