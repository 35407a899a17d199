"""`finetune info RECIPE --plan`: what a run will take here, from a few of its steps.

A process of its own opens the run as `train` would and takes real steps in a folder that is removed
afterwards. Memory is added up from its parts; what another setting would need is rehearsed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.bench.flops import synchronise
from finetune.bench.ours import Ours
from finetune.bench.subprocess import Host
from finetune.commands.plan_options import Baseline, rehearsed
from finetune.console import bar, say
from finetune.data.feature_loader import AnyLoader, FeatureLoader
from finetune.data.image_store import Store
from finetune.errors import RecipeError, SetupError
from finetune.evaluation.evaluate import evaluate
from finetune.evaluation.features import at_once, pre_logits
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.environment import DTYPES
from finetune.text import counted
from finetune.training.memory import Need, num_bytes

__all__ = ["Trial", "describe", "forecast"]

_PARTS = {
    "program": "interpreter, libraries, threads",
    "weights": "",
    "gradients": "",
    "moments": "the optimiser's",
    "average": "optim.ema_decay",
    "images": "decoded and kept",
    "features": "computed once, in a file that is mapped",
    "snapshot": "a checkpoint that is being written",
}


def describe(found: Mapping[str, Any]) -> str:
    """Write a forecast for a terminal.

    Args:
        found: from `forecast`.
    Returns: a block each for the run, memory, time and disk, then a table of other settings.
    """
    height, width = found["image_size"]
    device = found["machine"]["device"]
    parameters = found["parameters"]
    frozen = parameters["total"] - parameters["trained"]
    lines = [
        found["recipe"],
        f"  {found['architecture']}, {height} x {width} px, {found['precision']}, "
        f"{device['name']} ({device['type']})",
        f"  {parameters['total']:,} parameters"
        + (f", {frozen:,} of them frozen" if frozen else ", all trained"),
        f"  {found['num_images']:,} images, {found['batch_size']} a step, "
        f"{found['micro_batch']} at once",
        "",
        *_memory(found),
        "",
        *_time(found["time"], found["steps"]),
        "",
        *_disk(found["disk"]),
        "",
        *_options(found),
    ]
    return "\n".join(lines)


def _memory(found: Mapping[str, Any]) -> Iterator[str]:
    memory = found["memory"]
    parts = memory["parts"]
    yield f"memory of the {memory['where']}, predicted"
    for name, about in _PARTS.items():
        if parts[name]:
            yield f"  {name:14}{_size(parts[name]):>10}  {about}".rstrip()
    each = f"{_size(parts['activations_per_image'])} an image"
    yield f"  {'activations':14}{_size(parts['activations']):>10}  {each}"
    for phase, number in memory["phases"].items():
        yield f"  {'in ' + phase:14}{_size(number):>10}"
    yield f"  {'peak':14}{_size(memory['peak']):>10}"
    measured = memory["measured"]
    if measured:
        training = memory["phases"]["training"]
        yield (
            f"  {'measured':14}{_size(measured):>10}  in the steps of this trial; "
            f"predicted for them {_percent(training / measured - 1)}"
        )


def _time(time: Mapping[str, Any], steps: int) -> Iterator[str]:
    turns = ", ".join(f"{rate:,.1f}" for rate in time["turns"])
    yield f"time, from {counted(len(time['turns']), 'turn')} of {counted(steps, 'step')}"
    if time["features_seconds"]:
        features = _duration(time["features_seconds"])
        yield f"  {'features':14}{features:>10}  once; then they are kept"
    yield f"  {'images/s':14}{time['images_per_second']:>10,.1f}  ({turns})"
    yield f"  {'input':14}{time['input_share']:>10.0%}  of a step"
    yield f"  {'evaluation':14}{time['evaluated_per_second']:>10,.1f}  images/s"
    yield f"  {'an epoch':14}{_duration(time['epoch_seconds']):>10}"
    evaluations = counted(time["evaluations"], "evaluation")
    yield (
        f"  {'the run':14}{_duration(time['run_seconds']):>10}  "
        f"{counted(time['run_steps'], 'step')}, {evaluations}"
    )


def _disk(disk: Mapping[str, int]) -> Iterator[str]:
    yield "disk"
    yield f"  {'a checkpoint':14}{_size(disk['checkpoint']):>10}"
    yield f"  {'the run':14}{_size(disk['needed']):>10}  of {_size(disk['free_here'])} free here"


def _options(found: Mapping[str, Any]) -> Iterator[str]:
    peak, rate = found["memory"]["peak"], found["time"]["images_per_second"]
    options = found["options"]
    if found["time"]["features_seconds"]:
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
        memory = f"{_size(option['peak']):>10}  x{option['peak'] / peak:<5.2f}"
        halves = f"halves {' and '.join(option['halves'])}" if option["halves"] else ""
        yield f"  {option['change']:{wide}}  {memory}{speed} {halves}".rstrip()


def _size(number: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:,.1f} {unit}"
    return f"{number:.0f} B"


def _percent(share: float) -> str:
    return f"{share:+.0%}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


_SECONDS = 3.0  # of steps, for each of the turns
_TURNS = 2
_MOST = 40  # steps of a turn
_WARMUP = 2
_MOST_EVALUATED = 1024


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
    with (
        tempfile.TemporaryDirectory(prefix="finetune-plan-") as folder,
        bar(total=1, start=0, shown=True) as shown,
    ):

        def advance(steps: int) -> None:
            shown.total = max(shown.total, shown.n + steps + 1)
            shown.update(steps)

        arguments = {"recipe": recipe, "folder": folder}
        with Host("plan", Trial, arguments, steps=advance, notice=say) as host:
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
            "accelerate launch"
        )
    if recipe.run.num_processes not in (None, 1):
        raise RecipeError(
            f"run.num_processes: info --plan looks at one process, and the recipe asks for "
            f"{recipe.run.num_processes}; add run.num_processes=1"
        )


class Trial(Ours):
    """A recipe's training on this process: a few steps, and what it would be like otherwise."""

    def __init__(self, line: Any, *, recipe: Recipe, folder: str) -> None:
        super().__init__(line, recipe=recipe, folder=folder)
        self.rates: dict[str, float] = {}
        # of features, where the run trains on them
        self.rows: FeatureLoader | None = None  # to evaluate
        self.width = self.feature_bytes = 0

    def measure(self) -> dict[str, Any]:
        """Time real steps and steps without input in turns, and an evaluation.

        Returns: "steps" of a turn, and "time" without what follows from the length of the run.
        """
        one = min(self._seconds_of_one() for _ in range(2))
        # between two steps, when the network, its moments and the images are all that is held
        self.resident = _resident()
        self.images = sum(self._kept(loader.store) for loader in self._feeds())
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
        images = min(max(int(3 * rate * _SECONDS), 1), _MOST_EVALUATED)
        self.rates = {"real": rate, "synthetic": max(without, rate)}
        self.rates["evaluation"] = self.evaluate(images=images)
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
                "evaluated_per_second": self.rates["evaluation"],
                "features_seconds": first,
                "epoch_seconds": setup.num_samples / rate,
                "run_seconds": first + seconds + evaluated / self.rates["evaluation"],
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
        self.trained = _rows(self.loader, width)
        self.rows = _rows(self.val_loader, width)
        counts = [len(split) for name, split in self.setup.source.splits.items() if name != "train"]
        number = self.setup.num_samples + sum(counts)
        self.feature_bytes, self.width = 4 * width * number, width
        return number / rate

    def evaluate(self, *, images: int) -> float:
        """Evaluate a number of images, or all rows of features. Returns: images a second."""
        self._evaluated = True  # a warm-up costs, and evaluation is never compiled
        if self.rows is None:
            return super().evaluate(images=images)
        size = self.recipe.data.eval_batch_size
        found = evaluate(self.trainer.evaluated(), self.rows, self.accelerator, batch_size=size)
        return float(found["images_per_second"])

    def _seconds_of_one(self) -> float:
        started = time.perf_counter()
        self._one_step()
        synchronise(self.device)
        return time.perf_counter() - started

    def predict(self) -> dict[str, Any]:
        """Add the memory up, and see what other settings would make of it.

        Returns: "parameters", "memory", "disk", "micro_batch" and "options".
        """
        network = self.accelerator.unwrap_model(self.trainer.model)
        cut = self.setup.sampler.micro_batches(0, micro_batch=self.trainer.micro_batch)
        self.part = max(len(indices) for _, indices in cut)
        given: dict[str, Any] = {"dtype": DTYPES[self.precision], "images": self.part}
        self.line.tick()
        # a classifier's step takes its features, in float32 and in the dtype it computes with
        need = Need(0, 8 * self.width) if self.width else rehearsed(self.setup, network, **given)
        evaluation = rehearsed(self.setup, network, train=False, **given)
        splits = self.setup.source.splits
        sizes = [len(splits[name]) for name in ("val", "test") if name in splits]
        parts = {**self._parts(network), "features": self.feature_bytes}
        checkpoint = sum(parts[key] for key in ("weights", "moments", "average"))
        on_host = self.device.type == "cpu"
        baseline = Baseline(
            setup=self.setup,
            network=network,
            dtype=DTYPES[self.precision],
            part=self.part,
            evaluated=min(self.recipe.data.eval_batch_size, max(sizes, default=0)),
            parts=parts,
            report=_report_bytes() if on_host else 0,
            need=need,
            evaluation=evaluation,
            real=self.rates["real"],
            synthetic=self.rates["synthetic"],
            in_memory=self.loader.store.images is not None,
            features_at_once=at_once(self.device, self.recipe.data) if self.width else 0,
            tick=self.line.tick,
        )
        phases = baseline.phases(parts, need.at(self.part))
        model = parts["average"] or parts["weights"]
        kept = self.recipe.run.keep_checkpoints + 2  # the best one, and one that is being written
        return {
            "parameters": {
                "total": sum(p.numel() for p in network.parameters()),
                "trained": sum(p.numel() for p in network.parameters() if p.requires_grad),
            },
            "micro_batch": self.part,
            "memory": {
                "where": "host" if on_host else "device",
                "parts": {
                    **parts,
                    "activations": need.at(self.part),
                    "activations_per_image": need.per_image,
                },
                "phases": phases,
                "peak": max(phases.values()),
                # of steps that compute the features anew there is nothing in a run
                "measured": None if self.width else self.peaks["host" if on_host else "device"],
            },
            "disk": {"checkpoint": checkpoint, "needed": kept * checkpoint + 2 * model},
            "options": baseline.options(),
        }

    def _parts(self, network: nn.Module) -> dict[str, int]:
        """Bytes of what is there in every step."""
        averages = [] if self.trainer.ema is None else self.trainer.ema.module.state_dict().values()
        moments = self.trainer.optimizer.optimizer.state.values()
        state = [value for each in moments for value in each.values() if torch.is_tensor(value)]
        kept = {
            "weights": num_bytes(network.state_dict().values()),
            "moments": num_bytes(state),
            "average": num_bytes(averages),
        }
        parts = {"program": 0, **kept, "images": self.images, "snapshot": 0}
        if self.device.type == "cpu":
            # interpreter, libraries, threads and what the allocator keeps
            parts["program"] = max(self.resident - sum(parts.values()), 0)
            if self._saves_before_the_end():  # it is written while training goes on
                parts["snapshot"] = sum(kept.values())
        trained = (p for p in network.parameters() if p.requires_grad)
        return {**parts, "gradients": num_bytes(trained)}

    def _feeds(self) -> list[Any]:
        """What `train` keeps open: its own images and those of validation."""
        return [self.loader, *([self.val_loader] if "val" in self.setup.source.splits else [])]

    def _kept(self, store: Store) -> int:
        """Bytes of decoded images, where this device's memory holds them."""
        images = store.images
        if images is None:
            return 0
        whole = [images] if isinstance(images, torch.Tensor) else images
        # not num_bytes: an image that is made when it is asked for has another one's id afterwards
        return sum(image.nbytes for image in whole if image.device.type == self.device.type)

    def _saves_before_the_end(self) -> bool:
        setup = self.setup
        return any(setup.saves_after(step) for step in range(1, setup.steps))


def _rows(loader: AnyLoader, width: int) -> FeatureLoader:
    """Features of zeros in the place of images; they take no memory."""
    split = loader.store.split
    values_ND = np.broadcast_to(np.zeros(width, np.float32), (len(split), width))
    return FeatureLoader(split, values_ND, num_classes=loader.num_classes, device=loader.device)


def _resident() -> int:
    """Bytes of host memory that this process holds, after what was freed is given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    import psutil  # type: ignore[import-untyped]  # Accelerate brings it

    return int(psutil.Process().memory_info().rss)


def _report_bytes() -> int:
    """What the libraries take that draw the report at the end of a run."""
    before = _resident()
    importlib.import_module("finetune.report.page")
    importlib.import_module("matplotlib.pyplot")
    return max(_resident() - before, 0)
