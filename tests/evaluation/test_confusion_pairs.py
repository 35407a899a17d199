"""An evaluation of more classes than a matrix is made for: counted once, held in little memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from ranks import two_ranks
from torch import nn

from finetune.commands.evaluate import describe, write_results
from finetune.data.feature_loader import FeatureLoader
from finetune.data.items import ArrayItems
from finetune.data.source import Split
from finetune.evaluation import calibration
from finetune.evaluation.confusion import read_confusion
from finetune.evaluation.evaluate import Examination
from finetune.run.directory import RunDir, json_text

NUM_CLASSES = 21843


class Bumps(nn.Module):
    """Logits of one feature, by themselves: no matrix product, whose sums go by the batch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.slopes_K = torch.randn(num_classes, generator=generator)
        self.bias_K = torch.zeros(num_classes)
        self.bias_K[:: num_classes // 9] = 9  # some of the answers are right

    def forward(self, features_BD: torch.Tensor) -> torch.Tensor:
        return features_BD * self.slopes_K + self.bias_K


def measured(num_images: int, num_classes: int) -> dict[str, object]:
    """Measure a classifier of one feature, on all ranks of this launch."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 9, num_images) * (num_classes // 9)
    split = Split("test", labels, ArrayItems(np.zeros((num_images, 1, 1, 3), np.uint8), "x"))
    values_ND = generator.standard_normal((num_images, 1), dtype=np.float32)
    network = Bumps(num_classes)
    accelerator = Accelerator(cpu=True)
    loader = FeatureLoader(split, values_ND, num_classes=num_classes, device=torch.device("cpu"))
    examination = Examination(loader, accelerator, temperature=2.0, fit=True, num_mistakes=5)
    return examination.of(network, batch_size=4)


def written(num_images: int, num_classes: int, out: Path) -> None:
    result = measured(num_images, num_classes)
    if Accelerator(cpu=True).is_main_process:
        out.write_text(json.dumps({**result, "images_per_second": 0}))


@pytest.mark.parametrize("num_images", [1, 31])
def test_two_ranks_count_each_image_once(num_images: int, tmp_path: Path) -> None:
    """One image leaves a rank without any; 31 are 15 and 16."""
    two_ranks(written, num_images, NUM_CLASSES, tmp_path / "two.json")
    written(num_images, NUM_CLASSES, tmp_path / "one.json")
    both = json.loads((tmp_path / "two.json").read_text())
    assert both == json.loads((tmp_path / "one.json").read_text())
    assert both["examples"] == sum(both["confusion"]["count"]) == num_images
    if num_images > 1:
        assert 0 < both["top1"] < 1


def test_the_files_are_small_and_of_the_classes_that_matter(tmp_path: Path) -> None:
    result = measured(300, NUM_CLASSES)
    names = [f"n{number:08}" for number in range(NUM_CLASSES)]
    facts = {**result, "model": "m", "data": "d", "split": "test", "class_names": names}
    files = write_results(facts, tmp_path / "out")
    assert [Path(file).name for file in files][:2] == ["results.json", "per_class.csv"]
    text = (tmp_path / "out/results.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(facts))
    assert text.count("\n") == 1
    assert len(text) < 3_000_000
    assert (tmp_path / "out/per_class.csv").read_text().count("\n") == NUM_CLASSES + 1
    shown = describe(facts).splitlines()
    counts = read_confusion(result)
    assert counts is not None
    (true, predicted, count), *_ = counts.most_confused(1)
    assert f"{count:6}  {names[true]} → {names[predicted]}" in shown
    assert len(shown) < 40  # not a line for each class


def test_a_run_keeps_its_results_indented_up_to_1000_classes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    few = {"test": measured(30, 1000)}
    run.write_json("results.json", few)
    assert (tmp_path / "results.json").read_text() == json.dumps(few, indent=2) + "\n"
    assert len(few["test"]["confusion"]) == 1000  # type: ignore[arg-type]
    many = {"test": measured(30, 1001)}
    assert json_text(many) == json.dumps(many, separators=(",", ":")) + "\n"
    run.write_json("results.json", many)
    assert run.read_json("results.json") == many


def test_a_temperature_of_many_classes_is_the_same_in_any_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 9 * torch.randn(90, 2000, generator=generator)
    labels = torch.multinomial((logits / 3).softmax(1), 1, generator=generator)[:, 0]
    whole = calibration.fit_temperature(logits, labels)
    monkeypatch.setattr(calibration, "_NUMBERS_AT_ONCE", 7 * 2000)
    assert calibration.fit_temperature(logits, labels) == whole
    assert whole == pytest.approx(3, rel=0.2)
