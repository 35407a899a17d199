"""Frozen features of a split: the inputs of a model's classifier, computed once and cached on disk.

The cache folder `features` names each file by a hash of everything that the features depend on: the
model's tensors except its classifier, its preprocessing, the decoders, the decode size, the
precision, and the content of the images. So a run that trains only the head, its evaluation, and a
probe of the same model share one file. A file is read completely and compared with its sha256
before use.
"""

# B batch, N images, D width, C channels, H W pixels

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from finetune import __version__
from finetune.cache import cache_path
from finetune.data.decode import decoder_versions
from finetune.data.decode_split import TIMEOUT_SECONDS, drop_unreadable
from finetune.data.loader import ImageLoader
from finetune.data.pixel_store import build_pixel_store
from finetune.data.source import Split
from finetune.errors import DataError, WeightsError
from finetune.evaluation.feature_cache import (
    FORMAT_VERSION,
    read_cached_features,
    remove_cached_features,
    write_cached_features,
)
from finetune.model_checksums import json_sha256
from finetune.models.features import compute_pre_logits, linear_classifier_names
from finetune.models.save import BuiltModel
from finetune.precision import accelerator_precision, float32_settings
from finetune.progress import item_bar
from finetune.ranks import local_world_size
from finetune.recipe.load import DataSection
from finetune.recipe.training_keys import TRAINING_ONLY_ARGS
from finetune.transforms.eval_transforms import default_eval_spec
from finetune.transforms.pipeline import Pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "VALUES_PER_BROADCAST",
    "FeatureExtractor",
    "Features",
    "compute_features",
    "compute_pre_logits",
    "feature_batch_size",
    "feature_identity",
    "load_or_compute_features",
    "subset_indices",
]

FeatureExtractor = Callable[[nn.Module, Tensor], Tensor]
_BATCHES_PER_SHARD = 8  # batches that a rank computes between two gathers
VALUES_PER_BROADCAST = 2**24  # 64 MiB
_CPU_BATCH_SIZE = 64  # 20 % faster than 256 for a small ViT: activations fit the CPU caches


