"""The contact sheet: correct tiles for any images and names, with little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageChops, ImageColor
from refusals import refused

from finetune.commands import contact_sheet as sheet_module
from finetune.commands import sheet_drawing
from finetune.commands.contact_sheet import ContactSheet
from finetune.commands.sheet_drawing import save_sheet
from finetune.evaluation.confidence_intervals import wilson_interval

RED = (200, 30, 30)


def prediction_row(path: str, *labels: str) -> dict[str, Any]:
    confidence = 1 / max(len(labels), 1)
    return {
        "path": path,
        "predictions": [
            {"label": label, "index": index, "confidence": confidence}
            for index, label in enumerate(labels)
        ],
    }


def solid_image(height: int, width: int, color: tuple[int, int, int] = RED) -> np.ndarray:
    return np.full((height, width, 3), color, dtype=np.uint8)


def draw_sheet(
    rows: list[dict[str, Any]], images: dict[int, np.ndarray], **options: Any
) -> Image.Image:
    sheet = ContactSheet(**options)
    for index, pixels in images.items():
        sheet.add_image(index, pixels)
    for row in rows:
        sheet.add_row(row)
    return sheet.draw(title="a model")


def count_pixels(image: Image.Image, color: tuple[int, int, int]) -> int:
    return int((np.asarray(image) == color).all(axis=2).sum())


@pytest.mark.parametrize(
    "size, expected",
    [
        ((32, 32), (192, 192)),
        ((8, 8), (192, 192)),
        ((100, 100), (100, 100)),
        ((300, 300), (192, 192)),
        ((96, 192), (96, 192)),
        ((1, 400), (1, 192)),
        ((3000, 4000), (144, 192)),
    ],
)
def test_thumbnails_keep_the_aspect_ratio(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = draw_sheet([prediction_row("a.png", "cat")], {0: solid_image(*size)})
    assert count_pixels(image, RED) == expected[0] * expected[1]


def test_small_images_are_enlarged_by_whole_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    image = np.asarray(draw_sheet([prediction_row("a.png", "cat")], {0: pixels}))
    enlarged = pixels.repeat(6, axis=0).repeat(6, axis=1)
    windows = [
        (y, x)
        for y, x in np.argwhere((image == enlarged[0, 0]).all(axis=2))
        if np.array_equal(image[y : y + 192, x : x + 192], enlarged)
    ]
    assert len(windows) == 1


def test_only_small_thumbnails_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet_module, "MAX_TILES", 2)
    sheet = ContactSheet()
    pixels = solid_image(4000, 6000)
    for index in range(3):
        sheet.add_image(index, pixels)
    assert {index: image.size for index, image in sheet._thumbnails.items()} == {
        0: (192, 128),
        1: (192, 128),
    }
    assert not any(image.readonly for image in sheet._thumbnails.values())


def test_at_most_max_tiles_are_drawn_and_all_files_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [prediction_row(f"{number}.png", "cat") for number in range(500)]
    images = {number: solid_image(8, 8) for number in range(500)}
    image = draw_sheet(rows, images)
    assert count_pixels(image, RED) == 200 * 192 * 192
    monkeypatch.setattr(sheet_module, "MAX_TILES", 4)
    sheet = ContactSheet()
    for row in [*rows[:5], {"path": "x", "error": "zero bytes"}]:
        sheet.add_row(row)
    assert sheet._format_summary("calibrated") == (
        "6 files · 1 unreadable · showing the first 4 · least confident first · calibrated"
    )


def test_least_confident_first_and_unreadable_last() -> None:
    colors = [(10, 0, 0), (20, 0, 0), (30, 0, 0)]
    rows = [{"path": "x", "error": "zero bytes"}]
    rows += [prediction_row(f"{number}.png", "cat") for number in range(3)]
    for row, confidence in zip(rows[1:], (0.9, 0.3, 0.6), strict=True):
        row["predictions"][0]["confidence"] = confidence
    image = draw_sheet(rows, {index: solid_image(32, 32, colors[index - 1]) for index in (1, 2, 3)})
    pixels = np.asarray(image)
    first = [tuple(np.argwhere((pixels == color).all(axis=2))[0]) for color in colors]
    order = sorted(range(3), key=lambda index: first[index])
    assert order == [1, 2, 0]
    pink = (pixels == ImageColor.getrgb("#fdf0ef")).all(axis=2)
    # the unreadable file is in the second row
    assert np.argwhere(pink)[0][0] > max(y for y, _ in first)


def test_folder_names_that_are_classes_count_as_labels() -> None:
    red = ImageColor.getrgb("#b42318")
    rows = [
        prediction_row("/photos/cat/1.png", "cat"),
        prediction_row("/photos/dog/2.png", "cat"),
        prediction_row("/photos/holiday/3.png", "cat"),
    ]
    images = {index: solid_image(32, 32, (9, 9, 9)) for index in range(3)}
    image = draw_sheet(rows, images, class_names=["cat", "dog"])
    border = 192 * 192 - 186 * 186
    assert count_pixels(image, (9, 9, 9)) == 3 * 192 * 192 - border  # a border around one image
    assert count_pixels(image, red) >= border
    sheet = ContactSheet(["cat", "dog"])
    for row in [*rows, {"path": "/photos/cat/4.png", "error": "zero bytes"}]:
        sheet.add_row(row)
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(1, 2))
    summary = f"1 of 2 match their folder (95 % interval {low}–{high} %)"
    assert (
        sheet._format_summary("") == f"4 files · 1 unreadable · {summary} · least confident first"
    )
    assert count_pixels(draw_sheet(rows, images), red) == 0


def test_multilabel_tiles_show_one_line_per_label() -> None:
    row = prediction_row("1.png", *"abcdefgh")
    caption = sheet_module._caption_predictions
    assert caption(row) == row["predictions"][:3]
    assert caption({**row, "labels": row["predictions"][2:6]}) == row["predictions"][2:6]
    lines = [prediction["label"] for prediction in caption({**row, "labels": row["predictions"]})]
    assert lines == [*"abcde", "and 3 more"]
    (no_label,) = caption({**row, "labels": []})
    assert (no_label["label"], no_label["confidence"]) == ("no label", None)
    heights = [
        draw_sheet([{**row, "labels": row["predictions"][:count]}], {0: solid_image(32, 32)}).height
        for count in (0, 1, 4, 8)
    ]
    assert heights[0] == heights[1] < heights[2] < heights[3]


def test_unreadable_files_get_marked_empty_tiles() -> None:
    rows = [
        prediction_row("a.png", "cat"),
        {"path": "b.png", "error": "an HTML page, not an image"},
    ]
    image = draw_sheet(rows, {0: solid_image(32, 32)})
    pink = ImageColor.getrgb("#fdf0ef")
    assert count_pixels(image, RED) == 192 * 192
    assert count_pixels(image, pink) > 0.9 * 192 * 192
    assert count_pixels(draw_sheet(rows[:1], {0: solid_image(32, 32)}), pink) == 0


def test_bar_length_shows_the_confidence() -> None:
    blue = ImageColor.getrgb("#2563eb")
    for confidence, length in ((1.0, 192), (0.5, 96), (0.001, 0)):
        row = prediction_row("a.png", "cat")
        row["predictions"][0]["confidence"] = confidence
        assert count_pixels(draw_sheet([row], {0: solid_image(32, 32)}), blue) == 4 * length


@pytest.mark.parametrize(
    "name",
    [
        "صورة القطة.png",
        "תמונה.png",
        "猫の写真.png",
        "हिन्दी.png",
        "🐈\u200d⬛.png",
        "a\x1b[2J\n\r\0b.png",
        "caf\udce9.png",
        "\u202egnp.exe",
        "x" * 5000 + ".png",
        "/".join(["folder"] * 600),
        "",
        "…",
    ],
)
def test_any_name_and_label_fits_its_tile(name: str) -> None:
    rows = [
        prediction_row(name, name, name),
        {"path": name, "error": name},
        prediction_row("b.png", "x", "y"),
    ]
    image = draw_sheet(rows, {0: solid_image(32, 32), 2: solid_image(32, 32)})
    empty = draw_sheet([], {})
    assert image.width == empty.width
    # the gaps between the cards stay empty
    left = sheet_module._MARGIN + sheet_module._CARD_WIDTH
    for x in (left, left + sheet_module._CARD_WIDTH + sheet_module._GAP):
        gap = image.crop((x, 110, x + sheet_module._GAP, image.height))
        assert not ImageChops.difference(gap, Image.new("RGB", gap.size, "#f4f4f5")).getbbox()


def test_truncate_middle_keeps_both_ends() -> None:
    font = sheet_drawing.FontSet([]).at_size(12)
    long = "a-very-long-name-" * 20 + "0042.jpg"
    fitted = sheet_drawing.truncate_middle(long, font, 192)
    assert fitted.startswith("a-very")
    assert fitted.endswith("42.jpg")
    assert 170 < font(fitted).getlength(fitted) <= 192
    assert sheet_drawing.truncate_middle("short.png", font, 192) == "short.png"
    assert sheet_drawing.truncate_middle("wide", font, 1) == "…"


def test_wrap_text_breaks_between_words() -> None:
    font = sheet_drawing.FontSet([]).at_size(13)
    text = "an HTML page, not an image; download it again and again until it is one"
    lines = sheet_drawing.wrap_text(text, font, 192, max_lines=9)
    assert " ".join(lines) == text
    assert len(lines) > 1
    assert all(font(line).getlength(line) <= 192 for line in lines)
    assert len(sheet_drawing.wrap_text(text, font, 192, max_lines=2)) == 2
    assert sheet_drawing.wrap_text(text, font, 192, max_lines=0) == []


def test_common_folder_is_stripped() -> None:
    strip = sheet_module._strip_common_folder
    assert strip(["/a/b/c.png", "/a/d.png"]) == ["b/c.png", "d.png"]
    assert strip(["/a/b/c.png"]) == ["c.png"]
    assert strip(["c.png", "b/d.png"]) == ["c.png", "b/d.png"]
    assert strip(["/a/c.png", "d.png"]) == ["/a/c.png", "d.png"]
    assert strip([]) == []


def test_missing_characters_use_a_system_font(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fallback = str(folder / "STIXGeneral.ttf")
    (tmp_path / "broken.ttf").write_text("no font")
    default_characters = sheet_drawing._supported_characters(
        sheet_drawing._default_font_path(bold=False)
    )
    missing = sorted(sheet_drawing._supported_characters(fallback) - default_characters)
    text = "".join(map(chr, missing))
    text = "".join(char for char in text if char.isprintable())
    assert text
    system_fonts = [str(tmp_path / "broken.ttf"), str(tmp_path / "gone.ttf"), fallback]
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: system_fonts)
    fonts = sheet_drawing.FontSet([text, "cat"])
    assert fonts.at_size(14)(text).path == fallback
    assert fonts.at_size(14)("cat").path == sheet_drawing._default_font_path(bold=False)
    assert fonts.at_size(14, bold=True)("cat").path == sheet_drawing._default_font_path(bold=True)


def test_save_sheet_replaces_the_file_atomically(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    path.write_text("old")
    sheet = ContactSheet()
    sheet.add_row(prediction_row("a.png", "cat"))
    sheet.add_image(0, solid_image(8, 8))
    save_sheet(sheet.draw(title="a model"), path, option="--sheet")
    with Image.open(path) as image:
        assert image.convert("RGB").tobytes() == sheet.draw(title="a model").tobytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["sheet.png"]
    with refused("setup.not_writable", "--sheet"):
        save_sheet(Image.new("RGB", (8, 8)), tmp_path / "gone" / "sheet.png", option="--sheet")
