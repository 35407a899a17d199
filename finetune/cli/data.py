"""Commands for datasets: `data info`, `data scan` and `data doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from finetune.cli.command import CommandGroup, CommandResult, command
from finetune.cli.output import format_nested
from finetune.cli.shared_arguments import (
    PORT,
    check_model_argument,
    check_run_or_model_folder,
    checked_by,
    source_argument,
)
from finetune.errors import DataError, redact_urls
from finetune.log import logger
from finetune.recipe.paths import check_is_outside

__all__ = ["data"]

multilabel_option = click.option(
    "--multilabel",
    is_flag=True,
    help="Read any number of labels per image, like data.task=multilabel.",
)


@click.group("data", cls=CommandGroup)
def data() -> None:
    """Show classes; find wrong labels, duplicates and bad images."""


@command("info", example="finetune data info photos --sheet photos.png")
@source_argument
@click.option("--sheet", metavar="FILE", help="Draw images of each class into a .png or .jpg file.")
@multilabel_option
def info(source: str, sheet: str | None, *, multilabel: bool) -> CommandResult:
    """Show the splits, classes and image sizes of SOURCE.

    SOURCE is a folder or file of images, or a prefixed source as in data.source; see
    `finetune start`.
    """
    from finetune.data.open_source import open_source
    from finetune.data.summary import summarize_source

    sheet_entry = {}
    if sheet:
        from finetune.commands.show_images import show_source

        path = show_source(source, sheet, option="--sheet", multilabel=multilabel)
        sheet_entry["sheet"] = str(path)
    summary = {**summarize_source(open_source(source, multilabel=multilabel)), **sheet_entry}
    return CommandResult(summary, format_nested(summary))


@command("scan", example="finetune data scan photos")
@source_argument
@multilabel_option
def scan(source: str, *, multilabel: bool) -> CommandResult:
    """Decode every image of SOURCE and list those that cannot be read.

    SOURCE is a folder or file of images, or a prefixed source as in data.source; see
    `finetune start`.
    """
    from finetune.data.decode_split import find_unreadable_images
    from finetune.data.open_source import open_source
    from finetune.host_resources import num_cores

    opened = open_source(source, multilabel=multilabel)
    unreadable = find_unreadable_images(opened, num_cores())
    error = None
    if unreadable:
        total = sum(len(split) for split in opened.splits.values())
        error = DataError(
            f"{source}: {len(unreadable)} of {total} images cannot be read; fix or remove them, "
            "or train with data.unreadable=quarantine",
            code="data.unreadable",
        )
    lines = [f"{row['split']}: {row['name']}: {row['error']}" for row in unreadable]
    text = "\n".join(lines) or f"{redact_urls(source)}: every image can be read"
    return CommandResult(unreadable, text, error)


@command("doctor", example="finetune data doctor photos --out photos-doctor")
@source_argument
@click.option(
    "--weights",
    metavar="NAME",
    multiple=True,
    callback=checked_by(check_model_argument),
    help="Pretrained weights to compute features with; repeat to average several. Default: the "
    "best one or two on this machine.",
)
@click.option("--out", metavar="DIR", default="doctor", show_default=True, help="Output folder.")
@click.option(
    "--run",
    metavar="RUN",
    callback=checked_by(check_run_or_model_folder),
    help="Run directory trained on SOURCE: its predictions count too, for images it has held out.",
)
@click.option(
    "--group",
    metavar="COLUMN|REGEX",
    help="Column, or regular expression for the names of images, that tells which images belong "
    "together, like data.group.",
)
@multilabel_option
@click.option(
    "--review",
    is_flag=True,
    help="Decide about the findings in DIR on a web page, which saves DIR/decisions.csv.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the page.")
@click.option("--port", default=7861, show_default=True, type=PORT, help="0: any free port.")
def doctor(
    source: str, out: str, host: str, port: int, *, review: bool, **options: Any
) -> CommandResult:
    """Find wrong labels, near-duplicates, leaks and outliers in SOURCE.

    SOURCE is a folder or file of images, or a prefixed source as in data.source; see
    `finetune start`. The doctor lists its findings in DIR and changes no image and no label.
    With --review and without --weights, findings that DIR already has are used.
    """
    from finetune.doctor.diagnosis import diagnose, format_diagnosis

    check_is_outside(source, Path(out))
    has_findings = Path(out, "doctor.json").exists()
    if not (review and has_findings and not options["weights"]):
        diagnosis = diagnose(source, out=out, **options)
        if not review or not diagnosis:
            return CommandResult(diagnosis, format_diagnosis(diagnosis, out))
        logger.info(format_diagnosis(diagnosis, out))
    from finetune.doctor.review_server import serve_review

    return CommandResult(serve_review(source, folder=out, host=host, port=port), "")


for each in (info, scan, doctor):
    data.add_command(each)
