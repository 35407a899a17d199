"""Previews of augmented training images: exactly the pixels of the training steps."""

from __future__ import annotations

import base64
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logs import logged
from PIL import Image
from small_datasets import make_pixel_store

from finetune.data.loader import ImageLoader
from finetune.data.pixel_store import PixelStore
from finetune.errors import DataError, SetupError
from finetune.recipe.load import parse_recipe
from finetune.report.thumbnails import denormalize
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup, build_setup
from finetune.training.training_images import (
    augment_images,
    pick_one_per_class,
    write_training_images,
)

RECIPE = """
model: {{name: "embedded:vit_nano", pretrained: false}}
data: {{source: "{source}", train: "{train}", batch_size: {batch_size}, num_train: {images},
       mean: [0.4, 0.5, 0.6], std: [0.2, 0.3, 0.25]}}
optim: {{lr: 0.001, steps: 40}}
"""


def make_setup(source: str, train: str, *, images: int = 24, batch_size: int = 16) -> TrainingSetup:
    text = RECIPE.format(source=source, train=train, images=images, batch_size=batch_size)
    recipe = parse_recipe(text)
    return build_setup(recipe, device=torch.device("cpu"), show_progress=False)


def to_uint8(setup: TrainingSetup, image_CHW: torch.Tensor) -> np.ndarray:
    preprocessing = setup.preprocessing
    denormalized = denormalize(
        image_CHW[None].float(), mean=preprocessing.mean, std=preprocessing.std
    )
    return np.rint(255 * denormalized[0]).astype(np.uint8)


