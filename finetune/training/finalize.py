"""The end of a run: evaluate the best weights, write model/, results.json, card and report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from finetune.data.decisions import split_decisions
from finetune.data.feature_loader import AnyLoader, FeatureLoader
from finetune.data.leakage import find_equal_pixels
from finetune.data.source import Split
from finetune.errors import FinetuneError
from finetune.evaluation.claims import check_claims
from finetune.evaluation.evaluator import NUM_MISTAKES, Evaluator
from finetune.evaluation.learning_curve import measure_learning_curve
from finetune.evaluation.multilabel import DEFAULT_THRESHOLD
from finetune.log import logger
from finetune.model_checksums import read_checksums
from finetune.models.lora import save_adapter
from finetune.models.save import save_model
from finetune.precision import autocast_dtype
from finetune.publish.artifacts import (
    base_model,
    keep_other_files,
    rewrite_artifacts,
    write_artifacts,
)
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import training_keys
from finetune.run.directory import RunDir
from finetune.run.record import (
    describe_changed_metrics,
    read_record,
    update_record,
    write_record,
)
from finetune.training.accelerator import run_on_main
from finetune.training.sanity import check_results, raise_if_diverged
from finetune.training.setup import TrainingSetup
from finetune.training.trainer_state import TrainerState
from finetune.training.training_images import write_training_images

__all__ = [
    "BestValidation",
    "build_val_evaluator",
    "can_reuse_last_eval",
    "finalize_run",
    "recheck_claims",
    "save_trained_model",
    "use_full_split_indices",
    "warn_of_equal_pixels",
]

_MAX_CURVE_OPERATIONS = 1e11  # of the largest fit of a learning curve: a few seconds
MAX_KEPT_LOGITS = 1 << 26  # validation logits kept in memory during training: 256 MiB


class BestValidation(NamedTuple):
    """The best validation during training, to be reused for the published weights.

    Attributes:
        step: optimizer steps done before the validation.
        evaluator: the evaluator with the result.
    """

    step: int
    evaluator: Evaluator


def finalize_run(
    trainer: TrainerState,
    train_loader: AnyLoader,
    val_loader: AnyLoader | None,
    best_validation: BestValidation | None = None,
    *,
    started: float,
) -> dict[str, Any]:
    """Evaluate the best weights, evaluate the test split once, and write results.json and model/.

    Args:
        trainer: the training state after the last step.
        train_loader: loader of the training split; the report shows some of its images.
        val_loader: loader of the validation split, on which the temperature or the thresholds are
            fitted; None without a validation split.
        best_validation: a validation during training; reused if its step is the best.
        started: `time.perf_counter()` at the start of the command, minus the training time before
            a resume, in seconds.
    Returns: the content of results.json.
    Raises: DataError if a test image cannot be read and `data.unreadable` is "stop", after model/
        is written; DivergedError if the loss has diverged, after everything is written.
    """
    setup, run, accelerator = trainer.setup, trainer.run, trainer.accelerator
    batch_size = trainer.recipe.data.eval_batch_size
    results: dict[str, Any] = {}
    splits = setup.source.splits
    best_step, weights = trainer.load_best_weights()
    validation_scores: dict[str, Any] | None = None

    # Validate the best weights, unless training has done so.
    if val_loader is not None:
        if best_validation is not None and best_validation.step == best_step:
            evaluator = best_validation.evaluator
        else:
            evaluator = build_val_evaluator(trainer, val_loader)
            evaluator.evaluate(trainer.eval_model(), batch_size=batch_size)
        val_results = evaluator.results()
        fitted_key = "thresholds" if setup.is_multilabel else "temperature"
        validation_scores = val_results.pop("validation_scores", None)
        val_results |= split_decisions(setup.source, "val")
        results |= {"val": val_results, fitted_key: val_results.pop(fitted_key)}
        use_full_split_indices(
            splits["val"], val_loader.store.split, val_results.get("mistakes", [])
        )
    results |= {"best_step": best_step, "steps": trainer.counters.step}
    results |= {"skipped_steps": trainer.counters.skipped}

    # Write model/ before the test split is evaluated: an unreadable test image must not lose it.
    if trainer.is_main_process:
        _write_model_folder(trainer, results, weights, validation_scores)

    # Evaluate the test split, once.
    test, reported_loader = splits.get("test"), val_loader
    if test is not None:
        reported_loader = test_loader = trainer.build_loader(test, train=False)
        evaluator = Evaluator(
            test_loader,
            accelerator,
            temperature=results.get("temperature"),
            thresholds=results.get("thresholds") or [DEFAULT_THRESHOLD] * setup.num_classes,
            num_mistakes=NUM_MISTAKES,
        )
        evaluator.evaluate(trainer.eval_model(), batch_size=batch_size)
        results["test"] = {**evaluator.results(), **split_decisions(setup.source, "test")}
        use_full_split_indices(test, test_loader.store.split, results["test"]["mistakes"])
        loaders = train_loader, val_loader, test_loader
        run_on_main(accelerator, lambda: warn_of_equal_pixels(run, *loaders))

    # Write the results, the card and the report.
    if trainer.is_main_process:
        if curve := _learning_curve(train_loader, reported_loader):
            results["learning_curve"] = curve
        history = run.read_metrics()
        train_lines = [line for line in history if line["split"] == "train"]
        results["train"] = train_lines[-1] if train_lines else {}
        claims = [claim.model_dump(mode="json") for claim in trainer.recipe.claims]
        results["claims"] = check_claims(claims, history, results, setup.steps_per_epoch)
        update_record(run, {"metrics_changed": run.has_changed_metrics()})
        record = read_record(run)
        noted = filter(None, [*record.get("leakage", []), describe_changed_metrics(record)])
        results["warnings"] = [*noted, *check_results(setup, results, history)]
        results["command_seconds"] = round(time.perf_counter() - started, 1)
        run.write_json("results.json", results)
        rewrite_artifacts(run, repository=trainer.recipe.run.push_to)
        write_training_images(run, setup, train_loader.store, autocast_dtype(accelerator))
        _write_html_report(run.path, splits.get("val") if test is None else test)
    accelerator.wait_for_everyone()

    # Fail last: the weights and results of a diverged run are kept.
    run_on_main(accelerator, lambda: raise_if_diverged(run, setup, results))
    return results


def warn_of_equal_pixels(run: RunDir, *loaders: AnyLoader | None) -> None:
    """Log images of several splits with equal pixels but other bytes, and add them to run.json."""
    stores = {loader.store.split.name: loader.store for loader in loaders if loader is not None}
    record = read_record(run)
    known = record.get("leakage", [])
    if new := [line for line in find_equal_pixels(stores) if line not in known]:
        update_record(run, {"leakage": [*known, *new]})
    for line in new:
        logger.warning(line)


def _learning_curve(train_loader: AnyLoader, loader: AnyLoader | None) -> dict[str, Any] | None:
    """Measure a learning curve if that takes a few seconds: only of a run on cached features."""
    if not (isinstance(train_loader, FeatureLoader) and isinstance(loader, FeatureLoader)):
        return None
    if train_loader.labels.ndim == 2:
        return None
    train, test = (
        (each.get_features(np.arange(len(each.labels))).cpu().numpy(), each.labels.cpu().numpy())
        for each in (train_loader, loader)
    )
    num_images, width = train[0].shape
    if num_images * width**2 > _MAX_CURVE_OPERATIONS:
        return None
    return measure_learning_curve(train, test, num_classes=train_loader.num_classes)


def can_reuse_last_eval(trainer: TrainerState, val_loader: AnyLoader) -> bool:
    """True if a validation result during training can be reused for the published weights.

    False in two cases: the network has an adapter, because merging an adapter rounds the weights;
    or the validation logits are too many to keep in memory.
    """
    if trainer.recipe.model.adapter is not None:
        return False
    return len(val_loader.labels) * val_loader.num_classes <= MAX_KEPT_LOGITS


def build_val_evaluator(
    trainer: TrainerState, val_loader: AnyLoader, *, is_final: bool = True
) -> Evaluator:
    """Build the evaluator of the validation split.

    Args:
        is_final: True if the evaluation may go into results.json. Its results then also have the
            fitted temperature or thresholds and, if the data has no test split, the images with the
            highest losses.
    """
    has_test = "test" in trainer.setup.source.splits
    num_mistakes = NUM_MISTAKES if is_final and not has_test else 0
    return Evaluator(
        val_loader, trainer.accelerator, fit_calibration=is_final, num_mistakes=num_mistakes
    )


def recheck_claims(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    """Check the recipe's current claims against the results of a finished run.

    If the claims have changed, recipe.yaml, results.json, the card and the report are rewritten.

    Returns: the content of results.json.
    """
    results = run.read_json("results.json") or {}
    claims = [claim.model_dump(mode="json") for claim in recipe.claims]
    checked = results.get("claims") or []  # the claims with their measured values
    if len(checked) == len(claims) and all(
        old.get(key) == value
        for old, claim in zip(checked, claims, strict=True)
        for key, value in claim.items()
    ):
        return results
    record = read_record(run)
    steps_per_epoch = record.get("plan", {}).get("steps_per_epoch", 1.0)
    results["claims"] = check_claims(claims, run.read_metrics(), results, steps_per_epoch)
    run.write_recipe(recipe.to_yaml())
    record["training_keys"] = training_keys(recipe)
    record["metrics_changed"] = run.has_changed_metrics()
    record.pop("results_sha256", None)
    write_record(run, record)  # without a checksum, in case the process ends before the next two
    run.write_json("results.json", results)
    write_record(run, {**record, "results_sha256": run.checksums()["results_sha256"]})
    rewrite_artifacts(run)
    _write_html_report(run.path, None)
    return results


def save_trained_model(
    folder: Path,
    setup: TrainingSetup,
    weights: Mapping[str, torch.Tensor],
    results: Mapping[str, Any],
    validation_scores: Mapping[str, Any] | None,
) -> None:
    """Save the weights and the calibration in `results` into a folder, see `save_model`."""
    save_model(
        folder,
        setup.built,
        weights,
        class_names=setup.source.class_names,
        preprocessing=setup.preprocessing,
        temperature=results.get("temperature"),
        multilabel=setup.is_multilabel,
        thresholds=results.get("thresholds"),
        validation_scores=validation_scores,
    )


def _write_model_folder(
    trainer: TrainerState,
    results: dict[str, Any],
    weights: dict[str, torch.Tensor],
    validation_scores: dict[str, Any] | None,
) -> None:
    """Write model/ with the results so far; add the weights' sha256 to `results` and run.json."""
    setup, run = trainer.setup, trainer.run

    def write(folder: Path) -> None:
        if trainer.recipe.model.adapter is not None:
            name, revision = base_model(run)
            save_adapter(
                folder / "adapter", trainer.eval_model(), base_model_name=name, revision=revision
            )
        save_trained_model(folder, setup, weights, results, validation_scores)
        results["model_sha256"] = read_checksums(folder, source=str(run.path))["model.safetensors"]
        repository = trainer.recipe.run.push_to
        write_artifacts(folder, run, results, repository=repository, with_plots=False)
        keep_other_files(run, folder)

    run.publish_model(write, num_bytes=sum(tensor.nbytes for tensor in weights.values()))
    update_record(run, {"model_sha256": results["model_sha256"]})


def use_full_split_indices(
    full_split: Split, readable_split: Split, mistakes: list[dict[str, Any]]
) -> None:
    """Replace each mistake's index among the readable images by its index in the full split."""
    if len(readable_split) == len(full_split) or readable_split.rows is None:
        return
    rows = full_split.image_rows
    for mistake in mistakes:
        mistake["index"] = int(np.flatnonzero(rows == readable_split.rows[mistake["index"]])[0])


def _write_html_report(run: Path, split: Split | None) -> None:
    """Write report.html; a report that cannot be written must not fail the run."""
    from finetune.report.page import write_run_report  # imports matplotlib

    try:
        write_run_report(run, split=split)
    except FinetuneError as error:
        logger.warning(f"report.html is left out: {error}")
