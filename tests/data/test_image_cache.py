"""Decoded images on disk: decoded once for all processes, whole or absent, and never wrong."""

from __future__ import annotations

import errno
import fcntl
import io
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from samples import make_parquet, png, store_of

from finetune.data import decode as decode_module
from finetune.data import decode_all as scan_module
from finetune.data import image_cache as pixels_module
from finetune.data import image_store as store_module
from finetune.data.image_cache import Kept, kept_pixels
from finetune.data.source import Split, open_source
from finetune.errors import DataError, SetupError

NUMBER = 150


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, that also takes the few images of a test."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    for module in (scan_module, store_module):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    monkeypatch.setattr(decode_module, "_said", set())
    monkeypatch.setattr(pixels_module, "_POLL_SECONDS", 0.05)
    return tmp_path / "cache" / "pixels"


def split_of(root: Path, *, ragged: bool = False, bad: tuple[int, ...] = ()) -> Split:
    sizes = [(5 + row % 7, 4) if ragged else (5, 4) for row in range(NUMBER)]
    images = [
        {"bytes": b"" if row in bad else png(row, sizes[row]), "path": None}
        for row in range(NUMBER)
    ]
    make_parquet(root / "a.parquet", [row % 2 for row in range(NUMBER)], images=images)
    return open_source(f"parquet:{root}/a.parquet").splits["train"]


def taken(split: Split, notices: list[str] | None = None, **changes: Any) -> Kept:
    settings: dict[str, Any] = {
        "num_bytes": NUMBER * 60,
        "workers": 2,
        "unreadable": "stop",
        "progress": False,
        "notice": pytest.fail if notices is None else notices.append,
        "timeout_seconds": 60.0,
    }
    kept = kept_pixels(split, **{**settings, **changes})
    assert isinstance(kept, Kept), kept
    return kept


