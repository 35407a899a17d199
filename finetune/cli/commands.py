"""The verbs that look at a model, and those that come after training."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.cli.runner import Answer, answers, checked
from finetune.errors import DataError, RecipeError, WeightsError
from finetune.recipe.local import check_model, check_source, names_images, source_of

if TYPE_CHECKING:
    from finetune.recipe.load import Recipe

__all__ = ["VERBS", "data_option", "model_argument"]

model_argument = click.argument("model", callback=checked(check_model))
data_option = click.option(
    "--data",
    metavar="SOURCE",
    callback=checked(check_source),
    help="By default the data that MODEL was trained on.",
)

PIXELS = click.IntRange(1, 8192)  # a side; more would ask for gigabytes an image

PORTS = click.IntRange(0, 65535)


@click.command("info")
@click.argument("model", metavar="MODEL|RECIPE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--image-size", metavar="N", type=PIXELS, help="Look at N pixels.")
@click.option("--plan", is_flag=True, help="Predict memory and time of RECIPE from a few steps.")
@answers
def model_info(
    model: str, overrides: tuple[str, ...], image_size: int | None, plan: bool
) -> Answer:
    """Show MODEL's layers, parameters, MACs, tokens and preprocessing; downloads no weights.

    With --plan, what the training of RECIPE takes on this machine, and what would halve it.
    """
    if plan:
        return _plan(model, overrides, image_size)
    if model.endswith((".yaml", ".yml")):
        raise RecipeError(
            f"{model}: is a recipe; add --plan for what its training takes here, or name a model",
            code="recipe.conflict",
        )
    if overrides:
        raise RecipeError(
            f"{overrides[0]}: belongs to a recipe; info takes it with --plan",
            code="recipe.conflict",
        )
    check_model(model)

    from finetune.commands.info import describe
    from finetune.commands.info import model_info as look

    facts = look(model, image_size=image_size)
    return Answer(facts, describe(facts))


def _plan(recipe: str, overrides: tuple[str, ...], image_size: int | None) -> Answer:
    """The plan of a recipe; a run directory has one, too."""
    if image_size is not None:
        raise RecipeError(
            f"--image-size: not with --plan; write model.image_size={image_size} instead",
            code="recipe.conflict",
        )
    path, _ = _recipe(recipe, overrides)

    from finetune.commands.plan import describe, forecast

    prediction = forecast(path, overrides)
    return Answer(prediction, describe(prediction))


def _recipe(name: str, overrides: tuple[str, ...]) -> tuple[str, Recipe]:
    """The path of a recipe, or of a run's own, and what it says."""
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import refuse_undone

    refuse_undone(overrides)
    own = Path(name) / "recipe.yaml"
    path = str(own) if own.is_file() else name
    return path, load_recipe(path, overrides)


@click.command("show")
@click.argument("model", metavar="MODEL|SOURCE|RECIPE")
@click.argument("words", metavar="[IMAGE|KEY=VALUE]...", nargs=-1)
@click.option("--images", "of_images", is_flag=True, help="Draw images of SOURCE or RECIPE.")
@click.option(
    "--out",
    metavar="PATH",
    help="The folder for the pictures; with --images a .png or .jpg file, by default sheet.png.",
)
@answers
def show(model: str, words: tuple[str, ...], out: str | None, *, of_images: bool) -> Answer:
    """Draw where MODEL looks, its filters, position embeddings and attention distances.

    With --images, the images of SOURCE by class, or training images of RECIPE (or of a run) as the
    network sees them: before the augmentation, in eight epochs, and in evaluation.
    """
    if of_images:
        return _show_images(model, words, out or "sheet.png")
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    if model.endswith((".yaml", ".yml")):
        raise RecipeError(
            f"{model}: is a recipe; add --images for its training images, or name a model",
            code="recipe.conflict",
        )
    check_model(model)
    for word in words:
        if not glob.has_magic(word) and not os.path.lexists(word):
            raise DataError(f"{word}: no such file; name another", code="data.not_found")
    from finetune.commands.show import show as draw

    drawn = draw(model, words, out=out)
    skipped = [f"{name}: {why}" for name, why in drawn["skipped"].items()]
    return Answer(drawn, "\n".join([*drawn["files"], *skipped]))


