"""Pretrained configurations as timm knows them; an untrusted config.json is checked first."""

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

from finetune.errors import WeightsError, nearest
from finetune.files import open_regular

__all__ = [
    "CONTROL_ARGS",
    "Weights",
    "clean",
    "enormous",
    "is_size",
    "read_config",
    "read_json",
    "registered_config",
]

# Keys that the architecture decides, where an old config.json leaves them out.
STRUCTURE_KEYS = ("classifier", "first_conv", "fixed_input_size", "input_size")
# Keys of timm's pretrained configuration for the place that weights came from.
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
MULTILABEL = "multi_label_classification"  # the problem_type that transformers knows, too
LARGEST_SIDE = 8192  # pixels
LARGEST_ARGUMENT = 20_000  # far above any width, depth or length of a network
LARGEST_JSON = 8 * 2**20  # bytes; ImageNet-21k's class names with their descriptions take 2 MB


@dataclass(frozen=True)
class Weights:
    """An architecture with its arguments and, unless it starts from scratch, its tensors.

    Attributes:
        architecture: timm's name, without a tag.
        model_args: keyword arguments of timm that the tensors need.
        config: timm's pretrained configuration (mean, std, input_size, classifier, …).
        state: name to tensor on the CPU, all finite; None when training starts from scratch.
        class_names: in the order of the classifier's outputs, when the weights carry them.
        provenance: source, revision, file, sha256, license.
        temperature: divides the logits before the softmax; None when it was never fitted.
        multilabel: an image has any number of labels: the scores are sigmoids.
        thresholds: of each class, from which score on it is said; None when they were never fitted.
        from_config: model_args and config come from a config.json, not from timm or the user.
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
        """The configuration as timm.create_model() takes it; None for timm's own."""
        return {**self.config, "architecture": self.architecture} if self.config else None


def read_json(path: Path, label: str) -> Any:
    """Read an untrusted JSON file, of which at most LARGEST_JSON bytes are taken into memory.

    Args:
        label: what the user calls it, for messages.
    Raises: WeightsError for a file that cannot be read, is too large, or is not JSON.
    """
    try:
        with open_regular(path, limit_bytes=LARGEST_JSON) as file:
            content = file.read(LARGEST_JSON)
    except OSError as error:
        raise WeightsError(
            f"{label} cannot be read ({error.strerror}); check the file", code="weights.unreadable"
        ) from error
    except ValueError as error:
        raise WeightsError(
            f"{label} describes no network ({error}); get it again", code="weights.wrong_format"
        ) from error
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{label} is not JSON ({error}); get it again", code="weights.damaged"
        ) from error


def read_config(path: Path, source: str, **place: Any) -> Weights:
    """Read timm's config.json; nothing in it may steer timm's loader.

    Args:
        source: what the user calls it, for messages and the provenance.
        place: further keys of the provenance, such as the repository and its revision.
    Returns: everything but the tensors.
    Raises: WeightsError naming the key.
    """
    label = f"{source}: config.json"
    content = read_json(path, label)
    if not isinstance(content, dict) or "architecture" not in content:
        kind = "transformers" if isinstance(content, dict) and "architectures" in content else ""
        cause = f"{label} is in {kind}'s format" if kind else f"{label} has no architecture"
        raise WeightsError(
            f"{cause}; choose weights in timm's format (hf-hub:timm/…)", code="weights.wrong_format"
        )
    architecture, _ = split_model_name_tag(str(content["architecture"]))
    if not timm.is_model(architecture):
        close = nearest(architecture, timm.list_models()) or "; choose another model"
        raise WeightsError(
            f"{source}: this timm does not know '{architecture}'{close}",
            code="weights.unknown_name",
        )
    # Older folders hold the pretrained configuration at the top level.
    pretrained_cfg = _mapping(content, "pretrained_cfg", label) or content
    entry = timm.get_pretrained_cfg(architecture)
    structure = {key: getattr(entry, key, None) for key in STRUCTURE_KEYS}
    known = {f.name for f in fields(PretrainedCfg)}
    config = structure | {k: v for k, v in pretrained_cfg.items() if k in known}
    config["architecture"] = architecture
    config["num_classes"] = content.get("num_classes", config.get("num_classes"))
    config = clean(config)
    for key, (expected, is_valid) in CHECKS.items():
        if key in config and not is_valid(config[key]):
            raise _wrong(label, key, config[key], expected)
    names = content.get("label_names") or pretrained_cfg.get("label_names") or content.get("labels")
    multilabel = content.get("problem_type") == MULTILABEL
    classes = config.get("num_classes")
    return Weights(
        architecture=architecture,
        class_names=_class_names(names, classes, label),
        temperature=None if multilabel else _temperature(content, label),
        multilabel=multilabel,
        thresholds=_thresholds(content, classes, label) if multilabel else None,
        model_args=_model_args(content, label),
        config=config,
        provenance={"source": source, **place, "license": config.get("license")},
        from_config=True,
    )


