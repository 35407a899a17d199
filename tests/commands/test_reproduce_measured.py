"""Run directories that were copied without model/, their hash, and what is said of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from page_runs import MACHINE, measured_of, write_all, write_plan
from refusals import refused

from finetune.commands.reproduce_measured import (
    RUN_FILES,
    in_words,
    machines_of,
    percent,
    place_of,
    run_hash,
    spread,
    table_if_any,
)
from finetune.commands.reproduce_plan import load_plan
from finetune.recipe.load import load_recipe


def test_the_hash_is_that_of_the_four_files(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    folder = write_all(tmp_path, plan)
    run = folder / "whole-s0"
    joined = b"".join((run / name).read_bytes() for name in RUN_FILES)
    assert run_hash(run) == hashlib.sha256(joined).hexdigest()
    assert run_hash(folder / "whole-s1") != run_hash(run)
    before = run_hash(run)
    (run / "report.html").write_text("a page")
    assert run_hash(run) == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert run_hash(run) != before
    (run / "metrics.jsonl").unlink()
    with refused("checkpoint.not_found", "metrics.jsonl"):
        run_hash(run)
    probe = (folder / "few" / "probe.json").read_bytes()
    assert run_hash(folder / "few") == hashlib.sha256(probe).hexdigest()


def test_what_is_read(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    whole, _, few = measured_of(load_plan(plan), write_all(tmp_path, plan))
    assert [run.results["test"]["top1"] for run in whole.runs] == [0.5, 0.6]
    assert (few.runs, few.probe["model"]) == ([], "embedded:vit_nano")
    assert machines_of(whole) == machines_of(few) == "A GPU, 0123456+changes"


def test_a_machine_in_words() -> None:
    assert place_of({**MACHINE, "commit": None}) == ("A GPU", "not known")
    cpu = {"device": {"type": "cpu", "name": "A CPU", "threads": 1}, "commit": "0123456789"}
    assert place_of(cpu) == ("A CPU, 1 thread", "0123456")


def test_a_training_in_words(tmp_path: Path) -> None:
    path = write_plan(tmp_path).parent / "small.yaml"
    recipe = load_recipe(path, ["data.source=parquet:secret/place", "model.freeze=backbone"])
    text = in_words(recipe, named="hub:owner/images")
    assert text == (
        "`embedded:vit_nano` at 32 px, classifier alone; hub:owner/images, a copy; 4 epochs of "
        "batch 64, adamw at 0.001"
    )
    steps = load_recipe(path, ["optim.epochs=null", "optim.steps=7", "data.num_train=2000"])
    assert "; 2,000 images of hub:owner/images; 7 steps of batch 64" in in_words(steps)


@pytest.mark.parametrize(
    "values,said",
    [([0.5], "50.00"), ([0.5, None, 0.6], "55.00 ± 7.07"), ([], "–"), ([None], "–")],
)
def test_a_spread(values: list[float | None], said: str) -> None:
    assert percent(values) == said


def test_a_sign_is_the_means_alone() -> None:
    assert spread([0.1, 0.3], "{:+.1f}") == "+0.2 ± 0.1"


def test_a_table_keeps_its_cells() -> None:
    assert table_if_any(["a", "b"], []) == []
    lines = table_if_any(["a", "b"], [["x|y", "z\nw"]])
    assert lines == ["| a | b |", "| --- | --- |", "| x\\|y | z w |"]
