"""Changes between a stop and its resume: the run continues only if the result stays the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forked_runs import read_weights, run_file_hashes, run_ranks
from launches import launch_training
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.errors import Interrupted
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe_text(
    "train: resize | flip | rotate(10), eval: resize, batch_size: 8",
    source="SOURCE",
    model="pretrained: false, dropout: 0.1",
    optim="name: adamw, lr: 3e-3, schedule: constant, steps: 8, ema_decay: 0.9",
    run="precision: fp32, log_every: 1, eval_every: 4, save_every: 3",
    depth=2,
)


@pytest.fixture
def recipe(image_folder: Path) -> Callable[..., Recipe]:
    text = RECIPE.replace("SOURCE", f"folder:{image_folder}")
    return lambda *overrides: parse_recipe(text, overrides=overrides)


@pytest.fixture
def stopped_run(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Train a run that stops in step 7; its newest checkpoint is of step 6."""

    def train_and_stop(*overrides: str) -> Path:
        step = TrainerState.train_step

        def step_or_stop(trainer: TrainerState, *args: object) -> None:
            if trainer.counters.step == 6:
                raise Interrupted("stopped", 15)
            step(trainer, *args)  # type: ignore[arg-type]

        out = tmp_path / "stopped"
        with monkeypatch.context() as patch:
            patch.setattr(TrainerState, "train_step", step_or_stop)
            with pytest.raises(Interrupted):
                train(recipe(*overrides), out)
        return out

    return train_and_stop


def check_same_training(title: str, run: Path, other: Path, fault: Callable[..., None]) -> None:
    """Check that two runs used the same samples with nearly equal losses; add it to the page."""
    lines = [(log / "metrics.jsonl").read_text().splitlines() for log in (run, other)]
    ours, theirs = ([json.loads(line) for line in log] for log in lines)
    assert [line["samples_seen"] for line in ours] == [line["samples_seen"] for line in theirs]
    distance = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    assert distance < 1e-5
    fault(
        title,
        "the same images in the same steps, losses within 1e-5",
        f"largest difference of a loss {distance:.1e}",
    )


def check_resume_refused(recipe: Recipe, run: Path, code: str, *named: object) -> None:
    before = run_file_hashes(run)
    with refused(code, run, *named):
        train(recipe, run, resume=True)
    assert run_file_hashes(run) == before, "a refusal leaves the run as it was"


RECIPE_CHANGES = [
    ("data.batch_size=4", "8"),
    ("optim.lr=0.001", "0.003"),
    ("optim.schedule=cosine", "'constant'"),
    ("data.train=resize", "'resize | flip | rotate(10)'"),
    ("model.image_size=20", "16"),
    ("model.freeze=backbone", "'none'"),
    ("run.seed=1", "0"),
    ("optim.steps=5", "8"),
]


def test_a_changed_recipe_is_refused_with_the_difference(
    recipe: Callable[..., Recipe], stopped_run: Callable[..., Path], fault
) -> None:
    out = stopped_run()
    for override, old_value in RECIPE_CHANGES:
        key, _, new_value = override.partition("=")
        check_resume_refused(
            recipe(override), out, "recipe.not_this_run", key, old_value, new_value
        )
        fault(
            "another recipe at --resume: batch size, lr, schedule, transforms, image size, "
            "freezing, seed, number of steps",
            "2, the difference is shown, the run is unchanged",
        )


def add_image(folder: Path) -> None:
    shutil.copy(folder / "train/red/red-0.png", folder / "train/red/red-9.png")


def remove_image(folder: Path) -> None:
    (folder / "train/red/red-0.png").unlink()


def flip_pixel_bit(folder: Path) -> None:
    path = folder / "train/red/red-0.png"
    pixels = np.array(Image.open(path))
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)


def move_to_other_class(folder: Path) -> None:
    (folder / "train/red/red-0.png").rename(folder / "train/blue/red-0.png")


def rename_class(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split / "red").rename(folder / split / "rouge")


def add_class(folder: Path) -> None:
    for split in ("train", "test"):
        shutil.copytree(folder / split / "red", folder / split / "violet")


def test_changed_data_is_refused(
    recipe: Callable[..., Recipe],
    stopped_run: Callable[..., Path],
    image_folder: Path,
    tmp_path: Path,
    fault,
) -> None:
    out = stopped_run()
    original = shutil.copytree(image_folder, tmp_path / "kept")
    for change in (
        add_image,
        remove_image,
        flip_pixel_bit,
        move_to_other_class,
        rename_class,
        add_class,
    ):
        change(image_folder)
        check_resume_refused(recipe(), out, "data.changed", image_folder)
        shutil.rmtree(image_folder)
        shutil.copytree(original, image_folder)
        fault(
            "one image added, removed, moved to another class, or one pixel's bit changed; a class "
            "renamed or added",
            "3, before anything is decoded, the run is unchanged",
        )
    train(recipe(), out, resume=True)  # the original data is accepted


