"""SIGINT at any time of a push: the process ends, and the hub holds the whole commit or nothing.

Each trial chooses a fault of the storage, waits for a request of the push, and sends SIGINT. If the
process is still running after a short time, it sends a second one.
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
MAX_SECONDS = 5.0  # from the second signal to the end of the process
MAX_SILENCE_SECONDS = 30.0
FAULT = "SIGINT twice at any time of a push"
PROMISE = (
    "ends within 5 s of the second signal with 130; the hub holds the whole commit or nothing, "
    "and the message says which"
)
# Faults of the storage: (request pattern, kind, status), and whether the hub gives Xet tokens.
STORAGE_FAULTS: dict[str, tuple[list[tuple[str, str, int]], bool]] = {
    "no Xet": ([], False),
    "no Xet, slow": ([("preupload|lfs-upload|/commit/", "slow", 0)], False),
    "Xet token 500": ([("xet-write-token", "status", 500)], False),
    "Xet token hanging": ([("xet-write-token", "hang", 0)], False),
    "Xet token slow": ([("xet-write-token", "slow", 0)], False),
    "Xet storage 500": ([("/cas/", "status", 500)], True),
    "Xet storage hanging": ([("/cas/", "hang", 0)], True),
}
QUICK_FAULTS = ("no Xet, slow", "Xet storage hanging")
IN_PROCESS_PROGRAM = """
import sys
from finetune.cli.main import main
from finetune.publish import push, upload
push.upload_in_subprocess = lambda hub, job: upload.upload_and_commit(job, lambda report: None)
upload._Committer._check_xet = lambda self: None
sys.exit(main(sys.argv[1:]))
"""


class PushProcess:
    """A push in a subprocess, to a hub with a storage fault."""

    def __init__(self, hub: HubServer, tmp_path: Path, *, subprocess_upload: bool = True) -> None:
        self.hub = hub
        self.folder = write_model_folder(tmp_path / "net")
        self.stderr_path = tmp_path / "words"
        environment = {**hub.environment(tmp_path / "home", WRITE_TOKEN), "OMP_NUM_THREADS": "1"}
        environment.pop("HF_HUB_DISABLE_XET", None)
        program = ["-m", "finetune"] if subprocess_upload else ["-c", IN_PROCESS_PROGRAM]
        self.stdout_path = tmp_path / "answer"
        with self.stderr_path.open("wb") as stderr, self.stdout_path.open("wb") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, *program, "push", str(self.folder), "alice/net"],
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def wait_for_requests(self, count: int, *, timeout_seconds: float = 60.0) -> None:
        """Wait until the hub has received this number of requests, or the push has ended."""
        is_reached = lambda: self.process.poll() is not None or len(self.hub.requests) >= count  # noqa: E731
        wait_until(is_reached, seconds=timeout_seconds)

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)  # like Ctrl-C in a terminal

    def seconds_to_end(self, timeout_seconds: float) -> float:
        started = time.monotonic()
        self.process.wait(timeout_seconds)
        return time.monotonic() - started

    def num_commits(self) -> int:
        """Return the number of commits of the push."""
        if ("model", "alice/net") not in self.hub.store.repositories:
            return 0
        return len(self.hub.commits("alice/net")) - 1

    def check_hub(self) -> None:
        """Check that the hub holds the whole push or nothing, as the message says."""
        time.sleep(0.5)  # a commit in progress may still appear
        count = self.num_commits()
        assert count in (0, 1)
        if count:
            files = {k: v for k, v in self.hub.files("alice/net").items() if k != ".gitattributes"}
            assert files == {p.name: p.read_bytes() for p in self.folder.iterdir()}
        if "before the commit" in self.text or "before anything" in self.text:
            assert count == 0, self.text
        elif "the hub holds the whole commit" in self.text:
            assert count == 1, self.text
        else:
            is_done = "commit" in self.stdout_path.read_text()  # the signal came after the push
            assert is_done or re.search(
                "interrupted|does not answer now|may still take the whole", self.text
            ), self.text
            assert count == 1 or not is_done, self.text


@contextlib.contextmanager
def start_push(
    storage_fault: str, tmp_path: Path, *, subprocess_upload: bool = True
) -> Iterator[PushProcess]:
    faults, token = STORAGE_FAULTS[storage_fault]
    with HubServer(xet=token, xet_token=token) as hub:
        hub.add_user("alice", token=WRITE_TOKEN)
        for pattern, kind, status in faults:
            hub.fail(pattern, kind=kind, status=status, times=None)
        push = PushProcess(hub, tmp_path, subprocess_upload=subprocess_upload)
        try:
            yield push
        finally:
            push.process.kill()
            push.process.wait()


def load_factor() -> float:
    """Return the slowdown compared to an idle machine: waiting processes per core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def all_trials() -> list[Any]:
    """Return all trials of all storage faults; one trial of two of them is quick."""
    return [
        pytest.param(
            storage_fault,
            n,
            marks=[] if n == 0 and storage_fault in QUICK_FAULTS else [pytest.mark.faults],
            id=f"{storage_fault}-{n}",
        )
        for storage_fault in STORAGE_FAULTS
        for n in range(NUM_TRIALS)
    ]


