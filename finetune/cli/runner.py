"""How the command line talks: answers on standard output, everything else on standard error.

A verb returns an `Answer`; `run` prints it, turns errors into one message and an exit code, and
keeps tracebacks for --debug.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import click

from finetune.errors import (
    DivergedError,
    FinetuneError,
    Interrupted,
    RecipeError,
    SetupError,
    is_of_memory,
    masked,
    nearest,
    visible,
)
from finetune.processes import is_first_rank

__all__ = [
    "Answer",
    "Verbs",
    "answers",
    "debug_option",
    "figures",
    "flat",
    "run",
    "to_json",
    "visible",
]

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143

# Every rank ends with these, and one report is enough.
_ALIKE = (RecipeError, DivergedError, Interrupted)
_PLACES = ("out", "sheet", "profile", "export_space")  # options that say where to write
_OUT_OF_MEMORY_HELP = (
    "out of memory; the training stays the same with a smaller data.micro_batch or with "
    "model.grad_checkpointing=true; see also data.eval_batch_size and data.keep"
)


@dataclass(frozen=True)
class Answer:
    """What a verb found: as data for --json, as text otherwise, and what is wrong, if anything."""

    data: Any
    text: str
    problem: FinetuneError | None = None


class Verbs(click.Group):
    """A group that suggests the nearest verb."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"no such verb '{name}'{nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _note_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().obj["debug"] = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_note_debug,
    help="Show tracebacks.",
)


def answers(function: Callable[..., Answer]) -> Callable[..., None]:
    """Make a function the body of a verb: with --json and --debug, and its answer printed."""

    @functools.wraps(function)
    def body(as_json: bool, **arguments: Any) -> None:
        state = click.get_current_context().find_root().obj
        state["json"] = as_json
        _check_places(arguments)
        # what libraries print is not an answer
        with contextlib.redirect_stdout(sys.stderr):
            answer = function(**arguments)
        if is_first_rank():
            shown = to_json(answer.data) if as_json else visible(answer.text)
            state["answered"] = bool(shown)
            click.echo(shown, nl=bool(shown))
        if answer.problem:
            raise answer.problem

    json_option = click.option(
        "--json", "as_json", is_flag=True, help="Print machine-readable output."
    )
    return json_option(debug_option(body))


def _check_places(arguments: dict[str, Any]) -> None:
    """Refuse, before any work, a place to write to that the system has no such names for.

    What is there and whether it can be written is the verb's to find out.

    Args:
        arguments: of a verb, by name.
    Raises: SetupError naming the option.
    """
    for name in _PLACES:
        if place := arguments.get(name):
            option = f"--{name.replace('_', '-')}"
            try:
                os.lstat(place)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "no path has such characters"
                raise SetupError(
                    f"{option}: '{visible(place)}' cannot be written ({why}); choose another "
                    f"{option}"
                ) from error


