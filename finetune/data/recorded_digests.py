"""Digests of image files, to stop a run if a file changes after its fingerprint was computed.

The first time that a file is read, its content is compared with the digest. Afterwards only its
stat signature is compared, before and after the read: device, inode, size, mtime and ctime. If the
signature differs (or if the file changed within the last two seconds, see `is_settled`), the
content is compared again. So `touch` or a file system without stable inodes costs time, but does
not stop the run.
"""

# N images

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from finetune.data.decode import open_dataset_file
from finetune.data.stat_signatures import is_settled, stat_signature
from finetune.errors import DataError

__all__ = ["DIGEST_BYTES", "UNREADABLE_DIGEST", "RecordedDigests", "image_digest"]

DIGEST_BYTES = 16
UNREADABLE_DIGEST = bytes(DIGEST_BYTES)


def image_digest(body: bytes) -> bytes:
    """Return the digest of an encoded image: the first 16 bytes of its sha256."""
    return hashlib.sha256(body).digest()[:DIGEST_BYTES]


class RecordedDigests:
    """Digests of images in separate files; opens a file only if its content is unchanged.

    Args:
        num_images: number of images, N.
    """

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self._digests_N16: NDArray[np.uint8] | None = None

    def record(self, rows: NDArray[np.int64], digests_n16: NDArray[np.uint8]) -> None:
        """Set the digests of some rows; from now on, `open` compares them.

        Args:
            digests_n16: (n, 16) for rows (n,), each an `image_digest` or `UNREADABLE_DIGEST`.
        """
        if self._digests_N16 is None:
            self._digests_N16 = np.zeros((self._num_images, DIGEST_BYTES), dtype=np.uint8)
            self._is_recorded_N = np.zeros(self._num_images, dtype=bool)
            # Hash of the signature that each file had when its content was compared; 0 before. In
            # shared memory, so that the workers of an epoch know what earlier workers compared.
            shared = mmap.mmap(-1, 8 * self._num_images)
            self._signature_hashes_N = np.frombuffer(shared, dtype=np.int64)
        self._digests_N16[rows] = digests_n16
        self._is_recorded_N[rows] = True

    def get(self, rows: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """Return the digests (n, 16) of some rows; None if one of them is not recorded."""
        if self._digests_N16 is None or not self._is_recorded_N[rows].all():
            return None if len(rows) else np.zeros((0, DIGEST_BYTES), dtype=np.uint8)
        return self._digests_N16[rows]

    @contextlib.contextmanager
    def open(self, row: int, path: Path) -> Iterator[IO[bytes]]:
        """Open the file of an image to read it inside the `with` block.

        Raises: DataError if it cannot be opened. The code is data.changed if the file was readable
            when its digest was recorded, or if its content does not match the digest.
        """
        if self._digests_N16 is None or not self._is_recorded_N[row]:
            with open_dataset_file(path) as stream:
                yield stream
            return
        try:
            stream = open_dataset_file(path)
        except DataError as error:
            if self._digests_N16[row].tobytes() == UNREADABLE_DIGEST:
                raise
            raise _changed_error(str(error)) from None
        with stream:
            signature = stat_signature(stream.fileno())
            if hash(signature) == self._signature_hashes_N[row]:
                try:
                    yield stream
                finally:
                    if stat_signature(stream.fileno()) != signature:
                        raise _changed_error("while it was read")
                return
            try:
                body = stream.read()
            except OSError as error:
                raise _changed_error(f"cannot be read ({error.strerror or error})") from None
            if image_digest(body) != self._digests_N16[row].tobytes():
                raise _changed_error("its content differs")
            yield io.BytesIO(body)
            if is_settled(signature):
                self._signature_hashes_N[row] = hash(signature)


def _changed_error(cause: str) -> DataError:
    return DataError(
        f"has changed since the command started ({cause}); restore it and start again (continue a "
        "run with --resume)",
        code="data.changed",
    )
