"""Resolve an image classifier of transformers, and convert its configuration to timm's format.

The classifier's name is `transformers:owner/name@revision` or `transformers:FOLDER`.
"""

# H W h w pixels

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from finetune.errors import WeightsError, did_you_mean, root_cause_message
from finetune.files import read_untrusted_json
from finetune.hub.download import FileNotInRepoError, download_first, download_hub_file
from finetune.log import warn_once
from finetune.models.architectures.transformers_classifier import (
    ARCHITECTURE,
    classifier_types,
    network_config,
)
from finetune.models.weights.timm_config import (
    MULTILABEL_PROBLEM_TYPE,
    Weights,
    check_model_args,
    validate_config,
)
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.operations import MAX_IMAGE_SIDE
from finetune.transforms.preprocessing import resolve_preprocessing

__all__ = ["TRANSFORMERS_PREFIX", "ClassifierConfig", "ProcessorConfig", "resolve_classifier"]

TRANSFORMERS_PREFIX = "transformers:"
PROCESSOR_FILE = "preprocessor_config.json"
TRANSFORMERS_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
PILLOW_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# The ConvNext image processor, which CvT repositories also use, crops only below this image size.
CONVNEXT_CROPS_BELOW_PIXELS = 384
LEVIT_RESIZE = 256 / 224  # LeViT's processor multiplies the image size by it before the crop
_MAX_DIFFERENCE = 0.02  # of pixels in [0, 1], on average; two implementations differ by less


def _height_and_width(size: Any) -> Any:
    """Return (height, width) from any form of a size in an image processor's configuration.

    A size is a number, (height, width), or a mapping with height and width or shortest_edge.
    """
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        return size.get("height", edge), size.get("width", edge)
    return (size, size) if isinstance(size, int | float) else size


_Side = Annotated[int, Field(ge=1, le=MAX_IMAGE_SIDE)]
_ImageSize = Annotated[tuple[_Side, _Side] | None, BeforeValidator(_height_and_width)]
_Channel = Annotated[float, Field(allow_inf_nan=False)]
_PositiveChannel = Annotated[_Channel, Field(gt=0)]


class ClassifierConfig(BaseModel):
    """Valid values of a config.json; keys that are not listed are not checked."""

    model_config = ConfigDict(protected_namespaces=())  # allows the field name model_type

    model_type: str
    architectures: list[str] | None = None
    id2label: dict[int, Any] | None = None
    num_labels: Annotated[int, Field(ge=0)] | None = None
    problem_type: str | None = None
    image_size: _ImageSize = None


class ProcessorConfig(BaseModel):
    """Valid values of a preprocessor_config.json; keys that are not listed are not checked.

    A missing key has the default of the image processor's class, see `_prepare_with_transformers`.
    """

    image_processor_type: str | None = None
    size: _ImageSize = None
    crop_size: _ImageSize = None
    do_center_crop: bool | None = None
    crop_pct: Annotated[float, Field(ge=0, lt=2)] | None = None
    do_normalize: bool | None = None
    image_mean: tuple[_Channel, _Channel, _Channel] | None = None
    image_std: tuple[_PositiveChannel, _PositiveChannel, _PositiveChannel] | None = None
    resample: int | None = None
    do_rescale: bool | None = None
    rescale_factor: _PositiveChannel | None = None
    include_top: bool | None = None  # EfficientNet: divide by image_std once more


