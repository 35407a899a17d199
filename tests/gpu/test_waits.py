"""Training steps do not synchronize with the device, so the host prepares work ahead of the GPU.

torch reports every call that waits for a stream. A wait on the main stream would leave the GPU
idle. Batches are built on another stream, where a wait is only for that batch.
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
from gpu_runs import (
    MULTILABEL_OVERRIDES,
    NANO_RECIPE,
    RARE_CLASS_OVERRIDES,
    SGD_OVERRIDES,
    make_recipe,
    needs_gpu,
    train_here,
)

pytestmark = needs_gpu

FIRST_STEP, LAST_STEP = 4, 12  # the observed steps, inclusive
RUN_OVERRIDES = (f"optim.steps={LAST_STEP + 2}", "run.log_every=1000", "run.save_every=1000")
SYNC_WARNING = "called a synchronizing CUDA operation"

RECIPES: dict[str, tuple[str, ...]] = {
    "adamw, bf16": ("run.precision=bf16",),
    "adamw, float32": (),
    "sgd, bf16": (*SGD_OVERRIDES, "run.precision=bf16"),
    "sgd, float32, without clipping": (*SGD_OVERRIDES, "optim.clip_norm=null"),
    "ema": ("optim.ema_decay=0.9",),
    "micro-batches": ("data.micro_batch=16",),
    "dropout and stochastic depth": ("model.dropout=0.1", "model.drop_path=0.1"),
    "mixup and label smoothing": (
        "data.train=resize | mixup(0.8) | cutmix(1.0)",
        "optim.label_smoothing=0.1",
    ),
    "color, rotation, erasing": (
        "data.train=resize | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.1) | random_erasing(p=0.5)",
    ),
    "randaugment": ("data.train=random_resized_crop | rand_augment",),
    "layer-wise learning rates": ("optim.layer_decay=0.8",),
    "frozen blocks": ("model.freeze=2",),
    "only the head, on features": ("model.freeze=backbone", "data.train=resize"),
    "checkpointed activations": ("model.grad_checkpointing=true",),
    "images in memory": ("data.keep=memory",),
    "images decoded by workers": ("data.keep=none",),
    "photos of mixed sizes, decoded by workers": (
        *(
            "data.source=folder:PHOTO_FOLDER",
            "data.keep=none",
            "data.workers=2",
            "data.batch_size=24",
        ),
        "data.train=random_resized_crop | flip | rotate(15) | color_jitter(0.2, 0.2, 0.2)",
        "data.eval=resize(36) | center_crop(32)",
    ),
    "lamb": ("optim.name=lamb",),
    "multilabel": (
        *MULTILABEL_OVERRIDES,
        "optim.asymmetric_loss={}",
        "data.train=resize | mixup(0.8)",
    ),
    "rare classes": RARE_CLASS_OVERRIDES,
    "distillation, teacher computed in each step": ("distill.teacher=TEACHER",),
    "distillation, cached teacher outputs": ("distill.teacher=TEACHER", "data.train=resize"),
    "distillation of features": ("distill.teacher=TEACHER", "distill.kind=features"),
    "an adapter": ("model.adapter={rank: 4}",),
    "a network with batch norm": (
        *("model.name=resnet10t", "model.pretrained=false", "model.head_init=default"),
        "model.image_size=64",
    ),
}
# Optimizers without a fused step of torch: the host reads whether the gradient is finite.
SYNCHRONIZE_ONCE = {"lamb"}


def call_around_steps(
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[], object],
    end: Callable[[], object],
) -> None:
    """Call `begin` before step FIRST_STEP and `end` after step LAST_STEP of a run."""
    from finetune.training.trainer_state import TrainerState

    train_step = TrainerState.train_step

    def step_and_call(trainer: TrainerState, *arguments: Any) -> None:
        number = trainer.counters.step + 1
        if number == FIRST_STEP:
            begin()
        train_step(trainer, *arguments)
        if number == LAST_STEP:
            end()

    monkeypatch.setattr(TrainerState, "train_step", step_and_call)


def call_location() -> str:
    """Return the location in finetune, and the call in it that synchronized."""
    hidden = ("test_waits.py", "/warnings.py")
    frames = [f for f in traceback.extract_stack() if not f.filename.endswith(hidden)]
    finetune_frames = [
        f for f in frames if "/finetune/" in f.filename and "site-packages" not in f.filename
    ]
    last_frame = frames[-1] if frames else None
    frame = finetune_frames[-1] if finetune_frames else last_frame
    if frame is None:
        return "unknown"
    name = f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
    if last_frame is not None and last_frame.filename != frame.filename:
        name += f" > {Path(last_frame.filename).name}:{last_frame.lineno} {last_frame.name}"
    return name


def count_synchronizations(
    monkeypatch: pytest.MonkeyPatch, out: Path, *overrides: str
) -> tuple[Counter[str], Counter[str]]:
    """Train. Returns: synchronizations of the main stream and of others, by location."""
    main_stream: Counter[str] = Counter()
    other_streams: Counter[str] = Counter()

    def record_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        if SYNC_WARNING in str(message):
            on_main = torch.cuda.current_stream() == torch.cuda.default_stream()
            (main_stream if on_main else other_streams)[call_location()] += 1

    call_around_steps(
        monkeypatch,
        lambda: torch.cuda.set_sync_debug_mode("warn"),
        lambda: torch.cuda.set_sync_debug_mode("default"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", record_warning)
        train_here(out, *RUN_OVERRIDES, *overrides)
    return main_stream, other_streams


def format_counts(counts: Counter[str]) -> str:
    """Format counts per step by location, the most frequent first."""
    num_steps = LAST_STEP - FIRST_STEP + 1
    return ", ".join(
        f"{location} {count / num_steps:.3g}" for location, count in counts.most_common(6)
    )


def test_control_a_synchronization_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    """The control: a step that reads its loss from the device."""
    from finetune.training.meter import TrainMeter

    update = TrainMeter.update

    def read_and_update(meter: TrainMeter, loss_sum: Any, *arguments: Any, **options: Any) -> None:
        loss_sum.item()
        update(meter, loss_sum, *arguments, **options)

    monkeypatch.setattr(TrainMeter, "update", read_and_update)
    counts, _ = count_synchronizations(monkeypatch, tmp_path / "run")
    per_step = sum(counts.values()) / (LAST_STEP - FIRST_STEP + 1)
    figure(
        "the control: the loss is read in every step",
        "counted as one synchronization per step",
        f"{per_step:.3g} per step: {format_counts(counts)}",
    )
    assert per_step >= 1


@pytest.mark.parametrize("case", RECIPES)
def test_training_steps_do_not_synchronize(
    case: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    figure: Any,
) -> None:
    if "adapter" in case:
        pytest.importorskip("peft")
    overrides = RECIPES[case]
    for placeholder in ("TEACHER", "PHOTO_FOLDER"):
        if any(placeholder in override for override in overrides):
            path = str(request.getfixturevalue(placeholder.lower()))
            overrides = tuple(override.replace(placeholder, path) for override in overrides)
    main_stream, other_streams = count_synchronizations(monkeypatch, tmp_path / "run", *overrides)
    num_steps = LAST_STEP - FIRST_STEP + 1
    text = f"{sum(main_stream.values()) / num_steps:.3g}"
    if main_stream:
        text += f" ({format_counts(main_stream)})"
    allowed = num_steps if case in SYNCHRONIZE_ONCE else 0
    figure(
        f"calls that synchronize the main stream in a step: {case}",
        "at most one" if allowed else "none",
        f"{text}; on other streams, for small copies of a batch: "
        f"{sum(other_streams.values()) / num_steps:.3g}"
        + (f" ({format_counts(other_streams)})" if other_streams else ""),
    )
    assert sum(main_stream.values()) <= allowed, main_stream


@pytest.mark.parametrize("task", ["single label", "multilabel"])
def test_evaluation_synchronizes_only_at_its_end(
    task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    """Sums are read once for any number of batches, and logits one batch later."""
    from finetune.evaluation import evaluator as evaluation

    counts: Counter[str] = Counter()

    def record_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        if (
            SYNC_WARNING in str(message)
            and torch.cuda.current_stream() == torch.cuda.default_stream()
        ):
            counts[call_location()] += 1

    evaluate, num_batches = evaluation.evaluate, 0

    def evaluate_and_count(model: Any, loader: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal num_batches
        num_batches = -(-len(loader.labels) // options["batch_size"])
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return evaluate(model, loader, *arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(evaluation, "evaluate", evaluate_and_count)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", record_warning)
        short_run = ("optim.steps=2", "optim.warmup_steps=0", "data.eval_batch_size=2")
        task_overrides = MULTILABEL_OVERRIDES if task == "multilabel" else ()
        train_here(tmp_path / "run", *short_run, *task_overrides, "run.precision=bf16")
    locations = ", ".join(f"{name} {count}" for name, count in counts.most_common(8))
    figure(
        "calls that synchronize the main stream in an evaluation",
        "fewer than half the number of batches: only at the end",
        f"{task}: {sum(counts.values())} in {num_batches} batches ({locations})",
    )
    assert num_batches > 30
    assert sum(counts.values()) < num_batches / 2


def test_only_the_gradient_scaler_synchronizes_in_fp16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    """torch's GradScaler reads whether a gradient is infinite before the optimizer step."""
    counts, _ = count_synchronizations(monkeypatch, tmp_path / "run", "run.precision=fp16")
    per_step = sum(counts.values()) / (LAST_STEP - FIRST_STEP + 1)
    text = f"{per_step:.3g}: {format_counts(counts)}"
    figure("calls that synchronize in an fp16 step", "only those of the scaler", text)
    assert all("grad_scaler.py" in name or "optimizer.py" in name for name in counts), counts


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_nothing_is_copied_to_pageable_memory(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    """Check with the profiler's list of CUDA calls, in addition to torch's warnings."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    call_around_steps(monkeypatch, profiler.start, profiler.stop)
    train_here(tmp_path / "run", *RUN_OVERRIDES, *(SGD_OVERRIDES if optimizer == "sgd" else ()))
    num_steps = LAST_STEP - FIRST_STEP + 1
    counts, microseconds = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        name = event.name
        if (name.startswith("cuda") and "Synchronize" in name) or name.startswith("Memcpy DtoH"):
            counts[name] += 1
            microseconds[name] += event.time_range.elapsed_us()
    text = ", ".join(
        f"{name} {count / num_steps:.3g} ({microseconds[name] / num_steps:.0f} µs)"
        for name, count in sorted(counts.items())
    )
    figure(
        "copies from the device and synchronizations in a step, by the CUDA profiler",
        "one scalar to pinned memory, nothing to pageable memory",
        f"{optimizer}: {text}",
    )
    assert counts, "the profiler recorded nothing"
    pageable = sum(count for name, count in counts.items() if "Pageable" in name)
    assert pageable == 0, counts
    assert counts["Memcpy DtoH (Device -> Pinned)"] <= num_steps + 1, counts
    assert counts["cudaDeviceSynchronize"] <= 4, counts  # calls of the profiler itself


def idle_milliseconds(
    monkeypatch: pytest.MonkeyPatch, out: Path, *, synchronize: bool
) -> tuple[float, float]:
    """Train with a forward pass that takes about 50 ms on the device.

    Args:
        synchronize: wait for the device before each batch is built, as a program that reads would.
    Returns: milliseconds on the device between the end of a step and the next forward pass: the
        lower quartile, since other processes share the device, and the median.
    """
    from finetune.data.loader import ImageLoader
    from finetune.training.trainer_state import TrainerState

    sleep_cycles = 80_000_000  # about 50 ms
    ends, starts = [], []
    with monkeypatch.context() as patch:
        init, train_step, build_batch = (
            TrainerState.__init__,
            TrainerState.train_step,
            ImageLoader._build_batch,
        )

        def record_and_sleep(module: Any, inputs: Any) -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            starts.append(event)
            torch.cuda._sleep(sleep_cycles)

        def init_with_hook(trainer: TrainerState, *arguments: Any, **options: Any) -> None:
            init(trainer, *arguments, **options)
            trainer.model.register_forward_pre_hook(record_and_sleep)

        def step_and_record(trainer: TrainerState, *arguments: Any) -> None:
            train_step(trainer, *arguments)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            ends.append(event)

        def build_after_synchronize(loader: ImageLoader, *arguments: Any) -> Any:
            if synchronize:
                torch.cuda.synchronize()
            return build_batch(loader, *arguments)

        patch.setattr(TrainerState, "__init__", init_with_hook)
        patch.setattr(TrainerState, "train_step", step_and_record)
        patch.setattr(ImageLoader, "_build_batch", build_after_synchronize)
        from finetune.training.train import train

        overrides = (
            *RUN_OVERRIDES,
            "data.val_fraction=0",
            "data.train=random_resized_crop | rand_augment",
        )
        train(make_recipe(NANO_RECIPE, *overrides), out)
    torch.cuda.synchronize()
    gaps = [ends[n].elapsed_time(starts[n + 1]) for n in range(FIRST_STEP, LAST_STEP)]
    return statistics.quantiles(gaps)[0], statistics.median(gaps)


def test_the_device_is_not_idle_between_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: Any
) -> None:
    synchronized_gap, synchronized_median = idle_milliseconds(
        monkeypatch, tmp_path / "waiting", synchronize=True
    )
    gap, median = idle_milliseconds(monkeypatch, tmp_path / "run", synchronize=False)
    figure(
        "idle time of the device between two steps of about 50 ms, randaugment",
        "less than half of a program that synchronizes before each batch",
        f"{gap:.2f} ms instead of {synchronized_gap:.2f} ms (lower quartile; median {median:.2f} "
        f"and {synchronized_median:.2f} ms)",
    )
    assert gap < synchronized_gap / 2
