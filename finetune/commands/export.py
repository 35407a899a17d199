"""`finetune export`: export a model to ONNX or torch.export.

By default, the exported model includes the preprocessing: it takes a uint8 image of any size and
returns probabilities. The file is written only if these match those of `Classifier`, and
certificate.json next to it has the figures.

Without the preprocessing, it takes normalized images and returns logits, with a dynamic batch
size. NAME.onnx.json next to NAME.onnx has the preprocessing and the figures.
"""

# N images, B batch, K classes, h w the model's input size

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from finetune.commands.export_certificate import ImageClassifier, certify, vary_sizes
from finetune.commands.export_formats import (
    IMAGE_SIGNATURE,
    MAX_DIFFERENCE,
    SUFFIXES,
    check_exported,
    export_network,
    load_exported,
    require_packages,
)
from finetune.commands.export_runtimes import certify_runtimes, check_runtimes
from finetune.commands.reduced_precision import (
    format_reduced,
    open_reduced_precision,
    reduce_precision,
)
from finetune.data.decode import decode_image, hwc_to_chw
from finetune.data.from_recipe import open_full_data
from finetune.data.image_paths import list_cli_images
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.errors import DataError, FinetuneError, RecipeError, SetupError, redact_urls
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD
from finetune.files import explain_disk_errors, file_sha256, staging_folder
from finetune.formatting import format_bytes, pluralize
from finetune.inference import Classifier, eval_pipeline_and_class_names
from finetune.log import logger
from finetune.model_checksums import json_sha256
from finetune.models.build import build_model
from finetune.models.exported import CERTIFICATE
from finetune.models.save import BuiltModel
from finetune.recipe.paths import drop_folders
from finetune.run.directory import lock_run_of_model
from finetune.run.environment import package_versions
from finetune.run.record import load_run_recipe
from finetune.transforms.eval_transforms import spec_to_preprocessing
from finetune.transforms.pipeline import Pipeline

__all__ = ["export_model", "format_export", "resolve_output_path"]

_NUM_COMPARED = 16  # images
_BATCH_SIZES = (1, 2, 5, _NUM_COMPARED)
_PROVENANCE_KEYS = ("repository", "revision", "file", "sha256", "calibrated_on")
_RECORDED_PACKAGES = ("finetune", "torch", "timm", "onnx", "onnxscript", "onnxruntime")
_FALLBACK_SOURCE = "embedded:digits"


