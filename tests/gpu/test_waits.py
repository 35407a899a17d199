"""Nothing is read from the device between two steps: the host prepares ahead of the GPU.

torch tells every call that waits for a stream. Those on the stream of the computation would let the
GPU run dry; a batch is made on a stream of its own, where a wait is for that batch alone.
"""

from __future__ import annotations

import statistics
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import NANO, PAIRS, RARE, SGD, needs_gpu, recipe_of, trained

pytestmark = needs_gpu

FIRST, LAST = 4, 12  # the steps that are watched, the first and last of them included
STEPS = (f"optim.steps={LAST + 2}", "run.log_every=1000", "run.save_every=1000")
_WAITS = "called a synchronizing CUDA operation"

RECIPES: dict[str, tuple[str, ...]] = {
    "adamw, bf16": ("run.precision=bf16",),
    "adamw, float32": (),
    "sgd, bf16": (*SGD, "run.precision=bf16"),
    "sgd, float32, without clipping": (*SGD, "optim.clip_norm=null"),
    "ema": ("optim.ema_decay=0.9",),
    "micro-batches": ("data.micro_batch=16",),
    "dropout and stochastic depth": ("model.dropout=0.1", "model.drop_path=0.1"),
    "mixup and label smoothing": (
        "data.train=resize | mixup(0.8) | cutmix(1.0)",
        "optim.label_smoothing=0.1",
    ),
    "colour, rotation, erasing": (
        "data.train=resize | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.1) | random_erasing(p=0.5)",
    ),
    "randaugment": ("data.train=random_resized_crop | rand_augment",),
    "layer-wise learning rates": ("optim.layer_decay=0.8",),
    "frozen blocks": ("model.freeze=2",),
    "the head alone, on features": ("model.freeze=backbone", "data.train=resize"),
    "checkpointed activations": ("model.grad_checkpointing=true",),
    "images in memory": ("data.keep=memory",),
    "images decoded by workers": ("data.keep=none",),
    "photos of many sizes, decoded by workers": (
        *("data.source=folder:FOLDER", "data.keep=none", "data.workers=2", "data.batch_size=24"),
        "data.train=random_resized_crop | flip | rotate(15) | color_jitter(0.2, 0.2, 0.2)",
        "data.eval=resize(36) | center_crop(32)",
    ),
    "lamb": ("optim.name=lamb",),
    "several labels": (*PAIRS, "optim.asymmetric_loss={}", "data.train=resize | mixup(0.8)"),
    "rare classes": RARE,
    "a teacher beside the step": ("distill.teacher=TEACHER",),
    "a teacher's kept answers": ("distill.teacher=TEACHER", "data.train=resize"),
    "a teacher's features": ("distill.teacher=TEACHER", "distill.kind=features"),
    "an adapter": ("model.adapter={rank: 4}",),
    "a network with batch norm": (
        *("model.name=resnet10t", "model.pretrained=false", "model.head_init=default"),
        "model.image_size=64",
    ),
}
# What has no fused step of torch's must be told on the host whether the gradient is finite.
WAITS_ONCE = {"lamb"}


def watched(
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[], object],
    end: Callable[[], object],
) -> None:
    """Let a run call `begin` before its step FIRST and `end` after its step LAST."""
    from finetune.training.trainer_state import TrainerState

    take = TrainerState.train_step

    def step(trainer: TrainerState, *arguments: Any) -> None:
        number = trainer.counters.step + 1
        if number == FIRST:
            begin()
        take(trainer, *arguments)
        if number == LAST:
            end()

    monkeypatch.setattr(TrainerState, "train_step", step)


def place() -> str:
    """Where our code is, and what it called that waited."""
    hidden = ("test_waits.py", "/warnings.py")
    frames = [f for f in traceback.extract_stack() if not f.filename.endswith(hidden)]
    ours = [f for f in frames if "/finetune/" in f.filename and "site-packages" not in f.filename]
    inner = frames[-1] if frames else None
    where = ours[-1] if ours else inner
    if where is None:
        return "unknown"
    name = f"{Path(where.filename).name}:{where.lineno} {where.name}"
    if inner is not None and inner.filename != where.filename:
        name += f" > {Path(inner.filename).name}:{inner.lineno} {inner.name}"
    return name


