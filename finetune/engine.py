"""Training and evaluation: the only file that starts Accelerate.

`train` is the story: data, network and optimiser are made from the recipe, then one step after
another; at the end the best weights become `model/` and the test split is read, once.
"""

# B batch, K classes

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    GradientAccumulationPlugin,
    LoggerType,
    broadcast_object_list,
    parse_flag_from_env,
)
from torch import nn

from finetune.card import write_card
from finetune.claims import answer
from finetune.data.feed import Feed
from finetune.errors import FinetuneError, Interrupted, RecipeError, SetupError, nearest
from finetune.job import open_job
from finetune.live import Live
from finetune.metrics import Counts
from finetune.models.build import save_model, set_train_mode
from finetune.progress import Meter, StopSignals, bar, say
from finetune.provenance import pick_precision, requested_processes
from finetune.recipe import Recipe, RunSection
from finetune.record import begin, note_plan, status_kept
from finetune.rundir import RunDir

__all__ = ["evaluate", "launch", "train"]

_Result = TypeVar("_Result")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    processes = PartialState(cpu=without_gpu)
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


def train(
    recipe: Recipe, out: str | Path, *, resume: bool = False, dry_run: bool = False
) -> dict[str, Any]:
    """Fine-tune as a recipe says.

    Args:
        recipe: from `load_recipe`.
        out: the run directory.
        resume: continue from the newest intact checkpoint in `out`, or begin if there is none.
        dry_run: check everything, train nothing, write nothing.
    Returns: the content of results.json; with `dry_run` the plan.
    Raises: FinetuneError of the kind that DESIGN's exit codes list.
    """
    run = RunDir(out)
    accelerator = launch(recipe.run, out=run.path)
    main, world = accelerator.is_main_process, accelerator.num_processes
    job = open_job(
        recipe,
        device=accelerator.device,
        local_processes=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        notice=say if main else _silent,
        progress=main,
    )
    # Before the data is decoded: whatever of the recipe does not fit together shows here.
    job.try_pipelines()
    live = Live(job, accelerator, run)
    job.stream.micro_batches(0, rank=accelerator.process_index, world=world)
    precision = accelerator.mixed_precision.replace("no", "fp32")
    if dry_run:
        return {**job.plan(), "precision": precision, "num_processes": world}
    try:
        _on_main(accelerator, run.open)
        facts = {"precision": precision, "num_processes": world, "resume": resume, "notice": say}
        start = _on_main(accelerator, lambda: begin(run, job, **facts))
        if start is None:
            return run.read_json("results.json") or {}
        with StopSignals() as stop, status_kept(run, main=main):
            dtype = _DTYPES.get(precision, torch.float32)
            train_feed = job.feed(job.source.splits["train"], train=True, dtype=dtype)
            _on_main(accelerator, lambda: note_plan(run, job, start=start))
            val = job.source.splits.get("val")
            val_feed = None if val is None else job.feed(val, train=False)
            _heed(stop, run)
            if start:
                live.restore(start)
            if recipe.run.trackers:
                accelerator.init_trackers("finetune")
            _fit(live, train_feed, val_feed, stop)
            return _finish(live, val_feed)
    finally:
        run.close()


def _fit(live: Live, train_feed: Feed, val_feed: Feed | None, stop: StopSignals) -> None:
    """Take the steps that are left, with logs, evaluations and checkpoints when they are due."""
    job, accelerator, counters = live.job, live.accelerator, live.counters
    run_keys = live.recipe.run
    steps = train_feed.train(
        job.stream,
        range(counters.step, job.steps),
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        micro_batch=live.recipe.data.micro_batch,
    )
    meter = Meter(accelerator.device, counters.seconds)
    live.go_on(meter)
    with bar(total=job.steps, start=counters.step, shown=live.main) as shown:
        while counters.step < job.steps and not live.stops_early:
            live.step(*next(steps), meter)
            shown.update()
            step = counters.step
            if step % run_keys.log_every == 0 or step == job.steps:
                shown.set_postfix(_postfix(live.log(meter)))
            paused = meter.pause()
            best = False
            if val_feed is not None and job.evaluates_after(step):
                batch_size = live.recipe.data.eval_batch_size
                live.share_statistics()
                result = evaluate(live.evaluated(), val_feed, accelerator, batch_size=batch_size)
                best = live.log_validation(result, meter)
                shown.clear()
                job.notice(_validation(result, step, best=best))
                set_train_mode(live.model)
            signal_number = live.agree_to_stop(stop.received)
            if best or signal_number or job.saves_after(step):
                live.save(meter)
            meter.resume(paused)
            if signal_number:
                raise Interrupted(
                    f"{live.run.path}: stopped at step {step} of {job.steps} and saved; "
                    "continue with --resume",
                    signal_number,
                )


