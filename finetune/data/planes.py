"""Decoded images as networks take them: a tensor with its channels first."""

# H W pixels, C channels

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["planes"]

# what is decoded may be Python's bytes, or a mapped file; nobody writes to it
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def planes(image: NDArray[np.uint8]) -> Tensor:
    """An image, (H, W, C), as (C, H, W) of the same memory: whoever batches it has to copy it."""
    return torch.from_numpy(image).permute(2, 0, 1)
