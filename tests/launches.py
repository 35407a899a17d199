"""Start real training launches for the fault tests, watch them, and always end them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_texts import tiny_recipe_text

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 240.0  # what takes a few seconds on an idle machine
LAUNCHERS = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}

RECIPE = tiny_recipe_text(
    "train: resize | random_crop(padding=1), eval: resize, batch_size: 32",
    optim="name: adamw, lr: 1e-3, steps: 100000, warmup_steps: 0, ema_decay: 0.9",
    run="precision: fp32, log_every: 1, eval_every: 100000, test: false",
    size=8,
    width=16,
)


@dataclass
class Launch:
    """A running launch; its output goes to a file.

    Attributes:
        process: the launcher, or the training process if there is no launcher.
        out: the run directory.
        log: the file with standard output and standard error.
    """

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def read_record(self) -> dict[str, Any]:
        path = self.out / "run.json"
        record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return record

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the published checkpoints."""
        names = (self.out / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in names)

    def process_ids(self) -> list[int]:
        """Return the ids of all running processes of this launch, whatever their parent."""
        return [pid for pid in running_process_ids() if str(self.out) in process_command(pid)]

    def rank_process_ids(self) -> list[int]:
        """Return the process id of each rank, in order."""
        pid_by_rank = {}
        for pid in self.process_ids():
            variables, command = process_environment(pid), process_command(pid)
            is_python = not any(module in command for module in LAUNCHERS.values())
            # a data worker is a fork of its rank: its parent has the same rank
            parent = process_environment(parent_process_id(pid)).get("RANK")
            if variables.get("RANK", parent) != parent or (is_python and parent is None):
                pid_by_rank[int(variables.get("RANK", 0))] = pid
        return [pid_by_rank[rank] for rank in sorted(pid_by_rank)]

    def wait_until(
        self,
        condition: Callable[[], Any],
        description: str,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            ended = self.process.poll() is not None and not self.process_ids()
            assert not (ended and not condition()), (
                f"{description}: the launch ended first:\n{self.text}"
            )
            assert time.monotonic() < deadline, (
                f"{description}: not within {timeout_seconds:g} s:\n{self.text}"
            )
            time.sleep(0.05)

    def wait_for_steps(self, steps: int = 5) -> None:
        """Wait until training has logged this number of steps."""
        path = self.out / "metrics.jsonl"
        self.wait_until(
            lambda: path.exists() and path.read_text().count('"train"') >= steps, f"{steps} steps"
        )

    def wait_for_end(self, timeout_seconds: float = TIMEOUT_SECONDS) -> float:
        """Wait until every process of the launch has ended. Returns: the seconds it took."""
        started = time.monotonic()
        while self.process.poll() is None or self.process_ids():
            running = {pid: process_command(pid) for pid in self.process_ids()}
            assert time.monotonic() - started < timeout_seconds, (
                f"still running: {running}\n{self.text}"
            )
            time.sleep(0.05)
        return time.monotonic() - started


def running_process_ids() -> list[int]:
    """Return the ids of all processes except zombies."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if process_state(pid) not in ("", "Z", "X")]


def read_proc_file(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # the process has ended
        return ""


def process_state(pid: int) -> str:
    """Return R, S, D, T, Z, …, or "" if the process does not exist."""
    return read_proc_file(pid, "stat").rpartition(")")[2].strip()[:1]


def parent_process_id(pid: int) -> int:
    words = read_proc_file(pid, "stat").rpartition(")")[2].split()
    return int(words[1]) if words else 0


def process_command(pid: int) -> str:
    return read_proc_file(pid, "cmdline").replace("\0", " ")


def process_environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    pairs = (item.partition("=") for item in read_proc_file(pid, "environ").split("\0") if item)
    return {name: value for name, _, value in pairs}


def launcher_command(launcher: str, num_processes: int) -> list[str]:
    """Return the command before the program; launcher: "accelerate", "torchrun" or "python"."""
    if launcher == "python":
        return [sys.executable]
    if launcher == "torchrun":
        arguments = [LAUNCHERS[launcher], "--standalone", "--nproc_per_node", str(num_processes)]
    else:
        arguments = [LAUNCHERS[launcher], "--num_processes", str(num_processes)]
        if num_processes > 1:
            arguments += ["--multi_gpu", "--main_process_port", "0"]
    return [sys.executable, "-m", *arguments]


@contextlib.contextmanager
def default_sigint_handler() -> Iterator[None]:
    """Let child processes receive SIGINT, which a suite in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def launch_training(
    folder: Path,
    *overrides: str,
    launcher: str = "accelerate",
    num_processes: int = 2,
    recipe: str = RECIPE,
    command_prefix: tuple[str, ...] = (),
    launcher_options: tuple[str, ...] | None = None,
    extra_environment: dict[str, str] | None = None,
    out: Path | None = None,
    name: str = "run",
    program: tuple[str, ...] = ("-m", "finetune"),
) -> Iterator[Launch]:
    """Train in a launch of its own; kill all its processes at the end.

    Args:
        folder: where the recipe and the output go.
        overrides: recipe overrides, and options of `train`.
        launcher, num_processes: see `launcher_command`.
        recipe: the text of the recipe.
        command_prefix: put before the command, such as `ip netns exec NAME`.
        launcher_options: replace the launcher options for one machine.
        extra_environment: added to the environment.
        out: the run directory; `folder / name` by default.
        name: of the log file, and of the run directory.
        program: run instead of `-m finetune`, for example to inject a failure.
    """
    path = folder / "recipe.yaml"
    path.write_text(recipe)
    out = out or folder / name
    log = folder / f"{name}.log"
    launcher_arguments = launcher_command(launcher, num_processes)
    if launcher_options is not None:
        launcher_arguments = [
            *launcher_arguments[: launcher_arguments.index(LAUNCHERS[launcher]) + 1],
            *launcher_options,
        ]
    command = [*command_prefix, *launcher_arguments, *program, "train", str(path), *overrides]
    command += ["--out", str(out)]
    variables = {"ACCELERATE_USE_CPU": "true", "PYTHONUNBUFFERED": "1", **(extra_environment or {})}
    with start_process(command, variables, out=out, log=log) as launch:
        yield launch


@contextlib.contextmanager
def start_process(
    command: Sequence[str], variables: dict[str, str], *, out: Path, log: Path
) -> Iterator[Launch]:
    """Start a command that trains into `out` and prints into `log`; end its processes on exit."""
    with log.open("ab") as stream, default_sigint_handler():
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # its own process group, as in a terminal
        )
    launch = Launch(process, out, log)
    try:
        yield launch
    finally:
        for pid in {process.pid, *launch.process_ids()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def finetune_tracebacks(text: str) -> list[str]:
    """Return the tracebacks in a log, except the launcher's own report of a failed worker."""
    blocks = re.split(r"(?=Traceback \(most recent call last\))", text)[1:]
    launchers = ("torch/distributed/run.py", "accelerate/commands/launch.py")
    return [block for block in blocks if not any(name in block for name in launchers)]


def verified_steps(out: Path) -> list[int]:
    """Return the steps of the checkpoints that pass verification."""
    from finetune.run.directory import RunDir

    run = RunDir(out)
    return [step for step in run.checkpoint_steps() if run.verify_checkpoint(step) is None]
