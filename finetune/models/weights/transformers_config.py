"""Resolve an image classifier of transformers, and convert its configuration to timm's format.

The classifier's name is `transformers:owner/name@revision` or `transformers:FOLDER`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import HubError, WeightsError, did_you_mean
from finetune.hub.download import download_first, download_hub_file
from finetune.models.architectures.transformers_classifier import (
    ARCHITECTURE,
    CLASSIFIER_NAME,
    DROPPED_CONFIG_KEYS,
    classifier_classes,
)
from finetune.models.weights.timm_config import Weights, read_untrusted_json

__all__ = ["TRANSFORMERS_PREFIX", "resolve_classifier"]

TRANSFORMERS_PREFIX = "transformers:"
TRANSFORMERS_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
PILLOW_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# The ConvNext image processor, which CvT repositories also use, crops only below this image size.
CONVNEXT_CROPS_BELOW_PIXELS = 384


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
        paths = {file: folder / file for file in ("config.json", "preprocessor_config.json")}
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
        paths |= _fetch_optional(repository, "preprocessor_config.json", commit, name)
        file = (
            download_first(repository, TRANSFORMERS_WEIGHT_FILES, commit, display_name=name)
            if pretrained
            else None
        )
        weights, sha256 = (file.path, file.sha256) if file else (None, None)
        provenance = {"source": name, "repository": repository, "revision": main.commit}
    else:
        raise WeightsError(
            f"{name}: neither a folder nor a repository; write {TRANSFORMERS_PREFIX}owner/name or "
            f"{TRANSFORMERS_PREFIX}FOLDER",
            code="weights.unknown_name",
        )
    content = _read_json_mapping(paths["config.json"], name)
    path = paths.get("preprocessor_config.json")
    processor = _read_json_mapping(path, name) if path is not None and path.is_file() else {}
    return _parse_config(content, processor, provenance), weights, sha256


def _fetch_optional(repository: str, file: str, commit: str | None, name: str) -> dict[str, Path]:
    try:
        return {file: download_hub_file(repository, file, commit, display_name=name).path}
    except HubError:
        raise
    except WeightsError:  # the repository has no such file
        return {}


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
    if "model_type" not in content:
        raise WeightsError(
            f"{provenance['source']}: config.json has no model_type, so it is not in transformers' "
            f"format; for timm's format write hf-hub:owner/name, or the folder without a prefix",
            code="weights.wrong_format",
        )
    known = classifier_classes()
    if content["model_type"] not in known:
        close = did_you_mean(str(content["model_type"]), known) or "; choose another network"
        raise WeightsError(
            f"{provenance['source']}: '{content['model_type']}' is not an image classifier of "
            f"transformers{close}",
            code="weights.unsupported",
        )
    labels = content.get("id2label") or {}
    names = [str(labels[key]) for key in sorted(labels, key=int)] if labels else []
    has_default_names = all(re.fullmatch(r"LABEL_\d+", label) for label in names)
    parameters = inspect.signature(known[content["model_type"]]().forward).parameters
    # transformers omits the labels from config.json for its default of two classes
    config = _convert_preprocessing(content, processor) | {
        "classifier": f"network.{CLASSIFIER_NAME}",
        "num_classes": len(names) or int(content.get("num_labels", 2)),
        "fixed_input_size": "image_size" in content
        and "interpolate_pos_encoding" not in parameters,
    }
    network = {k: v for k, v in content.items() if k not in DROPPED_CONFIG_KEYS and v is not None}
    return Weights(
        architecture=ARCHITECTURE,
        model_args={"transformers_config": network},
        config=config,
        class_names=None if has_default_names else names,
        provenance=provenance,
    )


def _convert_preprocessing(
    content: Mapping[str, Any], processor: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert an image processor's configuration to timm's; an empty one gives defaults."""
    default = content.get("image_size", 224)
    sides = _parse_size(processor.get("size"), default)
    crop = (
        _parse_size(processor.get("crop_size"), default)
        if processor.get("do_center_crop")
        else None
    )
    squash = isinstance(processor.get("size"), Mapping) and "height" in processor["size"]
    config: dict[str, Any] = {"crop_pct": 1.0, "crop_mode": "squash" if squash else "center"}
    if crop is not None:
        config["crop_pct"] = min(crop[0] / sides[0], 1.0)
        sides = crop
    elif not squash and sides[0] < CONVNEXT_CROPS_BELOW_PIXELS and processor:
        config["crop_pct"] = float(processor.get("crop_pct") or 1.0)
    elif not squash:
        config["crop_mode"] = "squash"
    config["input_size"] = (3, *sides)
    do_normalize = processor.get("do_normalize", True)
    for key, source, plain in (("mean", "image_mean", 0.0), ("std", "image_std", 1.0)):
        if not do_normalize:
            config[key] = (plain,) * 3
        elif source in processor:
            config[key] = tuple(float(value) for value in processor[source])
    config["interpolation"] = PILLOW_INTERPOLATIONS.get(processor.get("resample", 3), "bicubic")
    return config


def _parse_size(size: Any, default: Any) -> tuple[int, int]:
    """Return (height, width) from an image processor's `size` in any of its forms.

    A size is a number, (height, width), or a mapping with height and width or shortest_edge.
    """
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    if size is None:
        size = default
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)
