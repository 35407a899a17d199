"""Image sheets: images by class, and augmented training images."""

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
from finetune.run.directory import RunDir
from finetune.training.setup import build_setup

RECIPE = """
model: {name: "embedded:vit_nano"}
data: {source: "embedded:digits", train: "resize(36) | random_crop(32)", num_train: 40}
optim: {lr: 0.001, steps: 2}
"""


def solid_image(color: tuple[int, int, int], size: int = 32) -> np.ndarray:
    return np.full((size, size, 3), color, dtype=np.uint8)


def count_pixels(image: Image.Image, color: tuple[int, int, int]) -> int:
    return int((np.asarray(image) == color).all(axis=2).sum())


def first_position(image: Image.Image, color: tuple[int, int, int]) -> tuple[int, int]:
    """Return the first row and the first column of a color."""
    rows, columns = np.nonzero((np.asarray(image) == color).all(axis=2))
    return int(rows.min()), int(columns.min())


def test_draw_image_rows_places_every_image() -> None:
    red, blue, green = (200, 30, 30), (30, 30, 200), (30, 200, 30)
    image_rows = [
        ImageRow("one", "3 train", [solid_image(red), solid_image(blue, 64)]),
        ImageRow("two", "x " * 300, [solid_image(green, 1000), None]),
    ]
    sheet = draw_image_rows(
        image_rows, title="a" * 500, facts=["2 classes"], column_titles=["before", "after"]
    )
    assert (
        count_pixels(sheet, red)
        == count_pixels(sheet, blue)
        == count_pixels(sheet, green)
        == 160 * 160
    )
    top, left = first_position(sheet, red)
    assert first_position(sheet, blue) == (top, left + 174)
    assert first_position(sheet, green)[1] == left
    assert first_position(sheet, green)[0] > top + 160


def test_source_sheet_shows_images_by_class(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "d", {"train/a": 12, "train/b": 2, "test/a": 1})
    path = show_source(source, tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(path))
    found_names = []
    names = sorted(f"a/{n}" for n in range(12))
    for name in [*names, "b/0", "b/1"]:
        pixels = np.asarray(Image.open(tmp_path / "d/train" / f"{name}.png"))
        enlarged = pixels.repeat(32, axis=0).repeat(32, axis=1)
        corners = np.argwhere((sheet == enlarged[0, 0]).all(axis=2))
        if any(np.array_equal(sheet[y : y + 160, x : x + 128], enlarged) for y, x in corners):
            found_names.append(name)
    assert found_names == [*(names[n] for n in (0, 2, 3, 5, 6, 8, 9, 11)), "b/0", "b/1"]


def test_a_sheet_does_not_replace_an_image_of_the_source(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "d", {"a": 2, "b": 2})
    with refused("recipe.conflict", "--sheet", "0.png"):
        show_source(source, tmp_path / "d" / "a" / "0.png", option="--sheet")


def test_source_sheet_skips_unreadable_images_and_limits_classes(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "d", {f"{n:02}": 1 for n in range(30)})
    write_file(tmp_path / "d/00/0.png", b"no image")
    exactly_24 = write_image_folder(tmp_path / "e", {f"{n:02}": 1 for n in range(24)})
    sheets = [
        show_source(folder, tmp_path / f"{n}.jpg") for n, folder in enumerate((source, exactly_24))
    ]
    sizes = {Image.open(sheet).size for sheet in sheets}
    assert len(sizes) == 1  # at most 24 classes
    assert Image.open(sheets[0]).format == "JPEG"


@pytest.fixture
def drawn_sheets(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[list[ImageRow], dict[str, list[str]]]]:
    """The image rows and texts of each sheet that is drawn."""
    sheets: list[tuple[list[ImageRow], dict[str, list[str]]]] = []

    def recording_draw(image_rows: list[ImageRow], **texts: list[str]) -> Image.Image:
        sheets.append((image_rows, texts))
        return draw_image_rows(image_rows, **texts)  # type: ignore[arg-type]

    monkeypatch.setattr("finetune.commands.show_images.draw_image_rows", recording_draw)
    return sheets


