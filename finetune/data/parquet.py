"""Parquet files and hub data sets: the rows of a table -> encoded images and numbered labels."""

from __future__ import annotations

import bisect
import functools
import glob
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from finetune.data.columns import (
    SPLITS,
    declared_names,
    find_columns,
    in_order,
    number_labels,
    refuse_alike,
)
from finetune.data.decode import open_data
from finetune.data.fingerprint import states_of
from finetune.data.hub import load_hub
from finetune.data.items import Chunk, Items, RowItems
from finetune.data.label_sets import number_columns, number_sets
from finetune.data.notices import notice
from finetune.data.streaming.hub_index import find_shards
from finetune.data.streaming.parquet_shards import chunk_of, label_column, open_shards
from finetune.data.streaming.remote_file import HubFile, LocalFile
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import DataError
from finetune.text import counted

__all__ = ["Columns", "Tables", "group_by_split", "read_hub", "read_parquet"]

# Larger sets are not held in memory: `datasets` writes their rows to its cache once, as Arrow files
# that are memory-mapped. Below, importing it would take longer than reading the rows.
_MEMORY_BYTES = 2**28
_BATCH_ROWS = 4096  # keeps a chunk of nested binary far below Arrow's 2 GiB
_Data = TypeVar("_Data")
_File = TypeVar("_File")
# of images and of labels, as the user names them; several of labels are columns of 0 and 1
Columns = tuple[str | None, str | tuple[str, ...] | None]


@dataclass
class Tables:
    """Images and labels of tables, by split."""

    items: Mapping[str, Items]
    labels: dict[str, np.ndarray]
    class_names: list[str]
    description: str
    columns: tuple[str, ...] = ()  # of 0 and 1


def read_parquet(
    path: str, columns: Columns, *, streaming: bool = False, multilabel: bool = False
) -> Tables:
    """Read a parquet file, a glob of them, or a folder in the hub's layout.

    Args:
        path: what follows `parquet:`.
        columns: of images and labels; None to find them.
        streaming: leave the images in their files, whatever their size.
        multilabel: an image has any number of labels.
    Raises: DataError for anything missing or damaged.
    """
    files = group_by_split(_find_files(path), Path, f"parquet:{path}")
    for file in (file for group in files.values() for file in group):
        _refuse_other(file)
    if streaming:
        local = {split: [LocalFile.at(file) for file in group] for split, group in files.items()}
        return _streamed(local, columns, multilabel=multilabel)
    num_bytes = sum(file.stat().st_size for group in files.values() for file in group)
    load = _load_files if num_bytes <= _MEMORY_BYTES else _load_mapped
    tables = _tables(
        {split: _schema(group[0]) for split, group in files.items()},
        columns,
        lambda split, label, _: _label_column(files[split], label),
        lambda split, image: RowItems(
            functools.partial(load, tuple(files[split]), image), files[split], image
        ),
        multilabel=multilabel,
    )
    number = sum(len(group) for group in files.values())
    tables.description = f"{counted(number, 'parquet file')}, {tables.description}"
    return tables


def _tables(
    schemas: Mapping[str, pa.Schema],
    columns: Columns,
    read_labels: Callable[[str, str, str], pa.ChunkedArray],
    make_items: Callable[[str, str], Items],
    *,
    multilabel: bool,
) -> Tables:
    """Find the columns, read and number the labels, and make the items of each split.

    Args:
        columns: of images and labels; None to find them.
        read_labels: from split, label column and image column to the labels.
        make_items: from split and image column to the images.
        multilabel: an image has any number of labels.
    """
    schema = next(iter(schemas.values()))
    image, names = find_columns(schema, *columns, multilabel=multilabel)
    flags = tuple(names) if len(names) > 1 else ()
    if flags:
        numbered = number_columns(
            {split: {name: read_labels(split, name, image) for name in names} for split in schemas}
        )
        refuse_alike(names, "the label columns")
        class_names = names
    else:
        labels = {split: read_labels(split, names[0], image) for split in schemas}
        declared = {split: declared_names(schema, names[0]) for split, schema in schemas.items()}
        numbered, class_names = (number_sets if multilabel else number_labels)(labels, declared)
    items = {split: make_items(split, image) for split in numbered}
    shown = f"{len(names)} columns of 0 and 1" if flags else repr(names[0])
    return Tables(items, numbered, class_names, f"columns {image!r} and {shown}", flags)


