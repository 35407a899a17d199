"""Read parquet files and Hugging Face Hub datasets: encoded images and class indices by split."""

from __future__ import annotations

import bisect
import functools
import glob
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from finetune.data.columns import (
    OTHER_SPLIT_NAMES,
    ColumnNames,
    declared_class_names,
    find_columns,
)
from finetune.data.decode import open_dataset_file
from finetune.data.encoded_images import EncodedImages, TableChunk, TableImages
from finetune.data.hub_dataset import list_parquet_files, load_hub_dataset
from finetune.data.labels import check_distinct_class_names, encode_labels
from finetune.data.multilabel import encode_indicator_columns, encode_label_lists
from finetune.data.split_names import SPLIT_ALIASES, group_by_split, sort_splits
from finetune.data.stat_signatures import stat_signatures
from finetune.data.streaming.parquet_shards import (
    ParquetShard,
    make_chunk,
    open_shards,
    read_label_column,
)
from finetune.data.streaming.shard_file import LocalFile, RemoteFile
from finetune.data.streaming.streamed_images import StreamedImages
from finetune.data.thread_pool import NUM_REQUEST_THREADS, thread_map
from finetune.errors import DataError
from finetune.formatting import pluralize
from finetune.log import warn_once

__all__ = ["MAX_IN_MEMORY_BYTES", "LabeledSplits", "read_hub", "read_parquet"]

# Larger datasets do not stay in memory: `datasets` writes their rows to its cache once and
# memory-maps them. For smaller ones, importing `datasets` would take longer than reading the rows.
MAX_IN_MEMORY_BYTES = 2**28
_BATCH_ROWS = 4096  # keeps a chunk of nested binary far below Arrow's limit of 2 GiB
_Data = TypeVar("_Data")
_File = TypeVar("_File")


@dataclass
class LabeledSplits:
    """Images and labels of a source, by split."""

    images: Mapping[str, EncodedImages]
    labels: dict[str, np.ndarray]
    class_names: list[str]
    description: str
    indicator_columns: tuple[str, ...] = ()  # label columns of 0 and 1
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)  # see `Split.groups`


_SHARD = re.compile(
    r"(.+)-(\d{5})-of-(\d{5})\b.*\.parquet", re.IGNORECASE
)  # the Hub's names of files


def read_parquet(
    path: str, columns: ColumnNames, *, streaming: bool = False, multilabel: bool = False
) -> LabeledSplits:
    """Read a parquet file, a glob of them, or a folder in the Hub's layout.

    Args:
        path: the source string after `parquet:`.
        columns: the columns that the user has named.
        streaming: stream the images from the files, even if they would fit in memory.
        multilabel: allow any number of labels per image.
    Raises: DataError for missing or damaged files.
    """
    files = group_by_split(_find_parquet_files(path), Path, f"parquet:{path}")
    for file in (file for group in files.values() for file in group):
        _check_is_parquet(file)
    opened = {
        split: [LocalFile.from_path(file) for file in group] for split, group in files.items()
    }
    shards = {split: open_shards(group) for split, group in opened.items()}
    if streaming:
        return _build_streamed(shards, columns, multilabel=multilabel)
    num_bytes = sum(file.stat().st_size for group in files.values() for file in group)
    load = _load_chunks if num_bytes <= MAX_IN_MEMORY_BYTES else _load_memory_mapped_chunks
    splits = _build_splits(
        {split: group[0].schema for split, group in shards.items()},
        columns,
        lambda split, label, image: read_label_column(shards[split], label, image),
        lambda split, image: TableImages(
            functools.partial(load, tuple(files[split]), image), files[split], image
        ),
        multilabel=multilabel,
    )
    for local in (local for group in opened.values() for local in group):
        local.read(0, 1)  # raises if the file has changed since its labels were read
    num_files = sum(len(group) for group in files.values())
    splits.description = f"{pluralize(num_files, 'parquet file')}, {splits.description}"
    return splits


