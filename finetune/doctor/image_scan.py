"""The pass over features and pixels that near-duplicates and outliers share.

The search for neighbors and the decoding of images take most of the time of a diagnosis.
"""

# N images, D width, k neighbors, S side of a thumbnail

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
_ROWS, _COLUMNS = 512, 64  # compared at once (120 MB for 60,000 images), and in a group


class Neighbors(NamedTuple):
    """The nearest images of each image, in Euclidean distance; k is at most N - 1.

    Attributes:
        indices_Nk: the images, the nearest first.
        squared_Nk: their squared distances.
        similarities_Nk: their cosine similarities.
    """

    indices_Nk: Tensor
    squared_Nk: Tensor
    similarities_Nk: Tensor


class PixelFacts(NamedTuple):
    """Size and brightness of an image, and a gray thumbnail of it.

    Attributes:
        height, width: in pixels.
        dark, bright: 1 % of the pixels are darker, 1 % are brighter; of 255.
        thumbnail_SS: uint8.
    """

    height: int
    width: int
    dark: float
    bright: float
    thumbnail_SS: NDArray[np.uint8]


def find_feature_neighbors(features_ND: NDArray[np.float32]) -> Neighbors:
    """Find the nearest images by centered features, of at most `MAX_WIDTH` components."""
    return nearest_images(_center(features_ND), NUM_NEIGHBORS)


@torch.inference_mode()
def nearest_images(values_ND: Tensor, num_neighbors: int) -> Neighbors:
    """Find the nearest images in Euclidean distance."""
    num_images, norms_N = len(values_ND), values_ND.square().sum(1)
    unit_ND = functional.normalize(values_ND, dim=1)
    # the closeness of two images is their product less half the second one's norm: one product of
    # matrices, into memory that is used again
    left_NE = torch.cat([values_ND, torch.ones(num_images, 1)], dim=1)
    right_NE = torch.cat([values_ND, -0.5 * norms_N[:, None]], dim=1)
    num_columns = -(-num_images // _COLUMNS) * _COLUMNS
    closeness = torch.full((_ROWS, num_columns), -torch.inf)
    blocks = []
    with item_bar(num_images, label="nearest images") as bar:
        for rows in torch.arange(num_images).split(_ROWS):
            block = closeness[: len(rows)]
            torch.mm(left_NE[rows], right_NE.T, out=block[:, :num_images])
            block[torch.arange(len(rows)), rows] = -torch.inf
            nearest, indices = _top_columns(block, min(num_neighbors, num_images - 1))
            squared = (norms_N[rows, None] - 2 * nearest).clamp(min=0)
            similarities = torch.einsum("nd,nkd->nk", unit_ND[rows], unit_ND[indices])
            blocks.append((indices, squared, similarities))
            bar.update(len(rows))
    return Neighbors(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _top_columns(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, and their columns; a third of the time of `topk`.

    They are in the k groups of columns that have the largest maxima.
    """
    groups = values.unflatten(1, (-1, _COLUMNS))
    group = groups.amax(2).topk(min(k, groups.shape[1])).indices
    candidates = groups.gather(1, group[:, :, None].expand(-1, -1, _COLUMNS)).flatten(1)
    columns = (group[:, :, None] * _COLUMNS + torch.arange(_COLUMNS)).flatten(1)
    largest, position = candidates.topk(k)
    return largest, columns.gather(1, position)


def _center(features_ND: NDArray[np.float32]) -> Tensor:
    """Return features without their mean, reduced to at most `MAX_WIDTH` principal components."""
    values_ND = torch.from_numpy(np.require(features_ND, requirements=["C", "W"]))
    num_images, width = values_ND.shape
    mean = values_ND.mean(0)
    if width <= MAX_WIDTH:
        return values_ND - mean
    covariance = values_ND.T @ values_ND / num_images - mean[:, None] * mean
    components = torch.linalg.eigh(covariance).eigenvectors[:, -MAX_WIDTH:]
    return values_ND @ components - mean @ components


def measure_pixels(
    decode: Callable[[int], NDArray[np.uint8]], num_images: int
) -> list[PixelFacts | None]:
    """Decode each image once, and return what is known of its pixels.

    Args:
        decode: function that returns image i as (H, W, 3) uint8; called from several threads. It
            raises a DataError for an unreadable image.
    Returns: one entry for each image; None if it is unreadable.
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

    facts = []
    with item_bar(num_images, label="pixels") as bar:
        for each in thread_map(measure, range(num_images), num_cores()):
            facts.append(each)
            bar.update()
    return facts
