"""A process that is paused, interrupted at its very end, short of memory, or hashes otherwise."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_runs import read_train_losses, read_weights
from launches import REPOSITORY, Launch, finetune_tracebacks, launch_training, process_state
from refusals import EXIT_CODES

STEPS = 300
TO_THE_END = [f"optim.steps={STEPS}", "run.save_every=100", f"run.eval_every={STEPS}"]
PAUSE_SECONDS = 4.0


def whole_run(folder: Path, *, processes: int, **options: Any) -> Path:
    """A run to its end, by as many processes. Returns: its directory."""
    kind = "python" if processes == 1 else "accelerate"
    name = options.pop("name", "whole")
    words = options.pop("words", TO_THE_END)
    with launch_training(
        folder, *words, launcher=kind, num_processes=processes, name=name, **options
    ) as launch:
        launch.wait_for_end()
        assert launch.process.returncode == 0, launch.text
    return launch.out


# Pauses -------------------------------------------------------------------------------------------


def pause(launch: Launch, pids: list[int]) -> None:
    """Stop processes for some seconds, and prove that they stood still."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        assert [process_state(pid) for pid in pids] == ["T"] * len(pids)
        done = len(read_train_losses(launch.out))
        assert done < STEPS, "the run was over before the pause"
        time.sleep(PAUSE_SECONDS)
        # a rank that waits for the paused one may finish its step, and no more
        assert len(read_train_losses(launch.out)) - done <= 1
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "processes, paused",
    [
        pytest.param(1, "all", id="one", marks=pytest.mark.faults),
        pytest.param(2, "all", id="both-of-two", marks=pytest.mark.faults),
        pytest.param(2, "rank 0", id="rank0-of-two", marks=pytest.mark.faults),
        pytest.param(2, "rank 1", id="rank1-of-two", marks=pytest.mark.faults),
    ],
)
def test_a_pause(processes: int, paused: str, tmp_path: Path, fault: Any) -> None:
    whole = whole_run(tmp_path, processes=processes)
    kind = "python" if processes == 1 else "accelerate"
    with launch_training(tmp_path, *TO_THE_END, launcher=kind, num_processes=processes) as launch:
        launch.wait_for_steps()
        ranks = launch.rank_process_ids()
        assert len(ranks) == processes
        pause(launch, ranks if paused == "all" else [ranks[int(paused[-1])]])
        launch.wait_for_end()
        assert launch.process.returncode == 0, launch.text
    assert len(read_train_losses(launch.out)) == STEPS
    assert read_train_losses(launch.out) == read_train_losses(whole)
    assert read_weights(launch.out) == read_weights(whole)
    fault(
        f"SIGSTOP for {PAUSE_SECONDS:g} seconds and SIGCONT in training: one process, both, either",
        "the losses and the weights of the run that nobody paused, to the bit",
    )


# Hashes -------------------------------------------------------------------------------------------

# Stands before the command line: each rank begins anew with a seed of its own.
OTHER_HASHES = """
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
# Augmentation by the order of a set, as a careless program would draw it.
BY_A_SET = """
from finetune.data import loader
init = loader.Sampler.__init__
def careless(self, *arguments, seed, **more):
    init(self, *arguments, seed=hash("finetune") % 1000, **more)
loader.Sampler.__init__ = careless
"""


def with_hashes(folder: Path, *, name: str, more: str = "") -> tuple[Path, set[str]]:
    """A run on two ranks that hash otherwise. Returns: its directory, the ranks' hashes."""
    program = folder / f"{name}.py"
    program.write_text(OTHER_HASHES.format(more=more))
    out = whole_run(folder, processes=2, name=name, program=(str(program),))
    lines = (folder / f"{name}.log").read_text().splitlines()
    return out, {line for line in lines if line.startswith("hash: ")}


