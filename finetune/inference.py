"""`Classifier`: load a fine-tuned model and predict images."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from finetune.data.decode import decode_image, hwc_to_chw
from finetune.data.image_paths import ImageInput, find_images
from finetune.errors import (
    DataError,
    FinetuneError,
    RecipeError,
    SetupError,
    WeightsError,
    redact_urls,
)
from finetune.evaluation.conformal import set_thresholds
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD, sigmoid_probabilities
from finetune.evaluation.selective import SelectiveThreshold, require_threshold
from finetune.evaluation.unknown_classes import (
    MIN_IMAGES,
    PreLogitsRecorder,
    UnknownClassScore,
)
from finetune.evaluation.validation_scores import ValidationScores, log_odds, nonconformity
from finetune.formatting import pluralize
from finetune.log import logger, warn_once
from finetune.models.exported import check_is_changeable, load_model
from finetune.models.fast_layers import use_onednn_linear
from finetune.models.features import compute_pre_logits, enable_feature_input
from finetune.models.save import BuiltModel
from finetune.models.tta import FlipTTA
from finetune.precision import resolve_precision
from finetune.progress import item_bar
from finetune.run.model import load_eval_pipeline
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.pipeline import Pipeline

__all__ = ["Classifier", "PredictionRow", "eval_pipeline_and_class_names", "get_num_classes"]

PredictionRow = dict[str, Any]  # see `Classifier.predict`
_DecodedCallback = Callable[[int, np.ndarray], None]

_MAX_WORKERS = 32
# Images per forward pass; on a CPU, larger batches exceed the CPU caches.
_BATCH_SIZE_BY_DEVICE = {"cpu": 8}
_DEFAULT_BATCH_SIZE = 64
# Decoded images are collected until their pixels take this many bytes, then go through the pipeline
# in one call. On a CPU, 1 means one image per call; on a GPU, 64 photos of 48 megapixels would take
# 9 GB without a limit.
PREPROCESS_BYTES_BY_DEVICE = {"cpu": 1}
DEFAULT_PREPROCESS_BYTES = 2**26


class Classifier:
    """An image classifier: a network with its preprocessing and class names.

    Args:
        network: network from images (B, 3, h, w) to logits (B, K). It is moved to the device and
            set to evaluation mode; on a CPU it uses `use_onednn_linear`.
        pipeline: evaluation transforms, without random operations.
        class_names: names of the K classes, in the order of the logits.
        device: device to compute on; None for a GPU if one is available.
        temperature: divisor of the logits before the softmax; None for 1.
        thresholds: K thresholds of a multi-label model; None for a single-label model. An image has
            a label if its confidence, the sigmoid of the logit, is at least the threshold.
        tta: "flip" to average the logits, and the pre-logits of `with_features`, of each image and
            its mirror image; None not to.
        with_features: True to add the pre-logits to the rows of `predict`, as "features", (D,)
            float32; the network then needs no classifier.
        selective: threshold of an answer; None to answer always.
        set_thresholds: K thresholds of prediction sets; None for no sets.
        unknown_score: the score for images of no known class; None not to mark them.
        weights_sha256: sha256 of the weights file; None if unknown.
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
        tta: Literal["flip"] | None = None,
        with_features: bool = False,
        selective: SelectiveThreshold | None = None,
        set_thresholds: NDArray[np.float64] | None = None,
        unknown_score: UnknownClassScore | None = None,
        weights_sha256: str | None = None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network = network.to(self.device).eval()
        self.pipeline = pipeline
        self.class_names = list(class_names)
        self.temperature = temperature
        self.thresholds = None if thresholds is None else list(thresholds)
        self._logits = self.network if tta is None else FlipTTA(self.network)
        self.selective = selective
        self.set_thresholds = set_thresholds
        self.unknown_score = unknown_score
        self.weights_sha256 = weights_sha256
        self._recorder = None if unknown_score is None else PreLogitsRecorder(self.network)
        self._with_features = with_features
        # compute the logits from the features, in one forward pass, if the network allows it
        self._classifies_features = (
            with_features
            and tta is None
            and enable_feature_input(network, pipeline.image_size, training=False) is None
        )
        # a GPU computes in its best precision, a CPU always in float32
        gpu = self.device.type == "cuda"
        self.precision = resolve_precision("auto", self.device) if gpu else "fp32"
        # one batch at a time on a GPU, because its memory may not hold two
        self._device_lock = (
            contextlib.nullcontext() if self.device.type == "cpu" else threading.Lock()
        )
        if self.device.type == "cpu":
            use_onednn_linear(self.network)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: torch.device | str | None = None,
        calibrated: bool = False,
        threshold: float | None = None,
        tta: Literal["flip"] | None = None,
        with_features: bool = False,
        max_error: float | None = None,
        coverage: float | None = None,
        mark_unknown: bool | None = False,
    ) -> Classifier:
        """Load a run directory, a model folder, `hf-hub:owner/name@revision` or a timm name.

        Also an exported file, NAME.onnx, which computes on the CPU, without `tta` and features.

        Class names are read with the weights; if none are stored, the class indices are the names.
        Preprocessing comes from the recipe for a run directory, otherwise from the weights'
        configuration.

        Args:
            model: path or name of the model, as above.
            device: device to compute on; None for a GPU if one is available.
            calibrated: True to divide the logits by the temperature stored with the model; False
                for the plain softmax, as in timm and transformers.
            threshold: threshold in [0, 1] for all classes of a multi-label model; None for the
                stored thresholds.
            tta, with_features: see `Classifier`.
            max_error: highest share of wrong answers among the answers, see `select_threshold`;
                None to answer always.
            coverage: share of images whose prediction set contains the true class, see
                `evaluation.conformal.set_thresholds`; None for no sets.
            mark_unknown: True to mark images that are of no known class, see
                `evaluation.unknown_classes`; None to mark them if the model has the score.
        Raises: WeightsError if the model does not exist, has no classifier (unless
            `with_features`), or has no temperature although `calibrated` is True, or no validation
            scores for `max_error` and `coverage`; RecipeError if an argument does not apply to the
            model; DataError if the model has too few validation scores.
        """
        built = load_model(str(model))
        check_is_changeable(built, str(model), "--tta", tta)
        check_is_changeable(built, str(model), "--features", with_features)
        class_names: list[str] = []
        if with_features and not getattr(built.model, "num_classes", 0):
            pipeline = load_eval_pipeline(model, built)
        else:
            pipeline, class_names = eval_pipeline_and_class_names(model, built)
        thresholds = _resolve_thresholds(
            model, built, len(class_names), threshold, calibrated=calibrated
        )
        temperature = built.temperature
        if calibrated and temperature is None:
            raise WeightsError(
                f"{model}: the model has no temperature; fit one on its validation split: "
                f"finetune eval {model} --fit-temperature",
                code="weights.no_temperature",
            )
        used_temperature = temperature if calibrated else None
        if mark_unknown is None:
            can_mark = (built.validation_scores or {}).get("unknown_class") is not None
            mark_unknown = can_mark and not (built.multilabel or tta)
        selective, sets, unknown_score = _resolve_guarantees(
            model,
            built,
            len(class_names),
            max_error=max_error,
            coverage=coverage,
            mark_unknown=mark_unknown,
            tta=tta,
        )
        return cls(
            built.model,
            pipeline,
            class_names,
            device=device,
            temperature=used_temperature,
            thresholds=thresholds,
            tta=tta,
            with_features=with_features,
            selective=selective,
            set_thresholds=sets,
            unknown_score=unknown_score,
            weights_sha256=built.provenance.get("sha256"),
        )

    def logits(self, images_BCHW: Tensor) -> Tensor:
        """Compute raw logits, without temperature.

        Args:
            images_BCHW: (B, 3, h, w), the pipeline's output, on any device.
        Returns: (B, K) float32 on the classifier's device.
        """
        with self._inference():
            logits_BK: Tensor = self._logits(images_BCHW.to(self.device, torch.float32)).float()
        return logits_BK

    def _logits_and_features(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Compute raw logits (B, K), with K = 0 without a classifier, and pre-logits (B, D)."""
        with self._inference():
            images_BCHW = images_BCHW.to(self.device, torch.float32)
            features_BD = compute_pre_logits(self.network, images_BCHW)
            if isinstance(self._logits, FlipTTA):
                flipped_BD = compute_pre_logits(self.network, images_BCHW.flip(3))
                features_BD = (features_BD + flipped_BD) / 2
        if not self.class_names:
            return features_BD[:, :0], features_BD
        inputs = features_BD if self._classifies_features else images_BCHW
        return self.logits(inputs), features_BD

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        with torch.inference_mode(), half:
            yield

    def confidences(self, logits_BK: Tensor) -> Tensor:
        """Convert logits to confidences: softmax, or sigmoid for a multi-label model.

        Args:
            logits_BK: (B, K), from `logits`.
        Returns: (B, K) float64.
        Raises: WeightsError if a logit is not finite.
        """
        _check_finite(logits_BK)
        if self.thresholds is not None:
            return torch.from_numpy(sigmoid_probabilities(logits_BK))
        return (logits_BK.double() / (self.temperature or 1.0)).softmax(1)

    def predict(
        self,
        paths: str | Path | Image.Image | Iterable[str | Path | Image.Image],
        *,
        top_k: int = 3,
        batch_size: int | None = None,
        progress: bool = False,
    ) -> list[PredictionRow]:
        """Classify images.

        Args:
            paths: files, folders (searched recursively) and glob patterns, or PIL images. An
                iterator is read to its end before the first image is decoded.
            top_k: predictions per image, the most probable first; at most K.
            batch_size: images per forward pass; None for 8 on a CPU, else 64.
            progress: True to show a progress bar on standard error.
        Returns: a dict for each image, in order: {"path", "predictions": [{"label", "index",
            "confidence"}]}, or {"path", "error"} for an unreadable file. "path" is None for a PIL
            image. A multi-label model adds "labels", a list like "predictions": the classes whose
            confidence reaches their threshold, the most probable first. With features, a row has
            "features", and no predictions if the network has no classifier. With `selective`, it
            has "abstained", True if the model is not certain enough to answer. With
            `set_thresholds`, it has "prediction_set", a list like "predictions", never empty. With
            `unknown_score`, it has "unknown", True for an image of no known class.
        Raises: RecipeError if top_k or batch_size is below 1; WeightsError if an output is not
            finite; DataError if an iterator returns one PIL image twice.
        """
        files = find_images([paths] if isinstance(paths, str | Path | Image.Image) else paths)
        return list(
            self.iter_predictions(files, top_k=top_k, batch_size=batch_size, progress=progress)
        )

    def iter_predictions(
        self,
        files: Sequence[ImageInput],
        *,
        top_k: int = 3,
        batch_size: int | None = None,
        progress: bool = False,
        on_decoded: _DecodedCallback | None = None,
    ) -> Iterator[PredictionRow]:
        """Classify images batch by batch, for more images than fit into memory.

        Worker threads process several batches at the same time; the cores are divided among them.

        Args:
            files: paths or PIL images, from `find_images`.
            top_k: predictions per image, the most probable first; at most K.
            batch_size: images per forward pass; None for 8 on a CPU, else 64.
            progress: True to show a progress bar on standard error.
            on_decoded: function called once per decoded image, from several threads, with the
                image's index in `files` and its pixels, (H, W, 3) uint8; None to call nothing.
        Yields: the dicts that `predict` returns, in order.
        Raises: RecipeError if top_k or batch_size is below 1; WeightsError if an output is not
            finite.
        """
        if batch_size is None:
            batch_size = _BATCH_SIZE_BY_DEVICE.get(self.device.type, _DEFAULT_BATCH_SIZE)
        for name, value in (("top_k", top_k), ("batch_size", batch_size)):
            if value < 1:
                raise RecipeError(
                    f"{name}: got {value}; expected 1 or more", code="recipe.wrong_value"
                )
        num_threads = torch.get_num_threads()
        num_workers = max(1, min(num_threads, _MAX_WORKERS, -(-len(files) // batch_size)))
        stop, futures = threading.Event(), deque[Future[list[PredictionRow]]]()
        # one batch per thread is faster than one batch on all of torch's threads, which would
        # synchronize in every layer
        pool = ThreadPoolExecutor(
            num_workers, initializer=_init_worker, initargs=(num_threads // num_workers, stop)
        )
        hooks = [
            module.register_forward_pre_hook(_raise_if_stopped) for module in self.network.modules()
        ]
        try:
            with item_bar(len(files), shown=progress) as progress_bar:
                starts = range(0, len(files), batch_size)
                for start in starts:
                    batch = files[start : start + batch_size]
                    futures.append(
                        pool.submit(self._predict_batch, start, batch, top_k, on_decoded)
                    )
                    # Wait for the oldest batch if all workers are busy, and at the end for all.
                    while futures and (len(futures) > num_workers or start == starts[-1]):
                        rows = futures.popleft().result()
                        progress_bar.update(len(rows))
                        yield from rows
        finally:
            stop.set()  # after an interrupt, workers end at the next layer, not the next batch
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)  # workers changed the default for new threads
            for hook in hooks:
                hook.remove()

    def _predict_batch(
        self,
        start: int,
        files: Sequence[ImageInput],
        top_k: int,
        on_decoded: _DecodedCallback | None,
    ) -> list[PredictionRow]:
        """Predict a batch of files; `start` is the index of the first one in the whole list."""
        rows: list[PredictionRow] = [
            {"path": redact_urls(path) if isinstance(path, str) else None} for path, _ in files
        ]
        decoded: list[tuple[PredictionRow, Tensor]] = []
        prepared: list[tuple[PredictionRow, Tensor]] = []
        max_bytes = PREPROCESS_BYTES_BY_DEVICE.get(self.device.type, DEFAULT_PREPROCESS_BYTES)
        num_bytes = 0
        for index, (row, (path, error)) in enumerate(zip(rows, files, strict=True), start):
            _raise_if_stopped()
            pixels_CHW = _decode_or_error(path, error, index, self.pipeline.decode_size, on_decoded)
            if isinstance(pixels_CHW, str):
                row["error"] = pixels_CHW
                continue
            decoded.append((row, pixels_CHW))
            num_bytes += pixels_CHW.nbytes
            if num_bytes >= max_bytes:
                prepared += self._preprocess(decoded)
                decoded, num_bytes = [], 0
        prepared += self._preprocess(decoded)
        if prepared:
            self._add_predictions(prepared, top_k)
        return rows

    def _preprocess(
        self, decoded: Sequence[tuple[PredictionRow, Tensor]]
    ) -> list[tuple[PredictionRow, Tensor]]:
        """Preprocess images to (3, h, w) on the device.

        An image that the pipeline rejects is excluded, and its row gets "error".
        """
        if not decoded:
            return []
        images = [image for _, image in decoded]
        # a tensor for one image, as in the demo, so that both give identical bits
        batch = images[0][None] if len(images) == 1 else images
        try:
            with self._device_lock:
                images_BCHW = self.pipeline(batch, device=self.device)
        except FinetuneError as error:
            if len(decoded) > 1:
                return [pair for single in decoded for pair in self._preprocess([single])]
            decoded[0][0]["error"] = str(error)
            return []
        return [(row, image) for (row, _), image in zip(decoded, images_BCHW, strict=True)]

    def _add_predictions(
        self, prepared: Sequence[tuple[PredictionRow, Tensor]], top_k: int
    ) -> None:
        """Add the predictions of a batch to its rows."""
        images_BCHW = torch.stack([image for _, image in prepared])
        try:
            with self._device_lock:
                if self._with_features:
                    logits_BK, features_BD = self._logits_and_features(images_BCHW)
                    _check_finite(features_BD)
                    for (row, _), features_D in zip(prepared, features_BD.cpu(), strict=True):
                        row["features"] = features_D.numpy()
                else:
                    logits_BK = self.logits(images_BCHW)
        except torch.OutOfMemoryError as error:
            raise SetupError(
                f"batch of {len(prepared)} images: does not fit into the memory of {self.device}; "
                "use a smaller batch size (--batch-size)",
                code="setup.memory",
            ) from error
        # stable sort: equal confidences stay in class order on every device
        ranked = self.confidences(logits_BK).sort(dim=1, descending=True, stable=True)
        is_multilabel = self.thresholds is not None
        num_ranked = len(self.class_names) if is_multilabel else top_k
        top_classes = zip(
            ranked.values[:, :num_ranked].cpu(), ranked.indices[:, :num_ranked].cpu(), strict=True
        )
        for (row, _), (confidence_K, index_K) in zip(prepared, top_classes, strict=True):
            row["predictions"] = self._to_predictions(confidence_K[:top_k], index_K[:top_k])
            if is_multilabel:
                is_label_K = (
                    confidence_K >= torch.tensor(self.thresholds, dtype=torch.float64)[index_K]
                )
                row["labels"] = self._to_predictions(confidence_K[is_label_K], index_K[is_label_K])
        self._add_guarantees([row for row, _ in prepared], logits_BK)

    def _add_guarantees(self, rows: Sequence[PredictionRow], logits_BK: Tensor) -> None:
        """Add "abstained", "prediction_set" and "unknown", from logits without temperature."""
        if self.unknown_score is not None:
            for row, is_unknown in zip(rows, self.is_unknown(logits_BK), strict=True):
                row["unknown"] = is_unknown
        if self.selective is None and self.set_thresholds is None:
            return
        probabilities_BK = logits_BK.double().softmax(1).cpu()
        if self.selective is not None:
            answers_B = log_odds(probabilities_BK.amax(1)) > self.selective.threshold
            for row, answers in zip(rows, answers_B.tolist(), strict=True):
                row["abstained"] = not answers
        if self.set_thresholds is not None:
            in_set_BK = nonconformity(probabilities_BK) <= torch.from_numpy(self.set_thresholds)
            confidences_BK = self.confidences(logits_BK).cpu()
            for row, in_set_K, confidence_K in zip(rows, in_set_BK, confidences_BK, strict=True):
                ranked_K = confidence_K.argsort(descending=True, stable=True)
                index_K = ranked_K[in_set_K[ranked_K]]
                row["prediction_set"] = self._to_predictions(confidence_K[index_K], index_K)

    def is_unknown(self, logits_BK: Tensor) -> list[bool]:
        """Return whether each image of this thread's last forward pass is of no known class.

        Args:
            logits_BK: the logits of that forward pass.
        Returns: B flags, all False without `unknown_score`.
        """
        if self.unknown_score is None or self._recorder is None:
            return [False] * len(logits_BK)
        scores_B = self.unknown_score.compute(
            self._recorder.last().cpu(), logits_BK.cpu().logsumexp(1)
        )
        return (scores_B > self.unknown_score.threshold).tolist()

    def _to_predictions(self, confidence_K: Tensor, index_K: Tensor) -> list[PredictionRow]:
        return [
            {"label": self.class_names[index], "index": index, "confidence": confidence}
            for confidence, index in zip(confidence_K.tolist(), index_K.tolist(), strict=True)
        ]


def _check_finite(outputs: Tensor) -> None:
    if not bool(outputs.isfinite().all()):
        raise WeightsError(
            "the model's outputs are not finite: its weights are corrupt; train or download it "
            "again",
            code="weights.not_finite",
        )


def get_num_classes(model: str | Path, built: BuiltModel) -> int:
    """Return the number of classes. Raises: WeightsError if the model has no classifier."""
    num_classes = int(getattr(built.model, "num_classes", 0) or 0)
    if not num_classes:
        raise WeightsError(
            f"{model}: these weights have no classifier; fine-tune them first: finetune train",
            code="weights.no_classifier",
        )
    return num_classes


def eval_pipeline_and_class_names(
    model: str | Path, built: BuiltModel, *, use_recipe: bool = True
) -> tuple[Pipeline, list[str]]:
    """Return the evaluation pipeline and the class names of a model.

    Args:
        model: path or name of the model; preprocessing comes from the recipe for a run directory,
            otherwise from the weights' configuration.
        built: the model built from `model`.
        use_recipe: False to ignore the recipe, and evaluate at another image size than the run's.
    Raises: WeightsError if the model has no classifier.
    """
    num_classes = get_num_classes(model, built)
    names = built.class_names or [str(index) for index in range(num_classes)]
    if repeated := len(names) - len({*names}):
        classes = pluralize(repeated, "class has", "classes have")
        warn_once(f"{model}: {classes} the name of another one; see 'index' with --json")
    if built.pipeline is not None:
        return built.pipeline, names
    if use_recipe:
        return load_eval_pipeline(model, built), names
    return build_pipeline(built.preprocessing), names


def _resolve_thresholds(
    model: str | Path,
    built: BuiltModel,
    num_classes: int,
    threshold: float | None,
    *,
    calibrated: bool,
) -> list[float] | None:
    """Return the thresholds of a multi-label model; None for a single-label model.

    Args: same as `Classifier.load`.
    """
    problem, code = "", "recipe.conflict"
    if threshold is not None and not 0 <= threshold <= 1:
        problem, code = (
            f"--threshold: got {threshold:g}; give a number from 0 to 1",
            "recipe.wrong_value",
        )
    elif threshold is not None and not built.multilabel:
        problem = (
            f"--threshold: {model} is a single-label model without thresholds; omit the option"
        )
    elif calibrated and built.multilabel:
        problem = (
            f"--calibrated: {model} is a multi-label model with one threshold per class, and "
            "has no temperature; omit the option"
        )
    if problem:
        raise RecipeError(problem, code=code)
    if not built.multilabel:
        return None
    stored = built.thresholds or [DEFAULT_THRESHOLD] * num_classes
    return stored if threshold is None else [threshold] * num_classes


def _resolve_guarantees(
    model: str | Path,
    built: BuiltModel,
    num_classes: int,
    *,
    max_error: float | None,
    coverage: float | None,
    mark_unknown: bool,
    tta: str | None,
) -> tuple[SelectiveThreshold | None, NDArray[np.float64] | None, UnknownClassScore | None]:
    """Return what `max_error`, `coverage` and `mark_unknown` need; None for those not given.

    Args, Raises: same as for `Classifier.load`.
    """
    given = {
        "--max-error": max_error is not None,
        "--coverage": coverage is not None,
        "--unknown": mark_unknown,
    }
    if not any(given.values()):
        return None, None, None
    option = next(name for name, is_given in given.items() if is_given)
    if built.multilabel or tta:
        reason = (
            f"{model} is a multi-label model, and the promise is about one label per image"
            if built.multilabel
            else "the validation scores were computed without --tta"
        )
        raise RecipeError(f"{option}: {reason}; omit {option}", code="recipe.conflict")
    if built.validation_scores is None:
        raise WeightsError(
            f"{model}: the model has no validation scores for {option}; compute them on its "
            f"validation split: finetune eval {model} --fit-temperature",
            code="weights.no_validation_scores",
        )
    scores = ValidationScores.from_config(
        built.validation_scores, num_classes=num_classes, source=str(model)
    )
    selective = sets = unknown_score = None
    if max_error is not None:
        selective = require_threshold(scores, max_error)
        logger.info(f"--max-error: {selective}")
    if coverage is not None:
        sets, note = set_thresholds(scores, coverage, num_classes=num_classes)
        logger.info(f"--coverage: {note}")
    if mark_unknown:
        unknown_score = _load_unknown_score(model, built, num_images=len(scores))
    return selective, sets, unknown_score


def _load_unknown_score(
    model: str | Path, built: BuiltModel, *, num_images: int
) -> UnknownClassScore:
    """Read the score for images of no known class. Raises: DataError if there is none."""
    recorder = PreLogitsRecorder(built.model)
    recorder.remove()
    entry = (built.validation_scores or {}).get("unknown_class")
    if not recorder.width:
        raise RecipeError(
            f"--unknown: {model} has not exactly one linear classifier, whose inputs the score "
            "needs; omit --unknown",
            code="recipe.conflict",
        )
    if entry is None:
        raise DataError(
            f"--unknown: {model} has no score for images of no known class, which needs "
            f"{MIN_IMAGES} validation images, and it has scores of "
            f"{pluralize(num_images, 'image')}; use more validation images (data.val_fraction)",
            code="data.too_few_images",
        )
    return UnknownClassScore.from_config(entry, width=recorder.width, source=str(model))


class _WorkerStopped(Exception):
    """Raised in a worker thread after the iterator was closed."""


_WORKER = threading.local()  # per worker thread: `stop`, the event that ends it


def _init_worker(num_threads: int, stop: threading.Event) -> None:
    torch.set_num_threads(num_threads)
    _WORKER.stop = stop


def _raise_if_stopped(*_: Any) -> None:
    """End a worker thread once the iterator is closed; also a forward pre-hook of every module."""
    stop = getattr(_WORKER, "stop", None)
    if stop is not None and stop.is_set():
        raise _WorkerStopped


def _decode_or_error(
    path: str | Image.Image,
    error: str | None,
    index: int,
    decode_size: int | None,
    on_decoded: _DecodedCallback | None,
) -> Tensor | str:
    """Decode an image. Returns: (3, H, W) uint8, or the error message."""
    if error is not None:
        return error
    try:
        pixels_HWC = decode_image(path, decode_size=decode_size, name="")
    except DataError as cause:
        return str(cause)
    if on_decoded is not None:
        on_decoded(index, pixels_HWC)
    return hwc_to_chw(pixels_HWC)
