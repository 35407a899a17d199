"""Read tensors from a file without trusting it: formats, truncation, pickles, NaN, checksums."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import load_state_dict
from torch import Tensor

from finetune.errors import WeightsError

__all__ = ["read_tensors"]

LFS_POINTER = b"version https://git-lfs"
LARGEST_HEADER = 100_000_000  # bytes. Source: safetensors/src/tensor.rs, MAX_HEADER_SIZE
# Weights are hardly compressible, beside a few zeros; what is beyond both of these is no archive
# of weights.
LARGEST_RATIO = 100  # unpacked bytes to those of the file; deflate comes to 1000 at most
HARMLESS_BYTES = 64 * 2**20


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a .safetensors, .npz or pickled PyTorch file onto the CPU.

    Pickled files go through torch's restricted reader, which builds tensors and plain containers
    and refuses everything else; NumPy archives are read without pickle.

    Returns: name to tensor, every floating one finite.
    Raises: WeightsError for a web page, an LFS pointer, a truncated or damaged file, a file that
        would run code, one that would take far more memory than it has bytes, an empty one, or
        NaN and infinities.
    """
    reader = {".safetensors": _read_safetensors, ".npz": _read_npz}.get(path.suffix, _read_pickled)
    try:
        _sniff(path)
        content: Mapping[str, Any] = reader(path)
    except OSError as error:  # a link to itself, a folder, no permission
        raise WeightsError(
            f"{path.name}: cannot be read ({error.strerror or error}); check the file"
        ) from error
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{path.name}: holds no tensors; give a file of weights")
    for name, tensor in tensors.items():
        _check_plain(path, name, tensor)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise WeightsError(
                f"{path.name}: tensor '{name}' holds {bad} NaN or infinite values; the training "
                f"that wrote it diverged, use an earlier checkpoint"
            )
    return tensors


def _check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse what only a pickle can hold: tensors that have not a number in the file for each."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise WeightsError(
            f"{path.name}: tensor '{name}' is sparse or has no numbers; save dense tensors"
        )
    claimed = tensor.numel() * tensor.element_size()
    if claimed > HARMLESS_BYTES and claimed > tensor.untyped_storage().nbytes():
        raise WeightsError(
            f"{path.name}: tensor '{name}' repeats few numbers up to {claimed:,} bytes, which is "
            f"no weight; save it with clone()"
        )


def _sniff(path: Path) -> None:
    """Refuse the two things that are found under the name of weights: a page and a pointer."""
    with path.open("rb") as file:
        head = file.read(256)
    text = head.lstrip().lower()
    if head.startswith(LFS_POINTER):
        raise WeightsError(
            f"{path.name}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise WeightsError(
            f"{path.name}: is a web page, not weights; download the file itself (on the hub: "
            f"/resolve/ in the address, not /blob/)"
        )
    if not head:
        raise WeightsError(f"{path.name}: is empty; download it again")


def _truncated(path: Path, detail: object) -> WeightsError:
    return WeightsError(f"{path.name}: truncated or damaged ({detail}); download it again")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        (header_size,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (size,)
        if 8 + header_size > size:
            raise _truncated(path, f"{size} bytes, the header alone needs more")
        if header_size > LARGEST_HEADER:
            raise WeightsError(
                f"{path.name}: a header of {header_size:,} bytes, more than safetensors' limit of "
                f"{LARGEST_HEADER:,}; download it again"
            )
        try:
            header = json.loads(file.read(header_size))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            expected = 8 + header_size + max(ends, default=0)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise _truncated(path, "its header is not safetensors'") from error
    if size < expected:
        raise _truncated(path, f"{size} of {expected} bytes")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise _truncated(path, error) from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _refuse_bomb(path: Path) -> None:
    """Refuse, by its directory alone, a zip archive that would unpack to far more than weights.

    Whoever unpacks it stops at the sizes that the directory says, if it says less than there is:
    zipfile reads on to no more than that, and torch has no more room.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # of any type on damaged bytes, as below
        raise _truncated(path, error) from error
    size, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if unpacked > HARMLESS_BYTES and unpacked > LARGEST_RATIO * size:
        raise WeightsError(
            f"{path.name}: would unpack from {size:,} to {unpacked:,} bytes, more than "
            f"{LARGEST_RATIO} times as many, which weights never do; get them from somebody else"
        )
    # zipfile unpacks whole blocks of the other methods before it looks at the size
    if not {member.compress_type for member in members} <= {
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    }:
        raise WeightsError(
            f"{path.name}: packed in a way that neither NumPy nor torch writes; pack it again with "
            f"deflate"
        )


def _read_npz(path: Path) -> dict[str, Tensor]:
    if not _is_zip(path):  # numpy takes anything else for a pickle
        raise WeightsError(f"{path.name}: not a NumPy archive; download it again")
    _refuse_bomb(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
    except ValueError as error:
        # The cause is left out: it advises to read the objects all the same.
        raise WeightsError(
            f"{path.name}: holds Python objects or damaged arrays; it is not read, since objects "
            f"could run code"
        ) from error
    except Exception as error:  # of any type: NumPy hands headers to Python's tokenizer
        raise _truncated(path, error) from error
    arrays = {name: a for name, a in members.items() if isinstance(a, np.ndarray)}
    return {name: torch.from_numpy(a) for name, a in arrays.items() if a.dtype.kind in "fiu"}


def _read_pickled(path: Path) -> dict[str, Any]:
    if _is_zip(path):
        _refuse_bomb(path)
    try:
        return load_state_dict(str(path), weights_only=True)
    except (EOFError, zipfile.BadZipFile) as error:
        raise _truncated(path, error) from error
    except Exception as error:  # torch raises a different type for each way a file is broken
        text = str(error)
        if "weights_only" in text or "globals" in text:
            raise WeightsError(
                f"{path.name}: refused, since reading it could run code that it carries; ask its "
                f"author for the same weights as .safetensors"
            ) from None  # torch's and timm's own words advise to run it
        raise _truncated(path, text.partition("\n")[0] or type(error).__name__) from error
