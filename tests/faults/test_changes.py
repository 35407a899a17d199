"""Changes between a stop and its resume: exact ones go on, all others are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forked_runs import read_weights, run_file_hashes
from forked_runs import run_ranks as launch_ranks
from launches import launch_training
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.errors import Interrupted
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")

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
def stopped(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """A run that ended in its seventh step; its newest checkpoint is of the sixth."""

    def stop(*overrides: str) -> Path:
        step = TrainerState.train_step

        def until(trainer: TrainerState, *args: object) -> None:
            if trainer.counters.step == 6:
                raise Interrupted("stopped", 15)
            step(trainer, *args)  # type: ignore[arg-type]

        out = tmp_path / "stopped"
        with monkeypatch.context() as patch:
            patch.setattr(TrainerState, "train_step", until)
            with pytest.raises(Interrupted):
                train(recipe(*overrides), out)
        return out

    return stop


def shown_as_close(title: str, run: Path, other: Path, fault: Callable[..., None]) -> None:
    """Two runs saw the same samples and had nearly the same losses; an entry of the page."""
    lines = [(each / "metrics.jsonl").read_text().splitlines() for each in (run, other)]
    ours, theirs = ([json.loads(line) for line in each] for each in lines)
    assert [line["samples_seen"] for line in ours] == [line["samples_seen"] for line in theirs]
    distance = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    assert distance < 1e-5
    fault(
        title,
        "the same images in the same steps, losses within 1e-5",
        f"largest difference of a loss {distance:.1e}",
    )


def check_refused(recipe: Recipe, run: Path, code: str, *named: object) -> None:
    before = run_file_hashes(run)
    with refused(code, run, *named):
        train(recipe, run, resume=True)
    assert run_file_hashes(run) == before, "a refusal leaves the run as it was"


OTHERS = [
    ("data.batch_size=4", "8"),
    ("optim.lr=0.001", "0.003"),
    ("optim.schedule=cosine", "'constant'"),
    ("data.train=resize", "'resize | flip | rotate(10)'"),
    ("model.image_size=20", "16"),
    ("model.freeze=backbone", "'none'"),
    ("run.seed=1", "0"),
    ("optim.steps=5", "8"),
]


def test_another_recipe_is_refused_with_the_difference(
    recipe: Callable[..., Recipe], stopped: Callable[..., Path], fault
) -> None:
    out = stopped()
    for override, before in OTHERS:
        key, _, now = override.partition("=")
        check_refused(recipe(override), out, "recipe.not_this_run", key, before, now)
        fault(
            "another recipe at --resume: batch, rate, schedule, images, size, freezing, seed, "
            "length",
            "2, the difference is shown, the run stays as it is",
        )


def added(folder: Path) -> None:
    shutil.copy(folder / "train/red/red-0.png", folder / "train/red/red-9.png")


def removed(folder: Path) -> None:
    (folder / "train/red/red-0.png").unlink()


def repainted(folder: Path) -> None:
    path = folder / "train/red/red-0.png"
    pixels = np.array(Image.open(path))
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)


def relabelled(folder: Path) -> None:
    (folder / "train/red/red-0.png").rename(folder / "train/blue/red-0.png")


def renamed_class(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split / "red").rename(folder / split / "rouge")


def another_class(folder: Path) -> None:
    for split in ("train", "test"):
        shutil.copytree(folder / split / "red", folder / split / "violet")


def test_other_data_is_refused(
    recipe: Callable[..., Recipe],
    stopped: Callable[..., Path],
    image_folder: Path,
    tmp_path: Path,
    fault,
) -> None:
    out = stopped()
    kept = shutil.copytree(image_folder, tmp_path / "kept")
    for change in (added, removed, repainted, relabelled, renamed_class, another_class):
        change(image_folder)
        check_refused(recipe(), out, "data.changed", image_folder)
        shutil.rmtree(image_folder)
        shutil.copytree(kept, image_folder)
        fault(
            "one image added, removed, moved to another class, or one pixel's bit changed; a class "
            "renamed or added",
            "3, before anything is decoded, the run stays as it is",
        )
    train(recipe(), out, resume=True)  # as it was, it is taken


def test_what_changes_nothing_learned_goes_on_to_the_same_weights(
    recipe: Callable[..., Recipe], stopped: Callable[..., Path], tmp_path: Path, fault
) -> None:
    out = stopped()
    train(recipe("run.log_every=3", "data.eval_batch_size=5", "run.save_every=1"), out, resume=True)
    train(recipe(), tmp_path / "plain")
    assert read_weights(out) == read_weights(tmp_path / "plain")
    fault(
        "logging, saving or evaluation's batch changed at --resume",
        "goes on to the weights of the uninterrupted run, to the bit",
    )


def test_another_micro_batch_continues_by_samples(
    recipe: Callable[..., Recipe], stopped: Callable[..., Path], tmp_path: Path, fault
) -> None:
    """Dropout is keyed by the micro-batch, so it is off here."""
    calm = "model.dropout=0"
    out = stopped(calm)
    train(recipe(calm, "data.micro_batch=2"), out, resume=True)
    train(recipe(calm), tmp_path / "plain")
    shown_as_close(
        "data.micro_batch changed at --resume: accumulation in four parts instead of one",
        out,
        tmp_path / "plain",
        fault,
    )


@pytest.mark.faults
def test_another_number_of_processes_continues_by_samples(
    recipe: Callable[..., Recipe],
    stopped: Callable[..., Path],
    image_folder: Path,
    tmp_path: Path,
    fault,
) -> None:
    """Dropout is keyed by the rank, so it is off here."""
    calm = "model.dropout=0"
    out = stopped(calm)
    train(recipe(calm), tmp_path / "plain")
    text = RECIPE.replace("SOURCE", f"folder:{image_folder}")
    with launch_training(tmp_path, calm, "--resume", recipe=text, out=out, num_processes=2) as two:
        two.wait_for_end()
    assert two.read_record()["num_processes"] == 2, two.text
    shown_as_close(
        "one process at the stop, two at --resume",
        out,
        tmp_path / "plain",
        fault,
    )


@pytest.mark.faults
def test_fewer_processes_continue_by_samples(
    recipe: Callable[..., Recipe], tmp_path: Path, fault
) -> None:
    calm = "model.dropout=0"
    out, step = tmp_path / "two", TrainerState.train_step

    def until(trainer: TrainerState, *args: object) -> None:
        if trainer.counters.step == 6:
            trainer.checkpoint_writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        step(trainer, *args)  # type: ignore[arg-type]

    def dies() -> None:
        TrainerState.train_step = until  # type: ignore[method-assign]
        train(recipe(calm), out)

    codes, told = launch_ranks([dies, dies])
    assert codes == [-signal.SIGKILL] * 2, told
    assert json.loads((out / "run.json").read_text())["num_processes"] == 2
    train(recipe(calm), out, resume=True)
    train(recipe(calm), tmp_path / "plain")
    shown_as_close(
        "two processes at the stop, one at --resume",
        out,
        tmp_path / "plain",
        fault,
    )


def test_a_longer_run_continues_where_its_past_is_the_same(
    recipe: Callable[..., Recipe], stopped: Callable[..., Path], tmp_path: Path, capsys, fault
) -> None:
    out = stopped()
    train(recipe("optim.steps=10"), out, resume=True)
    assert "10 steps instead of 8" in capsys.readouterr().err
    train(recipe("optim.steps=12"), out, resume=True)  # after its end too
    train(recipe("optim.steps=12"), tmp_path / "plain")
    assert read_weights(out) == read_weights(tmp_path / "plain")
    fault(
        "a longer run at --resume, constant learning rate, also after its end",
        "goes on to the weights of the run that was longer from the start, to the bit",
    )


def test_a_longer_run_is_refused_where_its_past_is_another(
    recipe: Callable[..., Recipe], stopped: Callable[..., Path], fault
) -> None:
    cosine = "optim.schedule=cosine"
    longer = recipe(cosine, "optim.steps=10")
    check_refused(longer, stopped(cosine), "recipe.not_this_run", "optim.steps", 8, 10)
    fault(
        "a longer run at --resume, cosine schedule",
        "2: the rates of the steps that are done would have been others",
    )
