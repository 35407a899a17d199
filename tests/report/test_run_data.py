from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused
from report_runs import metric_lines, write_run_dir

from finetune.model_checksums import add_checksums
from finetune.report.run_data import (
    format_count,
    format_decimal,
    format_duration,
    format_percent,
    read_run,
)

JSON_FILES = (
    *("run.json", "results.json", "training_images.json"),
    "model/config.json",
)
WRONG_TEST_METRICS = {
    "per_class.1": [{"support": 1, "recall": None, "precision": None, "f1": None}, None],
    "per_class.0.f1": [{"support": 1, "recall": None, "precision": None}],
    "confusion": 5,
    "calibration.0.low": [{"low": None, "high": 1, "count": 0, "accuracy": 0, "confidence": 0}],
    "calibrated.calibration.0": {"calibration": [None]},
    "mistakes": {"a": 1},
    "mistakes.0.index": [{"index": 1.5}],
    "top1": float("nan"),
    "loss": "x",
}


class TestReadRun:
    def test_finished_run(self, tmp_path: Path) -> None:
        run = read_run(write_run_dir(tmp_path / "run"))
        assert run.name == "run"
        assert run.history == metric_lines()
        assert run.steps_per_epoch == 20.2
        assert run.metrics("test")["top1"] == 0.8
        assert run.class_name(3) == "3"
        assert run.class_name(99) == "99"
        assert run.class_name(None) == "None"

    def test_unfinished_run_is_read_up_to_its_last_line(self, tmp_path: Path) -> None:
        run = read_run(
            write_run_dir(tmp_path / "run", status="running", metrics=metric_lines(steps=20))
        )
        assert run.results == {}
        assert run.metrics("test") == {}
        assert len(run.history) == 3

    def test_results_of_other_weights_are_left_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_run_dir(tmp_path / "run")
        results = json.loads((path / "results.json").read_text())
        (path / "results.json").write_text(json.dumps({**results, "model_sha256": "0" * 64}))
        assert read_run(path).results == {}
        assert "results.json is of other weights" in caplog.text

    def test_missing_metrics_file_gives_an_empty_history(self, tmp_path: Path) -> None:
        path = write_run_dir(tmp_path / "run")
        (path / "metrics.jsonl").unlink()
        assert read_run(path).history == []

    def test_missing_class_names_become_numbers(self, tmp_path: Path) -> None:
        path = write_run_dir(tmp_path / "run", class_names=["zero", "one"])
        assert read_run(path).class_names[:4] == ["zero", "one", "2", "3"]
        (path / "model" / "config.json").unlink()
        assert read_run(path).class_names == [str(number) for number in range(10)]

    @pytest.mark.parametrize("missing", ["run.json", "recipe.yaml"])
    def test_not_a_run_directory(self, tmp_path: Path, missing: str) -> None:
        path = write_run_dir(tmp_path / "run")
        (path / missing).unlink()
        for given_path, code in (
            (path, "recipe.not_a_run"),
            (path / "metrics.jsonl", "recipe.not_a_run"),
            (tmp_path / "nowhere", "recipe.not_found"),
        ):
            with refused(code, given_path):
                read_run(given_path)

    def test_run_without_metrics_is_not_finished(self, tmp_path: Path) -> None:
        path = write_run_dir(tmp_path / "run", status="failed (6)", metrics=[])
        with refused("checkpoint.not_finished", path, "failed (6)"):
            read_run(path)

    @pytest.mark.parametrize("name", JSON_FILES)
    @pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
    def test_damaged_json(self, tmp_path: Path, name: str, content: bytes) -> None:
        path = write_run_dir(tmp_path / "run")
        (path / name).write_bytes(content)
        with refused("checkpoint.damaged", path / name) as caught:
            read_run(path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("key", WRONG_TEST_METRICS)
    def test_wrong_metrics_are_refused(self, tmp_path: Path, key: str) -> None:
        wrong = {key.partition(".")[0]: WRONG_TEST_METRICS[key]}
        path = write_run_dir(tmp_path / "run", results={"test": wrong})
        with refused("checkpoint.damaged", path / "results.json", "NaN" if key == "top1" else key):
            read_run(path)

    @pytest.mark.parametrize("uri", ["https://example.org/a.png", "x.png", 7, None])
    def test_training_images_must_be_embedded(self, tmp_path: Path, uri: object) -> None:
        path = write_run_dir(tmp_path / "run")
        rows = [{"label": 0, "name": "x", "pictures": [uri] * 10}]
        (path / "training_images.json").write_text(json.dumps({"note": "", "rows": rows}))
        with refused("checkpoint.damaged", path / "training_images.json", "rows.0.pictures.0"):
            read_run(path)

    def test_damaged_lines_are_skipped(self, tmp_path: Path) -> None:
        path = write_run_dir(tmp_path / "run")
        metrics = path / "metrics.jsonl"
        metrics.write_text(f'{{"step": 5}}\n{metrics.read_text()}{{"step": 50, "spl')
        assert read_run(path).history == metric_lines()

    def test_changed_model_is_refused(self, tmp_path: Path) -> None:
        path = write_run_dir(tmp_path / "run")
        (path / "model" / "model.safetensors").write_text("weights")
        config = add_checksums({"label_names": ["a"]}, path / "model")
        (path / "model" / "config.json").write_text(json.dumps(config))
        assert read_run(path).class_name(0) == "a"
        (path / "model" / "model.safetensors").write_text("other weights")
        with refused("weights.damaged", path, "model.safetensors"):
            read_run(path)

    def test_lone_surrogates_are_read(self, tmp_path: Path) -> None:
        path = write_run_dir(tmp_path / "run")
        (path / "model" / "config.json").write_text(json.dumps({"label_names": ["\udcff"]}))
        assert read_run(path).class_name(0) == "\udcff"


class TestNumberFormats:
    def test_none_becomes_a_dash(self) -> None:
        for format_number in (format_percent, format_decimal, format_count, format_duration):
            assert format_number(None) == "–"

    def test_formats_use_narrow_spaces(self) -> None:
        """Unit names come from finetune/formatting.py."""
        assert format_percent(0.98754) == "98.75\u202f%"
        assert format_percent(1, 0) == "100\u202f%"
        assert format_decimal(0.123456) == "0.1235"
        assert format_count(1234567) == "1,234,567"
        assert format_duration(474.3) == "7\u202fmin\u202f54\u202fs"
