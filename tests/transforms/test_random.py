from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from finetune.transforms.random import (
    Draws,
    crop_offsets,
    crop_windows,
    erase_rectangles,
    mixed_rectangles,
    sample_keys,
    uniform,
)

SAMPLES = 4000
# Both sides are fixed by seeds: a test passes or fails for good. At 1e-3 one true agreement in a
# thousand would have been refused when the seeds were chosen.
ALPHA = 1e-3

# keys of samples 0 and 1 at seed 0, epoch 0; the first draws of operation 2
KEYS = [9735418304920043012, 16657667681619871377]
UNIFORMS = [0.7294608840438066, 0.7179800534132631]


def draws(count: int = SAMPLES, operation: int = 0) -> Draws:
    return Draws(sample_keys(7, 0, np.arange(count)), operation)


def same_distribution(ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic]) -> bool:
    assert ours.shape == theirs.shape
    assert len(ours) == SAMPLES
    return bool(stats.ks_2samp(ours, theirs).pvalue > ALPHA)


def theirs(transform: v2.Transform, size: tuple[int, int], names: str) -> npt.NDArray[np.int64]:
    torch.manual_seed(1)
    image = torch.zeros(3, *size)
    params = [transform.make_params([image]) for _ in range(SAMPLES)]
    return np.array([[one[name] for name in names.split()] for one in params])


def test_keys_depend_on_seed_epoch_and_sample_only() -> None:
    keys = sample_keys(3, 1, np.arange(100))
    assert keys.dtype == np.uint64
    assert np.array_equal(sample_keys(3, 1, [42, 5]), keys[[42, 5]])
    others = [sample_keys(4, 1, np.arange(100)), sample_keys(3, 2, np.arange(100))]
    everything = np.concatenate([keys, *others, sample_keys(1, 3, np.arange(100))])
    assert len(np.unique(everything)) == 400
    assert sample_keys(-1, 0, [0]) != sample_keys(0, 0, [0])


def test_keys_are_fixed_for_good() -> None:
    # a changed hash would silently change every run that is resumed
    assert sample_keys(0, 0, [0, 1]).tolist() == KEYS
    first = uniform(sample_keys(0, 0, [0]), 2, np.arange(2, dtype=np.uint64))
    assert first[0].tolist() == UNIFORMS


def test_draws_are_a_function_of_key_operation_and_number() -> None:
    whole, single = draws(64, 3), Draws(sample_keys(7, 0, [9]), 3)
    assert np.array_equal(whole.uniform(5)[9:10], single.uniform(5))
    assert np.array_equal(whole.uniform(2)[9:10], single.uniform(2))
    assert not np.array_equal(draws(64, 3).uniform(1), draws(64, 4).uniform(1))


def test_uniform_is_uniform_and_independent() -> None:
    values = draws().uniform(4)
    assert values.min() >= 0
    assert values.max() < 1
    for column in values.T:
        assert stats.kstest(column, "uniform").pvalue > ALPHA
    neighbours = np.corrcoef(np.stack([*values.T, draws(operation=1).uniform(1)[:, 0]]))
    assert np.abs(neighbours - np.eye(5)).max() < 0.06  # 4 standard errors of 1 / sqrt(4000)
    serial = np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]
    assert abs(serial) < 0.06


def test_integers_are_uniform() -> None:
    counts = np.bincount(draws().integers(np.full(SAMPLES, 7)), minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts).pvalue > ALPHA


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_beta_has_its_distribution(alpha: float) -> None:
    assert stats.kstest(draws().beta(alpha), "beta", args=(alpha, alpha)).pvalue > ALPHA


def test_chance_takes_its_share() -> None:
    assert abs(draws().chance(0.3).mean() - 0.3) < 0.03  # 4 standard errors
    assert draws().chance(1.0).all()
    assert not draws().chance(0.0).any()


@pytest.mark.parametrize(
    "size,scale,ratio",
    [
        ((32, 32), (0.05, 1.0), (3 / 4, 4 / 3)),
        ((60, 100), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((20, 200), (0.5, 1.0), (3 / 4, 4 / 3)),  # mostly the fallback
        ((200, 20), (0.9, 1.0), (0.9, 1.1)),
    ],
)
def test_crop_windows_are_torchvisions(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    windows = np.stack(crop_windows(draws(), size, scale, ratio), 1)
    reference = theirs(v2.RandomResizedCrop(8, scale, ratio), size, "top left height width")
    for column in range(4):
        assert same_distribution(windows[:, column], reference[:, column])
    areas = windows[:, 2] * windows[:, 3], reference[:, 2] * reference[:, 3]
    assert same_distribution(*areas)
    assert (windows[:, 0] + windows[:, 2] <= size[0]).all()
    assert (windows[:, 1] + windows[:, 3] <= size[1]).all()
    assert windows.min() >= 0


def test_crop_windows_fall_back_to_the_largest_central_window() -> None:
    top, left, height, width = crop_windows(draws(5), (10, 100), (1.0, 1.0), (3 / 4, 4 / 3))
    assert (top == 0).all()
    assert (left == 43).all()
    assert (height == 10).all()
    assert (width == 13).all()


def test_crop_offsets_are_uniform() -> None:
    top, left = crop_offsets(draws(), (8, 3))
    assert stats.chisquare(np.bincount(top, minlength=9)).pvalue > ALPHA
    assert stats.chisquare(np.bincount(left, minlength=4)).pvalue > ALPHA
    assert (top.max(), left.max()) == (8, 3)


def test_erase_rectangles_are_torchvisions() -> None:
    ours = np.stack(erase_rectangles(draws(), (32, 48), (0.02, 0.33), (0.3, 3.3)), 1)
    reference = theirs(v2.RandomErasing(p=1), (32, 48), "i j h w")
    for column in range(4):
        assert same_distribution(ours[:, column], reference[:, column])


def test_erase_rectangles_that_never_fit_are_empty() -> None:
    rectangles = erase_rectangles(draws(50), (32, 32), (1.0, 1.0), (1.0, 1.0))
    assert (rectangles[2] == 0).all()
    assert (rectangles[3] == 0).all()


def test_mixed_rectangles_are_torchvisions() -> None:
    d = draws()
    ours = np.stack(mixed_rectangles(d, (32, 48), d.beta(1.0)), 1)
    transform = v2.CutMix(num_classes=2)
    torch.manual_seed(1)
    image = torch.zeros(2, 3, 32, 48)
    boxes = np.array([transform.make_params([image])["box"] for _ in range(SAMPLES)])
    left, top, right, bottom = boxes.T
    for column, other in enumerate((top, left, bottom - top, right - left)):
        assert same_distribution(ours[:, column], other)
