"""Decoded images on disk: decoded once for all processes, whole or absent, and never wrong."""

from __future__ import annotations

import contextlib
import errno
import gc
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

from finetune import files as files_module
from finetune.data import decode_all as scan_module
from finetune.data import image_cache as pixels_module
from finetune.data import image_store as store_module
from finetune.data import notices as notices_module
from finetune.data import pixel_file as file_module
from finetune.data.image_cache import Decoded, How, cached_images
from finetune.data.items import RowItems
from finetune.data.pixel_file import Place
from finetune.data.source import Split, open_source
from finetune.errors import DataError
from finetune.files import CacheFolder

NUMBER = 150


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, that also takes the few images of a test."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    for module in (scan_module, store_module):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    monkeypatch.setattr(notices_module, "_logged", set())
    for module in (pixels_module, files_module):
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)
    return tmp_path / "cache" / "pixels"


def split_of(root: Path, *, ragged: bool = False, bad: tuple[int, ...] = ()) -> Split:
    sizes = [(5 + row % 7, 4) if ragged else (5, 4) for row in range(NUMBER)]
    images = [
        {"bytes": b"" if row in bad else png(row, sizes[row]), "path": None}
        for row in range(NUMBER)
    ]
    make_parquet(root / "a.parquet", [row % 2 for row in range(NUMBER)], images=images)
    return open_source(f"parquet:{root}/a.parquet").splits["train"]


def taken(split: Split, notices: list[str] | None = None, **changes: Any) -> Decoded:
    how: dict[str, Any] = {"workers": 2, "unreadable": "stop", "progress": False}
    how |= {"timeout_seconds": 60.0, **changes}
    tell = pytest.fail if notices is None else notices.append
    found = cached_images(split, How(**how), num_bytes=NUMBER * 60, tell=tell)
    assert isinstance(found, Decoded), found
    return found


def file_of(cache: Path) -> Path:
    """The file that was made last."""
    return max(cache.glob("*.pixels"), key=lambda path: path.stat().st_mtime_ns)


def check(found: Decoded, split: Split) -> None:
    assert len(found.images) == len(found.indices) > 0
    for image, index in zip(found.images, found.indices.tolist(), strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0), split.read(index))


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
    assert len(list(cache.iterdir())) == 1
    said = caplog.messages
    assert len(said) == bool(bad)
    monkeypatch.setattr(notices_module, "_logged", set())  # another process
    monkeypatch.setattr(pixels_module, "visit", pytest.fail)
    again = taken(split, unreadable="quarantine")
    for kept in (first, again):
        check(kept, split)
        assert kept.indices.tolist() == [row for row in range(NUMBER) if row not in bad]
        assert kept.images.size == (None if ragged else (5, 4))
    assert caplog.messages == 2 * said  # the same message anew
    monkeypatch.undo()


def test_images_decoded_to_another_size_are_another_file(tmp_path: Path, cache: Path) -> None:
    photo = io.BytesIO()
    Image.fromarray(np.full((64, 48, 3), 99, dtype=np.uint8)).save(photo, "JPEG")
    images = [{"bytes": photo.getvalue(), "path": None}] * 6
    make_parquet(tmp_path / "a.parquet", [0, 1] * 3, images=images)
    sizes, paths = [], []
    for size in (None, 24, 6):
        split = open_source(f"parquet:{tmp_path}/a.parquet", decode_size=size).splits["train"]
        kept = taken(split)
        check(kept, split)
        sizes.append(kept.images.size)
        paths.append(file_of(cache))
    assert sizes == [(64, 48), (32, 24), (8, 6)]
    assert len(set(paths)) == 3


def test_images_that_stop_a_run_leave_no_file(tmp_path: Path, cache: Path) -> None:
    split = split_of(tmp_path, bad=(3,))
    taken(split, unreadable="quarantine")  # is another file
    before = sorted(cache.iterdir())
    with pytest.raises(DataError, match="1 of 150 images cannot be read"):
        taken(split)
    assert sorted(cache.iterdir()) == before


