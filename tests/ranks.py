"""Run two ranks as a launcher would, but forked from a process that has imported everything.

A real launch imports torch three times, which takes most of the time of a small test. tests/faults
tests the real launchers.
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

from finetune.process_lifecycle import die_with_parent

TIMEOUT_SECONDS = 240.0  # seconds
fork_context = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Fork the server that ranks are forked from, now that this process has imported everything.

    Python's own fork server would import all of it again.
    """
    patch = pytest.MonkeyPatch()

    def fork(path: Any, arguments: list[Any], descriptors: Any) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                patch.undo()
                die_with_parent()
                exec(arguments[-1])
            finally:
                os._exit(1)
        return pid

    patch.setattr(multiprocessing.util, "spawnv_passfds", fork)
    multiprocessing.forkserver.ensure_running()
    patch.undo()


@dataclass(frozen=True)
class RankOutput:
    """The output of both ranks together."""

    stdout: str
    stderr: str


def run_two_ranks(
    work: Callable[..., object], *arguments: Any, environment: Mapping[str, str] | None = None
) -> RankOutput:
    """Run the same function on two connected CPU ranks.

    The ranks cannot have child processes.

    Args:
        work: a module-level function; its return value is the exit code, None for 0.
        arguments: its arguments; they are pickled.
        environment: added to the environment of this process.
    Raises: AssertionError unless both ranks exit with 0 in time.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    launch_variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    launch_variables |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        base_environment = {**os.environ, **(environment or {}), **launch_variables}
        ranks = [
            fork_context.Process(
                target=run_rank,
                args=(
                    {**base_environment, "RANK": rank, "LOCAL_RANK": rank},
                    files,
                    work,
                    arguments,
                ),
                daemon=True,
            )
            for rank in "01"
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if any(process.exitcode for process in ranks):
                break  # the other rank would wait for it
            ranks[0].join(0.05)
            ranks[1].join(0.05)
        for process in ranks:
            process.kill()  # no effect on an ended process
            process.join()
        stdout, stderr = (file.read_text(errors="replace") for file in files)
    codes = [process.exitcode for process in ranks]
    assert codes == [0, 0], f"{codes}\n{stderr[-3000:]}"
    return RankOutput(stdout, stderr)


def run_rank(
    environment: dict[str, str],
    files: list[Path],
    work: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    raise SystemExit(work(*arguments))


def run_rank_command(*arguments: str) -> int:
    """Run a command in a rank, without plots and report."""
    from forked_runs import disable_report_and_plots

    from finetune.cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        return main(list(arguments))


def run_rank_command_on_hub(hub: str, home: Path, token: str | None, *arguments: str) -> int:
    """Run a command in a rank whose only hub is the one at this address."""
    from hub_server import point_clients_at
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        point_clients_at(hub, patch, home, token)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        return run_rank_command(*arguments)
