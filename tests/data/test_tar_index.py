"""The cached index of tar shards: verified, updated if a shard changed; errors of headers."""

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
from small_datasets import random_png
from tar_shards import tar_bytes, tar_members, write_tar_shards

from finetune import log
from finetune.data import stat_signatures, tar_index
from finetune.data.streaming.remote_file import LocalFile
from finetune.data.tar_index import TarIndex, index_shards

BLOCK = tarfile.BLOCKSIZE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that also accepts files that were just written."""
    monkeypatch.setattr(stat_signatures, "_SETTLED_NS", -(10**18))
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tars"


@pytest.fixture
def shards_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards whose headers are read."""
    names: list[str] = []
    read_shard_headers = tar_index._read_shard_headers

    def recording_read_headers(file: Any, *columns: Any) -> Any:
        names.append(file.path.name)
        return read_shard_headers(file, *columns)

    monkeypatch.setattr(tar_index, "_read_shard_headers", recording_read_headers)
    return names


def index_folder(
    folder: Path, image: str | None = None, label: str | None = None
) -> list[TarIndex]:
    return index_shards(
        [LocalFile.from_path(path) for path in sorted(folder.iterdir())], image, label
    )


def index_content(indexes: list[TarIndex]) -> list[Any]:
    return [
        [
            tar_index.offsets.tolist(),
            tar_index.sizes.tolist(),
            tar_index.names.to_pylist(),
            tar_index.labels,
            tar_index.ignored,
        ]
        for tar_index in indexes
    ]


def test_offsets_are_those_of_the_images(tmp_path: Path, cache: Path) -> None:
    for shard_index in index_folder(write_tar_shards(tmp_path / "d")):
        shard_bytes = Path(shard_index.file.path).read_bytes()
        images = zip(
            shard_index.offsets.tolist(),
            shard_index.sizes.tolist(),
            shard_index.names.to_pylist(),
            strict=True,
        )
        for offset, size, name in images:
            assert shard_bytes[offset : offset + size] == random_png(int(name[:5]))


def test_reads_headers_once(tmp_path: Path, cache: Path, shards_read: list[str]) -> None:
    folder = write_tar_shards(tmp_path / "d")
    first = index_folder(folder)
    assert sorted(shards_read) == sorted(path.name for path in folder.iterdir())
    assert len(list(cache.iterdir())) == 4
    shards_read.clear()
    assert index_content(index_folder(folder)) == index_content(first)
    assert shards_read == []
    changed = folder / "set-train-0001.tar"
    changed.write_bytes(tar_bytes(tar_members(50, 6)))  # the same length as before
    assert index_folder(folder)[2].names.to_pylist()[0] == b"00050.png"
    assert shards_read == [changed.name]
    index_folder(folder, None, "cls")
    assert len(shards_read) == 5  # read again for another label column


def test_does_not_cache_the_index_of_a_recently_changed_shard(
    tmp_path: Path, cache: Path, shards_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change might not change the timestamp."""
    monkeypatch.setattr(stat_signatures, "_SETTLED_NS", 2 * 10**9)
    folder = write_tar_shards(tmp_path / "d")
    index_folder(folder)
    index_folder(folder)
    assert len(shards_read) == 8


def test_keeps_the_index_of_shards_read_before_an_interrupt(
    tmp_path: Path, cache: Path, shards_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tar_shards(tmp_path / "d", train=9)
    read_shard_headers = tar_index._read_shard_headers

    def interrupt_after_six(file: Any, *columns: Any) -> Any:
        if len(shards_read) == 6:
            raise KeyboardInterrupt
        return read_shard_headers(file, *columns)

    with monkeypatch.context() as patch:
        patch.setattr(tar_index, "_read_shard_headers", interrupt_after_six)
        with pytest.raises(KeyboardInterrupt):
            index_folder(folder)
    read_before = list(shards_read)
    shards_read.clear()
    assert len(index_folder(folder)) == 10
    assert len(read_before) == 6
    assert not set(read_before) & set(shards_read)


def test_reads_many_shards_in_worker_processes(
    tmp_path: Path, cache: Path, shards_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    expected = index_content(index_folder(folder))
    for path in cache.iterdir():
        path.unlink()
    shards_read.clear()
    monkeypatch.setattr(tar_index, "_MIN_PARALLEL_BYTES", 0)
    assert index_content(index_folder(folder)) == expected
    assert shards_read == []  # read by workers, not in this process
    assert len(list(cache.iterdir())) == 4
    (folder / "bad.tar").write_bytes(b"no tar" * 1000)
    with refused("data.damaged", "bad.tar"):
        index_folder(folder)


@pytest.mark.parametrize("small_bytes", [0, 2**24])
def test_a_full_disk_disables_only_the_cache(
    small_bytes: int,
    tmp_path: Path,
    cache: Path,
    shards_read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No shard is read twice, and one warning of one line is logged."""
    folder = write_tar_shards(tmp_path / "d")
    monkeypatch.setattr(tar_index, "_MIN_PARALLEL_BYTES", small_bytes)
    # the limit also applies to the file that captures stderr
    monkeypatch.setattr(log._console, "always", False)
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard_limit))
    try:
        assert len(index_folder(folder)) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    assert len(shards_read) == (4 if small_bytes else 0)  # read by workers, not in this process
    assert list(cache.iterdir()) == []
    [warning] = caplog.messages
    assert warning.endswith("File too large); the next run indexes them again")


