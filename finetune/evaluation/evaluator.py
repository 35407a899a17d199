"""Evaluate a model on a split; every image counts exactly once over all processes.

`finetune.training` creates the Accelerator and passes it in.
"""

# B batch, K classes

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Batch
from finetune.evaluation.calibration import TemperatureFitter
from finetune.evaluation.metrics import ClassificationMetrics, ImageResults, Metric, TopLosses
from finetune.evaluation.multilabel import MultilabelMetrics
from finetune.evaluation.unknown_classes import UnknownClassScoreFitter
from finetune.evaluation.validation_scores import ValidationScores
from finetune.progress import item_bar

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["NUM_MISTAKES", "Evaluator", "evaluate"]

# logits, labels, positions in the split
_EvaluatedBatch: TypeAlias = tuple[Tensor, Tensor, NDArray[np.int64]]
NUM_MISTAKES = 24  # wrong predictions to list, for test or, without a test split, val


def evaluate(
    model: nn.Module,
    loader: AnyLoader,
    accelerator: Accelerator,
    *,
    batch_size: int,
    extra_metrics: Sequence[Metric] = (),
    device_metrics: Sequence[Metric] = (),
    multilabel_metrics: MultilabelMetrics | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Evaluate a model on a split; every image counts exactly once over all ranks.

    Args:
        model: the network, not wrapped by DDP.
        batch_size: images per batch on this rank.
        extra_metrics: further metrics, which get their tensors in host memory.
        device_metrics: further metrics, which are updated right after the forward pass.
        multilabel_metrics: metrics to update for a multi-label split; None creates them and fits
            the best thresholds on this split.
        progress: True to show a progress bar.
    Returns: `ClassificationMetrics.compute()` or, for a multi-label split,
        `MultilabelMetrics.compute()`, and "images_per_second" over all ranks.
    Raises: DivergedError if a logit is not finite.
    """
    started = time.perf_counter()
    updated_metrics = list(device_metrics)
    host_metrics = list(extra_metrics)
    metrics: Metric
    if loader.labels.ndim == 2:
        metrics = multilabel_metrics or MultilabelMetrics(loader.labels)
        host_metrics.append(metrics)
    else:
        metrics = ClassificationMetrics(loader.num_classes, device=accelerator.device)
        updated_metrics.append(metrics)
    model.eval()
    batches = loader.eval_batches(
        rank=accelerator.process_index, world_size=accelerator.num_processes, batch_size=batch_size
    )
    bar = item_bar(
        len(loader.labels),
        label=f"evaluating {loader.store.split.name}",
        shown=progress and accelerator.is_main_process,
    )
    with _force_eager(), torch.no_grad(), accelerator.autocast(), bar:
        evaluated = _forward_batches(model, batches, updated_metrics)
        for batch in _copy_to_host(evaluated) if host_metrics else evaluated:
            for metric in host_metrics:
                metric.update(*batch)
            bar.update(len(batch[1]) * accelerator.num_processes)
    for module in model.modules():
        # FSDP keeps the weights gathered after a forward pass without a backward pass
        if isinstance(module, FSDPModule):
            module.reshard()
    results = metrics.compute(accelerator)
    elapsed = time.perf_counter() - started
    return {**results, "images_per_second": round(results["examples"] / elapsed, 2)}


def _forward_batches(
    model: nn.Module, batches: Iterable[Batch], metrics: Sequence[Metric]
) -> Iterator[_EvaluatedBatch]:
    """Compute the logits of each batch, and update the metrics on the same device."""
    for batch in batches:
        logits_BK = model(batch.images_BCHW).float()[: len(batch.labels_B)]
        for metric in metrics:
            metric.update(logits_BK, batch.labels_B, batch.indices)
        yield logits_BK, batch.labels_B, batch.indices


def _copy_to_host(batches: Iterable[_EvaluatedBatch]) -> Iterator[_EvaluatedBatch]:
    """Copy batches to the host; the copy from a GPU overlaps with the next forward pass."""
    pending: deque[tuple[_EvaluatedBatch, torch.cuda.Event]] = deque()
    for logits_BK, labels_B, indices in batches:
        if logits_BK.device.type != "cuda":
            yield logits_BK.cpu(), labels_B.cpu(), indices
            continue
        # a non-blocking copy to the host goes to pinned memory
        copies = [tensor.to("cpu", non_blocking=True) for tensor in (logits_BK, labels_B)]
        pending.append(((copies[0], copies[1], indices), torch.cuda.Event()))
        pending[-1][1].record()
        if len(pending) > 1:
            yield _wait_for_copy(*pending.popleft())
    while pending:
        yield _wait_for_copy(*pending.popleft())


def _wait_for_copy(batch: _EvaluatedBatch, event: torch.cuda.Event) -> _EvaluatedBatch:
    """Wait until the copy is complete."""
    event.synchronize()
    return batch


def _force_eager() -> contextlib.AbstractContextManager[Any]:
    """Run the model uncompiled, as published, so that no evaluation batch size is compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; set_stance would import it in 1 s
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class Evaluator:
    """Evaluate a split, and collect its logits and largest losses for detailed results.

    Args:
        temperature: temperature of additional, calibrated metrics (single-label only); None to omit
            these metrics.
        thresholds: one threshold per class (multi-label only); None fits the best ones on this
            split.
        fit_calibration: True to add the fitted temperature and the scores of all images
            (single-label) or the thresholds (multi-label) to the results.
        num_mistakes: number of wrong predictions to list.
    """

    def __init__(
        self,
        loader: AnyLoader,
        accelerator: Accelerator,
        *,
        temperature: float | None = None,
        thresholds: Sequence[float] | None = None,
        fit_calibration: bool = False,
        num_mistakes: int = 0,
    ) -> None:
        self._loader, self._accelerator = loader, accelerator
        self._multilabel_metrics: MultilabelMetrics | None = None
        if loader.labels.ndim == 2:
            temperature = None
            self._multilabel_metrics = MultilabelMetrics(loader.labels, thresholds)
        self._temperature = temperature
        self._fit_calibration = fit_calibration
        self._num_mistakes = num_mistakes
        self._calibrated_metrics = ClassificationMetrics(
            loader.num_classes, temperature=temperature or 1.0
        )
        self._temperature_fitter = TemperatureFitter(len(loader.labels), loader.num_classes)
        self._image_results = ImageResults()
        self._unknown_score_fitter: UnknownClassScoreFitter | None = None
        self._top_losses = TopLosses(num_mistakes)
        self.metrics: dict[str, Any] = {}

    def evaluate(
        self, model: nn.Module, *, batch_size: int, progress: bool = False
    ) -> dict[str, Any]:
        """Evaluate a model and keep its metrics. Returns: same as the function `evaluate`."""
        optional: tuple[tuple[Metric, bool], ...] = (
            (self._calibrated_metrics, self._temperature is not None),
            (self._temperature_fitter, self._fit_calibration and self._multilabel_metrics is None),
            (self._image_results, self._fit_calibration and self._multilabel_metrics is None),
            (self._top_losses, self._num_mistakes > 0 and self._multilabel_metrics is None),
        )
        with contextlib.ExitStack() as stack:
            if self._fit_calibration and self._multilabel_metrics is None:
                self._unknown_score_fitter = stack.enter_context(
                    UnknownClassScoreFitter(model, len(self._loader.labels))
                )
            self.metrics = evaluate(
                model,
                self._loader,
                self._accelerator,
                batch_size=batch_size,
                extra_metrics=[metric for metric, is_needed in optional if is_needed],
                device_metrics=[fitter] if (fitter := self._unknown_score_fitter) else [],
                multilabel_metrics=self._multilabel_metrics,
                progress=progress,
            )
        return self.metrics

    def results(self) -> dict[str, Any]:
        """Return detailed results of the last evaluation; all ranks must call this.

        Returns: the metrics and these keys: "temperature" and "validation_scores", see
            `ValidationScores.to_config`, with `fit_calibration`; "calibrated", {"temperature",
            "loss", "ece", "calibration"}, if `temperature` was given; and, with `num_mistakes`,
            "mistakes", a list of {"index", "name", "label", "predicted", "confidence", "loss"},
            largest loss first. A multi-label split has "thresholds" instead of the first two, and
            its mistakes have the keys of `MultilabelMetrics.top_losses`.
        """
        accelerator, results = self._accelerator, dict(self.metrics)
        split, mistakes = self._loader.store.split, []
        if self._multilabel_metrics is not None:
            if self._fit_calibration:
                results["thresholds"] = self._multilabel_metrics.thresholds
            mistakes = self._multilabel_metrics.top_losses(self._num_mistakes)
        elif self._fit_calibration:
            results["temperature"] = self._temperature_fitter.compute(accelerator)
            results["validation_scores"] = ValidationScores.from_results(
                self._image_results.compute(accelerator), split.labels, split=split.name
            ).to_config()
            if self._unknown_score_fitter is not None:
                unknown_score = self._unknown_score_fitter.compute(accelerator)
                entry = None if unknown_score is None else unknown_score.to_config()
                results["validation_scores"]["unknown_class"] = entry
        if self._temperature is not None:
            calibrated = self._calibrated_metrics.compute(accelerator)
            calibration = {key: calibrated[key] for key in ("loss", "ece", "calibration")}
            results["calibrated"] = {"temperature": self._temperature, **calibration}
        if self._num_mistakes:
            if self._multilabel_metrics is None:
                mistakes = self._top_losses.compute(accelerator)
            results["mistakes"] = [
                {"index": mistake["index"], "name": split.name_of(mistake["index"]), **mistake}
                for mistake in mistakes
            ]
        return results
