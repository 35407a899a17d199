"""Looking at whole data sets: every unreadable image is named, every other one loaded."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from samples import make_folder, make_parquet, png, write

from finetune.data import decode_all as scan_module
from finetune.data import notices
from finetune.data.decode import decode
from finetune.data.decode_all import decoded_bytes, info, readable, scan, visit
from finetune.data.image_cache import Decoded, How, decode_images
from finetune.data.pixel_file import Images
from finetune.data.source import Split, open_source
from finetune.errors import DataError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices are said once per process: each test starts anew."""
    monkeypatch.setattr(notices, "_logged", set())


@pytest.fixture(params=[0, 3])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """0: in this process; else as many others, also for the few images of a test."""
    monkeypatch.setattr(scan_module, "SMALL_BYTES", 0)
    number: int = request.param
    return number


def load(split: Split, **changes: Any) -> Decoded:
    how: dict[str, Any] = {"workers": 2, "unreadable": "stop", "progress": False}
    how |= {"timeout_seconds": 60.0, **changes}
    return decode_images(split, How(**how), num_bytes=decoded_bytes(split))


def pixels(images: Images) -> list[np.ndarray]:
    return [image.permute(1, 2, 0).numpy() for image in images]


def damaged_folder(root: Path) -> str:
    source = make_folder(root, {"train/a": 3, "train/b": 3, "test/a": 1, "test/b": 1})
    write(root / "train/a/3.png", png(0)[:60])
    write(root / "train/b/3.jpg", b"")
    write(root / "train/b/4.jpg", b"some text")
    os.mkfifo(root / "train/b/5.png")
    (root / "test/a/link.png").symlink_to("nowhere")
    return source


def test_scan_lists_every_unreadable_image(tmp_path: Path, workers: int) -> None:
    found = scan(open_source(damaged_folder(tmp_path)), workers=workers)
    assert [(item["name"], item["class"], item["split"]) for item in found] == [
        ("train/a/3.png", "a", "train"),
        ("train/b/3.jpg", "b", "train"),
        ("train/b/4.jpg", "b", "train"),
        ("train/b/5.png", "b", "train"),
        ("test/a/link.png", "a", "test"),
    ]
    causes = ("cannot be decoded", "zero bytes", "not an image", "is a pipe", "a link to nothing")
    for item, cause in zip(found, causes, strict=True):
        assert item["error"].startswith(cause)  # the name is given once
    json.dumps(found)
    assert scan(open_source("embedded:digits")) == []


def test_unreadable_images_far_apart_are_all_named_in_order(tmp_path: Path, workers: int) -> None:
    number = 400  # several tasks
    images = [{"bytes": png(row), "path": None} for row in range(number)]
    bad = [3, 4, 140, 399]
    for row in bad:
        images[row] = {"bytes": b"", "path": None}
    make_parquet(tmp_path / "a.parquet", [row % 2 for row in range(number)], images=images)
    source = open_source(f"parquet:{tmp_path}")
    assert [item["index"] for item in scan(source, workers=workers)] == bad
    loaded, kept = load(source.splits["train"], workers=workers, unreadable="quarantine")
    assert kept.tolist() == [row for row in range(number) if row not in bad]
    assert (len(loaded), loaded.size) == (396, (5, 4))
    assert np.array_equal(pixels(loaded)[-1], decode(png(398)))


def test_loading_stops_with_the_whole_list(tmp_path: Path) -> None:
    split = open_source(damaged_folder(tmp_path)).splits["train"]
    with pytest.raises(DataError) as caught:
        load(split)
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
        load(open_source(source).splits["train"])
    assert "bad19.png" in str(caught.value)
    assert "bad20.png" not in str(caught.value)
    assert "and 10 more" in str(caught.value)
    assert len(scan(open_source(source))) == 30


