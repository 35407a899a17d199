"""Decoding whole datasets: every unreadable image is reported, every other one loaded."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from small_datasets import random_png, write_file, write_image_folder, write_parquet

from finetune.data import decode_split as decode_all_module
from finetune.data.decode import decode_image
from finetune.data.decode_split import (
    DecodeOptions,
    decode_batches,
    estimate_decoded_bytes,
    find_unreadable_images,
    readable_indices,
)
from finetune.data.open_source import open_source
from finetune.data.pixel_cache import DecodedSplit, decode_to_memory
from finetune.data.pixel_file import DecodedImages
from finetune.data.source import Split
from finetune.data.summary import summarize_source
from finetune.errors import DataError


@pytest.fixture(params=[0, 3])
def num_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of worker processes (0: this process), even for few images."""
    monkeypatch.setattr(decode_all_module, "SMALL_SPLIT_BYTES", 0)
    num_workers: int = request.param
    return num_workers


def decode_options(**changes: Any) -> DecodeOptions:
    options: dict[str, Any] = {"num_workers": 2, "unreadable": "stop", "progress": False}
    return DecodeOptions(**options | {"timeout_seconds": 60.0, **changes})


def load(split: Split, **changes: Any) -> DecodedSplit:
    num_bytes = estimate_decoded_bytes(split)
    return decode_to_memory(split, decode_options(**changes), num_bytes=num_bytes)


def pixels(images: DecodedImages) -> list[np.ndarray]:
    return [image.permute(1, 2, 0).numpy() for image in images]


def damaged_folder(root: Path) -> str:
    source = write_image_folder(root, {"train/a": 3, "train/b": 3, "test/a": 1, "test/b": 1})
    write_file(root / "train/a/3.png", random_png(0)[:60])
    write_file(root / "train/b/3.jpg", b"")
    write_file(root / "train/b/4.jpg", b"some text")
    os.mkfifo(root / "train/b/5.png")
    (root / "test/a/link.png").symlink_to("nowhere")
    return source


def test_scan_lists_every_unreadable_image_once(tmp_path: Path, num_workers: int) -> None:
    unreadable = find_unreadable_images(
        open_source(damaged_folder(tmp_path)), num_workers=num_workers
    )
    assert [(item["name"], item["class"], item["split"]) for item in unreadable] == [
        ("train/a/3.png", "a", "train"),
        ("train/b/3.jpg", "b", "train"),
        ("train/b/4.jpg", "b", "train"),
        ("train/b/5.png", "b", "train"),
        ("test/a/link.png", "a", "test"),
    ]
    causes = ("cannot be decoded", "zero bytes", "not an image", "this is a pipe", "a broken link")
    for item, cause in zip(unreadable, causes, strict=True):
        assert item["error"].startswith(cause)  # does not repeat the name
    json.dumps(unreadable)
    assert find_unreadable_images(open_source("embedded:digits"), 2) == []


def test_lists_unreadable_images_of_several_tasks_in_order(
    tmp_path: Path, num_workers: int
) -> None:
    num_images = 400  # more than one task
    images = [{"bytes": random_png(row), "path": None} for row in range(num_images)]
    bad = [3, 4, 140, 399]
    for row in bad:
        images[row] = {"bytes": b"", "path": None}
    write_parquet(tmp_path / "a.parquet", [row % 2 for row in range(num_images)], images=images)
    source = open_source(f"parquet:{tmp_path}")
    assert [
        item["index"] for item in find_unreadable_images(source, num_workers=num_workers)
    ] == bad
    loaded, readable = load(
        source.splits["train"], num_workers=num_workers, unreadable="quarantine"
    )
    assert readable.tolist() == [row for row in range(num_images) if row not in bad]
    assert (len(loaded), loaded.common_size) == (396, (5, 4))
    assert np.array_equal(pixels(loaded)[-1], decode_image(random_png(398)))


def test_loading_fails_with_the_full_list(tmp_path: Path) -> None:
    split = open_source(damaged_folder(tmp_path)).splits["train"]
    with pytest.raises(DataError) as caught:
        load(split)
    message = str(caught.value)
    with pytest.raises(DataError) as caught_again:
        readable_indices(split, decode_options())
    assert str(caught_again.value) == message
    assert "split 'train': 4 of 10 images cannot be read" in message
    for name in ("train/a/3.png", "train/b/3.jpg", "train/b/4.jpg", "train/b/5.png"):
        assert f"\n  {name}: " in message
    assert "data.unreadable=quarantine" in message
    assert "finetune data scan" in message
    assert caught.value.exit_code == 3


def test_truncates_a_long_list(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"a": 1, "b": 1})
    for number in range(30):
        write_file(tmp_path / f"a/bad{number:02}.png", b"")
    with pytest.raises(DataError) as caught:
        load(open_source(source).splits["train"])
    assert "bad19.png" in str(caught.value)
    assert "bad20.png" not in str(caught.value)
    assert "and 10 more" in str(caught.value)
    assert len(find_unreadable_images(open_source(source), 2)) == 30


def test_quarantine_leaves_out_unreadable_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = open_source(damaged_folder(tmp_path)).splits["train"]
    images, readable = load(split, unreadable="quarantine", num_workers=3)
    assert readable.tolist() == [0, 1, 2, 4, 5, 6]
    options = decode_options(unreadable="quarantine")
    assert readable_indices(split, options).tolist() == readable.tolist()
    assert len(images) == 6
    for image, index in zip(pixels(images), readable.tolist(), strict=True):
        assert np.array_equal(image, split.decode(index))
    assert len(caplog.records) == 1
    assert "4 of 10 images cannot be read; they are left out" in caplog.messages[0]
    for number in range(3):
        write_file(tmp_path / f"train/a/{number}.png", b"")
    with pytest.raises(DataError, match="no readable image left in 1 class "):
        load(split, unreadable="quarantine")


def test_loaded_images_equal_decoded_images(tmp_path: Path, num_workers: int) -> None:
    generator = np.random.default_rng(0)
    num_images = 300  # more than two tasks
    images_of_one_size = [{"bytes": random_png(row), "path": None} for row in range(num_images)]
    write_parquet(
        tmp_path / "a/a.parquet", [row % 2 for row in range(num_images)], images=images_of_one_size
    )
    split = open_source(f"parquet:{tmp_path}/a").splits["train"]
    images, readable = load(split, num_workers=num_workers)
    assert (len(images), images.common_size) == (num_images, (5, 4))
    assert readable.tolist() == list(range(num_images))
    assert all(map(np.array_equal, pixels(images), map(split.decode, range(num_images))))

    sizes = [tuple(generator.integers(2, 30, 2).tolist()) for _ in range(num_images)]
    images_of_any_size = [
        {"bytes": random_png(row, sizes[row]), "path": None} for row in range(num_images)
    ]
    write_parquet(
        tmp_path / "b/b.parquet", [row % 2 for row in range(num_images)], images=images_of_any_size
    )
    split = open_source(f"parquet:{tmp_path}/b").splits["train"]
    images, readable = load(split, num_workers=num_workers)
    assert images.common_size is None
    assert [image.shape[:2] for image in pixels(images)] == sizes
    assert all(map(np.array_equal, pixels(images), map(split.decode, range(num_images))))


def test_one_differing_size_that_the_sample_misses(tmp_path: Path) -> None:
    num_images = 200
    images = [{"bytes": random_png(row), "path": None} for row in range(num_images)]
    images[7] = {"bytes": random_png(7, (9, 9)), "path": None}
    write_parquet(tmp_path / "a.parquet", [row % 2 for row in range(num_images)], images=images)
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    loaded, readable = load(split)
    assert loaded.common_size is None
    assert len(readable) == num_images
    arrays = pixels(loaded)
    assert [image.shape for image in arrays].count((5, 4, 3)) == num_images - 1
    assert all(np.array_equal(arrays[row], split.decode(row)) for row in range(num_images))


