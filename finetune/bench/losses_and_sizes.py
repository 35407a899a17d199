"""Two further benchmarks: losses compared with float32 training, and other dataset sizes."""

# N images, H W pixels, C channels

from __future__ import annotations

import contextlib
import os
import statistics
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from finetune.bench.loop_process import LoopProcess
from finetune.bench.ours import FinetuneLoop, with_store
from finetune.bench.timer import value_range
from finetune.data.pixel_file import DecodedImages
from finetune.data.pixel_store import PixelStore
from finetune.errors import RecipeError
from finetune.files import explain_disk_errors
from finetune.progress import step_bar
from finetune.recipe.schema import Recipe

__all__ = [
    "LOSSES_EVERY",
    "REFERENCE_OVERRIDES",
    "DatasetSizeLoop",
    "LossCurveLoop",
    "compare_losses",
    "study_losses",
    "study_sizes",
]

LOSSES_EVERY = 20  # steps per point of the loss curve
REFERENCE_OVERRIDES = (
    "run.precision=fp32",
    "model.compile=false",
)  # overrides of the float32 reference run


class LossCurveLoop(FinetuneLoop):
    """Trains a recipe from its first step and records the losses."""

    def losses(self, *, steps: int, every: int) -> dict[str, Any]:
        """Train. Returns: "losses" (means over `every` steps), "precision" and "compiled"."""
        self._open_training()
        trainer, losses = self.trainer, []
        with (
            contextlib.closing(trainer.run),
            contextlib.closing(self._planned_steps(steps)) as planned,
        ):
            for number, micro_batches in planned:
                trainer.train_step(number, micro_batches, self.meter)
                self.progress.tick()
                if trainer.counters.step % every == 0:
                    losses.append(trainer.log_training(self.meter)["loss"])
        return {"losses": losses, "precision": self.precision, "compiled": trainer.is_compiled}


def study_losses(recipe: Recipe, reference: Recipe, *, steps: int) -> dict[str, Any]:
    """Train twice from the first step, each time in a new process, and compare the losses.

    Args:
        reference: the recipe with `REFERENCE_OVERRIDES`.
        steps: number of steps, a multiple of LOSSES_EVERY.
    Returns: the result of `compare_losses`.
    """
    curves = []
    with step_bar(total=2 * steps, start=0, shown=True) as shown:
        for name, each in (("finetune", recipe), ("in float32", reference)):
            shown.set_description(f"losses {name}")
            with LoopProcess(name, LossCurveLoop, {"recipe": each}, on_steps=shown.update) as host:
                curves.append(host.call("losses", steps=steps, every=LOSSES_EVERY))
    return compare_losses(*curves, every=LOSSES_EVERY)


def compare_losses(own: dict[str, Any], plain: dict[str, Any], *, every: int) -> dict[str, Any]:
    """Compare two loss curves.

    Returns: a dict with keys "rows", each {"step", "loss", "plain" (the reference loss),
        "difference"}, means over the `every` steps up to "step"; "largest", the largest absolute
        difference; "precision" and "compiled" of `own`.
    """
    pairs = zip(own["losses"], plain["losses"], strict=True)
    rows = [
        {"step": number * every, "loss": loss, "plain": other, "difference": loss - other}
        for number, (loss, other) in enumerate(pairs, start=1)
    ]
    largest = max(abs(row["difference"]) for row in rows)
    settings = {key: own[key] for key in ("precision", "compiled")}
    return {"rows": rows, "largest": largest, **settings}


class DatasetSizeLoop(FinetuneLoop):
    """Trains a recipe on its images repeated up to another dataset size."""

    def train_on_size(self, *, images: int, warmup: int, steps: int) -> dict[str, Any]:
        """Train on a dataset of `images` images; an extra warm-up step shuffles the epoch.

        Returns: a dict with keys "images", "rate" (images per second) and "own_bytes" (memory for
            labels, row indices and the order of an epoch).
        Raises: RecipeError for images of several sizes; SetupError if the file does not fit.
        """
        loader, setup = self.loader, self.setup
        own = loader.store.images
        if isinstance(own, DecodedImages) and own.common_size:
            own = own.to(torch.device("cpu"))
        if not isinstance(own, torch.Tensor):
            raise RecipeError(
                "--images: the images have several sizes; use a dataset whose images have one size",
                code="recipe.unsupported",
            )
        mapped = self._memory_mapped(own, images)
        labels = np.take(loader.store.split.labels, np.arange(images), axis=0, mode="wrap")
        self.trainer.setup = setup.with_num_samples(images, labels)
        tracemalloc.start()  # after the mapping, which is not memory of this process
        split = loader.store.split.subset(np.resize(np.arange(len(loader.store.split)), images))
        self.active_loader = with_store(loader, PixelStore(split, mapped))
        order = self.setup.sampler.epoch_order(0)
        own_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del order
        try:
            rate = self.train(warmup=warmup + 1, steps=steps)
        finally:
            self.active_loader, self.trainer.setup = loader, setup
        return {"images": images, "rate": rate, "own_bytes": own_bytes}

    def _memory_mapped(self, images_NHWC: torch.Tensor, number: int) -> torch.Tensor:
        """Return a memory-mapped tensor with the images repeated up to `number` images."""
        shape = (number, *images_NHWC.shape[1:])
        path = self.folder / f"{number}.uint8"
        own = images_NHWC.cpu().numpy()
        if not path.exists():
            with (
                explain_disk_errors(path, needed_bytes=int(np.prod(shape))),
                path.open("wb") as file,
            ):
                for start in range(0, number, len(own)):
                    file.write(own[: number - start].data)
                file.flush()
                os.fsync(file.fileno())  # write it before the timed steps start
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+", shape=shape))


def study_sizes(
    recipe: Recipe, sizes: Sequence[int], *, warmup: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Train on datasets of several sizes in turn, each in its own process.

    Returns: a dict with keys "rows", each {"images", "train" (a `value_range`), "own_bytes"}, and
        "per_image", the bytes of memory per additional image between the smallest and the largest
        dataset, or None for a single size.
    """
    numbers = sorted(set(sizes))
    turns: dict[int, list[dict[str, Any]]] = {size: [] for size in numbers}
    total = repeats * len(turns) * (warmup + 1 + steps)
    with step_bar(total=total, start=0, shown=True) as shown, contextlib.ExitStack() as stack:
        hosts = {}
        for size in numbers:  # memory freed by one size would hide what another needs
            name = f"{size:,} images"
            shown.set_description(f"preparing {name}")
            host = LoopProcess(name, DatasetSizeLoop, {"recipe": recipe}, on_steps=shown.update)
            hosts[size] = stack.enter_context(host)
            host.call("prepare")
        for _ in range(repeats):
            for size, host in hosts.items():
                shown.set_description(f"{size:,} images")
                result = host.call("train_on_size", images=size, warmup=warmup, steps=steps)
                turns[size].append(result)
    rows: list[dict[str, Any]] = [
        {
            "images": size,
            "train": value_range([turn["rate"] for turn in own]),
            "own_bytes": int(statistics.median(turn["own_bytes"] for turn in own)),
        }
        for size, own in turns.items()
    ]
    more = numbers[-1] - numbers[0]
    grown = rows[-1]["own_bytes"] - rows[0]["own_bytes"]
    return {"rows": rows, "per_image": grown / more if more else None}
