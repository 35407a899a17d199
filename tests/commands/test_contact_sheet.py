"""The contact sheet: every tile there, whatever the pictures and names are; small in memory."""

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


def predicted(path: str, *labels: str) -> dict[str, Any]:
    share = 1 / max(len(labels), 1)
    return {
        "path": path,
        "predictions": [
            {"label": label, "index": index, "confidence": share}
            for index, label in enumerate(labels)
        ],
    }


def plain(height: int, width: int, colour: tuple[int, int, int] = RED) -> np.ndarray:
    return np.full((height, width, 3), colour, dtype=np.uint8)


def drawn(
    rows: list[dict[str, Any]], pictures: dict[int, np.ndarray], **wanted: Any
) -> Image.Image:
    sheet = ContactSheet(**wanted)
    for place, pixels in pictures.items():
        sheet.add_image(place, pixels)
    for row in rows:
        sheet.add_row(row)
    return sheet.draw(title="a model")


def area(image: Image.Image, colour: tuple[int, int, int]) -> int:
    return int((np.asarray(image) == colour).all(axis=2).sum())


@pytest.mark.parametrize(
    "size, shown",
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
def test_pictures_fit_the_tile_in_their_proportions(
    size: tuple[int, int], shown: tuple[int, int]
) -> None:
    image = drawn([predicted("a.png", "cat")], {0: plain(*size)})
    assert area(image, RED) == shown[0] * shown[1]


def test_small_pictures_keep_their_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    image = np.asarray(drawn([predicted("a.png", "cat")], {0: pixels}))
    enlarged = pixels.repeat(6, axis=0).repeat(6, axis=1)
    windows = [
        (y, x)
        for y, x in np.argwhere((image == enlarged[0, 0]).all(axis=2))
        if np.array_equal(image[y : y + 192, x : x + 192], enlarged)
    ]
    assert len(windows) == 1


def test_what_is_kept_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet_module, "MAX_TILES", 2)
    sheet = ContactSheet()
    pixels = plain(4000, 6000)
    for place in range(3):
        sheet.add_image(place, pixels)
    assert {place: picture.size for place, picture in sheet._thumbnails.items()} == {
        0: (192, 128),
        1: (192, 128),
    }
    assert not any(picture.readonly for picture in sheet._thumbnails.values())


def test_the_number_of_tiles_is_bounded_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [predicted(f"{number}.png", "cat") for number in range(500)]
    pictures = {number: plain(8, 8) for number in range(500)}
    image = drawn(rows, pictures)
    assert area(image, RED) == 200 * 192 * 192
    monkeypatch.setattr(sheet_module, "MAX_TILES", 4)
    sheet = ContactSheet()
    for row in [*rows[:5], {"path": "x", "error": "zero bytes"}]:
        sheet.add_row(row)
    assert sheet._format_summary("calibrated") == (
        "6 files · 1 unreadable · showing the first 4 · least confident first · calibrated"
    )


def test_the_least_sure_come_first_and_the_unreadable_last() -> None:
    colours = [(10, 0, 0), (20, 0, 0), (30, 0, 0)]
    rows = [{"path": "x", "error": "zero bytes"}]
    rows += [predicted(f"{number}.png", "cat") for number in range(3)]
    for row, confidence in zip(rows[1:], (0.9, 0.3, 0.6), strict=True):
        row["predictions"][0]["confidence"] = confidence
    image = drawn(rows, {place: plain(32, 32, colours[place - 1]) for place in (1, 2, 3)})
    pixels = np.asarray(image)
    first = [tuple(np.argwhere((pixels == colour).all(axis=2))[0]) for colour in colours]
    by_place = sorted(range(3), key=lambda place: first[place])
    assert by_place == [1, 2, 0]
    pink = (pixels == ImageColor.getrgb("#fdf0ef")).all(axis=2)
    assert np.argwhere(pink)[0][0] > max(y for y, _ in first)  # in the second row of tiles


def test_the_folder_tells_the_class_where_it_is_one() -> None:
    red = ImageColor.getrgb("#b42318")
    rows = [
        predicted("/photos/cat/1.png", "cat"),
        predicted("/photos/dog/2.png", "cat"),
        predicted("/photos/holiday/3.png", "cat"),
    ]
    pictures = {place: plain(32, 32, (9, 9, 9)) for place in range(3)}
    image = drawn(rows, pictures, class_names=["cat", "dog"])
    border = 192 * 192 - 186 * 186
    assert area(image, (9, 9, 9)) == 3 * 192 * 192 - border  # round one picture
    assert area(image, red) >= border
    sheet = ContactSheet(["cat", "dog"])
    for row in [*rows, {"path": "/photos/cat/4.png", "error": "zero bytes"}]:
        sheet.add_row(row)
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(1, 2))
    said = f"1 of 2 match their folder (95 % interval {low}–{high} %)"
    assert sheet._format_summary("") == f"4 files · 1 unreadable · {said} · least confident first"
    assert area(drawn(rows, pictures), red) == 0


