"""`finetune export`: export a model to ONNX or torch.export.

By default, the exported model includes the preprocessing: it takes a uint8 image of any size and
returns probabilities. The file is written only if these match those of `Classifier`, and
certificate.json next to it has the figures.

Without the preprocessing, it takes normalized images and returns logits, with a dynamic batch
size. A file NAME.onnx.json next to NAME.onnx contains the preprocessing, the class names and the
origin of the weights.
"""

# N images, B batch, K classes, h w the model's input size

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from finetune.commands.export_certificate import (
    MAX_DIFFERENCE,
    ImageClassifier,
    certify,
    vary_sizes,
)
from finetune.commands.export_formats import (
    IMAGE_SIGNATURE,
    SUFFIXES,
    ExportedModel,
    export_network,
    largest_difference,
    load_exported,
    require_packages,
    run_exported,
    suppress_exporter_output,
)
from finetune.commands.export_runtimes import certify_runtimes, check_runtimes
from finetune.commands.reduced_precision import (
    format_reduced,
    open_reduced_precision,
    replace_by_reduced,
)
from finetune.data.decode import decode_image, hwc_to_chw
from finetune.data.from_recipe import open_full_data
from finetune.data.image_paths import list_cli_images
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.errors import (
    DataError,
    FinetuneError,
    RecipeError,
    SetupError,
    WeightsError,
)
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD
from finetune.files import explain_disk_errors, file_sha256
from finetune.formatting import format_bytes, pluralize
from finetune.inference import Classifier, eval_pipeline_and_class_names
from finetune.log import logger
from finetune.model_checksums import json_sha256
from finetune.models.build import build_model
from finetune.models.exported import CERTIFICATE
from finetune.models.save import BuiltModel
from finetune.models.weights.timm_config import MULTILABEL_PROBLEM_TYPE
from finetune.run.environment import package_versions
from finetune.run.record import load_run_recipe
from finetune.transforms.eval_transforms import spec_to_preprocessing
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing_module import PreprocessingModule

__all__ = ["export_model", "format_export", "resolve_output_path"]

TOLERANCE = 1e-3
NUM_COMPARED_IMAGES = 16
BATCH_SIZES = (1, 2, 5, NUM_COMPARED_IMAGES)
_RECORDED_PACKAGES = ("finetune", "torch", "timm", "onnx", "onnxscript", "onnxruntime")
_FALLBACK_SOURCE = "embedded:digits"


