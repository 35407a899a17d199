"""The training step, and the state that it changes: network, optimizer, EMA and counters.

Each process has a `TrainerState`; `finetune/training/train.py` calls its methods.
"""

# B batch, K classes

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune import process_lifecycle
from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Batch
from finetune.data.source import Split
from finetune.errors import CheckpointError, DivergedError, RecipeError
from finetune.log import logger
from finetune.models.batch_norm import convert_to_sync_batch_norm
from finetune.models.freeze import set_train_mode
from finetune.models.lora import merge_adapter
from finetune.precision import accelerator_precision, autocast_dtype
from finetune.run import checkpoint
from finetune.run.checkpoint import CheckpointWriter
from finetune.run.directory import RunDir
from finetune.run.record import read_record, update_record
from finetune.training.accelerator import is_sharded, run_on_main
from finetune.training.delayed_scalars import DelayedScalars
from finetune.training.distillation import Distillation
from finetune.training.early_stopping import Counters
from finetune.training.frozen_backbone import FrozenBackbone
from finetune.training.losses import AnyLoss
from finetune.training.lr_schedule import set_lr
from finetune.training.meter import TrainMeter
from finetune.training.optim import supports_found_inf
from finetune.training.setup import TrainingSetup

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

__all__ = ["TrainerState"]

_VAL_METRICS = ("loss", "top1", "top5", "map", "balanced_accuracy", "macro_f1", "micro_f1")


