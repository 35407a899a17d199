"""A recipe's training sentence as torchvision's transforms of one PIL image, for other loops.

In the order in which it is written: moving colour and rotation before an enlargement is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchvision.transforms import InterpolationMode, v2

from finetune.errors import RecipeError
from finetune.transforms.grammar import Call, parse

__all__ = ["translate"]

_Size = tuple[int, int]


def translate(sentence: str, *, image_size: _Size, interpolation: str) -> list[Any]:
    """Turn a sentence into torchvision's transforms of PIL images.

    Args:
        sentence: of training.
        image_size: (height, width) that the network expects, in pixels.
        interpolation: of resizes that name none.
    Returns: transforms from PIL image to PIL image; normalisation is the loop's own affair.
    Raises: RecipeError naming an operation that has no counterpart here.
    """
    transforms = []
    for call in parse(sentence):
        if call.name == "normalise":
            continue
        if call.name not in _COUNTERPARTS:
            raise RecipeError(
                f"data.train: {call.name} has no counterpart in the loops that --against compares "
                f"with; they know {', '.join(_COUNTERPARTS)}. Leave it out for the comparison, or "
                "compare with synthetic only",
                code="recipe.unsupported",
            )
        # torchvision's names of the kernels are the grammar's
        kernel = InterpolationMode(call.arguments.get("interpolation") or interpolation)
        transforms.append(_COUNTERPARTS[call.name](call.arguments, _size(call, image_size), kernel))
    return transforms


def _size(call: Call, image_size: _Size) -> int | _Size:
    """The size after an operation; a resize to one number keeps the shape, a crop is square."""
    size: int | _Size | None = call.arguments.get("size")
    if size is None:
        return image_size
    return (size, size) if isinstance(size, int) and call.name != "resize" else size


_Arguments = dict[str, Any]

_COUNTERPARTS: Mapping[str, Callable[[_Arguments, Any, InterpolationMode], Any]] = {
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
