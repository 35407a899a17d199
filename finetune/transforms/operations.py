"""Table of transform operations: names, arguments, bounds and help text (no torch here)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "CORRUPTIONS",
    "INTERPOLATIONS",
    "MAX_IMAGE_SIDE",
    "OPERATIONS",
    "SEVERITIES",
    "Operation",
    "Parameter",
    "format_operations_help",
    "format_signature",
]

MAX_IMAGE_SIDE = 8192  # pixels per side; larger images would take gigabytes each

ParameterKind = Literal["size", "number", "integer", "symmetric_range", "range", "choice"]
CORRUPTIONS = ("noise", "blur", "jpeg", "contrast")
SEVERITIES = (1, 2, 3, 4, 5)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class Parameter:
    """One argument of an operation: its accepted values and default."""

    kind: ParameterKind
    default: Any = None
    low: float = 0.0
    high: float = math.inf
    choices: tuple[str, ...] = ()
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation that a transform spec can contain."""

    help: str
    parameters: Mapping[str, Parameter]
    role: Literal["geometry", "pixels", "normalize", "erase", "mix"]
    is_random: bool


_SIZE = Parameter("size", None, 1, MAX_IMAGE_SIDE)
_PROBABILITY = Parameter("number", 0.5, 0, 1)
_INTERPOLATION = Parameter("choice", None, choices=INTERPOLATIONS)
_FIT = Parameter("choice", None, choices=("contain", "cover"))
_WARP_INTERPOLATION = Parameter("choice", "nearest", choices=("nearest", "bilinear"))
_JITTER = Parameter("symmetric_range", 0.0, 0, 100)
_ASPECT_RATIO_BOUNDS = (0.001, 1000)  # aspect ratios are drawn in log space, so above 0

