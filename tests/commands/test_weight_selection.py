"""Comparing pretrained weights by their frozen features."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from finetune.commands import weight_selection
from finetune.commands.weight_selection import (
    Candidate,
    Score,
    choose_image_sizes,
    leave_one_out_accuracy,
    measure_seconds_per_image,
    score_candidates,
    sort_scores,
)
from finetune.errors import RecipeError
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe

TI = Candidate("embedded:vit_ti", 32, 3e-4, "")
NANO = Candidate("embedded:vit_nano", 32, 1e-3, "")


@pytest.mark.parametrize(
    "pretrained, side, sizes",
    [
        (224, 32, [128, 64]),  # small images are enlarged
        (224, 64, [128, 64]),
        (224, 80, [128, 224]),
        (224, 400, [224]),
        (518, 160, [224, 518]),  # a ViT with patches of 14 pixels
        (518, 32, [140, 56]),
        (384, 100, [160, 384]),
        (32, 32, [32]),
        (32, 200, [32, 64]),
    ],
)
def test_image_sizes_follow_the_images(pretrained: int, side: int, sizes: list[int]) -> None:
    assert choose_image_sizes(pretrained, side) == sizes


def test_leave_one_out_accuracy() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    noise = rng.normal(size=(60, 8)).astype(np.float32)
    separate = noise + 20 * np.eye(3, 8, dtype=np.float32)[labels]
    assert leave_one_out_accuracy(separate, labels) == 1
    assert leave_one_out_accuracy(noise, labels) < 0.6
    indicators = np.stack([labels == 0, labels > 0, labels == labels], axis=1).astype(np.uint8)
    assert leave_one_out_accuracy(separate, indicators) == pytest.approx(1)
    assert leave_one_out_accuracy(noise, indicators) < 0.9


def test_images_of_a_group_do_not_predict_each_other() -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(30) % 3).repeat(4)
    groups = np.arange(30).repeat(4).astype(str).astype(object)
    of_group = rng.normal(size=(30, 64)).astype(np.float32).repeat(4, axis=0)
    values = of_group + 0.01 * rng.normal(size=of_group.shape).astype(np.float32)
    assert leave_one_out_accuracy(values, labels) > 0.9
    assert leave_one_out_accuracy(values, labels, groups) < 0.6
    indicators = np.eye(3, dtype=np.uint8)[labels]
    assert leave_one_out_accuracy(values, indicators) > 0.9
    assert leave_one_out_accuracy(values, indicators, groups) < 0.6
    single = np.full(len(labels), "", dtype=object)
    assert leave_one_out_accuracy(values, labels, single) > 0.9


@pytest.mark.parametrize(
    "accuracy, num_images, num_train, is_slow_chosen",
    [
        (0.809, 10**6, 10**4, False),
        (0.811, 10**6, 10**4, True),
        (0.814, 400, 10**4, False),  # a standard error of two points
        (0.816, 400, 10**4, True),
        (0.801, 10**6, 300, True),  # both runs are short
    ],
)
def test_in_long_runs_twice_the_time_must_bring_half_a_point(
    accuracy: float, num_images: int, num_train: int, is_slow_chosen: bool
) -> None:
    """And a quarter of a standard error."""
    fast = Score(NANO, 0.80, num_images, num_train, 1e-3, "resize", has_batch_norm=False)
    slow = replace(fast, accuracy=accuracy, forward_seconds=4e-3)  # needs a point
    assert (sort_scores([fast, slow])[0] == slow) is is_slow_chosen


def recipe_of(candidate: Candidate) -> Recipe:
    return parse_recipe(f"""
