"""Parquet files and hub datasets: every layout, and every error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from refusals import refused
from small_datasets import class_counts, random_png, write_file, write_image_folder, write_parquet

from finetune.data import parquet as parquet_module
from finetune.data.decode import decode_image
from finetune.data.open_source import open_source
from finetune.data.splits import hold_out_validation
from finetune.errors import DataError, HubError

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def test_cifar10_equals_the_datasets_library(shared: Path) -> None:
    from datasets import load_dataset

    folder = shared / "data/cifar10"
    source = open_source(f"parquet:{folder}")
    assert source.class_names == CIFAR10
    assert class_counts(source) == {"train": [5000] * 10, "test": [1000] * 10}
    reference = load_dataset("parquet", data_files=str(folder / "plain_text/test-*"), split="train")
    test = source.splits["test"]
    assert np.array_equal(test.labels, reference.with_format("numpy")["label"][:])
    for row in (0, 1, 4095, 4096, 9999):
        assert np.array_equal(test.decode(row), np.asarray(reference[row]["img"])), row


def test_tiny_imagenet_with_validation_and_two_files(shared: Path) -> None:
    source = open_source(f"parquet:{shared}/data/tiny-imagenet-200-32px")
    assert class_counts(source) == {"train": [500] * 200, "val": [50] * 200}
    train = source.splits["train"]
    assert train.name_of(49_999).startswith("train-00000-of-00002.parquet row 49999")
    assert train.name_of(50_000).startswith("train-00001-of-00002.parquet row 0")
    assert hold_out_validation(source, 0.5, 0) is source


@pytest.mark.parametrize(
    "layout,path",
    [
        (["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"], ""),
        (["data/train-0.parquet", "data/validation-0.parquet"], ""),
        (["plain_text/train-0.parquet", "plain_text/test-0.parquet"], ""),
        (["default/train/0000.parquet", "default/test/0000.parquet"], ""),
        (["train/0000.parquet", "test/0000.parquet"], ""),
        (["mnist_train.parquet", "mnist_test.PARQUET"], ""),
        (["one/train-0.parquet", "two/test-0.parquet"], "/*/*.parquet"),
        (["everything.parquet"], ""),
        (["everything.parquet"], "/everything.parquet"),
        (["trainer.parquet"], ""),
    ],
)
def test_parquet_layouts(tmp_path: Path, layout: list[str], path: str) -> None:
    for number, name in enumerate(layout):
        write_parquet(tmp_path / name, [0, 1, 1] + [0] * number, names=["no", "yes"])
    source = open_source(f"parquet:{tmp_path}{path}")
    expected = {"train": [1, 2]}
    if len(layout) == 2:
        expected["val" if "validation" in layout[1] else "test"] = [2, 2]
    assert class_counts(source) == expected
    assert source.class_names == ["no", "yes"]


def test_a_file_named_after_two_splits_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("pretrain_test.parquet", "train_test.parquet"):
        write_parquet(tmp_path / name, [0, 1], names=["a", "b"])
    assert {*open_source(f"parquet:{tmp_path}").splits} == {"train", "test"}
    assert "train_test.parquet matches several splits (train, test)" in caplog.text
    assert "pretrain_test" not in caplog.text


def test_missing_and_repeated_shards_are_refused(tmp_path: Path) -> None:
    for number in (0, 2):
        write_parquet(tmp_path / f"train-0000{number}-of-00003.parquet", [0, 1], names=["a", "b"])
    with refused("data.not_found", tmp_path / "train", "2 files of 3"):
        open_source(f"parquet:{tmp_path}")
    write_parquet(tmp_path / "train-00001-of-00003.parquet", [0, 1], names=["a", "b"])
    assert len(open_source(f"parquet:{tmp_path}").splits["train"]) == 6
    write_parquet(tmp_path / "train-00000-of-00002.parquet", [0, 1], names=["a", "b"])
    with refused("data.not_found", "several versions"):
        open_source(f"parquet:{tmp_path}")


def test_asks_which_configuration(tmp_path: Path) -> None:
    for config in ("small", "large"):
        write_parquet(tmp_path / config / "train-0.parquet", [0, 1], names=["a", "b"])
    with refused("data.ambiguous", tmp_path / "large", tmp_path / "small"):
        open_source(f"parquet:{tmp_path}")
    assert class_counts(open_source(f"parquet:{tmp_path}/small")) == {"train": [1, 1]}


def test_rejects_paths_without_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    for path, code, expected_text in (
        ("cifar1", "data.not_found", "/cifar10'"),
        ("cifar10", "data.empty", "cifar10"),
        ("*/none-*.parquet", "data.empty", "*/none-*.parquet"),
    ):
        with refused(code, expected_text):
            open_source(f"parquet:{tmp_path}/{path}")


@pytest.mark.parametrize(
    "content,code,expected_text",
    [
        (b"version https://git-lfs.github.com/spec/v1", "data.wrong_format", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "data.wrong_format", "web page"),
        (b"", "data.damaged", "zero bytes"),
        (b"PAR1 and no end", "data.damaged", ""),
    ],
)
def test_rejects_files_that_are_not_parquet(
    tmp_path: Path, content: bytes, code: str, expected_text: str
) -> None:
    write_parquet(tmp_path / "test.parquet", [0, 1])
    write_file(tmp_path / "train.parquet", content)
    with refused(code, "train.parquet", expected_text):
        open_source(f"parquet:{tmp_path}")


def test_names_the_second_file_if_it_is_not_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [0, 1])
    write_file(tmp_path / "train-1.parquet", b"version https://git-lfs.github.com/spec/v1")
    with refused("data.wrong_format", "train-1.parquet"):
        open_source(f"parquet:{tmp_path}")


def test_description_counts_the_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1])
    assert open_source(f"parquet:{tmp_path}").description.startswith("1 parquet file, columns")
    write_parquet(tmp_path / "test.parquet", [0, 1])
    assert open_source(f"parquet:{tmp_path}").description.startswith("2 parquet files, columns")


def test_memory_mapped_tables_equal_tables_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, names and fingerprints are equal, also for rows that name files and for shards."""
    write_file(tmp_path / "x.png", random_png(9))
    rows = [
        {"bytes": None, "path": "x.png"},
        *({"bytes": random_png(n), "path": None} for n in range(9)),
    ]
    for name, images in (("train-0", rows[:4]), ("train-1", rows[4:]), ("test-0", rows[:2])):
        labels = [number % 2 for number in range(len(images))]
        write_parquet(tmp_path / f"{name}.parquet", labels, names=["a", "b"], images=images)
    in_memory = open_source(f"parquet:{tmp_path}")
    monkeypatch.setattr(parquet_module, "MAX_IN_MEMORY_BYTES", 10)
    mapped = open_source(f"parquet:{tmp_path}")
    assert mapped.class_names == in_memory.class_names
    for name, split in in_memory.splits.items():
        mapped_split = mapped.splits[name]
        assert np.array_equal(mapped_split.labels, split.labels)
        assert mapped_split.fingerprint == split.fingerprint
        for index in range(len(split)):
            assert mapped_split.name_of(index) == split.name_of(index)
            assert np.array_equal(mapped_split.decode(index), split.decode(index))
    assert mapped.splits["train"].name_of(4) == "train-1.parquet row 0"