def clean(config: Mapping[str, Any]) -> dict[str, Any]:
    """A pretrained configuration without the places that its weights once came from."""
    drop = (*PLACE_KEYS, "label_names", "label_descriptions")
    return {k: v for k, v in config.items() if k not in drop and v is not None}


def registered_config(architecture: str) -> dict[str, Any]:
    """timm's own pretrained configuration of an architecture; empty if it has none."""
    entry = timm.get_pretrained_cfg(architecture)
    return clean(asdict(entry)) if entry is not None else {}


def is_size(value: object) -> bool:
    """True if this is a size in pixels: one whole number, or (height, width)."""
    sides = value if isinstance(value, list | tuple) else (value, value)
    return len(sides) == 2 and all(_is_side(side) for side in sides)


def _is_side(value: object) -> bool:
    return _is_whole(value, least=1) and value <= LARGEST_SIDE  # type: ignore[operator]


def enormous(args: object) -> bool:
    """True if arguments hold a number for which a network would take all memory."""
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


# Keys of a pretrained configuration: the expected value in words, and the test for it.
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


def _wrong(label: str, key: str, value: object, expected: str) -> WeightsError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return WeightsError(f"{label}: {key}: {text}, expected {expected}", code="weights.wrong_config")


def _mapping(content: Mapping[str, Any], key: str, label: str) -> dict[str, Any]:
    value = content.get(key)
    if value is not None and not isinstance(value, dict):
        raise _wrong(label, key, value, "a mapping")
    return dict(value or {})


def _temperature(content: Mapping[str, Any], label: str) -> float | None:
    """The temperature that `finetune eval` fitted on a split, or None."""
    if content.get("calibration") is None:
        return None
    calibration = _mapping(content, "calibration", label)
    value: Any
    value, split = calibration.get("temperature"), calibration.get("split")
    if not _is_real(value) or value <= 0:
        raise _wrong(label, "calibration.temperature", value, "a finite number above 0")
    if not isinstance(split, str) or not split:
        raise _wrong(label, "calibration.split", split, "the name of a split")
    return float(value)


def _thresholds(content: Mapping[str, Any], classes: Any, label: str) -> list[float] | None:
    """The threshold of each class that a run fitted, or None."""
    values = _mapping(content, "calibration", label).get("thresholds")
    if values is None:
        return None
    is_list = isinstance(values, list) and len(values) == classes
    if not is_list or not all(_is_real(value) and 0 <= value <= 1 for value in values):
        expected = "a number from 0 to 1 for each class"
        raise _wrong(label, "calibration.thresholds", values, expected)
    return [float(value) for value in values]


def _model_args(content: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The network's arguments, without those that timm writes there and build() decides."""
    args = _mapping(content, "model_args", label)
    args.pop("num_classes", None)
    if args.get("in_chans") in (3, None):
        args.pop("in_chans", None)
    for key, value in args.items():
        name = f"model_args.{key}"
        if key == "in_chans":
            raise _wrong(label, name, value, "3; images have three channels here")
        if key in CONTROL_ARGS:
            raise WeightsError(
                f"{label}: {name} steers timm's loader and is no argument of a network; remove it "
                f"if you trust the rest",
                code="weights.unsafe",
            )
        if enormous(value) and key != "img_size":
            raise _wrong(label, name, value, f"numbers of at most {LARGEST_ARGUMENT}")
    if args.get("img_size") is not None and not is_size(args["img_size"]):
        raise _wrong(label, "model_args.img_size", args["img_size"], "pixels, or [height, width]")
    return args


def _class_names(names: Any, num_classes: int | None, label: str) -> list[str] | None:
    """Class names as a list; timm also allows {index: name} and {name: index}."""
    if not names:
        return None
    if isinstance(names, Mapping):
        by_index = {int(k): v for k, v in names.items() if str(k).isdecimal()}
        if sorted(by_index) != list(range(len(names))):
            return None  # gaps in the numbering: no list can hold them
        names = [by_index[i] for i in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(label, "label_names", names, "a list of strings")
    if num_classes is not None and len(names) != num_classes:
        raise WeightsError(
            f"{label}: label_names: {len(names)} names for {num_classes} classes; give one each, "
            f"or remove the key",
            code="weights.wrong_config",
        )
    return names
