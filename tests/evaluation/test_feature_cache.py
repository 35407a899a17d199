"""The feature cache on disk: atomic, safe for concurrent processes, and never fatal."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from finetune.evaluation.feature_cache import read_cached_features, write_cached_features

KEY = hashlib.sha256(b"one").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
VALUES = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_written_features_are_read_bit_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write_cached_features(folder, KEY, VALUES)
    values = read_cached_features(folder, KEY, num_images=50)
    assert values is not None
    assert not values.flags.writeable
    assert values.tobytes() == VALUES.tobytes()
    np.testing.assert_array_equal(np.load(only_file(folder)), VALUES)  # it is a plain .npy file
    assert read_cached_features(folder, OTHER, num_images=50) is None
    assert read_cached_features(tmp_path / "nowhere", KEY, num_images=50) is None


def flip_bit(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-100] ^= 1
    path.write_bytes(body)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def truncate_to_empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_header_bit(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[70] ^= 1
    path.write_bytes(body)


def swap_rows(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body[:128] + body[156:184] + body[128:156] + body[184:])


def append_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(200))


@pytest.mark.parametrize(
    "damage", [flip_bit, flip_header_bit, swap_rows, append_bytes, truncate, truncate_to_empty]
)
def test_damaged_file_is_removed_and_not_used(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_cached_features(tmp_path, KEY, VALUES)
    damage(only_file(tmp_path))
    assert read_cached_features(tmp_path, KEY, num_images=50) is None
    assert "is damaged" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [np.array([{"a": "thing"}] * 50, dtype=object), VALUES.astype(np.float64), VALUES[:49]],
    ids=["objects", "float64", "too few"],
)
def test_intact_file_with_other_content_is_not_used(tmp_path: Path, content: np.ndarray) -> None:
    np.save(tmp_path / "file.npy", content, allow_pickle=True)
    body = (tmp_path / "file.npy").read_bytes()
    for before in (b"", KEY.encode()):
        digest = hashlib.sha256(before + body).hexdigest()
        path = tmp_path / f"{KEY}-{digest}.npy"
        path.write_bytes(body)
        path.chmod(0o600)
        assert read_cached_features(tmp_path, KEY, num_images=50) is None
        assert not path.exists()


def test_file_renamed_to_another_key_is_not_used(tmp_path: Path) -> None:
    write_cached_features(tmp_path, OTHER, VALUES)
    path = only_file(tmp_path)
    path.rename(tmp_path / path.name.replace(OTHER, KEY))
    assert read_cached_features(tmp_path, KEY, num_images=50) is None


def test_full_disk_only_disables_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond the limit fails half-way
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        write_cached_features(tmp_path / "cache", KEY, VALUES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "cache").iterdir())
    stderr = capsys.readouterr().err
    assert "are not kept" in stderr
    assert "FINETUNE_CACHE" in stderr
    (tmp_path / "file").write_text("")
    write_cached_features(tmp_path / "file" / "features", KEY, VALUES)
    assert read_cached_features(tmp_path / "file" / "features", KEY, num_images=50) is None


def write_and_read(folder: Path, failures: str) -> None:
    """Write, read and delete the file repeatedly; several processes run this concurrently."""
    for _ in range(15):
        write_cached_features(folder, KEY, VALUES)
        values = read_cached_features(folder, KEY, num_images=50)
        if values is not None and values.tobytes() != VALUES.tobytes():
            Path(failures).write_text("wrong values")
        for path in folder.glob("*.npy"):
            path.unlink(missing_ok=True)  # like an eviction


def test_concurrent_processes_never_read_wrong_values(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    arguments = (tmp_path / "cache", str(tmp_path / "failures"))
    processes = [fork.Process(target=write_and_read, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not (tmp_path / "failures").exists()
    assert not list((tmp_path / "cache").glob(".*"))


def test_eviction_removes_the_least_recently_used_files(tmp_path: Path) -> None:
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
    size = 128 + VALUES.nbytes
    for age, key in zip((300, 200, 100), keys[:3], strict=True):
        write_cached_features(tmp_path, key, VALUES)
        (path,) = tmp_path.glob(f"{key}-*")
        os.utime(path, (time.time() - age,) * 2)
    # reading makes it the most recently used
    assert read_cached_features(tmp_path, keys[0], num_images=50) is not None
    (tmp_path / "mine.npy").write_bytes(bytes(10 * size))
    old, recent = (tmp_path / f".{KEY}.{number}.tmp" for number in (1, 2))
    old.write_text("left by a killed process")
    recent.write_text("being written")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    write_cached_features(tmp_path, keys[3], VALUES, max_bytes=2 * size)
    names = {path.name for path in tmp_path.iterdir()}
    assert {name[:64] for name in names if "-" in name} == {keys[0], keys[3]}
    assert names >= {"mine.npy", recent.name}
    assert old.name not in names
    write_cached_features(tmp_path, keys[3], VALUES, max_bytes=1)
    assert [path.name[:64] for path in tmp_path.glob("*-*.npy")] == [keys[3]]
