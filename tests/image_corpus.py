"""A corpus of damaged, unusual and hostile image files, each with its expected result.

All readers of images must agree on these files; tests/data/test_decode.py tests every pixel mode.
"""

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

__all__ = ["CORPUS", "CorpusFile", "encode_image", "sample_image", "single_color_png"]

ORIENTATION = 0x0112


@dataclass(frozen=True)
class CorpusFile:
    """One file of the corpus: the expected pixels, or a pattern of the error message.

    Attributes:
        source: the bytes, or a function that makes them: every test process imports this module.
        result: (H, W, 3) uint8, or a pattern of the error message.
        suffix: suffix of the file name.
    """

    source: bytes | Callable[[], bytes]
    result: np.ndarray | str
    suffix: str = ".png"

    @functools.cached_property
    def content(self) -> bytes:
        """The bytes of the file."""
        return self.source if isinstance(self.source, bytes) else self.source()


def sample_image(height: int = 12, width: int = 18) -> np.ndarray:
    """Return (H, W, 3) uint8, smooth enough for JPEG and different in each corner."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = (240 - 8 * rows, 13 * columns, 5 * (rows + columns))
    return np.clip(np.stack(channels, axis=2), 0, 255).astype(np.uint8)


def encode_image(image: Image.Image | np.ndarray, format_name: str, **options: Any) -> bytes:
    """Encode an image. Returns: the bytes of the file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, format_name, **options)
    return stream.getvalue()


def png_chunk(chunk_type: bytes, content: bytes) -> bytes:
    """Return one chunk of a PNG."""
    body = chunk_type + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def single_color_png(
    width: int, height: int, *, color_type: int = 2, with_pixels: bool = True
) -> bytes:
    """Return a PNG of one color, a few kilobytes at any size; color_type: 0 gray, 2 RGB, 6 RGBA."""
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    compressor, parts = zlib.compressobj(1), []
    if with_pixels:
        row = bytes(1 + width * {0: 1, 2: 3, 6: 4}[color_type])
        parts = [compressor.compress(row) for _ in range(height)]
    data = b"".join([*parts, compressor.flush()])
    start = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)
    return start + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def decode_with_pil(content: bytes) -> np.ndarray:
    """Decode with PIL alone, in the EXIF orientation."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def flip_bit(content: bytes, offset: int, bit: int = 3) -> bytes:
    flipped = bytearray(content)
    flipped[offset] ^= 1 << bit
    return bytes(flipped)


def gray_to_rgb(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2).astype(np.uint8)


def jpeg_without_pixels(width: int, height: int) -> bytes:
    """Return a JPEG header with a size, and no pixels."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + b"\x01\x11\0\x02\x11\0\x03\x11\0"
    scan = struct.pack(">HB", 12, 3) + b"\x01\0\x02\0\x03\0\0\x3f\0"
    parts = (b"\xff\xd8\xff\xc0", struct.pack(">H", len(frame) + 2), frame, b"\xff\xda", scan)
    return b"".join(parts)


def zero_tiff(side: int, *extra_tags: tuple[int, int], tile: int | None = None) -> bytes:
    """Return a gray TIFF of zeros, compressed into one strip or one tile.

    Args:
        side: height and width in pixels.
        extra_tags: (tag, value) pairs to add to the required ones; a tag may occur twice.
        tile: height and width of the tile in pixels; None for a strip.
    """
    compressed = zlib.compress(bytes((tile or side) ** 2), 1)
    tags = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1)]
    start = 8 + 2 + 12 * (len(tags) + 4 + len(extra_tags)) + 4
    if tile:
        tags += [(322, tile), (323, tile), (324, start), (325, len(compressed)), *extra_tags]
    else:
        tags += [(273, start), (278, side), (279, len(compressed)), (282, 1), *extra_tags]
    tags.sort(key=lambda pair: pair[0])
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags]
    return b"".join([b"II*\0", struct.pack("<IH", 8, len(tags)), *entries, bytes(4), compressed])


def bmp_without_pixels(width: int, height: int, *, compression: int = 0) -> bytes:
    """Return a BMP header with a size, and no pixels; compression: 1 run-length, 0 none."""
    bits, num_colors = (8, 256) if compression else (24, 0)
    start = 54 + 4 * num_colors
    file = b"BM" + struct.pack("<IHHI", start, 0, 0, start)
    sizes = struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, num_colors, 0
    )
    return file + sizes + bytes(4 * num_colors)


def replace_size(content: bytes, marker: bytes, skip: int, size: bytes) -> bytes:
    """Overwrite the size that follows `marker` after `skip` bytes."""
    start = content.index(marker) + len(marker) + skip
    return content[:start] + size + content[start + len(size) :]


def icon_with_large_png() -> bytes:
    """Return an icon that holds a PNG of 81 megapixels."""
    flat = single_color_png(9000, 9000, color_type=0)
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(flat), 22) + flat


