"""Decisions about images and classes: a CSV file that `data.decisions` applies to a source.

    action,split,index,path,given,label,digest
    relabel,train,17,cat/3.jpg,cat,dog,0f3c…
    drop,train,4,cat/9.jpg,cat,,
    keep,train,5,cat/12.jpg,cat,,
    merge,,,,kitten,cat,

`relabel` corrects a label, and `drop` removes an image. `keep` changes nothing, and records that a
person has looked. `merge` gives all images of the class `given` the class `label`, in all splits.
`path` is `Split.name_of(index)`, and `index` the position in the split as `open_source` returns it;
a path alone is enough if no other image has it. `given` is the label in the source, and `digest`
the hexadecimal digits of the image's `image_digest`. Both may be empty; if they are given, a
decision about an image that has changed since is refused. Several labels are written `cat|dog`, or
`[]` for none.
"""

# K classes

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from finetune.data.class_balance import count_images_per_class
from finetune.data.csv_file import line_error, read_records
from finetune.data.fingerprint import compute_digests
from finetune.data.open_source import check_classes
from finetune.data.recorded_digests import DIGEST_BYTES
from finetune.data.source import Source, Split
from finetune.data.split_names import SPLIT_ALIASES
from finetune.errors import DataError, did_you_mean
from finetune.files import write_atomically
from finetune.formatting import (
    escape_csv_formula,
    printable_path,
    unescape_csv_formula,
)
from finetune.log import warn_once

__all__ = [
    "Decision",
    "DecisionSummary",
    "apply_decisions",
    "label_names",
    "read_decisions",
    "split_decisions",
    "write_decisions",
]

_COLUMNS = ("action", "split", "index", "path", "given", "label", "digest")
_FORMATS = {  # pattern of a field in lower case, and its description
    "action": ("keep|relabel|drop|merge", "keep, relabel, drop or merge"),
    "split": (rf"({'|'.join(SPLIT_ALIASES)})?", "train, val, test or nothing"),
    "index": (r"[0-9]{0,15}", "a whole number or nothing"),
    "digest": (rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})?", "32 hexadecimal digits or nothing"),
}
_MAX_LISTED = 5  # merged classes in a description
_MAX_SHOWN_CHARS = 60  # characters of a value in a message


@dataclass(frozen=True)
class Decision:
    """One decision, a line of the file; see the docstring of this module.

    Attributes:
        action: what to do with the image, or merge for two classes.
        split, index: the image's split and its position there; None to find it by `path`.
        path: the image's name; None to find it by `split` and `index`.
        given: the label in the source; None to accept any. For merge: the class that goes.
        label: the right label. For merge: the class that it becomes.
        digest: 32 hexadecimal digits; None to accept any content.
        origin: file and line, for messages.
    """

    action: Literal["keep", "relabel", "drop", "merge"]
    split: str | None = None
    index: int | None = None
    path: str | None = None
    given: str | None = None
    label: str | None = None
    digest: str | None = None
    origin: str = field(default="data.decisions", compare=False, repr=False)

    def error(self, message: str, code: str) -> DataError:
        """Return a DataError about this decision."""
        return DataError(f"{self.origin}: {message}", code=code)


@dataclass(frozen=True)
class DecisionSummary:
    """What decisions have changed.

    Attributes:
        splits: dict from split to its counts "dropped" and "relabeled".
        merged: dict from each class that is gone to the class that it has become.
        not_applied: number of changes of test images that were not applied.
    """

    splits: dict[str, dict[str, int]]
    merged: dict[str, str]
    not_applied: int


def split_decisions(source: Source, split: str) -> dict[str, dict[str, int]]:
    """Return {"decisions": the split's entry of `DecisionSummary.splits`}; {} without changes.

    It is stored next to the metrics of the split.
    """
    changes = {} if source.decisions is None else source.decisions.splits.get(split, {})
    return {"decisions": changes} if changes else {}


# --- the file ------------------------------------------------------------------------------------


