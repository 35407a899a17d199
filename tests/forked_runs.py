"""Tiny training runs in forked child processes that a test may kill at any point.

Children are forked from this process, which has imported torch already.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from recipe_texts import tiny_recipe_text
from refusals import EXIT_CODES
from tqdm import tqdm

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.files import write_atomically
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run import checkpoint
from finetune.run.directory import RunDir
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

TINY_RECIPE = tiny_recipe_text(
    "train: 'resize | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.05) | random_crop(padding=2)', "
    "eval: resize, batch_size: 64",
    optim="name: adamw, lr: 3e-3, steps: 12, warmup_steps: 2, weight_decay: 0.05, clip_norm: 1.0",
    run="precision: fp32, log_every: 1, eval_every: 4",
    depth=2,
)

# Everything that draws random numbers or has state of its own.
FULL_OVERRIDES = [
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "model.drop_path=0.1",
    "optim.ema_decay=0.9",
    "data.micro_batch=16",
    "run.save_every=3",
]

# The same in half a second: eight steps, a checkpoint every two steps.
SMALL_OVERRIDES = [
    *FULL_OVERRIDES,
    *("data.num_train=128", "data.batch_size=16", "data.micro_batch=8", "run.test=false"),
    *("optim.steps=8", "run.save_every=2", "run.eval_every=4"),
]


def tiny_recipe(*overrides: str) -> Recipe:
    """Return the recipe of a run that takes a few seconds."""
    return parse_recipe(TINY_RECIPE, overrides=overrides)


def read_train_losses(run: Path) -> list[float]:
    """Return the training losses that a run has logged."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def read_weights(run: Path) -> bytes:
    """Return the bytes of the final weights of a run."""
    return (run / "model" / "model.safetensors").read_bytes()


def temporary_files(run: Path) -> list[str]:
    """Return the hidden files that an interrupted write leaves in a run directory."""
    return sorted(str(path.relative_to(run)) for path in run.rglob(".*") if path.name != ".lock")


def run_file_hashes(run: Path) -> dict[str, str]:
    """Return the sha256 of every file of a run except its lock."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def disable_report_and_plots(patch: pytest.MonkeyPatch) -> None:
    """Replace report and plots, most of the time of a tiny run, by small files."""
    disable_plots(patch)

    def page(run: Any, path: Path, *_: Any) -> Path:
        write_atomically(path, "page")
        return path

    patch.setattr("finetune.report.page._write_run_page", page)


def disable_plots(patch: pytest.MonkeyPatch) -> None:
    """Replace only the plots next to the weights by small files."""

    def draw(folder: Path, *_: Any) -> list[str]:
        for name in ("curves.png", "confusion.png", "reliability.png"):
            write_atomically(folder / name, b"picture")
        return []

    patch.setattr("finetune.publish.artifacts._draw_plots", draw)


# Children -----------------------------------------------------------------------------------------


class ChildResult(NamedTuple):
    """How a child ended: exit code or minus its signal, standard error, error code."""

    exit_code: int
    output: str
    error_code: str = ""


def fork_process(work: Callable[[], object], stderr: int) -> int:
    """Run `work` in a forked process that exits after it. Returns: its process id."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.dup2(stderr, 2)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        # Forked processes share the lock of the bars; a killed process would never release it.
        tqdm.set_lock(threading.RLock())
        work()
        code = 0
    except FinetuneError as error:
        os.write(2, f"{error}\nerror code: {error.code}\n".encode())
        code = error.exit_code
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def run_in_child(work: Callable[[], object]) -> ChildResult:
    """Run in a forked process; exit code 99 stands for any error that is no FinetuneError."""
    with tempfile.TemporaryFile() as stream:
        code = os.waitstatus_to_exitcode(os.waitpid(fork_process(work, stream.fileno()), 0)[1])
        stream.seek(0)
        output = stream.read().decode(errors="replace")
    message, _, error_code = output.removesuffix("\n").rpartition("\nerror code: ")
    return ChildResult(code, message, error_code) if message else ChildResult(code, output)


def check_child_error(result: ChildResult, code: str, *named: object) -> None:
    """Check that a child ended with a FinetuneError.

    Args:
        result: how the child ended.
        code: the error code; its family sets the exit code.
        named: texts the message must contain.
    """
    assert result.error_code == code, result.output
    assert result.exit_code == EXIT_CODES[code.partition(".")[0]], result.output
    assert "Traceback" not in result.output
    for value in (*named, "; "):  # "; " separates cause and fix
        assert str(value) in result.output, f"{value} is not named in: {result.output}"


def check_child_success(result: ChildResult, *named: str) -> None:
    """Check that a child succeeded and that its output contains these texts."""
    assert result.exit_code == 0, result.output
    for value in named:
        assert value in result.output, result.output


def child_exit_code(work: Callable[[], object]) -> int:
    """Run in a forked process. Returns: its exit code, or minus the signal that ended it."""
    return run_in_child(work).exit_code


def run_command_in_child(*arguments: str | Path) -> ChildResult:
    """Run a command of `finetune` in a child."""

    def work() -> None:
        subcommand, *rest = map(str, arguments)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exit_code = main([subcommand, "--json", *rest])
        answer = json.loads(out.getvalue() or "null")
        if exit_code and isinstance(answer, dict):
            os.write(2, f"error code: {answer['code']}\n".encode())
        raise SystemExit(exit_code)

    return run_in_child(work)


