"""Sheets of images: by class, and as the network sees them; every picture in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from small_datasets import write_file, write_image_folder

from finetune.cli.main import main
from finetune.commands.show_images import ImageRow, draw_image_rows, show_source, show_training
from finetune.recipe.load import parse_recipe
from finetune.report.thumbnails import denormalize
from finetune.training.setup import build_setup

RECIPE = """
model: {name: "embedded:vit_nano"}
data: {source: "embedded:digits", train: "resize(36) | random_crop(32)", num_train: 40}
optim: {lr: 0.001, steps: 2}
"""
Captured = pytest.CaptureFixture[str]


def plain(colour: tuple[int, int, int], size: int = 32) -> np.ndarray:
    return np.full((size, size, 3), colour, dtype=np.uint8)


def area(image: Image.Image, colour: tuple[int, int, int]) -> int:
    return int((np.asarray(image) == colour).all(axis=2).sum())


def places(image: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int]:
    """The first row and column of a colour."""
    rows, columns = np.nonzero((np.asarray(image) == colour).all(axis=2))
    return int(rows.min()), int(columns.min())


def test_each_picture_has_its_place() -> None:
    red, blue, green = (200, 30, 30), (30, 30, 200), (30, 200, 30)
    strips = [
        ImageRow("one", "3 train", [plain(red), plain(blue, 64)]),
        ImageRow("two", "x " * 300, [plain(green, 1000), None]),
    ]
    sheet = draw_image_rows(
        strips, title="a" * 500, facts=["2 classes"], column_titles=["before", "after"]
    )
    assert area(sheet, red) == area(sheet, blue) == area(sheet, green) == 128 * 128
    top, left = places(sheet, red)
    assert places(sheet, blue) == (top, left + 136)
    assert places(sheet, green)[1] == left
    assert places(sheet, green)[0] > top + 128


def test_a_source_by_class(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "d", {"train/a": 12, "train/b": 2, "test/a": 1})
    path = show_source(source, tmp_path / "sheet.png")
    drawn = np.asarray(Image.open(path))
    found = []
    names = sorted(f"a/{n}" for n in range(12))
    for name in [*names, "b/0", "b/1"]:
        pixels = np.asarray(Image.open(tmp_path / "d/train" / f"{name}.png"))
        large = pixels.repeat(25, axis=0).repeat(25, axis=1)
        corners = np.argwhere((drawn == large[0, 0]).all(axis=2))
        if any(np.array_equal(drawn[y : y + 125, x : x + 100], large) for y, x in corners):
            found.append(name)
    assert found == [*(names[n] for n in (0, 2, 3, 5, 6, 8, 9, 11)), "b/0", "b/1"]


def test_many_classes_and_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "d", {f"{n:02}": 1 for n in range(30)})
    write_file(tmp_path / "d/00/0.png", b"no image")
    few = write_image_folder(tmp_path / "e", {f"{n:02}": 1 for n in range(24)})
    sheets = [show_source(one, tmp_path / f"{n}.jpg") for n, one in enumerate((source, few))]
    sizes = {Image.open(sheet).size for sheet in sheets}
    assert len(sizes) == 1  # 24 of them
    assert Image.open(sheets[0]).format == "JPEG"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[ImageRow], dict[str, list[str]]]]:
    """The strips and texts of each sheet that is drawn."""
    kept: list[tuple[list[ImageRow], dict[str, list[str]]]] = []

    def keep(strips: list[ImageRow], **texts: list[str]) -> Image.Image:
        kept.append((strips, texts))
        return draw_image_rows(strips, **texts)  # type: ignore[arg-type]

    monkeypatch.setattr("finetune.commands.show_images.draw_image_rows", keep)
    return kept


def test_training_images_of_a_recipe(tmp_path: Path, seen: list[Any]) -> None:
    path = show_training(parse_recipe(RECIPE), tmp_path / "sheet.png")
    ((strips, texts),) = seen
    assert [len(strip.images) for strip in strips] == [1 + 8 + 1] * 6
    assert texts["column_titles"][1:-1] == [f"epoch {number}" for number in range(1, 9)]
    assert "resize(36) | random_crop(32)" in texts["facts"]
    shown = [np.asarray(picture) for picture in strips[0].images]
    assert shown[0].shape == (8, 8, 3)
    assert {picture.shape for picture in shown[1:]} == {(32, 32, 3)}
    assert len({picture.tobytes() for picture in shown[1:-1]}) > 4
    assert min(Image.open(path).size) > 900
    show_training(parse_recipe(RECIPE, overrides=["data.train=resize"]), tmp_path / "sheet.png")
    assert seen[1][1]["column_titles"] == ["decoded", "every epoch", "evaluation"]


def test_quarantine_counts_as_in_training(
    image_folder: Path, tmp_path: Path, seen: list[Any]
) -> None:
    changes = [f"data.source=folder:{image_folder}", "data.num_train=20", "data.batch_size=4"]
    changes += ["data.train=random_resized_crop(32) | cutmix(1.0)", "run.precision=fp32"]
    for number in (0, 1):
        write_file(image_folder / f"train/blue/blue-{number}.png", b"no image")
    with refused("data.unreadable", "blue", "finetune data scan folder:"):
        show_training(parse_recipe(RECIPE, overrides=changes), tmp_path / "sheet.png")
    recipe = parse_recipe(RECIPE, overrides=[*changes, "data.unreadable=quarantine"])
    show_training(recipe, tmp_path / "sheet.png")
    cpu = torch.device("cpu")
    setup = build_setup(recipe, device=cpu, show_progress=False)
    loader = setup.build_loader(setup.source.splits["train"], train=True)
    split = loader.store.split
    setup = setup.with_num_samples(len(split))
    assert len(split) < len(setup.source.splits["train"])
    ((strips, _),) = seen
    names = {strip.note: strip for strip in strips}
    matched = 0
    for step, (_, batches) in enumerate(loader.train_steps(setup.sampler, range(4))):
        (batch,) = batches
        for image, index in zip(
            batch.images_BCHW, setup.sampler.micro_batches(step)[0][1].tolist(), strict=True
        ):
            if (strip := names.get(split.name_of(index))) is not None:
                prepared = setup.preprocessing
                shown = denormalize(image[None], mean=prepared.mean, std=prepared.std)[0]
                matched += np.array_equal(np.rint(255 * shown).astype(np.uint8), strip.images[1])
    assert matched == len(strips) == 3


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write_image_folder(tmp_path / "photos", {"a": 2, "b": 2})
        (tmp_path / "r.yaml").write_text(RECIPE)

    def test_a_source(self, capsys: Captured) -> None:
        assert main(["show", "photos", "--images", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"file": "sheet.png"}
        assert Image.open("sheet.png").format == "PNG"

    def test_a_recipe_and_its_overrides(self) -> None:
        words = ["show", "r.yaml", "data.num_train=20", "--images", "--out", "s.jpg"]
        assert main(words) == 0
        assert Image.open("s.jpg").format == "JPEG"

    def test_data_info(self, capsys: Captured) -> None:
        assert main(["data", "info", "folder:photos", "--sheet", "s.png", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sheet"] == "s.png"
        assert Image.open("s.png").format == "PNG"
