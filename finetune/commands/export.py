"""Export a model to ONNX or to torch.export's format, compared with itself before it is published.

Beside NAME.onnx stands NAME.onnx.json: what has to be done to an image before the network sees it,
the names of the classes, and where both come from.
"""

# N images, B batch, K classes, h w the model's input size

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.commands.export_formats import (
    SUFFIXES,
    Run,
    innermost,
    opened,
    quiet,
    require_packages,
    write,
)
from finetune.commands.predict import evaluation
from finetune.commands.predict_io import list_files
from finetune.console import say
from finetune.data.decode import decode, planes
from finetune.data.from_recipe import whole_data_of
from finetune.data.source import Source, open_source
from finetune.errors import DataError, FinetuneError, RecipeError, WeightsError
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD
from finetune.files import disk_errors, sha256_of
from finetune.models.build import build
from finetune.models.saved import Built
from finetune.models.weights.timm_config import MULTILABEL
from finetune.recipe.identity import recipe_of
from finetune.run.environment import versions_of
from finetune.text import byte_size, counted
from finetune.transforms.evaluation import as_published
from finetune.transforms.pipeline import Pipeline

__all__ = ["describe", "export_model"]

TOLERANCE = 1e-3
NUM_IMAGES = 16
BATCH_SIZES = (1, 2, 5, NUM_IMAGES)
_VERSIONS = ("finetune", "torch", "timm", "onnx", "onnxscript", "onnxruntime")
_DIGITS = "embedded:digits"


