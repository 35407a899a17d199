"""Frozen features of a split: what a network gives its classifier, computed once and kept on disk.

They are kept in the cache's folder `features` under a hash of all they depend on: the network's
tensors but its classifier's, its preprocessing, the size that its images are decoded to, the
numbers it computes with, and the images' contents. So a run that trains the head alone, the
evaluation of what came out of it, and a probe find one another's. A file is read whole and compared
with its sha256 before any of it is used.
"""

# B batch, N images, D width, C channels, H W pixels

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import timm
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor, nn

from finetune import __version__
from finetune.console import say, say_nothing, terminal_bar
from finetune.data.decode_all import TIMEOUT_SECONDS
from finetune.data.image_store import open_store
from finetune.data.loader import Loader
from finetune.data.source import Split
from finetune.errors import DataError, WeightsError
from finetune.files import CacheFolder, cache_folder
from finetune.models.features import last_layers, pre_logits
from finetune.models.saved import TRAINING_ONLY, Built
from finetune.processes import local_processes
from finetune.recipe.load import DataSection
from finetune.run.environment import precision_of
from finetune.text import byte_size
from finetune.transforms.evaluation import default_eval
from finetune.transforms.pipeline import Pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "Features",
    "at_once",
    "compute",
    "identity_of",
    "places_of",
    "pre_logits",
    "read_cached",
    "split_features",
    "write_cached",
]

Reader = Callable[[nn.Module, Tensor], Tensor]

MAX_BYTES = 20 * 2**30
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}\.npy")
_HEADER_BYTES = 128  # NumPy pads its headers
_FORMAT = 2  # of the file: in the first the sha256 was not of the key


def read_cached(folder: Path, key: str, *, num_images: int) -> NDArray[np.float32] | None:
    """Read the features of a key, after checking every byte of the file.

    Args:
        key: hexadecimal sha256.
        num_images: N, which the file must have.
    Returns: (N, D), read-only; None if there is no intact file. Damaged ones are removed.
    """
    try:
        with CacheFolder(folder) as cache:
            for name in cache.names(key, ".npy"):
                try:
                    values_ND = _read(cache, name, key, num_images)
                    cache.touch(name)
                    return values_ND
                except FileNotFoundError:
                    continue  # another process made room, or removed it as damaged
                except ValueError as error:
                    cache.remove(name)
                    say(f"{folder / name}: is damaged ({error}); the features are computed again")
    except OSError as error:
        say(f"{folder}: is not used ({error}); the features are computed")
    return None


