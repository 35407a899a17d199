"""The cache on disk: whole or absent, alike for any number of processes, and never in the way."""

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

from finetune.evaluation.features import read_cached, write_cached

KEY = hashlib.sha256(b"one").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
VALUES = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write_cached(folder, KEY, VALUES)
    values = read_cached(folder, KEY, num_images=50)
    assert values is not None
    assert not values.flags.writeable
    assert values.tobytes() == VALUES.tobytes()
    np.testing.assert_array_equal(np.load(the_file(folder)), VALUES)  # anyone can read it
    assert read_cached(folder, OTHER, num_images=50) is None
    assert read_cached(tmp_path / "nowhere", KEY, num_images=50) is None


def flip_a_bit(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-100] ^= 1
    path.write_bytes(body)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def flip_in_the_header(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[70] ^= 1
    path.write_bytes(body)


def swap_rows(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body[:128] + body[156:184] + body[128:156] + body[184:])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(200))


@pytest.mark.parametrize(
    "damage", [flip_a_bit, flip_in_the_header, swap_rows, lengthen, cut, cut_to_nothing]
)
def test_a_damaged_file_is_removed_and_never_used(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_cached(tmp_path, KEY, VALUES)
    damage(the_file(tmp_path))
    assert read_cached(tmp_path, KEY, num_images=50) is None
    assert "is damaged" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [np.array([{"a": "thing"}] * 50, dtype=object), VALUES.astype(np.float64), VALUES[:49]],
    ids=["objects", "float64", "too few"],
)
def test_a_whole_file_of_something_else_is_not_used(tmp_path: Path, content: np.ndarray) -> None:
    np.save(tmp_path / "file.npy", content, allow_pickle=True)
    body = (tmp_path / "file.npy").read_bytes()
    for before in (b"", KEY.encode()):
        digest = hashlib.sha256(before + body).hexdigest()
        path = tmp_path / f"{KEY}-{digest}.npy"
        path.write_bytes(body)
        path.chmod(0o600)
        assert read_cached(tmp_path, KEY, num_images=50) is None
        assert not path.exists()


def test_features_of_another_key_are_not_used_under_this_one(tmp_path: Path) -> None:
    write_cached(tmp_path, OTHER, VALUES)
    path = the_file(tmp_path)
    path.rename(tmp_path / path.name.replace(OTHER, KEY))
    assert read_cached(tmp_path, KEY, num_images=50) is None


def test_a_full_disk_costs_only_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write beyond it fails half-way
    try:
        write_cached(tmp_path / "cache", KEY, VALUES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "cache").iterdir())
    said = capsys.readouterr().err
    assert "are not kept" in said
    assert "FINETUNE_CACHE" in said
    (tmp_path / "file").write_text("")
    write_cached(tmp_path / "file" / "features", KEY, VALUES)
    assert read_cached(tmp_path / "file" / "features", KEY, num_images=50) is None


def write_and_read(folder: Path, failures: str) -> None:
    """What each of several processes does at once."""
    for _ in range(15):
        write_cached(folder, KEY, VALUES)
        found = read_cached(folder, KEY, num_images=50)
        if found is not None and found.tobytes() != VALUES.tobytes():
            Path(failures).write_text("wrong values")
        for path in folder.glob("*.npy"):
            path.unlink(missing_ok=True)  # someone makes room


def test_several_processes_do_not_disturb_one_another(tmp_path: Path) -> None:
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


def test_room_is_made_by_removing_what_was_not_used_for_longest(tmp_path: Path) -> None:
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
    size = 128 + VALUES.nbytes
    for age, key in zip((300, 200, 100), keys[:3], strict=True):
        write_cached(tmp_path, key, VALUES)
        (path,) = tmp_path.glob(f"{key}-*")
        os.utime(path, (time.time() - age,) * 2)
    assert read_cached(tmp_path, keys[0], num_images=50) is not None  # now the youngest
    (tmp_path / "mine.npy").write_bytes(bytes(10 * size))
    old, young = (tmp_path / f".{KEY}.{number}.tmp" for number in (1, 2))
    old.write_text("of a killed process")
    young.write_text("being written")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    write_cached(tmp_path, keys[3], VALUES, max_bytes=2 * size)
    left = {path.name for path in tmp_path.iterdir()}
    assert {name[:64] for name in left if "-" in name} == {keys[0], keys[3]}
    assert left >= {"mine.npy", young.name}
    assert old.name not in left
    write_cached(tmp_path, keys[3], VALUES, max_bytes=1)
    assert [path.name[:64] for path in tmp_path.glob("*-*.npy")] == [keys[3]]
