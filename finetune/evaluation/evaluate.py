"""Measure a network on a split, each image counted once over all processes.

The Accelerator is made by `finetune.training` and only passed in.
"""

# B batch, K classes

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Batch
from finetune.evaluation.calibration import HeldLogits
from finetune.evaluation.metrics import Counts, Mistakes, worst
from finetune.evaluation.multilabel import LabelScores

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["NUM_MISTAKES", "Examination", "Watcher", "evaluate"]

_Seen: TypeAlias = tuple[Tensor, Tensor, NDArray[np.int64]]  # logits, labels, places in the split
NUM_MISTAKES = 24  # of the test split, or of validation where there is none, in results


class Watcher(Protocol):
    """Looks at each batch of an evaluation."""

    def add(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Take a batch on the host: logits, labels, and the images' places in the split."""


def evaluate(
    model: nn.Module,
    loader: AnyLoader,
    accelerator: Accelerator,
    *,
    batch_size: int,
    watchers: Sequence[Watcher] = (),
    scores: LabelScores | None = None,
) -> dict[str, Any]:
    """Measure a network on a split, each image counted once over all ranks.

    Args:
        model: the network, not wrapped by DDP.
        batch_size: images at once on this rank.
        watchers: see this rank's logits as well.
        scores: of several labels an image; None: with the thresholds that are best here.
    Returns: `Counts.result()`, or for several labels an image `LabelScores.figures()`, and
        "images_per_second" of all ranks together.
    Raises: DivergedError if a logit is not finite.
    """
    started = time.perf_counter()
    counts = Counts(loader.num_classes, device=accelerator.device)
    if loader.labels.ndim == 2:
        scores = scores or LabelScores(loader.labels)
        watchers = [*watchers, scores]
    model.eval()
    batches = loader.once(
        rank=accelerator.process_index, world=accelerator.num_processes, batch_size=batch_size
    )
    with _uncompiled(model), torch.no_grad(), accelerator.autocast():
        computed = _computed(model, batches, None if scores is not None else counts)
        for seen in _on_host(computed) if watchers else computed:
            for watcher in watchers:
                watcher.add(*seen)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a pass without a way back leaves weights gathered
            module.reshard()
    result = _summed(counts, accelerator) if scores is None else scores.figures(accelerator)
    elapsed = time.perf_counter() - started
    return {**result, "images_per_second": round(result["examples"] / elapsed, 2)}


def _computed(model: nn.Module, batches: Iterable[Batch], counts: Counts | None) -> Iterator[_Seen]:
    """Compute the logits of each batch, and count them where they are."""
    for batch in batches:
        logits_BK = model(batch.images_BCHW).float()[: len(batch.labels_B)]
        if counts is not None:
            counts.add(logits_BK, batch.labels_B)
        yield logits_BK, batch.labels_B, batch.indices


def _on_host(computed: Iterable[_Seen]) -> Iterator[_Seen]:
    """Yield batches on the host; those of a GPU while it computes the next one."""
    under_way: deque[tuple[_Seen, torch.cuda.Event]] = deque()
    for logits_BK, labels_B, indices in computed:
        if logits_BK.device.type != "cuda":
            yield logits_BK.cpu(), labels_B.cpu(), indices
            continue
        # into pinned memory
        copies = [tensor.to("cpu", non_blocking=True) for tensor in (logits_BK, labels_B)]
        under_way.append(((copies[0], copies[1], indices), torch.cuda.Event()))
        under_way[-1][1].record()
        if len(under_way) > 1:
            yield _arrived(*under_way.popleft())
    while under_way:
        yield _arrived(*under_way.popleft())


def _arrived(seen: _Seen, event: torch.cuda.Event) -> _Seen:
    """Wait for the copies."""
    event.synchronize()
    return seen


def _uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Compute as the published model will, and compile nothing for the sizes of evaluation."""
    if getattr(model, "_compiled_call_impl", None) is None:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class Examination:
    """A split measured once, with what a closer look at it needs: logits, and the worst mistakes.

    Args:
        temperature: measure the calibration of logits divided by this, too; of one label an image.
        thresholds: of several labels, of each class; None: those that are best on this split.
        fit: find the temperature that suits this split; of several labels, the thresholds.
        num_mistakes: how many of the wrong predictions to list.
    """

    def __init__(
        self,
        loader: AnyLoader,
        accelerator: Accelerator,
        *,
        temperature: float | None = None,
        thresholds: Sequence[float] | None = None,
        fit: bool = False,
        num_mistakes: int = 0,
    ) -> None:
        self._loader, self._accelerator = loader, accelerator
        self._scores: LabelScores | None = None
        if loader.labels.ndim == 2:
            temperature = None
            self._scores = LabelScores(loader.labels, thresholds)
        self._temperature, self._fit, self._num_mistakes = temperature, fit, num_mistakes
        counts = Counts(loader.num_classes)
        self._scaled = _Scaled(counts, temperature or 1.0)
        self._held = HeldLogits(len(loader.labels), loader.num_classes)
        self._mistakes = Mistakes(num_mistakes)
        self.figures: dict[str, Any] = {}

    def measure(self, model: nn.Module, *, batch_size: int) -> dict[str, Any]:
        """Evaluate a network. Returns: `figures`, which are those of `evaluate`."""
        optional = (
            (self._scaled, self._temperature is not None),
            (self._held, self._fit and self._scores is None),
            (self._mistakes, self._num_mistakes > 0 and self._scores is None),
        )
        self.figures = evaluate(
            model,
            self._loader,
            self._accelerator,
            batch_size=batch_size,
            watchers=[watcher for watcher, is_needed in optional if is_needed],
            scores=self._scores,
        )
        return self.figures

    def of(self, model: nn.Module, *, batch_size: int) -> dict[str, Any]:
        """Evaluate a network and look closer. Returns: as `report`."""
        self.measure(model, batch_size=batch_size)
        return self.report()

    def report(self) -> dict[str, Any]:
        """Look closer at what was measured; every rank must call it.

        Returns: `figures`, with "temperature" if one was fitted; "calibrated" {"temperature",
            "loss", "ece", "calibration"} if one was given; and "mistakes", worst first, each
            {"index", "name", "label", "predicted", "confidence", "loss"}, if they were asked for.
            Of several labels an image "thresholds" in the place of the temperature, and mistakes
            as `LabelScores.mistakes` has them.
        """
        accelerator, result = self._accelerator, dict(self.figures)
        split, mistakes = self._loader.store.split, []
        if self._scores is not None:
            if self._fit:
                result["thresholds"] = self._scores.thresholds
            mistakes = self._scores.mistakes(self._num_mistakes)
        elif self._fit:
            device = accelerator.device
            result["temperature"] = self._held.fit(
                lambda sums: torch.as_tensor(accelerator.reduce(sums.to(device), "sum")).cpu()
            )
        if self._temperature is not None:
            calibrated = _summed(self._scaled.counts, accelerator)
            kept = {key: calibrated[key] for key in ("loss", "ece", "calibration")}
            result["calibrated"] = {"temperature": self._temperature, **kept}
        if self._num_mistakes:
            if self._scores is None:
                of_all_ranks = _gathered(self._mistakes.worst, self._num_mistakes, accelerator)
                mistakes = worst(of_all_ranks, self._num_mistakes)
            result["mistakes"] = [
                {"index": one["index"], "name": split.name_of(one["index"]), **one}
                for one in mistakes
            ]
        return result


class _Scaled:
    """Counts logits that are divided by a temperature."""

    def __init__(self, counts: Counts, temperature: float) -> None:
        self.counts = counts
        self.temperature = temperature

    def add(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        self.counts.add(logits_BK.double() / self.temperature, labels_B)


def _summed(counts: Counts, accelerator: Accelerator) -> dict[str, Any]:
    """The result over all ranks."""
    device = accelerator.device
    sums = torch.as_tensor(accelerator.reduce(counts.tensor().to(device), "sum"))
    # ranks have more or fewer images
    pairs_N = accelerator.pad_across_processes(counts.pairs().to(device), dim=0, pad_index=-1)
    pairs_N = torch.as_tensor(accelerator.gather(pairs_N))
    return Counts(counts.num_classes, device=device).load(sums, pairs_N).result()


_KEYS = ("index", "label", "predicted", "confidence", "loss")


def _gathered(
    mistakes: Sequence[dict[str, Any]], limit: int, accelerator: Accelerator
) -> list[dict[str, Any]]:
    """Every rank's mistakes, through one tensor; float64 holds each index exactly."""
    if accelerator.num_processes == 1:
        return list(mistakes)
    table = torch.full((limit, len(_KEYS)), -1.0, dtype=torch.float64, device=accelerator.device)
    for row, one in enumerate(mistakes):
        table[row] = torch.tensor([float(one[key]) for key in _KEYS], dtype=torch.float64)
    rows = torch.as_tensor(accelerator.gather(table)).tolist()
    return [
        {"index": int(row[0]), "label": int(row[1]), "predicted": int(row[2])}
        | {"confidence": row[3], "loss": row[4]}
        for row in rows
        if row[0] >= 0
    ]
