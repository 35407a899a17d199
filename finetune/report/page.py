"""`finetune report`: write the HTML page of a run, or of a comparison, as a single file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from finetune.data.source import Split
from finetune.errors import RecipeError
from finetune.evaluation.claims import primary_metric
from finetune.evaluation.confusion import MAX_DENSE_CLASSES, ConfusionMatrix, parse_confusion_matrix
from finetune.evaluation.learning_curve import format_gain
from finetune.files import make_writable_folder, write_atomically
from finetune.formatting import TOO_FEW_IMAGES_NOTE
from finetune.report import plots
from finetune.report.comparison import (
    check_comparable,
    claim_comparison_rows,
    differing_settings,
    group_by_recipe,
    group_rows,
    metric_columns,
    run_rows,
    unstated_differences,
)
from finetune.report.doctor_findings import DoctorFindings
from finetune.report.figure_style import to_svg
from finetune.report.html import render_html
from finetune.report.run_data import (
    SPLIT_NAMES,
    Run,
    format_decimal,
    has_changed_since_read,
    read_run,
)
from finetune.report.sections import (
    claim_rows,
    class_columns,
    class_rows,
    confused_pair_rows,
    data_rows,
    headline_tiles,
    provenance_rows,
    run_status,
    speed_section,
)
from finetune.report.thumbnails import (
    class_thumbnails,
    mistake_rows,
    no_mistakes_reason,
    open_reported_split,
    training_image_rows,
)

__all__ = ["write_comparison", "write_report_pages", "write_run_report"]

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
_CALIBRATION_TITLE = "Accuracy by confidence"
_MAX_MATRIX_WIDTH_PIXELS = 540  # a wider confusion matrix has no diagram next to it


def write_report_pages(
    runs: Sequence[str], *, out: str | None = None, doctor: str | None = None
) -> dict[str, Any]:
    """Write report.html for each run and, for several runs, a comparison page.

    Args:
        runs: run directories, finished or not.
        out: file or folder for the page of a single run, or for the comparison page of several
            runs. By default, the pages are RUN/report.html, and comparison.html in the common
            parent folder of the runs.
        doctor: folder of `finetune data doctor`, whose findings the worst mistakes show.
    Returns: a dict with keys "reports" (the paths of the pages) and "comparison" (a path, or None
        for a single run).
    Raises: RecipeError if a path is not a run directory, or `doctor` has no findings;
        CheckpointError if a file of a run is damaged.
    """
    paths = list(dict.fromkeys(Path(run) for run in runs))
    loaded_runs = [read_run(path) for path in paths]  # read all runs before writing anything
    check_comparable(loaded_runs)
    findings = None if doctor is None else DoctorFindings(Path(doctor))
    if findings is not None:
        for run in loaded_runs:
            findings.warn_if_other_data(run)
    if len(paths) == 1:
        page = _resolve_output_file(out, REPORT_FILE, paths[0])
        report = _write_run_page(loaded_runs[0], page, None, findings)
        return {"reports": [str(report)], "comparison": None}
    reports = [
        str(_write_run_page(run, run.path / REPORT_FILE, None, findings)) for run in loaded_runs
    ]
    common_parent = os.path.commonpath([path.resolve().parent for path in paths])
    # keep the path as the user wrote it if all runs are in one folder
    folder = paths[0].parent if len({path.parent for path in paths}) == 1 else Path(common_parent)
    page = _resolve_output_file(out, COMPARISON_FILE, folder)
    return {"reports": reports, "comparison": str(_write_comparison_page(loaded_runs, page))}


def write_run_report(run: Path, *, split: Split | None = None) -> Path:
    """Write report.html into a run directory.

    Args:
        run: the run directory, finished or not.
        split: the reported split, which is test or, without a test split, val; None opens it from
            the recipe's data source.
    Returns: path of the page.
    Raises: same as `write_report_pages`.
    """
    run = Path(run)
    return _write_run_page(read_run(run), run / REPORT_FILE, split)


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write a page that compares runs.

    Args:
        runs: run directories.
        out: path of the page.
    Returns: `out`.
    Raises: same as `write_report_pages`.
    """
    loaded_runs = [read_run(Path(run)) for run in runs]
    check_comparable(loaded_runs)
    return _write_comparison_page(loaded_runs, Path(out))


