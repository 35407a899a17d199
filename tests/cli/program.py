"""A program with one command, for tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from finetune.cli.command import CommandGroup, CommandResult, command
from finetune.cli.runner import run

__all__ = ["failing_program", "program"]


def program(body: Callable[[], Any]) -> Callable[..., int]:
    """Return a function that runs a program with the command `go`.

    Args:
        body: what `go` does; it returns a CommandResult or any other value, or raises.
    """

    @command("go", example="test go")
    def go() -> CommandResult:
        result = body()
        return result if isinstance(result, CommandResult) else CommandResult(result, str(result))

    @click.group(cls=CommandGroup, sections={"All": (go,)})
    def group() -> None:
        """A group with one command."""

    return lambda *arguments: run(group, arguments)


def failing_program(error: BaseException) -> Callable[..., int]:
    """Return `program` with a command that raises an error."""

    def body() -> None:
        raise error

    return program(body)
