# B batch, C channels, H W source pixels, h w target pixels, K classes

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from test_geometry import photo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2 import functional as tv

from finetune.transforms import pipeline as augment
from finetune.transforms.color import color_jitter
from finetune.transforms.grammar import parse
from finetune.transforms.operations import INTERPOLATIONS
from finetune.transforms.pipeline import Pipeline, sample_keys
from finetune.transforms.ragged import Ragged
from finetune.transforms.random import Draws, Keys, crop_offsets, crop_windows, erase_rectangles

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EVERYTHING = (
    "random_resized_crop(scale=(0.2, 1.0)) | flip | vertical_flip | rotate(30) | "
    "color_jitter(0.4, 0.4, 0.4, 0.1) | rand_augment(3) | random_erasing(p=0.7)"
)


def photos(count: int, height: int = 32, width: int = 32) -> Tensor:
    return torch.stack([photo(height, width, seed) for seed in range(count)])


def keys(count: int, epoch: int = 0) -> Keys:
    return sample_keys(0, epoch, np.arange(count))


def pipeline(sentence: str, size: tuple[int, int] = (32, 32), *, train: bool = True) -> Pipeline:
    return Pipeline(sentence, image_size=size, mean=MEAN, std=STD, train=train)


def plain(sentence: str, size: tuple[int, int], interpolation: str = "bicubic") -> Pipeline:
    """Return a pipeline whose result is in levels from 0 to 255."""
    return Pipeline(
        sentence, image_size=size, mean=(0, 0, 0), std=(1 / 255,) * 3, interpolation=interpolation
    )


def test_normalisation_is_torchvisions() -> None:
    images = photos(4)
    theirs = tv.normalize(images.float() / 255, list(MEAN), list(STD))
    torch.testing.assert_close(pipeline("normalise")(images), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", [(24, 24), (48, 48)])
def test_normalisation_is_the_same_on_either_side_of_a_resize(target: tuple[int, int]) -> None:
    images = photos(4)
    ours = pipeline("resize(interpolation='bilinear')", target)(images)
    big = tv.resize(images.float(), list(target), tv.InterpolationMode.BILINEAR, antialias=True)
    theirs = tv.normalize(big / 255, list(MEAN), list(STD))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_random_resized_crop_is_torchvisions() -> None:
    images, names = photos(16, 40, 60), keys(16)
    ours = plain("random_resized_crop(scale=(0.1, 1.0))", (32, 48))(images, keys=names)
    windows = np.stack(crop_windows(Draws(names, 0), (40, 60), (0.1, 1.0), (3 / 4, 4 / 3)), 1)
    assert len(np.unique(windows, axis=0)) == 16
    mode = tv.InterpolationMode.BICUBIC
    for image, window, one in zip(images, windows.tolist(), ours, strict=True):
        theirs = tv.resized_crop(image, *window, [32, 48], mode, antialias=True)
        assert (one - theirs.float()).abs().mean() <= 1


def test_random_crop_is_torchvisions() -> None:
    images, names = photos(64), keys(64)
    ours = plain("random_crop(32, padding=4)", (32, 32))(images, keys=names)
    top, left = crop_offsets(Draws(names, 0), (8, 8))
    padded = tv.pad(images, [4])
    for place in range(64):
        theirs = tv.crop(padded[place], int(top[place]), int(left[place]), 32, 32)
        assert torch.equal(ours[place], theirs.float())


@pytest.mark.parametrize("size", [(20, 25), (40, 50), (21, 51)])
def test_center_crop_is_torchvisions(size: tuple[int, int]) -> None:
    images = photos(2, 33, 46)
    assert torch.equal(plain("center_crop", size)(images), tv.center_crop(images, size).float())


def test_padding_keeps_black_beside_an_enlargement() -> None:
    # the crop's zeros must be black, not the mean colour
    images = torch.full((8, 3, 32, 32), 200, dtype=torch.uint8)
    sentence = "random_crop(64, padding=32) | resize(interpolation='nearest')"
    ours = pipeline(sentence, (128, 128))(images, keys=keys(8))
    black = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)])
    white = torch.tensor([(200 / 255 - m) / s for m, s in zip(MEAN, STD, strict=True)])
    colours = ours.transpose(0, 1).reshape(3, -1)
    near = [(colours - one[:, None]).abs().amax(0) < 1e-5 for one in (black, white)]
    assert (near[0] | near[1]).all()
    assert near[0].float().mean() > 0.3
    grown = pipeline("resize(20) | center_crop", (48, 48))(images)  # zeros after the resampling
    torch.testing.assert_close(grown[0, :, 0, 0], black)