def check(kept: Kept, split: Split) -> None:
    assert len(kept.images) == len(kept.indices) > 0
    for image, index in zip(kept.images, kept.indices.tolist(), strict=True):
        np.testing.assert_array_equal(image, split.read(index))
        assert not image.flags.writeable


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("bad", [(), (0, 3, 140)])
def test_what_was_decoded_is_mapped_again_without_decoding(
    tmp_path: Path,
    ragged: bool,
    bad: tuple[int, ...],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    split = split_of(tmp_path, ragged=ragged, bad=bad)
    first = taken(split, unreadable="quarantine")
    assert {path.name for path in cache.iterdir()} == {first.path.name, "lock"}
    said = [record.message for record in caplog.records]
    assert len(said) == bool(bad)
    monkeypatch.setattr(decode_module, "_said", set())  # another process
    monkeypatch.setattr(pixels_module, "paint", pytest.fail)
    again = taken(split, unreadable="quarantine")
    for kept in (first, again):
        check(kept, split)
        assert kept.indices.tolist() == [row for row in range(NUMBER) if row not in bad]
        assert isinstance(kept.images, np.ndarray) is not ragged
    assert [record.message for record in caplog.records] == 2 * said  # the same message anew
    monkeypatch.undo()


def test_images_decoded_to_another_size_are_another_file(tmp_path: Path) -> None:
    photo = io.BytesIO()
    Image.fromarray(np.full((64, 48, 3), 99, dtype=np.uint8)).save(photo, "JPEG")
    images = [{"bytes": photo.getvalue(), "path": None}] * 6
    make_parquet(tmp_path / "a.parquet", [0, 1] * 3, images=images)
    shapes, paths = [], []
    for size in (None, 24, 6):
        split = open_source(f"parquet:{tmp_path}/a.parquet", decode_size=size).splits["train"]
        kept = taken(split)
        check(kept, split)
        shapes.append(np.shape(kept.images))
        paths.append(kept.path)
    assert shapes == [(6, 64, 48, 3), (6, 32, 24, 3), (6, 8, 6, 3)]
    assert len(set(paths)) == 3


def test_images_that_stop_a_run_leave_no_file(tmp_path: Path, cache: Path) -> None:
    split = split_of(tmp_path, bad=(3,))
    taken(split, unreadable="quarantine")  # is another file
    before = sorted(cache.iterdir())
    with pytest.raises(DataError, match="1 of 150 images cannot be read"):
        taken(split)
    assert sorted(cache.iterdir()) == before


def test_other_images_labels_or_decoders_are_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(tmp_path)
    part = split.subset(np.arange(100))
    names = {taken(each).path.name for each in (split, part)}
    monkeypatch.setattr(pixels_module, "LIMIT_PIXELS", 1000)
    names.add(taken(split).path.name)
    assert len(names) == 3
    check(taken(part), part)


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[1000] ^= 1
    path.write_bytes(body)


def flip_in_the_table(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[NUMBER * 60 + 3] ^= 1
    path.write_bytes(body)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [flip, flip_in_the_table, cut, empty, zeros])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    split = split_of(tmp_path)
    path = taken(split).path
    damage(path)
    notices: list[str] = []
    check(taken(split, notices), split)
    assert len(notices) == 1
    assert "is damaged" in notices[0]
    check(taken(split), split)


def test_of_a_large_file_images_spread_over_it_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(tmp_path)
    path = taken(split).path
    monkeypatch.setattr(pixels_module, "_CHECKED_BYTES", 600)
    with path.open("r+b") as file:
        file.write(bytes(4096))  # as a disk that lost a block
    notices: list[str] = []
    check(taken(split, notices), split)
    assert len(notices) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_costs_only_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("finetune.data.pixel_file._write", full)
    notices: list[str] = []
    split = split_of(tmp_path)
    store = store_of(split, notice=notices.append)
    assert len(notices) == 1
    assert os.strerror(number) in notices[0]
    assert "FINETUNE_CACHE" in notices[0]
    assert [path.name for path in cache.iterdir()] == ["lock"]
    (images,) = store.read_all([np.arange(NUMBER)])
    for index in range(NUMBER):
        np.testing.assert_array_equal(images[index].permute(1, 2, 0), split.read(index))


def test_a_folder_that_cannot_be_made_and_a_disk_without_room_are_said(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, notices = split_of(tmp_path), list[str]()
    cache.parent.write_text("a file")
    assert store_of(split, "memory", notice=notices.append).images is not None
    cache.parent.unlink()
    monkeypatch.setattr(pixels_module, "room_for", lambda num_bytes, folder: False)
    assert store_of(split, "memory", notice=notices.append).images is not None
    assert len(notices) == 2
    assert "Not a directory" in notices[0]
    assert "too little room" in notices[1]


def decode_there(split: Split, seconds: float, counter: Path) -> None:
    """What each of several processes does; decoding takes a while and leaves a mark."""
    paint = scan_module.paint

    def slowly(*args: Any, **kwargs: Any) -> Any:
        (counter / str(os.getpid())).touch()
        time.sleep(seconds)
        return paint(*args, **kwargs)

    pixels_module.paint = slowly  # type: ignore[attr-defined]
    check(taken(split, []), split)


def started(count: int, *arguments: Any) -> list[Any]:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=decode_there, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def until(holds: Callable[[], Any]) -> None:
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_one_process_decodes_and_the_others_wait(tmp_path: Path, cache: Path) -> None:
    split, marks = split_of(tmp_path), tmp_path / "marks"
    marks.mkdir()
    processes = started(3, split, 0.5, marks)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(marks.iterdir())) == 1
    assert len(list(cache.iterdir())) == 2


def test_the_next_takes_over_from_one_that_was_killed(tmp_path: Path, cache: Path) -> None:
    split, marks = split_of(tmp_path), tmp_path / "marks"
    marks.mkdir()
    (first,) = started(1, split, 600.0, marks)
    until(lambda: list(marks.iterdir()))
    (second,) = started(1, split, 0.0, marks)
    time.sleep(0.3)
    assert second.is_alive()  # it waits
    first.kill()
    second.join(60)
    assert second.exitcode == 0
    names = [path.name for path in cache.iterdir()]
    assert len(names) == 2, names  # what the first had begun is gone


def test_one_that_gives_no_sign_is_not_waited_for_for_ever(tmp_path: Path, cache: Path) -> None:
    split, notices = split_of(tmp_path), list[str]()
    cache.mkdir(parents=True)
    holds = multiprocessing.get_context("fork").Event()

    def hold() -> None:
        with (cache / "lock").open("a+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # all of it
            holds.set()
            time.sleep(600)

    holder = multiprocessing.get_context("fork").Process(target=hold)
    holder.start()
    assert holds.wait(30)
    with pytest.raises(SetupError, match=r"no sign for 0\.3 seconds.*--resume"):
        taken(split, notices, timeout_seconds=0.3)
    holder.kill()
    holder.join()
    assert ["waiting for it" in text for text in notices] == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_neither_a_file_nor_a_process(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    split, marks = split_of(tmp_path), tmp_path / "marks"
    marks.mkdir()
    read, parent = Split.read, os.getpid()

    def hangs(self: Split, index: int) -> np.ndarray:
        if os.getpid() != parent:
            (marks / str(os.getpid())).touch()
            if index >= 128:
                os.kill(parent, number)
                time.sleep(600)
        return read(self, index)

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Split, "read", hangs)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            taken(split)
    finally:
        signal.signal(number, before)
    assert [path.name for path in cache.iterdir()] == ["lock"]
    processes = [int(path.name) for path in marks.iterdir()]
    assert processes
    until(lambda: not multiprocessing.active_children())


def test_room_is_made_for_new_images(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(tmp_path)
    monkeypatch.setattr(pixels_module, "MAX_BYTES", 1)
    old = taken(split)
    new = taken(split.subset(np.arange(100)))
    assert [path.name for path in cache.glob("*.pixels")] == [new.path.name]
    check(old, split)  # what is mapped stays
    shutil.rmtree(cache)
    check(new, split)
    assert pixels_module.room_for(1, cache)
    assert not pixels_module.room_for(2**60, cache)


def test_a_store_is_alike_from_disk_memory_and_workers(tmp_path: Path) -> None:
    split = split_of(tmp_path, ragged=True, bad=(7,))
    how: dict[str, Any] = {"unreadable": "quarantine", "workers": 2}
    disk = store_of(split, "memory", **how)
    again = store_of(split, "auto", **how)
    none = store_of(split, "none", **how)
    order = [np.array([3, 140, 9]), np.array([0])]
    read = [store.read_all(order) for store in (disk, again, none)]
    for mine, *others in zip(*read, strict=True):
        for other in others:
            for image, twin in zip(mine, other, strict=True):
                np.testing.assert_array_equal(image.numpy(), twin.numpy())
    assert disk.images is not None
    part = disk.images[:5]
    assert len(part) == 5
    np.testing.assert_array_equal(part[4].permute(1, 2, 0).numpy(), disk.split.read(4))