def test_a_disk_that_fails_for_a_moment_costs_no_image(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out stays so in the file, and so in every later run."""
    split, read, here = split_of(tmp_path, bad=(3,)), RowItems.read, os.getpid()

    def flaky(self: RowItems, row: int, *arguments: Any) -> np.ndarray:
        if row == 7 and os.getpid() != here:
            raise DataError("7: cannot be opened (Input/output error)", code="data.unreadable")
        return read(self, row, *arguments)

    monkeypatch.setattr(RowItems, "read", flaky)
    first = taken(split, unreadable="quarantine")
    assert first.indices.tolist() == [row for row in range(NUMBER) if row != 3]
    check(first, split)
    check(taken(split, unreadable="quarantine"), split)


def test_other_images_labels_or_decoders_are_other_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(tmp_path)
    part = split.subset(np.arange(100))
    for each in (split, part, part):
        check(taken(each), each)
    monkeypatch.setattr(pixels_module, "LIMIT_PIXELS", 1000)
    taken(split)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_costs_only_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write = file_module._write

    def full(place: Place, *rest: Any) -> None:
        if isinstance(place, int):
            raise OSError(number, os.strerror(number))
        write(place, *rest)

    monkeypatch.setattr(file_module, "_write", full)
    notices: list[str] = []
    split = split_of(tmp_path)
    store = store_of(split, notice=notices.append)
    assert len(notices) == 1
    assert os.strerror(number) in notices[0]
    assert "FINETUNE_CACHE" in notices[0]
    assert not list(cache.iterdir())
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
    monkeypatch.setattr(CacheFolder, "has_room", lambda *_, **__: False)
    assert store_of(split, "memory", notice=notices.append).images is not None
    assert len(notices) == 2
    assert "File exists" in notices[0]
    assert "too little room" in notices[1]


def decode_there(split: Split, seconds: float, counter: Path) -> None:
    """What each of several processes does; decoding takes a while and leaves a mark."""
    visit = scan_module.visit

    def slowly(*args: Any, **kwargs: Any) -> Any:
        (counter / str(os.getpid())).touch()
        time.sleep(seconds)
        return visit(*args, **kwargs)

    pixels_module.visit = slowly  # type: ignore[attr-defined]
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
    assert len(list(cache.iterdir())) == 1


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
    assert len(names) == 1, names  # what the first had begun


def test_one_that_hangs_is_given_up_on(tmp_path: Path, cache: Path) -> None:
    split, marks, notices = split_of(tmp_path), tmp_path / "marks", list[str]()
    marks.mkdir()
    (holder,) = started(1, split, 600.0, marks)
    until(lambda: list(marks.iterdir()))
    how = How(workers=0, unreadable="stop", progress=False, timeout_seconds=0.3)
    found = cached_images(split, how, num_bytes=NUMBER * 60, tell=notices.append)
    holder.kill()
    holder.join()
    assert isinstance(found, str)
    assert "has come to a halt" in found
    assert ["waiting for it" in text for text in notices] == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_done_and_no_process(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    split, marks = split_of(tmp_path), tmp_path / "marks"
    marks.mkdir()
    read, parent = Split.read, os.getpid()

    def hangs(self: Split, index: int) -> np.ndarray:
        if os.getpid() != parent:
            (marks / str(os.getpid())).touch()
            if index >= 128:
                with contextlib.suppress(FileExistsError):  # one signal: a second ends all at once
                    (tmp_path / "sent").touch(exist_ok=False)
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
    (left,) = cache.iterdir()
    assert left.name.endswith(".tmp")
    processes = [int(path.name) for path in marks.iterdir()]
    assert processes
    # a signal between the workers' starts leaves an iterator that only the collector finds
    until(lambda: gc.collect() < 0 or not multiprocessing.active_children())


def stopped(split: Split, number: int) -> None:
    """Decode in another process that is killed when it has kept some images."""

    def work() -> None:
        keep, kept = file_module.Canvas.keep, list[int]()

        def killed(self: Any, index: int, image: Any) -> None:
            keep(self, index, image)
            kept.append(index)
            if len(kept) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        file_module.Canvas.keep = killed  # type: ignore[method-assign]
        taken(split, workers=0, unreadable="quarantine")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each visit decodes."""
    numbers: list[int] = []
    visit = scan_module.visit

    def noted(split: Split, *args: Any, **kwargs: Any) -> Any:
        numbers.append(len(split))
        return visit(split, *args, **kwargs)

    monkeypatch.setattr(pixels_module, "visit", noted)
    return numbers


@pytest.mark.parametrize("ragged", [False, True])
def test_a_killed_run_is_gone_on_with(
    tmp_path: Path,
    ragged: bool,
    cache: Path,
    visited: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    split = split_of(tmp_path, ragged=ragged, bad=(3, 140))
    for number in (60, 40):
        stopped(split, number)
        assert len(list(cache.glob(".*.tmp"))) == 1
    found = taken(split, unreadable="quarantine", workers=2)
    check(found, split)
    assert len(found.indices) == NUMBER - 2
    assert visited == [NUMBER - 100]  # the unreadable ones among them
    assert "were decoded by a run that was stopped" in caplog.text
    assert [path.suffix for path in cache.iterdir()] == [".pixels"]


@pytest.mark.parametrize("ragged", [False, True])
def test_what_a_killed_run_left_is_proved(
    tmp_path: Path, ragged: bool, cache: Path, visited: list[int]
) -> None:
    split = split_of(tmp_path, ragged=ragged)
    for damage in ("pixels", "rows", "cut"):
        stopped(split, 60)
        (left,) = cache.glob(".*.tmp")
        body = left.read_bytes()
        if damage == "pixels":
            start = 0 if not ragged else NUMBER * file_module.ROW.itemsize
            body = (
                body[:start]
                + bytes(byte ^ 1 for byte in body[start : start + 999])
                + body[start + 999 :]
            )
        else:
            body = b"\xff" * len(body) if damage == "rows" else body[:50]
        left.write_bytes(body)
        check(taken(split, [], unreadable="quarantine"), split)
        trusted = {"pixels": 60, "rows": 0, "cut": 2 * ragged}[damage]  # until they are read
        assert visited.pop() == NUMBER - trusted
        for path in cache.iterdir():
            path.unlink()


def test_room_is_made_for_new_images(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(tmp_path)
    monkeypatch.setattr(pixels_module, "MAX_BYTES", 1)
    old = taken(split)
    new = taken(split.subset(np.arange(100)))
    assert len(list(cache.iterdir())) == 1
    check(old, split)  # what is open stays
    shutil.rmtree(cache)
    check(new, split)


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
