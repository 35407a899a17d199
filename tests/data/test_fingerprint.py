"""Fingerprints detect every change of an image, and read an unchanged file only once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forked_runs import run_in_child
from refusals import refused
from small_datasets import random_png, write_file, write_image_folder, write_parquet
from tar_shards import SUFFIXES, tar_bytes, two_image_members

from finetune.data import fingerprint as fingerprint_module
from finetune.data import recorded_digests
from finetune.data import stat_signatures as signatures_module
from finetune.data.encoded_images import FileImages, TableImages
from finetune.data.open_source import open_source
from finetune.data.source import Split
from finetune.data.splits import merge_val
from finetune.data.stat_signatures import are_settled, stat_signatures
from finetune.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache that also takes few images and treats all files as old enough."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint_module, "MIN_STORED_BYTES", 0)
    monkeypatch.setattr(signatures_module, "SETTLED_NS", -(10**18))
    return tmp_path / "cache" / "hashes"


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows whose content was read."""
    rows: list[int] = []
    for image_class in (FileImages, TableImages):

        def recording_read_bytes(
            self: FileImages, row: int, read_bytes: Callable[..., bytes] = image_class.read_bytes
        ) -> bytes:
            rows.append(row)
            return read_bytes(self, row)

        monkeypatch.setattr(image_class, "read_bytes", recording_read_bytes)
    return rows


def open_train(source: str) -> Split:
    return open_source(source).splits["train"]


def test_hashes_the_content_and_labels_in_order(tmp_path: Path) -> None:
    split = open_train(write_image_folder(tmp_path, {"a": 3, "b": 2}))
    digests = b"".join(hashlib.sha256(random_png(number)).digest()[:16] for number in range(5))
    labels = struct.pack("<5q", 0, 0, 0, 1, 1)
    assert split.digests.tobytes() == digests
    assert split.fingerprint == hashlib.sha256(b"images" + digests + labels).hexdigest()


def test_does_not_read_an_unchanged_file_again(tmp_path: Path, rows_read: list[int]) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 20, "b": 20})
    first = open_train(source).fingerprint
    assert sorted(rows_read) == list(range(40))
    rows_read.clear()
    assert open_train(source).fingerprint == first
    assert rows_read == []
    write_file(tmp_path / "set/a/7.png", random_png(70))
    assert open_train(source).fingerprint != first
    assert len(set(rows_read)) == 40
    assert open_train(source).subset(np.arange(10, 30)).fingerprint != first


def test_does_not_hash_unchanged_tables_again(tmp_path: Path, rows_read: list[int]) -> None:
    write_parquet(tmp_path / "set/a.parquet", [0, 1] * 10)
    source = f"parquet:{tmp_path}/set"
    first = open_train(source).fingerprint
    assert sorted(rows_read) == list(range(20))
    rows_read.clear()
    assert open_train(source).fingerprint == first
    assert rows_read == []
    assert open_train(source).subset(np.arange(19)).fingerprint != first
    write_parquet(tmp_path / "set/a.parquet", [0, 1] * 10, images=[{"bytes": random_png(1)}] * 20)
    assert open_train(source).fingerprint != first


def test_detects_changes_of_files_that_a_table_names(tmp_path: Path) -> None:
    images = [{"bytes": None, "path": f"{number}.png"} for number in range(6)]
    for number in range(6):
        write_file(tmp_path / "set" / f"{number}.png", random_png(number))
    write_parquet(tmp_path / "set/a.parquet", [0, 1] * 3, images=images)
    source = f"parquet:{tmp_path}/set"
    first = open_train(source).fingerprint
    assert open_train(source).fingerprint == first
    write_file(tmp_path / "set/3.png", random_png(90))
    changed = open_train(source).fingerprint
    write_file(tmp_path / "set/3.png", random_png(3))
    assert changed != first == open_train(source).fingerprint


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_one_file_have_different_fingerprints(tmp_path: Path, streaming: bool) -> None:
    import pyarrow.parquet as pq

    path = write_parquet(tmp_path / "a.parquet", [0, 1, 0])
    table = pq.read_table(path)
    other_table = pq.read_table(
        write_parquet(tmp_path / "b", [0] * 3, images=[{"bytes": random_png(9)}] * 3)
    )
    pq.write_table(table.append_column("more", other_table["img"]), path)
    fingerprints = [
        open_source(f"parquet:{path}", image_column=name, label_column="label", streaming=streaming)
        .splits["train"]
        .fingerprint
        for name in ("img", "more", "img", "more")
    ]
    assert fingerprints[:2] == fingerprints[2:]
    assert len(set(fingerprints)) == 2


