"""The end of a run: what is published when, and what a later fault cannot take away."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faults_runs import without_plots
from recipe_texts import tiny_text
from refusals import refused

from finetune.data.from_recipe import data_of
from finetune.data.source import open_source
from finetune.errors import SetupError
from finetune.evaluation import evaluate as evaluation
from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.training import finalize
from finetune.training.train import train

RECIPE = tiny_text("eval: 'resize(18) | center_crop'")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch)


def test_results_hold_calibration_temperature_and_mistakes(tmp_path: Path) -> None:
    results = train(parse_recipe(RECIPE), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    assert results["temperature"] == results["test"]["calibrated"]["temperature"]
    assert len(results["test"]["mistakes"]) == 24
    split = open_source("embedded:digits").splits["test"]
    for one in results["test"]["mistakes"]:
        assert split.labels[one["index"]] == one["label"] != one["predicted"]
        assert split.name_of(one["index"]) == one["name"]
    assert "mistakes" not in results["val"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{100 * results['test']['top1']:.2f}" in page


def test_without_a_test_split_the_mistakes_are_those_of_validation(
    tmp_path: Path, image_folder: Path
) -> None:
    """Class folders only, one image of them damaged: the usual case of a user's own photos."""
    train_folder = image_folder / "train"
    changes = [f"data.source=folder:{train_folder}", "data.unreadable=quarantine"]
    changes += ["data.batch_size=4", "data.val_fraction=0.5", "optim.lr=1e-9"]
    recipe = parse_recipe(RECIPE, overrides=[*changes, "model.head_init=default"])
    split = data_of(recipe.data, recipe.run.seed).splits["val"]
    (train_folder / split.name_of(0)).write_bytes(b"no image")
    results = train(recipe, tmp_path / "run")
    assert "test" not in results
    assert results["val"]["examples"] == len(split) - 1
    assert results["val"]["mistakes"]
    for one in results["val"]["mistakes"]:
        assert split.labels[one["index"]] == one["label"] != one["predicted"]
        assert split.name_of(one["index"]) == one["name"]
    page = (tmp_path / "run" / "report.html").read_text()
    before, _, after = page.partition('id="images"')
    assert before.count("data:image/png") == len(results["val"]["mistakes"])
    assert after.count("data:image/png") == 3 * (1 + 1 + 1)  # a class each, and nothing is drawn
    unread = train(parse_recipe(RECIPE, overrides=["run.test=false"]), tmp_path / "unread")
    assert unread["val"]["mistakes"]  # there is a test split, and it is left alone


def test_without_validation_there_is_no_temperature(tmp_path: Path) -> None:
    results = train(parse_recipe(RECIPE, overrides=["data.val_fraction=0"]), tmp_path / "run")
    assert "temperature" not in results
    assert "calibrated" not in results["test"]
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert "calibration" not in config


def test_mistakes_are_numbered_by_the_whole_split(tmp_path: Path, image_folder: Path) -> None:
    damaged = sorted((image_folder / "test").rglob("*.png"))[0]
    damaged.write_bytes(b"no image")
    changes = [f"data.source=folder:{image_folder}", "data.unreadable=quarantine"]
    changes += ["data.batch_size=4", "data.val_fraction=0", "optim.lr=1e-9"]
    changes += ["model.head_init=default"]
    results = train(parse_recipe(RECIPE, overrides=changes), tmp_path / "run")
    split = open_source(f"folder:{image_folder}").splits["test"]
    assert results["test"]["examples"] == len(split) - 1
    assert results["test"]["mistakes"]
    for one in results["test"]["mistakes"]:
        assert split.name_of(one["index"]) == one["name"]
        assert np.asarray(split.read(one["index"])).ndim == 3


def test_a_test_image_that_cannot_be_read_costs_no_model(
    tmp_path: Path, image_folder: Path
) -> None:
    sorted((image_folder / "test").rglob("*.png"))[0].write_bytes(b"no image")
    changes = [f"data.source=folder:{image_folder}", "data.batch_size=4", "data.val_fraction=0"]
    with refused("data.unreadable"):
        train(parse_recipe(RECIPE, overrides=changes), tmp_path / "run")
    model = tmp_path / "run" / "model"
    assert {"config.json", "model.safetensors", "README.md"} <= set(os.listdir(model))
    assert not (tmp_path / "run" / "results.json").exists()


