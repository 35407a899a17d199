"""From a source string to labelled splits of images, which are decoded when they are read.

    hub:owner/name[@revision][:config]    a data set of the hub
    parquet:PATH                          a file, a glob, or a folder in the hub's layout
    folder:PATH                           train/, val/ and test/ with a folder per class in each,
                                          or one folder of class folders (then all is train),
                                          or images with a metadata.csv or labels.csv beside them
    csv:PATH                              a file with a path, a label and, if there is such a
                                          column, a split for each image
    tar:PATTERN                           shards of WebDataset's layout: KEY.jpg with KEY.cls or
                                          KEY.json, in a folder, by {000..099} or *, or at addresses
    embedded:digits                       scikit-learn's 1,797 handwritten digits
    embedded:digit_pairs                  two of them side by side, for several labels an image

`valid` and `validation` are read as val. A source without a test split stays without one: a run on
it reports no test figures. A new kind of source is one function here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finetune.data.columns import SPLITS, in_order, refuse_alike, split_in
from finetune.data.csv_file import Label, labels_file, read_csv
from finetune.data.fingerprint import are_known, fingerprint_by_names, fingerprint_of
from finetune.data.items import ArrayItems, FileItems, Items, Links, tell_ignored, walk_images
from finetune.data.label_sets import label_matrix
from finetune.data.notices import notice
from finetune.data.parquet import Columns, read_hub, read_parquet
from finetune.data.sampling import class_counts
from finetune.data.streaming.row_groups import ShardItems
from finetune.data.tar import read_tar
from finetune.errors import DataError
from finetune.recipe.local import check_source
from finetune.text import counted, printable

__all__ = ["Source", "Split", "open_source"]


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images. Nothing is decoded until it is read.

    Attributes:
        name: train, val or test.
        labels: (N,) int64, indices of the source's class names; or, where an image has any number
            of them, (N, K) uint8, 1 for each of its classes.
        items: where the images are.
        rows: (N,) int64, which of the items belong to this split; None for all of them.
        decode_size: least side in pixels that JPEGs are decoded to, see `decode`; None for theirs.
    """

    name: str
    labels: np.ndarray
    items: Items = field(repr=False)
    rows: np.ndarray | None = field(default=None, repr=False)
    decode_size: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_multilabel(self) -> bool:
        """True if an image has any number of labels."""
        return self.labels.ndim == 2

    def classes_of(self, index: int) -> list[int]:
        """Return the class of an image, or all those that it has."""
        label = self.labels[index]
        return np.flatnonzero(label).tolist() if self.is_multilabel else [int(label)]

    @functools.cached_property
    def _label_words(self) -> np.ndarray:
        """(N,) int64 that stand for the labels in hashes."""
        if not self.is_multilabel:
            return self.labels
        digests = (hashlib.sha256(row.tobytes()).digest()[:8] for row in self.labels)
        return np.frombuffer(b"".join(digests), dtype="<i8")

    def _row(self, index: int) -> int:
        return int(index) if self.rows is None else int(self.rows[index])

    def read(self, index: int, room: np.ndarray | None = None) -> np.ndarray:
        """Decode one image.

        Args:
            room: memory that it may be decoded into, see `decode`.
        Returns: (H, W, 3) uint8 RGB.
        Raises: DataError naming the image.
        """
        return self.items.read(self._row(index), self.decode_size, room)

    def name_of(self, index: int) -> str:
        """Return an image's name: its path in the folder, or file and row."""
        return self.items.name_of(self._row(index))

    def subset(self, indices: np.ndarray) -> Split:
        """Return the split with only these images, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows = chosen if self.rows is None else self.rows[chosen]
        return dataclasses.replace(self, labels=self.labels[chosen], rows=rows)

    @property
    def item_rows(self) -> np.ndarray:
        """The rows of the items that belong to the split, (N,) int64, in order."""
        return np.arange(len(self)) if self.rows is None else self.rows

    @functools.cached_property
    def _hashed(self) -> tuple[str, np.ndarray]:
        return fingerprint_of(self.items, self.item_rows, self._label_words)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every image's encoded bytes and label, in order, see `fingerprint_of`.

        Of streamed images it is over the names of their shards' contents.
        """
        if isinstance(self.items, ShardItems):
            return self.items.fingerprint(self.item_rows, self._label_words)
        return self._hashed[0]

    @property
    def former_fingerprint(self) -> str | None:
        """The fingerprint that earlier versions took of more than 1 GiB; None if it is the same."""
        if isinstance(self.items, ShardItems):
            return None
        return fingerprint_by_names(self.items, self.item_rows, self._label_words)

    @functools.cached_property
    def cache_key(self) -> str:
        """A SHA-256 that is another one as soon as an image may be another one.

        It is the fingerprint, and for shards that are streamed from this machine also their files'
        states. Where a server has no tag for the content it is another one in each process.
        """
        return self._cache_key()

    def _cache_key(self) -> str:
        if not isinstance(self.items, ShardItems):
            return self.fingerprint
        states = self.items.states(self.item_rows)
        nonce = b"" if are_known(states) or not len(states) else os.urandom(16)
        return hashlib.sha256(self.fingerprint.encode() + states.tobytes() + nonce).hexdigest()

    def is_unchanged(self) -> bool:
        """True if the images are still those of the fingerprint; only fresh ones are read again.

        Streamed shards that were written a moment ago, or have no tag, count as changed.
        """
        if isinstance(self.items, ShardItems):
            return self._cache_key() == self.cache_key
        fingerprint, before = self._hashed
        if are_known(before) and np.array_equal(self.items.states(self.item_rows), before):
            return True
        return fingerprint_of(self.items, self.item_rows, self._label_words)[0] == fingerprint


