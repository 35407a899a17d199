"""Which images files, folders, patterns and a list on standard input name."""

from __future__ import annotations

import glob
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from finetune.data.items import walk_images
from finetune.errors import DataError, RecipeError

__all__ = ["Found", "find_files", "list_files"]

Found = tuple[str, str | None]


def list_files(paths: Sequence[str]) -> list[Found]:
    """List the images that a command line names.

    Args:
        paths: files, folders, glob patterns, or "-" for a list on standard input, one path a line
            or separated by zero bytes; what it lists are no patterns.
    Returns: see `find_files`.
    Raises: DataError if the list on standard input is empty, RecipeError if it is named twice.
    """
    if list(paths).count("-") > 1:
        raise RecipeError("-: standard input is read once; name it once")
    found: list[Found] = []
    for path in paths:
        if path == "-":
            found += find_files(_listed_on_stdin(), patterns=False)
        else:
            found += find_files([path])
    return found


def find_files(paths: Iterable[str | Path], *, patterns: bool = True) -> list[Found]:
    """List the images that files, folders and glob patterns name.

    Args:
        paths: an existing path is never taken as a pattern.
        patterns: False takes every path as it is.
    Returns: (path, None), or (path, error) for a name behind which there is nothing.
    """
    found: list[Found] = []
    for path in [os.fspath(path) for path in paths]:
        matches = [path]
        if patterns and not os.path.lexists(path) and glob.has_magic(path):
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                found.append((path, "no file matches this pattern"))
        for match in matches:
            if not os.path.isdir(match):
                found.append((match, None))
                continue
            try:
                inside = sorted(walk_images(Path(match), Counter()))
            except DataError as error:
                found.append((match, str(error)))
                continue
            found += [(file, None) for file in inside] or [(match, "a folder without images")]
    return found


def _listed_on_stdin() -> list[str]:
    """The paths on standard input: what stands between zero bytes, or else on the lines."""
    listed = sys.stdin.buffer.read() if sys.stdin else b""  # None where it was closed
    if b"\0" in listed:
        names = listed.split(b"\0")
    else:
        names = [line.removesuffix(b"\r") for line in listed.split(b"\n")]
    paths = [os.fsdecode(name) for name in names if name]
    if not paths:
        raise DataError("-: the list on standard input is empty; write one path on each line")
    return paths
