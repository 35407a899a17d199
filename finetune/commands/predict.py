"""Classify files with a saved model: the same decoder and the same pipeline as evaluation."""

# B batch, K classes, C channels, H W pixels, h w the model's input size

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from finetune.commands.contact_sheet import ContactSheet, save_sheet
from finetune.commands.predict_io import (
    Found,
    Row,
    Rows,
    check_target,
    find_files,
    list_files,
    refuse_inputs,
    writing,
)
from finetune.console import terminal_bar
from finetune.data.decode import decode, planes
from finetune.errors import DataError, FinetuneError, RecipeError, SetupError, WeightsError
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD, probabilities
from finetune.models.build import build
from finetune.models.fast_blocks import compute_class_token, multiply_by_onednn
from finetune.models.saved import Built
from finetune.run.environment import pick_precision
from finetune.run.pipeline import pipeline_of
from finetune.transforms.evaluation import make_pipeline
from finetune.transforms.pipeline import Pipeline

__all__ = ["Classifier", "evaluation", "num_classes_of", "predict"]

_MOST_LANES = 32
# images through the network at once, by device; on a CPU, of larger batches less stays in its cache
_BATCH_SIZES = {"cpu": 8}
_BATCH_SIZE = 64
# bytes of pixels that go through the pipeline at once: a CPU takes images one by one, and on a GPU
# 64 decoded photos of 48 megapixels would be 9 GB
_PIXELS = {"cpu": 1}
_MOST_PIXELS = 2**26
_Look = Callable[[int, np.ndarray], None]


