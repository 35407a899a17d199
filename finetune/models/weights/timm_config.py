"""Read timm's pretrained configurations; validate an untrusted config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import timm
from timm.models import PretrainedCfg, split_model_name_tag
from torch import Tensor

from finetune.errors import WeightsError, did_you_mean
from finetune.files import open_regular_file

__all__ = [
    "CONTROL_ARGS",
    "Weights",
    "drop_source_keys",
    "has_huge_value",
    "is_image_size",
    "read_timm_config",
    "read_untrusted_json",
    "registered_config",
]

# Keys whose defaults come from timm's registry, because an old config.json may omit them.
ARCHITECTURE_KEYS = ("classifier", "first_conv", "fixed_input_size", "input_size")
# Keys of timm's pretrained configuration that say where to load the weights from.
SOURCE_KEYS = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load")
# Keyword arguments of timm.create_model() that control loading or the returned object; they are not
# arguments of the network.
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
MULTILABEL_PROBLEM_TYPE = "multi_label_classification"  # problem_type of transformers
MAX_IMAGE_SIDE = 8192  # pixels
MAX_ARGUMENT = 20_000  # far above the width, depth or length of any network
MAX_JSON_BYTES = 8 * 2**20  # ImageNet-21k's class names and descriptions take 2 MB


@dataclass(frozen=True)
class Weights:
    """An architecture with its arguments and, if pretrained, its tensors.

    Attributes:
        architecture: timm's name, without a tag.
        model_args: keyword arguments of timm.create_model() with which the tensors fit.
        config: timm's pretrained configuration (mean, std, input_size, classifier, …).
        state: {name: tensor} on the CPU, all finite; None for random weights, or before they are
            read.
        class_names: names in the order of the classifier's outputs; None if the weights have none.
        provenance: source, revision, file, sha256, license.
        temperature: divisor of the logits before softmax; None if it was not fitted.
        multilabel: True if an image can have any number of labels; scores are sigmoid(logit).
        thresholds: one per class; a class is predicted if its score is at least its threshold. None
            if they were not fitted.
        from_config: True if model_args and config were read from a config.json.
    """

    architecture: str
    model_args: dict[str, Any]
    config: dict[str, Any]
    state: dict[str, Tensor] | None = None
    class_names: list[str] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    multilabel: bool = False
    thresholds: list[float] | None = None
    from_config: bool = False

    @property
    def pretrained_cfg(self) -> dict[str, Any] | None:
        """Return `pretrained_cfg` for timm.create_model(); None to use timm's default."""
        return {**self.config, "architecture": self.architecture} if self.config else None


def read_untrusted_json(path: Path, label: str) -> Any:
    """Read an untrusted JSON file of at most MAX_JSON_BYTES.

    Args:
        path: the JSON file.
        label: name of the file in messages.
    Raises: WeightsError for a file that is unreadable, too large, or not JSON.
    """
    try:
        with open_regular_file(path, max_bytes=MAX_JSON_BYTES) as file:
            content = file.read(MAX_JSON_BYTES)
    except OSError as error:
        raise WeightsError(
            f"{label} is not readable ({error.strerror}); check the file", code="weights.unreadable"
        ) from error
    except ValueError as error:
        raise WeightsError(
            f"{label} does not describe a network ({error}); download it again",
            code="weights.wrong_format",
        ) from error
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{label} is not JSON ({error}); download it again", code="weights.damaged"
        ) from error


