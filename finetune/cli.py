"""The command line: the verbs, each handing over to the package.

Nothing heavy is imported before a verb needs it: `finetune --help` does not load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from finetune.errors import DataError, RecipeError
from finetune.terminal import Answer, Verbs, answers, debug_option, figures, flat, run, to_json

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
    from finetune.recipe import load_recipe

    if out == "":
        raise RecipeError("--out: is empty; name a folder, or leave it out for runs/RECIPE")
    if resume and (Path(recipe) / "recipe.yaml").is_file():
        recipe = str(Path(recipe) / "recipe.yaml")
    loaded, path = load_recipe(recipe, overrides), Path(recipe)
    # a run's own copy of its recipe belongs to that run, whatever the name of the file
    own = path.name == "recipe.yaml" and (path.parent / "run.json").is_file()
    folder = Path(out) if out else path.parent if own else Path("runs") / path.stem

    from finetune.engine import train as run_training

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
    from finetune.evaluate import describe, evaluate_model, write_results

    results = evaluate_model(model, data=data, split=split, fit_temperature=fit_temperature)
    written = write_results(results, out) if out else []
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
    from finetune.predict import predict as classify
    from finetune.predictions import describe, unreadable

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


@cli.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--out", metavar="PATH", help="The page's file or folder; of several runs the comparison's."
)
@answers
def report(runs: tuple[str, ...], out: str | None) -> Answer:
    """Write a page for each RUN, and one that compares them."""
    from finetune.report.page import report as write_pages

    written = write_pages(runs, out=out)
    pages = [*written["reports"], written["comparison"]]
    return Answer(written, "\n".join(str(page) for page in pages if page))


@cli.command("push")
@click.argument("run_or_model", metavar="RUN")
@click.argument("repository", metavar="REPO")
@click.option("--private", is_flag=True, help="Make REPO a private repository.")
@click.option("--revision", metavar="BRANCH", help="The branch to push to.  [default: main]")
@click.option("--message", metavar="TEXT", help="The commit's message.")
@answers
def push(
    run_or_model: str, repository: str, private: bool, revision: str | None, message: str | None
) -> Answer:
    """Push the model of RUN (a run directory or model folder) to REPO, owner/name on the hub.

    The token is that of HF_TOKEN or of `hf auth login`.
    """
    from finetune.hub.push import push as push_model

    pushed = push_model(
        run_or_model, repository, private=private, revision=revision, message=message
    )
    said = f"commit {pushed['commit']}"
    if not pushed["changed"]:
        said += " (nothing has changed: no new commit)"
    return Answer(pushed, f"{pushed['url']}\n{said}")


@cli.command("export")
@click.argument("model")
@click.option("--format", "kind", default="onnx", show_default=True, help="onnx or torch.")
@click.option("--out", metavar="PATH", help="The file, or the folder for it.")
@click.option("--images", metavar="PATH", multiple=True, help="What to compare the logits on.")
@click.option("--image-size", metavar="N", type=click.IntRange(min=1), help="Resize to N pixels.")
@answers
def export(
    model: str, kind: str, out: str | None, images: tuple[str, ...], image_size: int | None
) -> Answer:
    """Export MODEL for other programs, with its preprocessing, and compare the logits."""
    from finetune.export import describe, export_model

    exported = export_model(model, format=kind, out=out, images=images, image_size=image_size)
    return Answer(exported, describe(exported))


@cli.command("demo")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7860, show_default=True, type=int, help="0 takes a free one.")
@click.option("--share", is_flag=True, help="Also make a public link, through Gradio's servers.")
@click.option("--export-space", metavar="DIR", help="Write a folder that runs as a hub Space.")
@answers
def demo(model: str, host: str, port: int, share: bool, export_space: str | None) -> Answer:
    """Show MODEL in the browser: drop a picture, see its classes and where the model looked."""
    if export_space == "":
        raise RecipeError("--export-space: is empty; name a folder")
    if export_space:
        from finetune.demo.space import export_space as export_folder

        written = export_folder(model, export_space)
        return Answer(written, f"{written['folder']}: {len(written['files'])} files")
    from finetune.demo.serve import serve

    return Answer(serve(model, host=host, port=port, share=share), "")


@cli.group("recipes", cls=Verbs)
@debug_option
def recipes() -> None:
    """List, check and explain recipes."""


@recipes.command("list")
@click.argument("folder", default="recipes")
@answers
def list_recipes(folder: str) -> Answer:
    """List the recipes of FOLDER (by default ./recipes) with their network and data."""
    from finetune.recipe_help import list_folder

    rows = list_folder(folder)
    width = max((len(row["path"]) for row in rows), default=0)
    lines = [f"{row['path']:{width}}  {row['summary']}" for row in rows]
    return Answer(rows, "\n".join(lines))


@recipes.command("check")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@answers
def check(files: tuple[str, ...]) -> Answer:
    """Check recipes and print every problem of each."""
    from finetune.recipe import load_recipe

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
    from finetune.recipe_help import help_table, help_text

    return Answer(help_table(topic), help_text(topic))


@recipes.command("schema")
@answers
def schema() -> Answer:
    """Print the JSON schema of a recipe, for editors."""
    from finetune.recipe_help import json_schema

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
    from finetune.data.scan import info as describe
    from finetune.data.sources import open_source

    found = describe(open_source(source))
    return Answer(found, flat(found))


@data.command("scan")
@click.argument("source")
@answers
def scan(source: str) -> Answer:
    """Decode every image of SOURCE and list those that cannot be read."""
    from finetune.data.scan import scan as find_unreadable
    from finetune.data.sources import open_source

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what stands behind `finetune`; by default the process's own.
    Returns: the exit code.
    """
    return run(cli, sys.argv[1:] if arguments is None else arguments)
