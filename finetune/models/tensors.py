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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a .safetensors, .npz or pickled PyTorch file onto the CPU.

    Pickled files go through torch's restricted reader, which builds tensors and plain containers
    and refuses everything else; NumPy archives are read without pickle.

    Returns: name to tensor, every floating one finite.
    Raises: WeightsError for a web page, an LFS pointer, a truncated or damaged file, a file that
        would run code, an empty one, or NaN and infinities.
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
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise WeightsError(
                f"{path.name}: tensor '{name}' holds {bad} NaN or infinite values; the training "
                f"that wrote it diverged, use an earlier checkpoint"
            )
    return tensors


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


def _read_npz(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        if file.read(2) != b"PK":  # numpy takes anything else for a pickle
            raise WeightsError(f"{path.name}: not a NumPy archive; download it again")
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
