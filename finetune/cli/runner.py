"""Print answers on standard output, and everything else on standard error.

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
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from finetune.text import MISSING, counted, percent, percent_range

__all__ = [
    "EXIT_INTERRUPTED",
    "Answer",
    "Verbs",
    "answers",
    "checked",
    "debug_option",
    "end_by_interrupts",
    "figures",
    "flat",
    "next_steps",
    "run",
    "to_json",
]

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143

# Every rank ends with these, and one report is enough.
_ALIKE = (RecipeError, DivergedError, Interrupted)
_PLACES = ("out", "sheet", "page", "profile", "export_space")  # options that say where to write
_OUT_OF_MEMORY_HELP = (
    "out of memory; the training stays the same with a smaller data.micro_batch or with "
    "model.grad_checkpointing=true; see also data.eval_batch_size and data.keep"
)
_NO_ROOM_HELP = (
    "out of memory while a library was loaded: this process may have too little; raise its limit "
    "('ulimit -v unlimited', the container's), or end other programs"
)


@dataclass(frozen=True)
class Answer:
    """The result of a verb: data for --json, text otherwise, and a problem, if there is one."""

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
            with _stdout_errors():
                click.echo(shown, nl=bool(shown))
        if answer.problem:
            raise answer.problem

    json_option = click.option(
        "--json", "as_json", is_flag=True, help="Print machine-readable output."
    )
    return json_option(debug_option(body))


def checked(check: Callable[[str], None]) -> Callable[..., Any]:
    """Make a callback of a click parameter that refuses a value before the verb is imported.

    Args:
        check: raises a FinetuneError; of several values it gets each.
    """

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None:
                check(each)
        return value

    return callback


def _check_places(arguments: dict[str, Any]) -> None:
    """Refuse, before any work, a place to write to that the system has no such names for.

    What is there and whether it can be written is the verb's to find out.

    Args:
        arguments: of a verb, by name.
    Raises: RecipeError or SetupError naming the option.
    """
    for name in _PLACES:
        option, place = f"--{name.replace('_', '-')}", arguments.get(name)
        if place is not None and not place.strip():
            raise RecipeError(
                f"{option}: is empty; name a place, or leave it out", code="recipe.wrong_value"
            )
        if place:
            try:
                os.lstat(place)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "no path has such characters"
                raise SetupError(
                    f"{option}: '{visible(place)}' cannot be written ({why}); choose another "
                    f"{option}",
                    code="setup.not_writable",
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
    _buffer_stdout()
    before = signal.signal(signal.SIGTERM, _end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid text
    try:
        code = _invoke(group, arguments, state)
        with _stdout_errors():
            sys.stdout.flush()
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
        return _fail(error, state)
    except Exception as error:
        if is_of_memory(error):
            help_text = _NO_ROOM_HELP if isinstance(error, ImportError) else _OUT_OF_MEMORY_HELP
            return _fail(SetupError(help_text, code="setup.memory"), state)
        message = f"internal error: {type(error).__name__}: {error}".strip().splitlines()[0]
        internal = FinetuneError(f"{message}; run again with --debug")
        internal.printed_elsewhere = getattr(error, "printed_elsewhere", False)
        return _fail(internal, state)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Terminated(BaseException):
    """SIGTERM outside of training, which has its own way to stop: what is half written goes."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def end_by_interrupts() -> None:
    """Let an interrupt end this process as it ends other programs: all is done but its end.

    Python's own handler would print a traceback for each that comes while it shuts down.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Give standard streams that were closed a place that is empty and takes everything.

    Without it the next file that is opened gets the stream's number, and what a library prints
    goes into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _buffer_stdout() -> None:
    """Write answers whole where PYTHONUNBUFFERED is set, too.

    Python then forgets the rest of a text of which the system takes a part: of a pipe whose reader
    leaves, of a disk that is almost full.
    """
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        number, encoding = sys.stdout.fileno(), sys.stdout.encoding
        sys.stdout = open(number, "w", encoding=encoding, closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def _stdout_errors() -> Iterator[None]:
    """Raise SetupError where standard output cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence_stdout()
        raise SetupError(
            f"standard output: {error.strerror}; write it elsewhere", code="setup.not_writable"
        ) from error


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


def _fail(error: FinetuneError, state: dict[str, bool]) -> int:
    """Report an error on standard error and, where JSON was asked for, on standard output."""
    # A launcher ends the ranks that are left when one has ended: the message comes out whole.
    ended_by = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    message = visible(masked(str(error)))
    if state.get("debug"):
        click.echo(masked(traceback.format_exc()), err=True, nl=False)
        click.echo(f"error code: {error.code}", err=True)
    if is_first_rank():
        if not error.printed_elsewhere:
            click.echo(message, err=True)
        if state.get("json") and not state.get("answered"):
            click.echo(to_json(_error(message, error.exit_code, error.code)))
    elif not isinstance(error, _ALIKE) and not error.printed_elsewhere:
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
    """Write a run's results: a line for each split, each claim and each warning."""
    from finetune.evaluation.claims import wording  # not before it is needed: it brings torch

    lines = []
    for split in ("test", "val"):
        if shown := _measures(results.get(split) or {}):
            lines.append(f"{split}: {shown}")
    for claim in results.get("claims") or []:
        what, reported, measured = wording(claim)
        if claim.get("measured") is None:
            lines.append(f"claim {what}: not measured: {claim.get('how') or 'no figure'}")
        else:
            against = "" if reported == MISSING else f", reported {reported}"
            lines.append(f"claim {what}: {claim.get('verdict')}: measured {measured}{against}")
    lines += [f"warning: {warning}" for warning in results.get("warnings") or []]
    return "\n".join(lines)


def _measures(metrics: dict[str, Any]) -> str:
    """The figures of a split in a line, the accuracy with its interval if that is wide."""
    from finetune.evaluation.intervals import TOO_FEW_IMAGES, interval

    shown = []
    images, classes = metrics.get("examples"), len(metrics.get("per_class") or [])
    names = {"top1": "accuracy", "top5": "top-5 accuracy", "balanced_accuracy": "balanced accuracy"}
    if "map" in metrics:
        names = {"map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1"}
    for key, name in names.items():
        share = metrics.get(key)
        if not isinstance(share, (int, float)) or (key == "top5" and 0 < classes <= 5):
            continue
        ends = interval(share, images) if key == "top1" and images else None
        between = f" (95 % interval {percent_range(*ends)})" if ends else ""
        shown.append(f"{name} {percent(share)}{between}")
    for key, name in (("loss", "loss"), ("ece", "calibration error")):
        if isinstance(metrics.get(key), (int, float)):
            shown.append(f"{name} {metrics[key]:.4f}")
    if shown and images:
        few = " (too few to judge by)" if images < TOO_FEW_IMAGES else ""
        shown.append(f"on {counted(images, 'image')}{few}")
    return ", ".join(shown)


def next_steps(folder: Path) -> str:
    """Name a finished run's folder, its report, and two commands to try with it."""
    quoted = shlex.quote(str(folder))
    report = folder / "report.html"
    lines = [f"report: {report}"] if report.is_file() else []
    lines += [f"next: finetune predict {quoted} IMAGE", f"next: finetune demo {quoted}"]
    return "\n".join([*lines, f"run: {folder}"])


def flat(data: Any, name: str = "") -> str:
    """Write nested data as lines of `name: value`."""
    if isinstance(data, dict):
        return "\n".join(
            line for key, item in data.items() if (line := flat(item, f"{name}.{key}".lstrip(".")))
        )
    return f"{name}: {', '.join(map(str, data)) if isinstance(data, (list, tuple)) else data}"
