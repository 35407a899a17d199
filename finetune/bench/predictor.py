"""Predict memory and time of training steps, from a few real steps of one recipe.

Memory is a sum of parts: parameters and states from their shapes, activations from a pass with fake
tensors (`estimate_memory`). Time is proportional to the FLOPs of a pass, plus the input time.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.bench.timer import synchronize
from finetune.evaluation.feature_extraction import feature_batch_size
from finetune.models.batch_norm import configure_batch_norm
from finetune.models.build import build_model
from finetune.models.freeze import freeze_parameters
from finetune.precision import DTYPES, resolve_precision
from finetune.recipe.load import ModelSection
from finetune.recipe.schema import Recipe
from finetune.training.compile import choose_kernels
from finetune.training.memory import (
    NO_MEMORY,
    MemoryEstimate,
    checkpoint_bytes,
    estimate_memory,
    fake_copy,
    run_step,
    training_state_bytes,
)
from finetune.training.setup import TrainingSetup

__all__ = ["Prediction", "Predictor", "TrialMeasurements"]

_TIMED_IMAGES = 8  # images per pass when two dtypes are compared


@dataclass(frozen=True)
class TrialMeasurements:
    """Measurements from real steps of a recipe.

    Attributes:
        images_per_second, images_per_second_without_input: training throughput, with real and with
            synthetic input.
        resident_bytes: host memory between two steps; 0 for a device with its own memory.
        image_bytes: decoded images in the device's memory.
        report_bytes: host memory of the libraries that write the report.
        feature_bytes, feature_dim: size of the cached features of all images and their dimension;
            0 if training uses the images.
        keeps_images: True if decoded images stay in memory.
        teacher_bytes, teacher_estimate: weights of the distillation teacher, if any, and the memory
            of its forward pass.
    """

    images_per_second: float
    images_per_second_without_input: float
    resident_bytes: int = 0
    image_bytes: int = 0
    report_bytes: int = 0
    feature_bytes: int = 0
    feature_dim: int = 0
    keeps_images: bool = True
    teacher_bytes: int = 0
    teacher_estimate: MemoryEstimate = NO_MEMORY


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a recipe's training.

    Attributes:
        micro_batch_size: images per micro-batch in training.
        eval_batch_size: images per batch in evaluation; 0 without evaluation.
        parts: bytes by part: "program", "weights", "gradients", "moments", "average", "teacher",
            "images", "features" and "snapshot".
        phases: peak bytes by phase: "training", "evaluation", "report", and "features" while
            features are computed.
        activations: memory of a training step in addition to `parts`.
        images_per_second: training throughput; None if FLOPs cannot predict it for this recipe.
        has_adapter: True if the recipe trains an adapter.
    """

    micro_batch_size: int
    eval_batch_size: int
    parts: dict[str, int]
    phases: dict[str, int]
    activations: MemoryEstimate
    images_per_second: float | None
    has_adapter: bool = False

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the largest phase."""
        return max(self.phases.values())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint."""
        return checkpoint_bytes(self.parts, adapter=self.has_adapter)


@dataclass(frozen=True)
class _PassEstimates:
    """Memory estimates of training and evaluation for a model section, with the fake network."""

    fake_model: nn.Module
    training: MemoryEstimate
    evaluation: MemoryEstimate


