"""The measured loop performs the steps of `train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import StepCounter
from forked_runs import read_train_losses, tiny_recipe

from finetune.bench.timer import process_age_seconds
from finetune.bench.training_loop import TrainingLoop
from finetune.data.loader import Batch
from finetune.models.summary import summarize_model
from finetune.training.train import train

OVERRIDES = (
    *("data.batch_size=8", "data.micro_batch=4", "data.num_train=64", "data.val_fraction=0.5"),
    *("run.test=false", "model.dropout=0.1"),
)


@pytest.fixture(scope="module")
def steps() -> StepCounter:
    return StepCounter()


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, steps: StepCounter) -> TrainingLoop:
    folder = tmp_path_factory.mktemp("loop")
    loop = TrainingLoop(tiny_recipe(*OVERRIDES), folder, on_step=steps.tick)
    loop.first = loop.one_step()  # type: ignore[attr-defined]
    loop.counted = loop.count_operations()  # type: ignore[attr-defined]
    return loop


def test_describes_the_setup(loop: TrainingLoop) -> None:
    described: dict[str, Any] = loop.describe()
    assert (described["batch_size"], described["image_size"]) == (8, [16, 16])
    assert described["num_images"] == loop.setup.num_samples < 64
    assert described["precision"] == "fp32"
    assert described["augmentation"] == loop.recipe.data.train
    assert {"versions", "device", "commit"} <= set(described["machine"])
    json.dumps(described)
    first = loop.first.seconds_to_first_step  # type: ignore[attr-defined]
    assert 0 < first < process_age_seconds()


def test_operations_cover_all_micro_batches(loop: TrainingLoop) -> None:
    """Three forward passes over all micro-batches, minus the gradient of the images."""
    network = loop.accelerator.unwrap_model(loop.trainer.model)
    forward = 2 * 8 * summarize_model(network.eval(), (16, 16))["macs"]
    operations, products = loop.counted  # type: ignore[attr-defined]
    assert 0.9 < operations / (3 * forward) < 1.0
    # two micro-batches; the last block has no query, key and value matmul for all tokens
    assert sum(products.values()) == 2 * (1 + (4 + 3) + 1)
    rate = loop.matrix_rate(products)
    assert rate is not None
    assert rate > 0


@pytest.mark.usefixtures("no_plots")
def test_losses_match_train(loop: TrainingLoop, tmp_path: Path) -> None:
    """Also after synthetic steps and an evaluation, and with logging."""
    loop.train(warmup=1, steps=2)
    found = read_train_losses(loop.trainer.run.path)
    expected = tmp_path / "run"
    train(tiny_recipe(*OVERRIDES, "optim.steps=12"), expected)
    assert len(found) >= 5
    assert found == read_train_losses(expected)[: len(found)]


def test_training_advances_the_step_counters(loop: TrainingLoop, steps: StepCounter) -> None:
    before, reported_steps = loop.trainer.counters.step, steps.steps
    assert loop.train(warmup=2, steps=3).seconds > 0
    assert loop.trainer.counters.step - before == steps.steps - reported_steps == 5


def test_synthetic_steps_reuse_the_same_batches(
    loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Batch]] = []
    step = loop.trainer.train_step

    def recording_step(number: int, batches: Any, meter: Any) -> None:
        micro_batches = list(batches)
        assert len(micro_batches) == number == 2
        seen.append(micro_batches)
        step(number, iter(micro_batches), meter)

    monkeypatch.setattr(loop.trainer, "train_step", recording_step)
    assert loop.train(warmup=1, steps=2, synthetic=True).seconds > 0
    assert len(seen) == 3
    for micro_batches in seen:
        assert [id(batch) for batch in micro_batches] == [id(batch) for batch in seen[0]]
    loop.train(warmup=1, steps=1)
    images = [micro_batches[0].images_BCHW for micro_batches in seen]
    assert not torch.equal(images[-1], images[-2])
    assert images[0].shape == images[-1].shape


def test_evaluates_the_requested_number_of_images(
    loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.bench import training_loop

    evaluated = []
    evaluate = training_loop.evaluate

    def recording_evaluate(model: Any, loader: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        evaluated.append((loader.store.split.name, len(loader.labels)))
        return evaluate(model, loader, *args, **kwargs)

    monkeypatch.setattr(training_loop, "evaluate", recording_evaluate)
    assert loop.evaluate(images=20) > 0
    assert loop.evaluate(images=10**6) > 0
    # an untimed evaluation comes first
    num_val_images = 64 - loop.setup.num_samples
    assert evaluated == [("val", 20), ("val", 20), ("val", num_val_images)]


def test_without_validation_the_test_split_is_evaluated(tmp_path: Path) -> None:
    recipe = tiny_recipe("data.batch_size=8", "data.val_fraction=0", "run.precision=bf16")
    loop = TrainingLoop(recipe, tmp_path)
    assert loop.precision == "bf16"
    assert loop.val_loader.store.split.name == "test"


def test_quarantined_images_are_not_counted(image_folder: Path, tmp_path: Path) -> None:
    next((image_folder / "train" / "red").iterdir()).write_bytes(b"no image")
    overrides = ("data.num_train=null", "data.val_fraction=0", "data.unreadable=quarantine")
    recipe = tiny_recipe(*OVERRIDES, f"data.source=folder:{image_folder}", *overrides)
    loop = TrainingLoop(recipe, tmp_path / "loop")
    assert loop.describe()["num_images"] == 23
    assert loop.trainer.setup.sampler.num_samples == len(loop.loader.labels) == 23


def test_a_few_images_and_another_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run keeps its length: only the opened images are fewer."""
    loop = TrainingLoop(tiny_recipe(*OVERRIDES), tmp_path, max_images=6)
    assert len(loop.loader.labels) == len(loop.val_loader.labels) == 6
    assert loop.setup.num_samples > 6
    sizes: list[int] = []
    step = loop.trainer.train_step

    def recording_step(number: int, batches: Any, meter: Any) -> None:
        micro_batches = list(batches)
        sizes.extend(len(batch.images_BCHW) for batch in micro_batches)
        step(number, iter(micro_batches), meter)

    monkeypatch.setattr(loop.trainer, "train_step", recording_step)
    loop.train(warmup=1, steps=1, batch_size=12)
    assert sizes == [4, 4, 4] * 2


def test_prefetched_batches_are_not_timed(tmp_path: Path) -> None:
    recipe = tiny_recipe(*OVERRIDES, "data.keep=none", "data.workers=1")
    loop = TrainingLoop(recipe, tmp_path)
    before = loop.trainer.counters.step
    loop.train(warmup=1, steps=2)
    assert loop.trainer.counters.step - before == 3 + 2
    loop.train(warmup=1, steps=2, synthetic=True)
    assert loop.trainer.counters.step - before == 3 + 2 + 3


def test_profile_has_a_trace_and_ten_operations(loop: TrainingLoop, tmp_path: Path) -> None:
    found = loop.profile(tmp_path)
    trace = json.loads(Path(found["trace"]).read_text())
    assert trace["traceEvents"]
    rows = found["operations"]
    assert len(rows) == 10
    costs = [row["milliseconds"] for row in rows]
    assert costs == sorted(costs, reverse=True)
    assert 0 < sum(row["share"] for row in rows) <= 1
    json.dumps(found)
