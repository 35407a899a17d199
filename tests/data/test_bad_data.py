"""Invalid datasets: one message that names the cause, its exit code, and no file is changed.

The only place that tests what the readers of data sources refuse; each case runs a command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_input import BadInput, Content, check_bad_input, parametrize_bad_inputs
from small_datasets import random_png, write_parquet

from finetune.models.build import build_model
from finetune.models.save import save_model

INFO_COMMAND = "data info parquet:t.parquet"
TRAIN_COMMAND = "train r.yaml --out run"
RECIPE = """\
model: {name: embedded:vit_nano}
data: {source: "SOURCE", batch_size: 2}
optim: {lr: 1e-3, steps: 2}
run: {precision: fp32, threads: 1}
"""


def image_folder(
    code: str, named: str, *names: str, command: str = "data info folder:d", **extra_files: Content
) -> BadInput:
    """Case: a folder source with a valid image at each of these paths."""
    files: dict[str, Content] = {f"d/{name}": random_png(place) for place, name in enumerate(names)}
    return BadInput(
        command, code, named, {**files, **{f"d/{key}": value for key, value in extra_files.items()}}
    )


def parquet_table(
    code: str, named: str, *, command: str = INFO_COMMAND, **options: Any
) -> BadInput:
    """Case: a parquet table; labels are 0, 1, 0, 1 by default."""
    labels = options.pop("labels", [0, 1, 0, 1])
    files = {"t.parquet": lambda path: write_parquet(path, labels, **options)}
    return BadInput(command, code, named, files)


def parquet_file(
    content: Content, *, named: str = "t.parquet", code: str = "data.damaged"
) -> BadInput:
    return BadInput(INFO_COMMAND, code, named, {"t.parquet": content})


def write_columns(**named: Any) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table(named), path)


def truncated_parquet(fraction: float) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content = write_parquet(path, [0, 1] * 50).read_bytes()
        path.write_bytes(content[: int(len(content) * fraction)])

    return write


def parquet_with_flipped_bytes(position: float) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content = bytearray(write_parquet(path, [0, 1] * 50).read_bytes())
        for offset in range(20):
            content[int(len(content) * position) + offset] ^= 0xFF
        path.write_bytes(content)

    return write


def parquet_with_metadata(text: bytes) -> Callable[[Path], None]:
    """Return a writer of a table with this `datasets` metadata."""

    def write(path: Path) -> None:
        table = pq.read_table(write_parquet(path, [0, 1, 0, 1]))
        pq.write_table(table.replace_schema_metadata({"huggingface": text}), path)

    return write


def training_on(
    source: str, code: str, named: str, files: dict[str, Content], *overrides: str
) -> BadInput:
    recipe = RECIPE.replace("SOURCE", source)
    return BadInput(
        [*TRAIN_COMMAND.split(), *overrides],
        code,
        named,
        {**files, "r.yaml": recipe},
        may_create="run",
    )


def symlink_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def csv_lines(code: str, named: str, *rows: str) -> BadInput:
    """Case: a CSV file with these lines, next to two images."""
    files = {
        "1.png": random_png(1),
        "2.png": random_png(2),
        "t.csv": "".join(f"{row}\n" for row in rows),
    }
    return BadInput("data info csv:t.csv", code, named, files)


CSV_HEADER = "path,label"
THREE_IMAGES = {"d/a/1.png": random_png(1), "d/a/2.png": random_png(2), "d/b/2.png": random_png(3)}
KAGGLE = {"train.csv": "id,label\n1,a\n"}
TRAIN_IMAGE_A, TRAIN_IMAGE_B = "train/a/1.png", "train/b/1.png"
SOURCES = {
    "only a prefix": BadInput("data info folder:", "data.wrong_source", "'folder:'"),
    "a URL": BadInput(
        "data info https://example.org/d.zip", "data.wrong_source", "tar:https://example.org/d.zip"
    ),
    "a path without a prefix": BadInput(
        "eval embedded:vit_nano --data d", "data.empty", "folder:d", {"d": Path.mkdir}
    ),
    "a NUL byte": BadInput(["data", "info", "folder:a\0b"], "data.wrong_format", "folder:a"),
    "a NUL byte, parquet": BadInput(["data", "info", "parquet:a\0b"], "data.empty", "parquet:a"),
    "a name too long": BadInput(
        ["data", "info", f"folder:{'x' * 5000}"], "data.unreadable", "folder:xxx"
    ),
    "a name too long, parquet": BadInput(
        ["data", "info", f"parquet:{'x' * 5000}"], "data.unreadable", "parquet:xxx"
    ),
    "a password with a slash": BadInput(
        "data info tar:http://me:4711/word@host/x.tar", "data.wrong_source", "percent-encode"
    ),
    **{
        f"braces before the host, {braces}": BadInput(
            ["data", "info", f"tar:{braces}me:word@host/x.tar"], "data.wrong_source", "braces"
        )
        for braces in ("{http://a,http://b", "http{,}://", "http:{//,//}", "{http,http}://")
    },
    "parquet without a path": BadInput("data info parquet", "data.wrong_source", "hub:owner/name"),
    "hub without a name": BadInput("data info hub:", "data.wrong_source", "'hub:'"),
    "an unknown embedded dataset": BadInput(
        "data info embedded:digit", "data.wrong_source", "'digits'"
    ),
    "a hub name of one part": BadInput("data info hub:cifar10", "data.wrong_source", "hub:cifar10"),
    "a hub name with a space": BadInput(
        ["data", "info", "hub:a b/c"], "data.wrong_source", "hub:a b/c"
    ),
    "a hub name that is also a local folder": BadInput(
        "data info hub:a/b", "data.ambiguous", "'a/b'", {"a/b/x": b""}
    ),
}
FOLDERS = {
    "no such folder": BadInput(
        "data info folder:date", "data.not_found", "'data'", {"data": Path.mkdir}
    ),
    "a file": BadInput("data info folder:d", "data.wrong_format", "folder:d", {"d": b""}),
    "empty": BadInput("data info folder:d", "data.empty", "folder:d", {"d": Path.mkdir}),
    "files without classes": image_folder("data.empty", "folder:d", "1.png", "2.png"),
    "one class": image_folder("data.one_class", "'a'", "a/1.png", "a/2.png"),
    "a folder in a folder": image_folder("data.one_class", "'d/p'", "p/a/1.png", "p/b/1.png"),
    "labels in a table": image_folder(
        "data.no_labels",
        "finetune train csv:d/train.csv data.label_column=breed",
        "images/1.png",
        **{"train.csv": "id,breed\n1,a\n", "test.csv": "id\n2\n"},
    ),
    "labels in a table, and splits": image_folder(
        "data.no_labels", "finetune train csv:d/train.csv", "train/1.png", "test/2.png", **KAGGLE
    ),
    "labels in a table, and folders like splits": image_folder(
        "data.no_labels", "csv:d/train.csv", "train_images/1.png", "test_images/2.png", **KAGGLE
    ),
    "an empty class": image_folder("data.empty", ": b", "a/1.png", **{"b": Path.mkdir}),
    "an empty class of train": image_folder(
        "data.empty", "train: b", TRAIN_IMAGE_A, **{"train/b": Path.mkdir}
    ),
    "an empty class of test": image_folder(
        "data.empty", "test: a", TRAIN_IMAGE_A, TRAIN_IMAGE_B, **{"test/a": Path.mkdir}
    ),
    "splits without classes": image_folder("data.empty", "/train", "train/1.png", "test/1.png"),
    "a class of text files": image_folder("data.empty", ": b", "a/1.png", **{"b/x.txt": b"x"}),
    "classes that differ in case": image_folder(
        "data.duplicate_class", "'A'", "a/1.png", "A/1.png"
    ),
    "classes of two splits that differ in case": image_folder(
        "data.duplicate_class", "'cat'", "train/cat/1.png", TRAIN_IMAGE_B, "test/Cat/1.png"
    ),
    "classes that differ in Unicode form": image_folder(
        "data.duplicate_class", "'caf\u00e9'", "caf\u00e9/1.png", "cafe\u0301/1.png"
    ),
    "classes that differ in a space": image_folder(
        "data.duplicate_class", "'a'", "a/1.png", "a /1.png"
    ),
    "classes that differ in the number of spaces": image_folder(
        "data.duplicate_class", "'a b'", "a b/1.png", "a  b/1.png"
    ),
    "classes that differ in width": image_folder(
        "data.duplicate_class", "'1'", "1/1.png", "\uff11/1.png"
    ),
    "classes that differ in an invisible character": image_folder(
        "data.duplicate_class", "'a'", "a/1.png", "a\u200b/1.png"
    ),
    "a run next to the classes": image_folder(
        "data.wrong_format",
        "/r has",
        TRAIN_IMAGE_A,
        TRAIN_IMAGE_B,
        "train/r/1.png",
        **{"train/r/run.json": b"{}"},
    ),
    "runs next to the classes": image_folder(
        "data.wrong_format",
        "/x has",
        "a/1.png",
        "b/1.png",
        "runs/x/curves.png",
        **{"runs/x/results.json": b"{}"},
    ),
    "splits one folder deeper": image_folder(
        "data.wrong_format", "/train'?", "train/train/a/1.png", "train/test/a/1.png"
    ),
    "a class that is only in test": image_folder(
        "data.split_mismatch", ": c", TRAIN_IMAGE_A, TRAIN_IMAGE_B, "test/c/1.png"
    ),
    "val twice": image_folder(
        "data.ambiguous", "'valid'", TRAIN_IMAGE_A, TRAIN_IMAGE_B, "val/a/1.png", "valid/b/1.png"
    ),
    "an empty split": image_folder(
        "data.empty", "d/test", TRAIN_IMAGE_A, TRAIN_IMAGE_B, **{"test": Path.mkdir}
    ),
    "a split next to classes": image_folder("data.ambiguous", "'test'", "test/a/1.png", "b/1.png"),
    "one class in a split": image_folder("data.one_class", "'a'", TRAIN_IMAGE_A, "test/a/1.png"),
    "a link from class to class": image_folder(
        "data.wrong_link", "d/b/l", "a/1.png", "b/1.png", **{"b/l": symlink_to("../a")}
    ),
    "a link upwards": image_folder(
        "data.wrong_link", "d/b/l", "a/1.png", "b/1.png", **{"b/l": symlink_to("../../d")}
    ),
    "images that cannot be read": BadInput(
        "data scan folder:d",
        "data.unreadable",
        "1 of 3",
        {"d/a/1.png": random_png(1), "d/b/1.png": random_png(2), "d/b/2.png": b"no"},
    ),
    "a class without a readable image": training_on(
        "folder:d",
        "data.unreadable",
        "b/1.png",
        {
            "d/a/1.png": random_png(1),
            "d/a/2.png": random_png(2),
            "d/b/1.png": b"no",
            "d/b/2.png": b"no",
        },
        "data.unreadable=quarantine",
    ),
    "a pipe for an image": training_on(
        "folder:d", "data.unreadable", "b/1.png", {**THREE_IMAGES, "d/b/1.png": os.mkfifo}
    ),
    "a device for an image": training_on(
        "folder:d",
        "data.unreadable",
        "b/1.png",
        {
            "d/a/1.png": random_png(1),
            "d/a/2.png": random_png(2),
            "d/b/1.png": symlink_to("/dev/zero"),
            "d/b/2.png": random_png(3),
        },
    ),
}
CSV_FILES = {
    "no such file": BadInput(
        "train label.csv", "data.not_found", "'labels.csv'", {"labels.csv": ""}
    ),
    "a name without its prefix": BadInput(
        "eval embedded:vit_nano --data t.csv", "data.empty", "t.csv", {"t.csv": ""}
    ),
    "a folder with that name": BadInput(
        "data info csv:t.csv", "data.not_a_file", "t.csv", {"t.csv": Path.mkdir}
    ),
    "a pipe": BadInput("data info csv:t.csv", "data.not_a_file", "t.csv", {"t.csv": os.mkfifo}),
    "zero bytes": csv_lines("data.empty", "path,label"),
    "an empty line": csv_lines("data.empty", "path,label", ""),
    "a URL": csv_lines(
        "data.no_image", "'https://a.org/1.png'", "path,label", "https://a.org/1.png,a", "2.png,b"
    ),
    "a Windows path": csv_lines(
        "data.not_found", "write / for", "path,label", "img\\1.png,a", "2.png,b"
    ),
    "only a header": csv_lines("data.empty", "t.csv", "path,label"),
    "no header": csv_lines("data.no_column", "line 1", "1.png,a", "2.png,b"),
    "no path column": csv_lines("data.no_column", "data.image_column", "name,label", "1.png,a"),
    "no label column": csv_lines("data.no_column", "data.label_column", "path,x", "1.png,a"),
    "two label columns": csv_lines("data.ambiguous", "'label'", "path,label,label", "1.png,a,b"),
    "two split columns": csv_lines(
        "data.ambiguous", "'split'", "path,label,split,split", "1.png,a,train,test"
    ),
    "label columns that differ in case": csv_lines(
        "data.ambiguous", "'Label'", "path,Label,label", "1.png,a,b"
    ),
    "split columns that differ in case": csv_lines(
        "data.ambiguous", "'Split'", "path,label,split,Split", "1.png,a,train,test"
    ),
    "a missing label": csv_lines("data.no_labels", "line 3", CSV_HEADER, "1.png,a", "2.png, "),
    "a missing path": csv_lines("data.no_image", "line 2", CSV_HEADER, ",a"),
    "a missing file": csv_lines("data.not_found", "line 3", CSV_HEADER, "1.png,a", "3.png,b"),
    "a path outside the folder": csv_lines("data.unsafe", "line 2", CSV_HEADER, "../1.png,a"),
    "an absolute path": csv_lines("data.unsafe", "line 2", CSV_HEADER, "/etc/passwd,a"),
    "a path that leads outside the folder": csv_lines(
        "data.unsafe", "line 2", CSV_HEADER, "img/../../1.png,a"
    ),
    "the folder itself": csv_lines("data.unsafe", "line 3", CSV_HEADER, "1.png,a", ".,b"),
    "a mistyped file": csv_lines(
        "data.not_found", "did you mean", CSV_HEADER, "1.png,a", "2.pgn,b"
    ),
    "two missing files": csv_lines(
        "data.not_found", "1 more", CSV_HEADER, "1.png,a", "3.png,b", "4.png,b"
    ),
    "an image with two labels": csv_lines(
        "data.wrong_labels", "in line 2", CSV_HEADER, "1.png,a", "./1.png,b"
    ),
    "an image in two splits": csv_lines(
        "data.ambiguous", "in line 2", CSV_HEADER + ",split", "1.png,a,train", "1.png,a,test"
    ),
    "an unknown split": csv_lines("data.no_split", "'dev'", CSV_HEADER + ",split", "1.png,a,dev"),
    "one field too few": csv_lines("data.wrong_format", "line 3", CSV_HEADER, "1.png,a", "2.png"),
    "one field too many": csv_lines("data.wrong_format", "line 2", CSV_HEADER, "1.png,a,b"),
    "a wrong line below a field of two lines": csv_lines(
        "data.wrong_format", "line 5", CSV_HEADER, "1.png,a", '2.png,"x', 'y"', "1.png,b,c"
    ),
    "an open quote": csv_lines("data.wrong_format", "quote", CSV_HEADER, '1.png,"a', "2.png,b"),
    "a field of 200,000 characters": csv_lines(
        "data.wrong_format", "line 2", CSV_HEADER, "1.png," + "a" * 200_000
    ),
    "a NUL": csv_lines("data.wrong_format", "line 3", CSV_HEADER, "1.png,a", "2.png,\0"),
    "another encoding": BadInput(
        "data info csv:t.csv", "data.wrong_format", "line 2", {"t.csv": b"path,label\n\xe4.png,a"}
    ),
    "UTF-16": BadInput(
        "data info csv:t.csv", "data.wrong_format", "line 1", {"t.csv": CSV_HEADER.encode("utf-16")}
    ),
    "one class": csv_lines("data.one_class", "'a'", CSV_HEADER, "1.png,a", "2.png,a"),
    "classes that differ in case": csv_lines(
        "data.duplicate_class", "'A'", CSV_HEADER, "1.png,a", "2.png,A"
    ),
    "two forms of one number": csv_lines(
        "data.duplicate_class", "'1.0'", CSV_HEADER, "1.png,1", "2.png,1.0"
    ),
    "a metadata.csv without labels": BadInput(
        "data info folder:d",
        "data.no_column",
        "data.label_column",
        {"d/1.png": random_png(1), "d/metadata.csv": "file_name,text\n1.png,a cat\n"},
    ),
    "an image that cannot be read": BadInput(
        "data scan csv:t.csv",
        "data.unreadable",
        "1 of 2",
        {"1.png": random_png(1), "2.png": b"no", "t.csv": f"{CSV_HEADER}\n1.png,a\n2.png,b\n"},
    ),
}
TABLES = {
    "a pipe": parquet_file(os.mkfifo, code="data.empty"),
    "a folder with that name": parquet_file(Path.mkdir, code="data.empty"),
    "truncated in the middle": parquet_file(truncated_parquet(0.5)),
    "truncated at the end": parquet_file(truncated_parquet(0.999)),
    "no rows": parquet_table("data.empty", "'train'", labels=[], label_type=pa.int64()),
    "one class": parquet_table("data.one_class", "'1'", labels=[1, 1]),
    "no image column": parquet_file(
        write_columns(label=[0, 1], x=["a", "b"]), named="data.image_column", code="data.no_column"
    ),
    "no label column": parquet_file(
        write_columns(image=[b"a", b"b"], x=[0, 1]),
        named="data.label_column",
        code="data.no_column",
    ),
    "images that are strings": parquet_file(
        write_columns(image=["a", "b"], label=[0, 1]),
        named="data.image_column",
        code="data.wrong_format",
    ),
    "fractional labels": parquet_table("data.wrong_labels", "double", labels=[0.5, 1.5]),
    "missing labels": parquet_table("data.no_labels", "row 1", labels=[0, None, 1]),
    "missing class names": parquet_table("data.no_labels", "1 of 2", labels=["a", None]),
    "one declared class": parquet_table("data.one_class", "['a']", labels=[0, 0], names=["a"]),
    "negative labels with class names": parquet_table(
        "data.wrong_labels", "-1 in row 2", labels=[0, 1, -1], names=["a", "b"]
    ),
    "only labels of -1": parquet_table(
        "data.wrong_labels", "3 of 3", labels=[-1, -1, -1], names=["a", "b"]
    ),
    "labels that are lists": parquet_table("data.wrong_labels", "list", labels=[[0], [1]]),
    "negative labels": parquet_table("data.wrong_labels", "-1 in row 1", labels=[0, -1, 1]),
    "labels beyond the class names": parquet_table(
        "data.wrong_labels", "2 in row 2", labels=[0, 1, 2], names=["a", "b"]
    ),
    "text under declared class names": parquet_table(
        "data.wrong_labels", "are text", labels=["a", "b"], names=["a", "b"]
    ),
    "labels that differ in case": parquet_table(
        "data.duplicate_class", "'Cat'", labels=["cat", "Cat"]
    ),
    "metadata that is no JSON": parquet_file(parquet_with_metadata(b"{"), named="metadata"),
    "metadata that is a list": parquet_file(parquet_with_metadata(b"[]"), named="metadata"),
    "metadata of another shape": parquet_file(
        parquet_with_metadata(b'{"info": {"features": [1]}}'), named="metadata"
    ),
    "class names that are numbers": parquet_file(
        parquet_with_metadata(
            json.dumps(
                {"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, 2]}}}}
            ).encode()
        ),
        named="'label'",
    ),
    "a ClassLabel without names or number": parquet_file(
        parquet_with_metadata(
            json.dumps({"info": {"features": {"label": {"_type": "ClassLabel"}}}}).encode()
        ),
        named="'label'",
    ),
    "a missing column": training_on(
        "parquet:t.parquet",
        "data.no_column",
        "'label'",
        {"t.parquet": lambda path: write_parquet(path, [0, 1] * 4)},
        "data.label_column=labl",
    ),
    "a label column of images": training_on(
        "parquet:t.parquet",
        "data.wrong_labels",
        "struct",
        {"t.parquet": lambda path: write_parquet(path, [0, 1] * 4)},
        "data.label_column=img",
    ),
    "damaged pages": training_on(
        "parquet:t.parquet",
        "data.unreadable",
        "t.parquet",
        {"t.parquet": parquet_with_flipped_bytes(0.3)},
    ),
    "a row without an image": training_on(
        "parquet:t.parquet",
        "data.unreadable",
        "t.parquet row 0",
        {"t.parquet": lambda path: write_parquet(path, [0, 1], images=[None, None])},
        "data.val_fraction=0",
    ),
    "a row with an absolute path": training_on(
        "parquet:t.parquet",
        "data.unreadable",
        "/etc/passwd",
        {
            "t.parquet": lambda path: write_parquet(
                path, [0, 1], images=[{"bytes": None, "path": "/etc/passwd"}] * 2
            )
        },
        "data.val_fraction=0",
    ),
    "splits with different classes": BadInput(
        "data info parquet:d",
        "data.split_mismatch",
        "'test'",
        {
            "d/train.parquet": lambda path: write_parquet(path, [0, 1], names=["a", "b"]),
            "d/test.parquet": lambda path: write_parquet(path, [0, 1], names=["b", "a"]),
        },
    ),
    "files of a split with different classes": BadInput(
        "data info parquet:d",
        "data.split_mismatch",
        "train-1.parquet",
        {
            "d/train-0.parquet": lambda path: write_parquet(path, [0, 1], names=["a", "b"]),
            "d/train-1.parquet": lambda path: write_parquet(path, [0, 1], names=["b", "a"]),
        },
    ),
    "splits with different label types": BadInput(
        "data info parquet:d",
        "data.split_mismatch",
        "label column",
        {
            "d/train.parquet": lambda path: write_parquet(path, [0, 1]),
            "d/test.parquet": lambda path: write_parquet(path, ["0", "1"]),
        },
    ),
    "a split without the column": BadInput(
        "data scan parquet:d",
        "data.no_column",
        "d/test.parquet",
        {
            "d/train.parquet": lambda path: write_parquet(path, [0, 1]),
            "d/test.parquet": lambda path: write_parquet(path, [0, 1], image="picture"),
        },
    ),
}


def label_lists(
    code: str, named: str, *labels: Any, command: str = f"{INFO_COMMAND} --multilabel"
) -> BadInput:
    """Case: a table with these lists of labels."""
    return parquet_table(code, named, command=command, labels=list(labels))


def label_flags(code: str, named: str, **other_columns: Any) -> BadInput:
    """Case: a table with a 0/1 column `ant` and other columns."""
    files = {
        "t.parquet": write_columns(
            image=[random_png(1), random_png(2)], ant=[0, 1], **other_columns
        )
    }
    return BadInput(f"{INFO_COMMAND} --multilabel", code, named, files)


def multilabel_csv(code: str, named: str, *rows: str) -> BadInput:
    """Case: a multi-label CSV file with these lines."""
    files = csv_lines(code, named, *rows).files
    return BadInput("data info csv:t.csv --multilabel", code, named, files)


def save_multilabel_model(folder: Path) -> None:
    """Save a multi-label model with two labels."""
    args = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    settings: dict[str, Any] = {"args": args, "image_size": 16, "pretrained": False}
    built_model = build_model("vit_tiny_patch16_224", num_classes=2, multilabel=True, **settings)
    folder.mkdir()
    save_model(
        folder,
        built_model,
        built_model.model.state_dict(),
        class_names=["0", "1"],
        preprocessing=built_model.preprocessing,
        multilabel=True,
    )


MULTILABEL = {
    "one label instead of a list": label_lists("data.wrong_labels", "int64", 0, 1),
    "a list instead of one label": label_lists(
        "data.wrong_labels", "multilabel", [0], command=INFO_COMMAND
    ),
    "a missing list": label_lists("data.no_labels", "row 1", [0, 1], None),
    "a missing label in a list": label_lists("data.no_labels", "row 2", [0], [1], [0, None]),
    "a negative label": label_lists("data.wrong_labels", "-1 in row 1", [0, 1], [0, -1]),
    "a fractional label": label_lists("data.wrong_labels", "double", [0.5], [1.0]),
    "lists of lists": label_lists("data.wrong_labels", "list", [[0]], [[1]]),
    "only empty lists": label_lists("data.no_labels", "'train'", [], []),
    "one class": label_lists("data.one_class", "'1'", [1], [1]),
    "labels that differ in case": label_lists(
        "data.duplicate_class", "'Cat'", ["cat"], ["Cat", "dog"]
    ),
    "a label without a class name": BadInput(
        f"{INFO_COMMAND} --multilabel",
        "data.wrong_labels",
        "5 in row 1",
        {"t.parquet": lambda path: write_parquet(path, [[0], [1, 5]], names=["a", "b"])},
    ),
    "a column with a 2": label_flags("data.wrong_labels", "2 in row 0", bee=[2, 0]),
    "a column with a NaN": label_flags(
        "data.wrong_labels", "nan in row 1", bee=[0.0, float("nan")]
    ),
    "a column with a fraction": label_flags("data.wrong_labels", "0.5 in row 0", bee=[0.5, 1.0]),
    "a column with a missing value": label_flags("data.wrong_labels", "row 1", bee=[0, None]),
    "a column of strings": label_flags("data.wrong_labels", "'bee'", bee=["0", "1"]),
    "columns of empty strings": label_flags("data.wrong_labels", "'bee'", bee=["", ""]),
    "a line with a 2": multilabel_csv(
        "data.wrong_labels", "line 3", "path,a,b", "1.png,1,0", "2.png,2,1"
    ),
    "a line with a NaN": multilabel_csv("data.wrong_labels", "'nan'", "path,a,b", "1.png,nan,0"),
    "a line with a missing value": multilabel_csv(
        "data.wrong_labels", "'b'", "path,a,b", "1.png,1,"
    ),
    "a line without a label": multilabel_csv(
        "data.no_labels", "[]", CSV_HEADER, "1.png,a|b", "2.png,"
    ),
    "an empty name": multilabel_csv(
        "data.wrong_labels", "'a||b'", CSV_HEADER, "1.png,a||b", "2.png,a"
    ),
    "an empty set and a label for one image": multilabel_csv(
        "data.wrong_labels", "in line 2", CSV_HEADER, "1.png,a|b", "1.png,[]"
    ),
    "different 0/1 lines for one image": multilabel_csv(
        "data.wrong_labels", "in line 2", "path,a,b", "1.png,1,0", "1.png,1,1"
    ),
    "a single 0/1 column": multilabel_csv(
        "data.one_class", "'cat'", "path,cat", "1.png,0", "2.png,1"
    ),
    "an image in two splits": multilabel_csv(
        "data.ambiguous", "in line 2", CSV_HEADER + ",split", "1.png,a,train", "1.png,b,test"
    ),
    "no image with a label": multilabel_csv("data.no_labels", "t.csv", "path,a,b", "1.png,0,0"),
    "a missing column": BadInput(
        "train r.yaml data.task=multilabel data.label_column=[ant,bea] --out run",
        "data.no_column",
        "'bee'",
        {
            "t.parquet": write_columns(
                image=[random_png(1), random_png(2)], ant=[0, 1], bee=[1, 0]
            ),
            "r.yaml": RECIPE.replace("SOURCE", "parquet:t.parquet"),
        },
    ),
    "a folder of classes": BadInput(
        "data info folder:d --multilabel", "data.no_labels", "cat|dog", THREE_IMAGES
    ),
    "digit pairs without multi-label": BadInput(
        "data info embedded:digit_pairs", "data.wrong_labels", "data.task=multilabel"
    ),
    "a label that only the test split has": BadInput(
        "data info parquet:d --multilabel",
        "data.split_mismatch",
        "dog",
        {
            "d/train.parquet": lambda path: write_parquet(path, [["ant"], ["bee"]]),
            "d/test.parquet": lambda path: write_parquet(path, [["ant", "dog"]]),
        },
    ),
    "digits have one label each": BadInput(
        "data info embedded:digits --multilabel", "data.wrong_labels", "embedded:digits"
    ),
    "classes that the model does not have": BadInput(
        "eval run --data parquet:t.parquet",
        "data.wrong_classes",
        "'dog'",
        {
            "t.parquet": lambda path: write_parquet(path, [["1"], ["dog"]]),
            "run": save_multilabel_model,
        },
    ),
}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


GROUPS = {
    "source": SOURCES,
    "folder": FOLDERS,
    "csv": CSV_FILES,
    "parquet": TABLES,
    "multilabel": MULTILABEL,
}


@parametrize_bad_inputs(
    {f"{group}: {name}": bad for group, cases in GROUPS.items() for name, bad in cases.items()}
)
def test_invalid_data_is_refused(bad: BadInput) -> None:
    check_bad_input(bad)
