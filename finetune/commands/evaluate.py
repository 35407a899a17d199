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
from finetune.evaluation.evaluate import examine
from finetune.evaluation.features import identity_of
from finetune.files import make_folder, write_atomically
from finetune.models.build import build
from finetune.models.features import accept_features
from finetune.models.saved import Built
from finetune.models.weights.resolve import locate
from finetune.processes import local_processes
from finetune.recipe.identity import recipe_of
from finetune.recipe.load import DataSection, RunSection
from finetune.run.environment import dtype_of
from finetune.training.compile import choose_kernels
from finetune.training.frozen_backbone import feature_loader
from finetune.training.launch import launch
from finetune.transforms.evaluation import make_pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["describe", "evaluate_model", "write_results"]

SPLITS = ("train", "val", "test")
NUM_MISTAKES = 24


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
        split: "train", "val" or "test"; None for test, or for val with `fit_temperature`.
        fit_temperature: fit a temperature on the split and write it into the model's config.json.
        out: a folder that `write_results` will be given; checked before the work begins.
    Returns: as `examine`, with "model", "data", "split" and "class_names".
    Raises: RecipeError if the data is not known, DataError if its classes are not the model's,
        SetupError if the temperature cannot be written.
    """
    split = _known(("val" if fit_temperature else "test") if split is None else split)
    config = _config_of(model) if fit_temperature else None
    if out is not None:
        make_folder(Path(out), option="--out")
    recipe = recipe_of(model)
    section, seed = section_of(model, recipe, data)
    built = build(model)
    num_classes = int(getattr(built.model, "num_classes", 0) or 0)
    if not num_classes:
        raise WeightsError(f"{model}: these weights have no classifier; fine-tune them first")
    settings = {} if recipe is None else recipe.run.model_dump(include={"precision", "threads"})
    accelerator = launch(RunSection(**settings))
    source = _source_with(section, split, seed=seed)
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
    told = {"model": model, "data": section.source, "split": split}
    return {**told, **result, "class_names": names}


def _known(split: str) -> str:
    if split not in SPLITS:
        raise RecipeError(
            f"--split: unknown '{split}'{nearest(split, SPLITS)}; known: {', '.join(SPLITS)}"
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
    write_atomically(folder / "results.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_atomically(folder / "per_class.csv", _per_class_csv(names, result["per_class"]))
    after = result.get("calibrated", {}).get("calibration")
    pictures = {
        "confusion.png": figures.confusion(result["confusion"], names),
        "reliability.png": figures.reliability(result["calibration"], after),
    }
    for name, figure in pictures.items():
        figures.save_png(figure, folder / name)
    return [str(folder / name) for name in ("results.json", "per_class.csv", *pictures)]


def describe(result: Mapping[str, Any]) -> str:
    """The figures and the per-class report as text for people."""
    lines = [
        f"{result['split']}: "
        + "  ".join(f"{key} {result[key]:.4f}" for key in ("top1", "top5", "loss", "ece"))
        + f"  ({result['examples']} images)"
    ]
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

    counts_KK = np.asarray(result["confusion"])
    truth, guess = np.nonzero(counts_KK)
    times = counts_KK[truth, guess]
    found = np.union1d(truth, guess)
    names = [one_line(result["class_names"][index]) for index in found]
    report: str = classification_report(
        np.repeat(truth, times),
        np.repeat(guess, times),
        labels=found,
        target_names=names,
        digits=4,
        zero_division=0,
    )
    return report.rstrip("\n")


def _per_class_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["class", "support", "recall", "precision", "f1"])
    for name, row in zip(names, rows, strict=True):
        writer.writerow(
            [marked(name), *(row[key] for key in ("support", "recall", "precision", "f1"))]
        )
    return text.getvalue()


def _source_with(section: DataSection, split: str, *, seed: int) -> Source:
    """Open the data. Raises: DataError if it does not have the split."""
    source = whole_data_of(section) if split == "test" else data_of(section, seed)
    if split not in source.splits:
        have = ", ".join(source.splits)
        raise DataError(f"{section.source}: has no split '{split}'; it has {have}")
    return source


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
                "measure it on data with the same classes"
            )
        return source.splits[split], theirs
    unknown = [name for name in theirs if name not in names]
    if unknown:
        raise DataError(
            f"{source.name}: its {len(theirs)} classes are not those of {model} ({len(names)}: "
            f"{', '.join(names[:5])}…), which does not know '{unknown[0]}'; measure it on data "
            "with the same classes"
        )
    if theirs == names:
        return source.splits[split], names
    place = np.array([names.index(name) for name in theirs], dtype=np.int64)
    chosen = source.splits[split]
    return dataclasses.replace(chosen, labels=place[chosen.labels]), names


def _config_of(model: str) -> Path:
    """The config.json that a temperature can be written into."""
    folder = None if model.startswith(("hf-hub:", "hf_hub:", "embedded:")) else locate(model)
    if folder is None or not (folder / "config.json").is_file():
        raise RecipeError(
            f"--fit-temperature: {model} is not a run directory or model folder, so there is no "
            "config.json to write it into; copy the model into a folder first"
        )
    return folder / "config.json"


def _store_temperature(path: Path, temperature: float, split: str) -> None:
    """Write the temperature into a model's configuration, in one step."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["calibration"] = {"temperature": temperature, "split": split}
    write_atomically(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