@pytest.mark.parametrize("storage_fault, trial", all_trials())
def test_an_interrupted_push_commits_all_or_nothing(
    storage_fault: str, trial: int, tmp_path: Path, fault: Callable[..., None]
) -> None:
    rng = random.Random(f"{storage_fault} {trial}")
    # the first trial waits until the storage is negotiated; the others for any request
    count = 7 if trial == 0 else rng.randrange(1, 13)
    with start_push(storage_fault, tmp_path) as push:
        with contextlib.suppress(AssertionError):  # some faults prevent this request
            push.wait_for_requests(count, timeout_seconds=20)
        time.sleep(rng.uniform(0, 0.5))
        push.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            push.process.wait(rng.uniform(0.1, 2))
        push.interrupt()
        seconds = push.seconds_to_end(60)
        # the second signal may reach Python at exit; a shell reports that as 130 too
        assert push.process.returncode in (130, -signal.SIGINT, 0), push.text
        # a traceback of Python at start or exit is not from finetune
        assert not re.search(r"Traceback[\s\S]*finetune/(publish|hub)/", push.text), push.text
        assert seconds < MAX_SECONDS * load_factor(), push.text
        push.check_hub()
    fault(FAULT, PROMISE, storage_fault)


@pytest.mark.faults
def test_control_upload_in_the_same_process(tmp_path: Path, fault: Callable[..., None]) -> None:
    with start_push("Xet token 500", tmp_path, subprocess_upload=False) as push:
        wait_until(lambda: push.hub.count("xet-write-token"), seconds=60)
        for _ in range(2):
            push.interrupt()
            time.sleep(0.5)
        with pytest.raises(subprocess.TimeoutExpired):
            push.seconds_to_end(MAX_SECONDS)
    fault(
        "Control: the same, with the upload in the process that gets the signals",
        "it is still running 5 s after the second signal",
    )


@pytest.mark.faults
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


def test_the_upload_process_ends_with_its_parent(
    tmp_path: Path, fault: Callable[..., None]
) -> None:
    with start_push("Xet storage hanging", tmp_path) as push:
        wait_until(lambda: push.hub.count("/cas/"), seconds=60)
        children = Path(f"/proc/{push.process.pid}/task/{push.process.pid}/children").read_text()
        assert len(children.split()) == 1
        push.process.kill()
        push.process.wait()
        proc_folders = [Path(f"/proc/{child}") for child in children.split()]
        wait_until(lambda: not any(map(is_running, proc_folders)), seconds=60)
        assert push.num_commits() == 0
    fault("SIGKILL of a push", "the upload process ends with it")


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