def augmented_by_loader(
    setup: TrainingSetup, epochs: int, **kwargs: Any
) -> tuple[dict[int, list[np.ndarray]], ImageLoader]:
    """Return each image as the training loader augments it, epoch by epoch, and the loader."""
    split = setup.source.splits["train"]
    loader = setup.build_loader(split, train=True, **kwargs)
    steps = range(-(-epochs * len(split) // setup.recipe.data.batch_size))
    augmented: dict[int, list[np.ndarray]] = {}
    for step, (_, batches) in zip(steps, loader.train_steps(setup.sampler, steps), strict=True):
        (batch,) = batches
        _, indices = setup.sampler.micro_batches(step)[0]
        for image, index in zip(batch.images_BCHW, indices.tolist(), strict=True):
            augmented.setdefault(index, []).append(to_uint8(setup, image))
    return augmented, loader


TRANSFORMS = [
    "resize(36) | random_crop(32, padding=2) | flip",
    "random_resized_crop(32, scale=(0.2, 1.0)) | rand_augment(2, 9) | random_erasing(1.0)",
    "resize | flip | mixup(0.8) | cutmix(1.0)",
]


@pytest.mark.parametrize("train", TRANSFORMS)
@pytest.mark.parametrize("batch_size", [16, 7, 50])
def test_previews_equal_the_pixels_of_the_training_steps(train: str, batch_size: int) -> None:
    setup = make_setup("embedded:digits", train, batch_size=batch_size)
    split, epochs = setup.source.splits["train"], 3
    expected, loader = augmented_by_loader(setup, epochs)
    assert isinstance(loader.store.images, torch.Tensor)
    indices = [0, 5, len(split) - 1]
    previews = augment_images(setup, split, indices, same_size=True, num_epochs=epochs)
    assert [preview.labels for preview in previews] == [[label] for label in split.labels[indices]]
    for index, preview in zip(indices, previews, strict=True):
        assert preview.trained.shape == (epochs, 32, 32, 3)
        assert np.array_equal(preview.trained, np.stack(expected[index][:epochs]))
        assert np.array_equal(preview.decoded, split.decode(index))
        assert preview.name == split.name_of(index)
    # every epoch draws a new augmentation
    assert len({preview.tobytes() for preview in previews[0].trained}) == epochs


@pytest.mark.parametrize("train", TRANSFORMS)
def test_previews_of_images_of_different_sizes(image_folder: Path, train: str) -> None:
    setup = make_setup(f"folder:{image_folder}", train, images=20, batch_size=6)
    split = setup.source.splits["train"]
    expected, loader = augmented_by_loader(setup, 2)
    assert not isinstance(loader.store.images, torch.Tensor)
    previews = augment_images(setup, split, [3, 9], same_size=False, num_epochs=2)
    for index, preview in zip([3, 9], previews, strict=True):
        assert np.array_equal(preview.trained, np.stack(expected[index][:2]))


def test_previews_use_the_dtype_of_the_run() -> None:
    setup = make_setup("embedded:digits", TRANSFORMS[0])
    split = setup.source.splits["train"]
    expected, _ = augmented_by_loader(setup, 2, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"same_size": True, "num_epochs": 2}
    (bf16_preview,) = augment_images(setup, split, [4], dtype=torch.bfloat16, **settings)
    (fp32_preview,) = augment_images(setup, split, [4], **settings)
    assert np.array_equal(bf16_preview.trained, np.stack(expected[4][:2]))
    assert not np.array_equal(bf16_preview.trained, fp32_preview.trained)


def test_evaluation_preview_equals_the_eval_loader() -> None:
    setup = make_setup("embedded:digits", TRANSFORMS[0])
    split = setup.source.splits["train"]
    (batch,) = setup.build_loader(split, train=False).eval_batches()
    (preview,) = augment_images(setup, split, [7], same_size=True)
    assert np.array_equal(preview.evaluated, to_uint8(setup, batch.images_BCHW[7]))
    assert len(preview.trained) == 8


def test_deterministic_transforms_give_one_preview() -> None:
    setup = make_setup("embedded:digits", "resize(32)")
    (preview,) = augment_images(setup, setup.source.splits["train"], [2], same_size=True)
    assert len(preview.trained) == 1
    assert np.array_equal(preview.trained[0], preview.evaluated)


def test_pick_one_per_class_spreads_over_the_classes() -> None:
    split = make_setup("embedded:digits", "resize(32)").source.splits["train"]
    chosen = pick_one_per_class(split, 4)
    assert split.labels[chosen].tolist() == [0, 3, 6, 9]
    assert all(index == np.flatnonzero(split.labels == split.labels[index])[0] for index in chosen)
    assert len(pick_one_per_class(split, 20)) == 10


class TestWriteTrainingImages:
    def test_four_classes_with_eight_epochs(self, run: RunDir) -> None:
        setup = make_setup("embedded:digits", TRANSFORMS[0])
        store = make_pixel_store(setup.source.splits["train"])
        write_training_images(run, setup, store, torch.float32)
        written = run.read_json("training_images.json")
        assert written is not None
        assert written["note"] == ""
        assert [row["label"] for row in written["rows"]] == [0, 3, 6, 9]
        expected, _ = augmented_by_loader(setup, 1)
        index = pick_one_per_class(store.split, 4)[1]
        image_url = written["rows"][1]["pictures"][1]
        png = base64.b64decode(image_url.removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), expected[index][0])
        assert Counter(len(row["pictures"]) for row in written["rows"]) == {2 + 8: 4}

    def test_no_more_epochs_than_the_run_has(self, run: RunDir) -> None:
        setup = make_setup("embedded:digits", TRANSFORMS[0], images=300)
        write_training_images(
            run, setup, make_pixel_store(setup.source.splits["train"]), torch.float32
        )
        written = run.read_json("training_images.json") or {}
        # 40 steps are 3 epochs of 17 steps
        assert {len(row["pictures"]) for row in written["rows"]} == {2 + 2}

    def test_fewer_previews_of_large_photos(self, run: RunDir, tmp_path: Path) -> None:
        for number in range(8):
            folder = tmp_path / "photos" / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (2500, 2000), (9 * number, 9, 9)).save(
                folder / f"{number}.png", compress_level=1
            )
        setup = make_setup(f"folder:{tmp_path / 'photos'}", TRANSFORMS[0], images=6, batch_size=2)
        split = setup.source.splits["train"]
        write_training_images(run, setup, PixelStore(split, None), torch.float32)
        written = run.read_json("training_images.json") or {}
        image_counts = [len(row["pictures"]) for row in written["rows"]]
        assert image_counts == [2 + 2, 2 + 2]  # images of 5 megapixels each

    def test_unreadable_images_leave_a_note(
        self, run: RunDir, image_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setup = make_setup(f"folder:{image_folder}", TRANSFORMS[0], images=20)
        store = make_pixel_store(setup.source.splits["train"])
        for file in image_folder.glob("train/*/*.png"):
            file.unlink()
        write_training_images(run, setup, store, torch.float32)
        written = run.read_json("training_images.json") or {}
        assert written["rows"] == []
        assert "no such file" in written["note"]

    def test_full_disk_only_logs_a_warning(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raise_disk_full(*_: object) -> None:
            raise SetupError("the disk is full", code="setup.disk_full")

        monkeypatch.setattr(run, "write_json", raise_disk_full)
        setup = make_setup("embedded:digits", TRANSFORMS[0])
        store = make_pixel_store(setup.source.splits["train"])
        with logged() as messages:
            write_training_images(run, setup, store, torch.float32)
        assert messages == ["training_images.json is left out: the disk is full"]


def test_missing_image_is_named(image_folder: Path) -> None:
    setup = make_setup(f"folder:{image_folder}", TRANSFORMS[0], images=20)
    split = setup.source.splits["train"]
    (image_folder / split.name_of(0)).unlink()
    with pytest.raises(DataError, match=split.name_of(0)):
        augment_images(setup, split, [0], same_size=False)
