"""A small recipe as text, and the lines of the error that a wrong one ends in."""

from __future__ import annotations

import pytest

from finetune.errors import RecipeError
from finetune.recipe.load import parse_recipe

BASE = """\
model: {name: vit_tiny}
data: {source: "embedded:digits"}
optim:
  lr: 1e-3
  steps: 100
"""


def problems(text: str, *overrides: str) -> list[str]:
    """The lines of the error that a recipe ends in."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="r.yaml", overrides=overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def problem(text: str, *overrides: str) -> str:
    (line,) = problems(text, *overrides)
    return line


def with_line(line: str, *, section: str) -> str:
    """BASE with one more line in a section; the line is the last of the file."""
    kept = [text for text in BASE.splitlines() if not text.startswith(f"{section}:")]
    if section == "optim":
        return BASE + f"  {line}\n"
    start = {"model": "  name: vit_tiny", "data": '  source: "embedded:digits"'}.get(section, "")
    return "\n".join([*kept, f"{section}:", *([start] if start else []), f"  {line}\n"])