def export_model(
    model: str,
    *,
    format: str = "onnx",
    out: str | None = None,
    images: Sequence[str] = (),
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
        with `precision` "reduced" (see `convert_precision`); without also "preprocessing" (the path
        of the JSON file), "batch_sizes".
    Raises: WeightsError if the architecture cannot be exported, an output differs by more than
        1e-3, or `precision` lowers the accuracy by more than `max_drop`; SetupError if a package is
        missing, or the file cannot be written or is not from an earlier export; RecipeError or
        DataError for wrong arguments or images, or for a transform spec that cannot be exported.
    """
    reduced = precision and open_reduced_precision(
        model, precision, max_drop=max_drop, format=format, preprocessing=preprocessing
    )
    target = resolve_output_path(model, format, out, preprocessing=preprocessing)
    record_name = CERTIFICATE if preprocessing else f"{target.name}.json"
    _check_not_foreign(target, record_name)
    require_packages(format)
    versions = check_runtimes(
        certify_in, ort_web, format=format, preprocessing=preprocessing, precision=precision
    )
    with explain_disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    logger.info(
        f"{model}: loading the model, and {NUM_COMPARED_IMAGES} images to compare outputs on"
    )
    built = build_model(model, image_size=image_size)
    pipeline, class_names = eval_pipeline_and_class_names(
        model, built, use_recipe=image_size is None
    )
    network = built.model.eval().requires_grad_(False)
    metadata = _build_metadata(model, built, pipeline, class_names)
    module = _build_image_classifier(network, built, pipeline) if preprocessing else None
    # the graph gets what a caller decodes, so the decoder must not reduce the image
    decoded, compared_on = _load_comparison_images(
        model, None if preprocessing else pipeline.decode_size, images
    )
    with (
        explain_disk_errors(target),
        tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as staging,
    ):
        path = Path(staging) / target.name
        logger.info(f"exporting to {format}; a large model takes minutes")
        name = f"{model}: {format}"
        if module is None:
            images_N3hw = _preprocess(pipeline, decoded)
            opset, figures = _export_network(network, built, images_N3hw, path, format, name)
        else:
            classifier = Classifier(
                network,
                pipeline,
                class_names,
                device="cpu",
                temperature=built.temperature,
                thresholds=metadata.get("thresholds"),
            )
            varied = vary_sizes(list(decoded))
            opset, figures = _export_classifier(
                module, classifier, built, metadata, varied, path, format, name
            )
            figures["runtimes"] = certify_runtimes(
                versions, path, classifier, varied, name, ort_web=ort_web
            )
        if reduced is not None:
            logger.info(f"--{precision}: measuring on {len(reduced.validation)} validation images")
            figures["reduced"] = replace_by_reduced(path, reduced, metadata.get("thresholds"), name)
        result = {
            "format": format,
            "opset": opset,
            "bytes": sum(path.stat().st_size for path in path.parent.iterdir()),
            "sha256": {path.name: file_sha256(path) for path in sorted(path.parent.iterdir())},
            **figures,
            "images": compared_on,
        }
        record = {**metadata, "export": result}
        if module is not None:
            kept = {key: metadata[key] for key in ("source", "license", "versions")}
            calibration = {"temperature": built.temperature, "thresholds": built.thresholds}
            record = {
                **kept,
                "classes": class_names,
                "calibration": calibration,
                "export": result,
            }
        record["checksum"] = json_sha256(record)
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        (path.parent / record_name).write_text(text, encoding="utf-8")
        _move_into_place(path.parent, target, record_name)
    record_key = "certificate" if preprocessing else "preprocessing"
    return {"file": str(target), record_key: str(target.with_name(record_name)), **result}


@suppress_exporter_output()
def _export_network(
    network: nn.Module, built: BuiltModel, images_N3hw: Tensor, path: Path, format: str, name: str
) -> tuple[int | None, dict[str, Any]]:
    """Export from normalized images to logits. Returns: the opset, and figures for the record."""
    # zeros, because a .pt2 file stores the example input: it must not be a private image
    example = torch.zeros(2, *images_N3hw.shape[1:])
    opset = export_network(network, example, path, built.architecture, format)
    difference = _check_logits(network, load_exported(path, format), images_N3hw, name)
    return opset, {
        "max_difference": difference,
        "batch_sizes": list(BATCH_SIZES),
        "num_images": len(images_N3hw),
    }


@suppress_exporter_output()
def _export_classifier(
    module: ImageClassifier,
    classifier: Classifier,
    built: BuiltModel,
    metadata: dict[str, Any],
    images: Sequence[np.ndarray],
    path: Path,
    format: str,
    name: str,
) -> tuple[int | None, dict[str, Any]]:
    """Export from pixels to probabilities. Returns: the opset, and figures for the certificate."""
    height, width = classifier.pipeline.image_size
    # not square, so that the trace does not take height and width for one axis
    example = torch.zeros(1, height + 8, width + 24, 3, dtype=torch.uint8)
    opset = export_network(
        module,
        example,
        path,
        built.architecture,
        format,
        signature=IMAGE_SIGNATURE,
        metadata=_graph_metadata(metadata),
    )
    return opset, certify(load_exported(path, format), classifier, images, name)


def _build_image_classifier(
    network: nn.Module, built: BuiltModel, pipeline: Pipeline
) -> ImageClassifier:
    module = PreprocessingModule(
        pipeline.transform_spec,
        image_size=pipeline.image_size,
        mean=built.preprocessing.mean,
        std=built.preprocessing.std,
        interpolation=pipeline.interpolation,
    )
    return ImageClassifier(
        module, network, temperature=built.temperature, multilabel=built.multilabel
    ).eval()


def format_export(result: dict[str, Any]) -> str:
    """Format the result of `export_model`: the written files and the largest difference."""
    opset = f", opset {result['opset']}" if result["opset"] else ""
    first = f"{result['file']}: {format_bytes(result['bytes'])}{opset}"
    images = f"{pluralize(result['num_images'], 'image')} of {result['images']}"
    if "certificate" in result:
        text = (
            f"{first}, takes a uint8 image of any size\n"
            f"{result['certificate']}: {'in float, ' if 'reduced' in result else ''}same top-1 as "
            f"the model on {images}, in "
            f"{pluralize(result['num_sizes'], 'size')}; largest difference of a probability "
            f"{result['max_difference']:.2g} (limit {MAX_DIFFERENCE:g}), "
            f"{result['latency_ms']:.1f} ms per image"
        )
        others = [
            f"in {name} {figures['version']}: same top-1, largest difference "
            f"{figures['max_difference']:.2g}, {figures['latency_ms']:.1f} ms per image"
            for name, figures in result["runtimes"].items()
        ]
        return "\n".join([text, *others, *format_reduced(result.get("reduced"))])
    sizes = ", ".join(map(str, result["batch_sizes"]))
    return (
        f"{first}, dynamic batch size\n"
        f"{result['preprocessing']}: preprocessing and class names\n"
        f"largest logit difference {result['max_difference']:.2g} (limit {TOLERANCE:g}) on "
        f"{images}, batches of {sizes}"
    )


# --- output path and images to compare -----------------------------------------------------------


def resolve_output_path(
    model: str, format: str, out: str | None, *, preprocessing: bool = True
) -> Path:
    """Return the file to write: `out`, or a file in the folder `out`.

    This file is named "model", or after the model if it has no preprocessing.

    Raises: RecipeError if `out` has the suffix of another format.
    """
    suffix = SUFFIXES[format]
    path = Path(out or ".").expanduser()
    if path.suffix == suffix and not path.is_dir():
        return path
    if path.suffix in (".pt", ".pth", *SUFFIXES.values()) and not path.is_dir():
        raise RecipeError(
            f"--out: '{out}' has the wrong suffix for {format}; use {suffix}",
            code="recipe.wrong_value",
        )
    return path / f"{'model' if preprocessing else _default_file_stem(model)}{suffix}"


def _check_not_foreign(target: Path, record_name: str) -> None:
    """Raise SetupError if the file exists, unless the metadata of an export names it."""
    metadata_path = target.with_name(record_name)
    try:
        names = [*json.loads(metadata_path.read_bytes())["export"]["sha256"]]
    except (OSError, ValueError, KeyError, TypeError):
        names = []
    if target.name in names:
        return
    for path in (target, metadata_path):
        if os.path.lexists(path):
            cause = "is not from an earlier export; remove it, or"
            if names and path == metadata_path:
                cause = f"describes {names[0]};"
            raise SetupError(
                f"{path}: exists, but {cause} choose another --out", code="setup.exists"
            )


def _default_file_stem(model: str) -> str:
    """Return the default file stem: the name of the run, folder, repository or timm model."""
    path = Path(model).expanduser()
    if os.path.exists(path):
        path = path.resolve()
        if path.is_file():
            return path.stem
        return path.parent.name if path.name == "model" else path.name
    last = re.split(r"[/:]", model.partition("@")[0])[-1]
    return last or "model"


def _load_comparison_images(
    model: str, decode_size: int | None, paths: Sequence[str]
) -> tuple[Iterable[np.ndarray], str]:
    """Decode the images to compare outputs on.

    Returns: the images (H, W, 3) uint8, and the name of their source.
    """
    if paths:
        files = _sample_evenly(list_cli_images(paths))
        return [_decode_or_raise(path, error, decode_size) for path, error in files], "--images"
    if recipe := load_run_recipe(model):
        section = recipe.data
        try:
            source = open_full_data(section, recipe.run.seed)
            return _sample_source(source), section.source
        except FinetuneError as error:
            logger.warning(
                f"{section.source}: the data cannot be read ({error}); comparing the outputs on "
                f"{_FALLBACK_SOURCE} instead"
            )
    return _sample_source(open_source(_FALLBACK_SOURCE)), _FALLBACK_SOURCE


def _decode_or_raise(path: str, error: str | None, size: int | None) -> np.ndarray:
    if error is not None:
        raise DataError(f"--images: {path}: {error}; choose another image", code="data.unreadable")
    try:
        return decode_image(path, decode_size=size)
    except DataError as cause:
        raise DataError(
            f"--images: {cause}; choose another image", code="data.unreadable"
        ) from None


def _sample_source(source: Source) -> list[np.ndarray]:
    splits = source.splits
    split = next(splits[name] for name in ("test", "val", "train") if name in splits)
    return [split.decode(index) for index in _sample_evenly(range(len(split)))]


def _preprocess(pipeline: Pipeline, images: Iterable[np.ndarray]) -> Tensor:
    """Preprocess images of any size, one at a time to save memory. Returns: (N, 3, h, w)."""
    return torch.cat([pipeline([hwc_to_chw(image)]) for image in images])


def _sample_evenly(items: Sequence[Any]) -> list[Any]:
    """Return at most NUM_COMPARED_IMAGES items, evenly spaced."""
    count = min(NUM_COMPARED_IMAGES, len(items))
    return [items[index * len(items) // count] for index in range(count)]


# --- comparison ----------------------------------------------------------------------------------


def _check_logits(
    network: nn.Module, exported: ExportedModel, images_N3hw: Tensor, name: str
) -> float:
    """Compare the logits of both models, in several batch sizes. Returns: the largest difference.

    Raises: WeightsError if a difference exceeds TOLERANCE, or the export fails for a batch size.
    """
    max_difference = 0.0
    for size in BATCH_SIZES:
        images_B3hw = images_N3hw[torch.arange(size) % len(images_N3hw)]
        with torch.inference_mode():
            expected_BK = network(images_B3hw)
        what = f"{name}: the export fails for a batch of {size}"
        actual_BK = run_exported(exported, images_B3hw, what, advice="try another --format")
        difference = largest_difference(actual_BK, expected_BK)
        if not difference <= TOLERANCE:  # `not <=` instead of `>`, so that NaN fails too
            raise WeightsError(
                f"{name}: a logit of the export differs from the model's by {difference:.3g} "
                f"in a batch of {size} (limit {TOLERANCE:g}), so it was not written; "
                "try another --format",
                code="weights.wrong_export",
            )
        max_difference = max(max_difference, difference)
    return max_difference


# --- metadata ------------------------------------------------------------------------------------


def _build_metadata(
    model: str, built: BuiltModel, pipeline: Pipeline, class_names: list[str]
) -> dict[str, Any]:
    preprocessing = built.preprocessing
    published = spec_to_preprocessing(preprocessing, pipeline.transform_spec)
    height, width = preprocessing.image_size
    known = {key: built.provenance.get(key) for key in ("repository", "revision", "file", "sha256")}
    source = model if ":" in model or not os.path.exists(model) else _default_file_stem(model)
    multilabel_metadata: dict[str, Any] = {}
    if built.multilabel:
        thresholds = built.thresholds or [DEFAULT_THRESHOLD] * len(class_names)
        multilabel_metadata = {"problem_type": MULTILABEL_PROBLEM_TYPE, "thresholds": thresholds}
    return {
        "source": {"model": source, "architecture": built.architecture, **known},
        "input": {"name": "images", "shape": ["batch", 3, height, width], "dtype": "float32"},
        "output": {"name": "logits", "shape": ["batch", len(class_names)], "dtype": "float32"},
        "preprocessing": {
            "channels": "RGB",
            "values": "(pixel / 255 - mean) / std",
            "input_size": [3, height, width],
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "evaluation": pipeline.transform_spec,
            "decode_size": pipeline.decode_size,
            "interpolation": published.interpolation if published else preprocessing.interpolation,
            # null if only the transform spec defines it
            "crop_pct": published.crop_pct if published else None,
            "crop_mode": published.crop_mode if published else None,
        },
        "class_names": class_names,
        "temperature": built.temperature,
        "license": built.provenance.get("license"),
        **multilabel_metadata,
        "versions": package_versions(_RECORDED_PACKAGES),
    }


def _graph_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the metadata that the exported file itself contains, as JSON by key."""
    values = {
        "classes": metadata["class_names"],
        "input_size": metadata["preprocessing"]["input_size"],
        "license": metadata["license"],
        **{
            key: metadata[key]
            for key in ("thresholds", "temperature", "preprocessing", "source", "versions")
            if metadata.get(key) is not None
        },
    }
    return {key: json.dumps(value, allow_nan=False) for key, value in values.items()}


def _move_into_place(folder: Path, target: Path, record_name: str) -> None:
    """Move all files into the folder of `target`; the metadata with the checksums comes last."""
    metadata_path = target.with_name(record_name)
    metadata_path.unlink(missing_ok=True)
    weights_path = target.with_name(f"{target.name}.data")
    if not (folder / weights_path.name).exists():
        weights_path.unlink(missing_ok=True)
    for path in sorted(
        folder.iterdir(), key=lambda path: (path.name == metadata_path.name, path.name)
    ):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(path, target.parent / path.name)