@pytest.mark.parametrize("name,dimension", [("flip", 3), ("vertical_flip", 2)])
def test_flip_is_torchvisions_for_half_of_the_samples(name: str, dimension: int) -> None:
    images, names = photos(64), keys(64)
    ours = plain(f"{name}(p=0.5)", (32, 32))(images, keys=names)
    flipped = Draws(names, 0).chance(0.5)
    assert 16 < flipped.sum() < 48
    for place in range(64):
        theirs = images[place : place + 1].float()
        assert torch.equal(ours[place], (theirs.flip(dimension) if flipped[place] else theirs)[0])


def test_rotate_is_torchvisions() -> None:
    images, names = photos(16), keys(16)
    ours = plain("rotate(15)", (32, 32))(images, keys=names)
    angles = Draws(names, 0).uniform(1, -15, 15)[:, 0]
    assert np.ptp(angles) > 15
    for place, angle in enumerate(angles):
        theirs = tv.rotate(images[place], float(angle), tv.InterpolationMode.NEAREST)
        assert (ours[place] - theirs.float()).abs().max() < 1e-3


def test_random_erasing_is_torchvisions() -> None:
    images, names = photos(64), keys(64)
    ours = pipeline("random_erasing(p=0.5, value=0.25)")(images, keys=names)
    clean = pipeline("normalise")(images)
    draws = Draws(names, 0)
    taken = draws.chance(0.5)
    boxes = np.stack(erase_rectangles(draws, (32, 32), (0.02, 0.33), (0.3, 3.3)), 1)
    assert 16 < taken.sum() < 48
    for place, (top, left, height, width) in enumerate(boxes.tolist()):
        theirs = clean[place]
        if taken[place]:
            theirs = tv.erase(theirs, top, left, height, width, torch.tensor(0.25))
        assert torch.equal(ours[place], theirs)


def test_moving_colour_before_an_enlargement_changes_little() -> None:
    sentence = "resize(interpolation='bilinear') | flip | color_jitter(0.2, 0.2, 0.2)"
    run, names = plain(sentence, (96, 96)), keys(16)

    def difference(images: Tensor) -> Tensor:
        size, mode = [96, 96], tv.InterpolationMode.BILINEAR
        big = tv.resize(images.float(), size, mode, antialias=True)
        flipped = torch.from_numpy(Draws(names, 1).chance(0.5)).view(-1, 1, 1, 1)
        big = torch.where(flipped, big.flip(3), big)
        written = color_jitter(big, Draws(names, 2), **parse(sentence)[2].arguments)
        return (run(images, keys=names) - written).abs()

    # these operations are linear, and the mean grey of an image is nearly that of its enlargement
    assert difference(photos(16) // 2 + 60).max() < 1
    # but for the cut at 0 and 255, which then falls before the interpolation and not after it
    assert difference(photos(16)).mean() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [(32, 32), (48, 48), (24, 24)])
def test_a_sample_is_the_same_in_every_batch(dtype: torch.dtype, target: tuple[int, int]) -> None:
    images, names = photos(24), keys(24)
    run = pipeline(EVERYTHING, target)
    whole = run(images, keys=names, dtype=dtype)
    assert whole.shape == (24, 3, *target)
    assert whole.dtype == dtype
    single = [run(images[i : i + 1], keys=names[i : i + 1], dtype=dtype) for i in range(24)]
    assert torch.equal(torch.cat(single), whole)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    shuffled = run(images[order], keys=names[order.numpy()], dtype=dtype)
    assert torch.equal(shuffled, whole[order])
    other = run(images, keys=keys(24, epoch=1), dtype=dtype)
    assert ((other - whole).abs().amax((1, 2, 3)) > 0).all()


