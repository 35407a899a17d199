"""Measure a saved model on a split of any data set, and fit its temperature."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from finetune.commands.predict import num_classes_of
from finetune.commands.predict_io import marked, one_line
from finetune.console import bar, say
from finetune.data.feature_loader import AnyLoader
from finetune.data.from_recipe import data_of, section_of, whole_data_of
from finetune.data.image_store import Store, open_store
from finetune.data.loader import Loader
from finetune.data.source import Source, Split
from finetune.errors import DataError, RecipeError, nearest
from finetune.evaluation.confusion import DENSE_CLASSES, Confusion, read_confusion
from finetune.evaluation.evaluate import NUM_MISTAKES, Examination, evaluate
from finetune.evaluation.features import identity_of
from finetune.evaluation.intervals import TOO_FEW_IMAGES, interval
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD
from finetune.files import make_folder, write_atomically
from finetune.models.build import build
from finetune.models.features import accept_features
from finetune.models.saved import Built
from finetune.models.weights.resolve import locate
from finetune.processes import local_processes
from finetune.recipe.identity import recipe_of
from finetune.recipe.load import DataSection, Recipe, RunSection
from finetune.run.directory import json_text
from finetune.run.environment import dtype_of
from finetune.text import TOO_FEW, counted, percent_range
from finetune.training.compile import choose_kernels
from finetune.training.frozen_backbone import feature_loader
from finetune.training.launch import launch
from finetune.transforms.evaluation import corrupted, default_eval, make_pipeline
from finetune.transforms.operations import CORRUPTIONS, SEVERITIES

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["describe", "evaluate_model", "launched", "write_results"]

SPLITS = ("train", "val", "test")
_SHOWN_PAIRS = 20
_SHOWN_LABELS = 100
TASKS = ("multiclass", "multilabel")
_FIGURES = ("top1", "map", "loss", "ece")  # of corrupted images


def evaluate_model(
    model: str,
    *,
    data: str | None = None,
    split: str | None = None,
    fit_temperature: bool = False,
    corrupt: str | None = None,
    out: str | None = None,
) -> dict[str, Any]:
    """Measure a saved model on a split, each image counted once.

    Args:
        model: run directory, model folder, hub or timm name.
        data: a source string; None for the one that the run was trained on. Its classes may be
            some of the model's.
        split: "train", "val" or "test"; None for val with `fit_temperature`, and otherwise for
            test, or for val where the data has no test split; of other data than the run's with
            one split alone, for all of it.
        fit_temperature: fit a temperature on the split and write it into the model's config.json.
        corrupt: measure corrupted images, too: "all", one kind of CORRUPTIONS, or "noise:3".
        out: a folder that `write_results` will be given; checked before the work begins.
    Returns: as `Examination.of`, with "model", "data", "split", "class_names" and, with `corrupt`,
        "corrupted" {"rows": [{"kind", "severity", "top1", "loss", "ece"}], "mean": {"top1", …}}.
    Raises: RecipeError if the data is not known, DataError if its classes are not the model's or
        it has no such split, SetupError if the temperature cannot be written.
    """
    split = _checked("val" if split is None and fit_temperature else split)
    corruptions = _corruptions(corrupt)
    config = _config_of(model) if fit_temperature else None
    if out is not None:
        make_folder(Path(out), option="--out")
    recipe = recipe_of(model)
    section, seed = section_of(model, recipe, data)
    built, num_classes = _classifier(model, fit_temperature=fit_temperature)
    broken = {} if recipe is None else {"unreadable": recipe.data.unreadable}
    section = section.model_copy(update={"task": TASKS[built.multilabel], **broken})
    accelerator = launched(recipe)
    own = recipe is not None and section.source == recipe.data.source
    source, split = _open(section, split, seed=seed, own=own, shown=accelerator.is_main_process)
    labelled, names = _by_the_models_classes(model, built.class_names, num_classes, source, split)
    frozen = recipe is not None and recipe.model.freeze == "backbone"
    network = built.model.to(accelerator.device, torch.float32)
    choose_kernels(network, device=accelerator.device, dtype=dtype_of(accelerator))
    feed = _feed_of(labelled, built, section, accelerator, num_classes=num_classes, frozen=frozen)
    result = Examination(
        feed,
        accelerator,
        temperature=None if fit_temperature else built.temperature,
        thresholds=built.thresholds or [DEFAULT_THRESHOLD] * num_classes,
        fit=fit_temperature,
        num_mistakes=NUM_MISTAKES,
    ).of(network, batch_size=section.eval_batch_size)
    if config is not None and accelerator.is_main_process:
        _store_temperature(config, result["temperature"], split)
    if corruptions:
        store = feed.store if isinstance(feed, Loader) else _images(labelled, section, accelerator)
        result["corrupted"] = _corrupted(
            corruptions, network, store, built, section, accelerator, num_classes=num_classes
        )
    return {"model": model, "data": section.source, "split": split, **result, "class_names": names}


def launched(recipe: Recipe | None) -> Accelerator:
    """Accelerate, in the precision and with the threads of a run's recipe."""
    settings = {} if recipe is None else recipe.run.model_dump(include={"precision", "threads"})
    return launch(RunSection(**settings))


