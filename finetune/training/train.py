"""Training and evaluation: the only file that starts Accelerate.

`train` is the story: data, network and optimiser are made from the recipe, then one step after
another; at the end the best weights become `model/` and the test split is read, once.
"""

# B batch, K classes

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    broadcast_object_list,
    parse_flag_from_env,
)

from finetune.console import bar, say, say_nothing
from finetune.data.feature_loader import AnyLoader
from finetune.errors import FinetuneError, Interrupted, RecipeError, SetupError, nearest
from finetune.evaluation.evaluate import evaluate
from finetune.models.build import set_train_mode
from finetune.processes import keep_freed, local_processes
from finetune.recipe.load import Recipe, RunSection
from finetune.run.directory import RunDir
from finetune.run.environment import DTYPES, pick_precision, precision_of, requested_processes
from finetune.run.status import status_kept
from finetune.training.distributed import Launcher, RankErrors
from finetune.training.finalize import answer_anew, finish
from finetune.training.meter import Meter, StopSignals
from finetune.training.micro_batch import settle_micro_batch
from finetune.training.resume import begin, note_plan
from finetune.training.setup import open_setup
from finetune.training.trainer_state import TrainerState

__all__ = ["evaluate", "launch", "leave", "train"]

_Result = TypeVar("_Result")
_runs = itertools.count()  # of this process; all ranks count alike
_launcher = functools.cache(Launcher.of_this_process)


def launch(run: RunSection, *, out: Path | None = None) -> Accelerator:
    """Join the processes that the launcher started.

    Args:
        run: precision, threads, trackers and the expected number of processes.
        out: where trackers write.
    Returns: the accelerator; its device is ready.
    Raises: SetupError if the number of processes is not what was asked for.
    """
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    without_gpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if not without_gpu:
        _check_gpus()
    launcher = _launcher()
    processes = PartialState(
        cpu=without_gpu, timeout=datetime.timedelta(seconds=run.timeout_seconds)
    )
    if launcher is not None:
        launcher.joined = True
    for asked in (run.num_processes, requested_processes()):
        if asked is not None and asked != processes.num_processes:
            device = "" if processes.device.type == "cuda" else "ACCELERATE_USE_CPU=true "
            multi = "--multi_gpu " if asked > 1 else ""
            raise SetupError(
                f"{asked} processes were asked for and {processes.num_processes} started; run: "
                f"{device}accelerate launch {multi}--num_processes {asked} -m finetune train …"
            )
    known = sorted(kind.value for kind in LoggerType)
    for tracker in run.trackers:
        if tracker not in known:
            raise RecipeError(f"run.trackers: unknown '{tracker}'{nearest(tracker, known)}")
    if processes.device.type == "cpu":
        keep_freed()
    precision = pick_precision(run.precision, processes.device)
    # Accelerate keeps the precision of the process's first run; a second one may have another.
    AcceleratorState._reset_state()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no supported trackers")  # said below
            accelerator = Accelerator(
                mixed_precision="no" if precision == "fp32" else precision,
                log_with=list(run.trackers) or None,
                project_dir=out,
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
                # Both are given so that no environment variable can change the training.
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                dynamo_backend="no",
            )
    except (ImportError, ValueError) as error:
        raise SetupError(f"run: {error}") from error
    # Accelerate leaves a tracker out, with a debug line, when its package is not there.
    started = {getattr(tracker, "value", tracker) for tracker in accelerator.log_with}
    if missing := sorted(set(run.trackers) - started):
        raise SetupError(
            f"run.trackers: {', '.join(missing)}: its package is not installed; TensorBoard comes "
            "with: pip install 'finetune[track]'"
        )
    return accelerator


