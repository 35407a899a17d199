"""Losses against their formulas, torch, timm and scikit-learn; sums over micro-batches."""

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
from finetune.training.losses import ClassificationLoss, build_loss, check_class_weights

NAMES = ["ant", "bee", "cat", "dog"]
COUNTS = np.array([50, 30, 15, 5])
CPU = torch.device("cpu")


def make_batch(images: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels, and soft targets of mixed images."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(images, 4, generator=generator)
    labels = torch.randint(4, (images,), generator=generator)
    mixed = functional.one_hot(labels, 4) * 0.7 + functional.one_hot(labels.flip(0), 4) * 0.3
    return logits, labels, mixed


def make_loss(**keys: Any) -> ClassificationLoss:
    optim = OptimSection.model_validate({"lr": 1e-3, "steps": 1, **keys})
    return build_loss(optim, COUNTS, NAMES, CPU)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_plain_loss_is_bit_identical_to_torch_cross_entropy(smoothing: float) -> None:
    logits, labels, mixed = make_batch()
    for targets in (None, mixed):
        expected = functional.cross_entropy(
            logits,
            labels if targets is None else targets,
            reduction="sum",
            label_smoothing=smoothing,
        )
        assert torch.equal(make_loss(label_smoothing=smoothing)(logits, labels, targets), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_match_torch(smoothing: float) -> None:
    logits, labels, mixed = make_batch()
    loss = make_loss(class_weights={"dog": 10, "bee": "0.5"}, label_smoothing=smoothing)
    weight = torch.tensor([1.0, 0.5, 1.0, 10.0])
    for targets in (labels, mixed):
        expected = functional.cross_entropy(
            logits, targets, weight, reduction="sum", label_smoothing=smoothing
        )
        soft_targets = None if targets is labels else mixed
        torch.testing.assert_close(loss(logits, labels, soft_targets), expected)


def test_balanced_weights_match_scikit_learn() -> None:
    labels = np.repeat(np.arange(4), COUNTS)
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    np.testing.assert_allclose(
        make_loss(class_weights="balanced").class_weight_K, expected, rtol=1e-6
    )
    assert (expected * COUNTS).sum() == pytest.approx(COUNTS.sum()), (
        "the mean weight is 1, so the learning rate keeps its meaning"
    )
    optim = OptimSection.model_validate({"lr": 1, "steps": 1, "class_weights": "balanced"})
    empty = build_loss(optim, np.array([8, 0, 2]), NAMES[:3], CPU).class_weight_K
    assert empty is not None
    assert empty.isfinite().all()
    present = compute_class_weight("balanced", classes=np.array([0, 2]), y=[0] * 8 + [2] * 2)
    np.testing.assert_allclose(empty[[0, 2]], present)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 5.0])
def test_focal_loss_matches_its_formula(gamma: float) -> None:
    logits, labels, _ = make_batch()
    p = logits.softmax(1).gather(1, labels[:, None])[:, 0]
    expected = -((1 - p) ** gamma * p.log())
    torch.testing.assert_close(make_loss(focal_gamma=gamma)(logits, labels, None), expected.sum())
    alpha = torch.tensor([1.0, 1.0, 1.0, 3.0])
    weighted = make_loss(focal_gamma=gamma, class_weights={"dog": 3})(logits, labels, None)
    torch.testing.assert_close(weighted, (alpha[labels] * expected).sum())


def test_focal_loss_with_soft_targets_sums_over_classes() -> None:
    logits, labels, mixed = make_batch()
    targets = 0.9 * mixed + 0.1 / 4
    p = logits.softmax(1)
    expected = -(targets * (1 - p) ** 2 * p.log()).sum()
    actual = make_loss(focal_gamma=2, label_smoothing=0.1)(logits, labels, mixed)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("gamma", [0.3, 1.0, 2.0])
def test_focal_loss_of_sure_images_has_a_finite_gradient(gamma: float) -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0, 0.0]] * 2, requires_grad=True)
    make_loss(focal_gamma=gamma)(logits, torch.tensor([0, 1]), None).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_adjusted_logits_are_menons() -> None:
    logits, labels, mixed = make_batch()
    prior = torch.log(torch.tensor(COUNTS / COUNTS.sum(), dtype=torch.float32))
    for targets in (None, mixed):
        expected = functional.cross_entropy(
            logits + 1.5 * prior, labels if targets is None else targets, reduction="sum"
        )
        torch.testing.assert_close(
            make_loss(logit_adjustment=1.5)(logits, labels, targets), expected
        )
    optim = OptimSection.model_validate({"lr": 1, "steps": 1, "logit_adjustment": 1})
    absent = build_loss(optim, np.array([50, 30, 15, 0]), NAMES, CPU)
    assert absent(logits, labels.clamp(max=2), None).isfinite()


