"""Network namespaces that stand for several machines."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest


def run_ip(*arguments: str) -> str:
    result = subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=30
    )
    return result.stdout


@contextlib.contextmanager
def create_namespaces(letters: str, connect: Callable[[list[str]], None]) -> Iterator[list[str]]:
    """Create a network namespace for each letter; skip the test where that is not possible.

    Args:
        letters: one for each namespace.
        connect: called with the names; creates the links between them.
    Yields: the names.
    """
    if shutil.which("ip") is None:
        pytest.skip("no machines: the command ip (iproute2) is not installed")
    names = [f"finetune-{os.getpid()}-{letter}" for letter in letters]
    try:
        try:
            for name in names:
                run_ip("netns", "add", name)
                run_ip("-n", name, "link", "set", "lo", "up")
            connect(names)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no machines: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):  # it may not exist yet
                run_ip("netns", "del", name)
