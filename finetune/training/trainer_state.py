"""The live state of a run on one process: network, optimiser, EMA, counters, and one step of them.

`train` decides when; this file does it. The Accelerator is only passed in.
"""

# B batch, K classes

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune import processes
from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Batch
from finetune.data.source import Split
from finetune.errors import CheckpointError, DivergedError, RecipeError
from finetune.models.adapter import merge_adapter
from finetune.models.batch_norm import synchronise
from finetune.models.head import set_train_mode
from finetune.run import checkpoint
from finetune.run.checkpoint import CheckpointWriter, Counters
from finetune.run.directory import RunDir
from finetune.training.distillation import Distillation
from finetune.training.frozen_backbone import FrozenBackbone
from finetune.training.launch import is_sharded
from finetune.training.losses import AnyLoss
from finetune.training.meter import Meter
from finetune.training.optim import can_mask, set_lr
from finetune.training.setup import TrainingSetup

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

__all__ = ["DelayedScalars", "TrainerState"]

_VAL_FIGURES = ("loss", "top1", "top5", "map", "balanced_accuracy", "macro_f1", "micro_f1")


class DelayedScalars:
    """A small tensor of each step, read one step later on a GPU and at once elsewhere.

    Reading a number from a GPU at once would let it run dry while the host prepares the next step.

    Args:
        device: on which the tensors are.
        late: read them one step later; None: on a GPU.
    """

    def __init__(self, device: torch.device, *, late: bool | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._behind = int(self._on_gpu if late is None else late)
        self._waiting: collections.deque[tuple[Tensor, torch.cuda.Event | None]]
        self._waiting = collections.deque()

    def send(self, value: Tensor) -> None:
        """Send a tensor of one number to the host."""
        value = value.detach().reshape(())
        if not self._on_gpu:
            self._waiting.append((value.clone(), None))
            return
        on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
        on_host.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._waiting.append((on_host, arrived))

    def receive(self, *, wait: bool = False) -> list[float]:
        """Return the numbers that have arrived since the last call, oldest first.

        Args:
            wait: also for those that are still under way.
        """
        behind = 0 if wait else self._behind
        numbers = []
        while len(self._waiting) > behind:
            value, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()  # of the step before: it has long arrived
            numbers.append(float(value))
        return numbers


class TrainerState:
    """The live state of a run on one process; `build_trainer_state` makes it.

    Args:
        setup: of the run; once the data is open, with the number of images that can be read.
        accelerator: from `launch`; it has prepared the network and the optimiser.
        ema: the average of the weights, if `optim.ema_decay` asks for one.
        frozen: loads the data of a run that trains the head alone.
        distillation: adds a teacher's part to the loss.
        compiled: whether training steps are compiled.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        accelerator: Accelerator,
        run: RunDir,
        *,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        ema: ModelEmaV3 | None,
        frozen: FrozenBackbone | None,
        distillation: Distillation | None,
        compiled: bool,
    ) -> None:
        self.setup, self.accelerator, self.run = setup, accelerator, run
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self.frozen, self.distillation, self.compiled = frozen, distillation, compiled
        self.recipe = recipe = setup.recipe
        self.main = accelerator.is_main_process
        self.sharded = is_sharded(accelerator)
        self.counters = Counters()
        micro_batch = recipe.data.micro_batch
        self.micro_batch = None if micro_batch == "auto" else micro_batch  # `settle_micro_batch`
        self.checkpoint_writer = CheckpointWriter(run, newest=recipe.run.keep_checkpoints)
        self._finite = DelayedScalars(accelerator.device)
        self._signals = DelayedScalars(accelerator.device)
        self._masks = accelerator.scaler is None and can_mask(optimizer.optimizer)
        self._has_stepped = False

    @property
    def gives_features(self) -> bool:
        """True if the network is given features in the place of images."""
        return self.frozen is not None and self.frozen.gives_features

    def loader(self, split: Split, *, train: bool, dtype: torch.dtype = torch.float32) -> AnyLoader:
        """Make batches of a split ready; every rank must call it.

        Args: as for `TrainingSetup.loader`.
        Raises: DataError naming every image that cannot be read.
        """
        if train and self.distillation is not None:
            self.distillation.prepare(split)
        source = self.setup if self.frozen is None else self.frozen
        return source.loader(split, train=train, dtype=dtype)

    # One step ---------------------------------------------------------------------------------

    def step(self, num_batches: int, batches: Iterator[Batch], meter: Meter) -> None:
        """Take one optimiser step on this rank's micro-batches."""
        counters, accelerator, optim = self.counters, self.accelerator, self.recipe.optim
        losses = []
        self._before = before = [statistic.clone() for statistic in self._statistics]
        for number, batch in enumerate(batches):
            last = number == num_batches - 1
            waiting = contextlib.nullcontext() if last else accelerator.no_sync(self.model)
            self._seed_dropout(number)
            with waiting:
                loss_sum, logits_BK, *teacher_sum = self.forward(batch)
                # Gradients are averaged over ranks, and the loss is a mean over the global batch.
                share = accelerator.num_processes / self.recipe.data.batch_size
                # a loss that is not finite may have a gradient that is: NaN tells all ranks of it
                factor = torch.where(loss_sum.detach().isfinite(), share, float("nan"))
                with self._counted_once():
                    accelerator.backward(loss_sum * factor)
            sums = [loss_sum, logits_BK, batch.labels_B, *teacher_sum]
            losses.append([tensor.detach() for tensor in sums])
        finite = self._clip(optim.clip_norm).isfinite()
        set_lr(self.optimizer.optimizer, self.setup.lr(counters.step))
        self._update(finite)
        for statistic, old in zip(self._statistics, before, strict=True):
            statistic.copy_(torch.where(finite, statistic, old))  # no step, no trace of it
        self.optimizer.zero_grad()
        counters.step += 1
        if self.ema is not None:
            self.ema.update(accelerator.unwrap_model(self.model), step=counters.step)
        for each in losses:
            meter.add(*each, counts=finite)
        self._finite.send(finite)
        self._count_skipped(self._finite.receive())

    def undo_micro_batches(self) -> None:
        """Take back what those of a step that cannot be taken have changed."""
        self._take_back(self._before)

    def _take_back(self, before: Sequence[Tensor]) -> None:
        for statistic, old in zip(self._statistics, before, strict=True):
            statistic.copy_(old)

    @contextlib.contextmanager
    def _counted_once(self) -> Iterator[None]:
        """Keep batch norm's statistics, where the way back computes activations anew."""
        if not self.recipe.model.grad_checkpointing:
            yield
            return
        kept = [statistic.clone() for statistic in self._statistics]
        yield
        self._take_back(kept)

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the loss summed over a batch, the logits and, if there is one, the teacher's part.

        The logits are float32, (B, K).

        Raises: RecipeError for a lone image, whose every channel gives a batch norm one value.
        """
        try:
            logits_BK = self.model(batch.images_BCHW).float()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise RecipeError(
                "data.batch_size: batch norm needs more than one image at once on each process; "
                "raise it, and data.micro_batch, or set model.freeze_bn=true",
                code="recipe.wrong_value",
            ) from error
        loss_sum = self._loss_sum(logits_BK, batch.labels_B, batch.targets_BK)
        if self.distillation is None:
            return loss_sum, logits_BK
        loss_sum, teacher_sum = self.distillation.of_batch(loss_sum, logits_BK, batch)
        return loss_sum, logits_BK, teacher_sum

    def _clip(self, limit: float | None) -> Tensor:
        """Clip the gradient to a norm, if to any. Returns: its norm before, over all ranks."""
        accelerator = self.accelerator
        if self.sharded and not (limit is None and accelerator.is_fsdp2):
            most = float("inf") if limit is None else limit
            norm = torch.as_tensor(accelerator.clip_grad_norm_(self.model.parameters(), most))
        else:
            accelerator.unscale_gradients()
            if limit is None:  # to clip at infinity would write every gradient anew
                grads = [p.grad for p in self._trained if p.grad is not None]
                norm = nn.utils.get_total_norm(grads)
            else:
                norm = nn.utils.clip_grad_norm_(self._trained, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _update(self, finite: Tensor) -> None:
        """Let the optimiser step, or skip the step where the gradient is not finite."""
        optimizer, scaler = self.optimizer.optimizer, self.accelerator.scaler
        # The first step makes the moments, and torch's fused SGD would leave them unset.
        if self._masks and self._has_stepped:  # on the device, without waiting for it
            optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()
            self.optimizer.step()
        elif (scaler is not None and self._has_stepped) or bool(finite):
            self.optimizer.step()  # a scaler looks for what is not finite itself
            self._has_stepped = True
        elif scaler is not None:
            scaler.update()  # as its own step would have done

    def _seed_dropout(self, micro_batch: int) -> None:
        """Key dropout by (seed, step, rank, micro-batch): resuming needs no random state."""
        words = (self.recipe.run.seed, self.counters.step, self.accelerator.process_index)
        mixed = 0
        for word in (*words, micro_batch):
            mixed = (mixed ^ word) * 0x9E3779B97F4A7C15 % 2**63
            mixed ^= mixed >> 29
        torch.manual_seed(mixed)

    def _count_skipped(self, finite: Iterable[float]) -> None:
        """Count the skipped steps among those whose gradients have been read."""
        counters, limit = self.counters, max(self.recipe.run.max_skipped, 1)
        for was_finite in finite:
            counters.skipped += not was_finite
            counters.skipped_in_row = 0 if was_finite else counters.skipped_in_row + 1
            if counters.skipped_in_row >= limit:
                raise DivergedError(
                    f"{self.run.path}: the gradient was not finite in {limit} steps in a row, up "
                    f"to step {counters.step}; lower optim.lr or set optim.clip_norm. "
                    + (
                        f"The best checkpoint is of step {counters.best_step}."
                        if counters.best_step is not None
                        else ""
                    ),
                    code="diverged.gradients",
                )

    # Around the steps -------------------------------------------------------------------------

    def log(self, meter: Meter) -> dict[str, Any]:
        """Write a train line of metrics.jsonl, summed over ranks."""
        step = self.counters.step
        line = meter.line(
            self._sum(meter.sums()),
            step=step,
            samples_seen=step * self.recipe.data.batch_size,
            lr=self.setup.lr(step - 1),
        )
        self._write(line)
        return line

    def _sum(self, tensor: Tensor) -> Tensor:
        return torch.as_tensor(self.accelerator.reduce(tensor, "sum"))

    def _write(self, line: dict[str, Any]) -> None:
        if self.main:
            self.run.log(line)
            if self.recipe.run.trackers:
                good = ("top1", "top5", "map", "micro_f1")
                names = ("loss", "distill_loss", *good, "lr", "images_per_second")
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
            **{key: result[key] for key in _VAL_FIGURES if key in result},
            "lr": self.setup.lr(step - 1),
            "images_per_second": result["images_per_second"],
            "seconds": round(meter.seconds, 3),
        }
        self._write(line)
        best = self.recipe.run.best
        return self.counters.note(best, line["step" if best == "last" else best.split(".")[1]])

    @property
    def stops_early(self) -> bool:
        """True if `run.patience` evaluations brought nothing better."""
        patience = self.recipe.run.patience
        return patience is not None and self.counters.stale >= patience

    def save(self, meter: Meter) -> None:
        """Begin to publish a checkpoint of this step; `checkpoint_writer` prunes older ones."""
        counters = self.counters
        self._count_skipped(self._finite.receive(wait=True))
        counters.seconds = meter.seconds
        counters.pending = self._sum(meter.sums()).tolist()
        if self.accelerator.scaler is not None:
            counters.scaler = self.accelerator.scaler.state_dict()
        snapshot = checkpoint.capture(
            self.model,
            self.optimizer.optimizer,
            self.ema.module if self.ema is not None and self.main else None,
            dataclasses.asdict(counters),
            constant=self._constant,
        )
        if self.main:
            self.checkpoint_writer.write(counters.step, snapshot)

    def saved(self) -> None:
        """Wait, on every rank, until the last checkpoint is there."""
        self.checkpoint_writer.wait()
        self.accelerator.wait_for_everyone()

    def restore(self, step: int) -> None:
        """Continue from the checkpoint of `step`, which rank 0 has verified."""
        ema = None if self.ema is None else self.ema.module
        counters = checkpoint.restore(
            self.run.folder(step),
            self.model,
            self.optimizer.optimizer,
            ema,
            constant=self._constant,
        )
        try:
            self.counters = Counters(**counters)
        except TypeError as error:
            folder = self.run.folder(step)
            raise CheckpointError(
                f"{folder}: its state.json is not this program's ({error}); remove this checkpoint",
                code="checkpoint.damaged",
            ) from error
        best = self.counters.best_step
        if best is not None and (problem := self.run.verify(best)) is not None:
            self.setup.notice(
                f"the best checkpoint is damaged, a new best is looked for: {problem}"
            )
            self.counters = dataclasses.replace(self.counters, best=None, best_step=None, stale=0)
        if self.counters.scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(self.counters.scaler)

    def go_on(self, meter: Meter) -> None:
        """Begin to train, from what a checkpoint kept between two log lines."""
        processes.resume_garbage_collection()
        if self.main and self.counters.pending:
            meter.take_over(self.counters.pending)
        if self.recipe.model.sync_bn and self.accelerator.num_processes > 1:
            # not before: what tries the network out, or copies it, does so on each rank alone
            synchronise(self.accelerator.unwrap_model(self.model))
        set_train_mode(self.model)

    def share_statistics(self) -> None:
        """Average batch norm's running statistics over ranks: each has seen its own images.

        In the EMA they become those of rank 0, which checkpoints keep.
        """
        if self.accelerator.num_processes == 1:
            return
        for statistic in self._statistics:
            if statistic.is_floating_point():
                statistic.copy_(torch.as_tensor(self.accelerator.reduce(statistic, "mean")))
        for statistic in () if self.ema is None else _statistics_of(self.ema.module):
            torch.distributed.broadcast(statistic, src=0)

    @functools.cached_property
    def _loss_sum(self) -> AnyLoss:
        """The loss of a micro-batch; by now the images are known that can be read."""
        return self.setup.make_loss()

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        """The parameters that are trained; to walk through a network takes a millisecond."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @functools.cached_property
    def _constant(self) -> dict[str, Tensor]:
        """The weights that an adapter leaves as they were; no checkpoint holds them."""
        if self.recipe.model.adapter is None:
            return {}
        network = self.accelerator.unwrap_model(self.model)
        return {n: p.detach() for n, p in network.named_parameters() if not p.requires_grad}

    @functools.cached_property
    def _statistics(self) -> list[Tensor]:
        return _statistics_of(self.model)

    def agree_to_stop(self, received: int) -> int:
        """Let a signal to any rank stop all of them at the same step. Returns: its number or 0."""
        if self.accelerator.num_processes == 1:
            return received
        signals = torch.full((1,), received, device=self.accelerator.device)
        self._signals.send(torch.as_tensor(self.accelerator.gather(signals)).max())
        return int(max(self._signals.receive(), default=0))

    def load_best(self) -> tuple[int, dict[str, Tensor]]:
        """Put the best weights into the network that evaluation sees, an adapter merged.

        Returns: their step, and the weights themselves, by the names without an adapter.
        Raises: CheckpointError if no checkpoint verifies.
        """
        self.saved()
        step = self.counters.best_step or self.counters.step
        if (problem := self.run.verify(step)) is not None:
            self.setup.notice(f"the best checkpoint is damaged, the newest is taken: {problem}")
            step = self.run.newest(self.setup.notice) or self.counters.step
        weights = {**self._constant, **checkpoint.read_weights(self.run.folder(step))}
        model = self.evaluated()
        if self.distillation is not None:
            weights = self.distillation.discard(weights, model, self.setup.built.model)
        if self.sharded:
            checkpoint.set_weights(model, weights)
        else:
            model.load_state_dict(weights)
        return step, merge_adapter(model) if self.recipe.model.adapter else weights


def _statistics_of(model: nn.Module) -> list[Tensor]:
    """Batch norm's running means and variances, and the numbers of batches in them."""
    ends = ("running_mean", "running_var", "num_batches_tracked")
    return [buffer for name, buffer in model.named_buffers() if name.endswith(ends)]
