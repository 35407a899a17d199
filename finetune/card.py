"""The model card: what a reader of `model/README.md` needs to know, from the run's own figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from finetune.recipe import Recipe

__all__ = ["write_card"]

_SHOWN_CLASSES = 30


def write_card(
    recipe: Recipe,
    provenance: Mapping[str, Any],
    results: Mapping[str, Any],
    class_names: Sequence[str],
) -> str:
    """Write the card of a fine-tuned model.

    Args:
        recipe: of the run.
        provenance: of the weights it started from.
        results: the content of results.json.
        class_names: in the order of the logits.
    Returns: the text of README.md, with the hub's YAML at its head.
    """
    head = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm"],
    }
    licence = provenance.get("license")
    if licence:
        head["license"] = str(licence)
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", ""]
    lines += [*_summary(recipe, results), *_figures(results), *_classes(class_names)]
    known = [f"{key} {value}" for key, value in provenance.items() if value is not None]
    lines += [f"Weights it started from: {', '.join(known)}.", ""]
    lines += ["## Recipe", "", "```yaml", recipe.to_yaml().strip(), "```", ""]
    return "\n".join(lines)


def _summary(recipe: Recipe, results: Mapping[str, Any]) -> list[str]:
    start = "from random weights" if not recipe.model.pretrained else "from its pretrained weights"
    return [
        f"# {recipe.model.name} on {recipe.data.source}",
        "",
        f"Trained {start} on {recipe.data.source} with finetune: {results['steps']} steps of "
        f"{recipe.data.batch_size} images; the weights are those of step {results['best_step']}.",
        "",
        "```python",
        "import timm",
        'model = timm.create_model("local-dir:PATH_OF_THIS_FOLDER", pretrained=True).eval()',
        "```",
        "",
    ]


def _figures(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "| split | images | top-1 | top-5 | loss | calibration error |",
        "|---|---|---|---|---|---|",
    ]
    for split in ("val", "test"):
        if figures := results.get(split):
            numbers = " | ".join(f"{figures[key]:.4f}" for key in ("top1", "top5", "loss", "ece"))
            lines.append(f"| {split} | {figures['examples']} | {numbers} |")
    said = "Validation chose the weights; the test split was read once, at the end."
    return [*lines, "", said, ""]


def _classes(class_names: Sequence[str]) -> list[str]:
    shown = ", ".join(class_names[:_SHOWN_CLASSES])
    more = len(class_names) - _SHOWN_CLASSES
    end = f", and {more} more." if more > 0 else "."
    return [f"Classes ({len(class_names)}): {shown}{end}", ""]
