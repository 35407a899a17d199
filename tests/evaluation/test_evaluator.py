"""Detailed evaluation: calibration, temperature and mistakes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from refusals import refused
from torch import nn

from finetune.data.loader import ImageLoader
from finetune.data.open_source import open_source
from finetune.data.pixel_store import PixelStore
from finetune.evaluation.evaluator import Evaluator, evaluate
from finetune.transforms.pipeline import Pipeline


class Brightness(nn.Module):
    """Logits from mean pixel values: often wrong, and overconfident."""

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        rows_B8 = images_BCHW.mean((1, 3))
        return 8 * torch.cat([rows_B8, rows_B8[:, :2]], 1)


@pytest.fixture(scope="module")
def loader() -> ImageLoader:
    split = open_source("embedded:digits").splits["test"]
    pixels = np.stack([split.decode(i) for i in range(len(split))])
    store = PixelStore(split, torch.from_numpy(pixels))
    pipeline = Pipeline(
        "resize(8)",
        image_size=(8, 8),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bilinear",
        train=False,
    )
    return ImageLoader(store, pipeline, num_classes=10, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def evaluate_in_detail(
    loader: ImageLoader, accelerator: Accelerator, **options: Any
) -> dict[str, Any]:
    evaluator = Evaluator(loader, accelerator, **options)
    evaluator.evaluate(Brightness(), batch_size=100)
    return evaluator.results()


def test_progress_is_shown_on_a_terminal(loader, accelerator, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for progress, count in ((True, "355/355"), (False, "")):
        evaluate(Brightness(), loader, accelerator, batch_size=100, progress=progress)
        shown = capsys.readouterr().err
        assert count in shown
        assert bool(shown) is progress


def test_detailed_evaluation_without_options_matches_evaluate(loader, accelerator) -> None:
    plain = evaluate(Brightness(), loader, accelerator, batch_size=100)
    detailed = evaluate_in_detail(loader, accelerator)
    assert {**plain, "images_per_second": 0} == {**detailed, "images_per_second": 0}


def test_calibration_bins_add_up_to_accuracy_and_ece(loader, accelerator) -> None:
    result = evaluate_in_detail(loader, accelerator)
    bins = [bin for bin in result["calibration"] if bin["count"]]
    assert len(result["calibration"]) == 15
    assert sum(bin["count"] for bin in bins) == result["examples"] == len(loader.labels)
    correct = sum(bin["accuracy"] * bin["count"] for bin in bins)
    assert correct == pytest.approx(result["top1"] * result["examples"])
    gaps = sum(abs(bin["accuracy"] - bin["confidence"]) * bin["count"] for bin in bins)
    assert gaps / result["examples"] == pytest.approx(result["ece"])
    assert all(bin["low"] < bin["confidence"] <= bin["high"] for bin in bins)


def test_fitted_temperature_lowers_the_loss_and_keeps_predictions(loader, accelerator) -> None:
    fitted = evaluate_in_detail(loader, accelerator, fit_calibration=True)
    assert fitted["temperature"] > 1
    scaled = evaluate_in_detail(loader, accelerator, temperature=fitted["temperature"])
    assert scaled["calibrated"]["loss"] < scaled["loss"]
    assert scaled["calibrated"]["ece"] < scaled["ece"]
    assert scaled["top1"] == fitted["top1"]
    unchanged = evaluate_in_detail(loader, accelerator, temperature=1.0)
    assert unchanged["calibrated"]["loss"] == unchanged["loss"]
    assert unchanged["calibrated"]["calibration"] == unchanged["calibration"]


def test_mistakes_refer_to_images_of_the_split(loader, accelerator) -> None:
    mistakes = evaluate_in_detail(loader, accelerator, num_mistakes=5)["mistakes"]
    assert len(mistakes) == 5
    assert [mistake["loss"] for mistake in mistakes] == sorted(
        (mistake["loss"] for mistake in mistakes), reverse=True
    )
    split = loader.store.split
    for mistake in mistakes:
        assert mistake["label"] == split.labels[mistake["index"]] != mistake["predicted"]
        assert mistake["name"] == split.name_of(mistake["index"])
        logits = Brightness()(next(one_image_batches(loader, mistake["index"])))[0].double()
        assert mistake["confidence"] == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)


def one_image_batches(loader: ImageLoader, index: int):
    for pixels in loader.store.read_batches([np.array([index])]):
        yield loader.pipeline(pixels, keys=None, device=loader.device)


def test_non_finite_logits_are_refused(loader, accelerator) -> None:
    class NanModel(nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            return torch.full((len(images_BCHW), 10), float("nan"))

    with refused("diverged.outputs", "355 of 355"):
        Evaluator(loader, accelerator, fit_calibration=True, num_mistakes=3).evaluate(
            NanModel(), batch_size=50
        )
