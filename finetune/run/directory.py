"""The run directory: its lock, atomic files, and checkpoints that are complete or absent.

A checkpoint is a folder that is written under a temporary name, synced to disk, described by a
manifest of sizes and sha256, and published by one rename. Readers verify the manifest before they
change anything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

from finetune.errors import CheckpointError, SetupError, WeightsError, has_redacted_url
from finetune.files import (
    explain_disk_errors,
    file_sha256,
    fsync_file,
    fsync_folder,
    open_regular_file,
    remove_path,
    write_atomically,
)
from finetune.formatting import pluralize
from finetune.log import logger, warn_once
from finetune.model_checksums import MANIFEST, json_sha256, verify_model_folder
from finetune.run.integrity import (
    MAX_JSON_BYTES,
    MAX_LARGE_BYTES,
    check_is_run_folder,
    check_no_symlinks,
    load_json,
    open_lock_file,
    remove_leftovers,
)
from finetune.run.schema import check_json_types, parse_metrics_line

__all__ = [
    "SEARCH_FILE",
    "RunDir",
    "format_json",
    "lock_run",
    "lock_run_of_model",
    "resume_command",
    "unique_run_names",
    "whole_run",
]

SEARCH_FILE = "tune.json"  # of `finetune train SOURCE --minutes N`
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/")  # `Path` keeps one slash
_CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,})")
# Files with a checksum in run.json, by its key.
_CHECKSUM_KEYS = {
    "results_sha256": "results.json",
    "metrics_sha256": "metrics.jsonl",
    "training_images_sha256": "training_images.json",
}
_BAD_PATH_ERRORS = {errno.EEXIST, errno.ENOTDIR, errno.ENOENT}
_BAD_PATH_ERRORS |= {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
# The RunDir of this process that holds each lock file, by (device, inode).
_HELD_LOCKS: WeakValueDictionary[tuple[int, int], RunDir] = WeakValueDictionary()


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run directory, so that no other process trains it, unless this process has it open.

    Raises: SetupError if another process uses the run.
    """
    if _holds_lock(folder):
        yield
        return
    with contextlib.closing(RunDir(folder)) as run:
        try:
            run.open()
        except SetupError as error:
            if error.code != "setup.in_use":
                raise
            raise SetupError(
                f"{folder}: another process trains or pushes this run; wait until it has ended, "
                "then run the command again",
                code=error.code,
            ) from error
        yield


