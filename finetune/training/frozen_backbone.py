"""Training on cached features: with a frozen backbone, each image goes through it once.

The network before a frozen backbone's classifier gives each image the same vector at every step,
unless the training pipeline or dropout is random. The cached features (`evaluation.features`) serve
every epoch and validation, the test split, later runs, `eval` and `probe`. The network stays whole:
checkpoints, EMA, resuming and the published model are as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune.data.decode_all import TIMEOUT_SECONDS
from finetune.data.feature_loader import AnyLoader, FeatureLoader
from finetune.data.source import Split
from finetune.evaluation.features import identity_of, split_features
from finetune.models.features import accept_features
from finetune.recipe.load import DataSection
from finetune.training.launch import is_sharded
from finetune.training.setup import TrainingSetup
from finetune.transforms.pipeline import Pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["FrozenBackbone", "feature_loader"]


class FrozenBackbone:
    """Loads the splits of a run that trains the head alone: as features where it can, else images.

    It is made before the network is copied or wrapped, and stays on every rank in step.

    Args:
        setup: its network is on the accelerator's device; from now on it takes features, too, if
            each image has only one.

    Attributes:
        gives_features: whether the loaders give features.
    """

    def __init__(self, setup: TrainingSetup, accelerator: Accelerator) -> None:
        self._setup = setup
        self._accelerator = accelerator
        self._identity: dict[str, Any] | None = None
        self._reason = _reason_for_images(setup, accelerator)
        self.gives_features = self._reason is None

    def loader(self, split: Split, *, train: bool, dtype: torch.dtype = torch.float32) -> AnyLoader:
        """Make batches of a split ready; every rank must call it.

        Args: as for `TrainingSetup.loader`.
        Raises: DataError naming every image that cannot be read.
        """
        setup = self._setup
        if not self.gives_features:
            if train:
                setup.notice(f"model.freeze: every epoch computes all images anew: {self._reason}")
            return setup.loader(split, train=train, dtype=dtype)
        pipeline = setup.train_pipeline if train else setup.eval_pipeline
        # of what the classifier does not change, so at any moment the same
        if self._identity is None and self._accelerator.is_main_process:
            read = dataclasses.replace(setup.built, preprocessing=setup.preprocessing)
            self._identity = identity_of(read, setup.eval_pipeline.sentence)
        loader, origin = feature_loader(
            split,
            network=setup.built.model,
            pipeline=pipeline,
            identity={**(self._identity or {}), "eval": pipeline.sentence},
            section=setup.recipe.data,
            accelerator=self._accelerator,
            num_classes=setup.num_classes,
            timeout_seconds=setup.recipe.run.timeout_seconds / 2,
        )
        if train:
            setup.notice(
                "model.freeze: nothing changes before the classifier, so it alone is computed at "
                f"each step: the features were {origin}, and images/s is the classifier's"
            )
        return loader


def feature_loader(
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
    """Make batches of a split's features, on every rank.

    Args:
        split, network, pipeline, identity, section, accelerator, timeout_seconds: as for
            `split_features`.
    Returns: the batches, and where they came from, for people.
    """
    features = split_features(
        split,
        network=network,
        pipeline=pipeline,
        identity=identity,
        section=section,
        accelerator=accelerator,
        everywhere=True,
        timeout_seconds=timeout_seconds,
    )
    assert features is not None, "every rank has them"
    places_N = features.places_N
    readable = split if len(places_N) == len(split) else split.subset(places_N)
    loader = FeatureLoader(
        readable, features.values_ND, num_classes=num_classes, device=accelerator.device
    )
    origin = "read from the cache" if features.cached else f"computed in {features.seconds:.1f} s"
    return loader, origin


def _reason_for_images(setup: TrainingSetup, accelerator: Accelerator) -> str | None:
    """The reason that a run with a frozen backbone needs its images at every step, or None."""
    if is_sharded(accelerator):
        return "FSDP spreads the network over processes; train with DDP"
    size = setup.preprocessing.image_size
    if setup.train_pipeline.random:
        sentence = setup.eval_pipeline.sentence
        return f"data.train is random; with '{sentence}' each is computed only once"
    return accept_features(setup.built.model, size, training=True)
