"""The index of tar shards: kept, checked, read anew where a shard changed; refusals of headers."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import resource
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from samples import png
from tars import samples, shards, tar

from finetune.data import fingerprint, notices, tar_index
from finetune.data.streaming.remote_file import LocalFile
from finetune.data.tar_index import TarIndex, index_shards

BLOCK = tarfile.BLOCKSIZE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which also files that were just written count as settled."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**18))
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tars"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose headers are read."""
    names: list[str] = []
    whole = tar_index._read_shard

    def noted(file: Any, *columns: Any) -> Any:
        names.append(file.path.name)
        return whole(file, *columns)

    monkeypatch.setattr(tar_index, "_read_shard", noted)
    return names


def index(folder: Path, image: str | None = None, label: str | None = None) -> list[TarIndex]:
    return index_shards([LocalFile.at(path) for path in sorted(folder.iterdir())], image, label)


def content(found: list[TarIndex]) -> list[Any]:
    return [
        [one.offsets.tolist(), one.sizes.tolist(), one.names.to_pylist(), one.labels, one.ignored]
        for one in found
    ]


def test_places_are_those_of_the_images(tmp_path: Path, cache: Path) -> None:
    for one in index(shards(tmp_path / "d")):
        whole = Path(one.file.path).read_bytes()
        pairs = zip(one.offsets.tolist(), one.sizes.tolist(), one.names.to_pylist(), strict=True)
        for offset, size, name in pairs:
            assert whole[offset : offset + size] == png(int(name[:5]))


def test_headers_are_read_once(tmp_path: Path, cache: Path, read: list[str]) -> None:
    folder = shards(tmp_path / "d")
    first = index(folder)
    assert sorted(read) == sorted(path.name for path in folder.iterdir())
    assert len(list(cache.iterdir())) == 4
    read.clear()
    assert content(index(folder)) == content(first)
    assert read == []
    changed = folder / "set-train-0001.tar"
    changed.write_bytes(tar(samples(50, 6)))  # of the same length
    assert index(folder)[2].names.to_pylist()[0] == b"00050.png"
    assert read == [changed.name]
    index(folder, None, "cls")
    assert len(read) == 5  # for other labels


