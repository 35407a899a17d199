"""The upload folder: private, size-limited, and cleaned of leftovers from killed demos."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from finetune.demo.uploads import remove_oldest_files, temporary_workspace

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


@pytest.mark.parametrize("kind", ["link", "no lock", "lock is a link", "file"])
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
        workspace.mkdir(mode=0o700)
        if kind == "lock is a link":
            (workspace / "lock").symlink_to(target / "lock")
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
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with temporary_workspace():
        assert workspace.is_dir()
    monkeypatch.setattr(os, "getuid", lambda: user)
    with temporary_workspace():
        assert not workspace.exists()


def test_oldest_files_are_removed(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"sha{number}").mkdir()
        (tmp_path / f"sha{number}" / "a.png").write_bytes(b"x" * 2**17)
    remove_oldest_files(tmp_path, max_total_bytes=3 * 2**17 + 1, keep={tmp_path / "sha0" / "a.png"})
    assert sorted(os.listdir(tmp_path)) == ["sha0", "sha3", "sha4", "sha5"]


def test_tiny_files_count_toward_the_limit(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).touch()
    remove_oldest_files(tmp_path, max_total_bytes=10 * 2**16)
    assert len(os.listdir(tmp_path)) == 10