def _read(cache: CacheFolder, name: str, key: str, num_images: int) -> NDArray[np.float32]:
    """Read a file whole. Raises: ValueError if it is not what was written under the key."""
    with os.fdopen(cache.open(name), "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size - _HEADER_BYTES
        width = num_bytes // (4 * num_images)
        if width <= 0 or num_bytes != 4 * num_images * width:
            raise ValueError("it is cut off or of other images")
        header = file.read(_HEADER_BYTES)
        values_ND = np.empty((num_images, width), dtype=np.float32)
        file.readinto(values_ND)  # type: ignore[arg-type]
    if header != _header(values_ND) or name != _name_of(key, values_ND):
        raise ValueError("its sha256 is another")
    values_ND.flags.writeable = False
    return values_ND


def _header(values_ND: NDArray[np.float32]) -> bytes:
    """NumPy's header of these values, which is compared and never parsed."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values_ND))
    return header.getvalue()


def _name_of(key: str, values_ND: NDArray[np.float32]) -> str:
    """The file's name: the key, and a sha256 of the key and of all that is in the file."""
    digest = hashlib.sha256(key.encode() + _header(values_ND))
    digest.update(values_ND.reshape(-1).view(np.uint8).data)
    return f"{key}-{digest.hexdigest()}.npy"


def write_cached(
    folder: Path, key: str, values_ND: NDArray[np.float32], *, max_bytes: int = MAX_BYTES
) -> None:
    """Keep features in one step, and make room for them.

    A disk that is full or cannot be written costs only the cache, and a notice.

    Args:
        folder: made if it does not exist.
        key: hexadecimal sha256 of what they depend on.
        values_ND: float32.
        max_bytes: of all files together; the new one always stays.
    """
    values_ND = np.ascontiguousarray(values_ND)
    try:
        with CacheFolder(folder) as cache:
            name = _name_of(key, values_ND)
            with cache.write(key) as new:
                with os.fdopen(os.dup(new.descriptor), "wb") as file:
                    file.write(_header(values_ND))
                    file.write(values_ND.reshape(-1).view(np.uint8).data)
                new.name = name
            cache.make_room(max_bytes, keep=name, names=_NAME)
    except OSError as error:
        needed = byte_size(values_ND.nbytes)
        say(
            f"{folder}: the features ({needed}) are not kept ({error.strerror or error}); the "
            "next call computes them again. Free space, or set FINETUNE_CACHE to another folder"
        )


_SHARE_BATCHES = 8  # batches between two exchanges
_SENT_VALUES = 2**24  # 64 MiB at once
_CPU_BATCH = 64  # a fifth faster than 256 for a small ViT: what it computes stays in the caches


@dataclass(frozen=True, eq=False)
class Features:
    """Features of a split's readable images, with their labels.

    Attributes:
        values_ND: float32, read-only if they are from the cache.
        labels_N: int64.
        places_N: int64, the images' places in the split; all of them unless some are unreadable.
        cached: whether nothing had to be computed.
        seconds: that it took to read or compute them.
    """

    values_ND: NDArray[np.float32]
    labels_N: NDArray[np.int64]
    places_N: NDArray[np.int64]
    cached: bool
    seconds: float

    def at(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Features and labels of some rows."""
        return self.values_ND[rows], self.labels_N[rows]


def identity_of(built: Built, sentence: str | None) -> dict[str, Any]:
    """Everything but the data that features depend on.

    Args:
        built: the network, before anything is done to its weights.
        sentence: evaluation's operations; None for those that the weights imply.
    Returns: for JSON; "weights" is the sha256 of the network's tensors as they were built, with
        their names, so position embeddings resized in another way are other weights. Classifiers
        are left out: no feature depends on them.
    """
    digest = hashlib.sha256()
    after = tuple(f"{name}." for name in last_layers(built.model))
    for name, tensor in built.model.state_dict().items():
        if name.startswith(after):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    sizes = {key: value for key, value in built.model_args.items() if key not in TRAINING_ONLY}
    # what is left of it is in the sentence
    cropping = ("crop_pct", "crop_mode")
    pixels = {k: v for k, v in asdict(built.preprocessing).items() if k not in cropping}
    return {
        "weights": digest.hexdigest(),
        "architecture": built.architecture,
        "model_args": sizes,
        "preprocessing": pixels,
        "eval": sentence or default_eval(built.preprocessing),
        "resampled": "float32",  # once it was as run.precision: other features
        "versions": [__version__, torch.__version__, timm.__version__],
    }


def split_features(
    split: Split,
    *,
    network: nn.Module,
    pipeline: Pipeline,
    identity: Mapping[str, Any],
    section: DataSection,
    accelerator: Accelerator,
    everywhere: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    read: Reader = pre_logits,
) -> Features | None:
    """Take a split's features from the cache, or compute them on all processes and keep them.

    Args:
        split: labelled images; nothing is decoded when the cache has them.
        network: on the accelerator's device, float32; left in evaluation mode if it is used.
        pipeline: without random operations.
        identity: of `identity_of`, for this network and this pipeline; rank 0's counts.
        section: keep, workers, unreadable and eval_batch_size.
        accelerator: from `launch`; its precision is that of the features.
        everywhere: give them to all ranks.
        timeout_seconds: for which a batch is waited for before a worker counts as hanging.
        read: the features that are taken of a network and its images (B, C, H, W), as (B, D).
    Returns: on rank 0 the features, None on the others unless they are wanted everywhere.
    Raises: DataError for unreadable images, WeightsError for features that are not finite.
    """
    started = time.perf_counter()
    if not len(split):
        raise DataError(f"{split.name}: has no images; add some", code="data.empty")
    key, values, folder = "", None, cache_folder("features")
    if accelerator.is_main_process:
        key = _key(split, identity, section, accelerator, read)
        values = read_cached(folder, key, num_images=len(split))
    flag = torch.tensor([int(values is not None)], device=accelerator.device)
    cached = bool(torch.as_tensor(accelerator.reduce(flag, "sum")).item())
    if not cached:
        values = _computed(
            *(split, network, pipeline, section, accelerator),
            read=read,
            timeout_seconds=timeout_seconds,
        )
        if values is not None:
            if split.is_unchanged():
                write_cached(folder, key, values)
            else:
                say(f"split '{split.name}': may have changed meanwhile; its features are not kept")
    if everywhere and accelerator.num_processes > 1:
        values = _everywhere(values, key, len(split), accelerator)
    if values is None:
        return None
    places = np.flatnonzero(~np.isnan(values[:, 0]))
    kept = values if len(places) == len(values) else values[places]
    elapsed = round(time.perf_counter() - started, 3)
    return Features(kept, split.labels[places], places, cached, elapsed)


def _key(
    split: Split,
    identity: Mapping[str, Any],
    section: DataSection,
    accelerator: Accelerator,
    read: Reader,
) -> str:
    """Hash everything that a split's features depend on."""
    # a run that stops at unreadable images must not be served by one that left them out
    data = {
        "data": split.cache_key,
        "decode_size": split.decode_size,
        "unreadable": section.unreadable,
    }
    place = {"device": accelerator.device.type, "precision": accelerator.mixed_precision}
    everything = {**identity, **data, **place, "format": _FORMAT}
    if read is not pre_logits:
        everything["read"] = read.__name__
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def _computed(
    split: Split,
    network: nn.Module,
    pipeline: Pipeline,
    section: DataSection,
    accelerator: Accelerator,
    *,
    read: Reader,
    timeout_seconds: float,
) -> NDArray[np.float32] | None:
    """Compute a split's features on all processes. Returns: (N, D) on rank 0, NaN if unreadable."""
    device, main = accelerator.device, accelerator.is_main_process
    store = open_store(
        split,
        keep=section.keep,
        device=device,
        workers=section.workers,
        unreadable=section.unreadable,
        local_processes=local_processes(accelerator.num_processes),
        progress=main,
        notice=say if main else say_nothing,
        timeout_seconds=timeout_seconds,
    )
    loader = Loader(store, pipeline, num_classes=1, device=device)
    size = at_once(device, section)
    computed = compute(network, loader, accelerator, batch_size=size, read=read)
    if computed is None:
        return None
    # rows of unreadable images stay NaN: a computed one never is
    values = np.full((len(split), computed.shape[1]), np.nan, dtype=np.float32)
    values[places_of(store.split, split)] = computed
    return values


def at_once(device: torch.device, section: DataSection) -> int:
    """Images whose features are computed at once on a process."""
    most = _CPU_BATCH if device.type == "cpu" else section.eval_batch_size
    return min(section.eval_batch_size, most)


def compute(
    network: nn.Module,
    loader: Loader,
    accelerator: Accelerator,
    *,
    batch_size: int,
    read: Reader = pre_logits,
) -> NDArray[np.float32] | None:
    """Compute the features of every image once, over all processes.

    Which images share a batch does not depend on the number of processes: a matrix product of
    another height may round otherwise.

    Args:
        batch_size: images at once on each process.
    Returns: (N, D) in the split's order on rank 0, None on the others.
    Raises: WeightsError if a feature is not finite.
    """
    rank, world, total = accelerator.process_index, accelerator.num_processes, len(loader.labels)
    num_shares = -(-total // (batch_size * _SHARE_BATCHES))
    bounds = [total * share // num_shares for share in range(num_shares + 1)]
    largest = -(-total // num_shares)
    network.eval()
    gathered: list[Tensor] = []
    main = accelerator.is_main_process
    with terminal_bar(total, shown=main) as shown:
        for first in range(0, num_shares, world):
            # a process without a share of its own repeats the last: all go on in step
            share = min(first + rank, num_shares - 1)
            rows_BD = []
            with torch.inference_mode(), accelerator.autocast():
                for batch in loader.once(rank=share, world=num_shares, batch_size=batch_size):
                    rows_BD.append(read(network, batch.images_BCHW)[: len(batch.labels_B)])
                    shown.update(min(world, num_shares - first) * len(batch.labels_B))
                own = torch.cat(rows_BD)
                padded = nn.functional.pad(own, (0, 0, 0, largest - len(own)))
                everybodys = torch.as_tensor(accelerator.gather(padded))
            if not bool(everybodys.isfinite().all()):
                numbers = precision_of(accelerator)
                raise WeightsError(
                    f"the model's features are not finite in {numbers}; its weights are damaged"
                    + (", or need a wider run.precision" if numbers == "fp16" else ""),
                    code="weights.not_finite",
                )
            for other, rows in enumerate(everybodys.split(largest)):
                if main and (share := first + other) < num_shares:
                    gathered.append(rows[: bounds[share + 1] - bounds[share]].cpu())
    return torch.cat(gathered).numpy() if main else None


def _everywhere(
    values_ND: NDArray[np.float32] | None, key: str, num_images: int, accelerator: Accelerator
) -> NDArray[np.float32]:
    """Give rank 0's features to all: by its file where they can read it, else from its memory."""
    device, main = accelerator.device, accelerator.is_main_process

    def from_main(tensor: Tensor) -> Tensor:
        zero = torch.zeros_like(tensor)
        return torch.as_tensor(accelerator.reduce((tensor if main else zero).to(device), "sum"))

    width = 0 if values_ND is None else values_ND.shape[1]
    *letters, width = from_main(torch.tensor([*(key or "-" * 64).encode(), width])).tolist()
    if not main:
        values_ND = read_cached(
            cache_folder("features"), bytes(letters).decode(), num_images=num_images
        )
    missing = torch.tensor([int(values_ND is None)], device=device)
    if not bool(torch.as_tensor(accelerator.reduce(missing, "sum")).item()):
        assert values_ND is not None
        return values_ND
    whole = np.empty((num_images, width), np.float32) if values_ND is None else values_ND
    sent = max(_SENT_VALUES // width, 1)
    for first in range(0, num_images, sent):
        rows_ND = from_main(torch.from_numpy(np.array(whole[first : first + sent])))
        if values_ND is None:
            whole[first : first + sent] = rows_ND.cpu().numpy()
    return whole


def places_of(part: Split, whole: Split) -> NDArray[np.int64]:
    """Return the places of a subset's images in the split that it was taken from, in order."""
    return np.flatnonzero(np.isin(whole.item_rows, part.item_rows))