def _checked(split: str | None) -> str | None:
    if split is not None and split not in SPLITS:
        raise RecipeError(
            f"--split: unknown '{split}'{nearest(split, SPLITS)}; known: {', '.join(SPLITS)}",
            code="recipe.unknown_name",
        )
    return split


def _classifier(model: str, *, fit_temperature: bool) -> tuple[Built, int]:
    """A model, and the number of its classes."""
    built = build(model)
    num_classes = num_classes_of(model, built)
    if built.multilabel and fit_temperature:
        raise RecipeError(
            f"--fit-temperature: {model} gives an image any number of labels, by thresholds that "
            "training has fitted; remove the option",
            code="recipe.conflict",
        )
    return built, num_classes


def _corruptions(wanted: str | None) -> list[tuple[str, int]]:
    """The kinds and severities that --corrupt names, in order."""
    if wanted is None:
        return []
    names = {kind: [(kind, severity) for severity in SEVERITIES] for kind in CORRUPTIONS}
    names["all"] = [each for rows in names.values() for each in rows]
    names |= {f"{k}:{s}": [(k, s)] for k, s in names["all"]}
    if wanted not in names:
        raise RecipeError(
            f"--corrupt: unknown '{wanted}'{nearest(wanted, names)}; known: all, "
            f"{', '.join(CORRUPTIONS)}, of each all five severities, or one: noise:3",
            code="recipe.unknown_name",
        )
    return names[wanted]


def write_results(result: Mapping[str, Any], folder: str | Path) -> list[str]:
    """Write an evaluation into a folder, which is made if it is not there.

    Returns: the files: results.json, per_class.csv and, of one label an image, confusion.png and
        reliability.png.
    Raises: SetupError if the folder cannot be written.
    """
    from finetune.report import figures, style  # matplotlib takes a second to load

    folder = Path(folder)
    make_folder(folder, option="--out")
    names = result["class_names"]
    write_atomically(folder / "results.json", json_text(result))
    write_atomically(folder / "per_class.csv", _per_class_csv(names, result["per_class"]))
    after = result.get("calibrated", {}).get("calibration")
    pictures = {}
    if "confusion" in result:
        pictures = {
            "confusion.png": figures.confusion(_confusion(result), names),
            "reliability.png": figures.reliability(result["calibration"], after),
        }
    for name, figure in pictures.items():
        style.save_png(figure, folder / name)
    return [str(folder / name) for name in ("results.json", "per_class.csv", *pictures)]


def describe(result: Mapping[str, Any]) -> str:
    """The figures and the per-class report as text for people."""
    every = ("top1", "top5", "map", "balanced_accuracy", "macro_f1", "micro_f1", "loss", "ece")
    keys = [key for key in every if key in result]
    lines = [
        f"{result['split']}: "
        + "  ".join(f"{key} {result[key]:.4f}" for key in keys)
        + f"  ({result['examples']} images)"
    ]
    if "top1" in result and (ends := interval(result["top1"], result["examples"])):
        few = f"; {TOO_FEW} to judge by" if result["examples"] < TOO_FEW_IMAGES else ""
        lines.append(f"95 % interval of top1: {percent_range(*ends)}{few}")
    if scaled := result.get("calibrated"):
        lines.append(
            f"with temperature {scaled['temperature']:.4g}: loss {scaled['loss']:.4f}  "
            f"ece {scaled['ece']:.4f}"
        )
    if "temperature" in result:
        lines.append(f"temperature {result['temperature']:.4g}, written into config.json")
    lines += _corrupted_lines(result.get("corrupted", {}))
    table = _per_class(result) if "confusion" in result else _per_label(result)
    return "\n".join([*lines, "", table])


