"""Processes that decode images are killed, crash or hang: the run ends and says which and where."""

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
PROMISE = "the run ends with 5 (3 where an image crashes the decoder) and names worker and image"
TEXT = tiny_recipe_text(
    "train: resize, eval: resize, batch_size: 6, keep: none, workers: 2",
    source="folder:FOLDER",
    optim="name: adamw, lr: 1e-3, steps: 100000, warmup_steps: 0",
    run="precision: fp32, log_every: 1, eval_every: 100000, timeout_seconds: 6",
    size=8,
    width=16,
)


def children_of(parent: int) -> list[int]:
    return [pid for pid in running_process_ids() if parent_process_id(pid) == parent]


def ended(
    folder: Path, out: Path, prepare: Callable[[], None], *overrides: str
) -> tuple[int, str, list[int]]:
    """Train in a fork of this process. Returns: its exit code, what it said, who is left."""
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(TEXT.replace("FOLDER", str(folder)))
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
    left = [pid for pid in children_of(1) if str(out) in process_command(pid)]
    return os.waitstatus_to_exitcode(status), log.read_text(), left + children_of(child)


def at_image(name: str, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the worker that reads an image, once training has begun."""
    parent = os.getpid()
    read = Split.decode

    def reads(self: Split, index: int, room: Any = None) -> Any:
        # the check before the first step reads it in the trainer itself
        if os.getpid() != parent and self.name_of(index).endswith(name):
            action()
        return read(self, index, room)

    monkeypatch.setattr(Split, "decode", reads)


CASES = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), 5, "was killed by SIGKILL while it"),
    "crash": (lambda: os.kill(os.getpid(), signal.SIGSEGV), 3, "red-1.png: crashes the decoder"),
    "exit": (lambda: os._exit(7), 5, "ended with exit code 7 while it"),
    "hang": (lambda: time.sleep(600), 5, "no batch came within 1.5 seconds; worker"),
    "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP), 5, "no batch came within 1.5 seconds"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_worker_that_fails_ends_the_run(
    case: str,
    image_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
) -> None:
    action, expected, message = CASES[case]
    started = time.monotonic()
    overrides = ["run.timeout_seconds=3"] * ("no batch" in message)  # half of it for a batch

    def prepare() -> None:
        monkeypatch.setattr(worker_pool, "POLL_SECONDS", 0.25)
        at_image("red-1.png", action, monkeypatch)

    code, text, left = ended(image_folder, tmp_path / "run", prepare, *overrides)
    assert code == expected, text
    assert text.count(message) == 1, text
    assert "red-1.png" in text
    assert "data worker" in text
    assert "Traceback" not in text
    assert not left
    assert time.monotonic() - started < 120
    fault(FAULT, PROMISE)


def test_workers_do_not_outlive_their_rank(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def hang() -> None:
        (marks / str(os.getpid())).touch()
        os.kill(os.getppid(), signal.SIGKILL)  # the rank goes while its worker hangs
        time.sleep(600)

    code, text, _ = ended(
        image_folder,
        tmp_path / "run",
        lambda: at_image("red-1.png", hang, monkeypatch),
    )
    assert code == -signal.SIGKILL, text
    workers = [int(mark.name) for mark in marks.iterdir()]
    assert workers
    until = time.monotonic() + 60
    try:
        while left := set(workers) & set(running_process_ids()):
            assert time.monotonic() < until, f"outlived their rank: {left}"
            time.sleep(0.05)
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    fault("a rank is killed while its data worker hangs", "the worker ends with it")


@pytest.mark.faults
def test_a_worker_of_another_rank_is_killed(image_folder: Path, tmp_path: Path, fault: Any) -> None:
    recipe = TEXT.replace("FOLDER", str(image_folder))
    with launch_training(tmp_path, recipe=recipe) as launch:
        launch.wait_for_steps()
        ranks = launch.rank_process_ids()
        worker = children_of(ranks[1])[0]
        os.kill(worker, signal.SIGKILL)
        launch.wait_for_end()
        assert launch.text.count("was killed by SIGKILL") == 1, launch.text
        assert f"(process {worker})" in launch.text
        assert launch.read_record()["status"] == "failed (5)"
        assert not finetune_tracebacks(launch.text)
    fault("a data worker of one rank of two is killed", "all ranks end, and it is said once")
