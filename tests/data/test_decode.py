"""The decoder: every kind of image file gives the pixels that a viewer would show."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from refusals import refused

from finetune.data.decode import decode, planes
from finetune.errors import DataError

GREY16 = np.array([[0, 128, 129, 257], [32768, 40000, 65407, 65535]], dtype=np.uint16)
GREY8 = np.array([[0, 0, 1, 1], [128, 156, 255, 255]], dtype=np.uint8)  # by hand: round(v / 257)


def picture(height: int = 6, width: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_files_give_their_pixels(kind: str) -> None:
    pixels = picture()
    options = {"lossless": True} if kind == "WEBP" else {}
    result = decode(encoded(Image.fromarray(pixels), kind, **options))
    assert np.array_equal(result, pixels)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous


def test_bytes_path_and_pil_image_are_alike(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.fromarray(picture()), "JPEG", exif=exif)
    file = tmp_path / "a.jpg"
    file.write_bytes(data)
    expected = decode(data)
    assert expected.shape == (9, 6, 3)
    assert np.array_equal(decode(file), expected)
    assert np.array_equal(decode(str(file)), expected)
    with Image.open(file) as image:
        assert np.array_equal(decode(image), expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(Image.fromarray(picture()), kind, exif=exif.tobytes(), **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode(data), np.asarray(upright.convert("RGB")))
    assert decode(data).shape == ((9, 6, 3) if orientation > 4 else (6, 9, 3))


def test_orientation_six_puts_the_left_edge_on_top() -> None:
    pixels = picture()
    exif = Image.Exif()
    exif[0x0112] = 6  # "the 0th row is the right side, the 0th column the top"
    result = decode(encoded(Image.fromarray(pixels), "PNG", exif=exif))
    assert np.array_equal(result[0], pixels[::-1, 0])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning")
def test_damaged_exif_is_ignored_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = picture()
    data = encoded(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"x" * 9)
    assert np.array_equal(decode(data), pixels)

    def refuse(image: Image.Image) -> None:  # what PIL raises differs by version and damage
        raise struct.error("unpack requires a buffer of 2 bytes")

    monkeypatch.setattr(Image.Image, "getexif", refuse)
    caplog.clear()
    for _ in range(2):
        assert np.array_equal(decode(data), pixels)
    assert [record.message[:28] for record in caplog.records] == ["damaged EXIF data is ignored"]


def test_palette() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 150, 100])
    image.putdata([1, 0])
    for kind in ("PNG", "GIF", "BMP"):
        expected = [[[200, 150, 100], [10, 20, 30]]]
        assert decode(encoded(image, kind)).tolist() == expected, kind


def test_transparent_palette_entries_become_white() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 150, 100, 0, 0, 0])
    image.putdata([1, 0, 2])
    data = encoded(image, "PNG", transparency=bytes([255, 0, 102]))
    # the third: black at 102/255 = 0.4 over white = 153
    assert decode(data).tolist() == [[[255] * 3, [10, 20, 30], [153] * 3]]
    data = encoded(image, "PNG", transparency=0)
    assert decode(data).tolist() == [[[200, 150, 100], [255] * 3, [0] * 3]]


def test_alpha_is_laid_on_white() -> None:
    rgba = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 102]]], dtype=np.uint8)
    expected = [[[255, 0, 0], [255, 255, 255], [153, 153, 153]]]
    assert decode(encoded(Image.fromarray(rgba), "PNG")).tolist() == expected
    la = np.array([[[0, 255], [0, 0], [0, 102]]], dtype=np.uint8)
    expected = [[[0] * 3, [255] * 3, [153] * 3]]
    assert decode(encoded(Image.fromarray(la, "LA"), "PNG")).tolist() == expected


def test_premultiplied_alpha() -> None:
    straight = Image.fromarray(np.array([[[200, 100, 50, 255], [0, 0, 0, 0]]], dtype=np.uint8))
    assert decode(straight.convert("RGBa")).tolist() == [[[200, 100, 50], [255, 255, 255]]]


@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_a_transparent_colour_becomes_white(mode: str) -> None:
    image = Image.new(mode, (2, 1), 0)
    image.putpixel((1, 0), (9, 9, 9) if mode == "RGB" else 9 if mode == "L" else 1)
    data = encoded(image, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    shown = 255 if mode == "1" else 9
    assert decode(data).tolist() == [[[255] * 3, [shown] * 3]]


def test_one_bit_and_grey() -> None:
    pixels = np.array([[0, 255, 0], [255, 255, 0]], dtype=np.uint8)
    bilevel = Image.fromarray(pixels).convert("1")
    assert np.array_equal(decode(encoded(bilevel, "PNG")), grey(pixels))
    assert np.array_equal(decode(encoded(bilevel, "TIFF")), grey(pixels))
    assert np.array_equal(decode(encoded(Image.fromarray(pixels), "PNG")), grey(pixels))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    data = encoded(Image.fromarray(GREY16), kind)
    assert np.array_equal(decode(data), grey(GREY8))


def test_sixteen_bit_big_endian_and_integer_modes() -> None:
    big = Image.frombytes("I;16B", (4, 2), GREY16.astype(">u2").tobytes())
    assert np.array_equal(decode(encoded(big, "TIFF")), grey(GREY8))
    wide = Image.fromarray(GREY16.astype(np.int32))
    assert wide.mode == "I"
    assert np.array_equal(decode(wide), grey(GREY8))
    with refused("data.wrong_format", "0 to 65536", "0 to 65535"):
        decode(Image.fromarray(np.array([[0, 65536]], dtype=np.int32)))
    with refused("data.wrong_format", "-1 to 5"):
        decode(Image.fromarray(np.array([[-1, 5]], dtype=np.int32)))


def test_float_tiff_is_scaled_or_refused() -> None:
    values = np.array([[0.0, 0.5, 1.0]], dtype=np.float32)
    data = encoded(Image.fromarray(values), "TIFF")
    assert decode(data).tolist() == [[[0] * 3, [128] * 3, [255] * 3]]
    for wrong in (255.0, -0.1, np.nan, np.inf):
        bad = Image.fromarray(np.array([[0.0, wrong]], dtype=np.float32))
        with refused("data.wrong_format"):
            decode(encoded(bad, "TIFF"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "size, factor", [(320, 1), (161, 1), (160, 2), (81, 2), (80, 4), (41, 4), (40, 8), (1, 8)]
)
def test_a_jpeg_is_decoded_smaller_where_no_side_falls_short(
    mode: str, size: int, factor: int
) -> None:
    smooth = Image.fromarray(picture(6, 8)).resize((400, 320), Image.Resampling.BICUBIC)
    data = encoded(smooth.convert(mode), "JPEG", quality=95)
    whole, smaller = decode(data), decode(data, size=size)
    assert smaller.shape == (320 // factor, 400 // factor, 3)
    means = whole.astype(float).reshape(320 // factor, factor, 400 // factor, factor, 3)
    assert np.abs(smaller - means.mean(axis=(1, 3))).mean() < (1.0 if factor > 1 else 1e-9)


def test_only_what_can_be_decoded_smaller_is(tmp_path: Path) -> None:
    large = Image.fromarray(picture(64, 48))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(large, "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data)
    assert decode(data, size=12).shape == (12, 16, 3)
    np.testing.assert_array_equal(decode(tmp_path / "a.jpg", size=12), decode(data, size=12))
    for kind in ("PNG", "BMP", "WEBP"):
        assert decode(encoded(large, kind), size=12).shape == (64, 48, 3)
    narrow = encoded(large.resize((1, 400)), "JPEG")
    np.testing.assert_array_equal(decode(narrow, size=2), decode(narrow))


def test_the_limit_is_of_the_size_in_the_file() -> None:
    data = encoded(Image.fromarray(picture(64, 48)), "JPEG")
    with refused("data.too_large", "48 x 64"):
        decode(data, size=8, limit_pixels=64 * 48 - 1)


def test_cmyk() -> None:
    inks = np.array([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255]]], dtype=np.uint8)
    image = Image.fromarray(inks, "CMYK")
    assert decode(encoded(image, "TIFF")).tolist() == [[[255] * 3, [0, 255, 255], [0] * 3]]
    flat = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red = decode(encoded(flat, "JPEG", quality=100))
    assert np.abs(red.astype(int) - [255, 0, 0]).max() <= 3  # JPEG's own rounding


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_with_one_notice(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("#ff0000", "#00ff00", "#0000ff")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    for _ in range(3):
        assert np.array_equal(decode(data), np.asarray(frames[0]))
    assert (
        caplog.messages.count(
            "of animated images and files of several pages only the first frame is used"
        )
        == 1
    )


def test_a_still_image_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF"):
        decode(encoded(Image.fromarray(picture()), kind))
    assert caplog.records == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
def test_every_truncation_is_a_data_error(kind: str) -> None:
    data = encoded(Image.fromarray(picture(40, 40)), kind)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(DataError, match=r"^image: \w+") as caught:
            decode(data[: int(len(data) * part)])
        assert caught.value.code in ("data.damaged", "data.wrong_format")


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # PIL on damaged TIFF tags
def test_flipped_bytes_never_escape_as_another_error() -> None:
    generator = np.random.default_rng(1)
    failed = 0
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF"):
        data = np.frombuffer(encoded(Image.fromarray(picture(16, 16)), kind), dtype=np.uint8)
        for _ in range(60):
            broken = data.copy()
            places = generator.integers(0, len(data), 8)
            broken[places] = generator.integers(0, 256, 8)
            try:
                result = decode(broken.tobytes())
            except DataError:
                failed += 1
            else:
                assert result.dtype == np.uint8
                assert result.ndim == 3
    assert failed > 100


@pytest.mark.parametrize(
    "data,code,kind",
    [
        (b"", "data.damaged", "zero bytes"),
        (b"hello, this is text", "data.wrong_format", "b'hello"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "data.wrong_format", "LFS"),
        (b"\n<!DOCTYPE html><html></html>", "data.wrong_format", "HTML"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "data.wrong_format", "HEIC"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "data.wrong_format", "b'%!PS"),
    ],
)
def test_what_is_no_image(data: bytes, code: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "cat.jpg"
    file.write_bytes(data)
    for given, name in ((data, "image"), (file, str(file))):
        with pytest.raises(DataError, match=kind) as caught:
            decode(given)
        assert (caught.value.code, caught.value.exit_code) == (code, 3)
        assert str(caught.value).startswith(f"{name}: ")
    with pytest.raises(DataError, match=r"^row 7: "):
        decode(data, name=lambda: "row 7")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "broken.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    (tmp_path / "locked.png").write_bytes(encoded(Image.fromarray(picture()), "PNG"))
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
            decode(tmp_path / name)
        assert caught.value.code == code


@pytest.mark.parametrize("address", ["https://a.org/cat.png", "s3://bucket/cat.png"])
def test_addresses_are_not_read(address: str) -> None:
    for path in (address, Path(address)):
        with refused("data.not_a_file", "cat.png"):
            decode(path)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    file = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9.png"))
    try:
        Path(file).write_bytes(encoded(Image.fromarray(picture()), "PNG"))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    assert np.array_equal(decode(file), picture())
    Path(file).write_bytes(b"")
    with pytest.raises(DataError, match="zero bytes") as caught:
        decode(file)
    assert "caf\\xe9.png" in str(caught.value)
    str(caught.value).encode("utf-8")


def empty_png(width: int, height: int) -> bytes:
    """A PNG that promises a size and holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_too_large_is_refused_from_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    # decoding these would report missing pixels instead
    with refused("data.too_large", "8001 x 8000", "64,000,000"):
        decode(empty_png(8001, 8000))
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(empty_png(800, 800))
    with refused("data.too_large", "100 x 100", "9,999"):
        decode(Image.new("RGB", (100, 100)), limit_pixels=9_999)
    assert decode(Image.new("RGB", (100, 100)), limit_pixels=10_000).shape == (100, 100, 3)
    with pytest.raises(DataError, match="too large"):
        decode(empty_png(30_000, 30_000))  # PIL's own limit, twice MAX_IMAGE_PIXELS


