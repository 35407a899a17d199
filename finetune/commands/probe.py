"""Measure frozen features: few-shot accuracy, a linear probe, nearest neighbours."""

# N images, D width, K classes

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.from_recipe import data_of, section_of, whole_data_of
from finetune.data.source import Source
from finetune.data.splits import split_train
from finetune.errors import DataError, RecipeError, nearest
from finetune.evaluation.features import Features, identity_of, places_of, split_features
from finetune.evaluation.linear_probe import (
    BIAS,
    L2,
    draw_shots,
    few_shot,
    logistic_regression,
    neighbours,
    sgd_heads,
)
from finetune.files import make_folder, write_atomically
from finetune.models.build import build
from finetune.models.features import pre_logits, token_columns, token_features
from finetune.recipe.identity import recipe_of
from finetune.recipe.load import DataSection, RunSection
from finetune.run.environment import describe_machine, dtype_of
from finetune.training.compile import choose_kernels
from finetune.training.launch import launch
from finetune.transforms.evaluation import make_pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["SHOTS", "describe", "probe_model", "shots_of"]

SHOTS = (1, 5, 10, 25)
SPLITS = ("val", "test")
_TEMPERATURE = 0.07
_VAL_FRACTION = 0.1  # of train, to choose C on where the source has no val split


