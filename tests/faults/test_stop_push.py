"""A push that is killed or interrupted at any time: the hub holds the whole commit or nothing.

Each trial chooses a fault of the storage, waits for a request of the push, and sends a signal.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_fixtures import WRITE_TOKEN, write_model_folder
from hub_server import HubServer, wait_until

NUM_TRIALS = 20
MAX_SECONDS = 5.0  # from the last signal to the end of the process
MAX_SILENCE_SECONDS = 30.0
# Faults of the storage: (request pattern, kind), and whether the hub gives Xet tokens.
STORAGE_FAULTS: dict[str, tuple[list[tuple[str, str]], bool]] = {
    "no Xet": ([], False),
    "no Xet, slow": ([("preupload|lfs-upload|/commit/", "slow")], False),
    "no Xet, hanging commit": ([("/commit/", "hang")], False),
    "Xet token hanging": ([("xet-write-token", "hang")], False),
    "Xet storage 500": ([("/cas/", "status")], True),
    "Xet storage hanging": ([("/cas/", "hang")], True),
}


class PushProcess:
    """A push in a process of its own, to a hub with a storage fault."""

    def __init__(self, hub: HubServer, tmp_path: Path) -> None:
        self.hub = hub
        self.folder = write_model_folder(tmp_path / "net")
        self.stdout_path, self.stderr_path = tmp_path / "stdout", tmp_path / "stderr"
        environment = {**hub.environment(tmp_path / "home", WRITE_TOKEN), "OMP_NUM_THREADS": "1"}
        environment.pop("HF_HUB_DISABLE_XET", None)
        with self.stderr_path.open("wb") as stderr, self.stdout_path.open("wb") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "finetune", "push", str(self.folder), "alice/net"],
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def children(self) -> list[Path]:
        """Return the folders in /proc of the subprocesses."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [Path(f"/proc/{child}") for child in path.read_text().split()]

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # like Ctrl-C in a terminal

    def check_end(self) -> None:
        """Check that the push ends soon, and that the hub holds all or nothing, as it says."""
        started = time.monotonic()
        self.process.wait(60)
        load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert time.monotonic() - started < MAX_SECONDS * load, self.text
        # the second signal may reach Python at exit; a shell reports that as 130 too
        assert self.process.returncode in (130, -signal.SIGINT, 0), self.text
        # a traceback of Python at start or exit is not from finetune
        assert not re.search(r"Traceback[\s\S]*finetune/(publish|hub)/", self.text), self.text
        time.sleep(0.5)  # a commit in progress may still appear
        count = self.num_commits()
        if "before the commit" in self.text or "before anything" in self.text:
            assert count == 0, self.text
        elif "the hub holds the whole commit or nothing" not in self.text:
            is_done = "commit" in self.stdout_path.read_text() or "whole commit" in self.text
            assert is_done or "interrupted" in self.text, self.text
            assert count == is_done, self.text

    def num_commits(self) -> int:
        """Return the number of commits of the push, 0 or 1; a commit has all files."""
        if ("model", "alice/net") not in self.hub.store.repositories:
            return 0
        count = len(self.hub.commits("alice/net")) - 1
        if count:
            files = {k: v for k, v in self.hub.files("alice/net").items() if k != ".gitattributes"}
            assert files == {path.name: path.read_bytes() for path in self.folder.iterdir()}
        assert count in (0, 1)
        return count


@contextlib.contextmanager
def start_push(storage_fault: str, tmp_path: Path) -> Iterator[PushProcess]:
    faults, xet = STORAGE_FAULTS[storage_fault]
    with HubServer(xet=xet, xet_token=xet) as hub:
        hub.add_user("alice", token=WRITE_TOKEN)
        for pattern, kind in faults:
            hub.fail(pattern, kind=kind, status=500, times=None)
        push = PushProcess(hub, tmp_path)
        try:
            yield push
        finally:
            push.process.kill()
            push.process.wait()


def all_trials() -> list[Any]:
    """Return all trials of all storage faults."""
    return [
        pytest.param(
            storage_fault,
            n,
            id=f"{storage_fault}-{n}",
        )
        for storage_fault in STORAGE_FAULTS
        for n in range(NUM_TRIALS)
    ]


