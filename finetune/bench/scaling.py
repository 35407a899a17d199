"""How the cost of training grows with the number of images: it should not, but for their labels.

The set's own images, over and over, in one file of uint8 that is mapped into memory.
"""

# N images, H W pixels, C channels

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import numpy as np
import torch

from finetune.bench.ours import Ours
from finetune.data.image_store import Store
from finetune.data.loader import Feed
from finetune.errors import RecipeError
from finetune.files import disk_errors

__all__ = ["Grown", "per_image"]


class Grown(Ours):
    """A recipe's training on more images than its set has."""

    def grow(self, *, images: int, warmup: int, steps: int) -> dict[str, Any]:
        """Train on a set of another size.

        Args:
            images: in the set.
            warmup: steps that are left out; one more comes first, which draws the epoch's order.
            steps: that are timed.
        Returns: "images"; "rate", images a second; "own_bytes", memory for the labels, the
            rows and the order of an epoch.
        Raises: RecipeError for images of several sizes; SetupError where the file does not fit.
        """
        feed, job = self.feed, self.job
        if not isinstance(feed.store.images, torch.Tensor):
            raise RecipeError(
                "--images: the images have several sizes; name a set where they have one"
            )
        mapped = self._mapped(feed.store.images, images)
        before, job.num_samples = job.num_samples, images
        tracemalloc.start()  # after the mapping, which is no memory of this process
        split = feed.store.split.subset(np.resize(np.arange(len(feed.store.split)), images))
        self.trained = Feed(
            Store(split, mapped),
            feed.pipeline,
            num_classes=feed.num_classes,
            device=feed.device,
            dtype=feed.dtype,
        )
        order = job.stream.order(0)
        own_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del order
        try:
            rate = self.train(warmup=warmup + 1, steps=steps)
        finally:
            self.trained, job.num_samples = feed, before
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


def per_image(rows: list[dict[str, Any]]) -> float | None:
    """Bytes of memory for each image more, from the smallest set to the largest."""
    smallest, largest = (pick(rows, key=lambda row: row["images"]) for pick in (min, max))
    more = largest["images"] - smallest["images"]
    return (largest["own_bytes"] - smallest["own_bytes"]) / more if more else None
