"""The operations of image pipelines: their names, arguments, bounds and meaning (no torch here)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "CORRUPTIONS",
    "INTERPOLATIONS",
    "MAX_SIZE",
    "OPERATIONS",
    "SEVERITIES",
    "Operation",
    "Parameter",
    "help_text",
]

MAX_SIZE = 8192  # pixels a side; more would ask for gigabytes an image

Kind = Literal["size", "number", "integer", "spread", "pair", "choice"]
CORRUPTIONS = ("noise", "blur", "jpeg", "contrast")
SEVERITIES = (1, 2, 3, 4, 5)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class Parameter:
    """One argument of an operation: what it accepts and what it is when it is not written."""

    kind: Kind
    default: Any = None
    low: float = 0.0
    high: float = math.inf
    choices: tuple[str, ...] = ()
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """One word of the grammar."""

    help: str
    parameters: Mapping[str, Parameter]
    role: Literal["geometry", "pixels", "normalise", "erase", "mix"]
    random: bool


_SIZE = Parameter("size", None, 1, MAX_SIZE)
_PROBABILITY = Parameter("number", 0.5, 0, 1)
_KERNEL = Parameter("choice", None, choices=INTERPOLATIONS)
_WARP = Parameter("choice", "nearest", choices=("nearest", "bilinear"))
_SPREAD = Parameter("spread", 0.0, 0, 100)
_RATIO = (0.001, 1000)  # bounds of an aspect ratio: its logarithm is drawn

OPERATIONS: dict[str, Operation] = {
    "resize": Operation(
        "to the model's size; resize(n): the shorter side to n; resize((h, w)): exactly that",
        {"size": _SIZE, "interpolation": _KERNEL},
        "geometry",
        random=False,
    ),
    "center_crop": Operation(
        "the middle, zeros around it where the image is smaller", {"size": _SIZE}, "geometry", False
    ),
    "random_crop": Operation(
        "a window anywhere in the image, after `padding` pixels of zeros on each side",
        {"size": _SIZE, "padding": Parameter("integer", 0, 0, MAX_SIZE)},
        "geometry",
        random=True,
    ),
    "random_resized_crop": Operation(
        "a window of random area and aspect ratio, resized to `size`",
        {
            "size": _SIZE,
            "scale": Parameter("pair", (0.08, 1.0), 0, 1),
            "ratio": Parameter("pair", (3 / 4, 4 / 3), *_RATIO),
            "interpolation": _KERNEL,
        },
        "geometry",
        random=True,
    ),
    "flip": Operation("left to right with probability p", {"p": _PROBABILITY}, "geometry", True),
    "vertical_flip": Operation(
        "upside down with probability p", {"p": _PROBABILITY}, "geometry", True
    ),
    "rotate": Operation(
        "by an angle drawn from [-degrees, degrees] or [low, high]; zeros in the corners",
        {"degrees": Parameter("spread", low=-360, high=360, required=True), "interpolation": _WARP},
        "pixels",
        random=True,
    ),
    "color_jitter": Operation(
        "factors drawn from [1-x, 1+x] (hue: [-x, x], at most 0.5), applied in random order",
        {
            "brightness": _SPREAD,
            "contrast": _SPREAD,
            "saturation": _SPREAD,
            "hue": Parameter("spread", 0.0, -0.5, 0.5),
        },
        "pixels",
        random=True,
    ),
    "rand_augment": Operation(
        "num_ops operations out of RandAugment's fourteen",
        {
            "num_ops": Parameter("integer", 2, 0, 16),
            "magnitude": Parameter("integer", 9, 0, 999),
            "num_magnitude_bins": Parameter("integer", 31, 2, 1000),
            "interpolation": _WARP,
        },
        "pixels",
        random=True,
    ),
    "corrupt": Operation(
        f"corrupted by {', '.join(CORRUPTIONS)} of severity 1 to 5, to measure robustness; not in "
        "recipes: finetune eval --corrupt",
        {
            "kind": Parameter("choice", choices=CORRUPTIONS, required=True),
            "severity": Parameter("integer", None, SEVERITIES[0], SEVERITIES[-1], required=True),
        },
        "pixels",
        random=True,
    ),
    "normalise": Operation(
        "(x - mean) / std; implied before random_erasing or at the end", {}, "normalise", False
    ),
    "random_erasing": Operation(
        "with probability p a rectangle becomes `value` (after normalisation)",
        {
            "p": _PROBABILITY,
            "scale": Parameter("pair", (0.02, 0.33), 0, 1),
            "ratio": Parameter("pair", (0.3, 3.3), *_RATIO),
            "value": Parameter("number", 0.0, -1000, 1000),
        },
        "erase",
        random=True,
    ),
    "mixup": Operation(
        "blend with another image and its label, weight drawn from Beta(alpha, alpha)",
        {"alpha": Parameter("number", 1.0, 0.01, 100)},
        "mix",
        random=True,
    ),
    "cutmix": Operation(
        "a rectangle of another image, labels by area, area from Beta(alpha, alpha)",
        {"alpha": Parameter("number", 1.0, 0.01, 100)},
        "mix",
        random=True,
    ),
}


def help_text() -> str:
    """Return the table of operations, one paragraph each, for the command line."""
    lines = []
    for name, operation in OPERATIONS.items():
        arguments = ", ".join(
            key if parameter.required else f"{key}={parameter.default!r}"
            for key, parameter in operation.parameters.items()
        )
        lines.append(f"{name}({arguments})\n    {operation.help}")
    return "\n".join(lines)
