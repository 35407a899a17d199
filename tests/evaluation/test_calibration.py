"""Temperature scaling: minimizes cross-entropy, independently of how the images are split."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from finetune.evaluation import calibration as calibrate
from finetune.evaluation.calibration import TemperatureFitter, fit_temperature


def sample_logits(
    scale: float, *, num: int = 4000, classes: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits that are `scale` times too confident, and labels drawn without the scaling."""
    generator = torch.Generator().manual_seed(3)
    calibrated = 2 * torch.randn(num, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(calibrated.softmax(1), 1, generator=generator)[:, 0]
    return calibrated * scale, labels


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_temperature_matches_scipys_minimum(scale: float) -> None:
    logits, labels = sample_logits(scale)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / temperature, labels))

    minimum = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert fit_temperature(logits, labels) == pytest.approx(minimum.x, rel=1e-5)
    assert fit_temperature(logits, labels) == pytest.approx(scale, rel=0.1)


def test_two_processes_fit_the_same_temperature() -> None:
    logits, labels = sample_logits(2.5, num=999)
    whole = fit_temperature(logits, labels)
    second_half = (logits[400:], labels[400:])
    # two processes in lockstep; each adds the other's sums
    barrier = threading.Barrier(2)
    shared: dict[int, torch.Tensor] = {}
    temperatures: dict[int, float] = {}

    def fit_on_rank(rank: int, part: tuple[torch.Tensor, torch.Tensor]) -> None:
        def all_reduce(sums: torch.Tensor) -> torch.Tensor:
            shared[rank] = sums
            barrier.wait()
            both = shared[0] + shared[1]
            barrier.wait()
            return both

        temperatures[rank] = fit_temperature(*part, all_reduce=all_reduce)

    threads = [
        threading.Thread(target=fit_on_rank, args=(0, (logits[:400], labels[:400]))),
        threading.Thread(target=fit_on_rank, args=(1, second_half)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert temperatures == {0: whole, 1: whole}


def test_temperature_stays_within_bounds_without_a_minimum() -> None:
    labels = torch.arange(3).repeat(5)
    correct = 0.5 * torch.nn.functional.one_hot(labels, 3)
    assert fit_temperature(correct, labels) == 1, (
        "all correct: the loss is minimal at T = 0, which would give 100 % confidence"
    )
    assert fit_temperature(200 * correct, labels) == 1
    assert fit_temperature(correct, (labels + 1) % 3) == pytest.approx(calibrate.MAX_TEMPERATURE)
    assert fit_temperature(torch.zeros(6, 3), labels[:6]) == 1


def test_large_split_is_subsampled_by_image_index(monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "_MAX_KEPT_LOGITS", 70)
    logits, labels = sample_logits(1.5, num=30, classes=7)
    one_process = TemperatureFitter(30, 7)
    assert one_process.stride == 3
    indices = np.arange(30)
    one_process.update(logits, labels, indices)
    two_parts = TemperatureFitter(30, 7)
    for part in (slice(0, 11), slice(11, 30)):
        two_parts.update(logits[part], labels[part], indices[part])
    assert one_process.fit() == two_parts.fit() == fit_temperature(logits[::3].float(), labels[::3])


def test_process_without_logits_can_fit() -> None:
    fitter = TemperatureFitter(1, 5)
    assert fitter.fit(lambda sums: sums + torch.tensor([0.0, 1.0])) == pytest.approx(1.0)
