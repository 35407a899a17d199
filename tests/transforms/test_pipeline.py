# B batch, C channels, H W source pixels, h w target pixels, K classes

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from test_geometry import synthetic_photo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2 import functional as tv

from finetune.transforms.color import color_jitter
from finetune.transforms.operations import INTERPOLATIONS
from finetune.transforms.pipeline import Pipeline, sample_keys
from finetune.transforms.ragged import RaggedBatch
from finetune.transforms.sample_rng import (
    SampleKeys,
    SampleRNG,
    draw_crop_offsets,
    draw_crop_windows,
    draw_erase_boxes,
)
from finetune.transforms.spec_parser import parse_transform_spec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALL_OPERATIONS = (
    "random_resized_crop(scale=(0.2, 1.0)) | flip | vertical_flip | rotate(30) | "
    "color_jitter(0.4, 0.4, 0.4, 0.1) | rand_augment(3) | random_erasing(p=0.7)"
)


def synthetic_photos(count: int, height: int = 32, width: int = 32) -> Tensor:
    return torch.stack([synthetic_photo(height, width, seed) for seed in range(count)])


def make_keys(count: int, epoch: int = 0) -> SampleKeys:
    return sample_keys(0, epoch, np.arange(count))


def make_pipeline(
    transforms: str, size: tuple[int, int] = (32, 32), *, train: bool = True
) -> Pipeline:
    return Pipeline(transforms, image_size=size, mean=MEAN, std=STD, train=train)


def make_unnormalized_pipeline(
    transforms: str, size: tuple[int, int], interpolation: str = "bicubic"
) -> Pipeline:
    """Return a pipeline whose output ranges from 0 to 255."""
    return Pipeline(
        transforms, image_size=size, mean=(0, 0, 0), std=(1 / 255,) * 3, interpolation=interpolation
    )


def test_normalize_equals_torchvision() -> None:
    images = synthetic_photos(4)
    expected = tv.normalize(images.float() / 255, list(MEAN), list(STD))
    torch.testing.assert_close(make_pipeline("normalise")(images), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", [(24, 24), (48, 48)])
def test_normalize_after_resize_equals_torchvision(target: tuple[int, int]) -> None:
    images = synthetic_photos(4)
    actual = make_pipeline("resize(interpolation='bilinear')", target)(images)
    resized = tv.resize(images.float(), list(target), tv.InterpolationMode.BILINEAR, antialias=True)
    expected = tv.normalize(resized / 255, list(MEAN), list(STD))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_random_resized_crop_equals_torchvision() -> None:
    images, keys = synthetic_photos(16, 40, 60), make_keys(16)
    actual = make_unnormalized_pipeline("random_resized_crop(scale=(0.1, 1.0))", (32, 48))(
        images, keys=keys
    )
    windows = np.stack(
        draw_crop_windows(SampleRNG(keys, 0), (40, 60), (0.1, 1.0), (3 / 4, 4 / 3)), 1
    )
    assert len(np.unique(windows, axis=0)) == 16
    mode = tv.InterpolationMode.BICUBIC
    for image, window, actual_image in zip(images, windows.tolist(), actual, strict=True):
        expected = tv.resized_crop(image, *window, [32, 48], mode, antialias=True)
        assert (actual_image - expected.float()).abs().mean() <= 1


def test_random_crop_equals_torchvision() -> None:
    images, keys = synthetic_photos(64), make_keys(64)
    actual = make_unnormalized_pipeline("random_crop(32, padding=4)", (32, 32))(images, keys=keys)
    top, left = draw_crop_offsets(SampleRNG(keys, 0), (8, 8))
    padded = tv.pad(images, [4])
    for index in range(64):
        expected = tv.crop(padded[index], int(top[index]), int(left[index]), 32, 32)
        assert torch.equal(actual[index], expected.float())


@pytest.mark.parametrize("size", [(20, 25), (40, 50), (21, 51)])
def test_center_crop_equals_torchvision(size: tuple[int, int]) -> None:
    images = synthetic_photos(2, 33, 46)
    assert torch.equal(
        make_unnormalized_pipeline("center_crop", size)(images),
        tv.center_crop(images, size).float(),
    )


def test_padding_stays_black_after_an_enlargement() -> None:
    # the padding of the crop must be black, not the mean color
    images = torch.full((8, 3, 32, 32), 200, dtype=torch.uint8)
    transforms = "random_crop(64, padding=32) | resize(interpolation='nearest')"
    actual = make_pipeline(transforms, (128, 128))(images, keys=make_keys(8))
    black = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)])
    white = torch.tensor([(200 / 255 - mean) / std for mean, std in zip(MEAN, STD, strict=True)])
    colors = actual.transpose(0, 1).reshape(3, -1)
    is_close = [(colors - color[:, None]).abs().amax(0) < 1e-5 for color in (black, white)]
    assert (is_close[0] | is_close[1]).all()
    assert is_close[0].float().mean() > 0.3
    padded = make_pipeline("resize(20) | center_crop", (48, 48))(images)  # padded after the resize
    torch.testing.assert_close(padded[0, :, 0, 0], black)


