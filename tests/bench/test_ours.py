"""The measured finetune loop performs the steps of `train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import StepCounter
from forked_runs import read_train_losses, tiny_recipe

from finetune.bench.ours import FinetuneLoop
from finetune.bench.timer import peak_host_bytes, process_age_seconds
from finetune.data.loader import Batch
from finetune.models.summary import summarize_model
from finetune.training.train import train

OVERRIDES = (
    *("data.batch_size=8", "data.micro_batch=4", "data.num_train=64", "data.val_fraction=0.5"),
    *("run.test=false", "model.dropout=0.1"),
)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> FinetuneLoop:
    loop = FinetuneLoop(
        StepCounter(), recipe=tiny_recipe(*OVERRIDES), folder=str(tmp_path_factory.mktemp("ours"))
    )
    loop.prepared = loop.prepare()  # type: ignore[attr-defined]
    return loop


def test_prepare_reports_the_setup(ours: FinetuneLoop) -> None:
    prepared: dict[str, Any] = ours.prepared  # type: ignore[attr-defined]
    assert (prepared["batch_size"], prepared["image_size"]) == (8, [16, 16])
    assert prepared["num_images"] == ours.setup.num_samples < 64
    assert (prepared["device"], prepared["precision"]) == (ours.device.type, "fp32")
    assert prepared["augmentation"] == ours.recipe.data.train
    assert 0 < prepared["seconds_to_first_step"] < process_age_seconds()
    assert {"versions", "device", "commit"} <= set(prepared["machine"])
    json.dumps(prepared)


def test_operations_cover_all_micro_batches(ours: FinetuneLoop) -> None:
    """Three forward passes over all micro-batches, minus the gradient of the images."""
    network = ours.accelerator.unwrap_model(ours.trainer.model)
    forward = 2 * 8 * summarize_model(network.eval(), (16, 16))["macs"]
    share = ours.prepared["operations"] / (3 * forward)  # type: ignore[attr-defined]
    assert 0.9 < share < 1.0
    # two micro-batches; the last block has no query, key and value matmul for all tokens
    assert sum(ours.products.values()) == 2 * (1 + (4 + 3) + 1)


@pytest.mark.usefixtures("no_pictures")
def test_losses_match_train(ours: FinetuneLoop, tmp_path: Path) -> None:
    """Also after synthetic steps and an evaluation, and with logging."""
    ours.train(warmup=1, steps=2)
    found = read_train_losses(ours.folder / "run")
    expected = tmp_path / "run"
    train(tiny_recipe(*OVERRIDES, "optim.steps=12"), expected)
    assert len(found) >= 5
    assert found == read_train_losses(expected)[: len(found)]


def test_training_advances_the_step_counters(ours: FinetuneLoop) -> None:
    before, reported_steps = ours.trainer.counters.step, ours.progress.steps
    assert ours.train(warmup=2, steps=3) > 0
    assert ours.trainer.counters.step - before == ours.progress.steps - reported_steps == 5


def test_synthetic_steps_reuse_the_same_batches(
    ours: FinetuneLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Batch]] = []
    step = ours.trainer.train_step

    def recording_step(number: int, batches: Any, meter: Any) -> None:
        micro_batches = list(batches)
        assert len(micro_batches) == number == 2
        seen.append(micro_batches)
        step(number, iter(micro_batches), meter)

    monkeypatch.setattr(ours.trainer, "train_step", recording_step)
    assert ours.train(warmup=1, steps=2, synthetic=True) > 0
    assert len(seen) == 3
    for micro_batches in seen:
        assert [id(batch) for batch in micro_batches] == [id(batch) for batch in seen[0]]
    ours.train(warmup=1, steps=1)
    images = [micro_batches[0].images_BCHW for micro_batches in seen]
    assert not torch.equal(images[-1], images[-2])
    assert images[0].shape == images[-1].shape


def test_evaluates_the_requested_number_of_images(
    ours: FinetuneLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.bench import ours as ours_module

    evaluated = []
    evaluate = ours_module.evaluate

    def recording_evaluate(model: Any, loader: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        evaluated.append((loader.store.split.name, len(loader.labels)))
        return evaluate(model, loader, *args, **kwargs)

    monkeypatch.setattr(ours_module, "evaluate", recording_evaluate)
    assert ours.evaluate(images=20) > 0
    assert ours.evaluate(images=10**6) > 0
    # less than one batch; an untimed evaluation of one batch comes first
    num_val_images = 64 - ours.setup.num_samples
    assert evaluated == [("val", num_val_images), ("val", 20), ("val", num_val_images)]


def test_without_validation_the_test_split_is_evaluated(tmp_path: Path) -> None:
    recipe = tiny_recipe("data.batch_size=8", "data.val_fraction=0", "run.precision=bf16")
    loop = FinetuneLoop(StepCounter(), recipe=recipe, folder=str(tmp_path))
    assert loop.prepare()["precision"] == "bf16"
    assert loop.val_loader.store.split.name == "test"
    rate = loop.matrix_rate()
    assert rate is not None
    assert rate > 0


def test_quarantined_images_are_not_counted(image_folder: Path, tmp_path: Path) -> None:
    next((image_folder / "train" / "red").iterdir()).write_bytes(b"no image")
    overrides = ("data.num_train=null", "data.val_fraction=0", "data.unreadable=quarantine")
    recipe = tiny_recipe(*OVERRIDES, f"data.source=folder:{image_folder}", *overrides)
    ours = FinetuneLoop(StepCounter(), recipe=recipe, folder=str(tmp_path / "ours"))
    assert ours.prepare()["num_images"] == 23
    assert ours.trainer.setup.sampler.num_samples == len(ours.loader.labels) == 23


def test_prefetched_batches_are_not_timed(tmp_path: Path) -> None:
    recipe = tiny_recipe(*OVERRIDES, "data.keep=none", "data.workers=1")
    loop = FinetuneLoop(StepCounter(), recipe=recipe, folder=str(tmp_path))
    loop.prepare()
    before = loop.trainer.counters.step
    loop.train(warmup=1, steps=2)
    assert loop.trainer.counters.step - before == 3 + 2
    loop.train(warmup=1, steps=2, synthetic=True)
    assert loop.trainer.counters.step - before == 3 + 2 + 3


def test_memory(ours: FinetuneLoop) -> None:
    found = ours.memory()
    assert 50 * 2**20 < found["host"] <= peak_host_bytes()  # type: ignore[operator]
    assert (found["device"] is None) == (ours.device.type == "cpu")
    ours.empty_cache()


def test_profile_has_a_trace_and_ten_operations(ours: FinetuneLoop, tmp_path: Path) -> None:
    found = ours.profile(folder=str(tmp_path))
    trace = json.loads(Path(found["trace"]).read_text())
    assert trace["traceEvents"]
    rows = found["operations"]
    assert len(rows) == 10
    costs = [row["milliseconds"] for row in rows]
    assert costs == sorted(costs, reverse=True)
    assert 0 < sum(row["share"] for row in rows) <= 1
    json.dumps(found)
