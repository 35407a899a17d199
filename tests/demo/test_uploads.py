"""The demo's folder: private, limited, and cleared of what killed demos left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from finetune.demo import uploads as module
from finetune.demo.uploads import UploadFolder, temporary_workspace

WAITS = """
import sys, time
from finetune.demo.uploads import temporary_workspace
with temporary_workspace() as place:
    (place / "uploads" / "a.png").write_bytes(b"a")
    print(place, flush=True)
    time.sleep(60)
"""


def test_the_workplace_is_private_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/somewhere"):
        monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
        if before:
            monkeypatch.setenv("GRADIO_TEMP_DIR", before)
        with temporary_workspace() as place:
            assert os.environ["GRADIO_TEMP_DIR"] == str(place / "uploads")
            assert place.stat().st_mode & 0o077 == 0
            (place / "uploads" / "a").write_text("a")
        assert not place.exists()
        assert os.environ.get("GRADIO_TEMP_DIR") == before


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the system with nothing in it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_killed_one_is_removed_by_the_next(temporary: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    place = Path(process.stdout.readline().strip())
    with temporary_workspace():
        assert (place / "uploads" / "a.png").is_file()  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert (place / "uploads" / "a.png").is_file()
    with temporary_workspace() as own, temporary_workspace() as second:
        assert not place.exists()
        assert own.is_dir()  # a second one of this process left it alone
        assert second.is_dir()


@pytest.mark.parametrize("kind", ["link", "open to others", "no lock", "lock is a link", "file"])
def test_what_may_be_somebody_else_s_stays(temporary: Path, kind: str) -> None:
    target = temporary / "precious"
    target.mkdir(mode=0o700)
    (target / "lock").write_text("")
    place = temporary / "finetune-demo-abc"
    if kind == "link":
        place.symlink_to(target)
    elif kind == "file":
        place.write_text("")
    else:
        place.mkdir(mode=0o755 if kind == "open to others" else 0o700)
        if kind == "lock is a link":
            (place / "lock").symlink_to(target / "lock")
        elif kind == "open to others":
            (place / "lock").write_text("")
    with temporary_workspace():
        pass
    assert os.path.lexists(place)
    assert (target / "lock").is_file()


def test_somebody_else_s_folder_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = temporary / "finetune-demo-abc"
    place.mkdir(mode=0o700)
    (place / "lock").write_text("")
    monkeypatch.setattr(module.os, "getuid", lambda: place.stat().st_uid + 1)
    with temporary_workspace():
        assert place.is_dir()
    monkeypatch.undo()
    assert module._is_abandoned(place)


def total_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_the_oldest_make_room(tmp_path: Path) -> None:
    size = 2**17
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "0.png").write_bytes(b"e" * size)
    uploads = UploadFolder(tmp_path, max_total_bytes=3 * size, max_per_minute=9)
    for number in range(6):
        with uploads.reserve_space(size) as is_free:
            assert is_free
            file = tmp_path / f"sha{number}" / "a.png"
            file.parent.mkdir()
            file.write_bytes(b"x" * size)
            os.utime(file, (number, number))
        assert total_bytes(tmp_path) <= 4 * size  # with the example, which stays
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["example", "sha3", "sha4", "sha5"]
    with uploads.reserve_space(3 * size + 1) as is_free:
        assert not is_free
    with uploads.reserve_space(2 * size) as first, uploads.reserve_space(2 * size) as second:
        assert (first, second) == (True, False)
    with uploads.reserve_space(3 * size) as is_free:  # what did not come takes no room
        assert is_free


def test_empty_files_have_a_limit_too(tmp_path: Path) -> None:
    uploads = UploadFolder(tmp_path, max_total_bytes=10 * 2**16, max_per_minute=9)
    for number in range(100):
        (tmp_path / str(number)).touch()
    with uploads.reserve_space(1):
        assert len(list(tmp_path.iterdir())) == 9


def test_a_minute_has_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = UploadFolder(tmp_path, max_total_bytes=1, max_per_minute=3)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert [uploads.register_upload() for _ in range(4)] == [0, 0, 0, 60]
    clock[0] += 45.5
    assert uploads.register_upload() == 15
    clock[0] += 15
    assert [uploads.register_upload() for _ in range(4)] == [0, 0, 0, 60]
