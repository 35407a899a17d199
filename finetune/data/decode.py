"""One decoder for train, evaluation and prediction: the same file always gives the same pixels.

Canonical form: (H, W, 3) uint8 RGB, upright. To get there, the decoder
  - applies EXIF orientation, but no color profile (no ViT was trained with profiles applied);
  - composites any transparency (alpha, transparent palette entry or color) over white;
  - scales 16-bit gray to 8 bit (65535 -> 255), because a plain conversion would clip it to white;
  - scales float pixels, which must be in 0..1, and converts CMYK, YCbCr, palettes and 1-bit;
  - takes the first frame of an animation or the first of several pages, and warns once.

HEIC and HEIF photos need the optional package pillow-heif.
"""

# H W pixels, C channels

from __future__ import annotations

import functools
import importlib.metadata
import io
import os
import re
import struct
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import numpy as np
import PIL
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError, features
from torch import Tensor

from finetune.errors import DataError, install_hint
from finetune.files import open_regular_file
from finetune.formatting import printable_path
from finetune.log import warn_once

__all__ = [
    "HEIC_HINT",
    "MAX_JPEG_BYTES",
    "MAX_PIXELS",
    "decode_image",
    "decode_jpeg",
    "decoder_versions",
    "heif_decoder_version",
    "hwc_to_chw",
    "open_dataset_file",
]

MAX_PIXELS = 64_000_000
# An allow-list: PIL would also start Ghostscript for an EPS, guess the format of files without a
# signature, and decode the picture inside an ICO while opening it, before its size can be checked.
_ALLOWED_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "MPO")
_URL_SCHEMES = {"http:", "https:", "ftp:", "s3:", "gs:", "hf:", "file:"}
_MIN_JPEG_SIDE = 4  # PIL decodes smaller images: scales 5/8 and 1/2 may give them the same size
MAX_JPEG_BYTES = 2**26  # PIL decodes larger files, which it reads in pieces
_ORIENTATION_TAG = 0x0112
_TILE_TAGS = (322, 323)  # TIFF's TileWidth and TileLength
_TIFF_INTEGER_BYTES = {3: 2, 4: 4}  # bytes of SHORT and LONG, the types that TIFF 6.0 allows
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
HEIC_HINT = f"to read HEIC photos, {install_hint('heic')}"
_EXIF_KEYS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
# our own limit is lower and raises an error; PIL's warning would only repeat it
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# PIL's other warnings concern metadata, and print the path and line of PIL's source
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
# decoded pixels may be in read-only memory, such as a mapped file; nothing writes to them
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def decode_image(
    data: bytes | str | Path | AbstractContextManager[IO[bytes]] | Image.Image,
    *,
    decode_size: int | None = None,
    name: str | Callable[[], str] | None = None,
    buffer: np.ndarray | None = None,
) -> np.ndarray:
    """Decode an encoded image, a file or a PIL image to canonical RGB.

    Args:
        data: the file's content as bytes, its path, a context manager that opens it, or a PIL image
            (its current frame is decoded).
        decode_size: minimum length of each side in pixels. A JPEG is decoded at 1/8, 1/4 or 1/2 of
            its size if both sides stay at least this long, which skips most of the work. Ignored
            for other formats.
        name: name of the image in errors, "" for none; a function is called only when an error
            occurs.
        buffer: memory to decode into, (n,) uint8. The result is at its start or in new memory.
    Returns: (H, W, 3) uint8, contiguous; read-only.
    Raises: DataError for any image that cannot be decoded.
    """
    try:
        if isinstance(data, Image.Image):
            return _decode_pil_image(data, None)
        if isinstance(data, bytes):
            return _decode_stream(io.BytesIO(data), decode_size, buffer)
        opened = open_dataset_file(Path(data)) if isinstance(data, str | Path) else data
        with opened as stream:
            return _decode_stream(stream, decode_size, buffer)
    except DataError as error:
        cause, code = str(error), error.code
    except MemoryError:  # the image may be intact
        raise
    # PIL's readers raise nearly anything on damaged files: a bare struct.error, KeyError, ...
    except Exception as error:
        cause, code = f"cannot be decoded ({type(error).__name__}: {error})", "data.damaged"
    if name is None:
        name = printable_path(data) if isinstance(data, str | Path) else "image"
    prefix = name() if callable(name) else name
    raise DataError(f"{prefix}: {cause}" if prefix else cause, code=code)