@dataclass(frozen=True, eq=False)
class Features:
    """Features and labels of the readable images of a split.

    Attributes:
        values_ND: features, float32; read-only if they come from the cache.
        labels_N: class indices, int64.
        indices_N: positions of the images in the split, int64, ascending.
        is_cached: True if the features come from the cache.
        seconds: time to read or compute the features.
    """

    values_ND: NDArray[np.float32]
    labels_N: NDArray[np.int64]
    indices_N: NDArray[np.int64]
    is_cached: bool
    seconds: float

    def select(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the features and labels of some rows."""
        return self.values_ND[rows], self.labels_N[rows]


def feature_identity(
    built: BuiltModel, transform_spec: str | None, *, with_classifier: bool = False
) -> dict[str, Any]:
    """Return the data-independent part of the cache key: model, hash of the weights, transforms.

    Args:
        built: the model, before its weights are changed.
        transform_spec: evaluation transforms; None for the default transforms of the weights.
        with_classifier: True if logits are cached; features do not depend on the classifier.
    Returns: a JSON-serializable dict. "weights" is the sha256 over names and values of the model's
        tensors, after any resize of position embeddings.
    """
    digest = hashlib.sha256()
    classifier_prefixes = tuple(f"{name}." for name in linear_classifier_names(built.model))
    for name, tensor in built.model.state_dict().items():
        if name.startswith(classifier_prefixes) and not with_classifier:
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    model_args = {
        key: value for key, value in built.model_args.items() if key not in TRAINING_ONLY_ARGS
    }
    # the transform spec contains the cropping
    cropping = ("crop_pct", "crop_mode")
    preprocessing = {k: v for k, v in asdict(built.preprocessing).items() if k not in cropping}
    return {
        "weights": digest.hexdigest(),
        "architecture": built.architecture,
        "model_args": model_args,
        "preprocessing": preprocessing,
        "eval": transform_spec or default_eval_spec(built.preprocessing),
        "resampled": "float32",  # whatever run.precision is
        "versions": [__version__, torch.__version__, timm.__version__],
    }


def load_or_compute_features(
    split: Split,
    *,
    model: nn.Module,
    pipeline: Pipeline,
    identity: Mapping[str, Any],
    data_config: DataSection,
    accelerator: Accelerator,
    on_all_ranks: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    extract: FeatureExtractor = compute_pre_logits,
) -> Features | None:
    """Load a split's features from the cache, or compute them on all processes and cache them.

    Args:
        split: labeled images; they are not decoded if the cache has their features.
        model: float32 network on the accelerator's device; set to evaluation mode if the features
            are computed.
        pipeline: transforms without random operations.
        identity: `feature_identity` of this model and pipeline; only rank 0's is used.
        data_config: the recipe's `data` section; its keys keep, workers, unreadable and
            eval_batch_size are used.
        accelerator: the result of `create_accelerator`; features are computed in its precision.
        on_all_ranks: True to return the features on all ranks, not only on rank 0.
        timeout_seconds: longest wait for a batch before a worker counts as hanging.
        extract: function from a model and images (B, C, H, W) to features (B, D).
    Returns: the features on rank 0; None on the other ranks unless `on_all_ranks`.
        Unreadable images are excluded if data.unreadable is "quarantine".
    Raises: DataError for an unreadable image if data.unreadable is "stop"; WeightsError for
        features that are not finite.
    """
    started = time.perf_counter()
    key, values, folder = None, None, cache_path("features")
    if accelerator.is_main_process:
        key = _cache_key(split, identity, pipeline, data_config, accelerator, extract)
        if key is not None:
            values = read_cached_features(folder, key, num_images=len(split))
            if values is not None and not _still_unreadable(split, values, data_config.unreadable):
                remove_cached_features(folder, key)
                values = None
    flag = torch.tensor([int(values is not None)], device=accelerator.device)
    is_cached = bool(torch.as_tensor(accelerator.reduce(flag, "sum")).item())
    if not is_cached:
        values = _compute_split_features(
            split,
            model,
            pipeline,
            data_config,
            accelerator,
            extract=extract,
            timeout_seconds=timeout_seconds,
        )
        if values is not None and key is not None:
            write_cached_features(folder, key, values)
    if on_all_ranks and accelerator.num_processes > 1:
        values = _broadcast_features(values, key, len(split), accelerator)
    if values is None:
        return None
    indices = np.flatnonzero(~np.isnan(values[:, 0]))
    readable = values if len(indices) == len(values) else values[indices]
    elapsed = round(time.perf_counter() - started, 3)
    return Features(readable, split.labels[indices], indices, is_cached, elapsed)


def _cache_key(
    split: Split,
    identity: Mapping[str, Any],
    pipeline: Pipeline,
    section: DataSection,
    accelerator: Accelerator,
    extract: FeatureExtractor,
) -> str | None:
    """Return the cache key: a hash of everything that a split's features depend on.

    Returns: the key; None if changes of the images could go unnoticed.
    """
    if (images_key := split.cache_key()) is None:
        return None
    # a run that stops at unreadable images must not use a file that excludes them
    data = {
        "data": images_key,
        "decoder": decoder_versions(),
        "decode_size": split.decode_size,
        "unreadable": section.unreadable,
        "interpolation": pipeline.effective_default_interpolation,
    }
    device = accelerator.device.type
    compute = {"device": device, "precision": accelerator.mixed_precision}
    compute |= float32_settings(device)
    dependencies = {**identity, **data, **compute, "format": FORMAT_VERSION}
    if extract is not compute_pre_logits:
        dependencies["read"] = extract.__name__
    return json_sha256(dependencies)


def _still_unreadable(split: Split, values_ND: NDArray[np.float32], unreadable: str) -> bool:
    """Decode the images without features again; return True if none can be read, after a warning.

    So a temporary disk error does not exclude an image from later runs.

    Raises: DataError if an image has changed.
    """
    failed = list[tuple[int, str]]()
    for index in np.flatnonzero(np.isnan(values_ND[:, 0])).tolist():
        try:
            split.decode(index)
        except DataError as error:
            if error.code == "data.changed":
                raise
            failed.append((index, str(error)))
        else:
            return False
    drop_unreadable(split, failed, unreadable)
    return True


def _compute_split_features(
    split: Split,
    model: nn.Module,
    pipeline: Pipeline,
    section: DataSection,
    accelerator: Accelerator,
    *,
    extract: FeatureExtractor,
    timeout_seconds: float,
) -> NDArray[np.float32] | None:
    """Compute a split's features on all processes.

    Returns: (N, D) on rank 0, with NaN rows for unreadable images; None on the other ranks.
    """
    device, is_main = accelerator.device, accelerator.is_main_process
    store = build_pixel_store(
        split,
        keep=section.keep,
        device=device,
        num_workers=section.workers,
        unreadable=section.unreadable,
        local_world_size=local_world_size(accelerator.num_processes),
        progress=is_main,
        timeout_seconds=timeout_seconds,
    )
    loader = ImageLoader(store, pipeline, num_classes=1, device=device)
    batch_size = feature_batch_size(device, section)
    computed = compute_features(model, loader, accelerator, batch_size=batch_size, extract=extract)
    if computed is None:
        return None
    # only rows of unreadable images stay NaN
    values = np.full((len(split), computed.shape[1]), np.nan, dtype=np.float32)
    values[subset_indices(store.split, split)] = computed
    return values


def feature_batch_size(device: torch.device, section: DataSection) -> int:
    """Return the number of images per batch on one process."""
    max_batch_size = _CPU_BATCH_SIZE if device.type == "cpu" else section.eval_batch_size
    return min(section.eval_batch_size, max_batch_size)


def compute_features(
    model: nn.Module,
    loader: ImageLoader,
    accelerator: Accelerator,
    *,
    batch_size: int,
    extract: FeatureExtractor = compute_pre_logits,
) -> NDArray[np.float32] | None:
    """Compute the features of every image once, over all processes.

    Batches are the same for any number of processes, because a matrix product with another number
    of rows may round differently.

    Args:
        batch_size: images per batch on each process.
    Returns: (N, D) in the order of the split on rank 0, None on the other ranks.
    Raises: WeightsError if a feature is not finite.
    """
    rank = accelerator.process_index
    world_size = accelerator.num_processes
    num_images = len(loader.labels)
    num_shards = -(-num_images // (batch_size * _BATCHES_PER_SHARD))
    bounds = [num_images * shard // num_shards for shard in range(num_shards + 1)]
    max_shard_size = -(-num_images // num_shards)
    model.eval()
    gathered: list[Tensor] = []
    is_main = accelerator.is_main_process
    with item_bar(num_images, shown=is_main) as progress_bar:
        for first in range(0, num_shards, world_size):
            # a rank without a shard of its own repeats the last one, to join every gather
            shard = min(first + rank, num_shards - 1)
            rows_BD = []
            with torch.inference_mode(), accelerator.autocast():
                for batch in loader.eval_batches(
                    rank=shard, world_size=num_shards, batch_size=batch_size
                ):
                    rows_BD.append(extract(model, batch.images_BCHW)[: len(batch.labels_B)])
                    progress_bar.update(min(world_size, num_shards - first) * len(batch.labels_B))
                shard_rows = torch.cat(rows_BD)
                padded = nn.functional.pad(shard_rows, (0, 0, 0, max_shard_size - len(shard_rows)))
                all_rows = torch.as_tensor(accelerator.gather(padded))
            if not bool(all_rows.isfinite().all()):
                precision = accelerator_precision(accelerator)
                raise WeightsError(
                    f"the model's features are not finite in {precision}: its weights are damaged; "
                    "train or download it again"
                    + (", or set run.precision=fp32" if precision == "fp16" else ""),
                    code="weights.not_finite",
                )
            for rank_offset, rows in enumerate(all_rows.split(max_shard_size)):
                if is_main and (shard := first + rank_offset) < num_shards:
                    gathered.append(rows[: bounds[shard + 1] - bounds[shard]].cpu())
    return torch.cat(gathered).numpy() if is_main else None


def _broadcast_features(
    values_ND: NDArray[np.float32] | None,
    key: str | None,
    num_images: int,
    accelerator: Accelerator,
) -> NDArray[np.float32]:
    """Share rank 0's features: by its cache file if every rank can read it, else by broadcast."""
    device, is_main = accelerator.device, accelerator.is_main_process

    def from_main(tensor: Tensor) -> Tensor:
        zero = torch.zeros_like(tensor)
        return torch.as_tensor(accelerator.reduce((tensor if is_main else zero).to(device), "sum"))

    width = 0 if values_ND is None else values_ND.shape[1]
    *key_bytes, width = from_main(torch.tensor([*(key or "-" * 64).encode(), width])).tolist()
    if not is_main:
        values_ND = read_cached_features(
            cache_path("features"), bytes(key_bytes).decode(), num_images=num_images
        )
    missing = torch.tensor([int(values_ND is None)], device=device)
    if not bool(torch.as_tensor(accelerator.reduce(missing, "sum")).item()):
        assert values_ND is not None
        return values_ND
    all_values = np.empty((num_images, width), np.float32) if values_ND is None else values_ND
    num_rows = max(VALUES_PER_BROADCAST // width, 1)
    for first in range(0, num_images, num_rows):
        rows_ND = from_main(torch.from_numpy(np.array(all_values[first : first + num_rows])))
        if values_ND is None:
            all_values[first : first + num_rows] = rows_ND.cpu().numpy()
    return all_values


def subset_indices(subset: Split, split: Split) -> NDArray[np.int64]:
    """Return the positions of a subset's images in the split that it was taken from, sorted."""
    return np.flatnonzero(np.isin(split.image_rows, subset.image_rows))
