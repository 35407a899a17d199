"""Standard streams of a process that are closed, or a file on a full disk.

tests/faults/test_streams.py has long commands and pipes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launches import REPOSITORY
from refusals import EXIT_CODES

# A command whose libraries write directly to file descriptors 1 and 2.
PROGRAM = """
import os, click
from finetune.cli.runner import run

@click.group()
def group(): pass

@group.command()
def write():
    with open("opened", "w") as file:
        os.write(1, b"from a library")
        os.write(2, b"from a library")
        file.write("content")

raise SystemExit(run(group, ["write"]))
"""


def run_in_shell(
    command: str, folder: Path, *arguments: str, unbuffered: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command in bash; PYTHON in it is the Python of this process."""
    return subprocess.run(
        ["bash", "-c", command.replace("PYTHON", f"'{sys.executable}'"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
    )


def test_output_to_closed_streams_is_not_written_to_an_opened_file(tmp_path: Path) -> None:
    done = run_in_shell('PYTHON -c "$0" 0<&- 1>&- 2>&-', tmp_path, PROGRAM)
    assert done.returncode == 0
    assert (tmp_path / "opened").read_text() == "content"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_completely_is_an_error(
    unbuffered: str, tmp_path: Path
) -> None:
    """A limit on the file size, 4 KiB, stands for a disk that becomes full."""
    command = "ulimit -f 4; trap '' XFSZ; PYTHON -B -m finetune recipes schema > part"
    done = run_in_shell(command, tmp_path, unbuffered=unbuffered)
    assert (tmp_path / "part").stat().st_size == 4096
    assert done.returncode == EXIT_CODES["setup"], done.stderr
    assert len(done.stderr.splitlines()) == 1