def lock_run_of_model(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Lock the run whose model/ is a folder, see `lock_run`; do nothing for other folders."""
    run = folder.absolute().parent
    is_of_run = folder.name == "model" and (run / "run.json").is_file()
    return lock_run(run) if is_of_run else contextlib.nullcontext()


def _holds_lock(run: Path) -> bool:
    """True if this process has opened a run directory."""
    lock_path = run / ".lock"
    holder = _HELD_LOCKS.get(_device_and_inode(lock_path)) if os.path.lexists(lock_path) else None
    return holder is not None and holder._lock is not None


def _close_locks_in_child() -> None:
    """Close the inherited lock files in a forked process, so that a lock ends with its parent."""
    for run in list(_HELD_LOCKS.values()):
        if run._lock is not None:
            run._lock.close()
            run._lock = None


os.register_at_fork(after_in_child=_close_locks_in_child)


def whole_run(path: Path) -> Path:
    """Return the folder of the whole run if a folder is that of a stage or of a trial, else it."""
    for folder, file in (("stages", "recipe.yaml"), ("trials", SEARCH_FILE)):
        if path.parent.name == folder and (path.parent.parent / file).is_file():
            return whole_run(path.parent.parent)
    return path


def resume_command(path: Path) -> str:
    """Return the command line that continues the whole run of a folder, for messages.

    A run on a URL with a password or a query needs the address again, which is not stored.
    """
    folder = whole_run(path)
    command = shlex.join(["finetune", "train", str(folder), "--resume"])
    for name in ("recipe.yaml", SEARCH_FILE):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if has_redacted_url((folder / name).read_text(encoding="utf-8")):
                return f"{command} data.source=ADDRESS"
    return command


class RunDir:
    """The folder of one run; only rank 0 writes to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints_folder = self.path / "checkpoints"
        self.model_folder = self.path / "model"
        # Both files are unbuffered: on a full disk, flushing a buffer in `close` would fail again.
        self._lock: IO[bytes] | None = None
        self._metrics: IO[bytes] | None = None
        self._metrics_hash = hashlib.sha256()  # of what the file should have
        self._metrics_run_id: str | None = None

    def open(self, *, timeout_seconds: float = 0.0) -> None:
        """Create and lock the folder, and remove leftovers of an interrupted write.

        Args:
            timeout_seconds: longest wait for another process that holds the lock.
        Raises: SetupError if another running process uses the folder, it is not writable, or it is
            not a run directory; CheckpointError if one of its files is not a regular file.
        """
        lock_path = self.path / ".lock"
        if _URL.match(str(self.path)):
            raise SetupError(
                f"{self.path}: is a URL, which is not supported here; give a folder, and upload it "
                "afterwards",
                code="setup.not_writable",
            )
        with explain_disk_errors(self.path, needed_bytes=4096):
            self._create_folder(lock_path)
            self._lock = open_lock_file(lock_path)
        try:
            # The kernel releases this lock when the process ends.
            _acquire_lock(self._lock, timeout_seconds)
            _HELD_LOCKS[_device_and_inode(lock_path)] = self
        except (BlockingIOError, PermissionError):
            self._lock.seek(0)
            holder = self._lock.read().decode(errors="replace").strip() or "unknown"
            self._lock.close()
            self._lock = None
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
        with explain_disk_errors(self.path, needed_bytes=4096):
            remove_leftovers(self.path)  # before writing: leftovers may fill the disk
            self._lock.truncate(0)
            self._lock.write(f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def _create_folder(self, lock_path: Path) -> None:
        """Create the folder, or check the existing one. Raises: same as `open`."""
        try:
            if self.path.is_dir():
                check_no_symlinks(self.path)
                if _holds_lock(self.path):
                    raise SetupError(
                        f"{self.path}: in use by another run of this process ({os.getpid()}); wait "
                        "until that run has ended, or choose another --out",
                        code="setup.in_use",
                    )
                check_is_run_folder(self.path)
            self.checkpoints_folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            code = getattr(error, "errno", errno.EINVAL)  # ValueError: NUL in the name
            if code not in _BAD_PATH_ERRORS:
                raise
            raise SetupError(
                f"{self.path}: cannot be created ({os.strerror(code)}); choose another --out",
                code="setup.not_writable",
            ) from error

    def close(self) -> None:
        """Close the metrics file and release the lock."""
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()
        self._metrics = self._lock = None

    def _check_not_replaced(self) -> None:
        """Raise SetupError if the open run was moved or removed: the path may be of a new run."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat((self.path / ".lock").stat(), os.fstat(self._lock.fileno())):
                return
        raise SetupError(
            f"{self.path}: was moved, removed or replaced during the run, or the working directory "
            "has changed; nothing more is written to it. Continue the folder, where it is now, "
            "with --resume, or train again with another --out",
            code="setup.replaced",
        )

    # Files of the run -----------------------------------------------------------------------

    def write_recipe(self, text: str) -> None:
        """Write recipe.yaml atomically."""
        self._check_not_replaced()
        write_atomically(self.path / "recipe.yaml", text)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file of the run atomically, formatted by `format_json`."""
        self._check_not_replaced()
        write_atomically(self.path / name, format_json(content))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file of the run. Returns: its content, or None if it does not exist.

        Raises: CheckpointError if it cannot be read or is not valid, if it was changed after the
            run ended.
        """
        path = self.path / name
        limit = MAX_LARGE_BYTES if name == "results.json" else MAX_JSON_BYTES
        try:
            content = check_json_types(path, load_json(path, max_bytes=limit))
        except (FileNotFoundError, NotADirectoryError):
            if name == "results.json" and self._checksum("results_sha256"):
                warn_once(
                    f"{path}: the file is missing; restore it from a copy, or evaluate again: "
                    f"{resume_command(self.path)}"
                )
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read, or is not valid JSON ({error}); restore it from a copy, "
                "or train in another --out",
                code="checkpoint.damaged",
            ) from error
        key = next((key for key, file in _CHECKSUM_KEYS.items() if file == name), None)
        if key is not None and self._has_changed(key):
            again = f" and evaluate again: {resume_command(self.path)}"
            raise CheckpointError(
                f"{path}: was changed after the run ended (its sha256 is not the one in run.json); "
                f"restore it from a copy, or remove it{again if name == 'results.json' else ''}",
                code="checkpoint.damaged",
            )
        return content

    def checksums(self) -> dict[str, str]:
        """Return the entries of run.json with the sha256 of a file, from the files."""
        paths = {key: self.path / name for key, name in _CHECKSUM_KEYS.items()}
        return {key: file_sha256(path) for key, path in paths.items() if path.is_file()}

    def _has_changed(self, key: str) -> bool:
        """True if a file differs from its checksum in run.json, or is missing; False without."""
        checksum, path = self._checksum(key), self.path / _CHECKSUM_KEYS[key]
        return checksum is not None and not (path.is_file() and file_sha256(path) == checksum)

    def _checksum(self, key: str) -> str | None:
        """Return a checksum of run.json; None without one, as while the run proceeds."""
        return (self.read_json("run.json") or {}).get(key)

    def has_changed_metrics(self) -> bool:
        """True if metrics.jsonl was changed by anything but the run."""
        record = self.read_json("run.json") or {}
        if record.get("metrics_changed"):
            return True
        if self._metrics is None:
            return self._has_changed("metrics_sha256")
        path, sha256 = self.path / "metrics.jsonl", self._metrics_hash.hexdigest()
        return not (path.is_file() and file_sha256(path) == sha256)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl; warns if the file was changed since the last line."""
        self._check_not_replaced()
        path = self.path / "metrics.jsonl"
        if self._metrics is not None and self._is_metrics_file_changed(self._metrics):
            warn_once(
                f"{path}: another program has replaced or changed it; lines may be missing, so "
                "curves and claims may be wrong"
            )
            record = self.read_json("run.json") or {}
            self.write_json("run.json", {**record, "metrics_changed": True})
            self._metrics.close()
            self._metrics = None
        if self._metrics is None:
            self._metrics_run_id = self._run_id()
        body = remaining = _format_metrics_line(line, run_id=self._metrics_run_id).encode()
        with explain_disk_errors(path, needed_bytes=len(remaining)):
            if self._metrics is None:
                self._metrics = path.open("ab", buffering=0)
                self._metrics_hash = hashlib.sha256(path.read_bytes())
            end = self._metrics.tell()
            try:
                while remaining:  # on an almost full disk, `write` writes only a part
                    remaining = remaining[self._metrics.write(remaining) :]
            except OSError:
                self._metrics.truncate(end)
                raise
            self._metrics_hash.update(body)

    def _is_metrics_file_changed(self, file: IO[bytes]) -> bool:
        """True if metrics.jsonl is another file than the open one, or does not end where it was."""
        try:
            now = (self.path / "metrics.jsonl").stat()
        except FileNotFoundError:
            return True
        return not os.path.samestat(now, os.fstat(file.fileno())) or now.st_size != file.tell()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl, without lines that are damaged or of another run.

        Logs a warning if the file is missing or was changed, or if lines were skipped.

        Raises: CheckpointError if it is not a regular file, or cannot be read.
        """
        path = self.path / "metrics.jsonl"
        try:
            with open_regular_file(path, max_bytes=MAX_LARGE_BYTES) as file:
                lines = [parse_metrics_line(text) for text in file]
        except FileNotFoundError:
            if self.checkpoint_steps() or (self.path / "results.json").exists():
                warn_once(f"{path}: the file is missing; curves and claims lack its metrics")
            return []
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); restore it from a copy, or train in another "
                "--out",
                code="checkpoint.damaged",
            ) from error
        if self.has_changed_metrics():
            warn_once(
                f"{path}: was changed after the run had written it; curves and claims may be wrong"
            )
        run_id = self._run_id()
        kept = [line for line in lines if line is not None and line.pop("run", None) == run_id]
        if num_skipped := len(lines) - len(kept):
            skipped = pluralize(num_skipped, "line")
            warn_once(
                f"{path}: skipped {skipped}, damaged or of another run; curves and claims lack "
                "their metrics"
            )
        return kept

    def drop_metrics_after(self, step: int) -> None:
        """Drop the metrics of steps after `step`, because a resume from `step` repeats them."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        run_id = self._run_id()
        text = "".join(_format_metrics_line(line, run_id=run_id) for line in kept)
        write_atomically(self.path / "metrics.jsonl", text)

    # Checkpoints ----------------------------------------------------------------------------

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the published checkpoints, ascending, without verifying them."""
        matches = (
            _CHECKPOINT_NAME.fullmatch(entry.name)
            for entry in self.checkpoints_folder.glob("step-*")
        )
        return sorted(int(match[1]) for match in matches if match)

    def checkpoint_folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.checkpoints_folder / f"step-{step:08d}"

    def save_checkpoint(
        self, step: int, write_files: Callable[[Path], None], *, num_bytes: int
    ) -> None:
        """Write and publish the checkpoint of a step, or change nothing.

        Args:
            step: number of optimizer steps done.
            write_files: function that writes the files into a temporary folder, its argument.
            num_bytes: estimated size, for the error message if the disk is full.
        Raises: SetupError if the disk is full or not writable.
        """
        self._check_not_replaced()
        target = self.checkpoint_folder(step)
        # a random name rather than the process id, because containers reuse process ids
        temporary = self.checkpoints_folder / f".{target.name}.{os.urandom(4).hex()}"
        try:
            with explain_disk_errors(target, needed_bytes=num_bytes):
                _write_checkpoint_folder(temporary, write_files, run_id=self._run_id())
                if os.path.lexists(target):  # a damaged checkpoint that a resume skipped
                    remove_path(target)
                os.replace(temporary, target)
                fsync_folder(self.checkpoints_folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def publish_model(self, write_files: Callable[[Path], None], *, num_bytes: int) -> None:
        """Replace the whole folder `model/` with the files that `write_files` writes.

        Args: same as for `save_checkpoint`.
        """
        self._check_not_replaced()
        name = os.urandom(4).hex()
        temporary = self.path / f".model.{name}.tmp"
        old = self.path / f".model.old.{name}.tmp"
        try:
            with explain_disk_errors(self.model_folder, needed_bytes=num_bytes):
                temporary.mkdir()
                write_files(temporary)
                _sync_files(temporary)
                if os.path.lexists(self.model_folder):
                    os.replace(self.model_folder, old)
                os.replace(temporary, self.model_folder)
                fsync_folder(self.path)
        finally:
            # restore the old model if the process stopped between the two renames
            if not os.path.lexists(self.model_folder) and old.is_dir():
                os.replace(old, self.model_folder)
            for path in (temporary, old):
                with contextlib.suppress(OSError):
                    remove_path(path)

    def has_model(self) -> bool:
        """True if `model/` has the files that a loader needs; damage is logged as a warning."""
        names = ("config.json", "model.safetensors")
        if not all((self.model_folder / name).is_file() for name in names):
            return False
        try:
            verify_model_folder(self.model_folder, source=str(self.path))
        except WeightsError as error:
            logger.warning(f"rebuilding model/: {error}")
            return False
        return True

    def _run_id(self) -> str | None:
        """Return the id in run.json, which is also in the manifests of the run's checkpoints."""
        return (self.read_json("run.json") or {}).get("id")

    def verify_checkpoint(self, step: int) -> str | None:
        """Check that a checkpoint is intact and of this run. Returns: the problem, or None."""
        folder = self.checkpoint_folder(step)
        if not folder.is_dir():
            return f"{folder}: the folder is missing"
        try:
            manifest = load_json(folder / MANIFEST)
            files = manifest["files"]
            if manifest["step"] != step or manifest["sha256"] != json_sha256(files):
                return f"{folder / MANIFEST}: the manifest was changed"
            if manifest["run"] != self._run_id():
                return f"{folder}: this is a checkpoint of another run"
            for name, entry in files.items():
                path = folder / name
                if not path.is_file():
                    return f"{path}: the file is missing"
                if path.stat().st_size != entry["bytes"]:
                    return f"{path}: {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
                if file_sha256(path) != entry["sha256"]:
                    return f"{path}: its sha256 differs from the manifest"
            for path in folder.iterdir():  # an added ema.safetensors would be used
                if path.suffix in (".safetensors", ".json") and path.name not in (*files, MANIFEST):
                    return f"{path}: is not in the manifest"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{folder / MANIFEST}: {type(error).__name__}: {error}"
        return None

    def newest_intact_step(self, steps: Sequence[int] | None = None) -> int | None:
        """Find the newest intact checkpoint, and log a warning for each one that it skips.

        Args:
            steps: the checkpoints to choose from, ascending; None for all.
        Returns: the step of the newest intact one, or None if there is no checkpoint.
        Raises: CheckpointError if all checkpoints are damaged.
        """
        steps = self.checkpoint_steps() if steps is None else steps
        for step in reversed(steps):
            problem = self.verify_checkpoint(step)
            if problem is None:
                return step
            logger.warning(f"checkpoint of step {step} is skipped: {problem}")
        if steps:
            raise CheckpointError(
                f"{self.checkpoints_folder}: none of the {len(steps)} checkpoints is intact; "
                "train again without --resume in another --out",
                code="checkpoint.damaged",
            )
        return None

    def best_step_at(self, step: int) -> int | None:
        """Return the step of the best checkpoint, as recorded in the checkpoint of `step`."""
        try:
            best = load_json(self.checkpoint_folder(step) / "state.json")["best_step"]
        except (OSError, ValueError, TypeError, KeyError):
            return None  # damaged: a resume skips it, so its best one is not needed
        return best if isinstance(best, int) else None

    def copy_checkpoint(self, source: RunDir, step: int, *, run_id: str | None) -> None:
        """Copy an intact checkpoint of another run, as a checkpoint of this run.

        Args:
            run_id: the id of the other run.
        Raises: CheckpointError if it changes meanwhile, because the other run is training or was
            replaced; SetupError if the disk is full or not writable.
        """
        folder = source.checkpoint_folder(step)

        def copy_files(target: Path) -> None:
            for name, entry in files.items():
                copy = target / Path(name).name
                shutil.copyfile(folder / name, copy)
                if file_sha256(copy) != entry["sha256"]:
                    raise FileNotFoundError(folder / name)

        try:
            manifest = load_json(folder / MANIFEST)
            if manifest["run"] != run_id:
                raise FileNotFoundError(folder)
            files = manifest["files"]
            num_bytes = sum(entry["bytes"] for entry in files.values())
            self.save_checkpoint(step, copy_files, num_bytes=num_bytes)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder}: was changed or removed while it was copied; run the command again",
                code="checkpoint.damaged",
            ) from error

    def prune_checkpoints(self, keep: set[int]) -> None:
        """Remove all checkpoints except those of the given steps."""
        self._check_not_replaced()
        for step in self.checkpoint_steps():
            if step not in keep:
                # Rename first: an interruption must not leave half a checkpoint published.
                temporary = self.checkpoints_folder / f".doomed-{step}"
                os.replace(self.checkpoint_folder(step), temporary)
                with contextlib.suppress(OSError):
                    remove_path(temporary)


