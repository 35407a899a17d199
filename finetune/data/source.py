"""Datasets: labeled splits, whose images are decoded on demand."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.encoded_images import EncodedImages
from finetune.data.fingerprint import compute_digests, compute_fingerprint
from finetune.data.stat_signatures import are_settled
from finetune.data.streaming.streamed_images import StreamedImages
from finetune.errors import DataError

if TYPE_CHECKING:
    from finetune.data.decisions import DecisionSummary

__all__ = ["Source", "Split"]


@dataclass(frozen=True, eq=False)
class Split:
    """Labeled images, decoded on demand.

    Attributes:
        name: train, val or test.
        labels: class indices, (N,) int64. Multi-label: (N, K) uint8, 1 for each class of an image.
        images: the encoded images.
        rows: (N,) int64, indices of the split's images in `images`; None for all.
        decode_size: minimum side in pixels of decoded JPEGs, see `decode_image`; None: full size.
        groups: (N,) str objects, the group of each image, such as a patient; "" for none. Images of
            a group should be in the same split. None if the groups are unknown.
        draw_indices: (N,) int64, for each image the index of its random draw, see `random_draws`;
            None for 0 to N - 1.
        origin: name of the split of the source that the images are from; "" if it is `name`.
    """

    name: str
    labels: np.ndarray
    images: EncodedImages = field(repr=False)
    rows: np.ndarray | None = field(default=None, repr=False)
    decode_size: int | None = None
    groups: np.ndarray | None = field(default=None, repr=False)
    draw_indices: np.ndarray | None = field(default=None, repr=False)
    origin: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have any number of labels."""
        return self.labels.ndim == 2

    def class_indices(self, index: int) -> list[int]:
        """Return the class indices of an image: one, or any number for multi-label data."""
        label = self.labels[index]
        return np.flatnonzero(label).tolist() if self.is_multilabel else [int(label)]

    @functools.cached_property
    def _label_hashes(self) -> np.ndarray:
        """Label values that go into the fingerprint, (N,) int64.

        These are the class indices; for multi-label data, a hash of each row of labels.
        """
        if not self.is_multilabel:
            return self.labels
        digests = (hashlib.sha256(row.tobytes()).digest()[:8] for row in self.labels)
        return np.frombuffer(b"".join(digests), dtype="<i8")

    def _image_row(self, index: int) -> int:
        return int(index) if self.rows is None else int(self.rows[index])

    def decode(self, index: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """Decode one image.

        Args:
            buffer: memory to decode into, see `decode_image`.
        Returns: (H, W, 3) uint8 RGB.
        Raises: DataError naming the image; with the code data.changed if its content does not match
            `digests`.
        """
        return self.images.decode(self._image_row(index), self.decode_size, buffer)

    def name_of(self, index: int) -> str:
        """Return an image's name: its path in the folder, or its file and row."""
        return self.images.name_of(self._image_row(index))

    def subset(self, indices: np.ndarray) -> Split:
        """Return a split with only these images, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows = chosen if self.rows is None else self.rows[chosen]
        groups = None if self.groups is None else self.groups[chosen]
        return dataclasses.replace(
            self, labels=self.labels[chosen], rows=rows, groups=groups, draw_indices=None
        )

    def random_draws(self, entropy: int | list[int]) -> np.ndarray:
        """Draw a raw 64-bit number for each image, (N,).

        The numbers of PCG64 are the same in all NumPy versions, unlike NumPy's shuffles. An image
        that `data.decisions` drops does not change the numbers of others.
        """
        indices = np.arange(len(self)) if self.draw_indices is None else self.draw_indices
        draws: np.ndarray = np.random.PCG64(entropy).random_raw(int(indices.max(initial=0)) + 1)
        return draws[indices]

    @property
    def is_streamed(self) -> bool:
        """True if the images are streamed from shards."""
        return self.images.is_streamed

    @property
    def image_rows(self) -> np.ndarray:
        """Indices of the split's images in `images`, (N,) int64, in order."""
        return np.arange(len(self)) if self.rows is None else self.rows

    @functools.cached_property
    def digests(self) -> np.ndarray:
        """Digest of each image, (N, 16) uint8, see `compute_digests`; not for streamed images.

        From the first access on, `decode` raises a DataError for an image whose content differs.
        """
        digests = self.images.recorded_digests(self.image_rows)  # by another split of the images
        if digests is None:
            digests = compute_digests(self.images, self.image_rows)
            self.images.record_digests(self.image_rows, digests)
        return digests

    def use_digests(self, digests: np.ndarray) -> None:
        """Use the digests that another process has computed.

        Raises: DataError if that process has another number of images.
        """
        if len(digests) != len(self):
            raise DataError(
                f"split '{self.name}': {len(self)} images here, but {len(digests)} on rank 0; give "
                "all processes the same data",
                code="data.changed",
            )
        vars(self)["digests"] = digests  # where cached_property looks for it
        self.images.record_digests(self.image_rows, digests)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the digest and the label of each image, in order.

        For streamed images it covers the shards' ETags instead of the digests.
        """
        if isinstance(self.images, StreamedImages):
            return self.images.fingerprint(self.image_rows, self._label_hashes)
        return compute_fingerprint(self.digests, self._label_hashes)

    def cache_key(self) -> str | None:
        """Return a SHA-256 that changes whenever an image may have changed.

        It equals the fingerprint, except for streamed shards: then it is a hash of the fingerprint,
        the addresses of the shards (two servers can send the same ETag), and the stat signatures of
        local ones. None if changes could go unnoticed: a server sends no ETag, or a local shard was
        just written.
        """
        if not isinstance(self.images, StreamedImages):
            return self.fingerprint
        signatures = self.images.stat_signatures(self.image_rows)
        if len(signatures) and not are_settled(signatures):
            return None
        parts = f"{self.fingerprint}\n{self.images.origin}".encode() + signatures.tobytes()
        return hashlib.sha256(parts).hexdigest()

    def shard_times(self) -> str | None:
        """Return a hash of the mtimes and ctimes of local shards; None unless they are streamed.

        The fingerprint of a streamed split does not cover the content of its images.
        """
        if not self.is_streamed:
            return None
        times = self.images.stat_signatures(self.image_rows)[:, 3:]
        return hashlib.sha256(times.tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset.

    Attributes:
        name: the source string.
        splits: splits by name: train, val or test.
        class_names: class names by class index.
        description: origin and format of the data, for users.
        indicator_columns: names of the label columns of 0 and 1, if there are several. For a class
            without a column, the labels are unknown.
        decisions: what `data.decisions` has changed; None without decisions.
        unused: images that `data.num_train` and other keys have left out of the splits.
    """

    name: str
    splits: dict[str, Split]
    class_names: list[str]
    description: str
    indicator_columns: tuple[str, ...] = ()
    decisions: DecisionSummary | None = None
    unused: tuple[Split, ...] = ()

    def shrink(self, name: str, indices: np.ndarray) -> Source:
        """Return a source whose split has only these images, in this order."""
        split = self.splits[name]
        left_out = split.subset(np.setdiff1d(np.arange(len(split)), indices))
        splits = {**self.splits, name: split.subset(indices)}
        return dataclasses.replace(self, splits=splits, unused=(*self.unused, left_out))

    @property
    def classes_fingerprint(self) -> str:
        """A sha256 of the class names and their order."""
        return hashlib.sha256(json.dumps(self.class_names).encode()).hexdigest()

    def whole_fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each split before any image was held out or left out.

        So they are the same for each seed that draws validation images and subsets. They cover the
        groups, which determine the validation images.
        """
        parts: dict[str, list[Split]] = {}
        for split in self.splits.values():
            parts.setdefault(split.origin or split.name, []).append(split)
        for split in self.unused:
            parts.get(split.origin or split.name, []).append(split)
        whole = {name: _join(splits) for name, splits in parts.items()}
        return {
            name: split.fingerprint
            if split.groups is None
            else hashlib.sha256(f"{split.fingerprint}{split.groups.tolist()}".encode()).hexdigest()
            for name, split in whole.items()
        }


def _join(splits: list[Split]) -> Split:
    """Join splits of the same encoded images, in the order of their rows."""
    rows_N = np.concatenate([split.image_rows for split in splits])
    order_N = np.argsort(rows_N)
    labels = np.concatenate([split.labels for split in splits])[order_N]
    groups = splits[0].groups
    if groups is not None:
        groups = np.concatenate([split.groups for split in splits])[order_N]
    joined = dataclasses.replace(splits[0], rows=rows_N[order_N], labels=labels, groups=groups)
    if not joined.is_streamed:
        joined.use_digests(np.concatenate([split.digests for split in splits])[order_N])
    return joined
