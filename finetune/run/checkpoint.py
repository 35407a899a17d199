"""Checkpoints: the network, the optimizer state, the EMA, and the counters.

Tensors are stored as safetensors and numbers as JSON, so loading never runs code. Parameter names
are those of the unwrapped network: a checkpoint of eight sharded processes loads into one process.
Checkpoints contain no random state, because every random draw is keyed by the step or the sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from finetune.errors import CheckpointError
from finetune.run.directory import RunDir

__all__ = [
    "CheckpointWriter",
    "Snapshot",
    "capture_snapshot",
    "load_checkpoint",
    "load_full_state_dict",
    "read_eval_weights",
]


_FULL_STATE = StateDictOptions(full_state_dict=True)
# Parameter group settings that depend on the machine; a checkpoint does not restore them.
_MACHINE_SETTINGS = {"foreach", "fused", "capturable", "differentiable"}
# Other ranks get an empty state dict.
_FULL_STATE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclasses.dataclass(eq=False)
class Snapshot:
    """A copy of the training state in host memory, ready to be written."""

    weights: dict[str, Tensor]
    optimizer_tensors: dict[str, Tensor]
    optimizer_numbers: dict[str, Any]
    ema: dict[str, Tensor] | None
    counters: dict[str, Any]

    def num_bytes(self) -> int:
        """Return the size on disk, without a few hundred bytes of headers."""
        tensors = [
            *self.weights.values(),
            *self.optimizer_tensors.values(),
            *(self.ema or {}).values(),
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def write(self, folder: Path) -> None:
        """Write the files of the checkpoint into a folder."""
        save_file(self.weights, folder / "model.safetensors")
        save_file(self.optimizer_tensors, folder / "optimizer.safetensors")
        _write_json(folder / "optimizer.json", self.optimizer_numbers)
        if self.ema is not None:
            save_file(self.ema, folder / "ema.safetensors")
        _write_json(folder / "state.json", self.counters)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")


def capture_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: nn.Module | None,
    counters: dict[str, Any],
    *,
    frozen_weights: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Copy the training state to host memory; with a sharded network, every rank must call it.

    Args:
        model: the network, with or without a DDP or FSDP wrapper.
        optimizer: the optimizer, not wrapped by Accelerate.
        ema: the EMA of the network; None unless `optim.ema_decay` is set.
        counters: JSON-serializable dict: step, best metric, early stopping, loss scale.
        frozen_weights: weights to exclude, by name, because training does not change them.
    Returns: a snapshot that shares no memory with the training state; complete on rank 0 only.
    """
    moments: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"groups": [], "moments": {}}
    is_on_device = next(model.parameters()).device.type != "cpu"
    # Before its first step an optimizer has no state, and get_optimizer_state_dict would create it.
    if optimizer.state:
        state: Any = get_optimizer_state_dict(model, optimizer, options=_FULL_STATE_ON_RANK_0)
        for name, values in state.get("state", {}).items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    moments[f"{name}/{key}"] = _copy_to_host(value, is_copy=is_on_device)
                else:
                    numbers["moments"][f"{name}/{key}"] = value
        # Some optimizers count their steps in the parameter group.
        numbers["groups"] = [
            {
                key: value.item() if isinstance(value, Tensor) else value  # a scalar tensor
                for key, value in group.items()
                if key != "params"
            }
            for group in state.get("param_groups", [])
        ]
    weights: Any = get_model_state_dict(model, options=_FULL_STATE_ON_RANK_0)
    excluded = frozen_weights or {}
    ema_weights = {} if ema is None else ema.state_dict()
    return Snapshot(
        {
            n: _copy_to_host(t, is_copy=is_on_device)
            for n, t in weights.items()
            if n not in excluded
        },
        moments,
        numbers,
        None
        if ema is None
        else {n: _copy_to_host(t) for n, t in ema_weights.items() if n not in excluded},
        counters,
    )