def _build_splits(
    schemas: Mapping[str, pa.Schema],
    columns: ColumnNames,
    read_labels: Callable[[str, str, str], pa.ChunkedArray],
    make_images: Callable[[str, str], EncodedImages],
    *,
    multilabel: bool,
) -> LabeledSplits:
    """Find the columns, encode the labels and build the images of each split.

    Args:
        columns: the columns that the user has named.
        read_labels: function that reads a column, given split, column and image column.
        make_images: function that builds the images, given split and image column.
        multilabel: allow any number of labels per image.
    """
    schema = next(iter(schemas.values()))
    image_column, label_columns = find_columns(schema, columns, multilabel=multilabel)
    unused = {*schema.names} - {image_column, *label_columns, columns.group}
    similar = sorted(name for name in unused if name.lower() in {"split", *OTHER_SPLIT_NAMES})
    if similar and len(schemas) == 1:
        warn_once(
            f"the column {similar[0]!r} is not used; if it says which split an image is in, write "
            "a file for each split"
        )
    indicator_columns = tuple(label_columns) if len(label_columns) > 1 else ()
    if indicator_columns:
        encoded = encode_indicator_columns(
            {
                split: {name: read_labels(split, name, image_column) for name in label_columns}
                for split in schemas
            }
        )
        check_distinct_class_names(label_columns, "the label columns")
        class_names = label_columns
    else:
        labels = {split: read_labels(split, label_columns[0], image_column) for split in schemas}
        declared = {
            split: declared_class_names(schema, label_columns[0])
            for split, schema in schemas.items()
        }
        encoded, class_names = (encode_label_lists if multilabel else encode_labels)(
            labels, declared
        )
    images = {split: make_images(split, image_column) for split in encoded}
    groups = {}
    if columns.group is not None:
        for split in encoded:
            values = read_labels(split, columns.group, image_column).to_pylist()
            # NaN is not equal to itself
            names = ["" if value is None or value != value else str(value) for value in values]
            groups[split] = np.array(names, dtype=object)
    label_text = (
        f"{len(label_columns)} columns of 0 and 1" if indicator_columns else repr(label_columns[0])
    )
    return LabeledSplits(
        images,
        encoded,
        class_names,
        f"columns {image_column!r} and {label_text}",
        indicator_columns,
        groups,
    )


def _find_parquet_files(path: str) -> list[Path]:
    """List the parquet files of a path, sorted."""
    root = Path(path).expanduser().absolute()
    if root.is_file():
        return [root]
    if root.is_dir():
        # the Hub's layouts: *.parquet, data/*.parquet, CONFIG/*.parquet, CONFIG/SPLIT/*.parquet
        for level in ("*", "*/*", "*/*/*"):
            found = [file for file in root.glob(level) if file.suffix.lower() == ".parquet"]
            if parents := {file.parent for file in found}:
                break
        if len(parents) > 1 and not all(parent.name in SPLIT_ALIASES for parent in parents):
            names = ", ".join(sorted(str(parent) for parent in parents))
            raise DataError(
                f"parquet:{path}: contains several datasets; choose one of: {names}",
                code="data.ambiguous",
            )
        files = sorted(found)
        _check_all_shards(path, files)
    else:
        files = sorted(Path(file) for file in glob.glob(str(root), recursive=True))
        files = [file for file in files if file.is_file()]
    if not files:
        message = f"parquet:{path}: no parquet files; name a file, or a folder of parquet files"
        raise DataError(message, code="data.empty")
    return files


def _check_all_shards(path: str, files: Iterable[Path]) -> None:
    """Raise DataError if a file NAME-00001-of-00003 is missing, or if there are two of them."""
    numbers: dict[tuple[Path, str], list[tuple[int, int]]] = {}
    for file in files:
        if match := _SHARD.match(file.name):
            shards = numbers.setdefault((file.parent, match[1]), [])
            shards.append((int(match[2]), int(match[3])))
    for (folder, name), shards in numbers.items():
        total = shards[0][1]
        if sorted(shards) != [(number, total) for number in range(total)]:
            raise DataError(
                f"parquet:{path}: {folder / name} has {len(shards)} files of {total}, or files of "
                "several versions; download all of one version, and remove the others",
                code="data.not_found",
            )