@pytest.mark.parametrize("size", [(300, 280), (200, 256)])
@pytest.mark.parametrize("target", [(64, 64), (192, 192)])
def test_large_images_are_the_same_in_every_batch_and_on_every_number_of_threads(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    images, names = photos(4, *size), keys(4)
    run = pipeline(EVERYTHING, target)
    whole = run(images, keys=names)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            single = [run(images[i : i + 1], keys=names[i : i + 1]) for i in range(4)]
            assert torch.equal(torch.cat(single), whole)
    finally:
        torch.set_num_threads(threads)


SIZES = [(32, 32), (40, 30), (32, 32), (64, 48), (20, 24), (5, 90), (90, 5), (100, 150), (33, 50)]
# each way of an operation: windows, pads and flips before and after a resize, two resizes in a row,
# operations on pixels before and after, and moved before it for some of the sizes
SENTENCES = [
    EVERYTHING,
    *(f"random_resized_crop(interpolation='{kernel}') | flip" for kernel in INTERPOLATIONS),
    "center_crop(80) | random_crop(60, padding=50) | flip | resize",
    "resize(40) | random_crop | vertical_flip",
    "resize(40) | random_resized_crop | flip",
    "resize(50) | resize((40, 44)) | random_crop",
    "resize(40) | rotate(20, interpolation='bilinear') | center_crop",
    "resize(40) | rotate(20) | color_jitter(0.4, 0.4, 0.4, 0.1) | random_crop",
    "rand_augment(4) | resize | random_erasing(p=1.0)",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_images_of_any_sizes_are_those_of_one_size(sentence: str) -> None:
    images = [photo(*size, seed) for seed, size in enumerate(SIZES * 3)]
    names, run = keys(len(images)), plain(sentence, (32, 32))
    ragged = run(images, keys=names)
    alike = [run(one[None], keys=names[[place]])[0] for place, one in enumerate(images)]
    # sums of other lengths in float32, a nearest pixel of a rotation that lies on a tie
    difference = (ragged - torch.stack(alike)).abs()
    assert difference.mean() < 1e-4
    assert (difference > 1e-3).float().mean() < 1e-3


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sample_is_the_same_among_any_sizes(
    sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [photo(*size, seed) for seed, size in enumerate(SIZES)]
    names, run = keys(len(images)), pipeline(sentence)
    whole = run(images, keys=names, dtype=torch.bfloat16)
    for place, image in enumerate(images):
        alone = run([image], keys=names[[place]], dtype=torch.bfloat16)
        assert torch.equal(alone[0], whole[place])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    monkeypatch.setattr(augment, "_CHUNK_VALUES", 3 * 100 * 50)
    shuffled = run([images[place] for place in order], keys=names[order], dtype=torch.bfloat16)
    assert torch.equal(shuffled, whole[order])


class Operations(TorchDispatchMode):
    """Counts what would be kernels and copies on a GPU, and the largest result in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view
        if isinstance(result, Tensor) and not func.is_view:
            self.largest = max(self.largest, result.nbytes)
        return result


@pytest.mark.parametrize(
    "sentence",
    [
        "random_resized_crop | flip",
        "random_resized_crop | flip | color_jitter(0.4, 0.4, 0.4) | random_erasing",
        "resize(40) | center_crop",
        "resize(40) | rotate(10) | random_crop",
    ],
)
def test_operations_do_not_grow_with_the_number_of_sizes(sentence: str) -> None:
    run, counts = pipeline(sentence), {}
    for number in (1, 8, 64):  # all are larger than the result: one order of operations
        images = [photo(100 + i % number, 170 - i % number, i) for i in range(64)]
        assert len({image.shape for image in images}) == number
        batch = Ragged.of(images)
        run(batch, keys=keys(64))
        with Operations() as operations:
            run(batch, keys=keys(64))
        counts[number] = operations.count

    assert counts[1] == counts[8] == counts[64] < 400


def test_a_panorama_makes_no_canvas_of_its_size_for_all() -> None:
    images = [photo(40, 50, seed) for seed in range(30)]
    panorama = photo(40, 20_000)
    for sentence in ("random_resized_crop", "color_jitter(contrast=0.5) | resize"):
        run, largest = pipeline(sentence), []
        for batch in ([panorama], [*images, panorama]):
            with Operations() as operations:
                run(batch, keys=keys(len(batch)))
            largest.append(operations.largest)
        assert largest[1] < 2 * largest[0]


def test_memory_limit_splits_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    images, names = photos(10), keys(10)
    run = pipeline(EVERYTHING, (48, 48))
    whole, ragged = run(images, keys=names), run(list(images), keys=names)
    monkeypatch.setattr(augment, "_CHUNK_VALUES", 3 * 32 * 32 * 4)
    assert [len(part) for part in augment._chunks(10, (32, 32))] == [4, 4, 2]
    assert torch.equal(run(images, keys=names), whole)
    assert torch.equal(run(list(images), keys=names), ragged)


def test_the_images_given_are_not_changed() -> None:
    images = photos(8)
    before = images.clone()
    pipeline(EVERYTHING, (48, 48))(images, keys=keys(8))
    assert torch.equal(images, before)


def test_autocast_changes_no_pixel() -> None:
    prepare, images = pipeline("resize(40) | center_crop(40)", (40, 40), train=False), photos(2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = prepare(images)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16  # it goes on
    assert torch.equal(inside, prepare(images))


def test_bf16_is_near_float32() -> None:
    images, names = photos(16), keys(16)
    run = pipeline("resize | flip | rotate(15) | color_jitter(0.2, 0.2, 0.2, 0.05)", (96, 96))
    exact = run(images, keys=names)
    near = run(images, keys=names, dtype=torch.bfloat16).float()
    assert (
        0 < (near - exact).abs().max() < 0.06
    )  # 8 bits of mantissa, values up to 2.7, 3 roundings
    assert (near - exact).abs().mean() < 0.005


def test_overshoots_are_cut_as_in_an_image() -> None:
    images = (photos(2) > 127).to(torch.uint8) * 255
    for dtype in (torch.float32, torch.bfloat16):
        bright = plain("resize", (96, 96))(images, dtype=dtype)
        assert bright.min() == 0
        assert bright.max() in (255, 256)  # 255 in bf16 is 255; the product of scale rounds once
    assert plain("resize", (20, 20))(images).max() <= 255


def test_keys_from_torch_are_the_same_keys() -> None:
    images, names = photos(4), keys(4)
    run = pipeline("flip")
    signed = torch.from_numpy(names.view(np.int64))
    assert torch.equal(run(images, keys=signed), run(images, keys=names))


def test_random_operations_need_keys_and_training() -> None:
    with pytest.raises(AssertionError, match="no keys"):
        pipeline("resize | flip")(photos(2))
    with refused("recipe.conflict", "flip"):
        pipeline("resize | flip", train=False)
    assert pipeline("resize | center_crop", train=False)(photos(2)).shape == (2, 3, 32, 32)


def test_sources_that_cannot_end_at_the_models_size() -> None:
    run = pipeline("resize(32)", train=False)
    assert run(photos(2, 50, 50)).shape == (2, 3, 32, 32)
    with refused("recipe.wrong_size", "50x70", "32x44", "32x32", "center_crop"):
        run(photos(2, 50, 70))
    with refused("recipe.wrong_size", "48x48"):
        pipeline("resize(48)")


def test_describe_tells_the_order() -> None:
    text = pipeline("resize | rotate(3) | mixup", (64, 64)).describe((32, 32))
    assert text.splitlines()[0] == "rotate: at 32x32 (moved before the enlargement)"
    assert text.splitlines()[-2:] == ["normalise", "mixup"]


def mixing(sentence: str, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images, targets and both mixed; row i is mixed with the next."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 16, 24, generator=generator)
    targets = torch.eye(count)
    partner = (torch.arange(count) + 1) % count
    mixed = pipeline(sentence, (16, 24)).mix(images, targets, keys(count), partner)
    return images, targets, *mixed


def test_mixup_blends_images_and_targets_alike() -> None:
    images, targets, mixed, labels = mixing("mixup(0.4)", 32)
    share = torch.from_numpy(Draws(keys(32), 0).beta(0.4)).float()
    assert share.std() > 0.2
    for place in range(32):
        mate, weight = (place + 1) % 32, share[place]
        expected = images[place] * weight + images[mate] * (1 - weight)
        torch.testing.assert_close(mixed[place], expected)
        torch.testing.assert_close(
            labels[place], targets[place] * weight + targets[mate] * (1 - weight)
        )


def test_cutmix_targets_are_the_areas() -> None:
    images, targets, mixed, labels = mixing("cutmix", 64)
    for place in range(64):
        mate = (place + 1) % 64
        own = (mixed[place] == images[place]).all(0)
        other = (mixed[place] == images[mate]).all(0)
        assert (own ^ other).all()
        inside = other.nonzero()
        if len(inside):  # a full rectangle
            extent = inside.amax(0) - inside.amin(0) + 1
            assert extent.prod() == len(inside)
        torch.testing.assert_close(labels[place, place], own.float().mean())
        torch.testing.assert_close(labels[place, mate], other.float().mean())
    assert 0.2 < labels.diagonal().mean() < 0.8
    assert torch.equal(targets, torch.eye(64))


def test_both_mixes_share_the_rows() -> None:
    images, _, mixed, labels = mixing("mixup | cutmix", 256)
    torch.testing.assert_close(labels.sum(1), torch.ones(256))
    neighbours = images.roll(-1, 0)
    copied = ((mixed == images) | (mixed == neighbours)).all(1).flatten(1).all(1)
    assert 0.35 < copied.float().mean() < 0.65


def test_a_row_is_mixed_alike_in_every_batch() -> None:
    images, targets = torch.randn(8, 3, 16, 24), torch.eye(8)
    run = pipeline("mixup | cutmix", (16, 24))
    partner = torch.arange(8) ^ 1
    whole = run.mix(images, targets, keys(8), partner)
    half = run.mix(images[4:], targets[4:], keys(8)[4:], torch.arange(4) ^ 1)
    assert torch.equal(half[0], whole[0][4:])
    assert torch.equal(half[1], whole[1][4:])


def test_mixes_is_told_by_the_sentence() -> None:
    assert pipeline("flip | cutmix").mixes
    assert not pipeline("flip").mixes
