"""Losses against their formulas, torch's and scikit-learn's; sums that any cut leaves the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from sklearn.utils.class_weight import compute_class_weight
from timm.loss import AsymmetricLossMultiLabel, BinaryCrossEntropy
from torch import Tensor
from torch.nn import functional

from finetune.recipe.load import OptimSection
from finetune.training.losses import Loss, loss_of

NAMES = ["ant", "bee", "cat", "dog"]
COUNTS = np.array([50, 30, 15, 5])
CPU = torch.device("cpu")


def batch(images: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels, and targets of images that are mixed."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(images, 4, generator=generator)
    labels = torch.randint(4, (images,), generator=generator)
    mixed = functional.one_hot(labels, 4) * 0.7 + functional.one_hot(labels.flip(0), 4) * 0.3
    return logits, labels, mixed


def of(**keys: Any) -> Loss:
    optim = OptimSection.model_validate({"lr": 1e-3, "steps": 1, **keys})
    return loss_of(optim, COUNTS, NAMES, CPU)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_plain_recipe_has_torchs_cross_entropy_to_the_bit(smoothing: float) -> None:
    logits, labels, mixed = batch()
    for targets in (None, mixed):
        expected = functional.cross_entropy(
            logits,
            labels if targets is None else targets,
            reduction="sum",
            label_smoothing=smoothing,
        )
        assert torch.equal(of(label_smoothing=smoothing)(logits, labels, targets), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_are_torchs(smoothing: float) -> None:
    logits, labels, mixed = batch()
    loss = of(class_weights={"dog": 10, "bee": "0.5"}, label_smoothing=smoothing)
    weight = torch.tensor([1.0, 0.5, 1.0, 10.0])
    for targets in (labels, mixed):
        expected = functional.cross_entropy(
            logits, targets, weight, reduction="sum", label_smoothing=smoothing
        )
        given = None if targets is labels else mixed
        torch.testing.assert_close(loss(logits, labels, given), expected)


def test_balanced_weights_are_scikit_learns() -> None:
    labels = np.repeat(np.arange(4), COUNTS)
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    np.testing.assert_allclose(of(class_weights="balanced").weight_K, expected, rtol=1e-6)
    assert (expected * COUNTS).sum() == pytest.approx(COUNTS.sum()), "the rate is as without"
    optim = OptimSection.model_validate({"lr": 1, "steps": 1, "class_weights": "balanced"})
    empty = loss_of(optim, np.array([8, 0, 2]), NAMES[:3], CPU).weight_K
    assert empty is not None
    assert empty.isfinite().all()
    present = compute_class_weight("balanced", classes=np.array([0, 2]), y=[0] * 8 + [2] * 2)
    np.testing.assert_allclose(empty[[0, 2]], present)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 5.0])
def test_focal_loss_is_lins(gamma: float) -> None:
    logits, labels, _ = batch()
    p = logits.softmax(1).gather(1, labels[:, None])[:, 0]
    expected = -((1 - p) ** gamma * p.log())
    torch.testing.assert_close(of(focal_gamma=gamma)(logits, labels, None), expected.sum())
    alpha = torch.tensor([1.0, 1.0, 1.0, 3.0])
    weighted = of(focal_gamma=gamma, class_weights={"dog": 3})(logits, labels, None)
    torch.testing.assert_close(weighted, (alpha[labels] * expected).sum())


def test_focal_loss_of_shares_sums_over_them() -> None:
    logits, labels, mixed = batch()
    shares = 0.9 * mixed + 0.1 / 4
    p = logits.softmax(1)
    expected = -(shares * (1 - p) ** 2 * p.log()).sum()
    found = of(focal_gamma=2, label_smoothing=0.1)(logits, labels, mixed)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("gamma", [0.3, 1.0, 2.0])
def test_focal_loss_of_sure_images_has_a_finite_gradient(gamma: float) -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0, 0.0]] * 2, requires_grad=True)
    of(focal_gamma=gamma)(logits, torch.tensor([0, 1]), None).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_adjusted_logits_are_menons() -> None:
    logits, labels, mixed = batch()
    prior = torch.log(torch.tensor(COUNTS / COUNTS.sum(), dtype=torch.float32))
    for targets in (None, mixed):
        expected = functional.cross_entropy(
            logits + 1.5 * prior, labels if targets is None else targets, reduction="sum"
        )
        torch.testing.assert_close(of(logit_adjustment=1.5)(logits, labels, targets), expected)
    optim = OptimSection.model_validate({"lr": 1, "steps": 1, "logit_adjustment": 1})
    absent = loss_of(optim, np.array([50, 30, 15, 0]), NAMES, CPU)
    assert absent(logits, labels.clamp(max=2), None).isfinite()


@pytest.mark.parametrize(
    "keys",
    [{"class_weights": "balanced", "focal_gamma": 2}, {"logit_adjustment": 1, "focal_gamma": 1}],
)
def test_a_batch_that_is_cut_has_the_same_sum(keys: dict[str, Any]) -> None:
    logits, labels, mixed = batch()
    loss = of(**keys)
    whole = loss(logits, labels, mixed)
    parts = zip(logits.split(20), labels.split(20), mixed.split(20), strict=True)
    torch.testing.assert_close(torch.stack([loss(*part) for part in parts]).sum(), whole)


def test_a_weight_of_an_unknown_class_is_refused() -> None:
    with refused("recipe.unknown_name", "optim.class_weights", "'bea'", "'bee'"):
        of(class_weights={"bea": 2})


def several(images: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels of any number an image, and targets of images that are mixed."""
    logits, _, _ = batch(images)
    labels = (torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.4).byte()
    return logits, labels, 0.7 * labels + 0.3 * labels.flip(0)


