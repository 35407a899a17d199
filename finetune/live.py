"""The live state of a run on one process: network, optimiser, EMA, counters, and one step of them.

The engine decides when; this file does it. The Accelerator is the engine's and only passed in.
"""

# B batch, K classes

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from finetune import state
from finetune.data.feed import Batch
from finetune.errors import DivergedError, RecipeError
from finetune.job import Job
from finetune.models.head import set_train_mode
from finetune.optim import build_optimizer, set_lr
from finetune.progress import Meter
from finetune.rundir import RunDir

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Counters", "Live"]


@dataclasses.dataclass
class Counters:
    """What a checkpoint remembers besides tensors.

    Attributes:
        step: optimiser steps done, with skipped ones.
        best: the best value of `run.best` so far, and the step it was found at.
        stale: evaluations since then.
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
        """Take an evaluation into account. Returns: whether it is the best so far."""
        lower_is_better = metric.endswith("loss")
        if self.best is None or (value < self.best if lower_is_better else value > self.best):
            self.best, self.best_step, self.stale = value, self.step, 0
            return True
        self.stale += 1
        return False


class Live:
    """The live state of a run on this process."""

    def __init__(self, job: Job, accelerator: Accelerator, run: RunDir) -> None:
        recipe = self.recipe = job.recipe
        self.job = job
        self.accelerator = accelerator
        self.run = run
        self.main = accelerator.is_main_process
        self.counters = Counters()
        network, optim = job.built.model, recipe.optim
        if accelerator.device.type == "cpu":
            _prefer_plain_attention(network)
        network.to(accelerator.device)
        self.ema = ModelEmaV3(network, decay=optim.ema_decay) if optim.ema_decay else None
        optimizer = build_optimizer(
            network,
            name=optim.name,
            lr=optim.lr,
            momentum=optim.momentum,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            decay=optim.decay,
            layer_decay=optim.layer_decay,
            args=optim.args,
        )
        if recipe.model.compile:
            network.compile()
        self.model, self.optimizer = accelerator.prepare(network, optimizer)
        self.sharded = "FSDP" in str(accelerator.distributed_type)
        if self.sharded and self.ema is not None:
            raise RecipeError("optim.ema_decay: not with FSDP; remove the key or train with DDP")

    # One step ---------------------------------------------------------------------------------

    def step(self, num_batches: int, batches: Iterator[Batch], meter: Meter) -> None:
        """Take one optimiser step on this rank's micro-batches."""
        counters, accelerator, optim = self.counters, self.accelerator, self.recipe.optim
        losses = []
        for number, batch in enumerate(batches):
            last = number == num_batches - 1
            waiting = contextlib.nullcontext() if last else accelerator.no_sync(self.model)
            self._seed_dropout(number)
            with waiting:
                logits_BK = self.model(batch.images_BCHW).float()
                loss_sum = _loss_sum(logits_BK, batch, optim.label_smoothing)
                # Gradients are averaged over ranks, and the loss is a mean over the global batch.
                share = accelerator.num_processes / self.recipe.data.batch_size
                accelerator.backward(loss_sum * _unless_infinite(loss_sum.detach(), share))
            losses.append((loss_sum.detach(), logits_BK.detach(), batch.labels_B))
        limit = optim.clip_norm if optim.clip_norm is not None else float("inf")
        norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
        finite = math.isfinite(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        set_lr(self.optimizer.optimizer, self.job.lr(counters.step))
        if finite or accelerator.scaler is not None:  # a scaler leaves the step out by itself
            self.optimizer.step()
        self.optimizer.zero_grad()
        counters.step += 1
        if not finite:
            self._count_skipped()
            return
        counters.skipped_in_row = 0
        if self.ema is not None:
            self.ema.update(accelerator.unwrap_model(self.model), step=counters.step)
        for each in losses:
            meter.add(*each)

    def _seed_dropout(self, micro_batch: int) -> None:
        """Key dropout by (seed, step, rank, micro-batch): resuming needs no random state."""
        words = (self.recipe.run.seed, self.counters.step, self.accelerator.process_index)
        mixed = 0
        for word in (*words, micro_batch):
            mixed = (mixed ^ word) * 0x9E3779B97F4A7C15 % 2**63
            mixed ^= mixed >> 29
        torch.manual_seed(mixed)

    def _count_skipped(self) -> None:
        counters, limit = self.counters, max(self.recipe.run.max_skipped, 1)
        counters.skipped += 1
        counters.skipped_in_row += 1
        if counters.skipped_in_row >= limit:
            raise DivergedError(
                f"{self.run.path}: the gradient was not finite in {limit} steps in a row, up to "
                f"step {counters.step}; lower optim.lr or set optim.clip_norm. "
                + (
                    f"The best checkpoint is of step {counters.best_step}."
                    if counters.best_step is not None
                    else ""
                )
            )

    # Around the steps -------------------------------------------------------------------------

    def log(self, meter: Meter) -> dict[str, Any]:
        """Write a train line of metrics.jsonl, summed over ranks."""
        step = self.counters.step
        line = meter.line(
            self._sum(meter.sums()),
            step=step,
            samples_seen=step * self.recipe.data.batch_size,
            lr=self.job.lr(step - 1),
        )
        self._write(line)
        return line

    def _sum(self, tensor: Tensor) -> Tensor:
        return torch.as_tensor(self.accelerator.reduce(tensor, "sum"))

    def _write(self, line: dict[str, Any]) -> None:
        if self.main:
            self.run.log(line)
            if self.recipe.run.trackers:
                names = ("loss", "top1", "top5", "lr", "images_per_second")
                values = {f"{line['split']}/{key}": line.get(key) for key in names}
                self.accelerator.log(
                    {key: value for key, value in values.items() if value is not None},
                    step=line["step"],
                )

    def evaluated(self) -> nn.Module:
        """The network that evaluation sees; without DDP, which would wait for other ranks."""
        if self.ema is not None:
            return self.ema.module
        return self.model if self.sharded else self.accelerator.unwrap_model(self.model)

    def log_validation(self, result: dict[str, Any], meter: Meter) -> bool:
        """Write a val line of metrics.jsonl. Returns: whether it is the best so far."""
        step = self.counters.step
        line: dict[str, Any] = {
            "step": step,
            "samples_seen": step * self.recipe.data.batch_size,
            "split": "val",
            **{key: result[key] for key in ("loss", "top1", "top5")},
            "lr": self.job.lr(step - 1),
            "images_per_second": result["images_per_second"],
            "seconds": round(meter.seconds, 3),
        }
        self._write(line)
        return self.counters.note(self.recipe.run.best, line[self.recipe.run.best.split(".")[1]])

    @property
    def stops_early(self) -> bool:
        """Whether `run.patience` evaluations brought nothing better."""
        patience = self.recipe.run.patience
        return patience is not None and self.counters.stale >= patience

    def save(self, meter: Meter) -> None:
        """Publish a checkpoint of this step, and prune older ones."""
        counters, run = self.counters, self.run
        counters.seconds = meter.seconds
        counters.pending = self._sum(meter.sums()).tolist()
        if self.accelerator.scaler is not None:
            counters.scaler = self.accelerator.scaler.state_dict()
        snapshot = state.capture(
            self.model,
            self.optimizer.optimizer,
            self.ema.module if self.ema is not None and self.main else None,
            dataclasses.asdict(counters),
        )
        if self.main:
            run.save(counters.step, snapshot.write, needed=snapshot.num_bytes())
            newest = run.steps()[-self.recipe.run.keep_checkpoints :]
            run.prune({*newest, *(best for step in newest if (best := _best_step(run, step)))})
        self.accelerator.wait_for_everyone()

    def restore(self, step: int) -> None:
        """Continue from the checkpoint of `step`, which rank 0 has verified."""
        ema = None if self.ema is None else self.ema.module
        counters = state.restore(self.run.folder(step), self.model, self.optimizer.optimizer, ema)
        self.counters = Counters(**counters)
        best = self.counters.best_step
        if best is not None and (problem := self.run.verify(best)) is not None:
            self.job.notice(f"the best checkpoint is damaged, a new best is looked for: {problem}")
            self.counters = dataclasses.replace(self.counters, best=None, best_step=None, stale=0)
        if self.counters.scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(self.counters.scaler)

    def go_on(self, meter: Meter) -> None:
        """Begin to train, from what a checkpoint kept between two log lines."""
        if self.main and self.counters.pending:
            meter.take_over(self.counters.pending)
        set_train_mode(self.model)

    def share_statistics(self) -> None:
        """Average batch norm's running statistics over ranks: each has seen its own images."""
        if self.accelerator.num_processes == 1:
            return
        for name, buffer in self.model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.as_tensor(self.accelerator.reduce(buffer, "mean")))

    def agree_to_stop(self, received: int) -> int:
        """Let a signal to any rank stop all of them at the same step. Returns: its number or 0."""
        if self.accelerator.num_processes == 1:
            return received
        signals = torch.tensor([received], device=self.accelerator.device)
        return int(self.accelerator.gather(signals).max())

    def load_best(self) -> tuple[int, dict[str, Tensor]]:
        """Put the best weights into the network that evaluation sees.

        Returns: their step, and the weights themselves.
        Raises: CheckpointError if no checkpoint verifies.
        """
        step = self.counters.best_step or self.counters.step
        if (problem := self.run.verify(step)) is not None:
            self.job.notice(f"the best checkpoint is damaged, the newest is taken: {problem}")
            step = self.run.newest(self.job.notice) or self.counters.step
        weights = state.read_weights(self.run.folder(step))
        model = self.evaluated()
        if self.sharded:
            state.set_weights(model, weights)
        else:
            model.load_state_dict(weights)
        return step, weights


