"""Parquet files and hub data sets: the rows of a table -> encoded images and numbered labels."""

from __future__ import annotations

import functools
import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from finetune.data.columns import (
    SPLITS,
    declared_names,
    features_of,
    find_columns,
    in_order,
    number_labels,
)
from finetune.data.decode import notice, open_data
from finetune.data.hub import load_hub
from finetune.data.items import Chunk, RowItems
from finetune.data.streaming.hub_index import find_shards
from finetune.data.streaming.parquet_shards import chunk_of, label_column, open_shards
from finetune.data.streaming.remote_file import HubFile, LocalFile
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import DataError, nearest
from finetune.text import counted

__all__ = ["Tables", "read_hub", "read_parquet"]

# Above this the files are not held in memory: `datasets` turns them into memory-mapped Arrow once.
_MEMORY_BYTES = 2 * 2**30
_BATCH_ROWS = 4096  # keeps a chunk of nested binary far below Arrow's 2 GiB
_Found = TypeVar("_Found")


@dataclass
class Tables:
    """What was found in tables, by split."""

    items: dict[str, RowItems] | dict[str, ShardItems]
    labels: dict[str, np.ndarray]
    class_names: list[str]
    description: str


def read_parquet(
    path: str, image_column: str | None, label_column: str | None, *, streaming: bool = False
) -> Tables:
    """Read a parquet file, a glob of them, or a folder in the hub's layout.

    Args:
        path: what follows `parquet:`.
        image_column, label_column: None to find them.
        streaming: leave the images in their files, whatever their size.
    Raises: DataError for anything missing or damaged.
    """
    files = _split_files(_find_files(path), path)
    for file in (file for group in files.values() for file in group):
        _refuse_other(file)
    if streaming:
        local = {split: [LocalFile.at(file) for file in group] for split, group in files.items()}
        return _streamed(local, image_column, label_column)
    if sum(file.stat().st_size for group in files.values() for file in group) > _MEMORY_BYTES:
        # paths in a table start from its folder, which `datasets` does not keep
        parents = {file.parent for group in files.values() for file in group}
        folders = tuple(parents) if len(parents) == 1 else ()
        loaded = _memory_mapped(files)
        return _from_datasets(loaded, f"parquet:{path}", image_column, label_column, folders)
    schemas = {split: _schema(group[0]) for split, group in files.items()}
    image, label = find_columns(next(iter(schemas.values())), image_column, label_column)
    labels = {split: _label_column(group, label) for split, group in files.items()}
    names = {split: declared_names(features_of(schema), label) for split, schema in schemas.items()}
    numbered, class_names = number_labels(labels, names)
    items = {
        split: RowItems(functools.partial(_load_files, tuple(files[split]), image))
        for split in numbered
    }
    number = sum(len(group) for group in files.values())
    description = f"{counted(number, 'parquet file')}, columns {image!r} and {label!r}"
    return Tables(items, numbered, class_names, description)


def _find_files(path: str) -> list[Path]:
    """The parquet files that a path means, sorted."""
    given = Path(path).expanduser().absolute()
    if given.is_file():
        return [given]
    if given.is_dir():
        # the hub's layouts: *.parquet, data/*.parquet, CONFIG/*.parquet, CONFIG/SPLIT/*.parquet
        parents = {file.parent for file in given.glob("*.parquet")}
        parents = parents or {file.parent for file in given.glob("*/*.parquet")}
        parents = parents or {file.parent for file in given.glob("*/*/*.parquet")}
        if len(parents) > 1 and not all(parent.name in SPLITS for parent in parents):
            names = ", ".join(sorted(str(parent) for parent in parents))
            raise DataError(f"parquet:{path}: several data sets; name one of: {names}")
        files = sorted(file for parent in parents for file in parent.glob("*.parquet"))
    else:
        files = sorted(Path(file) for file in glob.glob(str(given), recursive=True))
        files = [file for file in files if file.is_file()]
        if not files and not glob.has_magic(path):
            siblings = [p.name for p in given.parent.iterdir()] if given.parent.is_dir() else []
            hint = nearest(given.name, siblings) or "; check it"
            raise DataError(f"parquet:{path}: no such path{hint}")
    if not files:
        raise DataError(f"parquet:{path}: no parquet file there; name one, or a folder of some")
    return files


def _split_files(files: Sequence[Path], path: str) -> dict[str, list[Path]]:
    """Group files by the split that their name begins with, or that their folder is called."""
    found: dict[str, list[Path]] = {}
    rest = []
    for file in files:
        words = [re.split(r"[-_.]", file.name)[0].lower(), file.parent.name.lower()]
        split = next((SPLITS[word] for word in words if word in SPLITS), None)
        if split:
            found.setdefault(split, []).append(file)
        else:
            rest.append(file)
    if not found:
        return {"train": rest}
    if rest:
        names = ", ".join(file.name for file in rest[:3])
        notice(f"parquet:{path}: {counted(len(rest), 'file')} of no known split left out: {names}")
    return in_order(found)


def _refuse_other(file: Path) -> None:
    """Refuse what is found under the name of a parquet file: a pointer, a page, nothing."""
    try:
        with open_data(file) as stream:
            head = stream.read(256).lstrip().lower()
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    if head.startswith(b"version https://git-lfs"):
        raise DataError(f"{file}: a Git LFS pointer, not the file itself; run `git lfs pull`")
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise DataError(
            f"{file}: a web page, not a parquet file; download the file itself (on the hub: "
            "/resolve/ in the address, not /blob/)"
        )
    if not head:
        raise DataError(f"{file}: zero bytes, not a parquet file; download it again")


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a parquet file, or a damaged one ({error}); download it again"
        ) from None


