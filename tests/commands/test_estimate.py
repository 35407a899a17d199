"""Measuring a run: a few real steps, memory, time, other settings, the text, and no leftovers."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_runs import TINY_RECIPE
from refusals import refused

from finetune.commands.estimate import estimate_run, format_run_estimate
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

OVERRIDES = (
    *("data.batch_size=24", "data.micro_batch=12", "data.num_train=120", "run.test=false"),
    *("optim.ema_decay=0.9", "run.eval_every=5", "model.args.depth=1", "data.train=resize"),
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("estimate") / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return str(path)


def set_clock(patch: pytest.MonkeyPatch, *, total_seconds: float) -> None:
    """Let each step take a millisecond, so that six steps of whole batches are measured."""
    clock = SimpleNamespace(perf_counter=itertools.count(0, 0.001).__next__)
    patch.setattr("finetune.commands.estimate.time", clock)
    patch.setattr("finetune.commands.estimate.TRIAL_SECONDS", 0.02)
    # skip garbage collection of objects from other tests
    patch.setattr("finetune.training.peak_memory.gc", SimpleNamespace(collect=lambda: 0))
    patch.setattr("finetune.commands.estimate.TOTAL_SECONDS", total_seconds)


@pytest.fixture
def estimate_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure only the recipe's own steps, and few of them."""
    set_clock(monkeypatch, total_seconds=0.0)


@pytest.fixture(scope="module")
def estimate(recipe: str) -> dict[str, Any]:
    """The estimate of a tiny run in bf16, with all other settings."""
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, total_seconds=1e9)
        estimate = estimate_run(recipe, (*OVERRIDES, "run.precision=fp32"))
    json.dumps(estimate)
    return estimate


def test_memory_contains_the_program_and_the_training_state(estimate: dict[str, Any]) -> None:
    memory = estimate["memory"]
    peaks = (memory["training"] + memory["checkpoint"], memory["evaluation"])
    assert memory["peak"] == max(peaks)
    assert memory["training"] > 2**27  # the trial runs in this process
    assert memory["checkpoint"] == estimate["disk"]["checkpoint"]
    assert memory["decoded_images"] >= 120 * 8 * 8 * 3
    assert (memory["where"], estimate["measured"]["images"]) == ("host", 12)
    assert estimate["measured"]["images_per_step"] == 24


def test_time_follows_from_the_measured_rates(estimate: dict[str, Any]) -> None:
    times, rate = estimate["time"], estimate["time"]["images_per_second"]
    assert times["epoch_seconds"] == pytest.approx(estimate["num_images"] / rate)
    assert (times["run_steps"], times["evaluations"]) == (12, 3)
    val = 120 - estimate["num_images"]
    test = 0  # of run.test=false
    evaluated = (4 * val + test) / times["evaluated_per_second"]
    assert times["run_seconds"] == pytest.approx(12 * 24 / rate + evaluated)


def test_other_settings_are_measured(estimate: dict[str, Any]) -> None:
    changes = [option["change"] for option in estimate["options"]]
    assert changes == [
        *("run.precision=bf16", "model.grad_checkpointing=true"),
        *("data.micro_batch=6", "model.freeze=backbone"),
    ]
    assert all(option["images_per_second"] > 0 for option in estimate["options"])


def test_disk_and_parameters_match_the_run(
    estimate: dict[str, Any], recipe: str, tmp_path: Path, no_plots: None
) -> None:
    overrides = (*OVERRIDES, "run.precision=fp32")
    train(parse_recipe(TINY_RECIPE, overrides=list(overrides)), tmp_path / "run")
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    written = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert estimate["disk"]["checkpoint"] == pytest.approx(written, rel=0.1)
    used = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*.safetensors"))
    assert 0.5 * used < estimate["disk"]["needed"] < 2 * used
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert estimate["parameters"]["trained"] == record["plan"]["trainable_parameters"]


