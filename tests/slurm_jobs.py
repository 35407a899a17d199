"""The Slurm batch script with doubles of `srun` and `scontrol`.

srun starts a process for each task and ends with the highest exit code, as the real one; scontrol
records its arguments.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launches import RECIPE, REPOSITORY, Launch, start_process

__all__ = ["requeue_requests", "submit"]

SCRIPT = REPOSITORY / "recipes" / "accelerate" / "slurm.sh"

SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=0
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do
    wait "$task"; code=$?
    ((code > worst)) && worst=$code
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$ASKED"; fi
"""


@pytest.fixture
def submit(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Launch]]:
    """Return a function that runs the script as Slurm does, with `tasks` tasks on one machine."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    allocation = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]"}
    out, log = tmp_path / "run", tmp_path / "log"

    @contextlib.contextmanager
    def start_job(*overrides: str, tasks: int = 2, **variables: str) -> Iterator[Launch]:
        counts = {"SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(tasks)}
        environment = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "ASKED": str(tmp_path / "asked"),
        }
        environment |= {"ACCELERATE_USE_CPU": "true", **allocation, **counts, **variables}
        command = [
            "bash",
            str(SCRIPT),
            str(tmp_path / "recipe.yaml"),
            *overrides,
            "--out",
            str(out),
        ]
        with start_process(command, environment, out=out, log=log) as launch:
            yield launch

    return start_job


def requeue_requests(folder: Path) -> list[str]:
    """Return the recorded scontrol commands, except `show`."""
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []
