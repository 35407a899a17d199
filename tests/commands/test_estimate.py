"""Estimating a run: a few real steps, memory by part, the text, and no leftovers."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import StepCounter
from forked_runs import TINY_RECIPE, tiny_recipe
from ranks import fork_context
from refusals import refused
from small_datasets import make_pixel_store, random_png, write_parquet

from finetune.commands.estimate import (
    RunTrial,
    decoded_image_bytes,
    estimate_run,
    format_run_estimate,
)
from finetune.data.feature_loader import FeatureLoader
from finetune.data.open_source import open_source
from finetune.errors import FinetuneError
from finetune.models.summary import count_parameters

OVERRIDES = (
    *("data.batch_size=24", "data.micro_batch=12", "data.num_train=120", "run.test=false"),
    *("optim.ema_decay=0.9", "run.eval_every=5", "model.args.depth=1"),
)


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    """Use few steps, and skip garbage collection of objects from other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finetune.commands.estimate._MAX_STEPS", 3)
        patch.setattr("finetune.commands.estimate.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> RunTrial:
    trial = RunTrial(
        StepCounter(), recipe=tiny_recipe(*OVERRIDES), folder=str(tmp_path_factory.mktemp("trial"))
    )
    trial.prepare()
    trial.timed = trial.measure()  # type: ignore[attr-defined]
    trial.predicted = trial.predict()  # type: ignore[attr-defined]
    return trial


def test_peak_memory_is_the_sum_of_its_parts(trial: RunTrial) -> None:
    predicted: dict[str, Any] = trial.predicted  # type: ignore[attr-defined]
    memory, weights_bytes = (
        predicted["memory"],
        4 * count_parameters(trial.setup.built.model.parameters()),
    )
    parts = memory["parts"]
    assert parts["weights"] == parts["gradients"] == parts["average"] == weights_bytes
    assert parts["moments"] == pytest.approx(2 * weights_bytes, rel=0.01)
    assert parts["snapshot"] == parts["weights"] + parts["moments"] + parts["average"]
    assert parts["images"] == 120 * 8 * 8 * 3
    per_image = parts["activations_per_image"]
    assert parts["activations"] == pytest.approx(12 * per_image, rel=0.1)
    constant = [value for key, value in parts.items() if not key.startswith("activations")]
    assert memory["phases"]["training"] == sum(constant) + parts["activations"]
    assert memory["peak"] == max(memory["phases"].values())
    assert (memory["where"], predicted["micro_batch"]) == ("host", 12)
    # the trial runs in this process, whose memory includes other tests' objects
    assert parts["program"] > 2**27
    assert memory["measured"] > parts["program"]


@pytest.mark.parametrize("sizes", [[(5, 4)] * 40, [(5, 4), (9, 7)] * 20])
def test_decoded_image_bytes_counts_images_of_any_size(
    sizes: list[tuple[int, int]], tmp_path: Path
) -> None:
    images = [{"bytes": random_png(n, size), "path": None} for n, size in enumerate(sizes)]
    file = write_parquet(tmp_path / "a.parquet", [0, 1] * 20, images=images)
    store = make_pixel_store(open_source(f"parquet:{file}").splits["train"], "memory")
    assert decoded_image_bytes(store, torch.device("cpu")) == sum(
        3 * math.prod(size) for size in sizes
    )


def test_time_follows_from_the_measured_rates(trial: RunTrial) -> None:
    time: dict[str, Any] = trial.timed["time"]  # type: ignore[attr-defined]
    rate = time["images_per_second"]
    assert rate == pytest.approx(sum(time["turns"]) / len(time["turns"]))
    assert time["epoch_seconds"] == pytest.approx(trial.setup.num_samples / rate)
    assert (time["run_steps"], time["evaluations"]) == (12, 3)
    val = 120 - trial.setup.num_samples
    evaluated = 4 * val / time["evaluated_per_second"]
    assert time["run_seconds"] == pytest.approx(12 * 24 / rate + evaluated)
    assert 0 <= time["input_share"] < 1


def test_disk_needs_the_kept_checkpoints_and_the_one_being_written(trial: RunTrial) -> None:
    predicted: dict[str, Any] = trial.predicted  # type: ignore[attr-defined]
    disk, parts = predicted["disk"], predicted["memory"]["parts"]
    assert disk["checkpoint"] == parts["snapshot"]
    assert disk["needed"] == (2 + 2) * disk["checkpoint"] + 2 * parts["average"]
    json.dumps(predicted)


def test_no_snapshot_without_intermediate_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests/bench/test_predictor.py tests the suggestions
    monkeypatch.setattr("finetune.commands.estimate.suggest_settings", lambda *_: [])
    overrides = ("data.val_fraction=0", "run.eval_every=12", "model.freeze=backbone")
    trial = RunTrial(
        StepCounter(), recipe=tiny_recipe(*OVERRIDES, *overrides), folder=str(tmp_path)
    )
    trial.prepare()
    trial.measure()
    predicted = trial.predict()
    parts = predicted["memory"]["parts"]
    assert parts["snapshot"] == 0
    assert 0 < parts["gradients"] < parts["weights"] / 10
    assert "evaluation" not in predicted["memory"]["phases"]
    assert predicted["parameters"]["trained"] == parts["gradients"] // 4


def test_frozen_backbone_is_estimated_with_cached_features(tmp_path: Path) -> None:
    overrides = (
        "model.freeze=backbone",
        "data.train=resize",
        "optim.steps=2000",
        "run.eval_every=9",
    )
    trial = RunTrial(
        StepCounter(), recipe=tiny_recipe(*OVERRIDES, *overrides), folder=str(tmp_path)
    )
    assert trial.prepare()["of_features"]
    time, steps = trial.measure()["time"], 2000
    rate = trial.measured.images_per_second
    assert time["features_seconds"] > 0
    assert isinstance(trial.active_loader, FeatureLoader)  # the timed steps used cached features
    assert time["images_per_second"] == rate
    val = 120 - trial.setup.num_samples
    evaluated = (time["evaluations"] + 1) * val / time["evaluated_per_second"]
    training = steps * 24 / rate
    assert time["run_seconds"] == pytest.approx(time["features_seconds"] + training + evaluated)
    estimate = trial.predict()
    memory, parts = estimate["memory"], estimate["memory"]["parts"]
    assert parts["features"] == 120 * 32 * 4
    assert (parts["activations_per_image"], memory["measured"]) == (2 * 32 * 4, None)
    excluded = ("images", "activations_per_image")
    assert memory["phases"]["training"] == sum(v for k, v in parts.items() if k not in excluded)
    assert {"features", "training"} <= set(memory["phases"])
    assert estimate["options"] == []


@pytest.mark.faults
def test_estimate_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, working = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    estimate = estimate_run(str(recipe), OVERRIDES)
    assert list(temporary.iterdir()) == list(working.iterdir()) == []
    assert estimate["batch_size"] == 24
    assert estimate["disk"]["free_here"] > 0
    assert estimate["options"]
    json.dumps(estimate)
    # faster
    monkeypatch.setattr(
        "finetune.bench.loop_process._START_METHOD", fork_context.get_start_method()
    )
    # an error in the other process is raised here with its type
    with pytest.raises(FinetuneError) as caught:
        estimate_run(str(recipe), ["data.source=folder:nowhere"])
    assert caught.value.exit_code == 3
    assert list(temporary.iterdir()) == []


def test_estimates_only_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    with refused("recipe.conflict", "run.num_processes=1"):
        estimate_run(str(recipe), ["run.num_processes=2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("setup.one_process", "accelerate launch"):
        estimate_run(str(recipe))


MIB = 2**20


def make_estimate(**changes: Any) -> dict[str, Any]:
    """Return an estimate with round numbers."""
    parts = {"program": 300, "weights": 20, "gradients": 19, "moments": 40, "average": 0}
    parts |= {
        "images": 7,
        "features": 0,
        "teacher": 0,
        "snapshot": 60,
        "activations": 100,
        "activations_per_image": 5,
    }
    return {
        "recipe": "r.yaml",
        "architecture": "vit_x",
        "image_size": [32, 48],
        "precision": "bf16",
        "machine": {"device": {"name": "A chip", "type": "cpu"}},
        "parameters": {"total": 5000, "trained": 1000},
        "num_images": 1200,
        "batch_size": 20,
        "micro_batch": 10,
        "memory": {
            "where": "host",
            "parts": {name: number * MIB for name, number in parts.items()},
            "phases": {"training": 546 * MIB, "evaluation": 2048 * MIB},
            "peak": 2048 * MIB,
            "measured": 525 * MIB,
        },
        "steps": 5,
        "time": {
            "images_per_second": 50.0,
            "turns": [40.0, 60.0],
            "input_share": 0.07,
            "evaluated_per_second": 150.0,
            "epoch_seconds": 24.0,
            "features_seconds": 0.0,
            "run_seconds": 7200.0,
            "run_steps": 600,
            "evaluations": 1,
        },
        "disk": {"checkpoint": 120 * MIB, "needed": 520 * MIB, "free_here": 4096 * MIB},
        "options": [
            {"change": "a=1", "peak": 1024 * MIB, "images_per_second": 100.0, "halves": ["memory"]},
            {"change": "b=22", "peak": 2048 * MIB, "images_per_second": None, "halves": []},
        ],
        **changes,
    }


def test_text_matches_the_golden_file() -> None:
    golden = Path(__file__).with_name("plan.txt").read_text(encoding="utf-8")
    assert format_run_estimate(make_estimate()) + "\n" == golden


def test_text_with_cached_features_and_without_options() -> None:
    time = {**make_estimate()["time"], "features_seconds": 240.0}
    page = format_run_estimate(make_estimate(time=time, options=[]))
    assert "4 min 0 s  once; then they are kept" in page
    assert page.endswith("only the classifier is trained, so no other settings were tried")
    assert format_run_estimate(make_estimate(options=[])).endswith("takes less memory or time")
