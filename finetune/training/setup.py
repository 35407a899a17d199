"""A recipe made concrete: data, network, pipelines and the number of steps, on a given device.

Nothing here trains, and nothing knows how many processes there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.decode import planes
from finetune.data.decode_all import readable
from finetune.data.from_recipe import data_of
from finetune.data.image_store import num_workers, open_store
from finetune.data.loader import Loader, Sampler, crosses_epoch
from finetune.data.sampling import ClassSampling, class_counts, class_draws
from finetune.data.source import Source, Split
from finetune.data.streaming.row_groups import ShardItems
from finetune.data.streaming.shuffle import lanes_of
from finetune.errors import DataError, RecipeError
from finetune.models.batch_norm import choose_statistics
from finetune.models.build import build
from finetune.models.saved import Built
from finetune.recipe.load import Recipe
from finetune.training.losses import AnyLoss, loss_of
from finetune.training.optim import lr_at
from finetune.transforms.evaluation import as_published, default_eval, make_pipeline, resized
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["TrainingSetup", "open_setup"]


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """Everything that training needs, before it is spread over processes.

    Attributes:
        num_samples: images in the training split; from `with_num_samples`, those that can be read.
        local_processes: processes that share this host's memory.
        notice: told once of each thing the user should know.
        progress: whether progress bars are shown.
        labels: of the training images that can be read; None: of all.
    """

    recipe: Recipe
    source: Source
    built: Built
    preprocessing: Preprocessing
    train_pipeline: Pipeline
    eval_pipeline: Pipeline
    num_samples: int
    device: torch.device
    local_processes: int
    notice: Callable[[str], None]
    progress: bool
    labels: NDArray[Any] | None = None

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.source.class_names)

    @property
    def workers(self) -> int:
        """Processes that decode for this one."""
        return num_workers(self.recipe.data.workers, self.local_processes)

    def with_num_samples(
        self, num_samples: int, labels: NDArray[Any] | None = None
    ) -> TrainingSetup:
        """The same setup for so many training images, with these labels; steps follow."""
        return dataclasses.replace(self, num_samples=num_samples, labels=labels)

    def fingerprints(self) -> dict[str, str]:
        """A sha256 for each split and for the classes' names: of images, labels and their order."""
        names = json.dumps(self.source.class_names).encode()
        splits = {name: split.fingerprint for name, split in self.source.splits.items()}
        return {**splits, "classes": hashlib.sha256(names).hexdigest()}

    def try_pipelines(self) -> None:
        """Send one training image through both pipelines.

        Raises: RecipeError naming the pipeline that does not lead to the network's size.
        """
        image = _first_image(self.source.splits["train"])
        if image is None:
            return  # decoding names them: before training, or with keep none as they are needed
        keys = np.zeros(1, dtype=np.uint64)
        for name in ("train", "eval"):
            pipeline: Pipeline = getattr(self, f"{name}_pipeline")
            with _named(name):
                pipeline([image], keys=keys if pipeline.random else None)

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training images of each class, (K,)."""
        return class_counts(self._train_labels, self.num_classes)

    @property
    def class_draws(self) -> NDArray[np.int64]:
        """Images of each class in an epoch, (K,); other than `class_counts` with data.sampling."""
        kind = self.recipe.data.sampling
        return self.class_counts if kind is None else class_draws(self.class_counts, kind)

    @property
    def _train_labels(self) -> NDArray[Any]:
        return self.source.splits["train"].labels if self.labels is None else self.labels

    @property
    def sampler(self) -> Sampler:
        """The order of the training images."""
        kind, seed = self.recipe.data.sampling, self.recipe.run.seed
        return Sampler(
            self.num_samples,
            batch_size=self.recipe.data.batch_size,
            seed=seed,
            unit=2 if self.train_pipeline.mixes else 1,
            lanes=lanes_of(self.source.splits["train"]),
            sampling=None if kind is None else ClassSampling(self._train_labels, kind, seed),
        )

    @property
    def multilabel(self) -> bool:
        """True if an image has any number of labels."""
        return self.recipe.data.task == "multilabel"

    def make_loss(self) -> AnyLoss:
        """Make the loss of a training step. Raises: RecipeError for weights of unknown classes."""
        names = self.source.class_names
        return loss_of(
            *(self.recipe.optim, self.class_draws, names, self.device), multilabel=self.multilabel
        )

    @property
    def steps_per_epoch(self) -> float:
        """Optimiser steps in which each training image comes once; need not be whole."""
        return self.num_samples / self.recipe.data.batch_size

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run; epochs are rounded up."""
        optim = self.recipe.optim
        return optim.steps or math.ceil(float(optim.epochs or 0) * self.steps_per_epoch)

    @property
    def requested_warmup_steps(self) -> int:
        """Optimiser steps of the warm-up that the recipe asks for."""
        optim = self.recipe.optim
        if optim.warmup_epochs is None:
            return optim.warmup_steps
        return round(optim.warmup_epochs * self.steps_per_epoch)

    @property
    def warmup_steps(self) -> int:
        """Optimiser steps of the warm-up, never more than the run has."""
        return min(self.requested_warmup_steps, self.steps)

    def lr(self, step: int, *, steps: int | None = None) -> float:
        """The learning rate of the optimiser step that follows `step` done ones.

        Args:
            steps: of the whole run, if it were another number.
        """
        optim, total = self.recipe.optim, self.steps if steps is None else steps
        return lr_at(
            step,
            lr=optim.lr,
            schedule=optim.schedule,
            steps=total,
            warmup_steps=min(self.requested_warmup_steps, total),
            warmup_lr=optim.warmup_lr,
            min_lr=optim.min_lr,
            step_every=optim.step_every,
            step_factor=optim.step_factor,
        )

    def evaluates_after(self, step: int) -> bool:
        """True if the validation split is due when `step` steps are done."""
        every = self.recipe.run.eval_every
        if every is not None:
            return step % every == 0 or step == self.steps
        return step == self.steps or crosses_epoch(
            step, batch_size=self.recipe.data.batch_size, num_samples=self.num_samples
        )

    def saves_after(self, step: int) -> bool:
        """True if a checkpoint is due when `step` steps are done."""
        every = self.recipe.run.save_every
        due = self.evaluates_after(step) if every is None else step % every == 0
        return due or step == self.steps

    def loader(self, split: Split, *, train: bool, dtype: torch.dtype = torch.float32) -> Loader:
        """Decode a split and connect it with its pipeline.

        Args:
            split: one of the source's.
            train: augment as the recipe says; else the evaluation pipeline, always in float32.
            dtype: of the augmented images.
        Raises: DataError naming every image that cannot be read.
        """
        data = self.recipe.data
        store = open_store(
            split,
            keep=data.keep,
            device=self.device,
            workers=self.workers,
            # Half of it: a rank that waits for a worker fails before the others time out on it.
            timeout_seconds=self.recipe.run.timeout_seconds / 2,
            unreadable=data.unreadable,
            local_processes=self.local_processes,
            progress=self.progress,
            notice=self.notice,
        )
        return Loader(
            store,
            self.train_pipeline if train else self.eval_pipeline,
            num_classes=self.num_classes,
            device=self.device,
            dtype=dtype,
        )

    def read_images(self) -> int:
        """Decode every image of the run once and keep none; streamed ones are not read.

        Returns: the number of training images that can be read.
        Raises: DataError naming the images of every split that cannot be read.
        """
        data, problems, num_samples = self.recipe.data, [], self.num_samples
        if isinstance(self.source.splits["train"].items, ShardItems):
            self.notice("streamed images are not read now; train reads them as it goes")
            return num_samples
        for name, split in self.source.splits.items():
            try:
                kept = readable(
                    split,
                    workers=self.workers,
                    unreadable=data.unreadable,
                    progress=self.progress,
                    timeout_seconds=self.recipe.run.timeout_seconds / 2,
                )
            except DataError as error:
                problems.append(error)
            else:
                num_samples = len(kept) if name == "train" else num_samples
        if problems:
            raise DataError("\n".join(map(str, problems)), code=problems[0].code)
        return num_samples

    def plan(self) -> dict[str, Any]:
        """The run's settings and sizes, for `--dry-run` and run.json."""
        return {
            "architecture": self.built.architecture,
            "weights": self.built.provenance,
            **{key: self.built.provenance[key] for key in ("parameters", "trainable_parameters")},
            "classes": self.num_classes,
            "images_read": self.num_samples,
            "images": {name: len(split) for name, split in self.source.splits.items()},
            "class_images": self.class_counts.tolist(),
            "image_size": list(self.preprocessing.image_size),
            "train_pipeline": self.train_pipeline.sentence,
            "eval_pipeline": self.eval_pipeline.sentence,
            "optimizer": self.recipe.optim.name,
            "lr": self.recipe.optim.lr,
            "schedule": self.recipe.optim.schedule,
            "device": str(self.device),
            "steps": self.steps,
            "steps_per_epoch": round(self.steps_per_epoch, 3),
            "warmup_steps": self.warmup_steps,
            "batch_size": self.recipe.data.batch_size,
            "workers": self.workers,
            **({"task": self.recipe.data.task} if self.multilabel else {}),
            **({"class_draws": self.class_draws.tolist()} if self.recipe.data.sampling else {}),
        }


