"""config.json in timm's hub format, written by somebody else: checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import timm
from timm.models import PretrainedCfg, split_model_name_tag

from finetune.errors import WeightsError, nearest
from finetune.files import open_regular

__all__ = [
    "CONTROL_ARGS",
    "ModelConfig",
    "clean",
    "enormous",
    "is_size",
    "read_config",
    "read_json",
]

# What an architecture fixes, where an old config.json leaves it out.
STRUCTURE_KEYS = ("classifier", "first_conv", "fixed_input_size", "input_size")
# Keys of timm's pretrained configuration that say where weights were, not what they are.
PLACE_KEYS = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load")
# Keywords of timm.create_model() that steer it (where it loads from, what it returns) and are
# no arguments of a network.
CONTROL_ARGS = (
    "model_name",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "scriptable",
    "exportable",
    "no_jit",
    "features_only",
    "num_classes",
    "in_chans",
    "model_cfg",
    "feature_cfg",
    "pruned",
    "pretrained_strict",
    "pretrained_filter_fn",
    "pretrained_model_args",
    "kwargs_filter",
)

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
CROP_MODES = ("center", "squash", "border")
LARGEST_SIDE = 8192  # pixels
LARGEST_ARGUMENT = 20_000  # far above any width, depth or length of a network
LARGEST_JSON = 8 * 2**20  # bytes; ImageNet-21k's class names with their descriptions take 2 MB


@dataclass(frozen=True)
class ModelConfig:
    """What a config.json says.

    Attributes:
        architecture: timm's name, without a tag.
        model_args: timm's keyword arguments of the network.
        config: timm's pretrained configuration, without the places that weights once came from.
        class_names: in the order of the logits, when it has them.
        temperature: divides the logits before the softmax, when it was fitted.
    """

    architecture: str
    model_args: dict[str, Any]
    config: dict[str, Any]
    class_names: list[str] | None
    temperature: float | None


def read_json(path: Path, where: str) -> Any:
    """Read a JSON file of somebody else, of which no more than LARGEST_JSON is taken into memory.

    Args:
        path: of the file.
        where: what the user calls it, for messages.
    Raises: WeightsError for a file that cannot be read, is too large, or is not JSON.
    """
    try:
        with open_regular(path, limit_bytes=LARGEST_JSON) as file:
            content = file.read(LARGEST_JSON)
    except OSError as error:
        raise WeightsError(f"{where} cannot be read ({error.strerror}); check the file") from error
    except ValueError as error:
        raise WeightsError(f"{where} describes no network ({error}); get it again") from error
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where} is not JSON ({error}); get it again") from error


def read_config(path: Path, source: str) -> ModelConfig:
    """Read timm's config.json; nothing in it may steer timm's loader.

    Args:
        path: of the file.
        source: what the user calls it, for messages.
    Raises: WeightsError naming the key.
    """
    where = f"{source}: config.json"
    content = read_json(path, where)
    if not isinstance(content, dict) or "architecture" not in content:
        kind = "transformers" if isinstance(content, dict) and "architectures" in content else ""
        cause = f"{where} is in {kind}'s format" if kind else f"{where} has no architecture"
        raise WeightsError(f"{cause}; choose weights in timm's format (hf-hub:timm/…)")
    architecture, _ = split_model_name_tag(str(content["architecture"]))
    if not timm.is_model(architecture):
        close = nearest(architecture, timm.list_models()) or "; choose another model"
        raise WeightsError(f"{source}: this timm does not know '{architecture}'{close}")
    # Older folders hold the pretrained configuration at the top level.
    given = _mapping(content, "pretrained_cfg", where) or content
    entry = timm.get_pretrained_cfg(architecture)
    structure = {key: getattr(entry, key, None) for key in STRUCTURE_KEYS}
    known = {f.name for f in fields(PretrainedCfg)}
    config = structure | {k: v for k, v in given.items() if k in known}
    config["architecture"] = architecture
    config["num_classes"] = content.get("num_classes", config.get("num_classes"))
    config = clean(config)
    for key, (expected, is_valid) in CHECKS.items():
        if key in config and not is_valid(config[key]):
            raise WeightsError(f"{where}: {key}: {_got(config[key])}, expected {expected}")
    names = content.get("label_names") or given.get("label_names") or content.get("labels")
    class_names = _names(names, config.get("num_classes"), where)
    temperature = _temperature(content, where)
    return ModelConfig(architecture, _model_args(content, where), config, class_names, temperature)


def clean(config: Mapping[str, Any]) -> dict[str, Any]:
    """A pretrained configuration without the places that its weights once came from."""
    drop = (*PLACE_KEYS, "label_names", "label_descriptions")
    return {k: v for k, v in config.items() if k not in drop and v is not None}


def is_size(value: object) -> bool:
    """Whether this is a size in pixels: one whole number, or (height, width)."""
    sides = value if isinstance(value, list | tuple) else (value, value)
    return len(sides) == 2 and all(_is_side(side) for side in sides)


def _is_side(value: object) -> bool:
    return _is_whole(value, least=1) and value <= LARGEST_SIDE  # type: ignore[operator]


def enormous(args: object) -> bool:
    """Whether arguments hold a number for which a network would take all memory."""
    if isinstance(args, Mapping):
        return any(map(enormous, args.values()))
    if isinstance(args, list | tuple):
        return any(map(enormous, args))
    return isinstance(args, int | float) and not -LARGEST_ARGUMENT <= args <= LARGEST_ARGUMENT


def _is_whole(value: object, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def _three(value: object, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(is_valid, value))


def _is_names(value: object) -> bool:
    several = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(name, str) for name in several)


# Of a pretrained configuration: what is expected, and whether it is that.
CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "mean": ("3 finite numbers", lambda v: _three(v, _is_real)),
    "std": ("3 finite numbers above 0", lambda v: _three(v, lambda x: _is_real(x) and x > 0)),
    # timm has up to 1.15
    "crop_pct": ("a number above 0 and below 2", lambda v: _is_real(v) and 0 < v < 2),
    "input_size": (
        "3 whole numbers, [3, height, width]",
        lambda v: _three(v, _is_side) and v[0] == 3,
    ),
    "interpolation": ("one of " + ", ".join(INTERPOLATIONS), lambda v: v in INTERPOLATIONS),
    "crop_mode": ("one of " + ", ".join(CROP_MODES), lambda v: v in CROP_MODES),
    "num_classes": ("a whole number", _is_whole),
    "label_offset": ("a whole number", _is_whole),
    "classifier": ("a name or a list of names", _is_names),
    "first_conv": ("a name or a list of names", _is_names),
}


def _got(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mapping(content: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = content.get(key)
    if value is not None and not isinstance(value, dict):
        raise WeightsError(f"{where}: {key}: {_got(value)}, expected a mapping")
    return dict(value or {})


def _temperature(content: Mapping[str, Any], where: str) -> float | None:
    """What `finetune eval` fitted on a split, or None."""
    if content.get("calibration") is None:
        return None
    calibration = _mapping(content, "calibration", where)
    value: Any
    value, split = calibration.get("temperature"), calibration.get("split")
    if not _is_real(value) or value <= 0:
        raise WeightsError(
            f"{where}: calibration.temperature: {_got(value)}, expected a finite number above 0"
        )
    if not isinstance(split, str) or not split:
        raise WeightsError(
            f"{where}: calibration.split: {_got(split)}, expected the name of a split"
        )
    return float(value)


def _model_args(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The network's arguments; what timm itself writes there and build() decides is dropped."""
    args = _mapping(content, "model_args", where)
    args.pop("num_classes", None)
    if args.get("in_chans") in (3, None):
        args.pop("in_chans", None)
    for key in args:
        if key == "in_chans":
            raise WeightsError(
                f"{where}: model_args.in_chans: {_got(args[key])}, expected 3; images have three "
                f"channels here"
            )
        if key in CONTROL_ARGS:
            raise WeightsError(
                f"{where}: model_args.{key} steers timm's loader and is no argument of a network; "
                f"remove it if you trust the rest"
            )
        if enormous(args[key]) and key != "img_size":
            raise WeightsError(
                f"{where}: model_args.{key}: {_got(args[key])}, expected numbers of at most "
                f"{LARGEST_ARGUMENT}"
            )
    if args.get("img_size") is not None and not is_size(args["img_size"]):
        raise WeightsError(
            f"{where}: model_args.img_size: {_got(args['img_size'])}, expected pixels, or "
            f"[height, width]"
        )
    return args


def _names(names: Any, num_classes: int | None, where: str) -> list[str] | None:
    """Class names as a list; timm also allows {index: name} and {name: index}."""
    if not names:
        return None
    if isinstance(names, Mapping):
        by_index = {int(k): v for k, v in names.items() if str(k).isdecimal()}
        if sorted(by_index) != list(range(len(names))):
            return None  # gaps in the numbering: no list can hold them
        names = [by_index[i] for i in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WeightsError(f"{where}: label_names: {_got(names)}, expected a list of strings")
    if num_classes is not None and len(names) != num_classes:
        raise WeightsError(
            f"{where}: label_names: {len(names)} names for {num_classes} classes; give one each, "
            f"or remove the key"
        )
    return names
