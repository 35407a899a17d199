"""One decoder for train, evaluation and prediction: the same file always gives the same pixels.

Canonical form: uint8, (H, W, 3), RGB, turned upright. What is done to get there:
  - EXIF orientation is applied; colour profiles are not (no ViT was trained with them applied);
  - transparency of any kind (alpha, transparent palette entry or colour) is laid on white;
  - 16-bit grey is scaled to 8 bit (65535 -> 255), where a plain conversion would clip it to white;
  - float pixels must lie in 0..1 and are scaled; CMYK, YCbCr, palettes and 1-bit are converted;
  - of an animation or a file of several pages the first is taken, with one notice.
"""

# H W pixels, C channels

from __future__ import annotations

import functools
import io
import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from finetune.data.notices import notice
from finetune.errors import DataError
from finetune.files import open_regular
from finetune.text import printable

__all__ = ["LIMIT_PIXELS", "decode", "open_data", "planes", "read_jpeg"]

LIMIT_PIXELS = 64_000_000
# An allow-list: PIL would also start Ghostscript for an EPS, guess at unsigned files, and decode
# the picture inside an ICO while opening it, before its size can be looked at.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "MPO")
_ADDRESSES = {"http:", "https:", "ftp:", "s3:", "gs:", "hf:", "file:"}
_LEAST_SIDE = 4  # pixels of a JPEG; below, 5/8 of a side can be as many pixels as half of it
_MOST_BYTES = 2**26  # of a JPEG; of a longer one PIL reads a piece at a time
_ORIENTATION = 0x0112
_TILE_TAGS = (322, 323)  # TIFF's TileWidth and TileLength
_TIFF_NUMBERS = {3: 2, 4: 4}  # bytes of a SHORT and of a LONG, the types that TIFF 6.0 allows them
_EXIF_KEYS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
# the limit here is lower and an error; PIL's warning would come besides it
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# its others are of metadata, and come with the path and the line of PIL's source
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
# decoded pixels may lie in read-only memory, such as a mapped file; nobody writes to them
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def decode(
    data: bytes | str | Path | Image.Image,
    *,
    size: int | None = None,
    limit_pixels: int = LIMIT_PIXELS,
    name: str | Callable[[], str] | None = None,
    room: np.ndarray | None = None,
) -> np.ndarray:
    """Turn an encoded image, a file or a PIL image into canonical RGB.

    Args:
        data: the file's content as bytes, its path, or a PIL image (its current frame is taken).
        size: a JPEG is decoded at an eighth, a quarter or half of its size if no side falls below
            this then, which skips most of the work; other formats are not affected.
        limit_pixels: H*W above which the image is refused, read from its header.
        name: what to call it in errors; a function is called only then.
        room: (n,) uint8, memory that is free to decode into; the result lies at its start, or
            elsewhere.
    Returns: (H, W, 3) uint8, contiguous; read-only.
    Raises: DataError for any image that cannot be decoded.
    """
    try:
        if isinstance(data, Image.Image):
            return _pixels(data, None, limit_pixels)
        if isinstance(data, bytes):
            return _from_stream(io.BytesIO(data), size, limit_pixels, room)
        with open_data(Path(data)) as stream:
            return _from_stream(stream, size, limit_pixels, room)
    except DataError as error:
        cause, code = str(error), error.code
    # PIL's readers raise nearly everything on damaged files: a bare struct.error, KeyError, ...
    except Exception as error:
        cause, code = f"cannot be decoded ({type(error).__name__}: {error})", "data.damaged"
    if name is None:
        name = printable(data) if isinstance(data, str | Path) else "image"
    raise DataError(f"{name() if callable(name) else name}: {cause}", code=code)


def planes(image: NDArray[np.uint8]) -> Tensor:
    """Return an image (H, W, C) as a (C, H, W) tensor of the same memory."""
    return torch.from_numpy(image).permute(2, 0, 1)