def run(group: click.Group, arguments: Sequence[str]) -> int:
    """Carry out a command line and report what goes wrong in one message.

    Args:
        group: the verbs.
        arguments: what stands behind the name of the program.
    Returns: the exit code.
    """
    # a usage error comes before the option is read
    state: dict[str, bool] = {"json": "--json" in arguments}
    if "_FINETUNE_COMPLETE" in os.environ:  # the shell asks for completions
        group.main(prog_name="finetune")
    _open_closed_streams()
    before = signal.signal(signal.SIGTERM, _end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid text
    try:
        code = _invoke(group, arguments, state)
        _flush()
        return code
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(file=shown)
        click.echo(visible(masked(shown.getvalue())), err=True, nl=False)
        if state["json"]:
            message = masked(error.format_message())
            click.echo(to_json(_error(message, error.exit_code, "usage")))
        return error.exit_code
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except _Terminated:
        _say("terminated")
        return EXIT_TERMINATED
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return EXIT_INTERRUPTED
    except FinetuneError as error:
        return _fail(error, state, expected=isinstance(error, _ALIKE), said=error.said)
    except Exception as error:
        kind = type(error).__name__
        if is_of_memory(error):
            out_of_memory = SetupError(_OUT_OF_MEMORY_HELP, code="setup.memory")
            return _fail(out_of_memory, state, expected=False)
        message = f"internal error: {kind}: {error}".strip().splitlines()[0]
        said = getattr(error, "said", False)
        internal = FinetuneError(f"{message}; run again with --debug")
        return _fail(internal, state, expected=False, said=said)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Terminated(BaseException):
    """SIGTERM outside of training, which has its own way to stop: what is half written goes."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _open_closed_streams() -> None:
    """Give a program whose standard output or error was closed a place to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
            setattr(sys, name, nowhere)


def _flush() -> None:
    """Bring the answer out. Raises: SetupError where it cannot be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence_stdout()
        raise SetupError(f"standard output: {error.strerror}; write it elsewhere") from error


def _silence_stdout() -> None:
    """Without this, Python complains again when it closes a stream that nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _invoke(group: click.Group, arguments: Sequence[str], state: dict[str, bool]) -> int:
    try:
        with group.make_context("finetune", list(arguments), obj=state) as context:
            group.invoke(context)
    except click.exceptions.Exit as stop:  # after --help and --version
        return stop.exit_code
    return 0


def _fail(
    error: FinetuneError, state: dict[str, bool], *, expected: bool, said: bool = False
) -> int:
    """Report an error on standard error and, where JSON was asked for, on standard output.

    Args:
        expected: every rank has it, and rank 0 reports it.
        said: another rank reports it.
    """
    # A launcher ends the ranks that are left when one has ended: the message comes out whole.
    ended_by = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    message = visible(masked(str(error)))
    if state.get("debug"):
        click.echo(masked(traceback.format_exc()), err=True, nl=False)
        click.echo(f"error code: {error.code}", err=True)
    if is_first_rank():
        if not said:
            click.echo(message, err=True)
        if state.get("json") and not state.get("answered"):
            click.echo(to_json(_error(message, error.exit_code, error.code)))
    elif not expected and not said:
        click.echo(f"rank {os.environ['RANK']}: {message}", err=True)
    signal.signal(signal.SIGTERM, ended_by)
    return error.exit_code


def _error(message: str, exit_code: int, code: str) -> dict[str, Any]:
    return {"error": message, "exit_code": exit_code, "code": code}


def _say(message: str) -> None:
    """Tell the user once, however many processes there are."""
    if is_first_rank():
        click.echo(message, err=True)


def to_json(data: Any) -> str:
    """Write data as JSON that every reader takes; what is not finite becomes null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """Make a value fit for JSON, which has neither NaN nor arrays nor paths."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return _finite(value.tolist()) if hasattr(value, "tolist") else str(value)


def figures(results: dict[str, Any]) -> str:
    """One line for each split, one for each claim."""
    lines = []
    for split in ("test", "val", "train"):
        found = results.get(split) or {}
        shown = [
            f"{key} {found[key]:.4f}"
            for key in ("top1", "top5", "loss", "ece")
            if isinstance(found.get(key), (int, float))
        ]
        if shown:
            images = f"  ({found['examples']} images)" if "examples" in found else ""
            label = "train (last log line)" if split == "train" else split
            lines.append(f"{label}: {'  '.join(shown)}{images}")
    for claim in results.get("claims") or []:
        measured = claim.get("measured")
        figure = f"{measured:.4f}" if isinstance(measured, float) else measured
        found = f" ({claim.get('how')})" if measured is None else f", measured {figure}"
        lines.append(f"claim {claim.get('metric')}: {claim.get('verdict')}{found}")
    return "\n".join(lines)


def flat(data: Any, name: str = "") -> str:
    """Write nested data as lines of `name: value`."""
    if isinstance(data, dict):
        return "\n".join(
            line for key, item in data.items() if (line := flat(item, f"{name}.{key}".lstrip(".")))
        )
    return f"{name}: {', '.join(map(str, data)) if isinstance(data, (list, tuple)) else data}"
