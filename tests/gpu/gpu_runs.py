"""Runs for the tests that need a GPU: in this process on either device, or in one of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

DEVICE = torch.device(os.environ.get("FINETUNE_GPU_TESTS_ON", "cuda"))
ON_GPU = DEVICE.type == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="a CPU has nothing of the kind")

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("gpu_child.py")
SECONDS = 120  # that a process may take

# The embedded network on digits, without evaluation on the way.
NANO = """
model: {name: embedded:vit_nano, image_size: 32, compile: false}
data:
  source: embedded:digits
  train: resize | random_crop(padding=2)
  eval: resize
  batch_size: 64
optim: {name: adamw, lr: 2e-3, steps: 16, warmup_steps: 4, weight_decay: 0.05, clip_norm: 1.0}
run: {precision: fp32, threads: 1, log_every: 1, eval_every: 1000, test: false}
"""
SGD = ("optim.name=sgd", "optim.lr=0.05")
# Two digits an image: several labels.
PAIRS = ("data.source=embedded:digit_pairs", "data.task=multilabel")
RARE = ("optim.class_weights=balanced", "optim.focal_gamma=2", "data.sampling=square_root")

# Random weights at a size that takes memory: about 30 MB an image in float32.
TINY_224 = """
model: {name: vit_tiny_patch16_224, pretrained: false, head_init: default, compile: false}
data:
  source: embedded:digits
  val_fraction: 0
  train: resize
  eval: resize
  batch_size: 128
optim: {name: adamw, lr: 1e-4, steps: 3}
run: {precision: fp32, threads: 1, log_every: 1, eval_every: 1000, test: false}
"""


def recipe_of(text: str = NANO, *overrides: str) -> Any:
    from finetune.recipe.load import parse_recipe

    return parse_recipe(text, overrides=overrides)


@contextlib.contextmanager
def one_device(kind: str) -> Iterator[None]:
    """Let runs of this process be on a "cuda" or "cpu" device."""
    from accelerate.state import AcceleratorState

    before = os.environ.get("ACCELERATE_USE_CPU")
    os.environ["ACCELERATE_USE_CPU"] = "true" if kind == "cpu" else "false"
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        os.environ.pop("ACCELERATE_USE_CPU", None)
        if before is not None:
            os.environ["ACCELERATE_USE_CPU"] = before
        AcceleratorState._reset_state(reset_partial_state=True)


def trained(out: Path, *overrides: str, text: str = NANO, on: str = DEVICE.type) -> dict[str, Any]:
    """Train in this process. Returns: results.json with "losses" of every logged step."""
    from forked_runs import read_train_losses

    from finetune.training.train import train

    with one_device(on):
        results = train(recipe_of(text, *overrides), out)
        return {**results, "losses": read_train_losses(out)}


def apart(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest relative difference of two runs' losses; infinite where one has none."""
    assert found, "no losses"
    assert len(found) == len(expected)
    if None in (*found, *expected):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def strict_float32() -> None:
    """Round no product to TF32: torch does so in convolutions unless it is told otherwise."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


# Processes of their own ---------------------------------------------------------------------------


class Done(NamedTuple):
    """A process that ended: its exit code (minus a signal), its output, and how long it took."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_words(self) -> str:
        """The last line that stands on standard error and is no progress bar."""
        lines = [line.strip() for line in self.err.replace("\r", "\n").splitlines()]
        return next((line for line in reversed(lines) if line and "step/s" not in line), "")

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err


def child(what: dict[str, Any], *, before: Sequence[str] = (), **environment: str) -> Done:
    """Run gpu_child.py.

    Args:
        what: for it, see there.
        before: a launcher's command, such as `-m torch.distributed.run`.
        environment: variables on top of this process's.
    """
    return started([*before, str(CHILD), json.dumps(what)], **environment)


def started(arguments: Sequence[str], **environment: str) -> Done:
    """Run Python in a process group of its own, which is ended after `SECONDS`."""
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    known = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FINETUNE_GPU_TESTS_ON": DEVICE.type,
        **environment,
    }
    if ON_GPU:
        known.pop("ACCELERATE_USE_CPU", None)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=known,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nended after {SECONDS} s"
    return Done(process.returncode, out, err, time.monotonic() - began)


def command_line(*arguments: str | Path) -> int:
    """Run a verb in this process. Returns: its exit code."""
    from finetune.cli.main import main

    return main([str(argument) for argument in arguments])


def described(done: Done) -> str:
    """How a process ended, for the page."""
    return f"exit code {done.code} after {done.seconds:.0f} s: {done.last_words[:240]}"
