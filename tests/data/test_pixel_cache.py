"""Decoded images on disk: decoded once for all processes, complete or absent, never wrong."""

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
from logs import forget_warnings, logged
from PIL import Image
from refusals import refused
from small_datasets import (
    make_pixel_store,
    random_png,
    write_file,
    write_image_folder,
    write_parquet,
)

from finetune.cache import CacheFolder
from finetune.data import decode as image_decoder
from finetune.data import decode_split as decode_module
from finetune.data import pixel_cache as cache_module
from finetune.data import pixel_store as store_module
from finetune.data.decode_split import DecodeOptions
from finetune.data.encoded_images import TableImages
from finetune.data.open_source import open_source
from finetune.data.pixel_cache import DecodedSplit, decode_with_cache
from finetune.data.source import Split
from finetune.errors import DataError

NUM_IMAGES = 150


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache that also takes few images."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    for module in (decode_module, store_module):
        monkeypatch.setattr(module, "SMALL_SPLIT_BYTES", 0)
    return tmp_path / "cache" / "pixels"


def make_split(root: Path, *, ragged: bool = False, unreadable_rows: tuple[int, ...] = ()) -> Split:
    sizes = [(5 + row % 7, 4) if ragged else (5, 4) for row in range(NUM_IMAGES)]
    images = [
        {"bytes": b"" if row in unreadable_rows else random_png(row, sizes[row]), "path": None}
        for row in range(NUM_IMAGES)
    ]
    write_parquet(root / "a.parquet", [row % 2 for row in range(NUM_IMAGES)], images=images)
    return open_source(f"parquet:{root}/a.parquet").splits["train"]


def decode_cached(split: Split, messages: list[str] | None = None, **changes: Any) -> DecodedSplit:
    options: dict[str, Any] = {"num_workers": 2, "unreadable": "stop", "progress": False}
    options |= {"timeout_seconds": 60.0, **changes}
    with logged(messages) as logged_messages:
        result = decode_with_cache(split, DecodeOptions(**options), num_bytes=NUM_IMAGES * 60)
    assert isinstance(result, DecodedSplit), result
    if messages is None:  # only messages about unreadable images are expected
        assert all("they are left out" in message for message in logged_messages)
    return result


def newest_file(cache_folder: Path) -> Path:
    """Return the newest cache file."""
    return max(cache_folder.glob("*.pixels"), key=lambda path: path.stat().st_mtime_ns)


def assert_equals_decoded(decoded: DecodedSplit, split: Split) -> None:
    assert len(decoded.images) == len(decoded.indices) > 0
    for image, index in zip(decoded.images, decoded.indices.tolist(), strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0), split.decode(index))