def test_a_shard_of_this_moment_is_not_remembered(
    tmp_path: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change may show no other time."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 2 * 10**9)
    folder = shards(tmp_path / "d")
    index(folder)
    index(folder)
    assert len(read) == 8


def test_what_was_read_before_a_stop_is_kept(
    tmp_path: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "d", train=9)
    whole = tar_index._read_shard

    def stopped(file: Any, *columns: Any) -> Any:
        if len(read) == 6:
            raise KeyboardInterrupt
        return whole(file, *columns)

    with monkeypatch.context() as patched:
        patched.setattr(tar_index, "_read_shard", stopped)
        with pytest.raises(KeyboardInterrupt):
            index(folder)
    before = list(read)
    read.clear()
    assert len(index(folder)) == 10
    assert len(before) == 6
    assert not set(before) & set(read)


def test_many_shards_are_read_by_processes(
    tmp_path: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "d")
    alone = content(index(folder))
    for path in cache.iterdir():
        path.unlink()
    read.clear()
    monkeypatch.setattr(tar_index, "_SMALL_BYTES", 0)
    assert content(index(folder)) == alone
    assert read == []  # not in this process
    assert len(list(cache.iterdir())) == 4
    (folder / "bad.tar").write_bytes(b"no tar" * 1000)
    with refused("data.damaged", "bad.tar"):
        index(folder)


@pytest.mark.parametrize("small_bytes", [0, 2**24])
def test_a_full_disk_costs_only_the_cache(
    small_bytes: int,
    tmp_path: Path,
    cache: Path,
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is read twice, and it is said once and in one line."""
    folder = shards(tmp_path / "d")
    monkeypatch.setattr(tar_index, "_SMALL_BYTES", small_bytes)
    monkeypatch.setattr(notices, "_logged", set())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert len(index(folder)) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read) == (4 if small_bytes else 0)  # not in this process
    assert list(cache.iterdir()) == []
    [said] = caplog.messages
    assert said.endswith("File too large); the next run reads the headers again")


def test_files_that_cannot_be_made_are_told_of_once(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each error names another file."""

    def full(_: object, key: str) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", key)

    monkeypatch.setattr(notices, "_logged", set())
    monkeypatch.setattr(tar_index.CacheFolder, "write", full)
    assert len(index(shards(tmp_path / "d"))) == 4
    assert len(caplog.messages) == 1


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an index and give it the hash of what it is then."""
    raw = json.loads(path.read_bytes()[32:])
    change(raw)
    body = json.dumps(raw).encode()
    path.write_bytes(hashlib.sha256(body).digest() + body)


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "an image beyond the shard": lambda raw: raw["sizes"].__setitem__(5, 2**40),
    "a place before it": lambda raw: raw["offsets"].__setitem__(0, -512),
    "places out of order": lambda raw: raw["offsets"].reverse(),
    "a size below nothing": lambda raw: raw["sizes"].__setitem__(0, -1),
    "a size that overflows": lambda raw: raw["sizes"].__setitem__(5, 2**63 - 1),
    "a label too few": lambda raw: raw["labels"].pop(),
    "a label of another kind": lambda raw: raw["labels"].__setitem__(0, [1.5]),
    "a name that is none": lambda raw: raw["names"].__setitem__(0, 7),
    "no labels": lambda raw: raw.pop("labels"),
    "a list of nothing": lambda raw: raw.update(offsets=[[1]] * 6),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=list(FORGED))
def test_a_forged_index_is_made_anew(
    change: Callable[[dict[str, Any]], object],
    tmp_path: Path,
    cache: Path,
    read: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = shards(tmp_path / "d")
    right = content(index(folder))
    kept = sorted(cache.iterdir())
    before = {path.name: path.read_bytes() for path in kept}
    forge(kept[2], change)
    read.clear()
    assert content(index(folder)) == right
    assert len(read) == 1
    assert f"{kept[2]}: is damaged" in caplog.text
    assert {path.name: path.read_bytes() for path in sorted(cache.iterdir())} == before


@pytest.mark.parametrize("damage", [b"", b"x" * 20, b"\0" * 100, "a label"])
def test_a_damaged_index_is_made_anew(
    damage: bytes | str, tmp_path: Path, cache: Path, read: list[str]
) -> None:
    folder = shards(tmp_path / "d")
    right = content(index(folder))
    path = sorted(cache.iterdir())[0]
    body = path.read_bytes().replace(b'"labels": [0, 1', b'"labels": [1, 1')
    path.write_bytes(damage if isinstance(damage, bytes) else body)
    read.clear()
    assert content(index(folder)) == right
    assert len(read) == 1


def test_a_cache_of_others_is_not_used(
    tmp_path: Path, cache: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = shards(tmp_path / "d")
    index(folder)
    cache.chmod(0o777)
    assert len(index(folder)) == 4
    assert len(read) == 8
    assert "others can write to it" in caplog.text


# --- headers -------------------------------------------------------------------------------------


def numbered(field: slice, value: bytes) -> Callable[[bytes], bytes]:
    """Change a field of the second header, and its checksum."""

    def change(whole: bytes) -> bytes:
        block = bytearray(whole[2 * BLOCK : 3 * BLOCK])
        block[field] = value
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return whole[: 2 * BLOCK] + bytes(block) + whole[3 * BLOCK :]

    return change


SIZE, KIND = slice(124, 136), slice(156, 157)
HEADERS = {
    "a size below nothing": numbered(SIZE, b"\xff" * 8 + struct.pack(">i", -1024)),
    "a header that leads to itself": numbered(SIZE, b"\xff" * 8 + struct.pack(">i", -512)),
    "a size of exabytes": numbered(SIZE, b"\x80" + struct.pack(">q", 2**60).rjust(11, b"\0")),
    "a size beyond the end": numbered(SIZE, b"%011o\0" % 2**20),
    "a long name of a gigabyte": lambda whole: numbered(SIZE, b"%011o\0" % 2**30)(
        numbered(KIND, b"L")(whole)
    ),
    "an extended header of a gigabyte": lambda whole: numbered(SIZE, b"%011o\0" % 2**30)(
        numbered(KIND, b"x")(whole)
    ),
    "an extended header below nothing": lambda whole: numbered(
        SIZE, b"\xff" * 8 + struct.pack(">i", -1024)
    )(numbered(KIND, b"g")(whole)),
    "a wrong checksum": lambda whole: whole[: 2 * BLOCK] + b"?" + whole[2 * BLOCK + 1 :],
    "cut in a header": lambda whole: whole[: 2 * BLOCK + 100],
    "cut in an image": lambda whole: whole[: 3 * BLOCK + 10],
    "cut between two": lambda whole: whole[: 2 * BLOCK],
    "two in one file": lambda whole: whole + whole,
    "a megabyte behind its end": lambda whole: whole + bytes(2**21),
    "headers without an end": lambda whole: tar(extended(3000)),
}


def extended(number: int) -> list[tarfile.TarInfo]:
    """Extended headers that each belong to the next one."""
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    return [header] * number


@pytest.mark.parametrize("change", HEADERS.values(), ids=list(HEADERS))
def test_damaged_headers(change: Callable[[bytes], bytes], tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    path.write_bytes(change(tar(samples(0, 3))))
    with refused("data.damaged", str(path)):
        index(path.parent)
    assert not list(cache.glob("*.tarindex"))


def test_a_header_of_any_length_is_not_read(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    (header,) = extended(1)
    header.size = 2**26
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 2**27)
    tracemalloc.start()
    with refused("data.damaged", "a header of 67,108,864 bytes"):
        index(path.parent)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_an_archive_of_many_members_is_not_held(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tarfile` keeps every member it has seen, a kilobyte each."""
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    path.write_bytes(tar(samples(0, 500)))
    most = []
    proc = tarfile.TarInfo.fromtarfile.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, archive: Any) -> Any:
        most.append(len(archive.members))
        return proc(kind, archive)

    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", classmethod(counted))
    assert len(index(path.parent)[0].offsets) == 500
    assert max(most) <= 1


def test_any_bytes_end_in_an_error_of_ours(tmp_path: Path, cache: Path) -> None:
    """Every byte of the first headers, changed."""
    whole = tar(samples(0, 2))
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    random = np.random.default_rng(0)
    outcomes = set()
    logging.disable(logging.WARNING)
    for _ in range(400):
        body = bytearray(whole)
        for place in random.integers(0, 6 * BLOCK, 3).tolist():
            body[place] = int(random.integers(256))
        path.write_bytes(body)
        try:
            index(path.parent)
            outcomes.add("read")
        except tar_index.DataError as error:
            outcomes.add(error.code)
        os.unlink(path)
    logging.disable(logging.NOTSET)
    assert "read" in outcomes
    assert len(outcomes) > 1
