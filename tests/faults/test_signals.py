"""A signal to any process of a launch: every rank stops at the same step, and nothing is lost."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launches import RECIPE, Launch, finetune_tracebacks, launch_training, verified_steps

FAULT = "SIGTERM or SIGINT to one process or to the group, accelerate launch and torchrun"
PROMISE = (
    "all ranks stop at the same step and save; run.json says 143 or 130; no process is left; "
    "no traceback of ours"
)
TO_THE_END = ["optim.steps=400", "run.save_every=100", "run.eval_every=400"]


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def send(launch: Launch, target: str, number: signal.Signals) -> None:
    """Send a signal to "launcher", "group" (as a terminal does), "rank 0" or "rank 1"."""
    if target == "group":
        os.killpg(launch.process.pid, number)
    elif target == "launcher":
        os.kill(launch.process.pid, number)
    else:
        os.kill(launch.rank_process_ids()[int(target[-1])], number)


def check_stopped(launch: Launch, codes: set[int]) -> None:
    """The run has stopped, saved one step, and said so once."""
    assert launch.read_record()["status"] in {f"stopped ({code})" for code in codes}
    (step,) = launch.checkpoint_steps()
    assert verified_steps(launch.out) == [step]
    assert launch.text.count(f"stopped at step {step} of") == 1, launch.text
    assert "no sign of life" not in launch.text
    assert not finetune_tracebacks(launch.text)


def cells() -> list[Any]:
    """Every signal to every process; one cell for each number of processes is quick."""
    found = []
    for kind in ("accelerate", "torchrun"):
        for count in (1, 2):
            targets = ["launcher", "group", *(f"rank {rank}" for rank in range(count))]
            for target in targets:
                for number in (signal.SIGTERM, signal.SIGINT):
                    cell = (kind, count, target, number)
                    quick = cell == ("accelerate", 2, "rank 1", signal.SIGTERM)
                    marks = () if quick else (pytest.mark.faults,)
                    name = f"{kind}-{count}-{target.replace(' ', '')}-{number.name}"
                    found.append(pytest.param(*cell, marks=marks, id=name))
    return found


@pytest.mark.parametrize("kind, count, target, number", cells())
def test_a_signal_stops_every_rank_at_the_same_step(
    kind: str, count: int, target: str, number: signal.Signals, tmp_path: Path, fault: Any
) -> None:
    with launch_training(tmp_path, launcher=kind, num_processes=count) as launch:
        launch.wait_for_steps()
        assert len(launch.rank_process_ids()) == count
        send(launch, target, number)
        launch.wait_for_end()
        codes = {128 + number}
        if (kind, count, target) == ("accelerate", 1, "launcher"):
            codes = {128 + signal.SIGTERM}  # it ends without a word to its worker
        check_stopped(launch, codes)
    fault(FAULT, PROMISE)


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_scheduler_signals_every_process(
    number: signal.Signals, tmp_path: Path, fault: Any
) -> None:
    """Slurm sends it to torchrun, which passes it on, to its workers and to theirs."""
    handled = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    options = ("--standalone", "--nproc_per_node", "2", "--signals_to_handle", handled)
    with launch_training(
        tmp_path, "data.keep=none", launcher="torchrun", launcher_options=options
    ) as launch:
        launch.wait_for_steps()
        everyone = launch.process_ids()
        assert len(everyone) > 3, "torchrun, two ranks, and workers that decode"
        for each in (signal.SIGCONT, number):
            for pid in everyone:
                os.kill(pid, each)
        launch.wait_for_end()
        check_stopped(launch, {128 + number})
    fault(
        "SIGCONT, then SIGTERM, SIGHUP or SIGUSR1 to every process of a torchrun, as by Slurm",
        "all ranks stop at the same step and save: what torchrun passes on is no second signal",
    )


@pytest.mark.faults
def test_the_terminal_is_closed(tmp_path: Path, fault: Any) -> None:
    """From then on whatever is said is an error, and the run says much."""
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    child, terminal = pty.fork()
    if child == 0:
        words = ["train", str(recipe), "run.eval_every=1", "--out", str(out)]
        os.execv(sys.executable, [sys.executable, "-m", "finetune", *words])
    try:
        said = b""
        while b"step 5: val" not in said:
            said += os.read(terminal, 1 << 16)  # an error if it ends before
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert json.loads((out / "run.json").read_text())["status"] == "stopped (129)"
    assert verified_steps(out)
    fault("the terminal is closed", "the run saves its state; run.json says 129")


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["accelerate", "torchrun"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_launcher_is_killed(kind: str, count: int, tmp_path: Path, fault: Any) -> None:
    with launch_training(
        tmp_path, *TO_THE_END, launcher=kind, num_processes=count, name="whole"
    ) as whole:
        whole.wait_for_end()
        assert whole.process.returncode == 0, whole.text
    with launch_training(tmp_path, *TO_THE_END, launcher=kind, num_processes=count) as launch:
        launch.wait_for_steps()
        send(launch, "launcher", signal.SIGKILL)
        seconds = launch.wait_for_end(timeout_seconds=30)
        check_stopped(launch, {143})
    with launch_training(
        tmp_path, *TO_THE_END, "--resume", launcher=kind, num_processes=count
    ) as again:
        again.wait_for_end()
        assert again.process.returncode == 0, again.text
    assert weights(again.out) == weights(whole.out)
    assert losses(again.out) == losses(whole.out)
    fault(
        "SIGKILL to the launcher",
        "its workers notice, save and end within 10 s; resuming ends in the same weights",
        f"{seconds:.1f} s ({kind}, {count})",
    )
    assert seconds < 10 * slowness()


def slowness() -> float:
    """Factor over the time on an idle machine: processes waiting for each core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
    ids=["SIGTERM-SIGINT", "SIGINT-SIGTERM"],
)
@pytest.mark.faults
def test_a_second_signal_ends_at_once(
    numbers: tuple[signal.Signals, ...], tmp_path: Path, fault: Any
) -> None:
    with launch_training(tmp_path, launcher="python", num_processes=1) as launch:
        launch.wait_for_steps()
        os.kill(launch.process.pid, signal.SIGSTOP)  # so that both are there in the same step
        for number in numbers:
            os.kill(launch.process.pid, number)
        os.kill(launch.process.pid, signal.SIGCONT)
        launch.wait_for_end()
        assert launch.process.returncode in (130, 143)
        assert launch.read_record()["status"] == "running"
        assert not launch.checkpoint_steps()
        assert not finetune_tracebacks(launch.text)
    with launch_training(
        tmp_path, "optim.steps=10", "--resume", launcher="python", num_processes=1
    ) as again:
        again.wait_for_end()
        assert again.process.returncode == 0, again.text
    fault("a second signal", "ends the process at once, without saving")


@pytest.mark.faults
def test_a_signal_while_nothing_is_trained_yet(tmp_path: Path, fault: Any) -> None:
    with launch_training(tmp_path, launcher="accelerate", num_processes=2) as launch:
        launch.wait_until(lambda: (launch.out / "run.json").exists(), "run.json")
        send(launch, "rank 1", signal.SIGTERM)
        launch.wait_for_end()
        assert launch.read_record()["status"] == "stopped (143)"
        assert "no sign of life" not in launch.text
        assert not finetune_tracebacks(launch.text)
    fault("SIGTERM before the first step", "the run stops at once, and run.json says 143")