def resolve_classifier(
    name: str, *, pretrained: bool = True
) -> tuple[Weights, Path | None, str | None]:
    """Read the configuration of a transformers classifier and find its weights file.

    Args:
        name: `transformers:owner/name@revision` or `transformers:FOLDER`.
        pretrained: False skips the weights file.
    Returns: weights without tensors; the path of the weights file (None if `pretrained` is False);
        the sha256 of the file (None unless it was downloaded).
    Raises: SetupError without transformers; WeightsError or HubError for files that are missing or
        not accessible.
    """
    location = name.removeprefix(TRANSFORMERS_PREFIX)
    folder = Path(location).expanduser()
    sha256 = None
    if folder.is_dir():
        paths = {file: folder / file for file in ("config.json", PROCESSOR_FILE)}
        files = [folder / file for file in TRANSFORMERS_WEIGHT_FILES if (folder / file).is_file()]
        provenance: dict[str, Any] = {"source": name, "license": None}
        if not paths["config.json"].is_file():
            raise WeightsError(
                f"{name}: no config.json in this folder; check the path", code="weights.no_config"
            )
        if pretrained and not files:
            raise WeightsError(
                f"{name}: no weights in this folder; expected {TRANSFORMERS_WEIGHT_FILES[0]}",
                code="weights.not_found",
            )
        weights = files[0] if pretrained else None
    elif re.fullmatch(r"[^/.~][^/]*/[^/]+", location):
        repository, _, revision = location.partition("@")
        main = download_hub_file(repository, "config.json", revision or None, display_name=name)
        commit = main.commit or revision or None
        paths = {"config.json": main.path}
        with contextlib.suppress(FileNotInRepoError):
            file = download_hub_file(repository, PROCESSOR_FILE, commit, display_name=name)
            paths[PROCESSOR_FILE] = file.path
        weights = None
        if pretrained:
            file = download_first(repository, TRANSFORMERS_WEIGHT_FILES, commit, display_name=name)
            weights, sha256 = file.path, file.sha256
        provenance = {"source": name, "repository": repository, "revision": main.commit}
    else:
        raise WeightsError(
            f"{name}: neither a folder nor a repository; write {TRANSFORMERS_PREFIX}owner/name or "
            f"{TRANSFORMERS_PREFIX}FOLDER",
            code="weights.unknown_name",
        )
    content = _read_json_mapping(paths["config.json"], name)
    path = paths.get(PROCESSOR_FILE)
    if path is None or not path.is_file():
        if pretrained:
            warn_once(
                f"{name}: no {PROCESSOR_FILE}, so images get the mean and std of ImageNet; for "
                "others, set data.mean and data.std"
            )
        return _parse_config(content, {}, provenance), weights, sha256
    written, image_3HW = _read_json_mapping(path, name), _example_image()
    # its values are checked before transformers computes with them
    validate_config(ProcessorConfig, written, f"{name}: {PROCESSOR_FILE}")
    if "auto_map" in written:
        warn_once(
            f"{name}: has code for its image processor, which is not run; images are prepared as "
            f"the keys of {PROCESSOR_FILE} say"
        )
        defaults = {"do_normalize": True, "do_rescale": True}
        return _parse_config(content, defaults | written, provenance), weights, sha256
    processor, expected = _prepare_with_transformers(path, image_3HW, name)
    parsed = _parse_config(content, processor, provenance)
    if expected[0].dim() == 3 and _is_prepared_differently(parsed.config, image_3HW, expected):
        kind = processor["image_processor_type"]
        warn_once(
            f"{name}: {kind} prepares images in a way that finetune cannot reproduce; the "
            "pretrained classifier may be wrong until you fine-tune it"
        )
    return parsed, weights, sha256


def _prepare_with_transformers(
    path: Path, image_3HW: Tensor, name: str
) -> tuple[dict[str, Any], Tensor]:
    """Prepare an image with the image processor of a preprocessor_config.json.

    Returns: the configuration, with the defaults of the processor's class; the image for the
        network, (1, 3, h, w), or other dimensions for networks that take patches.
    """
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False
        )
        return processor.to_dict(), processor(image_3HW, return_tensors="pt")["pixel_values"]
    except Exception as error:  # of any type, because the file may have any content
        raise WeightsError(
            f"{name}: {PROCESSOR_FILE}: transformers cannot use it ({root_cause_message(error)}); "
            "correct it, for example its image_processor_type, or download it again",
            code="weights.wrong_config",
        ) from error


def _example_image() -> Tensor:
    """Return an image (3, 240, 320) uint8 with different values in each channel and corner."""
    x_W, y_H1 = torch.arange(320) / 40, torch.arange(240)[:, None] / 40
    waves_3HW = torch.stack([(x_W * (1 + channel) + y_H1).sin() for channel in range(3)])
    return ((waves_3HW + 1) * 127).byte()


def _is_prepared_differently(
    config: Mapping[str, Any], image_3HW: Tensor, expected_13hw: Tensor
) -> bool:
    """True if our pipeline gives other pixels than the image processor, for example not BGR."""
    preprocessing = resolve_preprocessing(config, config["input_size"][1:])
    actual_13hw = build_pipeline(preprocessing)([image_3HW])
    if actual_13hw.shape != expected_13hw.shape:
        return True
    std_311 = torch.tensor(preprocessing.std)[:, None, None]
    return float(((actual_13hw - expected_13hw) * std_311).abs().mean()) > _MAX_DIFFERENCE


