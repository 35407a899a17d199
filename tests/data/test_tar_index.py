"""The cached index of tar shards: verified, updated if a shard changed; errors of headers."""

from __future__ import annotations

import resource
import tarfile
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from small_datasets import random_png
from tar_shards import tar_bytes, tar_members, write_tar_shards

from finetune import log
from finetune.data import stat_signatures
from finetune.data.streaming.shard_file import LocalFile
from finetune.data.tar_index import TarShard, index_shards

BLOCK = tarfile.BLOCKSIZE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that also accepts files that were just written."""
    monkeypatch.setattr(stat_signatures, "SETTLED_NS", -(10**18))
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tars"


@pytest.fixture
def shards_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are read, once for each pass over the headers."""
    names: list[str] = []
    read = LocalFile.read

    def recording_read(self: LocalFile, first: int, length: int) -> bytes:
        if first == 0:
            names.append(self.path.name)
        return read(self, first, length)

    monkeypatch.setattr(LocalFile, "read", recording_read)
    return names


def index_folder(
    folder: Path, image: str | None = None, label: str | None = None
) -> list[TarShard]:
    return index_shards(
        [LocalFile.from_path(path) for path in sorted(folder.iterdir())], image, label
    )


def index_content(indexes: list[TarShard]) -> list[Any]:
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
    monkeypatch.setattr(stat_signatures, "SETTLED_NS", 2 * 10**9)
    folder = write_tar_shards(tmp_path / "d")
    index_folder(folder)
    index_folder(folder)
    assert len(shards_read) == 8


def test_keeps_the_index_of_shards_read_before_an_error(
    tmp_path: Path, cache: Path, shards_read: list[str]
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    (folder / "set-train-9999.tar").write_bytes(b"no tar" * 1000)
    with refused("data.damaged", "set-train-9999.tar"):
        index_folder(folder)
    (folder / "set-train-9999.tar").unlink()
    shards_read.clear()
    assert len(index_folder(folder)) == 4
    assert shards_read == []


def test_a_full_disk_disables_only_the_cache(
    tmp_path: Path,
    cache: Path,
    shards_read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No shard is read twice, and one warning of one line is logged."""
    folder = write_tar_shards(tmp_path / "d")
    # the limit also applies to the file that captures stderr
    monkeypatch.setattr(log._console, "always", False)
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard_limit))
    try:
        assert len(index_folder(folder)) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    assert len(shards_read) == 4
    assert list(cache.iterdir()) == []
    [warning] = caplog.messages
    assert warning.endswith("File too large); the next run indexes them again")


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


def test_rebuilds_indexes_that_were_swapped(
    tmp_path: Path, cache: Path, shards_read: list[str]
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    expected = index_content(index_folder(folder))
    first, second = sorted(cache.iterdir())[:2]
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    shards_read.clear()
    assert index_content(index_folder(folder)) == expected
    assert len(shards_read) == 2


def test_ignores_a_cache_that_others_can_write(
    tmp_path: Path, cache: Path, shards_read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tar_shards(tmp_path / "d")
    index_folder(folder)
    cache.chmod(0o777)
    assert len(index_folder(folder)) == 4
    assert len(shards_read) == 8
    assert "others can write to it" in caplog.text
