"""Kill and resume on the GPU; checkpoints written during training; the fp16 gradient scaler."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import (
    NANO_RECIPE,
    describe_result,
    make_recipe,
    max_relative_difference,
    needs_gpu,
    run_child,
    train_here,
)

FULL_OVERRIDES = (
    *("model.dropout=0.1", "model.attention_dropout=0.1", "model.drop_path=0.1"),
    *("optim.ema_decay=0.9", "data.micro_batch=32", "data.val_fraction=0"),
    *("optim.steps=12", "run.save_every=4", "run.keep_checkpoints=5"),
    "data.train=resize | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.05) | random_crop(padding=2)",
)
# 1x1 and 3x3 convolutions, channels last on a GPU, and the state of fused AdamW.
CONVNET_OVERRIDES = (
    *("model.name=test_efficientnet", "model.pretrained=false", "model.head_init=default"),
    *("model.image_size=64", "model.dropout=0.1", "optim.ema_decay=0.9", "data.micro_batch=32"),
    *("data.val_fraction=0", "optim.steps=12", "run.save_every=4", "run.keep_checkpoints=5"),
)
KILL_BEFORE_STEP = 10


def compare_weights(one: Path, other: Path) -> tuple[bool, float]:
    """Return whether the final weights are bit-identical, and their largest difference."""
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
def test_resume_after_sigkill_matches_an_uninterrupted_run(
    precision: str, deterministic: bool, network: str, tmp_path: Path, figure: Any
) -> None:
    from forked_runs import read_train_losses

    question = "SIGKILL before a step, then --resume, against an uninterrupted run: " + (
        "deterministic kernels" if deterministic else "any kernels"
    )
    promise = "bit-identical weights and losses" if deterministic else "losses within 3e-2"
    settings = {
        "recipe": NANO_RECIPE,
        "overrides": [
            *(FULL_OVERRIDES if network == "ViT" else CONVNET_OVERRIDES),
            f"run.precision={precision}",
        ],
        "deterministic": deterministic,
    }
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    killed, uninterrupted = tmp_path / "killed", tmp_path / "whole"
    for out, options in (
        (uninterrupted, {}),
        (killed, {"kill_before": KILL_BEFORE_STEP}),
        (killed, {"resume": True}),
    ):
        result = run_child({**settings, **options, "out": str(out)}, **environment)
        expected = -signal.SIGKILL if "kill_before" in options else 0
        if result.exit_code != expected:
            figure(question, promise, f"{network}, {precision}: {describe_result(result)}")
        assert result.exit_code == expected, result.err[-3000:]
    is_equal, largest = compare_weights(uninterrupted, killed)
    losses, expected_losses = read_train_losses(killed), read_train_losses(uninterrupted)
    figure(
        question,
        promise,
        f"{network}, {precision}: {'equal' if is_equal else 'not equal'}, weights {largest:.1e} "
        f"apart, losses {max_relative_difference(losses, expected_losses):.1e}",
    )
    if deterministic:
        assert losses == expected_losses
        assert is_equal
    else:
        assert max_relative_difference(losses, expected_losses) < 3e-2


@needs_gpu
def test_evaluation_with_deterministic_kernels(tmp_path: Path, figure: Any) -> None:
    """Evaluation counts exactly, and must work with only deterministic kernels."""
    settings = {
        "recipe": NANO_RECIPE,
        "overrides": ["optim.steps=2", "optim.warmup_steps=0", "run.test=true"],
        "deterministic": True,
        "out": str(tmp_path / "run"),
    }
    result = run_child(settings, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    figure("evaluation under torch.use_deterministic_algorithms", "works", describe_result(result))
    assert result.exit_code == 0, result.err[-3000:]


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    """With a slow disk, a checkpoint holds the weights of its own step, not of a later one."""
    from safetensors.torch import load_file

    from finetune.run.checkpoint import Snapshot
    from finetune.training.train import train
    from finetune.training.trainer_state import TrainerState

    slow_step, steps_during_write = 4, []
    weights_at_save: dict[int, dict[str, torch.Tensor]] = {}
    is_writing: list[int] = []
    save, train_step, write = TrainerState.save_checkpoint, TrainerState.train_step, Snapshot.write

    def record_and_save(trainer: TrainerState, meter: Any) -> None:
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        weights_at_save[trainer.counters.step] = {
            name: t.detach().cpu().clone() for name, t in weights.items()
        }
        save(trainer, meter)

    def step(trainer: TrainerState, *arguments: Any) -> None:
        train_step(trainer, *arguments)
        if is_writing:
            steps_during_write.append(trainer.counters.step)

    def write_slowly(snapshot: Snapshot, folder: Path) -> None:
        if snapshot.counters["step"] == slow_step:
            is_writing.append(1)
            time.sleep(2)
        write(snapshot, folder)
        is_writing.clear()

    monkeypatch.setattr(TrainerState, "save_checkpoint", record_and_save)
    monkeypatch.setattr(TrainerState, "train_step", step)
    monkeypatch.setattr(Snapshot, "write", write_slowly)
    out = tmp_path / "run"
    overrides = ("optim.steps=60", "run.save_every=4", "run.keep_checkpoints=99")
    train(make_recipe(NANO_RECIPE, "data.val_fraction=0", *overrides), out)
    files = {
        int(folder.name.rpartition("-")[2]): load_file(folder / "model.safetensors")
        for folder in (out / "checkpoints").iterdir()
    }
    correct_steps = [
        step
        for step, weights in files.items()
        if all(torch.equal(weights[name], weights_at_save[step][name]) for name in weights)
    ]
    figure(
        "a checkpoint that takes 2 s to write",
        "training continues; every file holds exactly the weights of its own step",
        f"{len(steps_during_write)} steps during the write; {len(correct_steps)} of {len(files)} "
        "checkpoints correct",
    )
    assert steps_during_write
    assert len(files) == 15
    assert sorted(correct_steps) == sorted(files)
    first, last = files[slow_step], files[60]
    assert any(not torch.equal(first[name], last[name]) for name in first)


# fp16 -----------------------------------------------------------------------------------------


def record_scaler_steps(
    monkeypatch: pytest.MonkeyPatch, scale: float
) -> list[tuple[int, float, bool]]:
    """Start scalers at `scale`. Returns: number, scale and whether weights moved, for each step."""
    from finetune.training.trainer_state import TrainerState

    records: list[tuple[int, float, bool]] = []
    init, train_step = TrainerState.__init__, TrainerState.train_step

    def init_with_scale(trainer: TrainerState, *arguments: Any, **options: Any) -> None:
        init(trainer, *arguments, **options)
        scaler: Any = trainer.accelerator.scaler
        scaler._init_scale = scale

    def step_and_record(trainer: TrainerState, *arguments: Any) -> None:
        head = [p for name, p in trainer.model.named_parameters() if "head" in name]
        before = [p.detach().clone() for p in head]
        scaler: Any = trainer.accelerator.scaler
        scale = scaler.get_scale()
        train_step(trainer, *arguments)
        has_moved = any(not torch.equal(a, b) for a, b in zip(before, head, strict=True))
        records.append((trainer.counters.step, scale, has_moved))

    monkeypatch.setattr(TrainerState, "__init__", init_with_scale)
    monkeypatch.setattr(TrainerState, "train_step", step_and_record)
    return records


FP16_OVERRIDES = (
    "run.precision=fp16",
    "run.max_skipped=30",
    "optim.warmup_steps=0",
    "run.save_every=2",
)


@needs_gpu
def test_fp16_steps_with_an_overflow_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    records = record_scaler_steps(monkeypatch, 2.0**24)
    result = train_here(tmp_path / "run", *FP16_OVERRIDES, "optim.steps=24")
    skipped = [number for number, _, has_moved in records if not has_moved]
    scales = [scale for _, scale, _ in records]
    finite = [loss for loss in result["losses"] if loss is not None]
    figure(
        "fp16 with a scale of 2^24: the first steps overflow",
        "they are skipped and counted, the scale halves each time, training continues",
        f"{len(skipped)} steps skipped, {result['skipped_steps']} counted, scale "
        f"2^24 to {scales[-1]:g}; loss {finite[0]:.2f} to {finite[-1]:.2f}",
    )
    assert 1 in skipped
    assert skipped == list(range(1, len(skipped) + 1))
    assert result["skipped_steps"] == len(skipped)
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

    recipe = make_recipe(NANO_RECIPE, *FP16_OVERRIDES, "optim.steps=20", "data.val_fraction=0")
    with monkeypatch.context() as patch:
        uninterrupted = record_scaler_steps(patch, 2.0**24)
        train(recipe, tmp_path / "whole")
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        before = record_scaler_steps(patch, 2.0**24)
        save = TrainerState.save_checkpoint

        def save_and_stop(trainer: TrainerState, meter: Any) -> None:
            save(trainer, meter)
            if trainer.counters.step == 16:
                raise Interrupted("stopped", 15)

        patch.setattr(TrainerState, "save_checkpoint", save_and_stop)
        with pytest.raises(Interrupted):
            train(recipe, out)
    with monkeypatch.context() as patch:
        after = record_scaler_steps(patch, 2.0**24)
        train(recipe, out, resume=True)
    from forked_runs import read_train_losses

    pairs = zip(read_train_losses(out), read_train_losses(tmp_path / "whole"), strict=True)
    finite_pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    difference = max_relative_difference([a for a, _ in finite_pairs], [b for _, b in finite_pairs])
    figure(
        "fp16, resumed after overflows",
        "the scale is restored; losses within 1e-2 of the uninterrupted run",
        f"scale {before[-1][1]:g} before, {after[0][1]:g} after; losses {difference:.1e} apart",
    )
    assert after[0][0] == 17
    assert after[0][1] == before[-1][1]  # no growth within 2,000 steps
    # at this scale later steps may overflow too: the same ones in both runs
    assert [has_moved for *_, has_moved in after] == [
        has_moved for *_, has_moved in uninterrupted[16:]
    ]
    assert difference < 1e-2
