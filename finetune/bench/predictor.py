"""Predict memory and time of a recipe's training step, from a few real steps of one such recipe.

Memory is the sum of its parts: tensors by their shapes, activations by a pass without content
(`need_of`). Time grows with the operations of a pass, on top of what the input costs.
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

from finetune.bench.timer import synchronise
from finetune.evaluation.features import at_once
from finetune.models.batch_norm import choose_statistics
from finetune.models.build import build
from finetune.models.head import freeze_parameters
from finetune.recipe.load import ModelSection, Recipe
from finetune.run.environment import DTYPES, pick_precision
from finetune.training.compile import choose_kernels
from finetune.training.memory import (
    NO_NEED,
    Need,
    checkpoint_bytes,
    need_of,
    pass_once,
    step_bytes,
    twin_of,
)
from finetune.training.setup import TrainingSetup

__all__ = ["Measured", "Prediction", "Predictor"]

_TIMED_IMAGES = 8  # of the passes that compare two dtypes


@dataclass(frozen=True)
class Measured:
    """Facts about a run as its recipe has it that only its own steps show.

    Attributes:
        real, synthetic: images a second, with the input and without it.
        resident: bytes of host memory between two steps; 0 where the device has its own.
        images: bytes of decoded images in the device's memory.
        report: bytes of the host that the report's libraries take at the end.
        features, width: bytes of the features that stand for all images, and of how many numbers
            each is; 0 where training needs the images themselves.
        in_memory: whether decoded images are kept.
        teacher, teacher_pass: bytes of a teacher's weights, and the need of its pass in each step.
    """

    real: float
    synthetic: float
    resident: int = 0
    images: int = 0
    report: int = 0
    features: int = 0
    width: int = 0
    in_memory: bool = True
    teacher: int = 0
    teacher_pass: Need = NO_NEED


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a recipe's training.

    Attributes:
        micro_batch: images at once in training.
        evaluated: images at once in evaluation, 0 if there is none.
        parts: bytes of "program", "weights", "gradients", "moments", "average", "teacher",
            "images", "features" and "snapshot".
        phases: bytes in "training", "evaluation", "report", or while "features" are computed.
        need: beyond the parts, of a training step.
        images_per_second: None where the change is one that operations do not explain.
    """

    micro_batch: int
    evaluated: int
    parts: dict[str, int]
    phases: dict[str, int]
    need: Need
    images_per_second: float | None
    adapter: bool = False

    @property
    def peak(self) -> int:
        """Bytes of the phase that takes the most."""
        return max(self.phases.values())

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint."""
        return checkpoint_bytes(self.parts, adapter=self.adapter)


@dataclass(frozen=True)
class _Passes:
    """Passes through the network of a model section: shapes only, training, evaluation."""

    twin: nn.Module
    training: Need
    evaluation: Need


class Predictor:
    """Predicts a recipe and overrides of it alike.

    Args:
        setup: of the recipe that was measured.
        network: of the setup, with its kernels chosen; not wrapped.
        dtype: of its forward pass.
        micro_batch: of its steps; None for the whole batch.
        measured: of the same recipe.
        tick: told of each network that is sent through.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        network: nn.Module,
        *,
        dtype: torch.dtype,
        micro_batch: int | None,
        measured: Measured,
        tick: Callable[[], None],
    ) -> None:
        self.setup = setup
        self.network = network
        self.dtype = dtype
        self.measured = measured
        self._micro_batch = micro_batch
        self._tick = tick
        self._known: dict[tuple[str, torch.dtype], _Passes] = {}
        self._part = self._largest_part(setup.recipe)

    def predict(self, recipe: Recipe, *, free_input: bool = False) -> Prediction:
        """Predict a run of the recipe on this device and these data.

        Args:
            recipe: the measured one, or an override of it.
            free_input: as if images came in no time.
        Raises: FinetuneError for what is not possible with this network.
        """
        run = self.setup.recipe.run
        dtype = self.dtype
        if recipe.run.precision != run.precision:
            dtype = DTYPES[pick_precision(recipe.run.precision, self.setup.device)]
        passes = self._passes(recipe.model, dtype)
        parts = self._parts(recipe, passes)
        micro_batch = self._largest_part(recipe)
        sizes = [len(split) for name, split in self.setup.source.splits.items() if name != "train"]
        evaluated = min(recipe.data.eval_batch_size, max(sizes, default=0))
        if self.measured.width:
            evaluated = at_once(self.setup.device, recipe.data)
        return Prediction(
            micro_batch=micro_batch,
            evaluated=evaluated,
            parts=parts,
            phases=self._phases(
                parts, passes.training.at(micro_batch), passes.evaluation.at(evaluated), evaluated
            ),
            need=passes.training,
            images_per_second=self._rate(recipe, passes, dtype, free_input=free_input),
            adapter=recipe.model.adapter is not None,
        )

    def _largest_part(self, recipe: Recipe) -> int:
        """Images of the largest micro-batch of a step."""
        size = recipe.data.micro_batch
        if size == "auto" or size == self.setup.recipe.data.micro_batch:
            size = self._micro_batch  # as it was settled
        sampler = dataclasses.replace(self.setup, recipe=recipe).sampler
        cut = sampler.micro_batches(0, micro_batch=size)
        return max(len(indices) for _, indices in cut)

    # --- memory -----------------------------------------------------------------------------------

    def _passes(self, model: ModelSection, dtype: torch.dtype) -> _Passes:
        key = (model.model_dump_json(), dtype)
        if key not in self._known:
            self._tick()
            self._known[key] = self._send_through(model, dtype)
        return self._known[key]

    def _send_through(self, model: ModelSection, dtype: torch.dtype) -> _Passes:
        network, image_size = self._network(model, dtype)

        def change(twin: nn.Module) -> None:
            freeze_parameters(twin, model.freeze)
            if model.grad_checkpointing:
                twin.set_grad_checkpointing(True)  # type: ignore[operator]

        def need(*, train: bool) -> Need:
            return need_of(
                network,
                image_size=image_size,
                dtype=dtype,
                images=self._part,
                train=train,
                change=change,
                operations=train,
            )

        twin = twin_of(network, FakeTensorMode())
        change(twin)
        width = self.measured.width
        # a classifier's step takes its features, in float32 and in the dtype it computes with
        training = Need(0, 8 * width) if width else need(train=True)
        training += self.measured.teacher_pass
        return _Passes(twin, training, need(train=False))

    def _network(
        self, model: ModelSection, dtype: torch.dtype
    ) -> tuple[nn.Module, tuple[int, int]]:
        """The network, perhaps before it is frozen, and its (height, width) in pixels."""
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
        built = build(model.name, num_classes=self.setup.num_classes, **settings)
        choose_statistics(built.model, model)
        choose_kernels(built.model.to(device), device=device, dtype=dtype)
        return built.model, built.preprocessing.image_size

    def _parts(self, recipe: Recipe, passes: _Passes) -> dict[str, int]:
        """Bytes of what is there in every step."""
        setup = dataclasses.replace(self.setup, recipe=recipe)
        kept = step_bytes(passes.twin, recipe.optim)
        snapshot = checkpoint_bytes(kept, adapter=recipe.model.adapter is not None)
        saves = any(setup.saves_after(step) for step in range(1, setup.steps))
        on_host = self.setup.device.type == "cpu"  # written there while training goes on
        return {
            "program": self._program,
            **kept,
            "teacher": self.measured.teacher,
            "images": 0 if recipe.data.keep == "none" else self.measured.images,
            "features": self.measured.features,
            "snapshot": snapshot if on_host and saves else 0,
        }

    @functools.cached_property
    def _program(self) -> int:
        """Bytes of interpreter, libraries and threads, and what the allocator keeps."""
        kept = step_bytes(self._own.twin, self.setup.recipe.optim)
        held = kept["weights"] + kept["moments"] + kept["average"] + self.measured.teacher
        return max(self.measured.resident - held - self.measured.images, 0)

    @property
    def _own(self) -> _Passes:
        return self._passes(self.setup.recipe.model, self.dtype)

    def _phases(
        self, parts: dict[str, int], activations: int, evaluation: int, evaluated: int
    ) -> dict[str, int]:
        """Bytes while it trains, evaluates, and reports: the latter two have no gradients."""
        kept = sum(parts.values())
        phases = {"training": kept + activations}
        if self.measured.width:  # images first, then their features
            kept -= parts["images"]
            model = parts["program"] + parts["weights"] + parts["average"]
            phases = {
                "features": model + parts["images"] + evaluation,
                "training": kept + activations,
            }
        elif evaluated:
            phases["evaluation"] = kept - parts["gradients"] + evaluation
        if self.measured.report:
            remaining = kept - parts["gradients"] - parts["snapshot"]
            phases["report"] = remaining + self.measured.report
        return phases

    # --- time -------------------------------------------------------------------------------------

    def _rate(
        self, recipe: Recipe, passes: _Passes, dtype: torch.dtype, *, free_input: bool
    ) -> float | None:
        measured = self.measured
        if recipe == self.setup.recipe and not free_input:
            return measured.real
        own = self._own
        if passes is own and not free_input:
            return None
        seconds = 1 / measured.synthetic
        if passes is not own:
            if not own.training.operations or not passes.training.operations:
                return None
            seconds *= passes.training.operations / own.training.operations
        if dtype != self.dtype:
            seconds *= self._relative_seconds(dtype)
        return 1 / (seconds + (0 if free_input else 1 / measured.real - 1 / measured.synthetic))

    def _relative_seconds(self, dtype: torch.dtype) -> float:
        """Time of a pass in another dtype, in times of the run's own, measured on a few images."""
        twin, seconds = twin_of(self.network), dict[torch.dtype, float]()
        images, size = min(self._part, _TIMED_IMAGES), self.setup.preprocessing.image_size
        for kind in (self.dtype, dtype) * 2:  # the first of each warms up
            started = time.perf_counter()
            pass_once(twin, max(images, 2), size, kind, train=True)
            synchronise(self.setup.device)
            seconds[kind] = time.perf_counter() - started
        return seconds[dtype] / seconds[self.dtype]