class Predictor:
    """Predicts memory and time of the measured recipe, also with other settings.

    Args:
        setup: setup of the measured recipe.
        network: network of `setup` with its kernels chosen, not wrapped by DDP or torch.compile.
        dtype: dtype of the forward pass.
        micro_batch_size: images per micro-batch; None for the whole batch.
        measured: measurements of the same recipe.
        tick: called for each network whose memory is estimated.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        network: nn.Module,
        *,
        dtype: torch.dtype,
        micro_batch_size: int | None,
        measured: TrialMeasurements,
        tick: Callable[[], None],
    ) -> None:
        self.setup = setup
        self.network = network
        self.dtype = dtype
        self.measured = measured
        self._micro_batch_size = micro_batch_size
        self._tick = tick
        self._estimates: dict[tuple[str, torch.dtype], _PassEstimates] = {}
        self._max_micro_batch_size = self._largest_micro_batch(setup.recipe)

    def predict(self, recipe: Recipe, *, ignore_input_time: bool = False) -> Prediction:
        """Predict a run of a recipe on this device and dataset.

        Args:
            recipe: the measured recipe, possibly with overrides.
            ignore_input_time: assume that loading images takes no time.
        Raises: FinetuneError if this network does not support the recipe.
        """
        run = self.setup.recipe.run
        dtype = self.dtype
        if recipe.run.precision != run.precision:
            dtype = DTYPES[resolve_precision(recipe.run.precision, self.setup.device)]
        passes = self._cached_estimate(recipe.model, dtype)
        parts = self._memory_parts(recipe, passes)
        micro_batch = self._largest_micro_batch(recipe)
        sizes = [len(split) for name, split in self.setup.source.splits.items() if name != "train"]
        evaluated = min(recipe.data.eval_batch_size, max(sizes, default=0))
        if self.measured.feature_dim:
            evaluated = feature_batch_size(self.setup.device, recipe.data)
        return Prediction(
            micro_batch_size=micro_batch,
            eval_batch_size=evaluated,
            parts=parts,
            phases=self._memory_phases(
                parts,
                passes.training.bytes_for(micro_batch),
                passes.evaluation.bytes_for(evaluated),
                evaluated,
            ),
            activations=passes.training,
            images_per_second=self._images_per_second(
                recipe, passes, dtype, ignore_input_time=ignore_input_time
            ),
            has_adapter=recipe.model.adapter is not None,
        )

    def _largest_micro_batch(self, recipe: Recipe) -> int:
        """Return the number of images in the largest micro-batch of a step."""
        size = recipe.data.micro_batch
        if size == "auto" or size == self.setup.recipe.data.micro_batch:
            size = self._micro_batch_size  # the resolved size
        sampler = dataclasses.replace(self.setup, recipe=recipe).sampler
        cut = sampler.micro_batches(0, micro_batch_size=size)
        return max(len(indices) for _, indices in cut)

    # --- memory -----------------------------------------------------------------------------------

    def _cached_estimate(self, model: ModelSection, dtype: torch.dtype) -> _PassEstimates:
        key = (model.model_dump_json(), dtype)
        if key not in self._estimates:
            self._tick()
            self._estimates[key] = self._estimate_passes(model, dtype)
        return self._estimates[key]

    def _estimate_passes(self, model: ModelSection, dtype: torch.dtype) -> _PassEstimates:
        network, image_size = self._build_network(model, dtype)

        def change(twin: nn.Module) -> None:
            freeze_parameters(twin, model.freeze)
            if model.grad_checkpointing:
                twin.set_grad_checkpointing(True)  # type: ignore[operator]

        def need(*, train: bool) -> MemoryEstimate:
            return estimate_memory(
                network,
                image_size=image_size,
                dtype=dtype,
                num_images=self._max_micro_batch_size,
                train=train,
                prepare=change,
                with_flops=train,
            )

        twin = fake_copy(network, FakeTensorMode())
        change(twin)
        width = self.measured.feature_dim
        # training only the classifier stores its features in float32 and in the compute dtype
        training = MemoryEstimate(0, 8 * width) if width else need(train=True)
        training += self.measured.teacher_estimate
        return _PassEstimates(twin, training, need(train=False))

    def _build_network(
        self, model: ModelSection, dtype: torch.dtype
    ) -> tuple[nn.Module, tuple[int, int]]:
        """Return the network before freezing, and its input size (height, width) in pixels."""
        own, device = self.setup.recipe.model, self.setup.device
        changed_later = {
            "compile",
            *(["freeze"] if own.freeze == "none" else []),
            *([] if own.grad_checkpointing else ["grad_checkpointing"]),
        }
        if model.model_dump(exclude=changed_later) == own.model_dump(exclude=changed_later):
            return self.network, self.setup.preprocessing.image_size
        settings = model.model_dump(exclude={"name", "compile", "sync_bn", "freeze_bn"})
        settings["pretrained"] = False
        built = build_model(model.name, num_classes=self.setup.num_classes, **settings)
        configure_batch_norm(built.model, model)
        choose_kernels(built.model.to(device), device=device, dtype=dtype)
        return built.model, built.preprocessing.image_size

    def _memory_parts(self, recipe: Recipe, passes: _PassEstimates) -> dict[str, int]:
        """Return the bytes that stay allocated during a step, by part."""
        setup = dataclasses.replace(self.setup, recipe=recipe)
        kept = training_state_bytes(passes.fake_model, recipe.optim)
        snapshot = checkpoint_bytes(kept, adapter=recipe.model.adapter is not None)
        saves = any(setup.is_save_step(step) for step in range(1, setup.num_steps))
        on_host = (
            self.setup.device.type == "cpu"
        )  # written from host memory while training continues
        return {
            "program": self._program_bytes,
            **kept,
            "teacher": self.measured.teacher_bytes,
            "images": 0 if recipe.data.keep == "none" else self.measured.image_bytes,
            "features": self.measured.feature_bytes,
            "snapshot": snapshot if on_host and saves else 0,
        }

    @functools.cached_property
    def _program_bytes(self) -> int:
        """Bytes of interpreter, libraries, threads and memory cached by the allocator."""
        kept = training_state_bytes(self._measured_estimates.fake_model, self.setup.recipe.optim)
        held = kept["weights"] + kept["moments"] + kept["average"] + self.measured.teacher_bytes
        return max(self.measured.resident_bytes - held - self.measured.image_bytes, 0)

    @property
    def _measured_estimates(self) -> _PassEstimates:
        return self._cached_estimate(self.setup.recipe.model, self.dtype)

    def _memory_phases(
        self, parts: dict[str, int], activations: int, evaluation: int, evaluated: int
    ) -> dict[str, int]:
        """Return the peak bytes of each phase; evaluation and report need no gradients."""
        kept = sum(parts.values())
        phases = {"training": kept + activations}
        if self.measured.feature_dim:  # the images are needed only while features are computed
            kept -= parts["images"]
            model = parts["program"] + parts["weights"] + parts["average"]
            phases = {
                "features": model + parts["images"] + evaluation,
                "training": kept + activations,
            }
        elif evaluated:
            phases["evaluation"] = kept - parts["gradients"] + evaluation
        if self.measured.report_bytes:
            remaining = kept - parts["gradients"] - parts["snapshot"]
            phases["report"] = remaining + self.measured.report_bytes
        return phases

    # --- time -------------------------------------------------------------------------------------

    def _images_per_second(
        self, recipe: Recipe, passes: _PassEstimates, dtype: torch.dtype, *, ignore_input_time: bool
    ) -> float | None:
        measured = self.measured
        if recipe == self.setup.recipe and not ignore_input_time:
            return measured.images_per_second
        own = self._measured_estimates
        if passes is own and not ignore_input_time:
            return None
        seconds = 1 / measured.images_per_second_without_input
        if passes is not own:
            if not own.training.flops_per_image or not passes.training.flops_per_image:
                return None
            seconds *= passes.training.flops_per_image / own.training.flops_per_image
        if dtype != self.dtype:
            seconds *= self._relative_pass_time(dtype)
        return 1 / (
            seconds
            + (
                0
                if ignore_input_time
                else 1 / measured.images_per_second - 1 / measured.images_per_second_without_input
            )
        )

    def _relative_pass_time(self, dtype: torch.dtype) -> float:
        """Measure the time of a pass in `dtype`, relative to the measured recipe's dtype."""
        twin, seconds = fake_copy(self.network), dict[torch.dtype, float]()
        images = min(self._max_micro_batch_size, _TIMED_IMAGES)
        size = self.setup.preprocessing.image_size
        for kind in (self.dtype, dtype) * 2:  # the first pass of each dtype is a warm-up
            started = time.perf_counter()
            run_step(twin, max(images, 2), size, kind, train=True)
            synchronize(self.setup.device)
            seconds[kind] = time.perf_counter() - started
        return seconds[dtype] / seconds[self.dtype]