def evaluate(
    model: nn.Module, feed: Feed, accelerator: Accelerator, *, batch_size: int
) -> dict[str, Any]:
    """Measure a network on a split, each image counted once over all ranks.

    Args:
        model: the network, not wrapped by DDP.
        feed: of the split.
        accelerator: from `launch`.
        batch_size: images at once on this rank.
    Returns: `Counts.result()` and "images_per_second" of all ranks together.
    Raises: DivergedError if a logit is not finite.
    """
    started = time.perf_counter()
    counts = Counts(feed.num_classes, device=accelerator.device)
    model.eval()
    batches = feed.once(
        rank=accelerator.process_index, world=accelerator.num_processes, batch_size=batch_size
    )
    with torch.no_grad(), accelerator.autocast():
        for batch in batches:
            logits_BK = model(batch.images_BCHW).float()
            counts.add(logits_BK[: len(batch.labels_B)], batch.labels_B)
    sums = torch.as_tensor(accelerator.reduce(counts.tensor(), "sum"))
    result = Counts(feed.num_classes, device=accelerator.device).load(sums).result()
    elapsed = time.perf_counter() - started
    return {**result, "images_per_second": round(result["examples"] / elapsed, 2)}


def _on_main(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result:
    """Do something on rank 0; every rank gets its answer, or its error."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except FinetuneError as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    answer: _Result = outcome[0]
    return answer


def _heed(stop: StopSignals, run: RunDir) -> None:
    """End before the first step if a signal has come."""
    if stop.received:
        raise Interrupted(
            f"{run.path}: stopped before training went on; continue with --resume", stop.received
        )


def _finish(live: Live, val_feed: Feed | None) -> dict[str, Any]:
    """Measure the best weights, read the test split once, and write results.json and model/."""
    job, run, accelerator = live.job, live.run, live.accelerator
    batch_size = live.recipe.data.eval_batch_size
    best_step, weights = live.load_best()
    results: dict[str, Any] = {}
    if val_feed is not None:
        results["val"] = evaluate(live.evaluated(), val_feed, accelerator, batch_size=batch_size)
    results |= {"best_step": best_step, "steps": live.counters.step}
    results |= {"skipped_steps": live.counters.skipped}
    # Published before the test split is touched: a test image that cannot be read costs no model.
    _publish(live, results, weights)
    if (test := job.source.splits.get("test")) is not None:
        feed = job.feed(test, train=False)
        results["test"] = evaluate(live.evaluated(), feed, accelerator, batch_size=batch_size)
    if live.main:
        history = run.history()
        lines = (line for line in reversed(history) if line["split"] == "train")
        results["train"] = next(lines, {})
        claims = [claim.model_dump() for claim in live.recipe.claims]
        results["claims"] = answer(claims, history, results, job.steps_per_epoch)
        _publish(live, results, weights)
        run.write_json("results.json", results)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return results


def _publish(live: Live, results: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write model/ on rank 0, with a card that says what is known so far."""
    if not live.main:
        return
    job = live.job
    names = job.source.class_names
    live.run.publish_model(
        lambda folder: save_model(
            folder,
            job.built,
            weights,
            class_names=names,
            preprocessing=job.preprocessing,
            card=write_card(job.recipe, job.built.provenance, results, names),
        ),
        needed=sum(tensor.nbytes for tensor in weights.values()),
    )


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


def _silent(message: str) -> None:
    """Ranks other than 0 say nothing."""
