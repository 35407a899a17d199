"""Decoded images as tensors."""

from __future__ import annotations

import numpy as np
from PIL import Image

from finetune.data.decode import decode, planes


def test_planes_are_the_pixels_themselves() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    decoded = decode(Image.fromarray(pixels))
    seen = planes(decoded)
    assert seen.shape == (3, 4, 5)
    assert np.array_equal(seen.permute(1, 2, 0).numpy(), pixels)
    assert seen.data_ptr() == decoded.ctypes.data