def test_warns_once_if_the_cache_cannot_be_written(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Although each error names another file."""

    def raise_disk_full(_: object, key: str) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", key)

    monkeypatch.setattr(tar_index.CacheFolder, "write", raise_disk_full)
    assert len(index_folder(write_tar_shards(tmp_path / "d"))) == 4
    assert len(caplog.messages) == 1


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an index and write it with a matching hash."""
    fields = json.loads(path.read_bytes()[32:])
    change(fields)
    body = json.dumps(fields).encode()
    path.write_bytes(hashlib.sha256(body).digest() + body)


INVALID_INDEXES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an image beyond the end of the shard": lambda fields: fields["sizes"].__setitem__(5, 2**40),
    "a negative offset": lambda fields: fields["offsets"].__setitem__(0, -512),
    "unsorted offsets": lambda fields: fields["offsets"].reverse(),
    "a negative size": lambda fields: fields["sizes"].__setitem__(0, -1),
    "a size that overflows": lambda fields: fields["sizes"].__setitem__(5, 2**63 - 1),
    "a missing label": lambda fields: fields["labels"].pop(),
    "a label of another type": lambda fields: fields["labels"].__setitem__(0, [1.5]),
    "a name of another type": lambda fields: fields["names"].__setitem__(0, 7),
    "no labels": lambda fields: fields.pop("labels"),
    "nested offsets": lambda fields: fields.update(offsets=[[1]] * 6),
}


