"""JPEGs decoded without PIL have the same pixels, and the same errors if they are damaged."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from finetune.data import decode as decode_module
from finetune.data.decode import decode_image, decode_jpeg
from finetune.errors import DataError

PHOTO = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)


def resized_photo(width: int, height: int) -> Image.Image:
    return Image.fromarray(PHOTO).resize((width, height), Image.Resampling.BICUBIC)


def make_jpeg(width: int = 131, height: int = 100, mode: str = "RGB", **options: Any) -> bytes:
    stream = io.BytesIO()
    resized_photo(width, height).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def decode_with_pil(body: bytes, size: int | None = None) -> np.ndarray:
    with Image.open(io.BytesIO(body)) as image:
        if size is not None:
            image.draft(None, (size, size))
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def skipped_pil(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each JPEG: was it decoded without PIL?"""
    results: list[bool] = []

    def recording_decode_jpeg(*args: Any) -> np.ndarray | None:
        pixels = decode_jpeg(*args)
        results.append(pixels is not None)
        return pixels

    monkeypatch.setattr(decode_module, "decode_jpeg", recording_decode_jpeg)
    return results


@pytest.mark.parametrize("width, height", [(5, 5), (9, 7), (65, 33), (131, 100), (1, 400)])
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
def test_pixels_equal_those_of_pil(
    subsampling: str, width: int, height: int, skipped_pil: list[bool]
) -> None:
    pixels = np.asarray(resized_photo(width, height))
    for quality in (5, 90, 100):
        body = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling=subsampling)
        np.testing.assert_array_equal(decode_image(body), decode_with_pil(body))
        for size in (1, 10, 25, 50):
            np.testing.assert_array_equal(
                decode_image(body, decode_size=size), decode_with_pil(body, size)
            )
    assert skipped_pil.count(True) >= 12  # all except images as small as 3 x 3


@pytest.mark.parametrize(
    "options",
    [{"mode": "L"}, {"progressive": True}, {"keep_rgb": True}, {"restart_marker_rows": 1}],
)
def test_other_jpeg_variants(options: dict[str, Any], skipped_pil: list[bool]) -> None:
    body = make_jpeg(**options)
    np.testing.assert_array_equal(decode_image(body), decode_with_pil(body))
    assert skipped_pil == [True]


def test_decodes_the_first_image_of_an_mpo_file(skipped_pil: list[bool]) -> None:
    stream = io.BytesIO()
    resized_photo(9, 7).save(stream, "MPO", save_all=True, append_images=[resized_photo(131, 100)])
    body = stream.getvalue()
    with Image.open(stream) as image:
        assert image.format == "MPO"
    np.testing.assert_array_equal(decode_image(body), decode_with_pil(body))
    assert skipped_pil == [True]


@pytest.mark.parametrize("extra_bytes", [-1, 0, 1, 1000])
def test_decodes_into_a_buffer_that_is_large_enough(extra_bytes: int) -> None:
    body, buffer = make_jpeg(), np.zeros(131 * 100 * 3 + extra_bytes, dtype=np.uint8)
    pixels = decode_image(body, buffer=buffer)
    np.testing.assert_array_equal(pixels, decode_with_pil(body))
    assert not pixels.flags.writeable
    assert np.shares_memory(pixels, buffer) == (extra_bytes >= 0)
    if extra_bytes >= 0:
        np.testing.assert_array_equal(buffer[: pixels.size].reshape(pixels.shape), pixels)
        assert not buffer[pixels.size :].any()


def test_falls_back_to_pil(monkeypatch: pytest.MonkeyPatch, skipped_pil: list[bool]) -> None:
    cmyk_jpeg = make_jpeg(mode="CMYK")
    np.testing.assert_array_equal(decode_image(cmyk_jpeg), decode_with_pil(cmyk_jpeg))
    assert skipped_pil == []
    monkeypatch.setattr(decode_module, "MAX_JPEG_BYTES", 1000)
    np.testing.assert_array_equal(
        decode_image(make_jpeg(quality=100)), decode_with_pil(make_jpeg(quality=100))
    )
    assert skipped_pil == []
    assert decode_jpeg(make_jpeg(), (66, 51), None) is None
    assert decode_jpeg(b"", (9, 7), None) is None


def test_damaged_files_give_the_same_result_as_pil(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], skipped_pil: list[bool]
) -> None:
    generator = np.random.default_rng(1)
    intact = make_jpeg(33, 25, restart_marker_rows=1)
    bodies = [intact[:end] for end in range(2, len(intact), 7)]
    for _ in range(60):
        damaged = bytearray(intact)
        damaged[int(generator.integers(2, len(intact)))] = int(generator.integers(256))
        bodies.append(bytes(damaged))
    results = [_pixels_or_error(body) for body in bodies]
    assert {True, False} == set(skipped_pil)
    monkeypatch.setattr(decode_module, "decode_jpeg", lambda *args: None)
    expected = [_pixels_or_error(body) for body in bodies]
    assert {type(outcome) for outcome in expected} == {str, np.ndarray}
    for result, expected_result in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, expected_result)
    (line,) = capfd.readouterr().err.splitlines()  # and none of libjpeg's own
    assert line.startswith("finetune: JPEG files are damaged")


def _pixels_or_error(body: bytes) -> np.ndarray | str:
    try:
        return decode_image(body)
    except DataError as error:
        return str(error).partition(" at 0x")[0]
