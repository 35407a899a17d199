"""`finetune info RECIPE --plan`: measure a few real steps, and estimate time and disk of the run.

The steps are those of `finetune train` on a few of the images, without torch.compile. A step that
would take too long is measured with fewer images, and its memory is scaled up. Settings that may
take less memory or time are then measured in the same way, while time is left.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from finetune.bench.timer import synchronize
from finetune.bench.training_loop import TrainingLoop
from finetune.data.decode_split import estimate_decoded_bytes
from finetune.errors import FinetuneError, RecipeError, SetupError, is_out_of_memory
from finetune.evaluation.feature_extraction import compute_pre_logits
from finetune.formatting import format_bytes, format_duration, pluralize
from finetune.log import logger, quiet
from finetune.models.summary import count_parameters
from finetune.progress import step_bar
from finetune.recipe.load import load_recipe, override_recipe
from finetune.recipe.schema import Recipe
from finetune.training.peak_memory import PeakMemory, measure_peak_memory

__all__ = [
    "TOTAL_SECONDS",
    "TRIAL_SECONDS",
    "estimate_run",
    "format_run_estimate",
    "measure_recipe",
]

TOTAL_SECONDS = 25.0  # for the recipe and the other settings, without the imports
TRIAL_SECONDS = 8.0  # for the recipe's own steps; half of it for each other setting
_MAX_STEPS = 40
_NUM_IMAGES = 64  # images of each split that are opened; training repeats them


def estimate_run(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Measure some training steps of a recipe on this machine, and estimate the whole run.

    Args:
        path: path of the recipe.
        overrides: overrides of the recipe, each `section.key=value`.
    Returns: a dict with a summary of the recipe and the machine, and these keys:
        "parameters": {"total", "trained"}.
        "split_sizes": number of images by split.
        "measured": {"images" (per micro-batch), "images_per_step", "steps"}.
        "memory": in bytes {"where" ("host" or "device"), "training", "evaluation" (None without
            evaluation), "checkpoint" (a copy in host memory while a checkpoint is written),
            "peak", "decoded_images" (not part of the peak)}.
        "time": {"images_per_second", "evaluated_per_second", "features_seconds" (0 unless the run
            caches features), "epoch_seconds", "run_seconds", "run_steps", "evaluations"}.
        "disk": in bytes {"checkpoint", "needed", "free_here"}.
        "options": a list with {"change", "peak", "images_per_second"} for each other setting.
    Raises: FinetuneError if the recipe is wrong or the run cannot be set up.
    """
    recipe = load_recipe(path, overrides)
    _check_single_process(recipe)
    if recipe.optim.stages:
        logger.info("optim.stages: the estimate covers only the training after the stages")
    started = time.perf_counter()
    with step_bar(total=1, start=0, shown=True) as bar:

        def on_step() -> None:
            bar.total = max(bar.total, bar.n + 2)
            bar.update()

        own, changes = measure_recipe(recipe, on_step, seconds=TRIAL_SECONDS)
        own_seconds = time.perf_counter() - started
        options = []
        for change in changes:
            if time.perf_counter() - started + own_seconds / 2 > TOTAL_SECONDS:
                logger.info(f"{change}: not measured, because it would take too long")
                continue
            bar.set_description(change)
            option = _measure_change(recipe, change, on_step, seconds=TRIAL_SECONDS / 2)
            options += [] if option is None else [option]
    own["disk"]["free_here"] = shutil.disk_usage(".").free
    return {"recipe": path, **own, "options": options}


def _check_single_process(recipe: Recipe) -> None:
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        raise SetupError(
            f"info --plan: this measures a single process, but {num_processes} were started; run "
            "it without accelerate launch",
            code="setup.one_process",
        )
    if recipe.run.num_processes not in (None, 1):
        raise RecipeError(
            f"run.num_processes: info --plan measures a single process, but the recipe asks for "
            f"{recipe.run.num_processes}; add run.num_processes=1",
            code="recipe.conflict",
        )


