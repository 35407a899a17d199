"""summary.py: the table of a network's layers, and that of its classes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import timm
import torch
from sklearn.metrics import classification_report as reference
from torch import nn

import finetune.models  # registers our own networks with timm
from finetune.errors import FinetuneError
from finetune.summary import classification_report, model_summary

assert finetune.models


def figures(text: str) -> Iterator[tuple[str, list[int]]]:
    for line in text.splitlines():
        yield line, [int(found.replace(",", "")) for found in re.findall(r"\b\d[\d,]*\b", line)]


class TestModelSummary:
    def test_of_the_reviews_network(self) -> None:
        with torch.device("meta"):
            model = timm.create_model("vit_scratch_large_patch8_32").eval()
        lines = dict(figures(model_summary(model, (32, 32))))
        block = next(line for line in lines if line.startswith("blocks.0 … blocks.23 (each)"))
        macs = 12 * 17 * 1024**2 + 2 * 17**2 * 1024
        assert lines[block][-4:] == [17, 1024, 12_596_224, macs]
        total = next(line for line in lines if line.startswith("total"))
        assert lines[total] == [302_520_350, 24 * macs + 16 * 192 * 1024 + 17 * 1024 * 10]
        assert list(lines)[-1] == (
            "5.15 GMACs for one image of 32×32 px; 17 tokens; 302,520,350 parameters are trained"
        )

    def test_the_lines_make_the_total(self) -> None:
        model = timm.create_model("test_resnet", num_classes=7).eval()
        for parameter in model.fc.parameters():
            parameter.requires_grad_(False)
        text = model_summary(model, (64, 96))
        rows = [line for line in text.splitlines() if "(" in line and "GMACs" not in line]
        found = [dict(figures(row))[row][-2:] for row in rows]
        assert len(found) > 4
        total = next(n for line, n in figures(text) if line.startswith("total"))
        parameters = sum(p.numel() for p in model.parameters())
        assert total[0] == parameters == sum(row[0] for row in found)
        assert total[1] == sum(row[1] for row in found)
        trained = parameters - model.fc.weight.numel() - 7
        assert text.endswith(f"64×96 px; {trained:,} parameters are trained")

    def test_columns_are_aligned(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.flat, self.fc = nn.Flatten(), nn.Linear(12, 3, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.fc(self.flat(x))

        assert model_summary(Net().eval(), (2, 2)).splitlines()[:5] == [
            "layer        output  parameters  MACs",
            "-------------------------------------",
            "fc (Linear)  3               36    36",
            "-------------------------------------",
            "total                        36    36",
        ]


class TestClassificationReport:
    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_equals_scikit_learns(self, count: int) -> None:
        generator = np.random.default_rng(count)
        names = [f"class {'long ' * (index % 4)}{index}" for index in range(count)]
        truth = np.concatenate([np.arange(count), generator.integers(0, count, 500)])
        guess = np.where(generator.random(len(truth)) < 0.6, truth, truth[::-1])
        guess[guess == count - 1] = 0  # one class is never predicted
        confusion = np.zeros((count, count), int)
        np.add.at(confusion, (truth, guess), 1)
        expected = reference(truth, guess, target_names=names, zero_division=0)
        ours = classification_report(confusion.tolist(), names)
        assert [line.rstrip() for line in ours.splitlines()] == [
            line.rstrip() for line in expected.rstrip().splitlines()
        ]

    def test_names_and_matrix_go_together(self) -> None:
        with pytest.raises(FinetuneError, match="3 class names for a matrix with 2 rows"):
            classification_report([[1, 0], [0, 1]], ["a", "b", "c"])