def _show_images(target: str, overrides: tuple[str, ...], out: str) -> Answer:
    """Draw the sheet of a source, or of a recipe's training images."""
    if names_images(target):
        if overrides:
            raise RecipeError(
                f"{overrides[0]}: belongs to a recipe, and {target} is a source; remove it",
                code="recipe.conflict",
            )
        source = source_of(target)
        from finetune.commands.show_images import show_source

        path = show_source(source, out)
    else:
        recipe = _recipe(target, overrides)[1]
        from finetune.commands.show_images import show_training

        path = show_training(recipe, out)
    return Answer({"file": str(path)}, str(path))


@click.command("probe")
@model_argument
@data_option
@click.option("--split", help="test or val.  [default: test, or val where there is no test]")
@click.option("--shots", default="1,5,10,25", show_default=True, help="Images of each class.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--linear", is_flag=True, help="Also logistic regression on all of train.")
@click.option(
    "--linear-sgd", is_flag=True, help="Also linear heads at 13 learning rates, as DINOv2 does."
)
@click.option("--knn", metavar="K", type=click.IntRange(min=1), help="Also K nearest neighbours.")
@click.option("--out", metavar="DIR", help="Write probe.json.")
@answers
def probe(model: str, shots: str, **options: Any) -> Answer:
    """Measure what MODEL's frozen features are worth: few-shot linear accuracy."""
    from finetune.commands.probe import describe, probe_model, shots_of

    result = probe_model(model, shots=shots_of(shots), **options)
    return Answer(result, describe(result))


@click.command("reproduce")
@click.argument("name")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--only", metavar="RUN", multiple=True, help="Only this run; may be repeated.")
@click.option("--scale", default="full", show_default=True, help="full, or smoke for minutes.")
@click.option(
    "--data",
    metavar="SOURCE=COPY",
    multiple=True,
    help="Read COPY where a recipe says SOURCE; may be repeated.",
)
@click.option("--out", metavar="DIR", help="By default runs/NAME, or runs/NAME-smoke.")
@click.option("--done", is_flag=True, help="Train nothing; take the runs that are done.")
@click.option("--page", metavar="FILE", help="Write the page of all recipes and these runs.")
@answers
def reproduce(
    name: str, overrides: tuple[str, ...], data: tuple[str, ...], **options: Any
) -> Answer:
    """Carry out the plan NAME, a set of runs, and answer its claims in one table."""
    from finetune.commands.reproduce_plan import find_plan, load_plan
    from finetune.recipe.validate import refuse_undone

    refuse_undone(overrides)
    load_plan(find_plan(name))
    sources = {}
    for pair in data:
        source, sign, copy = pair.partition("=")
        if not (source and sign and copy):
            raise RecipeError(
                f"--data: got '{pair}'; expected SOURCE=COPY", code="recipe.wrong_value"
            )
        sources[source] = copy

    from finetune.commands.reproduce import describe
    from finetune.commands.reproduce import reproduce as carry_out

    answer = carry_out(name, overrides=overrides, sources=sources, **options)
    pages = [str(answer[key]) for key in ("table", "comparison", "page") if answer[key]]
    return Answer(answer, "\n".join([describe(answer), *pages]))


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--out", metavar="PATH", help="The page's file or folder; of several runs the comparison's."
)
@answers
def report(runs: tuple[str, ...], out: str | None) -> Answer:
    """Write a page for each RUN, and one that compares them."""
    from finetune.report.run_data import check_run

    for run in runs:
        check_run(Path(run))

    from finetune.report.page import report as write_pages

    written = write_pages(runs, out=out)
    pages = [*written["reports"], written["comparison"]]
    return Answer(written, "\n".join(str(page) for page in pages if page))


def _check_folder(path: str) -> None:
    if not os.path.lexists(path):
        raise WeightsError(
            f"{path}: no such folder; give the one that `finetune train` wrote",
            code="weights.not_found",
        )


@click.command("push")
@click.argument("run_or_model", metavar="RUN", callback=checked(_check_folder))
@click.argument("repository", metavar="REPO")
@click.option("--private", is_flag=True, help="Make REPO a private repository.")
@click.option("--revision", metavar="BRANCH", help="The branch to push to.  [default: main]")
@click.option("--message", metavar="TEXT", help="The commit's message.")
@click.option("--adapter", is_flag=True, help="Send only the adapter, in peft's format.")
@answers
def push(run_or_model: str, repository: str, **options: Any) -> Answer:
    """Push the model of RUN (a run directory or model folder) to REPO, owner/name on the hub.

    The token is that of HF_TOKEN or of `hf auth login`.
    """
    from finetune.publish.push import push as push_model

    pushed = push_model(run_or_model, repository, **options)
    text = f"commit {pushed['commit']}"
    if not pushed["changed"]:
        text += " (nothing has changed: no new commit)"
    return Answer(pushed, f"{pushed['url']}\n{text}")


