"""Columns are found or named; labels of any type become indices of class names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from refusals import refused
from samples import counts, make_parquet

from finetune.data.source import open_source


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    file = make_parquet(tmp_path / "a.parquet", [0, 1], image="Image", label="fine_label")
    assert counts(open_source(f"parquet:{file}")) == {"train": [1, 1]}
    make_parquet(file, [0, 1], image="photo", label="kind", names=["a", "b"])  # by recorded types
    assert open_source(f"parquet:{file}").class_names == ["a", "b"]
    make_parquet(file, [0, 1], image="photo", label="kind")
    with refused("data.no_column", "data.image_column", "photo, kind"):
        open_source(f"parquet:{file}")
    with refused("data.no_column", "data.label_column"):
        open_source(f"parquet:{file}", image_column="photo")
    with refused("data.no_column", "'foto'", "'photo'"):
        open_source(f"parquet:{file}", image_column="foto", label_column="kind")
    named = open_source(f"parquet:{file}", image_column="photo", label_column="kind")
    assert counts(named) == {"train": [1, 1]}
    with refused("data.wrong_format", "a.parquet", "int64", "data.image_column"):
        open_source(f"parquet:{file}", image_column="kind", label_column="kind")


@pytest.mark.parametrize(
    "labels,names",
    [
        (["dog", "cat", "dog"], ["cat", "dog"]),
        ([3, 10, 3], ["3", "10"]),
        ([True, False, True], ["false", "true"]),
    ],
)
def test_labels_without_declared_names_are_sorted(
    tmp_path: Path, labels: list[Any], names: list[str]
) -> None:
    make_parquet(tmp_path / "train.parquet", labels)
    make_parquet(tmp_path / "test.parquet", labels[:1])
    source = open_source(f"parquet:{tmp_path}")
    assert source.class_names == names
    expected = [names.index(str(label).lower()) for label in labels]
    assert source.splits["train"].labels.tolist() == expected
    assert source.splits["test"].labels.tolist() == expected[:1]
    assert source.splits["train"].labels.dtype == np.int64


def test_dictionary_labels(tmp_path: Path) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    make_parquet(tmp_path / "a.parquet", ["z", "y", "z"], label_type=kind)
    source = open_source(f"parquet:{tmp_path}")
    assert (source.class_names, source.splits["train"].labels.tolist()) == (["y", "z"], [1, 0, 1])


def test_a_declared_class_without_an_image_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_parquet(tmp_path / "a.parquet", [1, 1], names=["a", "b"])
    open_source(f"parquet:{tmp_path}")
    assert "1 declared class without an image: a" in caplog.messages[0]


def test_splits_that_do_not_fit_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_parquet(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
    test = tmp_path / "test.parquet"
    make_parquet(test, [0, 1], names=["b", "a"])
    with refused("data.split_mismatch", "'test'"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [], names=["a", "b"], label_type=pa.int64())
    with refused("data.empty", "'test'"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [0, 1], names=["a", "b"], image="picture")
    with refused("data.no_column", "test.parquet", "'img'"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [-1, -1], names=["a", "b"])  # how the hub withholds test labels
    assert counts(open_source(f"parquet:{tmp_path}")) == {"train": [1, 1]}
    assert caplog.messages == ["split 'test' is left out: its labels are withheld (all are -1)"]
    make_parquet(tmp_path / "train.parquet", [0, 0, 2], names=["a", "b", "c"])
    make_parquet(test, [1, 0], names=["a", "b", "c"])
    with refused("data.split_mismatch", "'test'", "'train'", "b"):
        open_source(f"parquet:{tmp_path}")