def test_a_report_that_cannot_be_written_costs_no_run(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(*_: object, **__: object) -> None:
        raise SetupError("report.html: the disk is full")

    monkeypatch.setattr("finetune.report.page.write_report", full)
    results = train(parse_recipe(RECIPE), tmp_path / "run")
    assert results["test"]["examples"]
    assert "report.html is left out: report.html: the disk is full" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"


def test_claims_that_changed_after_the_end_are_answered_anew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(parse_recipe(RECIPE), out)
    before = (out / "results.json").read_bytes()
    claims = 'claims: [{metric: test.top1, value: 0.5, tolerance: 0.5, source: "table §7"}]\n'
    results = train(parse_recipe(RECIPE + claims), out, resume=True)
    assert [claim["verdict"] for claim in results["claims"]] == ["met"]
    assert json.loads((out / "results.json").read_text()) == results
    for name in ("recipe.yaml", "report.html", "model/README.md"):
        assert "table §7" in (out / name).read_text(), name
    again = train(parse_recipe(RECIPE + claims.replace("0.5,", "0.9,", 1)), out, resume=True)
    assert [claim["value"] for claim in again["claims"]] == [0.9]
    train(parse_recipe(RECIPE), out, resume=True)
    assert (out / "results.json").read_bytes() == before


class Counted:
    """Stands for a function and counts its calls."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.function: Callable[..., Any] = getattr(module, name)
        self.calls = 0
        patch.setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def figures(results: dict[str, Any]) -> dict[str, Any]:
    """Results without the speed, which no two runs share."""
    timed = ("images_per_second", "seconds")
    return {
        name: {key: value for key, value in part.items() if key not in timed}
        if isinstance(part, dict)
        else part
        for name, part in results.items()
    }


def validated(run: Path) -> list[dict[str, Any]]:
    """The lines of the log that are of the validation split."""
    return [line for line in RunDir(run).history() if line["split"] == "val"]


@pytest.mark.parametrize("tested", [True, False], ids=["tested", "untested"])
def test_the_end_of_a_run_does_nothing_twice(
    tested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it change a figure that the best step has been validated already."""
    recipe = parse_recipe(RECIPE, overrides=["run.eval_every=2", f"run.test={tested}"])
    monkeypatch.setattr(finalize, "_MOST_KEPT", 0)
    anew = Counted(monkeypatch, evaluation, "evaluate")
    expected = train(recipe, tmp_path / "anew")
    monkeypatch.undo()
    without_plots(monkeypatch)
    once = Counted(monkeypatch, evaluation, "evaluate")
    saved = Counted(monkeypatch, finalize, "save_model")
    results = train(recipe, tmp_path / "once")
    assert figures(results) == figures(expected)
    assert results["val"].get("mistakes", []) == expected["val"].get("mistakes", [])
    assert tested or len(results["val"]["mistakes"]) == 24
    assert len(validated(tmp_path / "once")) == 2
    assert (once.calls, anew.calls) == (2 + tested, 3 + tested)
    assert saved.calls == 1
    names = ("config.json", "model.safetensors")
    for one, other in (
        (tmp_path / run / "model" / name for run in ("once", "anew")) for name in names
    ):
        assert one.read_bytes() == other.read_bytes()


def test_a_run_that_only_has_to_end_validates_its_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = parse_recipe(RECIPE), tmp_path / "run"
    expected = train(recipe, tmp_path / "whole")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finalize, "save_model", stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out)
    counted = Counted(monkeypatch, evaluation, "evaluate")
    assert figures(train(recipe, out, resume=True)) == figures(expected)
    assert counted.calls == 2


def test_the_figures_are_of_the_weights_that_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint is damaged after its validation, and the newest takes its place."""
    changes = ["run.eval_every=2", "run.best=val.top1", "optim.name=sgd", "optim.lr=1"]
    changes += ["optim.warmup_steps=0", "model.head_init=default", "run.keep_checkpoints=3"]
    verify = RunDir.verify
    monkeypatch.setattr(
        RunDir, "verify", lambda run, step: "damaged" if step == 2 else verify(run, step)
    )
    results = train(parse_recipe(RECIPE, overrides=changes), tmp_path / "run")
    first, last = validated(tmp_path / "run")
    assert first["top1"] > last["top1"]
    assert results["best_step"] == last["step"] == 4
    assert results["val"]["loss"] == last["loss"]


@pytest.mark.parametrize(
    "adapter, images, kept",
    [
        (None, 50_000, True),
        ({"rank": 4}, 50_000, False),  # it is merged before it is published
        (None, 100_000, False),  # of 1,000 classes: 400 MB
    ],
)
def test_validations_that_can_be_kept(adapter: Any, images: int, kept: bool) -> None:
    recipe = SimpleNamespace(model=SimpleNamespace(adapter=adapter))
    trainer: Any = SimpleNamespace(recipe=recipe)
    loader: Any = SimpleNamespace(labels=range(images), num_classes=1000)
    assert finalize.can_keep(trainer, loader) == kept