def _check_gpus() -> None:
    """Refuse more processes on this host than it has GPUs. Raises: SetupError."""
    started, gpus = local_processes(1), torch.accelerator.device_count()
    # as many as its launcher gave a rank of its own here: LOCAL_RANK may be set by hand
    if started > gpus and int(os.environ.get("LOCAL_RANK", 0)) >= gpus:
        raise SetupError(
            f"{started} processes were started here, and this host has {gpus} "
            f"GPU{'s' if gpus > 1 else ''}: each process needs its own; use --num_processes {gpus}"
        )


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    stay: bool = False,
) -> dict[str, Any]:
    """Fine-tune as a recipe says.

    Args:
        recipe: from `load_recipe`.
        out: the run directory.
        resume: continue from the newest intact checkpoint in `out`, or begin if there is none.
        dry_run: check everything, train nothing, write nothing.
        stay: keep the processes together for another run; `leave` parts them.
    Returns: the content of results.json; with `dry_run` the plan.
    Raises: FinetuneError of the kind that DESIGN's exit codes list.
    """
    run = RunDir(out)
    accelerator = launch(recipe.run, out=run.path)
    main, world = accelerator.is_main_process, accelerator.num_processes
    ranks = RankErrors(
        accelerator.process_index,
        world,
        number=next(_runs),
        timeout_seconds=recipe.run.timeout_seconds,
        launcher=_launcher(),
    )
    with contextlib.closing(run), StopSignals(_launcher()) as stop, ranks.in_order():
        with stop.at_once(_stopped(run)):
            trainer = _prepared(recipe, accelerator, run)
            setup, precision = trainer.setup, precision_of(accelerator)
            if recipe.run.precision == "auto":
                setup.notice(
                    f"run.precision: auto is {precision} on this {accelerator.device.type}"
                )
            _on_main(accelerator, lambda: _check_destination(recipe))
            if dry_run:
                return {**setup.plan(), "precision": precision, "num_processes": world}
            _on_main(accelerator, run.open)
            facts = {"precision": precision, "num_processes": world, "resume": resume}
            start = _on_main(accelerator, lambda: begin(run, setup, **facts, notice=say))
        if start is None:
            results = _on_main(accelerator, lambda: answer_anew(run, recipe))
        else:
            results = _to_the_end(trainer, start, precision, stop, ranks)
        with stop.at_once(_stopped(run)):
            for tracker in accelerator.trackers:
                tracker.finish()
            # The run is done: whatever the hub says, nothing of it is lost. Nobody waits for rank
            # 0, as a collective would be given up while a large model or a busy hub takes its time.
            if not stay:
                leave()
            if main:
                _publish(run, recipe)
            return results


def _prepared(recipe: Recipe, accelerator: Accelerator, run: RunDir) -> TrainerState:
    """Open the job before its data is decoded: what of the recipe does not fit shows here."""
    main, world = accelerator.is_main_process, accelerator.num_processes
    setup = open_setup(
        recipe,
        device=accelerator.device,
        local_processes=local_processes(world),
        notice=say if main else say_nothing,
        progress=main,
    )
    setup.try_pipelines()
    trainer = TrainerState(setup, accelerator, run)
    setup.stream.micro_batches(0, rank=accelerator.process_index, world=world)
    return trainer


