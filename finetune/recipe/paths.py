"""Check model names and data sources before a run: unknown kinds and missing files.

Does not import torch, so that a wrong path fails immediately.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from finetune.errors import DataError, RecipeError, WeightsError, did_you_mean, has_redacted_url
from finetune.source_kinds import (
    EMBEDDED_DATASETS,
    SOURCE_KINDS,
    kind_from_suffix,
    split_source,
)

__all__ = [
    "WEIGHTS_SUFFIXES",
    "check_data_source",
    "check_is_outside",
    "check_model_name",
    "check_recipe_or_source",
    "check_source_url",
    "drop_folders",
    "is_data_source",
    "raise_if_model_missing",
    "resolve_data_source",
    "suggest_path",
]

_SPREADSHEET_SUFFIXES = (".xlsx", ".xlsm", ".xls", ".ods")
_ARCHIVE_MODULES = {  # by suffix, the module of Python that unpacks the archive
    ".zip": "zipfile",
    ".tgz": "tarfile",
    ".tar.gz": "tarfile",
    ".tar.bz2": "tarfile",
    ".tar.xz": "tarfile",
}
WEIGHTS_SUFFIXES = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".tar")


def check_model_name(name: str) -> None:
    """Check that a model name exists if it can only be a local path.

    Raises: WeightsError if the path does not exist.
    """
    if re.match(r"(hf-hub|hf_hub|embedded|package|transformers):", name) or "\0" in name:
        return
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    try:
        exists = path.exists()
    except OSError:  # loading the model gives a better error
        return
    if not exists:
        raise_if_model_missing(name, path)


def raise_if_model_missing(name: str, path: Path) -> None:
    """Raise WeightsError for a missing path, unless the model name may be a timm name."""
    if "://" in name:
        raise WeightsError(
            f"model '{name}': URLs are not supported; download the weights and give the file or "
            "folder",
            code="weights.unknown_name",
        )
    if repository := re.fullmatch(r"(?:hub|hf|huggingface):/*([^/]+/.+)", name):
        raise WeightsError(
            f"model '{name}': unknown prefix; did you mean 'hf-hub:{repository[1]}'?",
            code="weights.unknown_name",
        )
    is_path = name.startswith((".", "/", "~", "local-dir:")) or path.suffix in WEIGHTS_SUFFIXES
    if not is_path and "/" not in name and "\\" not in name:
        return
    advice = suggest_path(name, suffixes=WEIGHTS_SUFFIXES) or "; check the path"
    if not is_path and re.fullmatch(r"[^/\\=]+/[^/\\]+", name) and not name.startswith("runs/"):
        advice += f"; for a repository on the Hub write 'hf-hub:{name}'"
    raise WeightsError(
        f"model '{name}': no such run directory, model folder or weights file{advice}",
        code="weights.not_found",
    )


def check_recipe_or_source(text: str) -> None:
    """Check that the recipe or folder of images that a command got as its argument exists.

    YAML files and URLs are not checked, because reading them as a recipe gives a better error.

    Raises: RecipeError if the path does not exist.
    """
    if not text.strip() or "://" in text or text.endswith((".yaml", ".yml")):
        return
    try:
        os.lstat(text)
    except FileNotFoundError:
        hint = suggest_path(text, suffixes=(".yaml", ".yml", ".csv", ".parquet", ".tar"))
        hint = hint or "; check the path, or see: finetune recipes list"
        raise RecipeError(
            f"{text}: neither a recipe nor a folder of images{hint}", code="recipe.not_found"
        ) from None
    except (OSError, ValueError):  # reading it gives a better error
        return


def check_is_outside(source: str, out: Path, *, option: str = "--out") -> None:
    """Raise RecipeError if an output is in the folder of images: it becomes a class or an image.

    Args:
        source: the images, as the user typed them.
        out: the output folder or file.
        option: the command-line option of `out`.
    """
    kind, path = split_source(source)
    if kind not in (None, "folder"):
        return
    folder = Path(os.path.expanduser(path)).resolve()
    if folder.is_dir() and folder in out.resolve().parents:
        raise RecipeError(
            f"{option}: {out} is in the folder of images {path}, where it would become a class or "
            "an image; give another folder",
            code="recipe.conflict",
        )


def suggest_path(text: str, *, suffixes: Sequence[str]) -> str:
    """Suggest an existing folder or file for a path that does not exist.

    Args:
        text: the path as the user typed it.
        suffixes: suffixes of the files that may be suggested.
    Returns: the end of an error message, such as "; did you mean 'runs/first'?"; empty if no entry
        of the path's parent folder has a similar name.
    """
    folder, name = os.path.split(text.rstrip("/"))
    try:
        names = [
            entry.name
            for entry in os.scandir(os.path.expanduser(folder) or ".")
            if entry.name.endswith(tuple(suffixes)) or entry.is_dir()
        ]
    except (OSError, ValueError):
        return ""
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{os.path.join(folder, close[0])}'?" if close else ""


def check_data_source(source: str, *, typed: str | None = None) -> None:
    """Check that a data source has a known kind and an existing path.

    Args:
        source: the data source.
        typed: what the user typed, for messages; None if it is equal to `source`.
    Raises: DataError for an unknown kind or a missing path.
    """
    typed = source if typed is None else typed
    kind, colon, path = source.partition(":")
    if kind not in SOURCE_KINDS or not path:
        hint = did_you_mean(kind, SOURCE_KINDS)
        if source and not colon and _exists(source):
            guesses = [own] if (own := kind_from_suffix(source)) else ["folder", "parquet"]
            meant = " or ".join(f"'{guess}:{source}'" for guess in guesses)
            hint = f"; did you mean {meant}?"
        elif kind in SOURCE_KINDS:
            hint = f": the path after '{kind}:' is missing"
        elif kind in ("http", "https"):
            hint = f"; download it, or if it is a tar file, write tar:{source}"
        raise DataError(
            f"{source!r}: not a data source{hint}; expected hub:owner/name, parquet:PATH, "
            "tar:PATTERN, csv:PATH, folder:PATH or embedded:digits",
            code="data.wrong_source",
        )
    if kind == "embedded" and path not in EMBEDDED_DATASETS:
        message = f"{typed}: no such embedded dataset{did_you_mean(path, EMBEDDED_DATASETS)}"
        raise DataError(message, code="data.wrong_source")
    check_source_url(source)
    if has_redacted_url(path):
        raise DataError(
            f"{typed}: this address was stored without its password or query; give the whole "
            "address, with data.source=ADDRESS or --data ADDRESS",
            code="data.redacted",
        )
    is_pattern = kind == "tar" and ("{" in path or "://" in path)
    if not SOURCE_KINDS[kind].is_local or "\0" in path or is_pattern:
        return
    if "://" in path:
        raise DataError(
            f"{typed}: '{kind}:' reads local files, and only 'tar:' reads from a URL; download it",
            code="data.wrong_source",
        )
    root = Path(os.path.expanduser(path)).absolute()
    try:
        if kind != "tar" and root.is_file():
            _refuse_spreadsheet_or_archive(path, typed)
        if root.exists() or (SOURCE_KINDS[kind].accepts_glob and glob.has_magic(path)):
            return
    except OSError:  # opening the source gives a better error
        return
    suffix = SOURCE_KINDS[kind].suffix
    hint = suggest_path(path, suffixes=(suffix,) if suffix else ())
    message = f"{typed}: no such path{hint or '; check it'}"
    if kind == "folder":
        message = f"{typed}: no such folder{hint}; expected a folder with one subfolder per class"
    raise DataError(message, code="data.not_found")


def check_source_url(source: str) -> None:
    """Check that `redact_urls` can find the password and the query in a URL of tar shards.

    Raises: DataError, which does not repeat the URL.
    """
    if not re.match(r"(?i)tar:https?://", source):
        if re.match(r"(?i)tar:(?=.*http)[^/]*\{.*//", source):
            raise DataError(
                "data source tar:…http…: in a URL, braces are allowed only after the host; write "
                "tar:https://host/…",
                code="data.wrong_source",
            )
        return
    try:
        url = urlsplit(source.removeprefix("tar:"))
        _ = url.port
        # a "/" in a password ends the host, and leaves a port, which may be a number
        is_valid = not re.search(r"[\s\"<>#]", source) and "@" not in url.path
    except ValueError:
        is_valid = False
    if not is_valid:
        raise DataError(
            "data source tar:http…: not a valid URL; percent-encode spaces, quotes, <, > and #, "
            "in a password also / and ?, and @ everywhere but before the host (for example / as "
            "%2F), and remove a fragment (#…)",
            code="data.wrong_source",
        )


def _refuse_spreadsheet_or_archive(path: str, typed: str) -> None:
    """Raise a DataError that says how to convert a spreadsheet or unpack an archive."""
    if path.lower().endswith(_SPREADSHEET_SUFFIXES):
        table = Path(path).with_suffix(".csv")
        raise DataError(
            f"{typed}: a spreadsheet; save its sheet as CSV (Excel: File > Save As > CSV UTF-8; "
            f"LibreOffice: File > Save As > Text CSV), then give {shlex.quote(str(table))}",
            code="data.wrong_format",
        )
    for suffix, module in _ARCHIVE_MODULES.items():
        if path.lower().endswith(suffix):
            folder = shlex.quote(path[: -len(suffix)])
            raise DataError(
                f"{typed}: an archive; unpack it: python -m {module} -e {shlex.quote(path)} "
                f"{folder}; then give {folder}",
                code="data.wrong_format",
            )


def is_data_source(text: str) -> bool:
    """True if a command-line argument is a data source, not a recipe or a run directory.

    Spreadsheets and archives count as data sources, so that the error says how to convert them.
    """
    if split_source(text)[0]:
        return True
    if not text or text.endswith((".yaml", ".yml")):
        return False
    if kind_from_suffix(text) or text.lower().endswith((*_SPREADSHEET_SUFFIXES, *_ARCHIVE_MODULES)):
        return True
    try:
        path = Path(os.path.expanduser(text))
        return path.is_dir() and not (path / "recipe.yaml").is_file()
    except (OSError, ValueError):  # not a valid path
        return False


def resolve_data_source(text: str) -> str:
    """Convert a path to a data source; a data source is returned unchanged. Raises: DataError."""
    if split_source(text)[0]:
        check_data_source(text)
        return text
    names_kind = ":" in text or text in SOURCE_KINDS
    if not text.strip() or (names_kind and not _exists(text)):  # "foldr:x" or "parquet"
        check_data_source(text)
    source = _source_from_path(text)
    check_data_source(source, typed=text)
    if source == f"folder:{text}" and not Path(os.path.expanduser(text)).is_dir():
        raise DataError(
            f"{text}: not a data source; expected a folder, or a .csv, .parquet or .tar file",
            code="data.wrong_source",
        )
    return source


def _exists(path: str) -> bool:
    try:
        return Path(os.path.expanduser(path)).exists()
    except (OSError, ValueError):  # not a valid path
        return False


def _source_from_path(text: str) -> str:
    """Return the data source `kind:path` for a file or folder, with the kind from its content."""
    if kind := kind_from_suffix(text):
        return f"{kind}:{text}"
    folder = Path(os.path.expanduser(text))
    if any(folder.glob("data/*.parquet")):
        return f"parquet:{text}"
    entries = list(folder.glob("[!.]*"))
    if not any(entry.is_dir() for entry in entries):
        suffixes = {entry.suffix.lower() for entry in entries}
        for suffix in (".parquet", ".tar"):
            if suffix in suffixes:
                return f"{suffix[1:]}:{text}"
    return f"folder:{text}"


def drop_folders(source: str) -> str:
    """Drop the parent folders of a local source or model; names on the Hub are unchanged."""
    if "://" in source:
        source = source.partition("?")[0]  # a query selects or signs a file, and is no name
    kind, colon, rest = source.partition(":")
    if colon and kind in ("hub", "hf-hub", "hf_hub", "embedded"):
        return source
    if kind == "transformers" and re.fullmatch(r"[^/.~][^/]*/[^/]+", rest):  # owner/name
        return source
    if kind not in ("folder", "parquet", "csv", "tar", "local-dir", "transformers"):
        kind, colon, rest = "", "", source  # not a source prefix: the colon is part of a path
        if not re.search(r"[\\/]", rest) and not rest.startswith((".", "~")):
            return source
    name = re.split(r"[\\/]", rest.rstrip("\\/"))[-1]
    return kind + colon + ("data" if name in ("", ".", "..") or name[0] == "~" else name)
