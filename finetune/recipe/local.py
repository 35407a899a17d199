"""Refuse names of models and data sets that cannot be right: unknown kinds, missing files.

No torch here, so that a wrong path is refused in a moment.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

from finetune.errors import DataError, WeightsError, nearest

__all__ = [
    "WEIGHTS_SUFFIXES",
    "check_model",
    "check_source",
    "names_images",
    "refuse_missing_model",
    "source_of",
]

_KINDS = ("hub", "parquet", "tar", "csv", "folder", "embedded")
_KIND_OF_SUFFIX = {".csv": "csv", ".tar": "tar", ".parquet": "parquet"}
WEIGHTS_SUFFIXES = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".tar")


def check_model(name: str) -> None:
    """Refuse a model's name that can only mean a file or folder, if there is none.

    Raises: WeightsError.
    """
    if re.match(r"(hf-hub|hf_hub|embedded|package|transformers):", name) or "\0" in name:
        return
    path = Path(name.removeprefix("local-dir:")).expanduser()
    try:
        exists = path.exists()
    except OSError:  # reading it says more
        return
    if not exists:
        refuse_missing_model(name, path)


def refuse_missing_model(name: str, path: Path) -> None:
    """Refuse a name without a file or folder, unless timm may know it. Raises: WeightsError."""
    if "://" in name:
        raise WeightsError(
            f"model.name: '{name}' is an address, and addresses are not read; download it first "
            f"and give the file or folder",
            code="weights.unknown_name",
        )
    if repository := re.fullmatch(r"(?:hub|hf|huggingface):/*([^/]+/.+)", name):
        raise WeightsError(
            f"model.name: unknown '{name}'; did you mean 'hf-hub:{repository[1]}'?",
            code="weights.unknown_name",
        )
    if name.startswith((".", "/", "~", "local-dir:")) or path.suffix in WEIGHTS_SUFFIXES:
        advice = "check the path"
    elif "/" in name or "\\" in name:
        advice = f"for a repository on the hub write 'hf-hub:{name}'"
    else:
        return
    raise WeightsError(
        f"model.name: no such file or folder '{name}'; {advice}", code="weights.not_found"
    )


def check_source(source: str) -> None:
    """Refuse a source of an unknown kind, or of a path that does not exist. Raises: DataError."""
    kind, colon, path = source.partition(":")
    if kind not in _KINDS or not path:
        hint = nearest(kind, _KINDS)
        if not colon and Path(source).expanduser().exists():
            guesses = [own] if (own := _own_kind(source)) else ["folder", "parquet"]
            meant = " or ".join(f"'{guess}:{source}'" for guess in guesses)
            hint = f"; did you mean {meant}?"
        elif kind in _KINDS:
            hint = f": the PATH behind '{kind}:' is missing"
        raise DataError(
            f"data.source: cannot read {source!r}{hint}; expected hub:owner/name, parquet:PATH, "
            "tar:PATTERN, csv:PATH, folder:PATH or embedded:digits",
            code="data.wrong_source",
        )
    if kind == "embedded" and path not in ("digits", "digit_pairs"):
        message = f"{source}: no such embedded data set{nearest(path, ['digits', 'digit_pairs'])}"
        raise DataError(message, code="data.wrong_source")
    is_pattern = kind == "tar" and ("{" in path or "://" in path)
    if kind in ("hub", "embedded") or "\0" in path or is_pattern:
        return
    root = Path(path).expanduser().absolute()
    try:
        if root.exists() or (kind in ("parquet", "tar") and glob.has_magic(path)):
            return
        siblings = [entry.name for entry in root.parent.iterdir()] if root.parent.is_dir() else []
    except OSError:  # opening it says more
        return
    hint = nearest(root.name, siblings)
    message = f"{source}: no such path{hint or '; check it'}"
    if kind == "folder":
        message = f"{source}: no such folder{hint}; expected a folder with a folder per class in it"
    raise DataError(message, code="data.not_found")


def names_images(text: str) -> bool:
    """True if a word of the command line names a source of images rather than a recipe or a run."""
    kind, colon, _ = text.partition(":")
    if colon and kind in _KINDS:
        return True
    if not text or text.endswith((".yaml", ".yml")):
        return False
    if _own_kind(text):
        return True
    try:
        path = Path(text).expanduser()
        return path.is_dir() and not (path / "recipe.yaml").is_file()
    except (OSError, RuntimeError, ValueError):  # no name that the system takes
        return False


def source_of(text: str) -> str:
    """The source string of a folder, a file or a source string. Raises: as `check_source`."""
    kind, colon, _ = text.partition(":")
    source = text if colon and kind in _KINDS else _of_path(text)
    check_source(source)
    return source


def _of_path(text: str) -> str:
    """The source string of a file, or of a folder of images, tar shards or parquet files."""
    if kind := _own_kind(text):
        return f"{kind}:{text}"
    folder = Path(text).expanduser()
    if any(folder.glob("data/*.parquet")):
        return f"parquet:{text}"
    inside = list(folder.glob("[!.]*"))
    if not any(entry.is_dir() for entry in inside):
        if any(entry.suffix == ".parquet" for entry in inside):
            return f"parquet:{text}"
        if any(entry.suffix == ".tar" for entry in inside):
            return f"tar:{text.rstrip('/')}/*.tar"
    return f"folder:{text}"


def _own_kind(file: str) -> str | None:
    return _KIND_OF_SUFFIX.get(Path(file).suffix.lower())
