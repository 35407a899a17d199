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

from finetune.models.build import build
from finetune.models.saved import save_model

TABLE = "data info parquet:t.parquet"
TRAIN = "train r.yaml --out run"
RECIPE = """\
model: {name: embedded:vit_nano}
data: {source: "SOURCE", batch_size: 2}
optim: {lr: 1e-3, steps: 2}
run: {precision: fp32, threads: 1}
"""


def folder(
    code: str, named: str, *names: str, words: str = "data info folder:d", **more: Content
) -> Bad:
    """A folder source with a good image under each of these names."""
    files: dict[str, Content] = {f"d/{name}": png(place) for place, name in enumerate(names)}
    return Bad(words, code, named, {**files, **{f"d/{key}": value for key, value in more.items()}})


def table(code: str, named: str, *, words: str = TABLE, **options: Any) -> Bad:
    """A table with labels 0, 1, 0, 1 unless others are given."""
    labels = options.pop("labels", [0, 1, 0, 1])
    make = {"t.parquet": lambda path: make_parquet(path, labels, **options)}
    return Bad(words, code, named, make)


def raw(content: Content, *, named: str = "t.parquet", code: str = "data.damaged") -> Bad:
    return Bad(TABLE, code, named, {"t.parquet": content})


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


def described(text: bytes) -> Callable[[Path], None]:
    """A table whose metadata for `datasets` is this."""

    def write(path: Path) -> None:
        table = pq.read_table(make_parquet(path, [0, 1, 0, 1]))
        pq.write_table(table.replace_schema_metadata({"huggingface": text}), path)

    return write


def training(source: str, code: str, named: str, files: dict[str, Content], *words: str) -> Bad:
    recipe = RECIPE.replace("SOURCE", source)
    return Bad([*TRAIN.split(), *words], code, named, {**files, "r.yaml": recipe}, leaves="run")


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def lines(code: str, named: str, *rows: str) -> Bad:
    """A CSV file of these lines beside two images."""
    files = {"1.png": png(1), "2.png": png(2), "t.csv": "".join(f"{row}\n" for row in rows)}
    return Bad("data info csv:t.csv", code, named, files)


