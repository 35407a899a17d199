"""The card: YAML the hub can read, and the run's own figures."""

from __future__ import annotations

import yaml

from finetune.card import write_card
from finetune.recipe import parse_recipe

RECIPE = parse_recipe(
    "model: {name: embedded:vit_nano}\ndata: {source: 'embedded:digits'}\n"
    "optim: {lr: 1e-3, steps: 5}\n"
)
FIGURES = {"examples": 355, "top1": 0.98765, "top5": 1.0, "loss": 0.1, "ece": 0.02}


def card(**changes) -> str:
    results = {"steps": 5, "best_step": 4, "test": FIGURES, **changes}
    provenance = {"source": "embedded:vit_nano", "sha256": "ab" * 32, "license": "apache-2.0"}
    return write_card(RECIPE, provenance, results, [f"class {i}" for i in range(40)])


def test_the_head_is_yaml_and_the_figures_are_the_runs() -> None:
    head, body = card().split("---\n", 2)[1:]
    assert yaml.safe_load(head) == {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm"],
        "license": "apache-2.0",
    }
    assert "| test | 355 | 0.9877 | 1.0000 | 0.1000 | 0.0200 |" in body
    assert "| val |" not in body
    assert "and 10 more" in body
    assert "those of step 4" in body


def test_the_recipe_in_the_card_is_the_recipe() -> None:
    text = card().split("```yaml\n")[1].split("```")[0]
    assert parse_recipe(text) == RECIPE
