"""`finetune data doctor`: compute features of a dataset once, and list its problems in a file.

The splits of a source are diagnosed together: a row is the position of an image in all splits, one
after the other. `doctor.json` has the problems, `label_scores.csv` the score of every label, and
`neighbors.npz` the nearest images of each listed label error. No image or label is changed.
"""

# N images, D width, K classes

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.commands.start import inspect_data
from finetune.commands.weight_selection import (
    Candidate,
    image_sizes,
    list_candidates,
    named_candidate,
    score_candidates,
)
from finetune.data.open_source import open_source
from finetune.data.source import Source, Split
from finetune.doctor.label_errors import (
    LabelErrors,
    check_cleanlab,
    find_label_errors,
    out_of_fold_probabilities,
)
from finetune.doctor.review_page import write_review_page
from finetune.errors import DataError, redact_urls
from finetune.evaluation.feature_extraction import feature_identity, load_or_compute_features
from finetune.files import make_writable_folder, write_atomically
from finetune.formatting import format_percent, pluralize
from finetune.log import logger
from finetune.models.build import build_model
from finetune.precision import autocast_dtype
from finetune.recipe.load import DataSection, RunSection, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.accelerator import create_accelerator
from finetune.training.compile import choose_kernels
from finetune.transforms.eval_transforms import build_pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["diagnose", "format_diagnosis"]

_EVAL_SPEC = "resize"  # the whole image, without cropping
_ROWS_PER_CHUNK = 4096  # images whose features a killed run loses
_NUM_LISTED = 5  # findings of each kind in the summary