def _read_json_mapping(path: Path, name: str) -> dict[str, Any]:
    content = read_untrusted_json(path, f"{name}: {path.name}")
    if not isinstance(content, dict):
        raise WeightsError(
            f"{name}: {path.name} is not a mapping; download it again", code="weights.wrong_config"
        )
    return content


def _parse_config(
    content: Mapping[str, Any], processor: Mapping[str, Any], provenance: dict[str, Any]
) -> Weights:
    """Convert a config.json and a preprocessor_config.json to `Weights` without tensors."""
    source = provenance["source"]
    if "model_type" not in content or "architecture" in content:
        raise WeightsError(
            f"{source}: config.json is in timm's format; write hf-hub:owner/name, or the folder "
            f"without a prefix",
            code="weights.wrong_format",
        )
    config = validate_config(ClassifierConfig, content, f"{source}: config.json")
    processor_config = validate_config(ProcessorConfig, processor, f"{source}: {PROCESSOR_FILE}")
    if config.problem_type == "regression":
        warn_once(
            f"{source}: predicts numbers, not classes (problem_type: regression); train a new "
            "classifier"
        )
    known = classifier_types()
    if config.model_type not in known:
        close = did_you_mean(config.model_type, known) or "; choose another network"
        raise WeightsError(
            f"{source}: '{config.model_type}' is not an image classifier of transformers{close}",
            code="weights.unsupported",
        )
    labels = config.id2label or {}
    names = [str(labels[index]) for index in sorted(labels)]
    # transformers omits the labels from config.json for its default of two classes
    num_classes = len(names) or (2 if config.num_labels is None else config.num_labels)
    has_default_names = all(re.fullmatch(r"LABEL_\d+", name) for name in names)
    # fail now, not after training, when the saved model is read
    model_args = {"transformers_config": network_config(content)}
    return Weights(
        architecture=ARCHITECTURE,
        model_args=check_model_args(model_args, f"{source}: config.json"),
        config={
            **_convert_preprocessing(config, processor_config, processor),
            "num_classes": num_classes,
            "fixed_input_size": True,
        },
        class_names=None if has_default_names else names,
        multilabel=_has_sigmoid(config.problem_type, num_classes),
        provenance=provenance,
        from_config=True,
    )


def _has_sigmoid(problem_type: str | None, num_classes: int) -> bool:
    """Return whether transformers' pipeline computes a sigmoid instead of a softmax."""
    if problem_type == "regression":
        return False
    return problem_type == MULTILABEL_PROBLEM_TYPE or num_classes == 1


def _convert_preprocessing(
    config: ClassifierConfig, processor: ProcessorConfig, written: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert an image processor's configuration to timm's pretrained configuration.

    Args:
        config: the network's configuration, whose image size is the default.
        processor: the image processor's configuration.
        written: the raw content of preprocessor_config.json; empty without that file.
    """
    default = config.image_size or (224, 224)
    size = processor.size or default
    squash = isinstance(written.get("size"), Mapping) and "height" in written["size"]
    result: dict[str, Any] = {"crop_pct": 1.0, "crop_mode": "squash" if squash else "center"}
    if processor.do_center_crop:
        crop, edge = processor.crop_size or default, float(size[0])
        kind = processor.image_processor_type or ""
        if kind.startswith("Levit"):
            edge *= LEVIT_RESIZE
        elif kind.startswith("PoolFormer"):
            edge /= processor.crop_pct or 1.0
        result["crop_pct"] = min(crop[0] / edge, 1.0)
        size = crop
    elif not squash and size[0] < CONVNEXT_CROPS_BELOW_PIXELS and written:
        result["crop_pct"] = processor.crop_pct or 1.0
    elif not squash:
        result["crop_mode"] = "squash"
    result["input_size"] = (3, *size)
    result |= _mean_and_std(processor) if written else {}
    resample = 3 if processor.resample is None else processor.resample
    result["interpolation"] = PILLOW_INTERPOLATIONS.get(resample, "bicubic")
    return result


def _mean_and_std(processor: ProcessorConfig) -> dict[str, tuple[float, ...]]:
    """Return the "mean" and "std" for pixels in [0, 1]."""
    scale = 255 * (processor.rescale_factor or 1 / 255) if processor.do_rescale else 255
    mean, std = processor.image_mean, processor.image_std
    if not processor.do_normalize or mean is None or std is None:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    power = 2 if processor.include_top else 1
    return {
        "mean": tuple(channel / scale for channel in mean),
        "std": tuple(channel**power / scale for channel in std),
    }
