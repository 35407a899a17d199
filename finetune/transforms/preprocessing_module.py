"""Evaluation preprocessing as an `nn.Module`, so that it can be part of an exported model.

It computes what `Pipeline` computes for an evaluation spec, but the image size is only known when
the exported model runs. Each axis is one matrix product, whose weights are computed from the image
size: row i of the matrix has the weights of output pixel i, after resize and center crop. As in
`Pipeline`, pixel values are not rounded between resize and normalization.
"""

# H W source pixels, h w target pixels

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from finetune.errors import RecipeError
from finetune.transforms.resample import filter_weights
from finetune.transforms.spec_parser import parse_transform_spec

__all__ = ["PreprocessingModule"]

_MAX_NEAREST_OUTPUTS = 2**16  # pixels per side of a resized image, before the crop
_SUPPORTED = (["resize"], ["center_crop"], ["resize", "center_crop"])


class PreprocessingModule(nn.Module):
    """Resize, crop and normalize one image of any size.

    Args:
        transform_spec: an evaluation spec: a resize, a center_crop, or both in this order.
        image_size: (height, width) that the model expects, in pixels.
        mean, std: mean and standard deviation of each channel, for pixel values from 0 to 1.
        interpolation: default filter of the resize.
    Raises: RecipeError if the spec has other operations.
    """

    scale: Tensor
    shift: Tensor
    mean_color: Tensor

    def __init__(
        self,
        transform_spec: str,
        *,
        image_size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str,
    ) -> None:
        super().__init__()
        calls = [
            call
            for call in parse_transform_spec(transform_spec, train=False)
            if call.name != "normalise"
        ]
        if [call.name for call in calls] not in _SUPPORTED:
            raise RecipeError(
                f"data.eval '{transform_spec}': cannot be part of the exported model, which "
                "supports a resize, a center_crop, or both in this order; export the network alone "
                "with --no-preprocessing",
                code="recipe.unsupported",
            )
        arguments = {call.name: call.arguments for call in calls}
        self.resize, self.crop = arguments.get("resize"), arguments.get("center_crop")
        self.image_size = image_size
        self.interpolation = interpolation
        if self.resize is not None:
            self.interpolation = self.resize["interpolation"] or interpolation
        for name, values in (
            ("scale", [1 / (255 * s) for s in std]),
            ("shift", [-m / s for m, s in zip(mean, std, strict=True)]),
            ("mean_color", [float(round(255 * m)) for m in mean]),
        ):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def forward(self, image_1HW3: Tensor) -> Tensor:
        """Preprocess a uint8 RGB image (1, H, W, 3). Returns: (1, 3, h, w) float32."""
        source_rows = torch.arange(image_1HW3.shape[1], dtype=torch.float64)
        source_columns = torch.arange(image_1HW3.shape[2], dtype=torch.float64)
        height, width = source_rows[-1] + 1, source_columns[-1] + 1
        targets = self._resized_sides(height, width)
        matrices, paddings = [], []
        for source, length, target, size in zip(
            (source_rows, source_columns), (height, width), targets, self.image_size, strict=True
        ):
            outputs = torch.arange(size, dtype=torch.float64) + _center_crop_start(target, size)
            paddings.append((outputs < 0) | (outputs >= target))
            matrix = _resize_matrix(source, outputs, length, target, self.interpolation)
            matrices.append(matrix * ~paddings[-1][:, None])
        rows_hH, columns_wW = matrices
        # rows first: a product with the image as it is in memory, (H, W * 3)
        pixels_hC = rows_hH @ image_1HW3[0].float().flatten(1)
        pixels_hw3 = columns_wW @ pixels_hC.unflatten(1, (-1, 3))
        if self.resize is not None and self.interpolation in ("bicubic", "lanczos"):
            pixels_hw3 = pixels_hw3.clamp(0, 255)
        if self.crop is not None and self.crop["fill"] is not None:
            is_padding = paddings[0][:, None, None] | paddings[1][None, :, None]
            pixels_hw3 = torch.where(is_padding, self.mean_color, pixels_hw3)
        # channels first: ONNX Runtime is slow at a product with the three values of a last axis
        pixels_3hw = pixels_hw3.permute(2, 0, 1)
        return (pixels_3hw * self.scale[:, None, None] + self.shift[:, None, None])[None]

    def _resized_sides(self, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """Return height and width after the resize, as float64 scalars.

        Source: finetune.transforms.execution_plan.size_after_operation, for sizes in a graph.
        """
        if self.resize is None:
            return height, width
        size, fit = self.resize["size"], self.resize["fit"]
        if isinstance(size, int) and fit is None:
            shorter = torch.minimum(height, width)
            sides = tuple(
                torch.where(side == shorter, float(size), torch.floor(size * side / shorter))
                for side in (height, width)
            )
            return sides[0], sides[1]
        target_height, target_width = (
            (size, size) if isinstance(size, int) else size or self.image_size
        )
        if fit is None:
            return torch.full_like(height, target_height), torch.full_like(width, target_width)
        choose = torch.maximum if fit == "contain" else torch.minimum
        ratio = choose(height / target_height, width / target_width)
        return torch.round(height / ratio).clamp(min=1), torch.round(width / ratio).clamp(min=1)


def _center_crop_start(length: Tensor, target: int) -> Tensor:
    """Return the start of a center crop, as `geometry.center_crop_start`, for float64 scalars."""
    margin = length - target
    return torch.where(margin < 0, -torch.floor(-margin / 2), torch.round(margin / 2))


def _resize_matrix(
    source: Tensor, outputs: Tensor, length: Tensor, target: Tensor, interpolation: str
) -> Tensor:
    """Return the resampling weights (h, H) of target pixels, in float32.

    Args:
        source: (H,) float64 source pixels.
        outputs: (h,) float64 target pixels; those outside of the target get any weights.
        length, target: float64 scalars, the length of the axis before and after the resize.
    """
    if interpolation == "nearest":
        # accumulated as in resample.nearest_pixels, so that ties round the same way
        steps = (length / target) * torch.ones(_MAX_NEAREST_OUTPUTS, dtype=torch.float64)
        positions = torch.cat([steps[:1] * 0.5, steps[1:]]).cumsum(0)
        index = outputs.clamp(0, _MAX_NEAREST_OUTPUTS - 1).long()
        nearest = torch.floor(positions[index]).minimum(length - 1)
        return (source == nearest[:, None]).float()
    # float32 as in resample.unscaled_taps, so that the weights agree
    scale = length.float() / target.float()
    stretch = scale.clamp(min=1.0)
    centers = (outputs.float() + 0.5)[:, None] * scale
    weights = filter_weights((source.float() + 0.5 - centers) / stretch, interpolation)
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)
