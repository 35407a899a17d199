"""Copies of tiny images are found, and similar images are not taken for them."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from sklearn.datasets import load_digits

from finetune.doctor.image_scan import find_feature_neighbors, measure_pixels
from finetune.doctor.near_duplicates import find_near_duplicates

Change = Callable[[Image.Image], Image.Image]
DIGITS = [Image.fromarray((image * 15).astype(np.uint8)) for image in load_digits().images[:600]]


def encode_jpeg(image: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=60)
    return Image.open(stream)


def mirror(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def crop(image: Image.Image) -> Image.Image:
    return image.crop((1, 2, 7, 8)).resize((8, 8))


def resize(image: Image.Image) -> Image.Image:
    return image.resize((5, 5), Image.Resampling.BILINEAR).resize((8, 8))


def find(images: list[Image.Image]) -> tuple[list[list[int]], np.ndarray]:
    facts = measure_pixels(lambda i: np.asarray(images[i].convert("RGB")), len(images))
    # features that know nothing
    features = np.random.default_rng(0).standard_normal((len(images), 8)).astype(np.float32)
    return find_near_duplicates([find_feature_neighbors(features)], facts.values())


CHANGES: list[Change] = [
    crop,
    encode_jpeg,
    mirror,
    resize,
    lambda image: ImageEnhance.Brightness(image).enhance(0.5),
    lambda image: ImageEnhance.Brightness(image).enhance(1.5),
    lambda image: mirror(crop(image)),
]


def test_copies_of_each_kind_are_found() -> None:
    changes = [change for change in CHANGES for _ in range(12)]
    copies = {600 + number: 7 * number for number in range(len(changes))}
    changed = (change(DIGITS[each]) for change, each in zip(changes, copies.values(), strict=True))
    groups, wrong = find([*DIGITS, *changed])
    found = np.array([[original, copy] in groups for copy, original in copies.items()])
    assert found.reshape(-1, 12).sum(axis=1).min() >= 11
    assert sum(each[-1] < 600 for each in groups) <= 2
    assert abs(wrong.sum() - (len(groups) - found.sum())) <= 4


def test_digits_without_copies_are_no_duplicates() -> None:
    groups, wrong = find(DIGITS[:400])
    assert sum(map(len, groups)) <= 4
    assert len(groups) - wrong.sum() <= 1


def test_several_copies_of_an_image_are_one_group() -> None:
    copies = [encode_jpeg(DIGITS[0]), mirror(DIGITS[0]), DIGITS[0], crop(DIGITS[0])]
    groups, _ = find(DIGITS[:200] + copies)
    assert [0, 200, 201, 202, 203] in groups


@pytest.mark.parametrize("num_images", range(1, 6))
def test_few_or_blank_images(num_images: int) -> None:
    assert find(DIGITS[:num_images])[0] == []
    assert find([Image.new("L", (9, 5), 200)] * num_images)[0] == []
    assert find([Image.new("L", (1, 1), 7 * i) for i in range(num_images)])[0] == []


def test_equal_images_among_few() -> None:
    groups, _ = find([*DIGITS[:4], DIGITS[2]])
    assert groups == [[2, 4]]


def test_simple_images_are_alike_by_chance() -> None:
    """Blobs differ in position and size only, so many are near to another one."""
    rng, grid = np.random.default_rng(0), np.arange(8)
    images = []
    for _ in range(300):
        x, y, radius = rng.uniform((2, 2, 1), (5, 5, 2))
        blob = np.exp(-((grid - x) ** 2 + (grid[:, None] - y) ** 2) / radius**2)
        images.append(Image.fromarray((250 * blob).astype(np.uint8)))
    groups, _ = find(images)
    assert sum(map(len, groups)) <= 0.02 * len(images)
