"""Read timm's pretrained configurations; validate an untrusted config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import timm
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from timm.models import PretrainedCfg, split_model_name_tag
from torch import Tensor, nn

from finetune.errors import WeightsError, did_you_mean
from finetune.files import read_untrusted_json
from finetune.formatting import format_bytes
from finetune.host_resources import total_memory_bytes
from finetune.log import warn_once
from finetune.models.architectures import transformers_classifier
from finetune.models.weights.read import WeightsFile
from finetune.models.weights.resize_posemb import default_resize_method
from finetune.transforms.operations import MAX_IMAGE_SIDE

__all__ = [
    "CONTROL_ARGS",
    "HubConfig",
    "PretrainedConfig",
    "Temperature",
    "Thresholds",
    "Weights",
    "check_memory",
    "check_model_args",
    "drop_source_keys",
    "has_huge_value",
    "is_image_size",
    "read_timm_config",
    "registered_config",
    "validate_config",
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

MULTILABEL_PROBLEM_TYPE = "multi_label_classification"  # problem_type of transformers
MAX_ARGUMENT = 20_000  # far above the width, depth or length of any network


@dataclass(frozen=True)
class Weights:
    """An architecture with its arguments and, if pretrained, its tensors.

    Attributes:
        architecture: timm's name, without a tag.
        model_args: keyword arguments of timm.create_model() for a network that fits the tensors.
        config: timm's pretrained configuration (mean, std, input_size, classifier, …).
        state: {name: tensor} on the CPU, all finite; None for random weights, or before the tensors
            are read.
        class_names: names in the order of the classifier's outputs; None if the weights have none.
        provenance: source, revision, file, sha256, license.
        temperature: divisor of the logits before softmax; None if it was not fitted.
        multilabel: True if an image can have any number of labels; scores are sigmoid(logit).
        thresholds: threshold of each class, which is predicted if its score is at least this. None
            if they were not fitted.
        validation_scores: the entry of config.json, unchecked; None if it has none.
        from_config: True if model_args and config were read from a config.json.
        posemb: method that resizes the position embeddings, one of RESIZE_METHODS; None if it
            follows from the architecture and the tag.
        file: the file of the tensors; None without tensors.
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
    validation_scores: Mapping[str, Any] | None = None
    from_config: bool = False
    posemb: str | None = None
    file: WeightsFile | None = None

    @property
    def pretrained_cfg(self) -> dict[str, Any] | None:
        """Return `pretrained_cfg` for timm.create_model(); None to use timm's default."""
        return {**self.config, "architecture": self.architecture} if self.config else None

    @property
    def resize_method(self) -> str:
        """Return the method that suits the position embeddings, one of RESIZE_METHODS."""
        return self.posemb or default_resize_method(self.architecture, self.config.get("tag"))


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
        cause = f"{label} is in {kind}' format" if kind else f"{label} has no architecture"
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
    entries = validate_config(HubConfig, content, label)
    # older folders have the pretrained configuration at the top level
    pretrained_cfg = entries.pretrained_cfg or content
    entry = timm.get_pretrained_cfg(architecture)
    defaults = {key: getattr(entry, key, None) for key in ARCHITECTURE_KEYS}
    known_keys = {f.name for f in fields(PretrainedCfg)}
    config = defaults | {k: v for k, v in pretrained_cfg.items() if k in known_keys}
    has_size = "input_size" in pretrained_cfg or "img_size" in (entries.model_args or {})
    if not has_size and config["input_size"] not in (None, (3, 224, 224)):
        warn_once(
            f"{label} has no input_size; without model.image_size, images get "
            f"{config['input_size'][-1]} pixels, the default of {architecture}"
        )
    config["architecture"] = architecture
    config["num_classes"] = content.get("num_classes", config.get("num_classes"))
    config = drop_source_keys(config)
    validate_config(PretrainedConfig, config, label)
    model_args = entries.model_args or {}
    if architecture == transformers_classifier.ARCHITECTURE:
        model_args = {"transformers_config": transformers_classifier.network_config(content)}
    names = content.get("label_names") or pretrained_cfg.get("label_names") or content.get("labels")
    multilabel = content.get("problem_type") == MULTILABEL_PROBLEM_TYPE
    classes = config.get("num_classes")
    temperature, thresholds = None, None
    if multilabel:
        calibration = entries.calibration or {}
        thresholds = validate_config(Thresholds, calibration, label, "calibration").thresholds
        if thresholds is not None and len(thresholds) != classes:
            expected = "one threshold for each class"
            raise _wrong_value_error(label, "calibration.thresholds", thresholds, expected)
    elif entries.calibration is not None:
        fitted = validate_config(Temperature, entries.calibration, label, "calibration")
        temperature = fitted.temperature
        provenance = {**provenance, "calibrated_on": fitted.split}
    return Weights(
        architecture=architecture,
        class_names=_read_class_names(names, classes, label),
        temperature=temperature,
        multilabel=multilabel,
        thresholds=thresholds,
        validation_scores=entries.validation_scores,
        model_args=check_model_args(model_args, label),
        config=config,
        provenance={"source": source, **provenance, "license": config.get("license")},
        from_config=True,
        posemb=entries.posemb,
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
    return len(sides) == 2 and all(
        isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= MAX_IMAGE_SIDE
        for side in sides
    )


def has_huge_value(value: object) -> bool:
    """True if a value, or an item in it, is a number above MAX_ARGUMENT in magnitude."""
    if isinstance(value, Mapping):
        return any(map(has_huge_value, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_huge_value, value))
    return isinstance(value, int | float) and not -MAX_ARGUMENT <= value <= MAX_ARGUMENT


def check_memory(network: nn.Module, source: str) -> None:
    """Raise WeightsError if a network would need more memory than this machine has.

    Args:
        network: the network that an untrusted config.json describes, on the meta device.
        source: name of the weights as the user gave it, for the message.
    """
    available = total_memory_bytes()
    needed = sum(tensor.nbytes for tensor in network.state_dict().values())
    if needed > available:
        raise WeightsError(
            f"{source}: the network's tensors need {format_bytes(needed)}, but this machine has "
            f"{format_bytes(available)} of memory; make the network smaller",
            code="weights.too_large",
        )


# --- valid values of a config.json; keys that are not listed are not checked ----------------------

_Count = Annotated[int, Field(strict=True, ge=0)]
_Side = Annotated[int, Field(strict=True, ge=1, le=MAX_IMAGE_SIDE)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Positive = Annotated[_Number, Field(gt=0)]
_Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class HubConfig(BaseModel):
    """Valid values of a config.json in timm's format."""

    model_config = ConfigDict(protected_namespaces=())  # allows the field name model_args

    pretrained_cfg: dict[str, Any] | None = None
    model_args: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    validation_scores: dict[str, Any] | None = None
    posemb: Literal["paper", "timm", "dinov2"] | None = None


class PretrainedConfig(BaseModel):
    """Valid values of timm's pretrained configuration; None stands for timm's default."""

    mean: tuple[_Number, _Number, _Number] | None = None
    std: tuple[_Positive, _Positive, _Positive] | None = None
    crop_pct: Annotated[_Positive, Field(lt=2)] | None = None  # timm uses values up to 1.15
    input_size: tuple[Literal[3], _Side, _Side] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    num_classes: _Count | None = None
    label_offset: _Count | None = None
    classifier: _Names | None = None
    first_conv: _Names | None = None


class Temperature(BaseModel):
    """The calibration of a multi-class model: a temperature, and the split it was fitted on."""

    temperature: _Positive
    split: Annotated[str, Field(min_length=1)]


class Thresholds(BaseModel):
    """The calibration of a multi-label model: one threshold per class, if they were fitted."""

    thresholds: list[Annotated[_Number, Field(ge=0, le=1)]] | None = None


Schema = TypeVar("Schema", bound=BaseModel)


def validate_config(schema: type[Schema], content: Any, label: str, *parents: str) -> Schema:
    """Validate entries of an untrusted configuration.

    Args:
        schema: the pydantic model of the valid values.
        content: the entries, read from JSON.
        label: name of the file, for messages.
        parents: keys of the mappings that contain the entries, outermost first.
    Raises: WeightsError that names the first invalid key.
    """
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        expected = first["msg"].removeprefix("Input should be ")
        expected = "a value" if first["type"] == "missing" else expected
        key = ".".join(map(str, (*parents, *first["loc"])))
        raise _wrong_value_error(label, key, first["input"], expected) from error


def _wrong_value_error(label: str, key: str, value: object, expected: str) -> WeightsError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return WeightsError(f"{label}: {key}: {text}; expected {expected}", code="weights.wrong_config")


def check_model_args(args: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Validate untrusted keyword arguments of timm.create_model().

    Args:
        args: the keyword arguments.
        label: name of the file in messages.
    Returns: the arguments without those that build_model() sets itself.
    Raises: WeightsError that names the first invalid argument.
    """
    args = {key: value for key, value in args.items() if key != "num_classes"}
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
