"""Run a command and turn any error into one message on standard error and an exit code.

A traceback is printed only with --debug.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from finetune.cli.output import to_json
from finetune.cli.streams import (
    buffer_stdout,
    discard_stdout,
    open_closed_streams,
    stdout_errors,
)
from finetune.errors import (
    DivergedError,
    FinetuneError,
    Interrupted,
    RecipeError,
    RegressionError,
    SetupError,
    escape_control_chars,
    is_lost_connection,
    is_out_of_memory,
    redact_secrets,
)
from finetune.log import print_messages, redirect_closed_terminal
from finetune.process_lifecycle import stop_signals
from finetune.ranks import is_main_process

__all__ = ["EXIT_INTERRUPTED", "reset_interrupt_handler", "run"]

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# All ranks raise these errors, so only rank 0 prints them.
_SAME_ON_ALL_RANKS = (RecipeError, DivergedError, RegressionError, Interrupted)
_OUT_OF_MEMORY_HELP = (
    "out of memory; reduce data.micro_batch or set model.grad_checkpointing=true; neither changes "
    "the training. See also data.eval_batch_size and data.keep"
)
_OUT_OF_MEMORY_IN_IMPORT_HELP = (
    "out of memory while a library was loaded; raise the memory limit of this process "
    "('ulimit -v unlimited') or of its container, or end other programs"
)
_LOST_PROCESS_HELP = (
    "another process of this launch has ended or does not answer; if it printed a message, that "
    "names the cause"
)


class _Terminated(BaseException):
    """Raised on SIGTERM or SIGHUP, so that partial files are removed.

    Training has its own handler.
    """

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number


def run(group: click.Group, arguments: Sequence[str]) -> int:
    """Run a command and print any error as one message.

    Args:
        group: the commands.
        arguments: the arguments after the name of the program.
    Returns: the exit code.
    """
    # checked here, because click may report a usage error before it parses --json
    state: dict[str, bool] = {"json": "--json" in arguments}
    if "_FINETUNE_COMPLETE" in os.environ:  # shell completion
        group.main(prog_name="finetune")
    open_closed_streams()
    buffer_stdout()
    print_messages()
    numbers = {*stop_signals()} & {signal.SIGTERM, signal.SIGHUP}
    previous_handlers = {number: signal.signal(number, _raise_terminated) for number in numbers}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be valid UTF-8
    try:
        exit_code = _invoke(group, arguments, state)
        with stdout_errors():
            sys.stdout.flush()
        return exit_code
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(file=usage)
        click.echo(escape_control_chars(redact_secrets(usage.getvalue())), err=True, nl=False)
        if state["json"]:
            message = redact_secrets(error.format_message())
            click.echo(to_json(_error_document(message, error.exit_code, "usage")))
        return error.exit_code
    except BrokenPipeError:
        discard_stdout()
        return EXIT_BROKEN_PIPE
    except _Terminated as stop:
        redirect_closed_terminal()
        _print_error("terminated")
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        _print_error("interrupted")
        return EXIT_INTERRUPTED
    except FinetuneError as error:
        return _report_error(error, state)
    except Exception as error:
        if is_out_of_memory(error):
            in_import = isinstance(error, ImportError)
            text = _OUT_OF_MEMORY_IN_IMPORT_HELP if in_import else _OUT_OF_MEMORY_HELP
            return _report_error(SetupError(text, code="setup.memory"), state)
        if "RANK" in os.environ and is_lost_connection(error):
            cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            lost = SetupError(f"{_LOST_PROCESS_HELP} ({cause})", code="setup.lost_process")
            lost.printed_by_other_rank = getattr(error, "printed_by_other_rank", False)
            return _report_error(lost, state)
        message = f"internal error: {type(error).__name__}: {error}".strip().splitlines()[0]
        internal = FinetuneError(f"{message}; run again with --debug")
        internal.printed_by_other_rank = getattr(error, "printed_by_other_rank", False)
        return _report_error(internal, state)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def reset_interrupt_handler() -> None:
    """Let Ctrl-C end the process silently from now on; call it after all work is done.

    Python's own handler would print a traceback if Ctrl-C came during the shutdown.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else SIGINT is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise _Terminated(number)


def _invoke(group: click.Group, arguments: Sequence[str], state: dict[str, bool]) -> int:
    try:
        with group.make_context("finetune", list(arguments), obj=state) as context:
            group.invoke(context)
    except click.exceptions.Exit as stop:  # after --help and --version
        return stop.exit_code
    return 0


def _report_error(error: FinetuneError, state: dict[str, bool]) -> int:
    """Print an error on standard error and, with --json, on standard output.

    Returns: the exit code.
    """
    # Ignore SIGTERM until the message is printed: launchers send it once another rank has ended.
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    message = escape_control_chars(str(error))
    if state.get("debug"):
        click.echo(redact_secrets(traceback.format_exc()), err=True, nl=False)
        click.echo(f"error code: {error.code}", err=True)
    if not error.printed_by_other_rank:
        if is_main_process():
            _print_error(message)
        elif not isinstance(error, _SAME_ON_ALL_RANKS):
            click.echo(f"rank {os.environ['RANK']}: {message}", err=True)
    if is_main_process() and state.get("json") and not state.get("result_printed"):
        click.echo(to_json(_error_document(message, error.exit_code, error.code)))
    signal.signal(signal.SIGTERM, previous_handler)
    return error.exit_code


def _print_error(message: str) -> None:
    """Print an error message on rank 0 only, without the prefix of log messages."""
    if is_main_process():
        click.echo(message, err=True)


def _error_document(message: str, exit_code: int, code: str) -> dict[str, Any]:
    return {"error": message, "exit_code": exit_code, "code": code}
