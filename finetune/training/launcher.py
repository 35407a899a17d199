"""The launcher of this process: torchrun or `accelerate launch`, found among its parents."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path

import yaml

__all__ = ["Launcher", "get_launcher", "requested_num_processes"]

EXIT_GRACE_SECONDS = 5.0  # from SIGTERM until a process that waits in C code is killed
_POLL_SECONDS = 0.5
_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun")
_LAUNCHER_MODULES = ("accelerate.commands.launch", "torch.distributed.run")


def requested_num_processes() -> int | None:
    """Read the requested number of processes from the command line of `accelerate launch`.

    It can differ from the real number: `accelerate launch --cpu --num_processes 2` silently starts
    one process.

    Returns: the number; None if the parent process is not `accelerate launch`, or if neither its
        command line nor its configuration file gives a number.
    """
    arguments = _command_line(os.getppid())
    launches = {"launch", "accelerate.commands.launch"} & set(arguments)
    if not any("accelerate" in word for word in arguments[:4]) or not launches:
        return None
    options: dict[str, str] = {}
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, attached = flag.partition("=")
        options.setdefault(name.replace("-", "_"), attached or value)
    number = options.get("__num_processes") or _num_processes_in(options.get("__config_file"))
    return int(number) if number and number.isdigit() else None


def _num_processes_in(config_file: str | None) -> str | None:
    """Read the number of processes from an Accelerate configuration file."""
    if config_file is None:
        return None
    try:
        config = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the launcher has reported the error
    return str(config.get("num_processes")) if isinstance(config, dict) else None


class Launcher:
    """The launcher of this process; once the launcher ends, a thread sends SIGTERM to this process.

    Attributes:
        has_ended: True once the launcher has ended.
        ranks_connected: True once the ranks are connected; the caller sets it. Until then, this
            process may wait in C code, where no signal handler runs, so it is killed after the
            grace period.
    """

    def __init__(self, parent: int) -> None:
        self.has_ended = False
        self.ranks_connected = False
        self._parent = parent
        self._sent_signal = False
        threading.Thread(target=self._watch_parent, daemon=True, name="launcher").start()

    @classmethod
    def from_parent_process(cls) -> Launcher | None:
        """Watch the parent process. Returns: the launcher, or None if the parent is not one."""
        parent = os.getppid()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            orphan = parent == 1 and not _is_launcher(parent)
            return cls(-1 if orphan else parent)
        return cls(parent) if _is_launcher(parent) else None

    def _watch_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(_POLL_SECONDS)
        self.has_ended = self._sent_signal = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(EXIT_GRACE_SECONDS)
        if not self.ranks_connected:
            os._exit(128 + signal.SIGTERM)

    def consume_signal(self) -> bool:
        """Return True if this object has sent SIGTERM since the last call."""
        sent_signal, self._sent_signal = self._sent_signal, False
        return sent_signal


def _is_launcher(pid: int) -> bool:
    """True if the command line of a process is torchrun or `accelerate launch`."""
    words = _command_line(pid)[:4]
    return any(Path(word).name in _LAUNCHERS or word in _LAUNCHER_MODULES for word in words)


def _command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if they cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@functools.cache
def get_launcher() -> Launcher | None:
    """Return the launcher of this process, or None; the first call starts to watch it."""
    return Launcher.from_parent_process()
