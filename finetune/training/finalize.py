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
from finetune.evaluation.evaluate import examine
from finetune.files import write_atomically
from finetune.models.saved import save_model
from finetune.publish.artifacts import refresh, write_evidence
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.run.record import read_record
from finetune.training.launch import on_main
from finetune.training.trainer_state import TrainerState
from finetune.training.verdict import refuse_exploded, warnings_of

__all__ = ["answer_anew", "finish"]

NUM_MISTAKES = 24  # of the test split, or of validation where there is none, in results.json


def finish(trainer: TrainerState, val_loader: AnyLoader | None) -> dict[str, Any]:
    """Measure the best weights, read the test split once, and write results.json and model/.

    Args:
        trainer: after its last step.
        val_loader: None if the run has no validation split; the temperature is fitted on it.
    Returns: the content of results.json.
    Raises: DataError if a test image cannot be read; model/ is published by then. DivergedError if
        the loss has exploded; everything is written by then.
    """
    setup, run, accelerator = trainer.setup, trainer.run, trainer.accelerator
    batch_size = trainer.recipe.data.eval_batch_size
    best_step, weights = trainer.load_best()
    results: dict[str, Any] = {}
    temperature = None
    splits = setup.source.splits
    if val_loader is not None:
        measured = examine(
            trainer.evaluated(),
            val_loader,
            accelerator,
            batch_size=batch_size,
            fit=True,
            num_mistakes=0 if "test" in splits else NUM_MISTAKES,
        )
        temperature = measured.pop("temperature")
        _number_by(splits["val"], val_loader.store.split, measured.get("mistakes", []))
        results |= {"val": measured, "temperature": temperature}
    results |= {"best_step": best_step, "steps": trainer.counters.step}
    results |= {"skipped_steps": trainer.counters.skipped}
    _publish(trainer, results, weights, final=False)
    if (test := splits.get("test")) is not None:
        # anew: its images may have been mended since its fingerprint was taken
        test_loader = trainer.loader(dataclasses.replace(test), train=False)
        results["test"] = examine(
            trainer.evaluated(),
            test_loader,
            accelerator,
            batch_size=batch_size,
            temperature=temperature,
            num_mistakes=NUM_MISTAKES,
        )
        _number_by(test, test_loader.store.split, results["test"]["mistakes"])
    if trainer.main:
        history = run.history()
        lines = (line for line in reversed(history) if line["split"] == "train")
        results["train"] = next(lines, {})
        claims = [claim.model_dump(mode="json") for claim in trainer.recipe.claims]
        results["claims"] = answer(claims, history, results, setup.steps_per_epoch)
        results["warnings"] = warnings_of(setup, results, history)
        run.write_json("results.json", results)
        _publish(trainer, results, weights, final=True)
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
    trainer: TrainerState, results: dict[str, Any], weights: dict[str, torch.Tensor], *, final: bool
) -> None:
    """Write model/ on rank 0, with the evidence that is known so far."""
    if not trainer.main:
        return
    setup, run = trainer.setup, trainer.run

    def write(folder: Path) -> None:
        save_model(
            folder,
            setup.built,
            weights,
            class_names=setup.source.class_names,
            preprocessing=setup.preprocessing,
            temperature=results.get("temperature"),
        )
        repository = trainer.recipe.run.push_to
        write_evidence(folder, run, results, repository=repository, pictures=final)

    run.publish_model(write, needed=sum(tensor.nbytes for tensor in weights.values()))


def _number_by(whole: Split, kept: Split, mistakes: list[dict[str, Any]]) -> None:
    """Number the mistakes by the whole split, also where images were left out of it."""
    if len(kept) == len(whole) or kept.rows is None:
        return
    rows = np.arange(len(whole)) if whole.rows is None else whole.rows
    for one in mistakes:
        one["index"] = int(np.flatnonzero(rows == kept.rows[one["index"]])[0])


def _report(run: Path, split: Split | None, notice: Callable[[str], None]) -> None:
    """Write report.html; a page that cannot be written is no reason to lose the run."""
    from finetune.report.page import write_report  # brings matplotlib

    try:
        write_report(run, split=split)
    except FinetuneError as error:
        notice(f"report.html is left out: {error}")
