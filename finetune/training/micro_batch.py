"""`data.micro_batch: auto`: as many images at once as fit on this device, found once in a run.

The global batch stays what the recipe says; only its parts change. What a part takes is predicted
(`need_of`); a GPU then runs a pass of that size, with memory set aside for what training adds.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Loader, Sampler
from finetune.errors import RecipeError, SetupError, is_of_memory
from finetune.processes import free_bytes
from finetune.run.directory import RunDir
from finetune.run.environment import dtype_of
from finetune.run.record import RunRecord, read_record, write_record
from finetune.text import byte_size
from finetune.training.memory import (
    NO_NEED,
    checkpoint_bytes,
    need_of,
    num_bytes,
    pass_once,
    step_bytes,
    twin_of,
)
from finetune.training.trainer_state import TrainerState

__all__ = [
    "available_bytes",
    "find_micro_batch",
    "largest",
    "passes",
    "settle_micro_batch",
    "still_to_come",
]

SHARE = 0.8  # of the memory that is free: kernels take some for themselves, and leave gaps


def settle_micro_batch(
    trainer: TrainerState, loader: AnyLoader, on_main: Callable[[Callable[[], Any]], Any]
) -> None:
    """Carry out `data.micro_batch: auto`: take the size that the run began with, or find one.

    Args:
        trainer: with its data on the device; before its first step or after `restore`.
        loader: of the training images; a table of features needs no parts.
        on_main: does something on rank 0 and gives every rank the answer.
    Raises: as `find_micro_batch`.
    """
    if trainer.recipe.data.micro_batch != "auto" or not isinstance(loader, Loader):
        return
    recorded: int | None = on_main(lambda: _recorded(trainer.run))
    images = recorded or find_micro_batch(trainer)
    if recorded is None:
        on_main(lambda: _record(trainer.run, images))
    trainer.micro_batch = images


def find_micro_batch(
    trainer: TrainerState, *, succeeds: Callable[[int], bool] | None = None
) -> int:
    """Find the largest micro-batch that fits; every rank must call it, and all get the smallest.

    Nothing of the training state changes: a twin of the network is sent through.

    Args:
        trainer: as for `settle_micro_batch`.
        succeeds: runs a real pass of so many images; None: `passes` on a GPU, nothing on a CPU,
            where too much memory would end the process.
    Returns: images at once; the share of a rank where all of it fits.
    Raises: SetupError if not even the smallest fits; RecipeError for a sharded network.
    """
    if trainer.sharded:
        raise RecipeError(
            "data.micro_batch: auto is not possible with FSDP; give a number",
            code="recipe.conflict",
        )
    setup, accelerator = trainer.setup, trainer.accelerator
    network = accelerator.unwrap_model(trainer.model)
    dtype = dtype_of(accelerator)
    image_size, device = setup.preprocessing.image_size, accelerator.device
    parts = _parts(setup.sampler, rank=accelerator.process_index, world=accelerator.num_processes)
    share = max(parts)
    need = need_of(network, image_size=image_size, dtype=dtype, images=min(share, 32))
    distillation = trainer.distillation
    teacher = NO_NEED if distillation is None else distillation.need(min(share, 32))
    need += teacher
    available, later = available_bytes(device, setup.local_processes), still_to_come(trainer)
    room = int(available * SHARE) - later
    images = largest(list(parts), lambda size: need.at(parts[size]) <= room)
    if succeeds is None and device.type == "cuda":
        gradients = num_bytes(p for p in network.parameters() if p.requires_grad)
        ballast = max(later - gradients, 0)  # the twin is as large as the gradients
        ballast += teacher.at(images)
        succeeds = functools.partial(passes, network, image_size, dtype, ballast)
    if succeeds is not None:
        smaller = (size for size in parts if size <= images)
        images = next((size for size in smaller if succeeds(parts[size])), 0)
    agreed = int(torch.as_tensor(accelerator.gather(torch.tensor([images], device=device))).min())
    if not agreed:
        least = need.at(min(parts.values())) + later
        raise SetupError(
            f"data.micro_batch: auto: not even {min(parts)} at once fits: about "
            f"{byte_size(least)} of {byte_size(available)} that are free, of which a fifth stays "
            "free; set model.grad_checkpointing=true, or take a smaller network or image size",
            code="setup.memory",
        )
    if agreed < share:
        setup.notice(_notice(agreed, share, network))
    return agreed


def _parts(sampler: Sampler, *, rank: int, world: int) -> dict[int, int]:
    """Sizes that cut a rank's share into equal parts, and the largest part that comes of each.

    Returns: the whole share first, one unit last; an uneven share makes some parts larger.
    """
    unit = sampler.unit
    share = -(-(sampler.batch_size // unit) // world)
    largest_parts = {}
    for size in sorted({-(-share // parts) * unit for parts in range(1, share + 1)}, reverse=True):
        cut = sampler.micro_batches(0, rank=rank, world=world, micro_batch=size)
        largest_parts[size] = max(len(indices) for _, indices in cut)
    return largest_parts


def largest(choices: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the largest number of images that fits, or 0.

    Args:
        choices: in descending order; where one fits, all smaller ones do.
        fits: asked of about log2 of them.
    """
    place = bisect.bisect_left(choices, True, key=fits)
    return choices[place] if place < len(choices) else 0


