"""Collect the title, facts and example images of a model for its demo page."""

# H W pixels

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from finetune.data.decode import decode_image
from finetune.data.from_recipe import open_data, open_full_data
from finetune.data.source import Split
from finetune.errors import DataError, FinetuneError, WeightsError
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES, accuracy_interval
from finetune.files import file_sha256, is_outside_link
from finetune.formatting import TOO_FEW_IMAGES_NOTE, format_percent, format_percent_range, pluralize
from finetune.hub.download import download_hub_file
from finetune.inference import Classifier
from finetune.log import logger
from finetune.model_checksums import read_checksums, verify_checksum
from finetune.models.weights.resolve import locate_weights
from finetune.run.directory import RunDir
from finetune.run.record import has_changed, load_run_recipe, read_record

__all__ = [
    "copy_example_images",
    "is_hub_name",
    "local_model_folder",
    "model_title",
    "pin_hub_commit",
    "split_hub_name",
    "summarize_model",
]

_NUM_EXAMPLES = 6
_MAX_EXAMPLE_PIXELS = 1024
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_REMOTE_SOURCE = re.compile(r"hub:|tar:.*://")  # opening these sources would download data


def is_hub_name(model: str) -> bool:
    """Return True for `hf-hub:owner/name`."""
    return model.startswith(("hf-hub:", "hf_hub:"))


def split_hub_name(model: str) -> tuple[str, str | None]:
    """Split `hf-hub:owner/name@revision` into owner/name and the revision or None."""
    repository, _, revision = model.split(":", 1)[1].partition("@")
    return repository, revision or None


def pin_hub_commit(model: str) -> str:
    """Add its commit to the name of a Hub model, so that all files are read from one commit."""
    if not is_hub_name(model):
        return model
    repository, revision = split_hub_name(model)
    commit = download_hub_file(repository, "config.json", revision).commit
    return f"hf-hub:{repository}@{commit}" if commit else model


def local_model_folder(model: str) -> Path | None:
    """Return the folder with a local model's config.json; None for Hub and registry names."""
    if is_hub_name(model):
        return None
    path = locate_weights(model)
    return path if path is not None and path.is_dir() else None


def model_title(model: str) -> str:
    """Return a short name: that of the Hub repository, the run folder, or the model."""
    if is_hub_name(model):
        return split_hub_name(model)[0]
    folder = local_model_folder(model)
    if folder is None or model.startswith("embedded:"):
        return model.rsplit(":", 1)[-1]
    path = folder.resolve()
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def summarize_model(model: str, classifier: Classifier) -> list[str]:
    """Return short facts: number of classes, input size, and the recorded accuracy or mAP.

    The metric is from the test split or, if there is none, from validation. An accuracy on few
    images is followed by its 95 % interval; a metric on too few images, by a warning.
    """
    height, width = classifier.pipeline.image_size
    classes = pluralize(len(classifier.class_names), "class", "classes")
    facts = [classes, f"input {width} × {height} pixels"]
    results = _read_results(model) or {}
    evaluated = results.get("model_sha256")
    if (
        None not in (evaluated, classifier.weights_sha256)
        and evaluated != classifier.weights_sha256
    ):
        logger.warning(f"{model}: results.json belongs to other weights, so no metrics are shown")
        results = {}
    split_name, metrics = "test", results.get("test")
    if not metrics:
        split_name, metrics = "validation", results.get("val")
    metrics = metrics if isinstance(metrics, dict) else {}
    accuracy = metrics.get("top1", metrics.get("map"))
    if isinstance(accuracy, (int, float)) and 0 <= accuracy <= 1:
        num_images = metrics.get("examples")
        num_images = num_images if isinstance(num_images, int) else 0  # 0: not recorded
        count_text = f"{num_images:,}" if num_images else "the"
        if "top1" in metrics:
            interval = accuracy_interval(accuracy, num_images)
            interval_text = (
                "" if interval is None else f" (95 % interval {format_percent_range(*interval)})"
            )
            facts.append(
                f"accuracy {format_percent(accuracy, 1)} on {count_text} {split_name} images"
                f"{interval_text}"
            )
        else:
            facts.append(f"mAP {format_percent(accuracy, 1)} on {count_text} {split_name} images")
        if metrics.get("decisions"):
            facts.append(f"some {split_name} labels corrected or images dropped by hand")
        if 0 < num_images < TOO_FEW_IMAGES:
            facts.append(TOO_FEW_IMAGES_NOTE)
    return facts


