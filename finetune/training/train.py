"""Training, from the first line to the last: setup, state, loop, finish.

`train` is the story: data, network and optimiser are made from the recipe, then one step after
another; at the end the best weights become `model/` and the test split is read, once.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from finetune.console import bar, say, say_nothing
from finetune.data.feature_loader import AnyLoader
from finetune.data.loader import Batch
from finetune.errors import FinetuneError, Interrupted
from finetune.evaluation.evaluate import Examination
from finetune.models.adapter import load_plain
from finetune.models.head import set_train_mode
from finetune.models.weights.read import read_tensors
from finetune.processes import local_processes
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import dtype_of, precision_of
from finetune.run.record import read_record, status_kept, write_record
from finetune.text import counted, duration
from finetune.training.banner import banner, size_notices
from finetune.training.build_state import build_trainer_state
from finetune.training.distributed import RankErrors
from finetune.training.finalize import answer_anew, can_keep, finish, validation
from finetune.training.launch import launch, leave, on_main, this_launcher
from finetune.training.meter import Meter, StopSignals
from finetune.training.micro_batch import settle_micro_batch
from finetune.training.resume import begin, note_plan
from finetune.training.setup import TrainingSetup, open_setup
from finetune.training.stages import folder_of, stage_recipes
from finetune.training.trainer_state import TrainerState

__all__ = ["train"]

LOCK_SECONDS = 30.0  # for the rank 0 before, which a launcher gives as long to end


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
    before = None
    if recipe.optim.stages:
        accelerator = launch(recipe.run, out=Path(out))
        if dry_run or not on_main(accelerator, RunDir(out).steps):  # else they are long done
            for number, stage in enumerate(stage_recipes(recipe), start=1):
                folder = folder_of(out, number)
                _train(stage, folder, before, resume=resume, dry_run=dry_run, stay=True)
                before = None if dry_run else folder
    return _train(recipe, out, before, resume=resume, dry_run=dry_run, stay=stay)


def _train(
    recipe: Recipe, out: str | Path, before: Path | None, *, resume: bool, dry_run: bool, stay: bool
) -> dict[str, Any]:
    """Do as `train`, from the weights that the stage before has left in its folder."""
    run = RunDir(out)
    accelerator = launch(recipe.run, out=run.path)
    rank, world = accelerator.process_index, accelerator.num_processes
    timeout_seconds, launcher = recipe.run.timeout_seconds, this_launcher()
    number = on_main(accelerator, time.time_ns)
    ranks = RankErrors(
        rank, world, number=number, timeout_seconds=timeout_seconds, launcher=launcher
    )
    with contextlib.closing(run), StopSignals(launcher) as stop, ranks.in_order():
        with stop.at_once(_stopped(run)):
            # Before any data is decoded: a recipe that does not fit is refused here.
            setup = _open(recipe, accelerator)
            recipe = setup.recipe  # with what its nulls mean here
            if before is not None:
                file = before / "model" / "model.safetensors"
                load_plain(setup.built.model, on_main(accelerator, lambda: read_tensors(file)))
            trainer = build_trainer_state(setup, accelerator, run)
            setup.sampler.micro_batches(0, rank=rank, world=world)
            precision, distillation = precision_of(accelerator), trainer.distillation
            teacher = {} if distillation is None else {"teacher": distillation.facts}
            on_main(accelerator, lambda: _check_destination(recipe))
            if dry_run:
                setup = setup.with_num_samples(on_main(accelerator, setup.read_images))
                _tell(setup, size_notices(setup))
                plan = {**setup.plan(), "precision": precision, "num_processes": world}
                return plan | teacher
            patience = LOCK_SECONDS if resume and launcher is not None else 0.0
            on_main(accelerator, lambda: run.open(patience_seconds=patience))
            facts = {"precision": precision, "num_processes": world, "resume": resume}
            facts |= teacher
            start = on_main(accelerator, lambda: begin(run, setup, **facts, notice=say))
        if start is None:
            results = on_main(accelerator, lambda: answer_anew(run, recipe))
        else:
            writer = trainer.checkpoint_writer
            with status_kept(run, main=trainer.main), ranks.explained(), writer.at_work():
                with stop.at_once(_stopped(run)):
                    train_loader, val_loader = _ready(trainer, start)
                best = _loop(trainer, train_loader, val_loader, stop)
                with stop.at_once(_stopped(run)):  # all steps are saved
                    results = finish(trainer, train_loader, val_loader, best)
        with stop.at_once(_stopped(run)):
            for tracker in accelerator.trackers:
                tracker.finish()
            # The run is done: whatever the hub says, nothing of it is lost. Nobody waits for rank
            # 0, as a collective would be given up while a large model or a busy hub takes its time.
            if not stay:
                leave()
            if trainer.main:
                _publish(run, recipe)
            return results


def _open(recipe: Recipe, accelerator: Accelerator) -> TrainingSetup:
    """Open the setup on this rank, and try its pipelines; rank 0 prints the notices."""
    main = accelerator.is_main_process
    setup = open_setup(
        recipe,
        device=accelerator.device,
        local_processes=local_processes(accelerator.num_processes),
        notice=say if main else say_nothing,
        progress=main,
    )
    setup.try_pipelines()
    return setup


def _ready(trainer: TrainerState, start: int) -> tuple[AnyLoader, AnyLoader | None]:
    """Decode the data and go to the step to continue from.

    From here on the setup counts the training images that can be read.

    Returns: the loaders of training and of validation, if there is one.
    """
    accelerator, run, splits = trainer.accelerator, trainer.run, trainer.setup.source.splits
    if start:  # before the images: a frozen backbone computes their features
        trainer.restore(start)
    train_loader = trainer.loader(splits["train"], train=True, dtype=dtype_of(accelerator))
    labels = train_loader.store.split.labels
    trainer.setup = setup = trainer.setup.with_num_samples(len(labels), labels)
    on_main(accelerator, lambda: note_plan(run, setup, start=start))
    val_loader = trainer.loader(splits["val"], train=False) if "val" in splits else None
    settle_micro_batch(trainer, train_loader, functools.partial(on_main, accelerator))
    if trainer.recipe.run.trackers:
        accelerator.init_trackers("finetune")
    _tell(setup, [*banner(trainer), *size_notices(setup)])
    return train_loader, val_loader


def _tell(setup: TrainingSetup, lines: list[str]) -> None:
    for line in lines:
        setup.notice(line)


def _loop(
    trainer: TrainerState, train_loader: AnyLoader, val_loader: AnyLoader | None, stop: StopSignals
) -> tuple[int, Examination] | None:
    """Take the steps that are left. Returns: the best validation and its step, if it is kept."""
    setup, accelerator, counters = trainer.setup, trainer.accelerator, trainer.counters
    log_every = trainer.recipe.run.log_every
    batches = train_loader.train(
        setup.sampler,
        range(counters.step, setup.steps),
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        micro_batch=trainer.micro_batch,
    )
    meter = Meter(accelerator.device, counters.seconds, distills=bool(trainer.distillation))
    first, began = counters.step + 1, meter.seconds
    forecast = _Forecast(setup.steps)
    keeps = val_loader is not None and can_keep(trainer, val_loader)
    kept: tuple[int, Examination] | None = None
    trainer.go_on(meter)
    with (
        contextlib.closing(batches) as steps,
        bar(total=setup.steps, start=counters.step, shown=trainer.main) as shown,
    ):
        while counters.step < setup.steps and not trainer.stops_early:
            number, coming = next(steps)
            trainer.step(number, _read(coming, trainer, meter, stop), meter)
            shown.update()
            step = counters.step
            if trainer.compiled and step == first:
                seconds = meter.seconds - began
                setup.notice(f"compiled the network: the first step took {seconds:.0f} s")
            if step % log_every == 0 or step == setup.steps:
                shown.set_postfix(_postfix(trainer.log(meter)), refresh=False)
            if (line := forecast.after(step, meter.seconds)) is not None:
                setup.notice(line)
            paused = meter.pause()
            best = False
            if val_loader is not None and setup.evaluates_after(step):
                examination = validation(trainer, val_loader, is_last=keeps)
                if best := _validate(trainer, examination, meter):
                    kept = (step, examination) if keeps else None
            signal_number = trainer.agree_to_stop(stop.received)
            if best or signal_number or setup.saves_after(step):
                trainer.save(meter)
            trainer.checkpoint_writer.look()
            meter.resume(paused)
            if signal_number:
                trainer.saved()
                raise Interrupted(_saved(trainer), signal_number)
    if counters.step < setup.steps:
        run = trainer.recipe.run
        setup.notice(
            f"stopped early, at step {counters.step:,} of {setup.steps:,}: "
            f"{counted(counters.stale, 'evaluation')} in a row had no better {run.best} than "
            f"the {counters.best:.4g} of step {counters.best_step} (run.patience={run.patience})"
        )
    return kept


def _read(
    batches: Iterator[Batch], trainer: TrainerState, meter: Meter, stop: StopSignals
) -> Iterator[Batch]:
    """Yield a step's micro-batches. Where one does not come, the steps before are saved.

    A signal ends the wait for it. Of several processes, others may not miss one: they only fail.
    """
    if trainer.accelerator.num_processes > 1:
        yield from batches
        return
    while True:
        try:
            with stop.at_once(_saved(trainer)):
                batch = next(batches, None)
        except FinetuneError:
            trainer.undo_micro_batches()
            trainer.saved()
            if trainer.counters.step not in {0, *trainer.run.steps()}:
                trainer.save(meter)
                trainer.saved()
            raise
        if batch is None:
            return
        yield batch


class _Forecast:
    """Says once how long the rest of a run takes, if that is long enough to be worth saying."""

    _STEPS, _SECONDS = 3, 10.0  # measured before anything is said

    def __init__(self, steps: int) -> None:
        self._total = steps
        self._start: tuple[int, float] | None = None
        self._is_done = False

    def after(self, step: int, seconds: float) -> str | None:
        """Take the time after a step into account. Returns: the line, once, else None."""
        if self._start is None:  # the first step may have compiled the network
            self._start = (step, seconds)
        done, elapsed = step - self._start[0], seconds - self._start[1]
        if self._is_done or done < self._STEPS or elapsed < self._SECONDS:
            return None
        self._is_done = True
        left = self._total - step
        if not left:
            return None
        return f"about {duration(elapsed / done * left)} for the {counted(left, 'step')} to come"


def _validate(trainer: TrainerState, examination: Examination, meter: Meter) -> bool:
    """Evaluate on the validation split and log it. Returns: True if it is the best so far."""
    trainer.share_statistics()
    batch_size = trainer.recipe.data.eval_batch_size
    result = examination.measure(trainer.evaluated(), batch_size=batch_size)
    best = trainer.log_validation(result, meter)
    shown = best and trainer.recipe.run.best != "last"
    trainer.setup.notice(_validation(result, trainer.counters.step, best=shown))
    set_train_mode(trainer.model)
    return best


def _check_destination(recipe: Recipe) -> None:
    """Find out before training whether the model can be pushed after it."""
    if recipe.run.push_to:
        from finetune.publish.permissions import check_rights

        check_rights(recipe.run.push_to, private=recipe.run.push_private)


def _publish(run: RunDir, recipe: Recipe) -> None:
    """Push the model if the recipe says so and it was not yet done, and note the commit."""
    record = read_record(run)
    before = record.get("pushed", {}).get("repository")
    if recipe.run.push_to and recipe.run.push_to != before:
        from finetune.publish.push import push

        pushed = push(run.path, recipe.run.push_to, private=recipe.run.push_private)
        write_record(run, {**record, "pushed": pushed})
        say(f"pushed to {pushed['url']}, commit {pushed['commit']}")


def _saved(trainer: TrainerState) -> str:
    """The message of a signal that ends training."""
    if not trainer.counters.step:
        return _stopped(trainer.run)
    steps = f"step {trainer.counters.step} of {trainer.setup.steps}"
    return f"{trainer.run.path}: stopped at {steps} and saved; continue with --resume"


def _stopped(run: RunDir) -> str:
    """The message of a signal where there is nothing to save."""
    return f"{run.path}: stopped; continue with --resume"


def _postfix(line: dict[str, Any]) -> dict[str, str]:
    """The part of a log line that fits beside the progress bar."""
    loss, rate = line["loss"], line["images_per_second"]
    return {
        "loss": "-" if loss is None else f"{loss:.4f}",
        "lr": f"{line['lr']:.1e}",
        "img/s": f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}",
    }


def _validation(result: dict[str, Any], step: int, *, best: bool) -> str:
    """A validation's figures in a line."""
    keys = ["loss", "top1", "top5"] if len(result["per_class"]) > 5 else ["loss", "top1"]
    if "map" in result:
        keys = ["loss", "map", "macro_f1", "micro_f1"]
    figures = "  ".join(f"{key} {result[key]:.4f}" for key in keys)
    return f"step {step}: val {figures}{'  (the best so far)' if best else ''}"
