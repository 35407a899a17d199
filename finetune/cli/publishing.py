"""The command that publishes: `push`."""

from __future__ import annotations

from typing import Any

import click

from finetune.cli.command import CommandResult, command
from finetune.cli.shared_arguments import check_run_or_model_folder, checked_by

__all__ = ["push"]


@command("push", example="finetune push runs/quickstart alice/digits --private")
@click.argument("run_or_model", metavar="RUN", callback=checked_by(check_run_or_model_folder))
@click.argument("repository", metavar="REPO")
@click.option("--private", is_flag=True, help="Create REPO as a private repository.")
@click.option("--revision", metavar="BRANCH", help="Branch to push to.  [default: main]")
@click.option("--message", metavar="TEXT", help="Commit message.")
@click.option("--adapter", is_flag=True, help="Push only the adapter, in peft's format.")
def push(run_or_model: str, repository: str, **options: Any) -> CommandResult:
    """Push a trained model and its card to the Hugging Face Hub.

    RUN is a run directory or model folder; REPO is owner/name on the Hub.

    The token comes from HF_TOKEN or `hf auth login`.
    """
    from finetune.publish.push import push

    pushed = push(run_or_model, repository, **options)
    text = f"commit {pushed['commit']}"
    if not pushed["changed"]:
        text += " (nothing has changed: no new commit)"
    return CommandResult(pushed, f"{pushed['url']}\n{text}")