def passes(
    network: nn.Module, image_size: tuple[int, int], dtype: torch.dtype, ballast: int, images: int
) -> bool:
    """True if a real pass, forward and backward, succeeds while `ballast` bytes are taken.

    The network, its gradients and the random state stay as they are.
    """
    device = next(network.parameters()).device

    def run_pass() -> None:
        taken = torch.empty(ballast, dtype=torch.uint8, device=device)
        pass_once(twin_of(network), images, image_size, dtype, train=True)
        del taken  # not before

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            run_pass()
            succeeded = True
        except RuntimeError as error:
            if not is_of_memory(error):
                raise
            succeeded = False
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return succeeded


def available_bytes(device: torch.device, local_processes: int) -> int:
    """Bytes that this process can still have: the device's, or its share of the host's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    return free_bytes() // max(local_processes, 1)


def still_to_come(trainer: TrainerState) -> int:
    """Bytes that the steps to come will keep: gradients, moments and, on a CPU, the snapshot."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    kept = step_bytes(network, trainer.recipe.optim)
    restored = bool(trainer.optimizer.optimizer.state)  # a checkpoint's moments are there already
    later = kept["gradients"] + (0 if restored else kept["moments"])
    if trainer.accelerator.device.type == "cpu":  # a checkpoint is written while training goes on
        later += checkpoint_bytes(kept, adapter=trainer.recipe.model.adapter is not None)
    return later


def _notice(images: int, share: int, network: nn.Module) -> str:
    """The line for a user whose batch does not fit at once."""
    message = f"data.micro_batch: auto: {images} of a process's {share} images fit at once"
    norms = (module for module in network.modules() if hasattr(module, "running_mean"))
    if any(norm.running_mean is not None for norm in norms):
        message += (
            "; the batch norms of this network take their statistics from these, so a machine of "
            "another size trains a little differently"
        )
    return message


# --- in run.json, so that a resumed run takes the same parts --------------------------------------


def _recorded(run: RunDir) -> int | None:
    """The size that the run began with; None if there is none, or of another machine."""
    record = read_record(run)
    match record.get("micro_batch"):
        case {"images": int(images), "on": on} if images > 0 and on == _place(record):
            return images
    return None


def _record(run: RunDir, images: int) -> None:
    record = read_record(run)
    write_record(run, {**record, "micro_batch": {"images": images, "on": _place(record)}})


def _place(record: RunRecord) -> dict[str, Any]:
    """The machine of run.json, which is written before the micro-batch is found."""
    device = record.get("device", {}).get("name")
    return {"device": device, "processes": record.get("num_processes")}
