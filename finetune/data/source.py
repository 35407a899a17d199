"""A source string -> labelled splits of images, decoded when read.

    hub:owner/name[@revision][:config]    a data set of the hub
    parquet:PATH                          a file, a glob, or a folder in the hub's layout
    folder:PATH                           train/, val/ and test/ with a folder per class in each,
                                          or one folder of class folders (then all is train)
    embedded:digits                       scikit-learn's 1,797 handwritten digits

`valid` and `validation` are read as val. A source without a test split stays without one: a run on
it reports no test figures. A new kind of source is one function here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finetune.data.columns import SPLITS, in_order, refuse_alike
from finetune.data.decode import notice
from finetune.data.items import ArrayItems, FileItems, Items, Links, walk_images
from finetune.data.parquet import read_hub, read_parquet
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import DataError, nearest
from finetune.text import counted, printable

__all__ = ["Source", "Split", "open_source"]

_KINDS = ("hub", "parquet", "folder", "embedded")
# Fingerprints of larger splits are over names and sizes: hashing 150 GB would take minutes.
_FINGERPRINT_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images. Nothing is decoded until it is read.

    Attributes:
        name: train, val or test.
        labels: (N,) int64, indices of the source's class names.
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
        """What to call an image: its path in the folder, or file and row."""
        return self.items.name_of(self._row(index))

    def subset(self, indices: np.ndarray) -> Split:
        """The same split with only these images, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows = chosen if self.rows is None else self.rows[chosen]
        return dataclasses.replace(self, labels=self.labels[chosen], rows=rows)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every image's encoded bytes and label, in order.

        Above 1 GiB of images, names and sizes in bytes stand for the bytes themselves, and for
        those that are streamed the names of their shards' contents. Images that cannot be opened
        count as such.
        """
        rows = np.arange(len(self)) if self.rows is None else self.rows
        if isinstance(self.items, ShardItems):
            return self.items.fingerprint(rows, self.labels)
        sizes = self.items.sizes()
        whole = int(sizes[rows].sum()) <= _FINGERPRINT_BYTES
        digest = hashlib.sha256(b"content" if whole else b"names and sizes")
        for row, label in zip(rows.tolist(), self.labels.tolist(), strict=True):
            if whole:
                body, size = _content(self.items, row)
            else:
                body, size = self.items.name_of(row).encode(), int(sizes[row])
            digest.update(struct.pack("<qqq", size, len(body), label))
            digest.update(body)
        return digest.hexdigest()


def _content(items: Items, row: int) -> tuple[bytes, int]:
    try:
        body = items.content(row)
    except DataError:
        return b"", -1
    return body, len(body)


@dataclass(frozen=True, eq=False)
class Source:
    """A data set.

    Attributes:
        name: the source string.
        splits: by name, among train, val and test.
        class_names: in the order of the labels.
        description: where it came from and how it was read, for people.
    """

    name: str
    splits: dict[str, Split]
    class_names: list[str]
    description: str


def open_source(
    source: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    streaming: bool = False,
    decode_size: int | None = None,
) -> Source:
    """Open a data set without decoding an image.

    Args:
        source: see the head of this file.
        image_column, label_column: columns of hub: and parquet: sources; None to find them.
        streaming: leave the images of hub: and parquet: sources where they are.
        decode_size: of the splits.
    Returns: the splits that the source has; see split_train for a missing validation split.
    Raises: DataError: no such source, or one that cannot be trained on.
    """
    kind, colon, rest = source.partition(":")
    if kind not in _KINDS or not rest:
        hint = nearest(kind, _KINDS)
        if not colon and Path(source).expanduser().exists():
            hint = f"; did you mean 'folder:{source}' or 'parquet:{source}'?"
        elif kind in _KINDS:
            hint = f": the PATH behind '{kind}:' is missing"
        raise DataError(
            f"data.source: cannot read {source!r}{hint}; expected hub:owner/name, parquet:PATH, "
            "folder:PATH or embedded:digits"
        )
    if kind in ("folder", "embedded") and (image_column or label_column):
        raise DataError(
            f"data.image_column, data.label_column: {kind}: sources have no columns; remove them"
        )
    try:
        opened = _open(source, kind, rest, image_column, label_column, streaming=streaming)
    except (OSError, ValueError) as error:  # a name that no system takes, a folder of others
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{source[:200]!r}: cannot be read ({cause}); check the path") from error
    _check(opened)
    splits = {
        name: dataclasses.replace(split, decode_size=decode_size)
        for name, split in opened.splits.items()
    }
    return dataclasses.replace(opened, splits=splits)


def _open(
    source: str,
    kind: str,
    rest: str,
    image_column: str | None,
    label_column: str | None,
    *,
    streaming: bool,
) -> Source:
    if kind == "folder":
        return _open_folder(source, rest)
    if kind == "embedded":
        return _open_embedded(source, rest)
    read = read_hub if kind == "hub" else read_parquet
    tables = read(rest, image_column, label_column, streaming=streaming)
    splits = {name: Split(name, tables.labels[name], tables.items[name]) for name in tables.labels}
    return Source(source, splits, tables.class_names, tables.description)


def _check(source: Source) -> None:
    """Refuse what cannot be trained on or would be measured wrongly."""
    if len(source.class_names) < 2:
        raise DataError(
            f"{source.name}: only one class, {source.class_names}; two are needed: add "
            "images of another, or name another column of a table with data.label_column"
        )
    train = source.splits.get("train")
    if train is None:
        return
    known = set(np.unique(train.labels).tolist())
    for name, split in source.splits.items():
        unknown = sorted(set(np.unique(split.labels).tolist()) - known)
        if unknown:
            names = ", ".join(source.class_names[label] for label in unknown[:5])
            number = counted(len(unknown), "class", "classes")
            cause = f"{number} in '{name}' but not in 'train': {names}"
            raise DataError(f"{source.name}: {cause}; add training images or remove these")
    missing = [name for label, name in enumerate(source.class_names) if label not in known]
    if missing:
        number = counted(len(missing), "declared class", "declared classes")
        notice(f"{source.name}: {number} without an image: {', '.join(missing[:5])}")


def _open_folder(source: str, path: str) -> Source:
    """Open a folder of splits of classes, or of classes."""
    root = Path(path).expanduser().absolute()
    if not root.is_dir():
        siblings = [p.name for p in root.parent.iterdir()] if root.parent.is_dir() else []
        absent = f"no such folder{nearest(root.name, siblings)}"
        cause = "a file, not a folder" if root.exists() else absent
        raise DataError(f"{source}: {cause}; expected a folder with a folder per class in it")
    ignored: Counter[str] = Counter()
    folders = _split_folders(root, source)
    links = Links((one for folder in folders.values() for one in _subfolders(folder)), source)
    found = {split: _classes(folders[split], source, ignored, links) for split in folders}
    if ignored:
        examples = ", ".join(sorted(ignored)[:5])
        notice(f"{source}: ignored {counted(ignored.total(), 'file')} of other kinds: {examples}")
    class_names = sorted({name for classes in found.values() for name in classes})
    if not class_names:
        raise DataError(f"{source}: no images in class folders; expected {path}/CLASS/IMAGE.jpg")
    refuse_alike(class_names, source)
    number = {name: label for label, name in enumerate(class_names)}
    splits = {}
    for split, classes in found.items():
        files = sorted((file, number[name]) for name, listed in classes.items() for file in listed)
        labels = np.array([label for _, label in files], dtype=np.int64)
        items = FileItems(root, [file.removeprefix(f"{root}{os.sep}") for file, _ in files])
        splits[split] = Split(split, labels, items)
    return Source(source, splits, class_names, f"image files in {counted(len(splits), 'split')}")


def _subfolders(folder: Path) -> list[Path]:
    """Visible folders, sorted by name; `__MACOSX` is what archives leave behind."""
    there = [p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "__MACOSX"]
    return sorted(p for p in there if p.is_dir())


def _split_folders(root: Path, source: str) -> dict[str, Path]:
    """Which folder holds which split; one folder of classes is all train."""
    folders = _subfolders(root)
    splits = [folder for folder in folders if folder.name.lower() in SPLITS]
    others = [folder.name for folder in folders if folder not in splits]
    if not splits:
        return {"train": root}
    found: dict[str, Path] = {}
    for folder in splits:
        split = SPLITS[folder.name.lower()]
        if split in found:
            both = f"{found[split].name!r} and {folder.name!r} are both {split}"
            raise DataError(f"{source}: {both}; keep one")
        found[split] = folder
    if others and "train" not in found:
        raise DataError(
            f"{source}: {splits[0].name!r} stands beside class folders ({', '.join(others[:3])}); "
            "move these into 'train'"
        )
    if others:
        notice(f"{source}: folders that are no split are ignored: {', '.join(others[:5])}")
    return in_order(found)


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
            f"{source}: no class folders in {printable(folder)}; make one for each class"
        )
    if empty:
        raise DataError(
            f"{source}: {counted(len(empty), 'class folder')} without images in "
            f"{printable(folder)}: {', '.join(empty[:5])}; fill or remove them"
        )
    return classes


def _open_embedded(source: str, name: str) -> Source:
    """scikit-learn's digits: 8x8 pixels of 0..16 scaled to 0..255, grey as RGB.

    Every fifth image of each class, in scikit-learn's order, is the test split.
    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    if name != "digits":
        raise DataError(f"{source}: no such embedded data set{nearest(name, ['digits'])}")
    from sklearn.datasets import load_digits

    grey, labels = load_digits(return_X_y=True)
    pixels = np.rint(grey.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    items = ArrayItems(np.repeat(pixels, 3, axis=3), "digits")
    labels = labels.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    splits = {
        split: Split(split, labels[rows], items, rows)
        for split, rows in (("train", np.flatnonzero(~test)), ("test", np.flatnonzero(test)))
    }
    description = "scikit-learn's handwritten digits, 8x8 grey; test is every fifth of each class"
    return Source(source, splits, [str(digit) for digit in range(10)], description)
