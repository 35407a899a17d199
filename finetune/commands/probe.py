"""`finetune probe`: evaluate frozen features by few-shot accuracy, linear probing and kNN."""

# N images, D feature width, K classes

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

from finetune.commands.evaluate import check_split_name, warn_if_changed
from finetune.data.decisions import split_decisions
from finetune.data.from_recipe import open_data, open_full_data, resolve_data_section
from finetune.data.groups import group_indices
from finetune.data.leakage import find_leakage, find_repeated_images
from finetune.data.source import Source
from finetune.data.splits import hold_out_validation
from finetune.errors import CheckpointError, DataError, RecipeError, redact_urls
from finetune.evaluation.feature_extraction import (
    Features,
    feature_identity,
    load_or_compute_features,
    subset_indices,
)
from finetune.evaluation.learning_curve import format_gain, measure_learning_curve
from finetune.evaluation.linear_probe import (
    BIAS_FEATURE,
    L2_WEIGHT,
    cross_validate,
    draw_shots,
    evaluate_few_shot,
    predict_knn,
    probe_logistic_regression,
    probe_sgd,
)
from finetune.files import make_writable_folder, write_atomically
from finetune.log import logger
from finetune.model_checksums import json_sha256, weights_hashes
from finetune.models.build import build_model
from finetune.models.features import compute_pre_logits, token_feature_slices, token_features
from finetune.precision import autocast_dtype
from finetune.recipe.load import DataSection, RunSection
from finetune.run.environment import collect_environment
from finetune.run.integrity import load_json
from finetune.run.record import describe_split_decisions, load_run_recipe
from finetune.training.accelerator import (
    check_same_data_on_all_ranks,
    check_same_on_all_ranks,
    create_accelerator,
)
from finetune.training.compile import choose_kernels
from finetune.transforms.eval_transforms import build_pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DEFAULT_SHOTS",
    "format_probe",
    "parse_shots",
    "probe_model",
    "read_probe",
    "write_probe",
]

PROBE_FILE = "probe.json"
DEFAULT_SHOTS = (1, 5, 10, 25)
SPLITS = ("val", "test")
_KNN_TEMPERATURE = 0.07
_VAL_FRACTION = 0.1  # fraction of train to choose C on, if the source has no val split


