"""A run, or several side by side, as one HTML file that needs nothing else to be read."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from finetune.data.source import Split
from finetune.errors import RecipeError
from finetune.evaluation.claims import main_figure
from finetune.evaluation.confusion import DENSE_CLASSES, Confusion, read_confusion
from finetune.files import make_folder, write_atomically
from finetune.report import figures
from finetune.report.comparison import (
    check_comparable,
    claims_beside,
    columns,
    differing_keys,
    group_rows,
    groups,
    run_rows,
)
from finetune.report.run_data import (
    SPLIT_NAMES,
    Run,
    bins,
    listed,
    percent,
    plain,
    read_run,
    section,
    whole,
)
from finetune.report.sections import (
    claim_rows,
    class_heads,
    class_rows,
    confused_pairs,
    data_rows,
    headline,
    provenance,
    range_test,
    speed,
    status,
)
from finetune.report.style import to_svg
from finetune.report.thumbnails import (
    class_pictures,
    mistake_rows,
    open_split,
    training_images,
    why_none,
)
from finetune.text import TOO_FEW

__all__ = ["compare", "report", "write_report"]

_VERSION = sys.modules["finetune"].__version__  # the package itself imports from here
REPORT = "report.html"
COMPARISON = "comparison.html"
_DIAGRAM = "Accuracy by confidence"
_WIDEST_BESIDE = 540  # pixels of a matrix that a calibration diagram fits beside

# XML and HTML know none of these; a file name may hold them
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{12,}")


def report(runs: Sequence[str], *, out: str | None = None) -> dict[str, Any]:
    """Write a page for each run and, for several, one that compares them.

    Args:
        runs: run directories, finished or not.
        out: for one run the page's file, or the folder for it; for several the comparison's. By
            default RUN/report.html, and comparison.html in the folder that the runs share.
    Returns: "reports", the pages' paths, and "comparison", a path or None.
    Raises: RecipeError if one is no run directory; CheckpointError if its files are damaged.
    """
    paths = list(dict.fromkeys(Path(run) for run in runs))
    read = [read_run(path) for path in paths]  # all of them, before anything is written
    check_comparable(read)
    if len(paths) == 1:
        page = _target(out, REPORT, paths[0])
        return {"reports": [str(_write_run(read[0], page, None))], "comparison": None}
    reports = [str(_write_run(run, run.path / REPORT, None)) for run in read]
    shared = os.path.commonpath([path.resolve().parent for path in paths])
    # as the user wrote it, where all runs lie in one folder
    folder = paths[0].parent if len({path.parent for path in paths}) == 1 else Path(shared)
    page = _target(out, COMPARISON, folder)
    return {"reports": reports, "comparison": str(_write_comparison(read, page))}


def write_report(run: Path, *, split: Split | None = None) -> Path:
    """Write report.html into a run directory.

    Args:
        run: the run directory, finished or not.
        split: the split that the page is about, test or else validation, if it is open already;
            else the recipe's source is opened.
    Returns: the page's path.
    Raises: as `report`.
    """
    run = Path(run)
    return _write_run(read_run(run), run / REPORT, split)


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write a page that compares runs.

    Args:
        runs: run directories.
        out: the file.
    Returns: `out`.
    Raises: as `report`.
    """
    read = [read_run(Path(run)) for run in runs]
    check_comparable(read)
    return _write_comparison(read, Path(out))


def _target(out: str | None, name: str, folder: Path) -> Path:
    """The file to write: `out` itself, or `name` in it if it is a folder."""
    if out is None:
        return folder / name
    path = Path(out)
    if path.suffix.lower() in (".html", ".htm") and not path.is_dir():
        make_folder(path.parent, option="--out")
        return path
    if (path.exists() or path.suffix) and not path.is_dir():
        raise RecipeError(
            f"--out: '{out}' is neither a folder nor an .html file; name one of them",
            code="recipe.wrong_value",
        )
    make_folder(path, option="--out")
    return path / name


def _write_run(run: Run, page: Path, split: Split | None) -> Path:
    """Fill the template of a run and write the page."""
    split, why_closed = (split, "") if split is not None else open_split(run)
    mistakes, pictures_note = mistake_rows(run, split, why_closed)
    seen, seen_note = training_images(run)
    name = run.shown_split
    counts, classes = read_confusion(run.figures(name)), class_rows(run, name)
    drawn = {**_matrix(run, counts), **_calibration(run, name)}
    # one diagram has room beside a matrix that leaves it some
    beside = len(drawn["diagrams"]) == 1 and 0 < drawn["matrix_width"][1] <= _WIDEST_BESIDE
    content = {
        "title": run.name,
        "remark": run.recipe.run.note,
        "status": status(run),
        "model": run.recipe.model.name,
        "source": run.recipe.data.source,
        "tiles": headline(run),
        "curves": _curves(run),
        "split_name": SPLIT_NAMES[name],
        "beside": beside,
        "too_few": TOO_FEW,
        **drawn,
        "pairs": confused_pairs(run, name),
        "classes": classes,
        "class_heads": class_heads(run),
        "multilabel": run.is_multilabel,
        "fitted": "thresholds" in run.results,
        "class_pictures": class_pictures(run, split),
        "num_classes": len(listed(run.figures(name), "per_class")),
        "intervals": any(row["interval"] for row in classes),
        "finished": bool(run.results),
        "mistakes": mistakes,
        "pictures": any(one["picture"] for one in mistakes),
        "pictures_note": pictures_note,
        "mistakes_note": why_none(run),
        "seen": seen,
        "seen_note": seen_note,
        "claims": claim_rows(run),
        "speed": speed(run),
        "data": data_rows(run),
        "provenance": provenance(run),
        "recipe": run.recipe.to_yaml(),
    }
    calibrated = content["finished"] and not run.is_multilabel
    anchors = {"confusion": bool(drawn["matrix"]), "calibration": calibrated}
    anchors |= {"classes": bool(classes), "mistakes": content["finished"]}
    anchors |= {"images": seen or seen_note, "claims": content["claims"]}
    every = ("curves", *anchors, "speed", "data", "provenance", "recipe")
    labels = {"mistakes": "Worst mistakes", "images": "Training images"}
    shown = [(key, labels.get(key, key.capitalize())) for key in every if anchors.get(key, True)]
    return _write(page, "run.html", contents=shown, **content)


