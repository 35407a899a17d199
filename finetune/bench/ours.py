"""Measure the training loop of `finetune train`, with real and synthetic input."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.bench.input_rate import input_rates
from finetune.bench.matrix_rate import MatMul, list_matmuls, matrix_rate
from finetune.bench.timer import PREFETCH_FACTOR, MeasuredLoop, StepTimer
from finetune.data.feature_loader import AnyLoader, FeatureLoader
from finetune.data.loader import ImageLoader
from finetune.data.pixel_store import PixelStore
from finetune.evaluation.evaluator import evaluate
from finetune.log import logger
from finetune.models.freeze import set_train_mode
from finetune.models.summary import count_flops
from finetune.precision import DTYPES, accelerator_precision
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import collect_environment
from finetune.training.accelerator import create_accelerator
from finetune.training.batch_size_finder import resolve_micro_batch_size
from finetune.training.build_state import build_trainer_state
from finetune.training.meter import TrainMeter
from finetune.training.setup import TrainingSetup, build_setup

__all__ = ["FinetuneLoop", "with_store", "zero_features"]

_MAX_EVALUATED_IMAGES = 4096  # decode at most this many images if there is no validation split
_NUM_PROFILED_OPERATIONS = 10  # operations in a profile
_PROFILED_STEPS = 3


class FinetuneLoop(MeasuredLoop):
    """Trains a recipe on all processes of a launch, some steps per call.

    Args:
        progress: the `ProgressReporter` that receives steps and messages.
        recipe: the recipe, trained as by `finetune train`.
        folder: folder for the run directory; the caller removes it.
    """

    def __init__(self, progress: Any, *, recipe: Recipe, folder: str) -> None:
        self.progress = progress
        self.recipe = recipe
        self.folder = Path(folder)
        self._has_evaluated = False

    @property
    def setup(self) -> TrainingSetup:
        """The training setup."""
        return self.trainer.setup

    def prepare(self) -> dict[str, Any]:
        """Build the setup, run the first step, and count the operations of a step.

        Returns: a dict with keys "device", "precision", "compiled", "batch_size", "micro_batch",
            "image_size", "num_images", "of_features" (True if `train` would cache the features),
            "seconds_to_first_step", "operations" (per step) and "machine".
        """
        self._open_training()
        self.val_loader = _eval_loader(self.setup)
        clock = self._one_step()
        # Unwrap DDP and torch.compile to reach the layers.
        network = self.accelerator.unwrap_model(self.trainer.model)
        world = self.accelerator.num_processes
        self.operations = world * count_flops(self._one_step)  # each process runs its share
        self.products: Counter[MatMul] = list_matmuls(network, self._one_step)
        return {
            "device": self.device.type,
            "precision": self.precision,
            "compiled": self.trainer.is_compiled,
            "batch_size": self.recipe.data.batch_size,
            "micro_batch": self.trainer.micro_batch_size,
            "image_size": list(self.setup.preprocessing.image_size),
            "num_images": self.setup.num_samples,
            "of_features": self.trainer.uses_cached_features,
            "architecture": self.setup.built.architecture,
            "augmentation": self.setup.train_pipeline.transform_spec,
            "seconds_to_first_step": clock.seconds_to_first_step,
            "operations": self.operations,
            "machine": collect_environment(self.device, world)
            | {"distributed": self._distributed_strategy()},
        }

    def _open_training(self) -> None:
        """Build the setup and trainer as `train` does before its first step."""
        run = RunDir(self.folder / "run")
        self.accelerator = create_accelerator(self.recipe.run, out=run.path)
        self.device = self.accelerator.device
        setup = build_setup(self.recipe, device=self.device, show_progress=False)
        self.trainer = build_trainer_state(setup, self.accelerator, run)
        if self.trainer.is_main_process:
            run.open()
        self.precision = accelerator_precision(self.accelerator)
        self.loader = setup.build_loader(
            setup.source.splits["train"], train=True, dtype=DTYPES[self.precision]
        )
        labels = self.loader.store.split.labels
        self.trainer.setup = setup.with_num_samples(len(labels), labels)
        self.active_loader: AnyLoader = self.loader
        distillation = self.trainer.distillation
        if distillation is not None and distillation.caches_outputs:
            distillation.use_cached_outputs(zero_features(self.loader, distillation.output_width))
            logger.info(
                "distill: finetune train computes the teacher's outputs once; this benchmark does "
                "not time that"
            )
        resolve_micro_batch_size(self.trainer, self.loader, lambda work: work())
        self.meter = TrainMeter(self.device, 0.0, has_teacher=distillation is not None)
        self.trainer.start(self.meter)

    def _distributed_strategy(self) -> str | None:
        """Return "FSDP" or "DDP", or None for one process."""
        if self.accelerator.num_processes == 1:
            return None
        return "FSDP" if self.trainer.is_sharded else "DDP"

    def train(self, *, warmup: int, steps: int, synthetic: bool = False) -> float:
        """Continue training.

        Args:
            warmup, steps: number of untimed steps, then of timed steps.
            synthetic: repeat the batches of a single step, which stay on the device.
        Returns: images per second, without the warm-up.
        """
        store = self.active_loader.store
        if store.images is None and not synthetic:
            warmup += store.num_workers * PREFETCH_FACTOR
        clock = StepTimer(self.device, warmup=warmup, steps=steps, tick=self.progress.tick)
        set_train_mode(self.trainer.model)
        (self._train_on_fixed_batches if synthetic else self._train_on_data)(clock)
        return self.recipe.data.batch_size * steps / clock.seconds

    def _train_on_data(self, clock: StepTimer) -> None:
        done = self.trainer.counters.step
        with contextlib.closing(self._planned_steps(clock.warmup + clock.steps)) as steps:
            for number, batches in steps:
                self.trainer.train_step(number, batches, self.meter)
                done += 1
                if done % self.recipe.run.log_every == 0:
                    self.trainer.log_training(self.meter)
                clock.step()

    def _train_on_fixed_batches(self, clock: StepTimer) -> None:
        with contextlib.closing(self._planned_steps(1)) as steps:
            _, batches = next(steps)
            kept = list(batches)
        for _ in range(clock.warmup + clock.steps):
            self.trainer.train_step(len(kept), iter(kept), self.meter)
            clock.step()

    def _planned_steps(self, steps: int) -> Any:
        first = self.trainer.counters.step
        return self.active_loader.train_steps(
            self.setup.sampler,
            range(first, first + steps),
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            micro_batch_size=self.trainer.micro_batch_size,
        )

    def _one_step(self) -> StepTimer:
        clock = StepTimer(self.device, warmup=1, steps=0, tick=self.progress.tick)
        self._train_on_data(clock)
        return clock

    def evaluate(self, *, images: int) -> float:
        """Evaluate at most `images` images. Returns: images per second."""
        batch_size = self.recipe.data.eval_batch_size

        def evaluated(number: int) -> dict[str, Any]:
            loader = _first_images(self.val_loader, number)
            network = self.trainer.eval_model()
            return evaluate(network, loader, self.accelerator, batch_size=batch_size)

        if not self._has_evaluated:  # the first evaluation allocates memory
            evaluated(batch_size)
            self._has_evaluated = True
        return float(evaluated(images)["images_per_second"])

    def matrix_rate(self) -> float | None:
        """Measure matrix multiplication on all processes at the same time.

        Returns: operations per second at this network's shapes and dtype; see `matrix_rate`.
        """
        self.accelerator.wait_for_everyone()
        own = matrix_rate(self.products, dtype=DTYPES[self.precision], device=self.device)
        if own is None:
            return None
        rate = torch.tensor(own, device=self.device)
        return float(torch.as_tensor(self.accelerator.reduce(rate, "sum")))

    def inputs(self, *, images: int, repeats: int) -> dict[str, Any]:
        """Compare loading with workers to decoding alone, see `input_rates`."""
        data, split = self.recipe.data, self.loader.store.split
        counts = {"workers": self.loader.store.num_workers, "images": images, "repeats": repeats}
        return input_rates(split, batch_size=data.batch_size, **counts)

    def profile(self, *, folder: str) -> dict[str, Any]:
        """Trace a few steps into trace.json, for chrome://tracing or Perfetto.

        Returns: a dict with keys "trace" (the file), "steps" and "operations" (those with the most
            self time), each {"name", "calls" and "milliseconds" per step, "share"}.
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
            for each in events[:_NUM_PROFILED_OPERATIONS]
        ]
        return {"trace": str(trace), "steps": _PROFILED_STEPS, "operations": rows}


