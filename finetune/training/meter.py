"""Training metrics between two log lines: loss, accuracy and images per second."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

__all__ = ["TrainMeter"]


class TrainMeter:
    """Sum up training metrics since the last log line, on the device to avoid host copies."""

    def __init__(
        self, device: torch.device, seconds_before: float, *, has_teacher: bool = False
    ) -> None:
        """Start the clock.

        Args:
            seconds_before: training time before the resume; 0 for a new run.
            has_teacher: True to also sum the distillation loss.
        """
        self._device = device
        self._num_sums = 4 + has_teacher
        self._is_multilabel = False  # set by `update` from the shape of the labels
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._start_time = time.perf_counter() - seconds_before
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(self._num_sums, dtype=self._dtype, device=self._device)
        self._interval_start = time.perf_counter()

    def update(
        self,
        loss_sum: Tensor,
        logits_BK: Tensor,
        labels_B: Tensor,
        *teacher_sum: Tensor,
        step_taken: Tensor,
    ) -> None:
        """Add one micro-batch of this rank, unless the step was skipped.

        Args:
            loss_sum: loss summed over the images, a scalar.
            logits_BK: float32 logits.
            labels_B: class indices (B,); for multi-label data, labels (B, K), 0 or 1.
            teacher_sum: distillation loss summed over the images; absent without a teacher.
            step_taken: boolean on the device; False for a skipped step.
        """
        self._is_multilabel = labels_B.ndim == 2
        if self._is_multilabel:
            predicted_BK, true_BK = logits_BK > 0, labels_B > 0
            correct = (predicted_BK & true_BK).sum(), predicted_BK.sum() + true_BK.sum()
        else:
            ranked = logits_BK.topk(min(5, logits_BK.shape[1]), dim=1).indices
            hits = ranked == labels_B[:, None]
            correct = hits[:, 0].sum(), hits.sum()
        images = torch.full_like(loss_sum, len(labels_B))
        sums = (loss_sum, *correct, images, *teacher_sum)
        stacked = torch.stack([each.to(self._dtype) for each in sums])
        self._sums += torch.where(step_taken, stacked, 0)

    @property
    def seconds(self) -> float:
        """Training time of the run in seconds, including the time before a resume."""
        return time.perf_counter() - self._start_time

    def local_sums(self) -> Tensor:
        """Return the sums of this rank, (4,): loss, top-1 hits, top-5 hits, images.

        With a teacher, the distillation loss comes fifth, (5,). Multi-label: instead of the hits,
        true positives, then predicted + actual positives, at threshold 0.5.
        """
        return self._sums.clone()

    def restore_sums(self, sums: list[float]) -> None:
        """Add the sums that a checkpoint saved between two log lines."""
        self._sums += torch.tensor(sums, dtype=self._dtype, device=self._device)

    def compute(
        self, global_sums: Tensor, *, step: int, samples_seen: int, lr: float
    ) -> dict[str, Any]:
        """Compute the log line from the sums over all ranks, and reset.

        Args:
            global_sums: result of `local_sums`, summed over ranks.
            step: optimizer steps done.
            samples_seen: training images of these steps, on all ranks.
            lr: learning rate of the last step.
        Returns: the line of metrics.jsonl; loss and accuracies are None if all steps were skipped.
        """
        # The one device-to-host copy per log line.
        loss, top1, top5, images, *teacher = global_sums.tolist()
        accuracies = {"top1": top1 / max(images, 1.0), "top5": top5 / max(images, 1.0)}
        if self._is_multilabel:
            accuracies = {"micro_f1": 2 * top1 / max(top5, 1.0)}
        elapsed = time.perf_counter() - self._interval_start
        self._reset()
        num_images = max(images, 1.0)
        return {
            "step": step,
            "samples_seen": samples_seen,
            "split": "train",
            "loss": loss / num_images if images else None,
            **{key: value if images else None for key, value in accuracies.items()},
            **({"distill_loss": teacher[0] / num_images if images else None} if teacher else {}),
            "lr": lr,
            "images_per_second": round(images / elapsed, 2),
            "seconds": round(self.seconds, 3),
        }

    def pause(self) -> float:
        """Return the current time, to pass to `resume` when training continues."""
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        """Exclude the time since `paused_at` from the images per second."""
        self._interval_start += time.perf_counter() - paused_at
