"""The fields of run.json and its status."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import logged
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.errors import DataError, Interrupted
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import training_keys
from finetune.run.directory import RunDir
from finetune.run.record import (
    load_run_recipe,
    read_finished_results,
    read_recipe,
    read_record,
    read_trained_recipe,
    record_status,
    training_identity,
    write_record,
)

RECIPE = tiny_recipe_text()


@contextlib.contextmanager
def run_that_ends_with(
    run: RunDir, error: BaseException | None, *, main: bool = True
) -> Iterator[None]:
    """Run the body in a run that ends with this error, or normally."""
    caught = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with caught, record_status(run, is_main_process=main):
        yield
        if error is not None:
            raise error


def test_unknown_and_missing_keys_are_kept(tmp_path: Path) -> None:
    run, path = RunDir(tmp_path), tmp_path / "run.json"
    assert read_record(run) == {}
    content = {"status": "running", "colour": {"of": [1]}}
    path.write_text(json.dumps(content))
    record = read_record(run)
    assert record == content
    write_record(run, {**record, "precision": "bf16"})
    assert json.loads(path.read_text()) == {**content, "precision": "bf16"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"status": 7}', '{"plan": {"steps": 0}}'])
def test_damaged_record_is_refused_and_left_unchanged(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with refused("checkpoint.damaged", "run.json"):
        read_record(RunDir(tmp_path))
    with run_that_ends_with(RunDir(tmp_path), DataError("broken")):
        pass
    assert (tmp_path / "run.json").read_text() == text


@pytest.mark.parametrize(
    "error, status, code",
    [
        (None, "done", None),
        (Interrupted("stopped", 15), "stopped (143)", "interrupted"),
        (DataError("broken", code="data.changed"), "failed (3)", "data.changed"),
        (MemoryError(), "failed (1)", None),
    ],
)
def test_status_records_how_the_run_ended(
    error: BaseException | None, status: str, code: str | None, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    write_record(run, {"status": "running", "num_processes": 2})
    with run_that_ends_with(run, error, main=False):
        pass
    assert read_record(run) == {"status": "running", "num_processes": 2}
    with run_that_ends_with(run, error):
        pass
    assert read_record(run) == {"status": status, "error_code": code, "num_processes": 2}


def test_a_run_whose_record_was_removed_is_not_done(tmp_path: Path) -> None:
    with run_that_ends_with(RunDir(tmp_path), DataError("broken")):
        pass
    with refused("checkpoint.damaged", "run.json"), run_that_ends_with(RunDir(tmp_path), None):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_was_edited_by_hand_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The data may have moved, or the report would name other data than that of its figures."""
    run, recipe = RunDir(tmp_path), parse_recipe(RECIPE)
    write_record(run, {"status": "done", "training_keys": training_keys(recipe)})
    for source in ("embedded:digits", "hub:other/set"):
        text = recipe.to_yaml().replace("embedded:digits", source)
        (tmp_path / "recipe.yaml").write_text(text)
        assert read_recipe(run).data.source == source
    (message,) = caplog.messages
    assert "data.source was changed" in message
    assert "'embedded:digits', now 'hub:other/set'" in message


def test_finished_results_need_status_done_and_the_same_recipe(tmp_path: Path) -> None:
    def make_recipe(*overrides: str) -> Recipe:
        return parse_recipe(RECIPE, overrides=overrides)

    run = RunDir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(make_recipe().to_yaml())
    run.write_json("results.json", {"steps": 4})
    for status in ("running", "stopped (143)", "failed (3)"):
        write_record(run, {"status": status})
        assert read_finished_results(tmp_path, make_recipe()) is None
    write_record(run, {"status": "done"})
    assert read_finished_results(tmp_path, make_recipe()) == {"steps": 4}
    assert read_finished_results(tmp_path, make_recipe("run.threads=1")) == {"steps": 4}
    assert read_finished_results(tmp_path, make_recipe("optim.lr=2e-3")) is None


