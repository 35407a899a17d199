"""`finetune info RECIPE --plan`: memory, time and disk of a run, from a few of its steps.

A process of its own opens the run as `train` would and takes real steps in a folder that is removed
afterwards. Other settings are overrides of the recipe, sent through the same predictor.
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

from finetune.bench.ours import Ours, zeros
from finetune.bench.predictor import Measured, Prediction, Predictor
from finetune.bench.subprocess import Host
from finetune.bench.timer import synchronise
from finetune.console import bar, say
from finetune.data.feature_loader import FeatureLoader
from finetune.data.image_store import Store
from finetune.errors import FinetuneError, RecipeError, SetupError
from finetune.evaluation.evaluate import evaluate
from finetune.evaluation.features import pre_logits
from finetune.models.profile import count_parameters, depth
from finetune.recipe.load import Recipe, load_recipe, parse_recipe
from finetune.run.environment import DTYPES
from finetune.text import byte_size, counted, duration

__all__ = ["Trial", "decoded_bytes", "describe", "forecast", "other_settings"]

_PARTS = {
    "program": "interpreter, libraries, threads",
    "weights": "",
    "gradients": "",
    "moments": "the optimiser's",
    "average": "optim.ema_decay",
    "teacher": "distill.teacher",
    "images": "decoded and kept",
    "features": "computed once, in memory",
    "snapshot": "a checkpoint that is being written",
}


def describe(plan: Mapping[str, Any]) -> str:
    """Write a forecast for a terminal.

    Args:
        plan: from `forecast`.
    Returns: a block each for the run, memory, time and disk, then a table of other settings.
    """
    height, width = plan["image_size"]
    device = plan["machine"]["device"]
    parameters, disk = plan["parameters"], plan["disk"]
    frozen = parameters["total"] - parameters["trained"]
    lines = [
        plan["recipe"],
        f"  {plan['architecture']}, {height} x {width} px, {plan['precision']}, "
        f"{device['name']} ({device['type']})",
        f"  {parameters['total']:,} parameters"
        + (f", {frozen:,} of them frozen" if frozen else ", all trained"),
        f"  {plan['num_images']:,} images, {plan['batch_size']} a step, "
        f"{plan['micro_batch']} at once",
        "",
        *_memory(plan),
        "",
        *_time(plan["time"], plan["steps"]),
        "",
        "disk",
        _bytes("a checkpoint", disk["checkpoint"]),
        _bytes("the run", disk["needed"], f"of {byte_size(disk['free_here'])} free here"),
        "",
        *_options(plan),
    ]
    return "\n".join(lines)


def _memory(plan: Mapping[str, Any]) -> Iterator[str]:
    memory = plan["memory"]
    parts, phases, measured = memory["parts"], memory["phases"], memory["measured"]
    yield f"memory of the {memory['where']}, predicted"
    for name, about in _PARTS.items():
        if parts[name]:
            yield _bytes(name, parts[name], about)
    each = f"{byte_size(parts['activations_per_image'])} an image"
    yield _bytes("activations", parts["activations"], each)
    for phase, number in phases.items():
        yield _bytes(f"in {phase}", number)
    yield _bytes("peak", memory["peak"])
    if measured:
        off = f"{phases['training'] / measured - 1:+.0%}"
        yield _bytes("measured", measured, f"in the steps of this trial; predicted for them {off}")


def _time(time: Mapping[str, Any], steps: int) -> Iterator[str]:
    turns = ", ".join(f"{rate:,.1f}" for rate in time["turns"])
    facts = {
        "features": (duration(time["features_seconds"]), "once; then they are kept"),
        "images/s": (f"{time['images_per_second']:,.1f}", f"({turns})"),
        "input": (f"{time['input_share']:.0%}", "of a step"),
        "evaluation": (f"{time['evaluated_per_second']:,.1f}", "images/s"),
        "an epoch": (duration(time["epoch_seconds"]), ""),
        "the run": (
            duration(time["run_seconds"]),
            f"{counted(time['run_steps'], 'step')}, {counted(time['evaluations'], 'evaluation')}",
        ),
    }
    if not time["features_seconds"]:
        del facts["features"]
    yield f"time, from {counted(len(time['turns']), 'turn')} of {counted(steps, 'step')}"
    for name, (value, about) in facts.items():
        yield f"  {name:14}{value:>12}  {about}".rstrip()


def _bytes(name: str, number: int, about: str = "") -> str:
    return f"  {name:14}{byte_size(number):>10}  {about}".rstrip()


def _options(plan: Mapping[str, Any]) -> Iterator[str]:
    peak, rate = plan["memory"]["peak"], plan["time"]["images_per_second"]
    options = plan["options"]
    if plan["time"]["features_seconds"]:
        yield "only the classifier is trained: no other setting was tried"
        return
    if not options:
        yield "no setting that was tried takes less memory or time"
        return
    title = "what would be less"
    wide = max(len(title) - 2, *(len(option["change"]) for option in options))
    yield f"{title:{wide + 2}}  {'peak':>10}        {'images/s':>10}"
    for option in options:
        faster = option["images_per_second"]
        speed = f"{faster:>10,.1f}  x{faster / rate:<5.2f}" if faster else f"{'-':>10}        "
        memory = f"{byte_size(option['peak']):>10}  x{option['peak'] / peak:<5.2f}"
        halves = f"halves {' and '.join(option['halves'])}" if option["halves"] else ""
        yield f"  {option['change']:{wide}}  {memory}{speed} {halves}".rstrip()


_SECONDS = 3.0  # of steps, for each of the turns
_TURNS = 2
_MOST = 40  # steps of a turn
_WARMUP = 2
_MOST_EVALUATED = 1024
_WORTH = 0.98  # of memory or time: what leaves more is no line
_INPUT_SHARE = 0.1  # of a step, from which on the input is worth a line


def forecast(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Predict memory and time of a recipe's training on this machine, from a short measurement.

    Args:
        path: of the recipe.
        overrides: `section.key=value` each.
    Returns: "parameters" {"total", "trained"}; "memory" in bytes {"parts", "phases", "peak",
        "measured", "where"}; "time" {"images_per_second", "turns", "input_share",
        "evaluated_per_second", "features_seconds" (0 where there are none to compute first),
        "epoch_seconds", "run_seconds", "evaluations"}; "disk" in bytes; "options", each {"change",
        "peak", "images_per_second", "halves"}; and what was measured.
    Raises: FinetuneError of the kind that DESIGN's exit codes list.
    """
    recipe = load_recipe(path, overrides)
    _check(recipe)
    if recipe.optim.stages:
        say("optim.stages: what follows is of the training after them")
    with bar(total=1, start=0, shown=True) as shown:

        def advance(steps: int) -> None:
            shown.total = max(shown.total, shown.n + steps + 1)
            shown.update(steps)

        with Host("plan", Trial, {"recipe": recipe}, steps=advance, notice=say) as host:
            shown.set_description("the first steps")
            facts = host.ask("prepare")
            shown.set_description("steps")
            measured = host.ask("measure")
            shown.set_description("memory")
            predicted = host.ask("predict")
    kept = ("architecture", "device", "precision", "batch_size", "image_size", "num_images")
    free = shutil.disk_usage(".").free
    return {
        "recipe": path,
        **{key: facts[key] for key in kept},
        "augmentation": facts["augmentation"],
        "machine": facts["machine"],
        **measured,
        **predicted,
        "disk": {**predicted["disk"], "free_here": free},
    }