def export_model(
    model: str,
    *,
    format: str = "onnx",
    out: str | None = None,
    images: Sequence[str] = (),
    data: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    preprocessing: bool = True,
    precision: Literal["int8", "fp16"] | None = None,
    max_drop: float = 0.5,
    certify_in: Sequence[str] = (),
    ort_web: str | None = None,
) -> dict[str, Any]:
    """Export a model, and write it only if its outputs match the model's.

    Args:
        model: run directory, model folder, Hub or timm name.
        format: "onnx", or "torch" for a .pt2 file of torch.export.
        out: the file, or the folder to write it to; None uses the working directory.
        images: files, folders and glob patterns of images to compare the outputs on; by default the
            run's own data, or scikit-learn's digits if the model has no readable data.
        data: source string of the run's data where it is now; None uses the recorded one.
        image_size: pixels, or (height, width); None uses the model's own.
        preprocessing: True to export a model from a uint8 image (1, H, W, 3) of any size to
            probabilities (1, K); False for a model from normalized images (B, 3, h, w) to logits
            (B, K).
        precision: precision of the exported network; None for float32. Others need a run directory,
            whose validation images measure the accuracy, and ONNX with the preprocessing.
        max_drop: largest drop of the accuracy by `precision`, in percentage points.
        certify_in: also compare in these runtimes, names of RUNTIMES.
        ort_web: folder of the npm package onnxruntime-web, see `find_ort_web`.
    Returns: a dict with keys "file", "format", "opset", "bytes", "sha256" (by file name),
        "max_difference" (of a probability, or of a logit), "num_images", "images"; with
        preprocessing also "certificate" (the path of the JSON file), "top1_agreement",
        "num_sizes", "latency_ms" (of the float model), "runtimes" (see `certify_runtimes`), and
        with `precision` "reduced" (see `reduce_precision`); without also "preprocessing" (the path
        of the JSON file), "batch_sizes".
    Raises: WeightsError if the architecture cannot be exported, an output differs by more than
        MAX_DIFFERENCE, or `precision` lowers the accuracy by more than `max_drop`; SetupError if a
        package is missing, or the file cannot be written or is not from an earlier export;
        RecipeError or DataError for wrong arguments or images, or for a transform spec that cannot
        be exported.
    """
    if data is not None and load_run_recipe(model) is None:
        raise RecipeError(
            f"--data: {model} is not a run directory; give images with --images",
            code="recipe.conflict",
        )
    reduced = precision and open_reduced_precision(
        model, precision, max_drop=max_drop, format=format, preprocessing=preprocessing, data=data
    )
    target = resolve_output_path(model, format, out, preprocessing=preprocessing)
    record_path = target.with_name(CERTIFICATE if preprocessing else f"{target.name}.json")
    required_source = None if out else _source_name(model)
    _check_not_foreign(target, record_path, required_source)
    require_packages(format)
    versions = check_runtimes(
        certify_in, ort_web, format=format, preprocessing=preprocessing, precision=precision
    )
    with explain_disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    logger.info(f"{model}: loading the model, and {_NUM_COMPARED} images to compare outputs on")
    built = build_model(model, image_size=image_size)
    built.model.eval().requires_grad_(False)
    pipeline, classes = eval_pipeline_and_class_names(model, built, use_recipe=image_size is None)
    metadata = _build_metadata(model, built, pipeline, classes)
    module = ImageClassifier(built, pipeline).eval() if preprocessing else None
    # the graph gets what a caller decodes, so the decoder must not reduce the image
    decode_size = None if preprocessing else pipeline.decode_size
    pixels, images_name = _load_images(model, data, decode_size, images)
    name, thresholds = f"{model}: {format}", metadata.get("thresholds")
    with explain_disk_errors(target), staging_folder(target) as folder:
        path = folder / target.name
        logger.info(f"exporting to {format}; a large model takes minutes")
        if module is None:
            images_N3hw = torch.cat([pipeline([hwc_to_chw(image)]) for image in pixels])
            figures = _export_network(built, images_N3hw, path, format, name)
        else:
            opset = _export_classifier(module, pipeline.image_size, metadata, path, format)
            classifier = Classifier(
                built.model,
                pipeline,
                classes,
                device="cpu",
                temperature=built.temperature,
                thresholds=thresholds,
            )
            varied = vary_sizes(pixels)
            figures = {
                "opset": opset,
                **certify(load_exported(path, format), classifier, varied, name),
                "runtimes": certify_runtimes(
                    versions, path, classifier, varied, name, ort_web=ort_web
                ),
            }
        if reduced is not None:
            logger.info(f"--{precision}: measuring on {len(reduced.validation)} validation images")
            figures["reduced"] = reduce_precision(path, reduced, thresholds, name)
        files = sorted(folder.iterdir())
        result = {
            "format": format,
            "bytes": sum(file.stat().st_size for file in files),
            "sha256": {file.name: file_sha256(file) for file in files},
            **figures,
            "images": images_name,
        }
        calibration = {"temperature": built.temperature, "thresholds": built.thresholds}
        record = {**metadata, "calibration": calibration, "export": result}
        record["checksum"] = json_sha256(record)
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        (folder / record_path.name).write_text(text, encoding="utf-8")
        with lock_run_of_model(target.parent):  # a push would replace the folder by its copy
            # another export may have written its certificate meanwhile
            _check_not_foreign(target, record_path, required_source)
            _move_into_place(folder, target, record_path)
    record_key = "certificate" if preprocessing else "preprocessing"
    return {"file": str(target), record_key: str(record_path), **result}