@dataclass(frozen=True, eq=False)
class Source:
    """A data set.

    Attributes:
        name: the source string.
        splits: by name, among train, val and test.
        class_names: in the order of the labels.
        description: where it came from and how it was read, for people.
        columns: of 0 and 1, if it has several; a class without one may be in any image.
    """

    name: str
    splits: dict[str, Split]
    class_names: list[str]
    description: str
    columns: tuple[str, ...] = ()


def open_source(
    source: str,
    *,
    image_column: str | None = None,
    label_column: str | tuple[str, ...] | None = None,
    streaming: bool = False,
    decode_size: int | None = None,
    multilabel: bool = False,
) -> Source:
    """Open a data set without decoding an image.

    Args:
        source: see the head of this file.
        image_column, label_column: columns of hub:, parquet: and csv: sources, suffixes of tar:
            members; None to find them.
        streaming: leave the images of hub:, parquet: and tar: sources where they are.
        decode_size: of the splits.
        multilabel: an image has any number of labels; several label columns hold 0 and 1.
    Returns: the splits that the source has; see split_train for a missing validation split.
    Raises: DataError: no such source, or one that cannot be trained on.
    """
    check_source(source)
    kind, _, rest = source.partition(":")
    if kind in ("folder", "embedded") and (image_column or label_column):
        raise DataError(
            f"data.image_column, data.label_column: {kind}: sources have no columns; remove them",
            code="data.no_column",
        )
    try:
        columns = image_column, label_column
        opened = _open(source, kind, rest, columns, streaming=streaming, multilabel=multilabel)
    except (OSError, ValueError) as error:  # a name that no system takes, a folder of others
        cause = getattr(error, "strerror", None) or error
        message = f"{source[:200]!r}: cannot be read ({cause}); check the path"
        raise DataError(message, code="data.unreadable") from error
    _check(opened)
    splits = {
        name: dataclasses.replace(split, decode_size=decode_size)
        for name, split in opened.splits.items()
    }
    return dataclasses.replace(opened, splits=splits)


def _open(
    source: str, kind: str, rest: str, columns: Columns, *, streaming: bool, multilabel: bool
) -> Source:
    if kind == "folder":
        return _open_folder(source, rest, multilabel=multilabel)
    if kind == "csv":
        file = Path(rest).expanduser().absolute()
        listed, flags = read_csv(file, columns, multilabel=multilabel)
        return _of_files(source, file.parent, listed, f"images of {file.name}", flags)
    if kind == "embedded":
        return _open_embedded(source, rest, multilabel=multilabel)
    read = {"hub": read_hub, "tar": read_tar}.get(kind, read_parquet)
    tables = read(rest, columns, streaming=streaming, multilabel=multilabel)
    splits = {name: Split(name, tables.labels[name], tables.items[name]) for name in tables.labels}
    return Source(source, splits, tables.class_names, tables.description, tables.columns)


def _check(source: Source) -> None:
    """Refuse a set that cannot be trained on or would be measured wrongly."""
    if len(source.class_names) < 2:
        raise DataError(
            f"{source.name}: only one class, {source.class_names}; two are needed: add "
            "images of another, or name another column of a table with data.label_column",
            code="data.one_class",
        )
    train = source.splits.get("train")
    if train is None:
        return
    present = {
        name: {*np.flatnonzero(class_counts(split.labels, len(source.class_names))).tolist()}
        for name, split in source.splits.items()
    }
    known = present["train"]
    for name in source.splits:
        unknown = sorted(present[name] - known)
        if unknown:
            names = ", ".join(source.class_names[label] for label in unknown[:5])
            number = counted(len(unknown), "class", "classes")
            cause = f"{number} in '{name}' but not in 'train': {names}"
            raise DataError(
                f"{source.name}: {cause}; add training images or remove these",
                code="data.split_mismatch",
            )
    missing = [name for label, name in enumerate(source.class_names) if label not in known]
    if missing:
        number = counted(len(missing), "declared class", "declared classes")
        notice(f"{source.name}: {number} without an image: {', '.join(missing[:5])}")


