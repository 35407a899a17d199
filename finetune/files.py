"""Safe file access: regular files only, atomic writes, and clear errors for a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from finetune.errors import RecipeError, SetupError, WeightsError, escape_control_chars
from finetune.formatting import escape_to_one_line

__all__ = [
    "atomic_replace",
    "check_not_overwriting_inputs",
    "check_output_file",
    "describe_file_type",
    "explain_disk_errors",
    "file_sha256",
    "fsync_file",
    "fsync_folder",
    "git_blob_sha1",
    "is_outside_link",
    "make_writable_folder",
    "open_regular_file",
    "read_untrusted_json",
    "remove_path",
    "staging_folder",
    "stat_signature",
    "write_atomically",
]

MAX_JSON_BYTES = 8 * 2**20  # ImageNet-21k's class names and descriptions take 2 MB
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def file_sha256(path: Path) -> str:
    """Return the hexadecimal sha256 of a file's bytes."""
    return _hash_file(path, hashlib.sha256())


def git_blob_sha1(path: Path) -> str:
    """Return the hexadecimal sha1 that git gives the file as a blob."""
    head = b"blob %d\0" % path.stat().st_size
    return _hash_file(path, hashlib.sha1(head, usedforsecurity=False))


def _hash_file(path: Path, digest: Any) -> str:
    with path.open("rb") as file:  # Python 3.10 has no hashlib.file_digest
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def open_regular_file(path: Path, *, max_bytes: int | None = None) -> IO[bytes]:
    """Open a regular file for reading; opening a named pipe would block forever.

    Args:
        path: path of the file; symbolic links are followed.
        max_bytes: maximum size of the file; None for no limit.
    Raises: OSError if the file cannot be opened; ValueError if it is not a regular file, or is too
        large.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"this is {describe_file_type(mode)}, not a file")
    file = path.open("rb")
    if max_bytes is not None and (size := os.fstat(file.fileno()).st_size) > max_bytes:
        file.close()
        raise ValueError(f"{size:,} bytes are more than the {max_bytes:,} allowed")
    return file


def stat_signature(file: int | bytes | str | os.PathLike[str]) -> tuple[int, int, int, int, int]:
    """Return device, inode, size, mtime and ctime of a file; symlinks are followed.

    Args:
        file: a path or a file descriptor.
    """
    status = os.stat(file)
    device, inode = status.st_dev % 2**63, status.st_ino % 2**63
    return device, inode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_outside_link(path: Path, folder: Path) -> bool:
    """Return True for a symlink that points outside its folder or to a hidden file.

    Args:
        path: path of the file below `folder`.
        folder: folder that may itself be a symlink; folders between both may not.
    """
    real = path.resolve()
    expected = (folder.resolve() / path.relative_to(folder)).parent
    return real.parent != expected or (path.is_symlink() and real.name.startswith("."))


def read_untrusted_json(path: Path, label: str) -> Any:
    """Read an untrusted JSON file of at most MAX_JSON_BYTES.

    Args:
        path: the JSON file.
        label: name of the file, for messages.
    Raises: WeightsError for a file that is unreadable, too large, or not JSON.
    """
    try:
        with open_regular_file(path, max_bytes=MAX_JSON_BYTES) as file:
            content = file.read(MAX_JSON_BYTES)
    except OSError as error:
        raise WeightsError(
            f"{label} is not readable ({error.strerror}); check the file", code="weights.unreadable"
        ) from error
    except ValueError as error:
        raise WeightsError(
            f"{label} cannot be used ({error}); restore it from a copy or download it again",
            code="weights.wrong_format",
        ) from error
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{label} is not JSON ({error}); restore it from a copy or download it again",
            code="weights.damaged",
        ) from error


def describe_file_type(mode: int) -> str:
    """Describe the `st_mode` of something that is not a regular file, for error messages."""
    return "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"


def write_atomically(path: Path, content: str | bytes, *, option: str = "--out") -> None:
    """Write a file with `atomic_replace`; text is encoded as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    writing = explain_disk_errors(path, needed_bytes=len(data), option=option)
    with atomic_replace(path, option=option) as temporary, writing:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_replace(path: Path, *, option: str = "--out") -> Iterator[Path]:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    Args:
        path: the file to replace or create; its folder must exist.
        option: command-line option that sets the path, for the error message.
    Yields: a temporary path to write to; it becomes `path` if the block ends without an error.
    Raises: SetupError if the disk is full or the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with explain_disk_errors(path, option=option):
            temporary.touch()
        yield temporary
        with explain_disk_errors(path, option=option):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_folder(path.parent)
    finally:
        # an OSError means a folder without write access, so the file was never created
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target`, for files that are moved once all are written.

    It is removed at the end of the block, or by the next call if the process is killed.

    Raises: SetupError if another process has a folder for the same target.
    """
    target = target.absolute()  # "." has no name
    folder = target.with_name(f".{target.name}.tmp")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SetupError(
            f"{target}: another process is writing it; wait for its end, or choose another --out",
            code="setup.in_use",
        ) from None
    try:
        for path in folder.iterdir():
            remove_path(path)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_path(path: Path) -> None:
    """Remove a file, a folder with its content, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_writable_folder(folder: Path, *, option: str) -> None:
    """Create a folder and its parents if needed, and check that it is writable.

    Args:
        folder: path of the folder.
        option: command-line option that sets the folder, such as --out, for the error message.
    Raises: SetupError if the folder cannot be created or is not writable.
    """
    with explain_disk_errors(folder, needed_bytes=4096, option=option):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise SetupError(
                f"{option}: '{folder}' is not a folder; choose another path",
                code="setup.not_writable",
            ) from error
    if not os.access(folder, os.W_OK):
        raise SetupError(
            f"{option}: '{folder}' is not writable; choose another folder",
            code="setup.not_writable",
        )


@contextlib.contextmanager
def explain_disk_errors(
    path: Path, *, needed_bytes: int = 0, option: str = "--out"
) -> Iterator[None]:
    """Re-raise write errors of the block as a SetupError with a clear message.

    Args:
        path: the file that the block writes.
        needed_bytes: bytes that the write needs, or 0 if unknown.
        option: command-line option that sets the path, for the error message.
    Raises: SetupError if the disk or quota is full, or if the path cannot be written: access is
        denied, the name is too long, or the device fails.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _errno_of(error)
        if not number:  # raised by safetensors itself, not by the operating system
            raise
        if number in _DISK_FULL_ERRNOS:
            size = f"{needed_bytes:,} bytes are needed" if needed_bytes else os.strerror(number)
            raise SetupError(
                f"{path}: the disk is full ({size}); earlier files are kept: free some space, then "
                "run the command again (training with --resume)",
                code="setup.disk_full",
            ) from error
        raise SetupError(
            f"{escape_control_chars(str(path))}: cannot be written ({os.strerror(number)}); choose "
            f"another {option}",
            code="setup.not_writable",
        ) from error


def _errno_of(error: Exception) -> int:
    """Return the errno of an error, or 0; a SafetensorError has it only in its message."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match.group(1)) if match else 0


def fsync_file(file: IO[Any]) -> None:
    """Flush a file's content to the disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- output files ---------------------------------------------------------------------------------


def check_output_file(path: str | Path, *, option: str, suffixes: Sequence[str]) -> Path:
    """Check that an output file can be written, before the work starts.

    Args:
        path: the output file.
        option: command-line option that sets the file, such as --out, for the error message.
        suffixes: allowed suffixes, such as ".csv".
    Returns: the path.
    Raises: RecipeError if the suffix is not allowed; SetupError if the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise RecipeError(
            f"{option}: '{path}' has an unknown suffix; use {' or '.join(suffixes)}",
            code="recipe.wrong_value",
        )
    if not path.parent.is_dir():
        raise SetupError(
            f"{option}: the folder '{path.parent}' does not exist; create it first",
            code="setup.not_writable",
        )
    if path.is_dir():
        raise SetupError(
            f"{option}: '{path}' is a folder; choose another file name",
            code="setup.not_writable",
        )
    if not os.access(path.parent, os.W_OK):
        raise SetupError(
            f"{option}: '{path}' cannot be written (read-only folder); choose another folder",
            code="setup.not_writable",
        )
    return path


def check_not_overwriting_inputs(
    image_paths: Iterable[str], outputs: Mapping[str, Path | None]
) -> None:
    """Check that no output would overwrite an input image.

    Args:
        image_paths: paths of the input images.
        outputs: dict from each command-line option to its output file, which is None if the option
            is not given.
    Raises: RecipeError that names the option and the image.
    """
    written = {os.path.realpath(path): option for option, path in outputs.items() if path}
    for path in image_paths if written else ():
        option = written.get(os.path.realpath(path))
        if option is not None:
            raise RecipeError(
                f"{option}: would overwrite the input {escape_to_one_line(path)}; "
                "choose another file",
                code="recipe.conflict",
            )