def _check_is_parquet(file: Path) -> None:
    """Raise a DataError for a Git LFS pointer, a web page or an empty file."""
    try:
        with open_dataset_file(file) as stream:
            head = stream.read(256).lstrip().lower()
    except DataError as error:
        raise DataError(f"{file}: {error}", code=error.code) from None
    if head.startswith(b"version https://git-lfs"):
        message = f"{file}: a Git LFS pointer, not the file itself; run `git lfs pull`"
        raise DataError(message, code="data.wrong_format")
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise DataError(
            f"{file}: a web page, not a parquet file; download the file itself (on the hub: "
            "/resolve/ in the URL, not /blob/)",
            code="data.wrong_format",
        )
    if not head:
        message = f"{file}: empty file (zero bytes); download it again"
        raise DataError(message, code="data.damaged")


def _load_chunks(files: Iterable[Path], column: str) -> list[TableChunk]:
    chunks = []
    for file in files:
        row = 0
        try:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=[column]):
                chunks.append(make_chunk(file.name, (file.parent,), row, batch.column(column)))
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            message = f"{file}: damaged parquet file ({error}); download it again"
            raise DataError(message, code="data.damaged") from None
    return chunks


def read_hub(
    spec: str, columns: ColumnNames, *, streaming: bool = False, multilabel: bool = False
) -> LabeledSplits:
    """Load a dataset from the Hub, or from the cache if the Hub does not respond.

    Args:
        spec: `owner/name[@revision][:config]`.
        columns: the columns that the user has named.
        streaming: stream the images from the Hub; needs a connection.
        multilabel: allow any number of labels per image.
    Raises: DataError if the dataset, revision or configuration does not exist; HubError if the Hub
        denies access, or if it does not respond and nothing is cached.
    """
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([^:]+))?(?::(.+))?", spec)
    if not match:
        raise DataError(
            f"hub:{spec}: expected hub:owner/name[@revision][:config]", code="data.wrong_source"
        )
    name, revision, config = match.groups()
    if Path(name).is_dir():  # `datasets` would read it instead of the Hub
        raise DataError(
            f"hub:{spec}: a local folder is also named {name!r}; use parquet: or folder: to read "
            "it, or start in another folder to read the dataset on the hub",
            code="data.ambiguous",
        )
    commit: str | None
    if streaming:
        dataset_files = list_parquet_files(f"hub:{spec}", name, config, revision)
        paths = _select_known_splits(dataset_files.paths, f"hub:{spec}")
        commit = dataset_files.commit
        open_file = functools.partial(RemoteFile.open_on_hub, f"hub:{spec}", name, commit)
        shards = {
            split: open_shards([*thread_map(open_file, group, NUM_REQUEST_THREADS)])
            for split, group in paths.items()
        }
        splits = _build_streamed(shards, columns, dataset_files.schema, multilabel=multilabel)
    else:
        dataset_dict, commit = load_hub_dataset(f"hub:{spec}", name, config, revision)
        splits = _splits_from_datasets(
            dataset_dict, f"hub:{spec}", columns, _datasets_cache_folders(), multilabel=multilabel
        )
    splits.description += f", revision {commit or revision or 'unknown'}"
    return splits


def _datasets_cache_folders() -> tuple[Path, ...]:
    """List the cache folders whose image files a Hub dataset may reference by path."""
    from datasets import config
    from huggingface_hub import constants

    caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return tuple(Path(cache).absolute() for cache in caches)


