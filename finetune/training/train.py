"""The whole training run: build, prepare data, train, finalize.

Read this file from top to bottom. A run builds data, network and optimizer from the recipe, takes
the training steps, writes the best weights to `model/`, and evaluates the test split once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Batch
from finetune.errors import FinetuneError, Interrupted, Paused, SetupError
from finetune.evaluation.evaluator import Evaluator
from finetune.files import file_sha256
from finetune.formatting import pluralize
from finetune.log import logger
from finetune.model_checksums import verify_model_folder, weights_hashes
from finetune.models.freeze import set_train_mode
from finetune.models.lora import load_base_state_dict
from finetune.models.weights.read import read_tensors
from finetune.progress import step_bar, step_postfix
from finetune.ranks import local_world_size
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import LOCATION_KEYS, training_keys
from finetune.run.directory import RunDir, resume_command
from finetune.run.record import read_record, record_status, write_record
from finetune.training.accelerator import (
    check_same_on_all_ranks,
    create_accelerator,
    destroy_process_group,
    run_on_main,
    share_digests,
)
from finetune.training.batch_size_finder import resolve_micro_batch_size
from finetune.training.build_state import build_trainer_state
from finetune.training.finalize import (
    BestValidation,
    build_val_evaluator,
    can_reuse_last_eval,
    finalize_run,
    recheck_claims,
    warn_of_equal_pixels,
)
from finetune.training.launcher import get_launcher
from finetune.training.meter import TrainMeter
from finetune.training.rank_errors import RankErrors
from finetune.training.resume import (
    check_no_existing_run,
    record_plan,
    start_or_resume,
    warn_of_changes,
)
from finetune.training.sanity import check_setup
from finetune.training.setup import build_setup
from finetune.training.signals import StopSignals
from finetune.training.stages import first_stage_started, stage_folder, stage_recipes
from finetune.training.startup_summary import format_startup_summary
from finetune.training.trainer_state import TrainerState

__all__ = ["train"]

LOCK_TIMEOUT_SECONDS = 30.0  # after a restart, the previous rank 0 may take this long to end


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    branch_from: str | Path | None = None,
    dry_run: bool = False,
    keep_process_group: bool = False,
    seconds_before: float = 0.0,
    pause: Callable[[int, int], bool] | None = None,
) -> dict[str, Any]:
    """Fine-tune a model as described by a recipe.

    Each stage in `optim.stages` is trained first, as a run of its own in a folder below `out`. The
    first stage starts from the pretrained weights; each later stage, and the run itself, starts
    from the best weights of the stage before it.

    Args:
        recipe: a validated recipe, from `load_recipe`.
        out: path of the run directory.
        resume: True to continue from the newest intact checkpoint in `out`, or from step 0 if `out`
            has no checkpoint; False to refuse a directory that contains a run.
        branch_from: another run directory, with `resume`: if `out` has no checkpoint, start from
            the newest checkpoint of that run whose learning rates are those of this recipe, which
            may differ only in its length.
        dry_run: True to check everything, but train and write nothing.
        keep_process_group: True to keep the process group for another run; destroy it later with
            `destroy_process_group`.
        seconds_before: seconds that the command has taken before this call, for example to choose
            the recipe; they are part of "command_seconds" in results.json.
        pause: called after each evaluation but those of stages, with the number of steps done and
            of all steps. If it returns True, or after the last step, the run is saved and ends with
            `Paused`: it has no results, and its test split is not evaluated. Single process only.
    Returns: the content of results.json; with `dry_run`, the plan of the run.
    Raises: FinetuneError; its subclass sets the exit code. Paused by `pause`.
    """
    started = time.perf_counter() - seconds_before
    init_from = None  # run directory of the previous stage
    if recipe.optim.stages:
        accelerator = create_accelerator(recipe.run, out=Path(out))
        # A checkpoint of the run itself means that all stages are done.
        stages_done = not dry_run and run_on_main(
            accelerator,
            lambda: any(RunDir(path).checkpoint_steps() for path in (out, branch_from or out)),
        )
        if not dry_run and not stages_done:
            _prepare_stages(recipe, accelerator, RunDir(out), resume=resume)
        for number, stage in enumerate([] if stages_done else stage_recipes(recipe), start=1):
            folder = stage_folder(out, number)
            _train(
                stage,
                folder,
                init_from=init_from,
                resume=resume,
                branch_from=None,
                dry_run=dry_run,
                keep_process_group=True,
                started=time.perf_counter(),
                pause=None,
            )
            init_from = None if dry_run else folder
    elif not dry_run and resume and stage_folder(out, 1).exists():
        logger.warning(
            f"{out}: a stage of this run was trained, but the recipe has no optim.stages now; its "
            "weights are not used"
        )
    return _train(
        recipe,
        out,
        init_from=init_from,
        resume=resume,
        branch_from=None if branch_from is None else RunDir(branch_from),
        dry_run=dry_run,
        keep_process_group=keep_process_group,
        started=started,
        pause=pause,
    )


def _prepare_stages(recipe: Recipe, accelerator: Accelerator, run: RunDir, *, resume: bool) -> None:
    """Check the training after the stages, and write recipe.yaml and run.json, before they start.

    Raises: SetupError if a stage has started and `resume` is False; the errors of `_train`.
    """
    trainer = _build_trainer(recipe, accelerator, run, init_from=None)
    provenance = trainer.provenance()

    def prepare() -> None:
        with contextlib.closing(run):
            run.open()
            started = first_stage_started(recipe, run.path)
            if not resume:
                check_no_existing_run(run, has_stage=started)
            if started:
                warn_of_changes(run, trainer.setup, provenance.get("teacher"))
            else:
                start_or_resume(run, trainer.setup, resume=resume, **provenance)

    run_on_main(accelerator, prepare)
    accelerator.free_memory()  # the network is built again after the stages


def _train(
    recipe: Recipe,
    out: str | Path,
    *,
    init_from: Path | None,
    resume: bool,
    branch_from: RunDir | None,
    dry_run: bool,
    keep_process_group: bool,
    started: float,
    pause: Callable[[int, int], bool] | None,
) -> dict[str, Any]:
    """Train one stage, or the run itself.

    Args:
        init_from: run directory of the previous stage, whose weights replace the pretrained ones;
            None without a previous stage.
        started: `time.perf_counter()` at the start of the command, or of the stage.

    The other arguments, the result and the errors are those of `train`.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise SetupError(
            "torch.no_grad or inference_mode: is in effect around this call, so no gradient can be "
            "computed; end it first",
            code="setup.unsupported",
        )
    run = RunDir(out)
    accelerator = create_accelerator(recipe.run, out=run.path)
    launcher = get_launcher()
    rank_errors = RankErrors(
        accelerator.process_index,
        accelerator.num_processes,
        launch_id=run_on_main(accelerator, time.time_ns),
        timeout_seconds=recipe.run.timeout_seconds,
        launcher=launcher,
    )
    with (
        contextlib.closing(run),
        StopSignals(launcher) as signals,
        rank_errors.end_rank_0_first(),
        signals.raise_immediately(_stopped_message(run)),
    ):
        # Build and check everything before any image is decoded.
        trainer = _build_trainer(recipe, accelerator, run, init_from=init_from)
        recipe = trainer.recipe  # with model.head_init resolved
        run_on_main(accelerator, lambda: _check_push_rights(recipe))
        if dry_run:
            return _dry_run(trainer)

        # Lock the run directory, and find the step to continue from.
        lock_timeout = LOCK_TIMEOUT_SECONDS if resume and launcher is not None else 0.0
        run_on_main(accelerator, lambda: run.open(timeout_seconds=lock_timeout))
        start_step = run_on_main(
            accelerator,
            lambda: start_or_resume(
                run, trainer.setup, resume=resume, branch_from=branch_from, **trainer.provenance()
            ),
        )
        if start_step is None:  # the run is done already
            logger.info(
                f"{run.path}: already finished, so nothing was trained; these are its results"
            )
            results = run_on_main(accelerator, lambda: recheck_claims(run, recipe))
        else:
            with (
                signals.deferred(),  # while the status is written
                record_status(run, is_main_process=trainer.is_main_process),
                rank_errors.report_cause(),
                trainer.checkpoint_writer.finish_on_exit(),
                signals.raise_immediately(_stopped_message(run)),
            ):
                train_loader, val_loader = _prepare_data(trainer, start_step)
                started -= trainer.counters.seconds  # trained before a resume
                with signals.deferred():  # the loop saves a checkpoint before it stops
                    best_validation = _train_loop(trainer, train_loader, val_loader, signals, pause)
                results = finalize_run(
                    trainer, train_loader, val_loader, best_validation, started=started
                )

        # Close the trackers, disconnect the processes, and push the model.
        for tracker in accelerator.trackers:
            tracker.finish()
        # The run is complete, so a failed push loses nothing. Other ranks do not wait for the
        # push: a collective would time out during the upload of a large model.
        if not keep_process_group:
            destroy_process_group()
        if trainer.is_main_process:
            _push_to_hub(run, recipe)
        return results


