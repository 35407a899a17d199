"""The command line: the verbs, each handing over to the package.

Nothing heavy is imported before a verb needs it: `finetune --help` does not load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from finetune import processes
from finetune.cli.commands import VERBS
from finetune.cli.runner import Answer, Verbs, answers, debug_option, figures, flat, run, to_json
from finetune.errors import DataError, RecipeError
from finetune.processes import is_first_rank

__all__ = ["cli", "main"]


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    sys.modules["finetune"].__version__,  # the package itself; it imports nothing from here
    prog_name="finetune",
    message="%(prog)s %(version)s",
)
@debug_option
def cli() -> None:
    """Fine-tune pretrained vision models from a recipe.

    The main job: finetune train recipes/quickstart.yaml

    On several processes: accelerate launch -m finetune train RECIPE
    """


@cli.command("train")
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", metavar="DIR", help="Run directory; by default runs/<name of the recipe>.")
@click.option("--resume", is_flag=True, help="Continue from the newest intact checkpoint.")
@click.option("--dry-run", is_flag=True, help="Check everything, train nothing.")
@answers
def train(
    recipe: str, overrides: tuple[str, ...], out: str | None, resume: bool, dry_run: bool
) -> Answer:
    """Train as RECIPE says; KEY=VALUE changes one of its keys, such as optim.lr=1e-3.

    With --resume, RECIPE may be a run directory.
    """
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import refuse_undone

    if out == "":
        raise RecipeError("--out: is empty; name a folder, or leave it out for runs/RECIPE")
    if resume and (Path(recipe) / "recipe.yaml").is_file():
        recipe = str(Path(recipe) / "recipe.yaml")
    refuse_undone(overrides)
    loaded, path = load_recipe(recipe, overrides), Path(recipe)
    # a run's own copy of its recipe belongs to that run, whatever the name of the file
    own = path.name == "recipe.yaml" and (path.parent / "run.json").is_file()
    folder = Path(out) if out else path.parent if own else Path("runs") / path.stem

    from finetune.training.train import train as run_training

    results = run_training(loaded, folder, resume=resume, dry_run=dry_run)
    text = flat(results) if dry_run else f"{figures(results)}\n{folder}"
    return Answer(results, text)


@cli.command("eval")
@click.argument("model")
@click.option("--data", metavar="SOURCE", help="By default the data that MODEL was trained on.")
@click.option("--split", help="train, val or test.  [default: test]")
@click.option("--out", metavar="DIR", help="Write results.json, per_class.csv and pictures.")
@click.option(
    "--fit-temperature",
    is_flag=True,
    help="Fit a temperature on val (or --split) and write it into MODEL's config.json.",
)
@answers
def evaluate(
    model: str, data: str | None, split: str | None, out: str | None, fit_temperature: bool
) -> Answer:
    """Measure MODEL on a split: a run directory, a model folder, hf-hub:owner/name or timm name."""
    from finetune.commands.evaluate import describe, evaluate_model, write_results

    if out == "":
        raise RecipeError("--out: is empty; name a folder, or leave it out")
    results = evaluate_model(
        model, data=data, split=split, fit_temperature=fit_temperature, out=out
    )
    written = write_results(results, out) if out and is_first_rank() else []
    return Answer(results, "\n".join([describe(results), *written]))


@cli.command("predict")
@click.argument("model")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--top-k", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--out", metavar="FILE", help="Write a .csv or .jsonl file.")
@click.option("--sheet", metavar="FILE", help="Write a .png with the predictions under pictures.")
@click.option("--calibrated", is_flag=True, help="Divide the logits by MODEL's temperature.")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1))
@answers
def predict(
    model: str,
    paths: tuple[str, ...],
    top_k: int,
    out: str | None,
    sheet: str | None,
    calibrated: bool,
    batch_size: int,
) -> Answer:
    """Classify images: files, folders, patterns, or "-" for a list on standard input."""
    from finetune.commands.predict import predict as classify
    from finetune.commands.predict_io import describe, unreadable

    rows = classify(
        model,
        paths,
        top_k=top_k,
        out=out,
        sheet=sheet,
        calibrated=calibrated,
        batch_size=batch_size,
    )
    return Answer(rows, describe(rows, out=out, sheet=sheet), unreadable(rows))


@cli.group("recipes", cls=Verbs)
@debug_option
def recipes() -> None:
    """List, check and explain recipes."""


@recipes.command("list")
@click.argument("folder", default="recipes")
@answers
def list_recipes(folder: str) -> Answer:
    """List the recipes of FOLDER (by default ./recipes) with their network and data."""
    from finetune.recipe.help import list_folder

    rows = list_folder(folder)
    width = max((len(row["path"]) for row in rows), default=0)
    lines = [f"{row['path']:{width}}  {row['summary']}" for row in rows]
    return Answer(rows, "\n".join(lines))


@recipes.command("check")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@answers
def check(files: tuple[str, ...]) -> Answer:
    """Check recipes and print every problem of each."""
    from finetune.recipe.load import load_recipe

    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            load_recipe(file)
            rows.append({"path": file, "valid": True, "problems": []})
        except RecipeError as error:
            rows.append({"path": file, "valid": False, "problems": str(error).splitlines()})
    problems = [problem for row in rows for problem in row["problems"]]
    return Answer(
        rows,
        "\n".join(f"{row['path']}: {'ok' if row['valid'] else 'not valid'}" for row in rows),
        RecipeError("\n".join(problems)) if problems else None,
    )


@recipes.command("help")
@click.argument("topic", metavar="[SECTION[.KEY]]", default="")
@answers
def explain(topic: str) -> Answer:
    """Explain the keys of a recipe: types, defaults, meaning; data.train: the operations."""
    from finetune.recipe.help import help_table, help_text

    return Answer(help_table(topic), help_text(topic))


@recipes.command("schema")
@answers
def schema() -> Answer:
    """Print the JSON schema of a recipe, for editors."""
    from finetune.recipe.help import json_schema

    found = json_schema()
    return Answer(found, to_json(found))


@cli.group("data", cls=Verbs)
@debug_option
def data() -> None:
    """Look into data sets."""


@data.command("info")
@click.argument("source")
@answers
def info(source: str) -> Answer:
    """Show the splits, classes and image sizes of SOURCE."""
    from finetune.data.decode_all import info as describe
    from finetune.data.source import open_source

    found = describe(open_source(source))
    return Answer(found, flat(found))


@data.command("scan")
@click.argument("source")
@answers
def scan(source: str) -> Answer:
    """Decode every image of SOURCE and list those that cannot be read."""
    from finetune.data.decode_all import scan as find_unreadable
    from finetune.data.source import open_source

    opened = open_source(source)
    found = find_unreadable(opened)
    problem = None
    if found:
        total = sum(len(split) for split in opened.splits.values())
        problem = DataError(
            f"{source}: {len(found)} of {total} images cannot be read; mend or remove them, or "
            "train with data.unreadable=quarantine"
        )
    lines = [f"{row['split']}: {row['name']}: {row['error']}" for row in found]
    return Answer(found, "\n".join(lines) or f"{source}: every image can be read", problem)


for verb in VERBS:
    cli.add_command(verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what stands behind `finetune`; by default the process's own.
    Returns: the exit code.
    """
    with processes.patient():
        return run(cli, sys.argv[1:] if arguments is None else arguments)