def png_with_compressed_text(*, itxt: bool) -> bytes:
    """Return a PNG with 50 MB of compressed text."""
    texts = PngInfo()
    if itxt:
        texts.add_itxt("Comment", "x" * 50_000_000, zip=True)
    else:
        texts.add_text("Comment", "x" * 50_000_000, zip=True)
    return encode_image(sample_image(), "PNG", pnginfo=texts)


def decompression_bombs() -> dict[str, CorpusFile]:
    """Return one small file of each format that claims more pixels than the limit."""
    small = Image.fromarray(sample_image())
    side = 13_000
    size = struct.pack(">II", side, side)
    gif = encode_image(small, "GIF")
    # what PIL writes for one color, 13,000 x 13,000
    webp = "524946461e000000574542505650384c110000002fc7f2b10c0750ad2614b9ff8188e87f0000"
    too_large, tiles = "more than the limit of 64,000,000", "tiles of 9000 x 9000 pixels, more than"
    files = {
        "JPEG": CorpusFile(jpeg_without_pixels(side, side), too_large, ".jpg"),
        "BMP": CorpusFile(bmp_without_pixels(side, side), too_large, ".bmp"),
        "run-length BMP": CorpusFile(
            bmp_without_pixels(side, side, compression=1), too_large, ".bmp"
        ),
        "PPM": CorpusFile(b"P6 13000 13000 255\n", too_large, ".ppm"),
        "plain-text PBM": CorpusFile(b"P1 13000 13000\n0 1 0 1\n", too_large, ".pbm"),
        "GIF": CorpusFile(gif[:6] + struct.pack("<HH", side, side) + gif[10:], too_large, ".gif"),
        "GIF, only its frame": CorpusFile(
            replace_size(gif, b"\x2c\0\0\0\0", 0, struct.pack("<HH", side, side)), too_large, ".gif"
        ),
        "TIFF": CorpusFile(lambda: zero_tiff(9000), too_large, ".tif"),
        "TIFF, its tile alone": CorpusFile(lambda: zero_tiff(16, tile=9000), tiles, ".tif"),
        "TIFF, the first of its tags alone": CorpusFile(
            lambda: zero_tiff(16, (322, 16), (323, 16), tile=9000), tiles, ".tif"
        ),
        "WebP": CorpusFile(bytes.fromhex(webp), too_large, ".webp"),
        "ICO": CorpusFile(icon_with_large_png, "an icon, which is not supported", ".png"),
    }
    if features.check("jpg_2000"):
        box = encode_image(small, "JPEG2000")
        files["JPEG 2000"] = CorpusFile(replace_size(box, b"ihdr", 0, size), too_large, ".jp2")
    if features.check("avif"):
        box = encode_image(small, "AVIF")
        files["AVIF"] = CorpusFile(replace_size(box, b"ispe", 4, size), too_large, ".avif")
    return {f"a bomb, {kind}": file for kind, file in files.items()}


def damaged_files() -> dict[str, CorpusFile]:
    png, jpeg = (
        encode_image(sample_image(), "PNG"),
        encode_image(sample_image(), "JPEG", quality=90),
    )
    files = {
        "zero bytes": CorpusFile(b"", "zero bytes"),
        "a web page": CorpusFile(b"<!DOCTYPE html><html>404</html>", "an HTML page", ".jpg"),
        "an archive": CorpusFile(b"PK\x03\x04" + bytes(60), "not an image"),
        "random bytes": CorpusFile(np.random.default_rng(0).bytes(500), "not an image"),
        "zeros": CorpusFile(bytes(500), "not an image"),
        "an SVG": CorpusFile(b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "not an image"),
        "a PNG without pixels": CorpusFile(
            single_color_png(9, 9, with_pixels=False), "cannot be decoded"
        ),
        "a PNG with width 0": CorpusFile(
            single_color_png(0, 9), "0 x 9|not an image|cannot be decoded"
        ),
        "a PNG with one flipped bit in its pixels": CorpusFile(
            flip_bit(png, png.index(b"IDAT") + 12), "cannot be decoded"
        ),
        "a PNG with one flipped bit in its header": CorpusFile(
            flip_bit(png, 18), "not an image|cannot be decoded|pixels"
        ),
        "a PNG without its last chunk": CorpusFile(png[:-12], sample_image()),
        "a JPEG with a flipped bit in its signature": CorpusFile(
            flip_bit(jpeg, 0), "not an image", ".jpg"
        ),
        "a JPEG with a flipped bit in its Huffman table": CorpusFile(
            flip_bit(jpeg, jpeg.index(b"\xff\xc4") + 5, 7), "cannot be decoded", ".jpg"
        ),
    }
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for fraction in (0.003, 0.5, 0.99):
        for format_name in ("PNG", "JPEG"):
            content = encode_image(noise, format_name)
            cut = content[: int(len(content) * fraction)]
            message = "not an image|cannot be decoded"
            files[f"a {format_name} truncated to {fraction:.1%}"] = CorpusFile(
                cut, message, f".{format_name.lower()}"
            )
    return files


