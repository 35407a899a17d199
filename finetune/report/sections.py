"""The sections of a run's page as plain rows, ready for a template; nothing here is HTML."""

# K classes

from __future__ import annotations

import contextlib
import math
import statistics
from typing import Any

import numpy as np

from finetune.data.sampling import draws_in_words, imbalance
from finetune.evaluation.claims import wording
from finetune.evaluation.confusion import DENSE_CLASSES, read_confusion
from finetune.report.run_data import (
    SPLIT_NAMES,
    Run,
    accuracy_range,
    duration,
    is_too_few,
    listed,
    narrow,
    number,
    percent,
    plain,
    section,
    whole,
)
from finetune.run.record import teacher_in_words
from finetune.run.validation import load_json
from finetune.text import MISSING, counted, short_count

__all__ = [
    "claim_rows",
    "class_heads",
    "class_rows",
    "confused_pairs",
    "data_rows",
    "headline",
    "provenance",
    "range_test",
    "speed",
    "status",
    "training_rate",
]

Row = dict[str, Any]

_PAIRS = 12
# of a class: key and head
_CLASS_FIGURES = {"recall": "Recall", "precision": "Precision", "f1": "F1"}
_MOST_CLASSES = 200  # rows of the table of classes, where there are more than 1,000


def status(run: Run) -> Row:
    """State of the run. Returns: "kind" (done, running or failed) and "text"."""
    recorded = str(run.record.get("status", "unknown"))
    steps, last = run.plan.get("steps"), run.history[-1]["step"] if run.history else 0
    reached = f"{whole(last)} of {whole(steps)} steps"
    # the page is written just before the record says so
    ended = recorded == "running" and last > 0 and run.results.get("steps") == last
    if recorded == "done" or ended:
        return {"kind": "done", "text": "done"}
    if recorded == "running":
        text = f"running, or killed: {reached} are logged"
        return {"kind": "running", "text": text}
    return {"kind": "failed", "text": f"{recorded}: {reached} are logged"}


def headline(run: Run) -> list[Row]:
    """The figures at the head of the page, the most important first.

    Returns: "label", "value", "note", and "is_too_few" where too few images are behind a figure.
    """
    test, val = run.figures("test"), run.figures("val")
    tiles = []
    if measured := test or val:
        tiles += _split_tiles(run, measured)
    key, name = ("map", "Validation mAP") if run.is_multilabel else ("top1", "Validation top-1")
    if test and val:
        tiles.append(_accuracy_tile(name, val.get(key), val.get("examples"), of=key))
    elif not val and (line := _last(run, "val")):
        share, images = line.get(key), _val_images(run)
        tiles.append(_accuracy_tile(name, share, images, _at_step(line), of=key))
    if not test and (line := _last(run, "train")):
        tiles.append(_tile("Training loss", plain(line.get("loss")), _at_step(line)))
    if run.results:
        kept = run.results.get("best_step")
        note = f"of {whole(run.results.get('steps'))} steps"
        if stages := run.recipe.optim.stages:
            note += f", after {counted(len(stages), 'stage')} (optim.stages)"
        tiles.append(_tile("Kept step", whole(kept), note))
    if run.plan:
        trained = number(run.plan.get("trainable_parameters"))
        all_of_them = trained == number(run.plan.get("parameters"))
        note = "all trained" if all_of_them else f"{_short(trained)} trained"
        if (adapter := run.recipe.model.adapter) is not None:
            note += f", {adapter.kind} of rank {adapter.rank} among them"
        if run.recipe.model.sync_bn:
            note += "; batch norm over all processes"
        if run.recipe.model.freeze_bn:
            note += "; batch norm keeps its statistics"
        tiles.append(_tile("Parameters", _short(run.plan.get("parameters")), note))
    return tiles


def _split_tiles(run: Run, figures: Row) -> list[Row]:
    """The tiles of the split that the page is about."""
    name, images = SPLIT_NAMES[run.shown_split], figures.get("examples")
    loss = _tile(f"{name.capitalize()} loss", plain(figures.get("loss")), "nats")
    if run.is_multilabel:
        head = f"{name.capitalize()} mAP"
        return [
            _accuracy_tile(head, figures.get("map"), images, of="map"),
            _tile("Macro F1", percent(figures.get("macro_f1")), "mean of the classes"),
            _tile("Micro F1", percent(figures.get("micro_f1")), "all labels together"),
            loss,
        ]
    tiles = [_accuracy_tile(f"{name.capitalize()} top-1", figures.get("top1"), images)]
    if run.has_top5:
        tiles.append(_tile(f"{name.capitalize()} top-5", percent(figures.get("top5")), ""))
    if (balanced := figures.get("balanced_accuracy")) is not None:
        note = f"mean recall of the classes; macro F1 {percent(figures.get('macro_f1'))}"
        tiles.append(_tile("Balanced accuracy", percent(balanced), note))
    return [*tiles, loss, _tile("Calibration error", plain(figures.get("ece")), f"{name}, ECE")]


