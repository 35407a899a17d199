"""Show training images as the network sees them: in several epochs, and in evaluation."""

# S images, E epochs, R rows of a batch, H W decoded pixels, h w network input pixels

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.decode import hwc_to_chw
from finetune.data.loader import one_hot_targets
from finetune.data.pixel_store import PixelStore
from finetune.data.sampler import DistributedBatchSampler
from finetune.data.source import Split
from finetune.errors import FinetuneError
from finetune.log import logger
from finetune.report.run_data import TRAINING_IMAGES_FILE
from finetune.report.thumbnails import denormalize, to_data_uri
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup
from finetune.transforms.mixing import partner_rows

__all__ = [
    "NUM_EPOCHS",
    "AugmentedImage",
    "augment_images",
    "pick_one_per_class",
    "write_training_images",
]

NUM_EPOCHS = 8
_NUM_IMAGES = 4  # training images in a report
_THUMBNAIL_SIDE = 128  # pixels
# Limit for all images of a report, original and transformed; takes under a second on one core.
_MAX_PIXELS = 40_000_000


@dataclass(frozen=True)
class AugmentedImage:
    """A training image with its augmented versions.

    Attributes:
        name: name of the image in its split.
        labels: class index of the image; for multi-label data, all its class indices.
        decoded: the original, (H, W, 3) uint8.
        trained: the network input in each epoch, (E, h, w, 3) uint8; E is 1 without random
            transforms.
        evaluated: the network input in evaluation, (h, w, 3) uint8.
    """

    name: str
    labels: list[int]
    decoded: NDArray[np.uint8]
    trained: NDArray[np.uint8]
    evaluated: NDArray[np.uint8]


def pick_one_per_class(split: Split, max_images: int) -> list[int]:
    """Return the index of the first image of each class.

    With more than `max_images` classes, only `max_images` evenly spaced classes are used.
    """
    classes = split.labels.argmax(axis=1) if split.is_multilabel else split.labels
    _, first = np.unique(classes, return_index=True)
    positions = np.linspace(0, len(first) - 1, min(max_images, len(first))).round().astype(int)
    chosen: list[int] = first[positions].tolist()
    return chosen


def augment_images(
    setup: TrainingSetup,
    split: Split,
    indices: Sequence[int],
    *,
    same_size: bool,
    num_epochs: int = NUM_EPOCHS,
    dtype: torch.dtype = torch.float32,
) -> list[AugmentedImage]:
    """Transform training images exactly as the training steps do.

    Args:
        setup: the training setup.
        split: the training split, without quarantined images.
        indices: indices of the images in the split.
        same_size: True if all images of the split have the same size, so that they form one tensor.
        num_epochs: number of epochs to show, starting with the first.
        dtype: dtype of the images in training.
    Raises: DataError if an image, or one that is mixed into it, cannot be read.
    """
    train, device = setup.train_pipeline, setup.device
    num_epochs = num_epochs if train.is_random else 1
    decoded = {index: split.decode(index) for index in indices}
    keys_R, indices_R, partners_R, places_ES = _find_batch_rows(setup.sampler, indices, num_epochs)
    pixels = [
        hwc_to_chw(decoded[index] if index in decoded else split.decode(index))
        for index in indices_R.tolist()
    ]
    batch = torch.stack(pixels) if same_size else pixels
    images = train(batch, keys=keys_R, dtype=dtype, device=device)
    if train.has_mixing:
        labels = torch.from_numpy(split.labels[indices_R])
        targets = one_hot_targets(labels, setup.num_classes)
        images, _ = train.mix_batch(
            images, targets.to(device), keys_R, torch.from_numpy(partners_R)
        )
    originals = [hwc_to_chw(decoded[index]) for index in indices]
    evaluated = _to_uint8_pixels(setup.eval_pipeline(originals, device=device), setup)
    trained = _to_uint8_pixels(images, setup)
    return [
        AugmentedImage(
            split.name_of(index),
            split.class_indices(index),
            decoded[index],
            trained[places_ES[:, place]],
            evaluated[place],
        )
        for place, index in enumerate(indices)
    ]