class TrainerState:
    """The training state of one process; `build_trainer_state` builds it.

    Args:
        setup: the training setup; replaced once the number of readable images is known.
        accelerator: the accelerator of this rank, which has prepared `model` and `optimizer`.
        run: the run directory.
        model: the network, wrapped for DDP or FSDP with several processes.
        optimizer: the optimizer of the trainable parameters.
        ema: EMA of the network; None unless `optim.ema_decay` is set.
        frozen_backbone: the frozen backbone of a run that trains only the head, which builds its
            loaders; None for other runs.
        distillation: the teacher and its distillation loss; None unless `distill` is set.
        is_compiled: True if training steps are compiled.
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
        frozen_backbone: FrozenBackbone | None,
        distillation: Distillation | None,
        is_compiled: bool,
    ) -> None:
        self.setup, self.accelerator, self.run = setup, accelerator, run
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self.frozen_backbone = frozen_backbone
        self.distillation = distillation
        self.is_compiled = is_compiled
        self.recipe = recipe = setup.recipe
        self.is_main_process = accelerator.is_main_process
        self.is_sharded = is_sharded(accelerator)
        self.counters = Counters()
        micro_batch = recipe.data.micro_batch
        # `resolve_micro_batch_size` sets it for "auto"
        self.micro_batch_size = None if micro_batch == "auto" else micro_batch
        self.checkpoint_writer = CheckpointWriter(run, num_newest=recipe.run.keep_checkpoints)
        self.finite_steps = DelayedScalars(accelerator.device)
        self._signals = DelayedScalars(accelerator.device)
        self._has_stepped = False

    @property
    def uses_cached_features(self) -> bool:
        """True if the loaders yield cached features instead of images."""
        return self.frozen_backbone is not None and self.frozen_backbone.uses_cached_features

    def build_train_loader(self) -> AnyLoader:
        """Build the loader of the training split; every rank must call this.

        Afterwards, `setup` counts only the readable training images.

        Raises: DataError naming every unreadable image, if `data.unreadable` is "stop".
        """
        split = self.setup.source.splits["train"]
        loader = self.build_loader(split, train=True, dtype=autocast_dtype(self.accelerator))
        labels = loader.store.split.labels
        self.setup = self.setup.with_num_samples(len(labels), labels)
        return loader

    def build_loader(
        self, split: Split, *, train: bool, dtype: torch.dtype = torch.float32
    ) -> AnyLoader:
        """Build the loader of a split; every rank must call it.

        Args, Raises: same as for `TrainingSetup.build_loader`.
        """
        if train and self.distillation is not None:
            self.distillation.cache_outputs(split)
        source = self.setup if self.frozen_backbone is None else self.frozen_backbone
        return source.build_loader(split, train=train, dtype=dtype)

    def start(self, meter: TrainMeter) -> None:
        """Prepare for the first step: restore the meter, sync batch norm, switch to train mode."""
        process_lifecycle.resume_garbage_collection()
        if self.is_main_process and self.counters.pending:
            meter.restore_sums(self.counters.pending)
        if self.recipe.model.sync_bn and self.accelerator.num_processes > 1:
            # Not earlier: so far, each rank has run the network alone, and synced layers would have
            # waited for the other ranks.
            convert_to_sync_batch_norm(self.accelerator.unwrap_model(self.model))
        set_train_mode(self.model)

    # One step ------------------------------------------------------------------------------------

    def train_step(
        self, num_micro_batches: int, micro_batches: Iterator[Batch], meter: TrainMeter
    ) -> None:
        """Take one optimizer step, with gradient accumulation over this rank's micro-batches.

        Args:
            num_micro_batches: length of `micro_batches`.
            micro_batches: this rank's micro-batches of the step.
            meter: the meter that sums up loss and accuracy until the next log line.
        Raises: DivergedError after `run.max_skipped` skipped steps in a row.
        """
        accelerator, recipe, counters = self.accelerator, self.recipe, self.counters
        self._bn_stats_before_step = [statistic.clone() for statistic in self.bn_stats]

        # Forward and backward. DDP averages the gradients over ranks, once, after the last
        # micro-batch; but the loss must be the mean over the global batch.
        loss_scale = accelerator.num_processes / recipe.data.batch_size
        outputs = []
        for index, batch in enumerate(micro_batches):
            is_last = index == num_micro_batches - 1
            _seed_dropout(
                accelerator.device, recipe.run.seed, counters.step, accelerator.process_index, index
            )
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.model):
                loss_sum, logits_BK, *teacher_sum = self.forward(batch)
                # A non-finite loss may have finite gradients: NaN makes every rank skip the step.
                factor = torch.where(loss_sum.detach().isfinite(), loss_scale, float("nan"))
                # Gradient checkpointing runs the forward pass again in backward.
                recomputes = recipe.model.grad_checkpointing
                with self.preserve_bn_stats() if recomputes else contextlib.nullcontext():
                    accelerator.backward(loss_sum * factor)
            tensors = (loss_sum, logits_BK, batch.labels_B, *teacher_sum)
            outputs.append([tensor.detach() for tensor in tensors])

        # Clip the gradient, and update the weights. If the gradient is not finite, the step is
        # skipped: it changes neither weights nor batch norm statistics.
        finite = self.clip_grad_norm(recipe.optim.clip_norm).isfinite()
        set_lr(self.optimizer.optimizer, self.setup.lr_at(counters.step))
        self._optimizer_step(finite)
        for statistic, old in zip(self.bn_stats, self._bn_stats_before_step, strict=True):
            statistic.copy_(torch.where(finite, statistic, old))
        self.optimizer.zero_grad()
        counters.step += 1
        if self.ema is not None:
            self.ema.update(accelerator.unwrap_model(self.model), step=counters.step)

        # Add to the sums for the next log line.
        for output in outputs:
            meter.update(*output, step_taken=finite)
        self.finite_steps.send(finite)
        self._count_skipped_steps(self.finite_steps.receive())

    def forward(self, batch: Batch, *, model: nn.Module | None = None) -> tuple[Tensor, ...]:
        """Run the forward pass of a batch.

        Args:
            batch: images and labels on the device.
            model: the network without its DDP wrapper, to run it on this rank alone; None for
                `self.model`.
        Returns: the loss summed over the batch, the logits (B, K) in float32 and, with
            distillation, the summed distillation loss.
        Raises: RecipeError if batch norm gets a single value per channel.
        """
        try:
            logits_BK = (model or self.model)(batch.images_BCHW).float()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise RecipeError(
                "data.batch_size: batch norm needs micro-batches of more than one image; raise it "
                "and data.micro_batch, or set model.freeze_bn=true",
                code="recipe.wrong_value",
            ) from error
        loss_sum = self._loss_fn(logits_BK, batch.labels_B, batch.targets_BK)
        if self.distillation is None:
            return loss_sum, logits_BK
        loss_sum, teacher_sum = self.distillation.compute_loss(loss_sum, logits_BK, batch)
        return loss_sum, logits_BK, teacher_sum

    @functools.cached_property
    def _loss_fn(self) -> AnyLoss:
        """The loss function; built late, because it depends on the readable images."""
        return self.setup.build_loss()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip the gradients if `max_norm` is given.

        Returns: the global norm before clipping, on the device.
        """
        accelerator = self.accelerator
        if self.is_sharded and not (max_norm is None and accelerator.is_fsdp2):
            limit = float("inf") if max_norm is None else max_norm
            norm = torch.as_tensor(accelerator.clip_grad_norm_(self.model.parameters(), limit))
        else:
            accelerator.unscale_gradients()
            if max_norm is None:  # clipping at infinity would rewrite every gradient
                grads = [p.grad for p in self._trainable_parameters if p.grad is not None]
                norm = nn.utils.get_total_norm(grads)
            else:
                norm = nn.utils.clip_grad_norm_(self._trainable_parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @functools.cached_property
    def _trainable_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, cached: walking through a network takes a millisecond."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def _optimizer_step(self, finite: Tensor) -> None:
        """Update the weights, or skip the step if the gradient is not finite."""
        optimizer, scaler = self.optimizer.optimizer, self.accelerator.scaler
        # The first step creates the moments: if torch's fused SGD skipped it, they would be
        # uninitialized.
        if self._has_stepped and scaler is None and supports_found_inf(optimizer):
            # on the device, without a sync
            optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()
            self.optimizer.step()
        elif (scaler is not None and self._has_stepped) or bool(finite):
            self.optimizer.step()  # a scaler checks for infinities itself
            self._has_stepped = True
        elif scaler is not None:
            scaler.update()  # `self.optimizer.step` would have done it

    def _count_skipped_steps(self, finite: Iterable[float]) -> None:
        """Count skipped steps.

        Args:
            finite: 1 for each step with a finite gradient, 0 for each skipped step.
        Raises: DivergedError after `run.max_skipped` skipped steps in a row.
        """
        counters, limit = self.counters, max(self.recipe.run.max_skipped, 1)
        for was_finite in finite:
            counters.skipped += not was_finite
            counters.skipped_in_row = 0 if was_finite else counters.skipped_in_row + 1
            if counters.skipped_in_row >= limit:
                raise DivergedError(
                    f"{self.run.path}: the gradient was not finite in {limit} steps in a row, up "
                    f"to step {counters.step}; lower optim.lr or set optim.clip_norm. "
                    + (
                        f"The best checkpoint is step {counters.best_step}."
                        if counters.best_step is not None
                        else ""
                    ),
                    code="diverged.gradients",
                )

    def sync_stop_signal(self, received: int) -> int:
        """Agree on a stop signal, so that all ranks stop at the same step.

        Returns: the number of a signal that any rank has received, or 0.
        """
        if self.accelerator.num_processes == 1:
            return received
        signals = torch.full((1,), received, device=self.accelerator.device)
        self._signals.send(torch.as_tensor(self.accelerator.gather(signals)).max())
        return int(max(self._signals.receive(), default=0))

    # Logs and evaluation -------------------------------------------------------------------------

    def log_training(self, meter: TrainMeter) -> dict[str, Any]:
        """Write a training line to metrics.jsonl, summed over ranks. Returns: the line."""
        step = self.counters.step
        line = meter.compute(
            self._sum_over_ranks(meter.local_sums()),
            step=step,
            samples_seen=step * self.recipe.data.batch_size,
            lr=self.setup.lr_at(step - 1),
        )
        self._write_metrics(line)
        return line

    def log_validation(self, result: dict[str, Any], meter: TrainMeter) -> bool:
        """Write a validation line to metrics.jsonl. Returns: True if it is the best so far."""
        step = self.counters.step
        line: dict[str, Any] = {
            "step": step,
            "samples_seen": step * self.recipe.data.batch_size,
            "split": "val",
            **{key: result[key] for key in _VAL_METRICS if key in result},
            "lr": self.setup.lr_at(step - 1),
            "images_per_second": result["images_per_second"],
            "seconds": round(meter.seconds, 3),
        }
        self._write_metrics(line)
        best = self.recipe.run.best
        return self.counters.update_best(
            best, line["step" if best == "last" else best.split(".")[1]]
        )

    def _write_metrics(self, line: dict[str, Any]) -> None:
        if self.is_main_process:
            self.run.append_metrics(line)
            if self.recipe.run.trackers:
                accuracies = ("top1", "top5", "map", "micro_f1")
                names = ("loss", "distill_loss", *accuracies, "lr", "images_per_second")
                values = {f"{line['split']}/{key}": line.get(key) for key in names}
                self.accelerator.log(
                    {key: value for key, value in values.items() if value is not None},
                    step=line["step"],
                )

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return torch.as_tensor(self.accelerator.reduce(tensor, "sum"))

    def eval_model(self) -> nn.Module:
        """Return the network to evaluate, without its DDP wrapper: the EMA if the run has one."""
        if self.ema is not None:
            return self.ema.module
        return self.model if self.is_sharded else self.accelerator.unwrap_model(self.model)

    # Checkpoints ---------------------------------------------------------------------------------

    def save_checkpoint(self, meter: TrainMeter) -> None:
        """Start to write a checkpoint of this step in the background; older ones are pruned."""
        counters = self.counters
        self._count_skipped_steps(self.finite_steps.receive(wait=True))
        counters.seconds = meter.seconds
        counters.pending = self._sum_over_ranks(meter.local_sums()).tolist()
        if self.accelerator.scaler is not None:
            counters.scaler = self.accelerator.scaler.state_dict()
        snapshot = self._capture_snapshot()
        if self.is_main_process:
            self.checkpoint_writer.write(counters.step, snapshot, keep=self.setup.decay_start_step)

    def _capture_snapshot(self) -> checkpoint.Snapshot:
        return checkpoint.capture_snapshot(
            self.model,
            self.optimizer.optimizer,
            self.ema.module if self.ema is not None and self.is_main_process else None,
            dataclasses.asdict(self.counters),
            frozen_weights=self._frozen_weights,
        )

    @functools.cached_property
    def _frozen_weights(self) -> dict[str, Tensor]:
        """The frozen weights of an adapter run, which checkpoints do not contain."""
        if self.recipe.model.adapter is None:
            return {}
        network = self.accelerator.unwrap_model(self.model)
        return {n: p.detach() for n, p in network.named_parameters() if not p.requires_grad}

    def checkpoint_bytes(self) -> int:
        """Return the size in bytes of a checkpoint of the current state.

        Before the first step, the optimizer has no state, so that its part is missing.
        """
        return self._capture_snapshot().num_bytes()

    def wait_for_checkpoint(self) -> None:
        """Wait on every rank until the last checkpoint is written."""
        self.checkpoint_writer.wait()
        self.accelerator.wait_for_everyone()

    def load_checkpoint(self, step: int) -> None:
        """Continue from the checkpoint of `step`, which rank 0 has verified."""
        ema = None if self.ema is None else self.ema.module
        counters = checkpoint.load_checkpoint(
            self.run.checkpoint_folder(step),
            self.model,
            self.optimizer.optimizer,
            ema,
            frozen_weights=self._frozen_weights,
        )
        try:
            self.counters = Counters(**counters)
        except TypeError as error:
            folder = self.run.checkpoint_folder(step)
            raise CheckpointError(
                f"{folder}: state.json has unknown or missing fields ({error}); remove this "
                "checkpoint",
                code="checkpoint.damaged",
            ) from error
        best = self.counters.best_step
        if best is not None and (problem := self._verify_checkpoint(best)) is not None:
            logger.warning(
                f"the best checkpoint is missing or damaged; searching for a new best: {problem}"
            )
            self._record_lost_best(best)
            self.counters = dataclasses.replace(self.counters, best=None, best_step=None, stale=0)
        if self.counters.scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(self.counters.scaler)

    def _record_lost_best(self, step: int) -> None:
        """Record that the best weights are lost, so that the published ones are others."""
        if self.is_main_process:
            changes = read_record(self.run).get("numerics_changed", [])
            lost = f"the best checkpoint, of step {step:,}, was lost"
            if lost not in changes:
                update_record(self.run, {"numerics_changed": [*changes, lost]})

    def _verify_checkpoint(self, step: int) -> str | None:
        """Read a checkpoint on rank 0. Returns: its problem on every rank; None if it is intact."""
        return run_on_main(self.accelerator, lambda: self.run.verify_checkpoint(step))

    def load_best_weights(self) -> tuple[int, dict[str, Tensor]]:
        """Load the best weights into `eval_model`, and merge an adapter.

        Returns: the step of the best checkpoint, and its weights, with the names that they have in
            the network without an adapter.
        Raises: CheckpointError if no checkpoint is intact.
        """
        self.wait_for_checkpoint()
        step = self.counters.best_step or self.counters.step
        if (problem := self._verify_checkpoint(step)) is not None:
            logger.warning(
                f"the best checkpoint is missing or damaged; using the newest: {problem}"
            )
            if self.counters.best_step is not None:
                self._record_lost_best(step)
            newest = run_on_main(self.accelerator, self.run.newest_intact_step)
            step = newest or self.counters.step
        weights = {
            **self._frozen_weights,
            **checkpoint.read_eval_weights(self.run.checkpoint_folder(step)),
        }
        model = self.eval_model()
        if self.distillation is not None:
            weights = self.distillation.remove_projection(weights, model, self.setup.built.model)
        if self.is_sharded:
            checkpoint.load_full_state_dict(model, weights)
        else:
            model.load_state_dict(weights)
        return step, merge_adapter(model) if self.recipe.model.adapter else weights

    def provenance(self) -> dict[str, Any]:
        """Return precision, number of processes and teacher, for the plan and run.json."""
        values: dict[str, Any] = {
            "precision": accelerator_precision(self.accelerator),
            "num_processes": self.accelerator.num_processes,
        }
        if self.distillation is not None:
            values["teacher"] = self.distillation.teacher_info
        return values

    # Batch norm statistics -----------------------------------------------------------------------

    @functools.cached_property
    def bn_stats(self) -> list[Tensor]:
        """Running means, running variances and batch counts of the batch norm layers."""
        return _bn_buffers(self.model)

    def restore_bn_stats(self) -> None:
        """Restore the batch norm statistics from before an incomplete step."""
        _copy_values(self._bn_stats_before_step, self.bn_stats)

    @contextlib.contextmanager
    def preserve_bn_stats(self) -> Iterator[None]:
        """Restore the batch norm statistics after the block, which may run the network."""
        saved = [statistic.clone() for statistic in self.bn_stats]
        yield
        _copy_values(saved, self.bn_stats)

    def sync_batch_norm(self) -> None:
        """Average the running statistics of batch norm over ranks, since their images differ.

        The EMA's statistics are broadcast from rank 0, whose EMA the checkpoints contain.
        """
        if self.accelerator.num_processes == 1:
            return
        for statistic in self.bn_stats:
            if statistic.is_floating_point():
                statistic.copy_(torch.as_tensor(self.accelerator.reduce(statistic, "mean")))
        for statistic in () if self.ema is None else _bn_buffers(self.ema.module):
            torch.distributed.broadcast(statistic, src=0)


def _bn_buffers(model: nn.Module) -> list[Tensor]:
    """Return the running means, running variances and batch counts of batch norm layers."""
    ends = ("running_mean", "running_var", "num_batches_tracked")
    return [buffer for name, buffer in model.named_buffers() if name.endswith(ends)]


def _copy_values(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for value, tensor in zip(source, target, strict=True):
        tensor.copy_(value)


def _seed_dropout(device: torch.device, *parts: int) -> None:
    """Seed dropout from (seed, step, rank, micro-batch), so that resuming needs no RNG state."""
    seed = 0
    for part in parts:
        seed = (seed ^ part) * 0x9E3779B97F4A7C15 % 2**63
        seed ^= seed >> 29
    # torch.manual_seed also queues the seed, with a stack trace, for each accelerator that is not
    # initialized: 0.3 ms and a longer queue in every step on a CPU
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