def _load_memory_mapped_chunks(files: Sequence[Path], column: str) -> list[TableChunk]:
    """Load the same chunks as `_load_chunks`, but memory-mapped from the cache of `datasets`."""
    import datasets

    # `datasets` identifies files by name and mtime only: a replaced file could yield old rows
    signature = hashlib.sha256(stat_signatures(files).tobytes()).hexdigest()[:16]
    try:
        loaded = datasets.load_dataset(
            "parquet",
            name=f"finetune-{signature}",
            data_files=[str(file) for file in files],
            columns=[column],
            split="train",
        )
        pa.default_memory_pool().release_unused()  # memory that writing the files used
        lengths = [pq.read_metadata(file).num_rows for file in files]
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        cache_folder = datasets.config.HF_DATASETS_CACHE
        raise DataError(
            f"{files[0].parent}: the rows cannot be written to {cache_folder} ({cause}); download "
            "damaged files again, set HF_HOME to a disk with more space, or set "
            "data.streaming=true",
            code="data.unreadable",
        ) from None
    chunks, ends = [], [*itertools.accumulate(lengths)]
    first = 0
    for array in loaded.data.column(column).chunks:
        last = first + len(array)
        edges = [first, *(end for end in ends if first < end < last), last]
        for start, end in itertools.pairwise(edges):  # a chunk may hold rows of two files
            file_index = bisect.bisect_right(ends, start)
            row = start - ends[file_index] + lengths[file_index]
            part = array.slice(start - first, end - start)
            chunks.append(
                make_chunk(files[file_index].name, (files[file_index].parent,), row, part)
            )
        first = last
    return chunks


def _splits_from_datasets(
    dataset_dict: Any,
    source: str,
    columns: ColumnNames,
    folders: tuple[Path, ...],
    *,
    multilabel: bool = False,
) -> LabeledSplits:
    """Build splits from a `datasets.DatasetDict`.

    Args:
        folders: allowed folders of image files, see `TableChunk`.
    """
    splits = _select_known_splits(dataset_dict, source)

    def make_items(split: str, image: str) -> TableImages:
        args = splits[split], image, f"{source} {split}", folders
        files = [entry["filename"] for entry in splits[split].cache_files]
        return TableImages(functools.partial(_chunks_of_dataset, *args), files, image)

    return _build_splits(
        {split: data.features.arrow_schema for split, data in splits.items()},
        columns,
        lambda split, label, _: splits[split].data.column(label),
        make_items,
        multilabel=multilabel,
    )


def _select_known_splits(splits: Mapping[str, _Data], source: str) -> dict[str, _Data]:
    """Select train, val and test; if a dataset has only one split, it becomes train."""
    chosen: dict[str, str] = {}
    for name in sorted(
        splits, key=lambda name: SPLIT_ALIASES.get(name) != name
    ):  # prefer train to training
        if name in SPLIT_ALIASES:
            chosen.setdefault(SPLIT_ALIASES[name], name)
    known = sort_splits({split: splits[name] for split, name in chosen.items()})
    if not known and len(splits) == 1:
        known = {"train": next(iter(splits.values()))}
    if not known:
        message = (
            f"{source}: no split named train, validation or test, only {list(splits)}; rename one"
        )
        raise DataError(message, code="data.no_split")
    others = [name for name in splits if name not in chosen.values()]
    if others and len(splits) > 1:
        warn_once(f"{source}: splits with unknown names are ignored: {', '.join(others)}")
    return known


def _build_streamed(
    shards: Mapping[str, Sequence[ParquetShard]],
    columns: ColumnNames,
    declared_schema: pa.Schema | None = None,
    *,
    multilabel: bool = False,
) -> LabeledSplits:
    """Read the labels of parquet shards and stream their images.

    Args:
        declared_schema: schema declared in the dataset card; None if it declares none.
    """
    splits = _build_splits(
        {split: declared_schema or group[0].schema for split, group in shards.items()},
        columns,
        lambda split, label, image: read_label_column(shards[split], label, image),
        lambda split, image: StreamedImages(shards[split], image),
        multilabel=multilabel,
    )
    num_groups = sum(len(one.group_lengths()) for split in splits.images for one in shards[split])
    files_text = pluralize(sum(map(len, shards.values())), "parquet file")
    groups_text = pluralize(num_groups, "row group")
    splits.description = f"{files_text}, {splits.description}, streamed in {groups_text}"
    return splits


def _chunks_of_dataset(
    dataset: Any, column: str, title: str, folders: tuple[Path, ...]
) -> list[TableChunk]:
    # directly from the memory-mapped Arrow table: `datasets` would decode and rotate the images
    chunks = []
    row = 0
    for array in dataset.data.column(column).chunks:
        chunks.append(make_chunk(title, folders, row, array))
        row += len(array)
    return chunks
