"""Sanity checks: of the settings before training, and of the results after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from timm.optim import get_optimizer_info

from finetune.data.class_balance import describe_imbalance
from finetune.data.leakage import find_repeated_images
from finetune.errors import DivergedError
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES, wilson_interval
from finetune.evaluation.multilabel import chance_mean_average_precision
from finetune.formatting import format_percent, pluralize
from finetune.recipe.schema import OptimSection, Recipe
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup

__all__ = ["MIN_USEFUL_STEPS", "check_results", "check_setup", "raise_if_diverged"]

MIN_USEFUL_STEPS = 50  # shorter runs hardly change the weights
_MAX_FIRST_WEIGHTS_SHARE = 0.1  # share of the first step's weights in the EMA, at the end
_DIVERGENCE_WARNING_FACTOR = 2.0  # times the chance loss; a network that learns stays below
_DIVERGENCE_ERROR_FACTOR = 10.0  # times the chance loss


def check_setup(setup: TrainingSetup) -> list[str]:
    """Return a warning, with advice, for each setting that is ignored or too small.

    Covers ignored recipe keys, warm-up that takes the whole run, too few steps, an EMA too slow for
    the run, repeated training images, small validation and test splits, and rare classes.
    """
    lines = [*_check_ignored_keys(setup.recipe), *_check_warmup(setup), *_check_num_steps(setup)]
    lines += _check_ema(setup, setup.num_steps)
    lines += find_repeated_images(setup.source.splits["train"])
    for name in ("val", "test"):
        split = setup.source.splits.get(name)
        if split is not None and len(split) < TOO_FEW_IMAGES:
            lines.append(_small_split_warning(setup, name, len(split)))
    return [*lines, *_check_class_balance(setup)]


def _check_ignored_keys(recipe: Recipe) -> list[str]:
    """Warn about `optim` keys that have no effect.

    This is not an error, so that a user who sets `optim.schedule=constant` can keep the keys that
    it disables.
    """
    optim, default = recipe.optim, OptimSection.model_fields
    has_momentum = get_optimizer_info(optim.name).has_momentum
    changed = {key for key, field in default.items() if getattr(optim, key) != field.default}
    conditions = [
        ("warmup_lr", not (optim.warmup_steps or optim.warmup_epochs), "the run has no warm-up"),
        ("min_lr", optim.schedule == "constant", "the learning rate is constant"),
        ("step_factor", optim.schedule != "step", f"the schedule is {optim.schedule}"),
        ("decay_ratio", optim.schedule != "wsd", f"the schedule is {optim.schedule}"),
        ("layer_decay", recipe.model.freeze == "backbone", "only the head is trained"),
        ("momentum", not has_momentum, f"{optim.name} has none"),
        ("ema_warmup", not optim.ema_decay, "the run has no EMA"),
    ]
    return [
        f"optim.{key}: has no effect, because {reason}"
        for key, is_ignored, reason in conditions
        if is_ignored and key in changed
    ]


def _check_warmup(setup: TrainingSetup) -> list[str]:
    optim, steps = setup.recipe.optim, setup.num_steps
    if setup.warmup_steps < steps:
        return []
    key = "warmup_steps" if optim.warmup_epochs is None else "warmup_epochs"
    tenth = steps // 10
    shorter = f"optim.warmup_steps={tenth}"
    if optim.warmup_epochs is not None:
        shorter = f"optim.warmup_epochs={tenth / setup.steps_per_epoch:.3g}"
    return [
        f"optim.{key}: all {pluralize(steps, 'step')} are warm-up "
        f"({setup.requested_warmup_steps:,} were requested), so the learning rate only rises; "
        f"shorten it, for example {shorter}, unless this is intended"
    ]


def _check_num_steps(setup: TrainingSetup) -> list[str]:
    optim, batch_size = setup.recipe.optim, setup.recipe.data.batch_size
    if setup.num_steps >= MIN_USEFUL_STEPS:
        return []
    if optim.steps is not None:
        advice = f"raise optim.steps to {MIN_USEFUL_STEPS} or more"
    else:
        epochs = math.ceil(MIN_USEFUL_STEPS / setup.steps_per_epoch)
        advice = f"lower data.batch_size, or set optim.epochs={epochs} or more"
    return [
        f"the run has only {pluralize(setup.num_steps, 'step')} ({setup.num_samples:,} training "
        f"images in batches of {batch_size}), too few to learn much; {advice}"
    ]


def _check_ema(setup: TrainingSetup, num_steps: int) -> list[str]:
    """Warn if the EMA after some steps still has much of the weights of the first one."""
    optim = setup.recipe.optim
    if not optim.ema_decay or optim.ema_warmup:
        return []
    share = optim.ema_decay ** (num_steps - 1)  # the first step sets the EMA to its weights
    if share <= _MAX_FIRST_WEIGHTS_SHARE:
        return []
    steps = pluralize(num_steps, "step")
    return [
        f"optim.ema_decay: {optim.ema_decay:g} is too slow for {steps}: the weights of the first "
        f"step have a share of {share:.0%} in the average, which is evaluated and saved; set "
        "optim.ema_warmup=true, or lower optim.ema_decay"
    ]


def _small_split_warning(setup: TrainingSetup, name: str, num_images: int) -> str:
    """Return the warning for a split that is too small to measure accuracy."""
    split_name = {"val": "validation", "test": "test"}[name]
    advice = "add images"
    splits, fraction = setup.source.splits, TOO_FEW_IMAGES / (setup.num_samples + num_images)
    if name == "val" and splits["val"].images is splits["train"].images and fraction <= 0.5:
        advice += f", or set data.val_fraction={math.ceil(100 * fraction) / 100:g} or more"
    metric = "a metric" if setup.is_multilabel else "an accuracy"
    return (
        f"{pluralize(num_images, f'{split_name} image')}: {metric} on so few is mostly noise; "
        f"{advice}"
    )


def _check_class_balance(setup: TrainingSetup) -> list[str]:
    imbalance = describe_imbalance(setup.class_counts, setup.source.class_names)
    if not imbalance:
        return []
    if setup.is_multilabel:
        return [f"{imbalance}: F1 and average precision of rare classes are based on few images"]
    optim, sampling = setup.recipe.optim, setup.recipe.data.sampling
    advice = "add images of them, set optim.class_weights=balanced, and "
    if sampling or optim.class_weights or optim.focal_gamma or optim.logit_adjustment:
        advice = ""
    return [
        f"{imbalance}: accuracy hardly reflects the rare classes; {advice}compare runs by balanced "
        "accuracy"
    ]


def check_results(
    setup: TrainingSetup, results: dict[str, Any], history: Sequence[dict[str, Any]]
) -> list[str]:
    """Return warnings if the run has diverged, is no better than chance, or has too slow an EMA.

    Runs of fewer than MIN_USEFUL_STEPS steps are not expected to beat chance.

    Args:
        setup: the training setup.
        results: the content of results.json so far.
        history: the lines of metrics.jsonl.
    """
    chance_loss = _chance_loss(setup)
    train_losses = _logged_losses(history, "train")
    final_loss = _final_loss(setup, results, history)
    advice = "lower optim.lr or set optim.clip_norm"
    chance_advice = "try another optim.lr, train longer, or check the labels"
    warnings = _check_ema(setup, results["best_step"])  # a run may stop early
    if warnings:
        chance_advice = "set optim.ema_warmup=true, because the EMA is too slow for the run"
    # An overconfident network has a high validation loss as well, but not a high training loss.
    if final_loss > _DIVERGENCE_WARNING_FACTOR * chance_loss and (
        not train_losses or train_losses[-1] > chance_loss
    ):
        warnings.append(
            f"the final loss, {_format_loss(final_loss)}, is far above that of random guessing, "
            f"{chance_loss:.2f}: training has diverged; {advice}"
        )
    elif results["steps"] >= MIN_USEFUL_STEPS and (
        evidence := _describe_chance_level(results, setup.num_classes)
    ):
        warnings.append(f"{evidence}, no better than guessing; {chance_advice}")
    return warnings


def raise_if_diverged(run: RunDir, setup: TrainingSetup, results: dict[str, Any]) -> None:
    """Raise DivergedError if the loss has diverged; call it after everything is written."""
    history = run.read_metrics()
    chance_loss, optim = _chance_loss(setup), setup.recipe.optim
    train_losses, val_losses = _logged_losses(history, "train"), _logged_losses(history, "val")
    final_loss = _final_loss(setup, results, history)
    # A head of zeros starts at the chance loss; another head may start anywhere and improve.
    initial_loss = (
        chance_loss if setup.recipe.model.head_init == "zeros" else (val_losses or [chance_loss])[0]
    )
    if final_loss > max(_DIVERGENCE_ERROR_FACTOR * chance_loss, initial_loss) and (
        not train_losses or train_losses[-1] > chance_loss
    ):
        raise DivergedError(
            f"{run.path}: training has diverged: the final loss is {_format_loss(final_loss)}, "
            f"while random guessing gives {chance_loss:.2f}; lower optim.lr (it is {optim.lr:g}) "
            f"or set optim.clip_norm, and choose another --out. This run directory keeps the "
            f"weights of step {results['best_step']}, the results and all checkpoints.",
            code="diverged.loss",
        )


def _chance_loss(setup: TrainingSetup) -> float:
    """Return the loss of uniform predictions: ln K, or ln 2 for multi-label."""
    return math.log(2 if setup.is_multilabel else setup.num_classes)


def _logged_losses(history: Sequence[dict[str, Any]], split: str) -> list[float]:
    """Return the logged losses of a split, in order, without skipped steps."""
    return [line["loss"] for line in history if line["split"] == split and line["loss"] is not None]


def _final_loss(
    setup: TrainingSetup, results: dict[str, Any], history: Sequence[dict[str, Any]]
) -> float:
    """Return the last validation loss, or else the test loss, or else the last training loss.

    Without a validation or test loss, returns 0 if class weights or a teacher change the scale of
    the training loss.
    """
    if val_losses := _logged_losses(history, "val"):
        return val_losses[-1]
    if "test" in results:
        return float(results["test"]["loss"])
    if setup.recipe.distill or setup.recipe.optim.class_weights not in (None, "balanced"):
        return 0.0
    return (_logged_losses(history, "train") or [0.0])[-1]


def _describe_chance_level(results: dict[str, Any], num_classes: int) -> str:
    """Describe an accuracy or mAP that could be due to chance; return "" if it could not."""
    split = "test" if "test" in results else "val"
    metrics = results.get(split)
    if not metrics or metrics["examples"] < TOO_FEW_IMAGES:
        return ""
    examples, classes = metrics["examples"], metrics["per_class"]
    if "map" in metrics:
        mean, std = chance_mean_average_precision([row["support"] for row in classes], examples)
        if metrics["map"] > mean + 2 * std:
            return ""
        return (
            f"the mean average precision on the {examples:,} images of {split} is "
            f"{format_percent(metrics['map'])} (random ranking: {format_percent(mean)})"
        )
    top1 = metrics["top1"]
    if sum(row["support"] > 0 for row in classes) < 2:
        return ""
    if sum(row["precision"] is not None for row in classes) == 1:  # None: was never predicted
        return f"the network predicts the same class for all {examples:,} images of {split}"
    if wilson_interval(round(top1 * examples), examples)[0] <= 1 / num_classes:
        return f"the accuracy on the {examples:,} images of {split} is {format_percent(top1)}"
    return ""


def _format_loss(loss: float) -> str:
    return f"{loss:,.0f}" if loss >= 100 else f"{loss:.2f}"
