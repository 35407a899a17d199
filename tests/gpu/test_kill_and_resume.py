"""Killed and resumed on the GPU; checkpoints that are written beside the steps; fp16's scaler."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import NANO, apart, child, described, needs_gpu, recipe_of, trained

FULL = (
    *("model.dropout=0.1", "model.attention_dropout=0.1", "model.drop_path=0.1"),
    *("optim.ema_decay=0.9", "data.micro_batch=32", "data.val_fraction=0"),
    *("optim.steps=12", "run.save_every=4", "run.keep_checkpoints=5"),
    "data.train=resize | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.05) | random_crop(padding=2)",
)
# Convolutions of one pixel and of three, channels last on a GPU, and the moments of a fused AdamW.
CONVOLVES = (
    *("model.name=test_efficientnet", "model.pretrained=false", "model.head_init=default"),
    *("model.image_size=64", "model.dropout=0.1", "optim.ema_decay=0.9", "data.micro_batch=32"),
    *("data.val_fraction=0", "optim.steps=12", "run.save_every=4", "run.keep_checkpoints=5"),
)
KILLED_BEFORE = 10


def distance(one: Path, other: Path) -> tuple[bool, float]:
    """Whether the published weights are equal to the bit; and how far the farthest are apart."""
    from safetensors.torch import load_file

    files = [run / "model" / "model.safetensors" for run in (one, other)]
    first, second = map(load_file, files)
    assert first.keys() == second.keys()
    largest = max(float((first[name] - second[name]).abs().max()) for name in first)
    return files[0].read_bytes() == files[1].read_bytes(), largest


@pytest.mark.parametrize(
    "precision, deterministic, network",
    [
        *((precision, True, "ViT") for precision in ("fp32", "bf16")),
        *((precision, False, "ViT") for precision in ("fp32", "bf16")),
        ("bf16", True, "channels last"),
    ],
)
def test_sigkill_and_resume(
    precision: str, deterministic: bool, network: str, tmp_path: Path, figure: Any
) -> None:
    from forked_runs import read_train_losses

    question = "SIGKILL before a step, then --resume, against a run that nothing stopped: " + (
        "deterministic kernels" if deterministic else "any kernels"
    )
    promise = "equal weights and losses, to the bit" if deterministic else "losses within 3e-2"
    settings = {
        "recipe": NANO,
        "overrides": [*(FULL if network == "ViT" else CONVOLVES), f"run.precision={precision}"],
        "deterministic": deterministic,
    }
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for out, more in (
        (whole, {}),
        (killed, {"kill_before": KILLED_BEFORE}),
        (killed, {"resume": True}),
    ):
        done = child({**settings, **more, "out": str(out)}, **environment)
        expected = -signal.SIGKILL if "kill_before" in more else 0
        if done.code != expected:
            figure(question, promise, f"{network}, {precision}: {described(done)}")
        assert done.code == expected, done.err[-3000:]
    same, largest = distance(whole, killed)
    found, expected_losses = read_train_losses(killed), read_train_losses(whole)
    figure(
        question,
        promise,
        f"{network}, {precision}: {'equal' if same else 'not equal'}, weights {largest:.1e} "
        f"apart, losses {apart(found, expected_losses):.1e}",
    )
    if deterministic:
        assert found == expected_losses
        assert same
    else:
        assert apart(found, expected_losses) < 3e-2


@needs_gpu
def test_evaluation_with_deterministic_kernels(tmp_path: Path, figure: Any) -> None:
    """Exact counts need no deterministic kernels, but must not be refused by them either."""
    settings = {
        "recipe": NANO,
        "overrides": ["optim.steps=2", "optim.warmup_steps=0", "run.test=true"],
        "deterministic": True,
        "out": str(tmp_path / "run"),
    }
    done = child(settings, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    figure("evaluation under torch.use_deterministic_algorithms", "goes through", described(done))
    assert done.code == 0, done.err[-3000:]


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    """A disk that takes seconds; what it writes is the step it was asked at, not a later one."""
    from safetensors.torch import load_file

    from finetune.run.checkpoint import Snapshot
    from finetune.training.train import train
    from finetune.training.trainer_state import TrainerState

    at, during = 4, []
    taken: dict[int, dict[str, torch.Tensor]] = {}
    counting: list[int] = []
    save, take, write = TrainerState.save_checkpoint, TrainerState.train_step, Snapshot.write

    def saving(trainer: TrainerState, meter: Any) -> None:
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        taken[trainer.counters.step] = {
            name: t.detach().cpu().clone() for name, t in weights.items()
        }
        save(trainer, meter)

    def step(trainer: TrainerState, *arguments: Any) -> None:
        take(trainer, *arguments)
        if counting:
            during.append(trainer.counters.step)

    def slowly(snapshot: Snapshot, folder: Path) -> None:
        if snapshot.counters["step"] == at:
            counting.append(1)
            time.sleep(2)
        write(snapshot, folder)
        counting.clear()

    monkeypatch.setattr(TrainerState, "save_checkpoint", saving)
    monkeypatch.setattr(TrainerState, "train_step", step)
    monkeypatch.setattr(Snapshot, "write", slowly)
    out = tmp_path / "run"
    saves = ("optim.steps=60", "run.save_every=4", "run.keep_checkpoints=99")
    train(recipe_of(NANO, "data.val_fraction=0", *saves), out)
    files = {
        int(folder.name.rpartition("-")[2]): load_file(folder / "model.safetensors")
        for folder in (out / "checkpoints").iterdir()
    }
    right = [
        step
        for step, weights in files.items()
        if all(torch.equal(weights[name], taken[step][name]) for name in weights)
    ]
    figure(
        "a checkpoint that takes 2 s to write",
        "steps go on meanwhile; every file holds the weights of its own step, to the bit",
        f"{len(during)} steps during the write; {len(right)} of {len(files)} checkpoints right",
    )
    assert during
    assert len(files) == 15
    assert sorted(right) == sorted(files)
    first, last = files[at], files[60]
    assert any(not torch.equal(first[name], last[name]) for name in first)


# fp16 -----------------------------------------------------------------------------------------


def overflowing(monkeypatch: pytest.MonkeyPatch, scale: float) -> list[tuple[int, float, bool]]:
    """Let scalers begin at `scale`. Returns: of each step its number, the scale, whether weights
    moved."""
    from finetune.training.trainer_state import TrainerState

    seen: list[tuple[int, float, bool]] = []
    init, take = TrainerState.__init__, TrainerState.train_step

    def begin(trainer: TrainerState, *arguments: Any, **named: Any) -> None:
        init(trainer, *arguments, **named)
        scaler: Any = trainer.accelerator.scaler
        scaler._init_scale = scale

    def step(trainer: TrainerState, *arguments: Any) -> None:
        head = [p for name, p in trainer.model.named_parameters() if "head" in name]
        before = [p.detach().clone() for p in head]
        scaler: Any = trainer.accelerator.scaler
        scale = scaler.get_scale()
        take(trainer, *arguments)
        moved = any(not torch.equal(a, b) for a, b in zip(before, head, strict=True))
        seen.append((trainer.counters.step, scale, moved))

    monkeypatch.setattr(TrainerState, "__init__", begin)
    monkeypatch.setattr(TrainerState, "train_step", step)
    return seen


FP16 = ("run.precision=fp16", "run.max_skipped=30", "optim.warmup_steps=0", "run.save_every=2")


@needs_gpu
def test_an_overflow_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    seen = overflowing(monkeypatch, 2.0**24)
    found = trained(tmp_path / "run", *FP16, "optim.steps=24")
    skipped = [number for number, _, moved in seen if not moved]
    scales = [scale for _, scale, _ in seen]
    finite = [loss for loss in found["losses"] if loss is not None]
    figure(
        "fp16 with a scale of 2^24: the first steps overflow",
        "they are left out and counted, the scale halves each time, training goes on",
        f"{len(skipped)} steps left out, {found['skipped_steps']} counted, scale "
        f"2^24 to {scales[-1]:g}; loss {finite[0]:.2f} to {finite[-1]:.2f}",
    )
    assert 1 in skipped
    assert skipped == list(range(1, len(skipped) + 1))
    assert found["skipped_steps"] == len(skipped)
    assert scales[1] == scales[0] / 2
    assert scales[-1] < scales[0]
    assert finite[-1] < finite[0]


@needs_gpu
def test_resuming_restores_the_scaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    from finetune.errors import Interrupted
    from finetune.training.train import train
    from finetune.training.trainer_state import TrainerState

    recipe = recipe_of(NANO, *FP16, "optim.steps=20", "data.val_fraction=0")
    with monkeypatch.context() as patch:
        whole = overflowing(patch, 2.0**24)
        train(recipe, tmp_path / "whole")
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        before = overflowing(patch, 2.0**24)
        save = TrainerState.save_checkpoint

        def stopped(trainer: TrainerState, meter: Any) -> None:
            save(trainer, meter)
            if trainer.counters.step == 16:
                raise Interrupted("stopped", 15)

        patch.setattr(TrainerState, "save_checkpoint", stopped)
        with pytest.raises(Interrupted):
            train(recipe, out)
    with monkeypatch.context() as patch:
        after = overflowing(patch, 2.0**24)
        train(recipe, out, resume=True)
    from forked_runs import read_train_losses

    pairs = zip(read_train_losses(out), read_train_losses(tmp_path / "whole"), strict=True)
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    difference = apart([a for a, _ in both], [b for _, b in both])
    figure(
        "fp16, resumed after overflows",
        "the scale goes on where it was; losses within 1e-2 of the run that was not stopped",
        f"scale {before[-1][1]:g} before, {after[0][1]:g} after; losses {difference:.1e} apart",
    )
    assert after[0][0] == 17
    assert after[0][1] == before[-1][1]  # no growth within 2,000 steps
    # at such a scale a later step may overflow, too: the same one in both
    assert [moved for *_, moved in after] == [moved for *_, moved in whole[16:]]
    assert difference < 1e-2
