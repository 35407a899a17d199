"""Build data, network, transforms and the number of steps from a recipe, on a given device.

Nothing here trains, or communicates with other processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.class_balance import ClassSampler, compute_class_draws, count_images_per_class
from finetune.data.decode import hwc_to_chw
from finetune.data.decode_split import DecodeOptions, readable_indices
from finetune.data.from_recipe import open_data
from finetune.data.loader import ImageLoader
from finetune.data.pixel_store import build_pixel_store, resolve_num_workers
from finetune.data.sampler import DistributedBatchSampler, completes_epoch
from finetune.data.source import Source, Split
from finetune.data.streaming.shuffle import build_shuffle_streams
from finetune.errors import DataError, RecipeError
from finetune.log import logger
from finetune.models.batch_norm import configure_batch_norm
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.recipe.schema import Recipe
from finetune.training.losses import AnyLoss, build_loss, check_class_weights
from finetune.training.lr_schedule import decay_start_step, lr_at
from finetune.transforms.eval_transforms import (
    build_pipeline,
    default_eval_spec,
    eval_resize_size,
    spec_to_preprocessing,
)
from finetune.transforms.mixing import PAIR_SIZE
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["TrainingSetup", "build_setup"]


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """Everything that training needs, before it is distributed over processes.

    Attributes:
        recipe: the recipe, with `model.head_init` resolved.
        source: the opened data, with the splits that the recipe uses.
        built: the network, with its weights loaded.
        preprocessing: preprocessing of the published model.
        train_pipeline: training transforms.
        eval_pipeline: evaluation transforms.
        num_samples: number of images in the training split; after `with_num_samples`, only the
            readable ones count.
        device: device of the network.
        local_world_size: number of processes that share this host's memory.
        show_progress: True to show progress bars.
        labels: labels of the readable training images; None for those of the whole split.
    """

    recipe: Recipe
    source: Source
    built: BuiltModel
    preprocessing: Preprocessing
    train_pipeline: Pipeline
    eval_pipeline: Pipeline
    num_samples: int
    device: torch.device
    local_world_size: int
    show_progress: bool
    labels: NDArray[Any] | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        return len(self.source.class_names)

    @property
    def num_workers(self) -> int:
        """Number of decoding processes."""
        return resolve_num_workers(self.recipe.data.workers, self.local_world_size)

    def with_num_samples(
        self, num_samples: int, labels: NDArray[Any] | None = None
    ) -> TrainingSetup:
        """Return a copy with another number of training images, which also changes `num_steps`."""
        return dataclasses.replace(self, num_samples=num_samples, labels=labels)

    def fingerprints(self) -> dict[str, str]:
        """Return a sha256 of each split (images, labels and their order) and of the class names."""
        splits = {name: split.fingerprint for name, split in self.source.splits.items()}
        return {**splits, "classes": self.source.classes_fingerprint}

    def check_transforms(self) -> None:
        """Apply the training and the evaluation transforms to one image.

        Raises: RecipeError naming `data.train` or `data.eval` if the result has the wrong size.
        """
        image = _first_readable_image(self.source.splits["train"])
        if image is None:
            return  # decoding reports the unreadable images later
        keys = np.zeros(1, dtype=np.uint64)
        for name in ("train", "eval"):
            pipeline: Pipeline = getattr(self, f"{name}_pipeline")
            with _prefix_recipe_errors(name):
                pipeline([image], keys=keys if pipeline.is_random else None)

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training images of each class, (K,)."""
        return count_images_per_class(self._train_labels, self.num_classes)

    @property
    def epoch_class_counts(self) -> NDArray[np.int64]:
        """Images of each class in an epoch, (K,), drawn according to `data.sampling`."""
        kind = self.recipe.data.sampling
        return self.class_counts if kind is None else compute_class_draws(self.class_counts, kind)

    @property
    def _train_labels(self) -> NDArray[Any]:
        return self.source.splits["train"].labels if self.labels is None else self.labels

    @property
    def sampler(self) -> DistributedBatchSampler:
        """The sampler, which computes the training images of each step."""
        kind, seed = self.recipe.data.sampling, self.recipe.run.seed
        return DistributedBatchSampler(
            self.num_samples,
            batch_size=self.recipe.data.batch_size,
            seed=seed,
            group_size=PAIR_SIZE if self.train_pipeline.has_mixing else 1,
            shuffle_streams=build_shuffle_streams(self.source.splits["train"]),
            class_sampler=None if kind is None else ClassSampler(self._train_labels, kind, seed),
        )

    @property
    def is_multilabel(self) -> bool:
        """True if an image can have any number of labels."""
        return self.recipe.data.task == "multilabel"

    def build_loss(self) -> AnyLoss:
        """Build the training loss. Raises: RecipeError for class weights of unknown classes."""
        return build_loss(
            self.recipe.optim,
            self.epoch_class_counts,
            self.source.class_names,
            self.device,
            multilabel=self.is_multilabel,
        )

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps per epoch; may be fractional."""
        return self.num_samples / self.recipe.data.batch_size

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run; epochs are rounded up."""
        optim = self.recipe.optim
        return optim.steps or math.ceil(float(optim.epochs or 0) * self.steps_per_epoch)

    @property
    def requested_warmup_steps(self) -> int:
        """Optimizer steps of warm-up in the recipe."""
        optim = self.recipe.optim
        if optim.warmup_epochs is None:
            return optim.warmup_steps
        return round(optim.warmup_epochs * self.steps_per_epoch)

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of warm-up, at most the length of the run."""
        return min(self.requested_warmup_steps, self.num_steps)

    def lr_at(self, step: int, *, total_steps: int | None = None) -> float:
        """Return the learning rate of an optimizer step.

        Args:
            step: 0-based index of the step, which is the number of steps done before it.
            total_steps: length of the run; None for `num_steps`.
        """
        optim, total = self.recipe.optim, self.num_steps if total_steps is None else total_steps
        return lr_at(
            step,
            lr=optim.lr,
            schedule=optim.schedule,
            total_steps=total,
            warmup_steps=min(self.requested_warmup_steps, total),
            warmup_lr=optim.warmup_lr,
            min_lr=optim.min_lr,
            step_every=optim.step_every,
            step_factor=optim.step_factor,
            decay_ratio=optim.decay_ratio,
        )

    @property
    def decay_start_step(self) -> int | None:
        """The number of steps before the decay of schedule wsd; None for other schedules.

        A run can be lengthened from its checkpoint of this step.
        """
        optim = self.recipe.optim
        if optim.schedule != "wsd":
            return None
        return decay_start_step(
            self.num_steps, warmup_steps=self.warmup_steps, decay_ratio=optim.decay_ratio
        )

    def is_eval_step(self, step: int) -> bool:
        """True if the run evaluates on the validation split after `step` steps."""
        every = self.recipe.run.eval_every
        if every is not None:
            return step % every == 0 or step == self.num_steps
        return step == self.num_steps or completes_epoch(
            step, batch_size=self.recipe.data.batch_size, num_samples=self.num_samples
        )

    def is_save_step(self, step: int) -> bool:
        """True if the run saves a checkpoint after `step` steps."""
        every = self.recipe.run.save_every
        is_due = self.is_eval_step(step) if every is None else step % every == 0
        return is_due or step in (self.num_steps, self.decay_start_step)

    def build_loader(
        self, split: Split, *, train: bool, dtype: torch.dtype = torch.float32
    ) -> ImageLoader:
        """Decode a split and build its loader.

        Args:
            split: a split of the source.
            train: True for the training transforms; False for the evaluation transforms.
            dtype: dtype of the training images; evaluation uses float32.
        Raises: DataError naming every unreadable image, if `data.unreadable` is "stop".
        """
        data = self.recipe.data
        store = build_pixel_store(
            split,
            keep=data.keep,
            device=self.device,
            num_workers=self.num_workers,
            # Half the timeout: a rank with a stuck worker fails before the other ranks time out.
            timeout_seconds=self.recipe.run.timeout_seconds / 2,
            unreadable=data.unreadable,
            local_world_size=self.local_world_size,
            progress=self.show_progress,
        )
        return ImageLoader(
            store,
            self.train_pipeline if train else self.eval_pipeline,
            num_classes=self.num_classes,
            device=self.device,
            dtype=dtype,
        )

    def count_readable_images(self) -> int:
        """Decode every image of all splits once, without keeping them; streamed images are skipped.

        Returns: the number of readable training images.
        Raises: DataError naming the unreadable images of every split, if `data.unreadable` is
            "stop".
        """
        problems, num_samples = [], self.num_samples
        if self.source.splits["train"].is_streamed:
            logger.info("streamed images are not checked now: training finds unreadable ones later")
            return num_samples
        options = DecodeOptions(
            self.num_workers,
            self.recipe.data.unreadable,
            progress=self.show_progress,
            timeout_seconds=self.recipe.run.timeout_seconds / 2,
        )
        for name, split in self.source.splits.items():
            try:
                kept = readable_indices(split, options)
            except DataError as error:
                problems.append(error)
            else:
                num_samples = len(kept) if name == "train" else num_samples
        if problems:
            raise DataError("\n".join(map(str, problems)), code=problems[0].code)
        return num_samples

    def plan(self) -> dict[str, Any]:
        """Return the settings and sizes of the run, for `--dry-run` and run.json."""
        decisions = self.source.decisions
        return {
            "architecture": self.built.architecture,
            "weights": self.built.provenance,
            **{key: self.built.provenance[key] for key in ("parameters", "trainable_parameters")},
            "classes": self.num_classes,
            "images_read": self.num_samples,
            "images": {name: len(split) for name, split in self.source.splits.items()},
            "class_images": self.class_counts.tolist(),
            "image_size": list(self.preprocessing.image_size),
            "train_pipeline": self.train_pipeline.transform_spec,
            "eval_pipeline": self.eval_pipeline.transform_spec,
            "optimizer": self.recipe.optim.name,
            "lr": self.recipe.optim.lr,
            "schedule": self.recipe.optim.schedule,
            "device": str(self.device),
            "steps": self.num_steps,
            "steps_per_epoch": round(self.steps_per_epoch, 3),
            "warmup_steps": self.warmup_steps,
            "batch_size": self.recipe.data.batch_size,
            "workers": self.num_workers,
            **({} if decisions is None else {"decisions": dataclasses.asdict(decisions)}),
            **({"task": self.recipe.data.task} if self.is_multilabel else {}),
            **(
                {"class_draws": self.epoch_class_counts.tolist()}
                if self.recipe.data.sampling
                else {}
            ),
        }


def build_setup(
    recipe: Recipe,
    *,
    device: torch.device,
    local_world_size: int = 1,
    show_progress: bool,
) -> TrainingSetup:
    """Open the data and build the network and transforms of a recipe.

    Args:
        recipe: a validated recipe, from `load_recipe`.
        device: device that the run uses; the network stays on the CPU for now.
        local_world_size: processes that share this host's memory.
        show_progress: True to show progress bars.
    Returns: the setup; no image is decoded yet.
    Raises: RecipeError, DataError or WeightsError if recipe, data and weights do not match.
    """
    data, model = recipe.data, recipe.model

    # Open the data.
    source = open_data(data, recipe.run.seed)
    if "train" not in source.splits:
        message = f"{source.name}: has no train split, only {', '.join(source.splits)}; add one"
        raise DataError(message, code="data.no_split")
    if recipe.run.patience is not None and "val" not in source.splits:
        raise RecipeError(
            "run.patience: the data has no validation split; set data.val_fraction, or remove the "
            "key",
            code="recipe.conflict",
        )
    if not recipe.run.test:
        splits = {name: split for name, split in source.splits.items() if name != "test"}
        source = dataclasses.replace(source, splits=splits)
    num_samples = len(source.splits["train"])
    if data.batch_size > num_samples:
        logger.warning(
            f"data.batch_size: {data.batch_size} is more than the {num_samples} training images; "
            "each step uses some of them several times"
        )

    # Build the network, with the same random initialization in every process.
    torch.manual_seed(recipe.run.seed)
    built = build_model(
        model.name,
        num_classes=len(source.class_names),
        class_names=source.class_names,
        multilabel=data.task == "multilabel",
        **model.model_dump(exclude={"name", "compile", "sync_bn", "freeze_bn"}),
    )
    configure_batch_norm(built.model, model)
    if model.head_init is None:
        head_init = "keep" if "kept_classes" in built.provenance else "zeros"
        model = model.model_copy(update={"head_init": head_init})
        recipe = recipe.model_copy(update={"model": model})

    # Use the preprocessing of the weights, with the recipe's overrides.
    preprocessing = _override_preprocessing(recipe, built)
    built = dataclasses.replace(built, preprocessing=preprocessing)
    eval_spec = data.eval or default_eval_spec(preprocessing)
    published_preprocessing = spec_to_preprocessing(preprocessing, eval_spec)
    if published_preprocessing is None:
        logger.warning(
            f"data.eval: timm's hub format cannot store '{eval_spec}'; timm evaluates the "
            f"published model with '{default_eval_spec(preprocessing)}'"
        )
        published_preprocessing = preprocessing
    _check_decode_size(data.decode_size, published_preprocessing)

    # Build the transforms.
    with _prefix_recipe_errors("train"):
        train_spec = data.train or f"{eval_spec} | flip"
        train_pipeline = build_pipeline(preprocessing, train_spec, train=True)
    with _prefix_recipe_errors("eval"):
        eval_pipeline = build_pipeline(preprocessing, eval_spec, train=False)
    check_class_weights(recipe.optim, source.class_names)
    return TrainingSetup(
        recipe=recipe,
        source=source,
        built=built,
        preprocessing=published_preprocessing,
        train_pipeline=train_pipeline,
        eval_pipeline=eval_pipeline,
        num_samples=num_samples,
        device=device,
        local_world_size=local_world_size,
        show_progress=show_progress,
    )


@contextlib.contextmanager
def _prefix_recipe_errors(key: str) -> Iterator[None]:
    """Begin the block's RecipeErrors with the recipe key, `data.train` or `data.eval`."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"data.{key}: {error}", code=error.code) from error


