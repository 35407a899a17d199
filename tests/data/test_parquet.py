"""Parquet files and hub data sets: every layout, and every way in which one can be wrong."""

from __future__ import annotations

import os
import pickle
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
from samples import counts, make_folder, make_parquet, png, write

from finetune.data import parquet as tables
from finetune.data.decode import decode
from finetune.data.source import open_source
from finetune.data.splits import split_train
from finetune.errors import DataError, HubError

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


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
    with refused("data.ambiguous", tmp_path / "large", tmp_path / "small"):
        open_source(f"parquet:{tmp_path}")
    assert counts(open_source(f"parquet:{tmp_path}/small")) == {"train": [1, 1]}


def test_parquet_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    for path, code, named in (
        ("cifar1", "data.not_found", "'cifar10'"),
        ("cifar10", "data.empty", "cifar10"),
        ("*/none-*.parquet", "data.empty", "*/none-*.parquet"),
    ):
        with refused(code, named):
            open_source(f"parquet:{tmp_path}/{path}")


@pytest.mark.parametrize(
    "content,code,kind",
    [
        (b"version https://git-lfs.github.com/spec/v1", "data.wrong_format", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "data.wrong_format", "web page"),
        (b"", "data.damaged", "zero bytes"),
        (b"PAR1 and no end", "data.damaged", ""),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: bytes, code: str, kind: str) -> None:
    make_parquet(tmp_path / "test.parquet", [0, 1])
    write(tmp_path / "train.parquet", content)
    with refused(code, "train.parquet", kind):
        open_source(f"parquet:{tmp_path}")


def test_a_second_file_that_is_none_is_named(tmp_path: Path) -> None:
    make_parquet(tmp_path / "train-0.parquet", [0, 1])
    write(tmp_path / "train-1.parquet", b"version https://git-lfs.github.com/spec/v1")
    with refused("data.wrong_format", "train-1.parquet"):
        open_source(f"parquet:{tmp_path}")


def test_one_file_and_more_are_counted(tmp_path: Path) -> None:
    make_parquet(tmp_path / "train.parquet", [0, 1])
    assert open_source(f"parquet:{tmp_path}").description.startswith("1 parquet file, columns")
    make_parquet(tmp_path / "test.parquet", [0, 1])
    assert open_source(f"parquet:{tmp_path}").description.startswith("2 parquet files, columns")


def test_larger_than_memory_is_mapped_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, names and so fingerprints, also of rows that name files, and of several files."""
    write(tmp_path / "x.png", png(9))
    rows = [{"bytes": None, "path": "x.png"}, *({"bytes": png(n), "path": None} for n in range(9))]
    for name, images in (("train-0", rows[:4]), ("train-1", rows[4:]), ("test-0", rows[:2])):
        labels = [number % 2 for number in range(len(images))]
        make_parquet(tmp_path / f"{name}.parquet", labels, names=["a", "b"], images=images)
    source = open_source(f"parquet:{tmp_path}")
    monkeypatch.setattr(tables, "_MEMORY_BYTES", 10)
    mapped = open_source(f"parquet:{tmp_path}")
    assert mapped.class_names == source.class_names
    for name, split in source.splits.items():
        other = mapped.splits[name]
        assert np.array_equal(other.labels, split.labels)
        assert other.fingerprint == split.fingerprint
        for index in range(len(split)):
            assert other.name_of(index) == split.name_of(index)
            assert np.array_equal(other.read(index), split.read(index))
    assert mapped.splits["train"].name_of(4) == "train-1.parquet row 0"
    again = pickle.loads(pickle.dumps(mapped.splits["train"]))
    assert np.array_equal(again.read(7), source.splits["train"].read(7))


@pytest.mark.parametrize("limit", [10, 2**28])
def test_mapped_rows_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    rows, size = 600, 3000
    images = [{"bytes": bytes([row % 256]) * size, "path": None} for row in range(rows)]
    make_parquet(tmp_path / "train.parquet", [row % 2 for row in range(rows)], images=images)
    monkeypatch.setattr(tables, "_MEMORY_BYTES", limit)
    before = pa.total_allocated_bytes()
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    held = (pa.total_allocated_bytes() - before) / rows
    assert train.items.content(599) == images[599]["bytes"]
    assert held < 100 if limit == 10 else held > size  # the control


def test_mapped_rows_are_those_of_todays_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file of the same length in its place, its mtime restored."""
    monkeypatch.setattr(tables, "_MEMORY_BYTES", 10)
    rows = []
    for shade in (10, 200):
        images = [{"bytes": bytes([shade]) * 50, "path": None}] * 4
        path = make_parquet(tmp_path / "train.parquet", [0, 1] * 2, images=images)
        os.utime(path, ns=(10**18, 10**18))
        rows.append(open_source(f"parquet:{tmp_path}").splits["train"].items.content(0)[0])
    assert rows == [10, 200]


def test_rows_that_cannot_be_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_parquet(tmp_path / "train.parquet", [0, 1] * 50)
    body = bytearray(path.read_bytes())
    body[4:40] = b"\xff" * 36
    path.write_bytes(body)
    monkeypatch.setattr(tables, "_MEMORY_BYTES", 10)
    with refused("data.unreadable", tmp_path, "data.streaming=true"):
        open_source(f"parquet:{tmp_path}")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError("Not enough disk space. Needed: 5.00 GB")

    monkeypatch.setattr("datasets.load_dataset", full)
    with refused("data.unreadable", "Not enough disk space", "HF_HOME"):
        open_source(f"parquet:{tmp_path}")


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
    others = ("extra", "training")
    for other in others:
        make_parquet(tmp_path / f"{other}-0.parquet", [1], names=["x", "a"])
    splits = ("train", "validation", *others)
    files = {split: str(tmp_path / f"{split}-0.parquet") for split in splits}
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
    assert any(
        "splits of unknown use are left out: extra, training" in text for text in caplog.messages
    )
    train = source.splits["train"]
    # our decoder, our EXIF rule: `datasets` would have turned it itself
    assert train.read(3).shape == (4, 5, 3)
    assert np.array_equal(train.read(3), np.rot90(decode(png(3)), -1))
    assert train.name_of(3) == "hub:someone/things@v1.0:large train row 3 (turned.png)"
    assert np.array_equal(pickle.loads(pickle.dumps(train)).read(3), train.read(3))
    assert "revision v1.0" in source.description


def test_hub_rows_name_files_of_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_dataset

    write(tmp_path / "cache/downloads/x.png", png(5))
    write(tmp_path / "secret.png", png(6))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    paths = [f"{tmp_path}/cache/downloads/x.png", f"{tmp_path}/secret.png", "secret.png"]
    rows = [{"bytes": None, "path": path} for path in paths]
    file = make_parquet(tmp_path / "t.parquet", [0, 1, 1], names=["a", "b"], images=rows)
    loaded = load_dataset("parquet", data_files=str(file), cache_dir=str(tmp_path / "cache"))
    hub_double(monkeypatch, lambda: loaded)
    train = open_source("hub:someone/things").splits["train"]
    assert np.array_equal(train.read(0), decode(png(5)))
    with pytest.raises(DataError, match=r"secret.png\): this path leads outside"):
        train.read(1)
    with pytest.raises(DataError, match="no such file"):  # never from the working directory
        train.read(2)


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
    with pytest.raises(HubError, match="hub cannot be reached and nothing is cached"):
        open_source("hub:someone/things")


def test_hub_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.exceptions import DatasetNotFoundError

    def answer(error: Exception) -> Callable[[], Any]:
        def refuse() -> Any:
            raise error

        return refuse

    hub_double(monkeypatch, answer(DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub")))
    with pytest.raises(DataError, match=r"cannot be loaded.*doesn't exist.*check its name"):
        open_source("hub:a/b")
    hub_double(monkeypatch, answer(ValueError("BuilderConfig 'x' not found.\nAvailable: ['y']")))
    with pytest.raises(DataError, match=r"cannot be loaded \(BuilderConfig 'x' not found. Avail"):
        open_source("hub:a/b:x")
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is a folder 'a/b' here"):
        open_source("hub:a/b")


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_set_is_opened_without_pandas(kind: str, tmp_path: Path) -> None:
    """Importing it takes as long as all the rest of opening a set."""
    if kind == "parquet":
        make_parquet(tmp_path / "train.parquet", [0, 1] * 6)
    else:
        make_folder(tmp_path, {"train/a": 2, "train/b": 2})
    script = (
        "import sys; from finetune.data.source import open_source\n"
        f"split = open_source('{kind}:{tmp_path}').splits['train']\n"
        "print(len(split.fingerprint), split.read(0).ndim, 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "64 3 False\n"
