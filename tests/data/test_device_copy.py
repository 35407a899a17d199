"""Batches come to the device in order, one ahead, and with the pixels that they had."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from finetune.data.device_copy import copy_ahead


def batch(number: int) -> list[np.ndarray]:
    generator = np.random.default_rng(number)
    return [
        generator.integers(0, 256, (2 + number, 3 + image, 3), dtype=np.uint8) for image in range(4)
    ]


def test_batches_come_in_order_one_ahead() -> None:
    asked: list[int] = []

    def batches() -> Iterator[list[np.ndarray]]:
        images = None
        for number in range(4):
            if images is not None:
                for image in images:
                    image[:] = 0  # as a slot that is used again
            asked.append(number)
            images = batch(number)
            yield images

    for number, found in enumerate(copy_ahead(batches(), torch.device("cpu"))):
        assert asked == list(range(min(number + 2, 4)))
        for mine, other in zip(found, batch(number), strict=True):
            assert mine.is_contiguous()
            np.testing.assert_array_equal(mine.permute(1, 2, 0).cpu().numpy(), other)


def test_nothing_stays_nothing_and_an_error_comes_through() -> None:
    assert list(copy_ahead([], torch.device("cpu"))) == []

    def broken() -> Iterator[list[np.ndarray]]:
        yield batch(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(copy_ahead(broken(), torch.device("cpu")))
