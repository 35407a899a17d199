"""`data.micro_batch: auto`: find the largest micro-batch that fits into memory, once per run.

The global batch size stays the same; only the number of accumulation steps changes. The memory of a
micro-batch is estimated (`estimate_memory`); a GPU then runs a real step of that size, while the
memory that training allocates later is reserved.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import ImageLoader
from finetune.data.sampler import DistributedBatchSampler
from finetune.errors import RecipeError, SetupError, is_out_of_memory
from finetune.formatting import format_bytes
from finetune.host_resources import available_memory_bytes
from finetune.log import logger
from finetune.precision import autocast_dtype
from finetune.run.directory import RunDir
from finetune.run.record import RunRecord, read_record, write_record
from finetune.training.memory import (
    NO_MEMORY,
    checkpoint_bytes,
    estimate_memory,
    fake_copy,
    run_step,
    tensor_bytes,
    training_state_bytes,
)
from finetune.training.trainer_state import TrainerState

__all__ = [
    "available_bytes",
    "find_largest_fitting",
    "find_micro_batch_size",
    "real_step_fits",
    "resolve_micro_batch_size",
    "unallocated_state_bytes",
]

USABLE_SHARE = 0.8  # of free memory; the rest is for kernel workspace and fragmentation


def resolve_micro_batch_size(
    trainer: TrainerState, loader: AnyLoader, run_on_main: Callable[[Callable[[], Any]], Any]
) -> None:
    """Set the micro-batch size for `data.micro_batch: auto`: read it from run.json, or find it.

    Args:
        trainer: the training state before its first step, or after `load_checkpoint`; the training
            images are on the device already.
        loader: loader of the training split; with cached features, this does nothing.
        run_on_main: calls a function on rank 0 and returns its result on every rank.
    Raises: same as `find_micro_batch_size`.
    """
    if trainer.recipe.data.micro_batch != "auto" or not isinstance(loader, ImageLoader):
        return
    recorded: int | None = run_on_main(lambda: _read_recorded_size(trainer.run))
    micro_batch_size = recorded or find_micro_batch_size(trainer)
    if recorded is None:
        run_on_main(lambda: _record_size(trainer.run, micro_batch_size))
    trainer.micro_batch_size = micro_batch_size


def find_micro_batch_size(
    trainer: TrainerState, *, step_fits: Callable[[int], bool] | None = None
) -> int:
    """Find the largest micro-batch size that fits; every rank must call it, and the smallest wins.

    The training state does not change: the steps run on a copy of the network.

    Args:
        trainer: same as for `resolve_micro_batch_size`.
        step_fits: returns True if a real step with this number of images fits. None uses
            `real_step_fits` on a GPU; on a CPU only the estimate is used, because running out of
            memory would end the process.
    Returns: the micro-batch size; if it fits, this is a rank's whole share of the batch.
    Raises: SetupError if not even the smallest size fits; RecipeError for a sharded network.
    """
    if trainer.is_sharded:
        raise RecipeError(
            "data.micro_batch=auto: not supported with FSDP; give a number",
            code="recipe.conflict",
        )
    setup, accelerator = trainer.setup, trainer.accelerator
    network = accelerator.unwrap_model(trainer.model)
    dtype = autocast_dtype(accelerator)
    image_size, device = setup.preprocessing.image_size, accelerator.device
    largest_micro_batch = _candidate_sizes(
        setup.sampler, rank=accelerator.process_index, world_size=accelerator.num_processes
    )
    share = max(largest_micro_batch)
    estimate = estimate_memory(
        network, image_size=image_size, dtype=dtype, num_images=min(share, 32)
    )
    distillation = trainer.distillation
    teacher = NO_MEMORY if distillation is None else distillation.estimate_memory(min(share, 32))
    estimate += teacher
    available = available_bytes(device, setup.local_world_size)
    later = unallocated_state_bytes(trainer)
    limit = int(available * USABLE_SHARE) - later
    micro_batch_size = find_largest_fitting(
        list(largest_micro_batch),
        lambda size: estimate.bytes_for(largest_micro_batch[size]) <= limit,
    )
    if step_fits is None and device.type == "cuda":
        gradients = tensor_bytes(p for p in network.parameters() if p.requires_grad)
        reserved = max(later - gradients, 0)  # the copy is as large as the gradients
        reserved += teacher.bytes_for(micro_batch_size)
        step_fits = functools.partial(real_step_fits, network, image_size, dtype, reserved)
    if step_fits is not None:
        smaller = (size for size in largest_micro_batch if size <= micro_batch_size)
        micro_batch_size = next(
            (size for size in smaller if step_fits(largest_micro_batch[size])), 0
        )
    smallest = int(
        torch.as_tensor(accelerator.gather(torch.tensor([micro_batch_size], device=device))).min()
    )
    if not smallest:
        needed = estimate.bytes_for(min(largest_micro_batch.values())) + later
        raise SetupError(
            "data.micro_batch=auto: not even a micro-batch of "
            f"{min(largest_micro_batch)} fits: it needs about {format_bytes(needed)} of "
            f"{format_bytes(available)} free memory, and a fifth stays in reserve; set "
            "model.grad_checkpointing=true, or choose a smaller network or image size",
            code="setup.memory",
        )
    if smallest < share:
        logger.info(_smaller_batch_message(smallest, share, network))
    return smallest


def _candidate_sizes(
    sampler: DistributedBatchSampler, *, rank: int, world_size: int
) -> dict[int, int]:
    """Return the possible micro-batch sizes, which split a rank's share of the batch evenly.

    Returns: a dict from each size to the number of images in its largest micro-batch, sizes in
        descending order: from the whole share to `sampler.group_size`. The largest micro-batch can
        exceed the size if the shares of the ranks are uneven.
    """
    group_size = sampler.group_size
    share = -(-(sampler.batch_size // group_size) // world_size)
    largest_micro_batch = {}
    for size in sorted(
        {-(-share // num_micro_batches) * group_size for num_micro_batches in range(1, share + 1)},
        reverse=True,
    ):
        micro_batches = sampler.micro_batches(
            0, rank=rank, world_size=world_size, micro_batch_size=size
        )
        largest_micro_batch[size] = max(len(indices) for _, indices in micro_batches)
    return largest_micro_batch


def find_largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, or 0, by bisection.

    Args:
        sizes: in descending order; if one fits, all smaller ones do.
        fits: called about log2(len(sizes)) times.
    """
    index = bisect.bisect_left(sizes, True, key=fits)
    return sizes[index] if index < len(sizes) else 0


