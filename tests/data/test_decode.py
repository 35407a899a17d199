"""The decoder returns the pixels that an image viewer would show, for every file format."""

from __future__ import annotations

import importlib.util
import io
import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_corpus import CORPUS
from logs import logged
from PIL import Image, ImageOps
from refusals import refused

from finetune.data.decode import decode_image, hwc_to_chw
from finetune.data.image_paths import find_images
from finetune.errors import DataError

GRAY16 = np.array([[0, 128, 129, 257], [32768, 40000, 65407, 65535]], dtype=np.uint16)
# computed by hand: round(v / 257)
GRAY8 = np.array([[0, 0, 1, 1], [128, 156, 255, 255]], dtype=np.uint8)


def random_pixels(height: int = 6, width: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def to_rgb(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_files_decode_exactly(kind: str) -> None:
    pixels = random_pixels()
    options = {"lossless": True} if kind == "WEBP" else {}
    result = decode_image(encode(Image.fromarray(pixels), kind, **options))
    assert np.array_equal(result, pixels)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous


FOUR_COLORS = np.array([[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 255)]], np.uint8)
PHOTO = FOUR_COLORS.repeat(16, axis=0).repeat(24, axis=1)  # smooth, so that HEVC changes it little


def heic_photo(**options: Any) -> bytes:
    """Encode `PHOTO` as a phone does."""
    pytest.importorskip("pillow_heif").register_heif_opener()
    return encode(Image.fromarray(PHOTO), "HEIF", quality=100, **options)


def test_heic_photos_are_upright() -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        expected = decode_image(encode(Image.fromarray(PHOTO), "PNG", exif=exif))
        upright = decode_image(heic_photo(exif=exif.tobytes()))
        np.testing.assert_allclose(upright.astype(int), expected.astype(int), atol=3)


def test_heic_photos_have_the_limits_of_other_images(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = heic_photo(thumbnails=[16])
    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.decode.MAX_PIXELS", 64 * 64 - 1)
        with refused("data.too_large", "64 x 64"):  # HEVC codes more than it shows
            decode_image(photo)
    assert decode_image(photo, decode_size=16).shape == (32, 48, 3), "not its thumbnail"
    declared_size = photo.index(b"ispe") + 8
    smaller = photo[:declared_size] + struct.pack(">II", 16, 16) + photo[declared_size + 8 :]
    for damaged in (smaller, photo[:100]):
        with refused("data.damaged"):
            decode_image(damaged)


def test_bytes_path_and_pil_image_decode_to_the_same_pixels(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.fromarray(random_pixels()), "JPEG", exif=exif)
    file = tmp_path / "a.jpg"
    file.write_bytes(data)
    expected = decode_image(data)
    assert expected.shape == (9, 6, 3)
    assert np.array_equal(decode_image(file), expected)
    assert np.array_equal(decode_image(str(file)), expected)
    with Image.open(file) as image:
        assert np.array_equal(decode_image(image), expected)


@pytest.mark.parametrize(
    "kind, orientation",
    [*(("JPEG", number) for number in range(1, 9)), ("PNG", 6), ("TIFF", 6), ("WEBP", 6)],
)
def test_applies_exif_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(Image.fromarray(random_pixels()), kind, exif=exif.tobytes(), **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode_image(data), np.asarray(upright.convert("RGB")))
    assert decode_image(data).shape == ((9, 6, 3) if orientation > 4 else (6, 9, 3))


def test_orientation_six_puts_the_left_edge_on_top() -> None:
    pixels = random_pixels()
    exif = Image.Exif()
    exif[0x0112] = 6  # "the 0th row is the right side, the 0th column the top"
    result = decode_image(encode(Image.fromarray(pixels), "PNG", exif=exif))
    assert np.array_equal(result[0], pixels[::-1, 0])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning")
def test_ignores_damaged_exif_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = random_pixels()
    data = encode(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"x" * 9)
    assert np.array_equal(decode_image(data), pixels)

    # PIL's error differs by version and by damage
    def raise_struct_error(image: Image.Image) -> None:
        raise struct.error("unpack requires a buffer of 2 bytes")

    monkeypatch.setattr(Image.Image, "getexif", raise_struct_error)
    caplog.clear()
    for _ in range(2):
        assert np.array_equal(decode_image(data), pixels)
    assert [record.message[:28] for record in caplog.records] == ["damaged EXIF data is ignored"]


def test_palette_images() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 150, 100])
    image.putdata([1, 0])
    for kind in ("PNG", "GIF", "BMP"):
        expected = [[[200, 150, 100], [10, 20, 30]]]
        assert decode_image(encode(image, kind)).tolist() == expected, kind


