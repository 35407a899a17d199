"""The file of images: each where its row says, proved when it is read, whatever lies there."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.data import pixel_file as module
from finetune.data.pixel_file import Canvas, Images, Place, Table, read_table, write_table
from finetune.data.shared_memory import shared_memory

KEY = "a" * 64


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, file: int) -> Place:
    return file if request.param == "file" else shared_memory(100_000)


def again(place: int) -> np.ndarray:
    pytest.fail(f"{place} is damaged")


def image(number: int, size: tuple[int, int] = (3, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def test_images_of_one_size_close_up(place: Place) -> None:
    canvas = Canvas(place, 10, size=(3, 4), num_bytes=0)
    kept = np.array([0, 1, 3, 4, 5, 8, 9])
    for index in reversed(kept.tolist()):
        canvas.keep(index, image(index))
    rows = canvas.close_up(kept)
    images = Images(place, rows, again)
    assert (len(images), images.size, images.num_bytes) == (7, (3, 4), 7 * 36)
    batch = images.batch(np.arange(7))
    assert isinstance(batch, torch.Tensor)
    for mine, other, index, row in zip(batch, images, kept, rows, strict=True):
        np.testing.assert_array_equal(mine, image(index))
        np.testing.assert_array_equal(other.permute(1, 2, 0), image(index))
        assert row["crc"] == zlib.crc32(image(index).tobytes())
    assert torch.equal(images.to(torch.device("cpu")), batch)
    if isinstance(place, int):
        assert os.fstat(place).st_size == 7 * 36
    else:
        assert torch.equal(images.whole(), batch)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_batches_are_read_in_threads(
    place: Place, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(module, "_THREADS_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    canvas = Canvas(place, 9, size=(3, 4), num_bytes=0)
    for index in range(9):
        canvas.keep(index, image(index))
    order = np.array([8, 3, 3, 0])
    images = Images(place, canvas.close_up(np.arange(9)), again)
    for mine, index in zip(images.batch(order), order, strict=True):
        np.testing.assert_array_equal(mine, image(index))


@pytest.mark.parametrize("size", [None, (3, 4)])
def test_other_sizes_stand_behind_one_another(place: Place, size: tuple[int, int] | None) -> None:
    canvas = Canvas(place, 4, size=size, num_bytes=10)
    sizes = [(3, 4), (5, 5), (3, 4), (2, 9)]
    for index in (2, 0, 3, 1):
        canvas.keep(index, image(index, sizes[index])[:, ::-1])  # not contiguous
    images = Images(place, canvas.close_up(np.array([0, 1, 3])), again)
    assert (len(images), images.size) == (3, None)
    batch = images.batch(np.array([0, 1, 2]))
    for mine, other, index in zip(images, batch, (0, 1, 3), strict=True):
        np.testing.assert_array_equal(mine.permute(1, 2, 0), image(index, sizes[index])[:, ::-1])
        assert torch.equal(mine, other)
    assert torch.equal(images[1:][1], images[2])


def test_several_processes_write_at_once(place: Place) -> None:
    canvas = Canvas(place, 90, size=None, num_bytes=0)

    def write(first: int) -> None:
        for index in range(first, 90, 3):
            canvas.keep(index, image(index, (1 + index % 5, 2)))

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write, args=(first,)) for first in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    images = Images(place, canvas.close_up(np.arange(90)), again)
    for index in range(90):
        expected = image(index, (1 + index % 5, 2))
        np.testing.assert_array_equal(images[index].permute(1, 2, 0), expected)


def test_nothing_is_nothing(place: Place) -> None:
    canvas = Canvas(place, 0, size=None, num_bytes=0)
    assert len(Images(place, canvas.close_up(np.zeros(0, dtype=np.int64)), again)) == 0


def test_memory_that_is_used_up_is_an_error() -> None:
    canvas = Canvas(shared_memory(40), 2, size=(3, 4), num_bytes=0)
    canvas.keep(0, image(0))
    with pytest.raises(OSError, match="memory"):
        canvas.keep(1, image(1))


def filled(file: int) -> Table:
    """Nine of ten images with their table."""
    canvas, kept = Canvas(file, 10, size=(3, 4), num_bytes=0), np.delete(np.arange(10), 6)
    for index in kept.tolist():
        canvas.keep(index, image(index))
    table = Table(canvas.close_up(kept), kept, [(6, "is not an image")])
    write_table(file, table, KEY)
    return table


def test_the_table_comes_back(file: int) -> None:
    table, read = filled(file), None
    read = read_table(file, KEY, 10)
    np.testing.assert_array_equal(read.rows, table.rows)
    np.testing.assert_array_equal(read.indices, table.indices)
    assert read.failed == table.failed
    with pytest.raises(ValueError, match="other images"):
        read_table(file, "b" * 64, 10)
    for number in (8, 9, 11):
        with pytest.raises(ValueError, match=r"images|numbers"):
            read_table(file, KEY, number)


@pytest.mark.parametrize("place", [0, 3, 8])
def test_a_damaged_image_is_decoded_again(file: int, place: int) -> None:
    rows, places = filled(file).rows, list[int]()

    def decoded(index: int) -> np.ndarray:
        places.append(index)
        return image(50 + index)

    images = Images(file, rows, decoded)
    (byte,) = os.pread(file, 1, int(rows["offset"][place]) + 35)
    os.pwrite(file, bytes([byte ^ 4]), int(rows["offset"][place]) + 35)
    np.testing.assert_array_equal(images.batch(np.array([place]))[0], image(50 + place))
    np.testing.assert_array_equal(images[place:][0].permute(1, 2, 0), image(50 + place))
    assert places == [place, place]
    images.batch(np.delete(np.arange(9), place))
    assert len(places) == 2
    os.ftruncate(file, 40)  # also of one that was proved before
    places.clear()
    images.batch(np.arange(1, 9))
    assert places == list(range(1, 9))


def forged(file: int, table: Table) -> None:
    os.ftruncate(file, 9 * 36)
    write_table(file, table, KEY)


@pytest.mark.parametrize("rows", ["offset", "height", "width"])
@pytest.mark.parametrize("value", [-1, 0, 2**31 - 1])
def test_impossible_rows_are_refused_also_under_their_sha256(
    file: int, rows: str, value: int
) -> None:
    table = filled(file)
    forged(file, table)
    read_table(file, KEY, 10)
    table.rows[rows][4] = value
    forged(file, table)
    if (rows, value) == ("offset", 0):
        read_table(file, KEY, 10)  # another image's: its checksum is for that
        return
    with pytest.raises(ValueError, match=r"impossible sizes|beyond the end"):
        read_table(file, KEY, 10)


@pytest.mark.parametrize(
    "texts",
    [
        *("7", "[" * 1000, "[" * 90, "null", '{"0": 1}', "[7]", "[[6]]", '[[6, ""], [6, ""]]'),
        *('[["6", ""]]', "[[6, 7]]", '[[6.0, ""]]', '[[true, ""]]', '[[-1, ""]]', '[[1e999, ""]]'),
    ],
)
def test_impossible_causes_are_refused_also_under_their_sha256(
    file: int, texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(file)
    with monkeypatch.context() as patch:
        patch.setattr(module.json, "dumps", lambda _: texts)
        forged(file, table)
    with pytest.raises(ValueError, match=r"cause|images|index|Expecting|nested"):
        read_table(file, KEY, 10)