@pytest.mark.parametrize("change", INVALID_INDEXES.values(), ids=list(INVALID_INDEXES))
def test_rebuilds_an_invalid_index_with_a_valid_checksum(
    change: Callable[[dict[str, Any]], object],
    tmp_path: Path,
    cache: Path,
    shards_read: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    expected = index_content(index_folder(folder))
    index_files = sorted(cache.iterdir())
    before = {path.name: path.read_bytes() for path in index_files}
    rewrite_index(index_files[2], change)
    shards_read.clear()
    assert index_content(index_folder(folder)) == expected
    assert len(shards_read) == 1
    assert f"{index_files[2]}: is damaged" in caplog.text
    assert {path.name: path.read_bytes() for path in sorted(cache.iterdir())} == before


@pytest.mark.parametrize("damage", [b"", b"x" * 20, b"\0" * 100, "a label"])
def test_rebuilds_a_damaged_index(
    damage: bytes | str, tmp_path: Path, cache: Path, shards_read: list[str]
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    expected = index_content(index_folder(folder))
    path = sorted(cache.iterdir())[0]
    body = path.read_bytes().replace(b'"labels": [0, 1', b'"labels": [1, 1')
    path.write_bytes(damage if isinstance(damage, bytes) else body)
    shards_read.clear()
    assert index_content(index_folder(folder)) == expected
    assert len(shards_read) == 1


def test_ignores_a_cache_that_others_can_write(
    tmp_path: Path, cache: Path, shards_read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    index_folder(folder)
    cache.chmod(0o777)
    assert len(index_folder(folder)) == 4
    assert len(shards_read) == 8
    assert "others can write to it" in caplog.text


# --- headers -------------------------------------------------------------------------------------


def change_header_field(field: slice, value: bytes) -> Callable[[bytes], bytes]:
    """Return a function that changes a field of the second header and its checksum."""

    def change(shard_bytes: bytes) -> bytes:
        header = bytearray(shard_bytes[2 * BLOCK : 3 * BLOCK])
        header[field] = value
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        return shard_bytes[: 2 * BLOCK] + bytes(header) + shard_bytes[3 * BLOCK :]

    return change


SIZE_FIELD, TYPE_FIELD = slice(124, 136), slice(156, 157)
DAMAGED_SHARDS = {
    "a negative size": change_header_field(SIZE_FIELD, b"\xff" * 8 + struct.pack(">i", -1024)),
    "a header that points to itself": change_header_field(
        SIZE_FIELD, b"\xff" * 8 + struct.pack(">i", -512)
    ),
    "a size of exabytes": change_header_field(
        SIZE_FIELD, b"\x80" + struct.pack(">q", 2**60).rjust(11, b"\0")
    ),
    "a size beyond the end": change_header_field(SIZE_FIELD, b"%011o\0" % 2**20),
    "a long name of a gigabyte": lambda shard_bytes: change_header_field(
        SIZE_FIELD, b"%011o\0" % 2**30
    )(change_header_field(TYPE_FIELD, b"L")(shard_bytes)),
    "an extended header of a gigabyte": lambda shard_bytes: change_header_field(
        SIZE_FIELD, b"%011o\0" % 2**30
    )(change_header_field(TYPE_FIELD, b"x")(shard_bytes)),
    "an extended header of negative size": lambda shard_bytes: change_header_field(
        SIZE_FIELD, b"\xff" * 8 + struct.pack(">i", -1024)
    )(change_header_field(TYPE_FIELD, b"g")(shard_bytes)),
    "a wrong checksum": lambda shard_bytes: (
        shard_bytes[: 2 * BLOCK] + b"?" + shard_bytes[2 * BLOCK + 1 :]
    ),
    "truncated in a header": lambda shard_bytes: shard_bytes[: 2 * BLOCK + 100],
    "truncated in an image": lambda shard_bytes: shard_bytes[: 3 * BLOCK + 10],
    "truncated between two members": lambda shard_bytes: shard_bytes[: 2 * BLOCK],
    "two archives in one file": lambda shard_bytes: shard_bytes + shard_bytes,
    "zeros after the end": lambda shard_bytes: shard_bytes + bytes(2**21),
    "headers without an end": lambda shard_bytes: tar_bytes(extended_headers(3000)),
}


def extended_headers(number: int) -> list[tarfile.TarInfo]:
    """Return extended headers, each of which applies to the next one."""
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    return [header] * number


@pytest.mark.parametrize("change", DAMAGED_SHARDS.values(), ids=list(DAMAGED_SHARDS))
def test_rejects_damaged_headers(
    change: Callable[[bytes], bytes], tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    path.write_bytes(change(tar_bytes(tar_members(0, 3))))
    with refused("data.damaged", str(path)):
        index_folder(path.parent)
    assert not list(cache.glob("*.tarindex"))


def test_does_not_read_a_huge_header(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    (header,) = extended_headers(1)
    header.size = 2**26
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 2**27)
    tracemalloc.start()
    with refused("data.damaged", "a header of 67,108,864 bytes"):
        index_folder(path.parent)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_does_not_keep_all_members_in_memory(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tarfile` would keep every member that it has read, a kilobyte each."""
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    path.write_bytes(tar_bytes(tar_members(0, 500)))
    num_members = []
    fromtarfile = tarfile.TarInfo.fromtarfile.__func__  # type: ignore[attr-defined]

    def counting_fromtarfile(cls: Any, archive: Any) -> Any:
        num_members.append(len(archive.members))
        return fromtarfile(cls, archive)

    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", classmethod(counting_fromtarfile))
    assert len(index_folder(path.parent)[0].offsets) == 500
    assert max(num_members) <= 1


def test_random_bytes_raise_only_data_errors(tmp_path: Path, cache: Path) -> None:
    """Change random bytes of the first headers."""
    shard_bytes = tar_bytes(tar_members(0, 2))
    path = tmp_path / "d" / "t.tar"
    path.parent.mkdir()
    generator = np.random.default_rng(0)
    outcomes = set()
    logging.disable(logging.WARNING)
    for _ in range(400):
        damaged = bytearray(shard_bytes)
        for position in generator.integers(0, 6 * BLOCK, 3).tolist():
            damaged[position] = int(generator.integers(256))
        path.write_bytes(damaged)
        try:
            index_folder(path.parent)
            outcomes.add("read")
        except tar_index.DataError as error:
            outcomes.add(error.code)
        os.unlink(path)
    logging.disable(logging.NOTSET)
    assert "read" in outcomes
    assert len(outcomes) > 1
