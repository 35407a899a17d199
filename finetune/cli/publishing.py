"""The command that publishes: `push`."""

from __future__ import annotations

from typing import Any

import click

from finetune.cli.command import CommandResult, command
from finetune.cli.shared_arguments import (
    check_run_or_model_folder,
    checked_by,
    ort_web_option,
)
from finetune.errors import RecipeError

__all__ = ["push"]


@command("push", example="finetune push runs/quickstart alice/digits --private")
@click.argument("run_or_model", metavar="RUN", callback=checked_by(check_run_or_model_folder))
@click.argument("repository", metavar="REPO")
@click.option("--private", is_flag=True, help="Create REPO as a private repository.")
@click.option("--revision", metavar="BRANCH", help="Branch to push to.  [default: main]")
@click.option("--message", metavar="TEXT", help="Commit message.")
@click.option("--adapter", is_flag=True, help="Push only the adapter, in peft's format.")
@click.option(
    "--static-space",
    is_flag=True,
    help="Push a page that runs the model in the browser; REPO is a Space.",
)
@ort_web_option
def push(
    run_or_model: str,
    repository: str,
    static_space: bool,
    ort_web: str | None,
    adapter: bool,
    **options: Any,
) -> CommandResult:
    """Push a trained model and its card to the Hugging Face Hub.

    RUN is a run directory or model folder; REPO is owner/name on the Hub.

    The token comes from HF_TOKEN or `hf auth login`.
    """
    if static_space and adapter:
        raise RecipeError(
            "--static-space: not allowed with --adapter; remove one of them",
            code="recipe.conflict",
        )
    if static_space:
        from finetune.demo.static_page import push_static_space

        pushed = push_static_space(run_or_model, repository, ort_web=ort_web, **options)
    else:
        from finetune.publish.push import push

        pushed = push(run_or_model, repository, adapter=adapter, **options)
    text = f"commit {pushed['commit']}"
    if not pushed["changed"]:
        text += " (nothing has changed: no new commit)"
    return CommandResult(pushed, f"{pushed['url']}\n{text}")
