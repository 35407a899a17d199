"""Temperature scaling: the minimum of the cross-entropy, alike however the images are split."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from finetune.evaluation import calibration as calibrate
from finetune.evaluation.calibration import HeldLogits, fit_temperature


def sample(scale: float, *, num: int = 4000, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are `scale` times too sure, and labels drawn from the honest ones."""
    generator = torch.Generator().manual_seed(3)
    honest = 2 * torch.randn(num, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(honest.softmax(1), 1, generator=generator)[:, 0]
    return honest * scale, labels


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_the_temperature_is_the_minimum_that_scipy_finds(scale: float) -> None:
    logits, labels = sample(scale)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / temperature, labels))

    found = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert fit_temperature(logits, labels) == pytest.approx(found.x, rel=1e-5)
    assert fit_temperature(logits, labels) == pytest.approx(scale, rel=0.1)


def test_parts_that_are_added_up_give_the_same() -> None:
    logits, labels = sample(2.5, num=999)
    whole = fit_temperature(logits, labels)
    others = (logits[400:], labels[400:])
    # two processes in step, each adding the other's sums
    barrier = threading.Barrier(2)
    shared: dict[int, torch.Tensor] = {}
    answers: dict[int, float] = {}

    def process(rank: int, part: tuple[torch.Tensor, torch.Tensor]) -> None:
        def total(sums: torch.Tensor) -> torch.Tensor:
            shared[rank] = sums
            barrier.wait()
            both = shared[0] + shared[1]
            barrier.wait()
            return both

        answers[rank] = fit_temperature(*part, total=total)

    threads = [
        threading.Thread(target=process, args=(0, (logits[:400], labels[:400]))),
        threading.Thread(target=process, args=(1, others)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {0: whole, 1: whole}


def test_where_there_is_no_minimum_nothing_is_sharpened_and_the_bound_holds() -> None:
    labels = torch.arange(3).repeat(5)
    right = 0.5 * torch.nn.functional.one_hot(labels, 3)
    assert fit_temperature(right, labels) == 1, "all right: the lowest T would say 100 %"
    assert fit_temperature(200 * right, labels) == 1
    assert fit_temperature(right, (labels + 1) % 3) == pytest.approx(calibrate.HIGHEST)
    assert fit_temperature(torch.zeros(6, 3), labels[:6]) == 1


def test_a_large_split_is_thinned_by_place_and_not_by_process(monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "_MOST_NUMBERS", 70)
    logits, labels = sample(1.5, num=30, classes=7)
    every = HeldLogits(30, 7)
    assert every.stride == 3
    places = np.arange(30)
    every.add(logits, labels, places)
    in_two = HeldLogits(30, 7)
    for part in (slice(0, 11), slice(11, 30)):
        in_two.add(logits[part], labels[part], places[part])
    assert every.fit() == in_two.fit() == fit_temperature(logits[::3].float(), labels[::3])


def test_nothing_held_is_no_error_for_a_process_without_images() -> None:
    held = HeldLogits(1, 5)
    assert held.fit(lambda sums: sums + torch.tensor([0.0, 1.0])) == pytest.approx(1.0)
