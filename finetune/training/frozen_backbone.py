"""Training on cached features: a frozen backbone computes each image once.

A frozen backbone gives an image the same features at every step, unless the training transforms or
dropout are random. All epochs, validation, the test split, later runs, `eval` and `probe` use the
cached features (`evaluation.feature_extraction`). The network stays complete: checkpoints, EMA,
resuming and the published model work as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune.data.decode_split import TIMEOUT_SECONDS
from finetune.data.feature_loader import AnyLoader, FeatureLoader
from finetune.data.source import Split
from finetune.evaluation.feature_extraction import feature_identity, load_or_compute_features
from finetune.log import logger
from finetune.models.features import enable_feature_input
from finetune.recipe.load import DataSection
from finetune.training.accelerator import is_sharded
from finetune.training.setup import TrainingSetup
from finetune.transforms.pipeline import Pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["FrozenBackbone", "build_feature_loader"]


class FrozenBackbone:
    """Builds the loaders of a head-only run; they yield cached features if possible.

    Create it on every rank, before the network is copied or wrapped.

    Args:
        setup: the training setup; its network must be on the accelerator's device. If features can
            be cached, the network is changed to accept them as input.

    Attributes:
        uses_cached_features: True if the loaders yield features, False if images.
    """

    def __init__(self, setup: TrainingSetup, accelerator: Accelerator) -> None:
        self._setup = setup
        self._accelerator = accelerator
        self._identity: dict[str, Any] | None = None
        self._why_not_cached = _find_obstacle_to_caching(setup, accelerator)
        self.uses_cached_features = self._why_not_cached is None

    def build_loader(
        self, split: Split, *, train: bool, dtype: torch.dtype = torch.float32
    ) -> AnyLoader:
        """Build the loader of a split; every rank must call it.

        Args, Raises: same as for `TrainingSetup.build_loader`.
        """
        setup = self._setup
        if not self.uses_cached_features:
            if train:
                logger.info(f"model.freeze: features are not cached: {self._why_not_cached}")
            return setup.build_loader(split, train=train, dtype=dtype)
        pipeline = setup.train_pipeline if train else setup.eval_pipeline
        # Compute the identity once: it excludes the classifier, so training does not change it.
        if self._identity is None and self._accelerator.is_main_process:
            self._identity = feature_identity(setup.built, setup.eval_pipeline.transform_spec)
        loader, origin = build_feature_loader(
            split,
            network=setup.built.model,
            pipeline=pipeline,
            identity={**(self._identity or {}), "eval": pipeline.transform_spec},
            section=setup.recipe.data,
            accelerator=self._accelerator,
            num_classes=setup.num_classes,
            timeout_seconds=setup.recipe.run.timeout_seconds / 2,
        )
        if train:
            logger.info(
                "model.freeze: each step computes only the classifier on cached features, which "
                f"were {origin}; images/s counts the classifier only"
            )
        return loader


def build_feature_loader(
    split: Split,
    *,
    network: nn.Module,
    pipeline: Pipeline,
    identity: Mapping[str, Any],
    section: DataSection,
    accelerator: Accelerator,
    num_classes: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> tuple[FeatureLoader, str]:
    """Build the loader of a split's features; every rank must call it.

    Args:
        split: the split whose images the network computes features of.
        network: network on the accelerator's device.
        pipeline: transforms, without random operations.
        identity: JSON-serializable dict that identifies network and transforms in the cache key.
        section: the recipe's `data` section, which says how images are decoded.
        accelerator: the accelerator of this rank.
        num_classes: number of classes, K.
        timeout_seconds: longest wait for a batch before a worker counts as hanging.
    Returns: the loader, and a text that says where the features came from, for a log message.
    """
    features = load_or_compute_features(
        split,
        model=network,
        pipeline=pipeline,
        identity=identity,
        data_config=section,
        accelerator=accelerator,
        on_all_ranks=True,
        timeout_seconds=timeout_seconds,
    )
    assert features is not None, "every rank has them"
    indices_N = features.indices_N
    readable = split if len(indices_N) == len(split) else split.subset(indices_N)
    loader = FeatureLoader(
        readable, features.values_ND, num_classes=num_classes, device=accelerator.device
    )
    origin = (
        "read from the cache" if features.is_cached else f"computed in {features.seconds:.1f} s"
    )
    return loader, origin


def _find_obstacle_to_caching(setup: TrainingSetup, accelerator: Accelerator) -> str | None:
    """Return the reason why features cannot be cached, or None."""
    if is_sharded(accelerator):
        return "FSDP shards the network over processes; train with DDP"
    size = setup.preprocessing.image_size
    if setup.train_pipeline.is_random:
        spec = setup.eval_pipeline.transform_spec
        return f"data.train is random; with data.train='{spec}' they would be cached"
    return enable_feature_input(setup.built.model, size, training=True)
