"""Jobs of the Slurm batch script that are requeued and preempted."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from launches import Launch, finetune_tracebacks, process_command, verified_steps
from slurm_jobs import requeue_requests, submit

__all__ = ["submit"]  # fixture

SETTINGS = ["optim.steps=400", "run.save_every=100", "run.eval_every=400"]


def task_process_ids(launch: Launch) -> list[int]:
    """Return the processes that Slurm would signal: all of the step, without the batch script."""
    return [pid for pid in launch.process_ids() if "-m finetune train" in process_command(pid)]


def signal_all_tasks(launch: Launch, *signals: signal.Signals) -> None:
    for signal_number in signals:
        for pid in task_process_ids(launch):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        time.sleep(0.1)


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
