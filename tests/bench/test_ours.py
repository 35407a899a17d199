"""Our own training under measurement is our own training, step by step."""

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

CHANGES = (
    *("data.batch_size=8", "data.micro_batch=4", "data.num_train=64", "data.val_fraction=0.5"),
    *("run.test=false", "model.dropout=0.1"),
)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> FinetuneLoop:
    made = FinetuneLoop(
        StepCounter(), recipe=tiny_recipe(*CHANGES), folder=str(tmp_path_factory.mktemp("ours"))
    )
    made.facts = made.prepare()  # type: ignore[attr-defined]
    return made


def test_what_it_says_of_itself(ours: FinetuneLoop) -> None:
    facts: dict[str, Any] = ours.facts  # type: ignore[attr-defined]
    assert (facts["batch_size"], facts["image_size"]) == (8, [16, 16])
    assert facts["num_images"] == ours.setup.num_samples < 64
    assert (facts["device"], facts["precision"]) == (ours.device.type, "fp32")
    assert facts["augmentation"] == ours.recipe.data.train
    assert 0 < facts["seconds_to_first_step"] < process_age_seconds()
    assert {"versions", "device", "commit"} <= set(facts["machine"])
    json.dumps(facts)


def test_a_step_is_counted_whole(ours: FinetuneLoop) -> None:
    """Three times the forward pass over all micro-batches, but for the gradient of the images."""
    network = ours.accelerator.unwrap_model(ours.trainer.model)
    forward = 2 * 8 * summarize_model(network.eval(), (16, 16))["macs"]
    share = ours.facts["operations"] / (3 * forward)  # type: ignore[attr-defined]
    assert 0.9 < share < 1.0
    # both micro-batches; the last block has no product for queries, keys and values of all tokens
    assert sum(ours.products.values()) == 2 * (1 + (4 + 3) + 1)


@pytest.mark.usefixtures("no_pictures")
def test_the_steps_are_those_of_train(ours: FinetuneLoop, tmp_path: Path) -> None:
    """Also after synthetic steps and an evaluation, and with the log's lines."""
    ours.train(warmup=1, steps=2)
    found = read_train_losses(ours.folder / "run")
    expected = tmp_path / "run"
    train(tiny_recipe(*CHANGES, "optim.steps=12"), expected)
    assert len(found) >= 5
    assert found == read_train_losses(expected)[: len(found)]


def test_training_counts_steps_and_images(ours: FinetuneLoop) -> None:
    before, told = ours.trainer.counters.step, ours.progress.steps
    assert ours.train(warmup=2, steps=3) > 0
    assert ours.trainer.counters.step - before == ours.progress.steps - told == 5


def test_synthetic_steps_see_the_same_batches_again(
    ours: FinetuneLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Batch]] = []
    step = ours.trainer.train_step

    def spy(number: int, batches: Any, meter: Any) -> None:
        kept = list(batches)
        assert len(kept) == number == 2
        seen.append(kept)
        step(number, iter(kept), meter)

    monkeypatch.setattr(ours.trainer, "train_step", spy)
    assert ours.train(warmup=1, steps=2, synthetic=True) > 0
    assert len(seen) == 3
    for kept in seen:
        assert [id(batch) for batch in kept] == [id(batch) for batch in seen[0]]
    ours.train(warmup=1, steps=1)
    images = [kept[0].images_BCHW for kept in seen]
    assert not torch.equal(images[-1], images[-2])
    assert images[0].shape == images[-1].shape


def test_evaluation_of_some_images(ours: FinetuneLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.bench import ours as subjects

    counted = []
    evaluate = subjects.evaluate

    def spy(model: Any, loader: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        counted.append((loader.store.split.name, len(loader.labels)))
        return evaluate(model, loader, *args, **kwargs)

    monkeypatch.setattr(subjects, "evaluate", spy)
    assert ours.evaluate(images=20) > 0
    assert ours.evaluate(images=10**6) > 0
    whole = 64 - ours.setup.num_samples  # less than a batch, which goes first and is not timed
    assert counted == [("val", whole), ("val", 20), ("val", whole)]


def test_without_validation_some_of_another_split_is_evaluated(tmp_path: Path) -> None:
    recipe = tiny_recipe("data.batch_size=8", "data.val_fraction=0", "run.precision=bf16")
    made = FinetuneLoop(StepCounter(), recipe=recipe, folder=str(tmp_path))
    assert made.prepare()["precision"] == "bf16"
    assert made.val_loader.store.split.name == "test"
    rate = made.matrix_rate()
    assert rate is not None
    assert rate > 0


def test_images_in_quarantine_are_not_counted(image_folder: Path, tmp_path: Path) -> None:
    next((image_folder / "train" / "red").iterdir()).write_bytes(b"no image")
    changes = ("data.num_train=null", "data.val_fraction=0", "data.unreadable=quarantine")
    recipe = tiny_recipe(*CHANGES, f"data.source=folder:{image_folder}", *changes)
    ours = FinetuneLoop(StepCounter(), recipe=recipe, folder=str(tmp_path / "ours"))
    assert ours.prepare()["num_images"] == 23
    assert ours.trainer.setup.sampler.num_samples == len(ours.loader.labels) == 23


def test_what_workers_loaded_before_is_not_timed(tmp_path: Path) -> None:
    recipe = tiny_recipe(*CHANGES, "data.keep=none", "data.workers=1")
    made = FinetuneLoop(StepCounter(), recipe=recipe, folder=str(tmp_path))
    made.prepare()
    before = made.trainer.counters.step
    made.train(warmup=1, steps=2)
    assert made.trainer.counters.step - before == 3 + 2
    made.train(warmup=1, steps=2, synthetic=True)
    assert made.trainer.counters.step - before == 3 + 2 + 3


def test_memory(ours: FinetuneLoop) -> None:
    found = ours.memory()
    assert 50 * 2**20 < found["host"] <= peak_host_bytes()  # type: ignore[operator]
    assert (found["device"] is None) == (ours.device.type == "cpu")
    ours.empty_cache()


def test_a_profile_is_a_trace_and_ten_operations(ours: FinetuneLoop, tmp_path: Path) -> None:
    found = ours.profile(folder=str(tmp_path))
    trace = json.loads(Path(found["trace"]).read_text())
    assert trace["traceEvents"]
    rows = found["operations"]
    assert len(rows) == 10
    costs = [row["milliseconds"] for row in rows]
    assert costs == sorted(costs, reverse=True)
    assert 0 < sum(row["share"] for row in rows) <= 1
    json.dumps(found)
