"""Sources: the right images with the right labels, or an error that says what is wrong."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from finetune.data import decode as decode_module
from finetune.data import scan as scan_module
from finetune.data import sources as module
from finetune.data import tables
from finetune.data.decode import decode
from finetune.data.scan import decoded_bytes, info, load_images, scan
from finetune.data.sources import Source, Split, open_source, split_train
from finetune.errors import DataError

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices are said once per process: each test starts anew."""
    monkeypatch.setattr(decode_module, "_said", set())


def png(number: int, size: tuple[int, int] = (5, 4), **options: Any) -> bytes:
    """A small image of its own for each number; size is (H, W)."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", **options)
    return stream.getvalue()


def write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def make_folder(root: Path, counts: dict[str, int]) -> str:
    """counts: images per folder, such as {"train/cat": 3}. Returns: the source string."""
    number = 0
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            write(root / folder / f"{index}.png", png(number))
            number += 1
    return f"folder:{root}"


def make_parquet(
    file: Path,
    labels: list[Any],
    *,
    names: list[str] | None = None,
    image: str = "img",
    label: str = "label",
    label_type: pa.DataType | None = None,
    images: list[Any] | None = None,
) -> Path:
    """A parquet file as the hub has them; names: written as a ClassLabel."""
    if images is None:
        images = [{"bytes": png(number), "path": None} for number in range(len(labels))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(images, kind), label: pa.array(labels, label_type)})
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"_type": "ClassLabel", "names": names}}
        recorded = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": recorded})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=3)
    return file


def counts(source: Source) -> dict[str, list[int]]:
    return {
        name: np.bincount(split.labels, minlength=len(source.class_names)).tolist()
        for name, split in source.splits.items()
    }


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


# --- the source string


@pytest.mark.parametrize(
    "text,said",
    [
        ("foldr:x", "did you mean 'folder'"),
        ("parquet", "expected hub:owner/name"),
        ("folder:", "expected hub:owner/name"),
        ("cifar10", "cannot read 'cifar10'"),
        ("embedded:digit", "did you mean 'digits'"),
        ("hub:cifar10", "expected hub:owner/name"),
        ("hub:a/b@", "expected hub:owner/name"),
    ],
)
def test_unknown_sources(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        open_source(text)
    assert caught.value.exit_code == 3


def test_a_path_without_a_kind_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"did you mean 'folder:{tmp_path}'"):
        open_source(str(tmp_path))


def test_columns_are_for_tables_only() -> None:
    with pytest.raises(DataError, match="embedded: sources have no columns"):
        open_source("embedded:digits", image_column="img")


# --- embedded


def test_digits() -> None:
    from sklearn.datasets import load_digits

    source = open_source("embedded:digits")
    assert source.class_names == [str(digit) for digit in range(10)]
    assert {name: len(split) for name, split in source.splits.items()} == {
        "train": 1442,
        "test": 355,
    }
    grey, labels = load_digits(return_X_y=True)
    places = [source.splits["test"].name_of(i) for i in range(355)]
    rows = [int(place.removeprefix("digits row ")) for place in places]
    for index in (0, 100, 354):
        image = source.splits["test"].read(index)
        assert np.array_equal(image[..., 0], np.rint(grey[rows[index]].reshape(8, 8) * 255 / 16))
        assert np.array_equal(image[..., 0], image[..., 2])
        assert source.splits["test"].labels[index] == labels[rows[index]]
    zeros = np.flatnonzero(labels == 0)
    assert [row for row in rows if labels[row] == 0] == zeros[4::5].tolist()
    train_rows = [source.splits["train"].name_of(i) for i in range(1442)]
    assert not set(train_rows) & set(places)


def test_reading_gives_a_copy() -> None:
    split = open_source("embedded:digits").splits["train"]
    first = split.read(0)
    split.read(0)[:] = 7
    assert np.array_equal(split.read(0), first)
    assert first.max() > 200


# --- folders


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Valid"])
def test_folder_of_splits(tmp_path: Path, val: str) -> None:
    folders = {"train/dog": 3, "train/cat": 2, f"{val}/cat": 1, "test/dog": 2, "test/cat": 1}
    source = open_source(make_folder(tmp_path, folders))
    assert source.class_names == ["cat", "dog"]
    assert counts(source) == {"train": [2, 3], "val": [1, 0], "test": [1, 2]}
    assert list(source.splits) == ["train", "val", "test"]
    train = source.splits["train"]
    assert [train.name_of(index) for index in range(5)] == [
        *("train/cat/0.png", "train/cat/1.png"),
        *("train/dog/0.png", "train/dog/1.png", "train/dog/2.png"),
    ]
    assert np.array_equal(train.read(2), decode(tmp_path / "train/dog/0.png"))


def test_folder_of_classes_is_all_train(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"b": 2, "a": 3, "c/deep/er": 1}))
    assert counts(source) == {"train": [3, 2, 1]}
    assert source.splits["train"].name_of(5) == "c/deep/er/0.png"


def test_relative_folder_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "data", {"a": 1, "b": 1})
    monkeypatch.chdir(tmp_path)
    source = open_source("folder:data")
    monkeypatch.chdir("/")
    assert source.splits["train"].read(1).shape == (5, 4, 3)
    assert source.splits["train"].name_of(1) == "b/0.png"


@pytest.mark.parametrize(
    "folders,said",
    [
        ({"train/a": 1, "train/b": 1, "test/a": 1, "test/c": 1}, "in 'test' but not in 'train': c"),
        ({"train/a": 1, "train/b": 0}, r"1 class folders in .*train have no images: b"),
        ({"train/a": 1, "train/b": 1, "test/a": 0}, r"class folders in .*test have no images: a"),
        ({"cat": 1, "Cat": 1}, "'Cat' and 'cat' differ only in case"),
        ({"train/cat": 1, "train/dog": 1, "test/Cat": 1}, "'Cat' and 'cat' differ only"),
        ({"caf\u00e9": 1, "cafe\u0301": 1}, "differ only in case, Unicode"),
        ({"train/a": 2}, r"only one class, \['a'\]; two are needed"),
        ({"train": 3, "test": 1}, r"no class folders in .*train"),
        ({"": 3}, "no class folders"),
        ({"a": 1, "b": 1, "test/a": 1}, "'test' stands beside class folders .a, b."),
        ({"train/a": 1, "train/b": 1, "val/a": 1, "valid/a": 1}, "'val' and 'valid' are both val"),
    ],
)
def test_folders_that_cannot_be_trained_on(
    tmp_path: Path, folders: dict[str, int], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        open_source(make_folder(tmp_path, folders))


def test_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    with pytest.raises(DataError, match=r"no such folder; did you mean 'flowers'\?"):
        open_source(f"folder:{tmp_path}/flower")
    write(tmp_path / "file.png", png(0))
    with pytest.raises(DataError, match="a file, not a folder"):
        open_source(f"folder:{tmp_path}/file.png")
    with pytest.raises(DataError, match="no class folders"):
        open_source(f"folder:{tmp_path}/flowers")


def test_only_a_test_split_opens(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"test/a": 1, "test/b": 2}))
    assert counts(source) == {"test": [1, 2]}
    with pytest.raises(DataError, match="no train split"):
        split_train(source, 0.1, 0)


def test_clutter_is_ignored_with_one_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_folder(tmp_path, {"train/a": 1, "train/b": 1, "__MACOSX/a": 1, ".cache/a": 1})
    for name in ("train/a/Thumbs.db", "train/a/.DS_Store", "train/b/._0.png", "train/notes.txt"):
        write(tmp_path / name, b"x")
    write(tmp_path / "train/a/.ipynb_checkpoints/0.png", png(9))
    with caplog.at_level(logging.WARNING):
        opened = open_source(source)
        open_source(source)
    assert counts(opened) == {"train": [1, 1]}
    assert len(caplog.records) == 1
    assert "4 files that are not images are ignored: .DS_Store, ._0.png" in messages(caplog)[0]


def test_suffixes_in_capitals_and_links(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "d", {"a": 1})
    write(tmp_path / "d/a/B.JPG", png(1))
    write(tmp_path / "elsewhere/x.png", png(2))
    (tmp_path / "d/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/again").symlink_to(tmp_path / "elsewhere")  # a circle
    opened = open_source(source)
    assert counts(opened) == {"train": [2, 1]}
    assert np.array_equal(opened.splits["train"].read(2), decode(png(2)))


def test_odd_file_names(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"a": 1, "b c\n'": 1})
    top = os.fsencode(tmp_path)
    try:
        os.mkdir(os.path.join(top, b"na\xefve"))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    Path(os.fsdecode(os.path.join(top, b"na\xefve", b"\xff.png"))).write_bytes(png(7))
    opened = open_source(source)
    assert opened.class_names == ["a", "b c\n'", "na\\xefve"]
    train = opened.splits["train"]
    assert np.array_equal(train.read(2), decode(png(7)))
    assert train.name_of(2) == "na\\xefve/\\xff.png"
    assert len(train.fingerprint()) == 64
    assert np.array_equal(pickle.loads(pickle.dumps(train)).read(2), decode(png(7)))


# --- parquet


def test_cifar10(shared: Path) -> None:
    from datasets import load_dataset

    folder = shared / "data/cifar10"
    source = open_source(f"parquet:{folder}")
    assert source.class_names == CIFAR10
    assert counts(source) == {"train": [5000] * 10, "test": [1000] * 10}
    reference = load_dataset("parquet", data_files=str(folder / "plain_text/test-*"), split="train")
    test = source.splits["test"]
    assert np.array_equal(test.labels, reference.with_format("numpy")["label"][:])
    for row in (0, 1, 4095, 4096, 9999):
        assert np.array_equal(test.read(row), np.asarray(reference[row]["img"])), row


def test_tiny_imagenet_has_validation_and_two_files(shared: Path) -> None:
    source = open_source(f"parquet:{shared}/data/tiny-imagenet-200-32px")
    assert counts(source) == {"train": [500] * 200, "val": [50] * 200}
    train = source.splits["train"]
    assert train.name_of(49_999).startswith("train-00000-of-00002.parquet row 49999")
    assert train.name_of(50_000).startswith("train-00001-of-00002.parquet row 0")
    assert split_train(source, 0.5, 0) is source


@pytest.mark.parametrize(
    "layout,path",
    [
        (["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"], ""),
        (["data/train-0.parquet", "data/validation-0.parquet"], ""),
        (["plain_text/train-0.parquet", "plain_text/test-0.parquet"], ""),
        (["default/train/0000.parquet", "default/test/0000.parquet"], ""),
        (["train/0000.parquet", "test/0000.parquet"], ""),
        (["one/train-0.parquet", "two/test-0.parquet"], "/*/*.parquet"),
        (["everything.parquet"], ""),
        (["everything.parquet"], "/everything.parquet"),
        (["trainer.parquet"], ""),
    ],
)
def test_parquet_layouts(tmp_path: Path, layout: list[str], path: str) -> None:
    for number, name in enumerate(layout):
        make_parquet(tmp_path / name, [0, 1, 1] + [0] * number, names=["no", "yes"])
    source = open_source(f"parquet:{tmp_path}{path}")
    expected = {"train": [1, 2]}
    if len(layout) == 2:
        expected["val" if "validation" in layout[1] else "test"] = [2, 2]
    assert counts(source) == expected
    assert source.class_names == ["no", "yes"]


def test_several_configurations_ask_for_one(tmp_path: Path) -> None:
    for config in ("small", "large"):
        make_parquet(tmp_path / config / "train-0.parquet", [0, 1], names=["a", "b"])
    with pytest.raises(DataError, match=r"several data sets; name one of: .*large, .*small"):
        open_source(f"parquet:{tmp_path}")
    assert counts(open_source(f"parquet:{tmp_path}/small")) == {"train": [1, 1]}


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
    with pytest.raises(DataError, match="the image column holds int64; expected encoded images"):
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
        ([0, 1, -1], ["a", "b"], r"1 of 3 labels are outside 0 to 1; the first is -1 in row 2"),
        ([0, 2, 2], ["a", "b"], r"2 of 3 labels are outside 0 to 1; the first is 2 in row 1"),
        ([-1, -1, -1], ["a", "b"], "3 of 3 labels are outside"),
        ([0, None, 1], ["a", "b"], r"1 of 3 labels are missing; the first in row 1"),
        ([0, 1, -1], None, "has the label -1"),
        ([0.5, 1.0], None, "labels of type double; expected integers or strings"),
        ([[0], [1]], None, "labels of type list"),
        (["a", None], None, "1 of 2 labels are missing"),
        (["cat", "Cat"], None, "differ only in case"),
        ([1, 1], ["a", "b"], None),
        ([4, 4], None, "only one class"),
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
        assert "1 declared classes have no image: a" in messages(caplog)[0]
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
    with pytest.raises(DataError, match="split 'test' is empty"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [0, 1], names=["a", "b"], image="picture")
    with pytest.raises(DataError, match=r"test.parquet: has no column 'img'"):
        open_source(f"parquet:{tmp_path}")
    make_parquet(test, [-1, -1], names=["a", "b"])  # how the hub withholds test labels
    assert counts(open_source(f"parquet:{tmp_path}")) == {"train": [1, 1]}
    assert messages(caplog) == ["split 'test' is left out: its labels are withheld (all are -1)"]
    make_parquet(tmp_path / "train.parquet", [0, 0, 2], names=["a", "b", "c"])
    make_parquet(test, [1, 0], names=["a", "b", "c"])
    with pytest.raises(DataError, match="1 classes are in 'test' but not in 'train': b"):
        open_source(f"parquet:{tmp_path}")


def test_parquet_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    for path, said in (
        ("cifar1", r"no such path; did you mean 'cifar10'\?"),
        ("cifar10", "no parquet file there"),
        ("*/none-*.parquet", "no parquet file there"),
    ):
        with pytest.raises(DataError, match=said):
            open_source(f"parquet:{tmp_path}/{path}")
    write(tmp_path / "a.parquet", b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match=r"a.parquet: not a parquet file, or a damaged one"):
        open_source(f"parquet:{tmp_path}/a.parquet")


def test_rows_may_point_to_files_or_have_nothing(tmp_path: Path) -> None:
    write(tmp_path / "pictures/x.png", png(5))
    rows = [
        {"bytes": None, "path": "pictures/x.png"},
        {"bytes": None, "path": "pictures/absent.png"},
        {"bytes": None, "path": None},
        None,
        {"bytes": b"", "path": "e.png"},
    ]
    make_parquet(tmp_path / "a.parquet", [0, 1, 1, 1, 1], images=rows)
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    assert np.array_equal(train.read(0), decode(png(5)))
    for row, said in (
        (1, r"a.parquet row 1 \(pictures/absent.png\): no such file"),
        (2, "a.parquet row 2: no image in this row"),
        (3, "a.parquet row 3: no image in this row"),
        (4, r"a.parquet row 4 \(e.png\): zero bytes"),
    ):
        with pytest.raises(DataError, match=said):
            train.read(row)
    assert train.items.sizes().tolist() == [len(png(5)), 0, 0, 0, 0]
    assert len(train.fingerprint()) == 64


def test_larger_than_memory_is_mapped_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parquet(tmp_path / "train-0.parquet", [0, 1, 1, 0], names=["a", "b"])
    make_parquet(tmp_path / "test-0.parquet", [1], names=["a", "b"])
    source = open_source(f"parquet:{tmp_path}")
    monkeypatch.setattr(tables, "_MEMORY_BYTES", 10)
    mapped = open_source(f"parquet:{tmp_path}")
    assert mapped.class_names == source.class_names
    for name, split in source.splits.items():
        assert mapped.splits[name].fingerprint() == split.fingerprint()
        assert np.array_equal(mapped.splits[name].read(0), split.read(0))


# --- the hub


def hub_double(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]
) -> list[tuple[Any, ...]]:
    """Let `datasets.load_dataset` answer from this machine. Returns: what was asked."""
    asked = []

    def load_dataset(name: str, config: str | None, *, revision: str | None) -> Any:
        asked.append((name, config, revision))
        return answer()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def local_hub(tmp_path: Path) -> Callable[[], Any]:
    from datasets import load_dataset

    exif = Image.Exif()
    exif[0x0112] = 6
    turned = {"bytes": png(3, exif=exif), "path": "turned.png"}
    rows = [{"bytes": png(number), "path": None} for number in range(3)]
    make_parquet(
        tmp_path / "train-0.parquet", [0, 1, 1, 0], names=["x", "a"], images=[*rows, turned]
    )
    make_parquet(tmp_path / "validation-0.parquet", [1], names=["x", "a"])
    make_parquet(tmp_path / "extra-0.parquet", [1], names=["x", "a"])
    files = {
        split: str(tmp_path / f"{split}-0.parquet") for split in ("train", "validation", "extra")
    }
    loaded = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    return lambda: loaded


def test_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = hub_double(monkeypatch, local_hub(tmp_path))
    source = open_source("hub:someone/things@v1.0:large")
    assert asked == [("someone/things", "large", "v1.0")]
    assert source.class_names == ["x", "a"]
    assert counts(source) == {"train": [2, 2], "val": [0, 1]}
    assert any("splits of unknown use are left out: extra" in text for text in messages(caplog))
    train = source.splits["train"]
    # our decoder, our EXIF rule: `datasets` would have turned it itself
    assert train.read(3).shape == (4, 5, 3)
    assert np.array_equal(train.read(3), np.rot90(decode(png(3)), -1))
    assert train.name_of(3) == "hub:someone/things@v1.0:large train row 3 (turned.png)"
    assert np.array_equal(pickle.loads(pickle.dumps(train)).read(3), train.read(3))
    assert "revision v1.0" in source.description


def test_hub_revision_is_never_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = local_hub(tmp_path)()
    for data in loaded.values():
        url = f"hf://datasets/someone/things@{'a' * 40}/train-0.parquet"
        data.info.download_checksums = {url: {}}
    hub_double(monkeypatch, lambda: loaded)
    assert f"revision {'a' * 40}" in open_source("hub:someone/things").description
    open_source(f"hub:someone/things@{'a' * 40}")
    with pytest.raises(DataError, match=f"only revision {'a' * 40} is cached"):
        open_source(f"hub:someone/things@{'b' * 40}")


def test_hub_not_reachable() -> None:
    # the real library, offline by the environment of this suite
    with pytest.raises(DataError, match="hub cannot be reached and nothing is cached"):
        open_source("hub:someone/things")


def test_hub_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.exceptions import DatasetNotFoundError

    def answer(error: Exception) -> Callable[[], Any]:
        def refuse() -> Any:
            raise error

        return refuse

    hub_double(monkeypatch, answer(DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub")))
    with pytest.raises(DataError, match=r"no such data set or revision.*doesn't exist.*hf auth"):
        open_source("hub:a/b")
    hub_double(monkeypatch, answer(ValueError("BuilderConfig 'x' not found.\nAvailable: ['y']")))
    with pytest.raises(DataError, match=r"cannot be loaded \(BuilderConfig 'x' not found. Avail"):
        open_source("hub:a/b:x")
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is a folder 'a/b' here"):
        open_source("hub:a/b")


# --- splits


def test_subset_and_names(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0, 1, 0, 1, 0])
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    part = train.subset(np.array([4, 1, 0])).subset(np.array([2, 0]))
    assert len(part) == 2
    assert part.labels.tolist() == [0, 0]
    assert [part.name_of(index) for index in range(2)] == ["a.parquet row 0", "a.parquet row 4"]
    assert np.array_equal(part.read(1), decode(png(4)))


def test_fingerprint_knows_every_image_label_and_order(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"a": 3, "b": 3})

    def fingerprint() -> str:
        return open_source(source).splits["train"].fingerprint()

    first = fingerprint()
    seen = {first}
    assert fingerprint() == first
    os.utime(tmp_path / "a/0.png", (0, 0))
    assert fingerprint() == first  # content, not dates
    write(tmp_path / "a/3.png", png(50))
    seen.add(fingerprint())
    (tmp_path / "a/3.png").unlink()
    assert fingerprint() == first
    (tmp_path / "b/0.png").unlink()
    seen.add(fingerprint())
    write(tmp_path / "b/0.png", png(51))
    seen.add(fingerprint())
    split = open_source(source).splits["train"]
    seen.add(split.subset(np.arange(6)[::-1]).fingerprint())
    swapped = Split("train", split.labels[::-1].copy(), split.items)
    seen.add(swapped.fingerprint())
    assert len(seen) == 6


def test_fingerprint_of_large_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_folder(tmp_path, {"a": 2, "b": 2})
    monkeypatch.setattr(module, "_FINGERPRINT_BYTES", 10)
    first = open_source(source).splits["train"].fingerprint()
    write(tmp_path / "a/0.png", png(60) + b"longer")
    second = open_source(source).splits["train"].fingerprint()
    (tmp_path / "a/0.png").rename(tmp_path / "a/00.png")
    third = open_source(source).splits["train"].fingerprint()
    assert len({first, second, third}) == 3


def test_fingerprint_with_unreadable_files_does_not_hang(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"a": 1, "b": 1})
    os.mkfifo(tmp_path / "a/pipe.png")
    (tmp_path / "a/link.png").symlink_to("nowhere")
    assert len(open_source(source).splits["train"].fingerprint()) == 64


def read_in_worker(split: Split, index: int) -> np.ndarray:
    return split.read(index)


@pytest.mark.parametrize("kind", ["parquet", "folder", "digits"])
def test_splits_are_cheap_to_pickle(tmp_path: Path, kind: str) -> None:
    if kind == "digits":
        split = open_source("embedded:digits").splits["train"]
    elif kind == "folder":
        split = open_source(make_folder(tmp_path, {"a": 2, "b": 2})).splits["train"]
    else:
        images = [{"bytes": os.urandom(100_000), "path": None} for _ in range(3)]
        images.append({"bytes": png(1), "path": None})
        make_parquet(tmp_path / "a.parquet", [0, 1, 1, 0], images=images)
        split = open_source(f"parquet:{tmp_path}").splits["train"]
    data = pickle.dumps(split)
    assert len(data) < (500_000 if kind == "digits" else 3_000)
    assert np.array_equal(pickle.loads(data).read(3), split.read(3))


def test_splits_are_read_in_other_processes(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0, 1, 1, 0])
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            image = pool.apply(read_in_worker, (split, 2))
        assert np.array_equal(image, split.read(2)), method


def test_splits_are_read_in_threads(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0, 1] * 20)
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    fresh = pickle.loads(pickle.dumps(split))  # not opened yet: the threads race for it
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(fresh.read, list(range(40)) * 5))
    assert len(images) == 200
    for number, image in enumerate(images):
        assert np.array_equal(image, decode(png(number % 40)))


# --- validation


def test_split_train_is_stratified_and_loses_nothing(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0] * 20 + [1] * 10 + [2] * 2 + [3])
    source = open_source(f"parquet:{tmp_path}")
    split = split_train(source, 0.1, 0)
    # round-half-up; at least 1 where there are two; the only image stays in train
    assert counts(split) == {"train": [18, 9, 1, 1], "val": [2, 1, 1, 0]}
    parts = [split.splits[name] for name in ("train", "val")]
    names = [part.name_of(index) for part in parts for index in range(len(part))]
    assert len(names) == 33
    assert len(set(names)) == 33
    for part in parts:
        for index in range(len(part)):
            row = int(part.name_of(index).split()[-1])
            assert part.labels[index] == source.splits["train"].labels[row]
    assert "val" not in source.splits
    nearly_all = counts(split_train(source, 0.99, 0))
    assert nearly_all == {"train": [1, 1, 1, 1], "val": [19, 9, 1, 0]}


def test_split_train_is_keyed_by_the_seed() -> None:
    source = open_source("embedded:digits")

    def rows(seed: int) -> list[int]:
        val = split_train(source, 0.1, seed).splits["val"]
        return [int(val.name_of(index).split()[-1]) for index in range(len(val))]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)
    # recorded once: another machine or NumPy must take the same images
    assert rows(0)[:6] == [2, 3, 11, 13, 20, 55]


def test_split_train_refusals(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"a": 1, "b": 1}))
    assert split_train(source, 0, 0) is source
    for wrong in (-0.1, 1.0, 3.0):
        with pytest.raises(DataError, match=r"data.val_fraction: .* is not in"):
            split_train(source, wrong, 0)
    with pytest.raises(DataError, match="every class has a single image"):
        split_train(source, 0.5, 0)


# --- scanning and loading


def damaged_folder(root: Path) -> str:
    source = make_folder(root, {"train/a": 3, "train/b": 3, "test/a": 1, "test/b": 1})
    write(root / "train/a/3.png", png(0)[:60])
    write(root / "train/b/3.jpg", b"")
    write(root / "train/b/4.jpg", b"some text")
    os.mkfifo(root / "train/b/5.png")
    (root / "test/a/link.png").symlink_to("nowhere")
    return source


def test_scan_lists_every_unreadable_image(tmp_path: Path) -> None:
    found = scan(open_source(damaged_folder(tmp_path)), workers=3)
    assert [(item["name"], item["class"], item["split"]) for item in found] == [
        ("train/a/3.png", "a", "train"),
        ("train/b/3.jpg", "b", "train"),
        ("train/b/4.jpg", "b", "train"),
        ("train/b/5.png", "b", "train"),
        ("test/a/link.png", "a", "test"),
    ]
    causes = ("cannot be decoded", "zero bytes", "not an image", "a pipe", "a link to nothing")
    for item, cause in zip(found, causes, strict=True):
        assert item["error"].startswith(f"{item['name']}: {cause}")
    json.dumps(found)
    assert scan(open_source("embedded:digits")) == []


def test_loading_stops_with_the_whole_list(tmp_path: Path) -> None:
    split = open_source(damaged_folder(tmp_path)).splits["train"]
    with pytest.raises(DataError) as caught:
        load_images(split)
    text = str(caught.value)
    assert "split 'train': 4 of 10 images cannot be read" in text
    for name in ("train/a/3.png", "train/b/3.jpg", "train/b/4.jpg", "train/b/5.png"):
        assert f"\n  {name}: " in text
    assert "data.unreadable: quarantine" in text
    assert "finetune data scan" in text
    assert caught.value.exit_code == 3


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"a": 1, "b": 1})
    for number in range(30):
        write(tmp_path / f"a/bad{number:02}.png", b"")
    with pytest.raises(DataError) as caught:
        load_images(open_source(source).splits["train"])
    assert "bad19.png" in str(caught.value)
    assert "bad20.png" not in str(caught.value)
    assert "and 10 more" in str(caught.value)
    assert len(scan(open_source(source))) == 30


def test_quarantine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = open_source(damaged_folder(tmp_path)).splits["train"]
    images, kept = load_images(split, unreadable="quarantine", workers=3)
    assert kept.tolist() == [0, 1, 2, 4, 5, 6]
    assert len(images) == 6
    for image, index in zip(images, kept.tolist(), strict=True):
        assert np.array_equal(image, split.read(index))
    assert len(caplog.records) == 1
    assert "4 of 10 images cannot be read; they are left out" in messages(caplog)[0]
    for number in range(3):
        write(tmp_path / f"train/a/{number}.png", b"")
    with pytest.raises(DataError, match="no readable image is left of 1 classes"):
        load_images(split, unreadable="quarantine")


@pytest.mark.parametrize("workers", [1, 4])
def test_loaded_images_are_those_of_read(tmp_path: Path, workers: int) -> None:
    generator = np.random.default_rng(0)
    number = 300  # more than two tasks of threads
    same = [{"bytes": png(row), "path": None} for row in range(number)]
    make_parquet(tmp_path / "a/a.parquet", [row % 2 for row in range(number)], images=same)
    split = open_source(f"parquet:{tmp_path}/a").splits["train"]
    images, kept = load_images(split, workers=workers)
    assert isinstance(images, np.ndarray)
    assert images.shape == (number, 5, 4, 3)
    assert kept.tolist() == list(range(number))
    assert all(np.array_equal(images[row], split.read(row)) for row in range(number))

    sizes = [tuple(generator.integers(2, 90, 2).tolist()) for _ in range(number)]
    odd = [{"bytes": png(row, sizes[row]), "path": None} for row in range(number)]
    make_parquet(tmp_path / "b/b.parquet", [row % 2 for row in range(number)], images=odd)
    split = open_source(f"parquet:{tmp_path}/b").splits["train"]
    images, kept = load_images(split, workers=workers)
    assert isinstance(images, list)
    assert [image.shape[:2] for image in images] == sizes
    assert all(np.array_equal(images[row], split.read(row)) for row in range(number))


def test_one_odd_size_that_the_sample_misses(tmp_path: Path) -> None:
    number = 200
    images = [{"bytes": png(row), "path": None} for row in range(number)]
    images[7] = {"bytes": png(7, (9, 9)), "path": None}
    make_parquet(tmp_path / "a.parquet", [row % 2 for row in range(number)], images=images)
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    loaded, kept = load_images(split)
    assert isinstance(loaded, list)
    assert len(kept) == number
    assert [image.shape for image in loaded].count((5, 4, 3)) == number - 1
    assert all(np.array_equal(loaded[row], split.read(row)) for row in range(number))


def test_images_that_do_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    split = open_source("embedded:digits").splits["train"]
    monkeypatch.setattr(scan_module.np, "empty", refuse)
    with pytest.raises(DataError, match=r"do not fit in memory; set data.keep: none"):
        load_images(split)


def test_progress_goes_to_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    load_images(open_source("embedded:digits").splits["test"], progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == ""


def test_info(tmp_path: Path) -> None:
    images = [{"bytes": png(row, (4 + row, 9 - row)), "path": None} for row in range(3)]
    images.append({"bytes": b"", "path": None})
    make_parquet(tmp_path / "train.parquet", [0, 1, 1, 1], names=["a", "b"], images=images)
    source = open_source(f"parquet:{tmp_path}")
    found = info(source)
    assert found["class_names"] == ["a", "b"]
    assert found["splits"] == {
        "train": {
            "images": 4,
            "per_class": [1, 3],
            "sampled": 4,
            "unreadable_in_sample": 1,
            "min_size": [4, 7],
            "max_size": [6, 9],
        }
    }
    assert json.loads(json.dumps(found)) == found
    digits = open_source("embedded:digits").splits["train"]
    assert decoded_bytes(digits) == 1442 * 8 * 8 * 3