def read_timm_config(path: Path, source: str, **provenance: Any) -> Weights:
    """Read a config.json in timm's format; reject keys that would control timm's loader.

    Args:
        path: the config.json.
        source: name of the weights as the user gave it, for messages and the provenance.
        provenance: additional entries of the provenance, such as repository and revision.
    Returns: weights without tensors.
    Raises: WeightsError naming the invalid key.
    """
    label = f"{source}: config.json"
    content = read_untrusted_json(path, label)
    if not isinstance(content, dict) or "architecture" not in content:
        kind = "transformers" if isinstance(content, dict) and "architectures" in content else ""
        cause = f"{label} is in {kind}'s format" if kind else f"{label} has no architecture"
        raise WeightsError(
            f"{cause}; choose weights in timm's format (hf-hub:timm/…)", code="weights.wrong_format"
        )
    architecture, _ = split_model_name_tag(str(content["architecture"]))
    if not timm.is_model(architecture):
        close = did_you_mean(architecture, timm.list_models()) or "; choose another model"
        raise WeightsError(
            f"{source}: this version of timm has no model '{architecture}'{close}",
            code="weights.unknown_name",
        )
    # older folders have the pretrained configuration at the top level
    pretrained_cfg = _get_mapping(content, "pretrained_cfg", label) or content
    entry = timm.get_pretrained_cfg(architecture)
    defaults = {key: getattr(entry, key, None) for key in ARCHITECTURE_KEYS}
    known_keys = {f.name for f in fields(PretrainedCfg)}
    config = defaults | {k: v for k, v in pretrained_cfg.items() if k in known_keys}
    config["architecture"] = architecture
    config["num_classes"] = content.get("num_classes", config.get("num_classes"))
    config = drop_source_keys(config)
    for key, (expected, is_valid) in CONFIG_CHECKS.items():
        if key in config and not is_valid(config[key]):
            raise _wrong_value_error(label, key, config[key], expected)
    names = content.get("label_names") or pretrained_cfg.get("label_names") or content.get("labels")
    multilabel = content.get("problem_type") == MULTILABEL_PROBLEM_TYPE
    classes = config.get("num_classes")
    return Weights(
        architecture=architecture,
        class_names=_read_class_names(names, classes, label),
        temperature=None if multilabel else _read_temperature(content, label),
        multilabel=multilabel,
        thresholds=_read_thresholds(content, classes, label) if multilabel else None,
        model_args=_read_model_args(content, label),
        config=config,
        provenance={"source": source, **provenance, "license": config.get("license")},
        from_config=True,
    )


def drop_source_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pretrained configuration without SOURCE_KEYS, label names and None values."""
    drop = (*SOURCE_KEYS, "label_names", "label_descriptions")
    return {k: v for k, v in config.items() if k not in drop and v is not None}


def registered_config(architecture: str) -> dict[str, Any]:
    """Return the pretrained configuration in timm's registry; empty if there is none."""
    entry = timm.get_pretrained_cfg(architecture)
    return drop_source_keys(asdict(entry)) if entry is not None else {}


def is_image_size(value: object) -> bool:
    """True for an image size in pixels: one integer, or (height, width)."""
    sides = value if isinstance(value, list | tuple) else (value, value)
    return len(sides) == 2 and all(_is_image_side(side) for side in sides)


def _is_image_side(value: object) -> bool:
    return _is_int(value, minimum=1) and value <= MAX_IMAGE_SIDE  # type: ignore[operator]


def has_huge_value(value: object) -> bool:
    """True if a value, or an item in it, is a number above MAX_ARGUMENT in magnitude."""
    if isinstance(value, Mapping):
        return any(map(has_huge_value, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_huge_value, value))
    return isinstance(value, int | float) and not -MAX_ARGUMENT <= value <= MAX_ARGUMENT


def _is_int(value: object, *, minimum: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_finite_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def _is_triple(value: object, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(is_valid, value))


def _is_name_or_names(value: object) -> bool:
    names = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(name, str) for name in names)


