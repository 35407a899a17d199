"""Images for tests of transforms."""

from __future__ import annotations

import pytest
import torch
from test_geometry import synthetic_photo
from torch import Tensor


@pytest.fixture
def images() -> Tensor:
    """(8, 3, 31, 40) uint8; one image is gray and one has a single color."""
    stack = torch.stack([synthetic_photo(31, 40, seed) for seed in range(8)])
    stack[1] = stack[1, :1]
    stack[2] = torch.tensor([10, 200, 90], dtype=torch.uint8).view(3, 1, 1)
    return stack