OPERATIONS: dict[str, Operation] = {
    "resize": Operation(
        "resize to the model's size; resize(n): shorter side to n; resize((h, w)): to h x w; "
        "fit='contain' keeps the aspect ratio, with both sides at most this long; fit='cover': at "
        "least this long",
        {"size": _SIZE, "interpolation": _INTERPOLATION, "fit": _FIT},
        "geometry",
        is_random=False,
    ),
    "center_crop": Operation(
        "crop the center; if the image is smaller, pad it with zeros (fill='mean': mean color)",
        {"size": _SIZE, "fill": Parameter("choice", None, choices=("mean",))},
        "geometry",
        is_random=False,
    ),
    "random_crop": Operation(
        "pad each side with `padding` zeros, then crop at a random position",
        {"size": _SIZE, "padding": Parameter("integer", 0, 0, MAX_IMAGE_SIDE)},
        "geometry",
        is_random=True,
    ),
    "random_resized_crop": Operation(
        "crop a random area with a random aspect ratio and resize it to `size`",
        {
            "size": _SIZE,
            "scale": Parameter("range", (0.08, 1.0), 0, 1),
            "ratio": Parameter("range", (3 / 4, 4 / 3), *_ASPECT_RATIO_BOUNDS),
            "interpolation": _INTERPOLATION,
        },
        "geometry",
        is_random=True,
    ),
    "flip": Operation(
        "flip horizontally with probability p", {"p": _PROBABILITY}, "geometry", True
    ),
    "vertical_flip": Operation(
        "flip vertically with probability p", {"p": _PROBABILITY}, "geometry", True
    ),
    "rotate": Operation(
        "rotate by a random angle from [-degrees, degrees] or [low, high]; fill with 0",
        {
            "degrees": Parameter("symmetric_range", low=-360, high=360, required=True),
            "interpolation": _WARP_INTERPOLATION,
        },
        "pixels",
        is_random=True,
    ),
    "color_jitter": Operation(
        "random factors from [1-x, 1+x] (hue: shift from [-x, x], x at most 0.5), in random order",
        {
            "brightness": _JITTER,
            "contrast": _JITTER,
            "saturation": _JITTER,
            "hue": Parameter("symmetric_range", 0.0, -0.5, 0.5),
        },
        "pixels",
        is_random=True,
    ),
    "rand_augment": Operation(
        "apply num_ops random operations, drawn from RandAugment's fourteen",
        {
            "num_ops": Parameter("integer", 2, 0, 16),
            "magnitude": Parameter("integer", 9, 0, 999),
            "num_magnitude_bins": Parameter("integer", 31, 2, 1000),
            "interpolation": _WARP_INTERPOLATION,
        },
        "pixels",
        is_random=True,
    ),
    "trivial_augment": Operation(
        "TrivialAugment: apply one of RandAugment's operations with a random magnitude",
        {
            "num_magnitude_bins": Parameter("integer", 31, 2, 1000),
            "interpolation": _WARP_INTERPOLATION,
        },
        "pixels",
        is_random=True,
    ),
    "auto_augment": Operation(
        "AutoAugment with the policy learned on ImageNet",
        {"interpolation": _WARP_INTERPOLATION},
        "pixels",
        is_random=True,
    ),
    "augmix": Operation(
        "AugMix: mix the image with `width` chains of `depth` random operations (0: 1 to 3)",
        {
            "severity": Parameter("integer", 3, 1, 10),
            "width": Parameter("integer", 3, 1, 10),
            "depth": Parameter("integer", 0, 0, 10),
            "alpha": Parameter("number", 1.0, 0.01, 100),
            "interpolation": Parameter("choice", "bilinear", choices=("nearest", "bilinear")),
        },
        "pixels",
        is_random=True,
    ),
    "three_augment": Operation(
        "3-Augment of DeiT III: grayscale, solarization or blur; DeiT III adds color_jitter(0.3, "
        "0.3, 0.3) and flip",
        {},
        "pixels",
        is_random=True,
    ),
    "grayscale": Operation(
        "convert to grayscale with probability p",
        {"p": Parameter("number", 0.1, 0, 1)},
        "pixels",
        is_random=True,
    ),
    "gaussian_blur": Operation(
        "with probability p, blur with a standard deviation from `sigma`, in pixels",
        {"p": _PROBABILITY, "sigma": Parameter("range", (0.1, 2.0), 0.01, 100)},
        "pixels",
        is_random=True,
    ),
    "corrupt": Operation(
        f"apply {', '.join(CORRUPTIONS)} with severity 1 to 5, to measure robustness; not for "
        "recipes, only for finetune eval --corrupt",
        {
            "kind": Parameter("choice", choices=CORRUPTIONS, required=True),
            "severity": Parameter("integer", None, SEVERITIES[0], SEVERITIES[-1], required=True),
        },
        "pixels",
        is_random=True,
    ),
    "normalise": Operation(
        "(x - mean) / std; if omitted, applied before random_erasing or at the end",
        {},
        "normalize",
        False,
    ),
    "random_erasing": Operation(
        "with probability p, fill a random rectangle with `value` (after normalization)",
        {
            "p": _PROBABILITY,
            "scale": Parameter("range", (0.02, 0.33), 0, 1),
            "ratio": Parameter("range", (0.3, 3.3), *_ASPECT_RATIO_BOUNDS),
            "value": Parameter("number", 0.0, -1000, 1000),
        },
        "erase",
        is_random=True,
    ),
    "mixup": Operation(
        "blend images and labels in pairs, with a weight from Beta(alpha, alpha)",
        {"alpha": Parameter("number", 1.0, 0.01, 100)},
        "mix",
        is_random=True,
    ),
    "cutmix": Operation(
        "paste a rectangle of another image, with an area drawn from Beta(alpha, alpha), and mix "
        "the labels by area",
        {"alpha": Parameter("number", 1.0, 0.01, 100)},
        "mix",
        is_random=True,
    ),
}


def format_signature(name: str) -> str:
    """Format an operation with its arguments and defaults: `mixup(alpha=1.0)`."""
    arguments = ", ".join(
        key if parameter.required else f"{key}={parameter.default!r}"
        for key, parameter in OPERATIONS[name].parameters.items()
    )
    return f"{name}({arguments})"


def format_operations_help() -> str:
    """Format the table of operations for a terminal, one paragraph per operation."""
    return "\n".join(
        f"{format_signature(name)}\n    {operation.help}" for name, operation in OPERATIONS.items()
    )
