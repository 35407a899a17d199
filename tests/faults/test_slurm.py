"""The Slurm batch script: the processes it starts, and when it requeues the job.

`srun` and `scontrol` are test doubles: srun starts a process for each task and ends with the
highest exit code, as the real one; scontrol records its arguments.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import (
    RECIPE,
    REPOSITORY,
    TIMEOUT_SECONDS,
    Launch,
    finetune_tracebacks,
    process_command,
    start_process,
    verified_steps,
)

SCRIPT = REPOSITORY / "recipes" / "accelerate" / "slurm.sh"
SETTINGS = ["optim.steps=400", "run.save_every=100", "run.eval_every=400"]

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


def test_only_a_job_that_saved_at_the_time_limit_is_requeued(submit: Any, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    for code in (0, 1, 2, 5, 137, 143, 138):
        assert requeue_requests(tmp_path) == []
        python.write_text(f'#!/bin/bash\necho "$RANK/$WORLD_SIZE $MASTER_ADDR $*"\nexit {code}\n')
        python.chmod(0o755)
        with submit("run.seed=1") as launch:
            assert launch.process.wait(TIMEOUT_SECONDS) == (0 if code == 138 else code)
    assert requeue_requests(tmp_path) == ["requeue 4711"]
    lines = launch.text.splitlines()
    for rank in range(2):
        command = f"-m finetune train {tmp_path}/recipe.yaml run.seed=1 --out {launch.out} --resume"
        assert f"{rank}/2 127.0.0.1 {command}" in lines


def task_process_ids(launch: Launch) -> list[int]:
    """Return the processes that Slurm would signal: all of the step, without the batch script."""
    return [pid for pid in launch.process_ids() if "-m finetune train" in process_command(pid)]


def signal_all_tasks(launch: Launch, *signals: signal.Signals) -> None:
    for signal_number in signals:
        for pid in task_process_ids(launch):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        time.sleep(0.1)


@pytest.mark.faults
def test_a_requeued_and_a_preempted_job_continue(submit: Any, tmp_path: Path, fault: Any) -> None:
    with submit(*SETTINGS) as first:
        first.wait_for_steps()
        signal_all_tasks(first, signal.SIGUSR1)
        first.wait_for_end()
        assert first.process.returncode == 0  # the exit code of scontrol
        assert requeue_requests(tmp_path) == ["requeue 4711"]
        assert first.read_record()["status"] == "stopped (138)"
        (step,) = first.checkpoint_steps()
        assert verified_steps(first.out) == [step]
    with submit(*SETTINGS, tasks=1) as second:
        second.wait_for_steps(step + 5)
        signal_all_tasks(second, signal.SIGCONT, signal.SIGTERM)
        second.wait_for_end()
        assert second.process.returncode == 143
        assert second.read_record()["status"] == "stopped (143)"
    with submit(*SETTINGS, tasks=3) as third:
        third.wait_for_end()
        assert third.process.returncode == 0, third.text
    record = third.read_record()
    assert (record["status"], record["num_processes"]) == ("done", 3)
    assert len(requeue_requests(tmp_path)) == 1
    assert not finetune_tracebacks(third.text)
    fault(
        "Slurm's SIGUSR1 before the time limit, SIGCONT and SIGTERM of a preemption",
        "the run is saved and continues in the next allocation, with 2, 1 and 3 processes; "
        "the script requeues only the first job",
    )