def test_fails_if_the_images_do_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(file: BinaryIO, *arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("finetune.data.pixel_cache._write_images", raise_out_of_memory)
    with refused("data.memory", "'train'", "data.keep=none"):
        load(open_source("embedded:digits").splits["train"])


@pytest.mark.parametrize("bytes_per_image", [0, 20, 2**20], ids=lambda value: f"{value} bytes")
def test_workers_return_the_same_pixels_through_few_buffers(
    tmp_path: Path, bytes_per_image: int
) -> None:
    """Images that are larger than expected do not fit into the shared memory."""
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated, so not decoded into the buffer
    bodies = [random_png(row, (5 + row % 7, 4)) for row in range(40)]
    for row in range(0, 40, 3):
        photo, pixels = io.BytesIO(), np.random.default_rng(row).integers(0, 256, (24, 40, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(
            photo, "JPEG", exif=exif if row % 2 else Image.Exif()
        )
        bodies[row] = photo.getvalue()
    bodies[7] = b""
    images = [{"bytes": body, "path": None} for body in bodies]
    write_parquet(tmp_path / "a.parquet", [row % 2 for row in range(40)], images=images)
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    batches = [np.random.default_rng(n).integers(0, 40, 1 + n % 5) for n in range(60)]
    results = decode_batches(
        split,
        iter(batches),
        num_workers=2,
        timeout_seconds=60.0,
        bytes_per_image=bytes_per_image,
        with_checksums=True,
    )
    for indices, decoded in zip(batches, results, strict=True):
        time.sleep(0.005)  # lets the workers run ahead
        for index, image in zip(indices.tolist(), decoded, strict=True):
            if index == 7:
                assert isinstance(image, DataError)
                assert (image.code, "zero bytes" in str(image)) == ("data.damaged", True)
            else:
                assert not isinstance(image, DataError)
                np.testing.assert_array_equal(image.pixels, split.decode(index))
                assert image.crc32 == zlib.crc32(image.pixels.tobytes())


def test_logs_a_warning_of_several_workers_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for number in range(300):
        path = tmp_path / f"{'ab'[number % 2]}/{number:03}.gif"
        path.parent.mkdir(exist_ok=True)
        is_animated = number in (7, 8, 150, 151)  # none is in the sample that is checked first
        frames[0].save(path, save_all=is_animated, append_images=frames[1:] if is_animated else ())
    images, _ = load(open_source(f"folder:{tmp_path}").splits["train"], num_workers=num_workers)
    assert len(images) == 300
    assert [text for text in caplog.messages if "first frame" in text] == caplog.messages
    assert len(caplog.messages) == 1


def test_names_an_image_that_crashes_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_all_module, "SMALL_SPLIT_BYTES", 0)
    split = open_source(write_image_folder(tmp_path, {"a": 20, "b": 20})).splits["train"]
    decode, parent = Split.decode, os.getpid()

    def crash_on_image_7(self: Split, index: int, *buffer: Any) -> np.ndarray:
        if index == 7 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGSEGV)
        return decode(self, index)

    monkeypatch.setattr(Split, "decode", crash_on_image_7)
    with pytest.raises(DataError, match=rf"^{split.name_of(7)}: crashes the decoder"):
        load(split, num_workers=2)


def test_shows_progress_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    load(open_source("embedded:digits").splits["test"], progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == ""


def test_summarize_source(tmp_path: Path) -> None:
    images = [{"bytes": random_png(row, (4 + row, 9 - row)), "path": None} for row in range(3)]
    images.append({"bytes": b"", "path": None})
    write_parquet(tmp_path / "train.parquet", [0, 1, 1, 1], names=["a", "b"], images=images)
    source = open_source(f"parquet:{tmp_path}")
    summary = summarize_source(source)
    assert summary["class_names"] == ["a", "b"]
    assert summary["splits"] == {
        "train": {
            "images": 4,
            "per_class": [1, 3],
            "sampled": 4,
            "unreadable_in_sample": 1,
            "min_size": [4, 7],
            "max_size": [6, 9],
        }
    }
    assert json.loads(json.dumps(summary)) == summary
    digits = open_source("embedded:digits").splits["train"]
    assert estimate_decoded_bytes(digits) == 1442 * 8 * 8 * 3
