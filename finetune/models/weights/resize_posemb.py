"""Grids of learned position embeddings: resize to any image size; prefix tokens stay untouched."""

# N tokens, D width, h w grid in patches

from __future__ import annotations

import math

import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from finetune.errors import WeightsError

__all__ = ["METHODS", "resize_grid", "square_grid"]

METHODS = ("paper", "timm")


def square_grid(num_tokens: int) -> tuple[int, int] | None:
    """Return the square grid that holds so many patch tokens, (height, width), or None."""
    side = math.isqrt(max(num_tokens, 0))
    return (side, side) if side * side == num_tokens and side else None


def resize_grid(
    posemb_1ND: Tensor,
    grid: tuple[int, int],
    *,
    method: str = "paper",
    num_prefix: int = 1,
    source_grid: tuple[int, int] | None = None,
) -> Tensor:
    """Resize a grid of position embeddings; prefix tokens stay as they are.

    Args:
        posemb_1ND: (1, num_prefix + h*w, D), patches in row-major order.
        grid: target (height, width) in patches.
        method: one of METHODS: "paper" is bilinear with aligned corners, computed in float64;
            "timm" is timm's antialiased bicubic.
        num_prefix: leading tokens without a place in the grid (class, distillation, registers);
            0 for networks that embed patches only.
        source_grid: (h, w) of the embeddings as given; None when they are square.
    Returns: (1, num_prefix + height*width, D), same dtype.
    Raises: WeightsError if the tokens do not fill the source grid.
    Source: vision_transformer, vit_jax/checkpoint.py, load_pretrained (zoom, order=1);
        timm.layers.resample_abs_pos_embed.
    """
    num_patches = posemb_1ND.shape[1] - num_prefix
    source_grid = source_grid or square_grid(num_patches)
    if source_grid is None or source_grid[0] * source_grid[1] != num_patches:
        raise WeightsError(
            f"pos_embed: {num_patches} position embeddings (and {num_prefix} prefix tokens) do not "
            f"form the grid {source_grid or 'of a square image'}; give the image size that the "
            f"weights were trained at",
            code="weights.wrong_shape",
        )
    if source_grid == tuple(grid):
        return posemb_1ND
    if method == "timm":
        return resample_abs_pos_embed(
            posemb_1ND, list(grid), list(source_grid), num_prefix_tokens=num_prefix
        )
    prefix_1PD, patches_1ND = posemb_1ND[:, :num_prefix], posemb_1ND[:, num_prefix:]
    image_1Dhw = patches_1ND.double().transpose(1, 2).unflatten(2, source_grid)
    # With aligned corners a target of one patch takes the first source patch, as zoom does too.
    resized_1Dhw = torch.nn.functional.interpolate(
        image_1Dhw, size=tuple(grid), mode="bilinear", align_corners=True
    )
    resized_1ND = resized_1Dhw.flatten(2).transpose(1, 2).to(posemb_1ND.dtype)
    return torch.cat([prefix_1PD, resized_1ND], dim=1)
