"""Paths of images to predict: files, folders, patterns, and lists on standard input."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from finetune.data.decode import HEIC_HINT, decode_image
from finetune.data.image_folder import count_heic_photos, walk_images, warn_ignored_files
from finetune.errors import DataError, RecipeError
from finetune.formatting import escape_to_one_line

__all__ = ["ImageInput", "find_images", "list_cli_images"]


ImageInput = tuple[Any, str | None]  # a path or PIL image, and an error message or None


def list_cli_images(paths: Sequence[str]) -> list[ImageInput]:
    """List the images given on a command line.

    Args:
        paths: files, folders, glob patterns, or "-" for a list on standard input with one path per
            line or NUL-separated; listed paths are not glob patterns.
    Returns: see `find_images`.
    Raises: DataError if the list on standard input is empty; RecipeError if "-" is given twice.
    """
    if list(paths).count("-") > 1:
        raise RecipeError(
            "-: standard input can be read only once; give '-' once", code="recipe.conflict"
        )
    files: list[ImageInput] = []
    for path in paths:
        if path == "-":
            files += find_images(_read_paths_from_stdin(), expand_patterns=False)
        else:
            files += find_images([path])
    return files


def find_images(
    paths: Iterable[str | Path | Image.Image], *, expand_patterns: bool = True
) -> list[ImageInput]:
    """List images from files, folders, glob patterns and PIL images.

    Args:
        paths: paths, glob patterns or PIL images. An existing path is never treated as a pattern.
        expand_patterns: expand glob patterns; if False, take every path literally.
    Returns: a list with (path or image, None) for each image, and (path, error) for each path
        where none is found.
    Raises: DataError if an iterator returns one PIL image twice, as `ImageSequence.Iterator` does:
        its earlier frame or pixels would be lost.
    """
    files: list[ImageInput] = []
    counts: Counter[int] = Counter()  # of images by their id; `files` keeps the images alive
    for given in paths:
        if isinstance(given, Image.Image):
            counts[id(given)] += 1
            if counts[id(given)] == 2:
                if isinstance(paths, Iterator):
                    raise DataError(
                        "the iterator returns the same PIL image twice, perhaps with other pixels; "
                        "yield copies: image.copy()",
                        code="data.ambiguous",
                    )
                # PIL loads a file when its pixels are first needed, which is not thread-safe
                with contextlib.suppress(DataError):
                    decode_image(given)
            files.append((given, None))
            continue
        path = os.fspath(given)
        matches = [path]
        if expand_patterns and not os.path.lexists(path) and glob.has_magic(path):
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                files.append((path, "no file matches this pattern"))
        for match in matches:
            if not os.path.isdir(match):
                files.append((match, None))
                continue
            ignored: Counter[str] = Counter()
            try:
                image_files = sorted(walk_images(Path(match), ignored))
            except DataError as error:
                files.append((match, str(error)))
                continue
            warn_ignored_files(escape_to_one_line(match), ignored)
            advice = f"; {HEIC_HINT}" if count_heic_photos(ignored) else ""
            nothing = match, f"a folder without images{advice}"
            files += [(file, None) for file in image_files] or [nothing]
    return files


def _read_paths_from_stdin() -> list[str]:
    """Read paths from standard input, NUL-separated or one per line."""
    listed = sys.stdin.buffer.read() if sys.stdin else b""  # stdin is None if it was closed
    if b"\0" in listed:
        names = listed.split(b"\0")
    else:
        names = [line.removesuffix(b"\r") for line in listed.split(b"\n")]
    paths = [os.fsdecode(name) for name in names if name]
    if not paths:
        raise DataError(
            "-: the list on standard input is empty; write one path on each line", code="data.empty"
        )
    return paths
