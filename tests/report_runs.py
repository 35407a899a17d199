"""Small, complete run directories for the report tests, also with hostile names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.data.from_recipe import open_data
from finetune.data.open_source import open_source
from finetune.data.source import Split
from finetune.recipe.load import parse_recipe
from finetune.report.run_data import Run, read_run
from finetune.report.thumbnails import to_data_uri

RECIPE = """
model: {name: "embedded:vit_nano"}
data: {source: "embedded:digits", batch_size: 64}
optim: {lr: 0.001, steps: 40}
"""

# Class names that must appear unchanged in text, in HTML attributes and in plots.
HOSTILE_NAMES = [
    "<b>bold</b>",
    "</title><script>alert(1)</script>",
    "\"quotes\" & 'apostrophes'",
    "line\nbreak\tand tab",
    "$5 and $6",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",  # Hebrew
    "\u732b\u54aa",  # Chinese
    "lone \ud83d surrogate \x00 nul",
    "very long " * 30,
    "plain \u202e override",
]


def metric_lines(*, steps: int = 40, validate: bool = True) -> list[dict[str, Any]]:
    """Return a log line every 10 steps and, with `validate`, a validation every 20."""
    lines: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        metrics = {"loss": 2.3 - step / 25, "top1": step / 50, "top5": 0.9}
        common = {"step": step, "samples_seen": 64 * step, "lr": 1e-3 * (1 - step / 41)}
        times = {"images_per_second": 500.0 + step, "seconds": step / 4}
        lines.append({**common, "split": "train", **metrics, **times})
        if validate and step % 20 == 0:
            lines.append({**common, "split": "val", **metrics, **times})
    return lines


def calibration_bins(shift: float = 0.05) -> list[dict[str, Any]]:
    """Return 15 calibration bins; the first three are empty."""
    return [
        {
            "low": index / 15,
            "high": (index + 1) / 15,
            "count": 10 * index if index > 2 else 0,
            "accuracy": (index + 0.5) / 15 - shift if index > 2 else None,
            "confidence": (index + 0.5) / 15 if index > 2 else None,
        }
        for index in range(15)
    ]


def split_results(num_classes: int = 10, top1: float = 0.8) -> dict[str, Any]:
    """Return the final results of a split."""
    confusion = [[1] * num_classes for _ in range(num_classes)]
    for index in range(num_classes):
        confusion[index][index] = 30 + index
    confusion[3][5] = 17
    row = {"support": 40, "recall": 0.75, "precision": 0.5, "f1": 0.6}
    per_class: list[dict[str, Any]] = [dict(row) for _ in range(num_classes)]
    per_class[-1] = {"support": 0, "recall": None, "precision": None, "f1": None}
    return {
        **{"loss": 0.6, "top1": top1, "top5": 0.99, "ece": 0.031, "examples": 400},
        **{"per_class": per_class, "confusion": confusion, "calibration": calibration_bins()},
        "images_per_second": 1234.5,
    }


def _mistakes(split: Split) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "name": split.name_of(index),
            "label": int(split.labels[index]),
            "predicted": (int(split.labels[index]) + 1) % 10,
            "confidence": 0.9,
            "loss": 5.0 - index,
        }
        for index in range(3)
    ]


def val_mistakes() -> list[dict[str, Any]]:
    """Return top losses with real indices of the validation split of `RECIPE`."""
    recipe = parse_recipe(RECIPE)
    return _mistakes(open_data(recipe.data, recipe.run.seed).splits["val"])


def run_results(**changes: Any) -> dict[str, Any]:
    """Return the content of results.json; top losses have real indices of the digits test split."""
    mistakes = _mistakes(open_source("embedded:digits").splits["test"])
    calibrated = {
        "temperature": 1.25,
        "loss": 0.55,
        "ece": 0.011,
        "calibration": calibration_bins(0.01),
    }
    test = {**split_results(), "mistakes": mistakes, "calibrated": calibrated}
    claims = [
        {"metric": "test.top1", "value": 0.8, "tolerance": 0.01, "source": "table 1"},
        {"metric": "val.loss", "between": [0.1, 0.2], "source": "table 2"},
        {"metric": "val.top1", "trend": "rising", "source": "figure 3"},
        {"metric": "train.loss", "below": "val.loss", "source": "figure 3", "note": "a note"},
        {"metric": "val.ece", "when": "epoch 9", "value": 0.1, "source": "text"},
    ]
    outcomes: list[dict[str, Any]] = [
        {"measured": 0.8, "how": "test split", "verdict": "met"},
        {"measured": 0.6, "how": "evaluation at step 40", "verdict": "not met"},
        {"measured": 0.2, "how": "slope per epoch", "verdict": "met"},
        {"measured": 0.5, "measured_other": 0.6, "how": "both", "verdict": "met"},
        {"measured": None, "how": "no evaluation there", "verdict": "not measured"},
    ]
    content = {
        "val": split_results(top1=0.7),
        "test": test,
        "train": {},
        **{"best_step": 20, "steps": 40, "skipped_steps": 0, "command_seconds": 83.2},
        "claims": [
            {**claim, **claim_outcome}
            for claim, claim_outcome in zip(claims, outcomes, strict=True)
        ],
    }
    return {**content, **changes}


def write_training_images(run: Path, *, epochs: int = 8) -> None:
    """Write training_images.json as the end of a run does, for the first three digits."""
    split = open_source("embedded:digits").splits["train"]
    rows = [
        {
            "name": split.name_of(index),
            "label": int(split.labels[index]),
            "pictures": [to_data_uri(split.decode(index), max_side=128)] * (epochs + 2),
        }
        for index in range(3)
    ]
    (run / "training_images.json").write_text(json.dumps({"note": "", "rows": rows}))


def write_run_dir(
    path: Path,
    *overrides: str,
    class_names: list[str] | None = None,
    status: str = "done",
    metrics: list[dict[str, Any]] | None = None,
    results: dict[str, Any] | None = None,
) -> Path:
    """Write a run directory.

    Args:
        path: the run directory.
        overrides: the recipe overrides.
        class_names: the class names; 0 to 9 by default.
        status: the status in run.json; only a done run has results.
        metrics: the lines of metrics.jsonl.
        results: the content of results.json, instead of `run_results()`.
    """
    (path / "model").mkdir(parents=True)
    record = {
        "started": "2026-01-02T03:04:05+0000",
        "status": status,
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "device": {"type": "cpu", "name": "A processor", "threads": 1},
        **{"num_processes": 1, "commit": "0123abc", "argv": ["finetune", "train", "r.yaml"]},
        "plan": {
            "architecture": "vit_tiny_patch16_224",
            "weights": {"source": "embedded:vit_nano", "sha256": "60d8", "license": None},
            **{"parameters": 1021114, "trainable_parameters": 1450, "classes": 10},
            "images": {"train": 1293, "val": 145, "test": 359},
            **{"steps": 40, "steps_per_epoch": 20.2, "precision": "fp32"},
        },
        "data_fingerprint": "ddc8",
    }
    (path / "run.json").write_text(json.dumps(record))
    (path / "recipe.yaml").write_text(parse_recipe(RECIPE, overrides=overrides).to_yaml())
    text = "".join(
        json.dumps(line) + "\n" for line in (metric_lines() if metrics is None else metrics)
    )
    (path / "metrics.jsonl").write_text(text)
    if status == "done":
        (path / "results.json").write_text(json.dumps(results or run_results()))
    labels = class_names or [str(digit) for digit in range(10)]
    (path / "model" / "config.json").write_text(json.dumps({"label_names": labels}))
    return path


def write_and_read_run(path: Path, *overrides: str, **options: Any) -> Run:
    """Write a run directory as `write_run_dir` does, and read it."""
    return read_run(write_run_dir(path, *overrides, **options))