def tiled(side: int, *, order: str, is_big: bool, kind: int) -> bytes:
    """A grey TIFF of 16 x 16 pixels, 0 to 255, in one tile; kind: 3 for SHORT, 4 for LONG."""
    packed = zlib.compress(bytes(range(256)) + bytes(side * side - 256))
    long, entry = ("Q", "HHQ") if is_big else ("I", "HHI")
    field = struct.calcsize(order + long)
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    first = 16 if is_big else 8
    count = struct.pack(order + ("Q" if is_big else "H"), len(tags) + 2)
    start = first + len(count) + (4 + 2 * field) * (len(tags) + 2) + field
    version = (43, 8, 0, first) if is_big else (42, first)
    version_bytes = struct.pack(order + ("HHHQ" if is_big else "HI"), *version)
    parts = [b"II" if order == "<" else b"MM", version_bytes, count]
    for tag, value in [*tags, (324, start), (325, len(packed))]:
        width = kind if tag < 324 else 4
        content = struct.pack(order + ("H" if width == 3 else "I"), value).ljust(field, b"\0")
        parts += [struct.pack(order + entry, tag, width, 1), content]
    return b"".join([*parts, bytes(field), packed])


# PIL reads no BigTIFF of the other order
@pytest.mark.parametrize("order, is_big", [("<", False), (">", False), ("<", True)])
@pytest.mark.parametrize("kind", [3, 4])
def test_tiles_of_a_tiff(order: str, is_big: bool, kind: int, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"order": order, "is_big": is_big, "kind": kind}
    data = tiled(16, **layout)
    (tmp_path / "a.tif").write_bytes(data)
    pixels = grey(np.arange(256, dtype=np.uint8).reshape(16, 16))
    for given in (data, tmp_path / "a.tif", Image.open(io.BytesIO(data))):
        assert np.array_equal(decode(given), pixels)
    with refused("data.too_large", "32 x 32", "1,000"):
        decode(tiled(32, **layout), limit_pixels=1000)


