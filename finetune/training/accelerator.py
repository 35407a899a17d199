"""Create the Accelerator, run work on rank 0 only, and destroy the process group.

The only module that starts Accelerate.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)

from finetune.data.source import Source, Split
from finetune.errors import (
    FinetuneError,
    RecipeError,
    SetupError,
    did_you_mean,
    install_hint,
)
from finetune.host_resources import disable_malloc_trim
from finetune.precision import resolve_precision
from finetune.ranks import local_world_size
from finetune.recipe.load import RunSection
from finetune.recipe.schema import Recipe
from finetune.training.launcher import Launcher, get_launcher, requested_num_processes
from finetune.training.rank_errors import error_from_rank

__all__ = [
    "check_same_data_on_all_ranks",
    "check_same_on_all_ranks",
    "create_accelerator",
    "create_run_accelerator",
    "destroy_process_group",
    "is_sharded",
    "run_on_main",
    "share_digests",
]

_Result = TypeVar("_Result")


def create_accelerator(section: RunSection, *, out: Path | None = None) -> Accelerator:
    """Connect the processes that the launcher started, and create their Accelerator.

    Args:
        section: the recipe's `run` section: precision, threads, trackers, number of processes.
        out: folder in which trackers write their logs.
    Returns: the accelerator.
    Raises: SetupError if the number of processes is not the requested one, or a tracker's package
        is missing, or under torch.autocast or another default dtype; RecipeError for an unknown
        tracker.
    """
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    without_gpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if not without_gpu:
        _check_num_gpus()
    launcher = get_launcher()
    with _terminable_while_connecting(launcher):
        processes = PartialState(
            cpu=without_gpu, timeout=datetime.timedelta(seconds=section.timeout_seconds)
        )
    _check_num_processes(processes, section.num_processes)
    known = sorted(kind.value for kind in LoggerType)
    for tracker in section.trackers:
        if tracker not in known:
            raise RecipeError(
                f"run.trackers: unknown '{tracker}'{did_you_mean(tracker, known) or '.'} "
                f"Choose from {', '.join(known)}",
                code="recipe.unknown_name",
            )
    if processes.device.type == "cpu":
        disable_malloc_trim()
    precision = resolve_precision(section.precision, processes.device)
    _check_autocast_and_dtype(processes.device.type)
    # Accelerate keeps the precision of the first run in a process; a second run may differ.
    AcceleratorState._reset_state()
    try:
        with warnings.catch_warnings():
            # raised as an error below
            warnings.filterwarnings("ignore", message=".*no supported trackers")
            accelerator = Accelerator(
                mixed_precision="no" if precision == "fp32" else precision,
                log_with=list(section.trackers) or None,
                project_dir=out,
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
                # Set the next two explicitly, so that no environment variable changes training.
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                dynamo_backend="no",
            )
    except (ImportError, ValueError) as error:
        raise SetupError(
            f"run: Accelerate rejects this setup ({error}); check run.precision, run.trackers and "
            "the options of accelerate launch",
            code="setup.unsupported",
        ) from error
    # Accelerate only logs a debug line if a tracker's package is missing.
    active_trackers = {getattr(tracker, "value", tracker) for tracker in accelerator.log_with}
    if missing := sorted(set(section.trackers) - active_trackers):
        raise SetupError(
            f"run.trackers: no package is installed for {', '.join(missing)}; for TensorBoard, "
            f"{install_hint('track')}",
            code="setup.missing_package",
        )
    return accelerator


def _check_autocast_and_dtype(device_type: str) -> None:
    """Raise SetupError if the calling program has changed how torch computes.

    An outer autocast keeps converted weights until it ends, so training would use old weights.
    """
    changes = {
        "torch.autocast": torch.is_autocast_enabled(device_type),
        "torch.set_default_dtype": torch.get_default_dtype() != torch.float32,
    }
    if found := [name for name, is_changed in changes.items() if is_changed]:
        raise SetupError(
            f"{found[0]}: is in effect around this call, and changes the results; end it first, "
            "and set run.precision instead",
            code="setup.unsupported",
        )


@contextlib.contextmanager
def _terminable_while_connecting(launcher: Launcher | None) -> Iterator[None]:
    """Let SIGTERM kill a rank while it connects: C code waits there, and no Python handler runs.

    Raises: SetupError if the ranks cannot connect.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if launcher is None or launcher.ranks_connected or not is_main_thread:
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise SetupError(
            f"the processes of this launch cannot connect ({reason}); if the launcher restarts "
            "processes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before starting it",
            code="setup.lost_process",
        ) from error
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    launcher.ranks_connected = True


