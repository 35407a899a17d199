"""Image and label columns are detected or configured; labels become class indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused
from small_datasets import class_counts, random_png, write_file, write_parquet

from finetune.data.open_source import open_source


def test_columns_are_detected_or_configured(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [0, 1], image="Image", label="fine_label")
    assert class_counts(open_source(f"parquet:{path}")) == {"train": [1, 1]}
    # by their recorded types
    write_parquet(path, [0, 1], image="photo", label="kind", names=["a", "b"])
    assert open_source(f"parquet:{path}").class_names == ["a", "b"]
    write_parquet(path, [0, 1], image="photo", label="kind")
    configured = open_source(f"parquet:{path}", image_column="photo", label_column="kind")
    assert class_counts(configured) == {"train": [1, 1]}


def test_a_second_image_column_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = [{"bytes": random_png(number), "path": None} for number in (5, 6)]
    path = write_parquet(tmp_path / "a.parquet", [0, 1], image="img", image_mask=images)
    table = pq.read_table(path).rename_columns(["img", "label", "image"])
    pq.write_table(table, path)
    open_source(f"parquet:{path}")
    assert "the column 'image' gives the images, not 'img'" in caplog.messages[0]
    caplog.clear()
    open_source(f"parquet:{path}", image_column="img")
    assert not caplog.messages


def test_a_column_that_could_name_the_splits_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_parquet(tmp_path / "a.parquet", [0, 1], split=["train", "test"])
    open_source(f"parquet:{path}")
    assert "the column 'split' is not used" in caplog.messages[0]
    caplog.clear()
    write_parquet(tmp_path / "d/train.parquet", [0, 1], split=["train", "train"])
    write_parquet(tmp_path / "d/test.parquet", [0, 1], split=["test", "test"])
    open_source(f"parquet:{tmp_path / 'd'}")
    assert not caplog.messages


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [0, 1], other=[1, 0])
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["image", "label", "label"]), path)
    with refused("data.ambiguous", "'label'"):
        open_source(f"parquet:{path}")


def test_a_second_label_column_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("x.png", "y.png"):
        write_file(tmp_path / name, random_png(1))
    path = tmp_path / "table.csv"
    write_file(path, b"path,class,label\nx.png,0,a\ny.png,1,b\n")
    open_source(f"csv:{path}")
    assert "the column 'label' gives the labels, not 'class'" in caplog.messages[0]
    caplog.clear()
    open_source(f"csv:{path}", label_column="label")
    assert not caplog.messages


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


def test_ignores_a_split_with_withheld_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
    write_parquet(tmp_path / "test.parquet", [-1, -1], names=["a", "b"])  # as on the hub
    assert class_counts(open_source(f"parquet:{tmp_path}")) == {"train": [1, 1]}
    assert caplog.messages == ["split 'test' is ignored: its labels are withheld (all are -1)"]
