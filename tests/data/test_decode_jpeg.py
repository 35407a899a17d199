"""JPEGs decoded without PIL: the same pixels, and the same errors for damaged files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from finetune.data import decode as decoding
from finetune.data.decode import decode, read_jpeg
from finetune.data.shared_memory import Slots
from finetune.errors import DataError

PHOTO = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)


def photo(width: int, height: int) -> Image.Image:
    return Image.fromarray(PHOTO).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(width: int = 131, height: int = 100, mode: str = "RGB", **options: Any) -> bytes:
    stream = io.BytesIO()
    photo(width, height).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def by_pil(body: bytes, size: int | None = None) -> np.ndarray:
    with Image.open(io.BytesIO(body)) as image:
        if size is not None:
            image.draft(None, (size, size))
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each JPEG was read here rather than by PIL."""
    seen: list[bool] = []

    def noted(*args: Any) -> np.ndarray | None:
        pixels = read_jpeg(*args)
        seen.append(pixels is not None)
        return pixels

    monkeypatch.setattr(decoding, "read_jpeg", noted)
    return seen


@pytest.mark.parametrize("width, height", [(5, 5), (9, 7), (65, 33), (131, 100), (1, 400)])
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
def test_the_pixels_are_those_of_pil(
    subsampling: str, width: int, height: int, read: list[bool]
) -> None:
    pixels = np.asarray(photo(width, height))
    for quality in (5, 90, 100):
        body = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling=subsampling)
        np.testing.assert_array_equal(decode(body), by_pil(body))
        for size in (1, 10, 25, 50):
            np.testing.assert_array_equal(decode(body, size=size), by_pil(body, size))
    assert read.count(True) >= 12  # all but what is as small as 3 by 3


@pytest.mark.parametrize(
    "options",
    [{"mode": "L"}, {"progressive": True}, {"keep_rgb": True}, {"restart_marker_rows": 1}],
)
def test_other_kinds_of_jpeg(options: dict[str, Any], read: list[bool]) -> None:
    body = jpeg(**options)
    np.testing.assert_array_equal(decode(body), by_pil(body))
    assert read == [True]


def test_the_first_picture_of_several(read: list[bool]) -> None:
    stream = io.BytesIO()
    photo(9, 7).save(stream, "MPO", save_all=True, append_images=[photo(131, 100)])
    body = stream.getvalue()
    with Image.open(stream) as image:
        assert image.format == "MPO"
    np.testing.assert_array_equal(decode(body), by_pil(body))
    assert read == [True]


@pytest.mark.parametrize("more", [-1, 0, 1, 1000])
def test_it_is_decoded_where_there_is_room(more: int) -> None:
    body, room = jpeg(), np.zeros(131 * 100 * 3 + more, dtype=np.uint8)
    pixels = decode(body, room=room)
    np.testing.assert_array_equal(pixels, by_pil(body))
    assert not pixels.flags.writeable
    assert np.shares_memory(pixels, room) == (more >= 0)
    if more >= 0:
        np.testing.assert_array_equal(room[: pixels.size].reshape(pixels.shape), pixels)
        assert not room[pixels.size :].any()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_slot_holds_what_is_turned_or_damaged(orientation: int, read: list[bool]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    whole = jpeg(exif=exif.tobytes(), restart_marker_rows=1)
    damaged = whole.replace(b"\xff\xd1", b"\xff\xd5")
    slots = Slots(1, 3 * 131 * 100 * 3)
    bodies = [damaged, whole, damaged]
    put = slots.put(0, [lambda room, body=body: decode(body, room=room) for body in bodies])
    assert read == [False, True, False]
    for found, body in zip(slots.take(0, put), bodies, strict=True):
        np.testing.assert_array_equal(found.permute(1, 2, 0), decode(body))


def test_what_pil_has_to_read(monkeypatch: pytest.MonkeyPatch, read: list[bool]) -> None:
    inks = jpeg(mode="CMYK")
    np.testing.assert_array_equal(decode(inks), by_pil(inks))
    assert read == []
    monkeypatch.setattr(decoding, "_MOST_BYTES", 1000)
    np.testing.assert_array_equal(decode(jpeg(quality=100)), by_pil(jpeg(quality=100)))
    assert read == []
    assert read_jpeg(jpeg(), (66, 51), None) is None
    assert read_jpeg(b"", (9, 7), None) is None


def test_a_damaged_file_is_as_it_is_with_pil(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], read: list[bool]
) -> None:
    random = np.random.default_rng(1)
    whole = jpeg(33, 25, restart_marker_rows=1)
    bodies = [whole[:end] for end in range(2, len(whole), 7)]
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[int(random.integers(2, len(whole)))] = int(random.integers(256))
        bodies.append(bytes(damaged))
    found = [_outcome(body) for body in bodies]
    assert {True, False} == set(read)
    monkeypatch.setattr(decoding, "read_jpeg", lambda *args: None)
    expected = [_outcome(body) for body in bodies]
    assert {type(outcome) for outcome in expected} == {str, np.ndarray}
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert capfd.readouterr().err == ""  # libjpeg's own words would name no file


def _outcome(body: bytes) -> np.ndarray | str:
    try:
        return decode(body)
    except DataError as error:
        return str(error).partition(" at 0x")[0]