def _check_num_processes(processes: PartialState, requested: int | None) -> None:
    """Check that as many processes run as the recipe and the launcher's command line request.

    Raises: SetupError with the right command if the numbers differ.
    """
    for number in (requested, requested_num_processes()):
        if number is not None and number != processes.num_processes:
            device = "" if processes.device.type == "cuda" else "ACCELERATE_USE_CPU=true "
            multi = "--multi_gpu " if number > 1 else ""
            raise SetupError(
                f"{number} processes were requested and {processes.num_processes} started; run: "
                f"{device}accelerate launch {multi}--num_processes {number} -m finetune train …",
                code="setup.wrong_processes",
            )


def _check_num_gpus() -> None:
    """Raise SetupError if this host runs more processes than it has GPUs."""
    started, gpus = local_world_size(1), torch.accelerator.device_count()
    # LOCAL_RANK may be set by hand, so a rank fails only if there is no GPU with that index.
    if started > gpus and int(os.environ.get("LOCAL_RANK", 0)) >= gpus:
        raise SetupError(
            f"{started} processes were started here, and this host has {gpus} "
            f"GPU{'s' if gpus > 1 else ''}: each process needs its own; use --num_processes {gpus}",
            code="setup.too_few_gpus",
        )


def is_sharded(accelerator: Accelerator) -> bool:
    """True if FSDP shards the network over the processes."""
    return "FSDP" in str(accelerator.distributed_type)


def run_on_main(accelerator: Accelerator, function: Callable[[], _Result]) -> _Result:
    """Call a function on rank 0 only; every rank returns its result or raises its error."""
    outcome: list[Any] = [None, None]
    main_error: BaseException | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except BaseException as error:  # signals too: the other ranks must not wait forever
            main_error = error
            code = error.code if isinstance(error, FinetuneError) else FinetuneError.code
            outcome[1] = (f"rank 0: {error}", getattr(error, "exit_code", 1), code)
    broadcast_object_list(outcome)
    if main_error is not None:
        raise main_error
    if outcome[1] is not None:
        raise error_from_rank(*outcome[1])
    result: _Result = outcome[0]
    return result


def check_same_on_all_ranks(values: Mapping[str, Any]) -> None:
    """Raise SetupError on every rank if one of them has other values than rank 0.

    Args:
        values: the values of this rank, by their names for users.
    """
    main, *others = gather_object([dict(values)])
    for rank, other in enumerate(others, start=1):
        if different := [name for name, value in main.items() if other.get(name) != value]:
            raise SetupError(
                f"rank {rank} differs from rank 0 in {', '.join(different)}; start all processes "
                "with the same command, data and weights",
                code="setup.ranks_differ",
            )


def share_digests(accelerator: Accelerator, splits: Iterable[Split]) -> None:
    """Let every rank accept only images whose content rank 0 has fingerprinted.

    Image files are compared when they are read. Tables and tar shards are compared here, by each
    rank whose files are not those of rank 0, such as copies on another machine.

    Args:
        splits: the splits that the ranks read; streamed ones are left out.
    Raises: SetupError on every rank if images of one of them differ.
    """
    in_files = [split for split in splits if not split.is_streamed]
    digests = run_on_main(accelerator, lambda: [split.digests for split in in_files])
    signatures = [_file_signatures(split) for split in in_files]
    of_main = gather_object([signatures])[0]
    same = {}
    for is_local_main in (True, False):  # the others of a machine find its digests in the cache
        if accelerator.is_local_main_process == is_local_main:
            for index, split in enumerate(in_files):
                has_same_files = signatures[index] == of_main[index]
                same[f"images of '{split.name}'"] = has_same_files or np.array_equal(
                    split.digests, digests[index]
                )
        accelerator.wait_for_everyone()
    check_same_on_all_ranks(same)
    for split, split_digests in zip(in_files, digests, strict=True):
        split.use_digests(split_digests)


def check_same_data_on_all_ranks(
    accelerator: Accelerator, source: Source, names: Iterable[str]
) -> None:
    """Share the digests of some splits, and compare their labels, classes and shards.

    Raises: SetupError on every rank if one of them has other data.
    """
    splits = [source.splits[name] for name in names]
    share_digests(accelerator, splits)
    fingerprints = {f"labels or shards of '{split.name}'": split.fingerprint for split in splits}
    check_same_on_all_ranks({"classes": source.class_names, **fingerprints})


def _file_signatures(split: Split) -> list[list[int]]:
    """Return size, inode and times of the tables or shards of a split; empty for image files."""
    if split.images.has_file_per_image:
        return []
    signatures: list[list[int]] = split.images.stat_signatures(split.image_rows)[:, 1:].tolist()
    return signatures


def destroy_process_group() -> None:
    """Destroy the process group if it exists."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def create_run_accelerator(recipe: Recipe | None) -> Accelerator:
    """Create the accelerator with the precision and threads of a recipe; None for the defaults."""
    settings = {} if recipe is None else recipe.run.model_dump(include={"precision", "threads"})
    return create_accelerator(RunSection(**settings))