def read_decisions(file: str | Path) -> list[Decision]:
    """Read a CSV file of decisions, also one that a spreadsheet has saved.

    The columns may be in any order; other columns are ignored, and all but "action" are optional.
    Fields are separated by commas, semicolons or tabs.

    Raises: DataError naming the line.
    """
    file = Path(file).expanduser()
    records = read_records(file)
    _, header = next(records, (1, []))
    names = [name.strip().lower() for name in header]
    for name in _COLUMNS:
        if names.count(name) > 1:
            message = f"two columns are named {name!r}; rename one"
            raise line_error(file, 1, message, "data.ambiguous")
    if "action" not in names:
        message = f"no column 'action'; write the columns {', '.join(_COLUMNS)}"
        raise line_error(file, 1, message, "data.no_column")
    decisions = []
    for line, fields in records:
        try:
            if any(fields[len(names) :]):  # a spreadsheet may leave out empty fields at the end
                raise DataError(
                    f"{len(fields)} fields, but the header has {len(names)}; quote fields that "
                    "contain a separator",
                    code="data.wrong_format",
                )
            values = dict(zip(names, map(unescape_csv_formula, fields), strict=False))
            decisions.append(_parse_decision(values, f"{printable_path(file)}: line {line}"))
        except DataError as error:
            raise line_error(file, line, str(error), error.code) from None
    return decisions


def _parse_decision(values: Mapping[str, str], origin: str) -> Decision:
    """Parse a line. Raises: DataError without file and line."""
    texts = {name: values.get(name) or None for name in _COLUMNS}
    for name, (pattern, expected) in _FORMATS.items():
        text = (texts[name] or "").strip().lower()
        if not re.fullmatch(pattern, text):
            message = f"{name} {text[:_MAX_SHOWN_CHARS]!r}; expected {expected}"
            raise DataError(message, code="data.wrong_format")
        texts[name] = text or None
    split, index, action = texts.pop("split"), texts.pop("index"), texts["action"]
    has_image = bool(texts["path"] or (split and index))
    has_classes = bool(texts["given"] and texts["label"]) and not has_image
    if action == "merge" and not has_classes:
        raise DataError(
            "merge joins two classes; write them in the columns 'given' and 'label', and leave "
            "split, index and path empty",
            code="data.wrong_format",
        )
    if not has_image and not (action in ("keep", "merge") and texts["given"]):
        message = f"{action} names no image; fill the column 'path', or 'split' and 'index'"
        raise DataError(message, code="data.no_image")
    if action == "relabel" and not texts["label"]:
        message = "relabel needs the right label; fill the column 'label'"
        raise DataError(message, code="data.no_labels")
    if action == "keep" and has_image and texts["label"] not in (None, texts["given"]):
        message = f"keep leaves the label as it is; for {texts['label']!r}, write relabel"
        raise DataError(message, code="data.wrong_format")
    return Decision(
        split=SPLIT_ALIASES[split] if split else None,
        index=int(index) if index else None,
        origin=origin,
        **cast(Any, texts),
    )


def write_decisions(file: str | Path, decisions: Iterable[Decision]) -> None:
    """Write a CSV file of decisions atomically; `read_decisions` reads the same decisions.

    Raises: SetupError if the file cannot be written.
    """
    text = io.StringIO(newline="")
    # quoted, because `read_decisions` ignores spaces before a field without quotes
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(_COLUMNS)
    for one in decisions:
        values = (getattr(one, name) for name in _COLUMNS)
        writer.writerow("" if value is None else escape_csv_formula(str(value)) for value in values)
    write_atomically(Path(file).expanduser(), text.getvalue())


# --- applying them -------------------------------------------------------------------------------


