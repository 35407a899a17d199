"""The checks before a resume, and the record that a run begins with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from recipe_texts import tiny_text
from refusals import refused
from samples import make_folder
from tars import RangeServer, shards

from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.run.record import read_record, write_record
from finetune.training.resume import begin, note_plan
from finetune.training.setup import TrainingSetup, open_setup

RECIPE = tiny_text()


def setup_of(*overrides: str) -> TrainingSetup:
    return open_setup(
        parse_recipe(RECIPE, overrides=overrides),
        device=torch.device("cpu"),
        notice=pytest.fail,
        progress=False,
    )


def start(run: RunDir, setup: TrainingSetup, **changes: Any) -> int | None:
    facts: dict[str, Any] = {"precision": "fp32", "num_processes": 1, "resume": False}
    return begin(run, setup, **{**facts, "notice": lambda text: None, **changes})


def save(run: RunDir, step: int) -> None:
    run.save(step, lambda folder: (folder / "state.json").write_text("{}"), needed=0)


def test_a_run_without_a_checkpoint_is_begun_anew_and_one_with_is_kept(run: RunDir) -> None:
    assert start(run, setup_of()) == 0
    assert start(run, setup_of("optim.lr=2e-3")) == 0
    save(run, 2)
    with refused("setup.run_exists", run.path, "running", "--resume"):
        start(run, setup_of("optim.lr=2e-3"))
    assert start(run, setup_of("optim.lr=2e-3"), resume=True) == 2


def test_only_what_changes_nothing_learned_may_differ(run: RunDir) -> None:
    start(run, setup_of())
    save(run, 2)
    free = ["data.micro_batch=8", "data.workers=1", "run.log_every=3", "run.threads=1"]
    assert start(run, setup_of(*free), resume=True) == 2
    for override, *named in (
        ("model.dropout=0.1", "model.dropout", "0.0", "0.1"),
        ("data.batch_size=32", "data.batch_size"),
        ("run.seed=1", "run.seed"),
    ):
        with refused("recipe.not_this_run", *named):
            start(run, setup_of(override), resume=True)
    with refused("recipe.not_this_run", "run.precision", "fp32", "bf16"):
        start(run, setup_of(), resume=True, precision="bf16")


def test_images_may_have_moved_but_not_changed(run: RunDir, tmp_path: Path) -> None:
    def of(name: str) -> TrainingSetup:
        place = f"data.source=folder:{tmp_path / name}"
        return setup_of(place, "data.val_fraction=0.2", "data.batch_size=4")

    make_folder(tmp_path / "here", {"a": 12, "b": 12})
    start(run, of("here"))
    save(run, 2)
    (tmp_path / "here").rename(tmp_path / "there")
    assert start(run, of("there"), resume=True) == 2
    assert str(tmp_path / "there") in (run.path / "recipe.yaml").read_text()
    next((tmp_path / "there").rglob("*.png")).rename(tmp_path / "gone.png")
    with refused("data.changed", "there"):
        start(run, of("there"), resume=True)


def test_shards_of_another_server_may_be_others(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sizes may be the same, and a server may have no tag for the content."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def of(server: RangeServer) -> TrainingSetup:
        server.tag = ""
        place = f"data.source=tar:{server.url}/set-train-0000.tar"
        return setup_of(place, "data.val_fraction=0", "data.batch_size=2")

    shards(tmp_path, train=1)
    with RangeServer(tmp_path) as here, RangeServer(tmp_path) as there:
        start(run, of(here))
        save(run, 2)
        assert start(run, of(here), resume=True) == 2
        with refused("recipe.not_this_run", "data.source"):
            start(run, of(there), resume=True)


def test_a_run_says_at_its_start_that_it_is_measured_on_training_images(
    run: RunDir, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "set", {"train/a": 9, "train/b": 9, "test/a": 1, "test/b": 1})
    shutil.copy(tmp_path / "set/train/a/1.png", tmp_path / "set/test/a/0.png")
    lines: list[str] = []
    start(run, setup_of(f"data.source={source}", "data.batch_size=4"), notice=lines.append)
    assert ["split 'test': 1 of 2 images" in line for line in lines] == [True]


def test_checkpoints_beyond_the_intact_one_are_removed(run: RunDir) -> None:
    start(run, setup_of())
    save(run, 1)
    save(run, 2)
    (run.folder(2) / "manifest.json").unlink()
    assert start(run, setup_of(), resume=True) == 1
    assert run.steps() == [1]
    (run.folder(1) / "manifest.json").unlink()
    with refused("checkpoint.damaged", run.checkpoints):
        start(run, setup_of(), resume=True)


def test_a_finished_run_is_done_only_with_its_results(run: RunDir) -> None:
    start(run, setup_of())
    save(run, 4)
    record = read_record(run)
    write_record(run, {**record, "status": "done"})
    assert start(run, setup_of(), resume=True) == 4, "killed before its results were written"
    write_record(run, {**record, "status": "done"})
    run.write_json("results.json", {})
    assert start(run, setup_of(), resume=True) == 4, "its model/ was removed"
    write_record(run, {**record, "status": "done"})
    for name in ("config.json", "model.safetensors"):
        run.model.mkdir(exist_ok=True)
        (run.model / name).touch()
    assert start(run, setup_of(), resume=True) is None


def test_without_its_record_a_run_is_not_continued(run: RunDir) -> None:
    start(run, setup_of())
    save(run, 4)
    (run.path / "run.json").unlink()
    with refused("checkpoint.damaged", run.path / "run.json"):
        start(run, setup_of(), resume=True)


def test_the_number_of_readable_images_is_part_of_the_run(run: RunDir) -> None:
    setup = setup_of()
    start(run, setup)
    note_plan(run, setup, start=0)
    assert read_record(run)["plan"]["images_read"] == setup.num_samples
    setup = setup.with_num_samples(setup.num_samples - 1)
    with refused("data.changed", setup.num_samples, setup.num_samples + 1):
        note_plan(run, setup, start=2)


def test_a_run_with_images_in_quarantine_resumes_as_long_as_it_was(run: RunDir) -> None:
    epochs = ["optim.steps=null", "optim.epochs=1", "optim.schedule=constant"]
    setup = setup_of(*epochs)
    readable = setup.with_num_samples(setup.num_samples - setup.recipe.data.batch_size)
    start(run, setup)
    note_plan(run, readable, start=0)
    save(run, 2)
    assert start(run, setup, resume=True, notice=pytest.fail) == 2
    longer, lines = setup_of(*epochs, "optim.epochs=2"), []
    assert start(run, longer, resume=True, notice=lines.append) == 2
    twice = longer.with_num_samples(readable.num_samples).steps
    assert [f"{twice} steps instead of {readable.steps}" in line for line in lines] == [True]
    write_record(run, {**read_record(run), "status": "done"})
    run.write_json("results.json", {})
    run.model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (run.model / name).touch()
    assert start(run, setup, resume=True, notice=pytest.fail) is None
