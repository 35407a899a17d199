"""Training images as the network sees them: the same ones in several epochs, and in evaluation."""

# S images, E epochs, R rows of a batch, H W pixels, h w the network's

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.decode import planes
from finetune.data.image_store import Store
from finetune.data.loader import Sampler, shares_of_classes
from finetune.data.source import Split
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import FinetuneError
from finetune.report.run_data import TRAINING_IMAGES
from finetune.report.thumbnails import to_uri, visible
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup

__all__ = ["EPOCHS", "Augmented", "augmented", "one_of_each", "write_augmented"]

EPOCHS = 8
_SHOWN = 4  # images in a report
_SIDE = 128  # pixels of a picture there
# Of all views in a report, decoded and prepared: less than a second of one core.
_MOST_PIXELS = 40_000_000


@dataclass(frozen=True)
class Augmented:
    """A training image and what becomes of it.

    Attributes:
        name: of the image.
        labels: the index of its class, or of each that it has.
        decoded: (H, W, 3) uint8.
        epochs: (E, h, w, 3) uint8, as the step takes it that it belongs to in each epoch; E is 1
            where all epochs are alike.
        evaluation: (h, w, 3) uint8.
    """

    name: str
    labels: list[int]
    decoded: NDArray[np.uint8]
    epochs: NDArray[np.uint8]
    evaluation: NDArray[np.uint8]


def one_of_each(split: Split, number: int) -> list[int]:
    """The first image of each class, or of so many classes spread over all of them."""
    classes = split.labels.argmax(axis=1) if split.is_multilabel else split.labels
    _, first = np.unique(classes, return_index=True)
    places = np.linspace(0, len(first) - 1, min(number, len(first))).round().astype(int)
    chosen: list[int] = first[places].tolist()
    return chosen


def augmented(
    setup: TrainingSetup,
    split: Split,
    indices: Sequence[int],
    *,
    one_size: bool,
    epochs: int = EPOCHS,
    dtype: torch.dtype = torch.float32,
) -> list[Augmented]:
    """Prepare training images as the steps do that take them.

    Args:
        split: of training, without images in quarantine.
        one_size: True where all images of the split have one size; the pipeline is told so.
        epochs: to look at, from the first.
        dtype: of the images in training.
    Raises: DataError if an image cannot be read, or one that is mixed into it.
    """
    train, device = setup.train_pipeline, setup.device
    epochs = epochs if train.random else 1
    decoded = {index: split.read(index) for index in indices}
    keys_R, indices_R, partners_R, places_ES = _rows(setup.sampler, indices, epochs)
    pixels = [
        planes(decoded[index] if index in decoded else split.read(index))
        for index in indices_R.tolist()
    ]
    batch = torch.stack(pixels) if one_size else pixels
    images = train(batch, keys=keys_R, dtype=dtype, device=device)
    if train.mixes:
        labels = torch.from_numpy(split.labels[indices_R])
        targets = shares_of_classes(labels, setup.num_classes)
        images, _ = train.mix(images, targets.to(device), keys_R, torch.from_numpy(partners_R))
    plain = [planes(decoded[index]) for index in indices]
    evaluated = _pixels(setup.eval_pipeline(plain, device=device), setup)
    trained = _pixels(images, setup)
    return [
        Augmented(
            split.name_of(index),
            split.classes_of(index),
            decoded[index],
            trained[places_ES[:, place]],
            evaluated[place],
        )
        for place, index in enumerate(indices)
    ]


def _rows(
    sampler: Sampler, indices: Sequence[int], epochs: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find images in the steps of training, each beside the one that is mixed into it.

    Returns: keys (R,), sample indices (R,), the row that is mixed into each row (R,), and the rows
        of the images themselves (E, S).
    """
    keys: list[NDArray[np.uint64]] = []
    samples: list[NDArray[np.int64]] = []
    partners: list[int] = []
    places = np.empty((epochs, len(indices)), dtype=np.int64)
    seen = [-1] * len(indices)  # the last epoch: a sampling may leave an image out of some
    for epoch in range(epochs):
        for number, index in enumerate(indices):
            position = _next(sampler, index, seen[number] + 1)
            seen[number] = position // sampler.num_samples
            step, place = divmod(position, sampler.batch_size)
            step_keys, step_samples = sampler.micro_batches(step)[0]
            first, row = place - place % sampler.unit, len(partners)
            pair = slice(first, first + sampler.unit)
            keys.append(step_keys[pair])
            samples.append(step_samples[pair])
            partners += reversed(range(row, row + len(step_keys[pair])))
            places[epoch, number] = row + place - first
    return np.concatenate(keys), np.concatenate(samples), np.array(partners), places


def _next(sampler: Sampler, index: int, epoch: int) -> int:
    """The first place of an image in the stream, from an epoch on."""
    while not len(places := np.flatnonzero(sampler.order(epoch) == index)):
        epoch += 1
    return epoch * sampler.num_samples + int(places[0])


def _pixels(images: Tensor, setup: TrainingSetup) -> NDArray[np.uint8]:
    """Undo the normalisation of images (B, 3, h, w). Returns: (B, h, w, 3) uint8."""
    mean, std = setup.preprocessing.mean, setup.preprocessing.std
    shown = visible(images.float().cpu(), mean=mean, std=std)
    pixels: NDArray[np.uint8] = np.rint(255 * shown).astype(np.uint8)
    return pixels


def _few(setup: TrainingSetup, split: Split) -> tuple[list[int], int]:
    """Choose images for a report, and the number of epochs: fewer of both where photos are large.

    Raises: DataError if the first image cannot be read.
    """
    epochs = min(EPOCHS, max(1, int(setup.steps / setup.steps_per_epoch)))
    indices = one_of_each(split, _SHOWN)
    source, target = split.read(indices[0]).shape[:2], setup.preprocessing.image_size
    views = _MOST_PIXELS // (math.prod(source) + math.prod(target))
    indices = indices[: max(1, views // 3)]  # two epochs and the evaluation at least
    return indices, min(epochs, max(1, views // len(indices) - 1))


def write_augmented(run: RunDir, setup: TrainingSetup, store: Store, dtype: torch.dtype) -> None:
    """Write the training images that the report shows; where it cannot show them, the reason."""
    note, rows, split = "", [], store.split
    if isinstance(split.items, ShardItems):
        note = "They are not shown: the images are streamed, and would be fetched again."
    else:
        try:
            indices, epochs = _few(setup, split)
            one_size = isinstance(store.images, Tensor)
            rows = augmented(setup, split, indices, one_size=one_size, epochs=epochs, dtype=dtype)
        except FinetuneError as error:
            note = f"They are not shown: {error}"
    listed = [
        {
            "name": one.name,
            **({"labels": one.labels} if split.is_multilabel else {"label": one.labels[0]}),
            "pictures": [
                to_uri(picture, side=_SIDE)
                for picture in (one.decoded, *one.epochs, one.evaluation)
            ],
        }
        for one in rows
    ]
    try:
        run.write_json(TRAINING_IMAGES, {"note": note, "rows": listed})
    except FinetuneError as error:  # no reason to lose the run
        setup.notice(f"{TRAINING_IMAGES} is left out: {error}")
