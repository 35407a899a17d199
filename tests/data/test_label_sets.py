"""Several labels an image, of every kind of source: the same matrix, and its splits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from refusals import refused
from samples import make_folder, make_parquet, png, write
from tars import tar

from finetune.cli.main import main
from finetune.data.decode_all import info, scan, without_unreadable
from finetune.data.from_recipe import data_of
from finetune.data.source import Source, Split, open_source
from finetune.data.splits import keep_classes, merge_val, split_train, take
from finetune.recipe.load import DataSection

SETS = [["ant", "cat"], ["bee"], [], ["cat", "bee", "ant"]]
MATRIX = [[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]
NAMES = ["ant", "bee", "cat"]


def opened(source: str, **options: Any) -> Source:
    return open_source(source, multilabel=True, **options)


def of_table(folder: Path, labels: list[Any], features: Any = None, **options: Any) -> Source:
    path = make_parquet(folder / "t.parquet", labels)
    if features is not None:
        table = pa.parquet.read_table(path)
        recorded = json.dumps({"info": {"features": {"label": features}}})
        pa.parquet.write_table(table.replace_schema_metadata({"huggingface": recorded}), path)
    return opened(f"parquet:{path}", **options)


def of_lines(folder: Path, *lines: str) -> Source:
    for number in range(4):
        write(folder / f"{number}.png", png(number))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    assert np.array_equal(
        opened(f"folder:{folder}").splits["train"].labels,
        opened(f"csv:{folder}/labels.csv").splits["train"].labels,
    )
    return opened(f"csv:{folder}/labels.csv")


def declared(folder: Path, wrap: Callable[[Any], Any]) -> Source:
    feature = wrap({"_type": "ClassLabel", "names": NAMES})
    return of_table(folder, [[NAMES.index(name) for name in each] for each in SETS], feature)


def columns(folder: Path, *, names: bool, dtype: type, streaming: bool = False) -> Source:
    """A table with a column of 0 and 1 for each class; named, or all that it has."""
    path = make_parquet(folder / "t.parquet", [0] * 4)
    table = pa.parquet.read_table(path).drop(["label"])
    for name, values in zip(NAMES, np.array(MATRIX).T, strict=True):
        table = table.append_column(name, pa.array([dtype(value) for value in values]))
    if names:
        table = table.append_column("words", pa.array(["x"] * 4))
    pa.parquet.write_table(table, path)
    asked = tuple(NAMES) if names else None
    return opened(f"parquet:{path}", label_column=asked, streaming=streaming)


def of_tar(folder: Path) -> Source:
    members = [
        member
        for number, each in enumerate(SETS)
        for member in (
            (f"{number}.png", png(number)),
            (f"{number}.json", json.dumps({"label": each}).encode()),
        )
    ]
    (folder / "t.tar").write_bytes(tar(members))
    return opened(f"tar:{folder}/t.tar")


SOURCES: dict[str, Callable[[Path], Source]] = {
    "lists of names": lambda f: of_table(f, SETS),
    "lists, streamed": lambda f: of_table(f, SETS, streaming=True),
    "lists of ClassLabel": lambda f: declared(f, lambda one: {"_type": "List", "feature": one}),
    "sequences of ClassLabel": lambda f: declared(
        f, lambda one: {"_type": "Sequence", "feature": one, "length": -1}
    ),
    "an older list of ClassLabel": lambda f: declared(f, lambda one: [one]),
    "columns of integers": lambda f: columns(f, names=True, dtype=int),
    "columns, streamed": lambda f: columns(f, names=True, dtype=int, streaming=True),
    "columns of booleans": lambda f: columns(f, names=False, dtype=bool),
    "columns of floats": lambda f: columns(f, names=False, dtype=float),
    "fields of names": lambda f: of_lines(
        f, "path,label", "0.png,ant|cat", "1.png,bee", "2.png,[]", "3.png, cat | bee|ant"
    ),
    "lines of one image": lambda f: of_lines(
        *(f, "path,label", "0.png,ant", "0.png,cat", "1.png,bee", "2.png,[]", "3.png,cat"),
        *("3.png,bee", "3.png,ant", "3.png,ant"),
    ),
    "fields of 0 and 1": lambda f: of_lines(
        f, "cat,path,bee,ant", "1,0.png,0,1", "0.0,1.png,1.0,0", "0,2.png,0,0", "1,3.png,1,1"
    ),
    "fields of json": of_tar,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_matrix(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path)
    train = source.splits["train"]
    assert source.class_names == NAMES
    has_columns = kind.startswith("columns") or "0 and 1" in kind
    assert sorted(source.columns) == (NAMES if has_columns else [])
    assert train.labels.tolist() == MATRIX
    assert train.labels.dtype == np.uint8
    assert train.classes_of(3) == [0, 1, 2]
    assert train.subset(np.array([2, 0])).labels.tolist() == [MATRIX[2], MATRIX[0]]
    before = train.fingerprint
    flipped = train.labels.copy()
    flipped[3, 1] = 0
    assert dataclasses.replace(train, labels=flipped).fingerprint != before
    assert len(train.read(1)) == 5


def test_a_column_without_a_1_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "1.png", png(1))
    (tmp_path / "t.csv").write_text("path,ant,bee,cat\n1.png,1,0,1\n")
    assert opened(f"csv:{tmp_path}/t.csv").class_names == ["ant", "cat"]
    assert "no classes: bee" in caplog.text


def test_integers_without_names_are_their_own_names(tmp_path: Path) -> None:
    source = of_table(tmp_path, [[7, 2], [7], [], [11]])
    assert source.class_names == ["2", "7", "11"]
    assert source.splits["train"].labels.sum(axis=0).tolist() == [1, 2, 1]


def test_a_class_of_one_split_alone_is_refused(tmp_path: Path) -> None:
    make_parquet(tmp_path / "train-0.parquet", SETS)
    make_parquet(tmp_path / "test-0.parquet", [["ant", "dog"]])
    with refused("data.split_mismatch", "dog"):
        opened(f"parquet:{tmp_path}")


def test_pairs_of_digits_have_both_labels() -> None:
    pairs, digits = opened("embedded:digit_pairs"), open_source("embedded:digits")
    for name, split in pairs.splits.items():
        own = digits.splits[name]
        assert len(split) == len(own)
        assert split.read(0).shape == (8, 16, 3)
        labels = {tuple(own.read(i).ravel()): own.labels[i] for i in range(len(own))}
        for index in range(0, len(split), 41):
            pixels = split.read(index)
            both = {int(labels[tuple(half.ravel())]) for half in np.split(pixels, 2, axis=1)}
            assert split.classes_of(index) == sorted(both)
    with refused("data.wrong_labels", "task=multilabel"):
        open_source("embedded:digit_pairs")
    with refused("data.wrong_labels", "one label"):
        opened("embedded:digits")


def of_matrix(labels: np.ndarray) -> Source:
    items = open_source("embedded:digits").splits["train"].items
    split = Split("train", labels, items, np.arange(len(labels)))
    return Source("x", {"train": split}, [str(k) for k in range(labels.shape[1])], "")


@pytest.fixture(scope="module")
def rare() -> Source:
    """Classes of 2 to 400 of 600 images that come together as they fall."""
    generator = np.random.default_rng(0)
    shares = [0.005, 0.02, 0.1, 0.3, 0.6]
    labels = (generator.random((600, 5)) < shares).astype(np.uint8)
    labels[:, 0] = 0
    labels[[17, 400], 0] = 1
    return of_matrix(labels)


def test_validation_has_about_its_share_of_every_class(rare: Source) -> None:
    labels = rare.splits["train"].labels
    split = split_train(rare, 0.2, 0)
    train, val = (split.splits[name].labels for name in ("train", "val"))
    assert len(train) + len(val) == 600
    assert 0.19 < len(val) / 600 < 0.25
    assert (train.sum(axis=0) + val.sum(axis=0)).tolist() == labels.sum(axis=0).tolist()
    assert (train.sum(axis=0) > 0).all()
    assert val[:, 0].sum() == 1
    wanted = np.maximum(0.2 * labels.sum(axis=0), 1)
    assert (val.sum(axis=0) >= wanted - 0.5).all()
    assert (val.sum(axis=0) <= 1.15 * wanted + 1).all()
    bare = (labels.sum(axis=1) == 0).sum()
    assert (val.sum(axis=1) == 0).sum() == pytest.approx(0.2 * bare, abs=0.5)
    rows = [split_train(rare, 0.2, seed).splits["val"].rows for seed in (0, 0, 1)]
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_a_class_that_comes_with_rarer_ones_alone_stays_in_train() -> None:
    pairs = np.zeros((6, 4), dtype=np.uint8)
    for k in range(3):
        pairs[[k, k + 3], k] = 1
        pairs[k, 3] = 1  # class 3 always beside another one
    for seed in range(60):  # in some the rarer classes take all of its images
        parts = split_train(of_matrix(pairs), 0.5, seed).splits
        assert parts["train"].labels[:, 3].any()


def test_parts_of_splits(rare: Source) -> None:
    few = take(rare, "train", 100, 3).splits["train"]
    assert len(few) == 100 == len(np.unique(few.rows))
    kept = keep_classes(rare, ["4", "1"])
    assert kept.class_names == ["1", "4"]
    assert np.array_equal(kept.splits["train"].labels, rare.splits["train"].labels[:, [1, 4]])
    whole = merge_val(split_train(rare, 0.2, 0)).splits["train"]
    assert whole.labels.sum() == rare.splits["train"].labels.sum()


def test_an_image_that_cannot_be_read_is_named_with_its_classes(tmp_path: Path) -> None:
    path = make_parquet(tmp_path / "t.parquet", [*SETS, ["ant"]], images=None)
    images = [{"bytes": png(n), "path": None} for n in range(4)] + [{"bytes": b"no", "path": None}]
    make_parquet(path, [*SETS[:3], ["ant"], ["ant", "cat"]], images=images)
    source = opened(f"parquet:{path}")
    (bad,) = scan(source, progress=False)
    assert (bad["index"], bad["class"]) == (4, "ant|cat")
    train = source.splits["train"]
    assert without_unreadable(train, [(4, "bad")], "quarantine").tolist() == [0, 1, 2, 3]
    with refused("data.unreadable", "1 class", "labels 1"):
        without_unreadable(train, [(1, "bad")], "quarantine")


def test_data_info_counts_images_of_each_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_parquet(tmp_path / "t.parquet", SETS)
    facts = info(opened(f"parquet:{path}"))["splits"]["train"]
    assert facts["per_class"] == [2, 2, 2]
    assert facts["without_label"] == 1
    assert main(["data", "info", f"parquet:{path}", "--multilabel", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"] == facts
    assert main(["data", "scan", f"parquet:{path}", "--multilabel"]) == 0
    assert main(["data", "info", f"parquet:{path}"]) == 3
    assert "task=multilabel" in capsys.readouterr().err


def test_a_folder_of_classes_has_one_label_an_image(tmp_path: Path) -> None:
    with refused("data.no_labels", "labels.csv"):
        opened(make_folder(tmp_path, {"train/cat": 2, "train/dog": 2}))


def test_a_split_without_a_label_is_refused_before_training(tmp_path: Path) -> None:
    lines = ["path,label,split"]
    for index in range(8):
        (tmp_path / f"{index}.png").write_bytes(png(index))
        label, split = ("a|b", "train") if index < 6 else ("[]", "test")
        lines.append(f"{index}.png,{label},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    section = DataSection(source=f"csv:{tmp_path / 'labels.csv'}", task="multilabel")
    with refused("data.no_labels", "'test'"):
        data_of(section, 0)