def _corrupted_lines(found: Mapping[str, Any]) -> list[str]:
    """A row for each kind and figure of corrupted images, with a column for each severity."""
    if not found:
        return []
    rows = found["rows"]
    severities = sorted({row["severity"] for row in rows})
    lines = [f"{'corrupted, severity':20}" + "".join(f"{each:8}" for each in severities)]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for key in found["mean"]:
            values = "".join(f"{row[key]:8.4f}" for row in rows if row["kind"] == kind)
            lines.append(f"{kind:14}{key:6}{values}")
    mean = "  ".join(f"{key} {value:.4f}" for key, value in found["mean"].items())
    return ["", *lines, f"mean of {counted(len(rows), 'corruption')}: {mean}"]


def _per_class(result: Mapping[str, Any]) -> str:
    """scikit-learn's classification report of the classes that occur or were predicted."""
    from sklearn.metrics import classification_report  # half a second

    counts = _confusion(result)
    truth, guess, times = counts.true_M, counts.said_M, counts.count_M
    if counts.num_classes > DENSE_CLASSES:
        return _most_confused(counts, result["class_names"])
    present = np.union1d(truth, guess)
    names = [one_line(result["class_names"][index]) for index in present]
    report: str = classification_report(
        np.repeat(truth, times),
        np.repeat(guess, times),
        labels=present,
        target_names=names,
        digits=4,
        zero_division=0,
    )
    return report.rstrip("\n")


def _per_label(result: Mapping[str, Any]) -> str:
    """A line for each class of several labels an image, those with most images first."""
    keys = ("precision", "recall", "f1", "ap", "threshold")
    pairs = zip(result["class_names"], result["per_class"], strict=True)
    rows = sorted(pairs, key=lambda pair: -pair[1]["support"])[:_SHOWN_LABELS]
    width = max(len(one_line(name)) for name, _ in rows)
    lines = [f"{'':{width}}" + "".join(f"{key:>10}" for key in (*keys, "support"))]
    for name, row in rows:
        cells = ("-" if row[key] is None else f"{row[key]:.4f}" for key in keys)
        figures = "".join(f"{cell:>10}" for cell in (*cells, str(row["support"])))
        lines.append(f"{one_line(name):{width}}{figures}")
    more = ["", "every class: per_class.csv, with --out DIR"]
    return "\n".join(lines + more * (len(result["per_class"]) > _SHOWN_LABELS))


def _confusion(result: Mapping[str, Any]) -> Confusion:
    counts = read_confusion(result)
    assert counts is not None  # of an evaluation that this process made
    return counts


def _most_confused(counts: Confusion, names: Sequence[str]) -> str:
    """The most confused pairs, where a line for each class would fill many screens."""
    lines = ["images  true class → predicted class"] + [
        f"{count:6}  {one_line(names[true])} → {one_line(names[predicted])}"
        for true, predicted, count in counts.most_confused(_SHOWN_PAIRS)
    ]
    return "\n".join([*lines, "", "every class: per_class.csv, with --out DIR"])


def _per_class_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    every = ("support", "recall", "precision", "f1", "ap", "threshold")
    keys = [key for key in every if key in rows[0]]
    writer.writerow(["class", *keys])
    for name, row in zip(names, rows, strict=True):
        writer.writerow([marked(name), *(row[key] for key in keys)])
    return text.getvalue()


def _open(
    section: DataSection, split: str | None, *, seed: int, own: bool, shown: bool
) -> tuple[Source, str]:
    """Open the data, and choose the split where none is named: test, or val without a test split.

    Args:
        own: the run was trained on it; of other data nothing is set aside but for val.
        shown: print that there is no test split.
    Raises: DataError if it does not have the split.
    """
    is_whole = split in (None, "test") or (split == "train" and not own)
    source = whole_data_of(section, seed) if is_whole else data_of(section, seed)
    if split is None and "test" not in source.splits:
        if own or len(source.splits) > 1:
            source, name = data_of(section, seed), "val"
            part = "validation"
        else:
            (name,), part = source.splits, "all of it"
        if name in source.splits:
            split, images = name, counted(len(source.splits[name]), "image")
            if shown:
                say(f"{section.source}: has no test split; measuring {part}, {images}")
    split = split or "test"
    if split not in source.splits:
        have = ", ".join(source.splits)
        raise DataError(
            f"{section.source}: has no split '{split}'; it has {have}", code="data.no_split"
        )
    return source, split


