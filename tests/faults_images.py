"""A corpus of image files as people have them: damaged, odd, hostile, each with its result."""

# H W pixels

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps, features
from PIL.PngImagePlugin import PngInfo

__all__ = ["CORPUS", "File", "encoded", "flat_png", "picture"]

ORIENTATION = 0x0112


@dataclass(frozen=True)
class File:
    """One file of the corpus: its pixels, or a part of the message that refuses it.

    Attributes:
        made: the file's bytes, or what makes them: every process of a suite reads this module.
        result: (H, W, 3) uint8, or a part of the message.
        suffix: of the file's name.
    """

    made: bytes | Callable[[], bytes]
    result: np.ndarray | str
    suffix: str = ".png"

    @functools.cached_property
    def content(self) -> bytes:
        """The file's bytes."""
        return self.made if isinstance(self.made, bytes) else self.made()


def picture(height: int = 12, width: int = 18) -> np.ndarray:
    """(H, W, 3) uint8, smooth enough for a JPEG and different in each corner."""
    down, along = np.mgrid[0:height, 0:width]
    channels = (240 - 8 * down, 13 * along, 5 * (down + along))
    return np.clip(np.stack(channels, axis=2), 0, 255).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str, **options: Any) -> bytes:
    """The bytes of an image file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    """One chunk of a PNG."""
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def flat_png(width: int, height: int, *, kind: int = 2, whole: bool = True) -> bytes:
    """A PNG of one colour, a few kilobytes whatever its size; kind: the PNG's colour type."""
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    packer, parts = zlib.compressobj(1), []
    if whole:
        row = bytes(1 + width * {0: 1, 2: 3, 6: 4}[kind])
        parts = [packer.compress(row) for _ in range(height)]
    data = b"".join([*parts, packer.flush()])
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _as_pil(content: bytes) -> np.ndarray:
    """The pixels that PIL alone makes of a file, upright."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def _flipped(content: bytes, place: int, bit: int = 3) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def _grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2).astype(np.uint8)


def _jpeg_header(width: int, height: int) -> bytes:
    """A JPEG that says its size and ends before its pixels."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + b"\x01\x11\0\x02\x11\0\x03\x11\0"
    scan = struct.pack(">HB", 12, 3) + b"\x01\0\x02\0\x03\0\0\x3f\0"
    parts = (b"\xff\xd8\xff\xc0", struct.pack(">H", len(frame) + 2), frame, b"\xff\xda", scan)
    return b"".join(parts)


def _tiff(side: int, *more: tuple[int, int], tile: int | None = None) -> bytes:
    """A grey TIFF of zeros, packed into one strip or one tile.

    Args:
        side: of the image in pixels.
        more: tags and values behind those that it needs, also such as are there already.
        tile: its side in pixels; None for a strip.
    """
    packed = zlib.compress(bytes((tile or side) ** 2), 1)
    tags = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1)]
    start = 8 + 2 + 12 * (len(tags) + 4 + len(more)) + 4
    if tile:
        tags += [(322, tile), (323, tile), (324, start), (325, len(packed)), *more]
    else:
        tags += [(273, start), (278, side), (279, len(packed)), (282, 1), *more]
    tags.sort(key=lambda pair: pair[0])
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags]
    return b"".join([b"II*\0", struct.pack("<IH", 8, len(tags)), *entries, bytes(4), packed])


def _bmp(width: int, height: int, *, packing: int = 0) -> bytes:
    """A BMP that says its size and ends before its pixels; packing: 1 of runs, 0 none."""
    bits, colours = (8, 256) if packing else (24, 0)
    start = 54 + 4 * colours
    file = b"BM" + struct.pack("<IHHI", start, 0, 0, start)
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, packing, 0, 0, 0, colours, 0)
    return file + sizes + bytes(4 * colours)


def _resized(content: bytes, box: bytes, skip: int, size: bytes) -> bytes:
    """A file in which another size stands some bytes behind the name of a box."""
    place = content.index(box) + len(box) + skip
    return content[:place] + size + content[place + len(size) :]


def _icon() -> bytes:
    """An icon that holds a PNG of 81 megapixels."""
    flat = flat_png(9000, 9000, kind=0)
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(flat), 22) + flat


def _with_text(*, international: bool) -> bytes:
    """A PNG with 50 MB of packed text."""
    texts = PngInfo()
    if international:
        texts.add_itxt("Comment", "x" * 50_000_000, zip=True)
    else:
        texts.add_text("Comment", "x" * 50_000_000, zip=True)
    return encoded(picture(), "PNG", pnginfo=texts)


