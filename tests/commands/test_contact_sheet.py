"""The contact sheet: correct tiles for any images and names, with little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops, ImageColor
from refusals import refused

from finetune.commands.contact_sheet import (
    ERROR_COLOR,
    THUMBNAIL_PIXELS,
    ContactSheet,
    Tile,
    draw_grid,
    make_thumbnail,
    save_sheet,
)

RED = (200, 30, 30)


def prediction_row(path: str, *labels: str, confidence: float = 0.5) -> dict[str, Any]:
    entries = [{"label": label, "index": 0, "confidence": confidence} for label in labels]
    return {"path": path, "predictions": entries}


def solid_image(height: int, width: int, color: tuple[int, int, int] = RED) -> np.ndarray:
    return np.full((height, width, 3), color, dtype=np.uint8)


def draw_sheet(rows: list[dict[str, Any]], images: dict[int, np.ndarray]) -> Image.Image:
    sheet = ContactSheet()
    for index, pixels in images.items():
        sheet.add_image(index, pixels)
    for row in rows:
        sheet.add_row(row)
    return sheet.draw(title="a model")


def count_pixels(image: Image.Image, color: Any) -> int:
    return int((np.asarray(image) == color).all(axis=2).sum())


@pytest.mark.parametrize(
    "size, expected",
    [
        ((32, 32), (160, 160)),
        ((300, 300), (160, 160)),
        ((64, 128), (80, 160)),
        ((1, 400), (1, 160)),
        ((3000, 4000), (120, 160)),
    ],
)
def test_thumbnails_keep_the_aspect_ratio(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = draw_sheet([prediction_row("a.png", "cat")], {0: solid_image(*size)})
    assert count_pixels(image, RED) == expected[0] * expected[1]


def test_thumbnail_shares_no_memory_with_the_image() -> None:
    pixels = solid_image(8, 8)
    thumbnail = make_thumbnail(pixels)
    pixels[:] = 0
    assert count_pixels(thumbnail, RED) == 64


def test_sheet_shows_at_most_200_images() -> None:
    rows = [prediction_row(f"{number}.png", "cat") for number in range(500)]
    image = draw_sheet(rows, {number: solid_image(8, 8) for number in range(500)})
    assert count_pixels(image, RED) == 200 * THUMBNAIL_PIXELS**2


def test_least_confident_first_and_unreadable_last() -> None:
    colors = [(10, 0, 0), (20, 0, 0), (30, 0, 0)]
    rows: list[dict[str, Any]] = [{"path": "IMAGE.png", "error": "zero bytes"}]
    rows += [prediction_row("a.png", "cat", confidence=value) for value in (0.9, 0.3, 0.6)]
    images = {index + 1: solid_image(32, 32, color) for index, color in enumerate(colors)}
    pixels = np.asarray(draw_sheet(rows, images))
    columns = [np.argwhere((pixels == color).all(axis=2))[:, 1].min() for color in colors]
    assert sorted(range(3), key=columns.__getitem__) == [1, 2, 0]
    assert np.argwhere((pixels == ImageColor.getrgb(ERROR_COLOR)).all(axis=2))[:, 1].min() > max(
        columns
    )


def test_multilabel_tiles_show_at_most_six_labels() -> None:
    row = prediction_row("1.png", *"abcdefgh")
    heights = [
        draw_sheet([{**row, "labels": row["predictions"][:count]}], {0: solid_image(32, 32)}).height
        for count in (0, 1, 4, 6, 7, 8)
    ]
    assert heights[0] == heights[1] < heights[2] < heights[3] < heights[4] == heights[5]


@pytest.mark.parametrize(
    "name",
    [
        "صورة القطة.png",
        "猫の写真.png",
        "हिन्दी.png",
        "🐈\u200d⬛.png",
        "a\x1b[2J\n\r\0b.png",
        "caf\udce9.png",
        "\u202egnp.exe",
        "x" * 5000 + ".png",
        "/".join(["folder"] * 600),
        "",
    ],
)
def test_any_name_and_label_fits_its_tile(name: str) -> None:
    rows = [
        prediction_row(name, name, name),
        {"path": name, "error": name},
        prediction_row("b.png", "x", "y"),
    ]
    images = {0: solid_image(32, 32), 2: solid_image(32, 32)}
    image, header = draw_sheet(rows, images), 70
    for column in range(3):  # the gaps between the tiles stay empty
        right = (column + 1) * (THUMBNAIL_PIXELS + 14)
        gap = image.crop((right, header, right + 14, image.height))
        assert not ImageChops.difference(gap, Image.new("RGB", gap.size, "white")).getbbox()
    rows[:2] = [prediction_row("a.png", "x", "y"), {"path": "c.png", "error": "zero bytes"}]
    assert image.size == draw_sheet(rows, images).size


def test_text_tiles_and_images_share_a_grid() -> None:
    tiles = [Tile(None, ["cat", "3 images"]), Tile(make_thumbnail(solid_image(8, 8)), ["a"])] * 2
    image = draw_grid(tiles, num_columns=2, title="x" * 5000, facts=["y " * 5000])
    assert count_pixels(image, RED) == 2 * THUMBNAIL_PIXELS**2
    assert image.width < 3 * THUMBNAIL_PIXELS


def test_save_sheet_replaces_the_file_atomically(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    path.write_text("old")
    drawn = draw_sheet([prediction_row("a.png", "cat")], {0: solid_image(8, 8)})
    save_sheet(drawn, path, option="--sheet")
    with Image.open(path) as image:
        assert image.convert("RGB").tobytes() == drawn.tobytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["sheet.png"]
    with refused("setup.not_writable", "--sheet"):
        save_sheet(drawn, tmp_path / "gone" / "sheet.png", option="--sheet")
