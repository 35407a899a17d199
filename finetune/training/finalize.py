"""The end of a run: the best weights measured and published, the test split read once, the report.

model/ is written before the test split is read, so an error there cannot lose it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.console import say
from finetune.data.feature_loader import AnyLoader
from finetune.data.source import Split
from finetune.errors import FinetuneError
from finetune.evaluation.claims import answer
from finetune.evaluation.evaluate import NUM_MISTAKES, Examination
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD
from finetune.files import write_atomically
from finetune.models.adapter import save_adapter
from finetune.models.saved import save_model
from finetune.publish.artifacts import base_of, refresh, write_evidence
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import dtype_of
from finetune.run.record import read_record
from finetune.training.launch import on_main
from finetune.training.trainer_state import TrainerState
from finetune.training.training_images import write_augmented
from finetune.training.verdict import refuse_exploded, warnings_of

__all__ = ["answer_anew", "can_keep", "finish", "validation"]

_MOST_KEPT = 1 << 26  # logits of validation that are kept while training goes on: 256 MiB


def can_keep(trainer: TrainerState, val_loader: AnyLoader) -> bool:
    """True if the figures of a validation can be those of the published weights.

    With an adapter they are not: it is merged, and rounded, for publication.
    """
    if trainer.recipe.model.adapter is not None:
        return False
    return len(val_loader.labels) * val_loader.num_classes <= _MOST_KEPT


def validation(
    trainer: TrainerState, val_loader: AnyLoader, *, is_last: bool = True
) -> Examination:
    """Make an examination of the validation split.

    Args:
        is_last: ask for what the end of the run needs, too: the temperature, and the mistakes if
            there is no test split.
    """
    has_test = "test" in trainer.setup.source.splits
    num_mistakes = NUM_MISTAKES if is_last and not has_test else 0
    return Examination(val_loader, trainer.accelerator, fit=is_last, num_mistakes=num_mistakes)


def finish(
    trainer: TrainerState,
    train_loader: AnyLoader,
    val_loader: AnyLoader | None,
    validated: tuple[int, Examination] | None = None,
) -> dict[str, Any]:
    """Measure the best weights, read the test split once, and write results.json and model/.

    Args:
        trainer, train_loader: after the last step; the report shows some training images.
        val_loader: None if the run has no validation split; the temperature is fitted on it.
        validated: a step and its `validation`, which is not made again if the step is the best.
    Returns: the content of results.json.
    Raises: DataError if a test image cannot be read; model/ is published by then. DivergedError if
        the loss has exploded; everything is written by then.
    """
    setup, run, accelerator = trainer.setup, trainer.run, trainer.accelerator
    batch_size = trainer.recipe.data.eval_batch_size
    best_step, weights = trainer.load_best()
    results: dict[str, Any] = {}
    splits = setup.source.splits
    if val_loader is not None:
        if validated is None or validated[0] != best_step:
            validated = best_step, validation(trainer, val_loader)
            validated[1].measure(trainer.evaluated(), batch_size=batch_size)
        measured = validated[1].report()
        fitted = "thresholds" if setup.multilabel else "temperature"
        results |= {"val": measured, fitted: measured.pop(fitted)}
        _number_by(splits["val"], val_loader.store.split, measured.get("mistakes", []))
    results |= {"best_step": best_step, "steps": trainer.counters.step}
    results |= {"skipped_steps": trainer.counters.skipped}
    if trainer.main:
        _publish(trainer, results, weights)
    if (test := splits.get("test")) is not None:
        # anew: its images may have been mended since its fingerprint was taken
        test_loader = trainer.loader(dataclasses.replace(test), train=False)
        examination = Examination(
            test_loader,
            accelerator,
            temperature=results.get("temperature"),
            thresholds=results.get("thresholds") or [DEFAULT_THRESHOLD] * setup.num_classes,
            num_mistakes=NUM_MISTAKES,
        )
        results["test"] = examination.of(trainer.evaluated(), batch_size=batch_size)
        _number_by(test, test_loader.store.split, results["test"]["mistakes"])
    if trainer.main:
        history = run.history()
        lines = (line for line in reversed(history) if line["split"] == "train")
        results["train"] = next(lines, {})
        claims = [claim.model_dump(mode="json") for claim in trainer.recipe.claims]
        results["claims"] = answer(claims, history, results, setup.steps_per_epoch)
        results["warnings"] = warnings_of(setup, results, history)
        run.write_json("results.json", results)
        refresh(run, repository=trainer.recipe.run.push_to)
        write_augmented(run, setup, train_loader.store, dtype_of(accelerator))
        _report(run.path, splits.get("val") if test is None else test, setup.notice)
    accelerator.wait_for_everyone()
    on_main(accelerator, lambda: refuse_exploded(run, setup, results))
    return results


def answer_anew(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """The results of a finished run, with answers to the claims that its recipe has by now.

    Where they are others than before, recipe.yaml, results.json, the card and the report follow.
    """
    results = run.read_json("results.json") or {}
    claims = [claim.model_dump(mode="json") for claim in recipe.claims]
    before = results.get("claims") or []
    pairs = zip(before, claims, strict=False)
    same = [{key: row.get(key) for key in claim} for row, claim in pairs]
    if len(before) == len(claims) and same == claims:
        return results
    steps_per_epoch = read_record(run).get("plan", {}).get("steps_per_epoch", 1.0)
    results["claims"] = answer(claims, run.history(), results, steps_per_epoch)
    write_atomically(run.path / "recipe.yaml", recipe.to_yaml())
    run.write_json("results.json", results)
    refresh(run)
    _report(run.path, None, say)
    return results


def _publish(
    trainer: TrainerState, results: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    """Write model/, with the evidence that is known so far."""
    setup, run = trainer.setup, trainer.run

    def write(folder: Path) -> None:
        save_model(
            folder,
            setup.built,
            weights,
            class_names=setup.source.class_names,
            preprocessing=setup.preprocessing,
            temperature=results.get("temperature"),
            multilabel=setup.multilabel,
            thresholds=results.get("thresholds"),
        )
        if trainer.recipe.model.adapter is not None:
            save_adapter(folder / "adapter", trainer.evaluated(), base=base_of(run))
        repository = trainer.recipe.run.push_to
        write_evidence(folder, run, results, repository=repository, pictures=False)

    run.publish_model(write, needed=sum(tensor.nbytes for tensor in weights.values()))


def _number_by(whole: Split, kept: Split, mistakes: list[dict[str, Any]]) -> None:
    """Number the mistakes by the whole split, also where images were left out of it."""
    if len(kept) == len(whole) or kept.rows is None:
        return
    rows = whole.item_rows
    for one in mistakes:
        one["index"] = int(np.flatnonzero(rows == kept.rows[one["index"]])[0])


def _report(run: Path, split: Split | None, notice: Callable[[str], None]) -> None:
    """Write report.html; a page that cannot be written is no reason to lose the run."""
    from finetune.report.page import write_report  # brings matplotlib

    try:
        write_report(run, split=split)
    except FinetuneError as error:
        notice(f"report.html is left out: {error}")