def _feed_of(
    split: Split,
    built: Built,
    section: DataSection,
    accelerator: Accelerator,
    *,
    num_classes: int,
    frozen: bool,
) -> AnyLoader:
    """Batches of a split: with a backbone that was frozen, of the features that its run kept."""
    device, preprocessing = accelerator.device, built.preprocessing
    pipeline = make_pipeline(preprocessing, section.eval, train=False)
    if frozen and accept_features(built.model, preprocessing.image_size, training=False) is None:
        loader, _ = feature_loader(
            split,
            network=built.model,
            pipeline=pipeline,
            identity=identity_of(built, section.eval) if accelerator.is_main_process else {},
            section=section,
            accelerator=accelerator,
            num_classes=num_classes,
        )
        return loader
    store = _images(split, section, accelerator)
    return Loader(store, pipeline, num_classes=num_classes, device=device)


def _images(split: Split, section: DataSection, accelerator: Accelerator) -> Store:
    """The pixels of a split."""
    return open_store(
        split,
        keep=section.keep,
        device=accelerator.device,
        workers=section.workers,
        unreadable=section.unreadable,
        local_processes=local_processes(accelerator.num_processes),
        progress=accelerator.is_main_process,
        notice=say,
    )


def _corrupted(
    corruptions: Sequence[tuple[str, int]],
    network: nn.Module,
    store: Store,
    built: Built,
    section: DataSection,
    accelerator: Accelerator,
    *,
    num_classes: int,
) -> dict[str, Any]:
    """The figures of each corruption, and their means."""
    sentence = section.eval or default_eval(built.preprocessing)
    rows: list[dict[str, Any]] = []
    shown = accelerator.is_main_process
    with bar(total=len(corruptions), start=0, shown=shown) as progress:
        for kind, severity in corruptions:
            pipeline = make_pipeline(built.preprocessing, corrupted(sentence, kind, severity))
            loader = Loader(store, pipeline, num_classes=num_classes, device=accelerator.device)
            size = section.eval_batch_size
            figures = evaluate(network, loader, accelerator, batch_size=size)
            kept = {key: figures[key] for key in _FIGURES if key in figures}
            rows.append({"kind": kind, "severity": severity, **kept})
            progress.update()
    mean = {key: statistics.fmean(row[key] for row in rows) for key in kept}
    return {"rows": rows, "mean": mean}


def _by_the_models_classes(
    model: str, names: list[str] | None, num_classes: int, source: Source, split: str
) -> tuple[Split, list[str]]:
    """Number the labels as the model does; classes that it does not know are refused.

    Logits mean the model's own classes: another data set's would be counted at random.

    Returns: the split, and the names of the model's classes.
    """
    theirs = list(source.class_names)
    if names is None:
        if len(theirs) != num_classes:
            raise DataError(
                f"{source.name}: {len(theirs)} classes, and {model} tells {num_classes} apart; "
                "measure it on data with the same classes",
                code="data.wrong_classes",
            )
        return source.splits[split], theirs
    number = {name: index for index, name in reversed([*enumerate(names)])}  # the first of equals
    unknown = [name for name in theirs if name not in number]
    if unknown:
        raise DataError(
            f"{source.name}: its {len(theirs)} classes are not those of {model} ({len(names)}: "
            f"{', '.join(names[:5])}…), which does not know '{unknown[0]}'; measure it on data "
            "with the same classes",
            code="data.wrong_classes",
        )
    if source.columns and (missing := [name for name in names if name not in source.columns]):
        raise DataError(
            f"{source.name}: has no column of 0 and 1 for {len(missing)} of the {len(names)} "
            f"classes of {model}: {', '.join(missing[:5])}; add these columns, as no other says "
            "which images have the class",
            code="data.no_column",
        )
    if theirs == names:
        return source.splits[split], names
    place = np.array([number[name] for name in theirs], dtype=np.int64)
    chosen = source.splits[split]
    if not chosen.is_multilabel:
        return dataclasses.replace(chosen, labels=place[chosen.labels]), names
    labels_NK = np.zeros((len(chosen), len(names)), dtype=np.uint8)
    labels_NK[:, place] = chosen.labels
    return dataclasses.replace(chosen, labels=labels_NK), names


def _config_of(model: str) -> Path:
    """The config.json that a temperature can be written into."""
    folder = None if model.startswith(("hf-hub:", "hf_hub:", "embedded:")) else locate(model)
    if folder is None or not (folder / "config.json").is_file():
        raise RecipeError(
            f"--fit-temperature: {model} is not a run directory or model folder, so there is no "
            "config.json to write it into; copy the model into a folder first",
            code="recipe.conflict",
        )
    return folder / "config.json"


def _store_temperature(path: Path, temperature: float, split: str) -> None:
    """Write the temperature into a model's configuration, in one step."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["calibration"] = {"temperature": temperature, "split": split}
    write_atomically(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