def _find_files(path: str) -> list[Path]:
    """List the parquet files that a path means, sorted."""
    root = Path(path).expanduser().absolute()
    if root.is_file():
        return [root]
    if root.is_dir():
        # the hub's layouts: *.parquet, data/*.parquet, CONFIG/*.parquet, CONFIG/SPLIT/*.parquet
        for pattern in ("*.parquet", "*/*.parquet", "*/*/*.parquet"):
            if parents := {file.parent for file in root.glob(pattern)}:
                break
        if len(parents) > 1 and not all(parent.name in SPLITS for parent in parents):
            names = ", ".join(sorted(str(parent) for parent in parents))
            raise DataError(
                f"parquet:{path}: several data sets; name one of: {names}", code="data.ambiguous"
            )
        files = sorted(file for parent in parents for file in parent.glob("*.parquet"))
    else:
        files = sorted(Path(file) for file in glob.glob(str(root), recursive=True))
        files = [file for file in files if file.is_file()]
    if not files:
        message = f"parquet:{path}: no parquet file there; name one, or a folder of some"
        raise DataError(message, code="data.empty")
    return files


def group_by_split(
    files: Sequence[_File],
    path_of: Callable[[_File], PurePath],
    where: str,
    *,
    whole_name: bool = False,
) -> dict[str, list[_File]]:
    """Group files by the split that begins their name, or is the name of their folder.

    Args:
        where: the source, for notices.
        whole_name: take a split from any word of a name, not the first alone.
    """
    groups: dict[str, list[_File]] = {}
    rest = []
    for file in files:
        path = path_of(file)
        words = re.split(r"[-_.]", path.name.lower())[: None if whole_name else 1]
        words.append(path.parent.name.lower())
        split = next((SPLITS[word] for word in words if word in SPLITS), None)
        if split:
            groups.setdefault(split, []).append(file)
        else:
            rest.append(file)
    if not groups:
        return {"train": rest}
    if rest:
        names = ", ".join(path_of(file).name for file in rest[:3])
        notice(f"{where}: {counted(len(rest), 'file')} of no known split left out: {names}")
    return in_order(groups)


def _refuse_other(file: Path) -> None:
    """Refuse a Git LFS pointer, a web page or an empty file under the name of a parquet file."""
    try:
        with open_data(file) as stream:
            head = stream.read(256).lstrip().lower()
    except DataError as error:
        raise DataError(f"{file}: {error}", code=error.code) from None
    if head.startswith(b"version https://git-lfs"):
        message = f"{file}: a Git LFS pointer, not the file itself; run `git lfs pull`"
        raise DataError(message, code="data.wrong_format")
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise DataError(
            f"{file}: a web page, not a parquet file; download the file itself (on the hub: "
            "/resolve/ in the address, not /blob/)",
            code="data.wrong_format",
        )
    if not head:
        message = f"{file}: zero bytes, not a parquet file; download it again"
        raise DataError(message, code="data.damaged")


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a parquet file, or a damaged one ({error}); download it again",
            code="data.damaged",
        ) from None


def _label_column(files: Iterable[Path], column: str) -> pa.ChunkedArray:
    try:
        tables = [pq.ParquetFile(file).read(columns=[column]) for file in files]
        columns = [table.column(column) for table in tables]
        return pa.chunked_array([c for part in columns for c in part.chunks], columns[0].type)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        message = f"{column}: this column cannot be read ({error})"
        raise DataError(message, code="data.damaged") from None


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
                f"{file}: has no column {column!r}, which others have; write all alike",
                code="data.no_column",
            ) from None
        except (pa.ArrowException, OSError) as error:
            message = f"{file}: damaged parquet file ({error}); download it again"
            raise DataError(message, code="data.damaged") from None
    return chunks


def read_hub(
    text: str, columns: Columns, *, streaming: bool = False, multilabel: bool = False
) -> Tables:
    """Load a data set of the hub, from the cache when it is there.

    Args:
        text: `owner/name[@revision][:config]`.
        columns: of images and labels; None to find them.
        streaming: leave the images on the hub.
        multilabel: an image has any number of labels.
    Raises: DataError: no such data set, revision or configuration; HubError: no access, or no hub.
    """
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([^:]+))?(?::(.+))?", text)
    if not match:
        raise DataError(
            f"hub:{text}: expected hub:owner/name[@revision][:config]", code="data.wrong_source"
        )
    name, revision, config = match.groups()
    if Path(name).is_dir():  # `datasets` would read it instead of the hub
        message = f"hub:{text}: there is a folder {name!r} here; use parquet: or folder:"
        raise DataError(message, code="data.ambiguous")
    commit: str | None
    if streaming:
        shards = find_shards(f"hub:{text}", name, config, revision)
        files, commit = _known_splits(shards.files, f"hub:{text}"), shards.commit
        tables = _streamed(files, columns, shards.schema, multilabel=multilabel)
    else:
        loaded, commit = load_hub(f"hub:{text}", name, config, revision)
        tables = _from_datasets(loaded, f"hub:{text}", columns, _caches(), multilabel=multilabel)
    tables.description += f", revision {commit or revision or 'unknown'}"
    return tables


