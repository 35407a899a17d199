"""Two ranks as a launcher would start them, but from a process that has imported everything.

A launch costs three imports of torch, most of the time of a small test. That the launchers
themselves work is for the tests of faults.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune.processes import end_with_parent

PATIENCE = 240.0  # seconds
forked = multiprocessing.get_context("forkserver")


def fork_server() -> None:
    """Fork, from this process, which has imported everything by now, what ranks are forked from.

    Python's own would import all of it again.
    """
    patch = pytest.MonkeyPatch()

    def fork(path: Any, words: list[Any], descriptors: Any) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                patch.undo()
                end_with_parent()
                exec(words[-1])
            finally:
                os._exit(1)
        return pid

    patch.setattr(multiprocessing.util, "spawnv_passfds", fork)
    multiprocessing.forkserver.ensure_running()
    patch.undo()


@dataclass(frozen=True)
class Ended:
    """The output of both ranks together."""

    stdout: str
    stderr: str


def two_ranks(
    work: Callable[..., object], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Ended:
    """Do the same work on two CPU processes that know of one another.

    They cannot have processes of their own.

    Args:
        work: a function of a module; what it returns is the exit code, None for 0.
        arguments: of the function, to be pickled.
        environment: variables beside this process's own.
    Raises: AssertionError unless both end well in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        own = {**os.environ, **(environment or {}), **shared}
        ranks = [
            forked.Process(
                target=_rank,
                args=({**own, "RANK": rank, "LOCAL_RANK": rank}, files, work, arguments),
                daemon=True,
            )
            for rank in "01"
        ]
        for process in ranks:
            process.start()
        until = time.monotonic() + PATIENCE
        while any(process.is_alive() for process in ranks) and time.monotonic() < until:
            if any(process.exitcode for process in ranks):
                break  # the other would wait for it
            ranks[0].join(0.05)
            ranks[1].join(0.05)
        for process in ranks:
            process.kill()  # nothing, if it has ended
            process.join()
        stdout, stderr = (file.read_text(errors="replace") for file in files)
    codes = [process.exitcode for process in ranks]
    assert codes == [0, 0], f"{codes}\n{stderr[-3000:]}"
    return Ended(stdout, stderr)


def _rank(
    environment: dict[str, str],
    files: list[Path],
    work: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    raise SystemExit(work(*arguments))


def command(*words: str) -> int:
    """The command line, in a rank; its runs have no pictures."""
    from faults_runs import without_pictures

    from finetune.cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        return main(list(words))


def command_at(hub: str, home: Path, token: str | None, *words: str) -> int:
    """The command line, in a rank whose only hub is the one at this address."""
    from hub_server import point_at
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        point_at(hub, patch, home, token)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        return command(*words)
