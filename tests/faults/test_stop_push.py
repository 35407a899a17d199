"""SIGINT at any moment of a push: the process ends, and the hub holds all of the commit or nothing.

Each trial lets the hub be in one of its moods, waits for one of the push's requests, and sends a
SIGINT; if the process is still there after a while, it sends a second one.
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

TRIALS = 20
SECONDS = 5.0  # from the second signal to the end of the process
SILENCE_SECONDS = 30.0
FAULT = "SIGINT twice at any moment of a push"
PROMISE = (
    "gone within 5 s of the second one with 130; the hub holds all of the commit or nothing, and "
    "the message says which"
)
# What the hub's storage does: (what fails, kind, status), and whether it hands out Xet tokens.
MOODS: dict[str, tuple[list[tuple[str, str, int]], bool]] = {
    "no Xet": ([], False),
    "no Xet, slow": ([("preupload|lfs-upload|/commit/", "slow", 0)], False),
    "Xet token 500": ([("xet-write-token", "status", 500)], False),
    "Xet token hanging": ([("xet-write-token", "hang", 0)], False),
    "Xet token slow": ([("xet-write-token", "slow", 0)], False),
    "Xet storage 500": ([("/cas/", "status", 500)], True),
    "Xet storage hanging": ([("/cas/", "hang", 0)], True),
}
QUICK = ("no Xet, slow", "Xet storage hanging")
HERE = """
import sys
from finetune.cli.main import main
from finetune.publish import push, upload
push.send_apart = lambda hub, job: upload.send(job, lambda report: None)
upload._Push._ask_for_storage = lambda self: None
sys.exit(main(sys.argv[1:]))
"""


class Push:
    """A push in a process of its own, to a hub in a mood."""

    def __init__(self, hub: HubServer, tmp_path: Path, *, apart: bool = True) -> None:
        self.hub = hub
        self.folder = write_model_folder(tmp_path / "net")
        self.words = tmp_path / "words"
        environment = {**hub.environment(tmp_path / "home", WRITE_TOKEN), "OMP_NUM_THREADS": "1"}
        environment.pop("HF_HUB_DISABLE_XET", None)
        start = ["-m", "finetune"] if apart else ["-c", HERE]
        self.answer = tmp_path / "answer"
        with self.words.open("wb") as stream, self.answer.open("wb") as answer:
            self.process = subprocess.Popen(
                [sys.executable, *start, "push", str(self.folder), "alice/net"],
                env=environment,
                stdout=answer,
                stderr=stream,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.words.read_text(errors="replace")

    def wait_for_requests(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until the hub was asked so often, or nothing more will come."""
        ends = lambda: self.process.poll() is not None or len(self.hub.requests) >= count  # noqa: E731
        wait_until(ends, seconds=seconds)

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)  # as a terminal does

    def seconds_to_end(self, most: float) -> float:
        began = time.monotonic()
        self.process.wait(most)
        return time.monotonic() - began

    def commits(self) -> int:
        """How many commits the push has made."""
        if ("model", "alice/net") not in self.hub.store.repositories:
            return 0
        return len(self.hub.commits("alice/net")) - 1

    def check_hub(self) -> None:
        """The hub holds nothing of the push or all of it, as the message says."""
        time.sleep(0.5)  # a commit that the hub was at may still come
        count = self.commits()
        assert count in (0, 1)
        if count:
            held = {k: v for k, v in self.hub.files("alice/net").items() if k != ".gitattributes"}
            assert held == {p.name: p.read_bytes() for p in self.folder.iterdir()}
        if "before the commit" in self.text or "before anything" in self.text:
            assert count == 0, self.text
        elif "holds the whole commit" in self.text:
            assert count == 1, self.text
        else:
            is_done = "commit" in self.answer.read_text()  # and then the signal came
            assert is_done or re.search(
                "interrupted|does not answer now|may still take the whole", self.text
            ), self.text
            assert count == 1 or not is_done, self.text