def real_step_fits(
    network: nn.Module,
    image_size: tuple[int, int],
    dtype: torch.dtype,
    reserved_bytes: int,
    num_images: int,
) -> bool:
    """True if a real forward and backward pass fits while `reserved_bytes` are allocated.

    The network, its gradients and the random state do not change.
    """
    device = next(network.parameters()).device

    def try_step() -> None:
        reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
        run_step(fake_copy(network), num_images, image_size, dtype, train=True)
        del reserved  # keeps the memory allocated until here

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            try_step()
            fits = True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = False
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return fits


def available_bytes(device: torch.device, local_world_size: int) -> int:
    """Return the bytes that this process can still allocate: on the GPU, or its share of RAM."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    return available_memory_bytes() // max(local_world_size, 1)


def unallocated_state_bytes(trainer: TrainerState) -> int:
    """Return the bytes that training will allocate later: gradients, moments, CPU snapshot."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    state = training_state_bytes(network, trainer.recipe.optim)
    is_resumed = bool(trainer.optimizer.optimizer.state)  # a resumed run has its moments already
    num_bytes = state["gradients"] + (0 if is_resumed else state["moments"])
    if trainer.accelerator.device.type == "cpu":  # checkpoints are written during training
        num_bytes += checkpoint_bytes(state, adapter=trainer.recipe.model.adapter is not None)
    return num_bytes


def _smaller_batch_message(micro_batch_size: int, share: int, network: nn.Module) -> str:
    """Return the message for a rank's share of the batch that does not fit at once."""
    message = f"data.micro_batch=auto: {micro_batch_size} of {share} images per process fit"
    norms = (module for module in network.modules() if hasattr(module, "running_mean"))
    if any(norm.running_mean is not None for norm in norms):
        message += (
            "; batch norm uses the statistics of a micro-batch, so results differ slightly on a "
            "machine with more or less memory"
        )
    return message


# --- in run.json, so that a resumed run uses the same size ----------------------------------------


def _read_recorded_size(run: RunDir) -> int | None:
    """Return the recorded micro-batch size; None if none is recorded or the machine differs."""
    record = read_record(run)
    match record.get("micro_batch"):
        case {"images": int(images), "on": on} if images > 0 and on == _recorded_machine(record):
            return images
    return None


def _record_size(run: RunDir, micro_batch_size: int) -> None:
    record = read_record(run)
    write_record(
        run,
        {**record, "micro_batch": {"images": micro_batch_size, "on": _recorded_machine(record)}},
    )


def _recorded_machine(record: RunRecord) -> dict[str, Any]:
    """Return the machine recorded in run.json, which exists before the size is found."""
    device = record.get("device", {}).get("name")
    return {"device": device, "processes": record.get("num_processes")}