HEAD = "path,label"
FEW = {"d/a/1.png": png(1), "d/a/2.png": png(2), "d/b/2.png": png(3)}
ONE, TWO = "train/a/1.png", "train/b/1.png"
SOURCES = {
    "no prefix": Bad("data info somewhere", "data.wrong_source", "'somewhere'"),
    "an empty name": Bad(["data", "info", ""], "data.wrong_source", "''"),
    "a prefix alone": Bad("data info folder:", "data.wrong_source", "'folder:'"),
    "an unknown prefix": Bad("data info foldr:x", "data.wrong_source", "'folder'"),
    "an address": Bad(
        "data info https://example.org/d.zip", "data.wrong_source", "'https://example.org/d.zip'"
    ),
    "a path without a prefix": Bad(
        "data info d", "data.wrong_source", "'folder:d'", {"d": Path.mkdir}
    ),
    "a zero byte": Bad(["data", "info", "folder:a\0b"], "data.wrong_format", "folder:a"),
    "a zero byte, parquet": Bad(["data", "info", "parquet:a\0b"], "data.empty", "parquet:a"),
    "a name too long": Bad(
        ["data", "info", f"folder:{'x' * 5000}"], "data.unreadable", "folder:xxx"
    ),
    "a name too long, parquet": Bad(
        ["data", "info", f"parquet:{'x' * 5000}"], "data.unreadable", "parquet:xxx"
    ),
    "parquet without a place": Bad("data info parquet", "data.wrong_source", "hub:owner/name"),
    "hub without a name": Bad("data info hub:", "data.wrong_source", "'hub:'"),
    "a hub name with half a revision": Bad(
        "data info hub:a/b@", "data.wrong_source", "hub:owner/name"
    ),
    "no embedded set": Bad("data info embedded:digit", "data.wrong_source", "'digits'"),
    "a hub name of one part": Bad("data info hub:cifar10", "data.wrong_source", "hub:cifar10"),
    "a hub name with a space": Bad(["data", "info", "hub:a b/c"], "data.wrong_source", "hub:a b/c"),
    "a hub name of a folder here": Bad(
        "data info hub:a/b", "data.ambiguous", "'a/b'", {"a/b/x": b""}
    ),
}
FOLDERS = {
    "no such folder": Bad(
        "data info folder:date", "data.not_found", "'data'", {"data": Path.mkdir}
    ),
    "a file": Bad("data info folder:d", "data.wrong_format", "folder:d", {"d": b""}),
    "empty": Bad("data info folder:d", "data.empty", "folder:d", {"d": Path.mkdir}),
    "files without classes": folder("data.empty", "folder:d", "1.png", "2.png"),
    "one class": folder("data.one_class", "'a'", "a/1.png", "a/2.png"),
    "an empty class": folder("data.empty", ": b", "a/1.png", **{"b": Path.mkdir}),
    "an empty class of train": folder("data.empty", "train: b", ONE, **{"train/b": Path.mkdir}),
    "an empty class of test": folder("data.empty", "test: a", ONE, TWO, **{"test/a": Path.mkdir}),
    "splits without classes": folder("data.empty", "/train", "train/1.png", "test/1.png"),
    "a class of texts": folder("data.empty", ": b", "a/1.png", **{"b/x.txt": b"x"}),
    "classes that differ in case": folder("data.duplicate_class", "'A'", "a/1.png", "A/1.png"),
    "classes of two splits that differ in case": folder(
        "data.duplicate_class", "'cat'", "train/cat/1.png", TWO, "test/Cat/1.png"
    ),
    "classes that differ in Unicode form": folder(
        "data.duplicate_class", "'caf\u00e9'", "caf\u00e9/1.png", "cafe\u0301/1.png"
    ),
    "classes that differ in a space": folder("data.duplicate_class", "'a'", "a/1.png", "a /1.png"),
    "a class that is only in test": folder("data.split_mismatch", ": c", ONE, TWO, "test/c/1.png"),
    "val twice": folder("data.ambiguous", "'valid'", ONE, TWO, "val/a/1.png", "valid/b/1.png"),
    "an empty split": folder("data.empty", "d/test", ONE, TWO, **{"test": Path.mkdir}),
    "a split beside classes": folder("data.ambiguous", "'test'", "test/a/1.png", "b/1.png"),
    "one class in a split": folder("data.one_class", "'a'", ONE, "test/a/1.png"),
    "a link from class to class": folder(
        "data.wrong_link", "d/b/l", "a/1.png", "b/1.png", **{"b/l": link("../a")}
    ),
    "a link upwards": folder(
        "data.wrong_link", "d/b/l", "a/1.png", "b/1.png", **{"b/l": link("../../d")}
    ),
    "columns of a folder": training(
        "folder:d",
        "data.no_column",
        "data.image_column",
        {"d/a/1.png": png(1), "d/b/1.png": png(2)},
        "data.label_column=label",
    ),
    "only test": training(
        "folder:d",
        "data.no_split",
        "folder:d",
        {"d/test/a/1.png": png(1), "d/test/b/1.png": png(2)},
    ),
    "no train, with validation": training(
        "folder:d",
        "data.no_split",
        "folder:d",
        {f"d/{name}.png": png(1) for name in ("val/a/1", "val/b/1", "test/a/1")},
    ),
    "one image for each class": training(
        "folder:d",
        "data.too_few_images",
        "data.val_fraction",
        {"d/a/1.png": png(1), "d/b/1.png": png(2)},
    ),
    "images that cannot be read": Bad(
        "data scan folder:d",
        "data.unreadable",
        "1 of 3",
        {"d/a/1.png": png(1), "d/b/1.png": png(2), "d/b/2.png": b"no"},
    ),
    "a class of which nothing can be read": training(
        "folder:d",
        "data.unreadable",
        "b/1.png",
        {"d/a/1.png": png(1), "d/a/2.png": png(2), "d/b/1.png": b"no", "d/b/2.png": b"no"},
        "data.unreadable=quarantine",
    ),
    "a pipe for an image": training(
        "folder:d", "data.unreadable", "b/1.png", {**FEW, "d/b/1.png": os.mkfifo}
    ),
    "a device for an image": training(
        "folder:d",
        "data.unreadable",
        "b/1.png",
        {
            "d/a/1.png": png(1),
            "d/a/2.png": png(2),
            "d/b/1.png": link("/dev/zero"),
            "d/b/2.png": png(3),
        },
    ),
}
CSV_FILES = {
    "no such file": Bad("train label.csv", "data.not_found", "'labels.csv'", {"labels.csv": ""}),
    "a name without its prefix": Bad(
        "data info t.csv", "data.wrong_source", "'csv:t.csv'", {"t.csv": ""}
    ),
    "a folder called so": Bad(
        "data info csv:t.csv", "data.not_a_file", "t.csv", {"t.csv": Path.mkdir}
    ),
    "a pipe": Bad("data info csv:t.csv", "data.not_a_file", "t.csv", {"t.csv": os.mkfifo}),
    "zero bytes": lines("data.empty", "path,label"),
    "an address": lines(
        "data.no_image", "'https://a.org/1.png'", "path,label", "https://a.org/1.png,a", "2.png,b"
    ),
    "a path of Windows": lines(
        "data.not_found", "write / for", "path,label", "img\\1.png,a", "2.png,b"
    ),
    "a header alone": lines("data.empty", "t.csv", "path,label"),
    "no header": lines("data.no_column", "line 1", "1.png,a", "2.png,b"),
    "no column of labels": lines("data.no_column", "data.label_column", "path,x", "1.png,a"),
    "two columns of labels": lines("data.ambiguous", "'label'", "path,label,label", "1.png,a,b"),
    "a label that is missing": lines("data.no_labels", "line 3", HEAD, "1.png,a", "2.png, "),
    "a path that is missing": lines("data.no_image", "line 2", HEAD, ",a"),
    "a file that is missing": lines("data.not_found", "line 3", HEAD, "1.png,a", "3.png,b"),
    "a path out of the folder": lines("data.unsafe", "line 2", HEAD, "../1.png,a"),
    "a path of the system": lines("data.unsafe", "line 2", HEAD, "/etc/passwd,a"),
    "an image with two labels": lines(
        "data.wrong_labels", "in line 2", HEAD, "1.png,a", "./1.png,b"
    ),
    "an image in two splits": lines(
        "data.ambiguous", "in line 2", HEAD + ",split", "1.png,a,train", "1.png,a,test"
    ),
    "an unknown split": lines("data.no_split", "'dev'", HEAD + ",split", "1.png,a,dev"),
    "a field too few": lines("data.wrong_format", "line 3", HEAD, "1.png,a", "2.png"),
    "a field too many": lines("data.wrong_format", "line 2", HEAD, "1.png,a,b"),
    "a quote that stays open": lines("data.wrong_format", "quote", HEAD, '1.png,"a', "2.png,b"),
    "a field without an end": lines("data.wrong_format", "line 2", HEAD, "1.png," + "a" * 200_000),
    "a NUL": lines("data.wrong_format", "line 3", HEAD, "1.png,a", "2.png,\0"),
    "another encoding": Bad(
        "data info csv:t.csv", "data.wrong_format", "line 2", {"t.csv": b"path,label\n\xe4.png,a"}
    ),
    "UTF-16": Bad(
        "data info csv:t.csv", "data.wrong_format", "line 1", {"t.csv": HEAD.encode("utf-16")}
    ),
    "one class": lines("data.one_class", "'a'", HEAD, "1.png,a", "2.png,a"),
    "classes that differ in case": lines("data.duplicate_class", "'A'", HEAD, "1.png,a", "2.png,A"),
    "a metadata.csv without labels": Bad(
        "data info folder:d",
        "data.no_column",
        "data.label_column",
        {"d/1.png": png(1), "d/metadata.csv": "file_name,text\n1.png,a cat\n"},
    ),
    "an image that cannot be read": Bad(
        "data scan csv:t.csv",
        "data.unreadable",
        "1 of 2",
        {"1.png": png(1), "2.png": b"no", "t.csv": f"{HEAD}\n1.png,a\n2.png,b\n"},
    ),
}
TABLES = {
    "no such file": Bad(
        "data info parquet:tt.parquet", "data.not_found", "'t.parquet'", {"t.parquet": b""}
    ),
    "no file of a pattern": Bad(
        ["data", "info", "parquet:*.parquet"], "data.empty", "parquet:*.parquet"
    ),
    "an empty folder": Bad("data info parquet:d", "data.empty", "parquet:d", {"d": Path.mkdir}),
    "two sets in a folder": Bad(
        "data info parquet:d",
        "data.ambiguous",
        "parquet:d",
        {f"d/{name}/t.parquet": lambda path: make_parquet(path, [0, 1]) for name in ("one", "two")},
    ),
    "zero bytes": raw(b""),
    "text": raw(b"label,image\n0,a.png\n"),
    "a web page": raw(b"<!DOCTYPE html><html></html>", code="data.wrong_format"),
    "a pointer": raw(b"version https://git-lfs.github.com/spec/v1\n", code="data.wrong_format"),
    "a pipe": raw(os.mkfifo, code="data.empty"),
    "a folder called so": raw(Path.mkdir, code="data.empty"),
    "cut in the middle": raw(cut(0.5)),
    "cut at the end": raw(cut(0.999)),
    "no rows": table("data.empty", "'train'", labels=[], label_type=pa.int64()),
    "one class": table("data.one_class", "'1'", labels=[1, 1]),
    "no image column": raw(
        columns(label=[0, 1], x=["a", "b"]), named="data.image_column", code="data.no_column"
    ),
    "no label column": raw(
        columns(image=[b"a", b"b"], x=[0, 1]), named="data.label_column", code="data.no_column"
    ),
    "images that are words": raw(
        columns(image=["a", "b"], label=[0, 1]), named="data.image_column", code="data.wrong_format"
    ),
    "labels that are fractions": table("data.wrong_labels", "double", labels=[0.5, 1.5]),
    "labels that are missing": table("data.no_labels", "row 1", labels=[0, None, 1]),
    "names that are missing": table("data.no_labels", "1 of 2", labels=["a", None]),
    "one declared class": table("data.one_class", "['a']", labels=[0, 0], names=["a"]),
    "labels below their names": table(
        "data.wrong_labels", "-1 in row 2", labels=[0, 1, -1], names=["a", "b"]
    ),
    "labels that are withheld": table(
        "data.wrong_labels", "3 of 3", labels=[-1, -1, -1], names=["a", "b"]
    ),
    "labels that are lists": table("data.wrong_labels", "list", labels=[[0], [1]]),
    "labels below 0": table("data.wrong_labels", "-1 in row 1", labels=[0, -1, 1]),
    "labels beyond their names": table(
        "data.wrong_labels", "2 in row 2", labels=[0, 1, 2], names=["a", "b"]
    ),
    "labels that differ in case": table("data.duplicate_class", "'Cat'", labels=["cat", "Cat"]),
    "metadata that is no JSON": raw(described(b"{"), named="metadata"),
    "metadata that is a list": raw(described(b"[]"), named="metadata"),
    "metadata of another shape": raw(described(b'{"info": {"features": [1]}}'), named="metadata"),
    "names that are numbers": raw(
        described(
            json.dumps(
                {"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, 2]}}}}
            ).encode()
        ),
        named="'label'",
    ),
    "classes without names or number": raw(
        described(json.dumps({"info": {"features": {"label": {"_type": "ClassLabel"}}}}).encode()),
        named="'label'",
    ),
    "a column that is not there": training(
        "parquet:t.parquet",
        "data.no_column",
        "'label'",
        {"t.parquet": lambda path: make_parquet(path, [0, 1] * 4)},
        "data.label_column=labl",
    ),
    "a label column of images": training(
        "parquet:t.parquet",
        "data.wrong_labels",
        "struct",
        {"t.parquet": lambda path: make_parquet(path, [0, 1] * 4)},
        "data.label_column=img",
    ),
    "pages that are damaged": training(
        "parquet:t.parquet", "data.unreadable", "t.parquet", {"t.parquet": flipped(0.3)}
    ),
    "a row without an image": training(
        "parquet:t.parquet",
        "data.unreadable",
        "t.parquet row 0",
        {"t.parquet": lambda path: make_parquet(path, [0, 1], images=[None, None])},
        "data.val_fraction=0",
    ),
    "a row that names a file of the system": training(
        "parquet:t.parquet",
        "data.unreadable",
        "/etc/passwd",
        {
            "t.parquet": lambda path: make_parquet(
                path, [0, 1], images=[{"bytes": None, "path": "/etc/passwd"}] * 2
            )
        },
        "data.val_fraction=0",
    ),
    "splits of other classes": Bad(
        "data info parquet:d",
        "data.split_mismatch",
        "'test'",
        {
            "d/train.parquet": lambda path: make_parquet(path, [0, 1], names=["a", "b"]),
            "d/test.parquet": lambda path: make_parquet(path, [0, 1], names=["b", "a"]),
        },
    ),
    "splits of other types": Bad(
        "data info parquet:d",
        "data.split_mismatch",
        "label column",
        {
            "d/train.parquet": lambda path: make_parquet(path, [0, 1]),
            "d/test.parquet": lambda path: make_parquet(path, ["0", "1"]),
        },
    ),
    "a split without the column": Bad(
        "data scan parquet:d",
        "data.no_column",
        "d/test.parquet",
        {
            "d/train.parquet": lambda path: make_parquet(path, [0, 1]),
            "d/test.parquet": lambda path: make_parquet(path, [0, 1], image="picture"),
        },
    ),
}


def listed(code: str, named: str, *labels: Any, words: str = f"{TABLE} --multilabel") -> Bad:
    """A table with these lists of labels."""
    return table(code, named, words=words, labels=list(labels))


def flags(code: str, named: str, **more: Any) -> Bad:
    """A table with a column of 0 and 1 for ant, and others."""
    make = {"t.parquet": columns(image=[png(1), png(2)], ant=[0, 1], **more)}
    return Bad(f"{TABLE} --multilabel", code, named, make)


def several(code: str, named: str, *rows: str) -> Bad:
    """A CSV file of these lines, with several labels an image."""
    files = lines(code, named, *rows).files
    return Bad("data info csv:t.csv --multilabel", code, named, files)


def save_multilabel(folder: Path) -> None:
    """A model that gives an image any number of two labels."""
    args = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    settings: dict[str, Any] = {"args": args, "image_size": 16, "pretrained": False}
    built = build("vit_tiny_patch16_224", num_classes=2, multilabel=True, **settings)
    folder.mkdir()
    save_model(
        folder,
        built,
        built.model.state_dict(),
        class_names=["0", "1"],
        preprocessing=built.preprocessing,
        multilabel=True,
    )


LABELS = {
    "one label in the place of a list": listed("data.wrong_labels", "int64", 0, 1),
    "a list where one label is asked": listed("data.wrong_labels", "multilabel", [0], words=TABLE),
    "a list that is missing": listed("data.no_labels", "row 1", [0, 1], None),
    "a label in a list that is missing": listed("data.no_labels", "row 2", [0], [1], [0, None]),
    "a label below 0": listed("data.wrong_labels", "-1 in row 1", [0, 1], [0, -1]),
    "a label that is a fraction": listed("data.wrong_labels", "double", [0.5], [1.0]),
    "lists of lists": listed("data.wrong_labels", "list", [[0]], [[1]]),
    "no label at all": listed("data.no_labels", "'train'", [], []),
    "one class": listed("data.one_class", "'1'", [1], [1]),
    "names that differ in case": listed("data.duplicate_class", "'Cat'", ["cat"], ["Cat", "dog"]),
    "a label that the names lack": Bad(
        f"{TABLE} --multilabel",
        "data.wrong_labels",
        "5 in row 1",
        {"t.parquet": lambda path: make_parquet(path, [[0], [1, 5]], names=["a", "b"])},
    ),
    "a column with a 2": flags("data.wrong_labels", "2 in row 0", bee=[2, 0]),
    "a column with a NaN": flags("data.wrong_labels", "nan in row 1", bee=[0.0, float("nan")]),
    "a column with a fraction": flags("data.wrong_labels", "0.5 in row 0", bee=[0.5, 1.0]),
    "a column with a gap": flags("data.wrong_labels", "row 1", bee=[0, None]),
    "a column of words": flags("data.wrong_labels", "'bee'", bee=["0", "1"]),
    "columns without a 1": flags("data.wrong_labels", "'bee'", bee=["", ""]),
    "a line with a 2": several("data.wrong_labels", "line 3", "path,a,b", "1.png,1,0", "2.png,2,1"),
    "a line with a NaN": several("data.wrong_labels", "'nan'", "path,a,b", "1.png,nan,0"),
    "a line with a gap": several("data.wrong_labels", "'b'", "path,a,b", "1.png,1,"),
    "a line without a label": several("data.no_labels", "[]", HEAD, "1.png,a|b", "2.png,"),
    "an empty name": several("data.wrong_labels", "'a||b'", HEAD, "1.png,a||b", "2.png,a"),
    "an empty set beside a label": several(
        "data.wrong_labels", "in line 2", HEAD, "1.png,a|b", "1.png,[]"
    ),
    "lines of 0 and 1 that differ": several(
        "data.wrong_labels", "in line 2", "path,a,b", "1.png,1,0", "1.png,1,1"
    ),
    "a lone column of 0 and 1": several(
        "data.one_class", "'cat'", "path,cat", "1.png,0", "2.png,1"
    ),
    "an image of two splits": several(
        "data.ambiguous", "in line 2", HEAD + ",split", "1.png,a,train", "1.png,b,test"
    ),
    "no line with a label": several("data.no_labels", "t.csv", "path,a,b", "1.png,0,0"),
    "a column that is not there": Bad(
        "train r.yaml data.task=multilabel data.label_column=[ant,bea] --out run",
        "data.no_column",
        "'bee'",
        {
            "t.parquet": columns(image=[png(1), png(2)], ant=[0, 1], bee=[1, 0]),
            "r.yaml": RECIPE.replace("SOURCE", "parquet:t.parquet"),
        },
    ),
    "a folder of classes": Bad("data info folder:d --multilabel", "data.no_labels", "cat|dog", FEW),
    "digits that have one label": Bad(
        "data info embedded:digits --multilabel", "data.wrong_labels", "embedded:digits"
    ),
    "other classes than the model's": Bad(
        "eval run --data parquet:t.parquet",
        "data.wrong_classes",
        "'dog'",
        {
            "t.parquet": lambda path: make_parquet(path, [["1"], ["dog"]]),
            "run": save_multilabel,
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


@parametrised(CSV_FILES)
def test_csv_files(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: CSV files", PROMISE)


@parametrised(LABELS)
def test_several_labels(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: several labels an image", PROMISE)


@parametrised(TABLES)
def test_tables(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: parquet", PROMISE)
