"""The batch script for Slurm: what it starts, and when it puts the job back into the queue.

`srun` and `scontrol` are stand-ins: one starts a process for each task and ends with the highest
exit code, as srun does; the other writes down what it is asked.
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
    """Run the script as Slurm does in an allocation of so many tasks on one machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    allocation = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]"}
    out, log = tmp_path / "run", tmp_path / "log"

    @contextlib.contextmanager
    def start(*words: str, tasks: int = 2, **variables: str) -> Iterator[Launch]:
        counts = {"SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(tasks)}
        own = {"PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}
        own |= {"ACCELERATE_USE_CPU": "true", **allocation, **counts, **variables}
        command = [
            "bash",
            str(SCRIPT),
            str(tmp_path / "recipe.yaml"),
            *words,
            "--out",
            str(out),
        ]
        with start_process(command, own, out=out, log=log) as launch:
            yield launch

    return start


def asked(folder: Path) -> list[str]:
    """What the script has asked of scontrol, beside the names of machines."""
    place = folder / "asked"
    return place.read_text().splitlines() if place.exists() else []


def test_only_a_run_that_saved_before_the_time_was_over_is_queued_again(
    submit: Any, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    for code in (0, 1, 2, 5, 137, 143, 138):
        assert asked(tmp_path) == []
        python.write_text(f'#!/bin/bash\necho "$RANK/$WORLD_SIZE $MASTER_ADDR $*"\nexit {code}\n')
        python.chmod(0o755)
        with submit("run.seed=1") as launch:
            assert launch.process.wait(TIMEOUT_SECONDS) == (0 if code == 138 else code)
    assert asked(tmp_path) == ["requeue 4711"]
    lines = launch.text.splitlines()
    for rank in range(2):
        command = f"-m finetune train {tmp_path}/recipe.yaml run.seed=1 --out {launch.out} --resume"
        assert f"{rank}/2 127.0.0.1 {command}" in lines


def tasks_of(launch: Launch) -> list[int]:
    """The processes that Slurm would signal: all of the step, and not the batch script."""
    return [pid for pid in launch.process_ids() if "-m finetune train" in process_command(pid)]


def signal_all(launch: Launch, *numbers: signal.Signals) -> None:
    for number in numbers:
        for pid in tasks_of(launch):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.1)


@pytest.mark.faults
def test_a_job_that_is_preempted_and_queued_again(submit: Any, tmp_path: Path, fault: Any) -> None:
    with submit(*SETTINGS) as first:
        first.wait_for_steps()
        signal_all(first, signal.SIGUSR1)
        first.wait_for_end()
        assert first.process.returncode == 0  # that of scontrol
        assert asked(tmp_path) == ["requeue 4711"]
        assert first.read_record()["status"] == "stopped (138)"
        (step,) = first.checkpoint_steps()
        assert verified_steps(first.out) == [step]
    with submit(*SETTINGS, tasks=1) as second:
        second.wait_for_steps(step + 5)
        signal_all(second, signal.SIGCONT, signal.SIGTERM)
        second.wait_for_end()
        assert second.process.returncode == 143
        assert second.read_record()["status"] == "stopped (143)"
    with submit(*SETTINGS, tasks=3) as third:
        third.wait_for_end()
        assert third.process.returncode == 0, third.text
    record = third.read_record()
    assert (record["status"], record["num_processes"]) == ("done", 3)
    assert len(asked(tmp_path)) == 1
    assert not finetune_tracebacks(third.text)
    fault(
        "Slurm's SIGUSR1 before the time is over, SIGCONT and SIGTERM of a preemption",
        "the run is saved and goes on with the next allocation, of 2, 1 and 3 processes; "
        "the script requeues the first alone",
    )