def _resolve_output_file(out: str | None, name: str, folder: Path) -> Path:
    """Return the page's path: the file `out`, or `name` in the folder `out`, else in `folder`."""
    if out is None:
        return folder / name
    path = Path(out)
    if path.suffix.lower() in (".html", ".htm") and not path.is_dir():
        make_writable_folder(path.parent, option="--out")
        return path
    if (path.exists() or path.suffix) and not path.is_dir():
        raise RecipeError(
            f"--out: '{out}' is neither a folder nor an .html file; give one of them",
            code="recipe.wrong_value",
        )
    make_writable_folder(path, option="--out")
    return path / name


def _write_run_page(
    run: Run, page: Path, split: Split | None, findings: DoctorFindings | None = None
) -> Path:
    """Render and write the page of a run."""
    split, why_closed = (split, "") if split is not None else open_reported_split(run)
    mistakes, images_note = mistake_rows(run, split, why_closed, findings)
    training_rows, training_note = training_image_rows(run)
    split_name = run.reported_split
    matrix, classes = parse_confusion_matrix(run.metrics(split_name)), class_rows(run, split_name)
    rendered = {**_confusion_section(run, matrix), **_calibration_section(run, split_name)}
    # put a single calibration diagram next to a small confusion matrix
    is_diagram_beside = (
        len(rendered["diagrams"]) == 1
        and 0 < rendered["matrix_width"][1] <= _MAX_MATRIX_WIDTH_PIXELS
    )
    content = {
        "title": run.name,
        "remark": run.recipe.run.note,
        "status": run_status(run),
        "model": run.recipe.model.name,
        "source": run.recipe.data.source,
        "tiles": headline_tiles(run),
        "curves": _curve_svgs(run),
        "split_name": SPLIT_NAMES[split_name],
        "beside": is_diagram_beside,
        "too_few": TOO_FEW_IMAGES_NOTE,
        **rendered,
        **_learning_curve_section(run, split_name),
        "pairs": confused_pair_rows(run, split_name),
        "classes": classes,
        "class_heads": class_columns(run),
        "multilabel": run.is_multilabel,
        "fitted": "thresholds" in run.results,
        "class_pictures": class_thumbnails(run, split),
        "num_classes": len(run.metrics(split_name).get("per_class", ())),
        "intervals": any(row["interval"] for row in classes),
        "finished": bool(run.results),
        "mistakes": mistakes,
        "pictures": any(mistake["picture"] for mistake in mistakes),
        "pictures_note": images_note,
        "mistakes_note": no_mistakes_reason(run),
        "doctor_link": _relative_link(findings.page, page) if findings is not None else "",
        "seen": training_rows,
        "seen_note": training_note,
        "claims": claim_rows(run),
        "speed": speed_section(run),
        "data": data_rows(run),
        "provenance": provenance_rows(run),
        "recipe": run.recipe.to_yaml(),
    }
    has_calibration = content["finished"] and not run.is_multilabel
    anchors = {"confusion": bool(rendered["matrix"]), "calibration": has_calibration}
    anchors |= {"more-images": content["learning_curve"], "classes": bool(classes)}
    anchors |= {"mistakes": content["finished"]}
    anchors |= {"images": training_rows or training_note, "claims": content["claims"]}
    all_anchors = ("curves", *anchors, "speed", "data", "provenance", "recipe")
    labels = {"mistakes": "Worst mistakes", "images": "Training images"}
    labels["more-images"] = "More images"
    contents = [
        (key, labels.get(key, key.capitalize())) for key in all_anchors if anchors.get(key, True)
    ]
    text = _render("run.html", contents=contents, **content)
    if has_changed_since_read(run):  # it may have ended, and written a newer page
        return _write_run_page(read_run(run.path), page, None, findings)
    write_atomically(page, text)
    return page


def _curve_svgs(run: Run) -> list[str]:
    """Plot each curve as a separate small figure, to stay readable on a phone."""
    if not run.history:
        return []
    steps_per_epoch = run.steps_per_epoch
    return [
        to_svg(
            plots.plot_curves(run.history, run.results, keys=[key], steps_per_epoch=steps_per_epoch)
        )
        for key in plots.curve_keys(run.history)
    ]


def _confusion_section(run: Run, matrix: ConfusionMatrix | None) -> dict[str, Any]:
    """Render the confusion matrix.

    Returns: a dict with keys "matrix" (an SVG, empty without a matrix), "matrix_width" (minimum and
        maximum in pixels) and "matrix_note".
    """
    if matrix is None or not matrix.num_classes:
        return {"matrix": "", "matrix_width": (0, 0), "matrix_note": ""}
    figure = plots.plot_confusion_matrix(matrix, run.class_names)
    width = round(72 * figure.get_figwidth())
    note = "The stronger the color, the larger the share of the true class."
    if matrix.num_classes > MAX_DENSE_CLASSES:
        note = f"The most confused of {matrix.num_classes:,} classes. {note}"
    elif matrix.num_classes > plots.MAX_CLASSES_WITH_COUNTS:
        note = (
            f"{matrix.num_classes} classes: the color shows the square root of the share of the "
            "true class, so rare confusions are visible; not every class is labeled."
        )
    # a minimum width keeps the counts readable; a phone then scrolls sideways
    min_width = min(width, 110 + 34 * matrix.num_classes, 600)
    svg = to_svg(figure)
    return {"matrix": svg, "matrix_width": (min_width, width), "matrix_note": note}