def test_quarantine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = open_source(damaged_folder(tmp_path)).splits["train"]
    images, kept = load(split, unreadable="quarantine", workers=3)
    assert kept.tolist() == [0, 1, 2, 4, 5, 6]
    assert readable(split, unreadable="quarantine").tolist() == kept.tolist()
    assert len(images) == 6
    for image, index in zip(pixels(images), kept.tolist(), strict=True):
        assert np.array_equal(image, split.read(index))
    assert len(caplog.records) == 1
    assert "4 of 10 images cannot be read; they are left out" in caplog.messages[0]
    for number in range(3):
        write(tmp_path / f"train/a/{number}.png", b"")
    with pytest.raises(DataError, match="no readable image is left of 1 class "):
        load(split, unreadable="quarantine")


def test_loaded_images_are_those_of_read(tmp_path: Path, workers: int) -> None:
    generator = np.random.default_rng(0)
    number = 300  # more than two tasks
    same = [{"bytes": png(row), "path": None} for row in range(number)]
    make_parquet(tmp_path / "a/a.parquet", [row % 2 for row in range(number)], images=same)
    split = open_source(f"parquet:{tmp_path}/a").splits["train"]
    images, kept = load(split, workers=workers)
    assert (len(images), images.size) == (number, (5, 4))
    assert kept.tolist() == list(range(number))
    assert all(np.array_equal(pixels(images)[row], split.read(row)) for row in range(number))

    sizes = [tuple(generator.integers(2, 90, 2).tolist()) for _ in range(number)]
    odd = [{"bytes": png(row, sizes[row]), "path": None} for row in range(number)]
    make_parquet(tmp_path / "b/b.parquet", [row % 2 for row in range(number)], images=odd)
    split = open_source(f"parquet:{tmp_path}/b").splits["train"]
    images, kept = load(split, workers=workers)
    assert images.size is None
    assert [image.shape[:2] for image in pixels(images)] == sizes
    assert all(np.array_equal(pixels(images)[row], split.read(row)) for row in range(number))


def test_one_odd_size_that_the_sample_misses(tmp_path: Path) -> None:
    number = 200
    images = [{"bytes": png(row), "path": None} for row in range(number)]
    images[7] = {"bytes": png(7, (9, 9)), "path": None}
    make_parquet(tmp_path / "a.parquet", [row % 2 for row in range(number)], images=images)
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    loaded, kept = load(split)
    assert loaded.size is None
    assert len(kept) == number
    found = pixels(loaded)
    assert [image.shape for image in found].count((5, 4, 3)) == number - 1
    assert all(np.array_equal(found[row], split.read(row)) for row in range(number))


def test_images_that_do_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, body: memoryview, offset: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("finetune.data.pixel_file._write", full)
    with refused("data.memory", "'train'", "data.keep: none"):
        load(open_source("embedded:digits").splits["train"])


def test_what_the_disk_refuses_comes_back_from_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    source = make_folder(tmp_path / "data", {"a": 150, "b": 150})
    split = open_source(source).splits["train"]

    def full(index: int, image: np.ndarray) -> None:
        if index > 200:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        visit(split, full, workers=workers, progress=False)
    assert caught.value.errno == errno.ENOSPC
    assert not multiprocessing.active_children()


def test_a_notice_of_several_processes_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for number in range(300):
        path = tmp_path / f"{'ab'[number % 2]}/{number:03}.gif"
        path.parent.mkdir(exist_ok=True)
        moving = number in (7, 8, 150, 151)  # none of those that are looked at beforehand
        frames[0].save(path, save_all=moving, append_images=frames[1:] if moving else ())
    images, _ = load(open_source(f"folder:{tmp_path}").splits["train"], workers=workers)
    assert len(images) == 300
    assert [text for text in caplog.messages if "first frame" in text] == caplog.messages
    assert len(caplog.messages) == 1


def test_an_image_that_crashes_the_decoder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_module, "SMALL_BYTES", 0)
    split = open_source(make_folder(tmp_path, {"a": 20, "b": 20})).splits["train"]
    read, parent = Split.read, os.getpid()

    def crashes(self: Split, index: int) -> np.ndarray:
        if index == 7 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGSEGV)
        return read(self, index)

    monkeypatch.setattr(Split, "read", crashes)
    with pytest.raises(DataError, match=rf"^{split.name_of(7)}: crashes the decoder"):
        load(split, workers=2)


def test_progress_goes_to_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    load(open_source("embedded:digits").splits["test"], progress=True)
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
