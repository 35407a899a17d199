"""One step: the weights, the counters and the log after it; and steps that are skipped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from recipe_texts import tiny_text
from refusals import refused

from finetune.data.loader import Batch
from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.training import build_state
from finetune.training.build_state import build_trainer_state
from finetune.training.launch import launch
from finetune.training.meter import Meter
from finetune.training.setup import open_setup
from finetune.training.trainer_state import DelayedScalars, TrainerState

RECIPE = tiny_text(
    "batch_size: 8",
    optim="name: sgd, momentum: 0, lr: 0.1, steps: 10, schedule: constant",
)


def trainer_of(tmp_path: Path, *overrides: str) -> tuple[TrainerState, Meter]:
    recipe = parse_recipe(RECIPE, overrides=overrides)
    accelerator = launch(recipe.run)
    setup = open_setup(recipe, device=accelerator.device, notice=pytest.fail, progress=False)
    run = RunDir(tmp_path / "run")
    run.open()
    return build_trainer_state(setup, accelerator, run), Meter(accelerator.device, 0.0)


def batch(count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    return Batch(images, torch.arange(count) % 10)


def test_the_gradient_is_the_mean_over_the_global_batch(tmp_path: Path) -> None:
    trainer, meter = trainer_of(tmp_path)
    head = trainer.model.head.bias.detach().clone()
    whole = batch(8)
    expected = torch.full((10,), 0.1)  # a zero head: softmax is 1/10 everywhere
    expected -= torch.bincount(whole.labels_B, minlength=10) / 8
    parts = [Batch(whole.images_BCHW[i : i + 4], whole.labels_B[i : i + 4]) for i in (0, 4)]
    trainer.step(2, iter(parts), meter)
    assert torch.allclose(trainer.model.head.bias, head - 0.1 * expected, atol=1e-7)
    assert meter.sums()[3] == 8


def test_the_images_of_one_process_decide_whether_a_run_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def compiles(choice: object, *, images: int, **others: object) -> bool:
        seen.append(images)
        return False

    monkeypatch.setattr(build_state, "compiles", compiles)
    trainer_of(tmp_path / "one")
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    trainer_of(tmp_path / "four")
    assert seen == [10 * 8, 10 * 8 // 4]


def test_without_a_limit_no_gradient_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, meter = trainer_of(tmp_path)
    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", pytest.fail)
    trainer.step(1, iter([batch(8)]), meter)
    head = trainer.model.head.weight.detach().clone()
    trainer.step(1, iter([batch(8, seed=1)]), meter)
    assert not torch.equal(trainer.model.head.weight, head)


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(tmp_path: Path) -> None:
    trainer, meter = trainer_of(tmp_path, "optim.ema_decay=0.5")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    bad = batch(8)
    bad.images_BCHW[3] = float("inf")
    trainer.step(1, iter([bad]), meter)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    counters = trainer.counters
    assert (counters.step, counters.skipped, counters.skipped_in_row) == (1, 1, 1)
    assert meter.sums().tolist() == [0, 0, 0, 0]
    trainer.step(1, iter([batch(8)]), meter)
    assert (trainer.counters.skipped, trainer.counters.skipped_in_row) == (1, 0)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_a_skipped_step_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """Left out on the device or by the host, at first or later: the right steps alone decide."""
    ends = []
    for steps in ("gbgg", "ggg"):
        trainer, meter = trainer_of(tmp_path / steps, f"optim.name={name}", "optim.momentum=0.9")
        assert trainer._masks == (name != "lion")
        right = (batch(8, seed=seed) for seed in range(3))
        for step in steps:
            wrong = Batch(torch.full((8, 3, 16, 16), float("nan")), torch.arange(8))
            trainer.step(1, iter([next(right) if step == "g" else wrong]), meter)
        assert trainer.counters.skipped == steps.count("b")
        assert meter.sums()[3] == 24
        ends.append(trainer.model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_wrong_first_step_leaves_no_moments(name: str, tmp_path: Path) -> None:
    trainer, meter = trainer_of(tmp_path, f"optim.name={name}", "optim.momentum=0.9")
    bad = batch(8)
    bad.images_BCHW[0] = float("nan")
    trainer.step(1, iter([bad]), meter)
    assert not trainer.optimizer.optimizer.state
    trainer.step(1, iter([batch(8)]), meter)
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_a_wrong_first_step_under_a_loss_scale_leaves_no_moments(tmp_path: Path) -> None:
    """torch's fused SGD would make its momentum of memory as it is, and not write to it."""
    trainer, meter = trainer_of(tmp_path, "optim.momentum=0.9", "optim.args={fused: true}")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    # what Accelerate does for fp16, which it refuses to do on a CPU
    trainer.accelerator.scaler, trainer.accelerator.native_amp, trainer._masks = scaler, True, False
    plain = trainer.optimizer.optimizer
    trainer.optimizer = AcceleratedOptimizer(plain, device_placement=False, scaler=scaler)
    trainer.accelerator._optimizers = [trainer.optimizer]
    trainer.accelerator.state._shared_state["_mixed_precision"] = "fp16"
    try:
        bad = batch(8)
        bad.images_BCHW[0] = float("nan")
        trainer.step(1, iter([bad]), meter)
        assert not trainer.optimizer.optimizer.state
        assert scaler.get_scale() == 2.0
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.step(1, iter([batch(8)]), meter)
    finally:
        trainer.accelerator.state._shared_state["_mixed_precision"] = "no"
    after = trainer.model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert trainer.counters.skipped == 1


