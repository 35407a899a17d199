"""A classifier of transformers, from its name to its configuration in timm's words.

`transformers:owner/name@revision` or `transformers:FOLDER` names one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import HubError, WeightsError, nearest
from finetune.hub.download import fetch, first_of
from finetune.models.architectures.transformers_adapter import (
    ARCHITECTURE,
    CLASSIFIER,
    DROPPED,
    classes,
)
from finetune.models.weights.timm_config import Weights, read_json

__all__ = ["PREFIX", "describe"]

PREFIX = "transformers:"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
KERNELS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# ConvNext's processor, which CvT's repositories name, crops below this size in pixels.
CONVNEXT_CROPS_BELOW = 384


def describe(name: str, *, pretrained: bool = True) -> tuple[Weights, Path | None, str | None]:
    """Read the configuration of a classifier of transformers and find its weights.

    Args:
        name: `transformers:owner/name@revision` or `transformers:FOLDER`.
        pretrained: False looks for no weights.
    Returns: everything but the tensors; the file of the tensors, None if it was not looked for;
        its sha256, if checking it took it.
    Raises: SetupError without transformers; WeightsError and HubError for what cannot be had.
    """
    place = name.removeprefix(PREFIX)
    folder = Path(place).expanduser()
    sha256 = None
    if folder.is_dir():
        paths = {file: folder / file for file in ("config.json", "preprocessor_config.json")}
        files = [folder / file for file in WEIGHT_FILES if (folder / file).is_file()]
        provenance: dict[str, Any] = {"source": name, "license": None}
        if not paths["config.json"].is_file():
            raise WeightsError(
                f"{name}: no config.json in this folder; check the path", code="weights.no_config"
            )
        if pretrained and not files:
            raise WeightsError(
                f"{name}: no weights in this folder; expected {WEIGHT_FILES[0]}",
                code="weights.not_found",
            )
        weights = files[0] if pretrained else None
    elif re.fullmatch(r"[^/.~][^/]*/[^/]+", place):
        repository, _, revision = place.partition("@")
        main = fetch(repository, "config.json", revision or None, source=name)
        commit = main.commit or revision or None
        paths = {"config.json": main.path}
        paths |= _optional(repository, "preprocessor_config.json", commit, name)
        file = first_of(repository, WEIGHT_FILES, commit, source=name) if pretrained else None
        weights, sha256 = (file.path, file.sha256) if file else (None, None)
        provenance = {"source": name, "repository": repository, "revision": main.commit}
    else:
        raise WeightsError(
            f"{name}: neither a folder nor a repository; write {PREFIX}owner/name or "
            f"{PREFIX}FOLDER",
            code="weights.unknown_name",
        )
    content = _json(paths["config.json"], name)
    path = paths.get("preprocessor_config.json")
    processor = _json(path, name) if path is not None and path.is_file() else {}
    return _weights(content, processor, provenance), weights, sha256


def _optional(repository: str, file: str, commit: str | None, name: str) -> dict[str, Path]:
    try:
        return {file: fetch(repository, file, commit, source=name).path}
    except HubError:
        raise
    except WeightsError:  # the repository answered: it holds no such file
        return {}


def _json(path: Path, name: str) -> dict[str, Any]:
    content = read_json(path, f"{name}: {path.name}")
    if not isinstance(content, dict):
        raise WeightsError(
            f"{name}: {path.name} is no mapping; get it again", code="weights.wrong_config"
        )
    return content


def _weights(
    content: Mapping[str, Any], processor: Mapping[str, Any], provenance: dict[str, Any]
) -> Weights:
    """The network of a config.json and a preprocessor_config.json, without tensors."""
    if "model_type" not in content:
        raise WeightsError(
            f"{provenance['source']}: config.json names no model_type, so it is not in "
            f"transformers' format; for timm's write hf-hub:owner/name, or the folder alone",
            code="weights.wrong_format",
        )
    known = classes()
    if content["model_type"] not in known:
        close = nearest(str(content["model_type"]), known) or "; choose another network"
        raise WeightsError(
            f"{provenance['source']}: '{content['model_type']}' is no image classifier of "
            f"transformers{close}",
            code="weights.unsupported",
        )
    labels = content.get("id2label") or {}
    names = [str(labels[key]) for key in sorted(labels, key=int)] if labels else []
    numbered = all(re.fullmatch(r"LABEL_\d+", label) for label in names)
    takes = inspect.signature(known[content["model_type"]]().forward).parameters
    # transformers leaves two classes out of a config.json
    config = _preprocessing(content, processor) | {
        "classifier": f"network.{CLASSIFIER}",
        "num_classes": len(names) or int(content.get("num_labels", 2)),
        "fixed_input_size": "image_size" in content and "interpolate_pos_encoding" not in takes,
    }
    network = {k: v for k, v in content.items() if k not in DROPPED and v is not None}
    return Weights(
        architecture=ARCHITECTURE,
        model_args={"transformers_config": network},
        config=config,
        class_names=None if numbered else names,
        provenance=provenance,
    )


def _preprocessing(content: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    """timm's words for an image processor; for a folder without one, ImageNet's usual values."""
    own = content.get("image_size", 224)
    sides = _sides(processor.get("size"), own)
    crop = _sides(processor.get("crop_size"), own) if processor.get("do_center_crop") else None
    squash = isinstance(processor.get("size"), Mapping) and "height" in processor["size"]
    config: dict[str, Any] = {"crop_pct": 1.0, "crop_mode": "squash" if squash else "center"}
    if crop is not None:
        config["crop_pct"] = min(crop[0] / sides[0], 1.0)
        sides = crop
    elif not squash and sides[0] < CONVNEXT_CROPS_BELOW and processor:
        config["crop_pct"] = float(processor.get("crop_pct") or 1.0)
    elif not squash:
        config["crop_mode"] = "squash"
    config["input_size"] = (3, *sides)
    normalised = processor.get("do_normalize", True)
    for key, source, plain in (("mean", "image_mean", 0.0), ("std", "image_std", 1.0)):
        if not normalised:
            config[key] = (plain,) * 3
        elif source in processor:
            config[key] = tuple(float(value) for value in processor[source])
    config["interpolation"] = KERNELS.get(processor.get("resample", 3), "bicubic")
    return config


def _sides(size: Any, own: Any) -> tuple[int, int]:
    """(height, width) of a processor's size: a number, height and width, or the shortest edge."""
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    if size is None:
        size = own
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)
