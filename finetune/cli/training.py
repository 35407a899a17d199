"""Commands that train: `train` and `start`."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from finetune import process_lifecycle
from finetune.cli.command import CommandResult, command
from finetune.cli.output import format_nested, format_next_steps, format_results
from finetune.errors import RecipeError, SetupError, escape_control_chars, redact_urls
from finetune.log import logger
from finetune.recipe.paths import check_recipe_or_source, is_data_source, resolve_data_source

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

__all__ = ["default_run_name", "start", "train"]

_download_option = click.option(
    "--download", is_flag=True, help="Also download and compare weights that are probably better."
)


@command("train", example="finetune train recipes/quickstart.yaml optim.lr=1e-3 --out runs/first")
@click.argument("recipe", metavar="RECIPE|SOURCE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", metavar="DIR", help="Run directory. Default: runs/NAME_OF_THE_RECIPE.")
@click.option("--resume", is_flag=True, help="Continue from the newest intact checkpoint.")
@click.option("--dry-run", is_flag=True, help="Check everything, but do not train.")
@_download_option
def train(
    recipe: str,
    overrides: tuple[str, ...],
    out: str | None,
    resume: bool,
    dry_run: bool,
    download: bool,
) -> CommandResult:
    """Fine-tune a model as RECIPE says, or on your own images.

    KEY=VALUE overrides a key of the recipe, such as optim.lr=1e-3.

    For a SOURCE of images (see `finetune start`), this command creates a recipe, prints it, and
    trains it.

    With --resume, RECIPE may be a run directory. With --out as well, a new run starts from its
    newest checkpoint that fits, for example to train longer: optim.steps=N.
    """
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import check_override_conflicts
    from finetune.run.directory import resume_command

    check_override_conflicts(overrides)
    run, branch_from = Path(out) if out else None, None
    folder = Path(recipe)
    if (folder / ".lock").is_file() and not (folder / "recipe.yaml").is_file():
        raise RecipeError(
            f"{recipe}: this run was stopped before it wrote its recipe, so nothing was trained; "
            f"start it again: {shlex.join(['finetune', 'train', 'RECIPE', '--out', recipe])}",
            code="recipe.not_a_run",
        )
    if is_data_source(recipe):
        run = run or Path("runs") / default_run_name(recipe)
        if not (resume and (run / "recipe.yaml").is_file()):
            return _train_source(recipe, overrides, run, dry_run=dry_run, download=download)
        if redact_urls(recipe) != recipe:  # the run does not store passwords and signatures
            overrides = (f"data.source={json.dumps(resolve_data_source(recipe))}", *overrides)
        recipe = str(run)
    elif download:
        raise RecipeError(
            f"--download: {recipe} names its weights, which are downloaded anyway; use the option "
            "with a folder of images",
            code="recipe.conflict",
        )
    if (Path(recipe) / "recipe.yaml").is_file():
        if not resume:
            raise RecipeError(
                f"{recipe}: this is a run directory, not a recipe; to continue the run: "
                f"{resume_command(Path(recipe))}",
                code="recipe.not_a_recipe",
            )
        if run is not None and run.resolve() != Path(recipe).resolve():
            branch_from = Path(recipe)
        recipe = str(Path(recipe) / "recipe.yaml")
    check_recipe_or_source(recipe)
    loaded, path = load_recipe(recipe, overrides), Path(recipe)
    # recipe.yaml in a run directory continues that run; the name of any other file names a new run
    has_run_files = any((path.parent / name).is_file() for name in ("run.json", ".lock"))
    is_run = path.name == "recipe.yaml" and has_run_files
    run = run or (path.parent if is_run else Path("runs") / path.stem)
    return _train_recipe(loaded, run, resume=resume, branch_from=branch_from, dry_run=dry_run)


def _train_recipe(
    recipe: Recipe, run: Path, *, resume: bool, branch_from: Path | None = None, dry_run: bool
) -> CommandResult:
    # log before importing torch, which takes seconds
    logger.info(f"{recipe.model.name} on {recipe.data.source}, output in {run}")
    from finetune.training.train import train

    process_lifecycle.freeze_imports()
    seconds_before = process_lifecycle.seconds_since_start()
    results = train(
        recipe,
        run,
        resume=resume,
        branch_from=branch_from,
        dry_run=dry_run,
        seconds_before=seconds_before,
    )
    if dry_run:
        return CommandResult(results, format_nested(results))
    return CommandResult(results, f"{format_results(results)}\n{format_next_steps(run)}")


def _train_source(
    source: str, overrides: tuple[str, ...], run: Path, *, dry_run: bool, download: bool
) -> CommandResult:
    """Create a recipe for a source of images and train it."""
    from finetune.recipe.load import parse_overrides

    resolve_data_source(source)
    parse_overrides(overrides)  # before importing torch, which takes seconds
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(
            f"{source}: only a single process can create a recipe; run finetune start {source} "
            "--out my.yaml first, then launch the training of my.yaml",
            code="recipe.unsupported",
        )
    logger.info(f"creating a recipe for {source}")
    from finetune.commands import start

    if run.exists() and not dry_run:
        with start.open_new_run(run):  # fail now, not after minutes of trials
            pass
    created = start.start(source, overrides=overrides, download=download)
    click.echo(escape_control_chars(created.yaml_text), err=True, nl=False)
    if not dry_run:
        start.write_start_files(created, run)
    return _train_recipe(created.recipe, run, resume=False, dry_run=dry_run)


def default_run_name(source: str) -> str:
    """Return the default run name for a data source: its file name, as a valid folder name."""
    last = redact_urls(source).rstrip("/").rpartition("/")[2].rpartition(":")[2]
    last = last.removesuffix("?***")
    return re.sub(r"[*?{}\[\],]", "", Path(last).stem).strip(".-") or "run"


@command("start", example="finetune start photos optim.epochs=10 --out photos.yaml")
@click.argument("source")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", metavar="FILE", help="Write the recipe to FILE.")
@_download_option
def start(
    source: str, overrides: tuple[str, ...], out: str | None, download: bool
) -> CommandResult:
    """Create a recipe for your images and explain each value.

    SOURCE is a folder of class folders, a file (CSV with paths and labels, tar shard, parquet), or
    a prefixed source as in data.source: folder:, csv:, tar:, parquet:, hub: or embedded:. Weights
    are downloaded only with --download.

    KEY=VALUE sets a key of the recipe.
    """
    from finetune.files import check_output_file, write_atomically
    from finetune.recipe.load import parse_overrides
    from finetune.recipe.validate import check_override_conflicts

    resolve_data_source(source)
    check_override_conflicts(overrides)
    parse_overrides(overrides)  # before importing torch, which takes seconds
    if out and check_output_file(out, option="--out", suffixes=(".yaml", ".yml")).exists():
        raise SetupError(
            f"--out: '{out}' already exists; remove it, or choose another name",
            code="setup.exists",
        )
    from finetune.commands.start import start

    created = start(source, overrides=overrides, download=download)
    if out:
        write_atomically(Path(out), created.yaml_text)
    next_step = f"\n{out}\ntrain it: finetune train {out}" if out else ""
    return CommandResult(
        created.recipe.redacted().model_dump(), f"{created.yaml_text.rstrip()}{next_step}"
    )