def _bombs() -> dict[str, File]:
    """Of each format one file that says more pixels than the limit, and few bytes for them."""
    small = Image.fromarray(picture())
    side = 13_000
    size = struct.pack(">II", side, side)
    gif = encoded(small, "GIF")
    # what PIL writes for one colour, 13,000 x 13,000
    webp = "524946461e000000574542505650384c110000002fc7f2b10c0750ad2614b9ff8188e87f0000"
    large, tiles = "more than the limit of 64,000,000", "tiles of 9000 x 9000 pixels, more than"
    files = {
        "JPEG": File(_jpeg_header(side, side), large, ".jpg"),
        "BMP": File(_bmp(side, side), large, ".bmp"),
        "BMP of runs": File(_bmp(side, side, packing=1), large, ".bmp"),
        "PPM": File(b"P6 13000 13000 255\n", large, ".ppm"),
        "PBM of digits": File(b"P1 13000 13000\n0 1 0 1\n", large, ".pbm"),
        "GIF": File(gif[:6] + struct.pack("<HH", side, side) + gif[10:], large, ".gif"),
        "GIF, its frame alone": File(
            _resized(gif, b"\x2c\0\0\0\0", 0, struct.pack("<HH", side, side)), large, ".gif"
        ),
        "TIFF": File(lambda: _tiff(9000), large, ".tif"),
        "TIFF, its tile alone": File(lambda: _tiff(16, tile=9000), tiles, ".tif"),
        "TIFF, the first of its tags alone": File(
            lambda: _tiff(16, (322, 16), (323, 16), tile=9000), tiles, ".tif"
        ),
        "WebP": File(bytes.fromhex(webp), large, ".webp"),
        "ICO": File(_icon, "an icon, which is not supported", ".png"),
    }
    if features.check("jpg_2000"):
        box = encoded(small, "JPEG2000")
        files["JPEG 2000"] = File(_resized(box, b"ihdr", 0, size), large, ".jp2")
    if features.check("avif"):
        box = encoded(small, "AVIF")
        files["AVIF"] = File(_resized(box, b"ispe", 4, size), large, ".avif")
    return {f"a bomb, {kind}": file for kind, file in files.items()}


