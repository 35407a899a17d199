"""Training images as they are shown: the very pixels that the steps of training take."""

from __future__ import annotations

import base64
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from samples import store_of

from finetune.data.image_store import Store
from finetune.data.loader import Loader
from finetune.errors import DataError, SetupError
from finetune.recipe.load import parse_recipe
from finetune.report.thumbnails import visible
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup, open_setup
from finetune.training.training_images import augmented, one_of_each, write_augmented

RECIPE = """
model: {{name: "embedded:vit_nano", pretrained: false}}
data: {{source: "{source}", train: "{train}", batch_size: {batch_size}, num_train: {images},
       mean: [0.4, 0.5, 0.6], std: [0.2, 0.3, 0.25]}}
optim: {{lr: 0.001, steps: 40}}
"""


def setup_of(source: str, train: str, *, images: int = 24, batch_size: int = 16) -> TrainingSetup:
    text = RECIPE.format(source=source, train=train, images=images, batch_size=batch_size)
    recipe = parse_recipe(text)
    return open_setup(recipe, device=torch.device("cpu"), notice=lambda _: None, progress=False)


def pixels(setup: TrainingSetup, image_CHW: torch.Tensor) -> np.ndarray:
    prepared = setup.preprocessing
    shown = visible(image_CHW[None].float(), mean=prepared.mean, std=prepared.std)
    return np.rint(255 * shown[0]).astype(np.uint8)


