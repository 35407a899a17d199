"""The sections of a run's page as plain rows, ready for a template; nothing here is HTML."""

# K classes

from __future__ import annotations

import math
import statistics
from typing import Any

from finetune.evaluation.claims import wording
from finetune.report.run_data import (
    MISSING,
    Run,
    duration,
    listed,
    number,
    percent,
    plain,
    section,
    whole,
)
from finetune.text import counted

__all__ = [
    "claim_rows",
    "class_rows",
    "confused_pairs",
    "data_rows",
    "headline",
    "matrix",
    "provenance",
    "speed",
    "status",
    "training_rate",
]

Row = dict[str, Any]

_PAIRS = 12


def status(run: Run) -> Row:
    """What became of the run. Returns: "kind" (done, running or failed) and "text"."""
    said = str(run.record.get("status", "unknown"))
    steps, last = run.plan.get("steps"), run.history[-1]["step"] if run.history else 0
    reached = f"{whole(last)} of {whole(steps)} steps"
    # the page is written just before the record says so
    ended = said == "running" and last > 0 and run.results.get("steps") == last
    if said == "done" or ended:
        return {"kind": "done", "text": "done"}
    if said == "running":
        text = f"running, or ended without a word: {reached} are logged"
        return {"kind": "running", "text": text}
    return {"kind": "failed", "text": f"{said}: {reached} are logged"}


def headline(run: Run) -> list[Row]:
    """The figures at the head of the page: label, value and a note, the most telling one first."""
    test, val = run.figures("test"), run.figures("val")
    tiles = []
    if test:
        on = f"on {whole(test.get('examples'))} images"
        tiles += [
            {"label": "Test top-1", "value": percent(test.get("top1")), "note": on},
            {"label": "Test top-5", "value": percent(test.get("top5")), "note": ""},
            {"label": "Test loss", "value": plain(test.get("loss")), "note": "nats"},
            {"label": "Calibration error", "value": plain(test.get("ece")), "note": "test, ECE"},
        ]
    if val:
        on = f"on {whole(val.get('examples'))} images"
        tiles.append({"label": "Validation top-1", "value": percent(val.get("top1")), "note": on})
    elif line := _last(run, "val"):
        on = f"at step {whole(line.get('step'))}"
        tiles.append({"label": "Validation top-1", "value": percent(line.get("top1")), "note": on})
    if not test and (line := _last(run, "train")):
        on = f"at step {whole(line.get('step'))}"
        tiles.append({"label": "Training loss", "value": plain(line.get("loss")), "note": on})
    if run.results:
        kept = run.results.get("best_step")
        of = f"of {whole(run.results.get('steps'))} steps"
        tiles.append({"label": "Kept step", "value": whole(kept), "note": of})
    if run.plan:
        trained = number(run.plan.get("trainable_parameters"))
        all_of_them = trained == number(run.plan.get("parameters"))
        note = "all trained" if all_of_them else f"{_short(trained)} trained"
        tiles.append(
            {"label": "Parameters", "value": _short(run.plan.get("parameters")), "note": note}
        )
    return tiles


def _last(run: Run, split: str) -> Row | None:
    return next((line for line in reversed(run.history) if line.get("split") == split), None)


def _short(value: Any) -> str:
    """1021114 → 1.02 M."""
    found = number(value)
    if found is None:
        return MISSING
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if found >= size:
            return f"{found / size:.3g}\u202f{unit}"
    return whole(found)


def class_rows(run: Run, split: str) -> list[Row]:
    """Name, support, recall, precision and F1 of every class."""
    rows = listed(run.figures(split), "per_class")
    return [
        {
            "name": run.class_name(index),
            "support": number(row.get("support")),
            **{key: number(row.get(key)) for key in ("recall", "precision", "f1")},
        }
        for index, row in enumerate(rows)
        if isinstance(row, dict)
    ]


def matrix(run: Run, split: str) -> list[list[int]]:
    """The confusion matrix, or an empty list when there is none that is square."""
    rows = run.figures(split).get("confusion")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == len(rows) and all(number(n) is not None for n in row)
        for row in rows
    ):
        return []
    return rows


def confused_pairs(run: Run, split: str) -> list[Row]:
    """The pairs of a true and a predicted class with the most images, and their share."""
    counts_KK = matrix(run, split)
    pairs = [
        (count, true, predicted)
        for true, row in enumerate(counts_KK)
        for predicted, count in enumerate(row)
        if true != predicted and count
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    return [
        {
            "true": run.class_name(true),
            "predicted": run.class_name(predicted),
            "count": count,
            "share": count / sum(counts_KK[true]),
        }
        for count, true, predicted in pairs[:_PAIRS]
    ]


def claim_rows(run: Run) -> list[Row]:
    """What sources report, and the run's own figures beside it."""
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
    """How fast the run was. Returns: "rows" of name and value, and "share" of time by activity."""
    lines = {split: _lines(run, split) for split in ("train", "val")}
    rate = training_rate(run)
    evaluated = number((run.figures("test") or run.figures("val")).get("images_per_second"))
    seconds = [found for line in run.history if (found := number(line.get("seconds"))) is not None]
    total = max(seconds, default=None)
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
    """How the data was handled: counts, who chose, what was read once."""
    data = run.recipe.data
    images = section(run.plan, "images")
    rows = [("Source", data.source)]
    for split in ("train", "val", "test"):
        if split in images:
            rows.append((f"{split.capitalize()} images", whole(images[split])))
    read = number(run.plan.get("images_read"))
    if read is not None and read != number(images.get("train")):
        rows.append(("Read of train", f"{whole(read)}; the others could not be decoded"))
    if run.figures("val") or _lines(run, "val"):
        chose = f"validation, by {run.recipe.run.best}"
        if "test" in images:
            chose += "; the test split had no part in it"
    else:
        chose = "nobody: there is no validation split, the last step is kept"
    rows.append(("Who chose the weights", chose))
    if run.figures("test"):
        rows.append(("Test", "read once, at the end"))
    else:
        rows.append(("Test", "not read"))
    skipped = number(run.results.get("skipped_steps"))
    if skipped:
        rows.append(("Skipped steps", f"{whole(skipped)}, with a loss that was not finite"))
    for key, label in (("train_pipeline", "In training"), ("eval_pipeline", "In evaluation")):
        if run.plan.get(key):
            rows.append((label, str(run.plan[key])))
    return rows


def provenance(run: Run) -> list[tuple[str, str]]:
    """Where the run comes from: machine, versions, commit, weights, data."""
    record, weights, device = (
        run.record,
        section(run.plan, "weights"),
        section(run.record, "device"),
    )
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
    labels = {"file": "Weights file", "source": "Weights", "sha256": "Weights sha256"}
    labels |= {"revision": "Weights revision", "license": "Weights licence"}
    for key in ("source", "revision", "file", "license", "sha256"):
        rows.append((labels[key], weights.get(key)))
    rows.append(("Data fingerprint", record.get("data_fingerprint")))
    argv = record.get("argv")
    rows.append(("Command", " ".join(map(str, argv)) if isinstance(argv, list) else argv))
    versions = section(record, "versions")
    rows.append(("Versions", ", ".join(f"{name} {found}" for name, found in versions.items())))
    return [(name, str(value)) for name, value in rows if value not in (None, "")]
