"""`finetune info RECIPE --plan`: estimate memory, time and disk of a run from a few of its steps.

A subprocess sets up the run as `train` does and trains a few real steps in a temporary folder. A
`Predictor` then extrapolates to the whole run, and to the same run with other recipe settings.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from finetune.bench.loop_process import LoopProcess
from finetune.bench.ours import FinetuneLoop, zero_features
from finetune.bench.predictor import Prediction, Predictor, TrialMeasurements
from finetune.bench.timer import synchronize
from finetune.data.feature_loader import FeatureLoader
from finetune.data.pixel_store import PixelStore
from finetune.errors import FinetuneError, RecipeError, SetupError
from finetune.evaluation.evaluator import evaluate
from finetune.evaluation.feature_extraction import compute_pre_logits
from finetune.formatting import format_bytes, format_duration, pluralize
from finetune.log import logger
from finetune.models.summary import blocks_per_stage, count_parameters
from finetune.precision import DTYPES
from finetune.progress import step_bar
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.schema import Recipe

__all__ = [
    "RunTrial",
    "decoded_image_bytes",
    "estimate_run",
    "format_run_estimate",
    "suggest_settings",
]

_MEMORY_PARTS = {
    "program": "interpreter, libraries, threads",
    "weights": "",
    "gradients": "",
    "moments": "the optimizer's",
    "average": "optim.ema_decay",
    "teacher": "distill.teacher",
    "images": "decoded and kept",
    "features": "computed once, in memory",
    "snapshot": "a checkpoint while it is written",
}


def format_run_estimate(estimate: Mapping[str, Any]) -> str:
    """Format an estimate for the terminal.

    Args:
        estimate: the result of `estimate_run`.
    Returns: one block each for the run, memory, time and disk, then a table of settings that need
        less memory or time.
    """
    height, width = estimate["image_size"]
    device = estimate["machine"]["device"]
    parameters, disk = estimate["parameters"], estimate["disk"]
    frozen = parameters["total"] - parameters["trained"]
    lines = [
        estimate["recipe"],
        f"  {estimate['architecture']}, {height} x {width} px, {estimate['precision']}, "
        f"{device['name']} ({device['type']})",
        f"  {parameters['total']:,} parameters"
        + (f", {frozen:,} frozen" if frozen else ", all trained"),
        f"  {estimate['num_images']:,} images, batch size {estimate['batch_size']}, "
        f"micro-batch {estimate['micro_batch']}",
        "",
        *_format_memory(estimate),
        "",
        *_format_time(estimate["time"], estimate["steps"]),
        "",
        "disk",
        _format_bytes("a checkpoint", disk["checkpoint"]),
        _format_bytes("the run", disk["needed"], f"of {format_bytes(disk['free_here'])} free here"),
        "",
        *_format_options(estimate),
    ]
    return "\n".join(lines)


def _format_memory(estimate: Mapping[str, Any]) -> Iterator[str]:
    memory = estimate["memory"]
    parts, phases, measured = memory["parts"], memory["phases"], memory["measured"]
    yield f"memory of the {memory['where']}, predicted"
    for name, note in _MEMORY_PARTS.items():
        if parts[name]:
            yield _format_bytes(name, parts[name], note)
    per_image = f"{format_bytes(parts['activations_per_image'])} per image"
    yield _format_bytes("activations", parts["activations"], per_image)
    for phase, num_bytes in phases.items():
        yield _format_bytes(f"in {phase}", num_bytes)
    yield _format_bytes("peak", memory["peak"])
    if measured:
        error = f"{phases['training'] / measured - 1:+.0%}"
        yield _format_bytes(
            "measured", measured, f"in this trial's steps; the prediction is off by {error}"
        )


def _format_time(time: Mapping[str, Any], steps: int) -> Iterator[str]:
    turns = ", ".join(f"{rate:,.1f}" for rate in time["turns"])
    rows = {
        "features": (format_duration(time["features_seconds"]), "once; then they are kept"),
        "images/s": (f"{time['images_per_second']:,.1f}", f"({turns})"),
        "input": (f"{time['input_share']:.0%}", "of a step"),
        "evaluation": (f"{time['evaluated_per_second']:,.1f}", "images/s"),
        "an epoch": (format_duration(time["epoch_seconds"]), ""),
        "the run": (
            format_duration(time["run_seconds"]),
            f"{pluralize(time['run_steps'], 'step')}, "
            f"{pluralize(time['evaluations'], 'evaluation')}",
        ),
    }
    if not time["features_seconds"]:
        del rows["features"]
    yield f"time, from {pluralize(len(time['turns']), 'turn')} of {pluralize(steps, 'step')}"
    for name, (value, note) in rows.items():
        yield f"  {name:14}{value:>12}  {note}".rstrip()


def _format_bytes(name: str, num_bytes: int, note: str = "") -> str:
    return f"  {name:14}{format_bytes(num_bytes):>10}  {note}".rstrip()


def _format_options(estimate: Mapping[str, Any]) -> Iterator[str]:
    peak, rate = estimate["memory"]["peak"], estimate["time"]["images_per_second"]
    options = estimate["options"]
    if estimate["time"]["features_seconds"]:
        yield "only the classifier is trained, so no other settings were tried"
        return
    if not options:
        yield "none of the tried settings takes less memory or time"
        return
    title = "settings that take less"
    width = max(len(title) - 2, *(len(option["change"]) for option in options))
    yield f"{title:{width + 2}}  {'peak':>10}        {'images/s':>10}"
    for option in options:
        option_rate = option["images_per_second"]
        speed = (
            f"{option_rate:>10,.1f}  x{option_rate / rate:<5.2f}"
            if option_rate
            else f"{'-':>10}        "
        )
        memory = f"{format_bytes(option['peak']):>10}  x{option['peak'] / peak:<5.2f}"
        halves = f"halves {' and '.join(option['halves'])}" if option["halves"] else ""
        yield f"  {option['change']:{width}}  {memory}{speed} {halves}".rstrip()


_TURN_SECONDS = 3.0  # target duration of a turn, one timed series of steps
_NUM_TURNS = 2
_MAX_STEPS = 40  # steps per turn
_WARMUP_STEPS = 2
_MAX_EVALUATED_IMAGES = 1024
_MAX_REMAINING_SHARE = 0.98  # list only settings that need at most 98 % of the memory or time
_MIN_INPUT_SHARE = 0.1  # suggest faster input only if loading takes more than 10 % of a step


def estimate_run(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Estimate memory and time of a recipe's training on this machine from a short measurement.

    Args:
        path: path of the recipe.
        overrides: overrides of the recipe, each `section.key=value`.
    Returns: a dict with keys "parameters" {"total", "trained"}; "memory" in bytes {"parts",
        "phases", "peak", "measured", "where"}; "time" {"images_per_second", "turns",
        "input_share", "evaluated_per_second", "features_seconds" (0 unless the run caches
        features), "epoch_seconds", "run_seconds", "evaluations"}; "disk" in bytes; "options", each
        {"change", "peak", "images_per_second", "halves"}; and a summary of the recipe and the
        machine.
    Raises: FinetuneError if the recipe is wrong or the run cannot be set up.
    """
    recipe = load_recipe(path, overrides)
    _check_single_process(recipe)
    if recipe.optim.stages:
        logger.info("optim.stages: the estimate covers only the training after the stages")
    with step_bar(total=1, start=0, shown=True) as progress:

        def advance(steps: int) -> None:
            progress.total = max(progress.total, progress.n + steps + 1)
            progress.update(steps)

        with LoopProcess("plan", RunTrial, {"recipe": recipe}, on_steps=advance) as host:
            progress.set_description("the first steps")
            run_info = host.call("prepare")
            progress.set_description("steps")
            measured = host.call("measure")
            progress.set_description("memory")
            predicted = host.call("predict")
    run_keys = ("architecture", "device", "precision", "batch_size", "image_size", "num_images")
    free_bytes = shutil.disk_usage(".").free
    return {
        "recipe": path,
        **{key: run_info[key] for key in run_keys},
        "augmentation": run_info["augmentation"],
        "machine": run_info["machine"],
        **measured,
        **predicted,
        "disk": {**predicted["disk"], "free_here": free_bytes},
    }


