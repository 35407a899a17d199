"""The run directory: its lock, atomic files, and checkpoints that are complete or absent.

A checkpoint is a directory that is written under a temporary name, synced to the disk, described by
a manifest of sizes and sha256, and published by one rename. Whoever reads it verifies the manifest
before anything live is changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

from finetune.errors import CheckpointError, SetupError
from finetune.files import disk_errors, sha256_of, sync, sync_folder, write_atomically
from finetune.run.validation import (
    MAX_JSON_BYTES,
    MAX_LARGE_BYTES,
    checked,
    clear,
    load_json,
    open_lock,
    read_log,
    refuse_links,
    refuse_others,
    remove,
)

__all__ = ["RunDir", "json_text"]

MANIFEST = "manifest.json"
_CHECKPOINT = re.compile(r"step-([0-9]{8})")
_NO_PLACE = {errno.EEXIST, errno.ENOTDIR, errno.ENOENT}
_NO_PLACE |= {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
# Who holds which lock file (device and inode): to the kernel all threads of a process are one.
_HELD: WeakValueDictionary[tuple[int, int], RunDir] = WeakValueDictionary()


class RunDir:
    """One run's folder; rank 0 alone writes to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        # Neither is buffered: on a full disk, what is left in a buffer fails again at `close`.
        self._lock: IO[bytes] | None = None
        self._metrics: IO[bytes] | None = None
        self._process: int | None = None  # that took the lock; a fork has not

    def open(self, *, patience_seconds: float = 0.0) -> None:
        """Create the folder, take its lock, and clear what an interrupted write left behind.

        Args:
            patience_seconds: for the process that holds the lock to end.
        Raises: SetupError if another live process holds the folder, it cannot be written, or it is
            no run's; CheckpointError if something else is in the place of one of its files.
        """
        place = self.path / ".lock"
        with disk_errors(self.path, needed=4096):
            self._make(place)
            self._lock = open_lock(place)
        try:
            # The kernel drops this kind of lock with its process, and no forked worker inherits it.
            _take(self._lock, patience_seconds)
            _HELD[_identity(place)], self._process = self, os.getpid()
        except (BlockingIOError, PermissionError):
            self._lock.seek(0)
            holder = self._lock.read().decode(errors="replace").strip() or "unknown"
            self._lock.close()
            raise SetupError(
                f"{self.path}: in use by process {holder}; wait for it, stop it, or choose another "
                "--out",
                code="setup.in_use",
            ) from None
        except OSError as error:
            raise SetupError(
                f"{self.path}: cannot be locked ({error.strerror}); choose an --out on a file "
                "system with locks",
                code="setup.no_locks",
            ) from error
        with disk_errors(self.path, needed=4096):
            clear(self.path)  # first: it may be what fills the disk
            self._lock.truncate(0)
            self._lock.write(f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def _make(self, place: Path) -> None:
        """Make the folder, unless it is there and a run's. Raises: as for `open`."""
        try:
            if self.path.is_dir():
                refuse_links(self.path)
                # Before it is opened: a process that closes a file gives back all its locks on it.
                holder = _HELD.get(_identity(place)) if os.path.lexists(place) else None
                if holder is not None and holder._process == os.getpid():
                    raise SetupError(
                        f"{self.path}: in use by process {os.getpid()}, this one; wait until its "
                        "run there has ended, or choose another --out",
                        code="setup.in_use",
                    )
                refuse_others(self.path)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", errno.EINVAL)  # a ValueError for a NUL in the name
            if number not in _NO_PLACE:
                raise
            raise SetupError(
                f"{self.path}: cannot be created ({os.strerror(number)}); choose another --out",
                code="setup.not_writable",
            ) from error

    def close(self) -> None:
        """Close the metrics file and give the lock back."""
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()
        self._metrics = self._lock = self._process = None

    # Files of the run -----------------------------------------------------------------------

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write `name` atomically, as `json_text`."""
        write_atomically(self.path / name, json_text(content))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file of the run. Returns: its content, or None when there is none."""
        path = self.path / name
        limit = MAX_LARGE_BYTES if name == "results.json" else MAX_JSON_BYTES
        try:
            return checked(path, load_json(path, limit_bytes=limit))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read, or is not valid JSON ({error}); restore it from a copy, "
                "or train in another --out",
                code="checkpoint.damaged",
            ) from error

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        rest = (json.dumps(line, allow_nan=False) + "\n").encode()
        with disk_errors(path, needed=len(rest)):
            if self._metrics is None:
                self._metrics = path.open("ab", buffering=0)
            end = self._metrics.tell()
            try:
                while rest:  # a disk that is almost full takes a part
                    rest = rest[self._metrics.write(rest) :]
            except OSError:
                self._metrics.truncate(end)
                raise

    def history(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; lines that are damaged, or that a kill cut short, are left out.

        Raises: CheckpointError if it is no file, or cannot be read.
        """
        path = self.path / "metrics.jsonl"
        try:
            return read_log(path)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); restore it from a copy, or train in another "
                "--out",
                code="checkpoint.damaged",
            ) from error

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps that will be trained again after a resume from `step`."""
        kept = [line for line in self.history() if line["step"] <= step]
        write_atomically(
            self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept)
        )

    # Checkpoints ----------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, in ascending order, verified or not."""
        matches = (_CHECKPOINT.fullmatch(entry.name) for entry in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in matches if match)

    def folder(self, step: int) -> Path:
        """The folder of the checkpoint at `step`."""
        return self.checkpoints / f"step-{step:08d}"

    def save(self, step: int, write: Callable[[Path], None], *, needed: int) -> None:
        """Publish the checkpoint of `step`, or leave everything as it was.

        Args:
            step: number of optimiser steps done.
            write: puts the checkpoint's files into the folder it is given.
            needed: estimate of the bytes to be written, for the message of a full disk.
        Raises: SetupError if the disk is full or not writable.
        """
        target = self.folder(step)
        temporary = self.checkpoints / f".{target.name}.{os.getpid()}"
        try:
            with disk_errors(target, needed=needed):
                _write_folder(temporary, write)
                if os.path.lexists(target):  # a damaged one that a resume fell back from
                    remove(target)
                os.replace(temporary, target)
                sync_folder(self.checkpoints)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def publish_model(self, write: Callable[[Path], None], *, needed: int) -> None:
        """Replace `model/` as a whole by what `write` puts into the folder it is given."""
        name = os.urandom(4).hex()  # a killed process's number comes again, in a container at once
        temporary = self.path / f".model.{name}.tmp"
        old = self.path / f".model.old.{name}.tmp"
        try:
            with disk_errors(self.model, needed=needed):
                temporary.mkdir()
                write(temporary)
                _settle(temporary)
                if os.path.lexists(self.model):
                    os.replace(self.model, old)
                os.replace(temporary, self.model)
                sync_folder(self.path)
        finally:
            if not os.path.lexists(self.model) and old.is_dir():  # stopped between the two
                os.replace(old, self.model)
            for path in (temporary, old):
                with contextlib.suppress(OSError):
                    remove(path)

    def has_model(self) -> bool:
        """True if `model/` is there, with all that a loader needs."""
        return all((self.model / name).is_file() for name in ("config.json", "model.safetensors"))

    def verify(self, step: int) -> str | None:
        """Compare a checkpoint with its manifest. Returns: what is wrong, or None."""
        folder = self.folder(step)
        try:
            manifest = load_json(folder / MANIFEST)
            files = manifest["files"]
            if manifest["step"] != step or manifest["sha256"] != _digest_of(files):
                return f"{folder / MANIFEST}: was changed"
            for name, facts in files.items():
                path = folder / name
                if not path.is_file():
                    return f"{path}: is missing"
                if path.stat().st_size != facts["bytes"]:
                    return f"{path}: {path.stat().st_size:,} bytes instead of {facts['bytes']:,}"
                if sha256_of(path) != facts["sha256"]:
                    return f"{path}: its sha256 is not the manifest's"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{folder / MANIFEST}: {type(error).__name__}: {error}"
        return None

    def newest(self, notice: Callable[[str], None]) -> int | None:
        """Find the newest checkpoint that verifies; `notice` is told of each that does not.

        Returns: its step, or None when the run has no checkpoint yet.
        Raises: CheckpointError if there are checkpoints and none verifies.
        """
        steps = self.steps()
        for step in reversed(steps):
            problem = self.verify(step)
            if problem is None:
                return step
            notice(f"checkpoint of step {step} is damaged and is passed over: {problem}")
        if steps:
            raise CheckpointError(
                f"{self.checkpoints}: none of the {len(steps)} checkpoints is intact; "
                "train again without --resume in another --out",
                code="checkpoint.damaged",
            )
        return None

    def prune(self, keep: set[int]) -> None:
        """Remove all checkpoints except those of the steps in `keep`."""
        for step in self.steps():
            if step not in keep:
                # Renamed first: a kill in the middle must not leave half a checkpoint published.
                temporary = self.checkpoints / f".doomed-{step}"
                os.replace(self.folder(step), temporary)
                with contextlib.suppress(OSError):
                    remove(temporary)