def _check(recipe: Recipe) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise SetupError(
            f"info --plan: looks at one process, and {started} were started; run it without "
            "accelerate launch",
            code="setup.one_process",
        )
    if recipe.run.num_processes not in (None, 1):
        raise RecipeError(
            f"run.num_processes: info --plan looks at one process, and the recipe asks for "
            f"{recipe.run.num_processes}; add run.num_processes=1",
            code="recipe.conflict",
        )


class Trial(Ours):
    """A recipe's training on this process: a few steps, and what it would be like otherwise."""

    def __init__(self, line: Any, *, recipe: Recipe, folder: str) -> None:
        super().__init__(line, recipe=recipe, folder=folder)
        # of features, where the run trains on them
        self.rows: FeatureLoader | None = None  # to evaluate
        self.width = self.feature_bytes = 0

    def measure(self) -> dict[str, Any]:
        """Time real steps and steps without input in turns, and an evaluation.

        Returns: "steps" of a turn, and "time" without what follows from the length of the run.
        """
        one = min(self._seconds_of_one() for _ in range(2))
        # between two steps, when the network, its moments and the images are all that is held
        on_host = self.device.type == "cpu"
        resident = _resident() if on_host else 0
        loaders = [self.loader, *([self.val_loader] if "val" in self.setup.source.splits else [])]
        images = sum(decoded_bytes(loader.store, self.device) for loader in loaders)
        first = 0.0
        if self.trainer.gives_features:
            first = self._seconds_of_features(one)
            one = min(self._seconds_of_one() for _ in range(2))
        steps = max(1, min(_MOST, int(_SECONDS / one)))
        real, synthetic = [], []
        for _ in range(_TURNS if steps > 1 else 1):
            real.append(self.train(warmup=min(steps, _WARMUP), steps=steps))
            synthetic.append(self.train(warmup=1, steps=steps, synthetic=True))
        # before anything else that takes memory
        self.peaks = self.memory()
        rate, without = (sum(rates) / len(rates) for rates in (real, synthetic))
        count = min(max(int(3 * rate * _SECONDS), 1), _MOST_EVALUATED)
        evaluated_per_second = self.evaluate(images=count)
        measured = Measured(
            real=rate,
            synthetic=max(without, rate),
            resident=resident,
            images=images,
            report=_report_bytes() if on_host else 0,
            features=self.feature_bytes,
            width=self.width,
            in_memory=self.loader.store.images is not None,
        )
        self.measured = self._with_teacher(measured)
        setup = self.setup
        evaluations = sum(setup.evaluates_after(step) for step in range(1, setup.steps + 1))
        splits = {name: len(split) for name, split in setup.source.splits.items()}
        val = splits.get("val", 0)
        evaluated = (evaluations + 1) * val + splits.get("test", 0)
        seconds = setup.steps * self.recipe.data.batch_size / rate
        return {
            "steps": steps,
            "time": {
                "images_per_second": rate,
                "turns": real,
                "input_share": max(0.0, 1 - rate / without),
                "evaluated_per_second": evaluated_per_second,
                "features_seconds": first,
                "epoch_seconds": setup.num_samples / rate,
                "run_seconds": first + seconds + evaluated / evaluated_per_second,
                "run_steps": setup.steps,
                "evaluations": evaluations,
            },
        }

    def _seconds_of_features(self, one: float) -> float:
        """Estimate how long all features take; from here on, rows of zeros stand for them.

        Args:
            one: seconds of a step through the whole network.
        """
        images = int(self.recipe.data.batch_size / one * _SECONDS)
        rate = self.evaluate(images=min(max(images, 1), _MOST_EVALUATED))
        (batch, *_) = self.val_loader.once(batch_size=1, world=len(self.val_loader.labels))
        with torch.inference_mode():
            width = pre_logits(self.setup.built.model, batch.images_BCHW).shape[1]
        self.trained = zeros(self.loader, width)
        self.rows = zeros(self.val_loader, width)
        counts = [len(split) for name, split in self.setup.source.splits.items() if name != "train"]
        number = self.setup.num_samples + sum(counts)
        self.feature_bytes, self.width = 4 * width * number, width
        return number / rate

    def _with_teacher(self, measured: Measured) -> Measured:
        """Add a teacher beside each step, or its answers where they are computed once."""
        distillation = self.trainer.distillation
        if distillation is None:
            return measured
        answers = 4 * distillation.width * self.setup.num_samples * distillation.caches
        return dataclasses.replace(
            measured,
            features=measured.features + answers,
            teacher=distillation.weight_bytes,
            teacher_pass=distillation.need(self.recipe.data.batch_size),
        )

    def evaluate(self, *, images: int) -> float:
        """Evaluate a number of images, or all rows of features. Returns: images a second."""
        self._evaluated = True  # a warm-up costs, and evaluation is never compiled
        if self.rows is None:
            return super().evaluate(images=images)
        size = self.recipe.data.eval_batch_size
        metrics = evaluate(self.trainer.evaluated(), self.rows, self.accelerator, batch_size=size)
        return float(metrics["images_per_second"])

    def _seconds_of_one(self) -> float:
        started = time.perf_counter()
        self._one_step()
        synchronise(self.device)
        return time.perf_counter() - started

    def predict(self) -> dict[str, Any]:
        """Predict this run, and the same run with other settings.

        Returns: "parameters", "memory", "disk", "micro_batch" and "options".
        """
        network = self.accelerator.unwrap_model(self.trainer.model)
        predictor = Predictor(
            self.setup,
            network,
            dtype=DTYPES[self.precision],
            micro_batch=self.trainer.micro_batch,
            measured=self.measured,
            tick=self.line.tick,
        )
        own = predictor.predict(self.recipe)
        where = "host" if self.device.type == "cpu" else "device"
        kept = self.recipe.run.keep_checkpoints + 2  # the best one, and one that is being written
        model = own.parts["average"] or own.parts["weights"]
        return {
            "parameters": {
                "total": count_parameters(network.parameters()),
                "trained": count_parameters(p for p in network.parameters() if p.requires_grad),
            },
            "micro_batch": own.micro_batch,
            "memory": {
                "where": where,
                "parts": {
                    **own.parts,
                    "activations": own.need.at(own.micro_batch),
                    "activations_per_image": own.need.per_image,
                },
                "phases": own.phases,
                "peak": own.peak,
                # of steps that compute the features anew there is nothing in a run
                "measured": None if self.width else self.peaks[where],
            },
            "disk": {"checkpoint": own.checkpoint, "needed": kept * own.checkpoint + 2 * model},
            # a classifier that is trained on features takes next to nothing
            "options": [] if self.width else other_settings(predictor, own, network),
        }