def _open_folder(source: str, path: str, *, multilabel: bool) -> Source:
    """Open a folder of splits of classes, or of classes, or of images named by CSV files."""
    root = Path(path).expanduser().absolute()
    if not root.is_dir():
        message = f"{source}: a file, not a folder; expected a folder with a folder per class in it"
        raise DataError(message, code="data.wrong_format")
    ignored: Counter[str] = Counter()
    folders = _split_folders(root, source)
    class_folders = {one.name for folder in folders.values() for one in _subfolders(folder)}
    tables = {split: labels_file(folder) for split, folder in folders.items()}
    if any(tables.values()) and (multilabel or len(class_folders) < 2):
        return _open_tables(source, root, folders, tables, multilabel=multilabel)
    if multilabel:
        raise DataError(
            f"{source}: a folder of classes has one label for each image, and data.task=multilabel "
            "any number; add a labels.csv with the columns path and label (cat|dog)",
            code="data.no_labels",
        )
    for table in filter(None, tables.values()):
        named = ", ".join(sorted(class_folders)[:3])
        notice(
            f"{source}: the folders ({named}) are taken for the classes, and {table.name} is not "
            f"read; to take its labels: csv:{printable(table)}"
        )
    links = Links((one for folder in folders.values() for one in _subfolders(folder)), source)
    classes_of = {split: _classes(folders[split], source, ignored, links) for split in folders}
    tell_ignored(source, ignored)
    start = f"{root}{os.sep}"
    listed = {
        split: [
            (file.removeprefix(start), name) for name, files in classes.items() for file in files
        ]
        for split, classes in classes_of.items()
    }
    return _of_files(source, root, listed, f"image files in {counted(len(listed), 'split')}")


def _open_tables(
    source: str,
    root: Path,
    folders: dict[str, Path],
    tables: dict[str, Path | None],
    *,
    multilabel: bool,
) -> Source:
    """Open a folder whose images have their labels in a CSV file, or in one for each split.

    Args:
        folders: of the splits, or the root alone.
        tables: in these folders, by split.
    """
    listed: dict[str, list[tuple[str, Label]]] = {}
    columns: dict[str, tuple[str, ...]] = {}
    for split, table in tables.items():
        if table is None:
            raise DataError(
                f"{source}: no metadata.csv or labels.csv in {printable(folders[split])}, but in "
                "another split; add one",
                code="data.no_labels",
            )
        if folders[split] == root:
            listed, columns[split] = read_csv(table, multilabel=multilabel)
        else:
            start = f"{folders[split].name}{os.sep}"
            rows, columns[split] = read_csv(table, split=split, multilabel=multilabel)
            listed[split] = [(start + path, label) for path, label in rows[split]]
    first, *others = columns
    for other in others:
        if lone := sorted({*columns[first]} ^ {*columns[other]}):
            raise DataError(
                f"{source}: the table of '{first}' or of '{other}' has no column {lone[0]!r}, "
                "and the other one has; write both with the same columns of 0 and 1",
                code="data.split_mismatch",
            )
    names = " and ".join(sorted({table.name for table in tables.values() if table}))
    return _of_files(source, root, listed, f"images of {names}", columns[first])


def _of_files(
    source: str,
    root: Path,
    listed: Mapping[str, Sequence[tuple[str, Label]]],
    description: str,
    columns: tuple[str, ...] = (),
) -> Source:
    """Make a source of image files.

    Args:
        listed: (path below the root, class or classes) of each image, by split.
        columns: as `Source` has them.
    """
    labels = [label for files in listed.values() for _, label in files]
    class_names = sorted(
        {name for label in labels for name in ([label] if isinstance(label, str) else label)}
    )
    if not class_names and labels:
        message = f"{source}: no image has a label; check the label column, or the columns of 0, 1"
        raise DataError(message, code="data.no_labels")
    if not class_names:
        message = f"{source}: no images in class folders; expected {root}/CLASS/IMAGE.jpg"
        raise DataError(message, code="data.empty")
    refuse_alike(class_names, source)
    number = {name: label for label, name in enumerate(class_names)}
    splits = {}
    for split, files in listed.items():
        files = sorted(files)
        items = FileItems(root, [path for path, _ in files])
        splits[split] = Split(split, _numbered([label for _, label in files], number), items)
    return Source(source, splits, class_names, description, columns)


