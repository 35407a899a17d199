"""Multi-label data: every kind of source gives the same label matrix and the same splits."""

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
from small_datasets import random_png, write_file, write_parquet
from tar_shards import tar_bytes

from finetune.cli.main import main
from finetune.data.decode_split import drop_unreadable, find_unreadable_images
from finetune.data.from_recipe import open_data
from finetune.data.open_source import open_source
from finetune.data.source import Source, Split
from finetune.data.splits import hold_out_validation, merge_val, select_classes, subsample
from finetune.data.summary import summarize_source
from finetune.recipe.load import DataSection

LABEL_SETS = [["ant", "cat"], ["bee"], [], ["cat", "bee", "ant"]]
MATRIX = [[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]
NAMES = ["ant", "bee", "cat"]


def open_multilabel(source: str, **options: Any) -> Source:
    return open_source(source, multilabel=True, **options)


def from_table(folder: Path, labels: list[Any], features: Any = None, **options: Any) -> Source:
    path = write_parquet(folder / "t.parquet", labels)
    if features is not None:
        table = pa.parquet.read_table(path)
        metadata = json.dumps({"info": {"features": {"label": features}}})
        pa.parquet.write_table(table.replace_schema_metadata({"huggingface": metadata}), path)
    return open_multilabel(f"parquet:{path}", **options)


def from_csv(folder: Path, *lines: str) -> Source:
    for number in range(4):
        write_file(folder / f"{number}.png", random_png(number))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    assert np.array_equal(
        open_multilabel(f"folder:{folder}").splits["train"].labels,
        open_multilabel(f"csv:{folder}/labels.csv").splits["train"].labels,
    )
    return open_multilabel(f"csv:{folder}/labels.csv")


def from_class_label_feature(folder: Path, wrap_feature: Callable[[Any], Any]) -> Source:
    feature = wrap_feature({"_type": "ClassLabel", "names": NAMES})
    return from_table(
        folder, [[NAMES.index(name) for name in labels] for labels in LABEL_SETS], feature
    )


def from_indicator_columns(
    folder: Path, *, configured: bool, dtype: type, streaming: bool = False
) -> Source:
    """Return a table with one indicator column per class; `configured`: name these columns."""
    path = write_parquet(folder / "t.parquet", [0] * 4)
    table = pa.parquet.read_table(path).drop(["label"])
    for name, values in zip(NAMES, np.array(MATRIX).T, strict=True):
        table = table.append_column(name, pa.array([dtype(value) for value in values]))
    if configured:
        table = table.append_column("words", pa.array(["x"] * 4))
    pa.parquet.write_table(table, path)
    label_column = tuple(NAMES) if configured else None
    return open_multilabel(f"parquet:{path}", label_column=label_column, streaming=streaming)


def from_tar(folder: Path) -> Source:
    members = [
        member
        for number, labels in enumerate(LABEL_SETS)
        for member in (
            (f"{number}.png", random_png(number)),
            (f"{number}.json", json.dumps({"label": labels}).encode()),
        )
    ]
    (folder / "t.tar").write_bytes(tar_bytes(members))
    return open_multilabel(f"tar:{folder}/t.tar")


SOURCES: dict[str, Callable[[Path], Source]] = {
    "lists of names": lambda f: from_table(f, LABEL_SETS),
    "lists, streamed": lambda f: from_table(f, LABEL_SETS, streaming=True),
    "lists of ClassLabel": lambda f: from_class_label_feature(
        f, lambda inner: {"_type": "List", "feature": inner}
    ),
    "sequences of ClassLabel": lambda f: from_class_label_feature(
        f, lambda inner: {"_type": "Sequence", "feature": inner, "length": -1}
    ),
    "legacy lists of ClassLabel": lambda f: from_class_label_feature(f, lambda inner: [inner]),
    "columns of integers": lambda f: from_indicator_columns(f, configured=True, dtype=int),
    "columns, streamed": lambda f: from_indicator_columns(
        f, configured=True, dtype=int, streaming=True
    ),
    "columns of booleans": lambda f: from_indicator_columns(f, configured=False, dtype=bool),
    "columns of floats": lambda f: from_indicator_columns(f, configured=False, dtype=float),
    "CSV fields of names": lambda f: from_csv(
        f, "path,label", "0.png,ant|cat", "1.png,bee", "2.png,[]", "3.png, cat | bee|ant"
    ),
    "several CSV rows per image": lambda f: from_csv(
        *(f, "path,label", "0.png,ant", "0.png,cat", "1.png,bee", "2.png,[]", "3.png,cat"),
        *("3.png,bee", "3.png,ant", "3.png,ant"),
    ),
    "CSV fields of 0 and 1": lambda f: from_csv(
        f, "cat,path,bee,ant", "1,0.png,0,1", "0.0,1.png,1.0,0", "0,2.png,0,0", "1,3.png,1,1"
    ),
    "JSON in tar files": from_tar,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_label_matrix(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path)
    train = source.splits["train"]
    assert source.class_names == NAMES
    has_columns = kind.startswith("columns") or "0 and 1" in kind
    assert sorted(source.indicator_columns) == (NAMES if has_columns else [])
    assert train.labels.tolist() == MATRIX
    assert train.labels.dtype == np.uint8
    assert train.class_indices(3) == [0, 1, 2]
    assert train.subset(np.array([2, 0])).labels.tolist() == [MATRIX[2], MATRIX[0]]
    before = train.fingerprint
    changed_labels = train.labels.copy()
    changed_labels[3, 1] = 0
    assert dataclasses.replace(train, labels=changed_labels).fingerprint != before
    assert len(train.decode(1)) == 5


def test_warns_of_an_indicator_column_without_a_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_file(tmp_path / "1.png", random_png(1))
    (tmp_path / "t.csv").write_text("path,ant,bee,cat\n1.png,1,0,1\n")
    assert open_multilabel(f"csv:{tmp_path}/t.csv").class_names == ["ant", "cat"]
    assert "ignored: bee" in caplog.text


def test_integer_labels_without_names_name_the_classes(tmp_path: Path) -> None:
    source = from_table(tmp_path, [[7, 2], [7], [], [11]])
    assert source.class_names == ["2", "7", "11"]
    assert source.splits["train"].labels.sum(axis=0).tolist() == [1, 2, 1]


def test_digit_pairs_have_the_labels_of_both_digits() -> None:
    pairs, digits = open_multilabel("embedded:digit_pairs"), open_source("embedded:digits")
    for name, split in pairs.splits.items():
        digit_split = digits.splits[name]
        assert len(split) == len(digit_split)
        assert split.decode(0).shape == (8, 16, 3)
        label_by_pixels = {
            tuple(digit_split.decode(i).ravel()): digit_split.labels[i]
            for i in range(len(digit_split))
        }
        for index in range(0, len(split), 41):
            pixels = split.decode(index)
            expected_labels = {
                int(label_by_pixels[tuple(half.ravel())]) for half in np.split(pixels, 2, axis=1)
            }
            assert split.class_indices(index) == sorted(expected_labels)


def from_matrix(labels: np.ndarray) -> Source:
    items = open_source("embedded:digits").splits["train"].images
    split = Split("train", labels, items, np.arange(len(labels)))
    return Source("x", {"train": split}, [str(k) for k in range(labels.shape[1])], "")


@pytest.fixture(scope="module")
def rare_classes() -> Source:
    """600 images with 2 to about 400 per class; classes co-occur at random."""
    generator = np.random.default_rng(0)
    shares = [0.005, 0.02, 0.1, 0.3, 0.6]
    labels = (generator.random((600, 5)) < shares).astype(np.uint8)
    labels[:, 0] = 0
    labels[[17, 400], 0] = 1
    return from_matrix(labels)


def test_validation_is_stratified_by_class(rare_classes: Source) -> None:
    labels = rare_classes.splits["train"].labels
    splits = hold_out_validation(rare_classes, 0.2, 0)
    train, val = (splits.splits[name].labels for name in ("train", "val"))
    assert len(train) + len(val) == 600
    assert 0.19 < len(val) / 600 < 0.25
    assert (train.sum(axis=0) + val.sum(axis=0)).tolist() == labels.sum(axis=0).tolist()
    assert (train.sum(axis=0) > 0).all()
    assert val[:, 0].sum() == 1
    expected_counts = np.maximum(0.2 * labels.sum(axis=0), 1)
    assert (val.sum(axis=0) >= expected_counts - 0.5).all()
    assert (val.sum(axis=0) <= 1.15 * expected_counts + 1).all()
    num_without_label = (labels.sum(axis=1) == 0).sum()
    assert (val.sum(axis=1) == 0).sum() == pytest.approx(0.2 * num_without_label, abs=0.5)
    rows = [hold_out_validation(rare_classes, 0.2, seed).splits["val"].rows for seed in (0, 0, 1)]
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_a_class_that_occurs_only_with_rarer_ones_stays_in_train() -> None:
    labels = np.zeros((6, 4), dtype=np.uint8)
    for k in range(3):
        labels[[k, k + 3], k] = 1
        labels[k, 3] = 1  # class 3 always occurs with another class
    for seed in range(60):  # for some seeds, the rarer classes take all of its images
        splits = hold_out_validation(from_matrix(labels), 0.5, seed).splits
        assert splits["train"].labels[:, 3].any()


def test_subsample_select_classes_and_merge_val(rare_classes: Source) -> None:
    subsampled = subsample(rare_classes, "train", 100, 3).splits["train"]
    assert len(subsampled) == 100 == len(np.unique(subsampled.rows))
    selected = select_classes(rare_classes, ["4", "1"])
    assert selected.class_names == ["1", "4"]
    assert np.array_equal(
        selected.splits["train"].labels, rare_classes.splits["train"].labels[:, [1, 4]]
    )
    merged = merge_val(hold_out_validation(rare_classes, 0.2, 0)).splits["train"]
    assert merged.labels.sum() == rare_classes.splits["train"].labels.sum()


def test_reports_unreadable_images_with_their_classes(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", [*LABEL_SETS, ["ant"]], images=None)
    images = [{"bytes": random_png(n), "path": None} for n in range(4)] + [
        {"bytes": b"no", "path": None}
    ]
    write_parquet(path, [*LABEL_SETS[:3], ["ant"], ["ant", "cat"]], images=images)
    source = open_multilabel(f"parquet:{path}")
    (bad,) = find_unreadable_images(source, 0)
    assert (bad["index"], bad["class"]) == (4, "ant|cat")
    train = source.splits["train"]
    assert drop_unreadable(train, [(4, "bad")], "quarantine").tolist() == [0, 1, 2, 3]
    with refused("data.unreadable", "1 class", "labels 1"):
        drop_unreadable(train, [(1, "bad")], "quarantine")


def test_data_info_counts_images_per_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_parquet(tmp_path / "t.parquet", LABEL_SETS)
    summary = summarize_source(open_multilabel(f"parquet:{path}"))["splits"]["train"]
    assert summary["per_class"] == [2, 2, 2]
    assert summary["without_label"] == 1
    assert main(["data", "info", f"parquet:{path}", "--multilabel", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"] == summary
    assert main(["data", "scan", f"parquet:{path}", "--multilabel"]) == 0


def test_rejects_a_split_without_labels_before_training(tmp_path: Path) -> None:
    lines = ["path,label,split"]
    for index in range(8):
        (tmp_path / f"{index}.png").write_bytes(random_png(index))
        label, split = ("a|b", "train") if index < 6 else ("[]", "test")
        lines.append(f"{index}.png,{label},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    section = DataSection(source=f"csv:{tmp_path / 'labels.csv'}", task="multilabel")
    with refused("data.no_labels", "'test'"):
        open_data(section, 0)
