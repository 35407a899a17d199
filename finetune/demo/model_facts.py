"""The facts of a model for its demo: name, figures, and pictures to try."""

# H W pixels

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from finetune.commands.predict import Classifier
from finetune.console import say
from finetune.data.from_recipe import data_of, whole_data_of
from finetune.data.source import Split
from finetune.errors import FinetuneError, WeightsError
from finetune.evaluation.intervals import TOO_FEW_IMAGES, interval
from finetune.hub.download import fetch
from finetune.models.weights.resolve import locate
from finetune.recipe.identity import recipe_of
from finetune.text import TOO_FEW, counted, percent, percent_range

__all__ = ["example_files", "facts", "is_hub_name", "model_folder", "title_of"]

_EXAMPLES = 6
_EXAMPLE_PIXELS = 1024
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_REMOTE = re.compile(r"hub:|tar:.*://")  # opening such data would download it


def is_hub_name(model: str) -> bool:
    """True for `hf-hub:owner/name`."""
    return model.startswith(("hf-hub:", "hf_hub:"))


def model_folder(model: str) -> Path | None:
    """The folder that holds a local model's config.json; None for hub and registry names."""
    if is_hub_name(model):
        return None
    path = locate(model)
    return path if path is not None and path.is_dir() else None


def title_of(model: str) -> str:
    """A short name: the repository's, the run's, or the model's own."""
    if is_hub_name(model):
        return model.split(":", 1)[1].partition("@")[0]
    folder = model_folder(model)
    if folder is None or model.startswith("embedded:"):
        return model.rsplit(":", 1)[-1]
    path = folder.resolve()
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def facts(model: str, classifier: Classifier) -> list[str]:
    """Short figures: classes, input size, and the accuracy or the mAP that is recorded.

    It is that of the test split or, without one, of validation; on few images with its 95 %
    interval, and followed by a mark where they are too few.
    """
    height, width = classifier.pipeline.image_size
    classes = counted(len(classifier.class_names), "class", "classes")
    figures = [classes, f"reads {width} × {height} pixels"]
    results = _results(model) or {}
    name, measured = "test", results.get("test")
    if not measured:
        name, measured = "validation", results.get("val")
    measured = measured if isinstance(measured, dict) else {}
    share = measured.get("top1", measured.get("map"))
    if isinstance(share, (int, float)) and 0 <= share <= 1:
        images = measured.get("examples")
        images = images if isinstance(images, int) else 0  # not recorded
        count = f"{images:,}" if images else "the"
        if "top1" in measured:
            ends = interval(share, images)
            between = "" if ends is None else f" (95 % interval {percent_range(*ends)})"
            figures.append(f"{percent(share, 1)} of {count} {name} images right{between}")
        else:
            figures.append(f"mAP {percent(share, 1)} on {count} {name} images")
        if 0 < images < TOO_FEW_IMAGES:
            figures.append(TOO_FEW)
    return figures


def _results(model: str) -> dict[str, Any] | None:
    """The content of results.json, where the model has one."""
    for file in _result_files(model):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return content
    return None


def _result_files(model: str) -> list[Path]:
    folder = model_folder(model)
    if folder is not None:
        beside = [folder / "results.json"]
        # above model/ only in a run directory: elsewhere the file could be about anything
        is_run = folder.name == "model" and (folder.parent / "run.json").is_file()
        return beside + [folder.parent / "results.json"] * is_run
    if not is_hub_name(model):
        return []
    repository, _, revision = model.split(":", 1)[1].partition("@")
    try:
        return [fetch(repository, "results.json", revision or None).path]
    except WeightsError:
        return []  # most repositories have none


def example_files(model: str, into: Path) -> list[Path]:
    """Pictures to try: those in the model's folder `examples`, else some of the run's test data.

    Args:
        model: as for `Classifier.load`.
        into: an existing folder for copies.
    Returns: up to six files in `into`; none where the model has none.
    """
    folder = model_folder(model)
    if folder is None:
        return []
    own = sorted(p for p in folder.glob("examples/*") if p.suffix.lower() in _SUFFIXES)
    copies = [into / f"{number}-{file.name}" for number, file in enumerate(own[:_EXAMPLES])]
    for file, copy in zip(own, copies, strict=False):
        copy.write_bytes(file.read_bytes())
    return copies or _from_data(model, into)


def _from_data(model: str, into: Path) -> list[Path]:
    """One image of each of some classes, of test or else of validation, as PNG."""
    try:
        recipe = recipe_of(model)
        if recipe is None:
            return []
        section = recipe.data
        if _REMOTE.match(section.source):
            return []
        source = whole_data_of(section, recipe.run.seed)
        if "test" not in source.splits:
            source = data_of(section, recipe.run.seed)
        split = source.splits.get("test") or source.splits.get("val")
        if split is None:
            return []
        return [
            _save(split.read(index), into / f"{number}-{_plain(source.class_names[label])}.png")
            for number, (index, label) in enumerate(_spread(split))
        ]
    except FinetuneError as error:
        say(f"the demo has no examples: {error}")
        return []


def _spread(split: Split) -> list[tuple[int, int]]:
    """The first image of each of a few classes, evenly chosen. Returns: (index, label) pairs."""
    labels = split.labels.argmax(axis=1) if split.is_multilabel else split.labels
    classes, first = np.unique(labels, return_index=True)
    count = min(_EXAMPLES, len(classes))
    chosen = np.linspace(0, len(classes) - 1, count).round().astype(int)
    return [(int(first[place]), int(classes[place])) for place in chosen]


def _save(pixels_HWC: np.ndarray, file: Path) -> Path:
    picture = Image.fromarray(pixels_HWC)
    picture.thumbnail((_EXAMPLE_PIXELS, _EXAMPLE_PIXELS))
    picture.save(file)
    return file


def _plain(name: str) -> str:
    """A class name as part of a file name."""
    return re.sub(r"[^0-9A-Za-z]+", "-", name)[:40].strip("-") or "class"