class Classifier:
    """A network with its preprocessing and the names of its classes.

    Args:
        network: images (B, 3, h, w) to logits (B, K); put on the device and into evaluation mode,
            on a CPU with the products of `multiply_by_onednn`.
        pipeline: without random operations.
        class_names: one for each of the K logits.
        device: where to compute; None takes a GPU if there is one.
        temperature: what logits are divided by before they become confidences; None for 1.
        thresholds: K of them, where an image has any number of labels: a class is one from this
            confidence on, which is then the sigmoid of its logit; None where it has one.
    """

    def __init__(
        self,
        network: nn.Module,
        pipeline: Pipeline,
        class_names: Sequence[str],
        *,
        device: torch.device | str | None = None,
        temperature: float | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network = network.to(self.device).eval()
        self.pipeline = pipeline
        self.class_names = list(class_names)
        self.temperature = temperature
        self.thresholds = None if thresholds is None else list(thresholds)
        # a GPU computes in the numbers it is made for, a CPU always in float32
        gpu = self.device.type == "cuda"
        self.precision = pick_precision("auto", self.device) if gpu else "fp32"
        # batches take turns on a device, whose memory may hold one only
        self._turn = contextlib.nullcontext() if self.device.type == "cpu" else threading.Lock()
        if self.device.type == "cpu":
            multiply_by_onednn(self.network)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: torch.device | str | None = None,
        calibrated: bool = False,
        threshold: float | None = None,
    ) -> Classifier:
        """Load a run directory, a model folder, `hf-hub:owner/name@revision` or a timm name.

        Class names come with the weights; weights without any give the numbers of the classes.
        A run directory is evaluated as its recipe says, everything else as the weights'
        configuration says.

        Args:
            model: what to load.
            device: where to compute; None takes a GPU if there is one.
            calibrated: divide logits by the temperature that is stored with the model; False
                gives the plain softmax, as timm and transformers do.
            threshold: of every class in place of those that are stored with the model, from 0 to
                1; for a model that gives an image several labels.
        Raises: WeightsError if there is no such model, it has no classifier, or no temperature;
            RecipeError for a threshold or a temperature where there can be none.
        """
        built = build(str(model))
        pipeline, class_names = evaluation(model, built)
        thresholds = _thresholds(model, built, len(class_names), threshold, calibrated=calibrated)
        temperature = built.temperature
        if calibrated and temperature is None:
            raise WeightsError(
                f"{model}: has no temperature to calibrate with; fit one on its validation split: "
                f"finetune eval {model} --fit-temperature",
                code="weights.no_temperature",
            )
        chosen = temperature if calibrated else None
        return cls(
            built.model,
            pipeline,
            class_names,
            device=device,
            temperature=chosen,
            thresholds=thresholds,
        )

    def logits(self, images_BCHW: Tensor) -> Tensor:
        """Compute raw logits, never divided by a temperature.

        Args:
            images_BCHW: (B, 3, h, w), as the pipeline prepares them, on any device.
        Returns: (B, K) float32 on the classifier's device.
        """
        images_BCHW = images_BCHW.to(self.device, torch.float32)
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        with torch.inference_mode(), half:
            logits_BK: Tensor = self.network(images_BCHW).float()
        return logits_BK

    def confidences(self, logits_BK: Tensor) -> Tensor:
        """Turn logits into confidences: their softmax, or of several labels the sigmoid of each.

        Args:
            logits_BK: (B, K), of `logits`.
        Returns: (B, K) float64.
        Raises: WeightsError if a logit is not finite.
        """
        if not bool(logits_BK.isfinite().all()):
            raise WeightsError(
                "the model's outputs are not finite: its weights are damaged; train or download "
                "it again",
                code="weights.not_finite",
            )
        if self.thresholds is not None:
            return torch.from_numpy(probabilities(logits_BK))
        return (logits_BK.double() / (self.temperature or 1.0)).softmax(1)

    def predict(
        self,
        paths: str | Path | Image.Image | Iterable[str | Path | Image.Image],
        *,
        top_k: int = 3,
        batch_size: int | None = None,
        progress: bool = False,
    ) -> list[Row]:
        """Classify images.

        Args:
            paths: files, folders (with those below them) and glob patterns, or PIL images.
            top_k: predictions per image, the most probable first; at most K.
            batch_size: images through the network at once; None for 8 on a CPU, else 64.
            progress: show a bar on standard error.
        Returns: in the order of the files, {"path", "predictions": [{"label", "index",
            "confidence"}]}, or {"path", "error"} for one that cannot be read; the path of a PIL
            image is None. A model that gives an image several labels adds "labels", of the same
            kind: the classes whose confidence is at or above their threshold, the most probable
            first.
        Raises: RecipeError if top_k or batch_size is below 1; WeightsError if an output is not
            finite.
        """
        files = find_files([paths] if isinstance(paths, str | Path | Image.Image) else paths)
        return list(self.rows(files, top_k=top_k, batch_size=batch_size, progress=progress))

    def rows(
        self,
        files: Sequence[Found],
        *,
        top_k: int = 3,
        batch_size: int | None = None,
        progress: bool = False,
        look: _Look | None = None,
    ) -> Iterator[Row]:
        """Classify images one batch after another, for lists that do not fit into memory.

        Several batches are under way at once, each on a thread and its share of the cores.

        Args:
            files: from `find_files`.
            top_k, batch_size, progress: see `predict`.
            look: is shown every decoded image, (H, W, 3) uint8, with its place in the list; called
                from several threads.
        Returns: the rows of `predict`, in order, as they are ready.
        Raises: as `predict`, before anything is read.
        """
        size = _BATCH_SIZES.get(self.device.type, _BATCH_SIZE) if batch_size is None else batch_size
        for name, number in (("top_k", top_k), ("batch_size", size)):
            if number < 1:
                raise RecipeError(
                    f"{name}: got {number}; expected 1 or more", code="recipe.wrong_value"
                )
        return self._rows(files, top_k, size, progress, look)

    def _rows(
        self,
        files: Sequence[Found],
        top_k: int,
        batch_size: int,
        progress: bool,
        look: _Look | None,
    ) -> Iterator[Row]:
        cores = torch.get_num_threads()
        lanes = max(1, min(cores, _MOST_LANES, -(-len(files) // batch_size)))
        stop, ahead = threading.Event(), deque[Future[list[Row]]]()
        # torch's own threads wait for one another in every layer; whole batches need not
        pool = ThreadPoolExecutor(lanes, initializer=_begin_lane, initargs=(cores // lanes, stop))
        hooks = [module.register_forward_pre_hook(_go_on) for module in self.network.modules()]
        try:
            with terminal_bar(len(files), shown=progress) as shown:
                for start in range(0, len(files), batch_size):
                    batch = files[start : start + batch_size]
                    ahead.append(pool.submit(self._classified, start, batch, top_k, look))
                    if len(ahead) > lanes:
                        yield from _shown(ahead.popleft().result(), shown)
                while ahead:
                    yield from _shown(ahead.popleft().result(), shown)
        finally:
            stop.set()  # an interrupt waits for one layer, not for a batch
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(cores)  # the lanes' number is the default of new threads
            for hook in hooks:
                hook.remove()

    def _classified(
        self, start: int, files: Sequence[Found], top_k: int, look: _Look | None
    ) -> list[Row]:
        """Make the rows of a batch of files, of which the first has the place `start`."""
        rows: list[Row] = [{"path": path if isinstance(path, str) else None} for path, _ in files]
        decoded: list[tuple[Row, Tensor]] = []
        prepared: list[tuple[Row, Tensor]] = []
        most, held = _PIXELS.get(self.device.type, _MOST_PIXELS), 0
        for place, (row, (path, error)) in enumerate(zip(rows, files, strict=True), start):
            _go_on()
            pixels_CHW = _decoded(path, error, place, self.pipeline.decode_size, look)
            if isinstance(pixels_CHW, str):
                row["error"] = pixels_CHW
                continue
            decoded.append((row, pixels_CHW))
            held += pixels_CHW.nbytes
            if held >= most:
                prepared += self._prepared(decoded)
                decoded, held = [], 0
        prepared += self._prepared(decoded)
        if prepared:
            self._classify(prepared, top_k)
        return rows

    def _prepared(self, decoded: Sequence[tuple[Row, Tensor]]) -> list[tuple[Row, Tensor]]:
        """Send images through the pipeline: (3, h, w) on the device for each that goes through."""
        if not decoded:
            return []
        images = [image for _, image in decoded]
        alone = images[0][None] if len(images) == 1 else images  # as the demo does, to the bit
        try:
            with self._turn:
                images_BCHW = self.pipeline(alone, device=self.device)
        except FinetuneError as error:
            if len(decoded) > 1:
                return [pair for one in decoded for pair in self._prepared([one])]
            decoded[0][0]["error"] = str(error)
            return []
        return [(row, image) for (row, _), image in zip(decoded, images_BCHW, strict=True)]

    def _classify(self, waiting: Sequence[tuple[Row, Tensor]], top_k: int) -> None:
        """Write the predictions of a batch into its rows."""
        try:
            with self._turn:
                logits_BK = self.logits(torch.stack([image for _, image in waiting]))
        except torch.OutOfMemoryError as error:
            raise SetupError(
                f"the memory of {self.device} does not hold {len(waiting)} images at once; take "
                "fewer with --batch-size",
                code="setup.memory",
            ) from error
        # stable, so that equal classes come by index on every device
        ranked = self.confidences(logits_BK).sort(dim=1, descending=True, stable=True)
        several = self.thresholds is not None
        depth = len(self.class_names) if several else top_k
        both = zip(ranked.values[:, :depth].cpu(), ranked.indices[:, :depth].cpu(), strict=True)
        for (row, _), (confidence_K, index_K) in zip(waiting, both, strict=True):
            row["predictions"] = self._named(confidence_K[:top_k], index_K[:top_k])
            if several:
                said_K = confidence_K >= torch.tensor(self.thresholds, dtype=torch.float64)[index_K]
                row["labels"] = self._named(confidence_K[said_K], index_K[said_K])

    def _named(self, confidence_K: Tensor, index_K: Tensor) -> list[Row]:
        return [
            {"label": self.class_names[index], "index": index, "confidence": confidence}
            for confidence, index in zip(confidence_K.tolist(), index_K.tolist(), strict=True)
        ]


def num_classes_of(model: str | Path, built: Built) -> int:
    """The number of a model's classes. Raises: WeightsError if it has no classifier."""
    num_classes = int(getattr(built.model, "num_classes", 0) or 0)
    if not num_classes:
        raise WeightsError(
            f"{model}: these weights have no classifier; fine-tune them first: finetune train",
            code="weights.no_classifier",
        )
    return num_classes


def evaluation(
    model: str | Path, built: Built, *, as_recorded: bool = True
) -> tuple[Pipeline, list[str]]:
    """The evaluation pipeline of a model, and the names of its classes.

    Args:
        model: a run directory is evaluated as its recipe says, everything else as the weights'
            configuration says.
        built: the same model.
        as_recorded: False leaves the recipe aside, for another image size than the run's.
    Raises: WeightsError if it has no classifier.
    """
    num_classes = num_classes_of(model, built)
    names = built.class_names or [str(index) for index in range(num_classes)]
    if as_recorded:
        return pipeline_of(model, built.preprocessing), names
    return make_pipeline(built.preprocessing), names


def predict(
    model: str,
    paths: Sequence[str],
    *,
    top_k: int = 3,
    out: str | Path | None = None,
    sheet: str | Path | None = None,
    calibrated: bool = False,
    threshold: float | None = None,
    batch_size: int | None = None,
    device: str | None = None,
) -> Rows:
    """Classify files and folders, and write the results to the files that are named.

    Args:
        model: see `Classifier.load`.
        paths: files, folders, glob patterns, or "-" for a list on standard input, one path a line
            (or separated by zero bytes, as `find -print0` gives it); its lines are no patterns.
        top_k: predictions per image.
        out: a .csv or .jsonl file, replaced in one step. Cells of the CSV that a spreadsheet would
            run as a formula, or that begin with an apostrophe, get an apostrophe in front; JSONL
            has every name as it is. Several labels of an image stand in one cell, as `cat|dog`.
        sheet: a .png file, replaced in one step: the first pictures with their predictions.
        calibrated, threshold: see `Classifier.load`.
        batch_size: see `Classifier.predict`.
        device: None takes a GPU if there is one.
    Returns: the rows of `Classifier.predict`; `unreadable` finds the errors among them.
    Raises: RecipeError for another suffix of `out` or `sheet` or the name of an input, SetupError
        if they cannot be written, DataError for an empty list on standard input.
    """
    target = None if out is None else check_target(out, option="--out")
    picture = None if sheet is None else check_target(sheet, option="--sheet", suffixes=[".png"])
    files = list_files(paths)
    refuse_inputs((path for path, _ in files), {"--out": target, "--sheet": picture})
    classifier = Classifier.load(model, device=device, calibrated=calibrated, threshold=threshold)
    compute_class_token(classifier.network)
    several = classifier.thresholds is not None
    rows = Rows(classifier.class_names, several=several)
    # a folder names one class, which says little of an image's labels
    drawing = ContactSheet(() if several else classifier.class_names) if picture else None
    look = None if drawing is None else drawing.look
    stream = classifier.rows(files, top_k=top_k, batch_size=batch_size, progress=True, look=look)
    depth = min(top_k, len(classifier.class_names))
    with contextlib.ExitStack() as stack:
        takers: list[Callable[[Row], None]] = [rows.append]
        if drawing is not None:
            takers.append(drawing.add)
        if target is not None:
            takers.append(stack.enter_context(writing(target, depth=depth, several=several)))
        for row in stream:
            for take in takers:
                take(row)
    if drawing is not None and picture is not None:
        heat = classifier.temperature
        remark = "" if heat is None else f"confidences calibrated with temperature {heat:.3f}"
        name = Path(model).resolve().name if os.path.exists(model) else model
        save_sheet(drawing.draw(title=name, remark=remark), picture, option="--sheet")
    return rows


def _thresholds(
    model: str | Path, built: Built, classes: int, threshold: float | None, *, calibrated: bool
) -> list[float] | None:
    """The threshold of each class where an image has any number of labels. Args: as for `load`."""
    problem, code = "", "recipe.conflict"
    if threshold is not None and not 0 <= threshold <= 1:
        problem, code = f"threshold: {threshold:g}; give a number from 0 to 1", "recipe.wrong_value"
    elif threshold is not None and not built.multilabel:
        problem = f"threshold: {model} gives an image one label, the most probable; leave it out"
    elif calibrated and built.multilabel:
        problem = (
            f"calibrated: {model} gives an image several labels, each by its own threshold, and "
            "has no temperature; leave it out"
        )
    if problem:
        raise RecipeError(problem, code=code)
    if not built.multilabel:
        return None
    stored = built.thresholds or [DEFAULT_THRESHOLD] * classes
    return stored if threshold is None else [threshold] * classes


class _Stopped(Exception):
    """A lane whose rows nobody waits for any more."""


_LANE = threading.local()  # in a lane: `stop`, which is set once it is to end


def _begin_lane(threads: int, stop: threading.Event) -> None:
    torch.set_num_threads(threads)
    _LANE.stop = stop


def _go_on(*_: Any) -> None:
    """Let a lane whose stream is over end here; a hook of the network's modules."""
    stop = getattr(_LANE, "stop", None)
    if stop is not None and stop.is_set():
        raise _Stopped


def _shown(rows: list[Row], bar: Any) -> list[Row]:
    """Rows, once they are counted in the bar."""
    bar.update(len(rows))
    return rows


def _decoded(
    path: str | Image.Image, error: str | None, place: int, size: int | None, look: _Look | None
) -> Tensor | str:
    """(3, H, W) uint8, or what is wrong with the file."""
    if error is not None:
        return error
    try:
        pixels_HWC = decode(path, size=size, name="image")
    except DataError as cause:
        return str(cause).removeprefix("image: ")
    if look is not None:
        look(place, pixels_HWC)
    return planes(pixels_HWC)
