"""Image and label columns are detected or configured; labels become class indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from refusals import refused
from small_datasets import class_counts, write_parquet

from finetune.data.open_source import open_source


def test_columns_are_detected_or_configured(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [0, 1], image="Image", label="fine_label")
    assert class_counts(open_source(f"parquet:{path}")) == {"train": [1, 1]}
    # by their recorded types
    write_parquet(path, [0, 1], image="photo", label="kind", names=["a", "b"])
    assert open_source(f"parquet:{path}").class_names == ["a", "b"]
    write_parquet(path, [0, 1], image="photo", label="kind")
    with refused("data.no_column", "data.image_column", "photo, kind"):
        open_source(f"parquet:{path}")
    with refused("data.no_column", "data.label_column"):
        open_source(f"parquet:{path}", image_column="photo")
    with refused("data.no_column", "'foto'", "'photo'"):
        open_source(f"parquet:{path}", image_column="foto", label_column="kind")
    configured = open_source(f"parquet:{path}", image_column="photo", label_column="kind")
    assert class_counts(configured) == {"train": [1, 1]}
    with refused("data.wrong_format", "a.parquet", "int64", "data.image_column"):
        open_source(f"parquet:{path}", image_column="kind", label_column="kind")


@pytest.mark.parametrize(
    "labels,names",
    [
        (["dog", "cat", "dog"], ["cat", "dog"]),
        ([3, 10, 3], ["3", "10"]),
        ([True, False, True], ["false", "true"]),
    ],
)
def test_class_names_are_sorted_if_none_are_declared(
    tmp_path: Path, labels: list[Any], names: list[str]
) -> None:
    write_parquet(tmp_path / "train.parquet", labels)
    write_parquet(tmp_path / "test.parquet", labels[:1])
    source = open_source(f"parquet:{tmp_path}")
    assert source.class_names == names
    expected = [names.index(str(label).lower()) for label in labels]
    assert source.splits["train"].labels.tolist() == expected
    assert source.splits["test"].labels.tolist() == expected[:1]
    assert source.splits["train"].labels.dtype == np.int64


def test_dictionary_encoded_labels(tmp_path: Path) -> None:
    label_type = pa.dictionary(pa.int8(), pa.string())
    write_parquet(tmp_path / "a.parquet", ["z", "y", "z"], label_type=label_type)
    source = open_source(f"parquet:{tmp_path}")
    assert (source.class_names, source.splits["train"].labels.tolist()) == (["y", "z"], [1, 0, 1])


def test_warns_of_a_declared_class_without_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "a.parquet", [1, 1], names=["a", "b"])
    open_source(f"parquet:{tmp_path}")
    assert "1 declared class without an image: a" in caplog.messages[0]


def test_rejects_splits_that_do_not_match(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
    test_file = tmp_path / "test.parquet"
    write_parquet(test_file, [0, 1], names=["b", "a"])
    with refused("data.split_mismatch", "'test'"):
        open_source(f"parquet:{tmp_path}")
    write_parquet(test_file, [], names=["a", "b"], label_type=pa.int64())
    with refused("data.empty", "'test'"):
        open_source(f"parquet:{tmp_path}")
    write_parquet(test_file, [0, 1], names=["a", "b"], image="picture")
    with refused("data.no_column", "test.parquet", "'img'"):
        open_source(f"parquet:{tmp_path}")
    write_parquet(test_file, [-1, -1], names=["a", "b"])  # how the hub withholds test labels
    assert class_counts(open_source(f"parquet:{tmp_path}")) == {"train": [1, 1]}
    assert caplog.messages == ["split 'test' is ignored: its labels are withheld (all are -1)"]
    write_parquet(tmp_path / "train.parquet", [0, 0, 2], names=["a", "b", "c"])
    write_parquet(test_file, [1, 0], names=["a", "b", "c"])
    with refused("data.split_mismatch", "'test'", "'train'", "b"):
        open_source(f"parquet:{tmp_path}")
