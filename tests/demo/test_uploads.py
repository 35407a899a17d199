"""The upload folder: private, size-limited, and cleaned of leftovers from killed demos."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from finetune.demo import uploads as uploads_module
from finetune.demo.uploads import UploadFolder, temporary_workspace

SLEEPING_DEMO = """
import sys, time
from finetune.demo.uploads import temporary_workspace
with temporary_workspace() as place:
    (place / "uploads" / "a.png").write_bytes(b"a")
    print(place, flush=True)
    time.sleep(60)
"""


def test_workspace_is_private_and_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/somewhere"):
        monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
        if before:
            monkeypatch.setenv("GRADIO_TEMP_DIR", before)
        with temporary_workspace() as workspace:
            assert os.environ["GRADIO_TEMP_DIR"] == str(workspace / "uploads")
            assert workspace.stat().st_mode & 0o077 == 0
            (workspace / "uploads" / "a").write_text("a")
        assert not workspace.exists()
        assert os.environ.get("GRADIO_TEMP_DIR") == before


@pytest.fixture
def empty_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the temporary folder of the system."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_workspace_of_a_killed_demo_is_removed(empty_tmp: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPING_DEMO], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    workspace = Path(process.stdout.readline().strip())
    with temporary_workspace():
        assert (workspace / "uploads" / "a.png").is_file()  # its process is alive
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert (workspace / "uploads" / "a.png").is_file()
    with temporary_workspace() as first, temporary_workspace() as second:
        assert not workspace.exists()
        assert first.is_dir()  # the second workspace of this process left it alone
        assert second.is_dir()


@pytest.mark.parametrize("kind", ["link", "open to others", "no lock", "lock is a link", "file"])
def test_suspicious_folders_are_not_removed(empty_tmp: Path, kind: str) -> None:
    target = empty_tmp / "precious"
    target.mkdir(mode=0o700)
    (target / "lock").write_text("")
    workspace = empty_tmp / "finetune-demo-abc"
    if kind == "link":
        workspace.symlink_to(target)
    elif kind == "file":
        workspace.write_text("")
    else:
        workspace.mkdir(mode=0o755 if kind == "open to others" else 0o700)
        if kind == "lock is a link":
            (workspace / "lock").symlink_to(target / "lock")
        elif kind == "open to others":
            (workspace / "lock").write_text("")
    with temporary_workspace():
        pass
    assert os.path.lexists(workspace)
    assert (target / "lock").is_file()


def test_folder_of_another_user_is_not_removed(
    empty_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = empty_tmp / "finetune-demo-abc"
    workspace.mkdir(mode=0o700)
    (workspace / "lock").write_text("")
    monkeypatch.setattr(uploads_module.os, "getuid", lambda: workspace.stat().st_uid + 1)
    with temporary_workspace():
        assert workspace.is_dir()
    monkeypatch.undo()
    assert uploads_module._is_abandoned(workspace)


def total_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_oldest_uploads_are_evicted(tmp_path: Path) -> None:
    size = 2**17
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "0.png").write_bytes(b"e" * size)
    uploads = UploadFolder(tmp_path, max_total_bytes=3 * size, max_per_minute=9)
    for number in range(6):
        with uploads.reserve_space(size) as is_reserved:
            assert is_reserved
            file = tmp_path / f"sha{number}" / "a.png"
            file.parent.mkdir()
            file.write_bytes(b"x" * size)
            os.utime(file, (number, number))
        assert total_bytes(tmp_path) <= 4 * size  # with the example, which stays
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["example", "sha3", "sha4", "sha5"]
    with uploads.reserve_space(3 * size + 1) as is_reserved:
        assert not is_reserved
    with uploads.reserve_space(2 * size) as first, uploads.reserve_space(2 * size) as second:
        assert (first, second) == (True, False)
    with uploads.reserve_space(
        3 * size
    ) as is_reserved:  # a reservation without an upload takes no space
        assert is_reserved


def test_empty_files_count_toward_the_limit(tmp_path: Path) -> None:
    uploads = UploadFolder(tmp_path, max_total_bytes=10 * 2**16, max_per_minute=9)
    for number in range(100):
        (tmp_path / str(number)).touch()
    with uploads.reserve_space(1):
        assert len(list(tmp_path.iterdir())) == 9


def test_uploads_per_minute_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = UploadFolder(tmp_path, max_total_bytes=1, max_per_minute=3)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert [uploads.register_upload() for _ in range(4)] == [0, 0, 0, 60]
    clock[0] += 45.5
    assert uploads.register_upload() == 15
    clock[0] += 15
    assert [uploads.register_upload() for _ in range(4)] == [0, 0, 0, 60]