def _best_step(run: RunDir, step: int) -> int | None:
    """The step whose checkpoint holds the best weights, as the one of `step` knows it."""
    try:
        counters = json.loads((run.folder(step) / "state.json").read_text(encoding="utf-8"))
        best: int | None = counters["best_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # an older checkpoint was damaged; a resume would pass it over, and its best
    return best


def _loss_sum(logits_BK: Tensor, batch: Batch, label_smoothing: float) -> Tensor:
    """Cross-entropy summed over the images, against labels or mixed targets."""
    targets = batch.labels_B if batch.targets_BK is None else batch.targets_BK
    return nn.functional.cross_entropy(
        logits_BK, targets, reduction="sum", label_smoothing=label_smoothing
    )


def _unless_infinite(loss: Tensor, share: float) -> Tensor:
    """The share, or NaN for a loss that is not finite, whose gradient might be all the same.

    The gradient carries it to all ranks, so that they leave the step out together.
    """
    return torch.where(loss.isfinite(), share, float("nan"))


def _prefer_plain_attention(network: nn.Module) -> None:
    """On CPU the plain product of matrices beats the fused kernel for the lengths of a ViT."""
    for module in network.modules():
        if getattr(module, "fused_attn", False):
            module.fused_attn = False  # type: ignore[assignment]