def other_settings(
    predictor: Predictor, own: Prediction, network: nn.Module
) -> list[dict[str, Any]]:
    """Predict other settings of a run.

    Args:
        predictor: of the run.
        own: its prediction of the run's recipe.
        network: of the run.
    Returns: those that take less memory or time, the most helpful first, each {"change", "peak" in
        bytes, "images_per_second" or None, "halves": "memory", "time", both or neither}.
    """
    recipe, rate = predictor.setup.recipe, predictor.measured.real
    gains, options = [], []
    for change, overrides, free_input in _changes(predictor, own, network):
        try:
            changed = parse_recipe(recipe.to_yaml(), overrides=overrides)
            other = predictor.predict(changed, free_input=free_input)
        except (FinetuneError, AssertionError):  # not with this network
            continue
        faster = other.images_per_second
        gain = min(other.peak / own.peak, rate / (faster or rate))
        if gain > _WORTH:
            continue
        halves = {"memory": 2 * other.peak <= own.peak, "time": (faster or 0) >= 2 * rate}
        gains.append(gain)
        options.append(
            {
                "change": change,
                "peak": other.peak,
                "halves": [name for name, is_half in halves.items() if is_half],
                "images_per_second": faster,
            }
        )
    return [options[place] for place in sorted(range(len(gains)), key=gains.__getitem__)]


