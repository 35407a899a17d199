"""One training step: weights, counters and log lines; skipped steps; checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from logs import logging_nothing
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.data.loader import Batch
from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.run.record import read_record, write_record
from finetune.training import build_state
from finetune.training.accelerator import create_accelerator
from finetune.training.build_state import build_trainer_state
from finetune.training.delayed_scalars import DelayedScalars
from finetune.training.meter import TrainMeter
from finetune.training.optim import supports_found_inf
from finetune.training.setup import build_setup
from finetune.training.trainer_state import TrainerState

RECIPE = tiny_recipe_text(
    "batch_size: 8",
    optim="name: sgd, momentum: 0, lr: 0.1, steps: 10, schedule: constant",
)


def make_trainer(tmp_path: Path, *overrides: str) -> tuple[TrainerState, TrainMeter]:
    recipe = parse_recipe(RECIPE, overrides=overrides)
    accelerator = create_accelerator(recipe.run)
    with logging_nothing():
        setup = build_setup(recipe, device=accelerator.device, show_progress=False)
    run = RunDir(tmp_path / "run")
    run.open()
    return build_trainer_state(setup, accelerator, run), TrainMeter(accelerator.device, 0.0)


def make_batch(count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    return Batch(images, torch.arange(count) % 10)


def test_gradient_is_the_mean_over_the_global_batch(tmp_path: Path) -> None:
    trainer, meter = make_trainer(tmp_path)
    bias = trainer.model.head.bias.detach().clone()
    batch = make_batch(8)
    expected_grad = torch.full((10,), 0.1)  # zero head: every softmax output is 1/10
    expected_grad -= torch.bincount(batch.labels_B, minlength=10) / 8
    micro_batches = [Batch(batch.images_BCHW[i : i + 4], batch.labels_B[i : i + 4]) for i in (0, 4)]
    trainer.train_step(2, iter(micro_batches), meter)
    assert torch.allclose(trainer.model.head.bias, bias - 0.1 * expected_grad, atol=1e-7)
    assert meter.local_sums()[3] == 8


def test_should_compile_gets_the_images_per_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def never_compile(choice: object, *, num_images: int, **others: object) -> bool:
        given.append(num_images)
        return False

    monkeypatch.setattr(build_state, "should_compile", never_compile)
    make_trainer(tmp_path / "one")
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    make_trainer(tmp_path / "four")
    assert given == [10 * 8, 10 * 8 // 4]


def test_gradients_are_not_clipped_without_clip_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, meter = make_trainer(tmp_path)
    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", pytest.fail)
    trainer.train_step(1, iter([make_batch(8)]), meter)
    head = trainer.model.head.weight.detach().clone()
    trainer.train_step(1, iter([make_batch(8, seed=1)]), meter)
    assert not torch.equal(trainer.model.head.weight, head)


def test_non_finite_gradient_only_increments_the_skip_counters(tmp_path: Path) -> None:
    trainer, meter = make_trainer(tmp_path, "optim.ema_decay=0.5")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    bad = make_batch(8)
    bad.images_BCHW[3] = float("inf")
    trainer.train_step(1, iter([bad]), meter)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    counters = trainer.counters
    assert (counters.step, counters.skipped, counters.skipped_in_row) == (1, 1, 1)
    assert meter.local_sums().tolist() == [0, 0, 0, 0]
    trainer.train_step(1, iter([make_batch(8)]), meter)
    assert (trainer.counters.skipped, trainer.counters.skipped_in_row) == (1, 0)


@pytest.mark.parametrize("warmup", [True, False])
def test_ema_decay_rises_to_its_value(warmup: bool, tmp_path: Path) -> None:
    trainer, meter = make_trainer(
        tmp_path, "optim.ema_decay=0.6", f"optim.ema_warmup={str(warmup).lower()}"
    )
    expected = None
    for step in range(5):
        trainer.train_step(1, iter([make_batch(8, seed=step)]), meter)
        weights = trainer.model.head.weight.detach()
        decay = min(0.6, 1 - (1 + step) ** (-2 / 3)) if warmup else 0.6
        expected = weights.clone() if expected is None else expected.lerp(weights, 1 - decay)
    torch.testing.assert_close(trainer.ema.module.head.weight, expected, rtol=1e-6, atol=0)
    assert not torch.equal(weights, expected)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_skipped_step_does_not_affect_later_steps(name: str, tmp_path: Path) -> None:
    """A step skipped on the device or by the host, first or later, does not change the weights."""
    final_weights = []
    for steps in ("gbgg", "ggg"):
        trainer, meter = make_trainer(tmp_path / steps, f"optim.name={name}", "optim.momentum=0.9")
        assert supports_found_inf(trainer.optimizer.optimizer) == (name != "lion")
        good_batches = (make_batch(8, seed=seed) for seed in range(3))
        for step in steps:
            bad_batch = Batch(torch.full((8, 3, 16, 16), float("nan")), torch.arange(8))
            trainer.train_step(1, iter([next(good_batches) if step == "g" else bad_batch]), meter)
        assert trainer.counters.skipped == steps.count("b")
        assert meter.local_sums()[3] == 24
        final_weights.append(trainer.model.state_dict())
    for key, value in final_weights[0].items():
        assert torch.equal(value, final_weights[1][key]), key


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_skipped_first_step_creates_no_optimizer_state(name: str, tmp_path: Path) -> None:
    trainer, meter = make_trainer(tmp_path, f"optim.name={name}", "optim.momentum=0.9")
    bad = make_batch(8)
    bad.images_BCHW[0] = float("nan")
    trainer.train_step(1, iter([bad]), meter)
    assert not trainer.optimizer.optimizer.state
    trainer.train_step(1, iter([make_batch(8)]), meter)
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_skipped_first_step_with_loss_scaling_creates_no_optimizer_state(tmp_path: Path) -> None:
    """torch's fused SGD would create momentum buffers from uninitialized memory."""
    trainer, meter = make_trainer(tmp_path, "optim.momentum=0.9", "optim.args={fused: true}")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    # what Accelerate sets up for fp16, which it refuses on a CPU
    trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
    optimizer = trainer.optimizer.optimizer
    trainer.optimizer = AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)
    trainer.accelerator._optimizers = [trainer.optimizer]
    trainer.accelerator.state._shared_state["_mixed_precision"] = "fp16"
    try:
        bad = make_batch(8)
        bad.images_BCHW[0] = float("nan")
        trainer.train_step(1, iter([bad]), meter)
        assert not trainer.optimizer.optimizer.state
        assert scaler.get_scale() == 2.0
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train_step(1, iter([make_batch(8)]), meter)
    finally:
        trainer.accelerator.state._shared_state["_mixed_precision"] = "no"
    after = trainer.model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert trainer.counters.skipped == 1


