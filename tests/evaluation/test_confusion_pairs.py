"""Evaluation with more classes than a dense confusion matrix allows: exact counts, small files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from ranks import run_two_ranks
from torch import nn

from finetune.commands.evaluate import format_evaluation, write_evaluation
from finetune.data.encoded_images import ArrayImages
from finetune.data.feature_loader import FeatureLoader
from finetune.data.source import Split
from finetune.evaluation.confusion import parse_confusion_matrix
from finetune.evaluation.evaluator import Evaluator
from finetune.run.directory import RunDir, format_json

NUM_CLASSES = 21843


class OneFeatureClassifier(nn.Module):
    """One-feature classifier without a matrix product, whose rounding would depend on the batch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.slopes_K = torch.randn(num_classes, generator=generator)
        self.bias_K = torch.zeros(num_classes)
        self.bias_K[:: num_classes // 9] = 9  # some predictions are correct

    def forward(self, features_BD: torch.Tensor) -> torch.Tensor:
        return features_BD * self.slopes_K + self.bias_K


def evaluate_classifier(num_images: int, num_classes: int) -> dict[str, object]:
    """Evaluate the one-feature classifier on all ranks of this launch."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 9, num_images) * (num_classes // 9)
    split = Split("test", labels, ArrayImages(np.zeros((num_images, 1, 1, 3), np.uint8), "x"))
    values_ND = generator.standard_normal((num_images, 1), dtype=np.float32)
    model = OneFeatureClassifier(num_classes)
    accelerator = Accelerator(cpu=True)
    loader = FeatureLoader(split, values_ND, num_classes=num_classes, device=torch.device("cpu"))
    evaluator = Evaluator(
        loader, accelerator, temperature=2.0, fit_calibration=True, num_mistakes=5
    )
    evaluator.evaluate(model, batch_size=4)
    return evaluator.results()


def evaluate_and_write(folder: Path) -> None:
    for num_images in (1, 31):
        result = evaluate_classifier(num_images, NUM_CLASSES)
        if Accelerator(cpu=True).is_main_process:
            text = json.dumps({**result, "images_per_second": 0})
            (folder / f"{num_images}.json").write_text(text)


def test_two_ranks_count_each_image_once(tmp_path: Path) -> None:
    """With one image, one rank has none; 31 images are split into 15 and 16."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    run_two_ranks(evaluate_and_write, two)
    evaluate_and_write(one)
    for num_images in (1, 31):
        two_ranks = json.loads((two / f"{num_images}.json").read_text())
        assert two_ranks == json.loads((one / f"{num_images}.json").read_text())
        assert two_ranks["examples"] == sum(two_ranks["confusion"]["count"]) == num_images
    assert 0 < two_ranks["top1"] < 1


def test_files_are_small_and_the_report_shows_the_most_confused_classes(tmp_path: Path) -> None:
    num_classes = 3000  # a dense matrix has 9,000,000 numbers
    result = evaluate_classifier(300, num_classes)
    names = [f"n{number:08}" for number in range(num_classes)]
    evaluation = {**result, "model": "m", "data": "d", "split": "test", "class_names": names}
    files = write_evaluation(evaluation, tmp_path / "out")
    assert [Path(file).name for file in files][:2] == ["results.json", "per_class.csv"]
    text = (tmp_path / "out/results.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(evaluation))
    assert text.count("\n") == 1
    assert len(text) < 140 * num_classes
    assert (tmp_path / "out/per_class.csv").read_text().count("\n") == num_classes + 1
    report = format_evaluation(evaluation).splitlines()
    counts = parse_confusion_matrix(result)
    assert counts is not None
    (true, predicted, count), *_ = counts.most_confused_pairs(1)
    assert f"{count:6}  {names[true]} → {names[predicted]}" in report
    assert len(report) < 40  # not one line per class


def test_results_json_is_indented_up_to_1000_classes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    few = {"test": evaluate_classifier(30, 1000)}
    run.write_json("results.json", few)
    assert (tmp_path / "results.json").read_text() == json.dumps(few, indent=2) + "\n"
    assert len(few["test"]["confusion"]) == 1000  # type: ignore[arg-type]
    many = {"test": evaluate_classifier(30, 1001)}
    assert format_json(many) == json.dumps(many, separators=(",", ":")) + "\n"
    run.write_json("results.json", many)
    assert run.read_json("results.json") == many
