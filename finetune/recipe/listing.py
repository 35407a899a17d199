"""List the recipes in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.recipe.load import load_recipe

__all__ = ["summarize_recipe_folder"]


def summarize_recipe_folder(folder: str | Path) -> list[dict[str, Any]]:
    """Summarize the recipes in a folder and its subfolders, except `accelerate/` and plan.yaml.

    Returns: one dict per file, with keys `path`, `valid`, `summary`, `model` and `source`; `model`
        and `source` are None if the recipe is invalid.
    Raises: RecipeError if the folder does not exist.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RecipeError(
            f"{folder}: no such folder; give the folder of the recipes: "
            "finetune recipes list FOLDER",
            code="recipe.not_found",
        )
    rows: list[dict[str, Any]] = []
    for path in sorted(root.rglob("*.yaml")):
        if "accelerate" in path.relative_to(root).parts[:-1] or path.name == "plan.yaml":
            continue
        row: dict[str, Any] = {"path": str(path), "valid": False, "model": None, "source": None}
        try:
            recipe = load_recipe(path).redacted()
        except RecipeError:
            row["summary"] = f"invalid; see: finetune recipes check {path}"
        else:
            row |= {"valid": True, "model": recipe.model.name, "source": recipe.data.source}
            row["summary"] = f"{recipe.model.name} on {recipe.data.source}"
        rows.append(row)
    return rows
