"""Near-duplicates are found, and similar images are not taken for them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter
from sklearn.datasets import load_digits

from finetune.doctor.image_scan import find_feature_neighbors, measure_pixels
from finetune.doctor.near_duplicates import find_near_duplicates, wrong_probabilities


def draw_photo(number: int, size: int = 64, scales: tuple[int, ...] = (3, 8, 24)) -> Image.Image:
    """Return noise with structure at three scales, as photos have."""
    rng, layers = np.random.default_rng(number), np.zeros((size, size, 3))
    for cells in scales:
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        layers += np.asarray(noise.resize((size, size), Image.Resampling.BICUBIC), float)
    return Image.fromarray((layers / 3).astype(np.uint8))


def encode_jpeg(image: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=50)
    return Image.open(stream)


def crop(left: int, top: int, size: int) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.crop((left, top, left + size, top + size)).resize((64, 64))


def mirror(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


COPIES: list[Callable[[Image.Image], Image.Image]] = [
    lambda image: image,
    crop(13, 0, 51),  # 80 %, a corner
    crop(3, 7, 54),
    lambda image: crop(0, 9, 51)(mirror(image)),
    encode_jpeg,
    lambda image: ImageEnhance.Brightness(image).enhance(0.6),
    lambda image: image.filter(ImageFilter.GaussianBlur(1)),
    lambda image: image.resize((38, 30)),
    lambda image: image.convert("L"),
]


def random_features(num_images: int, copies: dict[int, int]) -> np.ndarray:
    """Return features (N, 8) that are similar for each copy and its original."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((num_images, 8)).astype(np.float32)
    for index, original in copies.items():
        features[index] = features[original] + rng.normal(0, 0.1, 8)
    return features


def find(images: list[Image.Image], features: list[np.ndarray]) -> list[list[int]]:
    neighbors = [find_feature_neighbors(each) for each in features]
    facts = measure_pixels(lambda i: np.asarray(images[i].convert("RGB")), len(images))
    groups, wrong = find_near_duplicates(neighbors, facts.values())
    assert len(wrong) == len(groups)
    return groups


def test_each_kind_of_copy_is_found() -> None:
    photos = [draw_photo(number) for number in range(60)]
    images = photos + [copy(photo) for copy, photo in zip(COPIES, photos, strict=False)]
    expected = [[number, 60 + number] for number in range(len(COPIES))]
    # the neighbors of either network are candidates
    features = [
        random_features(len(images), {copy: original for original, copy in pairs})
        for pairs in (expected[:5], expected[5:])
    ]
    groups = find(images, features)
    assert sorted(groups) == expected
    assert groups[0] == [0, 60]  # the exact copy is the surest


def test_a_small_image_that_lost_its_detail_is_found() -> None:
    """Resized to 60 % and back, it correlates less than a crop of a large photo."""
    images = [draw_photo(number, 32, (8, 16, 32)) for number in range(60)]
    images += [image.resize((19, 19)).resize((32, 32)) for image in images[:20]]
    copies = {60 + number: number for number in range(20)}
    expected = [[number, copy] for copy, number in copies.items()]
    assert sorted(find(images, [random_features(80, copies)])) == expected


def test_copies_of_copies_are_one_group() -> None:
    images = [draw_photo(number) for number in range(8)]
    images += [encode_jpeg(images[2]), mirror(images[2])]
    assert find(images, [random_features(10, {8: 2, 9: 2})]) == [[2, 8, 9]]


def test_similar_features_are_not_enough() -> None:
    images = [draw_photo(number) for number in range(6)]
    images += [Image.new("RGB", (9, 9), color) for color in ("white", "white", "black")]
    assert find(images, [random_features(9, {1: 0, 3: 2, 7: 6, 8: 6})]) == []


def test_digits_look_alike_but_are_no_duplicates() -> None:
    pixels = (load_digits().images[:300] * 15).astype(np.uint8)
    images = [Image.fromarray(image) for image in pixels]
    features = pixels.reshape(len(pixels), -1).astype(np.float32)
    found = find(images, [features])
    assert sum(map(len, found)) <= 0.01 * len(images)


def test_a_single_image() -> None:
    assert find([draw_photo(0)], [random_features(1, {})]) == []


@pytest.mark.parametrize("width", [8, 300])
def test_constant_features(width: int) -> None:
    assert find([draw_photo(0)] * 3, [np.ones((3, width), np.float32)]) == [[0, 1, 2]]


def test_wrong_groups_are_expected_where_similar_images_reach_the_limit() -> None:
    rng = np.random.default_rng(0)
    limit, copies = 0.82, np.full(30, 0.98)

    def expect(num_similar: int) -> tuple[float, int]:
        """Return the expected and the true number of wrong groups, if each pair is a group."""
        similar = np.tanh(rng.exponential(0.2, num_similar))
        confirmed = np.concatenate([copies, similar[similar >= limit]])
        detail = np.concatenate([copies, similar])
        expected = wrong_probabilities(detail, limit, confirmed).sum()
        return expected, len(confirmed) - len(copies)

    expected, true = expect(20_000)
    assert true > 30
    assert abs(expected - true) <= 2 * (true + expected) ** 0.5
    assert expect(100)[0] <= 2
    assert expect(0) == (0.0, 0)


def test_copies_below_the_limit_are_not_taken_for_wrong_groups() -> None:
    """As in CIFAR-10, where the copies outnumber the similar images just below the limit."""
    rng, limit = np.random.default_rng(0), 0.82
    similar = np.tanh(rng.exponential(0.2, 10_000))
    copies = np.tanh(rng.normal(math.atanh(limit) + 0.75, 0.5, 2_000))
    confirmed = np.concatenate([each[each >= limit] for each in (similar, copies)])
    detail = np.concatenate([similar, copies])
    true = (similar >= limit).sum()
    expected = wrong_probabilities(detail, limit, confirmed).sum()
    assert true / 2 <= expected <= 2 * true


def test_sure_groups_are_right_although_others_are_not() -> None:
    similar = np.tanh(np.random.default_rng(0).exponential(0.2, 20_000))
    detail = np.concatenate([similar, np.full(10, 0.999)])
    probabilities = wrong_probabilities(detail, 0.82, np.array([0.999, 0.83]))
    assert probabilities[0] < 0.1
    assert probabilities[1] > 0.5