def _tile(label: str, value: str, note: str) -> Row:
    return {"label": label, "value": value, "note": note, "is_too_few": False}


def _accuracy_tile(label: str, accuracy: Any, images: Any, at: str = "", of: str = "top1") -> Row:
    """A tile with the number of images behind a figure, of top1 with its interval if it is wide."""
    interval = accuracy_range(accuracy, images) if of == "top1" else ""
    notes = [at, f"on {whole(images)} images" if images else ""]
    notes.append(f"95\u202f% interval {interval}" if interval else "")
    tile = _tile(label, percent(accuracy), ", ".join(note for note in notes if note))
    return {**tile, "is_too_few": is_too_few(images)}


def _at_step(line: Row) -> str:
    return f"at step {whole(line.get('step'))}"


def _last(run: Run, split: str) -> Row | None:
    return next((line for line in reversed(run.history) if line.get("split") == split), None)


def _short(value: Any) -> str:
    """1021114 → 1.02 M."""
    count = number(value)
    return MISSING if count is None else narrow(short_count(count))


def class_rows(run: Run, split: str) -> list[Row]:
    """Name, support and figures of every class, its recall with a 95 % interval.

    Beyond 1,000 classes those with the lowest F1, of these first the ones with the most images.
    """
    rows = [row if isinstance(row, dict) else {} for row in listed(run.figures(split), "per_class")]
    shown = list(range(len(rows)))
    if len(rows) > DENSE_CLASSES:
        ranks = [(number(row.get("f1")), -(number(row.get("support")) or 0)) for row in rows]
        shown = [index for index in shown if ranks[index][0] is not None]
        shown = sorted(shown, key=ranks.__getitem__)[:_MOST_CLASSES]
    return [
        {
            "name": run.class_name(index),
            "support": number(row.get("support")),
            "interval": accuracy_range(row.get("recall"), row.get("support")),
            **{key: number(row.get(key)) for key in class_heads(run)},
        }
        for index in shown
        if (row := rows[index])
    ]


def class_heads(run: Run) -> dict[str, str]:
    """The figures of a class, by key, with their heads."""
    if run.is_multilabel:
        return {"ap": "AP", **_CLASS_FIGURES, "threshold": "Threshold"}
    return _CLASS_FIGURES


def confused_pairs(run: Run, split: str) -> list[Row]:
    """The pairs of a true and a predicted class with the most images, and their share."""
    counts = read_confusion(run.figures(split))
    if counts is None:
        return []
    support_K = counts.support_K.tolist()
    return [
        {
            "true": run.class_name(true),
            "predicted": run.class_name(predicted),
            "count": count,
            "share": count / support_K[true],
        }
        for true, predicted, count in counts.most_confused(_PAIRS)
    ]


def claim_rows(run: Run) -> list[Row]:
    """Each claim of the recipe: as its source reports it, and as the run measured it."""
    answers = listed(run.results, "claims")
    return [
        {
            "verdict": str(answer.get("verdict", "not measured")),
            **dict(zip(("what", "reported", "measured"), wording(answer), strict=True)),
            **{key: str(answer.get(key) or "") for key in ("source", "note", "how")},
        }
        for answer in answers
        if isinstance(answer, dict)
    ]


def speed(run: Run) -> Row:
    """Speed of the run. Returns: "rows" of name and value, and "share" of time by activity."""
    lines = {split: _lines(run, split) for split in ("train", "val")}
    rate = training_rate(run)
    evaluated = number((run.figures("test") or run.figures("val")).get("images_per_second"))
    seconds = [number(line.get("seconds")) for line in run.history]
    total = max((known for known in seconds if known is not None), default=None)
    rows = [
        ("Training", f"{whole(rate)} images/s, median of the log lines" if rate else MISSING),
        ("Evaluation", f"{evaluated:,.0f} images/s" if evaluated else MISSING),
        ("Time", duration(total)),
    ]
    examples = number(run.figures("val").get("examples")) or _val_images(run)
    spent = math.fsum(
        examples / rate
        for line in lines["val"]
        if examples and (rate := number(line.get("images_per_second")))
    )
    share = []
    if total and spent < total:
        share = [("training", 1 - spent / total), ("validation", spent / total)]
        text = ", ".join(f"{name} {percent(part, 1)}" for name, part in share)
        rows.append(("Of this time", text))
    return {"rows": rows, "share": share}


def training_rate(run: Run) -> float | None:
    """Images per second, the median of the log lines."""
    rates = [number(line.get("images_per_second")) for line in _lines(run, "train")]
    return statistics.median(known) if (known := [rate for rate in rates if rate]) else None