def leave() -> None:
    """Part the processes of a launch; a process that was started alone has nothing to do."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _to_the_end(
    trainer: TrainerState, start: int, precision: str, stop: StopSignals, ranks: RankErrors
) -> dict[str, Any]:
    """Decode the data, train from `start` on, and finish. Returns: the content of results.json."""
    setup, accelerator, run = trainer.setup, trainer.accelerator, trainer.run
    with (
        status_kept(run, main=trainer.main),
        ranks.explained(),
        trainer.checkpoint_writer.at_work(),
    ):
        with stop.at_once(_stopped(run)):
            dtype = DTYPES[precision]
            train_loader = trainer.loaders.open(
                setup.source.splits["train"], train=True, dtype=dtype
            )
            _on_main(accelerator, lambda: note_plan(run, setup, start=start))
            val = setup.source.splits.get("val")
            val_loader = None if val is None else trainer.loaders.open(val, train=False)
            if start:
                trainer.restore(start)
            settle_micro_batch(trainer, train_loader, functools.partial(_on_main, accelerator))
            if trainer.recipe.run.trackers:
                accelerator.init_trackers("finetune")
        _fit(trainer, train_loader, val_loader, stop)
        with stop.at_once(_stopped(run)):  # all steps are saved
            return finish(trainer, val_loader)


def _fit(
    trainer: TrainerState, train_loader: AnyLoader, val_loader: AnyLoader | None, stop: StopSignals
) -> None:
    """Take the steps that are left, with logs, evaluations and checkpoints when they are due."""
    setup, accelerator, counters = trainer.setup, trainer.accelerator, trainer.counters
    run_keys = trainer.recipe.run
    batches = train_loader.train(
        setup.stream,
        range(counters.step, setup.steps),
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        micro_batch=trainer.micro_batch,
    )
    meter = Meter(accelerator.device, counters.seconds)
    first, began = counters.step + 1, meter.seconds
    trainer.go_on(meter)
    with (
        contextlib.closing(batches) as steps,
        bar(total=setup.steps, start=counters.step, shown=trainer.main) as shown,
    ):
        while counters.step < setup.steps and not trainer.stops_early:
            trainer.step(*next(steps), meter)
            shown.update()
            step = counters.step
            if trainer.compiled and step == first:
                setup.notice(
                    f"compiled the network: the first step took {meter.seconds - began:.0f} s"
                )
            if step % run_keys.log_every == 0 or step == setup.steps:
                shown.set_postfix(_postfix(trainer.log(meter)))
            paused = meter.pause()
            best = False
            if val_loader is not None and setup.evaluates_after(step):
                batch_size = trainer.recipe.data.eval_batch_size
                trainer.share_statistics()
                result = evaluate(
                    trainer.evaluated(), val_loader, accelerator, batch_size=batch_size
                )
                best = trainer.log_validation(result, meter)
                shown.clear()
                setup.notice(_validation(result, step, best=best))
                set_train_mode(trainer.model)
            signal_number = trainer.agree_to_stop(stop.received)
            if best or signal_number or setup.saves_after(step):
                trainer.save(meter)
            trainer.checkpoint_writer.look()
            meter.resume(paused)
            if signal_number:
                trainer.saved()
                raise Interrupted(
                    f"{trainer.run.path}: stopped at step {step} of {setup.steps} and saved; "
                    "continue with --resume",
                    signal_number,
                )


def _on_main(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result:
    """Do something on rank 0; every rank gets its answer, or its error."""
    outcome: list[Any] = [None, None]
    problem: BaseException | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except BaseException as error:  # a signal, too: the others must not wait for an answer
            problem = error
            outcome[1] = (str(error), getattr(error, "exit_code", 1))
    broadcast_object_list(outcome)
    if problem is not None:
        raise problem
    if outcome[1] is not None:
        message, code = outcome[1]
        elsewhere = FinetuneError(f"rank 0: {message}")
        elsewhere.exit_code, elsewhere.said = code, True
        raise elsewhere
    answer: _Result = outcome[0]
    return answer


def _check_destination(recipe: Recipe) -> None:
    """Find out before training whether the model can be pushed after it."""
    if recipe.run.push_to:
        from finetune.publish.permissions import check_rights

        check_rights(recipe.run.push_to, private=recipe.run.push_private)


def _publish(run: RunDir, recipe: Recipe) -> None:
    """Push the model if the recipe says so and it was not yet done, and note the commit."""
    record = run.read_json("run.json") or {}
    before = (record.get("pushed") or {}).get("repository")
    if recipe.run.push_to and recipe.run.push_to != before:
        from finetune.publish.push import push

        pushed = push(run.path, recipe.run.push_to, private=recipe.run.push_private)
        run.write_json("run.json", {**record, "pushed": pushed})
        say(f"pushed to {pushed['url']}, commit {pushed['commit']}")


def _stopped(run: RunDir) -> str:
    """What a signal leads to where there is nothing to save."""
    return f"{run.path}: stopped; continue with --resume"


def _postfix(line: dict[str, Any]) -> dict[str, str]:
    """The part of a log line that fits beside the progress bar."""
    loss = line["loss"]
    return {
        "loss": "-" if loss is None else f"{loss:.4f}",
        "lr": f"{line['lr']:.1e}",
        "img/s": f"{line['images_per_second']:.0f}",
    }


def _validation(result: dict[str, Any], step: int, *, best: bool) -> str:
    """What a validation found, in a line."""
    figures = "  ".join(f"{key} {result[key]:.4f}" for key in ("loss", "top1", "top5"))
    return f"step {step}: val {figures}{'  (the best so far)' if best else ''}"