def test_a_large_batch_is_measured_with_fewer_images(
    recipe: str, estimate_briefly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the whole batch would take longer than the whole measurement."""
    monkeypatch.setattr("finetune.commands.estimate.TRIAL_SECONDS", 1e-9)
    estimate = estimate_run(recipe, ["data.batch_size=1000", "data.micro_batch=auto"])
    assert estimate["measured"] == {"images": 2, "images_per_step": 2, "steps": 1}
    assert estimate["time"]["run_seconds"] > 0
    assert estimate["options"] == []


def test_frozen_backbone_is_estimated_with_cached_features(
    recipe: str, estimate_briefly: None
) -> None:
    overrides = (*OVERRIDES, "model.freeze=backbone", "data.train=resize", "optim.steps=2000")
    estimate = estimate_run(recipe, overrides)
    times = estimate["time"]
    assert times["features_seconds"] > 0
    assert times["run_seconds"] == pytest.approx(
        times["features_seconds"] + 2000 * 24 / times["images_per_second"]
    )
    assert estimate["parameters"]["trained"] < estimate["parameters"]["total"] / 10
    assert estimate["options"] == []


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("data.keep=none", "data.workers=1"), marks=pytest.mark.faults),
        ("data.train=resize | mixup(0.8)", "data.batch_size=6"),
        ("data.sampling=class_balanced",),
        ("data.val_fraction=0", "optim.class_weights=balanced", "run.eval_every=null"),
    ],
)
def test_other_recipes(overrides: tuple[str, ...], recipe: str, estimate_briefly: None) -> None:
    assert estimate_run(recipe, (*OVERRIDES, *overrides))["time"]["run_seconds"] > 0


def test_estimate_leaves_no_files(
    recipe: str, estimate_briefly: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, working = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert estimate_run(recipe, OVERRIDES)["disk"]["free_here"] > 0
    with refused("data.not_found", "nowhere"):
        estimate_run(recipe, ["data.source=folder:nowhere"])
    assert list(temporary.iterdir()) == list(working.iterdir()) == []


def test_estimates_only_one_process(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("recipe.conflict", "run.num_processes=1"):
        estimate_run(recipe, ["run.num_processes=2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("setup.one_process", "accelerate launch"):
        estimate_run(recipe)


MIB = 2**20


def make_estimate(**changes: Any) -> dict[str, Any]:
    """Return an estimate with round numbers."""
    return {
        "recipe": "r.yaml",
        "architecture": "vit_x",
        "image_size": [32, 48],
        "precision": "bf16",
        "machine": {"device": {"name": "A chip", "type": "cpu"}},
        "parameters": {"total": 5000, "trained": 1000},
        "measured": {"images": 10, "images_per_step": 20, "steps": 5},
        "num_images": 1200,
        "batch_size": 20,
        "micro_batch": 10,
        "memory": {
            "where": "host",
            "training": 546 * MIB,
            "evaluation": 2048 * MIB,
            "checkpoint": 60 * MIB,
            "peak": 2048 * MIB,
            "decoded_images": 7 * MIB,
        },
        "time": {
            "images_per_second": 50.0,
            "evaluated_per_second": 150.0,
            "epoch_seconds": 24.0,
            "features_seconds": 0.0,
            "run_seconds": 7200.0,
            "run_steps": 600,
            "evaluations": 1,
        },
        "disk": {"checkpoint": 120 * MIB, "needed": 520 * MIB, "free_here": 4096 * MIB},
        "options": [
            {"change": "a=1", "peak": 1024 * MIB, "images_per_second": 100.0},
            {"change": "b=22", "peak": 2048 * MIB, "images_per_second": 50.0},
        ],
        **changes,
    }


def test_text_matches_the_golden_file() -> None:
    golden = Path(__file__).with_name("plan.txt").read_text(encoding="utf-8")
    assert format_run_estimate(make_estimate()) + "\n" == golden


def test_text_with_cached_features_and_without_options() -> None:
    time = {**make_estimate()["time"], "features_seconds": 240.0, "evaluated_per_second": None}
    page = format_run_estimate(make_estimate(time=time, options=[]))
    assert "4 min 0 s  once; then they are kept" in page
    assert page.endswith("free here")