def _label_column(files: Iterable[Path], column: str) -> pa.ChunkedArray:
    try:
        tables = [pq.ParquetFile(file).read(columns=[column]) for file in files]
        columns = [table.column(column) for table in tables]
        return pa.chunked_array([c for part in columns for c in part.chunks], columns[0].type)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(f"{column}: this column cannot be read ({error})") from None


def _load_files(files: Iterable[Path], column: str) -> list[Chunk]:
    chunks = []
    for file in files:
        row = 0
        try:
            for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=[column]):
                chunks.append(chunk_of(file.name, (file.parent,), row, batch.column(column)))
                row += batch.num_rows
        except KeyError:
            raise DataError(
                f"{file}: has no column {column!r}, which others have; write all alike"
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: damaged parquet file ({error}); download it again") from None
    return chunks


def read_hub(
    text: str, image_column: str | None, label_column: str | None, *, streaming: bool = False
) -> Tables:
    """Load a data set of the hub, from the cache when it is there.

    Args:
        text: `owner/name[@revision][:config]`.
        image_column, label_column: None to find them.
        streaming: leave the images on the hub.
    Raises: DataError: no such data set, revision or configuration; HubError: no access, or no hub.
    """
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([^:]+))?(?::(.+))?", text)
    if not match:
        raise DataError(f"hub:{text}: expected hub:owner/name[@revision][:config]")
    name, revision, config = match.groups()
    if Path(name).is_dir():  # `datasets` would read it instead of the hub
        raise DataError(f"hub:{text}: there is a folder {name!r} here; use parquet: or folder:")
    commit: str | None
    if streaming:
        shards = find_shards(f"hub:{text}", name, config, revision)
        files, commit = _known_splits(shards.files, f"hub:{text}"), shards.commit
        tables = _streamed(files, image_column, label_column, shards.schema)
    else:
        loaded, commit = load_hub(f"hub:{text}", name, config, revision)
        tables = _from_datasets(loaded, f"hub:{text}", image_column, label_column, _caches())
    tables.description += f", revision {commit or revision or 'unknown'}"
    return tables


def _caches() -> tuple[Path, ...]:
    """Where the library unpacks and downloads to: an image folder's rows are paths below it."""
    from datasets import config
    from huggingface_hub import constants

    caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return tuple(Path(cache).absolute() for cache in caches)


def _memory_mapped(files: dict[str, list[Path]]) -> Any:
    import datasets

    named = {split: [str(file) for file in group] for split, group in files.items()}
    return datasets.load_dataset("parquet", data_files=named)


def _from_datasets(
    loaded: Any,
    title: str,
    image_column: str | None,
    label_column: str | None,
    folders: tuple[Path, ...],
) -> Tables:
    """Take the splits that we know out of a `datasets.DatasetDict`; for folders see Chunk."""
    found = _known_splits(loaded, title)
    schemas = {split: data.features.arrow_schema for split, data in found.items()}
    image, label = find_columns(next(iter(schemas.values())), image_column, label_column)
    names = {split: declared_names(features_of(schema), label) for split, schema in schemas.items()}
    labels = {split: data.data.column(label) for split, data in found.items()}
    numbered, class_names = number_labels(labels, names)
    items = {
        split: RowItems(functools.partial(_load_dataset, data, image, f"{title} {split}", folders))
        for split, data in found.items()
        if split in numbered
    }
    return Tables(items, numbered, class_names, f"columns {image!r} and {label!r}")


def _known_splits(there: Mapping[str, _Found], title: str) -> dict[str, _Found]:
    """The splits that we know, by our names for them."""
    found = in_order({SPLITS[name]: data for name, data in there.items() if name in SPLITS})
    if not found and len(there) == 1:
        found = {"train": next(iter(there.values()))}
    if not found:
        raise DataError(f"{title}: no split is called train, validation or test: {list(there)}")
    others = [name for name in there if name not in SPLITS]
    if others and len(there) > 1:
        notice(f"{title}: splits of unknown use are left out: {', '.join(others)}")
    return found


def _streamed(
    files: Mapping[str, Sequence[LocalFile | HubFile]],
    image_column: str | None,
    named_label: str | None,
    declared: pa.Schema | None = None,
) -> Tables:
    """Tables of which only the labels are read; `declared` is what a data set's card says."""
    shards = {split: open_shards(group) for split, group in files.items()}
    schemas = {split: declared or group[0].schema for split, group in shards.items()}
    image, label = find_columns(next(iter(schemas.values())), image_column, named_label)
    labels = {split: label_column(group, label, image) for split, group in shards.items()}
    names = {split: declared_names(features_of(schema), label) for split, schema in schemas.items()}
    numbered, class_names = number_labels(labels, names)
    items = {split: ShardItems(shards[split], image) for split in numbered}
    groups = counted(sum(len(one.starts) - 1 for one in items.values()), "row group")
    number = counted(sum(map(len, shards.values())), "parquet file")
    description = f"{number}, columns {image!r} and {label!r}, streamed in {groups}"
    return Tables(items, numbered, class_names, description)


def _load_dataset(dataset: Any, column: str, title: str, folders: tuple[Path, ...]) -> list[Chunk]:
    # straight from its memory-mapped Arrow table: `datasets` would decode, and turn by EXIF, itself
    chunks = []
    row = 0
    for array in dataset.data.column(column).chunks:
        chunks.append(chunk_of(title, folders, row, array))
        row += len(array)
    return chunks
