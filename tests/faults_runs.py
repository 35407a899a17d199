"""Runs for the tests of faults: a tiny recipe with everything on, children that may die, and how.

Children are forked from this process, which has paid for importing torch already.
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
from recipe_texts import tiny_text
from refusals import EXIT_CODES
from tqdm import tqdm

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.files import write_atomically
from finetune.recipe.load import Recipe, parse_recipe
from finetune.run import checkpoint
from finetune.run.directory import RunDir
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

TINY = tiny_text(
    "train: 'resize | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.05) | random_crop(padding=2)', "
    "eval: resize, batch_size: 64",
    optim="name: adamw, lr: 3e-3, steps: 12, warmup_steps: 2, weight_decay: 0.05, clip_norm: 1.0",
    run="precision: fp32, log_every: 1, eval_every: 4",
    depth=2,
)

# Everything that draws random numbers or keeps a state of its own.
FULL = [
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "model.drop_path=0.1",
    "optim.ema_decay=0.9",
    "data.micro_batch=16",
    "run.save_every=3",
]

# The same in half a second: eight steps, a checkpoint after every second one.
SMALL = [
    *FULL,
    *("data.num_train=128", "data.batch_size=16", "data.micro_batch=8", "run.test=false"),
    *("optim.steps=8", "run.save_every=2", "run.eval_every=4"),
]


def tiny(*overrides: str) -> Recipe:
    """A run of a few seconds."""
    return parse_recipe(TINY, overrides=overrides)


def losses(run: Path) -> list[float]:
    """The training losses that a run has logged."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def weights(run: Path) -> bytes:
    """The published weights of a run."""
    return (run / "model" / "model.safetensors").read_bytes()


def leftovers(run: Path) -> list[str]:
    """The hidden files that an interrupted write leaves in a run directory."""
    return sorted(str(path.relative_to(run)) for path in run.rglob(".*") if path.name != ".lock")


def digest(run: Path) -> dict[str, str]:
    """The sha256 of every file of a run but its lock."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def without_pictures(patch: pytest.MonkeyPatch) -> None:
    """Leave the drawing out, which takes most of a tiny run; the files are written as ever."""
    without_plots(patch)

    def page(run: Any, path: Path, split: Any) -> Path:
        write_atomically(path, "page")
        return path

    patch.setattr("finetune.report.page._write_run", page)


def without_plots(patch: pytest.MonkeyPatch) -> None:
    """Leave out those beside the weights alone."""

    def draw(folder: Path, *_: Any) -> list[str]:
        for name in ("curves.png", "confusion.png", "reliability.png"):
            write_atomically(folder / name, b"picture")
        return []

    patch.setattr("finetune.publish.artifacts._draw", draw)


# Children -----------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """The end of a child: its exit code or minus its signal, standard error, its error's code."""

    code: int
    said: str
    error_code: str = ""


