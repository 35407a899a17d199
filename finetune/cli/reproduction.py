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
@click.option("--only", metavar="RUN", multiple=True, help="Run only this plan entry. Repeatable.")
@click.option("--scale", default="full", show_default=True, help="full, or smoke (minutes).")
@click.option(
    "--data",
    metavar="SOURCE=COPY",
    multiple=True,
    help="Read COPY instead of the data source SOURCE. Repeatable.",
)
@click.option(
    "--out", metavar="DIR", help="Folder for the runs. Default: runs/NAME, or runs/NAME-smoke."
)
@click.option("--done", is_flag=True, help="Do not train; use only finished runs.")
@click.option(
    "--page", metavar="FILE", help="Write a Markdown page of all recipes and their results."
)
def reproduce(
    name: str, overrides: tuple[str, ...], data: tuple[str, ...], **options: Any
) -> CommandResult:
    """Run all recipes of a plan and check their claims.

    NAME is a folder below ./recipes that contains a plan.yaml, or the path of a plan. One table
    shows the results.
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


@command("bench", example="finetune bench recipes/quickstart.yaml --profile trace")
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--steps",
    default=20,
    show_default=True,
    type=click.IntRange(min=1),
    help="Timed steps per measurement.",
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Repetitions of all measurements.",
)
@click.option(
    "--decode",
    is_flag=True,
    help="With data.keep=none: compare the workers with processes that only decode.",
)
@click.option("--profile", metavar="DIR", help="Write a trace, and list the slowest operations.")
def bench(recipe: str, overrides: tuple[str, ...], **options: Any) -> CommandResult:
    """Measure training speed on this machine.

    RECIPE is trained for some steps, with and without data loading. Also measured: evaluation,
    memory, and the speed of this machine at the network's matrix multiplications.
    """
    from finetune.recipe.load import load_recipe
    from finetune.recipe.validate import check_override_conflicts

    check_override_conflicts(overrides)
    load_recipe(recipe, overrides)

    from finetune.bench.run import bench, format_bench

    result = bench(recipe, overrides, **options)
    return CommandResult(result, format_bench(result))
