"""Build the table rows of a run's page; the Jinja templates render them as HTML."""

# K classes

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from finetune.data.class_balance import describe_class_draws, describe_imbalance
from finetune.evaluation.claims import format_claim
from finetune.evaluation.confusion import MAX_DENSE_CLASSES, parse_confusion_matrix
from finetune.formatting import MISSING, format_short_count, pluralize
from finetune.report.run_data import (
    SPLIT_NAMES,
    Run,
    format_accuracy_interval,
    format_count,
    format_decimal,
    format_duration,
    format_percent,
    has_too_few_images,
    use_narrow_spaces,
)
from finetune.run.record import (
    describe_changed_metrics,
    describe_decisions,
    describe_split_decisions,
    describe_teacher,
)

__all__ = [
    "claim_rows",
    "class_columns",
    "class_rows",
    "confused_pair_rows",
    "data_rows",
    "headline_tiles",
    "provenance_rows",
    "run_status",
    "speed_section",
    "training_images_per_second",
    "training_seconds",
]

Row = dict[str, Any]

_NUM_CONFUSED_PAIRS = 12
# per-class metrics: key and table header
_CLASS_METRICS = {"recall": "Recall", "precision": "Precision", "f1": "F1"}
_MAX_CLASS_ROWS = 200  # in the class table, if there are more than 1,000 classes


def run_status(run: Run) -> Row:
    """Describe the status of the run: a dict with "kind" (done, running or failed) and "text"."""
    status = str(run.record.get("status", "unknown"))
    steps, last_step = run.plan.get("steps"), run.history[-1]["step"] if run.history else 0
    progress = f"{format_count(last_step)} of {format_count(steps)} steps"
    # A run writes its page just before its status becomes "done". If it continues later, with
    # another length, run.json has no sha256 of a model until its end.
    has_ended = (
        status == "running"
        and "model_sha256" in run.record
        and run.results.get("steps") == last_step
    )
    if status == "done" or has_ended:
        return {"kind": "done", "text": "done"}
    if status == "running":
        text = f"running, or killed: {progress} are logged"
        return {"kind": "running", "text": text}
    return {"kind": "failed", "text": f"{status}: {progress} are logged"}


def headline_tiles(run: Run) -> list[Row]:
    """Build the tiles at the top of the page, the most important first.

    Returns: a dict per tile with keys "label", "value", "note" and "is_too_few" (True if measured
        on too few images).
    """
    test, val = run.metrics("test"), run.metrics("val")
    tiles = []
    if metrics := test or val:
        tiles += _split_tiles(run, metrics)
    key, name = ("map", "Validation mAP") if run.is_multilabel else ("top1", "Validation top-1")
    if test and val:
        tiles.append(_accuracy_tile(name, val.get(key), val.get("examples"), metric=key))
    elif not val and (line := _last_log_line(run, "val")):
        accuracy, num_images = line.get(key), _num_val_images(run)
        tiles.append(_accuracy_tile(name, accuracy, num_images, _step_note(line), metric=key))
    if not test and (line := _last_log_line(run, "train")):
        tiles.append(_tile("Training loss", format_decimal(line.get("loss")), _step_note(line)))
    if run.results:
        best_step = run.results.get("best_step")
        note = f"of {format_count(run.results.get('steps'))} steps"
        if stages := run.recipe.optim.stages:
            note += f", after {pluralize(len(stages), 'stage')} (optim.stages)"
        tiles.append(_tile("Kept step", format_count(best_step), note))
    if run.plan:
        num_parameters = run.plan.get("parameters")
        num_trainable = run.plan.get("trainable_parameters")
        note = f"{_format_short_count(num_trainable)} trained"
        if num_trainable == num_parameters:
            note = "all trained"
        if (adapter := run.recipe.model.adapter) is not None:
            note += f", including {adapter.kind} of rank {adapter.rank}"
        if run.recipe.model.sync_bn:
            note += "; batch norm synchronized over processes"
        if run.recipe.model.freeze_bn:
            note += "; batch norm statistics frozen"
        tiles.append(_tile("Parameters", _format_short_count(num_parameters), note))
    return tiles