def apply_decisions(
    source: Source, decisions: Sequence[Decision], *, on_test: bool
) -> tuple[Source, DecisionSummary]:
    """Drop images, correct labels and merge classes.

    Every decision is checked before any is applied.

    Args:
        source: the source as `open_source` returns it; not streamed.
        on_test: also change the test split; otherwise its decisions are only checked and counted.
            Merged classes change all splits in any case.
    Returns: the changed source, and what has changed, which is also its attribute `decisions`.
    Raises: DataError naming the decision, if its image or class does not exist or has changed, if
        an image has two decisions, or if a class or a split keeps no image.
    """
    located = _locate_images(source, [one for one in decisions if one.path or one.split])
    _check_unchanged(source, located)
    into_K = _resolve_merges(source, [one for one in decisions if one.action == "merge"])
    splits, counts, not_applied = {}, {}, 0
    for name, split in source.splits.items():
        labels, is_kept = split.labels.copy(), np.ones(len(split), dtype=bool)
        for index, decision in located[name].items():
            if decision.action == "drop":
                is_kept[index] = False
            elif decision.action == "relabel":
                labels[index] = _encode_label(source, split, decision)
        is_relabeled = is_kept & (labels != split.labels).reshape(len(split), -1).any(axis=1)
        num_dropped, num_relabeled = int((~is_kept).sum()), int(is_relabeled.sum())
        splits[name] = split
        if name == "test" and not on_test:
            not_applied = num_dropped + num_relabeled
        elif num_dropped + num_relabeled:
            kept = np.flatnonzero(is_kept)
            changed = dataclasses.replace(split, labels=labels).subset(kept)
            splits[name] = dataclasses.replace(changed, draw_indices=kept)
            counts[name] = {"dropped": num_dropped, "relabeled": num_relabeled}
    names = source.class_names
    merged = {names[old]: names[new] for old, new in enumerate(into_K.tolist()) if old != new}
    summary = DecisionSummary(counts, merged, not_applied)
    changed_source = dataclasses.replace(source, splits=splits, decisions=summary)
    decided = _merge_classes(changed_source, into_K)
    _check_remaining(_merge_classes(source, into_K), decided)
    check_classes(decided)
    return decided, summary


def _locate_images(source: Source, decisions: Sequence[Decision]) -> dict[str, dict[int, Decision]]:
    """Find the image of each decision. Returns: by split, a dict from index to decision."""
    located: dict[str, dict[int, Decision]] = {name: {} for name in source.splits}
    by_path: dict[str | None, list[tuple[str, int]]] = {}
    if any(one.split is None or one.index is None for one in decisions):
        for name, split in source.splits.items():
            for index in range(len(split)):
                by_path.setdefault(split.name_of(index), []).append((name, index))
    missing = []
    for one in decisions:
        images, found = source.splits.get(one.split or ""), []
        if one.split is None or one.index is None:
            found = [
                place
                for place in by_path.get(one.path, ())
                if one.split in (None, place[0]) and one.index in (None, place[1])
            ]
        elif (
            images is not None
            and one.index < len(images)
            and one.path in (None, images.name_of(one.index))
        ):
            found = [(one.split, one.index)]
        if not found:
            missing.append(one)
            continue
        if len(found) > 1:
            message = f"{len(found)} images are named {one.path!r}; fill 'split' and 'index'"
            raise one.error(message, "data.ambiguous")
        ((name, index),) = found
        other = located[name].setdefault(index, one)
        if other is not one:
            message = f"the same image as in {other.origin}; keep one of the two decisions"
            raise one.error(message, "data.ambiguous")
    if missing:
        first, more = missing[0], f" (and {len(missing) - 1:,} more)" if missing[1:] else ""
        what = "" if first.path is None else f" {first.path[:_MAX_SHOWN_CHARS]!r}"
        what += "" if first.index is None else f" number {first.index}"
        what += "" if first.split is None else f" in '{first.split}'"
        raise first.error(
            f"no image{what} of {source.name}{more}; restore it, or remove the line",
            "data.not_found",
        )
    return located


def _check_unchanged(source: Source, located: Mapping[str, Mapping[int, Decision]]) -> None:
    """Raise a DataError for an image whose label or content is not that of the decision."""
    for name, by_index in located.items():
        split, causes = source.splits[name], {}
        with_digest = [index for index, one in by_index.items() if one.digest is not None]
        digests = compute_digests(split.images, split.image_rows[with_digest])
        for index, digest in zip(with_digest, digests, strict=True):
            if digest.tobytes().hex() != by_index[index].digest:
                causes[index] = "other content"
        for index, one in by_index.items():
            now = [source.class_names[label] for label in split.class_indices(index)]
            if one.given is not None and sorted(now) != label_names(one.given, split):
                causes[index] = f"its label is {'|'.join(now) or '[]'!r}, not {one.given!r}"
        for index, cause in causes.items():
            raise by_index[index].error(
                f"'{split.name_of(index)}' has changed since the decision ({cause}); decide again, "
                "or remove the line",
                "data.changed",
            )


