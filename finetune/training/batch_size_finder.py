"""`data.micro_batch: auto`: halve the micro-batch until it fits into memory, once per run.

The global batch size stays the same; only the number of accumulation steps changes. A GPU tries a
real forward and backward pass. A CPU estimates the memory instead: Linux would kill a process that
takes too much.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Batch, ImageLoader, one_hot_targets
from finetune.errors import RecipeError, SetupError, is_out_of_memory
from finetune.host_resources import available_memory_bytes
from finetune.log import logger
from finetune.models.freeze import set_train_mode
from finetune.precision import autocast_dtype
from finetune.run.directory import RunDir
from finetune.run.record import RunRecord, read_record, write_record
from finetune.training.accelerator import run_on_main
from finetune.training.peak_memory import measure_peak_memory
from finetune.training.trainer_state import TrainerState

__all__ = [
    "find_micro_batch_size",
    "micro_batch_fits",
    "read_micro_batch_size",
    "record_micro_batch_size",
    "resolve_micro_batch_size",
]

_MARGIN_DIVISOR = 4  # try a quarter more images: covers the next input, and fragmentation
_USABLE_SHARE = 0.8  # of the free memory of a host
_NUM_MEASURED_IMAGES = 4


def resolve_micro_batch_size(trainer: TrainerState, loader: AnyLoader) -> None:
    """Set the micro-batch size for `data.micro_batch: auto`: read it from run.json, or find it.

    Args:
        trainer: the training state before its first step, or after `load_checkpoint`; the training
            images are on the device already.
        loader: loader of the training split; if it yields cached features, the micro-batch size
            is left unset.
    Raises: SetupError or RecipeError, as `find_micro_batch_size` does.
    """
    if trainer.recipe.data.micro_batch != "auto" or not isinstance(loader, ImageLoader):
        return
    # Every rank must use the same size, and a resumed run the same size as before.
    recorded = run_on_main(trainer.accelerator, lambda: read_micro_batch_size(trainer.run))
    size = recorded or find_micro_batch_size(trainer)
    if recorded is None:
        run_on_main(trainer.accelerator, lambda: record_micro_batch_size(trainer.run, size))
    trainer.micro_batch_size = size


def find_micro_batch_size(trainer: TrainerState) -> int:
    """Halve the micro-batch until it fits on every rank; every rank must call this.

    The training state does not change.

    Args:
        trainer: the training state before its first step, or after `load_checkpoint`; the training
            images are on the device already.
    Returns: images per micro-batch; a rank's whole share of the batch, if that fits.
    Raises: SetupError if not even the smallest size fits; RecipeError for a sharded network.
    """
    if trainer.is_sharded:
        raise RecipeError(
            "data.micro_batch=auto: not supported with FSDP; give a number",
            code="recipe.conflict",
        )
    accelerator, sampler = trainer.accelerator, trainer.setup.sampler
    rank, world_size = accelerator.process_index, accelerator.num_processes
    groups_per_rank = -(-(sampler.batch_size // sampler.group_size) // world_size)
    share = size = groups_per_rank * sampler.group_size
    num_micro_batches = 1
    while True:
        micro_batches = sampler.micro_batches(
            0, rank=rank, world_size=world_size, micro_batch_size=size
        )
        # if the shares of the ranks are uneven, a micro-batch can have one image more than `size`
        fits = micro_batch_fits(trainer, max(len(indices) for _, indices in micro_batches))
        everywhere = accelerator.gather(torch.tensor([int(fits)], device=accelerator.device))
        if torch.as_tensor(everywhere).min():
            break
        if size == sampler.group_size:
            raise SetupError(
                f"data.micro_batch=auto: not even a micro-batch of {size} fits into memory; set "
                "model.grad_checkpointing=true, or choose a smaller network or image size",
                code="setup.memory",
            )
        num_micro_batches *= 2
        size = -(-groups_per_rank // num_micro_batches) * sampler.group_size
    if size < share:
        network = accelerator.unwrap_model(trainer.model)
        logger.info(_smaller_batch_message(size, share, network))
    return size


def micro_batch_fits(trainer: TrainerState, num_images: int) -> bool:
    """True if the forward and backward pass of a micro-batch fits into the memory of this rank.

    Weights, batch norm statistics and the random state do not change; gradients are freed.
    """
    device = trainer.accelerator.device
    set_train_mode(trainer.model)
    with (
        trainer.preserve_bn_stats(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            fits = (_fits_by_estimate if device.type == "cpu" else _fits)(trainer, num_images)
        except RuntimeError as error:
            if not (is_out_of_memory(error) or should_reduce_batch_size(error)):
                raise
            fits = False
    trainer.optimizer.zero_grad()
    clear_device_cache()
    return fits


def _fits(trainer: TrainerState, num_images: int) -> bool:
    """Try a micro-batch, while the memory that training allocates later is reserved.

    Returns: True. Raises: RuntimeError if memory runs out.
    """
    device = trainer.accelerator.device
    reserved = torch.empty(_later_bytes(trainer), dtype=torch.uint8, device=device)
    _forward_backward(trainer, num_images + num_images // _MARGIN_DIVISOR)
    del reserved  # allocated until here
    return True


def _fits_by_estimate(trainer: TrainerState, num_images: int) -> bool:
    """True if a micro-batch is estimated to fit into this rank's share of the host memory.

    The activation memory of a few images is measured, and scaled to the number of images.
    """
    few = min(num_images, _NUM_MEASURED_IMAGES)
    _forward_backward(trainer, few)  # allocates the gradients, which stay allocated
    with measure_peak_memory(trainer.accelerator.device) as memory:
        _forward_backward(trainer, few)
    activations = (memory.peak_bytes - memory.start_bytes) * num_images / few
    later = _later_bytes(trainer)
    snapshot = trainer.checkpoint_bytes() + later  # written while training continues
    available = available_memory_bytes() / trainer.setup.local_world_size
    return activations + later + snapshot <= _USABLE_SHARE * available


def _forward_backward(trainer: TrainerState, num_images: int) -> None:
    """Run forward and backward without the DDP wrapper: if a rank fails, no other rank waits."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    loss_sum, *_ = trainer.forward(_black_batch(trainer, num_images), model=network)
    trainer.accelerator.backward(loss_sum)


