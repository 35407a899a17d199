"""INT8 and FP16 versions of an exported ONNX file, kept only if their accuracy is good enough.

INT8 is static: ONNX Runtime's quantizer inserts QuantizeLinear and DequantizeLinear nodes, with
ranges from training images. Layers that change the probabilities too much stay in float. The
accuracy of the reduced file is measured on validation images, next to that of the float file.
"""

# H W pixels, K classes, N images

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.commands.evaluate import warn_if_changed, warn_of_training_images
from finetune.commands.export_formats import ExportedModel, load_exported
from finetune.commands.quantize_onnx import Int8Quantizer, convert_to_fp16
from finetune.data.from_recipe import open_data
from finetune.data.source import Split
from finetune.data.thread_pool import thread_map
from finetune.errors import DataError, RecipeError, WeightsError
from finetune.evaluation.paired import compare_correct, paired_interval
from finetune.formatting import pluralize
from finetune.host_resources import num_cores
from finetune.progress import item_bar
from finetune.run.directory import RunDir
from finetune.run.record import load_run_recipe, read_record

__all__ = [
    "ReducedPrecision",
    "format_reduced",
    "open_reduced_precision",
    "reduce_precision",
]

_NUM_CALIBRATION_IMAGES = 128
_MAX_VALIDATION_IMAGES = 10_000
_CHECK_EVERY = 200  # validation images, to stop if the drop is too large for certain
_NUM_LATENCY_IMAGES = 30
_NUM_RANKING_IMAGES = 24
# A layer is sensitive if INT8 moves more than this share of the probability to other classes, on
# average. On CIFAR-10, all layers of vit_ti together move 0.02, those of EfficientNet-Lite0 0.08.
# There the first convolution alone moves 0.06, the second 0.04, and no other more than 0.02.
_SENSITIVE_SHIFT = 0.03
_MAX_FLOAT_SHARE = 0.34  # of the layers; with more of them in float, little is gained


@dataclass(frozen=True)
class ReducedPrecision:
    """What to convert to, and what the result must keep.

    Attributes:
        kind: "int8" or "fp16".
        max_drop: largest drop of the accuracy, in percentage points.
        calibration: training images to compute the ranges of INT8 from.
        validation: labeled images to measure the accuracy on, in random order.
        data_changed: True if images or labels differ from those of the run.
    """

    kind: str
    max_drop: float
    calibration: Split
    validation: Split
    data_changed: bool