def _check_single_process(recipe: Recipe) -> None:
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        raise SetupError(
            f"info --plan: this estimates a single process, but {num_processes} were started; run "
            "it without accelerate launch",
            code="setup.one_process",
        )
    if recipe.run.num_processes not in (None, 1):
        raise RecipeError(
            f"run.num_processes: info --plan estimates a single process, but the recipe asks for "
            f"{recipe.run.num_processes}; add run.num_processes=1",
            code="recipe.conflict",
        )


class RunTrial(FinetuneLoop):
    """Measures a few training steps of a recipe, and estimates the run with other settings."""

    def __init__(self, line: Any, *, recipe: Recipe, folder: str) -> None:
        super().__init__(line, recipe=recipe, folder=folder)
        # set only if the run trains a head on cached features
        self.val_features: FeatureLoader | None = None
        self.feature_width = self.feature_bytes = 0

    def measure(self) -> dict[str, Any]:
        """Time training steps with real and with synthetic input, alternating, and an evaluation.

        Returns: a dict with keys "steps" (the steps per turn) and "time".
        """
        step_seconds = min(self._time_one_step() for _ in range(2))
        # between two steps, memory holds only the network, the optimizer state and the images
        on_host = self.device.type == "cpu"
        resident_bytes = _resident_bytes() if on_host else 0
        loaders = [self.loader, *([self.val_loader] if "val" in self.setup.source.splits else [])]
        image_bytes = sum(decoded_image_bytes(loader.store, self.device) for loader in loaders)
        features_seconds = 0.0
        if self.trainer.uses_cached_features:
            features_seconds = self._estimate_feature_seconds(step_seconds)
            step_seconds = min(self._time_one_step() for _ in range(2))
        steps = max(1, min(_MAX_STEPS, int(_TURN_SECONDS / step_seconds)))
        real, synthetic = [], []
        for _ in range(_NUM_TURNS if steps > 1 else 1):
            real.append(self.train(warmup=min(steps, _WARMUP_STEPS), steps=steps))
            synthetic.append(self.train(warmup=1, steps=steps, synthetic=True))
        # read the peaks now, before the evaluation raises them
        self.peaks = self.memory()
        rate, synthetic_rate = (sum(rates) / len(rates) for rates in (real, synthetic))
        num_images = min(max(int(3 * rate * _TURN_SECONDS), 1), _MAX_EVALUATED_IMAGES)
        evaluated_per_second = self.evaluate(images=num_images)
        measured = TrialMeasurements(
            images_per_second=rate,
            images_per_second_without_input=max(synthetic_rate, rate),
            resident_bytes=resident_bytes,
            image_bytes=image_bytes,
            report_bytes=_report_library_bytes() if on_host else 0,
            feature_bytes=self.feature_bytes,
            feature_dim=self.feature_width,
            keeps_images=self.loader.store.images is not None,
        )
        self.measured = self._add_teacher_cost(measured)
        setup = self.setup
        num_evaluations = sum(setup.is_eval_step(step) for step in range(1, setup.num_steps + 1))
        splits = {name: len(split) for name, split in setup.source.splits.items()}
        num_val = splits.get("val", 0)
        num_evaluated = (num_evaluations + 1) * num_val + splits.get("test", 0)
        training_seconds = setup.num_steps * self.recipe.data.batch_size / rate
        return {
            "steps": steps,
            "time": {
                "images_per_second": rate,
                "turns": real,
                "input_share": max(0.0, 1 - rate / synthetic_rate),
                "evaluated_per_second": evaluated_per_second,
                "features_seconds": features_seconds,
                "epoch_seconds": setup.num_samples / rate,
                "run_seconds": features_seconds
                + training_seconds
                + num_evaluated / evaluated_per_second,
                "run_steps": setup.num_steps,
                "evaluations": num_evaluations,
            },
        }

    def _estimate_feature_seconds(self, step_seconds: float) -> float:
        """Estimate the time to compute all features; from then on, training uses zeros as features.

        Args:
            step_seconds: duration of a training step through the whole network.
        """
        num_images = int(self.recipe.data.batch_size / step_seconds * _TURN_SECONDS)
        rate = self.evaluate(images=min(max(num_images, 1), _MAX_EVALUATED_IMAGES))
        (batch, *_) = self.val_loader.eval_batches(
            batch_size=1, world_size=len(self.val_loader.labels)
        )
        with torch.inference_mode():
            width = compute_pre_logits(self.setup.built.model, batch.images_BCHW).shape[1]
        self.active_loader = zero_features(self.loader, width)
        self.val_features = zero_features(self.val_loader, width)
        split_sizes = [
            len(split) for name, split in self.setup.source.splits.items() if name != "train"
        ]
        num_rows = self.setup.num_samples + sum(split_sizes)
        self.feature_bytes, self.feature_width = 4 * width * num_rows, width
        return num_rows / rate

    def _add_teacher_cost(self, measured: TrialMeasurements) -> TrialMeasurements:
        """Add the memory of the distillation teacher (in each step, or cached logits), if any."""
        distillation = self.trainer.distillation
        if distillation is None:
            return measured
        cached_logit_bytes = (
            4 * distillation.output_width * self.setup.num_samples * distillation.caches_outputs
        )
        return dataclasses.replace(
            measured,
            feature_bytes=measured.feature_bytes + cached_logit_bytes,
            teacher_bytes=distillation.weight_bytes,
            teacher_estimate=distillation.estimate_memory(self.recipe.data.batch_size),
        )

    def evaluate(self, *, images: int) -> float:
        """Evaluate `images` images, or all cached features. Returns: images per second."""
        self._evaluated = True  # no warm-up: it costs time, and evaluation is never compiled
        if self.val_features is None:
            return super().evaluate(images=images)
        size = self.recipe.data.eval_batch_size
        metrics = evaluate(
            self.trainer.eval_model(), self.val_features, self.accelerator, batch_size=size
        )
        return float(metrics["images_per_second"])

    def _time_one_step(self) -> float:
        started = time.perf_counter()
        self._one_step()
        synchronize(self.device)
        return time.perf_counter() - started

    def predict(self) -> dict[str, Any]:
        """Estimate this run, and the same run with other settings.

        Returns: a dict with keys "parameters", "memory", "disk", "micro_batch" and "options".
        """
        network = self.accelerator.unwrap_model(self.trainer.model)
        predictor = Predictor(
            self.setup,
            network,
            dtype=DTYPES[self.precision],
            micro_batch_size=self.trainer.micro_batch_size,
            measured=self.measured,
            tick=self.progress.tick,
        )
        baseline = predictor.predict(self.recipe)
        where = "host" if self.device.type == "cpu" else "device"
        # plus the best checkpoint, and the one that is being written
        num_checkpoints = self.recipe.run.keep_checkpoints + 2
        model_bytes = baseline.parts["average"] or baseline.parts["weights"]
        return {
            "parameters": {
                "total": count_parameters(network.parameters()),
                "trained": count_parameters(p for p in network.parameters() if p.requires_grad),
            },
            "micro_batch": baseline.micro_batch_size,
            "memory": {
                "where": where,
                "parts": {
                    **baseline.parts,
                    "activations": baseline.activations.bytes_for(baseline.micro_batch_size),
                    "activations_per_image": baseline.activations.bytes_per_image,
                },
                "phases": baseline.phases,
                "peak": baseline.peak_bytes,
                # None for cached features: the trial also ran the whole network, the run does not
                "measured": None if self.feature_width else self.peaks[where],
            },
            "disk": {
                "checkpoint": baseline.checkpoint_bytes,
                "needed": num_checkpoints * baseline.checkpoint_bytes + 2 * model_bytes,
            },
            # training a head on cached features costs so little that no setting matters
            "options": [] if self.feature_width else suggest_settings(predictor, baseline, network),
        }