def test_transparent_palette_entries_become_white() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 150, 100, 0, 0, 0])
    image.putdata([1, 0, 2])
    data = encode(image, "PNG", transparency=bytes([255, 0, 102]))
    # the third pixel: black with alpha 102/255 = 0.4 over white = 153
    assert decode_image(data).tolist() == [[[255] * 3, [10, 20, 30], [153] * 3]]
    data = encode(image, "PNG", transparency=0)
    assert decode_image(data).tolist() == [[[200, 150, 100], [255] * 3, [0] * 3]]


def test_alpha_is_composited_on_white() -> None:
    rgba = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 102]]], dtype=np.uint8)
    expected = [[[255, 0, 0], [255, 255, 255], [153, 153, 153]]]
    assert decode_image(encode(Image.fromarray(rgba), "PNG")).tolist() == expected
    la = np.array([[[0, 255], [0, 0], [0, 102]]], dtype=np.uint8)
    expected = [[[0] * 3, [255] * 3, [153] * 3]]
    assert decode_image(encode(Image.fromarray(la, "LA"), "PNG")).tolist() == expected


def test_premultiplied_alpha() -> None:
    straight = Image.fromarray(np.array([[[200, 100, 50, 255], [0, 0, 0, 0]]], dtype=np.uint8))
    assert decode_image(straight.convert("RGBa")).tolist() == [[[200, 100, 50], [255, 255, 255]]]


