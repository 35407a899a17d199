"""A small plan and its recipe, for tests that read or run plans."""

from __future__ import annotations

from pathlib import Path

from recipe_texts import tiny_recipe_text

RECIPE = (
    tiny_recipe_text(
        "eval: resize, num_train: 100, num_test: 40", optim="lr: 1e-3, steps: 2", width=16
    )
    + """claims:
  - {metric: test.top1, value: 0.5, tolerance: 0.2, source: a table}
"""
)
PLAN = """
title: A grid and the chosen values
runs:
  - name: chosen
    recipe: small.yaml
    grid: {optim.lr: [0.1, 0.3, 0.2], optim.weight_decay: [0, 0.5]}
    final: [data.val_fraction=0]
    seeds: [3, 4]
  - name: plain
    recipe: small.yaml
    overrides: [optim.steps=1]
    claims: [{metric: test.top1, value: 0.1, source: another table}]
smoke: [optim.steps=1]
"""


def write_plan(top: Path) -> str:
    """Write both below `top`/recipes. Returns: the path of the plan."""
    folder = top / "recipes" / "tables" / "grids"
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text(RECIPE)
    (folder / "plan.yaml").write_text(PLAN)
    return str(folder / "plan.yaml")