def hwc_to_chw(image: NDArray[np.uint8]) -> Tensor:
    """Return an image (H, W, C) as a (C, H, W) tensor that shares its memory."""
    return torch.from_numpy(image).permute(2, 0, 1)


def open_dataset_file(path: Path) -> IO[bytes]:
    """Open a file of a dataset. Raises: DataError if it does not exist or cannot be opened."""
    try:
        return open_regular_file(path)
    except FileNotFoundError:
        if _URL_SCHEMES.intersection(path.parts):  # pathlib collapses "//" to "/"
            message = "is a URL, which is not supported here; download the file and give its path"
            raise DataError(message, code="data.not_a_file") from None
        cause = "a broken link" if path.is_symlink() else "no such file"
        raise DataError(cause, code="data.not_found") from None
    except OSError as error:
        message = f"cannot be opened ({error.strerror or error})"
        raise DataError(message, code="data.unreadable") from None
    except ValueError as error:
        raise DataError(str(error), code="data.not_a_file") from None


@functools.lru_cache(maxsize=1)
def heif_decoder_version() -> str | None:
    """Return the version of pillow-heif, which decodes HEIC photos; None if it is not installed."""
    try:
        return importlib.metadata.version("pillow-heif")
    except importlib.metadata.PackageNotFoundError:
        return None


def decoder_versions() -> list[str | int | None]:
    """Return the versions and limits of the decoders, for cache keys.

    They decide which images can be read, and which pixels these have.
    """
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    heif = heif_decoder_version()
    return [PIL.__version__, jpeg, simplejpeg.__version__, heif, MAX_PIXELS]


@functools.lru_cache(maxsize=1)
def _register_heif_format() -> None:
    """Let PIL open HEIC photos. Call it only for such a file: the import takes 60 ms."""
    import pillow_heif

    # With thumbnails, `draft` would decode an embedded thumbnail instead of the photo. One thread,
    # because several photos are decoded at the same time.
    pillow_heif.register_heif_opener(
        thumbnails=False, depth_images=False, aux_images=False, decode_threads=1
    )


@functools.lru_cache(maxsize=1)
def _available_formats() -> list[str]:
    """List the formats that the installed PIL was built with."""
    Image.init()
    return [name for name in _ALLOWED_FORMATS if name in Image.OPEN]


def _is_heic(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS


def _decode_stream(
    stream: IO[bytes], decode_size: int | None, buffer: np.ndarray | None
) -> np.ndarray:
    """Decode an open file. Returns: (H, W, 3) uint8."""
    formats = _available_formats()
    head = stream.read(12)
    stream.seek(0)
    if _is_heic(head) and heif_decoder_version():
        _check_heif_sizes(stream)
        _register_heif_format()
        formats = [*formats, "HEIF"]
    try:
        image = Image.open(stream, formats=formats)
    except UnidentifiedImageError:
        stream.seek(0)
        raise _not_an_image_error(stream.read(256)) from None
    except Image.DecompressionBombError as error:
        raise DataError(f"too large to be decoded ({error})", code="data.too_large") from None
    with image:
        frames = 1 if image.format in ("JPEG", "MPO") else getattr(image, "n_frames", 1)
        if frames > 1:
            warn_once("animated images and multi-page files: only the first frame is used")
        return _decode_pil_image(
            image, decode_size, functools.partial(_decode_jpeg_stream, stream, buffer)
        )


def _check_heif_sizes(stream: IO[bytes]) -> None:
    """Reject a HEIC photo with a part above the pixel limit: parts are decoded before cropping.

    Source: ISO/IEC 23008-12, 6.5.3 (the box ispe has version, flags, width and height).
    """
    for sizes in re.findall(rb"ispe\0.{3}(.{8})", stream.read(), re.DOTALL):
        _check_num_pixels(*struct.unpack(">II", sizes))
    stream.seek(0)


def _check_num_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{width} x {height} pixels, more than the limit of {MAX_PIXELS:,}; make it smaller",
            code="data.too_large",
        )


