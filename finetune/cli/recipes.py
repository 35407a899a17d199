"""Commands for recipes: `recipes list`, `check`, `help` and `schema`."""

from __future__ import annotations

from typing import Any

import click

from finetune.cli.command import CommandGroup, CommandResult, command
from finetune.cli.output import to_json
from finetune.errors import RecipeError

__all__ = ["recipes"]


@click.group("recipes", cls=CommandGroup)
def recipes() -> None:
    """List, check and explain recipes."""


@command("list", example="finetune recipes list")
@click.argument("folder", default="recipes")
def list_recipes(folder: str) -> CommandResult:
    """List the recipes in FOLDER with their models and data."""
    from finetune.recipe.listing import summarize_recipe_folder

    rows = summarize_recipe_folder(folder)
    width = max((len(row["path"]) for row in rows), default=0)
    lines = [f"{row['path']:{width}}  {row['summary']}" for row in rows]
    return CommandResult(rows, "\n".join(lines))


@command("check", example="finetune recipes check my.yaml")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
def check(files: tuple[str, ...]) -> CommandResult:
    """Check recipes and print all problems of each."""
    from finetune.recipe.load import load_recipe

    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            load_recipe(file)
            rows.append({"path": file, "valid": True, "problems": []})
        except RecipeError as error:
            rows.append({"path": file, "valid": False, "problems": str(error).splitlines()})
    problems = [problem for row in rows for problem in row["problems"]]
    return CommandResult(
        rows,
        "\n".join(f"{row['path']}: {'ok' if row['valid'] else 'not valid'}" for row in rows),
        RecipeError("\n".join(problems), code="recipe.wrong_value") if problems else None,
    )


@command("help", example="finetune recipes help optim.schedule")
@click.argument("topic", metavar="[SECTION[.KEY]|OPERATION]", default="")
def explain(topic: str) -> CommandResult:
    """Explain the keys of a recipe: types, defaults, meaning.

    OPERATION is an image transform such as mixup; `finetune recipes help data.train` lists all.
    """
    from finetune.recipe.help import explain_topic

    rows, text = explain_topic(topic)
    return CommandResult(rows, text)


@command("schema", example="finetune recipes schema > recipe.schema.json")
def schema() -> CommandResult:
    """Print the JSON schema of a recipe, for editors."""
    from finetune.recipe.help import json_schema

    document = json_schema()
    return CommandResult(document, to_json(document))


for each in (list_recipes, check, explain, schema):
    recipes.add_command(each)
