"""Data sets that cannot be trained on: exit 3, the cause in one message, and no run begun."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults_bad import PROMISE, Bad, Content, parametrised, refuse
from samples import make_parquet, png

TABLE = "data info parquet:t.parquet"
TRAIN = "train r.yaml --out run"
RECIPE = """\
model: {name: embedded:vit_nano}
data: {source: "SOURCE", batch_size: 2}
optim: {lr: 1e-3, steps: 2}
run: {precision: fp32, threads: 1}
"""


def folder(said: str, *names: str, words: str = "data info folder:d", **more: Content) -> Bad:
    """A folder source with a good image under each of these names."""
    files: dict[str, Content] = {f"d/{name}": png(place) for place, name in enumerate(names)}
    return Bad(words, 3, said, {**files, **{f"d/{key}": value for key, value in more.items()}})


def table(said: str, *, words: str = TABLE, **options: Any) -> Bad:
    """A table with labels 0, 1, 0, 1 unless others are given."""
    labels = options.pop("labels", [0, 1, 0, 1])
    return Bad(words, 3, said, {"t.parquet": lambda path: make_parquet(path, labels, **options)})


def raw(said: str, content: Content, words: str = TABLE) -> Bad:
    return Bad(words, 3, said, {"t.parquet": content})


def columns(**named: Any) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table(named), path)


def cut(share: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = make_parquet(path, [0, 1] * 50).read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return change


def flipped(place: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(make_parquet(path, [0, 1] * 50).read_bytes())
        for offset in range(20):
            content[int(len(content) * place) + offset] ^= 0xFF
        path.write_bytes(content)

    return change


def told(text: bytes) -> Callable[[Path], None]:
    """A table whose metadata for `datasets` is this."""

    def write(path: Path) -> None:
        made = pq.read_table(make_parquet(path, [0, 1, 0, 1]))
        pq.write_table(made.replace_schema_metadata({"huggingface": text}), path)

    return write


def training(source: str, code: int, said: str, files: dict[str, Content], *words: str) -> Bad:
    recipe = RECIPE.replace("SOURCE", source)
    return Bad([*TRAIN.split(), *words], code, said, {**files, "r.yaml": recipe}, leaves="run")


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


FEW = {"d/a/1.png": png(1), "d/a/2.png": png(2), "d/b/2.png": png(3)}
ONE, TWO = "train/a/1.png", "train/b/1.png"
SOURCES = {
    "no prefix": Bad("data info somewhere", 3, "expected hub:owner/name"),
    "an empty name": Bad(["data", "info", ""], 3, "cannot read ''"),
    "a prefix alone": Bad("data info folder:", 3, "is missing"),
    "an unknown prefix": Bad("data info foldr:x", 3, "did you mean 'folder'"),
    "an address": Bad("data info https://example.org/d.zip", 3, "cannot read"),
    "a path without a prefix": Bad("data info d", 3, "did you mean 'folder:d'", {"d": Path.mkdir}),
    "a zero byte": Bad(["data", "info", "folder:a\0b"], 3, "no such folder"),
    "a zero byte, parquet": Bad(["data", "info", "parquet:a\0b"], 3, "no such path"),
    "a name too long": Bad(["data", "info", f"folder:{'x' * 5000}"], 3, "too long"),
    "a name too long, parquet": Bad(["data", "info", f"parquet:{'x' * 5000}"], 3, "too long"),
    "no embedded set": Bad("data info embedded:digit", 3, "did you mean 'digits'"),
    "a hub name of one part": Bad("data info hub:cifar10", 3, "expected hub:owner/name"),
    "a hub name with a space": Bad(["data", "info", "hub:a b/c"], 3, "expected hub:owner/name"),
    "a hub name of a folder here": Bad("data info hub:a/b", 3, "use parquet:", {"a/b/x": b""}),
}
FOLDERS = {
    "no such folder": Bad("data info folder:date", 3, "did you mean 'data'", {"data": Path.mkdir}),
    "a file": Bad("data info folder:d", 3, "a file, not a folder", {"d": b""}),
    "empty": Bad("data info folder:d", 3, "no class folders", {"d": Path.mkdir}),
    "files without classes": folder("no class folders", "1.png", "2.png"),
    "one class": folder("only one class", "a/1.png", "a/2.png"),
    "an empty class": folder("without images", "a/1.png", **{"b": Path.mkdir}),
    "a class of texts": folder("without images", "a/1.png", **{"b/x.txt": b"x"}),
    "classes that differ in case": folder("differ only in case", "a/1.png", "A/1.png"),
    "classes that differ in a space": folder("differ only in case", "a/1.png", "a /1.png"),
    "a class that is only in test": folder("not in 'train'", ONE, TWO, "test/c/1.png"),
    "val twice": folder("are both val", ONE, TWO, "val/a/1.png", "valid/b/1.png"),
    "an empty split": folder("no class folders", ONE, TWO, **{"test": Path.mkdir}),
    "a split beside classes": folder("stands beside class folders", "test/a/1.png", "b/1.png"),
    "one class in a split": folder("only one class", ONE, "test/a/1.png"),
    "a link from class to class": folder(
        "is another class", "a/1.png", "b/1.png", **{"b/l": link("../a")}
    ),
    "a link upwards": folder("is another class", "a/1.png", "b/1.png", **{"b/l": link("../../d")}),
    "columns of a folder": training(
        "folder:d",
        3,
        "have no columns",
        {"d/a/1.png": png(1), "d/b/1.png": png(2)},
        "data.label_column=label",
    ),
    "only test": training(
        "folder:d",
        3,
        "no train split",
        {"d/test/a/1.png": png(1), "d/test/b/1.png": png(2)},
    ),
    "one image for each class": training(
        "folder:d", 3, "single image", {"d/a/1.png": png(1), "d/b/1.png": png(2)}
    ),
    "images that cannot be read": Bad(
        "data scan folder:d",
        3,
        "1 of 3 images cannot be read",
        {"d/a/1.png": png(1), "d/b/1.png": png(2), "d/b/2.png": b"no"},
    ),
    "a class of which nothing can be read": training(
        "folder:d",
        3,
        "no readable image is left",
        {"d/a/1.png": png(1), "d/a/2.png": png(2), "d/b/1.png": b"no", "d/b/2.png": b"no"},
        "data.unreadable=quarantine",
    ),
    "a pipe for an image": training(
        "folder:d",
        3,
        "a pipe or a device",
        {**FEW, "d/b/1.png": os.mkfifo},
    ),
    "a device for an image": training(
        "folder:d",
        3,
        "a pipe or a device",
        {
            "d/a/1.png": png(1),
            "d/a/2.png": png(2),
            "d/b/1.png": link("/dev/zero"),
            "d/b/2.png": png(3),
        },
    ),
}
TABLES = {
    "no such file": Bad("data info parquet:tt.parquet", 3, "did you mean", {"t.parquet": b""}),
    "no file of a pattern": Bad(["data", "info", "parquet:*.parquet"], 3, "no parquet file"),
    "an empty folder": Bad("data info parquet:d", 3, "no parquet file", {"d": Path.mkdir}),
    "two sets in a folder": Bad(
        "data info parquet:d",
        3,
        "several data sets",
        {f"d/{name}/t.parquet": lambda path: make_parquet(path, [0, 1]) for name in ("one", "two")},
    ),
    "zero bytes": raw("zero bytes", b""),
    "text": raw("not a parquet file", b"label,image\n0,a.png\n"),
    "a web page": raw("a web page", b"<!DOCTYPE html><html></html>"),
    "a pointer": raw("Git LFS", b"version https://git-lfs.github.com/spec/v1\n"),
    "a pipe": raw("no such path", os.mkfifo),
    "a folder called so": raw("no parquet file", Path.mkdir),
    "cut in the middle": raw("not a parquet file", cut(0.5)),
    "cut at the end": raw("not a parquet file", cut(0.999)),
    "no rows": table("has no rows", labels=[], label_type=pa.int64()),
    "one class": table("only one class", labels=[1, 1]),
    "no image column": raw("image_column", columns(label=[0, 1], x=["a", "b"])),
    "no label column": raw("label_column", columns(image=[b"a", b"b"], x=[0, 1])),
    "images that are words": raw(
        "encoded images as bytes", columns(image=["a", "b"], label=[0, 1])
    ),
    "labels that are fractions": table("of type double", labels=[0.5, 1.5]),
    "labels that are missing": table("labels are missing", labels=[0, None, 1]),
    "labels that are lists": table("of type list", labels=[[0], [1]]),
    "labels below 0": table("below 0", labels=[0, -1, 1]),
    "labels beyond their names": table("outside 0 to 1", labels=[0, 1, 2], names=["a", "b"]),
    "labels that differ in case": table("differ only in case", labels=["cat", "Cat"]),
    "metadata that is no JSON": raw("metadata", told(b"{")),
    "metadata that is a list": raw("metadata", told(b"[]")),
    "metadata of another shape": raw("metadata", told(b'{"info": {"features": [1]}}')),
    "names that are numbers": raw(
        "metadata",
        told(
            json.dumps(
                {"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, 2]}}}}
            ).encode()
        ),
    ),
    "classes without names or number": raw(
        "metadata",
        told(json.dumps({"info": {"features": {"label": {"_type": "ClassLabel"}}}}).encode()),
    ),
    "a column that is not there": training(
        "parquet:t.parquet",
        3,
        "did you mean 'label'",
        {"t.parquet": lambda path: make_parquet(path, [0, 1] * 4)},
        "data.label_column=labl",
    ),
    "a label column of images": training(
        "parquet:t.parquet",
        3,
        "of type struct",
        {"t.parquet": lambda path: make_parquet(path, [0, 1] * 4)},
        "data.label_column=img",
    ),
    "pages that are damaged": training(
        "parquet:t.parquet", 3, "t.parquet", {"t.parquet": flipped(0.3)}
    ),
    "a row without an image": training(
        "parquet:t.parquet",
        3,
        "no image in this row",
        {"t.parquet": lambda path: make_parquet(path, [0, 1], images=[None, None])},
        "data.val_fraction=0",
    ),
    "a row that names a file of the system": training(
        "parquet:t.parquet",
        3,
        "leads outside",
        {
            "t.parquet": lambda path: make_parquet(
                path, [0, 1], images=[{"bytes": None, "path": "/etc/passwd"}] * 2
            )
        },
        "data.val_fraction=0",
    ),
    "splits of other classes": Bad(
        "data info parquet:d",
        3,
        "class names differ",
        {
            "d/train.parquet": lambda path: make_parquet(path, [0, 1], names=["a", "b"]),
            "d/test.parquet": lambda path: make_parquet(path, [0, 1], names=["b", "a"]),
        },
    ),
    "splits of other types": Bad(
        "data info parquet:d",
        3,
        "integers in one split",
        {
            "d/train.parquet": lambda path: make_parquet(path, [0, 1]),
            "d/test.parquet": lambda path: make_parquet(path, ["0", "1"]),
        },
    ),
    "a split without the column": Bad(
        "data scan parquet:d",
        3,
        "column",
        {
            "d/train.parquet": lambda path: make_parquet(path, [0, 1]),
            "d/test.parquet": lambda path: make_parquet(path, [0, 1], image="picture"),
        },
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@parametrised(SOURCES)
def test_sources(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: data sources", PROMISE)


@parametrised(FOLDERS)
def test_folders(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: folders of images", PROMISE)


@parametrised(TABLES)
def test_tables(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: parquet", PROMISE)
