"""The pass over features and pixels that near-duplicates and outliers share.

The search for neighbors and the decoding of images take most of the time of a diagnosis.
"""

# N images, B images of a block, D width, k neighbors, S side of a thumbnail

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from finetune.data.thread_pool import thread_map
from finetune.errors import DataError
from finetune.host_resources import num_cores
from finetune.progress import item_bar

__all__ = [
    "THUMBNAIL_SIDE",
    "Neighbors",
    "PixelFacts",
    "find_feature_neighbors",
    "measure_pixels",
    "nearest_images",
]

THUMBNAIL_SIDE = 32
NUM_NEIGHBORS = 10
MAX_WIDTH = 192  # principal components of the features, for speed
_BLOCK_SIZE = 512  # images compared with all at once: 120 MB for 60,000 images
_COLUMNS = 64  # of a group in the search for the smallest distances


class Neighbors(NamedTuple):
    """The nearest images of each image, nearest first; k is at most N - 1."""

    indices_Nk: Tensor
    squared_Nk: Tensor  # Euclidean distances
    similarities_Nk: Tensor  # of their cosine


class PixelFacts(NamedTuple):
    """Size in pixels and brightness of an image, and a gray thumbnail of it."""

    height: int
    width: int
    dark: float  # 1 % of the pixels are darker; of 255
    bright: float  # 1 % of the pixels are brighter
    thumbnail_SS: NDArray[np.uint8]


def find_feature_neighbors(features_ND: NDArray[np.float32]) -> Neighbors:
    """Find the nearest images by centered features, of at most `MAX_WIDTH` principal components."""
    values_ND = torch.from_numpy(np.require(features_ND, requirements=["C", "W"]))
    mean = values_ND.mean(0)
    if values_ND.shape[1] <= MAX_WIDTH:
        return nearest_images(values_ND - mean, NUM_NEIGHBORS)
    covariance = values_ND.T @ values_ND / len(values_ND) - mean[:, None] * mean
    components = torch.linalg.eigh(covariance).eigenvectors[:, -MAX_WIDTH:]
    return nearest_images(values_ND @ components - mean @ components, NUM_NEIGHBORS)


@torch.inference_mode()
def nearest_images(values_ND: Tensor, num_neighbors: int) -> Neighbors:
    """Find the nearest images in Euclidean distance."""
    num_images, k = len(values_ND), min(num_neighbors, len(values_ND) - 1)
    norms_N, unit_ND = values_ND.square().sum(1), functional.normalize(values_ND, dim=1)
    num_columns = -(-num_images // _COLUMNS) * _COLUMNS
    memory = torch.full((_BLOCK_SIZE, num_columns), torch.inf)  # of all blocks, for speed
    blocks = []
    with item_bar(num_images, label="nearest images") as bar:
        for rows_B in torch.arange(num_images).split(_BLOCK_SIZE):
            # the squared distances without the norms of the rows themselves
            squared_BN = memory[: len(rows_B)]
            out = squared_BN[:, :num_images]
            torch.addmm(norms_N, values_ND[rows_B], values_ND.T, alpha=-2.0, out=out)
            squared_BN[torch.arange(len(rows_B)), rows_B] = torch.inf
            squared_Bk, indices_Bk = _smallest(squared_BN, k)
            squared_Bk = (squared_Bk + norms_N[rows_B, None]).clamp(min=0)
            similarities_Bk = torch.einsum("bd,bkd->bk", unit_ND[rows_B], unit_ND[indices_Bk])
            blocks.append((indices_Bk, squared_Bk, similarities_Bk))
            bar.update(len(rows_B))
    return Neighbors(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k smallest values of each row, and their columns; a third of the time of `topk`.

    They are in the k groups of columns that have the smallest minima.
    """
    groups = values.unflatten(1, (-1, _COLUMNS))
    group = groups.amin(2).topk(min(k, groups.shape[1]), largest=False).indices[:, :, None]
    candidates = groups.gather(1, group.expand(-1, -1, _COLUMNS)).flatten(1)
    columns = (group * _COLUMNS + torch.arange(_COLUMNS)).flatten(1)
    smallest, position = candidates.topk(k, largest=False)
    return smallest, columns.gather(1, position)


def measure_pixels(
    decode: Callable[[int], NDArray[np.uint8]], num_images: int
) -> dict[int, PixelFacts]:
    """Decode each image once, and return what is known of its pixels.

    Args:
        decode: function that returns image i as (H, W, 3) uint8; called from several threads. It
            raises a DataError for an unreadable image.
    Returns: what is known, by i, ascending; unreadable images are missing.
    """

    def measure(index: int) -> PixelFacts | None:
        try:
            pixels = decode(index)
        except DataError:
            return None
        height, width = pixels.shape[:2]
        step = max(1, min(height, width) // 256)
        dark, bright = np.quantile(pixels[::step, ::step].mean(axis=2), [0.01, 0.99])
        image = Image.fromarray(pixels).convert("L")
        side = (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
        thumbnail = image.resize(side, Image.Resampling.BILINEAR, reducing_gap=2.0)
        return PixelFacts(height, width, float(dark), float(bright), np.asarray(thumbnail))

    facts = {}
    with item_bar(num_images, label="pixels") as bar:
        for index, each in enumerate(thread_map(measure, range(num_images), num_cores())):
            if each is not None:
                facts[index] = each
            bar.update()
    return facts