def trained(
    setup: TrainingSetup, epochs: int, **changes: Any
) -> tuple[dict[int, list[np.ndarray]], Loader]:
    """What the loader of training makes of each image, epoch after epoch, and the loader."""
    split = setup.source.splits["train"]
    loader = setup.loader(split, train=True, **changes)
    steps = range(-(-epochs * len(split) // setup.recipe.data.batch_size))
    found: dict[int, list[np.ndarray]] = {}
    for step, (_, batches) in zip(steps, loader.train(setup.sampler, steps), strict=True):
        (batch,) = batches
        _, indices = setup.sampler.micro_batches(step)[0]
        for image, index in zip(batch.images_BCHW, indices.tolist(), strict=True):
            found.setdefault(index, []).append(pixels(setup, image))
    return found, loader


SENTENCES = [
    "resize(36) | random_crop(32, padding=2) | flip",
    "random_resized_crop(32, scale=(0.2, 1.0)) | rand_augment(2, 9) | random_erasing(1.0)",
    "resize | flip | mixup(0.8) | cutmix(1.0)",
]


@pytest.mark.parametrize("train", SENTENCES)
@pytest.mark.parametrize("batch_size", [16, 7, 50])
def test_they_are_the_pixels_of_the_steps(train: str, batch_size: int) -> None:
    setup = setup_of("embedded:digits", train, batch_size=batch_size)
    split, epochs = setup.source.splits["train"], 3
    expected, loader = trained(setup, epochs)
    assert isinstance(loader.store.images, torch.Tensor)
    indices = [0, 5, len(split) - 1]
    shown = augmented(setup, split, indices, one_size=True, epochs=epochs)
    assert [one.labels for one in shown] == [[label] for label in split.labels[indices]]
    for index, one in zip(indices, shown, strict=True):
        assert one.epochs.shape == (epochs, 32, 32, 3)
        assert np.array_equal(one.epochs, np.stack(expected[index][:epochs]))
        assert np.array_equal(one.decoded, split.read(index))
        assert one.name == split.name_of(index)
    assert len({one.tobytes() for one in shown[0].epochs}) == epochs  # another draw each time


@pytest.mark.parametrize("train", SENTENCES)
def test_images_of_many_sizes_too(image_folder: Path, train: str) -> None:
    setup = setup_of(f"folder:{image_folder}", train, images=20, batch_size=6)
    split = setup.source.splits["train"]
    expected, loader = trained(setup, 2)
    assert not isinstance(loader.store.images, torch.Tensor)
    shown = augmented(setup, split, [3, 9], one_size=False, epochs=2)
    for index, one in zip([3, 9], shown, strict=True):
        assert np.array_equal(one.epochs, np.stack(expected[index][:2]))


def test_in_the_numbers_of_the_run() -> None:
    setup = setup_of("embedded:digits", SENTENCES[0])
    split = setup.source.splits["train"]
    expected, _ = trained(setup, 2, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"one_size": True, "epochs": 2}
    (shown,) = augmented(setup, split, [4], dtype=torch.bfloat16, **settings)
    (other,) = augmented(setup, split, [4], **settings)
    assert np.array_equal(shown.epochs, np.stack(expected[4][:2]))
    assert not np.array_equal(shown.epochs, other.epochs)


def test_evaluation_is_shown_as_the_loader_makes_it() -> None:
    setup = setup_of("embedded:digits", SENTENCES[0])
    split = setup.source.splits["train"]
    (batch,) = setup.loader(split, train=False).once()
    (shown,) = augmented(setup, split, [7], one_size=True)
    assert np.array_equal(shown.evaluation, pixels(setup, batch.images_BCHW[7]))
    assert len(shown.epochs) == 8


def test_without_draws_all_epochs_are_one() -> None:
    setup = setup_of("embedded:digits", "resize(32)")
    (shown,) = augmented(setup, setup.source.splits["train"], [2], one_size=True)
    assert len(shown.epochs) == 1
    assert np.array_equal(shown.epochs[0], shown.evaluation)


def test_one_of_each_class() -> None:
    split = setup_of("embedded:digits", "resize(32)").source.splits["train"]
    chosen = one_of_each(split, 4)
    assert split.labels[chosen].tolist() == [0, 3, 6, 9]
    assert all(index == np.flatnonzero(split.labels == split.labels[index])[0] for index in chosen)
    assert len(one_of_each(split, 20)) == 10


class TestWhatTheReportShows:
    def test_some_images(self, run: RunDir) -> None:
        setup = setup_of("embedded:digits", SENTENCES[0])
        store = store_of(setup.source.splits["train"])
        write_augmented(run, setup, store, torch.float32)
        written = run.read_json("training_images.json")
        assert written is not None
        assert written["note"] == ""
        assert [row["label"] for row in written["rows"]] == [0, 3, 6, 9]
        expected, _ = trained(setup, 1)
        index = one_of_each(store.split, 4)[1]
        picture = written["rows"][1]["pictures"][1]
        body = base64.b64decode(picture.removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(body))), expected[index][0])
        assert Counter(len(row["pictures"]) for row in written["rows"]) == {2 + 8: 4}

    def test_no_more_epochs_than_there_were(self, run: RunDir) -> None:
        setup = setup_of("embedded:digits", SENTENCES[0], images=300)
        write_augmented(run, setup, store_of(setup.source.splits["train"]), torch.float32)
        written = run.read_json("training_images.json") or {}
        assert {len(row["pictures"]) for row in written["rows"]} == {2 + 2}  # 40 of 17 steps each

    def test_fewer_of_large_photos(self, run: RunDir, tmp_path: Path) -> None:
        for number in range(12):
            folder = tmp_path / "photos" / "abcd"[number % 4]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (2500, 2000), (9 * number, 9, 9)).save(folder / f"{number}.png")
        setup = setup_of(f"folder:{tmp_path / 'photos'}", SENTENCES[0], images=9, batch_size=3)
        split = setup.source.splits["train"]
        write_augmented(run, setup, Store(split, None), torch.float32)
        written = run.read_json("training_images.json") or {}
        pictures = [len(row["pictures"]) for row in written["rows"]]
        assert pictures == [2 + 2, 2 + 2]  # of 5 megapixels each

    def test_one_line_where_they_cannot_be_read(
        self, run: RunDir, image_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setup = setup_of(f"folder:{image_folder}", SENTENCES[0], images=20)
        store = store_of(setup.source.splits["train"])
        for file in image_folder.glob("train/*/*.png"):
            file.unlink()
        write_augmented(run, setup, store, torch.float32)
        written = run.read_json("training_images.json") or {}
        assert written["rows"] == []
        assert "no such file" in written["note"]

    def test_a_disk_that_is_full_costs_only_them(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise SetupError("the disk is full", code="setup.disk_full")

        said: list[str] = []
        monkeypatch.setattr(run, "write_json", full)
        setup = setup_of("embedded:digits", SENTENCES[0])
        object.__setattr__(setup, "notice", said.append)
        write_augmented(run, setup, store_of(setup.source.splits["train"]), torch.float32)
        assert said == ["training_images.json is left out: the disk is full"]


def test_an_image_that_is_gone_is_named(image_folder: Path) -> None:
    setup = setup_of(f"folder:{image_folder}", SENTENCES[0], images=20)
    split = setup.source.splits["train"]
    (image_folder / split.name_of(0)).unlink()
    with pytest.raises(DataError, match=split.name_of(0)):
        augmented(setup, split, [0], one_size=False)
