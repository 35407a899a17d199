"""Our own training, on each process of a launch, measured as `train` does it; and without input."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.bench.input_rate import input_rates
from finetune.bench.matrix_rate import Product, matrix_rate, products
from finetune.bench.timer import BATCHES_AHEAD, Clock, Loop
from finetune.data.feature_loader import AnyLoader, FeatureLoader
from finetune.data.image_store import Store
from finetune.data.loader import Loader
from finetune.evaluation.evaluate import evaluate
from finetune.models.head import set_train_mode
from finetune.models.profile import count_operations
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import DTYPES, describe_machine, precision_of
from finetune.training.build_state import build_trainer_state
from finetune.training.launch import launch
from finetune.training.meter import Meter
from finetune.training.micro_batch import settle_micro_batch
from finetune.training.setup import TrainingSetup, open_setup

__all__ = ["Ours", "over", "zeros"]

_MOST_EVALUATED = 4096  # images that are decoded for it, where there is no validation split
_TOP = 10  # operations of a profile
_PROFILED_STEPS = 3


class Ours(Loop):
    """A recipe's training on the processes of a launch, a number of steps at a time.

    Args:
        line: told of steps and notices.
        recipe: to be trained as `train` would.
        folder: for the run directory; whoever made it removes it.
    """

    def __init__(self, line: Any, *, recipe: Recipe, folder: str) -> None:
        self.line = line
        self.recipe = recipe
        self.folder = Path(folder)
        self._evaluated = False

    @property
    def setup(self) -> TrainingSetup:
        """The setup that is trained."""
        return self.trainer.setup

    def prepare(self) -> dict[str, Any]:
        """Open the setup, take the first step, and count what one does.

        Returns: "device", "precision", "compiled", "batch_size", "micro_batch", "image_size",
            "num_images", "of_features" (whether `train` would compute features once instead),
            "seconds_to_first_step", "operations" of a step, "machine".
        """
        self._open()
        self.val_loader = _evaluated(self.setup)
        clock = self._one_step()
        # The network itself: DDP and compilation have nothing to say about its layers.
        network = self.accelerator.unwrap_model(self.trainer.model)
        world = self.accelerator.num_processes
        self.operations = world * count_operations(self._one_step)  # each has its share
        self.products: Counter[Product] = products(network, self._one_step)
        return {
            "device": self.device.type,
            "precision": self.precision,
            "compiled": self.trainer.compiled,
            "batch_size": self.recipe.data.batch_size,
            "micro_batch": self.trainer.micro_batch,
            "image_size": list(self.setup.preprocessing.image_size),
            "num_images": self.setup.num_samples,
            "of_features": self.trainer.gives_features,
            "architecture": self.setup.built.architecture,
            "augmentation": self.setup.train_pipeline.sentence,
            "seconds_to_first_step": clock.alive,
            "operations": self.operations,
            "machine": describe_machine(self.device, world) | {"distributed": self._distributed()},
        }

    def _open(self) -> None:
        """Open the setup as `train` does, up to its first step."""
        run = RunDir(self.folder / "run")
        self.accelerator = launch(self.recipe.run, out=run.path)
        self.device = self.accelerator.device
        notice = self.line.notice
        setup = open_setup(self.recipe, device=self.device, notice=notice, progress=False)
        self.trainer = build_trainer_state(setup, self.accelerator, run)
        if self.trainer.main:
            run.open()
        self.precision = precision_of(self.accelerator)
        self.loader = setup.loader(
            setup.source.splits["train"], train=True, dtype=DTYPES[self.precision]
        )
        labels = self.loader.store.split.labels
        self.trainer.setup = setup.with_num_samples(len(labels), labels)
        self.trained: AnyLoader = self.loader
        distillation = self.trainer.distillation
        if distillation is not None and distillation.caches:
            distillation.keep(zeros(self.loader, distillation.width))
            notice("distill: train computes the teacher's answers once; here they take no time")
        settle_micro_batch(self.trainer, self.loader, lambda work: work())
        self.meter = Meter(self.device, 0.0, distills=distillation is not None)
        self.trainer.go_on(self.meter)

    def _distributed(self) -> str | None:
        """The way in which the network is spread over processes."""
        if self.accelerator.num_processes == 1:
            return None
        return "FSDP" if self.trainer.sharded else "DDP"

    def train(self, *, warmup: int, steps: int, synthetic: bool = False) -> float:
        """Train on; `synthetic`: the same batches of one step over and over, ready on the device.

        Returns: images a second, without the steps of the warm-up.
        """
        store = self.trained.store
        if store.images is None and not synthetic:
            warmup += store.workers * BATCHES_AHEAD
        clock = Clock(self.device, warmup=warmup, steps=steps, tick=self.line.tick)
        set_train_mode(self.trainer.model)
        (self._synthetic if synthetic else self._real)(clock)
        return self.recipe.data.batch_size * steps / clock.seconds

    def _real(self, clock: Clock) -> None:
        done = self.trainer.counters.step
        with contextlib.closing(self._batches(clock.warmup + clock.steps)) as steps:
            for number, batches in steps:
                self.trainer.step(number, batches, self.meter)
                done += 1
                if done % self.recipe.run.log_every == 0:
                    self.trainer.log(self.meter)
                clock.step()

    def _synthetic(self, clock: Clock) -> None:
        with contextlib.closing(self._batches(1)) as steps:
            _, batches = next(steps)
            kept = list(batches)
        for _ in range(clock.warmup + clock.steps):
            self.trainer.step(len(kept), iter(kept), self.meter)
            clock.step()

    def _batches(self, steps: int) -> Any:
        first = self.trainer.counters.step
        return self.trained.train(
            self.setup.sampler,
            range(first, first + steps),
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            micro_batch=self.trainer.micro_batch,
        )

    def _one_step(self) -> Clock:
        clock = Clock(self.device, warmup=1, steps=0, tick=self.line.tick)
        self._real(clock)
        return clock

    def evaluate(self, *, images: int) -> float:
        """Evaluate a number of images, or all where there are fewer. Returns: images a second."""
        batch_size = self.recipe.data.eval_batch_size

        def evaluated(number: int) -> dict[str, Any]:
            loader = _first(self.val_loader, number)
            network = self.trainer.evaluated()
            return evaluate(network, loader, self.accelerator, batch_size=batch_size)

        if not self._evaluated:  # the first one takes the memory that the others use again
            evaluated(batch_size)
            self._evaluated = True
        return float(evaluated(images)["images_per_second"])

    def matrix_rate(self) -> float | None:
        """Measure the machine, with all processes at once.

        Returns: operations a second at this network's shapes and dtype.
        """
        self.accelerator.wait_for_everyone()
        own = matrix_rate(self.products, dtype=DTYPES[self.precision], device=self.device)
        if own is None:
            return None
        rate = torch.tensor(own, device=self.device)
        return float(torch.as_tensor(self.accelerator.reduce(rate, "sum")))

    def inputs(self, *, images: int, repeats: int) -> dict[str, Any]:
        """Read images as this training does, and only decode them: see `input_rates`."""
        data, split = self.recipe.data, self.loader.store.split
        counts = {"workers": self.loader.store.workers, "images": images, "repeats": repeats}
        return input_rates(split, batch_size=data.batch_size, **counts)

    def profile(self, *, folder: str) -> dict[str, Any]:
        """Trace a few steps into trace.json, which chrome://tracing and Perfetto open.

        Returns: "trace", "steps", and the "operations" that cost the most by themselves: "name",
            "calls", "milliseconds" a step, "share".
        """
        from torch.profiler import ProfilerActivity, profile

        is_gpu = self.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
        self._one_step()
        with profile(activities=kinds) as profiler:
            for _ in range(_PROFILED_STEPS):
                self._one_step()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        key = "self_device_time_total" if is_gpu else "self_cpu_time_total"
        events = sorted(profiler.key_averages(), key=lambda each: -float(getattr(each, key)))
        total = sum(float(getattr(each, key)) for each in events) or 1.0
        rows = [
            {
                "name": each.key,
                "calls": round(each.count / _PROFILED_STEPS, 1),
                "milliseconds": getattr(each, key) / 1000 / _PROFILED_STEPS,
                "share": getattr(each, key) / total,
            }
            for each in events[:_TOP]
        ]
        return {"trace": str(trace), "steps": _PROFILED_STEPS, "operations": rows}


def _evaluated(setup: TrainingSetup) -> Loader:
    """Images to evaluate: validation's, as in training, or else some of another split."""
    splits = setup.source.splits
    split = next(splits[name] for name in ("val", "test", "train") if len(splits.get(name, ())))
    if split.name != "val":
        split = split.subset(np.arange(min(len(split), _MOST_EVALUATED)))
    return setup.loader(split, train=False)


def _first(loader: Loader, images: int) -> Loader:
    """The first images of a split."""
    store = loader.store
    number = min(images, len(store.split))
    first = Store(
        store.split.subset(np.arange(number)),
        None if store.images is None else store.images[:number],
        workers=store.workers,
        timeout_seconds=store.timeout_seconds,
        image_bytes=store.image_bytes,
        device=loader.device,
        size=store.size,
    )
    return over(loader, first)


def zeros(loader: Loader, width: int) -> FeatureLoader:
    """Vectors of zeros in the place of images; they take no memory."""
    split = loader.store.split
    values_ND = np.broadcast_to(np.zeros(width, np.float32), (len(split), width))
    return FeatureLoader(split, values_ND, num_classes=loader.num_classes, device=loader.device)


def over(loader: Loader, store: Store) -> Loader:
    """The same loader of other images."""
    return Loader(
        store,
        loader.pipeline,
        num_classes=loader.num_classes,
        device=loader.device,
        dtype=loader.dtype,
    )
