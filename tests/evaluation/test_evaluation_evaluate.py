"""A closer look at an evaluation: calibration, temperature and mistakes, counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from refusals import refused
from torch import nn

from finetune.data.image_store import Store
from finetune.data.loader import Loader
from finetune.data.source import open_source
from finetune.evaluation.evaluate import Examination, evaluate
from finetune.transforms.pipeline import Pipeline


class Brightness(nn.Module):
    """Logits from the mean of the pixels: wrong often, and too sure."""

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        rows_B8 = images_BCHW.mean((1, 3))
        return 8 * torch.cat([rows_B8, rows_B8[:, :2]], 1)


@pytest.fixture(scope="module")
def loader() -> Loader:
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
    return Loader(store, pipeline, num_classes=10, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def looked_at(loader: Loader, accelerator: Accelerator, **asked: Any) -> dict[str, Any]:
    return Examination(loader, accelerator, **asked).of(Brightness(), batch_size=100)


def test_without_questions_it_is_the_evaluation(loader, accelerator) -> None:
    plain = evaluate(Brightness(), loader, accelerator, batch_size=100)
    closer = looked_at(loader, accelerator)
    assert {**plain, "images_per_second": 0} == {**closer, "images_per_second": 0}


def test_the_diagram_adds_up_to_the_figures(loader, accelerator) -> None:
    found = looked_at(loader, accelerator)
    bins = [one for one in found["calibration"] if one["count"]]
    assert len(found["calibration"]) == 15
    assert sum(one["count"] for one in bins) == found["examples"] == len(loader.labels)
    right = sum(one["accuracy"] * one["count"] for one in bins)
    assert right == pytest.approx(found["top1"] * found["examples"])
    gaps = sum(abs(one["accuracy"] - one["confidence"]) * one["count"] for one in bins)
    assert gaps / found["examples"] == pytest.approx(found["ece"])
    assert all(one["low"] < one["confidence"] <= one["high"] for one in bins)


def test_the_fitted_temperature_lowers_the_loss_and_moves_no_prediction(
    loader, accelerator
) -> None:
    fitted = looked_at(loader, accelerator, fit=True)
    assert fitted["temperature"] > 1
    scaled = looked_at(loader, accelerator, temperature=fitted["temperature"])
    assert scaled["calibrated"]["loss"] < scaled["loss"]
    assert scaled["calibrated"]["ece"] < scaled["ece"]
    assert scaled["top1"] == fitted["top1"]
    unchanged = looked_at(loader, accelerator, temperature=1.0)
    assert unchanged["calibrated"]["loss"] == unchanged["loss"]
    assert unchanged["calibrated"]["calibration"] == unchanged["calibration"]


def test_mistakes_name_images_of_the_split(loader, accelerator) -> None:
    found = looked_at(loader, accelerator, num_mistakes=5)["mistakes"]
    assert len(found) == 5
    assert [one["loss"] for one in found] == sorted((one["loss"] for one in found), reverse=True)
    split = loader.store.split
    for one in found:
        assert one["label"] == split.labels[one["index"]] != one["predicted"]
        assert one["name"] == split.name_of(one["index"])
        logits = Brightness()(next(_one(loader, one["index"])))[0].double()
        assert one["confidence"] == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)


def _one(loader: Loader, index: int):
    for pixels in loader.store.read_all([np.array([index])]):
        yield loader.pipeline(pixels, keys=None, device=loader.device)


def test_logits_that_are_not_finite_are_no_figures(loader, accelerator) -> None:
    class Broken(nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            return torch.full((len(images_BCHW), 10), float("nan"))

    with refused("diverged.outputs", "355 of 355"):
        Examination(loader, accelerator, fit=True, num_mistakes=3).of(Broken(), batch_size=50)
