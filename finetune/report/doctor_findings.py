"""The content of doctor.json, and what it says about the worst mistakes of a run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict  # pydantic needs it before Python 3.12

from finetune.errors import RecipeError
from finetune.files import open_regular_file
from finetune.formatting import format_percent
from finetune.log import logger
from finetune.report.run_data import Run
from finetune.source_kinds import SOURCE_KINDS, split_source

__all__ = ["DIAGNOSIS_FILE", "DiagnosedImage", "Diagnosis", "DoctorFindings", "read_diagnosis"]

DIAGNOSIS_FILE = "doctor.json"
_MAX_BYTES = 2**30
_CONFIG = ConfigDict(strict=True, extra="allow")

_Label = str | list[str]
_Count = Annotated[int, Field(ge=0)]


class DiagnosedImage(TypedDict):
    """An image with a problem."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    split: str
    index: _Count
    path: str
    digest: NotRequired[str | None]  # None for streamed images
    given: NotRequired[_Label]  # only of label errors and outliers, as are the others
    suggested: NotRequired[_Label]
    reason: NotRequired[str]
    score: NotRequired[FiniteFloat]
    similar: NotRequired[dict[str, list[str]]]  # keys of images by "given" and "suggested"


class _ClassProblem(TypedDict):
    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    kind: str
    classes: Annotated[list[str], Field(min_length=1, max_length=2)]
    score: FiniteFloat
    images: _Count  # that are confused, or in the class
    sizes: list[_Count]  # of the classes
    examples: list[tuple[str, list[str]]]  # a class and keys of images


class _Split(TypedDict):
    images: _Count
    fingerprint: str


class Diagnosis(TypedDict):
    """The content of doctor.json."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    source: str
    multilabel: bool
    splits: dict[str, _Split]
    label_errors: list[DiagnosedImage]
    duplicates: list[list[DiagnosedImage]]
    leaks: list[list[DiagnosedImage]]
    outliers: list[DiagnosedImage]
    class_problems: list[_ClassProblem]
    groups: list[list[DiagnosedImage]]
    expected: dict[str, dict[str, FiniteFloat]]


def read_diagnosis(folder: Path) -> Diagnosis:
    """Read doctor.json. Raises: OSError or ValueError if it is missing or damaged."""
    with open_regular_file(folder / DIAGNOSIS_FILE, max_bytes=_MAX_BYTES) as stream:
        try:
            return TypeAdapter(Diagnosis).validate_json(stream.read())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            message = f"{where}: {first['msg']}" if where else "not the JSON that the doctor writes"
            raise ValueError(message) from None


class DoctorFindings:
    """The findings in doctor.json, by image.

    Args:
        folder: the folder that `finetune data doctor --out` has written.
    Raises: RecipeError if it has no valid doctor.json.
    """

    def __init__(self, folder: Path) -> None:
        try:
            content = read_diagnosis(folder)
        except (OSError, ValueError) as error:
            cause = str(getattr(error, "strerror", None) or error).splitlines()[0][:200]
            raise RecipeError(
                f"--doctor: {folder / DIAGNOSIS_FILE}: no findings of the doctor ({cause}); create "
                "them with: finetune data doctor SOURCE --out DIR",
                code="recipe.wrong_value",
            ) from None
        self.page = folder / "doctor.html"
        self._fingerprints = {
            name: split["fingerprint"] for name, split in content["splits"].items()
        }
        self._source = content["source"]
        self._notes: dict[tuple[str, str], list[tuple[DiagnosedImage, str]]] = {}
        for image in content["label_errors"]:
            sure = format_percent(image.get("score", 0), 0)
            self._add(image, f"label probably {_join_names(image.get('suggested'))} ({sure} sure)")
        for kind, groups in (("leak", content["leaks"]), ("near-duplicate", content["duplicates"])):
            for group in groups:
                for image in group:
                    others = (f"{one['path']} in {one['split']}" for one in group if one != image)
                    self._add(image, f"{kind} of {next(others, 'itself')}")
        for image in content["outliers"]:
            self._add(image, f"outlier: {image.get('reason', '').replace('_', ' ')}")

    def _add(self, image: DiagnosedImage, note: str) -> None:
        self._notes.setdefault((image["split"], image["path"]), []).append((image, note))

    def warn_if_other_data(self, run: Run) -> None:
        """Log a warning if the doctor has inspected other data than that of a run."""
        source, changed = run.recipe.data.source, self._changed_splits(run)
        other = f"{run.path} was trained on {source}"
        if _absolute(self._source) == _absolute(source):
            if not changed:
                return
            other = f"{run.path} was trained on other images or labels in {', '.join(changed)}"
        elif {*self._fingerprints.values()} & {*_whole_fingerprints(run).values()} and not changed:
            return  # the same data at another path
        logger.warning(
            f"--doctor: {self.page.parent}: these findings are of {self._source}, but {other}; "
            f"create those of its data with: finetune data doctor {shlex.quote(source)} --out DIR"
        )

    def _changed_splits(self, run: Run) -> list[str] | None:
        """Return the splits whose images or labels are not those that the doctor has inspected.

        None if the recipe changes whole splits, so that the fingerprints cannot be compared.
        """
        data = run.recipe.data
        if data.classes or data.decisions or data.group or data.merge_val or data.streaming:
            return None
        recorded = _whole_fingerprints(run)
        return [
            name
            for name, fingerprint in self._fingerprints.items()
            if recorded.get(name, fingerprint) != fingerprint
        ]

    def describe(self, run: Run, mistake: Mapping[str, Any], digest: str | None) -> str:
        """Return the doctor's opinion of an image of the split that a run reports.

        Args:
            run: the run; its val split may be a part of train in the source.
            mistake: "name" of the image, and "label" as shown on the page.
            digest: hexadecimal digest of the image's content; None if unknown.
        Returns: the findings about the same image and label; "nothing found"; "not known" if the
            doctor may have inspected another image or label; "" if it has not seen the split.
        """
        split = run.reported_split if run.reported_split in self._fingerprints else "train"
        if split not in self._fingerprints:
            return ""
        found = self._notes.get((split, mistake["name"]), [])
        notes = [
            note
            for image, note in found
            if "suggested" not in image or _join_names(image.get("given")) == mistake["label"]
            if digest is None or image.get("digest") in (None, digest)
        ]
        changed = self._changed_splits(run)
        is_same = not found and changed is not None and split not in changed
        return "; ".join(notes) or ("nothing found" if is_same else "not known")


def _whole_fingerprints(run: Run) -> Mapping[str, str]:
    fingerprints: Mapping[str, str] = run.record.get("whole_fingerprints", {})
    return fingerprints


def _absolute(source: str) -> str:
    """Return a source string with an absolute path."""
    kind, path = split_source(source)
    is_path = SOURCE_KINDS[kind].is_local if kind else True
    return os.path.abspath(path) if is_path and "://" not in path else source


def _join_names(names: str | list[str] | None) -> str:
    """Join class names as the page shows them."""
    return names if isinstance(names, str) else ", ".join(names or ()) or "none"
