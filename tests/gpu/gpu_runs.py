"""Runs for the GPU tests: in this process on the GPU or CPU, or in a child process."""

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
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="this test needs a GPU")

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD_PROGRAM = Path(__file__).with_name("gpu_child.py")
TIMEOUT_SECONDS = 120  # of a child process

# The embedded network on digits, without evaluation during training.
NANO_RECIPE = """
model: {name: embedded:vit_nano, image_size: 32, compile: false}
data:
  source: embedded:digits
  train: resize | random_crop(padding=2)
  eval: resize
  batch_size: 64
optim: {name: adamw, lr: 2e-3, steps: 16, warmup_steps: 4, weight_decay: 0.05, clip_norm: 1.0}
run: {precision: fp32, threads: 1, log_every: 1, eval_every: 1000, test: false}
"""
SGD_OVERRIDES = ("optim.name=sgd", "optim.lr=0.05")
# Multilabel: two digits per image.
MULTILABEL_OVERRIDES = ("data.source=embedded:digit_pairs", "data.task=multilabel")
RARE_CLASS_OVERRIDES = (
    "optim.class_weights=balanced",
    "optim.focal_gamma=2",
    "data.sampling=square_root",
)

# A network with random weights that takes about 30 MB per image in float32.
TINY_224_RECIPE = """
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


def make_recipe(text: str = NANO_RECIPE, *overrides: str) -> Any:
    from finetune.recipe.load import parse_recipe

    return parse_recipe(text, overrides=overrides)


@contextlib.contextmanager
def use_device(device_type: str) -> Iterator[None]:
    """Run training of this process on a "cuda" or "cpu" device."""
    from accelerate.state import AcceleratorState

    old_value = os.environ.get("ACCELERATE_USE_CPU")
    os.environ["ACCELERATE_USE_CPU"] = "true" if device_type == "cpu" else "false"
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        os.environ.pop("ACCELERATE_USE_CPU", None)
        if old_value is not None:
            os.environ["ACCELERATE_USE_CPU"] = old_value
        AcceleratorState._reset_state(reset_partial_state=True)


def train_here(
    out: Path, *overrides: str, text: str = NANO_RECIPE, device_type: str = DEVICE.type
) -> dict[str, Any]:
    """Train in this process. Returns: the results, and "losses" of every logged step."""
    from forked_runs import read_train_losses

    from finetune.training.train import train

    with use_device(device_type):
        results = train(make_recipe(text, *overrides), out)
        return {**results, "losses": read_train_losses(out)}


def max_relative_difference(losses: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative difference of two lists of losses; infinite if one is None."""
    assert losses, "no losses"
    assert len(losses) == len(expected)
    if None in (*losses, *expected):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def disable_tf32() -> None:
    """Disable TF32; by default torch uses it in convolutions."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


# Child processes ----------------------------------------------------------------------------------


class ProcessResult(NamedTuple):
    """Result of a child process: exit code or minus the signal, output, duration."""

    exit_code: int
    out: str
    err: str
    seconds: float

    @property
    def last_message(self) -> str:
        """The last line on standard error that is no progress bar."""
        lines = [line.strip() for line in self.err.replace("\r", "\n").splitlines()]
        return next((line for line in reversed(lines) if line and "step/s" not in line), "")

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err


def run_child(
    job: dict[str, Any], *, launcher: Sequence[str] = (), **environment: str
) -> ProcessResult:
    """Run gpu_child.py.

    Args:
        job: its argument; see gpu_child.py.
        launcher: arguments of a launcher, such as `-m torch.distributed.run`.
        environment: added to the environment of this process.
    """
    return run_python([*launcher, str(CHILD_PROGRAM), json.dumps(job)], **environment)


def run_python(arguments: Sequence[str], **environment: str) -> ProcessResult:
    """Run Python in its own process group; kill the group after `TIMEOUT_SECONDS`."""
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FINETUNE_GPU_TESTS_ON": DEVICE.type,
        "PYTHONFAULTHANDLER": "1",
        **environment,
    }
    if ON_GPU:
        variables.pop("ACCELERATE_USE_CPU", None)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nkilled after {TIMEOUT_SECONDS} s"
    return ProcessResult(process.returncode, out, err, time.monotonic() - started)


def run_command(*arguments: str | Path) -> int:
    """Run a command in this process. Returns: its exit code."""
    from finetune.cli.main import main

    return main([str(argument) for argument in arguments])


def describe_result(result: ProcessResult) -> str:
    """Describe how a process ended, for the page."""
    return f"exit code {result.exit_code} after {result.seconds:.0f} s: {result.last_message[:240]}"
