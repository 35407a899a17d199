"""Processes that are paused, interrupted at exit, or have other hash seeds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_runs import read_train_losses, read_weights
from launches import REPOSITORY, Launch, launch_training, process_state

NUM_STEPS = 300
SETTINGS = [f"optim.steps={NUM_STEPS}", "run.save_every=100", f"run.eval_every={NUM_STEPS}"]
PAUSE_SECONDS = 4.0


def train_uninterrupted(folder: Path, *, num_processes: int, **options: Any) -> Path:
    """Train a run without interruption. Returns: its directory."""
    launcher = "python" if num_processes == 1 else "accelerate"
    name = options.pop("name", "whole")
    overrides = options.pop("words", SETTINGS)
    with launch_training(
        folder, *overrides, launcher=launcher, num_processes=num_processes, name=name, **options
    ) as launch:
        launch.wait_for_end()
        assert launch.process.returncode == 0, launch.text
    return launch.out


# Pauses -------------------------------------------------------------------------------------------


def pause_and_continue(launch: Launch, pids: list[int]) -> None:
    """Stop processes for some seconds, and check that training did not continue."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        assert [process_state(pid) for pid in pids] == ["T"] * len(pids)
        num_losses = len(read_train_losses(launch.out))
        assert num_losses < NUM_STEPS, "the run was over before the pause"
        time.sleep(PAUSE_SECONDS)
        # a rank that waits for the paused one may finish its current step
        assert len(read_train_losses(launch.out)) - num_losses <= 1
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "num_processes, target",
    [
        pytest.param(1, "all", id="one"),
        pytest.param(2, "all", id="both-of-two"),
        pytest.param(2, "rank 0", id="rank0-of-two"),
        pytest.param(2, "rank 1", id="rank1-of-two"),
    ],
)
def test_a_paused_process_gives_the_same_result(
    num_processes: int, target: str, tmp_path: Path, fault: Any
) -> None:
    reference = train_uninterrupted(tmp_path, num_processes=num_processes)
    launcher = "python" if num_processes == 1 else "accelerate"
    with launch_training(
        tmp_path, *SETTINGS, launcher=launcher, num_processes=num_processes
    ) as launch:
        launch.wait_for_steps()
        ranks = launch.rank_process_ids()
        assert len(ranks) == num_processes
        pause_and_continue(launch, ranks if target == "all" else [ranks[int(target[-1])]])
        launch.wait_for_end()
        assert launch.process.returncode == 0, launch.text
    assert len(read_train_losses(launch.out)) == NUM_STEPS
    assert read_train_losses(launch.out) == read_train_losses(reference)
    assert read_weights(launch.out) == read_weights(reference)
    fault(
        f"SIGSTOP for {PAUSE_SECONDS:g} seconds and SIGCONT in training: one process, both, or one "
        "of two",
        "bit-identical losses and weights of the run without a pause",
    )


# Hash seeds ---------------------------------------------------------------------------------------

# Replaces `-m finetune`: each rank restarts itself with its own hash seed.
HASH_SEED_PROGRAM = """
import os, sys
seed = str(1 + int(os.environ["RANK"]))
if os.environ.get("PYTHONHASHSEED") != seed:
    os.environ["PYTHONHASHSEED"] = seed
    os.execv(sys.executable, [sys.executable, *sys.argv])
print("hash:", hash("finetune"), file=sys.stderr)
{more}
from finetune.cli.main import main
sys.exit(main())
"""
# A sampler whose seed depends on a hash, as in a careless program.
UNSTABLE_SAMPLER = """
from finetune.data.sampler import DistributedBatchSampler
init = DistributedBatchSampler.__init__
def unstable(self, *arguments, seed, **more):
    init(self, *arguments, seed=hash("finetune") % 1000, **more)
DistributedBatchSampler.__init__ = unstable
"""


def train_with_hash_seeds(
    folder: Path, *, name: str, extra_code: str = ""
) -> tuple[Path, set[str]]:
    """Train two ranks with different hash seeds. Returns: the run directory, their hashes."""
    program = folder / f"{name}.py"
    program.write_text(HASH_SEED_PROGRAM.format(more=extra_code))
    out = train_uninterrupted(folder, num_processes=2, name=name, program=(str(program),))
    lines = (folder / f"{name}.log").read_text().splitlines()
    return out, {line for line in lines if line.startswith("hash: ")}


def test_hash_seeds_do_not_change_the_result(tmp_path: Path, fault: Any) -> None:
    reference = train_uninterrupted(
        tmp_path, num_processes=2, extra_environment={"PYTHONHASHSEED": "0"}
    )
    out, hashes = train_with_hash_seeds(tmp_path, name="hashes")
    assert len(hashes) == 2  # the seeds took effect
    assert read_train_losses(out) == read_train_losses(reference)
    assert read_weights(out) == read_weights(reference)
    unstable, _ = train_with_hash_seeds(tmp_path, name="careless", extra_code=UNSTABLE_SAMPLER)
    assert read_train_losses(unstable) != read_train_losses(reference)  # the control
    fault(
        "another PYTHONHASHSEED for each rank of two",
        "the same losses and weights; they differ with a sampler that uses a hash (the control)",
    )


# The end ------------------------------------------------------------------------------------------

# Replaces `-m finetune`: an interrupt arrives after the command has ended.
INTERRUPT_PROGRAM = """
import atexit, os, signal, sys, time
from finetune.cli import main as cli

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep({seconds})  # Python handles signals between two bytecode instructions

run = cli.run
def interrupted(*arguments):
    code = run(*arguments)
    {late}
    return code
cli.run = interrupted
{more}
code = cli.main()
atexit.register({at_exit})
sys.exit(code)
"""
INTERRUPT_POINTS = {
    "as the command returns": ("interrupt()", "int"),
    "while Python shuts down": ("pass", "interrupt"),
}


@pytest.mark.parametrize("point", list(INTERRUPT_POINTS))
@pytest.mark.parametrize("unprotected", [False, True], ids=["protected", "control"])
def test_an_interrupt_after_the_command_gives_no_traceback(
    point: str, unprotected: bool, tmp_path: Path, fault: Any
) -> None:
    after_run, at_exit = INTERRUPT_POINTS[point]
    program = tmp_path / "interrupted.py"
    extra_code = "cli.main = lambda: cli.run(cli.cli, sys.argv[1:])" if unprotected else ""
    text = INTERRUPT_PROGRAM.format(late=after_run, at_exit=at_exit, seconds=0.2, more=extra_code)
    program.write_text(text)
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = subprocess.run(
            [sys.executable, program, "recipes", "schema"],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        signal.signal(signal.SIGINT, old_handler)
    assert json.loads(result.stdout)["title"]  # the output is complete
    if unprotected:
        assert "KeyboardInterrupt" in result.stderr
        return
    assert result.returncode in (130, -signal.SIGINT)  # both are 130 for a shell
    assert result.stderr == ""
    fault(
        "SIGINT after the command: as it returns, while Python shuts down",
        "130, complete output, no traceback; without our handler one is printed (the control)",
    )
