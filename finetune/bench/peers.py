"""Another library's loop in the place of ours: the same network, on the images we begin with.

The images are decoded to PIL before the clock starts, which spares these loops what a set in files
would cost them in every epoch.
"""

from __future__ import annotations

from typing import Any

import torch

from finetune.bench.peer_loops import LOOPS, Images, Setting
from finetune.bench.timer import BATCHES_AHEAD, Clock, Loop
from finetune.bench.torchvision_transforms import translate
from finetune.console import say_nothing
from finetune.errors import RecipeError
from finetune.models.head import set_train_mode
from finetune.models.profile import count_operations
from finetune.processes import num_cores
from finetune.recipe.load import Recipe
from finetune.training.setup import TrainingSetup, open_setup

__all__ = ["Peer"]

_IMAGES = 1024  # that are decoded, or a batch where that is more
_TRIAL_STEPS = 3


class Peer(Loop):
    """Another library's loop on this process, a number of steps at a time.

    Args:
        line: told of steps and notices.
        recipe: of the training.
        loop: a name of LOOPS.
        precision: fp32, bf16 or fp16.
        device: its type.
        folder: for what a library insists on writing; whoever made it removes it.
    """

    def __init__(
        self, line: Any, *, recipe: Recipe, loop: str, precision: str, device: str, folder: str
    ) -> None:
        self.line = line
        self.recipe = recipe
        self.loop = LOOPS[loop]
        self.precision = precision
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.folder = folder

    def prepare(self) -> dict[str, Any]:
        """Build the network, decode images, and find out how many workers serve the loop best.

        Returns: "seconds_to_first_step", "compiled", "workers" and "operations" of a step.
        Raises: RecipeError if the recipe asks for what these loops have not.
        """
        recipe = self.recipe
        if recipe.distill is not None:
            raise RecipeError(
                "distill: the loops that --against compares with have no teacher; give a recipe "
                "without that section",
                code="recipe.unsupported",
            )
        if recipe.run.threads is not None:
            torch.set_num_threads(recipe.run.threads)
        setup = open_setup(recipe, device=self.device, notice=say_nothing, progress=False)
        parts, preprocessing = _equal_parts(setup), setup.preprocessing
        set_train_mode(setup.built.model.to(self.device))
        augment = translate(
            setup.train_pipeline.sentence,
            image_size=preprocessing.image_size,
            interpolation=preprocessing.interpolation,
        )
        self.setting = Setting(
            setup, _images(setup), augment, self.precision, self.device, parts, self.folder
        )
        clock = self._run(_TRIAL_STEPS)
        operations = count_operations(lambda: self._run(0))
        alone, self.setting.workers = clock.seconds, num_cores()
        if self._run(_TRIAL_STEPS).seconds > alone:
            self.setting.workers = 0
        return {
            "seconds_to_first_step": clock.alive,
            "compiled": self.setting.compiled,
            "workers": self.setting.workers,
            "operations": operations,
        }

    def train(self, *, warmup: int, steps: int) -> float:
        """Train on; see `Ours.train`. Returns: images a second."""
        return self.recipe.data.batch_size * steps / self._run(steps, warmup=warmup).seconds

    def _run(self, steps: int, *, warmup: int = 1) -> Clock:
        warmup += self.setting.workers * BATCHES_AHEAD
        clock = Clock(self.device, warmup=warmup, steps=steps, tick=self.line.tick)
        self.setting.images.length = self.recipe.data.batch_size * (warmup + steps)
        self.loop(self.setting, warmup + steps, clock.step)
        return clock


def _images(setup: TrainingSetup) -> Images:
    """Decode the images that our own training begins with."""
    number = min(setup.num_samples, max(setup.recipe.data.batch_size, _IMAGES))
    return Images(setup.source.splits["train"], setup.sampler.order(0)[:number].tolist())


def _equal_parts(setup: TrainingSetup) -> int:
    """Micro-batches of a step. Raises: RecipeError if they are not of equal size."""
    data = setup.recipe.data
    assert data.micro_batch != "auto", "our own training has found it"
    parts = len(setup.sampler.micro_batches(0, micro_batch=data.micro_batch))
    if data.batch_size % parts:
        raise RecipeError(
            f"data.micro_batch: {data.micro_batch} cuts {data.batch_size} images into {parts} "
            "unequal parts, which the loops that --against compares with cannot; take a divisor",
            code="recipe.unsupported",
        )
    return parts