def open_data(path: Path) -> IO[bytes]:
    """Open a file of a data set. Raises: DataError if there is none, or it cannot be opened."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        if _ADDRESSES.intersection(path.parts):  # Path makes one slash of two
            message = "addresses are not read; download it and give its path"
            raise DataError(message, code="data.not_a_file") from None
        cause = "a link to nothing" if path.is_symlink() else "no such file"
        raise DataError(cause, code="data.not_found") from None
    except OSError as error:
        message = f"cannot be opened ({error.strerror or error})"
        raise DataError(message, code="data.unreadable") from None
    except ValueError as error:
        raise DataError(str(error), code="data.not_a_file") from None


@functools.lru_cache(maxsize=1)
def _formats() -> list[str]:
    """List the formats that the installed PIL was built with."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _from_stream(
    stream: IO[bytes], size: int | None, limit_pixels: int, room: np.ndarray | None
) -> np.ndarray:
    """Decode an open file. Returns: (H, W, 3) uint8."""
    try:
        image = Image.open(stream, formats=_formats())
    except UnidentifiedImageError:
        stream.seek(0)
        raise _not_an_image(stream.read(256)) from None
    except Image.DecompressionBombError as error:
        raise DataError(f"too large to be decoded ({error})", code="data.too_large") from None
    with image:
        frames = 1 if image.format in ("JPEG", "MPO") else getattr(image, "n_frames", 1)
        if frames > 1:
            notice("of animated images and files of several pages only the first frame is used")
        return _pixels(image, size, limit_pixels, functools.partial(_read_jpeg, stream, room))


def _read_jpeg(stream: IO[bytes], room: np.ndarray | None, image: Image.Image) -> np.ndarray | None:
    """Decode an opened JPEG without PIL. Returns: (H, W, 3) uint8; None if PIL has to do it."""
    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    if stream.seek(0, os.SEEK_END) > _MOST_BYTES:
        return None
    stream.seek(0)
    return read_jpeg(stream.read(), image.size, room)


def read_jpeg(
    body: bytes, size: tuple[int, int], room: NDArray[np.uint8] | None
) -> NDArray[np.uint8] | None:
    """Decode a JPEG to the pixels that PIL would give.

    Args:
        body: the file, grey or in three colours; of several pictures in it the first is taken.
        size: (W, H): its own, or an eighth, a quarter or half of that, rounded up.
        room: (n,), to decode into where the pixels fit; contiguous.
    Returns: (H, W, 3), not turned upright, read-only; None for anything damaged, even if much of it
        could be decoded, and for a file of another size: PIL decides about these.
    """
    if max(size) < _LEAST_SIDE:
        return None
    width, height = size
    num_bytes = height * width * 3
    buffer = room[:num_bytes] if room is not None and room.size >= num_bytes else None
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            body, min_height=height, min_width=width, buffer=buffer
        )
    except ValueError:
        return None
    pixels.flags.writeable = False
    return pixels if pixels.shape == (height, width, 3) else None