@click.command("average")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, callback=checked(_check_folder))
@click.option("--out", metavar="DIR", required=True, help="The folder for the model.")
@click.option(
    "--alpha", "alphas", metavar="A", multiple=True, type=float, help="0 to 1; may be repeated."
)
@click.option("--greedy", is_flag=True, help="Take only runs that validation gains by.")
@answers
def average(runs: tuple[str, ...], **options: Any) -> Answer:
    """Average weights: of one RUN and its pretrained ones (--alpha, WiSE-FT), or of several (soup).

    Of several --alpha the best on validation is kept. The result is a model folder.
    """
    from finetune.commands.average import average as average_weights
    from finetune.commands.average import describe

    result = average_weights(runs, **options)
    return Answer(result, describe(result))


@click.command("export")
@model_argument
@click.option(
    "--format",
    default="onnx",
    show_default=True,
    metavar="TEXT",
    type=click.Choice(["onnx", "torch"]),
    help="onnx or torch.",
)
@click.option("--out", metavar="PATH", help="The file, or the folder for it.")
@click.option("--images", metavar="PATH", multiple=True, help="What to compare the logits on.")
@click.option("--image-size", metavar="N", type=PIXELS, help="Resize to N pixels.")
@answers
def export(model: str, **options: Any) -> Answer:
    """Export MODEL for other programs, with its preprocessing, and compare the logits."""
    from finetune.commands.export import describe, export_model

    exported = export_model(model, **options)
    return Answer(exported, describe(exported))


@click.command("demo")
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7860, show_default=True, type=PORTS, help="0 takes a free one.")
@click.option("--share", is_flag=True, help="Also make a public link, through Gradio's servers.")
@click.option("--export-space", metavar="DIR", help="Write a folder that runs as a hub Space.")
@answers
def demo(model: str, host: str, port: int, share: bool, export_space: str | None) -> Answer:
    """Show MODEL in the browser: drop a picture, see its classes and where the model looked."""
    if export_space:
        from finetune.demo.space import export_space as export_folder

        written = export_folder(model, export_space)
        return Answer(written, f"{written['folder']}: {len(written['files'])} files")
    from finetune.demo.server import serve

    return Answer(serve(model, host=host, port=port, share=share), "")


@click.command("bench")
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--against",
    metavar="NAME",
    multiple=True,
    help="synthetic (no input), decode, transformers or timm-loop, which may name one precision "
    "(timm-loop:bf16, finetune:fp32); with --end-to-end timm-train:PATH or transformers-trainer; "
    "may be repeated.",
)
@click.option(
    "--end-to-end",
    is_flag=True,
    help="Time the whole training as a command, and the same by timm's train.py or the Trainer.",
)
@click.option("--steps", show_default="20", type=click.IntRange(min=1))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--losses", metavar="STEPS", type=int, help="Compare the first losses with fp32's.")
@click.option(
    "--images",
    "sizes",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    help="Train on a set of that many images, too; may be repeated.",
)
@click.option("--profile", metavar="DIR", help="Write a trace, and list the costliest operations.")
@click.option("--out", metavar="FILE", help="Add the figures to a page such as BENCHMARKS.md.")
@answers
def bench(recipe: str, overrides: tuple[str, ...], *, end_to_end: bool, **options: Any) -> Answer:
    """Measure how fast RECIPE trains on this machine, and the same training in other loops."""
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import refuse_undone

    refuse_undone(overrides)
    load_recipe(recipe, overrides)
    given = {name: value for name, value in options.items() if value not in (None, ())}
    of_steps = sorted({"steps", "losses", "sizes", "profile"} & given.keys())
    if end_to_end and of_steps:
        names = ", ".join("--images" if name == "sizes" else f"--{name}" for name in of_steps)
        raise RecipeError(
            f"bench: {names} count steps, and --end-to-end times a whole training; leave them out",
            code="recipe.conflict",
        )

    from finetune.bench.markdown import describe

    if end_to_end:
        from finetune.bench.end_to_end import bench_jobs

        result = bench_jobs(recipe, overrides, **given)
    else:
        from finetune.bench.run import bench as measure

        result = measure(recipe, overrides, **given)
    return Answer(result, describe(result))


VERBS = (model_info, show, probe, reproduce, report, push, average, export, demo, bench)