def _copy_to_host(tensor: Tensor, *, is_copy: bool = False) -> Tensor:
    """Return a contiguous host tensor that shares no memory with the training state.

    Args:
        is_copy: True if `tensor` was copied from the device, so that no second copy is needed. Only
            one-element tensors are still cloned, because optimizers may keep their step counters on
            the host.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.contiguous().cpu()
    return tensor.contiguous() if is_copy and tensor.numel() > 1 else tensor.clone().contiguous()


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: nn.Module | None,
    *,
    frozen_weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Load a verified checkpoint into the network, the optimizer and the EMA.

    Args: `folder` is the folder of the checkpoint; the others are those of `capture_snapshot`.
    Returns: the counters of the checkpoint.
    Raises: CheckpointError if a file has the wrong format, before anything is changed. Verifying
        the manifest does not check the format.
    """
    state: dict[str, dict[str, Any]] = {}
    saved = _read_tensors_or_json(folder / "optimizer.json")
    counters = _read_tensors_or_json(folder / "state.json")
    tensors, weights = (
        _read_tensors_or_json(folder / f"{name}.safetensors") for name in ("optimizer", "model")
    )
    ema_weights = None if ema is None else _read_tensors_or_json(folder / "ema.safetensors")
    for key, value in {**tensors, **saved["moments"]}.items():
        name, _, moment = key.rpartition("/")
        state.setdefault(name, {})[moment] = value
    if state:
        groups: Any = get_optimizer_state_dict(model, optimizer, options=_FULL_STATE)[
            "param_groups"
        ]
        for group, values in zip(groups, saved["groups"], strict=True):
            settings = {key: value for key, value in values.items() if key not in _MACHINE_SETTINGS}
            # JSON has only lists, and optimizers need betas as a tuple
            group |= {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        set_optimizer_state_dict(
            model,
            optimizer,
            {"state": cast(Any, state), "param_groups": groups},
            options=_FULL_STATE,
        )
        _match_memory_format(optimizer)
    # Load the weights last: get_optimizer_state_dict steps a new optimizer, which may change them.
    load_full_state_dict(model, {**(frozen_weights or {}), **weights})
    if ema is not None and ema_weights is not None:
        ema.load_state_dict({**(frozen_weights or {}), **ema_weights})
    return counters


def _match_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the same strides as their weights, because fused kernels expect that."""
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            has_same_shape = isinstance(moment, Tensor) and moment.shape == weight.shape
            if has_same_shape and moment.stride() != weight.stride():
                moments[name] = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)


def _read_tensors_or_json(path: Path) -> dict[str, Any]:
    """Read a safetensors or JSON file. Raises: CheckpointError."""
    try:
        if path.suffix == ".json":
            return dict(json.loads(path.read_text(encoding="utf-8")))
        return load_file(path)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a valid {path.suffix[1:]} file ({error}); remove this checkpoint",
            code="checkpoint.damaged",
        ) from None


def load_full_state_dict(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load unsharded weights, with the names of the unwrapped network; `model` may be sharded."""
    # pass a copy, because torch replaces the values of the dict with shards
    set_model_state_dict(model, cast(Any, dict(weights)), options=_FULL_STATE)


def read_eval_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights to evaluate from a checkpoint: the EMA if it has one, else the network's."""
    ema = folder / "ema.safetensors"
    return _read_tensors_or_json(ema if ema.exists() else folder / "model.safetensors")


class CheckpointWriter:
    """Writes snapshots as checkpoints in a background thread.

    Args:
        run: the run directory, opened by this process.
        num_newest: number of newest checkpoints to keep; for each of them, the checkpoint that was
            the best at its step is kept too.
    """

    def __init__(self, run: RunDir, *, num_newest: int) -> None:
        self._run = run
        self._num_newest = num_newest
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending_write: Future[None] | None = None

    @contextlib.contextmanager
    def finish_on_exit(self) -> Iterator[None]:
        """Wait for the last checkpoint when the block ends.

        Raises: the error of the block, if any; otherwise SetupError if a checkpoint cannot be
            written.
        """
        try:
            yield
        except BaseException:
            if self._pending_write is not None:
                self._pending_write.exception()  # waits
            raise
        else:
            self.wait()
        finally:
            self._executor.shutdown()

    def write(self, step: int, snapshot: Snapshot, *, keep: int | None = None) -> None:
        """Start to write a checkpoint, after waiting for the previous one.

        Args:
            step: number of optimizer steps done.
            snapshot: the training state to write; the caller must not change it afterwards.
            keep: step of a checkpoint that is kept like a newest one, if it exists.
        Raises: SetupError if the previous checkpoint could not be written.
        """
        self.wait()
        self._pending_write = self._executor.submit(self._write_and_prune, step, snapshot, keep)

    def wait(self) -> None:
        """Wait until everything is written. Raises: SetupError if writing failed."""
        self._collect_result(only_if_done=False)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed write, without waiting."""
        self._collect_result(only_if_done=True)

    def _collect_result(self, *, only_if_done: bool) -> None:
        pending = self._pending_write
        if pending is not None and (pending.done() or not only_if_done):
            self._pending_write = None
            pending.result()

    def _write_and_prune(self, step: int, snapshot: Snapshot, keep: int | None) -> None:
        run = self._run
        run.save_checkpoint(step, snapshot.write, num_bytes=snapshot.num_bytes())
        steps = run.checkpoint_steps()
        kept = {*steps[-self._num_newest :], *(step for step in steps if step == keep)}
        run.prune_checkpoints(
            kept | {best for step in kept if (best := run.best_step_at(step)) is not None}
        )
