"""Small recipes as text, and helpers that load an invalid recipe and return its error."""

from __future__ import annotations

import pytest

from finetune.errors import RecipeError
from finetune.recipe.load import parse_recipe

BASE_RECIPE = """\
model: {name: vit_tiny}
data: {source: "embedded:digits"}
optim:
  lr: 1e-3
  steps: 100
"""


def tiny_recipe_text(
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
    """Return a recipe for a vision transformer that trains in a second.

    Args:
        data, model, optim, run: keys of these sections as YAML, such as "lr: 1e-3, steps: 4"; the
            network and the source are added.
        source: the data source.
        size: height and width of the images in pixels; a patch has 4.
        width, depth: embedding dimension and number of blocks.
    """
    args = f"{{patch_size: 4, embed_dim: {width}, depth: {depth}, num_heads: 2}}"
    model_keys = f"name: vit_tiny_patch16_224, image_size: {size}, args: {args}"
    return f"""
model: {{{model_keys}, {model}}}
data: {{source: "{source}", {data}}}
optim: {{{optim}}}
run: {{{run}, threads: 1}}
"""


def recipe_errors(code: str, text: str, *overrides: str) -> list[str]:
    """Load an invalid recipe. Returns: the lines of its error, which has the code recipe.CODE."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="r.yaml", overrides=overrides)
    assert (caught.value.code, caught.value.exit_code) == (f"recipe.{code}", 2)
    return str(caught.value).splitlines()


def recipe_error(code: str, text: str, *overrides: str) -> str:
    """Load a recipe with one error. Returns: the line of the error."""
    (line,) = recipe_errors(code, text, *overrides)
    return line
