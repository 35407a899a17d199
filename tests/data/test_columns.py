"""Columns are found or named; labels of any type become indices of class names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from samples import counts, make_parquet

from finetune.data import decode as decode_module
from finetune.data.source import open_source
from finetune.errors import DataError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices are said once per process: each test starts anew."""
    monkeypatch.setattr(decode_module, "_said", set())


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    file = make_parquet(tmp_path / "a.parquet", [0, 1], image="Image", label="fine_label")
    assert counts(open_source(f"parquet:{file}")) == {"train": [1, 1]}
    make_parquet(file, [0, 1], image="photo", label="kind", names=["a", "b"])  # by recorded types
    assert open_source(f"parquet:{file}").class_names == ["a", "b"]
    make_parquet(file, [0, 1], image="photo", label="kind")
    with pytest.raises(DataError, match=r"data.image_column: not found; .*columns: photo, kind"):
        open_source(f"parquet:{file}")
    with pytest.raises(DataError, match=r"data.label_column: not found"):
        open_source(f"parquet:{file}", image_column="photo")
    with pytest.raises(DataError, match=r"no column 'foto'; did you mean 'photo'\?; the columns"):
        open_source(f"parquet:{file}", image_column="foto", label_column="kind")
    named = open_source(f"parquet:{file}", image_column="photo", label_column="kind")
    assert counts(named) == {"train": [1, 1]}
    with pytest.raises(
        DataError, match=r"a.parquet: the image column holds int64; .*data.image_column"
    ):
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


@pytest.mark.parametrize(
    "labels,names,said",
    [
        (
            [0, 1, -1],
            ["a", "b"],
            r"1 of 3 labels are outside 0 to 1; the first is -1 in row 2; correct",
        ),
        ([0, 2, 2], ["a", "b"], r"2 of 3 labels are outside 0 to 1; the first is 2 in row 1"),
        ([-1, -1, -1], ["a", "b"], "3 of 3 labels are outside"),
        (
            [0, None, 1],
            ["a", "b"],
            r"1 of 3 labels are missing; the first in row 1; add the labels",
        ),
        ([0, 1, -1], None, "split 'train': 1 of 3 labels are below 0; .* -1 in row 2; correct"),
        (
            [0.5, 1.0],
            None,
            "labels of type double; expected integers or strings, .*data.label_column",
        ),
        ([[0], [1]], None, "labels of type list.*one for each image.*data.label_column"),
        (["a", None], None, "1 of 2 labels are missing"),
        (["cat", "Cat"], None, "differ only in case"),
        ([1, 1], ["a", "b"], None),
        ([4, 4], None, "only one class.*add images of another.*data.label_column"),
        ([0, 0], ["a"], "only one class"),
    ],
)
def test_labels_that_cannot_be_used(
    tmp_path: Path,
    labels: list[Any],
    names: list[str] | None,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_parquet(tmp_path / "a.parquet", labels, names=names)
    if said is None:  # declared, but without an image: harmless, so said
        open_source(f"parquet:{tmp_path}")
        assert "1 declared class without an image: a" in messages(caplog)[0]
        return
    with pytest.raises(DataError, match=said):
        open_source(f"parquet:{tmp_path}")


def test_splits_that_do_not_fit_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_parquet(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
    test = tmp_path / "test.parquet"
    make_parquet(test, [0, 1], names=["b", "a"])
    with pytest.raises(DataError, match="split 'test': its class names differ"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [], names=["a", "b"], label_type=pa.int64())
    with pytest.raises(DataError, match=r"split 'test' is empty: .*remove its file"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [0, 1], names=["a", "b"], image="picture")
    with pytest.raises(DataError, match=r"test.parquet: has no column 'img'"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [-1, -1], names=["a", "b"])  # how the hub withholds test labels
    assert counts(open_source(f"parquet:{tmp_path}")) == {"train": [1, 1]}
    assert messages(caplog) == ["split 'test' is left out: its labels are withheld (all are -1)"]
    make_parquet(tmp_path / "train.parquet", [0, 0, 2], names=["a", "b", "c"])
    make_parquet(test, [1, 0], names=["a", "b", "c"])
    with pytest.raises(DataError, match="1 class in 'test' but not in 'train': b"):
        open_source(f"parquet:{tmp_path}")