@pytest.mark.parametrize("storage_fault, trial", all_trials())
def test_an_interrupted_push_commits_all_or_nothing(
    storage_fault: str, trial: int, tmp_path: Path, fault: Callable[..., None]
) -> None:
    """SIGINT, and a second one if the process is still running after a short time."""
    rng = random.Random(f"{storage_fault} {trial}")
    # the first trial waits until the storage is negotiated; the others for any request
    count = 7 if trial == 0 else rng.randrange(1, 12)
    with start_push(storage_fault, tmp_path) as push:
        is_reached = lambda: push.process.poll() is not None or len(push.hub.requests) >= count  # noqa: E731
        with contextlib.suppress(AssertionError):  # some faults prevent this request
            wait_until(is_reached, seconds=20)
        time.sleep(rng.uniform(0, 0.5))
        push.send(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            push.process.wait(rng.uniform(0.1, 2))
        push.send(signal.SIGINT)
        push.check_end()
    fault(
        "SIGINT twice at any time of a push",
        "ends within 5 s of the second signal with 130; the hub holds the whole commit or "
        "nothing, and the message says which",
        storage_fault,
    )


def test_one_signal_ends_a_push_before_its_commit(tmp_path: Path) -> None:
    with start_push("Xet storage hanging", tmp_path) as push:
        wait_until(lambda: push.hub.count("/cas/"), seconds=60)
        push.send(signal.SIGTERM)
        push.process.wait(60)
        assert push.process.returncode == 128 + signal.SIGTERM
        assert "stopped before the commit: the hub holds nothing of this push" in push.text
        assert f"push again with: finetune push {push.folder} alice/net" in push.text
        assert push.num_commits() == 0


def test_one_signal_lets_a_commit_finish(tmp_path: Path) -> None:
    with start_push("no Xet, slow", tmp_path) as push:
        wait_until(lambda: push.hub.count("/commit/"), seconds=60)
        push.send(signal.SIGINT)
        push.check_end()
        assert push.num_commits() == 1
        assert f"the hub holds the whole commit {push.hub.commits('alice/net')[0]}" in push.text


def test_a_second_signal_abandons_a_commit(tmp_path: Path) -> None:
    with start_push("no Xet, hanging commit", tmp_path) as push:
        wait_until(lambda: push.hub.count("/commit/"), seconds=60)
        push.send(signal.SIGINT)
        wait_until(lambda: "interrupt again to stop now" in push.text)
        assert push.process.poll() is None
        push.send(signal.SIGINT)
        push.check_end()
        assert "during the commit: the hub holds the whole commit or nothing of it" in push.text


@pytest.mark.parametrize("trial", range(NUM_TRIALS))
def test_a_killed_push_commits_all_or_nothing(
    trial: int, tmp_path: Path, fault: Callable[..., None]
) -> None:
    """SIGKILL at any request of the push; a second push then completes it."""
    rng = random.Random(trial)
    with start_push("no Xet, slow", tmp_path) as push:
        count = rng.randrange(1, 12)
        wait_until(lambda: len(push.hub.requests) >= count, seconds=60)
        time.sleep(rng.uniform(0, 1))
        children = push.children()
        push.process.kill()
        push.process.wait()
        wait_until(lambda: not any(map(is_running, children)), seconds=60)
        time.sleep(2)  # a commit in progress may still appear
        push.num_commits()
        push.hub.faults.clear()
        again = PushProcess(push.hub, tmp_path)
        again.process.wait(60)
        assert again.num_commits() == 1, again.text
    fault("SIGKILL at any time of a push", "no process is left; the next push makes one commit")


def test_a_push_to_a_hanging_hub_keeps_logging(tmp_path: Path, fault: Callable[..., None]) -> None:
    with start_push("Xet storage hanging", tmp_path) as push:
        wait_until(lambda: push.hub.count("/cas/"), seconds=60)
        longest_silence, last_output, size = 0.0, time.monotonic(), 0
        end = last_output + 70
        while time.monotonic() < end and push.process.poll() is None:
            time.sleep(0.1)
            if (new_size := push.stderr_path.stat().st_size) != size:
                size, last_output = new_size, time.monotonic()
            longest_silence = max(longest_silence, time.monotonic() - last_output)
        assert longest_silence < MAX_SILENCE_SECONDS, push.text
        assert "sending the files" in push.text
    fault(
        "A push to Xet storage that never responds, for 70 s",
        "never 30 s without output on standard error",
        f"{longest_silence:.0f} s at most",
    )


@pytest.mark.parametrize("victim", ["parent", "subprocess"])
def test_a_push_ends_if_one_of_its_processes_is_killed(tmp_path: Path, victim: str) -> None:
    with start_push("Xet storage hanging", tmp_path) as push:
        wait_until(lambda: push.hub.count("/cas/"), seconds=60)
        [child] = push.children()
        if victim == "parent":
            push.process.kill()
            wait_until(lambda: not is_running(child), seconds=60)
        else:
            os.kill(int(child.name), signal.SIGKILL)
            assert push.process.wait(60) == 7
            assert "the upload process ended unexpectedly" in push.text
        assert push.num_commits() == 0


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