def test_suffixes_of_one_tar_have_different_fingerprints(tmp_path: Path) -> None:
    write_file(tmp_path / "a.tar", tar_bytes(two_image_members()))
    fingerprints = [
        open_source(f"tar:{tmp_path}/a.tar", image_column=suffix).splits["train"].fingerprint
        for suffix in (*SUFFIXES, *SUFFIXES)
    ]
    assert fingerprints[:2] == fingerprints[2:]
    assert len(set(fingerprints)) == 2


def test_merged_splits_keep_the_order_of_their_files(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 2})
    split = merge_val(open_source(source)).splits["train"]
    order = np.array([9, 0, 7, 3])
    assert split.subset(order).fingerprint == split.subset(order).fingerprint
    assert split.subset(order).fingerprint != split.subset(order[::-1]).fingerprint
    signatures = split.images.stat_signatures(order)
    names = [split.name_of(index) for index in order.tolist()]
    assert signatures[:, 1].tolist() == [os.stat(tmp_path / name).st_ino for name in names]


def reverse_content_keep_times(path: Path) -> None:
    """Write other content of the same length and restore the timestamps."""
    state = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def replace_with_another_file(path: Path) -> None:
    """Move another file of the same length and timestamps over this one."""
    state = path.stat()
    new_path = path.with_suffix(".new")
    new_path.write_bytes(path.read_bytes()[::-1])
    os.utime(new_path, ns=(state.st_atime_ns, state.st_mtime_ns))
    os.replace(new_path, path)


def recreate_file(path: Path) -> None:
    """Remove and recreate the file, usually with the same inode."""
    state, body = path.stat(), path.read_bytes()
    path.unlink()
    path.write_bytes(body[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def replace_with_a_symlink(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.with_suffix(".new").write_bytes(path.with_suffix(".old").read_bytes()[::-1])
    path.symlink_to(path.with_suffix(".new").name)


@pytest.mark.parametrize(
    "change",
    [reverse_content_keep_times, replace_with_another_file, recreate_file, replace_with_a_symlink],
)
def test_detects_changed_content_of_the_same_length(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 3, "b": 3})
    first = open_train(source).fingerprint
    change(tmp_path / "set/a/1.png")
    assert open_train(source).fingerprint != first


def test_does_not_cache_hashes_of_recently_changed_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_read: list[int],
    cache: Path,
) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 3, "b": 3})
    monkeypatch.setattr(signatures_module, "SETTLED_NS", 2 * 10**9)
    first = open_train(source).fingerprint
    assert not list(cache.glob("*"))
    rows_read.clear()
    assert open_train(source).fingerprint == first
    assert len(rows_read) == 6
    now = time.time()  # set the clock forward: only files older than two seconds are cached
    monkeypatch.setattr(signatures_module.time, "time_ns", lambda: int((now + 10) * 1e9))
    assert open_train(source).fingerprint == first
    rows_read.clear()
    assert open_train(source).fingerprint == first
    assert rows_read == []
    os.utime(tmp_path / "set/a/1.png", (now + 3600,) * 2)  # a timestamp in the future
    assert open_train(source).fingerprint == first
    assert len(set(rows_read)) == 6
    assert not are_settled(stat_signatures([tmp_path / "set/a/1.png"]))


def test_retries_files_that_could_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 3, "b": 3})
    read_bytes = FileImages.read_bytes

    def fail_for_row_2(self: FileImages, row: int) -> bytes:
        if row == 2:
            raise DataError("cannot be opened (Input/output error)")
        return read_bytes(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(FileImages, "read_bytes", fail_for_row_2)
        first = open_train(source).fingerprint
    assert open_train(source).fingerprint != first


def test_folder_name_that_is_not_utf_8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert len(open_train(write_image_folder(folder, {"a": 2, "b": 2})).fingerprint) == 64


# --- reading after the fingerprint ----------------------------------------------------------------


def swap_folders(path: Path) -> None:
    """Swap the class folders; no file is touched."""
    top, held = path.parent.parent, path.parent.parent / "held"
    (top / "a").rename(held)
    (top / "b").rename(top / "a")
    held.rename(top / "b")


CHANGES = [
    reverse_content_keep_times,
    replace_with_another_file,
    recreate_file,
    replace_with_a_symlink,
    swap_folders,
    Path.unlink,
]


def open_paths_in_parquet(root: Path) -> Split:
    rows = [{"bytes": None, "path": f"{name}/{n}.png"} for name in "ab" for n in range(3)]
    return open_train(f"parquet:{write_parquet(root / 'set/t.parquet', [0, 1] * 3, images=rows)}")


@pytest.mark.parametrize("kind", ["files", "paths in a table"])
@pytest.mark.parametrize("read_before", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_decodes_only_the_content_of_the_fingerprint(
    tmp_path: Path, kind: str, read_before: bool, change: Callable[[Path], None]
) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 3, "b": 3})
    split = open_train(source) if kind == "files" else open_paths_in_parquet(tmp_path)
    assert len(split.fingerprint) == 64
    subset = split.subset(np.array([1, 4]))
    if read_before:
        subset.decode(0)
    change(tmp_path / "set/a/1.png")
    with refused("data.changed", "a/1.png"):
        subset.decode(0)


