"""Real launches for the tests of faults: started, watched, and never left behind."""

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

from recipe_texts import tiny_text

REPOSITORY = Path(__file__).resolve().parents[1]
PATIENCE = 240.0  # seconds for what takes a few on an idle machine
LAUNCHERS = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}

RECIPE = tiny_text(
    "train: resize | random_crop(padding=1), eval: resize, batch_size: 32",
    optim="name: adamw, lr: 1e-3, steps: 100000, warmup_steps: 0, ema_decay: 0.9",
    run="precision: fp32, log_every: 1, eval_every: 100000, test: false",
    size=8,
    width=16,
)


@dataclass
class Launch:
    """A launch under way, its output in a file.

    Attributes:
        process: the launcher, or the program itself where there is none.
        out: the run directory.
    """

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def record(self) -> dict[str, Any]:
        path = self.out / "run.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def steps(self) -> list[int]:
        """The steps of the published checkpoints."""
        names = (self.out / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in names)

    def tree(self) -> list[int]:
        """The processes that this launch has started and that run, whoever their parent is."""
        return [pid for pid in processes() if str(self.out) in command_of(pid)]

    def ranks(self) -> list[int]:
        """The process of each rank, in order."""
        found = {}
        for pid in self.tree():
            variables, command = environment_of(pid), command_of(pid)
            alone = not any(module in command for module in LAUNCHERS.values())
            # a data worker is a fork of its rank: its parent has the same rank
            parent = environment_of(parent_of(pid)).get("RANK")
            if variables.get("RANK", parent) != parent or (alone and parent is None):
                found[int(variables.get("RANK", 0))] = pid
        return [found[rank] for rank in sorted(found)]

    def wait_until(self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
        until = time.monotonic() + seconds
        while not holds():
            ended = self.process.poll() is not None and not self.tree()
            assert not (ended and not holds()), f"{what}: the launch ended first:\n{self.text}"
            assert time.monotonic() < until, f"{what}: not within {seconds:g} s:\n{self.text}"
            time.sleep(0.05)

    def wait_for_steps(self, steps: int = 5) -> None:
        """Wait until training has logged that many steps."""
        path = self.out / "metrics.jsonl"
        self.wait_until(
            lambda: path.exists() and path.read_text().count('"train"') >= steps, f"{steps} steps"
        )

    def wait_for_end(self, seconds: float = PATIENCE) -> float:
        """Wait until none of the launch's processes is left. Returns: the seconds it took."""
        started = time.monotonic()
        while self.process.poll() is None or self.tree():
            left = {pid: command_of(pid) for pid in self.tree()}
            assert time.monotonic() - started < seconds, f"still there: {left}\n{self.text}"
            time.sleep(0.05)
        return time.monotonic() - started


def processes() -> list[int]:
    """The numbers of all processes that are not zombies."""
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in found if state_of(pid) not in ("", "Z", "X")]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def state_of(pid: int) -> str:
    """R, S, D, T, Z, … or nothing where there is no such process."""
    return _read(pid, "stat").rpartition(")")[2].strip()[:1]


def parent_of(pid: int) -> int:
    words = _read(pid, "stat").rpartition(")")[2].split()
    return int(words[1]) if words else 0


def command_of(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    pairs = (item.partition("=") for item in _read(pid, "environ").split("\0") if item)
    return {name: value for name, _, value in pairs}


def launcher(kind: str, processes: int) -> list[str]:
    """The words before the program: "accelerate", "torchrun" or "python"."""
    if kind == "python":
        return [sys.executable]
    if kind == "torchrun":
        words = [LAUNCHERS[kind], "--standalone", "--nproc_per_node", str(processes)]
    else:
        words = [LAUNCHERS[kind], "--num_processes", str(processes)]
        if processes > 1:
            words += ["--multi_gpu", "--main_process_port", "0"]
    return [sys.executable, "-m", *words]


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Processes started meanwhile heed SIGINT; a suite in the background does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def launched(
    folder: Path,
    *overrides: str,
    kind: str = "accelerate",
    processes: int = 2,
    recipe: str = RECIPE,
    before: tuple[str, ...] = (),
    options: tuple[str, ...] | None = None,
    environment: dict[str, str] | None = None,
    out: Path | None = None,
    name: str = "run",
    program: tuple[str, ...] = ("-m", "finetune"),
) -> Iterator[Launch]:
    """Train in processes of their own; whatever is left of them at the end is killed.

    Args:
        folder: for the recipe and the output.
        overrides: of the recipe, and options.
        kind, processes: as for `launcher`.
        before: words before the command line, such as `ip netns exec NAME`.
        options: of the launcher, instead of those for one machine.
        environment: more variables.
        out: the run directory; `folder / name` by default.
        name: of the files of this launch.
        program: another one that ends in the command line, to make something fail in it.
    """
    path = folder / "recipe.yaml"
    path.write_text(recipe)
    out = out or folder / name
    log = folder / f"{name}.log"
    words = launcher(kind, processes)
    if options is not None:
        words = [*words[: words.index(LAUNCHERS[kind]) + 1], *options]
    command = [*before, *words, *program, "train", str(path), *overrides]
    command += ["--out", str(out)]
    variables = {"ACCELERATE_USE_CPU": "true", "PYTHONUNBUFFERED": "1", **(environment or {})}
    with started(command, variables, out=out, log=log) as launch:
        yield launch


@contextlib.contextmanager
def started(
    command: Sequence[str], variables: dict[str, str], *, out: Path, log: Path
) -> Iterator[Launch]:
    """A command that trains into `out` and prints into `log`; its processes end with the block."""
    with log.open("ab") as stream, heeding_interrupts():
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # its own group, as a terminal would give it
        )
    launch = Launch(process, out, log)
    try:
        yield launch
    finally:
        for pid in {process.pid, *launch.tree()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def own_tracebacks(text: str) -> list[str]:
    """Tracebacks that are not the launcher's report of a worker that has failed."""
    blocks = re.split(r"(?=Traceback \(most recent call last\))", text)[1:]
    launchers = ("torch/distributed/run.py", "accelerate/commands/launch.py")
    return [block for block in blocks if not any(name in block for name in launchers)]


def intact(out: Path) -> list[int]:
    """The steps of the checkpoints that verify."""
    from finetune.run.directory import RunDir

    run = RunDir(out)
    return [step for step in run.steps() if run.verify(step) is None]
