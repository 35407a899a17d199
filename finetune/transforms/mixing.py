"""Mixup and CutMix: mix each image of a batch, and its label, with a partner image.

Partners are neighbors in the batch; the sampler keeps both on the same rank.
"""

# B batch, b rows with the same operation, C channels, H W pixels, K classes

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.geometry import box_mask
from finetune.transforms.sample_rng import FloatArray, IntArray, SampleRNG, to_device
from finetune.transforms.spec_parser import TransformCall

__all__ = ["PAIR_SIZE", "draw_cutmix_boxes", "mix_batch", "partner_rows"]

PAIR_SIZE = 2


def partner_rows(num_rows: int) -> npt.NDArray[np.int64]:
    """Return the partner row of each row, (num_rows,); an unpaired last row is its own partner."""
    rows = np.arange(num_rows)
    return np.where(rows ^ 1 < num_rows, rows ^ 1, rows)


def mix_batch(
    images_BCHW: Tensor,
    targets_BK: Tensor,
    keys: npt.NDArray[np.uint64],
    partners: Tensor,
    calls: Sequence[tuple[int, TransformCall]],
    *,
    num_calls: int,
) -> tuple[Tensor, Tensor]:
    """Mix each row with its partner row by mixup or cutmix; if the spec has both, draw one per row.

    Args:
        images_BCHW: normalized images.
        targets_BK: float targets, one distribution over the classes per row.
        keys: (B,) sample keys, which determine all random numbers.
        partners: (B,) int64 index of the row to mix into each row.
        calls: the mixup and cutmix operations of the spec, as (position in the spec, call).
        num_calls: number of operations in the spec; used as the position of the random choice
            between mixup and cutmix.
    Returns: new images (B, C, H, W) and targets (B, K).
    Source: torchvision, transforms.v2.MixUp and CutMix; random choice as in timm.data.Mixup.
    """
    choice_B = SampleRNG(keys, num_calls).integers(np.full(len(keys), len(calls)))
    partners = partners.to(images_BCHW.device)
    images, targets = images_BCHW.clone(), targets_BK.clone()
    for choice, (position, call) in enumerate(calls):
        rows = np.flatnonzero(choice_B == choice)
        if not len(rows):
            continue
        rng = SampleRNG(keys[rows], position)
        index = to_device(rows, images.device)
        own, other = images_BCHW[index], images_BCHW[partners[index]]
        own_share = rng.beta(call.arguments["alpha"])
        if call.name == "mixup":
            images[index] = _mixup(own, other, own_share)
        else:
            images[index], own_share = _cutmix(own, other, rng, own_share)
        own_weight = to_device(own_share, targets.device).to(targets.dtype)[:, None]
        index, partner_index = index.to(targets.device), partners[index].to(targets.device)
        targets[index] = targets_BK[index] * own_weight + targets_BK[partner_index] * (
            1 - own_weight
        )
    return images, targets


def _mixup(own_bCHW: Tensor, other_bCHW: Tensor, own_share: FloatArray) -> Tensor:
    weight = to_device(own_share, own_bCHW.device).to(own_bCHW.dtype).view(-1, 1, 1, 1)
    return own_bCHW * weight + other_bCHW * (1 - weight)


def _cutmix(
    own_bCHW: Tensor, other_bCHW: Tensor, rng: SampleRNG, own_share: FloatArray
) -> tuple[Tensor, FloatArray]:
    """Paste a rectangle of the partner. Returns: images, and the share (b,) that is not pasted."""
    size = (own_bCHW.shape[2], own_bCHW.shape[3])
    box = draw_cutmix_boxes(rng, size, own_share)
    mixed = torch.where(box_mask(box, size, own_bCHW.device), other_bCHW, own_bCHW)
    return mixed, 1 - box[2] * box[3] / (size[0] * size[1])


def draw_cutmix_boxes(
    rng: SampleRNG, size: tuple[int, int], keep_share: FloatArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Draw CutMix rectangles: random center, aspect ratio of the image, clipped at the borders.

    Args:
        rng: random numbers, one stream per sample.
        size: (height, width) of the images in pixels.
        keep_share: (B,) fraction of the image outside the rectangle, before clipping.
    Returns: top, left, height, width, each (B,).
    Source: torchvision, transforms.v2.CutMix.make_params.
    """
    half_side = 0.5 * np.sqrt(1 - keep_share)
    spans = []
    for length in size:
        center = rng.integers(np.full(len(rng), length))
        half_length = (half_side * length).astype(np.int64)
        start, end = np.maximum(center - half_length, 0), np.minimum(center + half_length, length)
        spans.append((start, end - start))
    (top, height), (left, width) = spans
    return top, left, height, width