def waits(
    monkeypatch: pytest.MonkeyPatch, out: Path, *overrides: str
) -> tuple[Counter[str], Counter[str]]:
    """Train. Returns: the waits on the computation's stream and on others, by their place."""
    main: Counter[str] = Counter()
    side: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if _WAITS in str(message):
            on_main = torch.cuda.current_stream() == torch.cuda.default_stream()
            (main if on_main else side)[place()] += 1

    watched(
        monkeypatch,
        lambda: torch.cuda.set_sync_debug_mode("warn"),
        lambda: torch.cuda.set_sync_debug_mode("default"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", note)
        trained(out, *STEPS, *overrides)
    return main, side


def told(found: Counter[str]) -> str:
    """Waits in a step by their place, the most frequent first."""
    number = LAST - FIRST + 1
    return ", ".join(f"{place} {times / number:.3g}" for place, times in found.most_common(6))


def test_a_wait_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any) -> None:
    """The control: a step that reads its loss from the device."""
    from finetune.training.meter import TrainMeter

    add = TrainMeter.update

    def reading(meter: TrainMeter, loss_sum: Any, *arguments: Any, **named: Any) -> None:
        loss_sum.item()
        add(meter, loss_sum, *arguments, **named)

    monkeypatch.setattr(TrainMeter, "update", reading)
    main, _ = waits(monkeypatch, tmp_path / "run")
    number = sum(main.values()) / (LAST - FIRST + 1)
    figure(
        "the control: a loss that is read in every step",
        "seen as one wait in a step",
        f"{number:.3g} in a step: {told(main)}",
    )
    assert number >= 1


@pytest.mark.parametrize("kind", RECIPES)
def test_nothing_waits_for_the_computation(
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    figure: Any,
) -> None:
    if "adapter" in kind:
        pytest.importorskip("peft")
    overrides = RECIPES[kind]
    for word in ("TEACHER", "FOLDER"):
        if any(word in each for each in overrides):
            path = str(request.getfixturevalue(word.lower()))
            overrides = tuple(each.replace(word, path) for each in overrides)
    main, side = waits(monkeypatch, tmp_path / "run", *overrides)
    number = LAST - FIRST + 1
    text = f"{sum(main.values()) / number:.3g}"
    if main:
        text += f" ({told(main)})"
    allowed = number if kind in WAITS_ONCE else 0
    figure(
        f"calls that wait for the computation's stream in a step: {kind}",
        "at most one" if allowed else "none",
        f"{text}; beside it, for a batch's small copies: {sum(side.values()) / number:.3g}"
        + (f" ({told(side)})" if side else ""),
    )
    assert sum(main.values()) <= allowed, main


@pytest.mark.parametrize("labels", ["one label", "several labels"])
def test_evaluation_waits_at_its_end(
    labels: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    """Its sums are read once, however many batches there are, and logits one batch later."""
    from finetune.evaluation import evaluator as evaluation

    found: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if _WAITS in str(message) and torch.cuda.current_stream() == torch.cuda.default_stream():
            found[place()] += 1

    evaluate, batches = evaluation.evaluate, 0

    def watched_evaluation(model: Any, loader: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal batches
        batches = -(-len(loader.labels) // named["batch_size"])
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return evaluate(model, loader, *arguments, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(evaluation, "evaluate", watched_evaluation)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", note)
        short = ("optim.steps=2", "optim.warmup_steps=0", "data.eval_batch_size=2")
        more = PAIRS if labels == "several labels" else ()
        trained(tmp_path / "run", *short, *more, "run.precision=bf16")
    where = ", ".join(f"{name} {number}" for name, number in found.most_common(8))
    figure(
        "calls that wait for the computation in an evaluation",
        "fewer than half as many as batches: its end alone",
        f"{labels}: {sum(found.values())} in {batches} batches ({where})",
    )
    assert batches > 30
    assert sum(found.values()) < batches / 2


def test_a_scaler_waits_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any) -> None:
    """torch's GradScaler reads whether a gradient was infinite before the optimiser steps."""
    main, _ = waits(monkeypatch, tmp_path / "run", "run.precision=fp16")
    number = sum(main.values()) / (LAST - FIRST + 1)
    text = f"{number:.3g}: {told(main)}"
    figure("calls that wait in a step of fp16", "only the scaler's own", text)
    assert all("grad_scaler.py" in name or "optimizer.py" in name for name in main), main


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_nothing_is_copied_to_pageable_memory(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    """The profiler's list of what the runtime was asked for, beside torch's own word."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    watched(monkeypatch, profiler.start, profiler.stop)
    trained(tmp_path / "run", *STEPS, *(SGD if optimizer == "sgd" else ()))
    steps = LAST - FIRST + 1
    counts, spent = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        name = event.name
        if (name.startswith("cuda") and "Synchronize" in name) or name.startswith("Memcpy DtoH"):
            counts[name] += 1
            spent[name] += event.time_range.elapsed_us()
    text = ", ".join(
        f"{name} {number / steps:.3g} ({spent[name] / steps:.0f} µs)"
        for name, number in sorted(counts.items())
    )
    figure(
        "copies from the device and waits in a step, by CUDA's profiler",
        "one number to pinned memory, nothing to pageable memory",
        f"{optimizer}: {text}",
    )
    assert counts, "the profiler saw nothing"
    pageable = sum(number for name, number in counts.items() if "Pageable" in name)
    assert pageable == 0, counts
    assert counts["Memcpy DtoH (Device -> Pinned)"] <= steps + 1, counts
    assert counts["cudaDeviceSynchronize"] <= 4, counts  # the profiler's own


def idle_milliseconds(
    monkeypatch: pytest.MonkeyPatch, out: Path, *, waiting: bool
) -> tuple[float, float]:
    """Train with a forward pass that takes a while on the device.

    Args:
        waiting: wait for the device before each batch is made, as a program does that reads.
    Returns: milliseconds between the end of a step and the next forward pass, on the device: the
        lower quartile, since other processes share it, and the median.
    """
    from finetune.data.loader import ImageLoader
    from finetune.training.trainer_state import TrainerState

    cycles = 80_000_000  # about 50 ms
    ends, starts = [], []
    with monkeypatch.context() as patch:
        init, take, make = TrainerState.__init__, TrainerState.train_step, ImageLoader._build_batch

        def before(module: Any, inputs: Any) -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            starts.append(event)
            torch.cuda._sleep(cycles)

        def begin(trainer: TrainerState, *arguments: Any, **named: Any) -> None:
            init(trainer, *arguments, **named)
            trainer.model.register_forward_pre_hook(before)

        def step(trainer: TrainerState, *arguments: Any) -> None:
            take(trainer, *arguments)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            ends.append(event)

        def made(loader: ImageLoader, *arguments: Any) -> Any:
            if waiting:
                torch.cuda.synchronize()
            return make(loader, *arguments)

        patch.setattr(TrainerState, "__init__", begin)
        patch.setattr(TrainerState, "train_step", step)
        patch.setattr(ImageLoader, "_build_batch", made)
        from finetune.training.train import train

        overrides = (*STEPS, "data.val_fraction=0", "data.train=random_resized_crop | rand_augment")
        train(recipe_of(NANO, *overrides), out)
    torch.cuda.synchronize()
    gaps = [ends[n].elapsed_time(starts[n + 1]) for n in range(FIRST, LAST)]
    return statistics.quantiles(gaps)[0], statistics.median(gaps)


def test_the_device_does_not_run_dry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    dry, dry_median = idle_milliseconds(monkeypatch, tmp_path / "waiting", waiting=True)
    gap, median = idle_milliseconds(monkeypatch, tmp_path / "run", waiting=False)
    figure(
        "the device's pause between two steps of about 50 ms, randaugment",
        "less than half of that of a program that waits before each batch",
        f"{gap:.2f} ms instead of {dry:.2f} ms (lower quartile; median {median:.2f} and "
        f"{dry_median:.2f} ms)",
    )
    assert gap < dry / 2
