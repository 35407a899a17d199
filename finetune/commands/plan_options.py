"""What a run would take with another setting: the peak of memory by its parts, and the rate.

Activations and operations of another setting are rehearsed (`need_of`); time is as the operations
are, on top of what the input costs. Only another dtype is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.bench.flops import count_operations, synchronise
from finetune.errors import FinetuneError, RecipeError
from finetune.models.build import build
from finetune.models.head import freeze_parameters
from finetune.models.profile import depth
from finetune.training.compile import choose_kernels
from finetune.training.memory import Need, need_of, num_bytes, pass_once, state_bytes, twin_of
from finetune.training.micro_batch import optimizer_settings
from finetune.training.setup import TrainingSetup

__all__ = ["Baseline", "rehearsed"]

_WORTH = 0.98  # of memory or time: what leaves more is no line
_INPUT_SHARE = 0.1  # of a step, from which on the input is worth a line
_TIMED_IMAGES = 8  # of the passes that compare two dtypes


def rehearsed(
    setup: TrainingSetup, network: nn.Module, *, dtype: torch.dtype, images: int, **given: Any
) -> Need:
    """`need_of` a pass at the setup's size, with its operations where it goes back, too."""
    count = count_operations if given.get("train", True) else None
    settings = {"image_size": setup.preprocessing.image_size, **given}
    return need_of(network, dtype=dtype, images=images, count=count, **settings)