def test_skips_that_are_read_late_are_counted_before_a_checkpoint(tmp_path: Path) -> None:
    trainer, meter = trainer_of(tmp_path, "run.max_skipped=2")
    trainer._finite = DelayedScalars(torch.device("cpu"), late=True)
    bad = batch(8)
    bad.images_BCHW[0] = float("nan")
    trainer.step(1, iter([bad]), meter)
    assert trainer.counters.skipped == 0
    trainer.save(meter)
    assert trainer.counters.skipped == 1
    trainer.step(1, iter([bad]), meter)
    with refused("diverged.gradients", "2 steps"):
        trainer.step(1, iter([batch(8)]), meter)


def test_dropout_depends_on_the_step_and_not_on_what_was_drawn_before(tmp_path: Path) -> None:
    ends = []
    for draws_before in (0, 5):
        trainer, meter = trainer_of(tmp_path / str(draws_before), "model.dropout=0.5")
        trainer.model.head.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        trainer.go_on(meter)
        torch.rand(draws_before)
        trainer.step(1, iter([batch(8)]), meter)
        ends.append(trainer.model.blocks[0].mlp.fc1.weight.detach().clone())
    assert torch.equal(*ends)


def test_log_lines_name_the_rate_that_was_used(tmp_path: Path) -> None:
    trainer, meter = trainer_of(tmp_path, "optim.schedule=linear", "optim.warmup_steps=4")
    trainer.step(1, iter([batch(8)]), meter)
    trainer.step(1, iter([batch(8)]), meter)
    line = trainer.log(meter)
    assert line["lr"] == pytest.approx(0.1 * 1 / 4)
    assert line["samples_seen"] == 16
    assert json.loads((trainer.run.path / "metrics.jsonl").read_text()) == line


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    trainer, meter = trainer_of(tmp_path, "run.keep_checkpoints=2")
    for step in range(1, 6):
        trainer.step(1, iter([batch(8, seed=step)]), meter)
        if step == 2:
            trainer.counters.note("val.top1", 0.5)
        trainer.save(meter)
    trainer.saved()
    assert trainer.run.steps() == [2, 4, 5]
    fresh, _ = trainer_of(tmp_path / "other")
    fresh.run = trainer.run
    fresh.restore(5)
    restored, saved = (dataclasses.asdict(each.counters) for each in (fresh, trainer))
    assert restored == saved
    assert fresh.load_best()[0] == 2


class TestDelayedScalars:
    def test_at_once_on_a_cpu(self) -> None:
        scalars = DelayedScalars(torch.device("cpu"))
        assert scalars.receive() == []
        scalars.send(torch.tensor(True))
        scalars.send(torch.tensor([2.5]))
        assert scalars.receive() == [1.0, 2.5]
        assert scalars.receive(wait=True) == []

    def test_one_step_later(self) -> None:
        scalars, received = DelayedScalars(torch.device("cpu"), late=True), []
        value = torch.tensor(0.0)
        for step in range(4):
            value.fill_(step)  # what was sent does not change
            scalars.send(value)
            received.append(scalars.receive())
        assert received == [[], [0.0], [1.0], [2.0]]
        assert scalars.receive(wait=True) == [3.0]