def _build_trainer(
    recipe: Recipe, accelerator: Accelerator, run: RunDir, *, init_from: Path | None
) -> TrainerState:
    """Build data, network, transforms and training state of a recipe on this rank.

    Args: see `_train`.
    Raises: RecipeError, DataError, WeightsError or SetupError if recipe, data, weights and machine
        do not match.
    """
    setup = build_setup(
        recipe,
        device=accelerator.device,
        local_world_size=local_world_size(accelerator.num_processes),
        show_progress=accelerator.is_main_process,
    )
    setup.check_transforms()
    setup.sampler.check_world_size(accelerator.num_processes)
    if init_from is not None:
        weights = run_on_main(accelerator, lambda: _read_stage_weights(init_from))
        load_base_state_dict(setup.built.model, weights)
    return build_trainer_state(setup, accelerator, run)


def _read_stage_weights(stage: Path) -> dict[str, Tensor]:
    """Read the best weights of a stage. Raises: WeightsError if they are damaged."""
    folder = stage / "model"
    verify_model_folder(folder, source=str(folder))
    return read_tensors(folder / "model.safetensors")


def _dry_run(trainer: TrainerState) -> dict[str, Any]:
    """Check that all images can be read, and log warnings. Returns: the plan of the run."""
    setup = trainer.setup
    num_samples = run_on_main(trainer.accelerator, setup.count_readable_images)
    setup = setup.with_num_samples(num_samples)
    for warning in check_setup(setup):
        logger.warning(warning)
    return {**setup.plan(), **trainer.provenance()}


