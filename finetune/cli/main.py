"""Entry point of the command line.

Commands import their modules only when they run, so `finetune --help` does not load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from finetune import process_lifecycle
from finetune.cli import data, models, publishing, recipes, reproduction, training
from finetune.cli.command import CommandGroup
from finetune.cli.runner import EXIT_INTERRUPTED, reset_interrupt_handler, run
from finetune.host_resources import configure_openmp

__all__ = ["cli", "main"]

SECTIONS = {
    "Train": (training.train, training.tune, training.start),
    "Use a model": (
        models.predict,
        models.evaluate,
        models.compare,
        models.demo,
        models.export,
        models.average,
    ),
    "Inspect": (
        models.info,
        models.show,
        models.probe,
        models.report,
        data.data,
        recipes.recipes,
    ),
    "Publish": (publishing.push,),
    "Reproduce": (reproduction.reproduce, reproduction.bench),
}


@click.group(
    cls=CommandGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(
    sys.modules["finetune"].__version__,  # already imported, as the parent package
    prog_name="finetune",
    message="%(prog)s %(version)s",
)
def cli() -> None:
    """Fine-tune pretrained vision models from a recipe.

    Start here: finetune train recipes/quickstart.yaml

    On several processes: accelerate launch -m finetune train RECIPE
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the arguments after `finetune`; None uses those of this process.
    Returns: the exit code.
    """
    configure_openmp()
    exit_process = process_lifecycle.skip_interpreter_teardown() if arguments is None else None
    try:
        with process_lifecycle.defer_garbage_collection():
            exit_code = run(cli, sys.argv[1:] if arguments is None else arguments)
            if exit_process is not None:
                reset_interrupt_handler()  # before the garbage collection that ends the block
    except KeyboardInterrupt:  # pressed after the command had ended
        exit_code = EXIT_INTERRUPTED
    if exit_process is not None:
        exit_process(exit_code)
    return exit_code
