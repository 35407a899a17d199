"""A closer look at an evaluation: calibration, temperature and mistakes, counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from finetune.data.image_store import Store
from finetune.data.loader import Feed
from finetune.data.source import open_source
from finetune.errors import DivergedError
from finetune.evaluation.evaluate import evaluate, examine
from finetune.transforms.pipeline import Pipeline


class Brightness(nn.Module):
    """Logits from the mean of the pixels: wrong often, and too sure."""

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        rows_B8 = images_BCHW.mean((1, 3))
        return 8 * torch.cat([rows_B8, rows_B8[:, :2]], 1)


@pytest.fixture(scope="module")
def feed() -> Feed:
    split = open_source("embedded:digits").splits["test"]
    pixels = np.stack([split.read(i) for i in range(len(split))])
    store = Store(split, torch.from_numpy(pixels))
    pipeline = Pipeline(
        "resize(8)",
        image_size=(8, 8),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bilinear",
        train=False,
    )
    return Feed(store, pipeline, num_classes=10, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def looked_at(feed: Feed, accelerator: Accelerator, **asked: Any) -> dict[str, Any]:
    return examine(Brightness(), feed, accelerator, batch_size=100, **asked)


def test_without_questions_it_is_the_evaluation(feed, accelerator) -> None:
    plain = evaluate(Brightness(), feed, accelerator, batch_size=100)
    closer = looked_at(feed, accelerator)
    assert {**plain, "images_per_second": 0} == {**closer, "images_per_second": 0}


def test_the_diagram_adds_up_to_the_figures(feed, accelerator) -> None:
    found = looked_at(feed, accelerator)
    bins = [one for one in found["calibration"] if one["count"]]
    assert len(found["calibration"]) == 15
    assert sum(one["count"] for one in bins) == found["examples"] == len(feed.labels)
    right = sum(one["accuracy"] * one["count"] for one in bins)
    assert right == pytest.approx(found["top1"] * found["examples"])
    gaps = sum(abs(one["accuracy"] - one["confidence"]) * one["count"] for one in bins)
    assert gaps / found["examples"] == pytest.approx(found["ece"])
    assert all(one["low"] < one["confidence"] <= one["high"] for one in bins)


def test_the_fitted_temperature_lowers_the_loss_and_moves_no_prediction(feed, accelerator) -> None:
    fitted = looked_at(feed, accelerator, fit=True)
    assert fitted["temperature"] > 1
    scaled = looked_at(feed, accelerator, temperature=fitted["temperature"])
    assert scaled["calibrated"]["loss"] < scaled["loss"]
    assert scaled["calibrated"]["ece"] < scaled["ece"]
    assert scaled["top1"] == fitted["top1"]
    unchanged = looked_at(feed, accelerator, temperature=1.0)
    assert unchanged["calibrated"]["loss"] == unchanged["loss"]
    assert unchanged["calibrated"]["calibration"] == unchanged["calibration"]


def test_mistakes_name_images_of_the_split(feed, accelerator) -> None:
    found = looked_at(feed, accelerator, num_mistakes=5)["mistakes"]
    assert len(found) == 5
    assert [one["loss"] for one in found] == sorted((one["loss"] for one in found), reverse=True)
    split = feed.store.split
    for one in found:
        assert one["label"] == split.labels[one["index"]] != one["predicted"]
        assert one["name"] == split.name_of(one["index"])
        logits = Brightness()(next(_one(feed, one["index"])))[0].double()
        assert one["confidence"] == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)


def _one(feed: Feed, index: int):
    for pixels in feed.store.read_all([np.array([index])]):
        yield feed.pipeline(pixels, keys=None, device=feed.device)


def test_logits_that_are_not_finite_are_no_figures(feed, accelerator) -> None:
    class Broken(nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            return torch.full((len(images_BCHW), 10), float("nan"))

    with pytest.raises(DivergedError, match="not finite"):
        examine(Broken(), feed, accelerator, batch_size=50, fit=True, num_mistakes=3)