def _changes(
    predictor: Predictor, own: Prediction, network: nn.Module
) -> Iterator[tuple[str, list[str], bool]]:
    """Settings to try: for the user, as overrides of the recipe, and if they free the input."""
    recipe, measured = predictor.setup.recipe, predictor.measured
    overrides = []
    if hasattr(network, "set_grad_checkpointing"):
        overrides.append("model.grad_checkpointing=true")
    if recipe.model.freeze == "none":
        overrides += [f"model.freeze={sum(depth(network)) // 2}", "model.freeze=backbone"]
    if predictor.dtype == torch.float32:
        overrides.append("run.precision=bf16")
    yield from ((override, [override], False) for override in overrides)
    height, width = predictor.setup.preprocessing.image_size
    size = _smaller(network, height, width)
    if size != [height, width]:
        override = f"model.image_size={size[0] if size[0] == size[1] else size}"
        is_named = str(height) in (recipe.data.train or "")
        yield override + (" and in data.train" if is_named else ""), [override], False
    overrides = [
        f"data.micro_batch={-(-own.micro_batch // 2)}",
        f"data.eval_batch_size={max(own.evaluated // 2, 1)}",
    ]
    yield from ((override, [override], False) for override in overrides)
    yield "optim.name=sgd", ["optim.name=sgd", "optim.betas=null", "optim.args={}"], False
    yield "data.keep=none", ["data.keep=none"], False
    if 1 - measured.real / measured.synthetic > _INPUT_SHARE:
        if measured.in_memory:
            yield "an input that costs nothing (data.train)", [], True
        else:
            yield "data.keep=memory", ["data.keep=memory"], True


def _smaller(network: nn.Module, height: int, width: int) -> list[int]:
    """The image size with about half as many pixels that patches divide."""
    patch = getattr(getattr(network, "patch_embed", None), "patch_size", 32)
    step = max(patch) if isinstance(patch, tuple | list) else int(patch)
    return [max(int(side / 2**0.5 / step), 1) * step for side in (height, width)]


def decoded_bytes(store: Store, device: torch.device) -> int:
    """Bytes of decoded images, where this device's memory holds them."""
    images = store.images
    if images is None:
        return 0
    return images.nbytes if images.device.type == device.type else 0


def _resident() -> int:
    """Bytes of host memory that this process holds, after what was freed is given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    import psutil  # type: ignore[import-untyped]  # Accelerate brings it

    return int(psutil.Process().memory_info().rss)


def _report_bytes() -> int:
    """Bytes of the libraries that draw the report at the end of a run."""
    before = _resident()
    importlib.import_module("finetune.report.page")
    importlib.import_module("matplotlib.pyplot")
    return max(_resident() - before, 0)