@pytest.mark.parametrize("name,dimension", [("flip", 3), ("vertical_flip", 2)])
def test_flip_equals_torchvision_for_half_of_the_samples(name: str, dimension: int) -> None:
    images, keys = synthetic_photos(64), make_keys(64)
    actual = make_unnormalized_pipeline(f"{name}(p=0.5)", (32, 32))(images, keys=keys)
    is_flipped = SampleRNG(keys, 0).bernoulli(0.5)
    assert 16 < is_flipped.sum() < 48
    for index in range(64):
        expected = images[index : index + 1].float()
        assert torch.equal(
            actual[index], (expected.flip(dimension) if is_flipped[index] else expected)[0]
        )


def test_rotate_equals_torchvision() -> None:
    images, keys = synthetic_photos(16), make_keys(16)
    actual = make_unnormalized_pipeline("rotate(15)", (32, 32))(images, keys=keys)
    angles = SampleRNG(keys, 0).uniform(1, -15, 15)[:, 0]
    assert np.ptp(angles) > 15
    for index, angle in enumerate(angles):
        expected = tv.rotate(images[index], float(angle), tv.InterpolationMode.NEAREST)
        assert (actual[index] - expected.float()).abs().max() < 1e-3


def test_random_erasing_equals_torchvision() -> None:
    images, keys = synthetic_photos(64), make_keys(64)
    actual = make_pipeline("random_erasing(p=0.5, value=0.25)")(images, keys=keys)
    unerased = make_pipeline("normalise")(images)
    rng = SampleRNG(keys, 0)
    is_erased = rng.bernoulli(0.5)
    boxes = np.stack(draw_erase_boxes(rng, (32, 32), (0.02, 0.33), (0.3, 3.3)), 1)
    assert 16 < is_erased.sum() < 48
    for index, (top, left, height, width) in enumerate(boxes.tolist()):
        expected = unerased[index]
        if is_erased[index]:
            expected = tv.erase(expected, top, left, height, width, torch.tensor(0.25))
        assert torch.equal(actual[index], expected)


def test_color_and_rotation_after_an_enlargement_equal_torchvision() -> None:
    transforms = "resize(interpolation='bilinear') | rotate(15) | color_jitter(0.2, 0.2, 0.2)"
    images, keys, mode = synthetic_photos(8), make_keys(8), tv.InterpolationMode.BILINEAR
    enlarged = tv.resize(images.float(), [96, 96], mode, antialias=True)
    angles = SampleRNG(keys, 1).uniform(1, -15, 15)[:, 0]
    rotated = [tv.rotate(image, float(a)) for image, a in zip(enlarged, angles, strict=True)]
    arguments = parse_transform_spec(transforms)[2].arguments
    expected = color_jitter(torch.stack(rotated), SampleRNG(keys, 2), **arguments)
    actual = make_unnormalized_pipeline(transforms, (96, 96))(images, keys=keys)
    assert (actual - expected).abs().max() < 1e-2