def _export_network(
    built: BuiltModel, images_N3hw: Tensor, path: Path, format: str, name: str
) -> dict[str, Any]:
    """Export from normalized images to logits, and compare the logits in several batch sizes.

    Returns: figures for the record.
    """
    # zeros, because a .pt2 file stores the example input: it must not be a private image
    example = torch.zeros(2, *images_N3hw.shape[1:])
    opset = export_network(built.model, example, path, built.architecture, format)
    exported, max_difference = load_exported(path, format), 0.0
    for size in _BATCH_SIZES:
        images_B3hw = images_N3hw[torch.arange(size) % len(images_N3hw)]
        with torch.inference_mode():
            expected_BK = built.model(images_B3hw)
        actual_BK = check_exported(
            exported,
            images_B3hw,
            expected_BK,
            name,
            f"a batch of {size}",
            advice="try another --format",
        )
        max_difference = max(max_difference, float((actual_BK - expected_BK).abs().max()))
    return {
        "opset": opset,
        "max_difference": max_difference,
        "batch_sizes": list(_BATCH_SIZES),
        "num_images": len(images_N3hw),
    }


def _export_classifier(
    module: ImageClassifier,
    image_size: tuple[int, int],
    metadata: dict[str, Any],
    path: Path,
    format: str,
) -> int | None:
    """Export from pixels to probabilities, with the metadata in the file. Returns: the opset."""
    height, width = image_size
    return export_network(
        module,
        # not square, so that the trace does not take height and width for one axis
        torch.zeros(1, height + 8, width + 24, 3, dtype=torch.uint8),
        path,
        metadata["source"]["architecture"],
        format,
        signature=IMAGE_SIGNATURE,
        metadata={key: json.dumps(value, allow_nan=False) for key, value in metadata.items()},
    )


def format_export(result: dict[str, Any]) -> str:
    """Format the result of `export_model`: the written files and the largest difference."""
    opset = f", opset {result['opset']}" if result["opset"] else ""
    first = f"{result['file']}: {format_bytes(result['bytes'])}{opset}"
    images = f"{pluralize(result['num_images'], 'image')} of {result['images']}"
    difference = f"{result['max_difference']:.2g} (limit {MAX_DIFFERENCE:g})"
    if "preprocessing" in result:
        sizes = ", ".join(map(str, result["batch_sizes"]))
        return (
            f"{first}, dynamic batch size\n"
            f"{result['preprocessing']}: preprocessing and class names\n"
            f"largest logit difference {difference} on {images}, batches of {sizes}"
        )
    in_float = "in float, " if "reduced" in result else ""
    lines = [
        f"{first}, takes a uint8 image of any size",
        f"{result['certificate']}: {in_float}same top-1 as the model on {images}, in "
        f"{pluralize(result['num_sizes'], 'size')}; largest difference of a probability "
        f"{difference}, {result['latency_ms']:.1f} ms per image",
    ]
    lines += [
        f"in {name} {figures['version']}: same top-1, largest difference "
        f"{figures['max_difference']:.2g}, {figures['latency_ms']:.1f} ms per image"
        for name, figures in result["runtimes"].items()
    ]
    return "\n".join([*lines, *format_reduced(result.get("reduced"))])


# --- output files --------------------------------------------------------------------------------


def resolve_output_path(
    model: str, format: str, out: str | None, *, preprocessing: bool = True
) -> Path:
    """Return the file to write: `out`, or a file in the folder `out`.

    This file is named "model", or after the model if it has no preprocessing.

    Raises: RecipeError if `out` has the suffix of another format.
    """
    path, suffix = Path(out or ".").expanduser(), SUFFIXES[format]
    if path.is_dir() or path.suffix not in (".pt", ".pth", *SUFFIXES.values()):
        return path / f"{'model' if preprocessing else _short_name(model)}{suffix}"
    if path.suffix != suffix:
        raise RecipeError(
            f"--out: '{out}' has the wrong suffix for {format}; use {suffix}",
            code="recipe.wrong_value",
        )
    return path


def _short_name(model: str) -> str:
    """Return the name of the run, folder, file, repository or timm model."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.stem
    if path.exists():
        path = path.resolve()
        return path.parent.name if path.name == "model" else path.name
    return re.split(r"[/:]", model.partition("@")[0])[-1] or "model"


def _source_name(model: str) -> str:
    """Return the model's name without folders, which may be private."""
    return _short_name(model) if os.path.exists(model) else drop_folders(model)


