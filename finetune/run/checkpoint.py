"""Checkpoints: the network, the optimiser's moments, the EMA, and the counters.

Tensors go to safetensors and numbers to JSON, so that loading can never run code. Names are those
of the plain network, whatever it is wrapped in: a checkpoint of eight sharded processes loads into
one. There is no random state in it, because every random draw is keyed by the step or the sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
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
from finetune.run.validation import load_json

__all__ = [
    "CheckpointWriter",
    "Counters",
    "Snapshot",
    "capture",
    "read_weights",
    "restore",
    "set_weights",
]


@dataclasses.dataclass
class Counters:
    """The numbers of a run under way.

    Attributes:
        step: optimiser steps done, with skipped ones.
        best: the best value of `run.best` so far, and the last step it was found at.
        stale: evaluations since the first such step.
        skipped, skipped_in_row: steps left out because a gradient was not finite.
        seconds: time spent.
        pending: what the meter has summed since the last log line.
        scaler: fp16's loss scale.
    """

    step: int = 0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    seconds: float = 0.0
    pending: list[float] = dataclasses.field(default_factory=list)
    scaler: dict[str, float] | None = None

    def note(self, metric: str, value: float) -> bool:
        """Take an evaluation into account.

        Of equal values the last is the best one: few images give many of them, and training that
        went on, at a smaller rate, has the better weights. Patience waits for a better one.

        Args:
            metric: `run.best`.
            value: of it; of "last" the step, which is always a greater one.
        Returns: True if it is the best so far.
        """
        gain = math.inf
        if self.best is not None:
            gain = self.best - value if metric.endswith("loss") else value - self.best
        self.stale = 0 if gain > 0 else self.stale + 1
        if gain >= 0:
            self.best, self.best_step = value, self.step
        return gain >= 0


_WHOLE = StateDictOptions(full_state_dict=True)
# Settings of an optimiser's group that belong to the machine.
_MACHINE_SETTINGS = {"foreach", "fused", "capturable", "differentiable"}
_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)  # empty on all others


@dataclasses.dataclass(eq=False)
class Snapshot:
    """A copy of the training state on the host, ready to be written."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    optimizer: dict[str, Any]
    ema: dict[str, Tensor] | None
    counters: dict[str, Any]

    def num_bytes(self) -> int:
        """Size on disk, without the few hundred bytes of headers."""
        tensors = [*self.weights.values(), *self.moments.values(), *(self.ema or {}).values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def write(self, folder: Path) -> None:
        """Put the checkpoint's files into `folder`."""
        save_file(self.weights, folder / "model.safetensors")
        save_file(self.moments, folder / "optimizer.safetensors")
        _write_json(folder / "optimizer.json", self.optimizer)
        if self.ema is not None:
            save_file(self.ema, folder / "ema.safetensors")
        _write_json(folder / "state.json", self.counters)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: nn.Module | None,
    counters: dict[str, Any],
    *,
    constant: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Copy the training state to the host; every rank must call it when the network is sharded.

    Args:
        model: the network, wrapped by DDP or FSDP or not at all.
        optimizer: its optimiser, unwrapped.
        ema: the averaged network, or None.
        counters: what JSON can hold: step, best, early stopping, loss scale.
        constant: weights that are left out, as no step changes them.
    Returns: a snapshot that shares no memory with the live state; whole on rank 0 only.
    """
    moments: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"groups": [], "moments": {}}
    elsewhere = next(model.parameters()).device.type != "cpu"
    # An optimiser that has not stepped has no state, and asking for it would make one up.
    if optimizer.state:
        state: Any = get_optimizer_state_dict(model, optimizer, options=_ON_RANK_0)
        for name, values in state.get("state", {}).items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    moments[f"{name}/{key}"] = _own(value, copied=elsewhere)
                else:
                    numbers["moments"][f"{name}/{key}"] = value
        # Some optimisers count their steps in the group, not with the moments.
        numbers["groups"] = [
            {
                key: value.item() if isinstance(value, Tensor) else value  # a tensor of one number
                for key, value in group.items()
                if key != "params"
            }
            for group in state.get("param_groups", [])
        ]
    weights: Any = get_model_state_dict(model, options=_ON_RANK_0)
    left_out = constant or {}
    average = {} if ema is None else ema.state_dict()
    return Snapshot(
        {n: _own(t, copied=elsewhere) for n, t in weights.items() if n not in left_out},
        moments,
        numbers,
        None if ema is None else {n: _own(t) for n, t in average.items() if n not in left_out},
        counters,
    )


def _own(tensor: Tensor, *, copied: bool = False) -> Tensor:
    """A tensor of the host that nothing else changes, contiguous.

    Args:
        copied: it came from a device, so it is nobody else's already; but an optimiser may count
            its steps in numbers on the host.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.contiguous().cpu()
    return tensor.contiguous() if copied and tensor.numel() > 1 else tensor.clone().contiguous()


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: nn.Module | None,
    *,
    constant: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Load a verified checkpoint into the live network, optimiser and EMA.

    Args: as for `capture`; `folder` is the checkpoint's, `constant` what it was made without.
    Returns: the counters.
    Raises: CheckpointError, before anything live is changed, for a file of another format: a
        manifest may have been written for it.
    """
    state: dict[str, dict[str, Any]] = {}
    saved = _read(folder / "optimizer.json")
    counters = _read(folder / "state.json")
    tensors, weights = (_read(folder / f"{name}.safetensors") for name in ("optimizer", "model"))
    average = None if ema is None else _read(folder / "ema.safetensors")
    for key, value in {**tensors, **saved["moments"]}.items():
        name, _, moment = key.rpartition("/")
        state.setdefault(name, {})[moment] = value
    if state:
        groups: Any = get_optimizer_state_dict(model, optimizer, options=_WHOLE)["param_groups"]
        for group, values in zip(groups, saved["groups"], strict=True):
            kept = {key: value for key, value in values.items() if key not in _MACHINE_SETTINGS}
            # JSON knows only lists, optimisers want their betas as a tuple
            group |= {k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()}
        set_optimizer_state_dict(
            model, optimizer, {"state": cast(Any, state), "param_groups": groups}, options=_WHOLE
        )
        _lay_out(optimizer)
    # Last: asking a fresh optimiser for its state makes it take a step, which moves some weights.
    set_weights(model, {**(constant or {}), **weights})
    if ema is not None and average is not None:
        ema.load_state_dict({**(constant or {}), **average})
    return counters


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Bring moments into their weights' order in memory: fused kernels walk along both alike."""
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            alike = isinstance(moment, Tensor) and moment.shape == weight.shape
            if alike and moment.stride() != weight.stride():
                moments[name] = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)


