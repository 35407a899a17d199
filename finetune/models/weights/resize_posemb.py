"""Resize learned position embeddings to another grid; prefix tokens do not change."""

# N tokens, D width, h w grid in patches

from __future__ import annotations

import math

import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor
from torch.nn.functional import interpolate

from finetune.errors import WeightsError

__all__ = ["RESIZE_METHODS", "default_resize_method", "resize_posemb", "square_grid"]

RESIZE_METHODS = ("paper", "timm", "dinov2")
_GOOGLE_TAGS = ("augreg", "orig_in21k", "sam_in1k")  # timm's tags of Google's ViTs begin with these
_GOOGLE_ARCHITECTURES = ("_siglip", "flexivit")


def default_resize_method(architecture: str, tag: str | None) -> str:
    """Return the resize method for pretrained weights by their origin.

    Args:
        architecture: timm's name, without a tag.
        tag: timm's tag of the weights; None if they have none.
    Returns: "paper" for weights from Google, "timm" for all others.
    Source: big_vision, models/vit.py, resample_posemb.
    """
    is_google = (tag or "").startswith(_GOOGLE_TAGS) or any(
        name in architecture for name in _GOOGLE_ARCHITECTURES
    )
    return "paper" if is_google else "timm"


def square_grid(num_tokens: int) -> tuple[int, int] | None:
    """Return (side, side) if the number of patch tokens is a square number above 0, else None."""
    side = math.isqrt(max(num_tokens, 0))
    return (side, side) if side * side == num_tokens and side else None


def resize_posemb(
    posemb_1ND: Tensor,
    target_grid: tuple[int, int],
    *,
    method: str = "paper",
    num_prefix_tokens: int = 1,
    source_grid: tuple[int, int] | None = None,
) -> Tensor:
    """Resize a grid of position embeddings; prefix tokens do not change.

    Args:
        posemb_1ND: (1, num_prefix_tokens + h*w, D): prefix tokens, then patches in row-major order.
        target_grid: (height, width) in patches.
        method: one of RESIZE_METHODS: "paper" is bilinear with aligned corners, computed in
            float64; "timm" is timm's antialiased bicubic; "dinov2" is bicubic without antialiasing,
            with the scale (n + 0.1) / m from m to n patches, computed in float64.
        num_prefix_tokens: leading tokens outside the grid (class, distillation, registers); 0 for
            networks that embed only patches.
        source_grid: (h, w) of `posemb_1ND`; None for a square grid.
    Returns: (1, num_prefix_tokens + height*width, D), same dtype.
    Raises: WeightsError if the tokens do not fill the source grid.
    Source: vision_transformer, vit_jax/checkpoint.py, load_pretrained (zoom, order=1);
        timm.layers.resample_abs_pos_embed; dinov2, models/vision_transformer.py,
        interpolate_pos_encoding.
    """
    num_patches = posemb_1ND.shape[1] - num_prefix_tokens
    source_grid = source_grid or square_grid(num_patches)
    if source_grid is None or source_grid[0] * source_grid[1] != num_patches:
        raise WeightsError(
            f"pos_embed: {num_patches} position embeddings (and {num_prefix_tokens} prefix tokens) "
            f"do not form the grid {source_grid or 'of a square image'}; give the image size that "
            f"the weights were trained at",
            code="weights.wrong_shape",
        )
    if source_grid == tuple(target_grid):
        return posemb_1ND
    if method == "timm":
        return resample_abs_pos_embed(
            posemb_1ND, list(target_grid), list(source_grid), num_prefix_tokens=num_prefix_tokens
        )
    prefix_1PD, patches_1ND = posemb_1ND[:, :num_prefix_tokens], posemb_1ND[:, num_prefix_tokens:]
    image_1Dhw = patches_1ND.double().transpose(1, 2).unflatten(2, source_grid)
    if method == "dinov2":
        scale = [(n + 0.1) / m for n, m in zip(target_grid, source_grid, strict=True)]
        resized_1Dhw = interpolate(image_1Dhw, scale_factor=scale, mode="bicubic")
    else:
        # aligned corners: a target of one patch gets the first source patch, as in scipy's zoom
        resized_1Dhw = interpolate(
            image_1Dhw, size=tuple(target_grid), mode="bilinear", align_corners=True
        )
    resized_1ND = resized_1Dhw.flatten(2).transpose(1, 2).to(posemb_1ND.dtype)
    return torch.cat([prefix_1PD, resized_1ND], dim=1)