@pytest.mark.parametrize(
    "keys",
    [{"class_weights": "balanced", "focal_gamma": 2}, {"logit_adjustment": 1, "focal_gamma": 1}],
)
def test_loss_of_micro_batches_sums_to_the_loss_of_the_batch(keys: dict[str, Any]) -> None:
    logits, labels, mixed = make_batch()
    loss = make_loss(**keys)
    whole = loss(logits, labels, mixed)
    micro_batches = zip(logits.split(20), labels.split(20), mixed.split(20), strict=True)
    torch.testing.assert_close(torch.stack([loss(*part) for part in micro_batches]).sum(), whole)


def test_class_weight_of_an_unknown_class_is_refused() -> None:
    with refused("recipe.unknown_name", "optim.class_weights", "'bea'", "'bee'"):
        optim = OptimSection.model_validate({"lr": 1, "steps": 1, "class_weights": {"bea": 2}})
        check_class_weights(optim, NAMES)


def make_multilabel_batch(images: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, multi-label targets, and soft targets of mixed images."""
    logits, _, _ = make_batch(images)
    labels = (torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.4).byte()
    return logits, labels, 0.7 * labels + 0.3 * labels.flip(0)


def make_multilabel_loss(**keys: Any) -> Any:
    optim = OptimSection.model_validate({"lr": 1e-3, "steps": 1, **keys})
    return build_loss(optim, COUNTS, NAMES, CPU, multilabel=True)


def test_multilabel_loss_matches_torch_binary_cross_entropy() -> None:
    logits, labels, mixed = make_multilabel_batch()
    for targets in (None, mixed):
        float_targets = labels.float() if targets is None else targets
        expected = functional.binary_cross_entropy_with_logits(logits, float_targets) * len(logits)
        torch.testing.assert_close(make_multilabel_loss()(logits, labels, targets), expected)


def test_multilabel_smoothing_matches_timm() -> None:
    logits, labels, _ = make_batch()
    expected = BinaryCrossEntropy(smoothing=0.1)(logits, labels) * len(logits)
    one_hot = functional.one_hot(labels, 4).byte()
    torch.testing.assert_close(
        make_multilabel_loss(label_smoothing=0.1)(logits, one_hot, None), expected
    )


@pytest.mark.parametrize("gamma_neg, gamma_pos, clip", [(4, 1, 0.05), (2, 0, 0.2), (3, 2, 0)])
def test_asymmetric_loss_matches_its_formula_and_timm(
    gamma_neg: float, gamma_pos: float, clip: float
) -> None:
    logits, labels, mixed = make_multilabel_batch()
    keys = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
    loss = make_multilabel_loss(asymmetric_loss=keys)
    p = logits.double().sigmoid()
    shifted = (p - clip).clamp(min=0)
    positive_term, negative_term = (
        (1 - p) ** gamma_pos * p.log(),
        shifted**gamma_neg * (1 - shifted).log(),
    )
    for targets in (None, mixed):
        target_values = labels if targets is None else targets
        expected = -(target_values * positive_term + (1 - target_values) * negative_term).sum() / 4
        torch.testing.assert_close(loss(logits, labels, targets), expected.float())
    reference = AsymmetricLossMultiLabel(**keys)
    per_image = [reference(*image) for image in zip(logits.split(1), labels.split(1), strict=True)]
    total = torch.stack(per_image).sum()  # the reference computes 1 - p in float32
    torch.testing.assert_close(loss(logits, labels, None) * 4, total, rtol=1e-5, atol=0)
    plain = make_multilabel_loss(asymmetric_loss={"gamma_neg": 0, "gamma_pos": 0, "clip": 0})
    torch.testing.assert_close(
        plain(logits, labels, None), make_multilabel_loss()(logits, labels, None)
    )


@pytest.mark.parametrize("gamma", [0.3, 2.0])
def test_asymmetric_loss_has_a_finite_gradient_at_extreme_logits(gamma: float) -> None:
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    for clip in (0, 0.05):
        keys = {"gamma_neg": gamma, "gamma_pos": gamma, "clip": clip}
        labels = torch.tensor([[1, 0], [1, 0]])
        make_multilabel_loss(asymmetric_loss=keys)(logits, labels, None).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("keys", [{}, {"asymmetric_loss": {}, "label_smoothing": 0.1}])
def test_multilabel_loss_of_micro_batches_sums_to_the_loss_of_the_batch(
    keys: dict[str, Any],
) -> None:
    logits, labels, mixed = make_multilabel_batch()
    loss = make_multilabel_loss(**keys)
    micro_batches = zip(logits.split(20), labels.split(20), mixed.split(20), strict=True)
    total = torch.stack([loss(*part) for part in micro_batches]).sum()
    torch.testing.assert_close(total, loss(logits, labels, mixed))