# {key of a pretrained configuration: (description of valid values, check)}.
CONFIG_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "mean": ("3 finite numbers", lambda v: _is_triple(v, _is_finite_number)),
    "std": (
        "3 finite numbers above 0",
        lambda v: _is_triple(v, lambda x: _is_finite_number(x) and x > 0),
    ),
    # timm uses values up to 1.15
    "crop_pct": ("a number above 0 and below 2", lambda v: _is_finite_number(v) and 0 < v < 2),
    "input_size": (
        "3 whole numbers, [3, height, width]",
        lambda v: _is_triple(v, _is_image_side) and v[0] == 3,
    ),
    "interpolation": ("one of " + ", ".join(INTERPOLATIONS), lambda v: v in INTERPOLATIONS),
    "crop_mode": ("one of " + ", ".join(CROP_MODES), lambda v: v in CROP_MODES),
    "num_classes": ("a whole number", _is_int),
    "label_offset": ("a whole number", _is_int),
    "classifier": ("a name or a list of names", _is_name_or_names),
    "first_conv": ("a name or a list of names", _is_name_or_names),
}


def _wrong_value_error(label: str, key: str, value: object, expected: str) -> WeightsError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return WeightsError(f"{label}: {key}: {text}; expected {expected}", code="weights.wrong_config")


def _get_mapping(content: Mapping[str, Any], key: str, label: str) -> dict[str, Any]:
    value = content.get(key)
    if value is not None and not isinstance(value, dict):
        raise _wrong_value_error(label, key, value, "a mapping")
    return dict(value or {})


def _read_temperature(content: Mapping[str, Any], label: str) -> float | None:
    """Return the temperature from the "calibration" entry; None without one."""
    if content.get("calibration") is None:
        return None
    calibration = _get_mapping(content, "calibration", label)
    value: Any
    value, split = calibration.get("temperature"), calibration.get("split")
    if not _is_finite_number(value) or value <= 0:
        raise _wrong_value_error(label, "calibration.temperature", value, "a finite number above 0")
    if not isinstance(split, str) or not split:
        raise _wrong_value_error(label, "calibration.split", split, "the name of a split")
    return float(value)


def _read_thresholds(content: Mapping[str, Any], classes: Any, label: str) -> list[float] | None:
    """Return the thresholds, one per class, from the "calibration" entry; None without them."""
    values = _get_mapping(content, "calibration", label).get("thresholds")
    if values is None:
        return None
    is_list = isinstance(values, list) and len(values) == classes
    if not is_list or not all(_is_finite_number(value) and 0 <= value <= 1 for value in values):
        expected = "a number from 0 to 1 for each class"
        raise _wrong_value_error(label, "calibration.thresholds", values, expected)
    return [float(value) for value in values]


def _read_model_args(content: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return and validate the model_args, without those that build_model() sets itself."""
    args = _get_mapping(content, "model_args", label)
    args.pop("num_classes", None)
    if args.get("in_chans") in (3, None):
        args.pop("in_chans", None)
    for key, value in args.items():
        name = f"model_args.{key}"
        if key == "in_chans":
            raise _wrong_value_error(label, name, value, "3; only RGB images are supported")
        if key in CONTROL_ARGS:
            raise WeightsError(
                f"{label}: {name} controls timm's loader and is not an argument of the network; "
                f"remove it if you trust the rest",
                code="weights.unsafe",
            )
        if has_huge_value(value) and key != "img_size":
            raise _wrong_value_error(label, name, value, f"numbers of at most {MAX_ARGUMENT}")
    if args.get("img_size") is not None and not is_image_size(args["img_size"]):
        raise _wrong_value_error(
            label, "model_args.img_size", args["img_size"], "pixels or [height, width]"
        )
    return args


def _read_class_names(names: Any, num_classes: int | None, label: str) -> list[str] | None:
    """Return class names as a list, also from {index: name}; None if they cannot form a list."""
    if not names:
        return None
    if isinstance(names, Mapping):
        by_index = {int(k): v for k, v in names.items() if str(k).isdecimal()}
        if sorted(by_index) != list(range(len(names))):
            return None  # {name: index}, or gaps in the indices
        names = [by_index[i] for i in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong_value_error(label, "label_names", names, "a list of strings")
    if num_classes is not None and len(names) != num_classes:
        raise WeightsError(
            f"{label}: label_names: {len(names)} names for {num_classes} classes; give one name "
            f"per class, or remove the key",
            code="weights.wrong_config",
        )
    return names