def _black_batch(trainer: TrainerState, num_images: int) -> Batch:
    """Return a batch of black images in the training image size, labeled as the first class."""
    setup, device = trainer.setup, trainer.accelerator.device
    size, dtype = setup.preprocessing.image_size, autocast_dtype(trainer.accelerator)
    images_BCHW = torch.zeros(num_images, 3, *size, dtype=dtype, device=device)
    labels_B = torch.zeros(num_images, dtype=torch.long, device=device)
    targets_BK = one_hot_targets(labels_B, setup.num_classes)
    return Batch(
        images_BCHW,
        targets_BK.to(torch.uint8) if setup.is_multilabel else labels_B,
        targets_BK if setup.train_pipeline.has_mixing else None,
        np.zeros(num_images, dtype=np.int64),
    )


def _later_bytes(trainer: TrainerState) -> int:
    """Return the bytes that the optimizer's state will add; 0 if the optimizer has it already.

    Two values per trainable weight are assumed.
    """
    if trainer.optimizer.optimizer.state:
        return 0
    return 2 * sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)


def _smaller_batch_message(micro_batch_size: int, share: int, network: nn.Module) -> str:
    """Return the log message if a rank's share of the batch does not fit as one micro-batch."""
    message = (
        f"data.micro_batch=auto: {micro_batch_size} of {share} images per process fit into memory"
    )
    norms = (module for module in network.modules() if hasattr(module, "running_mean"))
    if any(norm.running_mean is not None for norm in norms):
        message += (
            "; batch norm uses the statistics of a micro-batch, so results differ slightly on a "
            "machine with more or less memory"
        )
    return message


# --- in run.json, so that a resumed run uses the same size ----------------------------------------


def read_micro_batch_size(run: RunDir) -> int | None:
    """Return the recorded micro-batch size; None if none is recorded, or by another machine."""
    record = read_record(run)
    match record.get("micro_batch"):
        case {"images": int(images), "on": on} if images > 0 and on == _recorded_machine(record):
            return images
    return None


def record_micro_batch_size(run: RunDir, micro_batch_size: int) -> None:
    """Record the micro-batch size and the machine in run.json."""
    record = read_record(run)
    write_record(
        run,
        {**record, "micro_batch": {"images": micro_batch_size, "on": _recorded_machine(record)}},
    )


def _recorded_machine(record: RunRecord) -> dict[str, Any]:
    """Return the device and the number of processes that run.json records at the start."""
    device = record.get("device", {}).get("name")
    return {"device": device, "processes": record.get("num_processes")}