def open_setup(
    recipe: Recipe,
    *,
    device: torch.device,
    local_processes: int = 1,
    notice: Callable[[str], None],
    progress: bool,
) -> TrainingSetup:
    """Make a recipe concrete.

    Args:
        recipe: checked and complete.
        local_processes: processes that share this host's memory.
        notice: told once of each thing the user should know.
    Returns: the setup; no image is decoded yet.
    Raises: RecipeError, DataError or WeightsError for what does not fit together.
    """
    data = recipe.data
    source = _open_source(recipe)
    num_samples = len(source.splits["train"])
    if data.batch_size > num_samples:
        notice(
            f"data.batch_size: {data.batch_size} is more than the {num_samples} training images; "
            "each step takes some of them several times"
        )
    built = _build(recipe, source.class_names)
    if recipe.model.head_init is None:
        kept = {"head_init": "keep" if "kept_classes" in built.provenance else "zeros"}
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=kept)})
    preprocessing = _preprocessing(recipe, built, notice)
    evaluation = data.eval or default_eval(preprocessing)
    published = as_published(preprocessing, evaluation)
    if published is None:
        notice(
            f"data.eval: timm's hub format cannot say '{evaluation}'; whoever loads the published "
            f"model evaluates it with '{default_eval(preprocessing)}'"
        )
    _check_decode_size(data.decode_size, published or preprocessing, notice)
    setup = TrainingSetup(
        recipe=recipe,
        source=source,
        built=built,
        preprocessing=published or preprocessing,
        train_pipeline=_pipeline("train", data.train or f"{evaluation} | flip", preprocessing),
        eval_pipeline=_pipeline("eval", evaluation, preprocessing),
        num_samples=num_samples,
        device=device,
        local_processes=local_processes,
        notice=notice,
        progress=progress,
    )
    setup.make_loss()  # refuses weights of classes that are not there
    return setup


