from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from finetune.transforms.mixing import draw_cutmix_boxes
from finetune.transforms.sample_rng import (
    SampleRNG,
    draw_crop_offsets,
    draw_crop_windows,
    draw_erase_boxes,
    keyed_uniform,
    sample_keys,
)

NUM_SAMPLES = 4000
# Seeds fix both samples, so a test always passes or always fails. At this level, one correct
# distribution in a thousand would have been rejected when the seeds were chosen.
ALPHA = 1e-3

# keys of samples 0 and 1 with seed 0 in epoch 0, and the first draws of operation 2
EXPECTED_KEYS = [9735418304920043012, 16657667681619871377]
EXPECTED_UNIFORMS = [0.7294608840438066, 0.7179800534132631]


def make_rng(count: int = NUM_SAMPLES, operation: int = 0) -> SampleRNG:
    return SampleRNG(sample_keys(7, 0, np.arange(count)), operation)


def have_same_distribution(first: npt.NDArray[np.generic], second: npt.NDArray[np.generic]) -> bool:
    assert first.shape == second.shape
    assert len(first) == NUM_SAMPLES
    return bool(stats.ks_2samp(first, second).pvalue > ALPHA)


def torchvision_params(
    transform: v2.Transform, size: tuple[int, int], names: str
) -> npt.NDArray[np.int64]:
    torch.manual_seed(1)
    image = torch.zeros(3, *size)
    params = [transform.make_params([image]) for _ in range(NUM_SAMPLES)]
    return np.array([[draw[name] for name in names.split()] for draw in params])


def test_sample_keys_depend_on_seed_epoch_and_sample_only() -> None:
    keys = sample_keys(3, 1, np.arange(100))
    assert keys.dtype == np.uint64
    assert np.array_equal(sample_keys(3, 1, [42, 5]), keys[[42, 5]])
    other_keys = [sample_keys(4, 1, np.arange(100)), sample_keys(3, 2, np.arange(100))]
    all_keys = np.concatenate([keys, *other_keys, sample_keys(1, 3, np.arange(100))])
    assert len(np.unique(all_keys)) == 400
    assert sample_keys(-1, 0, [0]) != sample_keys(0, 0, [0])


def test_keys_never_change() -> None:
    # a changed hash would silently change every resumed run
    assert sample_keys(0, 0, [0, 1]).tolist() == EXPECTED_KEYS
    uniforms = keyed_uniform(sample_keys(0, 0, [0]), 2, np.arange(2, dtype=np.uint64))
    assert uniforms[0].tolist() == EXPECTED_UNIFORMS


def test_draws_depend_on_key_operation_and_index_only() -> None:
    batch, single = make_rng(64, 3), SampleRNG(sample_keys(7, 0, [9]), 3)
    assert np.array_equal(batch.uniform(5)[9:10], single.uniform(5))
    assert np.array_equal(batch.uniform(2)[9:10], single.uniform(2))
    assert not np.array_equal(make_rng(64, 3).uniform(1), make_rng(64, 4).uniform(1))


def test_uniform_is_uniform_and_independent() -> None:
    values = make_rng().uniform(4)
    assert values.min() >= 0
    assert values.max() < 1
    for column in values.T:
        assert stats.kstest(column, "uniform").pvalue > ALPHA
    correlations = np.corrcoef(np.stack([*values.T, make_rng(operation=1).uniform(1)[:, 0]]))
    assert np.abs(correlations - np.eye(5)).max() < 0.06  # 4 standard errors of 1 / sqrt(4000)
    serial_correlation = np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]
    assert abs(serial_correlation) < 0.06


def test_integers_are_uniform() -> None:
    counts = np.bincount(make_rng().integers(np.full(NUM_SAMPLES, 7)), minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts).pvalue > ALPHA


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_beta_has_the_beta_distribution(alpha: float) -> None:
    assert stats.kstest(make_rng().beta(alpha), "beta", args=(alpha, alpha)).pvalue > ALPHA


def test_bernoulli_has_its_probability() -> None:
    assert abs(make_rng().bernoulli(0.3).mean() - 0.3) < 0.03  # 4 standard errors
    assert make_rng().bernoulli(1.0).all()
    assert not make_rng().bernoulli(0.0).any()


@pytest.mark.parametrize(
    "size,scale,ratio",
    [
        ((32, 32), (0.05, 1.0), (3 / 4, 4 / 3)),
        ((60, 100), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((20, 200), (0.5, 1.0), (3 / 4, 4 / 3)),  # mostly uses the fallback
        pytest.param((200, 20), (0.9, 1.0), (0.9, 1.1), marks=pytest.mark.faults),
    ],
)
def test_crop_windows_have_the_distribution_of_torchvision(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    windows = np.stack(draw_crop_windows(make_rng(), size, scale, ratio), 1)
    reference = torchvision_params(
        v2.RandomResizedCrop(8, scale, ratio), size, "top left height width"
    )
    for column in range(4):
        assert have_same_distribution(windows[:, column], reference[:, column])
    areas = windows[:, 2] * windows[:, 3], reference[:, 2] * reference[:, 3]
    assert have_same_distribution(*areas)
    assert (windows[:, 0] + windows[:, 2] <= size[0]).all()
    assert (windows[:, 1] + windows[:, 3] <= size[1]).all()
    assert windows.min() >= 0


def test_crop_windows_fall_back_to_the_largest_central_window() -> None:
    top, left, height, width = draw_crop_windows(make_rng(5), (10, 100), (1.0, 1.0), (3 / 4, 4 / 3))
    assert (top == 0).all()
    assert (left == 43).all()
    assert (height == 10).all()
    assert (width == 13).all()


def test_crop_offsets_are_uniform() -> None:
    top, left = draw_crop_offsets(make_rng(), (8, 3))
    assert stats.chisquare(np.bincount(top, minlength=9)).pvalue > ALPHA
    assert stats.chisquare(np.bincount(left, minlength=4)).pvalue > ALPHA
    assert (top.max(), left.max()) == (8, 3)


def test_erase_boxes_have_the_distribution_of_torchvision() -> None:
    ours = np.stack(draw_erase_boxes(make_rng(), (32, 48), (0.02, 0.33), (0.3, 3.3)), 1)
    reference = torchvision_params(v2.RandomErasing(p=1), (32, 48), "i j h w")
    for column in range(4):
        assert have_same_distribution(ours[:, column], reference[:, column])


def test_erase_boxes_that_never_fit_are_empty() -> None:
    boxes = draw_erase_boxes(make_rng(50), (32, 32), (1.0, 1.0), (1.0, 1.0))
    assert (boxes[2] == 0).all()
    assert (boxes[3] == 0).all()


def test_cutmix_boxes_have_the_distribution_of_torchvision() -> None:
    rng = make_rng()
    ours = np.stack(draw_cutmix_boxes(rng, (32, 48), rng.beta(1.0)), 1)
    transform = v2.CutMix(num_classes=2)
    torch.manual_seed(1)
    image = torch.zeros(2, 3, 32, 48)
    boxes = np.array([transform.make_params([image])["box"] for _ in range(NUM_SAMPLES)])
    left, top, right, bottom = boxes.T
    for column, expected in enumerate((top, left, bottom - top, right - left)):
        assert have_same_distribution(ours[:, column], expected)
