"""Classify files with a saved model: the same decoder and the same pipeline as evaluation."""

# B batch, K classes, C channels, H W pixels, h w the model's input size

from __future__ import annotations

import csv
import glob
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from finetune.data.augment import Pipeline
from finetune.data.decode import decode, printable
from finetune.data.items import walk_images
from finetune.errors import DataError, FinetuneError, RecipeError, SetupError, WeightsError
from finetune.models.build import build
from finetune.preprocess import make_pipeline
from finetune.recipe import load_recipe

__all__ = ["Classifier", "describe", "find_files", "predict", "unreadable"]

Row = dict[str, Any]

_DECODERS = min(8, os.cpu_count() or 1)
_SUFFIXES = (".csv", ".jsonl")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_LISTED = 20  # unreadable files named in a message; the rows have them all


class Classifier:
    """A network with its preprocessing and the names of its classes.

    Args:
        network: images (B, 3, h, w) to logits (B, K); put on the device and into evaluation mode.
        pipeline: without random operations.
        class_names: one for each of the K logits.
        device: where to compute; None takes a GPU if there is one.
    """

    def __init__(
        self,
        network: nn.Module,
        pipeline: Pipeline,
        class_names: Sequence[str],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network = network.to(self.device).eval()
        self.pipeline = pipeline
        self.class_names = list(class_names)

    @classmethod
    def load(cls, model: str | Path, *, device: torch.device | str | None = None) -> Classifier:
        """Load a run directory, a model folder, `hf-hub:owner/name@revision` or a timm name.

        Class names come with the weights; weights without any give the numbers of the classes.
        A run directory is evaluated as its recipe says, everything else as the weights'
        configuration says.

        Raises: WeightsError if there is no such model, or it has no classifier.
        """
        built = build(str(model))
        num_classes = int(getattr(built.model, "num_classes", 0) or 0)
        if not num_classes:
            raise WeightsError(
                f"{model}: these weights have no classifier; fine-tune them first: finetune train"
            )
        names = built.class_names or [str(index) for index in range(num_classes)]
        recorded = Path(model) / "recipe.yaml"
        sentence = load_recipe(recorded).data.eval if recorded.is_file() else None
        preprocessing = built.preprocessing
        pipeline = make_pipeline(preprocessing, sentence, train=False)
        return cls(built.model, pipeline, names, device=device)

    def predict(
        self,
        paths: str | Path | Iterable[str | Path],
        *,
        top_k: int = 3,
        batch_size: int = 64,
        progress: bool = False,
    ) -> list[Row]:
        """Classify images.

        Args:
            paths: files, folders (with those below them) and glob patterns.
            top_k: predictions per image, the most probable first; at most K.
            batch_size: images through the network at once.
            progress: show a bar on standard error.
        Returns: in the order of the files, {"path", "predictions": [{"label", "index",
            "confidence"}]}, or {"path", "error"} for one that cannot be read.
        Raises: RecipeError if top_k or batch_size is below 1; WeightsError if an output is not
            finite.
        """
        for name, number in (("top_k", top_k), ("batch_size", batch_size)):
            if number < 1:
                raise RecipeError(f"{name}: got {number}; expected 1 or more")
        found = find_files([paths] if isinstance(paths, (str, Path)) else paths)
        rows: list[Row] = []
        waiting: list[tuple[Row, Tensor]] = []
        with tqdm(
            total=len(found), unit="image", file=sys.stderr, disable=None if progress else True
        ) as shown:
            for path, image in self._read(found):
                row: Row = {"path": path}
                rows.append(row)
                if isinstance(image, str):
                    row["error"] = image
                else:
                    waiting.append((row, image))
                if len(waiting) == batch_size:
                    self._classify(waiting, top_k)
                    waiting.clear()
                shown.update()
            if waiting:
                self._classify(waiting, top_k)
        return rows

    def _read(self, found: Sequence[tuple[str, str | None]]) -> Iterator[tuple[str, Tensor | str]]:
        """Prepare files in order: (3, h, w) on the device, or what is wrong with the file."""
        with ThreadPoolExecutor(_DECODERS) as pool:
            # a few at a time: 64 decoded photos of 48 megapixels would be 9 GB
            for start in range(0, len(found), _DECODERS):
                group = found[start : start + _DECODERS]
                pixels = pool.map(lambda item: item[1] or _decoded(item[0]), group)
                for (path, _), image in zip(group, pixels, strict=True):
                    yield path, image if isinstance(image, str) else self._prepare(image)

    def _prepare(self, pixels_CHW: Tensor) -> Tensor | str:
        """(3, H, W) uint8 to (3, h, w), or why this image does not go through the pipeline."""
        try:
            prepared: Tensor = self.pipeline(pixels_CHW[None], device=self.device)[0]
        except FinetuneError as error:
            return str(error)
        return prepared

    @torch.inference_mode()
    def _classify(self, waiting: Sequence[tuple[Row, Tensor]], top_k: int) -> None:
        """Write the predictions of a batch into its rows."""
        logits_BK = self.network(torch.stack([image for _, image in waiting])).double()
        if not bool(logits_BK.isfinite().all()):
            raise WeightsError("the model's outputs are not finite; its weights are damaged")
        # stable, so that equal classes come by index on every device
        confidence_BK, index_BK = logits_BK.softmax(1).sort(dim=1, descending=True, stable=True)
        best = zip(confidence_BK[:, :top_k].tolist(), index_BK[:, :top_k].tolist(), strict=True)
        for (row, _), (confidences, indices) in zip(waiting, best, strict=True):
            row["predictions"] = [
                {"label": self.class_names[index], "index": index, "confidence": confidence}
                for confidence, index in zip(confidences, indices, strict=True)
            ]


def predict(
    model: str,
    paths: Sequence[str],
    *,
    top_k: int = 3,
    out: str | Path | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> list[Row]:
    """Classify files and folders, and write the result if a file is named.

    Args:
        model: see `Classifier.load`.
        paths: files, folders, glob patterns, or "-" for a list on standard input, one path a line
            (or separated by zero bytes, as `find -print0` gives it).
        top_k: predictions per image.
        out: a .csv or .jsonl file, replaced in one step. Cells of the CSV that a spreadsheet would
            run as a formula begin with an apostrophe; JSONL has every name as it is.
        batch_size: images through the network at once.
        device: None takes a GPU if there is one.
    Returns: the rows of `Classifier.predict`; `unreadable` finds the errors among them.
    Raises: RecipeError for another suffix of `out`, SetupError if it cannot be written.
    """
    if out is not None and Path(out).suffix.lower() not in _SUFFIXES:
        raise RecipeError(f"--out: '{out}' has an unknown suffix; use {' or '.join(_SUFFIXES)}")
    if out is not None and not Path(out).parent.is_dir():
        raise SetupError(f"--out: the folder '{Path(out).parent}' does not exist; make it first")
    named: list[str] = []
    for path in paths:
        named += _listed_on_stdin() if path == "-" else [path]
    rows = Classifier.load(model, device=device).predict(
        named, top_k=top_k, batch_size=batch_size, progress=True
    )
    if out is not None:
        text = _csv(rows) if Path(out).suffix.lower() == ".csv" else _jsonl(rows)
        _replace(Path(out), text)
    return rows


def find_files(paths: Iterable[str | Path]) -> list[tuple[str, str | None]]:
    """List the images that files, folders and glob patterns name.

    Args:
        paths: an existing path is never taken as a pattern.
    Returns: (path, None), or (path, error) for a name behind which there is nothing.
    """
    found: list[tuple[str, str | None]] = []
    for path in [os.fspath(path) for path in paths]:
        matches = [path]
        if not os.path.lexists(path) and glob.has_magic(path):
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


def unreadable(rows: Iterable[Row]) -> DataError | None:
    """What to raise once everything else is written: the files that could not be read."""
    errors = [row for row in rows if "error" in row]
    if not errors:
        return None
    lines = [f"  {_one_line(row['path'])}: {row['error']}" for row in errors[:_LISTED]]
    if len(errors) > _LISTED:
        lines.append(f"  … and {len(errors) - _LISTED} more")
    which = "1 file was" if len(errors) == 1 else f"{len(errors)} files were"
    return DataError("\n".join([f"{which} not classified; mend or leave out:", *lines]))


def describe(rows: Sequence[Row], *, out: str | Path | None = None) -> str:
    """The rows as a table for people, or one line when they are in a file already."""
    good = [row for row in rows if "error" not in row]
    if out is not None:
        return f"{out}: {len(good)} of {len(rows)} files classified"
    names = [_one_line(row["path"]) for row in good]
    width = max(map(len, names), default=0)
    return "\n".join(
        f"{name:{width}}  "
        + "  ".join(
            f"{_one_line(one['label'])} {100 * one['confidence']:.1f} %"
            for one in row["predictions"]
        )
        for name, row in zip(names, good, strict=True)
    )


def _decoded(path: str) -> Tensor | str:
    """(3, H, W) uint8, or what is wrong with the file."""
    try:
        return torch.from_numpy(decode(path)).permute(2, 0, 1)
    except DataError as error:
        return str(error).removeprefix(f"{printable(path)}: ")


def _listed_on_stdin() -> list[str]:
    listed = sys.stdin.buffer.read()
    separator = b"\0" if b"\0" in listed else b"\n"
    return [os.fsdecode(line.rstrip(b"\r\n")) for line in listed.split(separator) if line.strip()]


def _csv(rows: Sequence[Row]) -> str:
    """A row per file: path, label_1, confidence_1, …, error."""
    depth = max((len(row.get("predictions", ())) for row in rows), default=0)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    pairs = [f"{name}_{rank}" for rank in range(1, depth + 1) for name in ("label", "confidence")]
    writer.writerow(["path", *pairs, "error"])
    for row in rows:
        cells: list[str] = []
        for one in row.get("predictions", ()):
            cells += [_cell(one["label"]), f"{one['confidence']:.6f}"]
        cells += [""] * (2 * depth - len(cells))
        writer.writerow([_cell(row["path"]), *cells, _cell(row.get("error", ""))])
    return text.getvalue()


def _cell(text: str) -> str:
    """Keep a spreadsheet from running a file name or a label as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _jsonl(rows: Sequence[Row]) -> str:
    # ASCII only: names that are not UTF-8 come back from \udc.. escapes as they were
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _replace(path: Path, text: str) -> None:
    """Write a file in one step; names that are not UTF-8 keep their bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "surrogateescape"))
        os.replace(temporary, path)
    except OSError as error:
        raise SetupError(
            f"--out: '{path}' cannot be written ({error.strerror or error}); choose another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _one_line(text: str) -> str:
    """Text without the line breaks and control characters that a terminal would obey."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
