"""The quickstart recipe: its cost, and its accuracy as shown in the first notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from logs import logging_nothing

from finetune.recipe.load import load_recipe
from finetune.training.setup import build_setup


def test_quickstart_is_cheap_enough_for_a_cpu_without_bf16(repository: Path) -> None:
    recipe = load_recipe(repository / "recipes" / "quickstart.yaml")
    cpu = torch.device("cpu")
    with logging_nothing():
        setup = build_setup(recipe, device=cpu, show_progress=False)
    height, width = setup.preprocessing.image_size
    patches = (height // 4) * (width // 4)
    # 1,560,000 patches took 124 s in float32 on two cores; the limit is 90 s
    assert setup.num_steps * recipe.data.batch_size * patches < 900_000


def test_notebook_shows_the_current_recipe_and_its_accuracy(repository: Path) -> None:
    notebook = json.loads((repository / "notebooks" / "1_quickstart.ipynb").read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    printed = ["".join(output.get("text", "")) for output in outputs]
    recipe = (repository / "recipes" / "quickstart.yaml").read_text()
    assert [text for text in printed if text.strip() == recipe.strip()]
    tables = "\n".join("".join(output.get("data", {}).get("text/plain", "")) for output in outputs)
    (top1,) = re.findall(r"^test +[\d.]+ +([\d.]+)", tables, re.MULTILINE)
    assert float(top1) >= 0.97