def _decode_jpeg_stream(
    stream: IO[bytes], buffer: np.ndarray | None, image: Image.Image
) -> np.ndarray | None:
    """Decode an open JPEG without PIL. Returns: (H, W, 3) uint8; None if PIL has to decode it."""
    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    if stream.seek(0, os.SEEK_END) > MAX_JPEG_BYTES:
        return None
    stream.seek(0)
    return decode_jpeg(stream.read(), image.size, buffer)


def decode_jpeg(
    body: bytes, size: tuple[int, int], buffer: NDArray[np.uint8] | None
) -> NDArray[np.uint8] | None:
    """Decode a JPEG to the same pixels as PIL.

    Args:
        body: content of the file, gray or three colors; only its first picture is decoded.
        size: (W, H) of the result: the full size, or 1/8, 1/4 or 1/2 of it, rounded up.
        buffer: (n,) contiguous memory to decode into if the pixels fit.
    Returns: (H, W, 3), EXIF orientation not applied, read-only. None if the file is damaged, even
        if part of it could be decoded, or has another size: PIL then decodes it or raises.
        A warning tells that it is damaged.
    """
    if max(size) < _MIN_JPEG_SIDE:
        return None
    width, height = size
    num_bytes = height * width * 3
    out = buffer[:num_bytes] if buffer is not None and buffer.size >= num_bytes else None
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            body, min_height=height, min_width=width, buffer=out
        )
    except ValueError as error:
        cause = str(error)
        if cause.startswith(("Corrupt", "Premature end")):  # PIL fills the hole without a word
            warn_once(
                f"JPEG files are damaged, and used if they can be decoded in part (first: {cause})",
                key="damaged JPEG",
            )
        return None
    pixels.flags.writeable = False
    return pixels if pixels.shape == (height, width, 3) else None


def _not_an_image_error(head: bytes) -> DataError:
    """Return the error for a file that PIL cannot identify; its first bytes tell what it is."""
    text = head.lstrip().lower()
    if not head:
        return DataError("zero bytes", code="data.damaged")
    if text.startswith(b"version https://git-lfs"):
        cause = "a Git LFS pointer, not the image itself; fetch it with `git lfs pull`"
    elif text.startswith((b"<!doctype html", b"<html")):
        cause = "an HTML page, not an image; download it again"
    elif _is_heic(head):
        if heif_decoder_version():
            return DataError("a damaged HEIC photo", code="data.damaged")
        cause = f"a HEIC photo; {HEIC_HINT}"
    elif head.startswith(b"\0\0\1\0"):
        cause = "an icon, which is not supported; convert it to PNG"
    else:
        cause = f"not an image, or of an unsupported format (it begins with {head[:12]!r})"
    return DataError(cause, code="data.wrong_format")


def _decode_pil_image(
    image: Image.Image,
    decode_size: int | None,
    fast_decode: Callable[[Image.Image], np.ndarray | None] = lambda image: None,
) -> np.ndarray:
    """Decode an open PIL image to canonical RGB. Returns: (H, W, 3) uint8.

    Args:
        fast_decode: a faster decoder, tried before PIL; returns None if it cannot decode the image.
    """
    width, height = image.size
    _check_num_pixels(width, height)
    if image.format == "TIFF":
        _check_tiff_tiles(image)
    if width * height == 0:
        raise DataError(f"the image has no pixels ({width} x {height})", code="data.damaged")
    if decode_size is not None:
        image.draft(None, (decode_size, decode_size))
    pixels = fast_decode(image)
    if pixels is None:
        image.load()
        pixels = _to_rgb(image)
    return np.ascontiguousarray(_apply_orientation(pixels, _exif_orientation(image)))