def json_text(content: Mapping[str, Any]) -> str:
    """Return the text of a run's JSON file: indented, except the figures of very many classes."""
    parts = (content, *content.values())
    many = any(isinstance(p, dict) and isinstance(p.get("confusion"), dict) for p in parts)
    separators = (",", ":") if many else None
    indent = None if many else 2
    return json.dumps(content, indent=indent, separators=separators, allow_nan=False) + "\n"


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode: the same under all names of a file."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def _take(lock: IO[bytes], patience_seconds: float) -> None:
    """Lock a file. Raises: BlockingIOError or PermissionError if another holds it for longer."""
    until = time.monotonic() + patience_seconds
    while True:
        try:
            return fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= until:
                raise
        time.sleep(0.2)


def _settle(folder: Path) -> None:
    """Sync each file of a folder, with the umask's rights (safetensors writes 0600)."""
    umask = os.umask(0)
    os.umask(umask)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        path.chmod(0o666 & ~umask)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _digest_of(files: dict[str, Any]) -> str:
    """The sha256 of the manifest's own entries: one flipped bit in it is found, too."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill `folder`, sync every file, and write the manifest last."""
    folder.mkdir()
    write(folder)
    _settle(folder)
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    step = int(folder.name.split("-")[1].split(".")[0])
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"step": step, "files": files, "sha256": _digest_of(files)}, file, indent=2)
        sync(file)
    sync_folder(folder)
