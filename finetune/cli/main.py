"""The command line: the verbs, each handing over to the package.

Nothing heavy is imported before a verb needs it: `finetune --help` does not load torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune import processes
from finetune.cli.commands import VERBS, data_option, model_argument
from finetune.cli.runner import (
    EXIT_INTERRUPTED,
    Answer,
    Verbs,
    answers,
    checked,
    debug_option,
    end_by_interrupts,
    figures,
    flat,
    next_steps,
    run,
    to_json,
)
from finetune.errors import DataError, RecipeError, SetupError, visible
from finetune.processes import is_first_rank
from finetune.recipe.local import check_source, names_images, source_of

if TYPE_CHECKING:
    from finetune.recipe.load import Recipe

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
@click.argument("recipe", metavar="RECIPE|SOURCE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", metavar="DIR", help="Run directory; by default runs/<name of the recipe>.")
@click.option("--resume", is_flag=True, help="Continue from the newest intact checkpoint.")
@click.option("--dry-run", is_flag=True, help="Check everything, train nothing.")
@answers
def train(
    recipe: str, overrides: tuple[str, ...], out: str | None, resume: bool, dry_run: bool
) -> Answer:
    """Train as RECIPE says; KEY=VALUE changes one of its keys, such as optim.lr=1e-3.

    For a SOURCE of images, as of `finetune start`, a recipe is made first, as that does, and shown.

    With --resume, RECIPE may be a run directory.
    """
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import refuse_undone

    refuse_undone(overrides)
    folder = Path(out) if out else None
    if names_images(recipe):
        folder = folder or Path("runs") / _name_of(recipe)
        if not (resume and (folder / "recipe.yaml").is_file()):
            return _train_source(recipe, overrides, folder, dry_run=dry_run)
        recipe = str(folder)
    if resume and (Path(recipe) / "recipe.yaml").is_file():
        recipe = str(Path(recipe) / "recipe.yaml")
    loaded, path = load_recipe(recipe, overrides), Path(recipe)
    # a run's own copy of its recipe belongs to that run, whatever the name of the file
    own = path.name == "recipe.yaml" and (path.parent / "run.json").is_file()
    folder = folder or (path.parent if own else Path("runs") / path.stem)
    return _train(loaded, folder, resume=resume, dry_run=dry_run)


def _train(recipe: Recipe, folder: Path, *, resume: bool, dry_run: bool) -> Answer:
    _announce(f"{recipe.model.name} on {recipe.data.source}, output in {folder}")
    from finetune.training.train import train as run_training

    processes.spare_imports()
    results = run_training(recipe, folder, resume=resume, dry_run=dry_run)
    text = flat(results) if dry_run else f"{figures(results)}\n{next_steps(folder)}"
    return Answer(results, text)


def _train_source(
    source: str, overrides: tuple[str, ...], folder: Path, *, dry_run: bool
) -> Answer:
    """Make a recipe for a source of images and train it."""
    source_of(source)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(
            f"{source}: a recipe is made by one process; run finetune start {source} --out "
            "my.yaml first, then launch the training of my.yaml",
            code="recipe.unsupported",
        )
    _announce(f"looking at {source}, for which a recipe is made")
    from finetune.commands.start import new_run, note, start

    if folder.exists() and not dry_run:
        with new_run(folder):  # refused now, and not after minutes of trials
            pass
    started = start(source, overrides=overrides)
    click.echo(visible(started.text), err=True, nl=False)
    if not dry_run:
        note(started, folder)
    return _train(started.recipe, folder, resume=False, dry_run=dry_run)


def _announce(line: str) -> None:
    """Say what has begun, before the libraries that it needs are loaded: they take seconds."""
    from finetune.console import say

    if is_first_rank():
        say(line)


def _name_of(source: str) -> str:
    """A run's name for a source: the last part of its path, without what is no name of a folder."""
    last = source.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return re.sub(r"[*?{}\[\],]", "", Path(last).stem).strip(".-") or "run"


@cli.command("start")
@click.argument("source")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", metavar="FILE", help="Write the recipe there.")
@answers
def start(source: str, overrides: tuple[str, ...], out: str | None) -> Answer:
    """Make a recipe for SOURCE, with a reason beside each choice; nothing is downloaded.

    SOURCE is a folder of class folders, a file (CSV with paths and labels, tar shard, parquet), or
    folder:, csv:, tar:, parquet:, hub: or embedded: as in data.source.
    KEY=VALUE takes the place of a choice.
    """
    from finetune.recipe.validate import refuse_undone

    source_of(source)
    refuse_undone(overrides)
    from finetune.commands.predict_io import check_target

    if out and check_target(out, option="--out", suffixes=(".yaml", ".yml")).exists():
        raise SetupError(
            f"--out: '{out}' is there already; remove it, or choose another name",
            code="setup.exists",
        )
    from finetune.commands.start import start as make_recipe
    from finetune.files import write_atomically

    started = make_recipe(source, overrides=overrides)
    if out:
        write_atomically(Path(out), started.text)
    written = f"\n{out}\ntrain it: finetune train {out}" if out else ""
    return Answer(started.recipe.model_dump(), f"{started.text.rstrip()}{written}")


