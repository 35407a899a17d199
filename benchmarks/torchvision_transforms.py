"""Translate a recipe's training transforms to torchvision, for the other programs.

The transforms run in the written order; only our own pipeline moves color and rotation before
upscaling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchvision.transforms import InterpolationMode, v2

from finetune.transforms.spec_parser import TransformCall, parse_transform_spec

__all__ = ["to_torchvision"]

_Size = tuple[int, int]


def to_torchvision(transform_spec: str, *, image_size: _Size, interpolation: str) -> list[Any]:
    """Translate a transform spec into torchvision transforms of PIL images.

    Args:
        transform_spec: the transform spec of training.
        image_size: (height, width) of the network's input, in pixels.
        interpolation: default interpolation of resizes.
    Returns: transforms from PIL image to PIL image, without normalization, which the loop does.
    Raises: SystemExit for an operation without a counterpart in torchvision.
    """
    transforms = []
    for call in parse_transform_spec(transform_spec):
        if call.name == "normalise":
            continue
        if call.name not in _TORCHVISION_TRANSFORMS:
            raise SystemExit(
                f"data.train: {call.name} has no counterpart here; the benchmarks support "
                f"{', '.join(_TORCHVISION_TRANSFORMS)}"
            )
        # torchvision uses the same names for interpolation
        kernel = InterpolationMode(call.arguments.get("interpolation") or interpolation)
        transforms.append(
            _TORCHVISION_TRANSFORMS[call.name](
                call.arguments, _output_size(call, image_size), kernel
            )
        )
    return transforms


def _output_size(call: TransformCall, image_size: _Size) -> int | _Size:
    """Return the output size; an int is the shorter side, and occurs only for a resize."""
    size: int | _Size | None = call.arguments.get("size")
    if size is None:
        return image_size
    return (size, size) if isinstance(size, int) and call.name != "resize" else size


_CallArguments = dict[str, Any]

_TORCHVISION_TRANSFORMS: Mapping[str, Callable[[_CallArguments, Any, InterpolationMode], Any]] = {
    "resize": lambda given, size, kernel: v2.Resize(size, interpolation=kernel),
    "center_crop": lambda given, size, kernel: v2.CenterCrop(size),
    "random_crop": lambda given, size, kernel: v2.RandomCrop(size, padding=given["padding"]),
    "random_resized_crop": lambda given, size, kernel: v2.RandomResizedCrop(
        size, scale=given["scale"], ratio=given["ratio"], interpolation=kernel
    ),
    "flip": lambda given, size, kernel: v2.RandomHorizontalFlip(given["p"]),
    "vertical_flip": lambda given, size, kernel: v2.RandomVerticalFlip(given["p"]),
    "rotate": lambda given, size, kernel: v2.RandomRotation(given["degrees"], interpolation=kernel),
    "color_jitter": lambda given, size, kernel: v2.ColorJitter(**given),
}