def test_delayed_skips_are_counted_before_a_checkpoint(tmp_path: Path) -> None:
    trainer, meter = make_trainer(tmp_path, "run.max_skipped=2")
    trainer.finite_steps = DelayedScalars(torch.device("cpu"), delayed=True)
    bad = make_batch(8)
    bad.images_BCHW[0] = float("nan")
    trainer.train_step(1, iter([bad]), meter)
    assert trainer.counters.skipped == 0
    trainer.save_checkpoint(meter)
    assert trainer.counters.skipped == 1
    trainer.train_step(1, iter([bad]), meter)
    with refused("diverged.gradients", "2 steps"):
        trainer.train_step(1, iter([make_batch(8)]), meter)


def test_dropout_depends_on_the_step_not_on_earlier_draws(tmp_path: Path) -> None:
    weights = []
    for draws_before in (0, 5):
        trainer, meter = make_trainer(tmp_path / str(draws_before), "model.dropout=0.5")
        trainer.model.head.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        trainer.start(meter)
        torch.rand(draws_before)
        trainer.train_step(1, iter([make_batch(8)]), meter)
        weights.append(trainer.model.blocks[0].mlp.fc1.weight.detach().clone())
    assert torch.equal(*weights)


def test_log_lines_contain_the_lr_of_the_last_step(tmp_path: Path) -> None:
    trainer, meter = make_trainer(tmp_path, "optim.schedule=linear", "optim.warmup_steps=4")
    trainer.train_step(1, iter([make_batch(8)]), meter)
    trainer.train_step(1, iter([make_batch(8)]), meter)
    line = trainer.log_training(meter)
    assert line["lr"] == pytest.approx(0.1 * 1 / 4)
    assert line["samples_seen"] == 16
    assert json.loads((trainer.run.path / "metrics.jsonl").read_text()) == {**line, "run": None}


def test_old_checkpoints_are_deleted_except_the_best(tmp_path: Path) -> None:
    trainer, meter = make_trainer(tmp_path, "run.keep_checkpoints=2")
    for step in range(1, 6):
        trainer.train_step(1, iter([make_batch(8, seed=step)]), meter)
        if step == 2:
            trainer.counters.update_best("val.top1", 0.5)
        trainer.save_checkpoint(meter)
    trainer.wait_for_checkpoint()
    assert trainer.run.checkpoint_steps() == [2, 4, 5]
    loaded, _ = make_trainer(tmp_path / "other")
    loaded.run = trainer.run
    loaded.load_checkpoint(5)
    restored, saved = (dataclasses.asdict(state.counters) for state in (loaded, trainer))
    assert restored == saved
    assert loaded.load_best_weights()[0] == 2

    write_record(trainer.run, {"status": "running"})
    shutil.rmtree(trainer.run.checkpoint_folder(2))
    loaded.load_checkpoint(5)
    assert loaded.counters.best_step is None
    lost = "the best checkpoint, of step 2, was lost"
    assert read_record(trainer.run)["numerics_changed"] == [lost]


class TestDelayedScalars:
    def test_no_delay_on_a_cpu(self) -> None:
        scalars = DelayedScalars(torch.device("cpu"))
        assert scalars.receive() == []
        scalars.send(torch.tensor(True))
        scalars.send(torch.tensor([2.5]))
        assert scalars.receive() == [1.0, 2.5]
        assert scalars.receive(wait=True) == []

    def test_delayed_by_one_step(self) -> None:
        scalars, received = DelayedScalars(torch.device("cpu"), delayed=True), []
        value = torch.tensor(0.0)
        for step in range(4):
            value.fill_(step)  # does not change the scalar that was sent
            scalars.send(value)
            received.append(scalars.receive())
        assert received == [[], [0.0], [1.0], [2.0]]
        assert scalars.receive(wait=True) == [3.0]
