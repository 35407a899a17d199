"""The processes of a launch: joining them, what rank 0 does for all, and parting again.

The only file that starts Accelerate.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    broadcast_object_list,
    parse_flag_from_env,
)

from finetune.errors import FinetuneError, RecipeError, SetupError, nearest
from finetune.processes import keep_freed_memory, local_processes
from finetune.recipe.load import RunSection
from finetune.run.environment import pick_precision, requested_processes
from finetune.training.distributed import Launcher, error_of_rank

__all__ = ["is_sharded", "launch", "leave", "on_main", "this_launcher"]

_Result = TypeVar("_Result")


@functools.cache
def this_launcher() -> Launcher | None:
    """The process that started this one for a rank; it is watched from the first call on."""
    return Launcher.of_this_process()


def launch(run: RunSection, *, out: Path | None = None) -> Accelerator:
    """Join the processes that the launcher started.

    Args:
        run: precision, threads, trackers and the expected number of processes.
    Returns: the accelerator; its device is ready.
    Raises: SetupError if the number of processes is not what was asked for.
    """
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    without_gpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if not without_gpu:
        _check_gpus()
    launcher = this_launcher()
    with _joining(launcher):
        processes = PartialState(
            cpu=without_gpu, timeout=datetime.timedelta(seconds=run.timeout_seconds)
        )
    _check_count(processes, run.num_processes)
    known = sorted(kind.value for kind in LoggerType)
    for tracker in run.trackers:
        if tracker not in known:
            raise RecipeError(
                f"run.trackers: unknown '{tracker}'{nearest(tracker, known)}",
                code="recipe.unknown_name",
            )
    if processes.device.type == "cpu":
        keep_freed_memory()
    precision = pick_precision(run.precision, processes.device)
    # Accelerate keeps the precision of the process's first run; a second one may have another.
    AcceleratorState._reset_state()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no supported trackers")  # refused below
            accelerator = Accelerator(
                mixed_precision="no" if precision == "fp32" else precision,
                log_with=list(run.trackers) or None,
                project_dir=out,
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
                # Both are given so that no environment variable can change the training.
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                dynamo_backend="no",
            )
    except (ImportError, ValueError) as error:
        raise SetupError(f"run: {error}", code="setup.unsupported") from error
    # Accelerate leaves a tracker out, with a debug line, when its package is not there.
    started = {getattr(tracker, "value", tracker) for tracker in accelerator.log_with}
    if missing := sorted(set(run.trackers) - started):
        raise SetupError(
            f"run.trackers: {', '.join(missing)}: its package is not installed; TensorBoard comes "
            "with: pip install 'finetune[track]'",
            code="setup.missing_package",
        )
    return accelerator


@contextlib.contextmanager
def _joining(launcher: Launcher | None) -> Iterator[None]:
    """Let SIGTERM kill a rank that waits for others in C, where no handler of Python's runs.

    Raises: SetupError if they cannot be reached.
    """
    if launcher is None or launcher.joined:
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise SetupError(
            f"the processes of this launch cannot join ({reason}); if it "
            "starts them again, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it",
            code="setup.lost_process",
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    launcher.joined = True


def _check_count(processes: PartialState, wanted: int | None) -> None:
    """Refuse another number of processes than the recipe or the launcher's words ask for.

    Raises: SetupError with the command that starts them.
    """
    for number in (wanted, requested_processes()):
        if number is not None and number != processes.num_processes:
            device = "" if processes.device.type == "cuda" else "ACCELERATE_USE_CPU=true "
            multi = "--multi_gpu " if number > 1 else ""
            raise SetupError(
                f"{number} processes were asked for and {processes.num_processes} started; run: "
                f"{device}accelerate launch {multi}--num_processes {number} -m finetune train …",
                code="setup.wrong_processes",
            )


def _check_gpus() -> None:
    """Refuse more processes on this host than it has GPUs. Raises: SetupError."""
    started, gpus = local_processes(1), torch.accelerator.device_count()
    # as many as its launcher gave a rank of its own here: LOCAL_RANK may be set by hand
    if started > gpus and int(os.environ.get("LOCAL_RANK", 0)) >= gpus:
        raise SetupError(
            f"{started} processes were started here, and this host has {gpus} "
            f"GPU{'s' if gpus > 1 else ''}: each process needs its own; use --num_processes {gpus}",
            code="setup.too_few_gpus",
        )


def is_sharded(accelerator: Accelerator) -> bool:
    """True if FSDP spreads the network over the processes."""
    return "FSDP" in str(accelerator.distributed_type)


def on_main(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result:
    """Do something on rank 0; every rank gets its answer, or its error."""
    outcome: list[Any] = [None, None]
    problem: BaseException | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except BaseException as error:  # a signal, too: the others must not wait for an answer
            problem = error
            code = error.code if isinstance(error, FinetuneError) else FinetuneError.code
            outcome[1] = (f"rank 0: {error}", getattr(error, "exit_code", 1), code)
    broadcast_object_list(outcome)
    if problem is not None:
        raise problem
    if outcome[1] is not None:
        raise error_of_rank(*outcome[1])
    answer: _Result = outcome[0]
    return answer


def leave() -> None:
    """Part the processes of a launch; a process that was started alone has nothing to do."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