def export_model(
    model: str,
    *,
    format: str = "onnx",
    out: str | None = None,
    images: Sequence[str] = (),
    image_size: int | tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Export a model for batches of any size; it is published only if its logits are the model's.

    Args:
        model: run directory, model folder, hub or timm name.
        format: "onnx", or "torch" for a .pt2 of torch.export.
        out: a file, or a folder to put it into; None for the working directory.
        images: files, folders and patterns to compare on; by default the run's own data, and
            scikit-learn's digits where there is none.
        image_size: pixels, or (height, width); None takes the model's own.
    Returns: {"file", "preprocessing", "format", "opset", "bytes", "sha256" of each file,
        "max_difference", "batch_sizes", "num_images", "images"}.
    Raises: WeightsError if the architecture cannot be exported with a dynamic batch or a logit
        differs by more than 1e-3; SetupError if a package is missing or nothing can be written;
        RecipeError, DataError for wrong arguments and images.
    """
    target = _target(model, format, out)
    require_packages(format)
    built = build(model, image_size=image_size)
    pipeline, class_names = evaluation(model, built, as_recorded=image_size is None)
    images_N3hw, compared_on = _pictures(model, pipeline, images)
    network = built.model.eval().requires_grad_(False)
    # zeros: a .pt2 keeps the example, and an image of somebody has no place in it
    example = torch.zeros(2, *images_N3hw.shape[1:])
    with disk_errors(target), contextlib.ExitStack() as stack:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent)
        at = Path(stack.enter_context(beside))
        exported = at / target.name
        with quiet():
            opset = write(network, example, exported, built.architecture, format)
            run = opened(exported, format)
            difference = _difference(network, run, images_N3hw, f"{model}: {format}")
        result = {
            "format": format,
            "opset": opset,
            "bytes": sum(path.stat().st_size for path in at.iterdir()),
            "sha256": {path.name: sha256_of(path) for path in sorted(at.iterdir())},
            "max_difference": difference,
            "batch_sizes": list(BATCH_SIZES),
            "num_images": len(images_N3hw),
            "images": compared_on,
        }
        facts = {**_facts(model, built, pipeline, class_names), "export": result}
        text = json.dumps(facts, indent=2, allow_nan=False) + "\n"
        (at / f"{target.name}.json").write_text(text, encoding="utf-8")
        _publish(at, target)
    return {"file": str(target), "preprocessing": f"{target}.json", **result}


def describe(result: dict[str, Any]) -> str:
    """The exported file, and how far its logits are from the model's, for people."""
    opset = f", opset {result['opset']}" if result["opset"] else ""
    sizes = ", ".join(map(str, result["batch_sizes"]))
    return (
        f"{result['file']}: {byte_size(result['bytes'])}{opset}, any batch size\n"
        f"{result['preprocessing']}: its preprocessing and classes\n"
        f"largest difference of a logit {result['max_difference']:.2g} (limit {TOLERANCE:g}) on "
        f"{counted(result['num_images'], 'image')} of {result['images']}, batches of {sizes}"
    )


# Where to, and what with ---------------------------------------------------------------------


def _target(model: str, format: str, out: str | None) -> Path:
    """The file to write: as named, or called after the model in the folder that is named."""
    suffix = SUFFIXES[format]
    path = Path(out or ".").expanduser()
    if path.suffix == suffix and not path.is_dir():
        return path
    if path.suffix in (".pt", ".pth", *SUFFIXES.values()) and not path.is_dir():
        raise RecipeError(
            f"--out: '{out}' is not named as {format} is; use the suffix {suffix}",
            code="recipe.wrong_value",
        )
    return path / f"{_name_of(model)}{suffix}"


def _name_of(model: str) -> str:
    """The exported file's stem: the run's, the folder's, the repository's or timm's name."""
    path = Path(model).expanduser()
    if os.path.exists(path):
        path = path.resolve()
        if path.is_file():
            return path.stem
        return path.parent.name if path.name == "model" else path.name
    last = re.split(r"[/:]", model.partition("@")[0])[-1]
    return last or "model"


def _pictures(model: str, pipeline: Pipeline, paths: Sequence[str]) -> tuple[Tensor, str]:
    """Real images, prepared. Returns: (N, 3, h, w), and what they are of."""
    if paths:
        chosen = _spread(list_files(paths))
        images = (_decoded(path, error, pipeline.decode_size) for path, error in chosen)
        return _prepared(pipeline, images), "--images"
    if recipe := recipe_of(model):
        section = recipe.data
        try:
            return _some_of(whole_data_of(section, recipe.run.seed), pipeline), section.source
        except FinetuneError as error:
            say(f"{section.source} cannot be read here ({error}); digits are compared instead")
    return _some_of(open_source(_DIGITS), pipeline), _DIGITS


def _decoded(path: str, error: str | None, size: int | None) -> np.ndarray:
    if error is not None:
        raise DataError(f"--images: {path}: {error}; name another", code="data.unreadable")
    try:
        return decode(path, size=size)
    except DataError as cause:
        raise DataError(f"--images: {cause}; name another", code="data.unreadable") from None


def _some_of(source: Source, pipeline: Pipeline) -> Tensor:
    splits = source.splits
    split = next(splits[name] for name in ("test", "val", "train") if name in splits)
    return _prepared(pipeline, map(split.read, _spread(range(len(split)))))


def _prepared(pipeline: Pipeline, images: Iterable[np.ndarray]) -> Tensor:
    """(N, 3, h, w) from images of any size, of which one at a time is held."""
    return torch.cat([pipeline([planes(one)]) for one in images])


def _spread(things: Sequence[Any]) -> list[Any]:
    """Some of them, evenly from the first to the last."""
    count = min(NUM_IMAGES, len(things))
    return [things[index * len(things) // count] for index in range(count)]


# Comparing ---------------------------------------------------------------------------------------


def _difference(network: nn.Module, run: Run, images_N3hw: Tensor, compared_on: str) -> float:
    """The largest difference of a logit over batches of several sizes.

    Raises: WeightsError above the tolerance, or for a batch size that the export does not take.
    """
    worst = 0.0
    for size in BATCH_SIZES:
        images_B3hw = images_N3hw[torch.arange(size) % len(images_N3hw)]
        with torch.inference_mode():
            expected_BK = network(images_B3hw)
        try:
            found_BK = run(images_B3hw)
        except Exception as error:  # see exporters.write
            raise WeightsError(
                f"{compared_on}: the export does not take a batch of {size} ({innermost(error)}); "
                "it is not written; try another --format",
                code="weights.wrong_export",
            ) from error
        same = expected_BK.shape == found_BK.shape
        largest = float((expected_BK - found_BK).abs().max()) if same else float("inf")
        if not largest <= TOLERANCE:  # written so that NaN fails too
            raise WeightsError(
                f"{compared_on}: a logit of the export differs from the model's by {largest:.3g} "
                f"in a batch of {size}, more than {TOLERANCE:g}; it is not written; "
                "try another --format",
                code="weights.wrong_export",
            )
        worst = max(worst, largest)
    return worst


# What stands beside ----------------------------------------------------------------------------


def _facts(model: str, built: Built, pipeline: Pipeline, names: list[str]) -> dict[str, Any]:
    own = built.preprocessing
    published = as_published(own, pipeline.sentence)
    height, width = own.image_size
    known = {key: built.provenance.get(key) for key in ("repository", "revision", "file", "sha256")}
    source = model if ":" in model or not os.path.exists(model) else _name_of(model)
    return {
        "source": {"model": source, "architecture": built.architecture, **known},
        "input": {"name": "images", "shape": ["batch", 3, height, width], "dtype": "float32"},
        "output": {"name": "logits", "shape": ["batch", len(names)], "dtype": "float32"},
        "preprocessing": {
            "channels": "RGB",
            "values": "(pixel / 255 - mean) / std",
            "input_size": [3, height, width],
            "mean": list(own.mean),
            "std": list(own.std),
            "evaluation": pipeline.sentence,
            "decode_size": pipeline.decode_size,
            "interpolation": published.interpolation if published else own.interpolation,
            # null where only the sentence says it
            "crop_pct": published.crop_pct if published else None,
            "crop_mode": published.crop_mode if published else None,
        },
        "class_names": names,
        "temperature": built.temperature,
        **_of_several(built, len(names)),
        "versions": versions_of(_VERSIONS),
    }


def _of_several(built: Built, classes: int) -> dict[str, Any]:
    """That scores are sigmoids, and their thresholds; empty where an image has one label."""
    if not built.multilabel:
        return {}
    thresholds = built.thresholds or [DEFAULT_THRESHOLD] * classes
    return {"problem_type": MULTILABEL, "thresholds": thresholds}


def _publish(folder: Path, target: Path) -> None:
    """Move the files to their place, the one that vouches for the others last."""
    beside = target.with_name(f"{target.name}.json")
    beside.unlink(missing_ok=True)
    data = target.with_name(f"{target.name}.data")
    if not (folder / data.name).exists():
        data.unlink(missing_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == beside.name, path.name)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(path, target.parent / path.name)