@pytest.mark.parametrize(
    "target, dtype",
    [((32, 32), torch.float32), ((48, 48), torch.bfloat16), ((24, 24), torch.float32)],
)
def test_samples_do_not_depend_on_the_batch(target: tuple[int, int], dtype: torch.dtype) -> None:
    images, keys = synthetic_photos(24), make_keys(24)
    pipeline = make_pipeline(ALL_OPERATIONS, target)
    batched = pipeline(images, keys=keys, dtype=dtype)
    assert batched.shape == (24, 3, *target)
    assert batched.dtype == dtype
    single = [
        pipeline(images[index : index + 1], keys=keys[index : index + 1], dtype=dtype)
        for index in range(24)
    ]
    assert torch.equal(torch.cat(single), batched)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    shuffled = pipeline(images[order], keys=keys[order.numpy()], dtype=dtype)
    assert torch.equal(shuffled, batched[order])
    other_epoch = pipeline(images, keys=make_keys(24, epoch=1), dtype=dtype)
    assert ((other_epoch - batched).abs().amax((1, 2, 3)) > 0).all()


def test_samples_without_padding_do_not_depend_on_the_batch() -> None:
    # four of these crops contain none of the padding
    images, keys = synthetic_photos(16, 20, 20), make_keys(16)
    pipeline = make_pipeline("resize(40) | random_crop(padding=4)")
    single = [
        pipeline(images[index : index + 1], keys=keys[index : index + 1]) for index in range(16)
    ]
    assert torch.equal(torch.cat(single), pipeline(images, keys=keys))


