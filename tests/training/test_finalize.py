"""The end of a run: results, published files, and errors after the weights are saved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forked_runs import copy_run, disable_plots, disable_report_and_plots
from logs import logged
from networks import config_without_checksums
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.commands.evaluate import evaluate_model
from finetune.data.from_recipe import open_data
from finetune.data.open_source import open_source
from finetune.errors import SetupError
from finetune.evaluation import evaluator as evaluation
from finetune.evaluation.validation_scores import ValidationScores
from finetune.recipe.load import parse_recipe
from finetune.report.page import write_run_report
from finetune.run.directory import RunDir
from finetune.training import finalize
from finetune.training.train import train

RECIPE = tiny_recipe_text("eval: 'resize(18) | center_crop'")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    disable_plots(monkeypatch)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    disable_report_and_plots(monkeypatch)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run with its report, and its results; tests that change it must copy it first."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        disable_plots(patch)
        return out, train(parse_recipe(RECIPE), out)


def test_results_contain_calibration_temperature_and_mistakes(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    run, results = finished_run
    assert json.loads((run / "results.json").read_text()) == results
    assert results["temperature"] == results["test"]["calibrated"]["temperature"]
    assert len(results["test"]["mistakes"]) == 24
    split = open_source("embedded:digits").splits["test"]
    for mistake in results["test"]["mistakes"]:
        assert split.labels[mistake["index"]] == mistake["label"] != mistake["predicted"]
        assert split.name_of(mistake["index"]) == mistake["name"]
    assert "mistakes" not in results["val"]
    config = json.loads((run / "model" / "config.json").read_text("utf-8"))
    scores = ValidationScores.from_config(config["validation_scores"], num_classes=10, source="")
    assert (scores.split, len(scores)) == ("val", results["val"]["examples"])
    assert (scores.nonconformity == 0).mean() == pytest.approx(results["val"]["top1"])
    page = (run / "report.html").read_text()
    assert f"{100 * results['test']['top1']:.2f}" in page


def test_mistakes_come_from_validation_without_a_test_split(
    tmp_path: Path, image_folder: Path
) -> None:
    """Only class folders, with one damaged image: the usual case of a user's own photos."""
    train_folder = image_folder / "train"
    overrides = [f"data.source=folder:{train_folder}", "data.unreadable=quarantine"]
    overrides += ["data.batch_size=4", "data.val_fraction=0.5", "optim.lr=1e-9"]
    recipe = parse_recipe(RECIPE, overrides=[*overrides, "model.head_init=default"])
    split = open_data(recipe.data, recipe.run.seed).splits["val"]
    (train_folder / split.name_of(0)).write_bytes(b"no image")
    results = train(recipe, tmp_path / "run")
    assert "test" not in results
    assert results["val"]["examples"] == len(split) - 1
    assert results["val"]["mistakes"]
    for mistake in results["val"]["mistakes"]:
        assert split.labels[mistake["index"]] == mistake["label"] != mistake["predicted"]
        assert split.name_of(mistake["index"]) == mistake["name"]
    page = (tmp_path / "run" / "report.html").read_text()
    before, _, after = page.partition('id="images"')
    assert before.count("data:image/png") == len(results["val"]["mistakes"])
    # one row per class, without random augmentation
    assert after.count("data:image/png") == 3 * (1 + 1 + 1)


@pytest.mark.usefixtures("no_report")
def test_no_temperature_without_a_validation_split(tmp_path: Path) -> None:
    results = train(parse_recipe(RECIPE, overrides=["data.val_fraction=0"]), tmp_path / "run")
    assert "temperature" not in results
    assert "calibrated" not in results["test"]
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert "calibration" not in config


@pytest.mark.usefixtures("no_report")
def test_mistake_indices_count_unreadable_images(tmp_path: Path, image_folder: Path) -> None:
    damaged = sorted((image_folder / "test").rglob("*.png"))[0]
    damaged.write_bytes(b"no image")
    overrides = [f"data.source=folder:{image_folder}", "data.unreadable=quarantine"]
    overrides += ["data.batch_size=4", "data.val_fraction=0", "optim.lr=1e-9"]
    overrides += ["model.head_init=default"]
    results = train(parse_recipe(RECIPE, overrides=overrides), tmp_path / "run")
    split = open_source(f"folder:{image_folder}").splits["test"]
    assert results["test"]["examples"] == len(split) - 1
    assert results["test"]["mistakes"]
    for mistake in results["test"]["mistakes"]:
        assert split.name_of(mistake["index"]) == mistake["name"]
        assert np.asarray(split.decode(mistake["index"])).ndim == 3