def fork(work: Callable[[], object], stderr: int) -> int:
    """Run in a forked process that never comes back. Returns: its process id."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.dup2(stderr, 2)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        # Forked processes share the lock of the bars; who is killed while holding it keeps it.
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


def in_child(work: Callable[[], object]) -> Ended:
    """Run in a forked process; 99 stands for whatever is not one of our errors."""
    with tempfile.TemporaryFile() as stream:
        code = os.waitstatus_to_exitcode(os.waitpid(fork(work, stream.fileno()), 0)[1])
        stream.seek(0)
        said = stream.read().decode(errors="replace")
    message, _, error_code = said.removesuffix("\n").rpartition("\nerror code: ")
    return Ended(code, message, error_code) if message else Ended(code, said)


def check_refused(ended: Ended, code: str, *named: object) -> None:
    """A child ended with an error of ours.

    Args:
        code: of the error; the exit code is its family's.
        named: what the message must name.
    """
    assert ended.error_code == code, ended.said
    assert ended.code == EXIT_CODES[code.partition(".")[0]], ended.said
    assert "Traceback" not in ended.said
    for name in (*named, "; "):  # a next step stands behind it
        assert str(name) in ended.said, f"{name} is not named in: {ended.said}"


def check_done(ended: Ended, *named: str) -> None:
    """A child ended well, and named these things on its way."""
    assert ended.code == 0, ended.said
    for name in named:
        assert name in ended.said, ended.said


def run_in_child(work: Callable[[], object]) -> int:
    """Run in a forked process. Returns: its exit code, or minus the signal that ended it."""
    return in_child(work).code


def command(*arguments: str | Path) -> Ended:
    """Run a command line in a child, with `finetune` left out."""

    def work() -> None:
        verb, *rest = map(str, arguments)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exit_code = main([verb, "--json", *rest])
        answer = json.loads(out.getvalue() or "null")
        if exit_code and isinstance(answer, dict):
            os.write(2, f"error code: {answer['code']}\n".encode())
        raise SystemExit(exit_code)

    return in_child(work)


# Death --------------------------------------------------------------------------------------------

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Moments:
    """Counts the steps and file operations of this process, and ends it before one of them.

    A step is one, so is each opening to write, sync, rename, removal, new folder and change of
    rights, and the middle of each file of tensors.

    Args:
        fatal: the number of the last one, counted from 1; 0 for none.
        die: how to end.
    """

    def __init__(self, fatal: int = 0, die: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.fatal = fatal
        self.die = die or (lambda: os.kill(os.getpid(), signal.SIGKILL))

    def watch(self) -> Moments:
        """Begin to count; only a process that ends soon should."""
        sys.addaudithook(self._operation)
        for place, name in ((os, "fsync"), (TrainerState, "step")):
            setattr(place, name, self._before(getattr(place, name)))
        checkpoint.save_file = self._in_the_middle(checkpoint.save_file)
        return self

    def tick(self, first: Callable[[], object] = lambda: None) -> None:
        """One more moment; what is done `first` if it is the last one."""
        self.count += 1
        if self.count == self.fatal:
            first()
            self.die()

    def _operation(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and args[2] & _WRITING):
            self.tick()

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*args, **kwargs)

        return call

    def _in_the_middle(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensors: Any, path: Path) -> None:
            save(tensors, path)
            self.tick(lambda: os.truncate(path, path.stat().st_size // 2))

        return call


def train_until(moment: int, recipe: Recipe, out: Path) -> None:
    """Train, and die by SIGKILL before the `moment`-th step or file operation from now on."""
    Moments(moment).watch()
    train(recipe, out, resume=True)


def killed_before(step: int, recipe: Recipe, out: Path) -> None:
    """Train in a child that dies by SIGKILL before it takes the `step`-th step from now on.

    What it was to save before is saved.
    """

    def work() -> None:
        take = Moments(step)._before(TrainerState.step)

        def saved_first(trainer: TrainerState, *arguments: Any) -> None:
            trainer.checkpoint_writer.wait()
            take(trainer, *arguments)

        TrainerState.step = saved_first  # type: ignore[assignment, method-assign]
        train(recipe, out, resume=True)

    assert run_in_child(work) == -signal.SIGKILL


def count_moments(recipe: Recipe, out: Path) -> int:
    """Train in a child to the end. Returns: how many moments that had."""
    place = out.with_name(f"{out.name}.moments")

    def work() -> None:
        moments = Moments().watch()
        train(recipe, out)
        place.write_text(str(moments.count))

    ended = in_child(work)
    assert ended.code == 0, ended.said
    return int(place.read_text())


# Several processes --------------------------------------------------------------------------------


def start_ranks(works: Sequence[Callable[[], object]], stderr: int) -> list[int]:
    """Fork a process for each rank of a launch over gloo, in a group of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[int] = []
    for rank, work in enumerate(works):

        def one(rank: int = rank, work: Callable[[], object] = work) -> None:
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

        ranks.append(fork(one, stderr))
        os.setpgid(ranks[-1], ranks[0])
    return ranks


def end_ranks(ranks: list[int], *, seconds: float = 120, grace: float = 20) -> list[int]:
    """Wait as a launcher does: when one rank has failed, the others are told to end, then ended.

    Returns: the exit codes, or minus the signals, in order.
    """
    codes: dict[int, int] = {}
    deadline, told = time.monotonic() + seconds, False
    try:
        while len(codes) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in codes and (found := os.waitpid(rank, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(found[1])
            if any(codes.values()) and not told:
                told, deadline = True, time.monotonic() + grace
                for rank in set(ranks) - codes.keys():
                    os.kill(rank, signal.SIGTERM)
            time.sleep(0.01)
    finally:
        for rank in set(ranks) - codes.keys():
            os.kill(rank, signal.SIGKILL)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    return [codes[rank] for rank in ranks]


def launched(works: Sequence[Callable[[], object]]) -> tuple[list[int], str]:
    """Run one function on each rank. Returns: the exit codes, and all their standard error."""
    with tempfile.TemporaryFile() as stream:
        codes = end_ranks(start_ranks(works, stream.fileno()))
        stream.seek(0)
        return codes, stream.read().decode(errors="replace")


# Copies -------------------------------------------------------------------------------------------


def copied(run: Path, to: Path) -> Path:
    """A run directory as it was, elsewhere."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns(".lock"))
    return to


def all_verified(run: Path) -> list[int]:
    """The steps of the checkpoints, each of which must be intact."""
    opened = RunDir(run)
    assert [opened.verify(step) for step in opened.steps()] == [None] * len(opened.steps())
    return opened.steps()