def _damaged() -> dict[str, File]:
    png, jpeg = encoded(picture(), "PNG"), encoded(picture(), "JPEG", quality=90)
    files = {
        "zero bytes": File(b"", "zero bytes"),
        "text": File(b"a picture of a cat\n" * 9, "not an image", ".jpg"),
        "a web page": File(b"<!DOCTYPE html><html>404</html>", "an HTML page", ".jpg"),
        "a Git LFS pointer": File(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        "a HEIC photo": File(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC", ".jpg"),
        "an archive": File(b"PK\x03\x04" + bytes(60), "not an image"),
        "random bytes": File(np.random.default_rng(0).bytes(500), "not an image"),
        "zeros": File(bytes(500), "not an image"),
        "an SVG": File(b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "not an image"),
        "a PostScript file": File(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an"),
        "a PNG without pixels": File(flat_png(9, 9, whole=False), "cannot be decoded"),
        "a PNG of no width": File(flat_png(0, 9), "0 x 9|not an image|cannot be decoded"),
        "a PNG with one flipped bit of its pixels": File(
            _flipped(png, png.index(b"IDAT") + 12), "cannot be decoded"
        ),
        "a PNG with one flipped bit of its header": File(
            _flipped(png, 18), "not an image|cannot be decoded|pixels"
        ),
        "a PNG without its last chunk": File(png[:-12], picture()),
        "a JPEG with a flipped start": File(_flipped(jpeg, 0), "not an image", ".jpg"),
        "a JPEG with a flipped table": File(
            _flipped(jpeg, jpeg.index(b"\xff\xc4") + 5, 7), "cannot be decoded", ".jpg"
        ),
    }
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for share in (0.003, 0.02, 0.2, 0.5, 0.9, 0.99):
        for kind in ("PNG", "JPEG"):
            content = encoded(noise, kind)
            cut = content[: int(len(content) * share)]
            said = "not an image|cannot be decoded"
            files[f"a {kind} of which {share:.1%} came"] = File(cut, said, f".{kind.lower()}")
    return files


def _modes() -> dict[str, File]:
    """Whole files whose pixels are not plain RGB."""
    pixels = picture()
    rgb = Image.fromarray(pixels)
    inks = rgb.convert("CMYK")
    cmyk, inks_tiff = encoded(inks, "JPEG", quality=95), encoded(inks, "TIFF")
    marker = cmyk.index(b"\xff\xee")  # Adobe's, which says that the inks are inverted
    end = marker + 2 + int.from_bytes(cmyk[marker + 2 : marker + 4], "big")
    plain = cmyk[:marker] + cmyk[end:]
    wide = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    unit = (np.arange(256, dtype=np.float32) / 255).reshape(16, 16)
    steps = np.arange(256, dtype=np.uint8).reshape(16, 16)
    alpha = np.dstack([pixels, np.where(pixels[..., 0] > 200, 255, 0).astype(np.uint8)])
    on_white = np.where(alpha[..., 3:] == 255, pixels, 255).astype(np.uint8)
    black = np.zeros((1, 10_000, 3), np.uint8)
    light = np.dstack([pixels[..., 0], alpha[..., 3]])
    palette = rgb.quantize(16)
    clear = palette.copy()
    cleared = np.asarray(palette) == 3
    without = np.where(cleared[:, :, None], 255, np.asarray(palette.convert("RGB")))
    files = {
        "a CMYK JPEG, inks inverted as Adobe does": File(cmyk, _as_pil(cmyk), ".jpg"),
        "a CMYK JPEG, inks as they are": File(plain, _as_pil(plain), ".jpg"),
        "a CMYK TIFF": File(inks_tiff, _as_pil(inks_tiff), ".tif"),
        "a grey PNG of 16 bits": File(encoded(wide, "PNG"), _grey(wide // 257)),
        "a grey TIFF of 16 bits": File(encoded(wide, "TIFF"), _grey(wide // 257), ".tif"),
        "a float TIFF from 0 to 1": File(encoded(unit, "TIFF"), _grey(steps), ".tif"),
        "a float TIFF from 0 to 255": File(encoded(unit * 255, "TIFF"), "grey values", ".tif"),
        "a float TIFF with NaN": File(encoded(unit * np.nan, "TIFF"), "grey values", ".tif"),
        "a TIFF of integers below 0": File(
            encoded(np.full((4, 4), -1, np.int32), "TIFF"), "grey values", ".tif"
        ),
        "a grey PNG": File(encoded(steps, "PNG"), _grey(steps)),
        "a PNG of one bit": File(
            encoded(Image.fromarray(steps).convert("1", dither=0), "PNG"),
            _grey(np.where(steps > 127, 255, 0)),
        ),
        "a palette": File(encoded(palette, "PNG"), np.asarray(palette.convert("RGB"))),
        "a palette with a clear colour": File(encoded(clear, "PNG", transparency=3), without),
        "alpha": File(encoded(alpha, "PNG"), on_white),
        "grey and alpha": File(
            encoded(Image.fromarray(light, "LA"), "PNG"),
            _grey(np.where(light[..., 1] == 255, light[..., 0], 255)),
        ),
        "one pixel": File(encoded(pixels[:1, :1], "PNG"), pixels[:1, :1]),
        "one pixel high, 10,000 wide": File(flat_png(10_000, 1), black),
        "10,000 pixels high, one wide": File(flat_png(1, 10_000), black.transpose(1, 0, 2)),
        "a PNG called .jpg": File(encoded(pixels, "PNG"), pixels, ".jpg"),
        "a JPEG called .png": File(encoded(rgb, "JPEG"), _as_pil(encoded(rgb, "JPEG"))),
        "a BMP called .tiff": File(encoded(pixels, "BMP"), pixels, ".tiff"),
    }
    for number in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = number
        content = encoded(rgb, "JPEG", exif=exif)
        files[f"EXIF orientation {number}"] = File(content, _as_pil(content), ".jpg")
    exif = Image.Exif()
    exif[ORIENTATION] = 99
    content = encoded(rgb, "PNG", exif=exif)
    files["EXIF orientation 99"] = File(content, pixels)
    return files


def _hostile() -> dict[str, File]:
    pixels = picture()
    frames = [Image.fromarray(pixels), Image.fromarray(255 - pixels)]
    several: dict[str, Any] = {"save_all": True, "append_images": frames[1:], "duration": 40}
    gif = encoded(frames[0], "GIF", **several)
    with Image.open(io.BytesIO(gif)) as opened:
        first = np.asarray(opened.convert("RGB"))
    large = "more than the limit of 64,000,000|too large to be decoded"
    return {
        "an animated GIF": File(gif, first, ".gif"),
        "an animated WebP": File(
            encoded(frames[0], "WEBP", lossless=True, **several), pixels, ".webp"
        ),
        "an animated PNG": File(encoded(frames[0], "PNG", **several), pixels),
        "a TIFF of two pages": File(encoded(frames[0], "TIFF", **several), pixels, ".tif"),
        "a header of 200 megapixels, PNG": File(flat_png(20_000, 10_000, whole=False), large),
        "a header of 200 megapixels, JPEG": File(_jpeg_header(20_000, 10_000), large, ".jpg"),
        "a header of 100 megapixels": File(flat_png(10_000, 10_000, whole=False), large),
        "a header of 2**62 pixels": File(flat_png(2**31 - 1, 2**31 - 1, whole=False), large),
        "80 megapixels of one colour": File(lambda: flat_png(10_000, 8_000), large),
        "80 megapixels of one colour and alpha": File(
            lambda: flat_png(10_000, 8_000, kind=6), large
        ),
        "a bomb of text, zTXt": File(lambda: _with_text(international=False), "too large"),
        "a bomb of text, iTXt": File(lambda: _with_text(international=True), "too large"),
        **_bombs(),
    }


CORPUS: dict[str, File] = {**_damaged(), **_modes(), **_hostile()}
