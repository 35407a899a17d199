"""Temperature scaling: minimizes cross-entropy, independently of how the images are split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from lockstep import run_in_lockstep
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


@pytest.mark.parametrize("scale", [0.3, 1.3, 4.0])
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
    parts = [(logits[:400], labels[:400]), (logits[400:], labels[400:])]
    assert whole == run_in_lockstep(
        lambda rank, accelerator: fit_temperature(
            *parts[rank], all_reduce=lambda sums: accelerator.reduce(sums, "sum")
        )
    )


def test_temperature_stays_within_bounds_without_a_minimum() -> None:
    labels = torch.arange(3).repeat(5)
    correct = 0.5 * torch.nn.functional.one_hot(labels, 3)
    assert fit_temperature(correct, labels) == 1, (
        "all correct: the loss is minimal at T = 0, which would give 100 % confidence"
    )
    assert fit_temperature(200 * correct, labels) == 1
    assert fit_temperature(correct, (labels + 1) % 3) == pytest.approx(calibrate.MAX_TEMPERATURE)
    assert fit_temperature(torch.zeros(6, 3), labels[:6]) == 1


def test_a_temperature_that_does_not_generalize_is_not_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5).repeat(8)
    logits = 6.0 * torch.nn.functional.one_hot(labels, 5) + torch.randn(40, 5, generator=generator)
    logits[7] = logits[7].roll(1)  # one confident mistake among 40 images
    assert fit_temperature(logits, labels) == 1
    # eight times as many images with the same mistake rate: now the same fit is confirmed
    assert abs(fit_temperature(logits.repeat(8, 1), labels.repeat(8)) - 1) > 0.05


def test_large_split_is_subsampled_by_image_index(monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "MAX_KEPT_LOGITS", 70)
    logits, labels = sample_logits(1.5, num=30, classes=7)
    one_process = TemperatureFitter(30, 7)
    assert one_process.stride == 3
    indices = np.arange(30)
    one_process.update(logits, labels, indices)
    two_parts = TemperatureFitter(30, 7)
    for part in (slice(0, 11), slice(11, 30)):
        two_parts.update(logits[part], labels[part], indices[part])
    temperatures = {each.compute(Accelerator(cpu=True)) for each in (one_process, two_parts)}
    assert temperatures == {fit_temperature(logits[::3].float(), labels[::3])}


def test_process_without_logits_can_fit() -> None:
    logits, labels = sample_logits(2.5, num=50)

    def fit_on_rank(rank: int, accelerator: Accelerator) -> float:
        fitter = TemperatureFitter(50, 7)
        if rank == 0:
            fitter.update(logits, labels, np.arange(50))
        return fitter.compute(accelerator)

    assert run_in_lockstep(fit_on_rank) == fit_temperature(logits.float(), labels)


def test_temperature_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 9 * torch.randn(90, 2000, generator=generator)
    labels = torch.multinomial((logits / 3).softmax(1), 1, generator=generator)[:, 0]
    expected = fit_temperature(logits, labels)
    monkeypatch.setattr(calibrate, "LOGITS_PER_CHUNK", 7 * 2000)
    assert fit_temperature(logits, labels) == expected
    assert expected == pytest.approx(3, rel=0.2)