def _calibration_section(run: Run, split: str) -> dict[str, Any]:
    """Plot the reliability diagram; with a fitted temperature, before and after scaling.

    Returns: a dict with keys "diagrams" (SVGs), "calibration_note", and "ece" (only if the run
        recorded no calibration bins).
    """
    results = run.metrics(split)
    calibrated = results.get("calibrated", {})
    before, after = results.get("calibration"), calibrated.get("calibration")
    section = {
        "diagrams": [],
        "ece": format_decimal(results.get("ece")) if results.get("ece") else "",
    }
    if not before:
        return {**section, "calibration_note": ""}
    note = f"Expected calibration error on the {SPLIT_NAMES[split]} split "
    note += format_decimal(results.get("ece"))
    diagrams = [
        plots.plot_reliability_diagram(before, title="As trained" if after else _CALIBRATION_TITLE)
    ]
    if after:
        diagrams.append(plots.plot_reliability_diagram(after, title="After temperature scaling"))
        note += (
            f"; {format_decimal(calibrated.get('ece'))} after temperature scaling with "
            f"T = {format_decimal(calibrated.get('temperature'), 3)}, fitted on validation"
        )
    svgs = [to_svg(figure) for figure in diagrams]
    return {
        "diagrams": svgs,
        "ece": "",
        "calibration_note": f"{note}. The bars of a calibrated model end at the diagonal.",
    }


def _learning_curve_section(run: Run, split: str) -> dict[str, str]:
    """Plot the learning curve. Returns: a dict with keys "learning_curve" (SVG) and "gain"."""
    if not (curve := run.results.get("learning_curve")):
        return {"learning_curve": "", "gain": ""}
    figure = plots.plot_learning_curve(curve, split=SPLIT_NAMES[split])
    return {"learning_curve": to_svg(figure), "gain": format_gain(curve)}


def _write_comparison_page(runs: Sequence[Run], page: Path) -> Path:
    groups = group_by_recipe(runs)
    named_histories = [(group.name, run.history) for group in groups for run in group.runs]
    metric = primary_metric({key for run in runs for line in run.history for key in line})
    curves = ((metric, "val"), ("loss", "val"), ("loss", "train"), ("lr", "train"))
    columns = metric_columns(runs)
    rows, (recipe_rows, scale) = run_rows(groups, runs, columns), group_rows(groups, columns)
    for row, run in zip(rows, runs, strict=True):
        row["link"] = _relative_link(run.path / REPORT_FILE, page)
    claims = claim_comparison_rows(runs)
    anchors = ["recipes", "curves", "runs", *(["claims"] if claims else [])]
    recipe_count = f"{len(groups)} recipes" if len(groups) > 1 else "one recipe"
    text = _render(
        "compare.html",
        title=f"{len(runs)} runs compared",
        remark=" ".join(dict.fromkeys(run.recipe.run.note for run in runs if run.recipe.run.note)),
        lead=f"{recipe_count}: {', '.join(group.name for group in groups)}",
        contents=[(key, key.capitalize()) for key in anchors],
        figures=[label for *_, label in columns],
        groups=recipe_rows,
        scale=scale,
        runs=rows,
        too_few=TOO_FEW_IMAGES_NOTE,
        intervals=any(cell["interval"] for row in rows for cell in row["figures"]),
        differing=[key for key, _ in differing_settings([run.recipe for run in runs])],
        inputs=unstated_differences(runs),
        curves=[
            to_svg(plots.plot_run_comparison(named_histories, key=key, split=split))
            for key, split in curves
        ],
        claims=claims,
    )
    write_atomically(page, text)
    return page


def _relative_link(target: Path, page: Path) -> str:
    """Return a link from a page to a file; "" if the file does not exist."""
    if not target.is_file():
        return ""
    return quote(os.fsencode(os.path.relpath(target.resolve(), page.parent.resolve())))


def _render(template: str, **content: Any) -> str:
    return render_html(template, script="sort.js", **content)
