"""Commands that train: `train`, `tune` and `start`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune import process_lifecycle
from finetune.cli.command import CommandResult, command
from finetune.cli.output import format_nested, format_next_steps, format_results
from finetune.errors import (
    RecipeError,
    SetupError,
    escape_control_chars,
    has_redacted_url,
    redact_urls,
)
from finetune.log import logger
from finetune.recipe.paths import (
    check_is_outside,
    check_recipe_or_source,
    is_data_source,
    resolve_data_source,
)

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

__all__ = ["default_run_name", "start", "train", "tune"]

_download_option = click.option(
    "--download", is_flag=True, help="Also download and compare weights that are probably better."
)
_on_option = click.option(
    "--on",
    type=click.Choice(["ray"]),
    help="Train several trials at the same time with Ray, one on each GPU of the cluster.",
)


@command("train", example="finetune train recipes/quickstart.yaml optim.lr=1e-3 --out runs/first")
@click.argument("recipe", metavar="RECIPE|SOURCE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", metavar="DIR", help="Run directory. Default: runs/NAME_OF_THE_RECIPE.")
@click.option("--resume", is_flag=True, help="Continue from the newest intact checkpoint.")
@click.option("--dry-run", is_flag=True, help="Check everything, but do not train.")
@click.option(
    "--minutes",
    type=float,
    metavar="N",
    help="For a SOURCE: try several recipes, and train the best one, in N minutes.",
)
@_on_option
@_download_option
def train(
    recipe: str,
    overrides: tuple[str, ...],
    out: str | None,
    resume: bool,
    dry_run: bool,
    minutes: float | None,
    on: str | None,
    download: bool,
) -> CommandResult:
    """Fine-tune a model as RECIPE says, or on your own images.

    KEY=VALUE overrides a key of the recipe, such as optim.lr=1e-3.

    For a SOURCE of images (see `finetune start`), this command creates a recipe, prints it, and
    trains it. With --minutes, it tries more recipes for that time.

    With --resume, RECIPE may be a run directory. With --out as well, a new run starts from its
    newest checkpoint that fits, for example to train longer: optim.steps=N.
    """
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import check_override_conflicts
    from finetune.run.directory import SEARCH_FILE, resume_command

    check_override_conflicts(overrides)
    run, branch_from = Path(out) if out else None, None
    folder = Path(recipe)
    is_search = (folder / SEARCH_FILE).is_file()  # not a source, although it has no recipe yet
    search = folder
    if is_data_source(recipe) and not is_search:
        search = run or Path("runs") / default_run_name(recipe)
    if minutes is not None or (_is_unfinished_search(search) and (resume or is_search)):
        source = None if is_search else recipe
        return _train_in_minutes(
            source,
            overrides,
            search,
            minutes,
            resume=resume,
            dry_run=dry_run,
            download=download,
            on_ray=on == "ray",
        )
    if on:
        search_command = f"finetune train {recipe} --minutes N --on {on}"
        if not is_data_source(recipe):
            search_command = f"finetune tune {recipe} --minutes N --on {on}"
        raise RecipeError(
            f"--on {on}: trains the trials of a search, but this is one run; search with "
            f"{search_command}, or train on several GPUs with accelerate launch",
            code="recipe.conflict",
        )
    if (folder / ".lock").is_file() and not (folder / "recipe.yaml").is_file():
        if (folder / "run.json").is_file():
            raise RecipeError(
                f"{folder / 'recipe.yaml'}: the file is missing; restore it, for example from a "
                "copy of the run, then continue the run with --resume",
                code="recipe.not_found",
            )
        if (folder / "trials").is_dir():
            raise RecipeError(
                f"{folder / SEARCH_FILE}: the record of a search is missing; restore it from a "
                "copy, or search in another --out",
                code="recipe.not_found",
            )
        raise RecipeError(
            f"{recipe}: this run was stopped before it wrote its recipe, so nothing was trained; "
            f"start it again: {shlex.join(['finetune', 'train', 'RECIPE', '--out', recipe])}",
            code="recipe.not_a_run",
        )
    if is_data_source(recipe):
        run = run or Path("runs") / default_run_name(recipe)
        if not (resume and (run / "recipe.yaml").is_file()):
            return _train_source(recipe, overrides, run, dry_run=dry_run, download=download)
        # The images may have moved, a URL may be signed again; other images are refused.
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
    if resume and _is_unfinished_search(run):
        raise SetupError(
            f"{run}: contains an unfinished search, which {recipe} alone cannot continue; continue "
            f"the search: {resume_command(run)}, or train in another --out",
            code="setup.run_exists",
        )
    return _train_recipe(loaded, run, resume=resume, branch_from=branch_from, dry_run=dry_run)


def _is_unfinished_search(folder: Path) -> bool:
    from finetune.run.directory import SEARCH_FILE

    return (folder / SEARCH_FILE).is_file() and not (folder / "results.json").is_file()


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
    check_is_outside(source, run)
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


def _train_in_minutes(
    source: str | None,
    overrides: tuple[str, ...],
    run: Path,
    minutes: float | None,
    *,
    resume: bool,
    dry_run: bool,
    download: bool,
    on_ray: bool,
) -> CommandResult:
    """Try several recipes for a source of images, and train the best one.

    Args:
        source: the images; None to continue the search in `run`.
        minutes: time for the whole command; None for that of the search in `run`.
    """
    from finetune.recipe.load import parse_overrides
    from finetune.run.directory import resume_command

    if source is not None and not is_data_source(source):
        raise RecipeError(
            f"--minutes: {source} is a recipe or a run, whose settings are fixed; give a folder of "
            "images, or search over the section `tune` of a recipe: finetune tune RECIPE "
            f"--minutes {minutes:g}",
            code="recipe.conflict",
        )
    if source is None and not resume:
        raise RecipeError(
            f"{run}: this is the folder of a search, not a source of images; continue the search: "
            f"{resume_command(run)}",
            code="recipe.conflict",
        )
    if dry_run:
        raise RecipeError(
            "--dry-run: checks one recipe, but --minutes searches for one; omit one of the two",
            code="recipe.conflict",
        )
    _check_search(minutes, patience=parse_overrides(overrides).get("run.patience"))
    if source is not None:
        resolve_data_source(source)
        check_is_outside(source, run)
    logger.info(f"searching for the best recipe, output in {run}")
    from finetune.commands.tune import tune_source

    process_lifecycle.freeze_imports()
    results = tune_source(
        source,
        run,
        minutes=minutes,
        overrides=overrides,
        resume=resume,
        download=download,
        on_ray=on_ray,
        seconds_before=process_lifecycle.seconds_since_start(),
    )
    return _search_result(results, run)


def _check_search(minutes: float | None, *, patience: int | None) -> None:
    """Raise RecipeError for what no search supports."""
    if minutes is not None and not 0 < minutes < math.inf:
        raise RecipeError(
            f"--minutes {minutes:g}: expected a number above 0; give the minutes that the whole "
            "command may take, such as 20",
            code="recipe.wrong_value",
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(
            "--minutes: only a single process can search for a recipe; run it without the "
            "launcher, then launch the recipe.yaml that it has found",
            code="recipe.unsupported",
        )
    if patience is not None:
        raise RecipeError(
            "run.patience: not allowed in a search, which ends bad runs itself; remove the key",
            code="recipe.conflict",
        )


def _search_result(results: dict[str, Any], run: Path) -> CommandResult:
    text = f"{format_results(results)}\n{format_next_steps(run)}\ntrials: {run / 'trials.html'}"
    return CommandResult(results, text)


@command("tune", example="finetune tune recipes/tune/digits.yaml --minutes 5")
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--minutes", type=float, required=True, metavar="N", help="Time for the whole command."
)
@click.option("--out", metavar="DIR", help="Run directory. Default: runs/NAME_OF_THE_RECIPE.")
@click.option("--resume", is_flag=True, help="Continue the search in the run directory.")
@_on_option
def tune(
    recipe: str,
    overrides: tuple[str, ...],
    minutes: float,
    out: str | None,
    resume: bool,
    on: str | None,
) -> CommandResult:
    """Search over the section `tune` of RECIPE, and train the best.

    The section has a list or a range of values for each key, such as optim.lr: {low: 1e-4, high:
    1e-2, log: true}. KEY=VALUE sets a key of the recipe; it is the same in all trials.
    """
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import check_override_conflicts

    check_override_conflicts(overrides)
    loaded = load_recipe(recipe, overrides)
    _check_search(minutes, patience=loaded.run.patience)
    fixed = {each.partition("=")[0].strip() for each in overrides}
    space = {key: values for key, values in loaded.tune.items() if key not in fixed}
    if not space:
        raise RecipeError(
            f"{recipe}: no keys to vary; list them in a section `tune`, for example "
            "optim.lr: [1e-4, 1e-3], or use finetune train",
            code="recipe.missing_key",
        )
    run = Path(out) if out else Path("runs") / Path(recipe).stem
    logger.info(f"searching for the best {', '.join(space)}, output in {run}")
    from finetune.commands.tune import tune_recipe

    process_lifecycle.freeze_imports()
    results = tune_recipe(
        loaded.model_copy(update={"tune": space}),
        run,
        minutes=minutes,
        overrides=overrides,
        resume=resume,
        on_ray=on == "ray",
        seconds_before=process_lifecycle.seconds_since_start(),
    )
    return _search_result(results, run)


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
    text = created.yaml_text.rstrip()
    if out:
        address = " data.source=ADDRESS" if has_redacted_url(text) else ""
        text += f"\n{out}\ntrain it: finetune train {out}{address}"
    return CommandResult(created.recipe.redacted().model_dump(), text)