def _open_source(recipe: Recipe) -> Source:
    """The data with the splits that the recipe takes from it."""
    source = data_of(recipe.data, recipe.run.seed)
    if "train" not in source.splits:
        message = f"{source.name}: no train split, only {', '.join(source.splits)}; name another"
        raise DataError(message, code="data.no_split")
    if not recipe.run.test:
        splits = {name: split for name, split in source.splits.items() if name != "test"}
        source = dataclasses.replace(source, splits=splits)
    if recipe.run.patience is not None and "val" not in source.splits:
        raise RecipeError(
            "run.patience: there is no validation split to wait on; set data.val_fraction, or "
            "remove the key",
            code="recipe.conflict",
        )
    return source


def _pipeline(key: str, sentence: str, preprocessing: Preprocessing) -> Pipeline:
    """Make the pipeline of `data.train` or `data.eval`; what is wrong with it names the key."""
    with _named(key):
        return make_pipeline(preprocessing, sentence, train=key == "train")


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"data.{key}: {error}", code=error.code) from error


def _check_decode_size(
    size: int | None, preprocessing: Preprocessing, notice: Callable[[str], None]
) -> None:
    """Refuse to decode to less than is needed; notice that the hub format has no such key."""
    if size is None:
        return
    needed = max(resized(preprocessing))
    if size < needed:
        raise RecipeError(
            f"data.decode_size: {size} is less than the {needed} pixels that images are resized "
            "to; raise it, or remove it",
            code="recipe.conflict",
        )
    notice(
        "data.decode_size: timm's hub format has no such key; whoever loads the published model "
        "decodes JPEGs at their own size"
    )


def _first_image(split: Split) -> torch.Tensor | None:
    """The first image that can be read, as (C, H, W) uint8, or None."""
    for index in range(len(split)):
        with contextlib.suppress(DataError):
            return planes(split.read(index))
    return None


def _build(recipe: Recipe, class_names: list[str]) -> Built:
    """Build the recipe's network, with the same random values in every process."""
    torch.manual_seed(recipe.run.seed)
    settings = recipe.model.model_dump(exclude={"name", "compile", "sync_bn", "freeze_bn"})
    num_classes = len(class_names)
    settings["multilabel"] = recipe.data.task == "multilabel"
    built = build(recipe.model.name, num_classes=num_classes, class_names=class_names, **settings)
    choose_statistics(built.model, recipe.model)
    return built


def _preprocessing(recipe: Recipe, built: Built, notice: Callable[[str], None]) -> Preprocessing:
    """The weights' preprocessing, with what the recipe overrides; the user is told once."""
    settings = recipe.data.model_dump(include={"mean", "std", "interpolation", "crop_pct"})
    differing = {
        key: value
        for key, value in settings.items()
        if value not in (None, getattr(built.preprocessing, key))
    }
    if differing and recipe.model.pretrained:
        listed = ", ".join(
            f"data.{key}={value} instead of {getattr(built.preprocessing, key)}"
            for key, value in differing.items()
        )
        notice(
            f"the recipe overrides the preprocessing that the weights were trained with: {listed}; "
            "remove the key unless this is meant"
        )
    return dataclasses.replace(built.preprocessing, **differing)