def measure_recipe(
    recipe: Recipe, on_step: Callable[[], object], *, seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """Measure a recipe for about `seconds` seconds, not counting its setup.

    Returns: the measurements, see `estimate_run`, and the overrides of `_changes_to_try`.
    """
    model = recipe.model.model_copy(update={"compile": False})  # compiling may take minutes
    recipe = recipe.model_copy(update={"model": model})
    with TemporaryDirectory(prefix="finetune-plan-") as folder:
        loop = TrainingLoop(recipe, Path(folder), max_images=_NUM_IMAGES, on_step=on_step)
        try:
            return _Trial(loop, seconds).measure(), _changes_to_try(loop)
        finally:
            loop.close()


def _measure_change(
    recipe: Recipe, change: str, on_step: Callable[[], object], *, seconds: float
) -> dict[str, Any] | None:
    """Measure a recipe with a changed setting.

    Returns: an item of "options" in `estimate_run`; None if the change is not supported or memory
        runs out.
    """
    try:
        changed = override_recipe(recipe, [change])
        with quiet():
            measured, _ = measure_recipe(changed, on_step, seconds=seconds)
    except FinetuneError:
        return None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    return {
        "change": change,
        "peak": measured["memory"]["peak"],
        "images_per_second": measured["time"]["images_per_second"],
    }


def _changes_to_try(loop: TrainingLoop) -> list[str]:
    """Return overrides that may take less memory or time; first those that alter training least."""
    recipe, trainer = loop.recipe, loop.trainer
    if trainer.uses_cached_features:  # training the classifier alone costs next to nothing
        return []
    network: nn.Module = loop.setup.built.model
    micro_batch = min(trainer.micro_batch_size or recipe.data.batch_size, recipe.data.batch_size)
    candidates = {
        "run.precision=bf16": loop.precision == "fp32",
        "model.grad_checkpointing=true": not recipe.model.grad_checkpointing
        and hasattr(network, "set_grad_checkpointing"),
        f"data.micro_batch={-(-micro_batch // 2)}": micro_batch > 1,
        "model.freeze=backbone": recipe.model.freeze == "none" and recipe.model.adapter is None,
    }
    return [change for change, is_possible in candidates.items() if is_possible]


class _Trial:
    """Measures a training loop for about the given number of seconds."""

    def __init__(self, loop: TrainingLoop, seconds: float) -> None:
        self.loop = loop
        self.seconds = seconds
        self.recipe, self.setup, self.device = loop.recipe, loop.setup, loop.device

    def measure(self) -> dict[str, Any]:
        """Return the measurements, as documented in `estimate_run`."""
        loop, setup, batch_size = self.loop, self.setup, self.recipe.data.batch_size
        features_seconds, evaluation_bytes, evaluated_per_second = 0.0, None, None
        if loop.trainer.uses_cached_features:
            features_seconds, evaluation_bytes = self._measure_features()
        images, seconds_per_step = self._images_per_step()
        steps = max(1, min(_MAX_STEPS, int(self.seconds / 3 / seconds_per_step)))
        with measure_peak_memory(self.device) as memory:
            clock = loop.train(warmup=1, steps=steps, batch_size=images)
        rate = images * steps / clock.seconds
        micro_batch = min(loop.trainer.micro_batch_size or batch_size, batch_size)
        training_bytes = self._peak_for(micro_batch, memory, images, self._time_step)
        splits = {name: len(split) for name, split in setup.source.splits.items()}
        if splits.keys() & {"val", "test"} and not features_seconds:
            evaluated_per_second, evaluation_bytes = self._measure_evaluation(rate)
        checkpoint_bytes = loop.trainer.checkpoint_bytes()
        # on a CPU, training continues while a copy of the state is written
        copy_bytes = checkpoint_bytes if self._saves_during_training() else 0
        evaluations = sum(setup.is_eval_step(step) for step in range(1, setup.num_steps + 1))
        num_evaluated = (evaluations + 1) * splits.get("val", 0) + splits.get("test", 0)
        network = loop.trainer.eval_model()
        parameters = list(setup.built.model.parameters())
        num_checkpoints = self.recipe.run.keep_checkpoints + 2  # the best, and the one in progress
        if setup.decay_start_step is not None:
            num_checkpoints += 2  # before the decay, and the best by then
        weight_bytes = sum(tensor.nbytes for tensor in network.state_dict().values())
        return {
            **loop.describe(),
            "parameters": {
                "total": count_parameters(parameters),
                "trained": count_parameters(p for p in parameters if p.requires_grad),
            },
            "split_sizes": splits,
            "measured": {
                "images": min(micro_batch, images),
                "images_per_step": images,
                "steps": steps,
            },
            "memory": {
                "where": "host" if self.device.type == "cpu" else "device",
                "training": training_bytes,
                "evaluation": evaluation_bytes,
                "checkpoint": copy_bytes,
                "peak": max(training_bytes + copy_bytes, evaluation_bytes or 0),
                "decoded_images": self._decoded_bytes(),
            },
            "time": {
                "images_per_second": rate,
                "evaluated_per_second": evaluated_per_second,
                "features_seconds": features_seconds,
                "epoch_seconds": setup.num_samples / rate,
                "run_seconds": features_seconds
                + setup.num_steps * batch_size / rate
                + (num_evaluated / evaluated_per_second if evaluated_per_second else 0.0),
                "run_steps": setup.num_steps,
                "evaluations": evaluations if splits.get("val") else 0,
            },
            "disk": {
                "checkpoint": checkpoint_bytes,
                "needed": num_checkpoints * checkpoint_bytes + 2 * weight_bytes,
            },
        }

    def _images_per_step(self) -> tuple[int, float]:
        """Find how many images a measured step can have: the whole batch, if time allows.

        Returns: the number of images, and the seconds that a step with so many images takes.
        """
        batch_size = self.recipe.data.batch_size
        images = min(2 * self.setup.sampler.group_size, batch_size)
        self._time_step(images)  # the first step allocates memory and loads kernels
        seconds = self._time_step(images)
        while images < batch_size and 2 * seconds < self.seconds / 4:
            images = min(2 * images, batch_size)
            seconds = self._time_step(images)
        return images, seconds

    def _time_step(self, images: int) -> float:
        started = time.perf_counter()
        self.loop.train(warmup=1, steps=0, batch_size=images)
        synchronize(self.device)
        return time.perf_counter() - started

    def _measure_evaluation(self, rate: float) -> tuple[float, int]:
        """Evaluate some images.

        Args:
            rate: images per second of training, which determines how many images are evaluated.
        Returns: images per second of evaluation, and the peak memory in bytes.
        """
        batch_size, available = self.recipe.data.eval_batch_size, len(self.loop.val_loader.labels)
        images = max(1, min(int(rate * self.seconds / 4), available))
        with measure_peak_memory(self.device) as memory:
            evaluated_per_second = self.loop.evaluate(images=images)
        measured = min(batch_size, images)
        peak_bytes = self._peak_for(
            batch_size, memory, measured, lambda number: self.loop.evaluate(images=number)
        )
        return evaluated_per_second, peak_bytes

    def _peak_for(
        self, wanted: int, memory: PeakMemory, images: int, run: Callable[[int], object]
    ) -> int:
        """Estimate the peak memory, in bytes, for a batch that may be larger than the measured one.

        Args:
            wanted: number of images in the batch to estimate.
            memory: the memory measured with the batch of `images` images.
            run: function that computes a batch of a given number of images, for a second
                measurement with half as many images.
        """
        if wanted <= images or images < 2:
            return memory.peak_bytes
        with measure_peak_memory(self.device) as smaller:
            run(images // 2)
        per_image = (memory.peak_bytes - smaller.peak_bytes) / (images - images // 2)
        return int(memory.peak_bytes + max(per_image, 0.0) * (wanted - images))

    def _measure_features(self) -> tuple[float, int]:
        """Measure computing a frozen backbone's features; later steps train on zeros instead.

        Returns: the seconds that computing the features of all images takes, and the peak memory in
            bytes.
        """
        self._time_step(min(2, self.recipe.data.batch_size))
        rate, peak_bytes = self._measure_evaluation(len(self.loop.val_loader.labels))
        (batch, *_) = self.loop.val_loader.eval_batches(
            batch_size=1, world_size=len(self.loop.val_loader.labels)
        )
        with torch.inference_mode():
            width = compute_pre_logits(self.setup.built.model, batch.images_BCHW).shape[1]
        self.loop.use_zero_features(width)
        return sum(map(len, self.setup.source.splits.values())) / rate, peak_bytes

    def _saves_during_training(self) -> bool:
        setup = self.setup
        return self.device.type == "cpu" and any(
            setup.is_save_step(step) for step in range(1, setup.num_steps)
        )

    def _decoded_bytes(self) -> int:
        """Return the bytes of the decoded images that the run keeps."""
        if self.recipe.data.keep == "none" or self.setup.source.splits["train"].is_streamed:
            return 0
        return sum(estimate_decoded_bytes(split) for split in self.setup.source.splits.values())


# --- text ----------------------------------------------------------------------------------------


def format_run_estimate(estimate: Mapping[str, Any]) -> str:
    """Format an estimate for the terminal.

    Args:
        estimate: the result of `estimate_run`.
    Returns: one block each for the run, memory, time and disk, then a table of other settings.
    """
    height, width = estimate["image_size"]
    device, disk = estimate["machine"]["device"], estimate["disk"]
    parameters, measured = estimate["parameters"], estimate["measured"]
    frozen = parameters["total"] - parameters["trained"]
    step = pluralize(measured["images_per_step"], "image")
    lines = [
        estimate["recipe"],
        f"  {estimate['architecture']}, {height} x {width} px, {estimate['precision']}, "
        f"{device['name']} ({device['type']})",
        f"  {parameters['total']:,} parameters"
        + (f", {frozen:,} frozen" if frozen else ", all trained"),
        f"  {estimate['num_images']:,} images, batch size {estimate['batch_size']}, "
        f"micro-batch {estimate['micro_batch'] or estimate['batch_size']}",
        f"  measured: {pluralize(measured['steps'], 'step')} of {step}, not compiled",
        "",
        *_format_memory(estimate["memory"]),
        "",
        *_format_time(estimate["time"]),
        "",
        "disk",
        _format_bytes("a checkpoint", disk["checkpoint"]),
        _format_bytes("the run", disk["needed"], f"of {format_bytes(disk['free_here'])} free here"),
        *_format_options(estimate),
    ]
    return "\n".join(lines)


def _format_memory(memory: Mapping[str, Any]) -> Iterator[str]:
    yield f"memory of the {memory['where']}"
    yield _format_bytes("training", memory["training"])
    if memory["checkpoint"]:
        yield _format_bytes("checkpoint", memory["checkpoint"], "while it is written")
    if memory["evaluation"] is not None:
        yield _format_bytes("evaluation", memory["evaluation"])
    yield _format_bytes("peak", memory["peak"])
    if memory["decoded_images"]:
        note = "on the GPU, in memory or in a cache file"
        yield _format_bytes("decoded images", memory["decoded_images"], note)


def _format_time(time: Mapping[str, Any]) -> Iterator[str]:
    yield "time"
    if time["features_seconds"]:
        yield _format_row(
            "features", format_duration(time["features_seconds"]), "once; then they are kept"
        )
    yield _format_row("training", f"{time['images_per_second']:,.1f}", "images/s")
    if time["evaluated_per_second"]:
        yield _format_row("evaluation", f"{time['evaluated_per_second']:,.1f}", "images/s")
    yield _format_row("an epoch", format_duration(time["epoch_seconds"]))
    steps = pluralize(time["run_steps"], "step")
    evaluations = pluralize(time["evaluations"], "evaluation")
    yield _format_row("the run", format_duration(time["run_seconds"]), f"{steps}, {evaluations}")


def _format_row(name: str, value: str, note: str = "") -> str:
    return f"  {name:14}{value:>12}  {note}".rstrip()


def _format_bytes(name: str, num_bytes: int, note: str = "") -> str:
    return _format_row(name, format_bytes(num_bytes), note)


def _format_options(estimate: Mapping[str, Any]) -> Iterator[str]:
    peak, rate = estimate["memory"]["peak"], estimate["time"]["images_per_second"]
    options = estimate["options"]
    if not options:
        return
    title = "other settings"
    width = max(len(title) - 2, *(len(option["change"]) for option in options))
    yield ""
    yield f"{title:{width + 2}}  {'peak':>10}        {'images/s':>10}"
    for option in options:
        memory = f"{format_bytes(option['peak']):>10}  x{option['peak'] / peak:<5.2f}"
        speed = option["images_per_second"]
        yield (
            f"  {option['change']:{width}}  {memory}{speed:>10,.1f}  x{speed / rate:.2f}"
        ).rstrip()
