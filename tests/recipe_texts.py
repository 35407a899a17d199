"""The small recipes of the tests as text, and the error that a wrong one ends in."""

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


def tiny_text(
    data: str = "eval: resize",
    *,
    model: str = "pretrained: false",
    source: str = "embedded:digits",
    optim: str = "lr: 3e-3, steps: 4",
    run: str = "precision: fp32",
    size: int = 16,
    width: int = 32,
    depth: int = 1,
) -> str:
    """A recipe for a vision transformer that trains in a second.

    Args:
        data, model, optim, run: keys of these sections as YAML, such as "lr: 1e-3, steps: 4"; the
            network and the source are added.
        size: of the images, in pixels; a patch has 4.
        width, depth: of the transformer.
    """
    args = f"{{patch_size: 4, embed_dim: {width}, depth: {depth}, num_heads: 2}}"
    network = f"name: vit_tiny_patch16_224, image_size: {size}, args: {args}"
    return f"""
model: {{{network}, {model}}}
data: {{source: "{source}", {data}}}
optim: {{{optim}}}
run: {{{run}, threads: 1}}
"""


def problems(code: str, text: str, *overrides: str) -> list[str]:
    """Load a wrong recipe. Returns: the lines of its error, whose code is recipe.CODE."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="r.yaml", overrides=overrides)
    assert (caught.value.code, caught.value.exit_code) == (f"recipe.{code}", 2)
    return str(caught.value).splitlines()


def problem(code: str, text: str, *overrides: str) -> str:
    """Load a recipe with one problem. Returns: its line."""
    (line,) = problems(code, text, *overrides)
    return line


def with_line(line: str, *, section: str) -> str:
    """Return BASE with one more line in a section; the line is the last of the file."""
    kept = [text for text in BASE.splitlines() if not text.startswith(f"{section}:")]
    if section == "optim":
        return BASE + f"  {line}\n"
    start = {"model": "  name: vit_tiny", "data": '  source: "embedded:digits"'}.get(section, "")
    return "\n".join([*kept, f"{section}:", *([start] if start else []), f"  {line}\n"])
