"""A signal to any process of a launch: every rank stops at the same step and the run is saved."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_runs import read_train_losses, read_weights
from launches import RECIPE, Launch, finetune_tracebacks, launch_training, verified_steps

FAULT = "SIGTERM or SIGINT to one process or to the group, accelerate launch and torchrun"
PROMISE = (
    "all ranks stop at the same step and save; run.json says 143 or 130; no process is left; "
    "no traceback of finetune"
)
SETTINGS = ["optim.steps=400", "run.save_every=100", "run.eval_every=400"]


def send_signal(launch: Launch, target: str, signal_number: signal.Signals) -> None:
    """Send a signal to "launcher", "group" (as a terminal does), "rank 0" or "rank 1"."""
    if target == "group":
        os.killpg(launch.process.pid, signal_number)
    elif target == "launcher":
        os.kill(launch.process.pid, signal_number)
    else:
        os.kill(launch.rank_process_ids()[int(target[-1])], signal_number)


def check_stopped(launch: Launch, codes: set[int]) -> None:
    """Check that the run stopped, saved one checkpoint, and reported it once."""
    assert launch.read_record()["status"] in {f"stopped ({code})" for code in codes}
    (step,) = launch.checkpoint_steps()
    assert verified_steps(launch.out) == [step]
    assert launch.text.count(f"stopped at step {step} of") == 1, launch.text
    assert "no sign of life" not in launch.text
    assert not finetune_tracebacks(launch.text)


def signal_cases() -> list[Any]:
    """Return all combinations of launcher, processes, target and signal."""
    cases = []
    for launcher in ("accelerate", "torchrun"):
        for num_processes in (1, 2):
            targets = ["launcher", "group", *(f"rank {rank}" for rank in range(num_processes))]
            for target in targets:
                for signal_number in (signal.SIGTERM, signal.SIGINT):
                    case = (launcher, num_processes, target, signal_number)
                    name = (
                        f"{launcher}-{num_processes}-{target.replace(' ', '')}-{signal_number.name}"
                    )
                    cases.append(pytest.param(*case, id=name))
    return cases


@pytest.mark.parametrize("launcher, num_processes, target, signal_number", signal_cases())
def test_a_signal_stops_every_rank_at_the_same_step(
    launcher: str,
    num_processes: int,
    target: str,
    signal_number: signal.Signals,
    tmp_path: Path,
    fault: Any,
) -> None:
    with launch_training(tmp_path, launcher=launcher, num_processes=num_processes) as launch:
        launch.wait_for_steps()
        assert len(launch.rank_process_ids()) == num_processes
        send_signal(launch, target, signal_number)
        launch.wait_for_end()
        codes = {128 + signal_number}
        if (launcher, num_processes, target) == ("accelerate", 1, "launcher"):
            codes = {128 + signal.SIGTERM}  # the launcher ends without a signal to its worker
        check_stopped(launch, codes)
    fault(FAULT, PROMISE)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_all_processes_by_a_scheduler(
    signal_number: signal.Signals, tmp_path: Path, fault: Any
) -> None:
    """Slurm signals torchrun, which forwards the signal, the ranks and their data workers."""
    handled = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    options = ("--standalone", "--nproc_per_node", "2", "--signals_to_handle", handled)
    with launch_training(
        tmp_path, "data.keep=none", launcher="torchrun", launcher_options=options
    ) as launch:
        launch.wait_for_steps()
        process_ids = launch.process_ids()
        assert len(process_ids) > 3, "torchrun, two ranks, and workers that decode"
        for number in (signal.SIGCONT, signal_number):
            for pid in process_ids:
                os.kill(pid, number)
        launch.wait_for_end()
        check_stopped(launch, {128 + signal_number})
    fault(
        "SIGCONT, then SIGTERM, SIGHUP or SIGUSR1 to every process of a torchrun, as by Slurm",
        "all ranks stop at the same step and save: a signal that torchrun forwards counts once",
    )


def test_a_closed_terminal_stops_the_run(tmp_path: Path, fault: Any) -> None:
    """After that every write to the terminal fails, and the run logs often."""
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    child, terminal = pty.fork()
    if child == 0:
        arguments = ["train", str(recipe), "run.eval_every=1", "--out", str(out)]
        os.execv(sys.executable, [sys.executable, "-m", "finetune", *arguments])
    try:
        output = b""
        while b"step 5: val" not in output:
            output += os.read(terminal, 1 << 16)  # fails if the run has ended
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


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_workers_stop_when_the_launcher_is_killed(
    launcher: str, num_processes: int, tmp_path: Path, fault: Any
) -> None:
    with launch_training(
        tmp_path, *SETTINGS, launcher=launcher, num_processes=num_processes, name="whole"
    ) as reference:
        reference.wait_for_end()
        assert reference.process.returncode == 0, reference.text
    with launch_training(
        tmp_path, *SETTINGS, launcher=launcher, num_processes=num_processes
    ) as launch:
        launch.wait_for_steps()
        send_signal(launch, "launcher", signal.SIGKILL)
        seconds = launch.wait_for_end(timeout_seconds=30)
        check_stopped(launch, {143})
    with launch_training(
        tmp_path, *SETTINGS, "--resume", launcher=launcher, num_processes=num_processes
    ) as resumed:
        resumed.wait_for_end()
        assert resumed.process.returncode == 0, resumed.text
    assert read_weights(resumed.out) == read_weights(reference.out)
    assert read_train_losses(resumed.out) == read_train_losses(reference.out)
    fault(
        "SIGKILL to the launcher",
        "its workers notice, save and end within 10 s; --resume gives the same weights",
        f"{seconds:.1f} s ({launcher}, {num_processes})",
    )
    assert seconds < 10 * load_factor()


def load_factor() -> float:
    """Return the slowdown compared to an idle machine: waiting processes per core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
    ids=["SIGTERM-SIGINT", "SIGINT-SIGTERM"],
)
def test_a_second_signal_ends_the_process_without_saving(
    signals: tuple[signal.Signals, ...], tmp_path: Path, fault: Any
) -> None:
    with launch_training(tmp_path, launcher="python", num_processes=1) as launch:
        launch.wait_for_steps()
        os.kill(launch.process.pid, signal.SIGSTOP)  # so that both signals arrive in the same step
        for signal_number in signals:
            os.kill(launch.process.pid, signal_number)
        os.kill(launch.process.pid, signal.SIGCONT)
        launch.wait_for_end()
        assert launch.process.returncode in (130, 143)
        assert launch.read_record()["status"] == "running"
        assert not launch.checkpoint_steps()
        assert not finetune_tracebacks(launch.text)
    with launch_training(
        tmp_path, "optim.steps=10", "--resume", launcher="python", num_processes=1
    ) as resumed:
        resumed.wait_for_end()
        assert resumed.process.returncode == 0, resumed.text
    fault("a second signal", "ends the process immediately, without saving")


def test_a_signal_before_the_first_step(tmp_path: Path, fault: Any) -> None:
    with launch_training(tmp_path, launcher="accelerate", num_processes=2) as launch:
        launch.wait_until(lambda: (launch.out / "run.json").exists(), "run.json")
        send_signal(launch, "rank 1", signal.SIGTERM)
        launch.wait_for_end()
        assert launch.read_record()["status"] == "stopped (143)"
        assert "no sign of life" not in launch.text
        assert not finetune_tracebacks(launch.text)
    fault("SIGTERM before the first step", "the run stops immediately; run.json says 143")