@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_a_transparent_color_becomes_white(mode: str) -> None:
    image = Image.new(mode, (2, 1), 0)
    image.putpixel((1, 0), (9, 9, 9) if mode == "RGB" else 9 if mode == "L" else 1)
    data = encode(image, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    opaque = 255 if mode == "1" else 9
    assert decode_image(data).tolist() == [[[255] * 3, [opaque] * 3]]


def test_bilevel_and_grayscale_images() -> None:
    pixels = np.array([[0, 255, 0], [255, 255, 0]], dtype=np.uint8)
    bilevel = Image.fromarray(pixels).convert("1")
    assert np.array_equal(decode_image(encode(bilevel, "PNG")), to_rgb(pixels))
    assert np.array_equal(decode_image(encode(bilevel, "TIFF")), to_rgb(pixels))
    assert np.array_equal(decode_image(encode(Image.fromarray(pixels), "PNG")), to_rgb(pixels))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grayscale_is_scaled_not_clipped(kind: str) -> None:
    data = encode(Image.fromarray(GRAY16), kind)
    assert np.array_equal(decode_image(data), to_rgb(GRAY8))


def test_16_bit_big_endian_and_32_bit_integer_images() -> None:
    big_endian = Image.frombytes("I;16B", (4, 2), GRAY16.astype(">u2").tobytes())
    assert np.array_equal(decode_image(encode(big_endian, "TIFF")), to_rgb(GRAY8))
    int32_image = Image.fromarray(GRAY16.astype(np.int32))
    assert int32_image.mode == "I"
    assert np.array_equal(decode_image(int32_image), to_rgb(GRAY8))
    with refused("data.wrong_format", "0 to 65536", "0 to 65535"):
        decode_image(Image.fromarray(np.array([[0, 65536]], dtype=np.int32)))
    dark = np.array([[1, 255]])
    with refused("data.wrong_format", "32-bit", "1 to 255", "8-bit"):  # not black
        decode_image(Image.fromarray(dark.astype(np.int32)))
    assert decode_image(b"P5 2 1 65535\n" + dark.astype(">u2").tobytes()).max() == 1
    with refused("data.wrong_format", "-1 to 5"):
        decode_image(Image.fromarray(np.array([[-1, 5]], dtype=np.int32)))


def test_dark_16_bit_images_are_said() -> None:
    lines: list[str] = []
    with logged(lines):
        pixels = decode_image(encode(Image.fromarray(GRAY16 // 16), "PNG"))
    assert pixels.max() == 16
    assert "above 4095 of 65535" in lines[0]


def test_float_tiff_is_scaled_or_rejected() -> None:
    values = np.array([[0.0, 0.5, 1.0]], dtype=np.float32)
    data = encode(Image.fromarray(values), "TIFF")
    assert decode_image(data).tolist() == [[[0] * 3, [128] * 3, [255] * 3]]
    for invalid_value in (255.0, -0.1, np.nan, np.inf):
        image = Image.fromarray(np.array([[0.0, invalid_value]], dtype=np.float32))
        with refused("data.wrong_format"):
            decode_image(encode(image, "TIFF"))


@pytest.mark.parametrize(
    "mode, size, factor",
    [
        *(("RGB", 320, 1), ("RGB", 161, 1), ("RGB", 160, 2), ("RGB", 81, 2), ("RGB", 80, 4)),
        *(("RGB", 41, 4), ("RGB", 40, 8), ("RGB", 1, 8), ("L", 80, 4), ("CMYK", 80, 4)),
    ],
)
def test_decode_size_reduces_jpegs_but_no_side_below_the_size(
    mode: str, size: int, factor: int
) -> None:
    image = Image.fromarray(random_pixels(6, 8)).resize((400, 320), Image.Resampling.BICUBIC)
    data = encode(image.convert(mode), "JPEG", quality=95)
    full, reduced = decode_image(data), decode_image(data, decode_size=size)
    assert reduced.shape == (320 // factor, 400 // factor, 3)
    means = full.astype(float).reshape(320 // factor, factor, 400 // factor, factor, 3)
    assert np.abs(reduced - means.mean(axis=(1, 3))).mean() < (1.0 if factor > 1 else 1e-9)


def test_decode_size_changes_only_large_jpegs(tmp_path: Path) -> None:
    large = Image.fromarray(random_pixels(64, 48))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(large, "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data)
    assert decode_image(data, decode_size=12).shape == (12, 16, 3)
    np.testing.assert_array_equal(
        decode_image(tmp_path / "a.jpg", decode_size=12), decode_image(data, decode_size=12)
    )
    for kind in ("PNG", "BMP", "WEBP"):
        assert decode_image(encode(large, kind), decode_size=12).shape == (64, 48, 3)
    narrow = encode(large.resize((1, 400)), "JPEG")
    np.testing.assert_array_equal(decode_image(narrow, decode_size=2), decode_image(narrow))


def test_pixel_limit_applies_to_the_size_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Image.fromarray(random_pixels(64, 48)), "JPEG")
    monkeypatch.setattr("finetune.data.decode.MAX_PIXELS", 64 * 48 - 1)
    with refused("data.too_large", "48 x 64"):
        decode_image(data, decode_size=8)


def test_cmyk_images() -> None:
    inks = np.array([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255]]], dtype=np.uint8)
    image = Image.fromarray(inks, "CMYK")
    assert decode_image(encode(image, "TIFF")).tolist() == [[[255] * 3, [0, 255, 255], [0] * 3]]
    uniform = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red = decode_image(encode(uniform, "JPEG", quality=100))
    assert np.abs(red.astype(int) - [255, 0, 0]).max() <= 3  # JPEG's own rounding


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_decode_to_the_first_frame_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("#ff0000", "#00ff00", "#0000ff")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    for _ in range(3):
        assert np.array_equal(decode_image(data), np.asarray(frames[0]))
    assert (
        caplog.messages.count("animated images and multi-page files: only the first frame is used")
        == 1
    )


def test_still_images_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF"):
        decode_image(encode(Image.fromarray(random_pixels()), kind))
    assert caplog.records == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
def test_truncated_files_raise_data_errors(kind: str) -> None:
    data = encode(Image.fromarray(random_pixels(40, 40)), kind)
    for fraction in (0.1, 0.5, 0.9):
        with pytest.raises(DataError, match=r"^image: \w+") as caught:
            decode_image(data[: int(len(data) * fraction)])
        assert caught.value.code in ("data.damaged", "data.wrong_format")


def test_holes_in_a_jpeg_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A sync that stopped leaves zeros, which PIL decodes without a word."""
    data = encode(Image.fromarray(random_pixels(80, 80)), "JPEG", quality=95)
    third = len(data) // 3
    for damaged in (
        data[:third] + bytes(len(data) - third),
        data[:third] + bytes(third) + data[2 * third :],
    ):
        assert decode_image(damaged).shape == (80, 80, 3)
    assert [message[:22] for message in caplog.messages] == ["JPEG files are damaged"]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # PIL on damaged TIFF tags
def test_corrupt_bytes_raise_only_data_errors() -> None:
    generator = np.random.default_rng(1)
    num_errors = 0
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF"):
        data = np.frombuffer(encode(Image.fromarray(random_pixels(16, 16)), kind), dtype=np.uint8)
        for _ in range(60):
            corrupt = data.copy()
            positions = generator.integers(0, len(data), 8)
            corrupt[positions] = generator.integers(0, 256, 8)
            try:
                result = decode_image(corrupt.tobytes())
            except DataError:
                num_errors += 1
            else:
                assert result.dtype == np.uint8
                assert result.ndim == 3
    assert num_errors > 100


@pytest.mark.parametrize(
    "data,code,expected_text",
    [
        (b"", "data.damaged", "zero bytes"),
        (b"hello, this is text", "data.wrong_format", "b'hello"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "data.wrong_format", "LFS"),
        (b"\n<!DOCTYPE html><html></html>", "data.wrong_format", "HTML"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "data.wrong_format", "b'%!PS"),
    ],
)
def test_rejects_files_that_are_not_images(
    data: bytes, code: str, expected_text: str, tmp_path: Path
) -> None:
    file = tmp_path / "cat.jpg"
    file.write_bytes(data)
    for source, name in ((data, "image"), (file, str(file))):
        with pytest.raises(DataError, match=expected_text) as caught:
            decode_image(source)
        assert (caught.value.code, caught.value.exit_code) == (code, 3)
        assert str(caught.value).startswith(f"{name}: ")
    with pytest.raises(DataError, match=r"^row 7: "):
        decode_image(data, name=lambda: "row 7")


def test_rejects_paths_that_are_not_readable_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "broken.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    (tmp_path / "locked.png").write_bytes(encode(Image.fromarray(random_pixels()), "PNG"))
    (tmp_path / "locked.png").chmod(0)
    expected = {
        "pipe.png": "data.not_a_file",
        "folder.png": "data.not_a_file",
        "broken.png": "data.not_found",
        "circle.png": "data.unreadable",
        "absent.png": "data.not_found",
    }
    if os.geteuid() != 0:  # root may read everything
        expected["locked.png"] = "data.unreadable"
    for name, code in expected.items():
        with pytest.raises(DataError, match=name) as caught:
            decode_image(tmp_path / name)
        assert caught.value.code == code


@pytest.mark.parametrize("url", ["https://a.org/cat.png", "s3://bucket/cat.png"])
def test_rejects_urls(url: str) -> None:
    for path in (url, Path(url)):
        with refused("data.not_a_file", "cat.png"):
            decode_image(path)


def test_reads_file_names_that_are_not_utf_8(tmp_path: Path) -> None:
    file = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9.png"))
    try:
        Path(file).write_bytes(encode(Image.fromarray(random_pixels()), "PNG"))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    assert np.array_equal(decode_image(file), random_pixels())
    Path(file).write_bytes(b"")
    with pytest.raises(DataError, match="zero bytes") as caught:
        decode_image(file)
    assert "caf\\xe9.png" in str(caught.value)
    str(caught.value).encode("utf-8")


def png_without_pixels(width: int, height: int) -> bytes:
    """Return a PNG with a size in its header but no pixel data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize(
    "name", [name for name in CORPUS if name != "80 megapixels of one color with alpha"]
)
def test_decodes_or_refuses_every_format(name: str, tmp_path: Path) -> None:
    """The same files as in tests/faults/test_images.py, which compares all readers."""
    file = CORPUS[name]
    path = tmp_path / f"image{file.suffix}"
    path.write_bytes(file.content)
    if isinstance(file.result, str):
        with pytest.raises(DataError, match=file.result):
            decode_image(path)
    else:
        assert np.array_equal(decode_image(path), file.result)


def test_rejects_too_large_images_from_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    # decoding these images would report missing pixels instead
    with refused("data.too_large", "8001 x 8000", "64,000,000"):
        decode_image(png_without_pixels(8001, 8000))
    with pytest.raises(DataError, match="cannot be decoded"):
        decode_image(png_without_pixels(800, 800))
    with pytest.raises(DataError, match="too large"):
        # above PIL's own limit, twice MAX_IMAGE_PIXELS
        decode_image(png_without_pixels(30_000, 30_000))
    monkeypatch.setattr("finetune.data.decode.MAX_PIXELS", 10_000)
    assert decode_image(Image.new("RGB", (100, 100))).shape == (100, 100, 3)
    with refused("data.too_large", "100 x 101", "10,000"):
        decode_image(Image.new("RGB", (100, 101)))


def tiled_tiff(side: int, *, order: str, is_big: bool, tag_type: int) -> bytes:
    """Return a 16 x 16 grayscale TIFF in one tile; tag_type: 3 for SHORT, 4 for LONG."""
    compressed = zlib.compress(bytes(range(256)) + bytes(side * side - 256))
    count_format, entry_format = ("Q", "HHQ") if is_big else ("I", "HHI")
    field_bytes = struct.calcsize(order + count_format)
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    header_bytes = 16 if is_big else 8
    count = struct.pack(order + ("Q" if is_big else "H"), len(tags) + 2)
    data_offset = header_bytes + len(count) + (4 + 2 * field_bytes) * (len(tags) + 2) + field_bytes
    version = (43, 8, 0, header_bytes) if is_big else (42, header_bytes)
    version_bytes = struct.pack(order + ("HHHQ" if is_big else "HI"), *version)
    parts = [b"II" if order == "<" else b"MM", version_bytes, count]
    for tag, value in [*tags, (324, data_offset), (325, len(compressed))]:
        value_type = tag_type if tag < 324 else 4
        value_bytes = struct.pack(order + ("H" if value_type == 3 else "I"), value).ljust(
            field_bytes, b"\0"
        )
        parts += [struct.pack(order + entry_format, tag, value_type, 1), value_bytes]
    return b"".join([*parts, bytes(field_bytes), compressed])


# PIL does not read big-endian BigTIFF files
@pytest.mark.parametrize("order, is_big", [("<", False), (">", False), ("<", True)])
@pytest.mark.parametrize("tag_type", [3, 4])
def test_tiled_tiff(
    order: str, is_big: bool, tag_type: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout: dict[str, Any] = {"order": order, "is_big": is_big, "tag_type": tag_type}
    data = tiled_tiff(16, **layout)
    (tmp_path / "a.tif").write_bytes(data)
    pixels = to_rgb(np.arange(256, dtype=np.uint8).reshape(16, 16))
    for source in (data, tmp_path / "a.tif", Image.open(io.BytesIO(data))):
        assert np.array_equal(decode_image(source), pixels)
    monkeypatch.setattr("finetune.data.decode.MAX_PIXELS", 1000)
    with refused("data.too_large", "32 x 32", "1,000"):
        decode_image(tiled_tiff(32, **layout))


def test_rejects_a_tiff_with_an_invalid_tag_type() -> None:
    data = tiled_tiff(16, order="<", is_big=True, tag_type=4)
    changed = data.replace(struct.pack("<HH", 322, 4), struct.pack("<HH", 322, 16))
    with refused("data.damaged", "16"):
        decode_image(changed)


def test_a_loaded_tiff_whose_stream_is_closed() -> None:
    stream = io.BytesIO()
    pages = [Image.fromarray(random_pixels()), Image.fromarray(random_pixels())]
    pages[0].save(stream, "TIFF", save_all=True, append_images=pages[1:])
    image = Image.open(stream)
    image.load()
    stream.close()
    assert np.array_equal(decode_image(image), random_pixels())


def test_pil_warnings_do_not_reach_stderr() -> None:
    """pytest resets the filters that the module sets, so its own start is repeated."""
    exif = Image.Exif()
    exif[270] = "x" * 300
    jpeg_bytes = encode(Image.fromarray(random_pixels()), "JPEG", exif=exif.tobytes()[:-200])
    with pytest.warns(UserWarning, match="Truncated File Read"):
        decode_image(jpeg_bytes)
    spec = importlib.util.find_spec("finetune.data.decode")
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        assert decode_image(jpeg_bytes).shape == (6, 9, 3)
    assert caught == []


def test_hwc_to_chw_shares_memory() -> None:
    pixels_HWC = decode_image(Image.fromarray(random_pixels(4, 5)))
    pixels_CHW = hwc_to_chw(pixels_HWC)
    assert pixels_CHW.shape == (3, 4, 5)
    assert np.array_equal(pixels_CHW.permute(1, 2, 0).numpy(), random_pixels(4, 5))
    assert pixels_CHW.data_ptr() == pixels_HWC.ctypes.data


def test_a_pil_image_that_several_threads_decode(tmp_path: Path) -> None:
    """PIL loads a file when its pixels are first needed, which is not thread-safe."""
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    with Image.open(tmp_path / "large.png") as image, ThreadPoolExecutor(8) as pool:
        for pixels in pool.map(decode_image, [path for path, _ in find_images([image] * 16)]):
            np.testing.assert_array_equal(pixels, noise)