def test_training_sheet_shows_decoded_augmented_and_eval_images(
    tmp_path: Path, drawn_sheets: list[Any]
) -> None:
    path = show_training(parse_recipe(RECIPE), tmp_path / "sheet.png")
    ((image_rows, texts),) = drawn_sheets
    assert [len(row.images) for row in image_rows] == [1 + 8 + 1] * 6
    assert texts["column_titles"][1:-1] == [f"epoch {number}" for number in range(1, 9)]
    assert "resize(36) | random_crop(32)" in texts["facts"]
    images = [np.asarray(image) for image in image_rows[0].images]
    assert images[0].shape == (8, 8, 3)
    assert {image.shape for image in images[1:]} == {(32, 32, 3)}
    assert len({image.tobytes() for image in images[1:-1]}) > 4
    assert min(Image.open(path).size) > 900
    show_training(parse_recipe(RECIPE, overrides=["data.train=resize"]), tmp_path / "sheet.png")
    assert drawn_sheets[1][1]["column_titles"] == ["decoded", "every epoch", "evaluation"]


def test_changed_images_of_a_run_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    run.write_json("run.json", {"split_fingerprints": {"train": "0" * 64}})
    show_training(parse_recipe(RECIPE), tmp_path / "sheet.png", run=run)
    assert "'train' have changed since the run" in caplog.text


def test_training_sheet_quarantines_images_as_training_does(
    image_folder: Path, tmp_path: Path, drawn_sheets: list[Any]
) -> None:
    overrides = [f"data.source=folder:{image_folder}", "data.num_train=20", "data.batch_size=4"]
    overrides += ["data.train=random_resized_crop(32) | cutmix(1.0)", "run.precision=fp32"]
    for number in (0, 1):
        write_file(image_folder / f"train/blue/blue-{number}.png", b"no image")
    with refused("data.unreadable", "blue", "finetune data scan folder:"):
        show_training(parse_recipe(RECIPE, overrides=overrides), tmp_path / "sheet.png")
    recipe = parse_recipe(RECIPE, overrides=[*overrides, "data.unreadable=quarantine"])
    show_training(recipe, tmp_path / "sheet.png")
    cpu = torch.device("cpu")
    setup = build_setup(recipe, device=cpu, show_progress=False)
    loader = setup.build_loader(setup.source.splits["train"], train=True)
    split = loader.store.split
    setup = setup.with_num_samples(len(split))
    assert len(split) < len(setup.source.splits["train"])
    ((image_rows, _),) = drawn_sheets
    rows_by_name = {row.note: row for row in image_rows}
    num_matched = 0
    for step, (_, batches) in enumerate(loader.train_steps(setup.sampler, range(4))):
        (batch,) = batches
        for image, index in zip(
            batch.images_BCHW, setup.sampler.micro_batches(step)[0][1].tolist(), strict=True
        ):
            if (row := rows_by_name.get(split.name_of(index))) is not None:
                preprocessing = setup.preprocessing
                denormalized = denormalize(
                    image[None], mean=preprocessing.mean, std=preprocessing.std
                )[0]
                num_matched += np.array_equal(
                    np.rint(255 * denormalized).astype(np.uint8), row.images[1]
                )
    assert num_matched == len(image_rows) == 3


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def working_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write_image_folder(tmp_path / "photos", {"a": 2, "b": 2})
        (tmp_path / "r.yaml").write_text(RECIPE)

    def test_show_images_of_a_source(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["show", "photos", "--images", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"file": "sheet.png"}
        assert Image.open("sheet.png").format == "PNG"

    def test_show_images_of_a_recipe_with_overrides(self) -> None:
        args = ["show", "r.yaml", "data.num_train=20", "--images", "--out", "s.jpg"]
        assert main(args) == 0
        assert Image.open("s.jpg").format == "JPEG"

    def test_data_info_sheet(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data", "info", "folder:photos", "--sheet", "s.png", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sheet"] == "s.png"
        assert Image.open("s.png").format == "PNG"
