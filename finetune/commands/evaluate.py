"""Measure a saved model on a split of any data set, and fit its temperature."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.commands.predict_io import marked, one_line
from finetune.console import say
from finetune.data.feature_loader import AnyLoader
from finetune.data.from_recipe import data_of, section_of, whole_data_of
from finetune.data.image_store import open_store
from finetune.data.loader import Loader
from finetune.data.source import Source, Split
from finetune.errors import DataError, RecipeError, WeightsError, nearest
from finetune.evaluation.confusion import DENSE_CLASSES, Confusion, read_confusion
from finetune.evaluation.evaluate import NUM_MISTAKES, examine
from finetune.evaluation.features import identity_of
from finetune.evaluation.intervals import TOO_FEW_IMAGES, interval
from finetune.files import make_folder, write_atomically
from finetune.models.build import build
from finetune.models.features import accept_features
from finetune.models.saved import Built
from finetune.models.weights.resolve import locate
from finetune.processes import local_processes
from finetune.recipe.identity import recipe_of
from finetune.recipe.load import DataSection, RunSection
from finetune.run.directory import json_text
from finetune.run.environment import dtype_of
from finetune.text import TOO_FEW, counted, percent_range
from finetune.training.compile import choose_kernels
from finetune.training.frozen_backbone import feature_loader
from finetune.training.launch import launch
from finetune.transforms.evaluation import make_pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["describe", "evaluate_model", "write_results"]

SPLITS = ("train", "val", "test")
_SHOWN_PAIRS = 20


def evaluate_model(
    model: str,
    *,
    data: str | None = None,
    split: str | None = None,
    fit_temperature: bool = False,
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
        out: a folder that `write_results` will be given; checked before the work begins.
    Returns: as `examine`, with "model", "data", "split" and "class_names".
    Raises: RecipeError if the data is not known, DataError if its classes are not the model's or
        it has no such split, SetupError if the temperature cannot be written.
    """
    split = _checked("val" if split is None and fit_temperature else split)
    config = _config_of(model) if fit_temperature else None
    if out is not None:
        make_folder(Path(out), option="--out")
    recipe = recipe_of(model)
    section, seed = section_of(model, recipe, data)
    built = build(model)
    num_classes = int(getattr(built.model, "num_classes", 0) or 0)
    if not num_classes:
        raise WeightsError(
            f"{model}: these weights have no classifier; fine-tune them first",
            code="weights.no_classifier",
        )
    settings = {} if recipe is None else recipe.run.model_dump(include={"precision", "threads"})
    accelerator = launch(RunSection(**settings))
    own = recipe is not None and section.source == recipe.data.source
    source, split = _open(section, split, seed=seed, own=own, shown=accelerator.is_main_process)
    labelled, names = _by_the_models_classes(model, built.class_names, num_classes, source, split)
    frozen = recipe is not None and recipe.model.freeze == "backbone"
    network = built.model.to(accelerator.device, torch.float32)
    choose_kernels(network, device=accelerator.device, dtype=dtype_of(accelerator))
    result = examine(
        network,
        _feed_of(labelled, built, section, accelerator, num_classes=num_classes, frozen=frozen),
        accelerator,
        batch_size=section.eval_batch_size,
        temperature=None if fit_temperature else built.temperature,
        fit=fit_temperature,
        num_mistakes=NUM_MISTAKES,
    )
    if config is not None and accelerator.is_main_process:
        _store_temperature(config, result["temperature"], split)
    facts = {"model": model, "data": section.source, "split": split}
    return {**facts, **result, "class_names": names}


def _checked(split: str | None) -> str | None:
    if split is not None and split not in SPLITS:
        raise RecipeError(
            f"--split: unknown '{split}'{nearest(split, SPLITS)}; known: {', '.join(SPLITS)}",
            code="recipe.unknown_name",
        )
    return split


def write_results(result: Mapping[str, Any], folder: str | Path) -> list[str]:
    """Write an evaluation into a folder.

    Args:
        result: of `evaluate_model`.
        folder: made if it is not there.
    Returns: the files: results.json, per_class.csv, confusion.png, reliability.png.
    Raises: SetupError if the folder cannot be written.
    """
    from finetune.report import figures  # matplotlib takes a second to load

    folder = Path(folder)
    make_folder(folder, option="--out")
    names = result["class_names"]
    write_atomically(folder / "results.json", json_text(result))
    write_atomically(folder / "per_class.csv", _per_class_csv(names, result["per_class"]))
    after = result.get("calibrated", {}).get("calibration")
    pictures = {
        "confusion.png": figures.confusion(_confusion(result), names),
        "reliability.png": figures.reliability(result["calibration"], after),
    }
    for name, figure in pictures.items():
        figures.save_png(figure, folder / name)
    return [str(folder / name) for name in ("results.json", "per_class.csv", *pictures)]


def describe(result: Mapping[str, Any]) -> str:
    """The figures and the per-class report as text for people."""
    keys = ("top1", "top5", "balanced_accuracy", "macro_f1", "loss", "ece")
    lines = [
        f"{result['split']}: "
        + "  ".join(f"{key} {result[key]:.4f}" for key in keys)
        + f"  ({result['examples']} images)"
    ]
    if ends := interval(result["top1"], result["examples"]):
        few = f"; {TOO_FEW} to judge by" if result["examples"] < TOO_FEW_IMAGES else ""
        lines.append(f"95 % interval of top1: {percent_range(*ends)}{few}")
    if scaled := result.get("calibrated"):
        lines.append(
            f"with temperature {scaled['temperature']:.4g}: loss {scaled['loss']:.4f}  "
            f"ece {scaled['ece']:.4f}"
        )
    if "temperature" in result:
        lines.append(f"temperature {result['temperature']:.4g}, written into config.json")
    return "\n".join([*lines, "", _per_class(result)])


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
    writer.writerow(["class", "support", "recall", "precision", "f1"])
    for name, row in zip(names, rows, strict=True):
        writer.writerow(
            [marked(name), *(row[key] for key in ("support", "recall", "precision", "f1"))]
        )
    return text.getvalue()


def _open(
    section: DataSection, split: str | None, *, seed: int, own: bool, shown: bool
) -> tuple[Source, str]:
    """Open the data, and choose the split where none is named: test, or val without a test split.

    Args:
        own: the run was trained on it; other data that is one split is measured whole.
        shown: print that there is no test split.
    Raises: DataError if it does not have the split.
    """
    source = whole_data_of(section, seed) if split in (None, "test") else data_of(section, seed)
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
    store = open_store(
        split,
        keep=section.keep,
        device=device,
        workers=section.workers,
        unreadable=section.unreadable,
        local_processes=local_processes(accelerator.num_processes),
        progress=accelerator.is_main_process,
        notice=say,
    )
    return Loader(store, pipeline, num_classes=num_classes, device=device)


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
    if theirs == names:
        return source.splits[split], names
    place = np.array([number[name] for name in theirs], dtype=np.int64)
    chosen = source.splits[split]
    return dataclasses.replace(chosen, labels=place[chosen.labels]), names


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