def probe_model(
    model: str,
    *,
    data: str | None = None,
    split: str | None = None,
    shots: Sequence[int] = DEFAULT_SHOTS,
    seeds: int = 3,
    linear: bool = False,
    linear_sgd: bool = False,
    logreg: bool = False,
    folds: int | None = None,
    knn: int | None = None,
    learning_curve: bool = False,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Evaluate simple classifiers on a network's frozen features.

    Few-shot accuracy follows big_vision: the features are pre-logits, whitened with the statistics
    of the shots, and the classifier is a least-squares fit to targets of ±1. Features are float32
    on every device. All processes compute features; only rank 0 fits and evaluates classifiers.

    Args:
        model: run directory, model folder, Hub or timm name; the model needs no classifier.
        data: a source string; None uses the data that the run was trained on.
        split: the split to evaluate on, "test" or "val". If "val" is given but does not exist, it
            is held out from train, as in training. None uses an existing split: test, else val.
        shots: numbers of training images per class, one few-shot evaluation each.
        seeds: number of random draws of the shots, with seeds 0, 1, …
        linear: True to also fit logistic regression on all of train, with C chosen on validation.
        linear_sgd: True to also train linear classifiers with SGD, like DINOv2's evaluation, and
            report the best one on validation. The grid combines 13 learning rates with several
            features: class tokens with and without averaged patch tokens, or only pre-logits if the
            network has no such tokens.
        logreg: True to also fit logistic regression as DINOv2 does: on raw features, with the best
            of 45 values of C.
        folds: number of folds of a cross-validation of logistic regression on train, which keeps
            the groups of data.group together; None for no cross-validation.
        knn: number of neighbors of a kNN classifier to evaluate as well; None for no kNN.
        learning_curve: True to also measure accuracy against the number of training images.
        out: a folder for probe.json and learning_curve.svg.
    Returns: a dict with keys "model", "data", "split", "split_fingerprints" (of all images of train
        and of the evaluated split), "decisions" (see `split_decisions`, only if they have changed
        the split), "protocol", "shots" {n: {"accuracy", "std", "seeds"}},
        "linear", "linear_sgd", "logreg", "folds", "knn", "learning_curve" (the result of
        `measure_learning_curve`), "features", "machine". "std" is the sample standard deviation
        over seeds, None for one seed; "linear" to "learning_curve" are None unless requested. On
        ranks other than 0, "shots" is empty.
    Raises: RecipeError for wrong arguments; DataError for unsuitable data; SetupError if `out`
        cannot be written.
    """
    _check_arguments(shots, split)
    out_folder = None if out is None else Path(out)
    if out_folder is not None:
        make_writable_folder(out_folder, option="--out")
    task = _open_task(model, data, split)
    _check_image_counts(task.source, task.source.splits["train"].labels, shots, knn, folds)
    include_val = linear or linear_sgd or logreg
    if not include_val and knn is None and folds is None and not learning_curve:
        task = _limit_to_shots(task, max(shots), seeds)
    accelerator = create_accelerator(RunSection(precision="fp32", threads=task.threads))
    if accelerator.is_main_process:
        read = {name: task.source.splits[name] for name in ("train", task.split)}
        for leak in find_leakage(replace(task.source, splits=read)):
            logger.warning(leak)
        for copies in find_repeated_images(task.source.splits["train"]) if folds else ():
            logger.warning(f"{copies}; until then, cross-validated accuracies are too high")
    identity, features, columns = _extract_features(
        model, task, accelerator, include_val, linear_sgd
    )
    header = {
        "model": model,
        "data": redact_urls(task.section.source),
        "split": task.split,
        "split_fingerprints": {
            name: task.source.splits[name].fingerprint for name in ("train", task.split)
        },
        **split_decisions(task.source, task.split),
    }
    if not features:
        return {**header, "shots": {}}
    metrics = _compute_metrics(
        task,
        features,
        columns,
        shots=shots,
        num_seeds=seeds,
        linear=linear,
        logreg=logreg,
        folds=folds,
        knn=knn,
        learning_curve=learning_curve,
    )
    if linear_sgd:
        metrics["linear_sgd"] = _fit_linear_sgd(task, features, columns, accelerator.device)
    metrics["protocol"] |= {key: identity[key] for key in ("eval", "weights")}
    machine = collect_environment(accelerator.device, accelerator.num_processes)
    result = {**header, **metrics, "machine": machine}
    if out_folder is not None:
        write_probe(result, out_folder)
        if curve := result["learning_curve"]:
            from finetune.report.figure_style import to_svg
            from finetune.report.plots import plot_learning_curve  # imports matplotlib
            from finetune.report.run_data import SPLIT_NAMES

            svg = to_svg(plot_learning_curve(curve, split=SPLIT_NAMES[task.split]))
            write_atomically(out_folder / "learning_curve.svg", svg)
    return result


def write_probe(result: Mapping[str, Any], folder: Path) -> None:
    """Write the result of `probe_model` to probe.json, with its sha256."""
    content = json.loads(json.dumps(result, allow_nan=False))
    content["sha256"] = json_sha256(content)
    write_atomically(folder / PROBE_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_probe(folder: Path) -> dict[str, Any] | None:
    """Read the result of `probe_model` from probe.json; None if the file does not exist.

    Raises: CheckpointError if the file is damaged or was changed.
    """
    path = folder / PROBE_FILE
    if not path.exists():
        return None
    try:
        content = load_json(path)
        if content.pop("sha256", None) != json_sha256(content):
            raise ValueError("it was changed after it was written")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be used ({str(error)[:200]}); restore the file, or remove it and run "
            "the probe again",
            code="checkpoint.damaged",
        ) from None
    result: dict[str, Any] = content
    result["shots"] = {int(count): row for count, row in result["shots"].items()}
    return result


def format_probe(result: Mapping[str, Any]) -> str:
    """Format the result of `probe_model`; empty on ranks other than 0."""
    if not result["shots"]:
        return ""
    protocol, features = result["protocol"], result["features"]
    facts = [f"{protocol['test_images']} images", f"{protocol['width']} features"]
    facts += filter(None, [describe_split_decisions(result)])
    lines = [f"{result['split']}: {', '.join(facts)}"]
    lines += ["", "shots  accuracy     std  per seed"]
    for count, row in result["shots"].items():
        std = "     –" if row["std"] is None else f"{row['std']:.4f}"
        per_seed = " ".join(f"{accuracy:.4f}" for accuracy in row["seeds"])
        lines.append(f"{count:5}    {row['accuracy']:.4f}  {std}  {per_seed}")
    for key, name in (("linear", "logistic regression"), ("logreg", "DINOv2's protocol")):
        if linear := result.get(key):
            edge_note = "; the best C is at the edge of the grid" if linear["at_edge"] else ""
            convergence_note = "" if linear["converged"] else "; stopped before it converged"
            lines.append(
                f"linear ({name}, C = {linear['c']:g} chosen on {linear['chosen_on']}): "
                f"{linear['accuracy']:.4f}{edge_note}{convergence_note}"
            )
    if folds := result.get("folds"):
        lines.append(
            f"cross-validation on train (logistic regression, C = {folds['c']:g}): "
            f"{folds['accuracy']:.4f} ± {folds['std']:.4f} over {len(folds['accuracies'])} folds"
        )
    if sgd := result.get("linear_sgd"):
        edge_note = "; the best rate is at the edge of the grid" if sgd["at_edge"] else ""
        lines.append(
            f"linear (SGD, learning rate {sgd['lr']:g} on {sgd['features']}; the best of "
            f"{len(sgd['grid'])} on {sgd['chosen_on']}): {sgd['accuracy']:.4f}{edge_note}"
        )
    if knn := result.get("knn"):
        lines.append(
            f"{knn['k']} nearest neighbors: {knn['weighted']:.4f} weighted with temperature "
            f"{knn['temperature']:g}, {knn['plain']:.4f} unweighted"
        )
    if curve := result.get("learning_curve"):
        lines += ["", "training images  accuracy"]
        for size, accuracies in zip(curve["sizes"], curve["accuracies"], strict=True):
            lines.append(f"{size:15,}    {sum(accuracies) / len(accuracies):.4f}")
        lines.append(format_gain(curve))
    times = (
        f"{name} {'from the cache' if info['cached'] else 'computed'} in {info['seconds']:.1f} s"
        for name, info in features.items()
    )
    lines += ["", f"features: {', '.join(times)}"]
    return "\n".join(lines)


def parse_shots(text: str) -> tuple[int, ...]:
    """Parse a list such as "1,5,10". Raises: RecipeError if it is not a list of numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise RecipeError(
            f"--shots: got '{text[:60]}'; expected numbers such as 1,5,10,25",
            code="recipe.wrong_value",
        )
    return tuple(int(part) for part in parts)


# --- arguments and data --------------------------------------------------------------------------


def _check_arguments(shots: Sequence[int], split: str | None) -> None:
    if not shots or min(shots) < 1 or len(set(shots)) < len(shots):
        listed = ",".join(map(str, shots))
        raise RecipeError(
            f"--shots: got '{listed}'; expected different numbers of 1 or more",
            code="recipe.wrong_value",
        )
    check_split_name(split, SPLITS)


@dataclass(frozen=True)
class _ProbeTask:
    """The data and settings of a probe.

    Attributes:
        split: name of the split to evaluate on.
        seed: seed of the train/val split.
        threads: number of torch threads on a CPU; None for torch's default.
        shot_indices: indices of the train images whose features are needed; None needs all.
    """

    source: Source
    split: str
    section: DataSection
    seed: int
    threads: int | None
    shot_indices: NDArray[np.int64] | None = None


def _open_task(model: str, data: str | None, split: str | None) -> _ProbeTask:
    """Open the data (None: the run's own, split as in training) and choose the evaluation split."""
    recipe = load_run_recipe(model)
    section, seed = resolve_data_section(model, recipe, data)
    source = open_data(section, seed) if split == "val" else open_full_data(section, seed)
    if section.task == "multilabel":
        raise DataError(
            f"{source.name}: this data is multi-label (data.task), but a probe needs one label per "
            "image; evaluate the model with: finetune eval",
            code="data.wrong_labels",
        )
    have = ", ".join(source.splits)
    if "train" not in source.splits:
        raise DataError(
            f"{source.name}: has no train split to draw shots from, only {have}; add a train split",
            code="data.no_split",
        )
    if split is None:
        split = next((name for name in ("test", "val") if name in source.splits), None)
    if split is None or split not in source.splits:
        missing = "neither test nor val" if split is None else f"no split '{split}'"
        raise DataError(
            f"{source.name}: has {missing} to evaluate on, only {have}; add a split, or evaluate "
            "on a part of train with --split val",
            code="data.no_split",
        )
    if recipe is not None and redact_urls(section.source) == recipe.data.source:
        own = open_data(section, seed)
        for name in own.splits:
            warn_if_changed(model, own, name)
    return _ProbeTask(source, split, section, seed, recipe.run.threads if recipe else None)


def _check_image_counts(
    source: Source,
    labels_N: NDArray[np.int64],
    shots: Sequence[int],
    knn: int | None,
    folds: int | None,
) -> None:
    """Raise if a class has fewer images than shots or folds, or the train split is too small.

    Classes without any images in train are ignored.
    """
    counts = np.bincount(labels_N, minlength=len(source.class_names))
    for option, needed in (("--shots", max(shots)), ("--folds", folds or 0)):
        rare_classes = [k for k in np.flatnonzero(counts).tolist() if counts[k] < needed]
        if rare_classes:
            names = [f"'{source.class_names[k]}' has {counts[k]}" for k in rare_classes[:5]]
            raise DataError(
                f"{source.name}: {option} {needed} needs at least that many images of each class "
                f"in train, but {len(rare_classes)} of {len(counts)} classes have fewer: "
                f"{', '.join(names)}{'…' if rare_classes[5:] else ''}; use fewer {option}, or add "
                "images",
                code="data.too_few_images",
            )
    if np.count_nonzero(counts) < 2:
        raise DataError(
            f"{source.name}: only one class has images in train; add images of another class",
            code="data.one_class",
        )
    if knn is not None and knn > len(labels_N):
        raise DataError(
            f"{source.name}: {knn} neighbors were requested, but train has {len(labels_N)} "
            "images; use a smaller --knn",
            code="data.too_few_images",
        )


# --- features and metrics ------------------------------------------------------------------------


def _limit_to_shots(task: _ProbeTask, max_shots: int, num_seeds: int) -> _ProbeTask:
    """Limit the task to the images that at least one seed draws as a shot."""
    # quarantine may exclude images, which changes what the seeds draw
    if task.section.unreadable == "quarantine":
        return task
    labels_N, num_classes = task.source.splits["train"].labels, len(task.source.class_names)
    draws = [
        draw_shots(labels_N, num_classes, shots=max_shots, seed=seed) for seed in range(num_seeds)
    ]
    return replace(task, shot_indices=np.unique(np.concatenate(draws)))


def _extract_features(
    model: str, task: _ProbeTask, accelerator: Accelerator, include_val: bool, use_tokens: bool
) -> tuple[dict[str, Any], dict[str, Features], dict[str, slice]]:
    """Compute features on all ranks.

    Returns: the result of `feature_identity`, the features by split, and the columns of each kind
        of feature. The first two are empty on ranks other than 0.
    """
    built = build_model(model)
    identity = feature_identity(built, task.section.eval) if accelerator.is_main_process else {}
    pipeline = build_pipeline(built.preprocessing, task.section.eval)
    network = built.model.to(accelerator.device, torch.float32)
    if not use_tokens:  # fast kernels would compute only the tokens that the classifier reads
        choose_kernels(network, device=accelerator.device, dtype=autocast_dtype(accelerator))
    split_names = dict.fromkeys(["train", task.split])
    if include_val and "val" in task.source.splits:
        split_names["val"] = None
    if accelerator.num_processes > 1:
        check_same_on_all_ranks({"weights": weights_hashes(built.provenance)})
        check_same_data_on_all_ranks(accelerator, task.source, split_names)
    splits = {name: task.source.splits[name] for name in split_names}
    if task.shot_indices is not None:
        splits["train"] = splits["train"].subset(task.shot_indices)
    features = {
        name: load_or_compute_features(
            split,
            model=network,
            pipeline=pipeline,
            identity=identity,
            data_config=task.section,
            accelerator=accelerator,
            extract=token_features if use_tokens else compute_pre_logits,
        )
        for name, split in splits.items()
    }
    features_on_main = {
        name: split_result for name, split_result in features.items() if split_result is not None
    }
    width = features_on_main["train"].values_ND.shape[1] if features_on_main else 0
    columns = (
        token_feature_slices(network, width) if use_tokens else {"pre-logits": slice(0, width)}
    )
    return identity, features_on_main, columns


def _compute_metrics(
    task: _ProbeTask,
    features: Mapping[str, Features],
    columns: Mapping[str, slice],
    *,
    shots: Sequence[int],
    num_seeds: int,
    linear: bool,
    logreg: bool,
    folds: int | None,
    knn: int | None,
    learning_curve: bool,
) -> dict[str, Any]:
    """Compute all metrics on pre-logits: few-shot, logistic regression and kNN."""
    source, pre_logits_columns = task.source, columns["pre-logits"]
    features = {
        name: replace(split_features, values_ND=split_features.values_ND[:, pre_logits_columns])
        for name, split_features in features.items()
    }
    train, test = (
        (split_features.values_ND, split_features.labels_N)
        for split_features in (features["train"], features[task.split])
    )
    if task.shot_indices is not None:
        labels_N = source.splits["train"].labels
        values_ND = np.zeros((len(labels_N), train[0].shape[1]), dtype=np.float32)
        # the other rows are never touched, so the OS allocates no memory for them
        values_ND[task.shot_indices] = train[0]
        train = values_ND, labels_N
    # check again, because unreadable images may have been excluded
    _check_image_counts(source, train[1], shots, knn, folds)
    num_classes = len(source.class_names)
    protocol = {
        "features": "pre-logits",
        "width": int(train[0].shape[1]),
        "train_images": len(train[1]),
        "test_images": len(test[1]),
        "classes": num_classes,
        "l2": L2_WEIGHT,
        "bias": BIAS_FEATURE,
    }
    knn_result = None
    if knn is not None:
        predictions = predict_knn(
            train, test[0], num_classes=num_classes, k=knn, temperature=_KNN_TEMPERATURE
        )
        weighted, plain = (float((predicted == test[1]).mean()) for predicted in predictions)
        knn_result = {
            "k": knn,
            "temperature": _KNN_TEMPERATURE,
            "weighted": weighted,
            "plain": plain,
        }
    groups_N = None
    if (groups := source.splits["train"].groups) is not None:
        groups_N = group_indices(groups)[features["train"].indices_N]
    return {
        "protocol": protocol,
        "shots": evaluate_few_shot(
            train, test, num_classes=num_classes, shots=shots, num_seeds=num_seeds
        ),
        "linear": _fit_linear(task, features, probe_logistic_regression) if linear else None,
        "linear_sgd": None,
        "logreg": _fit_linear(task, features, partial(probe_logistic_regression, raw_features=True))
        if logreg
        else None,
        "folds": cross_validate(*train, folds=folds, groups_N=groups_N) if folds else None,
        "knn": knn_result,
        "learning_curve": measure_learning_curve(train, test, num_classes=num_classes)
        if learning_curve
        else None,
        "features": {
            name: {
                "images": len(split_features.labels_N),
                "cached": split_features.is_cached,
                "seconds": split_features.seconds,
            }
            for name, split_features in features.items()
        },
    }


def _fit_linear_sgd(
    task: _ProbeTask,
    features: Mapping[str, Features],
    columns: Mapping[str, slice],
    device: torch.device,
) -> dict[str, Any]:
    """Fit linear classifiers with SGD, on token features if available, else on pre-logits."""
    feature_columns = {
        name: part for name, part in columns.items() if name != "pre-logits"
    } or columns
    num_classes = len(task.source.class_names)
    fit = partial(probe_sgd, feature_slices=feature_columns, num_classes=num_classes, device=device)
    return _fit_linear(task, features, fit)


def _fit_linear(
    task: _ProbeTask, features: Mapping[str, Features], fit: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Fit a linear classifier, with its hyperparameters selected on val, or on a part of train.

    Args:
        fit: `probe_logistic_regression`, or `probe_sgd` with its keyword arguments bound.
    """
    train, test, source = features["train"], features[task.split], task.source
    if task.split != "val" and "val" in features:
        val, train_indices = features["val"], np.arange(len(train.labels_N))
        chosen_on, val_data = "val", (val.values_ND, val.labels_N)
    else:
        train_split = source.splits["train"]
        train_only = Source(
            source.name, {"train": train_split}, source.class_names, source.description
        )
        held_out = hold_out_validation(train_only, _VAL_FRACTION, task.seed).splits
        in_val = np.isin(train.indices_N, subset_indices(held_out["val"], train_split))
        train_indices = np.flatnonzero(~in_val)
        chosen_on, val_data = f"{_VAL_FRACTION:.0%} of train", train.select(np.flatnonzero(in_val))
    result = fit(
        (train.values_ND, train.labels_N),
        (train_indices, val_data),
        (test.values_ND, test.labels_N),
    )
    return {**result, "chosen_on": chosen_on, "val_images": len(val_data[1])}
