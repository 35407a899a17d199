"""`finetune data doctor`: compute features of a dataset once, and list its problems in a file.

The splits of a source are diagnosed together; a row is the position of an image in all splits, one
split after the other. `doctor.json` has the problems, `label_scores.csv` the score of every label,
and `doctor.html` is the review page. No image and no label is changed.
"""

# N images, M readable ones, D width, K classes, E label errors

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from finetune.data.open_source import open_source
from finetune.data.source import Split
from finetune.doctor.class_overlap import find_class_problems
from finetune.doctor.features import (
    choose_weights,
    compute_features,
    count_trained_images,
    held_out_probabilities,
)
from finetune.doctor.findings import Findings, image_key, join_labels
from finetune.doctor.image_scan import find_feature_neighbors, measure_pixels
from finetune.doctor.label_errors import (
    LabelErrors,
    check_cleanlab,
    find_label_errors,
    fit_noise,
    out_of_fold_probabilities,
)
from finetune.doctor.near_duplicates import find_near_duplicates, merge_groups
from finetune.doctor.outliers import Outlier, find_feature_outliers, find_pixel_problems
from finetune.doctor.review_page import write_review_page
from finetune.errors import DataError, RecipeError, redact_urls
from finetune.files import make_writable_folder, write_atomically
from finetune.formatting import escape_csv_formula, format_percent, pluralize
from finetune.recipe.field_types import GroupSetting
from finetune.recipe.load import RunSection
from finetune.report.doctor_findings import DIAGNOSIS_FILE
from finetune.training.accelerator import create_accelerator

__all__ = ["diagnose", "format_diagnosis"]

_NUM_SIMILAR = 4
# of near-duplicates, measured with planted ones; the precision if none is wrong by chance
_MIN_PRECISION, _MIN_RECALL = 0.95, 0.94
_NUM_LISTED = 5  # findings of each kind in the summary