def _check_tiff_tiles(image: Image.Image) -> None:
    """Reject a TIFF whose tiles exceed the pixel limit: libtiff unpacks whole tiles.

    Parses the tags without PIL, because PIL uses the last of duplicate tags and libtiff the first.

    Raises: DataError, also if a tile size has a type that TIFF 6.0 does not allow.
    """
    if not getattr(image, "tile", None):  # the caller has already decoded it
        return
    fp = image.fp  # type: ignore[attr-defined]
    fp.seek(0)
    head = fp.read(4)
    order = "<" if head.startswith(b"II") else ">"
    is_big = 43 in head[2:]  # BigTIFF
    fp.seek(image.tag_v2.offset)  # type: ignore[attr-defined]
    (num_tags,) = struct.unpack(order + ("Q" if is_big else "H"), fp.read(8 if is_big else 2))
    largest = dict.fromkeys(_TILE_TAGS, 0)
    for _ in range(num_tags):
        entry = fp.read(20 if is_big else 12)
        tag, kind = struct.unpack(order + "HH", entry[:4])
        if tag not in _TILE_TAGS:
            continue
        if kind not in _TIFF_INTEGER_BYTES:
            message = f"the tile size has the unsupported TIFF type {kind}; save the image again"
            raise DataError(message, code="data.damaged")
        value = entry[12 if is_big else 8 :][: _TIFF_INTEGER_BYTES[kind]]
        number = int.from_bytes(value, "little" if order == "<" else "big")
        largest[tag] = max(largest[tag], number)
    width, height = largest.values()
    if width * height > MAX_PIXELS:
        raise DataError(
            f"tiles of {width} x {height} pixels, more than the limit of {MAX_PIXELS:,}; save it "
            "with smaller tiles",
            code="data.too_large",
        )


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Convert any mode to RGB. Returns: (H, W, 3) uint8, EXIF orientation not yet applied."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return np.asarray(image)
    if image.mode.startswith("I") or image.mode == "F":
        # PIL scales every PGM of more than 8 bits to 16, in mode I
        mode = "I;16" if image.format == "PPM" and image.mode == "I" else image.mode
        return np.repeat(_scale_gray(np.asarray(image), mode)[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        # not every PIL version converts premultiplied modes or transparent gray directly to RGBA
        straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)
        rgba = image.convert(straight).convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, rgba).convert("RGB"))
    return np.asarray(image.convert("RGB"))


def _scale_gray(gray: np.ndarray, mode: str) -> np.ndarray:
    """Scale integer or float gray to 8 bit.

    Args:
        gray: (H, W), integers in 0..65535 or floats in 0..1.
        mode: PIL's name of the mode.
    Returns: (H, W) uint8, rounded to nearest.
    Raises: DataError for values outside these ranges, and for 32-bit integers that are all below
        256: the white level would be a guess.
    """
    white = 1.0 if mode == "F" else 65535.0
    low, high = float(gray.min()), float(gray.max())
    if mode == "I" and 0 < high < 256:
        raise DataError(
            f"32-bit gray values from {low:g} to {high:g}, but white is 65535, so the image would "
            "be black; save it as 8-bit",
            code="data.wrong_format",
        )
    if mode != "F" and 0 < high < 4096:
        warn_once(
            f"a 16-bit gray image has no value above {high:g} of 65535, so it is dark; if it has "
            "10 or 12 bits, multiply its values",
            key="dark 16-bit gray",
        )
    if not (low >= 0 and high <= white):  # written so that NaN fails too
        raise DataError(
            f"gray values from {low:g} to {high:g}; expected 0 to {white:g}; save it as 8-bit",
            code="data.wrong_format",
        )
    return np.rint(gray.astype(np.float64) * (255.0 / white)).astype(np.uint8)


def _exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation to apply, 1 to 8 (PIL's TIFF reader applies it itself)."""
    # parsing EXIF costs as much as decoding a small JPEG, so skip images without any
    if image.format != "TIFF" and not any(key in image.info for key in _EXIF_KEYS):
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception as error:
        warn_once(
            f"damaged EXIF data is ignored and the image is assumed to be upright ({error})",
            key="damaged EXIF",
        )
        return 1


def _apply_orientation(image: np.ndarray, orientation: int) -> np.ndarray:
    """Apply the EXIF orientation, so that the image is upright.

    Args:
        image: (H, W, 3).
        orientation: EXIF tag 274; values outside 1..8 mean upright.
    Returns: (H, W, 3), or (W, H, 3) for 5 to 8.
    Source: EXIF 2.32, tag 274 (position of the 0th row and the 0th column).
    """
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return image
