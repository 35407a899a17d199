from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from refusals import refused
from report_runs import history, make_run

from finetune.report.run_data import duration, number, percent, plain, read_run, whole

DAMAGED = ("run.json", "results.json", "training_images.json", "model/config.json")


class TestReadRun:
    def test_a_finished_run(self, tmp_path: Path) -> None:
        run = read_run(make_run(tmp_path / "run"))
        assert run.name == "run"
        assert run.history == history()
        assert run.steps_per_epoch == 20.2
        assert run.figures("test")["top1"] == 0.8
        assert run.class_name(3) == "3"
        assert run.class_name(99) == "99"
        assert run.class_name(None) == "None"

    def test_an_unfinished_run_is_read_as_far_as_it_is(self, tmp_path: Path) -> None:
        run = read_run(make_run(tmp_path / "run", status="running", lines=history(steps=20)))
        assert run.results == {}
        assert run.figures("test") == {}
        assert len(run.history) == 3

    def test_a_cut_last_line_is_left_out(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run")
        metrics = path / "metrics.jsonl"
        metrics.write_text(metrics.read_text() + '{"step": 50, "spl')
        assert read_run(path).history == history()

    def test_results_alone_are_enough(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run")
        (path / "metrics.jsonl").unlink()
        assert read_run(path).history == []

    def test_class_names_that_are_missing_are_numbers(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", names=["zero", "one"])
        assert read_run(path).class_names[:4] == ["zero", "one", "2", "3"]
        (path / "model" / "config.json").unlink()
        assert read_run(path).class_names == [str(number) for number in range(10)]

    @pytest.mark.parametrize("missing", ["run.json", "recipe.yaml"])
    def test_not_a_run_directory(self, tmp_path: Path, missing: str) -> None:
        path = make_run(tmp_path / "run")
        (path / missing).unlink()
        for place, code in (
            (path, "recipe.not_a_run"),
            (path / "metrics.jsonl", "recipe.not_a_run"),
            (tmp_path / "nowhere", "recipe.not_found"),
        ):
            with refused(code, place):
                read_run(place)

    def test_nothing_measured_yet(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", status="failed (6)", lines=[])
        with refused("checkpoint.not_finished", path, "failed (6)"):
            read_run(path)

    @pytest.mark.parametrize("name", DAMAGED)
    @pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 100_000])
    def test_damaged_json(self, tmp_path: Path, name: str, content: bytes) -> None:
        path = make_run(tmp_path / "run")
        (path / name).write_bytes(content)
        with refused("checkpoint.damaged", path / name) as caught:
            read_run(path)
        assert "\n" not in str(caught.value)

    def test_results_of_another_shape(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", outcome={"test": 5})
        with refused("checkpoint.damaged", path / "results.json", "'test'"):
            read_run(path)

    @pytest.mark.parametrize("line", ["{", "5", "{}", '{"step": "x"}', '{"step": NaN}', "\xff"])
    def test_a_damaged_line_in_the_middle(self, tmp_path: Path, line: str) -> None:
        path = make_run(tmp_path / "run")
        metrics = path / "metrics.jsonl"
        metrics.write_text(f"{line}\n{metrics.read_text()}", encoding="latin-1")
        with refused("checkpoint.damaged", metrics, "" if line == "\xff" else "line 1"):
            read_run(path)

    def test_lone_surrogates_are_read(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run")
        (path / "model" / "config.json").write_text(json.dumps({"label_names": ["\udcff"]}))
        assert read_run(path).class_name(0) == "\udcff"


class TestNumbers:
    @pytest.mark.parametrize("value", [None, "1", True, math.nan, math.inf, [], 10**400])
    def test_what_is_no_finite_number(self, value: object) -> None:
        assert number(value) is None
        assert {percent(value), plain(value), whole(value), duration(value)} == {"–"}

    def test_a_page_has_narrow_spaces(self) -> None:
        """The words are those of finetune/text.py."""
        assert percent(0.98754) == "98.75\u202f%"
        assert percent(1, 0) == "100\u202f%"
        assert plain(0.123456) == "0.1235"
        assert whole(1234567) == "1,234,567"
        assert duration(474.3) == "7\u202fmin\u202f54\u202fs"