def diagnose(
    source: str,
    *,
    weights: Sequence[str] = (),
    out: str | Path = "doctor",
    run: str | None = None,
    group: str | None = None,
    multilabel: bool = False,
) -> dict[str, Any]:
    """Find the problems of a source; write doctor.json, label_scores.csv and doctor.html.

    Args:
        source: a source string, as in `data.source`.
        weights: names of pretrained weights; empty to choose them as `start` does. The
            probabilities of several networks are averaged.
        out: folder to write to.
        run: a run directory whose probabilities count too, for images that it has held out.
        group: column or regular expression that names the group of each image, as in `data.group`.
        multilabel: allow any number of labels per image.
    Returns: the content of doctor.json; empty on ranks other than 0.
    Raises: SetupError if cleanlab is missing or `out` is not writable; DataError if the source
        cannot be used; RecipeError if `run` or `group` does not fit.
    """
    started = time.perf_counter()
    check_cleanlab()
    folder = Path(out)
    make_writable_folder(folder, option="--out")
    if group is not None:
        _check_group(group)
    opened = open_source(source, multilabel=multilabel, group=group)
    accelerator = create_accelerator(RunSection())
    candidates = choose_weights(opened, weights, accelerator.device, group=group)
    computed = [compute_features(opened, each, accelerator) for each in candidates]
    run_NK = None if run is None else held_out_probabilities(run, opened, accelerator)
    features = [values_ND for values_ND in computed if values_ND is not None]
    if not features:
        return {}
    splits = opened.splits.values()
    class_names = opened.class_names
    places = [(split, index) for split in splits for index in range(len(split))]
    keys = [image_key(split.name, index) for split, index in places]
    images = [_describe_image(split, index) for split, index in places]
    labels_N = np.concatenate([split.labels for split in splits])

    def spans_splits(group: Sequence[int]) -> bool:
        return len({images[row]["split"] for row in group}) > 1

    def describe(groups: Iterable[Sequence[int]]) -> list[list[dict[str, Any]]]:
        return [[images[row] for row in group] for group in groups]

    facts = measure_pixels(lambda row: places[row][0].decode(places[row][1]), len(places))
    rows = np.array([row for row in facts if not np.isnan(features[0][row, 0])], dtype=np.int64)
    if len(rows) < 2:
        raise DataError(
            f"{redact_urls(opened.name)}: {len(rows)} of {pluralize(len(images), 'image')} can be "
            f"read; list the others with: finetune data scan {redact_urls(opened.name)}",
            code="data.unreadable",
        )
    features, labels = [values_ND[rows] for values_ND in features], labels_N[rows]
    neighbors = [find_feature_neighbors(values_MD) for values_MD in features]
    found, wrong = find_near_duplicates(neighbors, [facts[row] for row in rows.tolist()])
    # streamed images have no digest, and unreadable ones a digest of zeros
    copies = _equal_values((image["digest"] or "").strip("0") for image in images)
    near = [rows[group].tolist() for group in found]
    wrong_by_row = {group[0]: float(each) for group, each in zip(near, wrong, strict=True)}
    same = merge_groups([*copies, *near])
    groups = _equal_values("" if split.groups is None else split.groups[i] for split, i in places)
    group_N = np.arange(len(places))
    for members in merge_groups([*same, *groups]):
        group_N[members] = members[0]
    probabilities_MK = out_of_fold_probabilities(
        features, labels, group_N[rows], num_classes=len(class_names)
    )
    if run_NK is not None:
        run_MK = run_NK[rows]
        held_out = ~np.isnan(run_MK[:, 0])
        probabilities_MK[held_out] += fit_noise(run_MK[held_out], labels[held_out])[0]
        probabilities_MK[held_out] /= 2
    errors = find_label_errors(probabilities_MK, labels)
    similar_images = _find_similar(features[0], labels, errors)
    unusual = find_pixel_problems(facts, len(places))
    outliers = {each.row: each for each in unusual}
    for each in find_feature_outliers(neighbors, labels):
        row = int(rows[each.row])
        outliers.setdefault(row, Outlier(row, each.reason, each.score))
    leaks = [each for each in same if spans_splits(each)]
    duplicates = [each for each in same if not spans_splits(each)]
    is_labeled_KN = labels_N.T if multilabel else labels_N == np.arange(len(class_names))[:, None]
    rows_of = dict(zip(class_names, map(np.flatnonzero, is_labeled_KN), strict=True))
    names = [each.name for each in candidates]
    trained = {each: count_trained_images(each, opened) for each in (*names, run) if each}
    diagnosis: Any = {
        "source": redact_urls(opened.name),
        "classes": class_names,
        "multilabel": multilabel,
        "weights": names,
        "seen_in_training": {name: count for name, count in trained.items() if count},
        "splits": {
            name: {"images": len(split), "fingerprint": split.fingerprint}
            for name, split in opened.splits.items()
        },
        "label_errors": [
            {
                **images[rows[index]],
                "given": _label_names(labels[index], class_names),
                "suggested": _label_names(errors.suggested[index], class_names),
                "score": round(float(errors.scores_N[index]), 4),
                "similar": {
                    name: [keys[row] for row in rows[nearest]] for name, nearest in similar.items()
                },
            }
            for index, similar in zip(errors.indices, similar_images, strict=True)
        ],
        "duplicates": describe(duplicates),
        "leaks": describe(leaks),
        "outliers": [
            {
                **images[each.row],
                "given": _label_names(labels_N[each.row], class_names),
                "reason": each.reason,
                "score": round(each.score, 4),
            }
            for each in outliers.values()
        ],
        "class_problems": [
            {
                **problem,
                "sizes": [len(rows_of[name]) for name in problem["classes"]],
                "examples": [
                    [name, [keys[row] for row in _spread(rows_of[name])]]
                    for name in problem["classes"]
                ],
            }
            for problem in find_class_problems(probabilities_MK, labels, class_names)
        ],
        "groups": describe(filter(spans_splits, groups)),
        "expected": {
            "label_errors": _interval(*errors.expected),
            "duplicates": _expect_groups(duplicates, copies, wrong_by_row),
            "leaks": _expect_groups(leaks, copies, wrong_by_row),
            # unusual pixels are certain; an image far from all others may be a rare, good one
            "outliers": _interval(len(outliers), len(unusual), len(outliers)),
        },
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_atomically(
        folder / "label_scores.csv",
        _format_scores([images[row] for row in rows], labels, errors, class_names),
    )
    text = json.dumps(diagnosis, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / DIAGNOSIS_FILE, text)
    write_review_page(Findings(opened, diagnosis), folder)
    return diagnosis


def format_diagnosis(diagnosis: Mapping[str, Any], out: str | Path) -> str:
    """Format the result of `diagnose`; empty on ranks other than 0."""
    if not diagnosis:
        return ""
    num_images = sum(split["images"] for split in diagnosis["splits"].values())
    lines = [
        f"{diagnosis['source']}: {pluralize(num_images, 'image')}, "
        f"{len(diagnosis['classes'])} classes, features of {', '.join(diagnosis['weights'])}",
    ]
    for name, count in diagnosis["seen_in_training"].items():
        if count < num_images:
            lines.append(
                f"warning: {name} was trained on {count:,} of these {num_images:,} images; scores "
                "of seen and unseen images cannot be compared, and may be too sure"
            )
    errors, expected = diagnosis["label_errors"], diagnosis["expected"]["label_errors"]
    lines.append(
        f"label errors: {expected['count']:.0f} expected, between {math.floor(expected['low'])} "
        f"and {math.ceil(expected['high'])}; {len(errors)} to check"
    )
    for error in errors[:_NUM_LISTED]:
        given, suggested = (join_labels(error[key], " | ") for key in ("given", "suggested"))
        lines.append(
            f"  {error['split']}: {error['path']}: {given}, rather {suggested} "
            f"({format_percent(error['score'], 0)})"
        )
    for kind, name in (("leaks", "images in several splits"), ("duplicates", "duplicates")):
        if found := diagnosis[kind]:
            first = ", ".join(f"{each['split']}: {each['path']}" for each in found[0][:3])
            lines.append(f"{name}: {pluralize(len(found), 'group')}, such as {first}")
    if found := diagnosis["outliers"]:
        lines.append(f"outliers: {len(found)}, such as {found[0]['path']} ({found[0]['reason']})")
    if found := diagnosis["class_problems"]:
        classes = " and ".join(found[0]["classes"])
        lines.append(f"classes to check: {len(found)}, such as {classes} ({found[0]['kind']})")
    if found := diagnosis["groups"]:
        lines.append(f"groups (--group) with images of several splits: {len(found)}")
    lines.append(
        f"look at them and decide: {Path(out) / 'doctor.html'}, or all of them with: finetune data "
        f"doctor {diagnosis['source']} --out {out} --review"
    )
    return "\n".join(lines)


def _check_group(group: str) -> None:
    """Raise RecipeError if a group is not a column or a regular expression with one group."""
    try:
        TypeAdapter(GroupSetting).validate_python(group)
    except ValidationError as error:
        cause = error.errors()[0]["msg"]
        raise RecipeError(f"--group: {cause}", code="recipe.wrong_value") from None


def _interval(count: float, low: float, high: float) -> dict[str, float]:
    """Return the expected number of findings of a kind, for doctor.json."""
    return {"count": round(count, 1), "low": round(low, 1), "high": round(high, 1)}


def _expect_groups(
    found: Sequence[Sequence[int]],
    copies: Sequence[Sequence[int]],
    wrong_by_row: Mapping[int, float],
) -> dict[str, float]:
    """Return the expected number of groups: copies are certain, near-duplicates are not.

    Args:
        wrong_by_row: probability that a group of near-duplicates is wrong, by its first row.
    """
    is_copied = set(itertools.chain.from_iterable(copies))
    near = [group for group in found if is_copied.isdisjoint(group)]
    # a group that was merged from several is right if one of them is
    wrong = [min(wrong_by_row.get(row, 1.0) for row in group) for group in near]
    num_wrong, num_near = sum(wrong), len(near)
    margin = 2 * math.sqrt(num_wrong) + (1 - _MIN_PRECISION) * num_near
    return _interval(
        len(found) - num_wrong,
        len(found) - min(num_wrong + margin, num_near),
        len(found) + (1 / _MIN_RECALL - 1) * num_near,
    )


def _describe_image(split: Split, index: int) -> dict[str, Any]:
    digest = None if split.is_streamed else split.digests[index].tobytes().hex()
    return {"split": split.name, "index": index, "path": split.name_of(index), "digest": digest}


def _equal_values(values: Iterable[Hashable]) -> list[list[int]]:
    """Return the indices of each value, except empty ones, that occurs several times."""
    indices: dict[Hashable, list[int]] = {}
    for index, value in enumerate(values):
        if value:
            indices.setdefault(value, []).append(index)
    return [each for each in indices.values() if len(each) > 1]


def _spread(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose some rows from all over the data."""
    positions = np.linspace(0, len(rows) - 1, min(len(rows), _NUM_SIMILAR)).round().astype(int)
    return rows[positions]


def _label_names(label: Any, class_names: Sequence[str]) -> str | list[str]:
    """Return the class name of a label, or the names of a multi-label one."""
    if np.ndim(label) == 0:
        return class_names[label]
    return [class_names[k] for k in np.flatnonzero(label).tolist()]


def _format_scores(
    images: Sequence[Mapping[str, Any]],
    labels: NDArray[Any],
    errors: LabelErrors,
    class_names: Sequence[str],
) -> str:
    """Format label_scores.csv: one line for each readable image."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["split", "index", "given", "suggested", "score"])
    for image, given, suggested, score in zip(
        images, labels, errors.suggested, errors.scores_N, strict=True
    ):
        names = (join_labels(_label_names(label, class_names)) for label in (given, suggested))
        cells = map(escape_csv_formula, names)
        writer.writerow([image["split"], image["index"], *cells, f"{score:.6f}"])
    return text.getvalue()


def _find_similar(
    values_MD: NDArray[np.float32], labels: NDArray[Any], errors: LabelErrors
) -> list[dict[str, list[int]]]:
    """Find the images nearest to each label error that have the given or the suggested label.

    Returns: for each label error, "given" and "suggested" with up to four indices, nearest first.
    """
    unit_MD = normalize(values_MD - values_MD.mean(axis=0))
    # number the labels: equal sets of classes of multi-label data get equal numbers
    both = np.concatenate([labels, errors.suggested])
    given_M, suggested_M = np.split(np.unique(both, axis=0, return_inverse=True)[1].ravel(), 2)
    similar: list[dict[str, list[int]]] = [{"given": [], "suggested": []} for _ in errors.indices]
    for name, wanted_M in (("given", given_M), ("suggested", suggested_M)):
        wanted_E = wanted_M[errors.indices]
        for label in np.intersect1d(wanted_E, given_M):
            members, numbers = np.flatnonzero(given_M == label), np.flatnonzero(wanted_E == label)
            queries = errors.indices[numbers]
            num_neighbors = min(_NUM_SIMILAR + 1, len(members))  # the image itself is one
            search = NearestNeighbors(n_neighbors=num_neighbors, algorithm="brute")
            found = search.fit(unit_MD[members]).kneighbors(unit_MD[queries], return_distance=False)
            for number, query, near in zip(numbers, queries, members[found], strict=True):
                similar[number][name] = near[near != query][:_NUM_SIMILAR].tolist()
    return similar