def _eval_loader(setup: TrainingSetup) -> ImageLoader:
    """Return a loader of the validation images, or of some images of another split."""
    splits = setup.source.splits
    split = next(splits[name] for name in ("val", "test", "train") if len(splits.get(name, ())))
    if split.name != "val":
        split = split.subset(np.arange(min(len(split), _MAX_EVALUATED_IMAGES)))
    return setup.build_loader(split, train=False)


def _first_images(loader: ImageLoader, images: int) -> ImageLoader:
    """Return a loader of the first images of a split."""
    store = loader.store
    number = min(images, len(store.split))
    first = PixelStore(
        store.split.subset(np.arange(number)),
        None if store.images is None else store.images[:number],
        num_workers=store.num_workers,
        timeout_seconds=store.timeout_seconds,
        bytes_per_image=store.bytes_per_image,
        device=loader.device,
        common_size=store.common_size,
    )
    return with_store(loader, first)


def zero_features(loader: ImageLoader, width: int) -> FeatureLoader:
    """Return a loader of zero vectors instead of images; they take no memory."""
    split = loader.store.split
    values_ND = np.broadcast_to(np.zeros(width, np.float32), (len(split), width))
    return FeatureLoader(split, values_ND, num_classes=loader.num_classes, device=loader.device)


def with_store(loader: ImageLoader, store: PixelStore) -> ImageLoader:
    """Return a copy of a loader that reads from another pixel store."""
    return ImageLoader(
        store,
        loader.pipeline,
        num_classes=loader.num_classes,
        device=loader.device,
        dtype=loader.dtype,
    )
