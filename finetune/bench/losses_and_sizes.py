"""Further measurements of a recipe: its losses beside float32's, and sets of other sizes."""

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

from finetune.bench.ours import Ours, over
from finetune.bench.subprocess import Host
from finetune.bench.timer import spread
from finetune.console import bar, say
from finetune.data.image_store import Store
from finetune.data.pixel_file import Images
from finetune.errors import RecipeError
from finetune.files import disk_errors
from finetune.recipe.load import Recipe

__all__ = ["LOSSES_EVERY", "PLAINLY", "Curve", "Grown", "compared", "study_losses", "study_sizes"]

LOSSES_EVERY = 20  # steps that make one point of a curve
PLAINLY = ("run.precision=fp32", "model.compile=false")  # what the losses are compared with


class Curve(Ours):
    """A recipe's training on this process, from its first step."""

    def losses(self, *, steps: int, every: int) -> dict[str, Any]:
        """Train. Returns: "losses", the means of `every` steps each; "precision"; "compiled"."""
        self._open()
        trainer, losses = self.trainer, []
        with contextlib.closing(trainer.run), contextlib.closing(self._batches(steps)) as planned:
            for number, micro_batches in planned:
                trainer.step(number, micro_batches, self.meter)
                self.line.tick()
                if trainer.counters.step % every == 0:
                    losses.append(trainer.log(self.meter)["loss"])
        return {"losses": losses, "precision": self.precision, "compiled": trainer.compiled}


def study_losses(recipe: Recipe, plain: Recipe, *, steps: int) -> dict[str, Any]:
    """Train twice from the first step on, each time in a process of its own.

    Args:
        plain: the recipe with `PLAINLY`.
        steps: a multiple of LOSSES_EVERY.
    Returns: of `compared`.
    """
    curves = []
    with bar(total=2 * steps, start=0, shown=True) as shown:
        for name, each in (("finetune", recipe), ("in float32", plain)):
            shown.set_description(f"losses {name}")
            with Host(name, Curve, {"recipe": each}, steps=shown.update, notice=say) as host:
                curves.append(host.ask("losses", steps=steps, every=LOSSES_EVERY))
    return compared(*curves, every=LOSSES_EVERY)


def compared(own: dict[str, Any], plain: dict[str, Any], *, every: int) -> dict[str, Any]:
    """Put two curves side by side.

    Returns: "rows", each {"step", "loss", "plain", "difference"}, a mean over the `every` steps
        that end there; "largest", the largest difference; "precision" and "compiled" of the first.
    """
    pairs = zip(own["losses"], plain["losses"], strict=True)
    rows = [
        {"step": number * every, "loss": loss, "plain": other, "difference": loss - other}
        for number, (loss, other) in enumerate(pairs, start=1)
    ]
    largest = max(abs(row["difference"]) for row in rows)
    settings = {key: own[key] for key in ("precision", "compiled")}
    return {"rows": rows, "largest": largest, **settings}


class Grown(Ours):
    """A recipe's training on more images than its set has."""

    def grow(self, *, images: int, warmup: int, steps: int) -> dict[str, Any]:
        """Train on a set of another size, after one step more, which draws the epoch's order.

        Returns: "images"; "rate", images a second; "own_bytes", memory for the labels, the
            rows and the order of an epoch.
        Raises: RecipeError for images of several sizes; SetupError where the file does not fit.
        """
        loader, setup = self.loader, self.setup
        own = loader.store.images
        if isinstance(own, Images) and own.size:
            own = own.to(torch.device("cpu"))
        if not isinstance(own, torch.Tensor):
            raise RecipeError(
                "--images: the images have several sizes; name a set where they have one",
                code="recipe.unsupported",
            )
        mapped = self._mapped(own, images)
        labels = np.take(loader.store.split.labels, np.arange(images), axis=0, mode="wrap")
        self.trainer.setup = setup.with_num_samples(images, labels)
        tracemalloc.start()  # after the mapping, which is no memory of this process
        split = loader.store.split.subset(np.resize(np.arange(len(loader.store.split)), images))
        self.trained = over(loader, Store(split, mapped))
        order = self.setup.sampler.order(0)
        own_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del order
        try:
            rate = self.train(warmup=warmup + 1, steps=steps)
        finally:
            self.trained, self.trainer.setup = loader, setup
        return {"images": images, "rate": rate, "own_bytes": own_bytes}

    def _mapped(self, images_NHWC: torch.Tensor, number: int) -> torch.Tensor:
        """A file of that many images, as a tensor."""
        shape = (number, *images_NHWC.shape[1:])
        path = self.folder / f"{number}.uint8"
        own = images_NHWC.cpu().numpy()
        if not path.exists():
            with disk_errors(path, needed=int(np.prod(shape))), path.open("wb") as file:
                for start in range(0, number, len(own)):
                    file.write(own[: number - start].data)
                file.flush()
                os.fsync(file.fileno())  # else the system writes it while the clock runs
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+", shape=shape))


def study_sizes(
    recipe: Recipe, sizes: Sequence[int], *, warmup: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Train on sets of several sizes, in turn, each in a process of its own.

    Returns: "rows", each {"images", "train" of `spread`, "own_bytes"}; "per_image", bytes of memory
        for each image more, from the smallest set to the largest, or None for one set.
    """
    numbers = sorted(set(sizes))
    turns: dict[int, list[dict[str, Any]]] = {size: [] for size in numbers}
    total = repeats * len(turns) * (warmup + 1 + steps)
    with bar(total=total, start=0, shown=True) as shown, contextlib.ExitStack() as stack:
        hosts = {}
        for size in numbers:  # memory that one had and gave back would hide what another needs
            name = f"{size:,} images"
            shown.set_description(f"preparing {name}")
            host = Host(name, Grown, {"recipe": recipe}, steps=shown.update, notice=say)
            hosts[size] = stack.enter_context(host)
            host.ask("prepare")
        for _ in range(repeats):
            for size, host in hosts.items():
                shown.set_description(f"{size:,} images")
                turns[size].append(host.ask("grow", images=size, warmup=warmup, steps=steps))
    rows: list[dict[str, Any]] = [
        {
            "images": size,
            "train": spread([turn["rate"] for turn in own]),
            "own_bytes": int(statistics.median(turn["own_bytes"] for turn in own)),
        }
        for size, own in turns.items()
    ]
    more = numbers[-1] - numbers[0]
    grown = rows[-1]["own_bytes"] - rows[0]["own_bytes"]
    return {"rows": rows, "per_image": grown / more if more else None}
