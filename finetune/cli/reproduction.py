"""Commands for experiments: `reproduce` checks published results, `bench` measures speed."""

from __future__ import annotations

from typing import Any

import click

from finetune.cli.command import CommandResult, command
from finetune.errors import RecipeError

__all__ = ["bench", "reproduce"]


@command("reproduce", example="finetune reproduce vit_paper --scale smoke")
@click.argument("name")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--only", metavar="RUN", multiple=True, help="Run only this entry. Repeatable.")
@click.option("--scale", default="full", show_default=True, help="full, or smoke (minutes).")
@click.option(
    "--data",
    metavar="SOURCE=COPY",
    multiple=True,
    help="Read COPY where a recipe says SOURCE. Repeatable.",
)
@click.option("--out", metavar="DIR", help="Default: runs/NAME, or runs/NAME-smoke.")
@click.option("--done", is_flag=True, help="Do not train; use only finished runs.")
@click.option("--page", metavar="FILE", help="Write a page of all recipes and these runs.")
def reproduce(
    name: str, overrides: tuple[str, ...], data: tuple[str, ...], **options: Any
) -> CommandResult:
    """Run all recipes of a plan and check their claims.

    NAME is a folder with a plan.yaml below ./recipes, or a file. The results are in one table.
    """
    from finetune.commands.reproduce_plan import find_plan, load_plan
    from finetune.recipe.validate import check_override_conflicts

    check_override_conflicts(overrides)
    load_plan(find_plan(name))
    sources = {}
    for pair in data:
        source, equals, copy = pair.partition("=")
        if not (source and equals and copy):
            raise RecipeError(
                f"--data: got '{pair}'; expected SOURCE=COPY", code="recipe.wrong_value"
            )
        sources[source] = copy

    from finetune.commands.reproduce import format_plan_results, run_plan

    results = run_plan(name, overrides=overrides, sources=sources, **options)
    files = [str(results[key]) for key in ("table", "comparison", "page") if results[key]]
    return CommandResult(results, "\n".join([format_plan_results(results), *files]))


@command("bench", example="finetune bench recipes/quickstart.yaml --against timm-loop")
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--against",
    metavar="NAME",
    multiple=True,
    help="synthetic (no input), decode, transformers or timm-loop, which may name one precision "
    "(timm-loop:bf16, finetune:fp32); with --end-to-end timm-train:PATH or transformers-trainer. "
    "Repeatable.",
)
@click.option(
    "--end-to-end",
    is_flag=True,
    help="Time the whole training command, and the same training with timm's train.py or the "
    "Trainer.",
)
@click.option(
    "--steps", show_default="20", type=click.IntRange(min=1), help="Steps per measurement."
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Measurements of each loop.",
)
@click.option("--losses", metavar="STEPS", type=int, help="Compare the first losses with fp32's.")
@click.option(
    "--images",
    "sizes",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    help="Also train on a set of N images. Repeatable.",
)
@click.option("--profile", metavar="DIR", help="Write a trace, and list the slowest operations.")
@click.option("--out", metavar="FILE", help="Add the figures to a page such as BENCHMARKS.md.")
def bench(
    recipe: str, overrides: tuple[str, ...], *, end_to_end: bool, **options: Any
) -> CommandResult:
    """Measure training speed on this machine.

    RECIPE is trained for some steps here and, with --against, in the loops of other libraries.
    """
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import check_override_conflicts

    check_override_conflicts(overrides)
    load_recipe(recipe, overrides)
    given = {name: value for name, value in options.items() if value not in (None, ())}
    step_options = sorted({"steps", "losses", "sizes", "profile"} & given.keys())
    if end_to_end and step_options:
        names = ", ".join("--images" if name == "sizes" else f"--{name}" for name in step_options)
        raise RecipeError(
            f"bench: {names} count steps, and --end-to-end times a whole training; omit them",
            code="recipe.conflict",
        )

    from finetune.bench.markdown import render_text

    if end_to_end:
        from finetune.bench.end_to_end import bench_end_to_end

        result = bench_end_to_end(recipe, overrides, **given)
    else:
        from finetune.bench.run import bench

        result = bench(recipe, overrides, **given)
    return CommandResult(result, render_text(result))