def _split_tiles(run: Run, metrics: Row) -> list[Row]:
    """Build the tiles with the metrics of the reported split."""
    name, num_images = SPLIT_NAMES[run.reported_split], metrics.get("examples")
    note = describe_split_decisions(metrics)
    loss = _tile(f"{name.capitalize()} loss", format_decimal(metrics.get("loss")), "nats")
    if run.is_multilabel:
        label = f"{name.capitalize()} mAP"
        return [
            _accuracy_tile(label, metrics.get("map"), num_images, note, metric="map"),
            _tile("Macro F1", format_percent(metrics.get("macro_f1")), "mean of the classes"),
            _tile("Micro F1", format_percent(metrics.get("micro_f1")), "all labels together"),
            loss,
        ]
    tiles = [_accuracy_tile(f"{name.capitalize()} top-1", metrics.get("top1"), num_images, note)]
    if run.has_top5:
        tiles.append(_tile(f"{name.capitalize()} top-5", format_percent(metrics.get("top5")), ""))
    if (balanced_accuracy := metrics.get("balanced_accuracy")) is not None:
        note = f"mean recall of the classes; macro F1 {format_percent(metrics.get('macro_f1'))}"
        tiles.append(_tile("Balanced accuracy", format_percent(balanced_accuracy), note))
    return [
        *tiles,
        loss,
        _tile("Calibration error", format_decimal(metrics.get("ece")), f"{name}, ECE"),
    ]


def _tile(label: str, value: str, note: str) -> Row:
    return {"label": label, "value": value, "note": note, "is_too_few": False}


def _accuracy_tile(
    label: str,
    accuracy: float | None,
    num_images: float | None,
    first_note: str = "",
    metric: str = "top1",
) -> Row:
    """Build an accuracy tile; its note has the number of images and, for top-1, the interval."""
    interval = format_accuracy_interval(accuracy, num_images) if metric == "top1" else ""
    notes = [first_note, f"on {format_count(num_images)} images" if num_images else ""]
    notes.append(f"95\u202f% interval {interval}" if interval else "")
    tile = _tile(label, format_percent(accuracy), ", ".join(note for note in notes if note))
    return {**tile, "is_too_few": has_too_few_images(num_images)}


def _step_note(line: Row) -> str:
    return f"at step {format_count(line.get('step'))}"


def _last_log_line(run: Run, split: str) -> Row | None:
    return next((line for line in reversed(run.history) if line.get("split") == split), None)


def _format_short_count(count: int | None) -> str:
    """Format a count with a short unit: 1021114 → 1.02 M; None as a dash."""
    return MISSING if count is None else use_narrow_spaces(format_short_count(count))


def class_rows(run: Run, split: str) -> list[Row]:
    """Build a row per class: name, support, metrics, and the 95 % interval of the recall.

    With more than 1,000 classes, only the 200 classes with the lowest F1 get a row; of classes with
    equal F1, the larger ones come first.
    """
    rows = run.metrics(split).get("per_class", [])
    shown_indices = list(range(len(rows)))
    if len(rows) > MAX_DENSE_CLASSES:
        shown_indices = sorted(
            (index for index in shown_indices if rows[index]["f1"] is not None),
            key=lambda index: (rows[index]["f1"], -rows[index]["support"]),
        )[:_MAX_CLASS_ROWS]
    return [
        {
            "name": run.class_name(index),
            "support": rows[index]["support"],
            "interval": format_accuracy_interval(rows[index]["recall"], rows[index]["support"]),
            **{key: rows[index].get(key) for key in class_columns(run)},
        }
        for index in shown_indices
    ]


def class_columns(run: Run) -> dict[str, str]:
    """Return the columns of the class table: metric keys with their headers."""
    if run.is_multilabel:
        return {"ap": "AP", **_CLASS_METRICS, "threshold": "Threshold"}
    return _CLASS_METRICS


