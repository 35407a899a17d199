"""The verbs that look at a model, and those that come after training."""

from __future__ import annotations

from pathlib import Path

import click

from finetune.cli.runner import Answer, answers
from finetune.errors import RecipeError

__all__ = ["VERBS"]

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
            f"{model}: is a recipe; add --plan for what its training takes here, or name a model"
        )
    if overrides:
        raise RecipeError(f"{overrides[0]}: belongs to a recipe; info takes it with --plan")
    from finetune.commands.info import describe
    from finetune.commands.info import model_info as look

    found = look(model, image_size=image_size)
    return Answer(found, describe(found))


def _plan(recipe: str, overrides: tuple[str, ...], image_size: int | None) -> Answer:
    """The forecast of a recipe; a run directory has one, too."""
    from finetune.recipe.validate import refuse_undone

    if image_size is not None:
        raise RecipeError(
            f"--image-size: not with --plan; write model.image_size={image_size} instead"
        )
    refuse_undone(overrides)
    own = Path(recipe) / "recipe.yaml"
    from finetune.commands.plan import describe, forecast

    found = forecast(str(own) if own.is_file() else recipe, overrides)
    return Answer(found, describe(found))


@click.command("show")
@click.argument("model")
@click.argument("images", metavar="[IMAGE]...", nargs=-1)
@click.option("--out", metavar="DIR", required=True, help="The folder for the pictures.")
@answers
def show(model: str, images: tuple[str, ...], out: str) -> Answer:
    """Draw where MODEL looks, its filters, position embeddings and attention distances."""
    from finetune.commands.show import show as draw

    found = draw(model, images, out=out)
    skipped = [f"{name}: {why}" for name, why in found["skipped"].items()]
    return Answer(found, "\n".join([*found["files"], *skipped]))


@click.command("probe")
@click.argument("model")
@click.option("--data", metavar="SOURCE", help="By default the data that MODEL was trained on.")
@click.option("--split", help="test or val.  [default: test, or val where there is no test]")
@click.option("--shots", default="1,5,10,25", show_default=True, help="Images of each class.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--linear", is_flag=True, help="Also logistic regression on all of train.")
@click.option("--knn", metavar="K", type=click.IntRange(min=1), help="Also K nearest neighbours.")
@click.option("--out", metavar="DIR", help="Write probe.json.")
@answers
def probe(
    model: str,
    data: str | None,
    split: str | None,
    shots: str,
    seeds: int,
    linear: bool,
    knn: int | None,
    out: str | None,
) -> Answer:
    """Measure what MODEL's frozen features are worth: few-shot linear accuracy."""
    from finetune.commands.probe import describe, probe_model, shots_of

    result = probe_model(
        model,
        data=data,
        split=split,
        shots=shots_of(shots),
        seeds=seeds,
        linear=linear,
        knn=knn,
        out=out,
    )
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
    name: str,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    scale: str,
    data: tuple[str, ...],
    out: str | None,
    done: bool,
    page: str | None,
) -> Answer:
    """Carry out the plan NAME, a set of runs, and answer its claims in one table."""
    from finetune.commands.reproduce import reproduce as carry_out
    from finetune.commands.reproduce_table import describe
    from finetune.recipe.validate import refuse_undone

    refuse_undone(overrides)
    if page == "":
        raise RecipeError("--page: is empty; name a file")
    sources = {}
    for pair in data:
        source, sign, copy = pair.partition("=")
        if not (source and sign and copy):
            raise RecipeError(f"--data: got '{pair}'; expected SOURCE=COPY")
        sources[source] = copy
    told = carry_out(
        name,
        only=only,
        scale=scale,
        overrides=overrides,
        sources=sources,
        out=out,
        done=done,
        page=page,
    )
    pages = [str(told[key]) for key in ("table", "comparison", "page") if told[key]]
    return Answer(told, "\n".join([describe(told), *pages]))


@click.command("report")
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


@click.command("push")
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
    from finetune.publish.push import push as push_model

    pushed = push_model(
        run_or_model, repository, private=private, revision=revision, message=message
    )
    said = f"commit {pushed['commit']}"
    if not pushed["changed"]:
        said += " (nothing has changed: no new commit)"
    return Answer(pushed, f"{pushed['url']}\n{said}")


@click.command("export")
@click.argument("model")
@click.option("--format", "kind", default="onnx", show_default=True, help="onnx or torch.")
@click.option("--out", metavar="PATH", help="The file, or the folder for it.")
@click.option("--images", metavar="PATH", multiple=True, help="What to compare the logits on.")
@click.option("--image-size", metavar="N", type=PIXELS, help="Resize to N pixels.")
@answers
def export(
    model: str, kind: str, out: str | None, images: tuple[str, ...], image_size: int | None
) -> Answer:
    """Export MODEL for other programs, with its preprocessing, and compare the logits."""
    from finetune.commands.export import describe, export_model

    exported = export_model(model, format=kind, out=out, images=images, image_size=image_size)
    return Answer(exported, describe(exported))


@click.command("demo")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7860, show_default=True, type=PORTS, help="0 takes a free one.")
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
    "(timm-loop:bf16); may be repeated.",
)
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--losses", metavar="STEPS", type=int, help="Compare the first losses with fp32's.")
@click.option(
    "--images",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    help="Train on a set of that many images, too; may be repeated.",
)
@click.option("--profile", metavar="DIR", help="Write a trace, and list the costliest operations.")
@click.option("--out", metavar="FILE", help="Add the figures to a page such as BENCHMARKS.md.")
@answers
def bench(
    recipe: str,
    overrides: tuple[str, ...],
    against: tuple[str, ...],
    steps: int,
    repeats: int,
    losses: int | None,
    images: tuple[int, ...],
    profile: str | None,
    out: str | None,
) -> Answer:
    """Measure how fast RECIPE trains on this machine, and the same training in other loops."""
    from finetune.bench.markdown import describe
    from finetune.bench.run import bench as measure
    from finetune.recipe.validate import refuse_undone

    refuse_undone(overrides)
    if "" in (profile, out):
        raise RecipeError("--profile, --out: is empty; name a place, or leave it out")
    found = measure(
        recipe,
        overrides,
        against=against,
        steps=steps,
        repeats=repeats,
        losses=losses,
        sizes=images,
        profile=profile,
        out=out,
    )
    return Answer(found, describe(found))


VERBS = (model_info, show, probe, reproduce, report, push, export, demo, bench)