def probe_model(
    model: str,
    *,
    data: str | None = None,
    split: str | None = None,
    shots: Sequence[int] = SHOTS,
    seeds: int = 3,
    linear: bool = False,
    linear_sgd: bool = False,
    knn: int | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Measure how well simple classifiers do on a network's frozen features.

    The few-shot figure is that of big_vision: pre-logits, whitened by the shots, least squares
    with targets of ±1. Features are in float32 on every device. All processes of a launcher
    compute them; rank 0 alone does the rest.

    Args:
        model: run directory, model folder, hub or timm name; it needs no classifier.
        data: a source string; None for the one that the run was trained on.
        split: what is measured on, "test" or "val"; None for test, or for val where there is no
            test. A val split that the source does not have is taken from train, as in training.
        shots: images of each class to learn from, all from train.
        seeds: how many draws of them: seeds 0, 1, …
        linear: also logistic regression on all of train, its C chosen on validation.
        linear_sgd: also, as DINOv2's evaluation does, the best of many linear classifiers by SGD:
            13 learning rates, class tokens with and without patches (or pre-logits).
        knn: also this many nearest neighbours in train.
        out: a folder for probe.json.
    Returns: {"model", "data", "split", "protocol", "shots": {n: {"accuracy", "std", "seeds"}},
        "linear", "linear_sgd", "knn", "features", "machine"}; "std" is over seeds (n - 1), None
        for one seed; "linear", "linear_sgd" and "knn" are None unless asked for. On other ranks
        than 0 "shots" is empty.
    Raises: RecipeError for arguments, DataError for data, SetupError for `out`.
    """
    _check_arguments(shots, split)
    folder = None if out is None else Path(out)
    if folder is not None:
        make_folder(folder, option="--out")
    task = _open(model, data, split)
    _check_counts(task.source, task.source.splits["train"].labels, shots, knn)
    with_val = linear or linear_sgd
    if not with_val and knn is None:
        task = _of_shots(task, max(shots), seeds)
    accelerator = launch(RunSection(precision="fp32", threads=task.threads))
    identity, features, columns = _features(model, task, accelerator, with_val, linear_sgd)
    facts = {"model": model, "data": task.section.source, "split": task.split}
    if not features:
        return {**facts, "shots": {}}
    figures = _figures(task, features, columns, shots=shots, seeds=seeds, linear=linear, knn=knn)
    if linear_sgd:
        figures["linear_sgd"] = _linear_sgd(task, features, columns, accelerator.device)
    figures["protocol"] |= {key: identity[key] for key in ("eval", "weights")}
    machine = describe_machine(accelerator.device, accelerator.num_processes)
    result = {**facts, **figures, "machine": machine}
    if folder is not None:
        text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomically(folder / "probe.json", text)
    return result


def describe(result: Mapping[str, Any]) -> str:
    """The figures as text for people."""
    if not result["shots"]:
        return ""
    protocol, features = result["protocol"], result["features"]
    lines = [f"{result['split']}: {protocol['test_images']} images, {protocol['width']} features"]
    lines += ["", "shots  accuracy     std  of each seed"]
    for count, row in result["shots"].items():
        std = "     –" if row["std"] is None else f"{row['std']:.4f}"
        each = " ".join(f"{accuracy:.4f}" for accuracy in row["seeds"])
        lines.append(f"{count:5}    {row['accuracy']:.4f}  {std}  {each}")
    if linear := result.get("linear"):
        edge = "; the best C is at the edge of the grid" if linear["at_edge"] else ""
        stopped = "" if linear["converged"] else "; stopped before it converged"
        lines.append(
            f"linear (logistic regression, C {linear['c']:g} from {linear['chosen_on']}): "
            f"{linear['accuracy']:.4f}{edge}{stopped}"
        )
    if sgd := result.get("linear_sgd"):
        edge = "; the best rate is at the edge of the grid" if sgd["at_edge"] else ""
        lines.append(
            f"linear (SGD, the best of {len(sgd['grid'])} on {sgd['chosen_on']}: learning rate "
            f"{sgd['lr']:g} on {sgd['features']}): {sgd['accuracy']:.4f}{edge}"
        )
    if knn := result.get("knn"):
        lines.append(
            f"{knn['k']} nearest neighbours: {knn['weighted']:.4f} weighted with temperature "
            f"{knn['temperature']:g}, {knn['plain']:.4f} with one vote each"
        )
    times = (
        f"{name} {'from the cache' if one['cached'] else 'computed'} in {one['seconds']:.1f} s"
        for name, one in features.items()
    )
    lines += ["", f"features: {', '.join(times)}"]
    return "\n".join(lines)


def shots_of(text: str) -> tuple[int, ...]:
    """Read "1,5,10". Raises: RecipeError if it is no list of numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise RecipeError(
            f"--shots: got '{text[:60]}'; expected numbers such as 1,5,10,25",
            code="recipe.wrong_value",
        )
    return tuple(int(part) for part in parts)


# --- what is asked for, and whether the data has it ----------------------------------------------


def _check_arguments(shots: Sequence[int], split: str | None) -> None:
    if not shots or min(shots) < 1 or len(set(shots)) < len(shots):
        listed = ",".join(map(str, shots))
        raise RecipeError(
            f"--shots: got '{listed}'; expected different numbers of 1 or more",
            code="recipe.wrong_value",
        )
    if split is not None and split not in SPLITS:
        raise RecipeError(
            f"--split: unknown '{split}'{nearest(split, SPLITS)}; known: {', '.join(SPLITS)}",
            code="recipe.unknown_name",
        )


@dataclass(frozen=True)
class _Task:
    """Data, splits and settings of a probe; `seed` splits the data.

    `drawn` are the places in train whose features are needed; None for all of them.
    """

    source: Source
    split: str
    section: DataSection
    seed: int
    threads: int | None
    drawn: NDArray[np.int64] | None = None


def _open(model: str, data: str | None, split: str | None) -> _Task:
    """Open the data as the run does if it is the run's own, and find the split to measure on."""
    recipe = recipe_of(model)
    section, seed = section_of(model, recipe, data)
    source = data_of(section, seed) if split == "val" else whole_data_of(section, seed)
    if section.task == "multilabel":
        raise DataError(
            f"{source.name}: its images have several labels (data.task), and a probe counts one "
            "right or wrong; measure them with: finetune eval",
            code="data.wrong_labels",
        )
    have = ", ".join(source.splits)
    if "train" not in source.splits:
        raise DataError(
            f"{source.name}: has no train split to take shots from, only {have}; add one",
            code="data.no_split",
        )
    if split is None:
        split = next((name for name in ("test", "val") if name in source.splits), None)
    if split is None or split not in source.splits:
        missing = "neither test nor val" if split is None else f"no split '{split}'"
        raise DataError(
            f"{source.name}: has {missing} to measure on, only {have}; add one, or measure on a "
            "part of train with --split val",
            code="data.no_split",
        )
    return _Task(source, split, section, seed, recipe.run.threads if recipe else None)


def _check_counts(
    source: Source, labels_N: NDArray[np.int64], shots: Sequence[int], knn: int | None
) -> None:
    """Refuse classes with fewer images than shots, and a train split that is too small.

    Classes that the source declares and has no image of are left aside: the source has said so.
    """
    counts = np.bincount(labels_N, minlength=len(source.class_names))
    few = [k for k in np.flatnonzero(counts).tolist() if counts[k] < max(shots)]
    if few:
        named = ", ".join(f"'{source.class_names[k]}' has {counts[k]}" for k in few[:5])
        raise DataError(
            f"{source.name}: {max(shots)} shots need as many images of each class in train, and "
            f"{len(few)} of {len(counts)} classes have fewer: {named}{'…' if few[5:] else ''}; "
            "take fewer with --shots, or add images",
            code="data.too_few_images",
        )
    if np.count_nonzero(counts) < 2:
        raise DataError(
            f"{source.name}: only one class has images in train; add another's",
            code="data.one_class",
        )
    if knn is not None and knn > len(labels_N):
        raise DataError(
            f"{source.name}: {knn} neighbours were asked for and train has {len(labels_N)} "
            "images; take fewer with --knn",
            code="data.too_few_images",
        )


# --- figures -------------------------------------------------------------------------------------


def _of_shots(task: _Task, most: int, seeds: int) -> _Task:
    """Return the task for which features of the shots are enough: what is drawn is known."""
    if task.section.unreadable == "quarantine":  # an image that is left out changes the draws
        return task
    labels_N, num_classes = task.source.splits["train"].labels, len(task.source.class_names)
    draws = [draw_shots(labels_N, num_classes, shots=most, seed=seed) for seed in range(seeds)]
    return replace(task, drawn=np.unique(np.concatenate(draws)))


def _features(
    model: str, task: _Task, accelerator: Accelerator, with_val: bool, tokens: bool
) -> tuple[dict[str, Any], dict[str, Features], dict[str, slice]]:
    """The features of each split, what they depend on, and their columns; on rank 0 alone."""
    built = build(model)
    identity = identity_of(built, task.section.eval) if accelerator.is_main_process else {}
    pipeline = make_pipeline(built.preprocessing, task.section.eval)
    network = built.model.to(accelerator.device, torch.float32)
    if not tokens:  # the fastest way computes no more than the classifier reads
        choose_kernels(network, device=accelerator.device, dtype=dtype_of(accelerator))
    names = dict.fromkeys(["train", task.split])
    if with_val and "val" in task.source.splits:
        names["val"] = None
    splits = {name: task.source.splits[name] for name in names}
    if task.drawn is not None:
        splits["train"] = splits["train"].subset(task.drawn)
    features = {
        name: split_features(
            split,
            network=network,
            pipeline=pipeline,
            identity=identity,
            section=task.section,
            accelerator=accelerator,
            read=token_features if tokens else pre_logits,
        )
        for name, split in splits.items()
    }
    kept = {name: one for name, one in features.items() if one is not None}
    width = kept["train"].values_ND.shape[1] if kept else 0
    columns = token_columns(network, width) if tokens else {"pre-logits": slice(0, width)}
    return identity, kept, columns


def _figures(
    task: _Task,
    features: Mapping[str, Features],
    columns: Mapping[str, slice],
    *,
    shots: Sequence[int],
    seeds: int,
    linear: bool,
    knn: int | None,
) -> dict[str, Any]:
    """Everything that is computed from pre-logits."""
    source, read = task.source, columns["pre-logits"]
    features = {
        name: replace(one, values_ND=one.values_ND[:, read]) for name, one in features.items()
    }
    train, test = (
        (one.values_ND, one.labels_N) for one in (features["train"], features[task.split])
    )
    if task.drawn is not None:
        labels_N = source.splits["train"].labels
        values_ND = np.zeros((len(labels_N), train[0].shape[1]), dtype=np.float32)
        values_ND[task.drawn] = train[0]  # the other rows are never read, and take no memory
        train = values_ND, labels_N
    _check_counts(source, train[1], shots, knn)  # unreadable images may have been left out
    num_classes = len(source.class_names)
    protocol = {
        "features": "pre-logits",
        "width": int(train[0].shape[1]),
        "train_images": len(train[1]),
        "test_images": len(test[1]),
        "classes": num_classes,
        "l2": L2,
        "bias": BIAS,
    }
    votes = None
    if knn is not None:
        classes = neighbours(
            train, test[0], num_classes=num_classes, k=knn, temperature=_TEMPERATURE
        )
        weighted, plain = (float((predicted == test[1]).mean()) for predicted in classes)
        votes = {"k": knn, "temperature": _TEMPERATURE, "weighted": weighted, "plain": plain}
    return {
        "protocol": protocol,
        "shots": few_shot(train, test, num_classes=num_classes, shots=shots, seeds=seeds),
        "linear": _linear(task, features, logistic_regression) if linear else None,
        "linear_sgd": None,
        "knn": votes,
        "features": {
            name: {"images": len(one.labels_N), "cached": one.cached, "seconds": one.seconds}
            for name, one in features.items()
        },
    }


def _linear_sgd(
    task: _Task,
    features: Mapping[str, Features],
    columns: Mapping[str, slice],
    device: torch.device,
) -> dict[str, Any]:
    """Linear classifiers by SGD, on the tokens if there are any beside the pre-logits."""
    inputs = {name: part for name, part in columns.items() if name != "pre-logits"} or columns
    count = len(task.source.class_names)
    fit = partial(sgd_heads, columns=inputs, num_classes=count, device=device)
    return _linear(task, features, fit)


def _linear(
    task: _Task, features: Mapping[str, Features], fit: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """A linear classifier that is chosen on the source's val split, or on a part of train."""
    train, test, source = features["train"], features[task.split], task.source
    if task.split != "val" and "val" in features:
        val, places = features["val"], np.arange(len(train.labels_N))
        chosen_on, choose = "val", (val.values_ND, val.labels_N)
    else:
        whole = source.splits["train"]
        alone = Source(source.name, {"train": whole}, source.class_names, source.description)
        parts = split_train(alone, _VAL_FRACTION, task.seed).splits
        in_val = np.isin(train.places_N, places_of(parts["val"], whole))
        places = np.flatnonzero(~in_val)
        chosen_on, choose = f"{_VAL_FRACTION:.0%} of train", train.at(np.flatnonzero(in_val))
    pairs = ((one.values_ND, one.labels_N) for one in (train, test))
    fitted = fit(next(pairs), (places, choose), next(pairs))
    return {**fitted, "chosen_on": chosen_on, "val_images": len(choose[1])}
