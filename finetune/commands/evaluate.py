"""`finetune eval`: evaluate a saved model on a split of any dataset, or fit its temperature."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from finetune.data.decisions import split_decisions
from finetune.data.feature_loader import AnyLoader
from finetune.data.from_recipe import open_data, open_full_data, resolve_data_section
from finetune.data.leakage import find_leakage
from finetune.data.loader import ImageLoader
from finetune.data.pixel_store import PixelStore, build_pixel_store
from finetune.data.source import Source, Split
from finetune.errors import (
    CheckpointError,
    DataError,
    FinetuneError,
    RecipeError,
    SetupError,
    did_you_mean,
    redact_urls,
    weights_changed_error,
)
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES, accuracy_interval
from finetune.evaluation.confusion import MAX_DENSE_CLASSES, ConfusionMatrix, parse_confusion_matrix
from finetune.evaluation.evaluator import NUM_MISTAKES, Evaluator, evaluate
from finetune.evaluation.feature_extraction import feature_identity
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD
from finetune.files import make_writable_folder, write_atomically
from finetune.formatting import (
    TOO_FEW_IMAGES_NOTE,
    escape_csv_formula,
    escape_to_one_line,
    format_percent_range,
    pluralize,
)
from finetune.inference import get_num_classes
from finetune.log import logger, warn_once
from finetune.model_checksums import (
    read_checksums,
    verify_model_folder,
    weights_hashes,
    with_checksums,
)
from finetune.models.exported import check_is_changeable
from finetune.models.features import enable_feature_input
from finetune.models.save import BuiltModel
from finetune.models.tta import FlipTTA
from finetune.models.weights.resolve import locate_weights
from finetune.precision import autocast_dtype
from finetune.progress import step_bar
from finetune.ranks import local_world_size
from finetune.recipe.load import DataSection
from finetune.run.directory import RunDir, format_json, lock_run_of_model
from finetune.run.model import load_run_model
from finetune.run.record import (
    describe_split_decisions,
    read_record,
    warn_of_copied_shards,
)
from finetune.training.accelerator import (
    check_same_data_on_all_ranks,
    check_same_on_all_ranks,
    create_run_accelerator,
)
from finetune.training.compile import choose_kernels
from finetune.training.finalize import use_full_split_indices
from finetune.training.frozen_backbone import build_feature_loader
from finetune.transforms.eval_transforms import add_corruption, build_pipeline, default_eval_spec
from finetune.transforms.operations import CORRUPTIONS, SEVERITIES

if TYPE_CHECKING:
    from accelerate import Accelerator

    from finetune.recipe.schema import Recipe

__all__ = [
    "SPLITS",
    "TASKS",
    "check_same_models_on_all_ranks",
    "check_split_name",
    "evaluate_model",
    "format_evaluation",
    "open_evaluation_data",
    "prepare_evaluation",
    "warn_if_changed",
    "warn_of_training_images",
    "write_evaluation",
]

SPLITS = ("train", "val", "test")
_MAX_CONFUSED_PAIRS = 20
_MAX_LABEL_ROWS = 100
_ALL_CLASSES_HINT = "--out DIR writes the metrics of every class to per_class.csv"
TASKS = ("multiclass", "multilabel")
_CORRUPTION_METRICS = ("top1", "map", "loss", "ece")  # reported for corrupted images


def evaluate_model(
    model: str,
    *,
    data: str | None = None,
    split: str | None = None,
    fit_temperature: bool = False,
    corrupt: str | None = None,
    tta: Literal["flip"] | None = None,
    out: str | None = None,
) -> dict[str, Any]:
    """Evaluate a saved model on a split, each image once.

    Args:
        model: run directory, model folder, Hub or timm name, or an exported file NAME.onnx.
        data: a source string; None uses the data that the run was trained on. The classes may be a
            subset of the model's.
        split: "train", "val" or "test". None means val with `fit_temperature`; otherwise test, or
            val if the data has no test split. If `data` is not the run's own data and has only one
            split, None means that split.
        fit_temperature: True to fit a temperature on the split and write it into the model's
            config.json.
        corrupt: corruptions to evaluate as well: "all", one kind of CORRUPTIONS, or one kind and
            severity such as "noise:3"; None for no corruption.
        tta: "flip" to average the logits of each image and its mirror image; None not to.
        out: the folder to pass to `write_evaluation` later; only checked here, before evaluating.
    Returns: the result of `Evaluator.results`, plus the keys "model", "data", "split",
        "data_changed" (True if the split of the run's own data has changed since the run),
        "leakage" (the result of `warn_of_training_images`; empty on ranks other than 0),
        "decisions" (see `split_decisions`, only if they have changed the split), "class_names",
        "tta" (only with `tta`) and "corrupted" (only with `corrupt`): {"rows": [{"kind",
        "severity", "top1", "loss", "ece"}], "mean": {"top1", …}}.
    Raises: RecipeError if the data source is unknown; DataError if the model lacks one of the
        data's classes, or the split does not exist; SetupError if the temperature cannot be
        written, or `out` is a run or a model.
    """
    if split is None and fit_temperature:
        split = "val"
    check_split_name(split, SPLITS)
    corruptions = _parse_corruptions(corrupt)
    if tta and fit_temperature:
        raise RecipeError(
            "--tta: not allowed with --fit-temperature, because the temperature would not fit "
            "predictions without --tta; remove one of them",
            code="recipe.conflict",
        )
    config = _find_model_config(model) if fit_temperature else None
    if config is not None:
        verify_model_folder(config.parent, source=model)
        checksums = read_checksums(config.parent, source=model)
    if out is not None:
        if any((Path(out) / name).exists() for name in ("run.json", "config.json")):
            raise SetupError(
                f"--out: '{out}' has a run or a model, whose results.json would be replaced; "
                "choose another folder",
                code="setup.exists",
            )
        make_writable_folder(Path(out), option="--out")
    recipe, built = load_run_model(model)
    section, seed = resolve_data_section(model, recipe, data)
    check_is_changeable(built, model, "--tta", tta)
    check_is_changeable(built, model, "--corrupt", corrupt)
    num_classes = get_num_classes(model, built)
    if built.multilabel and fit_temperature:
        raise RecipeError(
            f"--fit-temperature: {model} is a multi-label model, which has thresholds instead of a "
            "temperature; remove the option",
            code="recipe.conflict",
        )
    unreadable_policy = {} if recipe is None else {"unreadable": recipe.data.unreadable}
    section = section.model_copy(update={"task": TASKS[built.multilabel], **unreadable_policy})
    accelerator = create_run_accelerator(recipe)
    source, split, data_changed = open_evaluation_data(
        model, recipe, section, seed=seed, split=split, accelerator=accelerator
    )
    check_same_models_on_all_ranks([built])
    leakage: list[str] = []
    if accelerator.is_main_process:
        leakage = warn_of_training_images(model, recipe, source, split)
    network, loader, class_names = prepare_evaluation(
        model,
        built,
        source,
        split,
        section,
        accelerator,
        # cached features cannot be flipped
        use_cached_features=recipe is not None and recipe.model.freeze == "backbone" and not tta,
    )
    if tta:
        network = FlipTTA(network)
    evaluator = Evaluator(
        loader,
        accelerator,
        temperature=None if fit_temperature else built.temperature,
        thresholds=built.thresholds or [DEFAULT_THRESHOLD] * num_classes,
        fit_calibration=fit_temperature,
        num_mistakes=NUM_MISTAKES,
    )
    evaluator.evaluate(network, batch_size=section.eval_batch_size, progress=True)
    result = evaluator.results()
    use_full_split_indices(source.splits[split], loader.store.split, result.get("mistakes", []))
    if split == built.provenance.get("calibrated_on") and accelerator.is_main_process:
        logger.warning(
            f"{model}: its temperature was fitted on a split '{split}'; on the same images, loss "
            "and calibration error with this temperature are too low"
        )
    validation_scores = result.pop("validation_scores", None)
    # on training images, and their copies in other data, the model makes fewer errors
    if split == "train" or (leakage and data is not None):
        validation_scores = None
        if config is not None and accelerator.is_main_process:
            logger.warning(
                f"{model}: a temperature fitted on training images, or copies of them, makes the "
                "model too sure of others; fit it on images that it was not trained on: --split val"
            )
    if config is not None and accelerator.is_main_process:
        images = source.splits[split].fingerprint
        calibration = {
            "temperature": result["temperature"],
            "split": split,
            "fingerprints": {split: images, "classes": source.classes_fingerprint},
        }
        with lock_run_of_model(config.parent):  # a push would replace config.json by its copy
            if read_checksums(config.parent, source=model) != checksums:
                raise weights_changed_error(model)
            _write_calibration(config, checksums, calibration, validation_scores)
    if corruptions:
        store = (
            loader.store
            if isinstance(loader, ImageLoader)
            else _open_pixel_store(loader.store.split, section, accelerator)
        )
        result["corrupted"] = _evaluate_corruptions(
            corruptions, network, store, built, section, accelerator, num_classes=num_classes
        )
    return {
        "model": model,
        "data": redact_urls(section.source),
        "split": split,
        "data_changed": data_changed,
        "leakage": leakage,
        **({"tta": tta} if tta else {}),
        **result,
        **split_decisions(source, split),
        "class_names": class_names,
    }


def open_evaluation_data(
    model: str,
    recipe: Recipe | None,
    section: DataSection,
    *,
    seed: int,
    split: str | None,
    accelerator: Accelerator,
) -> tuple[Source, str, bool]:
    """Open the data to evaluate a model on; warn if it has changed since the run.

    Args:
        model: model argument as the user typed it.
        recipe: recipe of the run if the model is a run directory, else None.
        section, seed: the result of `resolve_data_section`.
        split: see `evaluate_model`.
    Returns: the source, the name of the split, and whether the split of the run's own data has
        changed since the run.
    Raises: DataError if the split does not exist; SetupError if ranks have different data.
    """
    is_main = accelerator.is_main_process
    if recipe is not None and is_main:
        _warn_if_results_changed(model)
    is_training_data = recipe is not None and redact_urls(section.source) == recipe.data.source
    source, name = _open_split(
        section, split, seed=seed, is_training_data=is_training_data, log_split=is_main
    )
    if accelerator.num_processes > 1:
        check_same_data_on_all_ranks(accelerator, source, [name])
    data_changed = is_training_data and warn_if_changed(model, source, name, is_main=is_main)
    return source, name, data_changed


def check_same_models_on_all_ranks(models: Sequence[BuiltModel]) -> None:
    """Raise SetupError on every rank if one of them has other models."""
    check_same_on_all_ranks(
        {
            "weights": [weights_hashes(each.provenance) for each in models],
            "temperature or thresholds": [(each.temperature, each.thresholds) for each in models],
        }
    )


def prepare_evaluation(
    model: str,
    built: BuiltModel,
    source: Source,
    split: str,
    section: DataSection,
    accelerator: Accelerator,
    *,
    use_cached_features: bool,
) -> tuple[nn.Module, AnyLoader, list[str]]:
    """Move a model to the device, and build a loader with labels in the order of its classes.

    Args:
        model: model argument as the user typed it, for messages.
        use_cached_features: True to read cached features instead of images if possible.
    Returns: the network, the loader, and the names of the model's classes.
    Raises: DataError if the model lacks one of the dataset's classes.
    """
    num_classes = get_num_classes(model, built)
    mapped_split, class_names = _map_labels_to_model_classes(
        model, built.class_names, num_classes, source, split
    )
    if built.pipeline is not None:
        mapped_split = dataclasses.replace(mapped_split, decode_size=built.pipeline.decode_size)
    network: nn.Module = built.model.to(accelerator.device, torch.float32)
    choose_kernels(network, device=accelerator.device, dtype=autocast_dtype(accelerator))
    loader = _build_loader(
        mapped_split,
        built,
        section,
        accelerator,
        num_classes=num_classes,
        use_cached_features=use_cached_features,
    )
    return network, loader, class_names


def warn_of_training_images(
    model: str, recipe: Recipe | None, source: Source, split: str
) -> list[str]:
    """Warn if a run was trained on some of the images, so that its metrics are too high.

    Args:
        recipe: recipe of the run if the model is a run directory, else None.
    Returns: the leaks that were found.
    """
    if recipe is None:
        return []
    images = source.splits[split]
    record = read_record(RunDir(model))
    recorded = record.get("split_fingerprints", {})
    not_compared = (
        f"{model}: streamed images are not compared, so copies of its training images in '{split}' "
        "are not found"
    )
    is_own_data = redact_urls(source.name) == recipe.data.source
    if is_own_data and split == "train":
        logger.warning(f"{model}: was trained on these images, so its metrics are too high")
    if is_own_data and (split == "train" or recorded.get(split) == images.fingerprint):
        leaks = [leak for leak in record.get("leakage", []) if leak.startswith(f"split '{split}'")]
    elif images.is_streamed:
        logger.warning(not_compared)
        return []
    else:
        try:
            train = open_data(recipe.data, recipe.run.seed).splits["train"]
        except FinetuneError:
            logger.warning(
                f"{model}: its training images cannot be opened here ({recipe.data.source}), so "
                f"copies of them in '{split}' are not found"
            )
            return []
        if recorded.get("train", train.fingerprint) != train.fingerprint:
            logger.warning(
                f"{model}: its training images have changed since the run ({recipe.data.source}), "
                f"so copies of the old ones in '{split}' are not found"
            )
        if train.is_streamed:
            logger.warning(not_compared)
        leaks = find_leakage(dataclasses.replace(source, splits={"train": train, "test": images}))
    for leak in leaks:
        logger.warning(f"{model}: {leak}")
    return leaks


def _warn_if_results_changed(run: str) -> None:
    """Log a warning if results.json of a run was changed; an evaluation does not need it."""
    try:
        RunDir(run).read_json("results.json")
    except CheckpointError as error:
        logger.warning(str(error))


def warn_if_changed(run: str, source: Source, split: str, *, is_main: bool = True) -> bool:
    """Warn if a split of a run's own data is not the one that the run recorded.

    Args:
        source: the run's own data.
        is_main: False to warn in another process.
    Returns: True if it has changed.
    """
    record = read_record(RunDir(run))
    recorded = record.get("split_fingerprints", {})
    current = {split: source.splits[split].fingerprint, "classes": source.classes_fingerprint}
    if split == "test" and not record.get("training_keys", {}).get("run", {}).get("test", True):
        recorded = {**recorded, "test": current["test"]}  # the run did not read it
    has_changed = any(recorded.get(name) != sha256 for name, sha256 in current.items() if recorded)
    if has_changed and is_main:
        logger.warning(
            f"{source.name}: images, labels or classes of '{split}' have changed since the run "
            f"{run}; the metrics in its results.json are those of the old ones"
        )
    elif is_main:
        warn_of_copied_shards(record, source, names=[split])
    return has_changed


def check_split_name(split: str | None, choices: Sequence[str]) -> None:
    """Raise RecipeError if the value of --split is neither None nor one of the choices."""
    if split is not None and split not in choices:
        raise RecipeError(
            f"--split: unknown '{split}'{did_you_mean(split, choices) or '.'} Choose from "
            f"{', '.join(choices)}",
            code="recipe.unknown_name",
        )


def _parse_corruptions(name: str | None) -> list[tuple[str, int]]:
    """Return pairs (kind, severity) of the corruptions that --corrupt selects, in order."""
    if name is None:
        return []
    names = {kind: [(kind, severity) for severity in SEVERITIES] for kind in CORRUPTIONS}
    names["all"] = [each for rows in names.values() for each in rows]
    names |= {f"{k}:{s}": [(k, s)] for k, s in names["all"]}
    if name not in names:
        raise RecipeError(
            f"--corrupt: unknown '{name}'{did_you_mean(name, names) or '.'} Choose all, a "
            f"corruption at all five severities ({', '.join(CORRUPTIONS)}), or one severity, such "
            "as noise:3",
            code="recipe.unknown_name",
        )
    return names[name]


def write_evaluation(result: Mapping[str, Any], folder: str | Path) -> list[str]:
    """Write an evaluation into a folder; creates the folder if needed.

    Returns: paths of the written files: results.json, per_class.csv and, for single-label models,
        confusion.png and reliability.png.
    Raises: SetupError if the folder cannot be written.
    """
    from finetune.report import figure_style, plots

    folder = Path(folder)
    make_writable_folder(folder, option="--out")
    names = result["class_names"]
    write_atomically(folder / "results.json", format_json(result))
    write_atomically(folder / "per_class.csv", _per_class_csv(names, result["per_class"]))
    figures = plots.plot_metrics(result, names)
    for name, figure in figures.items():
        figure_style.save_png(figure, folder / name)
    return [str(folder / name) for name in ("results.json", "per_class.csv", *figures)]


def format_evaluation(result: Mapping[str, Any]) -> str:
    """Format the result of `evaluate_model`: the metrics and a table of the classes."""
    known_keys = ("top1", "top5", "map", "balanced_accuracy", "macro_f1", "micro_f1", "loss", "ece")
    keys = [key for key in known_keys if key in result]
    notes = [f"{result['examples']} images", describe_split_decisions(result)]
    lines = [
        f"{result['split']}{', averaged over flips' if 'tta' in result else ''}: "
        + "  ".join(f"{key} {result[key]:.4f}" for key in keys)
        + f"  ({', '.join(filter(None, notes))})"
    ]
    if "top1" in result and (bounds := accuracy_interval(result["top1"], result["examples"])):
        warning = (
            f"; {TOO_FEW_IMAGES_NOTE} to judge by" if result["examples"] < TOO_FEW_IMAGES else ""
        )
        lines.append(f"95 % interval of top1: {format_percent_range(*bounds)}{warning}")
    calibrated = result.get("calibrated")
    if calibrated and calibrated["temperature"] != 1:
        lines.append(
            f"with temperature {calibrated['temperature']:.4g}: loss {calibrated['loss']:.4f}  "
            f"ece {calibrated['ece']:.4f}"
        )
    if "temperature" in result:
        lines.append(
            f"temperature {result['temperature']:.4g}, fitted on '{result['split']}' of "
            f"{result['data']}, written to config.json; the results.json of a run is unchanged"
        )
    lines += _format_corruptions(result.get("corrupted", {}))
    table = _format_per_class(result) if "confusion" in result else _format_per_label(result)
    return "\n".join([*lines, "", table])


def _format_corruptions(corrupted: Mapping[str, Any]) -> list[str]:
    """Format one line per corruption kind and metric, with one column per severity."""
    if not corrupted:
        return []
    rows = corrupted["rows"]
    severities = sorted({row["severity"] for row in rows})
    lines = [f"{'corrupted, severity':20}" + "".join(f"{each:8}" for each in severities)]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for key in corrupted["mean"]:
            values = "".join(f"{row[key]:8.4f}" for row in rows if row["kind"] == kind)
            lines.append(f"{kind:14}{key:6}{values}")
    mean = "  ".join(f"{key} {value:.4f}" for key, value in corrupted["mean"].items())
    return ["", *lines, f"mean of {pluralize(len(rows), 'corruption')}: {mean}"]


def _format_per_class(result: Mapping[str, Any]) -> str:
    """Format scikit-learn's classification report, without classes that never occur."""
    from sklearn.metrics import classification_report  # takes half a second to import

    confusion = _confusion_of_result(result)
    true_labels = confusion.true_M
    predicted_labels = confusion.predicted_M
    counts = confusion.count_M
    if confusion.num_classes > MAX_DENSE_CLASSES:
        return _format_most_confused(confusion, result["class_names"])
    present = np.union1d(true_labels, predicted_labels)
    names = [escape_to_one_line(result["class_names"][index]) for index in present]
    report: str = classification_report(
        np.repeat(true_labels, counts),
        np.repeat(predicted_labels, counts),
        labels=present,
        target_names=names,
        digits=4,
        zero_division=0,
    )
    return report.rstrip("\n")


def _format_per_label(result: Mapping[str, Any]) -> str:
    """Format one line per class of a multi-label model, largest classes first."""
    keys = ("precision", "recall", "f1", "ap", "threshold")
    pairs = zip(result["class_names"], result["per_class"], strict=True)
    rows = sorted(pairs, key=lambda pair: -pair[1]["support"])[:_MAX_LABEL_ROWS]
    width = max(len(escape_to_one_line(name)) for name, _ in rows)
    lines = [f"{'':{width}}" + "".join(f"{key:>10}" for key in (*keys, "support"))]
    for name, row in rows:
        cells = ("-" if row[key] is None else f"{row[key]:.4f}" for key in keys)
        values = "".join(f"{cell:>10}" for cell in (*cells, str(row["support"])))
        lines.append(f"{escape_to_one_line(name):{width}}{values}")
    if len(result["per_class"]) > _MAX_LABEL_ROWS:
        lines += ["", _ALL_CLASSES_HINT]
    return "\n".join(lines)


def _confusion_of_result(result: Mapping[str, Any]) -> ConfusionMatrix:
    confusion = parse_confusion_matrix(result)
    assert confusion is not None  # every single-label result has a confusion matrix
    return confusion


def _format_most_confused(confusion: ConfusionMatrix, names: Sequence[str]) -> str:
    """Format the most confused class pairs; used if there are too many classes to list all."""
    lines = ["images  true class → predicted class"] + [
        f"{count:6}  {escape_to_one_line(names[true])} → {escape_to_one_line(names[predicted])}"
        for true, predicted, count in confusion.most_confused_pairs(_MAX_CONFUSED_PAIRS)
    ]
    return "\n".join([*lines, "", _ALL_CLASSES_HINT])


def _per_class_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    known_keys = ("support", "recall", "precision", "f1", "ap", "threshold")
    keys = [key for key in known_keys if key in rows[0]]
    writer.writerow(["class", *keys])
    for name, row in zip(names, rows, strict=True):
        writer.writerow([escape_csv_formula(name), *(row[key] for key in keys)])
    return text.getvalue()


def _open_split(
    section: DataSection, split: str | None, *, seed: int, is_training_data: bool, log_split: bool
) -> tuple[Source, str]:
    """Open the data and select a split; None selects the default, see `evaluate_model`.

    Args:
        is_training_data: True if the run was trained on this data; its "train" split then excludes
            the held-out validation images. The "train" split of other data is used completely.
        log_split: True to log which split is used if there is no test split.
    Returns: the source, and the name of the split.
    Raises: DataError if the split does not exist.
    """
    is_whole = split in (None, "test") or (split == "train" and not is_training_data)
    source = open_full_data(section, seed) if is_whole else open_data(section, seed)
    if split is None and "test" not in source.splits:
        if is_training_data or len(source.splits) > 1:
            source, name = open_data(section, seed), "val"
            part = "the val split"
        else:
            (name,), part = source.splits, "the whole dataset"
        if name in source.splits:
            split, images = name, pluralize(len(source.splits[name]), "image")
            if log_split:
                logger.info(f"{section.source}: has no test split; evaluating {part}, {images}")
    split = split or "test"
    if split not in source.splits:
        have = ", ".join(source.splits)
        raise DataError(
            f"{section.source}: has no split '{split}'; use one of: {have}", code="data.no_split"
        )
    return source, split


def _build_loader(
    split: Split,
    built: BuiltModel,
    section: DataSection,
    accelerator: Accelerator,
    *,
    num_classes: int,
    use_cached_features: bool,
) -> AnyLoader:
    """Return a loader of the split's images, or of cached features if possible and wanted."""
    device, preprocessing = accelerator.device, built.preprocessing
    pipeline = built.pipeline or build_pipeline(preprocessing, section.eval)
    if (
        use_cached_features
        and enable_feature_input(built.model, preprocessing.image_size, training=False) is None
    ):
        loader, _ = build_feature_loader(
            split,
            network=built.model,
            pipeline=pipeline,
            identity=feature_identity(built, section.eval) if accelerator.is_main_process else {},
            section=section,
            accelerator=accelerator,
            num_classes=num_classes,
        )
        return loader
    store = _open_pixel_store(split, section, accelerator)
    return ImageLoader(store, pipeline, num_classes=num_classes, device=device)


def _open_pixel_store(split: Split, section: DataSection, accelerator: Accelerator) -> PixelStore:
    """Build the pixel store of a split, with the settings of its data section."""
    return build_pixel_store(
        split,
        keep=section.keep,
        device=accelerator.device,
        num_workers=section.workers,
        unreadable=section.unreadable,
        local_world_size=local_world_size(accelerator.num_processes),
        progress=accelerator.is_main_process,
    )


def _evaluate_corruptions(
    corruptions: Sequence[tuple[str, int]],
    network: nn.Module,
    store: PixelStore,
    built: BuiltModel,
    section: DataSection,
    accelerator: Accelerator,
    *,
    num_classes: int,
) -> dict[str, Any]:
    """Evaluate each corruption.

    Returns: a dict with keys "rows" (the metrics of each corruption) and "mean" (their mean).
    """
    eval_spec = section.eval or default_eval_spec(built.preprocessing)
    rows: list[dict[str, Any]] = []
    is_main = accelerator.is_main_process
    with step_bar(total=len(corruptions), start=0, shown=is_main) as progress:
        for kind, severity in corruptions:
            pipeline = build_pipeline(
                built.preprocessing, add_corruption(eval_spec, kind, severity)
            )
            loader = ImageLoader(
                store, pipeline, num_classes=num_classes, device=accelerator.device
            )
            metrics = evaluate(network, loader, accelerator, batch_size=section.eval_batch_size)
            reported = {key: metrics[key] for key in _CORRUPTION_METRICS if key in metrics}
            rows.append({"kind": kind, "severity": severity, **reported})
            progress.update()
    mean = {key: statistics.fmean(row[key] for row in rows) for key in reported}
    return {"rows": rows, "mean": mean}


def _map_labels_to_model_classes(
    model: str, model_class_names: list[str] | None, num_classes: int, source: Source, split: str
) -> tuple[Split, list[str]]:
    """Map the labels of a split to the model's class indices, by class name.

    Otherwise label 3 of another dataset would be compared with the logit of an unrelated class.

    Returns: the split with mapped labels, and the names of the model's classes.
    Raises: DataError if the model lacks one of the dataset's classes.
    """
    data_class_names = list(source.class_names)
    if model_class_names is None:
        if len(data_class_names) != num_classes:
            raise DataError(
                f"{source.name}: has {len(data_class_names)} classes, but {model} has "
                f"{num_classes}; evaluate it on data with the same classes",
                code="data.wrong_classes",
            )
        warn_once(
            f"{model}: has no class names, so its outputs are taken in the order of the classes of "
            f"{source.name}; if this is another order, the results are wrong"
        )
        return source.splits[split], data_class_names
    index_of = {name: index for index, name in enumerate(model_class_names)}
    counts = Counter(model_class_names)
    repeated = [name for name in data_class_names if counts[name] > 1]
    if repeated and data_class_names != list(model_class_names):
        raise DataError(
            f"{source.name}: {model} has several classes named '{repeated[0]}', which cannot be "
            "matched by name; evaluate it on data with the same classes in the same order",
            code="data.wrong_classes",
        )
    unknown = [name for name in data_class_names if name not in index_of]
    if unknown:
        raise DataError(
            f"{source.name}: has {len(data_class_names)} classes, but {model} "
            f"has no class '{unknown[0]}' (its {len(model_class_names)} classes: "
            f"{', '.join(model_class_names[:5])}…); evaluate it on data with its classes",
            code="data.wrong_classes",
        )
    if source.indicator_columns and (
        missing := [name for name in model_class_names if name not in source.indicator_columns]
    ):
        raise DataError(
            f"{source.name}: has no 0/1 column for {len(missing)} of the {len(model_class_names)} "
            f"classes of {model}: {', '.join(missing[:5])}; add these columns, because no other "
            "column tells which images have these classes",
            code="data.no_column",
        )
    if data_class_names == model_class_names:
        return source.splits[split], model_class_names
    target_indices = np.array([index_of[name] for name in data_class_names], dtype=np.int64)
    selected = source.splits[split]
    if not selected.is_multilabel:
        return dataclasses.replace(
            selected, labels=target_indices[selected.labels]
        ), model_class_names
    labels_NK = np.zeros((len(selected), len(model_class_names)), dtype=np.uint8)
    labels_NK[:, target_indices] = selected.labels
    return dataclasses.replace(selected, labels=labels_NK), model_class_names


def _find_model_config(model: str) -> Path:
    """Return the path of the model's config.json. Raises: RecipeError if it has none to write."""
    folder = (
        None if model.startswith(("hf-hub:", "hf_hub:", "embedded:")) else locate_weights(model)
    )
    if folder is None or not (folder / "config.json").is_file():
        raise RecipeError(
            f"--fit-temperature: {model} is not a run directory or model folder, so it has no "
            "config.json to write to; copy the model into a folder first",
            code="recipe.conflict",
        )
    return folder / "config.json"


def _write_calibration(
    path: Path,
    checksums: Mapping[str, str],
    calibration: Mapping[str, Any],
    validation_scores: Mapping[str, Any] | None,
) -> None:
    """Write the temperature, its split, and the scores of the images into config.json.

    Args:
        path: config.json.
        checksums: those of the other files, see `read_checksums`; empty for none.
        calibration: the temperature, its split, and the fingerprints of that and of the classes.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    config["calibration"] = calibration
    config["validation_scores"] = validation_scores
    if checksums:
        config = with_checksums(config, checksums)
    write_atomically(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