def suggest_settings(
    predictor: Predictor, baseline: Prediction, network: nn.Module
) -> list[dict[str, Any]]:
    """Find settings with which a run would take less memory or time.

    Args:
        predictor: the predictor of the run.
        baseline: the prediction for the run's own recipe.
        network: the network of the run.
    Returns: the settings, the largest saving first, each a dict with keys "change", "peak" in
        bytes, "images_per_second" (or None) and "halves" (a list with "memory", "time" or both).
    """
    recipe, rate = predictor.setup.recipe, predictor.measured.images_per_second
    remaining_shares, options = [], []
    for change, overrides, free_input in _candidate_changes(predictor, baseline, network):
        try:
            changed = parse_recipe(recipe.to_yaml(), overrides=overrides)
            other = predictor.predict(changed, ignore_input_time=free_input)
        except (FinetuneError, AssertionError):  # the network does not support this setting
            continue
        option_rate = other.images_per_second
        remaining = min(other.peak_bytes / baseline.peak_bytes, rate / (option_rate or rate))
        if remaining > _MAX_REMAINING_SHARE:
            continue
        halves = {
            "memory": 2 * other.peak_bytes <= baseline.peak_bytes,
            "time": (option_rate or 0) >= 2 * rate,
        }
        remaining_shares.append(remaining)
        options.append(
            {
                "change": change,
                "peak": other.peak_bytes,
                "halves": [name for name, is_half in halves.items() if is_half],
                "images_per_second": option_rate,
            }
        )
    return [
        options[index]
        for index in sorted(range(len(remaining_shares)), key=remaining_shares.__getitem__)
    ]