def _check_decode_size(size: int | None, preprocessing: Preprocessing) -> None:
    """Raise RecipeError if images are decoded smaller than they are resized to."""
    if size is None:
        return
    needed = max(eval_resize_size(preprocessing))
    if size < needed:
        raise RecipeError(
            f"data.decode_size: {size} is less than the resize size of {needed} pixels; raise or "
            "remove it",
            code="recipe.conflict",
        )
    logger.warning(
        "data.decode_size: timm's hub format has no such key; timm decodes JPEGs for the published "
        "model at full size"
    )


def _first_readable_image(split: Split) -> torch.Tensor | None:
    """Return the first readable image, as (C, H, W) uint8, or None."""
    for index in range(len(split)):
        with contextlib.suppress(DataError):
            return hwc_to_chw(split.decode(index))
    return None


def _override_preprocessing(recipe: Recipe, built: BuiltModel) -> Preprocessing:
    """Return the preprocessing of the weights, with the recipe's overrides applied and logged."""
    settings = recipe.data.model_dump(include={"mean", "std", "interpolation", "crop_pct"})
    overrides = {
        key: value
        for key, value in settings.items()
        if value not in (None, getattr(built.preprocessing, key))
    }
    if overrides and recipe.model.pretrained:
        listed = ", ".join(
            f"data.{key}={value} instead of {getattr(built.preprocessing, key)}"
            for key, value in overrides.items()
        )
        logger.warning(
            f"the recipe overrides the preprocessing of the pretrained weights: {listed}; remove "
            "the key unless this is intended"
        )
    return dataclasses.replace(built.preprocessing, **overrides)