def _read_results(model: str) -> dict[str, Any] | None:
    """Read the model's results.json; None if it does not exist or was changed."""
    for file in _result_files(model):
        try:
            if (file.parent / "config.json").is_file() and file.is_file():
                checksums = read_checksums(file.parent, source=model)
                verify_checksum(file.name, file_sha256(file), checksums, source=model)
            else:  # in a run directory
                RunDir(file.parent).read_json(file.name)
        except FinetuneError as error:
            logger.warning(f"no metrics are shown: {error}")
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return content
    return None


def _result_files(model: str) -> list[Path]:
    folder = local_model_folder(model)
    if folder is not None:
        candidates = [folder / "results.json"]
        # use the parent folder's results.json only if the parent is a run directory
        is_run = folder.name == "model" and (folder.parent / "run.json").is_file()
        return candidates + [folder.parent / "results.json"] * is_run
    if not is_hub_name(model):
        return []
    repository, revision = split_hub_name(model)
    try:
        return [download_hub_file(repository, "results.json", revision).path]
    except WeightsError:
        return []  # most Hub repositories have no results.json


def copy_example_images(model: str, destination: Path) -> list[Path]:
    """Copy example images from the model's folder `examples`, else from the run's test data.

    The copies are decoded images of at most 1024 pixels, as PNG.

    Args:
        model: see `Classifier.load`.
        destination: an existing folder for the copies.
    Returns: paths of up to six files in `destination`; empty if no examples are found.
    """
    folder = local_model_folder(model)
    if folder is None:
        return []
    example_files = sorted(
        p for p in folder.glob("examples/*") if p.suffix.lower() in _IMAGE_SUFFIXES
    )
    copies = []
    for number, file in enumerate(example_files[:_NUM_EXAMPLES]):
        try:
            if is_outside_link(file, folder):
                raise DataError(
                    f"{file}: this symlink points outside the folder or to a hidden file; replace "
                    "it with a copy",
                    code="data.unreadable",
                )
            copy = destination / f"{number}-{file.stem}.png"
            copies.append(_save_thumbnail(decode_image(file), copy))
        except DataError as error:
            logger.warning(f"left out of the examples: {error}")
    return copies or _save_examples_from_data(model, destination)


def _save_examples_from_data(model: str, destination: Path) -> list[Path]:
    """Save one image each of up to six classes as PNG, from test or, without a test split, val."""
    try:
        recipe = load_run_recipe(model)
        if recipe is None:
            return []
        section = recipe.data
        if _REMOTE_SOURCE.match(section.source):
            return []
        source = open_full_data(section, recipe.run.seed)
        if "test" not in source.splits:
            source = open_data(section, recipe.run.seed)
        split = source.splits.get("test") or source.splits.get("val")
        if split is None:
            return []
        if has_changed(read_record(RunDir(model)), split):
            logger.warning(f"the demo has no examples: {source.name} has changed since the run")
            return []
        return [
            _save_thumbnail(
                split.decode(index),
                destination / f"{number}-{_slugify(source.class_names[label])}.png",
            )
            for number, (index, label) in enumerate(_select_examples(split))
        ]
    except FinetuneError as error:
        logger.info(f"the demo has no examples: {error}")
        return []


def _select_examples(split: Split) -> list[tuple[int, int]]:
    """Select the first image of each of a few evenly spaced classes. Returns: (index, label)."""
    labels = split.labels.argmax(axis=1) if split.is_multilabel else split.labels
    classes, first = np.unique(labels, return_index=True)
    num_examples = min(_NUM_EXAMPLES, len(classes))
    class_indices = np.linspace(0, len(classes) - 1, num_examples).round().astype(int)
    return [(int(first[index]), int(classes[index])) for index in class_indices]


def _save_thumbnail(pixels_HWC: np.ndarray, file: Path) -> Path:
    image = Image.fromarray(pixels_HWC)
    image.thumbnail((_MAX_EXAMPLE_PIXELS, _MAX_EXAMPLE_PIXELS))
    image.save(file)
    return file


def _slugify(name: str) -> str:
    """Turn a class name into text that is valid in a file name."""
    return re.sub(r"[^0-9A-Za-z]+", "-", name)[:40].strip("-") or "class"
