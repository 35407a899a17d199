"""The cache's folder: this user's alone, files whole or absent, one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune import files
from finetune.files import CacheFolder, UntrustedCacheError, cache_folder

KEY = hashlib.sha256(b"one").hexdigest()
NAMES = re.compile(r"[a-z]\.bin")
OTHER = 12345  # a user


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kind"


def written(folder: Path, name: str = "a.bin", content: bytes = b"whole") -> Path:
    with CacheFolder(folder) as cache, cache.write(KEY) as new:
        os.write(new.descriptor, content)
        new.name = name
    return folder / name


def test_each_kind_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    assert cache_folder("a") == tmp_path / "a"
    assert cache_folder("b") == tmp_path / "b"
    monkeypatch.setenv("FINETUNE_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("a") == tmp_path / "mine" / "a"
    monkeypatch.delenv("FINETUNE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("a") == tmp_path / ".cache" / "finetune" / "a"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("a") == tmp_path / "xdg" / "finetune" / "a"


def test_a_file_appears_with_its_name_or_not_at_all(folder: Path) -> None:
    with CacheFolder(folder) as cache:
        with cache.write(KEY) as new:
            os.write(new.descriptor, b"whole")
            assert len(cache.names(KEY, ".tmp")) == 1
            new.name = "a.bin"
            assert not (folder / "a.bin").exists()
        assert cache.read("a.bin", limit_bytes=5) == b"whole"
        with pytest.raises(ValueError, match="more than the 4"):
            cache.read("a.bin", limit_bytes=4)
        with cache.write(KEY) as new:
            os.write(new.descriptor, b"no name")

        def broken() -> None:
            with cache.write(KEY) as new:
                new.name = "b.bin"
                raise RuntimeError

        with pytest.raises(RuntimeError):
            broken()
    assert [path.name for path in folder.iterdir()] == ["a.bin"]


def test_everything_is_made_for_this_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        path = written(folder)
    finally:
        os.umask(before)
    modes = [oct(each.stat().st_mode & 0o777) for each in (path, folder, folder.parent)]
    assert modes == ["0o600", "0o700", "0o700"]


WRONG: dict[str, tuple[str, Callable[[Path], object]]] = {
    "file of another": ("12345", lambda path: os.chown(path, OTHER, 0)),
    "file that a group writes": ("mode 620", lambda path: path.chmod(0o620)),
    "file that all write": ("mode 602", lambda path: path.chmod(0o602)),
    "folder of another": ("12345", lambda path: os.chown(path.parent, OTHER, 0)),
    "folder that all write": ("1777", lambda path: path.parent.chmod(0o1777)),
    "folder that a group writes": ("770", lambda path: path.parent.chmod(0o770)),
    "cache of another": ("12345", lambda path: os.chown(path.parent.parent, OTHER, 0)),
    "cache that all write": ("777", lambda path: path.parent.parent.chmod(0o777)),
    "link": ("is a link", lambda path: (path.rename(f"{path}.x"), path.symlink_to(f"{path}.x"))),
    "link to nothing": ("is a link", lambda path: (path.unlink(), path.symlink_to("nowhere"))),
    "pipe": ("is a pipe", lambda path: (path.unlink(), os.mkfifo(path, 0o600))),
    "folder in its place": ("is a folder", lambda path: (path.unlink(), path.mkdir(0o700))),
    "folder is a link": (
        "is a link",
        lambda path: (path.parent.rename(f"{path.parent}.x"), path.parent.symlink_to("kind.x")),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_this_users_is_refused_at_once(folder: Path, what: str) -> None:
    if os.geteuid() and "of another" in what:
        pytest.skip("only root can give a file away")
    said, change = WRONG[what]
    path = written(folder)
    CacheFolder(folder).open("a.bin")
    change(path)
    with pytest.raises(UntrustedCacheError, match=said) as caught, CacheFolder(folder) as cache:
        cache.open("a.bin")
    assert re.search(r"remove it|chmod go-w|chown", str(caught.value))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_the_cache_may_be_a_link_of_the_users(folder: Path, tmp_path: Path) -> None:
    written(folder)
    folder.parent.rename(tmp_path / "disk")
    folder.parent.symlink_to("disk")
    with CacheFolder(folder) as cache:
        assert cache.read("a.bin", limit_bytes=9) == b"whole"
    os.chown(folder.parent, OTHER, 0, follow_symlinks=False)
    with pytest.raises(UntrustedCacheError, match="12345"):
        CacheFolder(folder)


def hold(folder: Path, holds: object, grow: bool) -> None:
    with CacheFolder(folder) as cache, cache.lock(KEY, notice=print, stalled_seconds=9) as mine:
        assert mine
        with cache.write(KEY) as new:
            holds.set()  # type: ignore[attr-defined]
            while True:
                time.sleep(0.02)
                if grow:
                    os.write(new.descriptor, b"more")


@pytest.mark.parametrize("grow", [True, False])
def test_a_lock_is_waited_for_with_a_word_and_given_up_on_or_taken_over(
    folder: Path, grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_POLL_SECONDS", 0.05)
    fork, notices = multiprocessing.get_context("fork"), list[str]()
    holds = fork.Event()
    holder = fork.Process(target=hold, args=(folder, holds, grow))
    holder.start()
    assert holds.wait(30)
    started = time.monotonic()

    def told(text: str) -> None:
        notices.append(text)
        if grow:
            holder.kill()

    with CacheFolder(folder) as cache:
        with cache.lock(KEY, notice=told, stalled_seconds=1.5) as mine:
            assert mine is grow  # what grows is waited for, and taken over after a kill
        other = hashlib.sha256(b"other").hexdigest()
        with cache.lock(other, notice=pytest.fail, stalled_seconds=0) as mine:
            assert mine
    assert 0.9 < time.monotonic() - started < 20
    assert len(notices) == 1
    assert "waiting" in notices[0]
    holder.kill()
    holder.join()


def test_no_lock_stays_behind_and_none_is_held_twice(folder: Path) -> None:
    with CacheFolder(folder) as cache:
        with cache.lock(KEY, notice=pytest.fail, stalled_seconds=9):
            (lock,) = folder.iterdir()
            orphan = os.open(lock, os.O_RDWR)
            assert cache._locked(lock.name) is None
        assert not list(folder.iterdir())
        fcntl.flock(orphan, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free, but nobody's any more
        with cache.lock(KEY, notice=pytest.fail, stalled_seconds=9) as mine:
            assert mine
    os.close(orphan)


@pytest.mark.parametrize("kind", ["pipe", "link", "another user's"])
def test_a_lock_that_is_not_this_users_is_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    written(folder)
    path = folder / f".{KEY}.lock"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "made")
    elif os.geteuid():
        pytest.skip("only root can give a file away")
    else:
        path.touch(0o600)
        os.chown(path, OTHER, 0)
    with (
        CacheFolder(folder) as cache,
        pytest.raises(UntrustedCacheError),
        cache.lock(KEY, notice=pytest.fail, stalled_seconds=9),
    ):
        pass
    assert not (tmp_path / "made").exists()


def test_the_oldest_go_first_and_strangers_stay(folder: Path) -> None:
    for age, name in enumerate(("c.bin", "b.bin", "a.bin", "mine.txt")):
        path = written(folder, name, bytes(100))
        os.utime(path, (time.time() - 100 * age,) * 2)
    old, young = (folder / f".{KEY}.{number}.tmp" for number in (1, 2))
    lock = folder / f".{KEY}.lock"
    for path in (old, young, lock):
        path.write_text("half")
    for path in (old, lock):
        os.utime(path, (time.time() - 2 * 24 * 3600,) * 2)
    with CacheFolder(folder) as cache:
        cache.make_room(200, keep="a.bin", names=NAMES)
    assert {path.name for path in folder.iterdir()} == {"a.bin", "c.bin", "mine.txt", young.name}