@pytest.mark.parametrize("limit", [10, 2**28])
def test_memory_mapped_rows_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    num_rows, image_bytes = 600, 3000
    images = [{"bytes": bytes([row % 256]) * image_bytes, "path": None} for row in range(num_rows)]
    write_parquet(tmp_path / "train.parquet", [row % 2 for row in range(num_rows)], images=images)
    monkeypatch.setattr(parquet_module, "MAX_IN_MEMORY_BYTES", limit)
    bytes_before = pa.total_allocated_bytes()
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    bytes_per_row = (pa.total_allocated_bytes() - bytes_before) / num_rows
    assert train.images.read_bytes(599) == images[599]["bytes"]
    # control: without memory mapping
    assert bytes_per_row < 100 if limit == 10 else bytes_per_row > image_bytes


def test_memory_mapped_rows_follow_a_replaced_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the new file has the same length and mtime."""
    monkeypatch.setattr(parquet_module, "MAX_IN_MEMORY_BYTES", 10)
    first_bytes = []
    for value in (10, 200):
        images = [{"bytes": bytes([value]) * 50, "path": None}] * 4
        path = write_parquet(tmp_path / "train.parquet", [0, 1] * 2, images=images)
        os.utime(path, ns=(10**18, 10**18))
        first_bytes.append(
            open_source(f"parquet:{tmp_path}").splits["train"].images.read_bytes(0)[0]
        )
    assert first_bytes == [10, 200]


def test_rejects_tables_that_cannot_be_memory_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "train.parquet", [0, 1] * 50)
    body = bytearray(path.read_bytes())
    body[4:40] = b"\xff" * 36
    path.write_bytes(body)
    monkeypatch.setattr(parquet_module, "MAX_IN_MEMORY_BYTES", 10)
    with refused("data.unreadable", tmp_path, "data.streaming=true"):
        open_source(f"parquet:{tmp_path}")

    def raise_disk_full(*_: Any, **__: Any) -> Any:
        raise OSError("Not enough disk space. Needed: 5.00 GB")

    monkeypatch.setattr("datasets.load_dataset", raise_disk_full)
    with refused("data.unreadable", "Not enough disk space", "HF_HOME"):
        open_source(f"parquet:{tmp_path}")


def patch_load_dataset(
    monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]
) -> list[tuple[Any, ...]]:
    """Replace `datasets.load_dataset`. Returns: the arguments of its calls."""
    calls = []

    def load_dataset(name: str, config: str | None, *, revision: str | None) -> Any:
        calls.append((name, config, revision))
        return load()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return calls


def load_local_dataset(tmp_path: Path) -> Callable[[], Any]:
    from datasets import load_dataset

    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = {"bytes": random_png(3, exif=exif), "path": "turned.png"}
    rows = [{"bytes": random_png(number), "path": None} for number in range(3)]
    write_parquet(
        tmp_path / "train-0.parquet", [0, 1, 1, 0], names=["x", "a"], images=[*rows, rotated]
    )
    write_parquet(tmp_path / "validation-0.parquet", [1], names=["x", "a"])
    other_splits = ("extra", "training")
    for name in other_splits:
        write_parquet(tmp_path / f"{name}-0.parquet", [1], names=["x", "a"])
    splits = ("train", "validation", *other_splits)
    files = {split: str(tmp_path / f"{split}-0.parquet") for split in splits}
    loaded = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    return lambda: loaded


def test_hub_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = patch_load_dataset(monkeypatch, load_local_dataset(tmp_path))
    source = open_source("hub:someone/things@v1.0:large")
    assert calls == [("someone/things", "large", "v1.0")]
    assert source.class_names == ["x", "a"]
    assert class_counts(source) == {"train": [2, 2], "val": [0, 1]}
    assert any(
        "splits with unknown names are ignored: extra, training" in text for text in caplog.messages
    )
    train = source.splits["train"]
    # our decoder applies EXIF orientation; `datasets` would have rotated the image itself
    assert train.decode(3).shape == (4, 5, 3)
    assert np.array_equal(train.decode(3), np.rot90(decode_image(random_png(3)), -1))
    assert train.name_of(3) == "hub:someone/things@v1.0:large train row 3 (turned.png)"
    assert "revision v1.0" in source.description


def test_hub_rows_may_name_only_cached_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_dataset

    write_file(tmp_path / "cache/downloads/x.png", random_png(5))
    write_file(tmp_path / "secret.png", random_png(6))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    paths = [f"{tmp_path}/cache/downloads/x.png", f"{tmp_path}/secret.png", "secret.png"]
    rows = [{"bytes": None, "path": path} for path in paths]
    file = write_parquet(tmp_path / "t.parquet", [0, 1, 1], names=["a", "b"], images=rows)
    loaded = load_dataset("parquet", data_files=str(file), cache_dir=str(tmp_path / "cache"))
    patch_load_dataset(monkeypatch, lambda: loaded)
    train = open_source("hub:someone/things").splits["train"]
    assert np.array_equal(train.decode(0), decode_image(random_png(5)))
    with pytest.raises(DataError, match=r"secret.png\): this path leads outside"):
        train.decode(1)
    with pytest.raises(DataError, match="no such file"):  # never read from the working directory
        train.decode(2)


def test_rejects_a_cached_copy_of_another_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_local_dataset(tmp_path)()
    for data in loaded.values():
        url = f"hf://datasets/someone/things@{'a' * 40}/train-0.parquet"
        data.info.download_checksums = {url: {}}
    patch_load_dataset(monkeypatch, lambda: loaded)
    assert f"revision {'a' * 40}" in open_source("hub:someone/things").description
    open_source(f"hub:someone/things@{'a' * 40}")
    with pytest.raises(DataError, match=f"only revision {'a' * 40} is cached"):
        open_source(f"hub:someone/things@{'b' * 40}")


def test_unreachable_hub() -> None:
    # the real library; the test environment sets it offline
    with pytest.raises(HubError, match="hub cannot be reached and nothing is cached"):
        open_source("hub:someone/things")


def test_hub_error_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.exceptions import DatasetNotFoundError

    def raising(error: Exception) -> Callable[[], Any]:
        def raise_error() -> Any:
            raise error

        return raise_error

    patch_load_dataset(
        monkeypatch, raising(DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub"))
    )
    with pytest.raises(DataError, match=r"cannot be loaded.*doesn't exist.*check the name"):
        open_source("hub:a/b")
    patch_load_dataset(
        monkeypatch, raising(ValueError("BuilderConfig 'x' not found.\nAvailable: ['y']"))
    )
    with pytest.raises(DataError, match=r"cannot be loaded \(BuilderConfig 'x' not found. Avail"):
        open_source("hub:a/b:x")
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="a local folder is also named 'a/b'"):
        open_source("hub:a/b")


@pytest.mark.faults  # slow: a new process imports torch
def test_opens_a_dataset_without_importing_pandas(tmp_path: Path) -> None:
    """Importing pandas takes as long as the rest of opening a dataset."""
    write_parquet(tmp_path / "rows" / "train.parquet", [0, 1] * 6)
    write_image_folder(tmp_path / "images", {"train/a": 2, "train/b": 2})
    script = (
        "import sys; from finetune.data.open_source import open_source\n"
        "for source in sys.argv[1:]:\n"
        "    split = open_source(source).splits['train']\n"
        "    print(len(split.fingerprint), split.decode(0).ndim, 'pandas' in sys.modules)"
    )
    sources = f"folder:{tmp_path}/images", f"parquet:{tmp_path}/rows"
    command = [sys.executable, "-c", script, *sources]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == 2 * "64 3 False\n"


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_parquet(tmp_path / "train.parquet", [0, 0, 1, 1])
    read_labels = parquet_module.read_label_column

    def read_then_replace(*arguments: Any) -> Any:
        labels = read_labels(*arguments)
        write_parquet(file, [1, 1, 0, 0])
        return labels

    monkeypatch.setattr(parquet_module, "read_label_column", read_then_replace)
    with refused("data.changed", file, "has changed since it was opened"):
        open_source(f"parquet:{tmp_path}")
