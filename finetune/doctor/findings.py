"""Read `doctor.json`, and describe each finding as the review page shows it."""

# E label errors

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.errors import DataError, redact_urls
from finetune.report.doctor_findings import (
    DIAGNOSIS_FILE,
    DiagnosedImage,
    Diagnosis,
    read_diagnosis,
)

__all__ = ["KINDS", "NEIGHBORS_FILE", "Findings", "class_key", "join_labels", "open_findings"]

NEIGHBORS_FILE = "neighbors.npz"
# the sections of the page, in their order
KINDS = {
    "label_errors": "Label errors",
    "leaks": "Leaks",
    "duplicates": "Duplicates",
    "groups": "Groups",
    "outliers": "Outliers",
    "class_problems": "Classes",
}
_EXAMPLES_PER_CLASS = 4


class Findings:
    """The findings of one diagnosis.

    The key of an image is its split and index, such as "train/17". A decision is about one key:
    that of an image or, for a class problem, the classes as JSON.

    Args:
        source: the diagnosed dataset.
        diagnosis: the content of doctor.json.
        neighbors: "given" and "suggested": rows (E, 4) of the images with this label that are
            nearest to each label error, -1 for none.
    Attributes:
        source: the diagnosed dataset.
        expected: the expected number of true problems of each kind, with its interval.
        images: the images of all findings by key, with split, index, path and digest.
        keys: for each kind of finding, the keys to decide on of each finding, surest finding first.
    """

    def __init__(
        self, source: Source, diagnosis: Diagnosis, neighbors: Mapping[str, NDArray[np.int64]]
    ) -> None:
        self.source = source
        self.expected = diagnosis["expected"]
        self.images: dict[str, DiagnosedImage] = {}
        self.keys: dict[str, list[list[str]]] = {}
        self._found: dict[str, Sequence[Any]] = {}
        self._neighbors = neighbors
        self._class_index = {name: index for index, name in enumerate(source.class_names)}
        for kind in KINDS:
            found: Sequence[Any] = diagnosis[kind]  # type: ignore[literal-required]
            groups = [each if isinstance(each, list) else [each] for each in found]
            self._found[kind] = groups
            self.keys[kind] = [[self._add(each) for each in group] for group in groups]

    def _add(self, image: Any) -> str:
        """Register an image. Returns: its key, or that of a class problem."""
        if "classes" in image:
            if unknown := set(image["classes"]) - self._class_index.keys():
                raise ValueError(f"the classes {sorted(unknown)} are not in the data")
            return class_key(image["classes"])
        if image["index"] >= len(self.source.splits[image["split"]]):
            raise ValueError(f"{image['split']} has no image {image['index']}")
        key = f"{image['split']}/{image['index']}"
        self.images.setdefault(key, image)
        return key

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have any number of labels."""
        return any(split.is_multilabel for split in self.source.splits.values())

    def describe(self, kind: str, start: int, stop: int) -> list[dict[str, Any]]:
        """Describe some findings of a kind, as JSON values for the page.

        Returns: dicts with the keys "images" (dicts with key, path and given label), "examples"
            (pairs of a class and the keys of images to compare with), "suggested", "score",
            "reason", "classes" with their "sizes" in images, and "count"; those that do not apply
            are missing.
        """
        numbered = enumerate(self._found[kind][start:stop], start)
        return [self._describe(kind, number, group) for number, group in numbered]

    def _describe(self, kind: str, number: int, group: Sequence[Any]) -> dict[str, Any]:
        first = group[0]
        if kind == "class_problems":
            return {
                "images": [],
                "reason": first["kind"],
                "classes": first["classes"],
                "score": first["score"],
                "count": first["images"],
                "sizes": [
                    sum(len(indices) for _, indices in self._images_of(name))
                    for name in first["classes"]
                ],
                "examples": [[name, self._class_examples(name)] for name in first["classes"]],
            }
        images = [
            {"key": key, "path": image["path"], "given": self.given_label(key)}
            for key, image in zip(self.keys[kind][number], group, strict=True)
        ]
        finding: dict[str, Any] = {"images": images, "examples": []}
        finding |= {key: first[key] for key in ("score", "reason") if key in first}
        if kind == "label_errors":
            finding["suggested"] = join_labels(first["suggested"])
            labels = {"given": images[0]["given"], "suggested": finding["suggested"]}
            finding["examples"] = [
                [label, [self._row_key(row) for row in self._neighbors[key][number] if row >= 0]]
                for key, label in labels.items()
            ]
        return finding

    def given_label(self, key: str) -> str:
        """Return the label of an image in the source; several are joined by |."""
        split, index = self.locate(key)
        classes = self.source.splits[split].class_indices(index)
        return join_labels([self.source.class_names[number] for number in classes])

    def locate(self, key: str) -> tuple[str, int]:
        """Return split and index of an image of the source.

        Raises: KeyError if the source has no such image.
        """
        split, _, index = key.partition("/")
        if not index.isdecimal() or int(index) >= len(self.source.splits[split]):
            raise KeyError(key)
        return split, int(index)

    def _row_key(self, row: int) -> str:
        """Return the key of the image in a row; the rows go through one split after the other."""
        splits = list(self.source.splits.values())
        while row >= len(splits[0]):
            row -= len(splits.pop(0))
        return f"{splits[0].name}/{row}"

    def _class_examples(self, name: str) -> list[str]:
        """Return keys of images of a class, from all over the first split that has it."""
        for split, indices in self._images_of(name):
            if len(indices):
                chosen = np.linspace(0, len(indices) - 1, _EXAMPLES_PER_CLASS).round().astype(int)
                return [f"{split}/{index}" for index in np.unique(indices[chosen])]
        return []

    def _images_of(self, name: str) -> list[tuple[str, NDArray[np.int64]]]:
        """Return the indices of the images of a class in each split."""
        k = self._class_index[name]
        return [
            (
                split.name,
                np.flatnonzero(split.labels[:, k] if split.is_multilabel else split.labels == k),
            )
            for split in self.source.splits.values()
        ]


def class_key(classes: Sequence[str]) -> str:
    """Return the key of a class problem."""
    return json.dumps(list(classes), ensure_ascii=False)


def join_labels(label: str | list[str], separator: str = "|") -> str:
    """Join the labels of a multi-label image, by default in the format of a decisions file."""
    return label if isinstance(label, str) else separator.join(label) or "[]"


def open_findings(source: str, folder: Path, *, decode_size: int | None = None) -> Findings:
    """Open a source, and read the findings about it.

    Args:
        source: the source string.
        folder: the folder with doctor.json.
        decode_size: minimum side in pixels of decoded JPEGs, see `Split`.
    Raises: DataError if the source cannot be opened, or if the findings are missing, damaged, or
        about other data.
    """

    def refusal(cause: str, code: str) -> DataError:
        command = ["finetune", "data", "doctor", redact_urls(source), "--out", str(folder)]
        return DataError(
            f"{folder / DIAGNOSIS_FILE}: {cause}; write it again: {shlex.join(command)}", code=code
        )

    try:
        diagnosis = read_diagnosis(folder)
    except FileNotFoundError as error:
        raise refusal("no such file", "data.not_found") from error
    except (OSError, ValueError) as error:
        raise refusal(f"cannot be read ({_first_line(error)})", "data.damaged") from error
    opened = open_source(source, multilabel=diagnosis["multilabel"], decode_size=decode_size)
    now = {name: split.fingerprint for name, split in opened.splits.items()}
    then = {name: split["fingerprint"] for name, split in diagnosis["splits"].items()}
    if now != then:
        names = sorted(name for name, _ in now.items() ^ then.items())
        raise refusal(
            f"is about other images or labels than {redact_urls(source)} has now (in "
            f"{', '.join(dict.fromkeys(names))})",
            "data.changed",
        )
    try:
        return Findings(opened, diagnosis, _read_neighbors(folder, opened, diagnosis))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise refusal(f"is damaged ({_first_line(error)})", "data.damaged") from error


def _read_neighbors(
    folder: Path, source: Source, diagnosis: Diagnosis
) -> dict[str, NDArray[np.int64]]:
    """Read the rows of the images nearest to each label error, see `Findings`."""
    with np.load(folder / NEIGHBORS_FILE, allow_pickle=False) as arrays:
        neighbors = {key: np.asarray(arrays[key], np.int64) for key in ("given", "suggested")}
    num_rows = sum(map(len, source.splits.values()))
    num_errors = len(diagnosis["label_errors"])
    if any(
        rows.ndim != 2 or len(rows) != num_errors or (rows >= num_rows).any()
        for rows in neighbors.values()
    ):
        raise ValueError(f"{NEIGHBORS_FILE} is about other findings")
    return neighbors


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    return str(getattr(error, "strerror", None) or error).partition("\n")[0][:200]