def confused_pair_rows(run: Run, split: str) -> list[Row]:
    """Build a row per most confused class pair, with its share of the true class's images."""
    matrix = parse_confusion_matrix(run.metrics(split))
    if matrix is None:
        return []
    support_K = matrix.support_K.tolist()
    return [
        {
            "true": run.class_name(true),
            "predicted": run.class_name(predicted),
            "count": count,
            "share": count / support_K[true],
        }
        for true, predicted, count in matrix.most_confused_pairs(_NUM_CONFUSED_PAIRS)
    ]


def claim_rows(run: Run) -> list[Row]:
    """Build a row per claim of the recipe, with its reported and measured value."""
    return [
        {
            "verdict": str(claim.get("verdict", "not measured")),
            **dict(zip(("what", "reported", "measured"), format_claim(claim), strict=True)),
            **{key: str(claim.get(key) or "") for key in ("source", "note", "how")},
        }
        for claim in run.results.get("claims", ())
    ]


def speed_section(run: Run) -> Row:
    """Describe the speed of the run.

    Returns: a dict with keys "rows" (pairs of name and value) and "share" (pairs of activity and
        its share of the time).
    """
    lines = {split: _log_lines(run, split) for split in ("train", "val")}
    train_rate = training_images_per_second(run)
    eval_rate = (run.metrics("test") or run.metrics("val")).get("images_per_second")
    total_seconds = training_seconds(run)
    rows = [
        (
            "Training",
            f"{format_count(train_rate)} images/s, median of the log lines"
            if train_rate
            else MISSING,
        ),
        ("Evaluation", f"{eval_rate:,.0f} images/s" if eval_rate else MISSING),
        ("Training time", format_duration(total_seconds)),
        ("Whole command", format_duration(run.results.get("command_seconds"))),
    ]
    num_val_images = run.metrics("val").get("examples") or _num_val_images(run)
    val_seconds = math.fsum(
        num_val_images / val_rate
        for line in lines["val"]
        if num_val_images and (val_rate := line.get("images_per_second"))
    )
    time_shares = []
    if total_seconds and val_seconds < total_seconds:
        time_shares = [
            ("training", 1 - val_seconds / total_seconds),
            ("validation", val_seconds / total_seconds),
        ]
        shares_text = ", ".join(
            f"{name} {format_percent(fraction, 1)}" for name, fraction in time_shares
        )
        rows.append(("Shares of time", shares_text))
    return {"rows": rows, "share": time_shares}


def training_seconds(run: Run) -> float | None:
    """Return the time of training and validation, from metrics.jsonl."""
    seconds = [line.get("seconds") for line in run.history]
    return max((known for known in seconds if known is not None), default=None)


def training_images_per_second(run: Run) -> float | None:
    """Return the training throughput in images per second, the median over metrics.jsonl."""
    rates = [line.get("images_per_second") for line in _log_lines(run, "train")]
    return statistics.median(known) if (known := [rate for rate in rates if rate]) else None


def _log_lines(run: Run, split: str) -> list[Row]:
    return [line for line in run.history if line.get("split") == split]


def _num_val_images(run: Run) -> int | None:
    num_images: int | None = run.plan.get("images", {}).get("val")
    return num_images


