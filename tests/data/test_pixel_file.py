"""The pixel file: images without gaps, each with a checksum that is verified when it is read."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from finetune.data.pixel_file import (
    DecodedImages,
    PixelTable,
    read_pixel_table,
    write_pixel_table,
)

KEY = "a" * 64
UNIFORM = [(3, 4)] * 9
RAGGED = [(3, 4), (5, 5), (3, 4), (2, 9), (1, 1), (3, 4), (3, 4), (8, 2), (3, 3)]
FAILED = [(6, "is not an image"), (9, "ist kein Bild ☹")]


def random_image(number: int, size: tuple[int, int] = (3, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def fail_if_damaged(position: int) -> np.ndarray:
    pytest.fail(f"image {position} is damaged")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BinaryIO]:
    with (tmp_path / "file").open("w+b") as opened:
        yield opened


def write_images(file: BinaryIO, sizes: list[tuple[int, int]]) -> PixelTable:
    """Write nine images of a split of eleven, and their table."""
    images = [random_image(number, size) for number, size in enumerate(sizes)]
    for image in images:
        file.write(image.data)
    checksums = np.array([zlib.crc32(image.data) for image in images], dtype=np.uint32)
    table = PixelTable(np.array(sizes, dtype=np.int64), checksums, FAILED)
    write_pixel_table(file, table, KEY)
    file.flush()
    return table


@pytest.mark.parametrize("sizes", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.parametrize("threaded", [False, True])
def test_reads_back_images_and_table(
    file: BinaryIO, sizes: list[tuple[int, int]], threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threaded:
        monkeypatch.setattr("finetune.data.pixel_file.MIN_THREADED_BYTES", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    write_images(file, sizes)
    table = read_pixel_table(file, KEY, 11)
    assert table.failed == FAILED
    assert table.indices.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 10]
    images = DecodedImages(file, table, fail_if_damaged, is_in_memory=False)
    assert len(images) == 9
    assert images.common_size == ((3, 4) if sizes == UNIFORM else None)
    assert images.pixel_bytes == sum(3 * height * width for height, width in sizes)
    order = np.array([8, 3, 3, 0])
    for pixels, number in zip(images.read_batch(order), order.tolist(), strict=True):
        expected = images[number].permute(1, 2, 0) if sizes == UNIFORM else images[number]
        assert torch.equal(pixels, expected)
    for image, (number, size) in zip(images, enumerate(sizes), strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0), random_image(number, size))
    assert torch.equal(images[2:][1:][1], images[4])
    assert len(images[2:4]) == 2


def test_copies_and_views_images_of_one_size(file: BinaryIO) -> None:
    images = DecodedImages(file, write_images(file, UNIFORM), fail_if_damaged, is_in_memory=True)
    expected = np.stack([random_image(number) for number in range(9)])
    np.testing.assert_array_equal(images.as_tensor(), expected)
    np.testing.assert_array_equal(images.to(torch.device("cpu")), expected)
    assert images.nbytes == images.pixel_bytes


def test_no_images(file: BinaryIO) -> None:
    table = PixelTable(np.zeros((0, 2), np.int64), np.zeros(0, np.uint32), [(0, "bad")])
    write_pixel_table(file, table, KEY)
    loaded = read_pixel_table(file, KEY, 1)
    assert (len(loaded.indices), loaded.failed) == (0, [(0, "bad")])
    assert not len(DecodedImages(file, loaded, fail_if_damaged, is_in_memory=False))


def test_decodes_a_damaged_image_again(file: BinaryIO) -> None:
    decoded: list[int] = []

    def decode_again(position: int) -> np.ndarray:
        decoded.append(position)
        return random_image(50 + position)

    images = DecodedImages(file, write_images(file, UNIFORM), decode_again, is_in_memory=False)
    file.seek(3 * 36 + 35)
    (byte,) = file.read(1)
    os.pwrite(file.fileno(), bytes([byte ^ 4]), 3 * 36 + 35)
    np.testing.assert_array_equal(images.read_batch(np.array([3]))[0], random_image(53))
    np.testing.assert_array_equal(images[3:][0].permute(1, 2, 0), random_image(53))
    assert decoded == [3, 3]
    images.read_batch(np.array([0, 1, 2, 4, 5, 6, 7, 8]))
    assert decoded == [3, 3]
    os.ftruncate(file.fileno(), 40)  # also damages images that were verified before
    images.read_batch(np.arange(1, 9))
    assert decoded == [3, 3, *range(1, 9)]


def test_refuses_a_file_of_another_key(file: BinaryIO) -> None:
    write_images(file, UNIFORM)
    with pytest.raises(ValueError, match="sha256"):
        read_pixel_table(file, "b" * 64, 11)


def test_refuses_every_change_after_the_pixels(file: BinaryIO) -> None:
    write_images(file, UNIFORM)
    file.seek(0)
    body = file.read()
    changes = [body[:length] for length in (0, 10, 9 * 36, len(body) - 1)]
    changes += [body + b"\0", bytes(len(body)), b"\xff" * len(body)]
    for position in range(9 * 36, len(body)):
        changes.append(body[:position] + bytes([body[position] ^ 16]) + body[position + 1 :])
    for change in changes:
        file.seek(0)
        file.truncate(0)
        file.write(change)
        with pytest.raises(ValueError, match=r"short|damaged|sha256"):
            read_pixel_table(file, KEY, 11)


def test_a_table_of_another_format_is_damage(tmp_path: Path) -> None:
    body = b"not a safetensors table" * 10
    digest = hashlib.sha256(b"key" + body).digest()
    (tmp_path / "f").write_bytes(body + struct.pack("<q32s", len(body), digest))
    with (tmp_path / "f").open("rb") as file, pytest.raises(ValueError, match="cannot be read"):
        read_pixel_table(file, "key", 10)
