"""Behavior of every command: --json and --debug, results on standard output, help."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import click

from finetune.cli.output import to_json
from finetune.cli.streams import stdout_errors
from finetune.errors import (
    FinetuneError,
    HubError,
    RecipeError,
    SetupError,
    did_you_mean,
    escape_control_chars,
    redact_urls,
)
from finetune.ranks import is_main_process

__all__ = ["CommandGroup", "CommandResult", "command"]

_OUTPUT_OPTIONS = ("out", "sheet", "features", "page", "profile", "export_space", "static")


@dataclass(frozen=True)
class CommandResult:
    """The result of a command.

    Attributes:
        data: result to print with --json.
        text: the same result, to print without --json; nothing is printed if this is empty.
        error: the error to raise after printing; None if the command succeeded.
    """

    data: Any
    text: str
    error: FinetuneError | None = None


class CommandGroup(click.Group):
    """A click group with --debug, sections of commands in its help, and suggestions for typos."""

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[click.Command]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_debug_option())
        self.sections = sections or {}
        for commands in self.sections.values():
            for each in commands:
                self.add_command(each)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"no such command '{name}'{did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the full first sentence of their help; click would truncate it."""
        sections = self.sections or {"Commands": list(self.commands.values())}
        width = max(map(len, self.commands), default=0)
        for title, commands in sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (f"{each.name:{width}}", each.get_short_help_str(limit=sys.maxsize))
                        for each in commands
                    ]
                )


def command(name: str, *, example: str) -> Callable[[Callable[..., CommandResult]], click.Command]:
    """Decorator: make a click command with --json and --debug that prints the returned result.

    Args:
        name: name of the command.
        example: example command line to show in --help.
    """

    def decorate(function: Callable[..., CommandResult]) -> click.Command:
        @functools.wraps(function)
        def run_and_print(as_json: bool, **arguments: Any) -> None:
            state = click.get_current_context().find_root().obj
            state["json"] = as_json
            _check_output_paths(arguments)
            _check_torch_loads()
            _check_hub_endpoint()
            with contextlib.redirect_stdout(sys.stderr):  # libraries may print
                result = function(**arguments)
            if is_main_process():
                text = to_json(result.data) if as_json else escape_control_chars(result.text)
                state["result_printed"] = bool(text)
                with stdout_errors():
                    click.echo(text, nl=bool(text))
            if result.error:
                raise result.error

        made = click.command(name, epilog=f"\b\nExample:\n  {example}")(run_and_print)
        json_help = "Print machine-readable output."
        made.params.append(click.Option(["--json", "as_json"], is_flag=True, help=json_help))
        made.params.append(_debug_option())
        return made

    return decorate


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_enable_debug,
        help="Show tracebacks.",
    )


def _enable_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().obj["debug"] = True


def _check_torch_loads() -> None:
    """With a limit on the address space, import torch in another process first.

    One of its libraries ends the process with SIGABRT if it gets no memory while it is loaded.

    Raises: ImportError if that happens.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or "torch" in sys.modules:
        return
    # the sys.path of this process, because `-c` would add the working folder
    program = "import sys; sys.path[:] = sys.argv[1:]; import torch"
    command = [sys.executable, "-c", program, *sys.path]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode < 0:
        raise ImportError("torch: Cannot allocate memory")


def _check_hub_endpoint() -> None:
    """Raise HubError if HF_ENDPOINT is no URL, because importing huggingface_hub would fail."""
    endpoint = os.environ.get("HF_ENDPOINT", "")
    try:
        _ = urlsplit(endpoint).port
    except ValueError as error:
        raise HubError(
            f"HF_ENDPOINT={endpoint}: not a URL ({error}); unset it, or set it to the URL of a hub",
            code="hub.wrong_endpoint",
        ) from None


def _check_output_paths(arguments: Mapping[str, Any]) -> None:
    """Refuse output paths that are empty, URLs, or rejected by the file system, before any work.

    The command itself checks later what exists at the path and whether it is writable.

    Args:
        arguments: the arguments of a command, by name.
    Raises: RecipeError or SetupError, with the name of the option.
    """
    for name in _OUTPUT_OPTIONS:
        option, path = f"--{name.replace('_', '-')}", arguments.get(name)
        if path is None:
            continue
        if not path.strip():
            raise RecipeError(
                f"{option}: empty path; give a path, or omit the option", code="recipe.wrong_value"
            )
        if "://" in path:
            raise SetupError(
                f"{option}: '{redact_urls(path)}' is a URL, which is not supported here; give a "
                "path, and upload it afterwards",
                code="setup.not_writable",
            )
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError as error:
            raise SetupError(
                f"{option}: '{escape_control_chars(path)}' cannot be written ({error.strerror}); "
                f"choose another {option}",
                code="setup.not_writable",
            ) from error
