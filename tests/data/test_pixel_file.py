"""Images side by side: each where its row says, without gaps where all are of one size."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from finetune.data import pixel_file as canvas_module
from finetune.data.pixel_file import Canvas, Ragged, arranged


@pytest.fixture(params=["memory", "file"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int | None]:
    if request.param == "memory":
        yield None
        return
    with (tmp_path / "file").open("w+b") as opened:
        yield opened.fileno()


def image(number: int, size: tuple[int, int] = (3, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def test_images_of_one_size_close_up(file: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas_module, "_BLOCK_BYTES", 100)  # less than three images
    canvas = Canvas(10, size=(3, 4), num_bytes=0, file=file)
    kept = np.array([0, 1, 3, 4, 5, 8, 9])
    for index in reversed(kept.tolist()):
        canvas.keep(index, image(index))
    rows = canvas.close_up(kept)
    found = arranged(canvas.images(), rows)
    assert isinstance(found, np.ndarray)
    assert found.shape == (7, 3, 4, 3)
    for here, index, row in zip(found, kept.tolist(), rows, strict=True):
        np.testing.assert_array_equal(here, image(index))
        assert row["crc"] == zlib.crc32(image(index).tobytes())
    if file is not None:
        assert len(canvas.images()) == 7 * 36


@pytest.mark.parametrize("size", [None, (3, 4)])
def test_other_sizes_stand_behind_one_another(
    file: int | None, size: tuple[int, int] | None
) -> None:
    canvas = Canvas(4, size=size, num_bytes=10, file=file)
    sizes = [(3, 4), (5, 5), (3, 4), (2, 9)]
    for index in (2, 0, 3, 1):
        canvas.keep(index, image(index, sizes[index])[:, ::-1])  # not contiguous
    found = arranged(canvas.images(), canvas.close_up(np.array([0, 1, 3])))
    assert isinstance(found, Ragged)
    assert len(found) == 3
    for here, index in zip(found, (0, 1, 3), strict=True):
        np.testing.assert_array_equal(here, image(index, sizes[index])[:, ::-1])
    np.testing.assert_array_equal(found[1:][1], found[2])


def test_several_processes_write_at_once(file: int | None) -> None:
    canvas = Canvas(90, size=None, num_bytes=0, file=file)

    def write(first: int) -> None:
        for index in range(first, 90, 3):
            canvas.keep(index, image(index, (1 + index % 5, 2)))

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write, args=(first,)) for first in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = arranged(canvas.images(), canvas.close_up(np.arange(90)))
    for index in range(90):
        np.testing.assert_array_equal(found[index], image(index, (1 + index % 5, 2)))


def test_nothing_is_nothing(file: int | None) -> None:
    canvas = Canvas(0, size=None, num_bytes=0, file=file)
    assert len(arranged(canvas.images(), canvas.close_up(np.zeros(0, dtype=np.int64)))) == 0


def test_memory_that_is_used_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas_module, "_reserved", lambda n: np.zeros(40, dtype=np.uint8))
    canvas = Canvas(2, size=(3, 4), num_bytes=0)
    canvas.keep(0, image(0))
    with pytest.raises(OSError, match="memory"):
        canvas.keep(1, image(1))
