"""Read tensors from an untrusted file; reject damaged files, pickled code, zip bombs and NaN."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor

from finetune.errors import WeightsError, weights_changed_error
from finetune.files import file_sha256, stat_signature
from finetune.log import logger

__all__ = ["WeightsFile", "read_tensors"]

LFS_POINTER_PREFIX = b"version https://git-lfs"
# Weights hardly compress, except zeros; an archive that exceeds both limits cannot hold weights.
MAX_UNPACK_RATIO = 100  # unpacked bytes over file bytes; deflate reaches at most 1000
ALWAYS_ALLOWED_BYTES = 64 * 2**20
# Entries of a training checkpoint that hold weights, in timm's order of preference.
_CHECKPOINT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")


@dataclass(frozen=True)
class WeightsFile:
    """A weights file as it was when it was read; its tensors may be mapped until they are copied.

    Attributes:
        path: path of the file.
        signature: device, inode, size, mtime and ctime.
    """

    path: Path
    signature: tuple[int, ...]

    @classmethod
    def snapshot(cls, path: Path) -> WeightsFile:
        """Record the file's signature before it is read; a missing file has an empty one."""
        try:
            return cls(path, stat_signature(path))
        except OSError:
            return cls(path, ())

    def check_unchanged(self, source: object, sha256: str) -> None:
        """Raise WeightsError if the file has been replaced or written since.

        Another ctime alone may come from a new hard link; the content is then compared.

        Args:
            source: name of the model as the user gave it, for messages.
            sha256: sha256 of the file when it was read.
        """
        now = WeightsFile.snapshot(self.path).signature
        if now[:-1] != self.signature[:-1] or (
            now != self.signature and file_sha256(self.path) != sha256
        ):
            raise weights_changed_error(f"{source}: {self.path.name}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a .safetensors, .npz or pickled PyTorch file onto the CPU.

    Pickled files go through torch's restricted unpickler, which builds only tensors and plain
    containers; NumPy archives are read without pickle.

    Returns: {name: tensor}; all floating-point tensors are finite.
    Raises: WeightsError for a web page, a Git LFS pointer, a truncated, damaged or empty file, a
        file that would run code, a file that unpacks to far more than its size, quantized weights,
        names that are not unique without their prefixes, or NaN or infinite values.
    """
    reader = {".safetensors": _read_safetensors, ".npz": _read_npz}.get(path.suffix, _read_pickled)
    try:
        _check_first_bytes(path)
        content: Mapping[str, Any] = reader(path)
    except OSError as error:  # for example a symlink loop, a folder, or no permission
        raise WeightsError(
            f"{path.name}: cannot read the file ({error.strerror or error}); check it",
            code="weights.unreadable",
        ) from error
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(
            f"{path.name}: contains no tensors; give a weights file", code="weights.empty"
        )
    for name, tensor in tensors.items():
        _check_dense(path, name, tensor)
        _check_not_quantized(path, name, tensor)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise WeightsError(
                f"{path.name}: tensor '{name}' has {count} NaN or infinite values, so the "
                f"training run diverged; use an earlier checkpoint",
                code="weights.not_finite",
            )
    return tensors


def _check_dense(path: Path, name: str, tensor: Tensor) -> None:
    """Raise WeightsError for sparse tensors and expanded views, which only a pickle can contain."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise WeightsError(
            f"{path.name}: tensor '{name}' is sparse or has no data; save dense tensors",
            code="weights.wrong_format",
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes > ALWAYS_ALLOWED_BYTES and num_bytes > tensor.untyped_storage().nbytes():
        raise WeightsError(
            f"{path.name}: tensor '{name}' is a view that expands fewer numbers to {num_bytes:,} "
            f"bytes; save a copy of it, made with clone()",
            code="weights.too_large",
        )


def _check_not_quantized(path: Path, name: str, tensor: Tensor) -> None:
    """Raise WeightsError for 8-bit floats and integer weights: they need scales."""
    is_8bit_float = tensor.is_floating_point() and tensor.element_size() == 1
    if is_8bit_float or (name.endswith(("weight", "kernel")) and not tensor.is_floating_point()):
        raise WeightsError(
            f"{path.name}: tensor '{name}' has the type {tensor.dtype}, as in quantized weights; "
            "use weights in float32, float16 or bfloat16",
            code="weights.unsupported",
        )


def _check_first_bytes(path: Path) -> None:
    """Raise WeightsError for common failed downloads: a web page, an LFS pointer, an empty file."""
    with path.open("rb") as file:
        head = file.read(256)
    text = head.lstrip().lower()
    if head.startswith(LFS_POINTER_PREFIX):
        raise WeightsError(
            f"{path.name}: this is a Git LFS pointer, not the weights; run `git lfs pull` in its "
            f"folder",
            code="weights.wrong_format",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise WeightsError(
            f"{path.name}: this is a web page, not weights; download the file itself (on the Hub: "
            f"/resolve/ in the URL, not /blob/)",
            code="weights.wrong_format",
        )
    if not head:
        raise WeightsError(f"{path.name}: empty file; download it again", code="weights.empty")


def _damaged_error(path: Path, detail: object) -> WeightsError:
    return WeightsError(
        f"{path.name}: truncated or damaged ({detail}); download it again", code="weights.damaged"
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise _damaged_error(path, error) from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _check_zip_bomb(path: Path) -> None:
    """Raise WeightsError for a zip archive that would unpack to too many bytes.

    The check reads only the zip directory. A directory that understates a size is harmless: zipfile
    reads, and torch allocates, at most the stated size.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # damaged bytes can raise any exception type
        raise _damaged_error(path, error) from error
    size, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if unpacked > ALWAYS_ALLOWED_BYTES and unpacked > MAX_UNPACK_RATIO * size:
        raise WeightsError(
            f"{path.name}: unpacks from {size:,} to {unpacked:,} bytes, more than "
            f"{MAX_UNPACK_RATIO} times as many, so it cannot hold weights; use another file",
            code="weights.too_large",
        )
    # with other compression methods zipfile unpacks whole blocks before it checks the size
    if not {member.compress_type for member in members} <= {
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    }:
        raise WeightsError(
            f"{path.name}: uses a compression method that neither NumPy nor torch writes; compress "
            f"it again with deflate",
            code="weights.wrong_format",
        )


def _read_npz(path: Path) -> dict[str, Tensor]:
    if not _is_zip(path):  # NumPy would read any other file as a pickle
        raise WeightsError(
            f"{path.name}: not a NumPy archive; download it again", code="weights.wrong_format"
        )
    _check_zip_bomb(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
    except ValueError as error:
        # do not quote NumPy's message, which advises loading the objects anyway
        raise WeightsError(
            f"{path.name}: contains Python objects, which could run code, or damaged arrays; ask "
            f"its author for .safetensors",
            code="weights.unsafe",
        ) from error
    except Exception as error:  # any type, because NumPy passes headers to Python's tokenizer
        raise _damaged_error(path, error) from error
    arrays = {name: a for name, a in members.items() if isinstance(a, np.ndarray)}
    return {name: torch.from_numpy(a) for name, a in arrays.items() if a.dtype.kind in "fiu"}


def _read_pickled(path: Path) -> dict[str, Any]:
    if _is_zip(path):
        _check_zip_bomb(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        names = [name for name in _CHECKPOINT_KEYS if isinstance(checkpoint.get(name), Mapping)]
        state = checkpoint[names[0]] if names else checkpoint
        tensors = clean_state_dict(state)
    except (EOFError, zipfile.BadZipFile) as error:
        raise _damaged_error(path, error) from error
    except Exception as error:  # torch raises a different type for each way a file is broken
        text = str(error)
        if "weights_only" in text or "globals" in text:
            raise WeightsError(
                f"{path.name}: not loaded, because it could run code; ask its author for the same "
                f"weights as .safetensors",
                code="weights.unsafe",
            ) from None  # torch's and timm's messages advise loading it anyway
        raise _damaged_error(path, text.partition("\n")[0] or type(error).__name__) from error
    if len(tensors) < len(state):
        raise WeightsError(
            f"{path.name}: tensors have the same name without the prefixes of DDP and "
            "torch.compile (module., _orig_mod.); keep one of each name",
            code="weights.other_names",
        )
    if len(names) > 1:
        logger.info(f"{path.name}: has weights in {', '.join(names)}; {names[0]} is used")
    return tensors