def test_log_and_save_settings_may_change(
    recipe: Callable[..., Recipe], stopped_run: Callable[..., Path], tmp_path: Path, fault
) -> None:
    out = stopped_run()
    train(recipe("run.log_every=3", "data.eval_batch_size=5", "run.save_every=1"), out, resume=True)
    train(recipe(), tmp_path / "plain")
    assert read_weights(out) == read_weights(tmp_path / "plain")
    fault(
        "log_every, save_every or eval_batch_size changed at --resume",
        "continues to the bit-identical weights of the uninterrupted run",
    )


def test_a_changed_micro_batch_continues_with_the_same_samples(
    recipe: Callable[..., Recipe], stopped_run: Callable[..., Path], tmp_path: Path, fault
) -> None:
    """Dropout depends on the micro-batch, so it is off here."""
    no_dropout = "model.dropout=0"
    out = stopped_run(no_dropout)
    train(recipe(no_dropout, "data.micro_batch=2"), out, resume=True)
    train(recipe(no_dropout), tmp_path / "plain")
    check_same_training(
        "data.micro_batch changed at --resume: accumulation in four parts instead of one",
        out,
        tmp_path / "plain",
        fault,
    )


def test_more_processes_continue_with_the_same_samples(
    recipe: Callable[..., Recipe],
    stopped_run: Callable[..., Path],
    image_folder: Path,
    tmp_path: Path,
    fault,
) -> None:
    """Dropout depends on the rank, so it is off here."""
    no_dropout = "model.dropout=0"
    out = stopped_run(no_dropout)
    train(recipe(no_dropout), tmp_path / "plain")
    text = RECIPE.replace("SOURCE", f"folder:{image_folder}")
    with launch_training(
        tmp_path, no_dropout, "--resume", recipe=text, out=out, num_processes=2
    ) as launch:
        launch.wait_for_end()
    assert launch.read_record()["num_processes"] == 2, launch.text
    check_same_training(
        "one process at the stop, two at --resume",
        out,
        tmp_path / "plain",
        fault,
    )


def test_fewer_processes_continue_with_the_same_samples(
    recipe: Callable[..., Recipe], tmp_path: Path, fault
) -> None:
    no_dropout = "model.dropout=0"
    out, step = tmp_path / "two", TrainerState.train_step

    def step_or_die(trainer: TrainerState, *args: object) -> None:
        if trainer.counters.step == 6:
            trainer.checkpoint_writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        step(trainer, *args)  # type: ignore[arg-type]

    def train_and_die() -> None:
        TrainerState.train_step = step_or_die  # type: ignore[method-assign]
        train(recipe(no_dropout), out)

    codes, output = run_ranks([train_and_die, train_and_die])
    assert codes == [-signal.SIGKILL] * 2, output
    assert json.loads((out / "run.json").read_text())["num_processes"] == 2
    train(recipe(no_dropout), out, resume=True)
    train(recipe(no_dropout), tmp_path / "plain")
    check_same_training(
        "two processes at the stop, one at --resume",
        out,
        tmp_path / "plain",
        fault,
    )


def test_more_steps_continue_with_a_constant_schedule(
    recipe: Callable[..., Recipe], stopped_run: Callable[..., Path], tmp_path: Path, capsys, fault
) -> None:
    out = stopped_run()
    train(recipe("optim.steps=10"), out, resume=True)
    assert "10 steps instead of 8" in capsys.readouterr().err
    train(recipe("optim.steps=12"), out, resume=True)  # after its end too
    train(recipe("optim.steps=12"), tmp_path / "plain")
    assert read_weights(out) == read_weights(tmp_path / "plain")
    fault(
        "a longer run at --resume, constant learning rate, also after its end",
        "continues to the bit-identical weights of a run that was longer from the start",
    )


def test_more_steps_are_refused_with_a_cosine_schedule(
    recipe: Callable[..., Recipe], stopped_run: Callable[..., Path], fault
) -> None:
    cosine = "optim.schedule=cosine"
    longer = recipe(cosine, "optim.steps=10")
    check_resume_refused(longer, stopped_run(cosine), "recipe.not_this_run", "optim.steps", 8, 10)
    fault(
        "a longer run at --resume, cosine schedule",
        "2: the finished steps would have had other learning rates",
    )