def _candidate_changes(
    predictor: Predictor, baseline: Prediction, network: nn.Module
) -> Iterator[tuple[str, list[str], bool]]:
    """Yield settings to try: a description, recipe overrides, and whether to ignore input time."""
    recipe, measured = predictor.setup.recipe, predictor.measured
    overrides = []
    if hasattr(network, "set_grad_checkpointing"):
        overrides.append("model.grad_checkpointing=true")
    if recipe.model.freeze == "none":
        overrides += [
            f"model.freeze={sum(blocks_per_stage(network)) // 2}",
            "model.freeze=backbone",
        ]
    if predictor.dtype == torch.float32:
        overrides.append("run.precision=bf16")
    yield from ((override, [override], False) for override in overrides)
    height, width = predictor.setup.preprocessing.image_size
    size = _half_area_size(network, height, width)
    if size != [height, width]:
        override = f"model.image_size={size[0] if size[0] == size[1] else size}"
        is_named = str(height) in (recipe.data.train or "")
        yield override + (" and in data.train" if is_named else ""), [override], False
    overrides = [
        f"data.micro_batch={-(-baseline.micro_batch_size // 2)}",
        f"data.eval_batch_size={max(baseline.eval_batch_size // 2, 1)}",
    ]
    yield from ((override, [override], False) for override in overrides)
    yield "optim.name=sgd", ["optim.name=sgd", "optim.betas=null", "optim.args={}"], False
    yield "data.keep=none", ["data.keep=none"], False
    if 1 - measured.images_per_second / measured.images_per_second_without_input > _MIN_INPUT_SHARE:
        if measured.keeps_images:
            yield "input at no cost (data.train)", [], True
        else:
            yield "data.keep=memory", ["data.keep=memory"], True


def _half_area_size(network: nn.Module, height: int, width: int) -> list[int]:
    """Return an image size (height, width) with half the pixels, divisible by the patch size."""
    patch_size = getattr(getattr(network, "patch_embed", None), "patch_size", 32)
    multiple = max(patch_size) if isinstance(patch_size, tuple | list) else int(patch_size)
    return [max(int(side / 2**0.5 / multiple), 1) * multiple for side in (height, width)]


def decoded_image_bytes(store: PixelStore, device: torch.device) -> int:
    """Return the bytes of decoded images that `store` keeps in the memory of `device`."""
    images = store.images
    if images is None:
        return 0
    return images.nbytes if images.device.type == device.type else 0


def _resident_bytes() -> int:
    """Return the resident set size of this process in bytes, after returning freed memory."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
    import psutil  # type: ignore[import-untyped]  # a dependency of Accelerate

    return int(psutil.Process().memory_info().rss)


def _report_library_bytes() -> int:
    """Import the libraries that draw the report of a run. Returns: their memory in bytes."""
    before = _resident_bytes()
    importlib.import_module("finetune.report.page")
    importlib.import_module("matplotlib.pyplot")
    return max(_resident_bytes() - before, 0)
