"""Data workers are killed, crash or hang: the run ends and names the worker and the image."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import (
    finetune_tracebacks,
    launch_training,
    parent_process_id,
    process_command,
    running_process_ids,
)
from recipe_texts import tiny_recipe_text

from finetune.cli.main import main
from finetune.data import worker_pool
from finetune.data.source import Split

FAULT = "a data worker is killed, crashes or hangs"
PROMISE = "the run ends with 5 (3 if an image crashes the decoder) and names worker and image"
RECIPE = tiny_recipe_text(
    "train: resize, eval: resize, batch_size: 6, keep: none, workers: 2",
    source="folder:FOLDER",
    optim="name: adamw, lr: 1e-3, steps: 100000, warmup_steps: 0",
    run="precision: fp32, log_every: 1, eval_every: 100000, timeout_seconds: 6",
    size=8,
    width=16,
)


def child_process_ids(parent: int) -> list[int]:
    return [pid for pid in running_process_ids() if parent_process_id(pid) == parent]


def train_in_fork(
    folder: Path, out: Path, prepare: Callable[[], None], *overrides: str
) -> tuple[int, str, list[int]]:
    """Train in a forked process. Returns: exit code, output, remaining processes."""
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(folder)))
    log = out.parent / "log"
    child = os.fork()
    if child == 0:
        code = 99
        try:
            with log.open("w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            sys.argv = ["finetune", "train", str(recipe), *overrides, "--out", str(out)]
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
            prepare()
            code = main()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    remaining = [pid for pid in child_process_ids(1) if str(out) in process_command(pid)]
    return os.waitstatus_to_exitcode(status), log.read_text(), remaining + child_process_ids(child)


def patch_decode(name: str, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `action` in the worker that decodes this image, once training has started."""
    parent = os.getpid()
    original_decode = Split.decode

    def decode(self: Split, index: int, buffer: Any = None) -> Any:
        # the check before the first step decodes it in the main process
        if os.getpid() != parent and self.name_of(index).endswith(name):
            action()
        return original_decode(self, index, buffer)

    monkeypatch.setattr(Split, "decode", decode)


WORKER_FAULTS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), 5, "was killed by SIGKILL while it"),
    "crash": (lambda: os.kill(os.getpid(), signal.SIGSEGV), 3, "red-1.png: crashes the decoder"),
    "exit": (lambda: os._exit(7), 5, "ended with exit code 7 while it"),
    "hang": (lambda: time.sleep(600), 5, "no batch came within 1.5 seconds; worker"),
    "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP), 5, "no batch came within 1.5 seconds"),
}


@pytest.mark.parametrize("case", list(WORKER_FAULTS))
def test_a_failing_worker_ends_the_run(
    case: str,
    image_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
) -> None:
    action, expected, message = WORKER_FAULTS[case]
    started = time.monotonic()
    overrides = ["run.timeout_seconds=3"] * ("no batch" in message)  # a batch may take half of it

    def prepare() -> None:
        monkeypatch.setattr(worker_pool, "POLL_SECONDS", 0.25)
        patch_decode("red-1.png", action, monkeypatch)

    code, text, remaining = train_in_fork(image_folder, tmp_path / "run", prepare, *overrides)
    assert code == expected, text
    assert text.count(message) == 1, text
    assert "red-1.png" in text
    assert "data worker" in text
    assert "Traceback" not in text
    assert not remaining
    assert time.monotonic() - started < 120
    fault(FAULT, PROMISE)


def test_workers_do_not_outlive_their_rank(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    marker_folder = tmp_path / "marks"
    marker_folder.mkdir()

    def hang() -> None:
        (marker_folder / str(os.getpid())).touch()
        os.kill(os.getppid(), signal.SIGKILL)  # the rank dies while its worker hangs
        time.sleep(600)

    code, text, _ = train_in_fork(
        image_folder,
        tmp_path / "run",
        lambda: patch_decode("red-1.png", hang, monkeypatch),
    )
    assert code == -signal.SIGKILL, text
    workers = [int(marker.name) for marker in marker_folder.iterdir()]
    assert workers
    deadline = time.monotonic() + 60
    try:
        while remaining := set(workers) & set(running_process_ids()):
            assert time.monotonic() < deadline, f"outlived their rank: {remaining}"
            time.sleep(0.05)
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    fault("a rank is killed while its data worker hangs", "the worker ends with it")


def test_a_killed_worker_of_one_rank_ends_all_ranks(
    image_folder: Path, tmp_path: Path, fault: Any
) -> None:
    recipe = RECIPE.replace("FOLDER", str(image_folder))
    with launch_training(tmp_path, recipe=recipe) as launch:
        launch.wait_for_steps()
        ranks = launch.rank_process_ids()
        worker = child_process_ids(ranks[1])[0]
        os.kill(worker, signal.SIGKILL)
        launch.wait_for_end()
        assert launch.text.count("was killed by SIGKILL") == 1, launch.text
        assert f"(process {worker})" in launch.text
        assert launch.read_record()["status"] == "failed (5)"
        assert not finetune_tracebacks(launch.text)
    fault("a data worker of one rank of two is killed", "all ranks end; it is reported once")
