"""The scripts in benchmarks/ run and print a table."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import TINY_RECIPE
from small_datasets import write_image_folder

from finetune.commands.portfolio import PORTFOLIO

TINY = ("data.num_train=60", "data.batch_size=8", "data.train=resize", "run.test=false")


def run_script(repository: Path, name: str, *arguments: str) -> list[list[str]]:
    """Run a script. Returns: the cells of the table that it prints, without the header."""
    command = [sys.executable, str(repository / "benchmarks" / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return table_cells(done.stdout)


def table_cells(text: str) -> list[list[str]]:
    """Return the cells of a printed table, without the header."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]


@pytest.fixture
def tune_regret(
    repository: Path,
    no_plots: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., list[list[str]]]:
    """Return a function that runs tune_regret.py in this process: `run_script` takes longer."""

    def run(*arguments: str) -> list[list[str]]:
        monkeypatch.setattr("sys.argv", ["tune_regret.py", *arguments])
        runpy.run_path(str(repository / "benchmarks" / "tune_regret.py"), run_name="__main__")
        return table_cells(capsys.readouterr().out)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE, encoding="utf-8")
    return str(path)


@pytest.mark.faults
def test_throughput_of_three_loops(repository: Path, recipe: str) -> None:
    pytest.importorskip("transformers")
    short = ("--steps", "2", "--warmup", "1", "--repeats", "1", "--workers", "0")
    rows = run_script(repository, "throughput.py", recipe, *TINY, *short)
    assert [row[:2] for row in rows] == [[name, "bf16"] for name in ("finetune", "timm", "trainer")]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)


@pytest.mark.faults
def test_whole_jobs(repository: Path, recipe: str) -> None:
    pytest.importorskip("transformers")
    overrides = ("optim.steps=null", "optim.epochs=1", "optim.warmup_steps=0")
    rows = run_script(
        repository, "whole_job.py", recipe, *TINY, *overrides, "--trainer", "--repeats", "1"
    )
    assert [row[0] for row in rows] == ["finetune", "trainer"]
    assert all(float(row[1]) > 0 for row in rows)


@pytest.mark.faults
def test_spin_counts(repository: Path, recipe: str) -> None:
    options = ("--spin-counts", "3000", "300000", "--repeats", "1")
    rows = run_script(repository, "spin_count.py", recipe, *TINY, *options)
    assert [row[0] for row in rows] == ["3000", "300000"]
    assert all(float(row[3]) > 0 for row in rows)


@pytest.mark.faults
def test_losses(repository: Path, recipe: str) -> None:
    rows = run_script(repository, "losses.py", recipe, *TINY, "run.precision=fp32", "--steps", "40")
    assert [row[0] for row in rows] == ["20", "40"]
    assert [float(row[3]) for row in rows] == [0.0, 0.0]  # both are float32


@pytest.mark.faults
def test_planted_problems(repository: Path, tmp_path: Path) -> None:
    options = ("--weights", "embedded:vit_nano", "--images", "300", "--leaks", "40")
    out = tmp_path / "planted"
    ((_, copies, leaks, wrong, _),) = run_script(
        repository, "plant_problems.py", "embedded:digits", str(out), *options
    )
    assert (copies.split()[-1], leaks.split()[-1], wrong) == ("3", "40", "0")
    assert int(leaks.split()[0]) >= 38
    assert len(list(out.rglob("*.png"))) == 343


@pytest.mark.faults
def test_tiny_copies(repository: Path) -> None:
    options = ("--images", "300", "--draws", "1")
    rows = run_script(repository, "tiny_copies.py", "embedded:digits", *options)
    ceiling, found = rows[:5], {row[0]: row[1] for row in rows[5:] if len(row) == 2}
    assert min(float(row[1]) for row in ceiling) > 5
    assert found["mirror"] == "30 of 30"


@pytest.mark.faults
def test_noise_recovery(repository: Path, tmp_path: Path) -> None:
    options = ("--weights", "embedded:vit_nano", "--images", "300", "--epochs", "1", "--seeds", "0")
    rows = run_script(
        repository, "noise_recovery.py", "embedded:digits", str(tmp_path / "noise"), *options
    )
    names = [f"{version}, top-1 %" for version in ("noisy", "checked", "suggested", "clean")]
    names += [f"recovered by {version}, %" for version in ("checked", "suggested")]
    assert [row[0] for row in rows] == names
    assert len(list(tmp_path.rglob("run.json"))) == 4


@pytest.mark.faults
def test_compare_keeps_its_promises(repository: Path) -> None:
    rows = run_script(repository, "compare_power.py", "--repeats", "200")
    shares = {tuple(row[:3]): float(row[3].partition(" %")[0]) for row in rows}
    alarms = [share for (what, *_), share in shares.items() if what.endswith("mid-p")]
    assert len(alarms) == 4
    assert all(share <= 7 for share in alarms)
    assert shares["1 point lower, found", "10,000", "8.0 %"] >= 90
    assert shares["4 points lower in one slice of 26: it is first", "10,000", "5.0 %"] >= 95


def test_regret_of_searches(tune_regret: Callable[..., list[list[str]]], tmp_path: Path) -> None:
    """On two tasks, the third configuration is best; a search in five runs finds it."""
    lines = []
    for task in ("one", "two"):
        for number, (name, accuracy) in enumerate([("start", 0.6), ("worse", 0.3), ("best", 0.9)]):
            curve = [(step, accuracy * step / 40, 1.0) for step in (10, 20, 30, 40)]
            row = {"task": task, "number": number, "name": name, "kind": "full", "curve": curve}
            row |= {"num_images": 1000, "estimated_seconds": 40.0, "final_seconds": 8.0}
            lines.append(json.dumps(row | {"test": accuracy}))
    table = tmp_path / "table.jsonl"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = tune_regret("replay", str(table))
    assert {row[0]: row[1:] for row in rows} == {
        "start": ["2", "0.500", "0.500"],
        "portfolio": ["6", "0.000", "0.000"],
        "random search": ["6", "0.000", "0.000"],
        "ASHA": ["6", "0.000", "0.000"],
    }


def test_the_portfolio_has_the_recorded_accuracies(repository: Path) -> None:
    lines = (repository / "benchmarks/tune_regret.jsonl").read_text(encoding="utf-8").splitlines()
    measured: dict[str, dict[str, float]] = {}
    for row in map(json.loads, lines):
        measured.setdefault(row["name"], {})[row["task"]] = round(row["test"], 3)
    assert len(PORTFOLIO) > 30
    for config in PORTFOLIO:
        assert config.accuracies == measured[config.name]


@pytest.mark.faults
def test_recording_for_the_regret(
    tune_regret: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    for split in ("train", "test"):
        write_image_folder(tmp_path / "photos", {f"{split}/a": 20, f"{split}/b": 20})
    plan, table = tmp_path / "plan.jsonl", tmp_path / "table.jsonl"
    keys = ("model.name=embedded:vit_nano", "model.freeze=backbone", "optim.epochs=2")
    folder = str(tmp_path / "photos")
    tune_regret("plan", str(plan), folder, "--overrides", *keys)
    for _ in range(2):  # the second time, all runs are in the table
        assert tune_regret("record", str(table), str(plan)) == []
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    assert len({row["name"] for row in rows}) == len(rows)
    row = rows[0]
    assert (row["task"], row["name"], row["kind"]) == ("photos", "start", "head")
    assert len(row["curve"]) == 2
    assert 0 <= row["test"] <= 1
    assert row["estimated_seconds"] > 0