def _lines(run: Run, split: str) -> list[Row]:
    return [line for line in run.history if line.get("split") == split]


def _val_images(run: Run) -> float | None:
    return number(section(run.plan, "images").get("val"))


def data_rows(run: Run) -> list[tuple[str, str]]:
    """Handling of the data: counts, who chose the weights, when the test split was read."""
    data = run.recipe.data
    images = section(run.plan, "images")
    rows = [("Source", data.source)]
    for split in ("train", "val", "test"):
        if split in images:
            rows.append((f"{split.capitalize()} images", whole(images[split])))
    counts_K, draws_K = _per_class(run, "class_images"), _per_class(run, "class_draws")
    total = number(images.get("train"))
    if run.is_multilabel and counts_K is not None and total:
        rows.append(("Labels of an image", f"{counts_K.sum() / total:.2f}, the mean of train"))
    if counts_K is not None and (rare := imbalance(counts_K, run.class_names)):
        rows.append(("Rare classes", rare))
    if data.sampling and counts_K is not None and draws_K is not None:
        words = draws_in_words(counts_K, draws_K, run.class_names)
        rows.append(("Sampling", f"{data.sampling}: {words}"))
    read = number(run.plan.get("images_read"))
    if read is not None and read != number(images.get("train")):
        rows.append(("Read of train", f"{whole(read)}; the others could not be decoded"))
    if run.figures("val") or _lines(run, "val"):
        best = run.recipe.run.best
        chose = f"validation, by {best}" if best != "last" else "nobody: the last step is kept"
        if "test" in images and best != "last":
            chose += "; the test split had no part in it"
    else:
        chose = "nobody: there is no validation split, the last step is kept"
    rows.append(("Who chose the weights", chose))
    if run.figures("test"):
        rows.append(("Test", "read once, at the end"))
    elif not run.recipe.run.test:
        rows.append(("Test", "not read: run.test is false"))
    elif run.results and "test" not in images:
        rows.append(("Test", "the data has no test split: the figures are those of validation"))
    else:
        rows.append(("Test", "not read"))
    skipped = number(run.results.get("skipped_steps"))
    if skipped:
        rows.append(("Skipped steps", f"{whole(skipped)}, with a loss that was not finite"))
    for key, label in (("train_pipeline", "In training"), ("eval_pipeline", "In evaluation")):
        if run.plan.get(key):
            rows.append((label, str(run.plan[key])))
    return rows


def _per_class(run: Run, key: str) -> np.ndarray | None:
    """A whole number of each class from the plan, (K,); None where it is missing or damaged."""
    numbers = [one for one in listed(run.plan, key) if isinstance(one, int) and one >= 0]
    fits = len(numbers) == len(run.class_names) and any(numbers)
    return np.array(numbers, dtype=np.int64) if fits else None


def range_test(run: Run) -> Row:
    """The range test of the learning rate: "points" of rate and smoothed loss, and "chosen".

    Returns: empty where there was none, or its file is damaged.
    """
    with contextlib.suppress(OSError, ValueError):
        curve = section({"curve": load_json(run.path / "lr_range.json")}, "curve")
        pairs = zip(listed(curve, "lr"), listed(curve, "smoothed"), strict=False)
        points = [pair for pair in pairs if all((number(value) or 0) > 0 for value in pair)]
        if points and number(curve.get("chosen")):
            return {"points": points, "chosen": curve["chosen"]}
    return {}


def provenance(run: Run) -> list[tuple[str, str]]:
    """Origin of the run: machine, versions, commit, weights, data."""
    record, weights = run.record, section(run.plan, "weights")
    device = section(record, "device")
    machine = [str(device.get(key)) for key in ("name", "type") if device.get(key)]
    if device.get("threads"):
        machine.append(counted(device["threads"], "thread"))
    precision = record.get("precision") or run.plan.get("precision")
    rows = [
        ("Started", record.get("started")),
        ("Device", ", ".join(machine)),
        ("Processes", record.get("num_processes")),
        ("Precision", precision),
        ("Commit", record.get("commit")),
        ("Network", run.plan.get("architecture")),
    ]
    rows.append(("Weights", weights.get("source")))
    names = {"revision": "revision", "file": "file", "license": "licence", "sha256": "sha256"}
    rows += [(f"Weights {name}", weights.get(key)) for key, name in names.items()]
    if (distill := run.recipe.distill) is not None:
        words = teacher_in_words(distill, record)
        rows.append(("Teacher", f"{distill.teacher}, {words}"))
        rows.append(("Teacher sha256", section(record, "teacher").get("sha256")))
    rows.append(("Data fingerprint", record.get("data_fingerprint")))
    argv = record.get("argv")
    rows.append(("Command", " ".join(map(str, argv)) if isinstance(argv, list) else argv))
    versions = section(record, "versions")
    rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return [(name, str(value)) for name, value in rows if value not in (None, "")]