model: {{name: "{candidate.name}", image_size: {candidate.image_size}, freeze: backbone}}
data: {{source: "embedded:digits", num_train: 75, train: resize}}
optim: {{lr: 1e-3, steps: 1}}
run: {{threads: 1}}
""")


def test_scores_of_real_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_selection, "MAX_SECONDS_PER_SCORE", 1e9)
    scores = score_candidates([TI, NANO], recipe_of, sizes=lambda candidate: [32, 48])
    assert [score.candidate.image_size for score in scores].count(48) == 1  # only the best
    assert all(0.4 < score.accuracy <= 1 for score in scores)
    (score,) = score_candidates([NANO], recipe_of, sizes=lambda candidate: [])
    assert score.num_images == weight_selection.MIN_SCORED_IMAGES  # nothing to compare it with


def test_only_networks_that_may_win_are_scored_on_more_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_selection, "MAX_SECONDS_PER_SCORE", 1e9)
    monkeypatch.setattr(weight_selection, "MIN_SCORED_IMAGES", 20)
    wider = replace(NANO, image_size=64)
    features = {32: 20.0, 48: 19.0, 64: 0.0}  # how far the classes are apart

    def compute(model: nn.Module, loader: Any, *_: object, **__: object) -> np.ndarray:
        size = loader.pipeline.image_size[0]
        noise = np.random.default_rng(size).normal(size=(len(loader.labels), 16))
        apart = features[size] * np.eye(10, 16)[loader.labels]
        return (noise + apart).astype(np.float32)

    monkeypatch.setattr(weight_selection, "compute_features", compute)
    best, close, worse = score_candidates(
        [NANO, wider], recipe_of, sizes=lambda each: [32, 48] if each is NANO else [64]
    )
    assert worse.candidate == wider
    assert worse.num_images == 20
    assert best.num_images == close.num_images == 65


@pytest.mark.parametrize("accuracy, num_images", [(0.7, 65), (0.58, 20)])
def test_a_network_that_cannot_win_is_scored_on_few_images(
    accuracy: float, num_images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_selection, "MIN_SCORED_IMAGES", 20)
    by_size = {32: (1e-3, 0.8), 48: (1e-3, accuracy)}  # the standard error is 0.1 on 20 images

    def measure(setup: Any, train: bool) -> float:
        return by_size[setup.preprocessing.image_size[0]][0]

    def compute(model: nn.Module, loader: Any, *_: object, **__: object) -> np.ndarray:
        return np.full((len(loader.labels), 1), loader.pipeline.image_size[0], dtype=np.float32)

    def score(values: np.ndarray, *_: object) -> float:
        return by_size[values[0, 0]][1]

    monkeypatch.setattr(weight_selection, "measure_seconds_per_image", measure)
    monkeypatch.setattr(weight_selection, "compute_features", compute)
    monkeypatch.setattr(weight_selection, "leave_one_out_accuracy", score)
    best, other = score_candidates([NANO], recipe_of, sizes=lambda candidate: [32, 48])
    assert best.num_images == other.num_images == num_images


def test_candidates_that_cannot_be_used_are_skipped() -> None:
    def recipe(candidate: Candidate) -> Recipe:
        if candidate.name == TI.name:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return recipe_of(candidate)

    wrong_size = replace(NANO, image_size=33)
    scores = score_candidates([TI, wrong_size, NANO], recipe, sizes=lambda candidate: [])
    assert [score.candidate for score in scores] == [NANO]
    with pytest.raises(torch.OutOfMemoryError):
        score_candidates([TI], recipe, sizes=lambda candidate: [])
    with pytest.raises(RecipeError):
        score_candidates([wrong_size], recipe, sizes=lambda candidate: [])


def test_a_network_without_features_is_used_if_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "finetune.training.frozen_backbone.enable_feature_input", lambda *_, **__: "no pre-logits"
    )
    scores = score_candidates([NANO, TI], recipe_of, sizes=lambda candidate: [])
    assert [(score.candidate, score.has_features) for score in scores] == [(NANO, False)]


def test_timing_excludes_waiting() -> None:
    class SleepingModel(nn.Linear):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return super().forward(images_BCHW[:, 0, 0])

    setup = SimpleNamespace(
        built=SimpleNamespace(model=SleepingModel(32, 2)),
        device=torch.device("cpu"),
        preprocessing=SimpleNamespace(image_size=(32, 32)),
        recipe=recipe_of(NANO),
    )
    assert measure_seconds_per_image(setup, train=True) < 0.05 / 8
