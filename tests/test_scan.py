"""Looking at whole data sets: every unreadable image is named, every other one loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from samples import make_folder, make_parquet, png, write

from finetune.data import decode as decode_module
from finetune.data import scan as scan_module
from finetune.data.decode import decode
from finetune.data.scan import decoded_bytes, info, load_images, readable, scan
from finetune.data.sources import open_source
from finetune.errors import DataError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices are said once per process: each test starts anew."""
    monkeypatch.setattr(decode_module, "_said", set())


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


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
        assert item["error"].startswith(cause)  # the name is given once
    json.dumps(found)
    assert scan(open_source("embedded:digits")) == []


@pytest.mark.parametrize("workers", [1, 4])
def test_unreadable_images_far_apart_are_all_named_in_order(tmp_path: Path, workers: int) -> None:
    number = 400  # several tasks of threads
    images = [{"bytes": png(row), "path": None} for row in range(number)]
    bad = [3, 4, 140, 399]
    for row in bad:
        images[row] = {"bytes": b"", "path": None}
    make_parquet(tmp_path / "a.parquet", [row % 2 for row in range(number)], images=images)
    source = open_source(f"parquet:{tmp_path}")
    assert [item["index"] for item in scan(source, workers=workers)] == bad
    loaded, kept = load_images(source.splits["train"], workers=workers, unreadable="quarantine")
    assert kept.tolist() == [row for row in range(number) if row not in bad]
    assert isinstance(loaded, np.ndarray)
    assert loaded.shape == (396, 5, 4, 3)
    assert np.array_equal(loaded[-1], decode(png(398)))


def test_loading_stops_with_the_whole_list(tmp_path: Path) -> None:
    split = open_source(damaged_folder(tmp_path)).splits["train"]
    with pytest.raises(DataError) as caught:
        load_images(split)
    text = str(caught.value)
    with pytest.raises(DataError) as again:
        readable(split)
    assert str(again.value) == text
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
    assert readable(split, unreadable="quarantine").tolist() == kept.tolist()
    assert len(images) == 6
    for image, index in zip(images, kept.tolist(), strict=True):
        assert np.array_equal(image, split.read(index))
    assert len(caplog.records) == 1
    assert "4 of 10 images cannot be read; they are left out" in messages(caplog)[0]
    for number in range(3):
        write(tmp_path / f"train/a/{number}.png", b"")
    with pytest.raises(DataError, match="no readable image is left of 1 class "):
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
    without_memory = SimpleNamespace(**{**vars(np), "empty": refuse})  # numpy needs its own
    monkeypatch.setattr(scan_module, "np", without_memory)
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