def open_reduced_precision(
    model: str,
    kind: str,
    *,
    max_drop: float,
    format: str,
    preprocessing: bool,
    data: str | None = None,
) -> ReducedPrecision:
    """Open the training and validation images of a run; warn if they are not fit to measure on.

    Args:
        data: source string of the run's data where it is now; None uses the recorded one.
    Raises: RecipeError if the options or the model do not allow a reduced precision; DataError
        without validation images.
    """
    problem, recipe = "", load_run_recipe(model, data=data)
    if format != "onnx":
        problem = f"needs ONNX; remove --format {format}"
    elif not preprocessing:
        problem = "needs the preprocessing; remove --no-preprocessing"
    elif recipe is None:
        problem = (
            f"{model} is not a run directory, so there are no validation images to measure the "
            "accuracy on; give a run directory"
        )
    if problem or recipe is None:
        raise RecipeError(f"--{kind}: {problem}", code="recipe.conflict")
    source = open_data(recipe.data, recipe.run.seed)
    splits = source.splits
    if "val" not in splits:
        raise DataError(
            f"--{kind}: {recipe.data.source} has no validation images to measure the accuracy on; "
            "train with data.val_fraction above 0",
            code="data.no_split",
        )
    classes = read_record(RunDir(model)).get("split_fingerprints", {}).get("classes")
    if classes not in (None, source.classes_fingerprint):
        raise DataError(
            f"{source.name}: its classes, or their order, have changed since the run {model}, so "
            f"--{kind} cannot measure the accuracy; restore the names of the class folders",
            code="data.changed",
        )
    # train images calibrate the ranges of INT8
    changed = [warn_if_changed(model, source, name) for name in ("val", "train")]
    warn_of_training_images(model, recipe, source, "val")
    train, validation = splits["train"], splits["val"]
    count = min(len(train), _NUM_CALIBRATION_IMAGES)
    chosen = np.random.default_rng(0).permutation(len(validation))[:_MAX_VALIDATION_IMAGES]
    calibration, validation = (
        train.subset(np.arange(count) * len(train) // count),
        validation.subset(chosen),
    )
    if recipe.data.unreadable == "quarantine" and not train.is_streamed:
        calibration, validation = _drop_unreadable(calibration), _drop_unreadable(validation)
    return ReducedPrecision(
        kind,
        max_drop=max_drop,
        calibration=calibration,
        validation=validation,
        data_changed=any(changed),
    )


def _drop_unreadable(split: Split) -> Split:
    """Leave out the images that cannot be decoded, as a run with data.unreadable=quarantine does.

    Raises: DataError if no image is left.
    """

    def error_of(index: int) -> DataError | None:
        try:
            split.decode(index)
        except DataError as error:
            return error
        return None

    errors = list(thread_map(error_of, range(len(split)), num_cores()))
    readable = [index for index, error in enumerate(errors) if error is None]
    if not readable and errors[0] is not None:
        raise errors[0]
    return split.subset(np.array(readable)) if len(readable) < len(split) else split


def reduce_precision(
    path: Path, reduced: ReducedPrecision, thresholds: Sequence[float] | None, name: str
) -> dict[str, Any]:
    """Replace an exported file with preprocessing by INT8 or FP16, and measure what it costs.

    INT8 leaves the sensitive layers in float. If the accuracy still drops by more than `max_drop`,
    it leaves twice as many, up to a third of all layers.

    Args:
        path: the float file, the only one in its folder.
        thresholds: K thresholds of a multi-label model, or None.
        name: name of the export, for error messages.
    Returns: a dict with keys "precision", "accuracy_float", "accuracy" (0 to 1; multi-label: share
        of images with all labels right), "drop" (in points), "drop_interval" (95 %, paired),
        "max_drop", "num_validation_images", "data_changed" (see `ReducedPrecision`), "num_changed"
        (images that only one of both has right), "latency_ms_float", "latency_ms", "bytes_float";
        with INT8 also "num_layers", "float_layers" (names) and "num_calibration_images".
    Raises: WeightsError if the accuracy drops by more than `max_drop`, or nothing can be converted.
    """
    if len(list(path.parent.iterdir())) > 1:
        raise WeightsError(
            f"{name}: the weights are too large for one file, which --{reduced.kind} needs; "
            f"export without --{reduced.kind}",
            code="weights.unsupported",
        )
    validation = reduced.validation
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        float_path = path.rename(Path(scratch) / "float.onnx")
        float_model = load_exported(float_path, "onnx")
        expected_N = _find_correct(float_model, validation, thresholds)
        for figures in _conversions(float_path, path, reduced, float_model):
            model = load_exported(path, "onnx")
            actual_N = _find_correct(model, validation, thresholds, expected_N, reduced.max_drop)
            compared = compare_correct(actual_N, expected_N[: len(actual_N)])
            drop = 100 * compared["difference"]
            low, high = (100 * bound for bound in compared["interval"])
            if drop <= reduced.max_drop:
                float_ms, reduced_ms = _measure_latencies([float_model, model], validation)
                return {
                    "precision": reduced.kind,
                    "accuracy_float": compared["b"],
                    "accuracy": compared["a"],
                    "drop": drop,
                    "drop_interval": [low, high],
                    "max_drop": reduced.max_drop,
                    "num_validation_images": len(actual_N),
                    "data_changed": reduced.data_changed,
                    "num_changed": compared["fixed"] + compared["broken"],
                    "latency_ms_float": float_ms,
                    "latency_ms": reduced_ms,
                    "bytes_float": float_path.stat().st_size,
                    **figures,
                }
    in_float = len(figures.get("float_layers", ()))
    raise WeightsError(
        f"{name}: {reduced.kind} lowers the accuracy on {len(actual_N)} validation images "
        f"from {100 * compared['b']:.2f} % to {100 * compared['a']:.2f} %, by {drop:.2f} points "
        f"(95 % interval {low:.2f} to {high:.2f}; limit {reduced.max_drop:g})"
        + (f", with {in_float} of {figures['num_layers']} layers in float" if in_float else "")
        + f", so it was not written; export without --{reduced.kind}, or raise --max-drop",
        code="weights.accuracy_drop",
    )


def format_reduced(reduced: dict[str, Any] | None) -> list[str]:
    """Format the result of `reduce_precision` as lines; none for None."""
    if reduced is None:
        return []
    low, high = reduced["drop_interval"]
    lines = [
        f"{reduced['precision']}, compared with float on "
        f"{pluralize(reduced['num_validation_images'], 'validation image')}: accuracy "
        f"{100 * reduced['accuracy']:.2f} % instead of {100 * reduced['accuracy_float']:.2f} %, "
        f"a drop of {reduced['drop']:.2f} points (95 % interval {low:.2f} to {high:.2f}; limit "
        f"{reduced['max_drop']:g}); {reduced['latency_ms']:.1f} ms instead of "
        f"{reduced['latency_ms_float']:.1f} ms per image"
    ]
    if high > reduced["max_drop"]:
        lines.append(
            "the interval reaches above the limit: these validation images are too few to rule out "
            "a larger drop"
        )
    if names := reduced.get("float_layers"):
        lines.append(
            f"{len(names)} of {reduced['num_layers']} layers stay in float: {', '.join(names)}"
        )
    return lines


# --- measurements --------------------------------------------------------------------------------


def _find_correct(
    model: ExportedModel,
    validation: Split,
    thresholds: Sequence[float] | None,
    expected_N: NDArray[np.bool_] | None = None,
    max_drop: float = 0.0,
) -> NDArray[np.bool_]:
    """Return for each image whether the top-1 class is right, or all labels if multi-label.

    Stops early, with fewer images, if the interval of the drop from `expected_N` is above
    `max_drop`.
    """
    correct: list[bool] = []
    with item_bar(len(validation), label="measuring the accuracy") as bar:
        for index, label in enumerate(validation.labels):
            [probabilities_K] = _probabilities(model, [validation.decode(index)])
            if thresholds is None:
                correct.append(bool(probabilities_K.argmax() == label))
            else:
                correct.append(bool(((probabilities_K >= np.array(thresholds)) == label).all()))
            bar.update()
            count = len(correct)
            if expected_N is not None and count % _CHECK_EVERY == 0:
                changes_N = np.array(correct).astype(int) - expected_N[:count]
                fixed, broken = int((changes_N > 0).sum()), int((changes_N < 0).sum())
                if -100 * paired_interval(fixed, broken, count)[1] > max_drop:
                    break
    return np.array(correct)


def _measure_latencies(models: Sequence[ExportedModel], validation: Split) -> list[float]:
    """Run models in turn, so that a busy machine slows all of them. Returns: medians in ms."""
    seconds: list[list[float]] = [[] for _ in models]
    for index in range(_NUM_LATENCY_IMAGES):
        image = validation.decode(index % len(validation))
        for model, times in zip(models, seconds, strict=True):
            start = time.perf_counter()
            _probabilities(model, [image])
            times.append(time.perf_counter() - start)
    return [round(1000 * statistics.median(times), 3) for times in seconds]


def _probabilities(model: ExportedModel, images: Iterable[np.ndarray]) -> NDArray[np.float32]:
    """Run a model on images (H, W, 3). Returns: (N, K)."""
    return np.stack([model(torch.from_numpy(np.array(image))[None])[0].numpy() for image in images])


# --- conversions ---------------------------------------------------------------------------------


def _conversions(
    path: Path, target: Path, reduced: ReducedPrecision, float_model: ExportedModel
) -> Iterator[dict[str, Any]]:
    """Write `target`, with more and more layers in float. Yields: the figures of each version.

    The folder of `path` gets temporary files.
    """
    if reduced.kind == "fp16":
        convert_to_fp16(path, target)
        yield {}
        return
    quantizer = Int8Quantizer(path, reduced.calibration)
    layers = quantizer.layers

    def quantize(float_layers: Collection[str]) -> dict[str, Any]:
        quantizer.quantize(target, float_layers=float_layers)
        return {
            "num_layers": len(layers),
            "float_layers": [quantizer.weight_name(layer) for layer in float_layers],
            "num_calibration_images": len(reduced.calibration),
        }

    num_images = min(len(reduced.calibration), _NUM_RANKING_IMAGES)
    images = [reduced.calibration.decode(index) for index in range(num_images)]
    expected_NK = _probabilities(float_model, images)

    def shift(file: Path) -> float:
        """Return the mean half of the absolute differences of the probabilities, 0 to 1."""
        difference_NK = _probabilities(load_exported(file, "onnx"), images) - expected_NK
        return float(np.nan_to_num(np.abs(difference_NK).sum(1).mean() / 2, nan=1.0))

    figures = quantize(())
    if shift(target) <= _SENSITIVE_SHIFT:
        yield figures
    shifts, trial = {}, path.with_name("trial.onnx")
    with item_bar(len(layers), label="measuring each layer in INT8", unit="layer") as bar:
        for layer in layers:
            quantizer.quantize(trial, float_layers=set(layers) - {layer})
            shifts[layer] = shift(trial)
            bar.update()
    ranked = sorted(layers, key=lambda layer: -shifts[layer])
    limit = int(_MAX_FLOAT_SHARE * len(layers))
    num_float = max(1, sum(each > _SENSITIVE_SHIFT for each in shifts.values()))
    while num_float < limit:
        yield quantize(ranked[:num_float])
        num_float *= 2
    yield quantize(ranked[:limit])