def of_several(**keys: Any) -> Any:
    optim = OptimSection.model_validate({"lr": 1e-3, "steps": 1, **keys})
    return loss_of(optim, COUNTS, NAMES, CPU, multilabel=True)


def test_several_labels_have_torchs_binary_cross_entropy() -> None:
    logits, labels, mixed = several()
    for targets in (None, mixed):
        given = labels.float() if targets is None else targets
        expected = functional.binary_cross_entropy_with_logits(logits, given) * len(logits)
        torch.testing.assert_close(of_several()(logits, labels, targets), expected)


def test_their_smoothing_is_timms() -> None:
    logits, labels, _ = batch()
    expected = BinaryCrossEntropy(smoothing=0.1)(logits, labels) * len(logits)
    hot = functional.one_hot(labels, 4).byte()
    torch.testing.assert_close(of_several(label_smoothing=0.1)(logits, hot, None), expected)


@pytest.mark.parametrize("gamma_neg, gamma_pos, clip", [(4, 1, 0.05), (2, 0, 0.2), (3, 2, 0)])
def test_the_asymmetric_loss_is_ridniks(gamma_neg: float, gamma_pos: float, clip: float) -> None:
    logits, labels, mixed = several()
    keys = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
    loss = of_several(asymmetric_loss=keys)
    p = logits.double().sigmoid()
    shifted = (p - clip).clamp(min=0)
    good, bad = (1 - p) ** gamma_pos * p.log(), shifted**gamma_neg * (1 - shifted).log()
    for targets in (None, mixed):
        shares = labels if targets is None else targets
        expected = -(shares * good + (1 - shares) * bad).sum() / 4
        torch.testing.assert_close(loss(logits, labels, targets), expected.float())
    authors = AsymmetricLossMultiLabel(**keys)
    each = [authors(*one) for one in zip(logits.split(1), labels.split(1), strict=True)]
    total = torch.stack(each).sum()  # of float32, in which they take 1 - p
    torch.testing.assert_close(loss(logits, labels, None) * 4, total, rtol=1e-5, atol=0)
    plain = of_several(asymmetric_loss={"gamma_neg": 0, "gamma_pos": 0, "clip": 0})
    torch.testing.assert_close(plain(logits, labels, None), of_several()(logits, labels, None))


@pytest.mark.parametrize("gamma", [0.3, 2.0])
def test_the_asymmetric_loss_of_sure_images_has_a_finite_gradient(gamma: float) -> None:
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    for clip in (0, 0.05):
        keys = {"gamma_neg": gamma, "gamma_pos": gamma, "clip": clip}
        labels = torch.tensor([[1, 0], [1, 0]])
        of_several(asymmetric_loss=keys)(logits, labels, None).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("keys", [{}, {"asymmetric_loss": {}, "label_smoothing": 0.1}])
def test_a_batch_of_several_labels_that_is_cut_has_the_same_sum(keys: dict[str, Any]) -> None:
    logits, labels, mixed = several()
    loss = of_several(**keys)
    parts = zip(logits.split(20), labels.split(20), mixed.split(20), strict=True)
    cut = torch.stack([loss(*part) for part in parts]).sum()
    torch.testing.assert_close(cut, loss(logits, labels, mixed))