@pytest.mark.usefixtures("no_report")
def test_equal_pixels_in_other_files_are_said_and_recorded(
    tmp_path: Path, image_folder: Path, capsys
) -> None:
    originals = sorted((image_folder / "train").rglob("*.png"))[:2]
    for name, image in zip(("val", "test"), originals, strict=True):
        folder = image_folder / name / image.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "saved_again.png").write_bytes(image.read_bytes() + b"\n")
    overrides = [f"data.source=folder:{image_folder}", "data.batch_size=4"]
    for _ in range(2):
        results = train(parse_recipe(RECIPE, overrides=overrides), tmp_path / "run", resume=True)
        (tmp_path / "run" / "model" / "config.json").unlink()
    leaks = [text for text in results["warnings"] if "the same pixels as train images" in text]
    assert [leak.split()[1] for leak in leaks] == ["'val':", "'test':"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["leakage"] == leaks
    output = capsys.readouterr().err
    assert [output.count(leak) for leak in leaks] == [1, 1]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "**Leak:** split 'test': 1 of 13 images have the same pixels" in card


@pytest.mark.usefixtures("no_report")
def test_unreadable_test_image_does_not_prevent_publishing_the_model(
    tmp_path: Path, image_folder: Path
) -> None:
    sorted((image_folder / "test").rglob("*.png"))[0].write_bytes(b"no image")
    overrides = [f"data.source=folder:{image_folder}", "data.batch_size=4", "data.val_fraction=0"]
    with refused("data.unreadable"):
        train(parse_recipe(RECIPE, overrides=overrides), tmp_path / "run")
    model = tmp_path / "run" / "model"
    assert {"config.json", "model.safetensors", "README.md"} <= set(os.listdir(model))
    assert not (tmp_path / "run" / "results.json").exists()


@pytest.mark.usefixtures("no_report")
def test_other_files_in_the_model_folder_are_kept(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run[0], run)
    (run / "model" / "examples").mkdir()
    (run / "model" / "examples" / "a.png").write_bytes(b"an example")
    (run / "model" / "model.onnx").write_bytes(b"of the old weights")
    (run / "model" / "model.safetensors").write_bytes(b"damaged")
    lines: list[str] = []
    with logged(lines):
        train(parse_recipe(RECIPE), run, resume=True)
    assert f"{run / 'model' / 'model.onnx'}: removed" in "\n".join(lines)
    assert (run / "model" / "examples" / "a.png").read_bytes() == b"an example"
    assert not (run / "model" / "model.onnx").exists()
    assert evaluate_model(str(run))["top1"] == finished_run[1]["test"]["top1"]


def test_failed_report_does_not_fail_the_run(tmp_path: Path, monkeypatch, capsys) -> None:
    def raise_disk_full(*_: object, **__: object) -> None:
        raise SetupError("report.html: the disk is full")

    monkeypatch.setattr("finetune.report.page.write_run_report", raise_disk_full)
    results = train(parse_recipe(RECIPE), tmp_path / "run")
    assert results["test"]["examples"]
    assert "report.html is left out: report.html: the disk is full" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"


def test_changed_claims_of_a_finished_run_are_rechecked_on_resume(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy_run(finished_run[0], tmp_path / "run")
    before = (out / "results.json").read_bytes()
    claims = 'claims: [{metric: test.top1, value: 0.5, tolerance: 0.5, source: "table §7"}]\n'
    results = train(parse_recipe(RECIPE + claims), out, resume=True)
    assert [claim["verdict"] for claim in results["claims"]] == ["met"]
    assert json.loads((out / "results.json").read_text()) == results
    for name in ("recipe.yaml", "report.html", "model/README.md"):
        assert "table §7" in (out / name).read_text(), name
    disable_report_and_plots(monkeypatch)
    changed = train(parse_recipe(RECIPE + claims.replace("0.5,", "0.9,", 1)), out, resume=True)
    assert [claim["value"] for claim in changed["claims"]] == [0.9]
    train(parse_recipe(RECIPE), out, resume=True)
    assert (out / "results.json").read_bytes() == before


def test_changed_results_are_refused_until_they_are_measured_again(
    finished_run: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, expected = copy_run(finished_run[0], tmp_path / "run"), finished_run[1]
    evaluate_model(str(out))
    assert "results.json" not in caplog.text
    (out / "results.json").write_text(
        json.dumps({**expected, "test": {**expected["test"], "top1": 1.0}})
    )
    evaluate_model(str(out))
    assert "results.json: was changed after the run ended" in caplog.text
    for use in (write_run_report, lambda _: train(parse_recipe(RECIPE), out, resume=True)):
        with refused("checkpoint.damaged", out / "results.json"):
            use(out)
    (out / "results.json").unlink()
    with monkeypatch.context() as patch:
        disable_report_and_plots(patch)
        again = train(parse_recipe(RECIPE), out, resume=True)
    assert again["test"]["top1"] == expected["test"]["top1"]
    write_run_report(out)


class CallCounter:
    """Replaces a function and counts its calls."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.function: Callable[..., Any] = getattr(module, name)
        self.calls = 0
        patch.setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def without_timings(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results without timings, which differ from run to run."""
    timing_keys = ("images_per_second", "seconds")
    return {
        name: {key: value for key, value in part.items() if key not in timing_keys}
        if isinstance(part, dict)
        else part
        for name, part in results.items()
        if name != "command_seconds"
    }


def validation_lines(run: Path) -> list[dict[str, Any]]:
    """Return the validation lines of the metrics log."""
    return [line for line in RunDir(run).read_metrics() if line["split"] == "val"]


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("with_test", [True, False], ids=["tested", "untested"])
def test_finalize_reuses_the_last_evaluation_and_saves_once(
    with_test: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best step's logged validation is reused, and the results are the same without reuse."""
    recipe = parse_recipe(RECIPE, overrides=["run.eval_every=2", f"run.test={with_test}"])
    monkeypatch.setattr(finalize, "MAX_KEPT_LOGITS", 0)
    evaluated_again = CallCounter(monkeypatch, evaluation, "evaluate")
    expected = train(recipe, tmp_path / "evaluated_again")
    monkeypatch.undo()
    disable_report_and_plots(monkeypatch)
    reused = CallCounter(monkeypatch, evaluation, "evaluate")
    saved = CallCounter(monkeypatch, finalize, "save_model")
    results = train(recipe, tmp_path / "reused")
    assert without_timings(results) == without_timings(expected)
    assert results["val"].get("mistakes", []) == expected["val"].get("mistakes", [])
    assert with_test or len(results["val"]["mistakes"]) == 24
    assert len(validation_lines(tmp_path / "reused")) == 2
    assert (reused.calls, evaluated_again.calls) == (2 + with_test, 3 + with_test)
    assert saved.calls == 1
    folders = [tmp_path / run / "model" for run in ("reused", "evaluated_again")]
    configs = [config_without_checksums(folder) for folder in folders]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert configs[0] == configs[1]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("no_report")
def test_resumed_finalize_evaluates_the_best_weights(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = parse_recipe(RECIPE), tmp_path / "run"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finalize, "save_model", stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out)
    evaluations = CallCounter(monkeypatch, evaluation, "evaluate")
    assert without_timings(train(recipe, out, resume=True)) == without_timings(finished_run[1])
    assert evaluations.calls == 2


@pytest.mark.usefixtures("no_report")
def test_results_match_the_published_weights_if_the_best_checkpoint_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint is damaged after validation, so the newest is published instead."""
    overrides = ["run.eval_every=2", "run.best=val.top1", "optim.name=sgd", "optim.lr=1"]
    overrides += ["optim.warmup_steps=0", "model.head_init=default", "run.keep_checkpoints=3"]
    verify = RunDir.verify_checkpoint
    monkeypatch.setattr(
        RunDir, "verify_checkpoint", lambda run, step: "damaged" if step == 2 else verify(run, step)
    )
    results = train(parse_recipe(RECIPE, overrides=overrides), tmp_path / "run")
    first, last = validation_lines(tmp_path / "run")
    assert first["top1"] > last["top1"]
    assert results["best_step"] == last["step"] == 4
    assert results["val"]["loss"] == last["loss"]


@pytest.mark.parametrize(
    "adapter, images, expected",
    [
        (None, 50_000, True),
        ({"rank": 4}, 50_000, False),  # the adapter is merged before publishing
        (None, 100_000, False),  # logits of 1,000 classes: 400 MB
    ],
)
def test_can_reuse_last_eval_limits_logit_size_and_excludes_adapters(
    adapter: Any, images: int, expected: bool
) -> None:
    recipe = SimpleNamespace(model=SimpleNamespace(adapter=adapter))
    trainer: Any = SimpleNamespace(recipe=recipe)
    loader: Any = SimpleNamespace(labels=range(images), num_classes=1000)
    assert finalize.can_reuse_last_eval(trainer, loader) == expected
