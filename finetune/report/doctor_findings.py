"""What `finetune data doctor` has found about the worst mistakes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict  # pydantic needs it before Python 3.12

from finetune.errors import RecipeError
from finetune.files import open_regular_file
from finetune.formatting import format_percent

__all__ = ["DoctorFindings"]

_MAX_BYTES = 1 << 28


class _Image(TypedDict):
    split: str
    path: str
    digest: NotRequired[str | None]  # None for streamed images


class _LabelError(_Image):
    given: str | list[str]
    suggested: str | list[str]
    score: FiniteFloat


class _Outlier(_Image):
    reason: str


class _Diagnosis(TypedDict):
    splits: dict[str, Any]
    label_errors: list[_LabelError]
    leaks: list[list[_Image]]
    duplicates: list[list[_Image]]
    outliers: list[_Outlier]


class DoctorFindings:
    """The findings of doctor.json, by image.

    Args:
        folder: folder that `finetune data doctor --out` has written.
    Raises: RecipeError if it has no valid doctor.json.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "doctor.json"
        try:
            with open_regular_file(file, max_bytes=_MAX_BYTES) as stream:
                content = TypeAdapter(_Diagnosis).validate_json(stream.read())
        except FileNotFoundError:
            raise RecipeError(
                f"--doctor: {file}: no such file; create it with: finetune data doctor SOURCE "
                "--out DIR",
                code="recipe.not_found",
            ) from None
        except (OSError, ValidationError, ValueError) as error:
            cause = str(error).splitlines()[0][:200]
            raise RecipeError(
                f"--doctor: {file}: not readable as findings of the doctor ({cause}); run it again",
                code="recipe.wrong_value",
            ) from None
        self.page = folder / "doctor.html"
        self._splits = {*content["splits"]}
        self._notes: dict[tuple[str, str], list[tuple[_Image, str | list[str] | None, str]]] = {}
        for found in content["label_errors"]:
            suggested = _join_names(found["suggested"])
            note = f"label probably {suggested} ({format_percent(found['score'], 0)} sure)"
            self._add(found, note, given=found["given"])
        for kind, groups in (("leak", content["leaks"]), ("near-duplicate", content["duplicates"])):
            for group in groups:
                for image in group:
                    other = next((one for one in group if one is not image), image)
                    self._add(image, f"{kind}: like {other['path']} in {other['split']}")
        for outlier in content["outliers"]:
            self._add(outlier, f"outlier: {outlier['reason'].replace('_', ' ')}")

    def _add(self, image: _Image, note: str, given: str | list[str] | None = None) -> None:
        self._notes.setdefault((image["split"], image["path"]), []).append((image, given, note))

    def describe(self, split: str, mistake: Mapping[str, Any], digest: str | None) -> str:
        """Return the doctor's opinion of an image; "" if the doctor has not seen its split.

        Args:
            split: split of the image in the run; a val split may be a part of train in the source.
            mistake: "name" of the image, and "label" as shown on the page.
            digest: hexadecimal digest of the image's content; None if unknown.
        """
        split = split if split in self._splits else "train"
        if split not in self._splits:
            return ""
        notes = [
            note
            for image, given, note in self._notes.get((split, mistake["name"]), ())
            if given is None or _join_names(given) == mistake["label"]  # not corrected since
            if digest is None or image.get("digest") in (None, digest)
        ]
        return "; ".join(notes) or "nothing found"


def _join_names(names: str | list[str]) -> str:
    """Join class names as the page shows them."""
    return names if isinstance(names, str) else ", ".join(names) or "none"