@cli.command("eval")
@model_argument
@data_option
@click.option(
    "--split",
    help="train, val or test.  [default: test, or val where there is none; of one split, all]",
)
@click.option("--out", metavar="DIR", help="Write results.json, per_class.csv and pictures.")
@click.option(
    "--fit-temperature",
    is_flag=True,
    help="Fit a temperature on val (or --split) and write it into MODEL's config.json.",
)
@click.option(
    "--corrupt",
    metavar="KIND",
    help="Measure corrupted images, too: all, noise, blur, jpeg or contrast; noise:3 is one of 5.",
)
@answers
def evaluate(model: str, out: str | None, **options: Any) -> Answer:
    """Measure MODEL on a split: a run directory, a model folder, hf-hub:owner/name or timm name."""
    from finetune.commands.evaluate import describe, evaluate_model, write_results

    results = evaluate_model(model, out=out, **options)
    written = write_results(results, out) if out and is_first_rank() else []
    return Answer(results, "\n".join([describe(results), *written]))


@cli.command("predict")
@model_argument
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--top-k", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--out", metavar="FILE", help="Write a .csv or .jsonl file.")
@click.option("--sheet", metavar="FILE", help="Write a .png with the predictions under pictures.")
@click.option("--calibrated", is_flag=True, help="Divide the logits by MODEL's temperature.")
@click.option(
    "--threshold",
    metavar="T",
    type=float,
    help="0 to 1, of every class of a MODEL that gives an image several labels, not its own.",
)
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="Images through the network at once.  [default: 8 on a CPU, else 64]",
)
@answers
def predict(
    model: str, paths: tuple[str, ...], out: str | None, sheet: str | None, **options: Any
) -> Answer:
    """Classify images: files, folders, patterns, or "-" for a list on standard input."""
    from finetune.commands.predict import predict as classify
    from finetune.commands.predict_io import describe, unreadable

    rows = classify(model, paths, out=out, sheet=sheet, **options)
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
        RecipeError("\n".join(problems), code="recipe.wrong_value") if problems else None,
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

    document = json_schema()
    return Answer(document, to_json(document))


@cli.group("data", cls=Verbs)
@debug_option
def data() -> None:
    """Look into data sets."""


multilabel_option = click.option(
    "--multilabel", is_flag=True, help="An image has any number of labels, as data.task says."
)


@data.command("info")
@click.argument("source", callback=checked(check_source))
@click.option("--sheet", metavar="FILE", help="Write a .png or .jpg with images of each class.")
@multilabel_option
@answers
def info(source: str, sheet: str | None, *, multilabel: bool) -> Answer:
    """Show the splits, classes and image sizes of SOURCE."""
    from finetune.data.decode_all import info as describe
    from finetune.data.source import open_source

    drawn = {}
    if sheet:
        from finetune.commands.show_images import show_source

        path = show_source(source, sheet, option="--sheet", multilabel=multilabel)
        drawn["sheet"] = str(path)
    facts = {**describe(open_source(source, multilabel=multilabel)), **drawn}
    return Answer(facts, flat(facts))


@data.command("scan")
@click.argument("source", callback=checked(check_source))
@multilabel_option
@answers
def scan(source: str, *, multilabel: bool) -> Answer:
    """Decode every image of SOURCE and list those that cannot be read."""
    from finetune.data.decode_all import scan as find_unreadable
    from finetune.data.source import open_source

    opened = open_source(source, multilabel=multilabel)
    unreadable = find_unreadable(opened)
    problem = None
    if unreadable:
        total = sum(len(split) for split in opened.splits.values())
        problem = DataError(
            f"{source}: {len(unreadable)} of {total} images cannot be read; mend or remove them, "
            "or train with data.unreadable=quarantine",
            code="data.unreadable",
        )
    lines = [f"{row['split']}: {row['name']}: {row['error']}" for row in unreadable]
    return Answer(unreadable, "\n".join(lines) or f"{source}: every image can be read", problem)


for verb in VERBS:
    cli.add_command(verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what stands behind `finetune`; by default the process's own.
    Returns: the exit code.
    """
    end = processes.skip_teardown() if arguments is None else None
    try:
        with processes.defer_garbage_collection():
            code = run(cli, sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # it came when the verb had ended
        code = EXIT_INTERRUPTED
    if end is not None:
        end_by_interrupts()
        end(code)
    return code