def _check_not_foreign(target: Path, record_path: Path, required_source: str | None) -> None:
    """Raise SetupError if the file exists, unless the record of an export names it.

    With `required_source`, this must be an export of the model of that name.
    """
    try:
        record = json.loads(record_path.read_bytes())
        names, source = [*record["export"]["sha256"]], record.get("source", {}).get("model")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        names, source = [], None
    if target.name in names and required_source is not None and source != required_source:
        raise SetupError(
            f"{target}: already exists, as an export of {source}; choose another path with --out",
            code="setup.exists",
        )
    known = {*names, record_path.name} if target.name in names else set()
    for path in (target, record_path, target.with_name(f"{target.name}.data")):
        if path.name not in known and os.path.lexists(path):
            cause = "is not from an earlier export; remove it, or"
            if names and path == record_path:
                cause = f"describes {names[0]};"
            raise SetupError(
                f"{path}: exists, but {cause} choose another --out", code="setup.exists"
            )


def _move_into_place(folder: Path, target: Path, record_path: Path) -> None:
    """Move all files into the folder of `target`; the record with the checksums comes last."""
    record_path.unlink(missing_ok=True)
    target.with_name(f"{target.name}.data").unlink(missing_ok=True)  # weights of an earlier export
    for path in sorted(folder.iterdir(), key=lambda path: path.name == record_path.name):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(path, target.parent / path.name)


def _build_metadata(
    model: str, built: BuiltModel, pipeline: Pipeline, classes: list[str]
) -> dict[str, Any]:
    """Return the metadata of the exported file, which its record repeats."""
    preprocessing = built.preprocessing
    published = spec_to_preprocessing(preprocessing, pipeline.transform_spec)
    provenance = {key: built.provenance.get(key) for key in _PROVENANCE_KEYS}
    metadata = {
        "source": {"model": _source_name(model), "architecture": built.architecture, **provenance},
        "classes": classes,
        "preprocessing": {
            "channels": "RGB",
            "values": "(pixel / 255 - mean) / std",
            "input_size": [3, *preprocessing.image_size],
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "evaluation": pipeline.transform_spec,
            "decode_size": pipeline.decode_size,
            "interpolation": published.interpolation if published else preprocessing.interpolation,
            # null if only the transform spec defines it
            "crop_pct": published.crop_pct if published else None,
            "crop_mode": published.crop_mode if published else None,
        },
        "license": built.provenance.get("license"),
        "versions": package_versions(_RECORDED_PACKAGES),
    }
    if built.multilabel:
        metadata["thresholds"] = built.thresholds or [DEFAULT_THRESHOLD] * len(classes)
    elif built.temperature is not None:
        metadata["temperature"] = built.temperature
    return metadata


# --- images to compare ---------------------------------------------------------------------------


def _load_images(
    model: str, data: str | None, decode_size: int | None, paths: Sequence[str]
) -> tuple[list[np.ndarray], str]:
    """Decode the images to compare outputs on.

    Returns: the images (H, W, 3) uint8, and the name of their source.
    """
    if paths:
        files = list_cli_images(paths)
        images = [_decode_or_raise(*files[index], decode_size) for index in _choose(files)]
        return images, "--images"
    if recipe := load_run_recipe(model, data=data):
        try:
            source = open_full_data(recipe.data, recipe.run.seed)
            return _decode_some(source), drop_folders(redact_urls(recipe.data.source))
        except FinetuneError as error:
            if data is not None:
                raise
            logger.warning(
                f"{recipe.data.source}: the data cannot be read ({error}); comparing the outputs "
                f"on {_FALLBACK_SOURCE} instead"
            )
    return _decode_some(open_source(_FALLBACK_SOURCE)), _FALLBACK_SOURCE


def _decode_or_raise(path: str, error: str | None, size: int | None) -> np.ndarray:
    problem = f"{path}: {error}"
    if error is None:
        try:
            return decode_image(path, decode_size=size)
        except DataError as cause:
            problem = str(cause)
    raise DataError(f"--images: {problem}; choose another image", code="data.unreadable")


def _decode_some(source: Source) -> list[np.ndarray]:
    split = next(source.splits[name] for name in ("test", "val", "train") if name in source.splits)
    return [split.decode(index) for index in _choose(split)]


def _choose(items: Sized) -> list[int]:
    """Return the indices of at most `_NUM_COMPARED` items, evenly spaced."""
    count = min(_NUM_COMPARED, len(items))
    return [index * len(items) // count for index in range(count)]
