"""The last look at a run: has it learned anything, or has its loss exploded?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from finetune.errors import DivergedError
from finetune.evaluation.intervals import TOO_FEW_IMAGES, wilson
from finetune.evaluation.multilabel import chance_map
from finetune.run.directory import RunDir
from finetune.text import percent
from finetune.training.banner import FEW_STEPS
from finetune.training.setup import TrainingSetup

__all__ = ["refuse_exploded", "warnings_of"]

_FAR_ABOVE = 2.0  # times the loss of an even guess: a network that learns is never there
_EXPLODED = 10.0  # times the same


def warnings_of(
    setup: TrainingSetup, results: dict[str, Any], history: Sequence[dict[str, Any]]
) -> list[str]:
    """Return a line for each sign that the run has not learned.

    A run of fewer than FEW_STEPS steps is not expected to be better than chance.

    Args:
        results: the content of results.json so far.
        history: the lines of metrics.jsonl.
    """
    guess = _guess(setup)
    train, final = _losses(history, "train"), _final_loss(setup, results, history)
    advice = "lower optim.lr or set optim.clip_norm"
    lines = []
    # An overconfident network has a high validation loss, too, but not a high training loss.
    if final > _FAR_ABOVE * guess and (not train or train[-1] > guess):
        lines.append(
            f"the loss at the end, {_shown(final)}, is far above the {guess:.2f} of guessing: "
            f"training has diverged; {advice}"
        )
    elif results["steps"] >= FEW_STEPS and (sign := _sign_of_chance(results, setup.num_classes)):
        lines.append(
            f"{sign}, no better than guessing; try another optim.lr, train longer, or check the "
            "labels"
        )
    return lines


def refuse_exploded(run: RunDir, setup: TrainingSetup, results: dict[str, Any]) -> None:
    """Raise DivergedError if the loss has exploded; everything of the run is written by then."""
    history = run.history()
    guess, optim = _guess(setup), setup.recipe.optim
    train, validated = _losses(history, "train"), _losses(history, "val")
    final = _final_loss(setup, results, history)
    # A head of zeros begins at an even guess; another one may begin anywhere, and come down.
    started = guess if setup.recipe.model.head_init == "zeros" else (validated or [guess])[0]
    if final > max(_EXPLODED * guess, started) and (not train or train[-1] > guess):
        raise DivergedError(
            f"{run.path}: training has diverged: the loss ended at {_shown(final)}, and guessing "
            f"has {guess:.2f}; lower optim.lr (it is {optim.lr:g}) or set optim.clip_norm, and "
            f"choose another --out. The weights of step {results['best_step']}, the figures and "
            "all checkpoints are kept here.",
            code="diverged.loss",
        )


def _guess(setup: TrainingSetup) -> float:
    """The loss of an even guess: ln K, or ln 2 where each class is said or not."""
    return math.log(2 if setup.multilabel else setup.num_classes)


def _losses(history: Sequence[dict[str, Any]], split: str) -> list[float]:
    """The losses of a split in the order of the log, without those of skipped steps."""
    return [line["loss"] for line in history if line["split"] == split and line["loss"] is not None]


def _final_loss(
    setup: TrainingSetup, results: dict[str, Any], history: Sequence[dict[str, Any]]
) -> float:
    """The validation loss after the last step; without validation, that of test, or training.

    That of training is 0 where weights of the recipe's, or a teacher, give it another scale.
    """
    if validated := _losses(history, "val"):
        return validated[-1]
    if "test" in results:
        return float(results["test"]["loss"])
    if setup.recipe.distill or setup.recipe.optim.class_weights not in (None, "balanced"):
        return 0.0
    return (_losses(history, "train") or [0.0])[-1]


def _sign_of_chance(results: dict[str, Any], num_classes: int) -> str:
    """The words for an accuracy that chance may have brought; empty if there is none."""
    split = "test" if "test" in results else "val"
    metrics = results.get(split)
    if not metrics or metrics["examples"] < TOO_FEW_IMAGES:
        return ""
    if "map" in metrics:
        return _sign_of_random_order(metrics, split)
    top1, examples = metrics["top1"], metrics["examples"]
    classes = metrics["per_class"]
    if sum(row["support"] > 0 for row in classes) < 2:
        return ""
    if sum(row["precision"] is not None for row in classes) == 1:  # None: was never predicted
        return f"all {examples:,} images of {split} are given the same class"
    if wilson(round(top1 * examples), examples)[0] <= 1 / num_classes:
        return f"the accuracy on the {examples:,} images of {split} is {percent(top1)}"
    return ""


def _sign_of_random_order(metrics: dict[str, Any], split: str) -> str:
    """The same for the mean average precision of several labels an image."""
    examples = metrics["examples"]
    mean, std = chance_map([row["support"] for row in metrics["per_class"]], examples)
    if metrics["map"] > mean + 2 * std:
        return ""
    words = f"the mean average precision on the {examples:,} images of {split}"
    return f"{words} is {percent(metrics['map'])} and that of a random order {percent(mean)}"


def _shown(loss: float) -> str:
    return f"{loss:,.0f}" if loss >= 100 else f"{loss:.2f}"