@pytest.mark.parametrize("size", [(300, 280), (200, 256)])
@pytest.mark.parametrize("target", [(64, 64), (192, 192)])
def test_large_images_do_not_depend_on_batch_and_threads(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    images, keys = synthetic_photos(4, *size), make_keys(4)
    pipeline = make_pipeline(ALL_OPERATIONS, target)
    batched = pipeline(images, keys=keys)
    num_threads_before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            single = [
                pipeline(images[index : index + 1], keys=keys[index : index + 1])
                for index in range(4)
            ]
            assert torch.equal(torch.cat(single), batched)
    finally:
        torch.set_num_threads(num_threads_before)


SIZES = [(32, 32), (40, 30), (32, 32), (64, 48), (20, 24), (5, 30), (30, 5), (80, 120), (33, 50)]
# every execution path: windows, pads and flips before and after a resize, two resizes in a row,
# pixel operations before and after a resize
TRANSFORM_SPECS = [
    ALL_OPERATIONS,
    *(f"random_resized_crop(interpolation='{name}') | flip" for name in INTERPOLATIONS),
    "center_crop(80) | random_crop(60, padding=50) | flip | resize",
    "resize(40) | random_crop | vertical_flip",
    "resize(40) | random_resized_crop | flip",
    "resize(50) | resize((40, 44)) | random_crop",
    "resize(40) | rotate(20, interpolation='bilinear') | center_crop",
    "resize(40) | rotate(20) | color_jitter(0.4, 0.4, 0.4, 0.1) | random_crop",
    "rand_augment(4) | resize | random_erasing(p=1.0)",
    "resize(fit='contain') | center_crop(fill='mean') | flip",
    "trivial_augment | auto_augment | augmix | three_augment | grayscale | gaussian_blur | resize",
]


@pytest.mark.parametrize("transforms", TRANSFORM_SPECS)
def test_ragged_batches_equal_dense_batches(transforms: str) -> None:
    images = [synthetic_photo(*size, seed) for seed, size in enumerate(SIZES)]
    keys, pipeline = make_keys(len(images)), make_unnormalized_pipeline(transforms, (32, 32))
    ragged = pipeline(images, keys=keys)
    dense = [pipeline(image[None], keys=keys[[index]])[0] for index, image in enumerate(images)]
    # float32 sums of other lengths, and ties between the nearest pixels of a rotation
    difference = (ragged - torch.stack(dense)).abs()
    assert difference.mean() < 1e-4
    assert (difference > 1e-3).float().mean() < 1e-3


@pytest.mark.parametrize("transforms", TRANSFORM_SPECS)
def test_samples_do_not_depend_on_the_sizes_in_the_batch(
    transforms: str,
) -> None:
    images = [synthetic_photo(*size, seed) for seed, size in enumerate(SIZES)]
    keys, pipeline = make_keys(len(images)), make_pipeline(transforms)
    batched = pipeline(images, keys=keys, dtype=torch.bfloat16)
    for index, image in enumerate(images):
        alone = pipeline([image], keys=keys[[index]], dtype=torch.bfloat16)
        assert torch.equal(alone[0], batched[index])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    pipeline.max_part_values = 3 * 100 * 50
    shuffled = pipeline([images[index] for index in order], keys=keys[order], dtype=torch.bfloat16)
    assert torch.equal(shuffled, batched[order])


class OperationCounter(TorchDispatchMode):
    """Counts operations that would be kernels on a GPU; records the largest result in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = self.max_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += not func.is_view
        if isinstance(result, Tensor) and not func.is_view:
            self.max_bytes = max(self.max_bytes, result.nbytes)
        return result


@pytest.mark.parametrize(
    "transforms",
    [
        "random_resized_crop | flip | color_jitter(0.4, 0.4, 0.4) | random_erasing",
        "resize(40) | rotate(10) | random_crop",
    ],
)
def test_number_of_operations_does_not_grow_with_the_sizes(transforms: str) -> None:
    pipeline, counts = make_pipeline(transforms), {}
    for num_sizes in (1, 8, 64):
        images = [
            synthetic_photo(100 + index % num_sizes, 170 - index % num_sizes, index)
            for index in range(64)
        ]
        assert len({image.shape for image in images}) == num_sizes
        batch = RaggedBatch.from_images(images)
        pipeline(batch, keys=make_keys(64))
        with OperationCounter() as counter:
            pipeline(batch, keys=make_keys(64))
        counts[num_sizes] = counter.num_operations

    assert counts[1] == counts[8] == counts[64] < 400


def test_a_panorama_does_not_pad_the_other_images() -> None:
    images = [synthetic_photo(40, 50, seed) for seed in range(30)]
    panorama = synthetic_photo(40, 20_000)
    for transforms in ("random_resized_crop", "color_jitter(contrast=0.5) | resize"):
        pipeline, max_bytes = make_pipeline(transforms), []
        for batch in ([panorama], [*images, panorama]):
            with OperationCounter() as counter:
                pipeline(batch, keys=make_keys(len(batch)))
            max_bytes.append(counter.max_bytes)
        assert max_bytes[1] < 2 * max_bytes[0]


@pytest.mark.parametrize("is_ragged", [False, True])
def test_memory_limit_splits_batches_without_a_difference(is_ragged: bool) -> None:
    photos, keys = synthetic_photos(16), make_keys(16)
    images: Any = list(photos) if is_ragged else photos
    results, counts = [], []
    for limit in (2**26, 3 * 32 * 32 * 4):
        pipeline = make_pipeline("random_resized_crop | flip", (48, 48))
        pipeline.max_part_values = limit
        with OperationCounter() as counter:
            results.append(pipeline(images, keys=keys))
        counts.append(counter.num_operations)
    assert torch.equal(*results)
    assert counts[1] > 3 * counts[0]  # at most four images at a time


def test_does_not_modify_its_input() -> None:
    images = synthetic_photos(8)
    before = images.clone()
    make_pipeline(ALL_OPERATIONS, (48, 48))(images, keys=make_keys(8))
    assert torch.equal(images, before)


def test_autocast_does_not_change_pixels() -> None:
    pipeline, images = (
        make_pipeline("resize(40) | center_crop(40)", (40, 40), train=False),
        synthetic_photos(2),
    )
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = pipeline(images)
        # autocast is still active
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.equal(under_autocast, pipeline(images))


def test_bf16_is_close_to_float32() -> None:
    images, keys = synthetic_photos(16), make_keys(16)
    pipeline = make_pipeline(
        "resize | flip | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.05)", (96, 96)
    )
    float32_result = pipeline(images, keys=keys)
    bf16_result = pipeline(images, keys=keys, dtype=torch.bfloat16).float()
    # 8 bits of mantissa, values up to 2.7, 3 roundings
    assert 0 < (bf16_result - float32_result).abs().max() < 0.06
    assert (bf16_result - float32_result).abs().mean() < 0.005


def test_clips_overshoots() -> None:
    images = (synthetic_photos(2) > 127).to(torch.uint8) * 255
    for dtype in (torch.float32, torch.bfloat16):
        resized = make_unnormalized_pipeline("resize", (96, 96))(images, dtype=dtype)
        assert resized.min() == 0
        # bf16 represents 255; the product with the scale rounds once
        assert resized.max() in (255, 256)
    assert make_unnormalized_pipeline("resize", (20, 20))(images).max() <= 255
    # the first of two resizes overshoots, the second one does not
    pipeline = make_unnormalized_pipeline("resize(48) | resize(interpolation='bilinear')", (20, 20))
    for batch in (images, [images[0], images[1, :, :30]]):
        assert 0 <= pipeline(batch).min() < pipeline(batch).max() <= 255


def test_accepts_keys_as_torch_tensors() -> None:
    images, keys = synthetic_photos(4), make_keys(4)
    pipeline = make_pipeline("flip")
    signed = torch.from_numpy(keys.view(np.int64))
    assert torch.equal(pipeline(images, keys=signed), pipeline(images, keys=keys))


def test_random_operations_need_keys() -> None:
    with pytest.raises(AssertionError, match="no keys"):
        make_pipeline("resize | flip")(synthetic_photos(2))
    assert make_pipeline("resize")(synthetic_photos(2)).shape == (2, 3, 32, 32)


def test_rejects_image_sizes_that_do_not_fit_the_model() -> None:
    pipeline = make_pipeline("resize(32)", train=False)
    for images in (synthetic_photos(2, 50, 70), [synthetic_photo(40, 40), synthetic_photo(50, 70)]):
        with refused("recipe.wrong_size", "50x70", "32x44", "32x32", "center_crop"):
            pipeline(images)
    with refused("recipe.wrong_size", "48x48"):
        make_pipeline("resize(48)")


def mix(transforms: str, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images, targets, mixed images and mixed targets; row i is mixed with row i + 1."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 16, 24, generator=generator)
    targets = torch.eye(count)
    partner = (torch.arange(count) + 1) % count
    mixed = make_pipeline(transforms, (16, 24)).mix_batch(
        images, targets, make_keys(count), partner
    )
    return images, targets, *mixed


def test_mixup_blends_images_and_targets_alike() -> None:
    images, targets, mixed, labels = mix("mixup(0.4)", 32)
    weights = torch.from_numpy(SampleRNG(make_keys(32), 0).beta(0.4)).float()
    assert weights.std() > 0.2
    for index in range(32):
        partner, weight = (index + 1) % 32, weights[index]
        expected = images[index] * weight + images[partner] * (1 - weight)
        torch.testing.assert_close(mixed[index], expected)
        torch.testing.assert_close(
            labels[index], targets[index] * weight + targets[partner] * (1 - weight)
        )


def test_cutmix_targets_are_the_areas() -> None:
    images, targets, mixed, labels = mix("cutmix", 64)
    for index in range(64):
        partner = (index + 1) % 64
        is_own = (mixed[index] == images[index]).all(0)
        is_partner = (mixed[index] == images[partner]).all(0)
        assert (is_own ^ is_partner).all()
        partner_pixels = is_partner.nonzero()
        if len(partner_pixels):  # the pixels form a full rectangle
            extent = partner_pixels.amax(0) - partner_pixels.amin(0) + 1
            assert extent.prod() == len(partner_pixels)
        torch.testing.assert_close(labels[index, index], is_own.float().mean())
        torch.testing.assert_close(labels[index, partner], is_partner.float().mean())
    assert 0.2 < labels.diagonal().mean() < 0.8
    assert torch.equal(targets, torch.eye(64))


def test_mixup_and_cutmix_each_apply_to_half_of_the_rows() -> None:
    images, _, mixed, labels = mix("mixup | cutmix", 256)
    torch.testing.assert_close(labels.sum(1), torch.ones(256))
    partners = images.roll(-1, 0)
    is_cutmix = ((mixed == images) | (mixed == partners)).all(1).flatten(1).all(1)
    assert 0.35 < is_cutmix.float().mean() < 0.65


def test_mixing_does_not_depend_on_the_batch() -> None:
    images, targets = torch.randn(8, 3, 16, 24), torch.eye(8)
    pipeline = make_pipeline("mixup | cutmix", (16, 24))
    partner = torch.arange(8) ^ 1
    batched = pipeline.mix_batch(images, targets, make_keys(8), partner)
    half = pipeline.mix_batch(images[4:], targets[4:], make_keys(8)[4:], torch.arange(4) ^ 1)
    assert torch.equal(half[0], batched[0][4:])
    assert torch.equal(half[1], batched[1][4:])


def test_has_mixing() -> None:
    assert make_pipeline("flip | cutmix").has_mixing
    assert not make_pipeline("flip").has_mixing
