"""CacheFolder: private to the user, files complete or absent, one process at a time."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logs import logging_nothing
from refusals import refused

from finetune.cache import CacheFolder, UntrustedCacheError, cache_path

KEY = hashlib.sha256(b"one").hexdigest()
BIN_NAME = re.compile(r"[a-z]\.bin")
OTHER_UID = 12345


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kind"


def write_file(folder: Path, name: str = "a.bin", content: bytes = b"whole") -> Path:
    with CacheFolder(folder) as cache, cache.write(name) as file:
        file.write(content)
    return folder / name


def test_cache_path_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    assert cache_path("a") == tmp_path / "a"
    assert cache_path("b") == tmp_path / "b"
    monkeypatch.setenv("FINETUNE_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path("a") == tmp_path / "mine" / "a"
    monkeypatch.setenv("FINETUNE_CACHE", "s3://me:a-password@bucket/x")
    with refused("setup.not_writable", "s3://***@bucket/x"):
        cache_path("a")
    monkeypatch.delenv("FINETUNE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_path("a") == tmp_path / ".cache" / "finetune" / "a"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path("a") == tmp_path / "xdg" / "finetune" / "a"


def test_a_file_is_written_completely_or_not_at_all(folder: Path) -> None:
    with CacheFolder(folder) as cache:
        with cache.write("a.bin") as file:
            file.write(b"whole")
            assert not (folder / "a.bin").exists()
        assert cache.read("a.bin", max_bytes=5) == b"whole"
        with pytest.raises(ValueError, match="more than the 4"):
            cache.read("a.bin", max_bytes=4)

        def write_and_fail() -> None:
            with cache.write("b.bin"):
                raise RuntimeError

        with pytest.raises(RuntimeError):
            write_and_fail()
    assert [path.name for path in folder.iterdir()] == ["a.bin"]


def test_files_and_folders_are_private_to_the_user(folder: Path) -> None:
    before = os.umask(0)
    try:
        path = write_file(folder)
    finally:
        os.umask(before)
    modes = [oct(each.stat().st_mode & 0o777) for each in (path, folder, folder.parent)]
    assert modes == ["0o600", "0o700", "0o700"]


UNSAFE_CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "file of another user": ("12345", lambda path: os.chown(path, OTHER_UID, 0)),
    "file is group-writable": ("mode 620", lambda path: path.chmod(0o620)),
    "file is world-writable": ("mode 602", lambda path: path.chmod(0o602)),
    "folder of another user": ("12345", lambda path: os.chown(path.parent, OTHER_UID, 0)),
    "folder is world-writable": ("1777", lambda path: path.parent.chmod(0o1777)),
    "folder is group-writable": ("770", lambda path: path.parent.chmod(0o770)),
    "cache of another user": ("12345", lambda path: os.chown(path.parent.parent, OTHER_UID, 0)),
    "cache is world-writable": ("777", lambda path: path.parent.parent.chmod(0o777)),
    "link": ("is a link", lambda path: (path.rename(f"{path}.x"), path.symlink_to(f"{path}.x"))),
    "broken link": ("is a link", lambda path: (path.unlink(), path.symlink_to("nowhere"))),
    "pipe": ("is a pipe", lambda path: (path.unlink(), os.mkfifo(path, 0o600))),
    "folder instead of a file": ("is a folder", lambda path: (path.unlink(), path.mkdir(0o700))),
    "folder is a link": (
        "is a link",
        lambda path: (path.parent.rename(f"{path.parent}.x"), path.parent.symlink_to("kind.x")),
    ),
}


@pytest.mark.parametrize("case", UNSAFE_CHANGES)
def test_unsafe_files_and_folders_are_refused(folder: Path, case: str) -> None:
    if os.geteuid() and "of another" in case:
        pytest.skip("only root can give a file away")
    message, change = UNSAFE_CHANGES[case]
    path = write_file(folder)
    CacheFolder(folder).open("a.bin").close()
    change(path)
    with pytest.raises(UntrustedCacheError, match=message) as caught, CacheFolder(folder) as cache:
        cache.open("a.bin")
    assert "; " in str(caught.value)  # cause and fix


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_the_cache_may_be_a_symlink_of_the_same_user(folder: Path, tmp_path: Path) -> None:
    write_file(folder)
    folder.parent.rename(tmp_path / "disk")
    folder.parent.symlink_to("disk")
    with CacheFolder(folder) as cache:
        assert cache.read("a.bin", max_bytes=9) == b"whole"
    os.chown(folder.parent, OTHER_UID, 0, follow_symlinks=False)
    with pytest.raises(UntrustedCacheError, match="12345"):
        CacheFolder(folder)


def hold_lock(folder: Path, is_held: Any) -> None:
    with CacheFolder(folder) as cache, cache.lock(KEY), cache.write(f"{KEY}.bin") as file:
        file.write(b"half")
        file.flush()
        is_held.set()
        time.sleep(600)


def test_waits_for_a_lock_until_its_holder_is_killed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fork = multiprocessing.get_context("fork")
    is_held = fork.Event()
    holder = fork.Process(target=hold_lock, args=(folder, is_held))
    holder.start()
    assert is_held.wait(30)
    timer = threading.Timer(0.3, holder.kill)
    with CacheFolder(folder) as cache:
        with cache.lock(hashlib.sha256(b"other").hexdigest()):
            assert holder.is_alive()
        timer.start()
        with cache.lock(KEY):
            holder.join(30)
            assert holder.exitcode == -signal.SIGKILL
            cache.remove_partial_files(KEY)
    assert not list(folder.iterdir())
    assert ["waiting for it" in message for message in caplog.messages] == [True]


def test_a_waiting_process_locks_a_file_that_exists(folder: Path) -> None:
    """The process that held the lock removes its file, so another process could lock a new one."""
    fork = multiprocessing.get_context("fork")
    seen = fork.SimpleQueue()

    def wait_and_list() -> None:
        with CacheFolder(folder) as cache, cache.lock(KEY):
            seen.put([path.suffix for path in folder.iterdir()])

    waiting = fork.Process(target=wait_and_list)
    with CacheFolder(folder) as cache, cache.lock(KEY):
        waiting.start()
        time.sleep(0.5)
        assert seen.empty()
    assert seen.get() == [".lock"]
    waiting.join(30)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("kind", ["pipe", "link", "another user's"])
def test_an_unsafe_lock_file_is_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    write_file(folder)
    path = folder / f".{KEY}.lock"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "made")
    elif os.geteuid():
        pytest.skip("only root can give a file away")
    else:
        path.touch(0o600)
        os.chown(path, OTHER_UID, 0)
    with (
        CacheFolder(folder) as cache,
        logging_nothing(),
        pytest.raises(UntrustedCacheError),
        cache.lock(KEY),
    ):
        pass
    assert not (tmp_path / "made").exists()


def test_evict_removes_the_oldest_files_and_keeps_unknown_names(folder: Path) -> None:
    for age, name in enumerate(("c.bin", "b.bin", "a.bin", "mine.txt")):
        path = write_file(folder, name, bytes(100))
        os.utime(path, (time.time() - 100 * age,) * 2)
    old_temporary, new_temporary = (folder / f".{KEY}.bin.{number}.tmp" for number in (1, 2))
    lock = folder / f".{KEY}.lock"
    for path in (old_temporary, new_temporary, lock):
        path.write_text("half")
    for path in (old_temporary, lock):
        os.utime(path, (time.time() - 2 * 24 * 3600,) * 2)
    with CacheFolder(folder) as cache:
        cache.evict(200, keep_name="a.bin", pattern=BIN_NAME)
    assert {path.name for path in folder.iterdir()} == {
        "a.bin",
        "c.bin",
        "mine.txt",
        new_temporary.name,
    }
