"""The cache of extracted features: one verified .npy file per split."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from finetune.cache import CacheFolder
from finetune.formatting import format_bytes
from finetune.log import logger

__all__ = [
    "FORMAT_VERSION",
    "read_cached_features",
    "remove_cached_features",
    "write_cached_features",
]

FORMAT_VERSION = 2  # part of every cache key
MAX_CACHE_BYTES = 20 * 2**30
_FILE_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}\.npy")
_HEADER_BYTES = 128  # length to which NumPy pads its headers


def read_cached_features(folder: Path, key: str, *, num_images: int) -> NDArray[np.float32] | None:
    """Read cached features and verify every byte of the file.

    Args:
        key: cache key, a hexadecimal sha256.
        num_images: number of rows, N, that the file must have.
    Returns: features (N, D), read-only; None if the cache has no intact file. Damaged files are
        removed.
    """
    try:
        with CacheFolder(folder) as cache:
            for name in cache.list_files(key, ".npy"):
                try:
                    values_ND = _read_feature_file(cache, name, key, num_images)
                    cache.mark_used(name)
                    return values_ND
                except FileNotFoundError:
                    continue  # another process evicted it, or removed it as damaged
                except ValueError as error:
                    cache.remove(name)
                    logger.warning(
                        f"{folder / name}: the file is damaged ({error}); computing the features "
                        "again"
                    )
    except OSError as error:
        logger.warning(f"{folder}: the feature cache is not used ({error}); computing the features")
    return None


def remove_cached_features(folder: Path, key: str) -> None:
    """Remove the cached features of a key, if possible."""
    with contextlib.suppress(OSError), CacheFolder(folder) as cache:
        for name in cache.list_files(key, ".npy"):
            cache.remove(name)


def _read_feature_file(
    cache: CacheFolder, name: str, key: str, num_images: int
) -> NDArray[np.float32]:
    """Read and verify a whole file. Raises: ValueError if it was not written for this key."""
    with cache.open(name) as file:
        num_bytes = os.fstat(file.fileno()).st_size - _HEADER_BYTES
        width = num_bytes // (4 * num_images)
        if width <= 0 or num_bytes != 4 * num_images * width:
            raise ValueError("it is truncated or for other images")
        header = file.read(_HEADER_BYTES)
        values_ND = np.empty((num_images, width), dtype=np.float32)
        file.readinto(values_ND)  # type: ignore[arg-type]
    if header != _npy_header(values_ND) or name != _feature_file_name(key, values_ND):
        raise ValueError("its sha256 does not match")
    values_ND.flags.writeable = False
    return values_ND


def _npy_header(values_ND: NDArray[np.float32]) -> bytes:
    """Return the NumPy header of these values; we compare headers and never parse them."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values_ND))
    return header.getvalue()


def _feature_file_name(key: str, values_ND: NDArray[np.float32]) -> str:
    """Return the file name: the key, and a sha256 over the key and the content of the file."""
    digest = hashlib.sha256(key.encode() + _npy_header(values_ND))
    digest.update(values_ND.reshape(-1).view(np.uint8).data)
    return f"{key}-{digest.hexdigest()}.npy"


def write_cached_features(
    folder: Path, key: str, values_ND: NDArray[np.float32], *, max_bytes: int = MAX_CACHE_BYTES
) -> None:
    """Write features to the cache atomically, and evict old files.

    If the disk is full or read-only, this logs a message and does not raise an error.

    Args:
        folder: the cache folder; created if it does not exist.
        key: cache key, the hexadecimal sha256 of everything that the features depend on.
        values_ND: float32 features.
        max_bytes: size limit of all files together; the new file is never evicted.
    """
    values_ND = np.ascontiguousarray(values_ND)
    try:
        with CacheFolder(folder) as cache:
            name = _feature_file_name(key, values_ND)
            with cache.write(name) as file:
                file.write(_npy_header(values_ND))
                file.write(values_ND.reshape(-1).view(np.uint8).data)
            cache.evict(max_bytes, keep_name=name, pattern=_FILE_NAME)
    except OSError as error:
        needed = format_bytes(values_ND.nbytes)
        logger.warning(
            f"{folder}: the features ({needed}) are not kept ({error.strerror or error}), so the "
            "next run computes them again; free space, or set FINETUNE_CACHE to another folder"
        )