def _caches() -> tuple[Path, ...]:
    """List the folders in which `datasets` keeps the files that rows may name."""
    from datasets import config
    from huggingface_hub import constants

    caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return tuple(Path(cache).absolute() for cache in caches)


def _load_mapped(files: Sequence[Path], column: str) -> list[Chunk]:
    """Return the same chunks as `_load_files`, memory-mapped from the cache of `datasets`."""
    import datasets

    # `datasets` goes by name and mtime alone: another file in the place would give the old rows
    state = hashlib.sha256(states_of(files).tobytes()).hexdigest()[:16]
    try:
        loaded = datasets.load_dataset(
            "parquet",
            name=f"finetune-{state}",
            data_files=[str(file) for file in files],
            columns=[column],
            split="train",
        )
        pa.default_memory_pool().release_unused()  # of writing the files
        lengths = [pq.read_metadata(file).num_rows for file in files]
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        place = datasets.config.HF_DATASETS_CACHE
        raise DataError(
            f"{files[0].parent}: the rows cannot be laid out in {place} ({cause}); download "
            "damaged files again, set HF_HOME to a disk with room, or set data.streaming=true",
            code="data.unreadable",
        ) from None
    chunks, ends = [], [*itertools.accumulate(lengths)]
    first = 0
    for array in loaded.data.column(column).chunks:
        last = first + len(array)
        edges = [first, *(end for end in ends if first < end < last), last]
        for start, end in itertools.pairwise(edges):  # a chunk may hold rows of two files
            number = bisect.bisect_right(ends, start)
            row = start - ends[number] + lengths[number]
            part = array.slice(start - first, end - start)
            chunks.append(chunk_of(files[number].name, (files[number].parent,), row, part))
        first = last
    return chunks


def _from_datasets(
    loaded: Any,
    title: str,
    columns: Columns,
    folders: tuple[Path, ...],
    *,
    multilabel: bool = False,
) -> Tables:
    """Take the known splits out of a `datasets.DatasetDict`; for `folders` see `Chunk`."""
    splits = _known_splits(loaded, title)

    def make_items(split: str, image: str) -> RowItems:
        args = splits[split], image, f"{title} {split}", folders
        files = [entry["filename"] for entry in splits[split].cache_files]
        return RowItems(functools.partial(_load_dataset, *args), files, image)

    return _tables(
        {split: data.features.arrow_schema for split, data in splits.items()},
        columns,
        lambda split, label, _: splits[split].data.column(label),
        make_items,
        multilabel=multilabel,
    )


def _known_splits(splits: Mapping[str, _Data], title: str) -> dict[str, _Data]:
    """Return the splits train, val and test; the only split of a set is train."""
    chosen: dict[str, str] = {}
    for name in sorted(splits, key=lambda name: SPLITS.get(name) != name):  # train before training
        if name in SPLITS:
            chosen.setdefault(SPLITS[name], name)
    known = in_order({split: splits[name] for split, name in chosen.items()})
    if not known and len(splits) == 1:
        known = {"train": next(iter(splits.values()))}
    if not known:
        message = f"{title}: no split is called train, validation or test: {list(splits)}"
        raise DataError(message, code="data.no_split")
    others = [name for name in splits if name not in chosen.values()]
    if others and len(splits) > 1:
        notice(f"{title}: splits of unknown use are left out: {', '.join(others)}")
    return known


def _streamed(
    files: Mapping[str, Sequence[LocalFile | HubFile]],
    columns: Columns,
    declared: pa.Schema | None = None,
    *,
    multilabel: bool = False,
) -> Tables:
    """Read the labels of tables and leave the images; `declared` is the schema of a set's card."""
    shards = {split: open_shards(group) for split, group in files.items()}
    tables = _tables(
        {split: declared or group[0].schema for split, group in shards.items()},
        columns,
        lambda split, label, image: label_column(shards[split], label, image),
        lambda split, image: ShardItems(shards[split], image),
        multilabel=multilabel,
    )
    num_groups = sum(len(one.lengths()) for split in tables.items for one in shards[split])
    files_text = counted(sum(map(len, shards.values())), "parquet file")
    groups_text = counted(num_groups, "row group")
    tables.description = f"{files_text}, {tables.description}, streamed in {groups_text}"
    return tables


def _load_dataset(dataset: Any, column: str, title: str, folders: tuple[Path, ...]) -> list[Chunk]:
    # straight from its memory-mapped Arrow table: `datasets` would decode images, and turn them
    chunks = []
    row = 0
    for array in dataset.data.column(column).chunks:
        chunks.append(chunk_of(title, folders, row, array))
        row += len(array)
    return chunks