def test_of_several_labels_all_have_a_line() -> None:
    row = predicted("1.png", *"abcdefgh")
    below = sheet_module._caption_predictions
    assert below(row) == row["predictions"][:3]
    assert below({**row, "labels": row["predictions"][2:6]}) == row["predictions"][2:6]
    lines = [one["label"] for one in below({**row, "labels": row["predictions"]})]
    assert lines == [*"abcde", "and 3 more"]
    (none,) = below({**row, "labels": []})
    assert (none["label"], none["confidence"]) == ("no label", None)
    heights = [
        drawn([{**row, "labels": row["predictions"][:count]}], {0: plain(32, 32)}).height
        for count in (0, 1, 4, 8)
    ]
    assert heights[0] == heights[1] < heights[2] < heights[3]


def test_unreadable_files_are_marked_empty_tiles() -> None:
    rows = [predicted("a.png", "cat"), {"path": "b.png", "error": "an HTML page, not an image"}]
    image = drawn(rows, {0: plain(32, 32)})
    pink = ImageColor.getrgb("#fdf0ef")
    assert area(image, RED) == 192 * 192
    assert area(image, pink) > 0.9 * 192 * 192
    assert area(drawn(rows[:1], {0: plain(32, 32)}), pink) == 0


def test_the_bar_is_as_long_as_the_confidence() -> None:
    blue = ImageColor.getrgb("#2563eb")
    for confidence, length in ((1.0, 192), (0.5, 96), (0.001, 0)):
        row = predicted("a.png", "cat")
        row["predictions"][0]["confidence"] = confidence
        assert area(drawn([row], {0: plain(32, 32)}), blue) == 4 * length


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
def test_names_and_labels_of_any_kind_fit_their_tile(name: str) -> None:
    rows = [
        predicted(name, name, name),
        {"path": name, "error": name},
        predicted("b.png", "x", "y"),
    ]
    image = drawn(rows, {0: plain(32, 32), 2: plain(32, 32)})
    bare = drawn([], {})
    assert image.width == bare.width
    # nothing is written into the gaps between the cards
    left = sheet_module._MARGIN + sheet_module._CARD_WIDTH
    for x in (left, left + sheet_module._CARD_WIDTH + sheet_module._GAP):
        gap = image.crop((x, 110, x + sheet_module._GAP, image.height))
        assert not ImageChops.difference(gap, Image.new("RGB", gap.size, "#f4f4f5")).getbbox()


def test_long_names_keep_their_ends() -> None:
    font = sheet_drawing.FontSet([]).at_size(12)
    long = "a-very-long-name-" * 20 + "0042.jpg"
    fitted = sheet_drawing.truncate_middle(long, font, 192)
    assert fitted.startswith("a-very")
    assert fitted.endswith("42.jpg")
    assert 170 < font(fitted).getlength(fitted) <= 192
    assert sheet_drawing.truncate_middle("short.png", font, 192) == "short.png"
    assert sheet_drawing.truncate_middle("wide", font, 1) == "…"


def test_text_is_broken_between_words() -> None:
    font = sheet_drawing.FontSet([]).at_size(13)
    text = "an HTML page, not an image; download it again and again until it is one"
    lines = sheet_drawing.wrap_text(text, font, 192, max_lines=9)
    assert " ".join(lines) == text
    assert len(lines) > 1
    assert all(font(line).getlength(line) <= 192 for line in lines)
    assert len(sheet_drawing.wrap_text(text, font, 192, max_lines=2)) == 2
    assert sheet_drawing.wrap_text(text, font, 192, max_lines=0) == []


def test_folders_that_all_share_are_left_out() -> None:
    short = sheet_module._strip_common_folder
    assert short(["/a/b/c.png", "/a/d.png"]) == ["b/c.png", "d.png"]
    assert short(["/a/b/c.png"]) == ["c.png"]
    assert short(["c.png", "b/d.png"]) == ["c.png", "b/d.png"]
    assert short(["/a/c.png", "d.png"]) == ["/a/c.png", "d.png"]
    assert short([]) == []


def test_characters_that_the_own_font_lacks_come_from_the_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    other = str(folder / "STIXGeneral.ttf")
    (tmp_path / "broken.ttf").write_text("no font")
    own = sheet_drawing._supported_characters(sheet_drawing._default_font_path(bold=False))
    lacking = sorted(sheet_drawing._supported_characters(other) - own)
    text = "".join(map(chr, lacking))
    text = "".join(char for char in text if char.isprintable())
    assert text
    found = [str(tmp_path / "broken.ttf"), str(tmp_path / "gone.ttf"), other]
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: found)
    fonts = sheet_drawing.FontSet([text, "cat"])
    assert fonts.at_size(14)(text).path == other
    assert fonts.at_size(14)("cat").path == sheet_drawing._default_font_path(bold=False)
    assert fonts.at_size(14, bold=True)("cat").path == sheet_drawing._default_font_path(bold=True)


def test_the_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    path.write_text("old")
    sheet = ContactSheet()
    sheet.add_row(predicted("a.png", "cat"))
    sheet.add_image(0, plain(8, 8))
    save_sheet(sheet.draw(title="a model"), path, option="--sheet")
    with Image.open(path) as image:
        assert image.convert("RGB").tobytes() == sheet.draw(title="a model").tobytes()
    assert [each.name for each in tmp_path.iterdir()] == ["sheet.png"]
    with refused("setup.not_writable", "--sheet"):
        save_sheet(Image.new("RGB", (8, 8)), tmp_path / "gone" / "sheet.png", option="--sheet")