# Kills --------------------------------------------------------------------------------------------

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class KillPoints:
    """Counts steps and file operations of this process, and kills it before one of them.

    Kill points are: a training step; each open for writing, sync, rename, removal, mkdir and chmod;
    and the middle of each tensor file.

    Args:
        kill_at: the kill point to kill at, counted from 1; 0 for none.
        kill: how to end the process; SIGKILL by default.
    """

    def __init__(self, kill_at: int = 0, kill: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.kill_at = kill_at
        self.kill = kill or (lambda: os.kill(os.getpid(), signal.SIGKILL))

    def install(self) -> KillPoints:
        """Start to count; the hooks stay until the process ends."""
        sys.addaudithook(self._audit_hook)
        for owner, name in ((os, "fsync"), (TrainerState, "train_step")):
            setattr(owner, name, self._count_call(getattr(owner, name)))
        checkpoint.save_file = self._count_write(checkpoint.save_file)
        return self

    def count_operation(self, before_kill: Callable[[], object] = lambda: None) -> None:
        """Count one kill point; at the chosen one, call `before_kill` and kill the process."""
        self.count += 1
        if self.count == self.kill_at:
            before_kill()
            self.kill()

    def _audit_hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and args[2] & _WRITING):
            self.count_operation()

    def _count_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count_operation()
            return function(*args, **kwargs)

        return counted

    def _count_write(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensors: Any, path: Path) -> None:
            save(tensors, path)
            self.count_operation(lambda: os.truncate(path, path.stat().st_size // 2))

        return counted


def train_until_kill_point(kill_at: int, recipe: Recipe, out: Path) -> None:
    """Train, and end by SIGKILL at kill point number `kill_at` from now on."""
    KillPoints(kill_at).install()
    train(recipe, out, resume=True)


def train_until_killed(step: int, recipe: Recipe, out: Path, **options: Any) -> None:
    """Train in a child that ends by SIGKILL before its step number `step` from now on.

    Pending checkpoints are written first. `options` are those of `train`.
    """

    def work() -> None:
        take_step = KillPoints(step)._count_call(TrainerState.train_step)

        def step_after_save(trainer: TrainerState, *arguments: Any) -> None:
            trainer.checkpoint_writer.wait()
            take_step(trainer, *arguments)

        TrainerState.train_step = step_after_save  # type: ignore[assignment, method-assign]
        train(recipe, out, resume=True, **options)

    assert child_exit_code(work) == -signal.SIGKILL


def train_killed_and_resumed(step: int, recipe: Recipe, out: Path) -> dict[str, Any]:
    """Kill a run before its step number `step`, and resume it. Returns: its results."""
    train_until_killed(step, recipe, out)
    return train(recipe, out, resume=True)


def check_same_run(out: Path, expected: Path) -> None:
    """Check that two runs have the same training losses and the same published weights."""
    assert read_train_losses(out) == read_train_losses(expected)
    assert read_weights(out) == read_weights(expected)


def count_kill_points(recipe: Recipe, out: Path) -> int:
    """Train in a child to the end. Returns: the number of kill points."""
    path = out.with_name(f"{out.name}.moments")

    def work() -> None:
        kill_points = KillPoints().install()
        train(recipe, out)
        path.write_text(str(kill_points.count))

    result = run_in_child(work)
    assert result.exit_code == 0, result.output
    return int(path.read_text())


# Several processes --------------------------------------------------------------------------------


def start_ranks(works: Sequence[Callable[[], object]], stderr: int) -> list[int]:
    """Fork a process for each rank of a launch over gloo, in one process group."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    ranks: list[int] = []
    for rank, work in enumerate(works):

        def run_rank(rank: int = rank, work: Callable[[], object] = work) -> None:
            from accelerate.state import AcceleratorState

            os.setpgid(0, ranks[0] if ranks else 0)
            os.environ.update(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(len(works)),
                    "LOCAL_WORLD_SIZE": str(len(works)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "ACCELERATE_USE_CPU": "true",
                }
            )
            AcceleratorState._reset_state(reset_partial_state=True)
            work()

        ranks.append(fork_process(run_rank, stderr))
        os.setpgid(ranks[-1], ranks[0])
    return ranks


def wait_for_ranks(
    ranks: list[int], *, timeout_seconds: float = 120, grace_seconds: float = 20
) -> list[int]:
    """Wait as a launcher does: when a rank fails, send SIGTERM to the others, then SIGKILL.

    Returns: the exit codes, or minus the signals, in rank order.
    """
    codes: dict[int, int] = {}
    deadline, terminated = time.monotonic() + timeout_seconds, False
    try:
        while len(codes) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in codes and (waited := os.waitpid(rank, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(waited[1])
            if any(codes.values()) and not terminated:
                terminated, deadline = True, time.monotonic() + grace_seconds
                for rank in set(ranks) - codes.keys():
                    os.kill(rank, signal.SIGTERM)
            time.sleep(0.01)
    finally:
        for rank in set(ranks) - codes.keys():
            os.kill(rank, signal.SIGKILL)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    return [codes[rank] for rank in ranks]


def run_ranks(works: Sequence[Callable[[], object]]) -> tuple[list[int], str]:
    """Run one function on each rank. Returns: the exit codes, and standard error of all ranks."""
    with tempfile.TemporaryFile() as stream:
        codes = wait_for_ranks(start_ranks(works, stream.fileno()))
        stream.seek(0)
        return codes, stream.read().decode(errors="replace")


# Copies -------------------------------------------------------------------------------------------


def copy_run(run: Path, target: Path) -> Path:
    """Copy a run directory."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns(".lock"))
    return target


def check_all_checkpoints(run: Path) -> list[int]:
    """Check that every checkpoint is intact. Returns: their steps."""
    run_dir = RunDir(run)
    assert [run_dir.verify_checkpoint(step) for step in run_dir.checkpoint_steps()] == [None] * len(
        run_dir.checkpoint_steps()
    )
    return run_dir.checkpoint_steps()