def _prepare_data(trainer: TrainerState, start_step: int) -> tuple[AnyLoader, AnyLoader | None]:
    """Load the checkpoint to resume from, decode the data, and log a summary of the run.

    Every rank accepts only images whose content rank 0 has fingerprinted. Afterwards,
    `trainer.setup` counts only readable training images.

    Args:
        start_step: step of the checkpoint; 0 to start from scratch.
    Returns: the loader of the training split, and that of the validation split, or None without a
        validation split.
    """
    accelerator, run, splits = trainer.accelerator, trainer.run, trainer.setup.source.splits
    share_digests(accelerator, splits.values())
    check_same_on_all_ranks(_training_inputs(trainer))
    if start_step:  # before the data: cached features need the weights
        trainer.load_checkpoint(start_step)
    train_loader = trainer.build_train_loader()
    setup = trainer.setup
    val_loader = trainer.build_loader(splits["val"], train=False) if "val" in splits else None
    num_val = None if val_loader is None else len(val_loader.labels)
    run_on_main(
        accelerator, lambda: record_plan(run, setup, start_step=start_step, num_val=num_val)
    )
    run_on_main(accelerator, lambda: warn_of_equal_pixels(run, train_loader, val_loader))
    resolve_micro_batch_size(trainer, train_loader)
    if trainer.recipe.run.trackers:
        accelerator.init_trackers("finetune")
    for line in format_startup_summary(trainer):
        logger.info(line)
    for warning in check_setup(setup):
        logger.warning(warning)
    return train_loader, val_loader