def _find_batch_rows(
    sampler: DistributedBatchSampler, indices: Sequence[int], num_epochs: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the images in the training batches, each with the image that is mixed into it.

    Returns: augmentation keys (R,), sample indices (R,), the row that is mixed into each row (R,),
        and the row of each image in each epoch (E, S).
    """
    keys: list[NDArray[np.uint64]] = []
    samples: list[NDArray[np.int64]] = []
    partners: list[int] = []
    places = np.empty((num_epochs, len(indices)), dtype=np.int64)
    seen = [-1] * len(indices)  # last epoch of each image; data.sampling omits some in an epoch
    for epoch in range(num_epochs):
        for number, index in enumerate(indices):
            position = _next_position(sampler, index, seen[number] + 1)
            seen[number] = position // sampler.num_samples
            step, place = divmod(position, sampler.batch_size)
            step_keys, step_samples = sampler.micro_batches(step)[0]
            first, row = place - place % sampler.group_size, len(partners)
            pair = slice(first, first + sampler.group_size)
            keys.append(step_keys[pair])
            samples.append(step_samples[pair])
            partners += (row + partner_rows(len(step_keys[pair]))).tolist()
            places[epoch, number] = row + place - first
    return np.concatenate(keys), np.concatenate(samples), np.array(partners), places


def _next_position(sampler: DistributedBatchSampler, index: int, epoch: int) -> int:
    """Return the first position of an image in the training stream, in `epoch` or a later one."""
    while not len(places := np.flatnonzero(sampler.epoch_order(epoch) == index)):
        epoch += 1
    return epoch * sampler.num_samples + int(places[0])


def _to_uint8_pixels(images: Tensor, setup: TrainingSetup) -> NDArray[np.uint8]:
    """Undo the normalization of images (B, 3, h, w). Returns: (B, h, w, 3) uint8."""
    mean, std = setup.preprocessing.mean, setup.preprocessing.std
    scaled = denormalize(images.float().cpu(), mean=mean, std=std)
    pixels: NDArray[np.uint8] = np.rint(255 * scaled).astype(np.uint8)
    return pixels


def _choose_images(setup: TrainingSetup, split: Split) -> tuple[list[int], int]:
    """Choose images and the number of epochs for a report: fewer of both if images are large.

    Raises: DataError if the first image cannot be read.
    """
    epochs = min(NUM_EPOCHS, max(1, int(setup.num_steps / setup.steps_per_epoch)))
    indices = pick_one_per_class(split, _NUM_IMAGES)
    source, target = split.decode(indices[0]).shape[:2], setup.preprocessing.image_size
    num_views = _MAX_PIXELS // (math.prod(source) + math.prod(target))
    indices = indices[: max(1, num_views // 3)]  # at least two epochs and the evaluation
    return indices, min(epochs, max(1, num_views // len(indices) - 1))


def write_training_images(
    run: RunDir, setup: TrainingSetup, store: PixelStore, dtype: torch.dtype
) -> None:
    """Write training images for the report, or a note that says why the report shows none."""
    note, rows, split = "", [], store.split
    if split.is_streamed:
        note = "They are not shown: the images are streamed and would be downloaded again."
    else:
        try:
            indices, epochs = _choose_images(setup, split)
            same_size = isinstance(store.images, Tensor)
            rows = augment_images(
                setup, split, indices, same_size=same_size, num_epochs=epochs, dtype=dtype
            )
        except FinetuneError as error:
            note = f"They are not shown: {error}"
    entries = [
        {
            "name": image.name,
            **({"labels": image.labels} if split.is_multilabel else {"label": image.labels[0]}),
            "pictures": [
                to_data_uri(picture, max_side=_THUMBNAIL_SIDE)
                for picture in (image.decoded, *image.trained, image.evaluated)
            ],
        }
        for image in rows
    ]
    try:
        run.write_json(TRAINING_IMAGES_FILE, {"note": note, "rows": entries})
    except FinetuneError as error:  # must not fail the run
        logger.warning(f"{TRAINING_IMAGES_FILE} is left out: {error}")