def label_names(text: str, split: Split) -> list[str]:
    """Return the sorted labels of a multi-label image, or the only one of another."""
    if not split.is_multilabel:
        return [text]
    return [] if text == "[]" else sorted({name.strip() for name in text.split("|")})


def _class_index(source: Source, name: str, decision: Decision) -> int:
    if name not in source.class_names:
        known = source.class_names
        some = f"; known: {', '.join(known[:5])}{', …' * bool(known[5:])}"
        message = f"{source.name} has no class {name[:_MAX_SHOWN_CHARS]!r}"
        raise decision.error(f"{message}{did_you_mean(name, known) or some}", "data.wrong_labels")
    return source.class_names.index(name)


def _encode_label(source: Source, split: Split, decision: Decision) -> Any:
    """Return the label of a relabeled image, see `Split.labels`."""
    indices = [
        _class_index(source, name, decision) for name in label_names(decision.label or "", split)
    ]
    if not split.is_multilabel:
        return indices[0]
    label_K = np.zeros(len(source.class_names), dtype=np.uint8)
    label_K[indices] = 1
    return label_K


def _resolve_merges(source: Source, merges: Sequence[Decision]) -> np.ndarray:
    """Return the class that each class becomes, (K,). Raises: DataError for a contradiction."""
    into_K = np.arange(len(source.class_names))
    for one in merges:
        old, new = (_class_index(source, name or "", one) for name in (one.given, one.label))
        if into_K[old] != old:
            message = f"the class {one.given!r} is merged twice; keep one of the two lines"
            raise one.error(message, "data.ambiguous")
        if into_K[new] == old:  # also for old == new
            message = f"{one.given!r} would be merged into itself; remove the line"
            raise one.error(message, "data.ambiguous")
        into_K[into_K == old] = into_K[new]
    return into_K


def _check_remaining(before: Source, after: Source) -> None:
    """Raise a DataError if a split or a class of train has lost its last image.

    Log a warning if a class of train has lost its last image but one.
    """
    names, what = before.class_names, ""
    for name, split in after.splits.items():
        counts_K, old_counts_K = (
            count_images_per_class(one.labels, len(names)) for one in (split, before.splits[name])
        )
        lost, single = (
            ", ".join(names[k] for k in np.flatnonzero(is_small_K)[:_MAX_LISTED])
            for is_small_K in ((counts_K == few) & (old_counts_K > few) for few in (0, 1))
        )
        if len(split) == 0:
            what = f"'{name}'"
        elif lost and name == "train":
            what = lost
        elif single and name == "train":
            warn_once(f"data.decisions: leave a single training image of {single}")
    if what:
        raise DataError(
            f"data.decisions: leave no image of {what} in {before.name}; keep one, merge the class "
            "with another, or choose other classes with data.classes",
            code="data.empty",
        )


def _merge_classes(source: Source, into_K: np.ndarray) -> Source:
    """Give the images of some classes another class, and remove these classes."""
    remaining, new_label_K = np.unique(into_K, return_inverse=True)
    if len(remaining) == len(into_K):
        return source
    splits = {}
    for name, split in source.splits.items():
        if split.is_multilabel:
            labels = np.zeros((len(split), len(remaining)), dtype=np.uint8)
            for old, new in enumerate(new_label_K):
                labels[:, new] |= split.labels[:, old]
        else:
            labels = new_label_K[split.labels]
        splits[name] = dataclasses.replace(split, labels=labels)
    class_names = [source.class_names[label] for label in remaining]
    return dataclasses.replace(
        source,
        splits=splits,
        class_names=class_names,
        indicator_columns=tuple(one for one in source.indicator_columns if one in class_names),
    )