def _training_inputs(trainer: TrainerState) -> dict[str, Any]:
    """Return what determines the trained weights, by its name for users."""
    sections, weights = training_keys(trainer.recipe), trainer.setup.built.provenance
    teacher = trainer.provenance().get("teacher", {})
    inputs = {
        f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()
    }
    inputs = {key: value for key, value in inputs.items() if key not in LOCATION_KEYS}
    return {
        **inputs,
        "labels, classes or shards": trainer.setup.fingerprints(),
        "pretrained weights": weights_hashes(weights),
        "teacher": weights_hashes(teacher),
    }


def _train_loop(
    trainer: TrainerState,
    train_loader: AnyLoader,
    val_loader: AnyLoader | None,
    signals: StopSignals,
    pause: Callable[[int, int], bool] | None,
) -> BestValidation | None:
    """Run the remaining steps.

    Returns: the best validation, which `finalize_run` reuses; None if it cannot be reused, or took
        place before a resume.
    Raises: Interrupted after a signal, Paused by `pause`; the last step is saved by then.
    """
    setup, run, counters = trainer.setup, trainer.recipe.run, trainer.counters
    reuse_eval = val_loader is not None and can_reuse_last_eval(trainer, val_loader)
    best_validation = None
    meter = TrainMeter(
        trainer.accelerator.device, counters.seconds, has_teacher=trainer.distillation is not None
    )
    first_step, first_seconds = counters.step + 1, meter.seconds
    all_steps = train_loader.train_steps(
        setup.sampler,
        range(counters.step, setup.num_steps),
        rank=trainer.accelerator.process_index,
        world_size=trainer.accelerator.num_processes,
        micro_batch_size=trainer.micro_batch_size,
    )
    trainer.start(meter)
    with (
        contextlib.closing(all_steps) as steps,
        step_bar(
            total=setup.num_steps, start=counters.step, shown=trainer.is_main_process
        ) as progress_bar,
    ):
        while counters.step < setup.num_steps and not counters.should_stop_early(run.patience):
            # train: forward and backward on each micro-batch, then one optimizer step
            num_micro_batches, micro_batches = next(steps)
            readable = _save_if_unreadable(micro_batches, trainer, meter, signals)
            trainer.train_step(num_micro_batches, readable, meter)
            step = counters.step

            # log
            progress_bar.update()
            if trainer.is_compiled and step == first_step:
                seconds = meter.seconds - first_seconds
                logger.info(f"compiled the network: the first step took {seconds:.0f} s")
            if step % run.log_every == 0 or step == setup.num_steps:
                line = trainer.log_training(meter)
                progress_bar.set_postfix(step_postfix(line), refresh=False)

            # evaluate; images per second do not include the time of evaluating and saving
            paused_at = meter.pause()
            is_best = False
            if val_loader is not None and setup.is_eval_step(step):
                evaluator = build_val_evaluator(trainer, val_loader, is_final=reuse_eval)
                is_best = _validate(trainer, evaluator, meter)
                if is_best and reuse_eval:
                    best_validation = BestValidation(step, evaluator)

            # save: the best weights, at the steps of the recipe, and before a stop
            stop_signal = trainer.sync_stop_signal(signals.received)
            must_pause = (
                pause is not None and setup.is_eval_step(step) and pause(step, setup.num_steps)
            )
            if is_best or stop_signal or must_pause or setup.is_save_step(step):
                trainer.save_checkpoint(meter)
            trainer.checkpoint_writer.raise_if_failed()
            if stop_signal:
                trainer.wait_for_checkpoint()
                raise Interrupted(_saved_message(trainer), stop_signal)
            if must_pause:
                break
            meter.resume(paused_at)

    if pause is not None:
        trainer.wait_for_checkpoint()
        raise Paused(_saved_message(trainer))
    if counters.step < setup.num_steps:
        logger.info(
            f"stopped early at step {counters.step:,} of {setup.num_steps:,}: "
            f"{pluralize(counters.stale, 'evaluation')} in a row did not improve {run.best} over "
            f"{counters.best:.4g} of step {counters.best_step} (run.patience={run.patience})"
        )
    return best_validation