@pytest.mark.parametrize("ragged, unreadable_rows", [(False, ()), (True, (0, 3, 140))])
def test_maps_the_cache_file_without_decoding_again(
    tmp_path: Path,
    ragged: bool,
    unreadable_rows: tuple[int, ...],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    split = make_split(tmp_path, ragged=ragged, unreadable_rows=unreadable_rows)
    first = decode_cached(split, unreadable="quarantine")
    assert len(list(cache_folder.iterdir())) == 1
    warnings = caplog.messages
    assert len(warnings) == bool(unreadable_rows)
    forget_warnings()  # as in a new process
    monkeypatch.setattr(cache_module, "decode_split", pytest.fail)
    reloaded = decode_cached(split, unreadable="quarantine")
    for result in (first, reloaded):
        assert_equals_decoded(result, split)
        assert result.indices.tolist() == [
            row for row in range(NUM_IMAGES) if row not in unreadable_rows
        ]
        assert result.images.common_size == (None if ragged else (5, 4))
    assert caplog.messages == 2 * warnings  # the same message again
    monkeypatch.undo()


def test_decode_size_is_part_of_the_cache_key(tmp_path: Path, cache_folder: Path) -> None:
    photo = io.BytesIO()
    Image.fromarray(np.full((64, 48, 3), 99, dtype=np.uint8)).save(photo, "JPEG")
    images = [{"bytes": photo.getvalue(), "path": None}] * 6
    write_parquet(tmp_path / "a.parquet", [0, 1] * 3, images=images)
    sizes, paths = [], []
    for size in (None, 24, 6):
        split = open_source(f"parquet:{tmp_path}/a.parquet", decode_size=size).splits["train"]
        result = decode_cached(split)
        assert_equals_decoded(result, split)
        sizes.append(result.images.common_size)
        paths.append(newest_file(cache_folder))
    assert sizes == [(64, 48), (32, 24), (8, 6)]
    assert len(set(paths)) == 3


def test_unreadable_images_that_stop_a_run_leave_no_file(
    tmp_path: Path, cache_folder: Path
) -> None:
    split = make_split(tmp_path, unreadable_rows=(3,))
    decode_cached(split, unreadable="quarantine")  # a file with a different key
    before = sorted(cache_folder.iterdir())
    with pytest.raises(DataError, match="1 of 150 images cannot be read"):
        decode_cached(split)
    assert sorted(cache_folder.iterdir()) == before


def test_retries_an_image_after_a_transient_disk_error(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images left out of the file would be missing in every later run too."""
    split, decode, parent = (
        make_split(tmp_path, unreadable_rows=(3,)),
        TableImages.decode,
        os.getpid(),
    )

    def fail_in_worker(self: TableImages, row: int, *arguments: Any) -> np.ndarray:
        if row == 7 and os.getpid() != parent:
            raise DataError("7: cannot be opened (Input/output error)", code="data.unreadable")
        return decode(self, row, *arguments)

    monkeypatch.setattr(TableImages, "decode", fail_in_worker)
    first = decode_cached(split, unreadable="quarantine")
    assert first.indices.tolist() == [row for row in range(NUM_IMAGES) if row != 3]
    assert_equals_decoded(first, split)
    assert_equals_decoded(decode_cached(split, unreadable="quarantine"), split)


@pytest.mark.parametrize("keep", ["memory", "none", "small"])
def test_an_image_that_is_missing_only_during_decoding_is_an_error(
    tmp_path: Path, keep: str, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is renamed and renamed back does not change the files' stat signatures."""
    if keep == "small":  # decoded into memory, without a cache file
        monkeypatch.setattr(store_module, "SMALL_SPLIT_BYTES", 2**24)
    source = write_image_folder(tmp_path / "data", {"a": 20, "b": 20})
    split, folder = open_source(source).splits["train"], tmp_path / "data/a"
    assert len(split.digests) == 40
    folder.rename(tmp_path / "elsewhere")
    settings: dict[str, Any] = {"unreadable": "quarantine", "messages": []}
    where = "memory" if keep == "small" else keep
    with refused("data.changed", "a/0.png"):
        make_pixel_store(split, where, **settings)
    (tmp_path / "elsewhere").rename(folder)
    assert not list(cache_folder.glob("*.pixels"))
    assert len(make_pixel_store(split, where).split) == 40


def test_images_and_decoders_are_part_of_the_cache_key(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = make_split(tmp_path)
    part = split.subset(np.arange(100))
    for some_split in (split, part, part):
        assert_equals_decoded(decode_cached(some_split), some_split)
    monkeypatch.setattr(image_decoder, "MAX_PIXELS", 1000)
    decode_cached(split)
    # a HEIC photo that could not be decoded before must not stay out of the cache
    monkeypatch.setattr(image_decoder, "heif_decoder_version", lambda: "another")
    decode_cached(split)
    assert len(list(cache_folder.iterdir())) == 4


def test_warns_if_the_cache_folder_cannot_be_created_or_the_disk_is_full(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, messages = make_split(tmp_path), list[str]()

    def raise_disk_full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache_folder.parent.write_text("a file")
    assert make_pixel_store(split, "memory", messages=messages).images is not None
    cache_folder.parent.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "write_pixel_table", raise_disk_full)
        assert make_pixel_store(split, "memory", messages=messages).images is not None
    assert not list(cache_folder.iterdir())
    monkeypatch.setattr(CacheFolder, "fits_on_disk", lambda *_, **__: False)
    store = make_pixel_store(split, "memory", messages=messages)
    (images,) = store.read_batches([np.arange(NUM_IMAGES)])
    np.testing.assert_array_equal(images[7].permute(1, 2, 0), split.decode(7))
    for message, cause in zip(messages, ("File exists", "No space", "too little"), strict=True):
        assert cause in message
        assert "FINETUNE_CACHE" in message


def decode_slowly(split: Split, seconds: float, marker_folder: Path) -> None:
    """Decode in one of several processes: slowly, leaving a marker file per process."""
    decode_split = decode_module.decode_split

    def slow_decode_split(*args: Any, **kwargs: Any) -> Any:
        (marker_folder / str(os.getpid())).touch()
        time.sleep(seconds)
        yield from decode_split(*args, **kwargs)

    cache_module.decode_split = slow_decode_split  # type: ignore[attr-defined]
    assert_equals_decoded(decode_cached(split, []), split)


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_process_decodes_and_the_others_wait_for_it(tmp_path: Path, cache_folder: Path) -> None:
    split, marker_folder = make_split(tmp_path), tmp_path / "marks"
    marker_folder.mkdir()
    fork = multiprocessing.get_context("fork")
    arguments = split, 0.5, marker_folder
    processes = [fork.Process(target=decode_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(marker_folder.iterdir())) == 1
    assert len(list(cache_folder.iterdir())) == 1


def test_a_signal_leaves_no_file_and_no_process(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, marker_folder = make_split(tmp_path), tmp_path / "marks"
    marker_folder.mkdir()
    decode, parent = Split.decode, os.getpid()

    def hang_in_worker(self: Split, index: int, *buffer: Any) -> np.ndarray:
        if os.getpid() != parent:
            (marker_folder / str(os.getpid())).touch()
            if index >= 128:
                # one signal only: a second one ends the run immediately
                with contextlib.suppress(FileExistsError):
                    (tmp_path / "sent").touch(exist_ok=False)
                    os.kill(parent, signal.SIGTERM)
                time.sleep(600)
        return decode(self, index)

    def interrupt(signal_number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Split, "decode", hang_in_worker)
    old_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            decode_cached(split)
    finally:
        # until no worker is left that could send the signal: by default, it ends this process
        wait_until(lambda: gc.collect() < 0 or not multiprocessing.active_children())
        signal.signal(signal.SIGTERM, old_handler)
    assert [path.suffix for path in cache_folder.iterdir()] in ([], [".lock"])
    processes = [int(path.name) for path in marker_folder.iterdir()]
    assert processes


def test_an_image_that_changes_during_decoding_is_an_error(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = open_source(write_image_folder(tmp_path / "data", {"a": 20, "b": 20})).splits["train"]
    decode_split = decode_module.decode_split

    def change_and_decode(*args: Any, **kwargs: Any) -> Any:
        write_file(tmp_path / "data/a/3.png", random_png(90))
        yield from decode_split(*args, **kwargs)

    monkeypatch.setattr(cache_module, "decode_split", change_and_decode)
    with refused("data.changed", "a/3.png"):
        decode_cached(split)
    assert not list(cache_folder.iterdir())


def test_evicts_old_files_for_new_images(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = make_split(tmp_path)
    monkeypatch.setattr(cache_module, "MAX_CACHE_BYTES", 1)
    old = decode_cached(split)
    new = decode_cached(split.subset(np.arange(100)))
    assert len(list(cache_folder.iterdir())) == 1
    assert_equals_decoded(old, split)  # open files stay valid
    shutil.rmtree(cache_folder)
    assert_equals_decoded(new, split)


def test_disk_memory_and_workers_give_the_same_pixels(tmp_path: Path) -> None:
    split = make_split(tmp_path, ragged=True, unreadable_rows=(7,))
    messages: list[str] = []
    options: dict[str, Any] = {
        "unreadable": "quarantine",
        "num_workers": 2,
        "messages": messages,
    }
    from_disk = make_pixel_store(split, "memory", **options)
    from_disk_again = make_pixel_store(split, "auto", **options)
    from_workers = make_pixel_store(split, "none", **options)
    order = [np.array([3, 140, 9]), np.array([0])]
    batches_by_store = [
        store.read_batches(order) for store in (from_disk, from_disk_again, from_workers)
    ]
    for batch, *other_batches in zip(*batches_by_store, strict=True):
        for other_batch in other_batches:
            for image, other_image in zip(batch, other_batch, strict=True):
                np.testing.assert_array_equal(image.numpy(), other_image.numpy())
    assert all("they are left out" in message for message in messages)
    assert from_disk.images is not None
    part = from_disk.images[:5]
    assert len(part) == 5
    np.testing.assert_array_equal(part[4].permute(1, 2, 0).numpy(), from_disk.split.decode(4))