def _curves(run: Run) -> list[str]:
    """One small figure each: a phone shows them below one another, at a readable size."""
    if not run.history:
        return []
    per_epoch, tested = run.steps_per_epoch, range_test(run)
    drawn = [
        to_svg(figures.curves(run.history, run.results, keys=[key], steps_per_epoch=per_epoch))
        for key in figures.curve_keys(run.history)
    ]
    return [*drawn, to_svg(figures.lr_range(**tested))] if tested else drawn


def _matrix(run: Run, counts: Confusion | None) -> dict[str, Any]:
    """The confusion matrix, its least and greatest width in pixels, and a note on its colours."""
    if counts is None or not counts.num_classes:
        return {"matrix": "", "matrix_width": (0, 0), "matrix_note": ""}
    figure = figures.confusion(counts, run.class_names)
    width = round(72 * figure.get_figwidth())
    note = "The stronger the colour, the larger the share of the true class."
    if counts.num_classes > DENSE_CLASSES:
        note = f"Of {counts.num_classes:,} classes, those of the most confused pairs. {note}"
    elif counts.num_classes > figures.COUNTED_CLASSES:
        note = (
            f"{counts.num_classes} classes: the colour goes by the square root of the share of the "
            "true class, so that rare confusions show; not every class is labelled."
        )
    # not so small that the counts cannot be read: a phone scrolls
    least = min(width, 110 + 34 * counts.num_classes, 600)
    svg = to_svg(figure)
    return {"matrix": svg, "matrix_width": (least, width), "matrix_note": note}


def _calibration(run: Run, split: str) -> dict[str, Any]:
    """The reliability diagrams, before and after temperature scaling where both are known."""
    results = run.figures(split)
    scaled = section(results, "calibrated")
    before, after = bins(results), bins(scaled)
    shown = {"diagrams": [], "ece": plain(results.get("ece")) if results.get("ece") else ""}
    if not before:
        return {**shown, "calibration_note": ""}
    note = f"Expected calibration error on the {SPLIT_NAMES[split]} split "
    note += plain(results.get("ece"))
    diagrams = [figures.reliability(before, title="As trained" if after else _DIAGRAM)]
    if after:
        diagrams.append(figures.reliability(after, title="After temperature scaling"))
        note += (
            f"; {plain(scaled.get('ece'))} after temperature scaling with "
            f"T = {plain(scaled.get('temperature'), 3)}, fitted on validation"
        )
    svgs = [to_svg(figure) for figure in diagrams]
    return {
        "diagrams": svgs,
        "ece": "",
        "calibration_note": f"{note}. The bars of a calibrated model end on the line.",
    }


def _write_comparison(runs: Sequence[Run], page: Path) -> Path:
    recipes = groups(runs)
    named = [(group.name, run.history) for group in recipes for run in group.runs]
    measured = main_figure({key for run in runs for line in run.history for key in line})
    drawn = ((measured, "val"), ("loss", "val"), ("loss", "train"), ("lr", "train"))
    shown = columns(runs)
    rows, (recipe_rows, scale) = run_rows(recipes, runs, shown), group_rows(recipes, shown)
    for row, run in zip(rows, runs, strict=True):
        target = run.path / REPORT
        row["link"] = ""
        if target.is_file():
            relative = os.path.relpath(target.resolve(), page.parent.resolve())
            row["link"] = quote(os.fsencode(relative))
    claims = claims_beside(runs)
    anchors = ["recipes", "curves", "runs", *(["claims"] if claims else [])]
    several = f"{len(recipes)} recipes" if len(recipes) > 1 else "one recipe"
    return _write(
        page,
        "compare.html",
        title=f"{len(runs)} runs compared",
        remark=" ".join(dict.fromkeys(run.recipe.run.note for run in runs if run.recipe.run.note)),
        lead=f"{several}: {', '.join(group.name for group in recipes)}",
        contents=[(key, key.capitalize()) for key in anchors],
        figures=[label for *_, label in shown],
        groups=recipe_rows,
        scale=scale,
        runs=rows,
        too_few=TOO_FEW,
        intervals=any(cell["interval"] for row in rows for cell in row["figures"]),
        differing=[key for key, _ in differing_keys(runs)],
        curves=[
            to_svg(figures.compare_curves(named, key=key, split=split)) for key, split in drawn
        ],
        claims=claims,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "plain": plain, "whole": whole}
    environment.filters["raw"] = lambda value: "" if value is None else value
    return environment


def _write(page: Path, template: str, **content: Any) -> Path:
    """Fill a template and replace the page in one step."""
    environment = _environment()
    loader = environment.loader
    assert loader is not None
    script = loader.get_source(environment, "sort.js")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = environment.get_template(template).render(
        script=script, script_hash=f"sha256-{digest}", version=_VERSION, **content
    )
    html = _TOKEN.sub("hf_…", _CONTROL.sub("\ufffd", html))
    # names that are no valid Unicode are shown by their escapes
    write_atomically(page, html.encode("utf-8", "backslashreplace").decode())
    return page