def pixel_modes() -> dict[str, CorpusFile]:
    """Return intact files whose pixels are not plain RGB."""
    pixels = sample_image()
    rgb = Image.fromarray(pixels)
    cmyk = encode_image(rgb.convert("CMYK"), "JPEG", quality=95)
    marker = cmyk.index(b"\xff\xee")  # the Adobe marker says that the inks are inverted
    end = marker + 2 + int.from_bytes(cmyk[marker + 2 : marker + 4], "big")
    cmyk_without_adobe = cmyk[:marker] + cmyk[end:]
    gray16 = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    gray_float = (np.arange(256, dtype=np.float32) / 255).reshape(16, 16)
    alpha = np.dstack([pixels, np.where(pixels[..., 0] > 200, 255, 0).astype(np.uint8)])
    on_white = np.where(alpha[..., 3:] == 255, pixels, 255).astype(np.uint8)
    black_row = np.zeros((1, 10_000, 3), np.uint8)
    palette = rgb.quantize(16)
    transparent = palette.copy()
    is_transparent = np.asarray(palette) == 3
    palette_on_white = np.where(is_transparent[:, :, None], 255, np.asarray(palette.convert("RGB")))
    files = {
        "a CMYK JPEG with inverted inks (Adobe)": CorpusFile(cmyk, decode_with_pil(cmyk), ".jpg"),
        "a CMYK JPEG with plain inks": CorpusFile(
            cmyk_without_adobe, decode_with_pil(cmyk_without_adobe), ".jpg"
        ),
        "a 16-bit gray PNG": CorpusFile(encode_image(gray16, "PNG"), gray_to_rgb(gray16 // 257)),
        "a float TIFF from 0 to 255": CorpusFile(
            encode_image(gray_float * 255, "TIFF"), "gray values", ".tif"
        ),
        "a palette PNG with a transparent color": CorpusFile(
            encode_image(transparent, "PNG", transparency=3), palette_on_white
        ),
        "an RGBA PNG": CorpusFile(encode_image(alpha, "PNG"), on_white),
        "1 x 1 pixel": CorpusFile(encode_image(pixels[:1, :1], "PNG"), pixels[:1, :1]),
        "1 pixel high, 10,000 wide": CorpusFile(single_color_png(10_000, 1), black_row),
        "10,000 pixels high, 1 wide": CorpusFile(
            single_color_png(1, 10_000), black_row.transpose(1, 0, 2)
        ),
        "a PNG named .jpg": CorpusFile(encode_image(pixels, "PNG"), pixels, ".jpg"),
        "a BMP named .tiff": CorpusFile(encode_image(pixels, "BMP"), pixels, ".tiff"),
    }
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = encode_image(rgb, "JPEG", exif=exif)
    files["EXIF orientation 6"] = CorpusFile(turned, decode_with_pil(turned), ".jpg")
    exif[ORIENTATION] = 99
    files["EXIF orientation 99"] = CorpusFile(encode_image(rgb, "PNG", exif=exif), pixels)
    return files


def hostile_files() -> dict[str, CorpusFile]:
    pixels = sample_image()
    frames = [Image.fromarray(pixels), Image.fromarray(255 - pixels)]
    animation: dict[str, Any] = {"save_all": True, "append_images": frames[1:], "duration": 40}
    gif = encode_image(frames[0], "GIF", **animation)
    with Image.open(io.BytesIO(gif)) as opened:
        first_frame = np.asarray(opened.convert("RGB"))
    too_large = "more than the limit of 64,000,000|too large to be decoded"
    return {
        "an animated GIF": CorpusFile(gif, first_frame, ".gif"),
        "a PNG header of 200 megapixels": CorpusFile(
            single_color_png(20_000, 10_000, with_pixels=False), too_large
        ),
        "a JPEG header of 200 megapixels": CorpusFile(
            jpeg_without_pixels(20_000, 10_000), too_large, ".jpg"
        ),
        "a PNG header of 100 megapixels": CorpusFile(
            single_color_png(10_000, 10_000, with_pixels=False), too_large
        ),
        "a PNG header of 2**62 pixels": CorpusFile(
            single_color_png(2**31 - 1, 2**31 - 1, with_pixels=False), too_large
        ),
        "80 megapixels of one color": CorpusFile(
            lambda: single_color_png(10_000, 8_000), too_large
        ),
        "80 megapixels of one color with alpha": CorpusFile(
            lambda: single_color_png(10_000, 8_000, color_type=6), too_large
        ),
        "a bomb, PNG text chunk zTXt": CorpusFile(
            lambda: png_with_compressed_text(itxt=False), "too large"
        ),
        "a bomb, PNG text chunk iTXt": CorpusFile(
            lambda: png_with_compressed_text(itxt=True), "too large"
        ),
        **decompression_bombs(),
    }


CORPUS: dict[str, CorpusFile] = {**damaged_files(), **pixel_modes(), **hostile_files()}