def unique_run_names(folders: Sequence[Path]) -> list[str]:
    """Return the folder names of runs, with as many parent folders as needed to be unique."""
    paths = [folder.resolve().parts for folder in folders]
    names = []
    for parts in paths:
        depths = range(1, len(parts) + 1)
        unique = (
            depth
            for depth in depths
            if sum(other[-depth:] == parts[-depth:] for other in paths) == 1
        )
        names.append("/".join(parts[-next(unique, 1) :]))
    return names


def format_json(content: Mapping[str, Any]) -> str:
    """Format a JSON file of a run: indented, but compact for results with over 1,000 classes."""
    parts = (content, *content.values())
    is_large = any(isinstance(p, dict) and isinstance(p.get("confusion"), dict) for p in parts)
    separators = (",", ":") if is_large else None
    indent = None if is_large else 2
    return json.dumps(content, indent=indent, separators=separators, allow_nan=False) + "\n"


def _format_metrics_line(line: Mapping[str, Any], *, run_id: str | None) -> str:
    return json.dumps({**line, "run": run_id}, allow_nan=False) + "\n"


def _device_and_inode(path: Path) -> tuple[int, int]:
    """Return (device, inode), which identify a file under any name."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def _acquire_lock(lock: IO[bytes], timeout_seconds: float) -> None:
    """Lock a file. Raises: BlockingIOError or PermissionError if another process keeps the lock.

    Unlike with `lockf`, the lock stays if this process opens and closes the file once more, for
    example to copy the folder.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.2)


def _sync_files(folder: Path) -> None:
    """Give each file the umask's default mode (safetensors uses 0600), and sync it to disk."""
    umask = os.umask(0)
    os.umask(umask)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        path.chmod(0o666 & ~umask)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_checkpoint_folder(
    folder: Path, write: Callable[[Path], None], *, run_id: str | None
) -> None:
    """Write the files of a checkpoint, sync them to disk, and write the manifest last."""
    folder.mkdir()
    write(folder)
    _sync_files(folder)
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    step = int(folder.name.split("-")[1].split(".")[0])
    # the sha256 of the entries reveals damage in the manifest itself
    manifest = {"run": run_id, "step": step, "files": files, "sha256": json_sha256(files)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        fsync_file(file)
    fsync_folder(folder)