def _save_if_unreadable(
    micro_batches: Iterator[Batch], trainer: TrainerState, meter: TrainMeter, signals: StopSignals
) -> Iterator[Batch]:
    """Yield the micro-batches of a step; if one cannot be read, save a checkpoint before raising.

    A signal interrupts the wait for a micro-batch. With several processes, nothing is saved: every
    rank would have to take part, but the other ranks may already be past this point.
    """
    if trainer.accelerator.num_processes > 1:
        yield from micro_batches
        return
    while True:
        try:
            with signals.raise_immediately(_saved_message(trainer)):
                batch = next(micro_batches, None)
        except FinetuneError:
            trainer.restore_bn_stats()
            trainer.wait_for_checkpoint()
            if trainer.counters.step not in {0, *trainer.run.checkpoint_steps()}:
                trainer.save_checkpoint(meter)
                trainer.wait_for_checkpoint()
            raise
        if batch is None:
            return
        yield batch


def _validate(trainer: TrainerState, evaluator: Evaluator, meter: TrainMeter) -> bool:
    """Evaluate on the validation split and log it. Returns: True if it is the best so far."""
    trainer.sync_batch_norm()
    metrics = evaluator.evaluate(
        trainer.eval_model(), batch_size=trainer.recipe.data.eval_batch_size
    )
    is_best = trainer.log_validation(metrics, meter)
    show_best = is_best and trainer.recipe.run.best != "last"
    logger.info(_format_validation(metrics, trainer.counters.step, best=show_best))
    set_train_mode(trainer.model)
    return is_best


def _check_push_rights(recipe: Recipe) -> None:
    """Check before training that the model can be pushed afterwards."""
    if recipe.run.push_to:
        from finetune.publish.permissions import check_rights

        check_rights(recipe.run.push_to, private=recipe.run.push_private)


def _push_to_hub(run: RunDir, recipe: Recipe) -> None:
    """Push the model to `run.push_to`, unless this one was pushed there before."""
    if recipe.run.push_to is None:
        return
    record = read_record(run)

    def describe_target() -> dict[str, Any]:
        # a temperature that was fitted later is in config.json
        files = ("model.safetensors", "config.json")
        sha256 = {name: file_sha256(run.model_folder / name) for name in files}
        return {"repository": recipe.run.push_to, "model_files": sha256}

    if not describe_target().items() <= record.get("pushed", {}).items():
        from finetune.publish.push import push

        pushed = push(run.path, recipe.run.push_to, private=recipe.run.push_private)
        write_record(run, {**record, "pushed": {**pushed, **describe_target()}})
        logger.info(f"pushed to {pushed['url']}, commit {pushed['commit']}")


def _stopped_message(run: RunDir) -> str:
    """Return the message for a signal when nothing needs to be saved."""
    return f"{run.path}: stopped; continue: {resume_command(run.path)}"


def _saved_message(trainer: TrainerState) -> str:
    """Return the message for a signal that ends training."""
    if not trainer.counters.step:
        return _stopped_message(trainer.run)
    steps = f"step {trainer.counters.step} of {trainer.setup.num_steps}"
    path = trainer.run.path
    return f"{path}: stopped at {steps} and saved; continue: {resume_command(path)}"


def _format_validation(metrics: dict[str, Any], step: int, *, best: bool) -> str:
    """Format validation metrics as one line."""
    keys = ["loss", "top1", "top5"] if len(metrics["per_class"]) > 5 else ["loss", "top1"]
    if "map" in metrics:
        keys = ["loss", "map", "macro_f1", "micro_f1"]
    values = "  ".join(f"{key} {metrics[key]:.4f}" for key in keys)
    return f"step {step}: val {values}{'  (best so far)' if best else ''}"