@pytest.mark.faults
def test_another_hash_seed_for_each_rank(tmp_path: Path, fault: Any) -> None:
    whole = whole_run(tmp_path, processes=2, environment={"PYTHONHASHSEED": "0"})
    out, hashes = with_hashes(tmp_path, name="hashes")
    assert len(hashes) == 2  # the seeds have come into force
    assert read_train_losses(out) == read_train_losses(whole)
    assert read_weights(out) == read_weights(whole)
    careless, _ = with_hashes(tmp_path, name="careless", more=BY_A_SET)
    assert read_train_losses(careless) != read_train_losses(whole)  # the control
    fault(
        "another PYTHONHASHSEED for each rank of two",
        "the same losses and weights; with images drawn by a hash they differ (the control)",
    )


# The end ------------------------------------------------------------------------------------------

# Stands before the command line: an interrupt comes once the verb has ended.
INTERRUPTED = """
import atexit, os, signal, sys, time
from finetune.cli import main as cli

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep({seconds})  # Python looks for signals between two of its instructions

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
MOMENTS = {
    "as the verb returns": ("interrupt()", "int"),
    "while Python shuts down": ("pass", "interrupt"),
}


@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("careless", [False, True], ids=["ours", "control"])
def test_an_interrupt_after_the_verb(
    moment: str, careless: bool, tmp_path: Path, fault: Any
) -> None:
    late, at_exit = MOMENTS[moment]
    program = tmp_path / "interrupted.py"
    more = "cli.main = lambda: cli.run(cli.cli, sys.argv[1:])" if careless else ""
    text = INTERRUPTED.format(late=late, at_exit=at_exit, seconds=0.2, more=more)
    program.write_text(text)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = subprocess.run(
            [sys.executable, program, "recipes", "schema"],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads(done.stdout)["title"]  # the answer is out
    if careless:
        assert "KeyboardInterrupt" in done.stderr
        return
    assert done.returncode in (130, -signal.SIGINT)  # to a shell both are 130
    assert done.stderr == ""
    fault(
        "SIGINT when the verb has ended: as it returns, while Python shuts down",
        "130, the answer is whole, no traceback; without our handling there is one (the control)",
    )


# Memory -------------------------------------------------------------------------------------------


def limited(mebibytes: int | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line with a limit on its address space, as `ulimit -v` sets it."""
    limit = [] if mebibytes is None else ["prlimit", f"--as={mebibytes << 20}"]
    return subprocess.run(
        [*limit, sys.executable, "-m", "finetune", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )


prlimit = pytest.mark.skipif(
    shutil.which("prlimit") is None,
    reason="no limit on the address space: the command prlimit is not installed",
)


@prlimit
@pytest.mark.parametrize(
    "mebibytes",
    [200, *(pytest.param(n, marks=pytest.mark.faults) for n in (100, 150, 250, 300, 400))],
)
def test_no_memory_for_the_libraries(mebibytes: int, tmp_path: Path, fault: Any) -> None:
    """torch's largest library alone is more than 400 MB, whatever it was built for."""
    words = ("train", "recipes/quickstart.yaml", "--out", str(tmp_path / "run"), "--json")
    done = limited(mebibytes, *words)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["code"]) == (EXIT_CODES["setup"], "setup.memory"), done.stderr
    begins, refuses = done.stderr.splitlines()  # what it begins, before torch is loaded
    assert "output in" in begins
    assert "ulimit" in refuses
    assert not finetune_tracebacks(done.stderr)
    assert not (tmp_path / "run" / "run.json").exists()
    fault(
        "memory refused while libraries are mapped (ulimit -v)",
        "5 (setup.memory) in one line, before anything is written",
    )


@prlimit
@pytest.mark.faults
def test_the_same_command_with_memory(tmp_path: Path, fault: Any) -> None:
    """The control: it is the limit that ends it."""
    words = ("train", "recipes/quickstart.yaml", "--dry-run", "--out", str(tmp_path / "run"))
    assert limited(None, *words).returncode == 0
    fault("the same without the limit", "the control: 0")