@pytest.mark.parametrize("error", [None, DataError("broken", code="data.changed")])
def test_files_that_are_changed_after_the_run_ended_are_noticed(
    error: BaseException | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path)
    write_record(run, {"status": "running", "id": "a"})
    with run_that_ends_with(run, error):
        run.write_json("results.json", {"steps": 4})
        run.append_metrics({"step": 1, "split": "train", "loss": 2.0})
        run.write_json("training_images.json", {"rows": []})
    run.close()
    assert run.read_json("results.json") == {"steps": 4}
    assert run.read_json("training_images.json") == {"rows": []}
    assert len(run.read_metrics()) == 1
    assert not caplog.records

    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace("2.0", "1.0"))
    run.write_json("results.json", {"steps": 5})
    assert run.read_metrics()[0]["loss"] == 1
    assert "metrics.jsonl: was changed after the run had written it" in caplog.text
    with refused("checkpoint.damaged", tmp_path / "results.json"):
        run.read_json("results.json")
    run.write_json("training_images.json", {"rows": [], "note": "of another run"})
    with refused("checkpoint.damaged", tmp_path / "training_images.json"):
        run.read_json("training_images.json")

    (tmp_path / "results.json").rename(tmp_path / "moved.json")
    assert run.read_json("results.json") is None
    assert "results.json: the file is missing" in caplog.text
    (tmp_path / "moved.json").rename(tmp_path / "results.json")

    record = read_record(run)
    write_record(run, {**record, "status": "running"})  # by hand: a resume removes the checksums
    with refused("checkpoint.damaged", tmp_path / "results.json"):
        run.read_json("results.json")


def test_a_run_without_its_recipe_is_no_model_folder(tmp_path: Path) -> None:
    assert load_run_recipe(tmp_path) is None
    (tmp_path / "run.json").write_text('{"status": "done"}')
    with refused("checkpoint.damaged", "no recipe.yaml", "model/recipe.yaml"):
        load_run_recipe(tmp_path)


def test_the_model_of_a_run_that_continues_may_be_older(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(tiny_recipe_text())
    (tmp_path / "model").mkdir()
    for status, is_warned in (("done", False), ("stopped (130)", True)):
        (tmp_path / "run.json").write_text(json.dumps({"status": status}))
        lines: list[str] = []
        with logged(lines):
            load_run_recipe(tmp_path)
        assert any("the run is not finished (stopped (130))" in line for line in lines) is is_warned


def test_a_card_names_the_data_that_the_run_was_trained_on(tmp_path: Path) -> None:
    recipe = parse_recipe(tiny_recipe_text())
    write_record(RunDir(tmp_path), {"training_keys": training_keys(recipe)})
    moved = parse_recipe(tiny_recipe_text(source="hub:famous/benchmark"))
    (tmp_path / "recipe.yaml").write_text(moved.to_yaml())
    assert read_recipe(RunDir(tmp_path)) == moved
    assert read_trained_recipe(RunDir(tmp_path)) == recipe


@pytest.mark.parametrize("split_seed", [None, 0])
def test_runs_with_other_readable_images_or_kept_classes_differ(split_seed: int | None) -> None:
    recipe = parse_recipe(tiny_recipe_text(f"eval: resize, split_seed: {json.dumps(split_seed)}"))
    record = {
        "plan": {"images_read": 80, "val_images_read": 20},
        "whole_fingerprints": {"train": "a"},
        "split_fingerprints": {"train": "a", "classes": "b"},
        "kept_rows_sha256": "c",
    }
    identity = training_identity(recipe, record)
    other_split = record | {"plan": {"images_read": 79, "val_images_read": 21}}
    is_same = training_identity(recipe, other_split) == identity
    assert is_same is (split_seed is None)  # else run.seed draws the splits
    for change in (
        {"plan": {"images_read": 79, "val_images_read": 20}},
        {"kept_rows_sha256": "d"},
        {"precision": "bf16"},
    ):
        assert training_identity(recipe, record | change) != identity
