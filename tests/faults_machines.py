"""Machines that are network namespaces of this one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


@contextlib.contextmanager
def machines(letters: str, connect: Callable[[list[str]], None]) -> Iterator[list[str]]:
    """Make a network namespace for each letter; where that cannot be, skip the test.

    Args:
        connect: lays the cables between them.
    Yields: their names.
    """
    if shutil.which("ip") is None:
        pytest.skip("no machines: the command ip (iproute2) is not installed")
    names = [f"finetune-{os.getpid()}-{letter}" for letter in letters]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            connect(names)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no machines: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):  # it may not be there yet
                ip("netns", "del", name)