def diagnose(
    source: str,
    *,
    weights: Sequence[str] = (),
    out: str | Path = "doctor",
    multilabel: bool = False,
) -> dict[str, Any]:
    """Find wrong labels in a source; write doctor.json, label_scores.csv and neighbors.npz.

    Args:
        source: a source string, as in `data.source`.
        weights: names of pretrained weights; empty to choose them as `start` does. The
            probabilities of several networks are averaged.
        out: folder to write to.
        multilabel: allow any number of labels per image.
    Returns: the content of doctor.json; empty on ranks other than 0.
    Raises: SetupError if cleanlab is missing or `out` is not writable; DataError if the source
        cannot be used.
    """
    started = time.perf_counter()
    check_cleanlab()
    folder = Path(out)
    make_writable_folder(folder, option="--out")
    opened = open_source(source, multilabel=multilabel)
    accelerator = create_accelerator(RunSection())
    candidates = _choose_weights(opened, weights, accelerator.device)
    images = _Images(opened)
    features = [_compute_features(images, each, accelerator) for each in candidates]
    if not accelerator.is_main_process:
        return {}
    rows = np.flatnonzero(~np.isnan(features[0][:, 0]))  # readable in all networks
    features = [values_ND[rows] for values_ND in features]
    labels, num_classes = images.labels[rows], len(opened.class_names)
    probabilities_NK = out_of_fold_probabilities(
        features, labels, np.arange(len(rows)), num_classes=num_classes
    )
    errors = find_label_errors(probabilities_NK, labels)
    diagnosis = {
        "source": redact_urls(opened.name),
        "classes": opened.class_names,
        "multilabel": multilabel,
        "weights": [each.name for each in candidates],
        "splits": {
            name: {"images": len(split), "fingerprint": split.fingerprint}
            for name, split in opened.splits.items()
        },
        "label_errors": [
            {
                **images.describe(int(rows[index])),
                "given": images.label_names(labels[index]),
                "suggested": images.label_names(errors.suggested[index]),
                "score": round(float(errors.scores_N[index]), 4),
            }
            for index in errors.indices
        ],
        "duplicates": [],
        "leaks": [],
        "outliers": [],
        "class_problems": [],
        "groups": [],
        "expected": {
            "label_errors": dict(zip(("count", "low", "high"), errors.expected, strict=True))
        },
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_atomically(folder / "label_scores.csv", _format_scores(images, rows, errors))
    text = json.dumps(diagnosis, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / "doctor.json", text)
    write_review_page(folder, opened)
    return diagnosis


def format_diagnosis(diagnosis: Mapping[str, Any], out: str | Path) -> str:
    """Format the result of `diagnose`; empty on ranks other than 0."""
    if not diagnosis:
        return ""
    num_images = sum(split["images"] for split in diagnosis["splits"].values())
    errors, expected = diagnosis["label_errors"], diagnosis["expected"]["label_errors"]
    lines = [
        f"{diagnosis['source']}: {pluralize(num_images, 'image')}, "
        f"{len(diagnosis['classes'])} classes, features of {', '.join(diagnosis['weights'])}",
        f"label errors: {len(errors)} listed; {expected['count']:.0f} expected "
        f"(95 %: {expected['low']:.0f} to {expected['high']:.0f})",
    ]
    for error in errors[:_NUM_LISTED]:
        lines.append(
            f"  {error['split']}: {error['path']}: {error['given']}, probably "
            f"{error['suggested']} ({format_percent(error['score'], 0)} sure)"
        )
    return "\n".join([*lines, f"all findings: {Path(out) / 'doctor.json'}"])


class _Images:
    """The images of all splits, one split after the other.

    Attributes:
        source: the dataset.
        labels: class indices (N,), or 0/1 indicators (N, K).
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.splits = list(source.splits.values())
        self.labels = np.concatenate([split.labels for split in self.splits])
        self._first_rows = np.cumsum([0, *map(len, self.splits)])

    def __len__(self) -> int:
        return len(self.labels)

    def locate(self, row: int) -> tuple[Split, int]:
        """Return the split of a row, and the index in it."""
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return self.splits[number], row - int(self._first_rows[number])

    def describe(self, row: int) -> dict[str, Any]:
        """Return split, index, path and digest of a row."""
        split, index = self.locate(row)
        digest = None if split.is_streamed else split.digests[index].tobytes().hex()
        return {
            "split": split.name,
            "index": index,
            "path": split.name_of(index),
            "digest": digest,
        }

    def label_names(self, label: Any) -> str | list[str]:
        """Return the class name of a label, or the names of a multi-label one."""
        if self.labels.ndim == 2:
            return [self.source.class_names[k] for k in np.flatnonzero(label)]
        return self.source.class_names[int(label)]


def _choose_weights(source: Source, names: Sequence[str], device: torch.device) -> list[Candidate]:
    """Return the named weights, or the best ones on this machine, each at one image size."""
    if "train" in source.splits:
        median_side = inspect_data(source, 0.0).median_side
    elif names:
        (name,) = list(source.splits)[:1]
        train = {"train": source.splits[name]}
        median_side = inspect_data(Source("", train, source.class_names, ""), 0.0).median_side
    else:
        raise DataError(
            f"{redact_urls(source.name)}: has no train split to compare networks on; name one with "
            "--weights",
            code="data.no_split",
        )

    def sizes_of(candidate: Candidate) -> list[int]:
        size = candidate.image_size
        return image_sizes(size, median_side)[:1] if isinstance(size, int) else []

    if names:
        candidates = [named_candidate(name, "as asked") for name in names]
        return [
            Candidate(each.name, next(iter(sizes_of(each)), each.image_size), each.lr, each.origin)
            for each in candidates
        ]
    scores = score_candidates(
        list_candidates(device), lambda each: _scoring_recipe(source, each), sizes=sizes_of
    )
    logger.info(f"weights: {scores[0]}")
    return [scores[0].candidate]


def _scoring_recipe(source: Source, candidate: Candidate) -> Recipe:
    """Build the recipe that computes the features of a candidate."""
    size = candidate.image_size
    recipe = {
        "model": {
            "name": candidate.name,
            "image_size": size if isinstance(size, int) else list(size),
            "freeze": "backbone",
        },
        "data": {**_data_section(source).model_dump(exclude_unset=True), "train": _EVAL_SPEC},
        "optim": {"name": "adamw", "lr": 1e-3, "epochs": 1},
    }
    return parse_recipe(json.dumps(recipe), name=f"recipe for {source.name}")


def _data_section(source: Source) -> DataSection:
    splits = source.splits.values()
    return DataSection(
        source=source.name,
        eval=_EVAL_SPEC,
        val_fraction=0.0,
        task="multilabel" if any(split.is_multilabel for split in splits) else "multiclass",
        unreadable="stop" if any(split.is_streamed for split in splits) else "quarantine",
    )


def _compute_features(
    images: _Images, candidate: Candidate, accelerator: Accelerator
) -> NDArray[np.float32]:
    """Compute or load the features of all images. Returns: (N, D), NaN for unreadable images."""
    built = build_model(candidate.name, image_size=candidate.image_size)
    identity = feature_identity(built, _EVAL_SPEC) if accelerator.is_main_process else {}
    pipeline = build_pipeline(built.preprocessing, _EVAL_SPEC)
    network = built.model.to(accelerator.device, torch.float32)
    choose_kernels(network, device=accelerator.device, dtype=autocast_dtype(accelerator))
    section = _data_section(images.source)
    values = []
    for split in images.splits:
        features = load_or_compute_features(
            split,
            model=network,
            pipeline=pipeline,
            identity=identity,
            data_config=section,
            accelerator=accelerator,
        )
        if features is not None:
            part = np.full((len(split), features.values_ND.shape[1]), np.nan, dtype=np.float32)
            part[features.indices_N] = features.values_ND
            values.append(part)
    return np.concatenate(values) if values else np.empty((len(images), 1), np.float32)


def _format_scores(images: _Images, rows: NDArray[np.int64], errors: LabelErrors) -> str:
    """Format label_scores.csv: one line for each readable image."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["split", "index", "given", "suggested", "score"])
    for position, row in enumerate(rows.tolist()):
        split, index = images.locate(row)
        names = [
            name if isinstance(name, str) else "|".join(name)
            for name in map(images.label_names, (images.labels[row], errors.suggested[position]))
        ]
        writer.writerow([split.name, index, *names, f"{errors.scores_N[position]:.6f}"])
    return text.getvalue()