def test_tiles_of_a_type_that_is_none_of_theirs() -> None:
    data = tiled(16, order="<", is_big=True, kind=4)
    changed = data.replace(struct.pack("<HH", 322, 4), struct.pack("<HH", 322, 16))
    with refused("data.damaged", "16"):
        decode(changed)


def test_a_tiff_that_was_decoded_and_closed() -> None:
    stream = io.BytesIO()
    pages = [Image.fromarray(picture()), Image.fromarray(picture())]
    pages[0].save(stream, "TIFF", save_all=True, append_images=pages[1:])
    image = Image.open(stream)
    image.load()
    stream.close()
    assert np.array_equal(decode(image), picture())


def test_nothing_of_pil_reaches_standard_error(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[270] = "x" * 300
    cut = encoded(Image.fromarray(picture()), "JPEG", exif=exif.tobytes()[:-200])
    (tmp_path / "a.jpg").write_bytes(cut)
    with pytest.warns(UserWarning, match="Truncated File Read"):
        decode(cut)
    code = "import sys; from finetune.data.decode import decode; print(decode(sys.argv[1]).shape)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.jpg"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("(6, 9, 3)\n", "")


def test_planes_are_the_pixels_themselves() -> None:
    decoded = decode(Image.fromarray(picture(4, 5)))
    tensor = planes(decoded)
    assert tensor.shape == (3, 4, 5)
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), picture(4, 5))
    assert tensor.data_ptr() == decoded.ctypes.data