def data_rows(run: Run) -> list[tuple[str, str]]:
    """Describe the data: image counts, how the weights were selected, when test was evaluated."""
    data = run.recipe.data
    split_sizes = run.plan.get("images", {})
    rows = [("Source", data.source)]
    for split in ("train", "val", "test"):
        if split in split_sizes:
            rows.append((f"{split.capitalize()} images", format_count(split_sizes[split])))
    if decisions := run.plan.get("decisions"):
        rows.append(("Decisions", describe_decisions(decisions)))
    counts_K = _per_class_counts(run, "class_images")
    draws_K = _per_class_counts(run, "class_draws")
    num_train = split_sizes.get("train")
    if run.is_multilabel and counts_K is not None and num_train:
        rows.append(("Labels per image", f"{counts_K.sum() / num_train:.2f} on average in train"))
    if counts_K is not None and (imbalance_note := describe_imbalance(counts_K, run.class_names)):
        rows.append(("Rare classes", imbalance_note))
    if data.sampling and counts_K is not None and draws_K is not None:
        words = describe_class_draws(counts_K, draws_K, run.class_names)
        rows.append(("Sampling", f"{data.sampling}: {words}"))
    num_read = run.plan.get("images_read")
    if num_read is not None and num_read != num_train:
        rows.append(
            ("Readable train images", f"{format_count(num_read)}; the others could not be decoded")
        )
    if run.metrics("val") or _log_lines(run, "val"):
        best = run.recipe.run.best
        selection = f"by {best}" if best != "last" else "none: the last step is kept"
        if "test" in split_sizes and best != "last":
            selection += "; the test split was not used"
    else:
        selection = "none: there is no validation split, so the last step is kept"
    rows.append(("Weight selection", selection))
    if run.metrics("test"):
        notes = ["evaluated once, at the end", describe_split_decisions(run.metrics("test"))]
        rows.append(("Test", ", ".join(filter(None, notes))))
    elif not run.recipe.run.test:
        rows.append(("Test", "not evaluated: run.test is false"))
    elif run.results and "test" not in split_sizes:
        rows.append(("Test", "the data has no test split; the metrics are from validation"))
    else:
        rows.append(("Test", "not evaluated"))
    num_skipped = run.results.get("skipped_steps")
    if num_skipped:
        rows.append(
            ("Skipped steps", f"{format_count(num_skipped)}, because the gradient was not finite")
        )
    for key, label in (
        ("train_pipeline", "Train transforms"),
        ("eval_pipeline", "Eval transforms"),
    ):
        if run.plan.get(key):
            rows.append((label, str(run.plan[key])))
    return rows


def _per_class_counts(run: Run, key: str) -> np.ndarray | None:
    """Return counts per class, (K,), of the training plan; None if they do not fit the classes."""
    counts = run.plan.get(key, [])
    has_all_classes = len(counts) == len(run.class_names) and any(counts)
    return np.array(counts, dtype=np.int64) if has_all_classes else None


def provenance_rows(run: Run) -> list[tuple[str, str]]:
    """Describe the provenance of the run: machine, versions, commit, weights and data."""
    record, weights = run.record, run.plan.get("weights", {})
    device = record.get("device", {})
    machine = [str(device.get(key)) for key in ("name", "type") if device.get(key)]
    if device.get("threads"):
        machine.append(pluralize(device["threads"], "thread"))
    precision = record.get("precision") or run.plan.get("precision")
    rows = [
        ("Started", record.get("started")),
        ("Device", ", ".join(machine)),
        ("Processes", record.get("num_processes")),
        ("Precision", precision),
        ("Commit", record.get("commit")),
        ("Network", run.plan.get("architecture")),
    ]
    if branch := record.get("branched_from"):
        rows.append(("Branched from", f"run {branch['run']}, step {branch['step']}"))
    rows.append(("Weights", weights.get("source")))
    names = {"revision": "revision", "file": "file", "license": "license", "sha256": "sha256"}
    rows += [(f"Weights {name}", weights.get(key)) for key, name in names.items()]
    if (distill := run.recipe.distill) is not None:
        teacher_note = describe_teacher(distill, record)
        rows.append(("Teacher", f"{distill.teacher}, {teacher_note}"))
        rows.append(("Teacher sha256", record.get("teacher", {}).get("sha256")))
    rows.append(("Data fingerprint", record.get("data_fingerprint")))
    rows.append(("Leakage", "; ".join(record.get("leakage", ()))))
    rows.append(("Changed metrics", describe_changed_metrics(record)))
    rows.append(("Changed at a resume", "; ".join(record.get("numerics_changed", ()))))
    rows.append(("Command", " ".join(record.get("argv", ()))))
    versions = record.get("versions", {})
    rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return [(name, str(value)) for name, value in rows if value not in (None, "")]
