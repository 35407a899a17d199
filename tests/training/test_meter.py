"""Training metrics are means over images; a pause does not count as training time."""

from __future__ import annotations

import time

import pytest
import torch

from finetune.training.meter import TrainMeter


def test_logged_loss_is_a_mean_over_images_not_batches() -> None:
    meter = TrainMeter(torch.device("cpu"), 100.0)
    logits = torch.tensor([[3.0, 2, 1, 0, -1, -2, -3]])
    taken, skipped = torch.tensor(True), torch.tensor(False)
    meter.update(torch.tensor(6.0), logits.expand(3, -1), torch.tensor([0, 0, 4]), step_taken=taken)
    meter.update(torch.tensor(float("nan")), logits, torch.tensor([6]), step_taken=skipped)
    meter.update(torch.tensor(1.0), logits, torch.tensor([6]), step_taken=taken)
    line = meter.compute(meter.local_sums(), step=7, samples_seen=28, lr=0.5)
    assert line["loss"] == pytest.approx(7 / 4)
    assert line["top1"] == 2 / 4
    assert line["top5"] == 3 / 4
    assert line["seconds"] >= 100
    assert (line["step"], line["samples_seen"], line["split"]) == (7, 28, "train")
    empty = meter.compute(meter.local_sums(), step=8, samples_seen=32, lr=0.5)
    assert empty["loss"] is None, "no mean without images"


def test_paused_time_does_not_count_as_training_time() -> None:
    meter = TrainMeter(torch.device("cpu"), 0.0)
    labels = torch.zeros(100, dtype=torch.long)
    meter.update(torch.tensor(1.0), torch.zeros(100, 2), labels, step_taken=torch.tensor(True))
    paused = meter.pause()
    time.sleep(0.5)
    meter.resume(paused)
    assert (
        meter.compute(meter.local_sums(), step=1, samples_seen=100, lr=0)["images_per_second"] > 400
    )