def test_decodes_touched_files_and_refuses_files_that_appear(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 3, "b": 3})
    split, path = open_train(source), tmp_path / "set/a/1.png"
    path.rename(tmp_path / "hidden")
    assert len(split.fingerprint) == 64
    with refused("data.not_found", "a/1.png"):
        split.decode(1)
    (tmp_path / "hidden").rename(path)
    with refused("data.changed", "a/1.png"):
        split.decode(1)
    again, pixels = open_train(source), split.decode(0)
    assert again.fingerprint != split.fingerprint
    for change in (Path.touch, lambda path: path.chmod(0o600)):
        change(path)
        assert np.array_equal(again.decode(1), open_train(source).decode(1))
    assert np.array_equal(again.decode(0), pixels)


def test_other_processes_do_not_compare_the_content_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = open_train(write_image_folder(tmp_path / "set", {"a": 3, "b": 3}))
    split.use_digests(split.digests.copy())
    assert run_in_child(lambda: split.decode(1)).exit_code == 0  # a worker of the first epoch
    monkeypatch.setattr(recorded_digests, "image_digest", lambda body: b"other")
    split.decode(1)
    with refused("data.changed"):
        split.decode(2)
    with refused("data.changed", "6 images", "5 on rank 0"):
        split.use_digests(split.digests[:5])


@pytest.mark.parametrize("derive", ["subset", "replace", "merge"])
def test_derived_splits_use_the_digests_of_another_process(derive: str, tmp_path: Path) -> None:
    """Otherwise, a rank would accept its own copy of an image that differs from that of rank 0."""
    counts = {"train/a": 3, "train/b": 1, "val/a": 1, "val/b": 1}
    opened = open_source(write_image_folder(tmp_path / "d", counts))
    for split in opened.splits.values():
        split.use_digests(split.digests.copy())
    write_file(tmp_path / "d/train/a/2.png", random_png(99))
    train = opened.splits["train"]
    derived = {
        "subset": lambda: train.subset(np.array([2])),
        "replace": lambda: dataclasses.replace(train, decode_size=4),
        "merge": lambda: merge_val(opened).splits["train"],
    }[derive]()
    assert derived.digests.size
    changed = [name for name in range(len(derived)) if derived.name_of(name) == train.name_of(2)]
    with refused("data.changed", "2.png"):
        derived.decode(changed[0])


def test_a_change_within_a_streamed_file_changes_the_cache_key(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "set/a.parquet", [0, 1] * 10)

    def open_streamed() -> Split:
        return open_source(f"parquet:{tmp_path}/set", streaming=True).splits["train"]

    first = open_streamed()
    key = first.cache_key()
    assert key == open_streamed().cache_key() is not None
    body, state = bytearray(path.read_bytes()), path.stat()
    body[100] ^= 1
    path.write_bytes(body)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert open_streamed().fingerprint == first.fingerprint, (
        "the fingerprint covers only the footer"
    )
    assert open_streamed().cache_key() != key
    with refused("data.changed", "a.parquet"):
        first.decode(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"0", b"1")),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(1000)),
        lambda path: path.write_bytes(b"\xff" * 128),
        lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
        lambda path: path.chmod(0o666),
    ],
    ids=["checksum", "digest", "empty", "long", "binary", "pipe", "open to all"],
)
def test_rehashes_if_the_stored_fingerprint_is_damaged(
    tmp_path: Path,
    cache: Path,
    damage: Callable[[Path], object],
    rows_read: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = write_image_folder(tmp_path / "set", {"a": 3, "b": 3})
    first = open_train(source).fingerprint
    (path,) = cache.iterdir()
    rows_read.clear()
    damage(path)
    assert open_train(source).fingerprint == first
    assert len(rows_read) == 6
    assert "cache of image hashes" in caplog.text


def test_ignores_the_fingerprint_of_another_dataset(tmp_path: Path, cache: Path) -> None:
    open_train(write_image_folder(tmp_path / "one", {"a": 3, "b": 3})).fingerprint  # noqa: B018
    (path,) = cache.iterdir()
    source = write_image_folder(tmp_path / "two", {"b": 4, "a": 3})
    fingerprint = open_train(source).fingerprint
    (other_path,) = set(cache.iterdir()) - {path}
    shutil.copy(path, other_path)
    assert open_train(source).fingerprint == fingerprint
