"""Folders of images: one folder per class, split folders, and CSV files next to the images."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from finetune.data.columns import ColumnNames
from finetune.data.csv_file import (
    LABEL_FILE_NAMES,
    ClassNames,
    find_labels_file,
    find_training_table,
    read_csv,
    train_command,
)
from finetune.data.decode import HEIC_HINT, heif_decoder_version
from finetune.data.encoded_images import FileImages
from finetune.data.labels import check_distinct_class_names
from finetune.data.multilabel import indicator_matrix
from finetune.data.source import Source, Split
from finetune.data.split_names import SPLIT_ALIASES, find_split_word, sort_splits
from finetune.errors import DataError
from finetune.formatting import pluralize, printable_path
from finetune.log import warn_once

__all__ = [
    "IMAGE_SUFFIXES",
    "SymlinkChecker",
    "count_heic_photos",
    "open_image_folder",
    "source_from_files",
    "walk_images",
    "warn_ignored_files",
]


# Files of the folders that commands write.
_OUTPUT_FILES = ("run.json", "results.json", "probe.json", "compare.json", "tune.json")
HEIF_SUFFIXES = (".heic", ".heif", ".hif")
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", *HEIF_SUFFIXES),
)


class SymlinkChecker:
    """Rejects symlinks from one class into another: their images would get a wrong label.

    Args:
        class_folders: class folders of all splits; some may be symlinks themselves.
        source: source string, for the message.
    Raises: DataError for a class folder that is a link to another class.
    """

    def __init__(self, class_folders: Iterable[Path], source: str) -> None:
        self._source = source
        folders = list(class_folders)
        self._class_folders = {os.path.realpath(folder) for folder in folders}
        self._real_class_folders = {
            os.path.realpath(folder) for folder in folders if not folder.is_symlink()
        }
        self._parent_folders = {
            str(parent) for folder in self._class_folders for parent in Path(folder).parents
        }
        for folder in folders:
            if folder.is_symlink():
                self.check(os.fspath(folder), None)

    def check(self, link: str, class_folder: str | None) -> None:
        """Reject a link to another class, or to a folder that contains a class.

        Args:
            link: path of the link; it may lead into its own class or out of the dataset.
            class_folder: class folder in which the link is; None if the link is a class folder.
        Raises: DataError naming link and target.
        """
        target = os.path.realpath(link)
        folders = {target, *map(str, Path(target).parents)}
        # intersect from the smaller set: there may be thousands of class folders, and of links
        if class_folder is None:
            others = folders & self._real_class_folders
        else:
            others = (folders & self._class_folders) - {os.path.realpath(class_folder)}
        if target in self._parent_folders or others:
            raise DataError(
                f"{self._source}: the link {printable_path(link)} leads to "
                f"{printable_path(target)}, which is, contains or is in another class folder; "
                "images would count twice; remove the link",
                code="data.wrong_link",
            )


def walk_images(
    folder: Path, ignored: Counter[str], symlink_checker: SymlinkChecker | None = None
) -> Iterator[str]:
    """Yield the image files below a folder; follow symlinks, but visit no folder twice.

    Args:
        folder: top folder; hidden files and folders in it are skipped.
        ignored: counter of ignored file names, updated in place: files that are not images, and
            HEIC photos if pillow-heif is not installed.
        symlink_checker: checker for each link; None to follow all links.
    Yields: paths, in no particular order. Images are recognized by suffix; no file is opened.
    Raises: DataError for a folder that cannot be listed or a link that is rejected.
    """
    seen = set()
    pending = [os.fspath(folder)]
    while pending:
        parent = pending.pop()
        identity = os.path.realpath(parent)
        if identity in seen:
            continue
        seen.add(identity)
        folders = []
        for entry in _list_folder(parent):
            hidden = entry.name.startswith(".")
            is_folder = _is_folder(entry)
            if hidden and is_folder:
                continue
            suffix = os.path.splitext(entry.name)[1].lower()
            is_readable = suffix in IMAGE_SUFFIXES
            if suffix in HEIF_SUFFIXES:
                is_readable = heif_decoder_version() is not None
            if not is_folder and (hidden or not is_readable):
                ignored[printable_path(entry.name)] += 1
                continue
            if symlink_checker and entry.is_symlink():
                symlink_checker.check(entry.path, os.fspath(folder))
            if is_folder:
                folders.append(entry.path)
            else:
                yield entry.path
        pending += reversed(folders)


def warn_ignored_files(name: str, ignored: Counter[str]) -> None:
    """Warn about the files below the folder `name` that `walk_images` ignored, if any."""
    num_photos = count_heic_photos(ignored)
    if num_photos:
        warn_once(f"{name}: {pluralize(num_photos, 'HEIC photo')} left out; {HEIC_HINT}")
    if others := [file for file in ignored if not _is_heic_photo(file)]:
        number = pluralize(ignored.total() - num_photos, "file")
        warn_once(f"{name}: ignored {number} of other kinds: {', '.join(sorted(others)[:5])}")


def count_heic_photos(ignored: Counter[str]) -> int:
    """Count the HEIC photos among the files that `walk_images` ignored."""
    return sum(count for file, count in ignored.items() if _is_heic_photo(file))


def _is_heic_photo(name: str) -> bool:
    return name.lower().endswith(HEIF_SUFFIXES) and not name.startswith(".")


def _list_folder(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:  # its entries know their type without a stat each
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"{printable_path(folder)}: cannot be listed ({error.strerror}); check its permissions "
            "and its disk",
            code="data.unreadable",
        ) from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def open_image_folder(source: str, path: str, *, multilabel: bool) -> Source:
    """Open a folder with split/class/images, class/images, or images listed in CSV files.

    Args:
        source: source string, for messages and as the name of the dataset.
        path: path of the folder; ~ is expanded.
        multilabel: allow any number of labels per image, which only CSV files can give.
    Raises: DataError if the folder has another layout, or a class or split without images.
    """
    root = Path(path).expanduser().absolute()
    if not root.is_dir():
        message = f"{source}: not a folder; expected a folder with one folder per class"
        raise DataError(message, code="data.wrong_format")
    ignored: Counter[str] = Counter()
    folders = _find_split_folders(root, source)
    class_folders = {
        subfolder.name for folder in folders.values() for subfolder in _subfolders(folder)
    }
    if class_folders and all(name.lower() in SPLIT_ALIASES for name in class_folders):
        (first, *_) = folders.values()
        raise DataError(
            f"{source}: the classes would be {', '.join(sorted(class_folders))}, so the splits are "
            f"one folder deeper; did you mean '{printable_path(first)}'?",
            code="data.wrong_format",
        )
    for folder in folders.values():
        for subfolder in _subfolders(folder):
            _check_is_no_output(subfolder, source)
    csv_files = {split: find_labels_file(folder) for split, folder in folders.items()}
    if any(csv_files.values()) and (multilabel or len(class_folders) < 2):
        return _open_folder_with_csv(source, root, folders, csv_files, multilabel=multilabel)
    if multilabel:
        raise DataError(
            f"{source}: class folders give only one label per image; for data.task=multilabel, add "
            "a labels.csv with the columns path and label (such as cat|dog)",
            code="data.no_labels",
        )
    if len(class_folders) == 1 and folders.get("train") == root:
        (name,) = class_folders
        if len(_subfolders(root / name)) > 1:
            raise DataError(
                f"{source}: only one folder, {name!r}, which contains folders itself; did you mean "
                f"'{os.path.join(path, name)}'?",
                code="data.one_class",
            )
    table = find_training_table(Path(path).expanduser())
    if table is not None and _are_not_classes(class_folders):
        raise DataError(
            f"{source}: no class folders, but {table.name} seems to list the labels; to train "
            f"on them: {train_command(table)}",
            code="data.no_labels",
        )
    shown_names = Counter(map(printable_path, class_folders))
    if repeated := [name for name, count in shown_names.items() if count > 1]:
        raise DataError(
            f"{source}: two class folders are shown as {repeated[0]!r}, because one name is not "
            "UTF-8 and the other contains a backslash; rename or merge them",
            code="data.duplicate_class",
        )
    for csv_file in filter(None, {*csv_files.values(), table}):
        named = ", ".join(sorted(class_folders)[:3])
        warn_once(
            f"{source}: the class folders ({named}) give the labels, and {csv_file.name} is "
            f"ignored; to train on its labels: {train_command(csv_file)}"
        )
    links = SymlinkChecker(
        (subfolder for folder in folders.values() for subfolder in _subfolders(folder)), source
    )
    classes_of = {
        split: _list_images_by_class(folders[split], source, ignored, links) for split in folders
    }
    warn_ignored_files(source, ignored)
    start = f"{root}{os.sep}"
    images_by_split = {
        split: [
            (file.removeprefix(start), name) for name, files in classes.items() for file in files
        ]
        for split, classes in classes_of.items()
    }
    return source_from_files(
        source, root, images_by_split, f"image files in {pluralize(len(images_by_split), 'split')}"
    )


def _open_folder_with_csv(
    source: str,
    root: Path,
    folders: dict[str, Path],
    csv_files: dict[str, Path | None],
    *,
    multilabel: bool,
) -> Source:
    """Open a folder whose labels are in one CSV file, or in one per split.

    Args:
        folders: dict from split to its folder; without split folders, the root is "train".
        csv_files: dict from split to the CSV file in its folder; None for a folder without one.
    """
    images_by_split: dict[str, list[tuple[str, ClassNames]]] = {}
    columns: dict[str, tuple[str, ...]] = {}
    no_columns = ColumnNames()  # data.image_column and others need csv:
    for split, table in csv_files.items():
        tables = [name for name in LABEL_FILE_NAMES if (folders[split] / name).is_file()]
        if len(tables) > 1:
            raise DataError(
                f"{source}: {' and '.join(tables)} in {printable_path(folders[split])}; both "
                "would give the labels, so remove or rename one",
                code="data.ambiguous",
            )
        if table is None:
            raise DataError(
                f"{source}: no metadata.csv or labels.csv in {printable_path(folders[split])}, but "
                "another split has one; add it",
                code="data.no_labels",
            )
        if folders[split] == root:
            images_by_split, columns[split], _ = read_csv(table, no_columns, multilabel=multilabel)
        else:
            start = f"{folders[split].name}{os.sep}"
            rows, columns[split], _ = read_csv(
                table, no_columns, split=split, multilabel=multilabel
            )
            images_by_split[split] = [(start + path, label) for path, label in rows[split]]
    first, *others = columns
    for other in others:
        if differing := sorted({*columns[first]} ^ {*columns[other]}):
            raise DataError(
                f"{source}: only one of the tables of '{first}' and '{other}' has a column "
                f"{differing[0]!r}; write both with the same columns of 0 and 1",
                code="data.split_mismatch",
            )
    names = " and ".join(sorted({table.name for table in csv_files.values() if table}))
    _warn_of_unlisted_images(source, root, folders.values(), images_by_split, names)
    return source_from_files(source, root, images_by_split, f"images of {names}", columns[first])


def _warn_of_unlisted_images(
    source: str,
    root: Path,
    folders: Iterable[Path],
    images_by_split: Mapping[str, Sequence[tuple[str, ClassNames]]],
    tables: str,
) -> None:
    """Warn about images in the folders that the tables do not list."""
    start = f"{root}{os.sep}"
    listed = {path for files in images_by_split.values() for path, _ in files}
    found = (file.removeprefix(start) for each in folders for file in walk_images(each, Counter()))
    if unlisted := sorted(file for file in found if file not in listed):
        warn_once(
            f"{source}: {tables} gives the labels; "
            f"{pluralize(len(unlisted), 'image is', 'images are')} not listed there and left out: "
            f"{', '.join(map(printable_path, unlisted[:3]))}"
        )


def source_from_files(
    source: str,
    root: Path,
    images_by_split: Mapping[str, Sequence[tuple[str, ClassNames]]],
    description: str,
    indicator_columns: tuple[str, ...] = (),
    groups: Mapping[str, str] | None = None,
) -> Source:
    """Build a source from image files.

    Args:
        source: source string, for messages and as the name of the dataset.
        root: folder to which the paths are relative.
        images_by_split: dict from split to a pair (path, class name or names) for each image.
        description: origin of the images, for users.
        indicator_columns: see `Source`.
        groups: dict from path to group; None or empty without groups.
    Raises: DataError if there is no image, if no image has a label, or if class names differ only
        in case, Unicode form or spaces.
    """
    labels = [label for files in images_by_split.values() for _, label in files]
    class_names = sorted(
        {name for label in labels for name in ([label] if isinstance(label, str) else label)}
    )
    if not labels:
        message = f"{source}: no images; expected {root}/CLASS/IMAGE.jpg"
        raise DataError(message, code="data.empty")
    if not class_names:
        raise DataError(
            f"{source}: no image has a label; check the label column, or the columns of 0 and 1",
            code="data.no_labels",
        )
    check_distinct_class_names(class_names, source)
    class_to_index = {name: label for label, name in enumerate(class_names)}
    splits = {}
    for split, files in images_by_split.items():
        files = sorted(files)
        images = FileImages(root, [path for path, _ in files])
        encoded = _encode_labels([label for _, label in files], class_to_index)
        groups_N = np.array([groups[path] for path, _ in files], dtype=object) if groups else None
        splits[split] = Split(split, encoded, images, groups=groups_N)
    return Source(source, splits, class_names, description, indicator_columns)


def _are_not_classes(folder_names: Iterable[str]) -> bool:
    """True for a single folder, or folders such as train_images and test_images."""
    names = set(folder_names)
    return len(names) < 2 or all(find_split_word(name) for name in names)


def _encode_labels(labels: Sequence[ClassNames], class_to_index: Mapping[str, int]) -> np.ndarray:
    """Encode class names as labels, see `Split.labels`."""
    if all(isinstance(label, str) for label in labels):
        return np.array([class_to_index[str(label)] for label in labels], dtype=np.int64)
    pairs = [(row, class_to_index[name]) for row, label in enumerate(labels) for name in label]
    rows_M, labels_M = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return indicator_matrix(rows_M, labels_M, len(labels), len(class_to_index))


def _subfolders(folder: Path) -> list[Path]:
    """List subfolders, sorted by name, without hidden ones and `__MACOSX` of Mac archives."""
    visible = [p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "__MACOSX"]
    return sorted(p for p in visible if p.is_dir())


def _check_is_no_output(folder: Path, source: str) -> None:
    """Raise DataError if a command has written its files, which include images, into a folder."""
    runs = sorted(folder.iterdir()) if folder.name == "runs" else []
    for each in (folder, *runs):
        for name in _OUTPUT_FILES:
            if (each / name).is_file():
                raise DataError(
                    f"{source}: {printable_path(each)} has the results of a command ({name}), not "
                    "the images of a class; move it to another folder",
                    code="data.wrong_format",
                )


def _find_split_folders(root: Path, source: str) -> dict[str, Path]:
    """Find the folder of each split; if there are none, use the root as train."""
    folders = _subfolders(root)
    split_names = [SPLIT_ALIASES.get(folder.name.lower()) for folder in folders]
    split_words = [find_split_word(folder.name) for folder in folders]
    # accept seg_train next to seg_test, but not the classes "goods train" and "test tube"
    differ = "train" in split_words and len({*split_words} - {None}) == len(split_words)
    if differ and all(_subfolders(folder) or find_labels_file(folder) for folder in folders):
        split_names = split_words
    others = [
        folder.name for folder, split in zip(folders, split_names, strict=True) if split is None
    ]
    folder_of: dict[str, Path] = {}
    for folder, split in zip(folders, split_names, strict=True):
        if split in folder_of:
            both = f"{folder_of[split].name!r} and {folder.name!r} are both the {split} split"
            raise DataError(f"{source}: {both}; keep one", code="data.ambiguous")
        if split is not None:
            folder_of[split] = folder
    if not folder_of:
        return {"train": root}
    if others and "train" not in folder_of:
        (first, *_) = folder_of.values()
        raise DataError(
            f"{source}: found both a split folder ({first.name!r}) and class folders "
            f"({', '.join(others[:3])}); move the class folders into 'train'",
            code="data.ambiguous",
        )
    if others:
        warn_once(f"{source}: folders that are not splits are ignored: {', '.join(others[:5])}")
    return sort_splits(folder_of)


def _list_images_by_class(
    folder: Path, source: str, ignored: Counter[str], link_checker: SymlinkChecker
) -> dict[str, list[str]]:
    """List the image files of each class folder, including its subfolders.

    Args:
        folder: folder of one split, with one folder per class.
        ignored: counter of ignored file names, updated in place.
    Returns: paths by class name. These include pipes and damaged files, which `finetune data scan`
        reports.
    """
    classes = {}
    for class_folder in _subfolders(folder):
        classes[printable_path(class_folder.name)] = list(
            walk_images(class_folder, ignored, link_checker)
        )
    ignored.update(printable_path(p.name) for p in folder.iterdir() if not p.is_dir())
    empty = [name for name, files in classes.items() if not files]
    if not classes:
        raise DataError(
            f"{source}: no class folders in {printable_path(folder)}; create one per class, or add "
            "a metadata.csv with the columns file_name and label",
            code="data.empty",
        )
    if empty:
        warn_ignored_files(source, ignored)
        advice = HEIC_HINT if count_heic_photos(ignored) else "fill or remove them"
        raise DataError(
            f"{source}: {pluralize(len(empty), 'class folder')} without images in "
            f"{printable_path(folder)}: {', '.join(empty[:5])}; {advice}",
            code="data.empty",
        )
    return classes
