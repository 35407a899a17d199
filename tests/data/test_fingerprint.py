"""Fingerprints: every change of an image shows, and an unchanged file is read once."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import make_folder, make_parquet, png, write

from finetune.data import fingerprint as module
from finetune.data import notices
from finetune.data.fingerprint import are_known, states_of
from finetune.data.items import FileItems, RowItems
from finetune.data.source import Split, open_source
from finetune.data.splits import merge_val
from finetune.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, also for the few images of a test; all files are old enough for it."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SMALL_BYTES", 0)
    monkeypatch.setattr(module, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(notices, "_logged", set())
    return tmp_path / "cache" / "hashes"


@pytest.fixture(params=["one", "each"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Up to 1 GiB the hash is one of all images; above, of the images' hashes."""
    if request.param == "each":
        monkeypatch.setattr(module, "_CONTENT_BYTES", 10)
    return bool(request.param == "each")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows whose content was read."""
    rows: list[int] = []
    for kind in (FileItems, RowItems):

        def content(self: FileItems, row: int, read: Callable[..., bytes] = kind.content) -> bytes:
            rows.append(row)
            return read(self, row)

        monkeypatch.setattr(kind, "content", content)
    return rows


def train(source: str) -> Split:
    return open_source(source).splits["train"]


def test_up_to_1_gib_it_is_the_hash_that_runs_have_recorded(tmp_path: Path) -> None:
    split = train(make_folder(tmp_path, {"a": 3, "b": 2}))
    digest = hashlib.sha256(b"content")
    for number, label in enumerate([0, 0, 0, 1, 1]):
        body = png(number)
        digest.update(struct.pack("<qqq", len(body), len(body), label) + body)
    assert split.fingerprint == digest.hexdigest()
    assert split.former_fingerprint is None


def test_above_it_the_former_hash_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = train(make_folder(tmp_path, {"a": 2, "b": 2}))
    content = split.fingerprint
    monkeypatch.setattr(module, "_CONTENT_BYTES", 10)
    digest = hashlib.sha256(b"names and sizes")
    for number, (name, label) in enumerate([("a/0", 0), ("a/1", 0), ("b/0", 1), ("b/1", 1)]):
        text = f"{name}.png".encode()
        digest.update(struct.pack("<qqq", len(png(number)), len(text), label) + text)
    assert split.former_fingerprint == digest.hexdigest()
    assert len({content, split.subset(np.arange(4)).fingerprint, digest.hexdigest()}) == 3


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, large: bool, reads: list[int]) -> None:
    source = make_folder(tmp_path / "set", {"a": 20, "b": 20})
    first = train(source).fingerprint
    assert sorted(reads) == list(range(40))
    reads.clear()
    assert train(source).fingerprint == first
    assert reads == []
    write(tmp_path / "set/a/7.png", png(70))
    assert train(source).fingerprint != first
    assert len(set(reads)) == (1 if large else 40)
    reads.clear()
    part = train(source).subset(np.arange(10, 30))
    assert part.fingerprint != first
    assert len(set(reads)) == (0 if large else 20)


def test_unchanged_tables_are_not_hashed_again(
    tmp_path: Path, large: bool, reads: list[int]
) -> None:
    make_parquet(tmp_path / "set/a.parquet", [0, 1] * 10)
    source = f"parquet:{tmp_path}/set"
    first = train(source).fingerprint
    assert sorted(reads) == list(range(20))
    reads.clear()
    assert train(source).fingerprint == first
    assert reads == []
    assert train(source).subset(np.arange(19)).fingerprint != first
    make_parquet(tmp_path / "set/a.parquet", [0, 1] * 10, images=[{"bytes": png(1)}] * 20)
    assert train(source).fingerprint != first


def test_files_that_a_table_names_count_too(tmp_path: Path, large: bool) -> None:
    images = [{"bytes": None, "path": f"{number}.png"} for number in range(6)]
    for number in range(6):
        write(tmp_path / "set" / f"{number}.png", png(number))
    make_parquet(tmp_path / "set/a.parquet", [0, 1] * 3, images=images)
    source = f"parquet:{tmp_path}/set"
    first = train(source).fingerprint
    assert train(source).fingerprint == first
    write(tmp_path / "set/3.png", png(90))
    changed = train(source).fingerprint
    write(tmp_path / "set/3.png", png(3))
    assert changed != first == train(source).fingerprint


def test_another_column_of_the_same_file_is_another(tmp_path: Path, large: bool) -> None:
    import pyarrow.parquet as pq

    path = make_parquet(tmp_path / "a.parquet", [0, 1, 0])
    table = pq.read_table(path)
    other = pq.read_table(make_parquet(tmp_path / "b", [0] * 3, images=[{"bytes": png(9)}] * 3))
    pq.write_table(table.append_column("more", other["img"]), path)
    prints = [
        open_source(f"parquet:{path}", image_column=name, label_column="label")
        .splits["train"]
        .fingerprint
        for name in ("img", "more", "img", "more")
    ]
    assert prints[:2] == prints[2:]
    assert len(set(prints)) == 2


def test_joined_splits_keep_the_order_of_their_files(tmp_path: Path, large: bool) -> None:
    source = make_folder(tmp_path, {"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 2})
    split = merge_val(open_source(source)).splits["train"]
    order = np.array([9, 0, 7, 3])
    assert split.subset(order).fingerprint == split.subset(order).fingerprint
    assert split.subset(order).fingerprint != split.subset(order[::-1]).fingerprint
    states = split.items.states(order)
    names = [split.name_of(index) for index in order.tolist()]
    assert states[:, 1].tolist() == [os.stat(tmp_path / name).st_ino for name in names]


def restored(path: Path) -> None:
    """Other content of the same length, and the times that it had."""
    state = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def moved_over(path: Path) -> None:
    """Another file of the same length, with the times of the first."""
    state = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    os.replace(other, path)


def same_inode(path: Path) -> None:
    """Removed and made anew, as a rule with the same inode."""
    state, body = path.stat(), path.read_bytes()
    path.unlink()
    path.write_bytes(body[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def through_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.with_suffix(".new").write_bytes(path.with_suffix(".old").read_bytes()[::-1])
    path.symlink_to(path.with_suffix(".new").name)


@pytest.mark.parametrize("change", [restored, moved_over, same_inode, through_a_link])
def test_content_of_the_same_length_is_seen(
    tmp_path: Path, large: bool, change: Callable[[Path], None]
) -> None:
    source = make_folder(tmp_path / "set", {"a": 3, "b": 3})
    first = train(source).fingerprint
    change(tmp_path / "set/a/1.png")
    assert train(source).fingerprint != first


def test_what_was_changed_a_moment_ago_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool, reads: list[int], cache: Path
) -> None:
    source = make_folder(tmp_path / "set", {"a": 3, "b": 3})
    monkeypatch.setattr(module, "_SETTLED_NS", 2 * 10**9)
    first = train(source).fingerprint
    assert not list(cache.glob("*"))
    reads.clear()
    assert train(source).fingerprint == first
    assert len(reads) == 6
    now = time.time()  # the clock is put forward: only what seems older than two seconds counts
    monkeypatch.setattr(module.time, "time_ns", lambda: int((now + 10) * 1e9))
    assert train(source).fingerprint == first
    reads.clear()
    assert train(source).fingerprint == first
    assert reads == []
    os.utime(tmp_path / "set/a/1.png", (now + 3600,) * 2)  # of the future
    assert train(source).fingerprint == first
    assert len(set(reads)) == (1 if large else 6)
    assert not are_known(states_of([tmp_path / "set/a/1.png"]))


def test_what_could_not_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    source = make_folder(tmp_path / "set", {"a": 3, "b": 3})
    read = FileItems.content

    def fails(self: FileItems, row: int) -> bytes:
        if row == 2:
            raise DataError("cannot be opened (Input/output error)")
        return read(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(FileItems, "content", fails)
        first = train(source).fingerprint
    assert train(source).fingerprint != first


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert len(train(make_folder(folder, {"a": 2, "b": 2})).fingerprint) == 64


def test_a_split_knows_that_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_folder(tmp_path / "set", {"a": 3, "b": 3})
    split = train(source)
    assert split.is_unchanged()
    restored(tmp_path / "set/a/1.png")
    assert not split.is_unchanged()
    restored(tmp_path / "set/a/1.png")
    assert split.is_unchanged(), "the content is what it was"
    monkeypatch.setattr(module, "_SETTLED_NS", 2 * 10**9)  # times alone prove nothing
    split = train(source)
    assert split.is_unchanged()
    monkeypatch.setattr(module, "_state_of", lambda path, latest: (1, 2, 3, 4, 5))
    assert split.is_unchanged()


def test_a_change_within_a_streamed_file_is_another_key_of_the_caches(tmp_path: Path) -> None:
    path = make_parquet(tmp_path / "set/a.parquet", [0, 1] * 10)

    def streamed() -> Split:
        return open_source(f"parquet:{tmp_path}/set", streaming=True).splits["train"]

    first = streamed()
    assert first.cache_key == streamed().cache_key
    assert first.is_unchanged()
    body, state = bytearray(path.read_bytes()), path.stat()
    body[100] ^= 1
    path.write_bytes(body)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert streamed().fingerprint == first.fingerprint, "it is of what the file's end says"
    assert streamed().cache_key != first.cache_key
    assert not first.is_unchanged()


def flip(body: bytearray) -> None:
    body[len(body) // 2] ^= 1


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: (
        body := bytearray(path.read_bytes()),
        flip(body),
        path.write_bytes(body),
    ),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 7),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("no index"),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "link": lambda path: (
        shutil.copy(path, f"{path}.x"),
        path.unlink(),
        path.symlink_to(f"{path}.x"),
    ),
    "open to all": lambda path: path.chmod(0o666),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "cache": lambda path: path.parent.chmod(0o1777),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_wrong_index_costs_only_another_look(
    tmp_path: Path,
    cache: Path,
    large: bool,
    damage: str,
    reads: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = make_folder(tmp_path / "set", {"a": 3, "b": 3})
    first = train(source).fingerprint
    (path,) = cache.iterdir()
    reads.clear()
    DAMAGE[damage](path)
    assert train(source).fingerprint == first
    assert len(reads) == 6
    assert "index of hashes" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_forged_index_of_another_data_set_does_not_fit(tmp_path: Path, cache: Path) -> None:
    one = make_folder(tmp_path / "one", {"a": 3, "b": 3})
    first = train(one).fingerprint
    (index,) = cache.iterdir()
    two = make_folder(tmp_path / "two", {"b": 4, "a": 3})
    second = train(two).fingerprint
    (other,) = set(cache.iterdir()) - {index}
    shutil.copy(index, other)
    assert train(two).fingerprint == second != first


def test_many_stale_hashes_are_left_out(tmp_path: Path, cache: Path, large: bool) -> None:
    source = make_folder(tmp_path / "set", {"a": 3, "b": 3})
    index = module._Index(os.fspath(tmp_path / "set"))
    for number in range(2000):
        index.put(number.to_bytes(40, "little"), bytes(32))
    index.save(2000)
    (path,) = cache.iterdir()
    assert path.stat().st_size > 2000 * 72
    train(source).fingerprint  # noqa: B018
    assert path.stat().st_size < 20 * 72