def _not_an_image(head: bytes) -> DataError:
    """Return the error for a file that is no image, recognised by its first bytes."""
    text = head.lstrip().lower()
    if not head:
        return DataError("zero bytes", code="data.damaged")
    if text.startswith(b"version https://git-lfs"):
        cause = "a Git LFS pointer, not the image itself; fetch it with `git lfs pull`"
    elif text.startswith((b"<!doctype html", b"<html")):
        cause = "an HTML page, not an image; download it again"
    elif head[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1"):
        cause = "a HEIC photo, which is not supported; convert it to JPEG"
    elif head.startswith(b"\0\0\1\0"):
        cause = "an icon, which is not supported; convert it to PNG"
    else:
        cause = f"not an image, or of an unsupported format (it begins with {head[:12]!r})"
    return DataError(cause, code="data.wrong_format")


def _pixels(
    image: Image.Image,
    size: int | None,
    limit_pixels: int,
    read: Callable[[Image.Image], np.ndarray | None] = lambda image: None,
) -> np.ndarray:
    """Convert an opened PIL image. Returns: (H, W, 3) uint8.

    Args:
        read: a faster decoder, tried before PIL; None if it cannot decode the image.
    """
    width, height = image.size
    if width * height > limit_pixels:
        raise DataError(
            f"{width} x {height} pixels, more than the limit of {limit_pixels:,}; make it smaller",
            code="data.too_large",
        )
    if image.format == "TIFF":
        _check_tiles(image, limit_pixels)
    if width * height == 0:
        raise DataError(f"an image of {width} x {height} pixels", code="data.damaged")
    if size is not None:
        image.draft(None, (size, size))
    pixels = read(image)
    if pixels is None:
        image.load()
        pixels = _to_rgb(image)
    return np.ascontiguousarray(_turn(pixels, _orientation(image)))


def _check_tiles(image: Image.Image, limit_pixels: int) -> None:
    """Refuse a TIFF whose tiles are larger than an image may be: its reader unpacks whole tiles.

    Of a tag that comes twice libtiff takes the first and PIL the last, so PIL is not asked.

    Raises: DataError, also for sizes of another type than TIFF 6.0 allows.
    """
    if not getattr(image, "tile", None):  # the caller has decoded it already
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
        if kind not in _TIFF_NUMBERS:
            message = f"the size of its tiles is of TIFF's type {kind}; save it anew"
            raise DataError(message, code="data.damaged")
        value = entry[12 if is_big else 8 :][: _TIFF_NUMBERS[kind]]
        number = int.from_bytes(value, "little" if order == "<" else "big")
        largest[tag] = max(largest[tag], number)
    width, height = largest.values()
    if width * height > limit_pixels:
        raise DataError(
            f"tiles of {width} x {height} pixels, more than the limit of {limit_pixels:,}; save it "
            "with smaller ones",
            code="data.too_large",
        )


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Bring any mode to RGB. Returns: (H, W, 3) uint8, not yet turned upright."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return np.asarray(image)
    if image.mode.startswith("I") or image.mode == "F":
        return np.repeat(_scale_grey(np.asarray(image), image.mode)[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        # premultiplied modes and transparent greys have no direct way to RGBA in every PIL
        straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)
        rgba = image.convert(straight).convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, rgba).convert("RGB"))
    return np.asarray(image.convert("RGB"))


def _scale_grey(grey: np.ndarray, mode: str) -> np.ndarray:
    """Scale integer or float grey to 8 bit.

    Args:
        grey: (H, W), integers in 0..65535 or floats in 0..1.
        mode: PIL's name of the mode, for the message.
    Returns: (H, W) uint8, rounded to nearest.
    Raises: DataError outside these ranges: the true white would be a guess.
    """
    white = 1.0 if mode == "F" else 65535.0
    low, high = float(grey.min()), float(grey.max())
    if not (low >= 0 and high <= white):  # written so that NaN fails too
        raise DataError(
            f"grey values from {low:g} to {high:g}; expected 0 to {white:g}; save it as 8-bit",
            code="data.wrong_format",
        )
    return np.rint(grey.astype(np.float64) * (255.0 / white)).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation to apply, 1 to 8 (PIL's TIFF reader applies it itself)."""
    # parsing EXIF costs as much as decoding a small JPEG: only where there is some
    if image.format != "TIFF" and not any(key in image.info for key in _EXIF_KEYS):
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception as error:
        notice(
            f"damaged EXIF data is ignored, the image taken as upright ({error})",
            key="damaged EXIF",
        )
        return 1


def _turn(image: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the camera's orientation.

    Args:
        image: (H, W, 3).
        orientation: EXIF tag 274; values outside 1..8 mean upright.
    Returns: (H, W, 3), or (W, H, 3) for 5 to 8.
    Source: EXIF 2.32, tag 274 (where the 0th row and the 0th column are).
    """
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return image
