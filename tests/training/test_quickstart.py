"""The quickstart: its cost, and its figure as the first notebook keeps it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from finetune.recipe.load import load_recipe
from finetune.training.setup import open_setup


def test_it_is_short_enough_for_a_processor_without_bf16(repository: Path) -> None:
    recipe = load_recipe(repository / "recipes" / "quickstart.yaml")
    cpu = torch.device("cpu")
    setup = open_setup(recipe, device=cpu, notice=pytest.fail, progress=False)
    height, width = setup.preprocessing.image_size
    patches = (height // 4) * (width // 4)
    # 1,560,000 patches took 124 s in float32 on two cores, and 90 s are allowed
    assert setup.steps * recipe.data.batch_size * patches < 900_000


def test_its_figure_is_that_of_the_recipe_as_it_stands(repository: Path) -> None:
    notebook = json.loads((repository / "notebooks" / "1_quickstart.ipynb").read_text())
    outputs = [one for cell in notebook["cells"] for one in cell.get("outputs", [])]
    printed = ["".join(one.get("text", "")) for one in outputs]
    recipe = (repository / "recipes" / "quickstart.yaml").read_text()
    assert [text for text in printed if text.strip() == recipe.strip()]
    tables = "\n".join("".join(one.get("data", {}).get("text/plain", "")) for one in outputs)
    (top1,) = re.findall(r"^test +[\d.]+ +([\d.]+)", tables, re.MULTILINE)
    assert float(top1) >= 0.97
