"""The training loop of `finetune train`, some steps at a time, to measure its time and memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.bench.input_rate import input_rates
from finetune.bench.matrix_rate import MatMul, list_matmuls, matrix_rate
from finetune.bench.timer import PREFETCH_FACTOR, StepTimer
from finetune.data.feature_loader import AnyLoader, FeatureLoader
from finetune.data.loader import ImageLoader
from finetune.data.pixel_store import PixelStore
from finetune.data.sampler import DistributedBatchSampler
from finetune.data.source import Split
from finetune.evaluation.evaluator import evaluate
from finetune.log import logger
from finetune.models.freeze import set_train_mode
from finetune.models.summary import count_flops
from finetune.precision import DTYPES, accelerator_precision
from finetune.ranks import local_world_size
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import collect_environment
from finetune.training.accelerator import create_accelerator
from finetune.training.batch_size_finder import resolve_micro_batch_size
from finetune.training.build_state import build_trainer_state
from finetune.training.meter import TrainMeter
from finetune.training.setup import TrainingSetup, build_setup

__all__ = ["TrainingLoop"]

_MAX_EVALUATED_IMAGES = 4096  # decode at most this many images if there is no validation split
_NUM_PROFILED_OPERATIONS = 10  # operations in a profile
_PROFILED_STEPS = 3


class TrainingLoop:
    """Trains a recipe on all processes of a launch, some steps per call.

    Args:
        recipe: the recipe, trained as by `finetune train`.
        folder: an empty folder for the run directory; the caller removes it.
        max_images: maximum number of images to open of each split; None for all.
        on_step: function to call after each step.

    Attributes:
        trainer: the training state; with `max_images`, its `setup` still describes all images.
        loader: loader of the training images.
        val_loader: loader of the images to evaluate.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        max_images: int | None = None,
        on_step: Callable[[], object] = lambda: None,
    ) -> None:
        self.recipe = recipe
        self._on_step = on_step
        self._has_evaluated = False
        run = RunDir(folder / "run")
        self.accelerator = create_accelerator(recipe.run, out=run.path)
        self.device = self.accelerator.device
        self.precision = accelerator_precision(self.accelerator)
        self.setup: TrainingSetup = build_setup(
            recipe,
            device=self.device,
            local_world_size=local_world_size(self.accelerator.num_processes),
            show_progress=False,
        )
        self.trainer = build_trainer_state(self.setup, self.accelerator, run)
        if self.trainer.is_main_process:
            run.open()
        train_split = _first_images(self.setup.source.splits["train"], max_images)
        self.loader: AnyLoader = self.setup.build_loader(
            train_split, train=True, dtype=DTYPES[self.precision]
        )
        if max_images is None:
            labels = self.loader.store.split.labels
            self.trainer.setup = self.setup = self.setup.with_num_samples(len(labels), labels)
        distillation = self.trainer.distillation
        if distillation is not None and distillation.caches_outputs:
            distillation.use_cached_outputs(self._zero_features(distillation.output_width))
            logger.info(
                "distill: finetune train computes the teacher's outputs once; that is not measured"
            )
        self.val_loader = _eval_loader(self.setup, max_images)
        resolve_micro_batch_size(self.trainer, self.loader)
        self.meter = TrainMeter(self.device, 0.0, has_teacher=distillation is not None)
        self.trainer.start(self.meter)

    def close(self) -> None:
        """Close the files of the run directory."""
        self.trainer.run.close()

    # Training -----------------------------------------------------------------------------------

    def train(
        self, *, warmup: int, steps: int, synthetic: bool = False, batch_size: int | None = None
    ) -> StepTimer:
        """Continue training.

        Args:
            warmup: number of untimed steps at the start, at least 1.
            steps: number of timed steps.
            synthetic: True to repeat the batches of a single step, which stay on the device.
            batch_size: images per step over all processes; None for that of the recipe.
        """
        store = self.loader.store
        if store.images is None and not synthetic and isinstance(self.loader, ImageLoader):
            warmup += store.num_workers * PREFETCH_FACTOR
        clock = StepTimer(self.device, warmup=warmup, steps=steps, tick=self._on_step)
        set_train_mode(self.trainer.model)
        sampler = self._sampler(batch_size)
        (self._train_on_fixed_batches if synthetic else self._train_on_data)(clock, sampler)
        return clock

    def _sampler(self, batch_size: int | None) -> DistributedBatchSampler:
        """Return the run's sampler, adapted to the opened images and to `batch_size` if given."""
        sampler, num_opened = self.trainer.setup.sampler, len(self.loader.labels)
        if num_opened == sampler.num_samples and batch_size is None:
            return sampler
        return dataclasses.replace(
            sampler,
            num_samples=num_opened,
            batch_size=batch_size or sampler.batch_size,
            class_sampler=None,  # it needs the labels of all images
        )

    def _train_on_data(self, clock: StepTimer, sampler: DistributedBatchSampler) -> None:
        done = self.trainer.counters.step
        with contextlib.closing(self._steps(sampler, clock.warmup + clock.steps)) as steps:
            for number, batches in steps:
                self.trainer.train_step(number, batches, self.meter)
                done += 1
                if done % self.recipe.run.log_every == 0:
                    self.trainer.log_training(self.meter)
                clock.step()

    def _train_on_fixed_batches(self, clock: StepTimer, sampler: DistributedBatchSampler) -> None:
        with contextlib.closing(self._steps(sampler, 1)) as steps:
            _, batches = next(steps)
            kept = list(batches)
        for _ in range(clock.warmup + clock.steps):
            self.trainer.train_step(len(kept), iter(kept), self.meter)
            clock.step()

    def _steps(self, sampler: DistributedBatchSampler, number: int) -> Any:
        first = self.trainer.counters.step
        return self.loader.train_steps(
            sampler,
            range(first, first + number),
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            micro_batch_size=self.trainer.micro_batch_size,
        )

    def one_step(self) -> StepTimer:
        """Train one step."""
        return self.train(warmup=1, steps=0)

    # Evaluation ---------------------------------------------------------------------------------

    def evaluate(self, *, images: int) -> float:
        """Evaluate at most `images` images. Returns: images per second."""
        batch_size = self.recipe.data.eval_batch_size

        def evaluated(number: int) -> dict[str, Any]:
            loader = _shortened(self.val_loader, number)
            network = self.trainer.eval_model()
            return evaluate(network, loader, self.accelerator, batch_size=batch_size)

        if not self._has_evaluated:  # the first evaluation allocates memory
            evaluated(min(batch_size, images))
            self._has_evaluated = True
        return float(evaluated(images)["images_per_second"])

    # Features of a frozen backbone --------------------------------------------------------------

    def use_zero_features(self, width: int) -> None:
        """From now on, train on zero vectors instead of a frozen backbone's cached features."""
        self.loader = self._zero_features(width)

    def _zero_features(self, width: int) -> FeatureLoader:
        """Return a loader of zero vectors instead of images; they take no memory."""
        split = self.loader.store.split
        values_ND = np.broadcast_to(np.zeros(width, np.float32), (len(split), width))
        return FeatureLoader(
            split, values_ND, num_classes=self.loader.num_classes, device=self.device
        )

    # What a step consists of --------------------------------------------------------------------

    def count_operations(self) -> tuple[int, Counter[MatMul]]:
        """Count a step's FLOPs over all processes, and list the matrix products of this process.

        This trains two steps.
        """
        # unwrap DDP and torch.compile to reach the layers
        network = self.accelerator.unwrap_model(self.trainer.model)
        flops = self.accelerator.num_processes * count_flops(self.one_step)
        return flops, list_matmuls(network, self.one_step)

    def matrix_rate(self, products: Counter[MatMul]) -> float | None:
        """Measure matrix multiplication on all processes at the same time.

        Args:
            products: the products to measure and their counts, from `count_operations`.
        Returns: operations per second at this network's shapes and dtype, summed over processes;
            None without products.
        """
        self.accelerator.wait_for_everyone()
        own = matrix_rate(products, dtype=DTYPES[self.precision], device=self.device)
        if own is None:
            return None
        rate = torch.tensor(own, device=self.device)
        return float(torch.as_tensor(self.accelerator.reduce(rate, "sum")))

    def input_rates(self, *, num_images: int, repeats: int) -> dict[str, Any]:
        """Compare workers with processes that only decode; see `input_rate.input_rates`."""
        store = self.loader.store
        return input_rates(
            store.split,
            workers=self.setup.num_workers,
            batch_size=self.recipe.data.batch_size,
            num_images=num_images,
            repeats=repeats,
        )

    def profile(self, folder: Path) -> dict[str, Any]:
        """Trace a few steps into trace.json, for chrome://tracing or Perfetto.

        Returns: a dict with keys "trace" (the file), "steps" and "operations" (those with the most
            self time), each {"name", "calls" and "milliseconds" per step, "share"}.
        """
        from torch.profiler import ProfilerActivity, profile

        is_gpu = self.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
        self.one_step()
        with profile(activities=kinds) as profiler:
            for _ in range(_PROFILED_STEPS):
                self.one_step()
        trace = folder / "trace.json"
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

    def describe(self) -> dict[str, Any]:
        """Describe recipe, network and machine, with JSON-serializable values."""
        strategy = None
        if self.accelerator.num_processes > 1:
            strategy = "FSDP" if self.trainer.is_sharded else "DDP"
        machine = collect_environment(self.device, self.accelerator.num_processes)
        return {
            "architecture": self.setup.built.architecture,
            "image_size": list(self.setup.preprocessing.image_size),
            "precision": self.precision,
            "compiled": self.trainer.is_compiled,
            "num_images": self.setup.num_samples,
            "batch_size": self.recipe.data.batch_size,
            "micro_batch": self.trainer.micro_batch_size,
            "optimizer": self.recipe.optim.name,
            "augmentation": self.setup.train_pipeline.transform_spec,
            "machine": machine | {"distributed": strategy},
        }


def _first_images(split: Split, number: int | None) -> Split:
    """Return a split of at most `number` images, evenly spaced over the given split.

    A streamed split is returned unchanged, because its images are read only as needed.
    """
    if number is None or split.is_streamed or len(split) <= number:
        return split
    return split.subset(np.arange(number) * len(split) // number)


def _eval_loader(setup: TrainingSetup, max_images: int | None) -> ImageLoader:
    """Return a loader of the validation split; without one, of some test or training images."""
    splits = setup.source.splits
    split = next(splits[name] for name in ("val", "test", "train") if len(splits.get(name, ())))
    if split.name != "val":
        max_images = min(max_images or _MAX_EVALUATED_IMAGES, _MAX_EVALUATED_IMAGES)
    return setup.build_loader(_first_images(split, max_images), train=False)


def _shortened(loader: ImageLoader, images: int) -> ImageLoader:
    """Return a loader of the first `images` images of a loader's split."""
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
    return ImageLoader(
        first,
        loader.pipeline,
        num_classes=loader.num_classes,
        device=loader.device,
        dtype=loader.dtype,
    )
