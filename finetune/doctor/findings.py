"""Read `doctor.json`, and describe each finding as the review page shows it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.data.open_source import open_source
from finetune.data.source import Source, Split
from finetune.errors import DataError, redact_urls
from finetune.report.doctor_findings import (
    DIAGNOSIS_FILE,
    DiagnosedImage,
    Diagnosis,
    read_diagnosis,
)

__all__ = ["KINDS", "Findings", "class_key", "image_key", "join_labels", "open_findings"]

# the sections of the page, in their order
KINDS = {
    "label_errors": "Label errors",
    "leaks": "Leaks",
    "duplicates": "Duplicates",
    "groups": "Groups",
    "outliers": "Outliers",
    "class_problems": "Classes",
}


class Findings:
    """The findings of one diagnosis.

    A decision is about one key: that of an image (`image_key`) or of a class problem (`class_key`).

    Attributes:
        source: the diagnosed dataset.
        is_multilabel: True if an image may have any number of labels.
        expected: the expected number of true problems of each kind, with its interval.
        images: the images of all findings by key, with split, index, path and digest.
        keys: for each kind of finding, the keys to decide on of each finding, surest finding first.
    Raises: KeyError or ValueError if the dataset lacks an image or a class of the diagnosis.
    """

    def __init__(self, source: Source, diagnosis: Diagnosis) -> None:
        self.source = source
        self.is_multilabel = diagnosis["multilabel"]
        self.expected = diagnosis["expected"]
        self.images: dict[str, DiagnosedImage] = {}
        self.keys: dict[str, list[list[str]]] = {}
        self._found: dict[str, list[Any]] = {}
        for kind in KINDS:
            found: Sequence[Any] = diagnosis[kind]  # type: ignore[literal-required]
            self._found[kind] = [each if isinstance(each, list) else [each] for each in found]
            self.keys[kind] = [[self._add(each) for each in group] for group in self._found[kind]]

    def _add(self, image: Any) -> str:
        """Register an image. Returns: its key, or that of a class problem."""
        if "classes" in image:
            if unknown := set(image["classes"]) - set(self.source.class_names):
                raise ValueError(f"the classes {sorted(unknown)} are not in the data")
            return class_key(image["classes"])
        key = image_key(image["split"], image["index"])
        self.locate(key)
        self.images.setdefault(key, image)
        return key

    def describe(self, kind: str, start: int, stop: int) -> list[dict[str, Any]]:
        """Describe some findings of a kind, as JSON values for the page.

        Returns: dicts with the keys "images" (dicts with key, path and given label), "examples"
            (pairs of a class and the keys of images to compare with), "suggested", "score",
            "reason", "classes" with their "sizes" in images, and "count"; those that do not apply
            are missing.
        """
        found = self._found[kind][start:stop]
        if kind == "class_problems":
            return [
                {
                    **{name: problem[name] for name in ("classes", "score", "sizes", "examples")},
                    "images": [],
                    "reason": problem["kind"],
                    "count": problem["images"],
                }
                for (problem,) in found
            ]
        return [self._describe_images(group) for group in found]

    def _describe_images(self, group: Sequence[Any]) -> dict[str, Any]:
        keys = [image_key(image["split"], image["index"]) for image in group]
        finding: dict[str, Any] = {
            "images": [
                {"key": key, "path": image["path"], "given": self.given_label(key)}
                for key, image in zip(keys, group, strict=True)
            ],
            "examples": [],
        }
        finding |= {name: group[0][name] for name in ("score", "reason") if name in group[0]}
        if "suggested" in group[0]:
            finding["suggested"] = join_labels(group[0]["suggested"])
            labels = {"given": self.given_label(keys[0]), "suggested": finding["suggested"]}
            similar = group[0].get("similar", {})
            finding["examples"] = [[label, similar.get(name, [])] for name, label in labels.items()]
        return finding

    def given_label(self, key: str) -> str:
        """Return the label of an image in the source; several are joined by |."""
        split, index = self.locate(key)
        classes = split.class_indices(index)
        return join_labels([self.source.class_names[number] for number in classes])

    def locate(self, key: str) -> tuple[Split, int]:
        """Return split and index of an image. Raises: KeyError if the source has no such image."""
        name, _, index = key.partition("/")
        split = self.source.splits[name]
        if not index.isdecimal() or int(index) >= len(split):
            raise KeyError(key)
        return split, int(index)


def image_key(split: str, index: int) -> str:
    """Return the key of an image, such as "train/17"."""
    return f"{split}/{index}"


def class_key(classes: Sequence[str]) -> str:
    """Return the key of a class problem: its classes as JSON."""
    return json.dumps(list(classes), ensure_ascii=False)


def join_labels(label: str | list[str], separator: str = "|") -> str:
    """Join the labels of a multi-label image, by default in the format of a decisions file."""
    return label if isinstance(label, str) else separator.join(label) or "[]"


def open_findings(source: str, folder: Path, *, decode_size: int | None = None) -> Findings:
    """Open a source, and read the findings about it.

    Args:
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
        cause = str(getattr(error, "strerror", None) or error)
        raise refusal(f"cannot be read ({cause})", "data.damaged") from error
    opened = open_source(source, multilabel=diagnosis["multilabel"], decode_size=decode_size)
    now = {name: split.fingerprint for name, split in opened.splits.items()}
    then = {name: split["fingerprint"] for name, split in diagnosis["splits"].items()}
    if now != then:
        names = sorted({name for name, _ in now.items() ^ then.items()})
        raise refusal(
            f"is about other images or labels than {redact_urls(source)} has now (in "
            f"{', '.join(names)})",
            "data.changed",
        )
    try:
        return Findings(opened, diagnosis)
    except (KeyError, ValueError) as error:
        raise refusal(f"is damaged ({error})", "data.damaged") from error