@contextlib.contextmanager
def pushing(mood: str, tmp_path: Path, *, apart: bool = True) -> Iterator[Push]:
    faults, token = MOODS[mood]
    with HubServer(xet=token, xet_token=token) as hub:
        hub.add_user("alice", token=WRITE_TOKEN)
        for pattern, kind, status in faults:
            hub.fail(pattern, kind=kind, status=status, times=None)
        push = Push(hub, tmp_path, apart=apart)
        try:
            yield push
        finally:
            push.process.kill()
            push.process.wait()


def slowness() -> float:
    """How much longer than on an idle machine things may take: processes waiting for each core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def trials() -> list[Any]:
    """Every mood at every moment; one moment of two moods is quick."""
    return [
        pytest.param(
            mood,
            n,
            marks=[] if n == 0 and mood in QUICK else [pytest.mark.faults],
            id=f"{mood}-{n}",
        )
        for mood in MOODS
        for n in range(TRIALS)
    ]


@pytest.mark.parametrize("mood, trial", trials())
def test_a_push_is_stopped(
    mood: str, trial: int, tmp_path: Path, fault: Callable[..., None]
) -> None:
    draw = random.Random(f"{mood} {trial}")
    # the first trial waits until the storage is negotiated; the others for any request
    count = 7 if trial == 0 else draw.randrange(1, 13)
    with pushing(mood, tmp_path) as push:
        with contextlib.suppress(AssertionError):  # a mood in which no such request comes
            push.wait_for_requests(count, seconds=20)
        time.sleep(draw.uniform(0, 0.5))
        push.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            push.process.wait(draw.uniform(0.1, 2))
        push.interrupt()
        seconds = push.seconds_to_end(60)
        # the second one may meet an interpreter that is ending, and a shell calls that 130 too
        assert push.process.returncode in (130, -signal.SIGINT, 0), push.text
        # what it may show of a signal to an interpreter that is starting or ending is not ours
        assert not re.search(r"Traceback[\s\S]*finetune/(publish|hub)/", push.text), push.text
        assert seconds < SECONDS * slowness(), push.text
        push.check_hub()
    fault(FAULT, PROMISE, mood)


@pytest.mark.faults
def test_the_control_in_one_process(tmp_path: Path, fault: Callable[..., None]) -> None:
    with pushing("Xet token 500", tmp_path, apart=False) as push:
        wait_until(lambda: push.hub.count("xet-write-token"), seconds=60)
        for _ in range(2):
            push.interrupt()
            time.sleep(0.5)
        with pytest.raises(subprocess.TimeoutExpired):
            push.seconds_to_end(SECONDS)
    fault(
        "Control: the same, sending from the process that gets the signals",
        "it is still there 5 s after the second signal",
    )


@pytest.mark.faults
def test_a_hub_that_does_not_go_on_is_never_silent(
    tmp_path: Path, fault: Callable[..., None]
) -> None:
    with pushing("Xet storage hanging", tmp_path) as push:
        wait_until(lambda: push.hub.count("/cas/"), seconds=60)
        longest, since, size = 0.0, time.monotonic(), 0
        end = since + 70
        while time.monotonic() < end and push.process.poll() is None:
            time.sleep(0.1)
            if (now := push.words.stat().st_size) != size:
                size, since = now, time.monotonic()
            longest = max(longest, time.monotonic() - since)
        assert longest < SILENCE_SECONDS, push.text
        assert "sending the files" in push.text
    fault(
        "A push to Xet storage that never answers, for 70 s",
        "never 30 s without a word on standard error",
        f"{longest:.0f} s at most",
    )


def test_the_sender_dies_with_its_parent(tmp_path: Path, fault: Callable[..., None]) -> None:
    with pushing("Xet storage hanging", tmp_path) as push:
        wait_until(lambda: push.hub.count("/cas/"), seconds=60)
        children = Path(f"/proc/{push.process.pid}/task/{push.process.pid}/children").read_text()
        assert len(children.split()) == 1
        push.process.kill()
        push.process.wait()
        gone = [Path(f"/proc/{child}") for child in children.split()]
        wait_until(lambda: not any(map(_lives, gone)), seconds=60)
        assert push.commits() == 0
    fault("SIGKILL of a push", "the process that sends the files ends with it")


def _lives(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
