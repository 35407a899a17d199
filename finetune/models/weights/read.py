"""Read tensors from an untrusted file: damage, pickles, archive bombs and NaN are refused."""

from __future__ import annotations

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
# Weights hardly compress, beside a few zeros; an archive beyond both limits does not hold weights.
LARGEST_RATIO = 100  # unpacked bytes to those of the file; deflate reaches 1000 at most
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
            f"{path.name}: cannot be read ({error.strerror or error}); check the file",
            code="weights.unreadable",
        ) from error
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(
            f"{path.name}: holds no tensors; give a file of weights", code="weights.empty"
        )
    for name, tensor in tensors.items():
        _check_plain(path, name, tensor)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise WeightsError(
                f"{path.name}: tensor '{name}' holds {count} NaN or infinite values; the training "
                f"that wrote it diverged, use an earlier checkpoint",
                code="weights.not_finite",
            )
    return tensors


def _check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse tensors that only a pickle can hold: sparse ones, and views of fewer numbers."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise WeightsError(
            f"{path.name}: tensor '{name}' is sparse or has no numbers; save dense tensors",
            code="weights.wrong_format",
        )
    claimed = tensor.numel() * tensor.element_size()
    if claimed > HARMLESS_BYTES and claimed > tensor.untyped_storage().nbytes():
        raise WeightsError(
            f"{path.name}: tensor '{name}' repeats few numbers up to {claimed:,} bytes, which is "
            f"no weight; save it with clone()",
            code="weights.too_large",
        )


def _sniff(path: Path) -> None:
    """Refuse what downloads leave in the place of weights: a web page, a pointer, an empty file."""
    with path.open("rb") as file:
        head = file.read(256)
    text = head.lstrip().lower()
    if head.startswith(LFS_POINTER):
        raise WeightsError(
            f"{path.name}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder",
            code="weights.wrong_format",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise WeightsError(
            f"{path.name}: is a web page, not weights; download the file itself (on the hub: "
            f"/resolve/ in the address, not /blob/)",
            code="weights.wrong_format",
        )
    if not head:
        raise WeightsError(f"{path.name}: is empty; download it again", code="weights.empty")


def _damaged(path: Path, detail: object) -> WeightsError:
    return WeightsError(
        f"{path.name}: truncated or damaged ({detail}); download it again", code="weights.damaged"
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _refuse_bomb(path: Path) -> None:
    """Refuse a zip archive that would unpack to far more than weights, by its directory alone.

    A directory that states too little does no harm: zipfile reads no further than the stated size,
    and torch allocates no more than that.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # of any type on damaged bytes, as below
        raise _damaged(path, error) from error
    size, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if unpacked > HARMLESS_BYTES and unpacked > LARGEST_RATIO * size:
        raise WeightsError(
            f"{path.name}: would unpack from {size:,} to {unpacked:,} bytes, more than "
            f"{LARGEST_RATIO} times as many, which weights never do; get them from somebody else",
            code="weights.too_large",
        )
    # zipfile unpacks whole blocks of the other methods before it looks at the size
    if not {member.compress_type for member in members} <= {
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    }:
        raise WeightsError(
            f"{path.name}: packed in a way that neither NumPy nor torch writes; pack it again with "
            f"deflate",
            code="weights.wrong_format",
        )


def _read_npz(path: Path) -> dict[str, Tensor]:
    if not _is_zip(path):  # numpy takes anything else for a pickle
        raise WeightsError(
            f"{path.name}: not a NumPy archive; download it again", code="weights.wrong_format"
        )
    _refuse_bomb(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
    except ValueError as error:
        # NumPy's message is left out: it advises to read the objects all the same.
        raise WeightsError(
            f"{path.name}: holds Python objects or damaged arrays; it is not read, since objects "
            f"could run code; ask its author for .safetensors",
            code="weights.unsafe",
        ) from error
    except Exception as error:  # of any type: NumPy hands headers to Python's tokenizer
        raise _damaged(path, error) from error
    arrays = {name: a for name, a in members.items() if isinstance(a, np.ndarray)}
    return {name: torch.from_numpy(a) for name, a in arrays.items() if a.dtype.kind in "fiu"}


def _read_pickled(path: Path) -> dict[str, Any]:
    if _is_zip(path):
        _refuse_bomb(path)
    try:
        return load_state_dict(str(path), weights_only=True)
    except (EOFError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error
    except Exception as error:  # torch raises a different type for each way a file is broken
        text = str(error)
        if "weights_only" in text or "globals" in text:
            raise WeightsError(
                f"{path.name}: refused, since reading it could run code that it carries; ask its "
                f"author for the same weights as .safetensors",
                code="weights.unsafe",
            ) from None  # torch's and timm's messages advise to run it
        raise _damaged(path, text.partition("\n")[0] or type(error).__name__) from error