@dataclass(frozen=True)
class Baseline:
    """A run as its recipe has it, from which other settings differ.

    Attributes:
        setup, network: of the run; the network is not wrapped.
        dtype: of the forward pass.
        part: images at once in training.
        evaluated: images at once in evaluation, 0 if there is none.
        parts: bytes of "program", "weights", "gradients", "moments", "average", "images",
            "features" and "snapshot".
        report: bytes that the report's libraries take at the end.
        need, evaluation: beyond these parts, of a training step and of an evaluation.
        real, synthetic: images a second, with the input and without it.
        in_memory: whether decoded images are kept.
        features_at_once: images whose features are computed at once before training; 0 where it
            needs the images themselves.
        tick: told of each rehearsal.
    """

    setup: TrainingSetup
    network: nn.Module
    dtype: torch.dtype
    part: int
    evaluated: int
    parts: dict[str, int]
    report: int
    need: Need
    evaluation: Need
    real: float
    synthetic: float
    in_memory: bool
    features_at_once: int
    tick: Callable[[], None]

    def phases(
        self, parts: dict[str, int], activations: int, evaluated: int | None = None
    ) -> dict[str, int]:
        """Bytes in a training step, in an evaluation, and at the end: the two have no gradients."""
        if self.features_at_once:
            return self._phases_of_features(activations)
        evaluated = self.evaluated if evaluated is None else evaluated
        kept = sum(parts.values())
        without = kept - parts["gradients"]
        found = {"training": kept + activations}
        if evaluated:
            found["evaluation"] = without + self.evaluation.at(evaluated)
        if self.report:
            found["report"] = without - parts["snapshot"] + self.report
        return found

    def _phases_of_features(self, activations: int) -> dict[str, int]:
        """Bytes while they are computed, while the classifier is trained on them, at the end."""
        parts = self.parts
        model = parts["program"] + parts["weights"] + parts["average"]
        later = sum(parts.values()) - parts["images"]
        found = {
            "features": model + parts["images"] + self.evaluation.at(self.features_at_once),
            "training": later + activations,
        }
        if self.report:
            found["report"] = later - parts["gradients"] - parts["snapshot"] + self.report
        return found

    def options(self) -> list[dict[str, Any]]:
        """Other settings and what they would take, the most helpful first.

        There are none for a run on features: its classifier takes next to nothing.

        Returns: each {"change", "peak" in bytes, "images_per_second" or None, "halves": "memory",
            "time", both or neither}.
        """
        if self.features_at_once:
            return []
        rate, peak = self.real, max(self.phases(self.parts, self.need.at(self.part)).values())
        found = []
        for option in [*self._of_the_network(), *self._of_the_rest()]:
            if min(option["peak"] / peak, rate / (option["rate"] or rate)) > _WORTH:
                continue
            found.append(option)
            halves = {
                "memory": 2 * option["peak"] <= peak,
                "time": (option["rate"] or 0.0) >= 2 * rate,
            }
            option["halves"] = [name for name, is_so in halves.items() if is_so]
            option["images_per_second"] = option.pop("rate")
        gains = [
            min(option["peak"] / peak, rate / (option["images_per_second"] or rate))
            for option in found
        ]
        order = sorted(range(len(found)), key=gains.__getitem__)
        return [found[place] for place in order]

    def _option(
        self,
        change: str,
        need: Need | None = None,
        *,
        part: int | None = None,
        rate: float | None = None,
        evaluated: int | None = None,
        **parts: int,
    ) -> dict[str, Any]:
        """One line: the peak with other parts, and the rate that follows from the operations."""
        need = need or self.need
        kept = {**self.parts, **parts}
        if kept["snapshot"]:
            kept["snapshot"] = sum(kept[key] for key in ("weights", "moments", "average"))
        if rate is None and need.operations and self.need.operations:
            computing = need.operations / self.need.operations / self.synthetic
            rate = 1 / (1 / self.real - 1 / self.synthetic + computing)
        phases = self.phases(kept, need.at(part or self.part), evaluated)
        return {"change": change, "peak": max(phases.values()), "rate": rate}

    def _of_the_network(self) -> list[dict[str, Any]]:
        """Checkpointing, freezing, another dtype, another size: each is rehearsed."""
        found, recipe, network = [], self.setup.recipe, self.network
        if not recipe.model.grad_checkpointing and hasattr(network, "set_grad_checkpointing"):
            frugal = self._need(network, change=_checkpointed)
            found.append(self._option("model.grad_checkpointing=true", frugal))
        if recipe.model.freeze == "none":
            for freeze in (sum(depth(network)) // 2, "backbone"):
                found += self._frozen(network, freeze)
        if self.dtype == torch.float32:
            rate = self.real * self._faster(network, torch.bfloat16)
            small = self._need(network, dtype=torch.bfloat16)
            found.append(self._option("run.precision=bf16", small, rate=rate))
        return [*found, *self._smaller(network)]

    def _frozen(self, network: nn.Module, freeze: str | int) -> list[dict[str, Any]]:
        twin = twin_of(network)
        try:
            freeze_parameters(twin, freeze)
        except RecipeError:  # a network without blocks
            return []
        need = self._need(network, change=lambda other: freeze_parameters(other, freeze))
        return [self._option(f"model.freeze={freeze}", need, **self._trained(twin))]

    def _trained(self, network: nn.Module) -> dict[str, int]:
        """The parts that follow from a network's tensors."""
        return {
            "weights": num_bytes(network.state_dict().values()),
            "gradients": num_bytes(p for p in network.parameters() if p.requires_grad),
            "moments": state_bytes(network, optimizer_settings(self.setup.recipe.optim)),
        }

    def _faster(self, network: nn.Module, dtype: torch.dtype) -> float:
        """How many times as fast a pass is in another dtype, measured on a few images."""
        twin, seconds = twin_of(network), {}
        images, size = min(self.part, _TIMED_IMAGES), self.setup.preprocessing.image_size
        for kind in (self.dtype, dtype) * 2:  # the first of each warms up
            started = time.perf_counter()
            pass_once(twin, max(images, 2), size, kind, train=True)
            synchronise(self.setup.device)
            seconds[kind] = time.perf_counter() - started
        return seconds[self.dtype] / seconds[dtype]

    def _smaller(self, network: nn.Module) -> list[dict[str, Any]]:
        """The image size with about half as many pixels, where the network has such a size."""
        height, width = self.setup.preprocessing.image_size
        patch = getattr(getattr(network, "patch_embed", None), "patch_size", 32)
        step = max(patch) if isinstance(patch, tuple | list) else int(patch)
        size = tuple(max(int(side / 2**0.5 / step), 1) * step for side in (height, width))
        if size == (height, width):
            return []
        settings = self.setup.recipe.model.model_dump(exclude={"name", "compile"})
        settings |= {"pretrained": False, "image_size": size}
        try:
            built = build(
                self.setup.recipe.model.name, num_classes=self.setup.num_classes, **settings
            )
        except FinetuneError:
            return []
        other = built.model.to(self.setup.device)
        choose_kernels(other, device=self.setup.device, dtype=self.dtype)
        need = self._need(other, image_size=size)
        shown = size[0] if size[0] == size[1] else list(size)
        said = f"model.image_size={shown}"
        if str(height) in (self.setup.recipe.data.train or ""):
            said += " and in data.train"
        return [self._option(said, need, **self._trained(other))]

    def _of_the_rest(self) -> list[dict[str, Any]]:
        """The micro-batch, the optimiser, the images and the input."""
        found, recipe = [], self.setup.recipe
        without = Need(self.need.fixed, self.need.per_image)  # the rate is not known
        half = -(-self.part // 2)
        if half < self.part:
            found.append(self._option(f"data.micro_batch={half}", without, part=half))
        half = self.evaluated // 2
        if half:
            found.append(self._option(f"data.eval_batch_size={half}", without, evaluated=half))
        settings = {**optimizer_settings(recipe.optim), "name": "sgd", "betas": None, "args": {}}
        moments = state_bytes(self.network, settings)
        if moments < self.parts["moments"]:
            found.append(self._option("optim.name=sgd", without, moments=moments))
        if self.parts["images"]:
            found.append(self._option("data.keep=none", without, images=0))
        share = 1 - self.real / self.synthetic
        if share > _INPUT_SHARE:
            change = (
                "an input that costs nothing (data.train)" if self.in_memory else "data.keep=memory"
            )
            found.append(self._option(change, without, rate=self.synthetic))
        return found

    def _need(self, network: nn.Module, **given: Any) -> Need:
        self.tick()
        settings = {"dtype": self.dtype, "images": self.part, **given}
        return rehearsed(self.setup, network, **settings)


def _checkpointed(network: nn.Module) -> None:
    network.set_grad_checkpointing(True)  # type: ignore[operator]
