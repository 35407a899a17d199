"""The pixel file: each image at the offset in its table row, with its checksum verified on read."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.data import pixel_file as pixel_file_module
from finetune.data.pixel_file import (
    DecodedImages,
    PixelFileWriter,
    PixelTable,
    Storage,
    read_pixel_table,
    write_pixel_table,
)
from finetune.data.shared_memory import allocate_shared_memory

KEY = "a" * 64


@pytest.fixture
def file_descriptor(tmp_path: Path) -> Iterator[int]:
    file_descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield file_descriptor
    os.close(file_descriptor)


@pytest.fixture(params=["memory", "file"])
def storage(request: pytest.FixtureRequest, file_descriptor: int) -> Storage:
    return file_descriptor if request.param == "file" else allocate_shared_memory(100_000)


def fail_if_damaged(index: int) -> np.ndarray:
    pytest.fail(f"image {index} is damaged")


def random_image(number: int, size: tuple[int, int] = (3, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def test_compact_closes_gaps_between_images_of_one_size(storage: Storage) -> None:
    writer = PixelFileWriter(storage, 10, expected_size=(3, 4), num_bytes=0)
    indices = np.array([0, 1, 3, 4, 5, 8, 9])
    for index in reversed(indices.tolist()):
        writer.write(index, random_image(index))
    rows = writer.compact(indices)
    images = DecodedImages(storage, rows, fail_if_damaged)
    assert (len(images), images.common_size, images.pixel_bytes) == (7, (3, 4), 7 * 36)
    batch = images.read_batch(np.arange(7))
    assert isinstance(batch, torch.Tensor)
    for from_batch, from_iteration, index, row in zip(batch, images, indices, rows, strict=True):
        np.testing.assert_array_equal(from_batch, random_image(index))
        np.testing.assert_array_equal(from_iteration.permute(1, 2, 0), random_image(index))
        assert row["crc"] == zlib.crc32(random_image(index).tobytes())
    assert torch.equal(images.to(torch.device("cpu")), batch)
    if isinstance(storage, int):
        assert os.fstat(storage).st_size == 7 * 36
    else:
        assert torch.equal(images.as_tensor(), batch)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_reads_large_batches_in_threads(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(pixel_file_module, "_MIN_THREADED_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    writer = PixelFileWriter(storage, 9, expected_size=(3, 4), num_bytes=0)
    for index in range(9):
        writer.write(index, random_image(index))
    order = np.array([8, 3, 3, 0])
    images = DecodedImages(storage, writer.compact(np.arange(9)), fail_if_damaged)
    for pixels, index in zip(images.read_batch(order), order, strict=True):
        np.testing.assert_array_equal(pixels, random_image(index))


@pytest.mark.parametrize("size", [None, (3, 4)])
def test_stores_images_of_mixed_sizes(storage: Storage, size: tuple[int, int] | None) -> None:
    writer = PixelFileWriter(storage, 4, expected_size=size, num_bytes=10)
    sizes = [(3, 4), (5, 5), (3, 4), (2, 9)]
    for index in (2, 0, 3, 1):
        writer.write(index, random_image(index, sizes[index])[:, ::-1])  # not contiguous
    images = DecodedImages(storage, writer.compact(np.array([0, 1, 3])), fail_if_damaged)
    assert (len(images), images.common_size) == (3, None)
    batch = images.read_batch(np.array([0, 1, 2]))
    for from_iteration, from_batch, index in zip(images, batch, (0, 1, 3), strict=True):
        np.testing.assert_array_equal(
            from_iteration.permute(1, 2, 0), random_image(index, sizes[index])[:, ::-1]
        )
        assert torch.equal(from_iteration, from_batch)
    assert torch.equal(images[1:][1], images[2])


def test_several_processes_write_concurrently(storage: Storage) -> None:
    writer = PixelFileWriter(storage, 90, expected_size=None, num_bytes=0)

    def write(first: int) -> None:
        for index in range(first, 90, 3):
            writer.write(index, random_image(index, (1 + index % 5, 2)))

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write, args=(first,)) for first in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    images = DecodedImages(storage, writer.compact(np.arange(90)), fail_if_damaged)
    for index in range(90):
        expected = random_image(index, (1 + index % 5, 2))
        np.testing.assert_array_equal(images[index].permute(1, 2, 0), expected)


def test_no_images(storage: Storage) -> None:
    writer = PixelFileWriter(storage, 0, expected_size=None, num_bytes=0)
    assert (
        len(DecodedImages(storage, writer.compact(np.zeros(0, dtype=np.int64)), fail_if_damaged))
        == 0
    )


def test_fails_if_the_memory_is_full() -> None:
    writer = PixelFileWriter(allocate_shared_memory(40), 2, expected_size=(3, 4), num_bytes=0)
    writer.write(0, random_image(0))
    with pytest.raises(OSError, match="memory"):
        writer.write(1, random_image(1))


def write_nine_images(file_descriptor: int) -> PixelTable:
    """Write nine of ten images and their table."""
    writer, indices = (
        PixelFileWriter(file_descriptor, 10, expected_size=(3, 4), num_bytes=0),
        np.delete(np.arange(10), 6),
    )
    for index in indices.tolist():
        writer.write(index, random_image(index))
    table = PixelTable(writer.compact(indices), indices, [(6, "is not an image")])
    write_pixel_table(file_descriptor, table, KEY)
    return table


def test_reads_back_the_table(file_descriptor: int) -> None:
    table, loaded = write_nine_images(file_descriptor), None
    loaded = read_pixel_table(file_descriptor, KEY, 10)
    np.testing.assert_array_equal(loaded.rows, table.rows)
    np.testing.assert_array_equal(loaded.indices, table.indices)
    assert loaded.failed == table.failed
    with pytest.raises(ValueError, match="other images"):
        read_pixel_table(file_descriptor, "b" * 64, 10)
    for num_images in (8, 9, 11):
        with pytest.raises(ValueError, match=r"indices|images|numbers"):
            read_pixel_table(file_descriptor, KEY, num_images)


@pytest.mark.parametrize("damaged_index", [0, 3, 8])
def test_decodes_a_damaged_image_again(file_descriptor: int, damaged_index: int) -> None:
    rows, decoded_indices = write_nine_images(file_descriptor).rows, list[int]()

    def decode_again(index: int) -> np.ndarray:
        decoded_indices.append(index)
        return random_image(50 + index)

    images = DecodedImages(file_descriptor, rows, decode_again)
    (byte,) = os.pread(file_descriptor, 1, int(rows["offset"][damaged_index]) + 35)
    os.pwrite(file_descriptor, bytes([byte ^ 4]), int(rows["offset"][damaged_index]) + 35)
    np.testing.assert_array_equal(
        images.read_batch(np.array([damaged_index]))[0], random_image(50 + damaged_index)
    )
    np.testing.assert_array_equal(
        images[damaged_index:][0].permute(1, 2, 0), random_image(50 + damaged_index)
    )
    assert decoded_indices == [damaged_index, damaged_index]
    images.read_batch(np.delete(np.arange(9), damaged_index))
    assert len(decoded_indices) == 2
    os.ftruncate(file_descriptor, 40)  # also damages images that were verified before
    decoded_indices.clear()
    images.read_batch(np.arange(1, 9))
    assert decoded_indices == list(range(1, 9))


def rewrite_table(file_descriptor: int, table: PixelTable) -> None:
    os.ftruncate(file_descriptor, 9 * 36)
    write_pixel_table(file_descriptor, table, KEY)


@pytest.mark.parametrize("field", ["offset", "height", "width"])
@pytest.mark.parametrize("value", [-1, 0, 2**31 - 1])
def test_rejects_invalid_rows_with_a_valid_checksum(
    file_descriptor: int, field: str, value: int
) -> None:
    table = write_nine_images(file_descriptor)
    rewrite_table(file_descriptor, table)
    read_pixel_table(file_descriptor, KEY, 10)
    table.rows[field][4] = value
    rewrite_table(file_descriptor, table)
    if (field, value) == ("offset", 0):
        # the row of another image; the image checksum detects that
        read_pixel_table(file_descriptor, KEY, 10)
        return
    with pytest.raises(ValueError, match=r"height or width|outside the pixel data"):
        read_pixel_table(file_descriptor, KEY, 10)


@pytest.mark.parametrize(
    "json_text",
    [
        *("7", "[" * 1000, "[" * 90, "null", '{"0": 1}', "[7]", "[[6]]", '[[6, ""], [6, ""]]'),
        *('[["6", ""]]', "[[6, 7]]", '[[6.0, ""]]', '[[true, ""]]', '[[-1, ""]]', '[[1e999, ""]]'),
    ],
)
def test_rejects_invalid_error_texts_with_a_valid_checksum(
    file_descriptor: int, json_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_nine_images(file_descriptor)
    with monkeypatch.context() as patch:
        patch.setattr(pixel_file_module.json, "dumps", lambda _: json_text)
        rewrite_table(file_descriptor, table)
    with pytest.raises(ValueError, match=r"unreadable image|images|indices|index|Expecting|nested"):
        read_pixel_table(file_descriptor, KEY, 10)
