"""Training and evaluation: the only file that starts Accelerate.

`train` is the story: data, network and optimiser are made from the recipe, then one step after
another; at the end the best weights become `model/` and the test split is read, once.
"""

# B batch, K classes

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn

from finetune.card import write_card
from finetune.claims import answer
from finetune.data.feed import Feed
from finetune.errors import DataError, Interrupted, RecipeError, SetupError
from finetune.job import Job, open_job
from finetune.live import Live
from finetune.metrics import Counts
from finetune.models.build import save_model, set_train_mode
from finetune.progress import Meter, StopSignals, bar, say
from finetune.provenance import describe_machine, pick_precision, requested_processes
from finetune.recipe import Recipe, RunSection, load_recipe
from finetune.rundir import RunDir, write_atomically

__all__ = ["evaluate", "launch", "train"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# A resumed run may differ in these: they change where and how fast, not what is learned.
_FREE_KEYS = {
    "data": {"micro_batch", "eval_batch_size", "keep", "workers"},
    "run": {"log_every", "save_every", "keep_checkpoints", "num_processes", "threads", "trackers"},
}


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
    precision = pick_precision(run.precision, processes.device)
    # Accelerate keeps the precision of the process's first run; a second one may have another.
    AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(
            mixed_precision="no" if precision == "fp32" else precision,
            log_with=list(run.trackers) or None,
            project_dir=out,
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
    main = accelerator.is_main_process
    job = open_job(
        recipe,
        device=accelerator.device,
        local_processes=accelerator.num_processes,
        notice=say if main else _silent,
        progress=main,
    )
    if dry_run:
        return {**job.plan(), "num_processes": accelerator.num_processes}
    with _held(run, main=main), StopSignals() as stop:
        start = _begin(run, job, accelerator, resume=resume)
        if start is None:
            return run.read_json("results.json") or {}
        with _status(run, main=main):
            dtype = _DTYPES.get(accelerator.mixed_precision, torch.float32)
            train_feed = job.feed(job.source.splits["train"], train=True, dtype=dtype)
            val = job.source.splits.get("val")
            val_feed = None if val is None else job.feed(val, train=False)
            live = Live(job, accelerator, run)
            if start:
                live.restore(start)
            _fit(live, train_feed, val_feed, stop)
            return _finish(live, val_feed)


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
    set_train_mode(live.model)
    with bar(total=job.steps, start=counters.step, shown=live.main) as shown:
        while counters.step < job.steps and not live.stops_early:
            live.step(next(steps), meter)
            shown.update()
            step = counters.step
            if step % run_keys.log_every == 0 or step == job.steps:
                shown.set_postfix(_postfix(live.log(meter)))
            paused = meter.pause()
            best = False
            if val_feed is not None and job.evaluates_after(step):
                batch_size = live.recipe.data.eval_batch_size
                result = evaluate(live.evaluated(), val_feed, accelerator, batch_size=batch_size)
                best = live.log_validation(result, meter)
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


# The run directory's beginning and end ----------------------------------------------------------


@contextlib.contextmanager
def _held(run: RunDir, *, main: bool) -> Iterator[None]:
    """Hold the run directory's lock on rank 0."""
    if main:
        run.open()
    try:
        yield
    finally:
        run.close()


def _begin(run: RunDir, job: Job, accelerator: Accelerator, *, resume: bool) -> int | None:
    """Start the run's record, or check that the recorded run is this one.

    Returns: the step to continue from, the same on all ranks; None if the run is already done.
    """
    start: list[int | None] = [0]
    if accelerator.is_main_process:
        record = run.read_json("run.json")
        fingerprint = job.fingerprint()
        if record is None:
            record = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        elif not resume:
            raise SetupError(
                f"{run.path}: holds a run already ({record['status']}); continue it with --resume, "
                "or choose another --out"
            )
        else:
            _check_same(run, job.recipe, record, fingerprint)
            start[0] = None if record["status"] == "done" else run.newest(say) or 0
        if start[0] is not None:
            run.forget_after(start[0])
            write_atomically(run.path / "recipe.yaml", job.recipe.to_yaml())
            machine = describe_machine(accelerator.device, accelerator.num_processes)
            plan = {**job.plan(), "precision": accelerator.mixed_precision.replace("no", "fp32")}
            record |= {"status": "running", **machine, "plan": plan}
            record["data_fingerprint"] = fingerprint
            record["weights_sha256"] = job.built.provenance.get("sha256")
            run.write_json("run.json", record)
            if job.recipe.run.trackers:
                accelerator.init_trackers("finetune")
    broadcast_object_list(start)
    return start[0]


def _check_same(run: RunDir, recipe: Recipe, record: dict[str, Any], fingerprint: str) -> None:
    """Refuse to continue a run whose recipe or data is another one, and show the difference."""
    old, new = load_recipe(run.path / "recipe.yaml").model_dump(), recipe.model_dump()
    differences = [
        f"{section}.{key}: {old[section][key]!r} was {new[section][key]!r} is"
        for section in ("model", "data", "optim", "run")
        for key in new[section]
        if old[section][key] != new[section][key] and key not in _FREE_KEYS.get(section, ())
    ]
    if differences:
        raise RecipeError(
            f"{run.path}: cannot continue with another recipe ({'; '.join(differences)}); "
            "restore the key, or choose another --out"
        )
    if record.get("data_fingerprint") != fingerprint:
        raise DataError(
            f"{recipe.data.source}: the data is not what the run in {run.path} began with (an "
            "image or label was added, removed or changed); restore it, or choose another --out"
        )


@contextlib.contextmanager
def _status(run: RunDir, *, main: bool) -> Iterator[None]:
    """Keep `status` in run.json true, whatever ends the run."""
    status = "done"
    try:
        yield
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        status = f"stopped ({code})" if isinstance(error, Interrupted) else f"failed ({code})"
        raise
    finally:
        if main and (record := run.read_json("run.json")) is not None:
            run.write_json("run.json", {**record, "status": status})


def _finish(live: Live, val_feed: Feed | None) -> dict[str, Any]:
    """Measure the best weights, read the test split once, and write results.json and model/."""
    job, run, accelerator = live.job, live.run, live.accelerator
    best_step, weights = live.load_best()
    model, results = live.evaluated(), dict[str, Any]()
    test = job.source.splits.get("test")
    feeds = {"val": val_feed, "test": None if test is None else job.feed(test, train=False)}
    for name, feed in feeds.items():
        if feed is not None:
            results[name] = evaluate(
                model, feed, accelerator, batch_size=live.recipe.data.eval_batch_size
            )
    if live.main:
        history = run.history()
        results["train"] = next(
            (line for line in reversed(history) if line["split"] == "train"), {}
        )
        results |= {"best_step": best_step, "steps": live.counters.step}
        results |= {"skipped_steps": live.counters.skipped}
        results["claims"] = answer(
            [claim.model_dump() for claim in live.recipe.claims],
            history,
            results,
            job.steps_per_epoch,
        )
        run.publish_model(
            lambda folder: save_model(
                folder,
                job.built,
                weights,
                class_names=job.source.class_names,
                preprocessing=job.preprocessing,
                card=write_card(job.recipe, job.built.provenance, results, job.source.class_names),
            ),
            needed=sum(t.nbytes for t in weights.values()),
        )
        run.write_json("results.json", results)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return results


def _postfix(line: dict[str, Any]) -> dict[str, str]:
    """The part of a log line that fits beside the progress bar."""
    loss = line["loss"]
    return {
        "loss": "-" if loss is None else f"{loss:.4f}",
        "lr": f"{line['lr']:.1e}",
        "img/s": f"{line['images_per_second']:.0f}",
    }


def _silent(message: str) -> None:
    """Ranks other than 0 say nothing."""