def _read(path: Path) -> dict[str, Any]:
    """The content of one file, tensors or JSON."""
    try:
        if path.suffix == ".json":
            return dict(json.loads(path.read_text(encoding="utf-8")))
        return load_file(path)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: is not what its name says ({error}); remove this checkpoint",
            code="checkpoint.damaged",
        ) from None


def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load whole tensors, by the plain network's names, into a network that may be sharded."""
    # a copy: torch puts shards into the mapping that it is given
    set_model_state_dict(model, cast(Any, dict(weights)), options=_WHOLE)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights that are evaluated from a checkpoint: its EMA if it has one."""
    ema = folder / "ema.safetensors"
    return _read(ema if ema.exists() else folder / "model.safetensors")


class CheckpointWriter:
    """Writes snapshots as checkpoints.

    Args:
        run: opened by this process.
        newest: how many of the last checkpoints stay, each with the best one that it knows.
    """

    def __init__(self, run: RunDir, *, newest: int) -> None:
        self._run = run
        self._newest = newest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the last checkpoint be finished, whatever ends the run; the run's error goes first.

        Raises: SetupError if a checkpoint cannot be written.
        """
        try:
            yield
        except BaseException:
            if self._writing is not None:
                self._writing.exception()  # waits
            raise
        else:
            self.wait()
        finally:
            self._thread.shutdown()

    def write(self, step: int, snapshot: Snapshot) -> None:
        """Begin to write a checkpoint, once the one before it is there.

        Args:
            step: number of optimiser steps done.
            snapshot: nobody else changes it.
        Raises: SetupError if the one before could not be written.
        """
        self.wait()
        self._writing = self._thread.submit(self._publish, step, snapshot)

    def wait(self) -> None:
        """Wait until everything is written. Raises: SetupError if it could not be."""
        self._look(done=False)

    def look(self) -> None:
        """Raise the error of a write that has failed; wait for none."""
        self._look(done=True)

    def _look(self, *, done: bool) -> None:
        writing = self._writing
        if writing is not None and (writing.done() or not done):
            self._writing = None
            writing.result()

    def _publish(self, step: int, snapshot: Snapshot) -> None:
        run = self._run
        run.save(step, snapshot.write, needed=snapshot.num_bytes())
        newest = run.steps()[-self._newest :]
        run.prune({*newest, *(best for step in newest if (best := _best_step(run, step)))})


def _best_step(run: RunDir, step: int) -> int | None:
    """The step whose checkpoint holds the best weights, as the one of `step` knows it."""
    try:
        best = load_json(run.folder(step) / "state.json")["best_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # an older checkpoint was damaged; a resume would pass it over, and its best
    return best if isinstance(best, int) else None