def _numbered(labels: Sequence[Label], number: Mapping[str, int]) -> np.ndarray:
    """The `labels` of a split."""
    if all(isinstance(label, str) for label in labels):
        return np.array([number[str(label)] for label in labels], dtype=np.int64)
    pairs = [(row, number[name]) for row, label in enumerate(labels) for name in label]
    rows_M, labels_M = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return label_matrix(rows_M, labels_M, len(labels), len(number))


def _subfolders(folder: Path) -> list[Path]:
    """List the visible folders, sorted by name; `__MACOSX` comes with archives made on a Mac."""
    visible = [p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "__MACOSX"]
    return sorted(p for p in visible if p.is_dir())


def _split_folders(root: Path, source: str) -> dict[str, Path]:
    """Find the folder of each split; without one, the folder of classes is all train."""
    folders = _subfolders(root)
    found = [SPLITS.get(folder.name.lower()) for folder in folders]
    words = [split_in(folder.name) for folder in folders]
    # seg_train beside seg_test, but not the classes "goods train" and "test tube"
    differ = "train" in words and len({*words} - {None}) == len(words)
    if differ and all(_subfolders(folder) or labels_file(folder) for folder in folders):
        found = words
    others = [folder.name for folder, split in zip(folders, found, strict=True) if split is None]
    folder_of: dict[str, Path] = {}
    for folder, split in zip(folders, found, strict=True):
        if split in folder_of:
            both = f"{folder_of[split].name!r} and {folder.name!r} are both {split}"
            raise DataError(f"{source}: {both}; keep one", code="data.ambiguous")
        if split is not None:
            folder_of[split] = folder
    if not folder_of:
        return {"train": root}
    if others and "train" not in folder_of:
        (first, *_) = folder_of.values()
        raise DataError(
            f"{source}: {first.name!r} stands beside class folders ({', '.join(others[:3])}); "
            "move these into 'train'",
            code="data.ambiguous",
        )
    if others:
        notice(f"{source}: folders that are no split are ignored: {', '.join(others[:5])}")
    return in_order(folder_of)


def _classes(
    folder: Path, source: str, ignored: Counter[str], links: Links
) -> dict[str, list[str]]:
    """List the image files of each class folder, also in folders below it.

    Args:
        folder: holds one folder per class.
        ignored: counts the names of files that are no images.
    Returns: class name -> paths. Links, pipes and damaged files are listed: a scan names them.
    """
    classes = {}
    for class_folder in _subfolders(folder):
        classes[printable(class_folder.name)] = list(walk_images(class_folder, ignored, links))
    ignored.update(printable(p.name) for p in folder.iterdir() if not p.is_dir())
    empty = [name for name, files in classes.items() if not files]
    if not classes:
        raise DataError(
            f"{source}: no class folders in {printable(folder)}; make one for each class, or add a "
            "metadata.csv with the columns file_name and label",
            code="data.empty",
        )
    if empty:
        tell_ignored(source, ignored)
        raise DataError(
            f"{source}: {counted(len(empty), 'class folder')} without images in "
            f"{printable(folder)}: {', '.join(empty[:5])}; fill or remove them",
            code="data.empty",
        )
    return classes


def _open_embedded(source: str, name: str, *, multilabel: bool) -> Source:
    """Open scikit-learn's digits: 8x8 pixels of 0..16 scaled to 0..255, grey as RGB.

    Every fifth image of each class, in scikit-learn's order, is the test split. In a pair each
    image of a split is the left one once, beside one that is drawn from the split.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn.datasets import load_digits

    if multilabel is not (name == "digit_pairs"):
        advice = "one label; use embedded:digit_pairs"
        advice = advice if multilabel else "several labels; set data.task=multilabel"
        raise DataError(f"{source}: its images have {advice}", code="data.wrong_labels")
    grey, labels = load_digits(return_X_y=True)
    pixels = np.rint(grey.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    items = ArrayItems(np.repeat(pixels, 3, axis=3), "digits")
    labels = labels.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    rows_of = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
    class_names = [str(digit) for digit in range(10)]
    description = "scikit-learn's handwritten digits, 8x8 grey; test is every fifth of each class"
    if not multilabel:
        splits = {split: Split(split, labels[rows], items, rows) for split, rows in rows_of.items()}
        return Source(source, splits, class_names, description)
    splits = {}
    for split, rows in rows_of.items():
        right = rows[np.argsort(np.random.PCG64(len(rows)).random_raw(len(rows)), kind="stable")]
        pairs = np.repeat(np.concatenate([pixels[rows], pixels[right]], axis=2), 3, axis=3)
        places = np.tile(np.arange(len(rows)), 2)
        both = label_matrix(places, np.concatenate([labels[rows], labels[right]]), len(rows), 10)
        splits[split] = Split(split, both, ArrayItems(pairs, f"digit_pairs {split}"))
    return Source(source, splits, class_names, f"pairs of {description}")
