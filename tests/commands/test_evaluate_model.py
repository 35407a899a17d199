"""Evaluating a saved model: reproduces the run's metrics, and refuses data with other classes."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logs import logged
from networks import forget_checksums
from PIL import Image
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file, save_file
from small_datasets import write_image_folder, write_parquet

from finetune.commands import evaluate
from finetune.commands.compare import compare_models
from finetune.commands.evaluate import (
    evaluate_model,
    format_evaluation,
    warn_if_changed,
    warn_of_training_images,
    write_evaluation,
)
from finetune.data.from_recipe import open_data
from finetune.data.open_source import open_source
from finetune.errors import SetupError
from finetune.evaluation.validation_scores import ValidationScores
from finetune.inference import Classifier
from finetune.model_checksums import with_checksums
from finetune.models.build import build_model
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.run.record import load_run_recipe
from finetune.training.train import train
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.sample_rng import sample_keys

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe_text("eval: 'resize(18) | center_crop'", optim="lr: 3e-3, steps: 6")
SMALL = ("data.num_test=90",)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, no_plots: None) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("evaluate") / "run"
    return out, train(parse_recipe(RECIPE), out)


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluate_reproduces_the_runs_metrics(finished_run, split: str) -> None:
    out, results = finished_run
    evaluated = evaluate_model(str(out), split=split)
    assert evaluated["confusion"] == results[split]["confusion"]
    assert evaluated["loss"] == pytest.approx(results[split]["loss"], abs=1e-6)
    assert (evaluated["split"], evaluated["data"]) == (split, "embedded:digits")


@pytest.mark.parametrize("split", ["train", "test"])
def test_evaluation_on_training_images_is_said(finished_run, split: str) -> None:
    lines: list[str] = []
    with logged(lines):
        evaluate_model(str(finished_run[0]), split=split)
    warning = f"{finished_run[0]}: was trained on these images, so its metrics are too high"
    assert (warning in lines) == (split == "train")


def test_evaluate_uses_the_kernels_and_dtype_of_training(finished_run, monkeypatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(evaluate, "choose_kernels", lambda network, **kwargs: calls.append(kwargs))
    evaluate_model(str(finished_run[0]), split="val")
    assert [(call["device"].type, call["dtype"]) for call in calls] == [("cpu", torch.float32)]


def test_model_folder_alone_gives_the_same_predictions(finished_run) -> None:
    out, results = finished_run
    evaluated = evaluate_model(str(out / "model"), data="embedded:digits")
    assert evaluated["confusion"] == results["test"]["confusion"]


def test_recorded_num_processes_does_not_apply_to_evaluation(finished_run) -> None:
    out, _ = finished_run
    recorded = out / "recipe.yaml"
    text = recorded.read_text()
    try:
        recorded.write_text(text.replace("num_processes: null", "num_processes: 8"))
        assert "num_processes: 8" in recorded.read_text()
        evaluate_model(str(out), split="val")
    except SetupError as error:  # pragma: no cover
        pytest.fail(str(error))
    finally:
        recorded.write_text(text)


def test_wrong_splits_data_and_classes_are_refused(finished_run, image_folder: Path) -> None:
    out, _ = finished_run
    with refused("recipe.unknown_name", "--split", "'tset'", "'test'"):
        evaluate_model(str(out), split="tset")
    with refused("data.wrong_classes", "3 classes", out):
        evaluate_model(str(out), data=f"folder:{image_folder}")
    with refused("recipe.missing_option", "--data"):
        evaluate_model(str(out / "model"))


def test_classes_in_another_order_are_said(finished_run) -> None:
    recipe = parse_recipe(RECIPE)
    source = open_data(recipe.data, recipe.run.seed)
    assert not warn_if_changed(str(finished_run[0]), source, "test")
    reordered = replace(source, class_names=source.class_names[::-1])
    assert warn_if_changed(str(finished_run[0]), reordered, "test")


def test_falls_back_to_validation_without_a_test_split(
    finished_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = finished_run
    photos = write_digit_folders(tmp_path, range(10), name=str) / "train"
    copy = tmp_path / "others"
    shutil.copytree(photos, copy)
    overrides = [f"data.source=folder:{photos}", "data.unreadable=quarantine"]
    results = train(parse_recipe(RECIPE, overrides=overrides), tmp_path / "run")
    capsys.readouterr()
    evaluated = evaluate_model(str(tmp_path / "run"))
    assert evaluated["split"] == "val"
    assert evaluated["confusion"] == results["val"]["confusion"]
    assert not evaluated["data_changed"]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no test split" in line]
    assert f"folder:{photos}" in line
    assert "the val split, 10 images" in line
    assert "too few images" in format_evaluation(evaluated)
    for path in photos.rglob("*.png"):
        path.write_bytes(path.read_bytes() + b"\0")
    assert evaluate_model(str(tmp_path / "run"))["data_changed"]
    capsys.readouterr()
    with refused("data.no_split", f"folder:{photos}", "'test'"):
        evaluate_model(str(tmp_path / "run"), split="test")
    evaluate_model(str(out))
    assert "no test split" not in capsys.readouterr().err
    num_images = len(list(photos.rglob("*.png")))  # all images, not a tenth of them
    evaluated = evaluate_model(str(out), data=f"folder:{photos}")
    assert (evaluated["split"], evaluated["examples"]) == ("train", num_images)
    assert "the whole dataset" in capsys.readouterr().err
    (copy / "0" / "broken.png").touch()  # quarantined, as in the run's training
    evaluated = evaluate_model(str(tmp_path / "run"), data=f"folder:{copy}", split="train")
    assert evaluated["examples"] == num_images


def test_accuracy_on_few_images_has_a_confidence_interval() -> None:
    metrics = {"loss": 0.5, "top1": 0.8, "top5": 1.0, "ece": 0.1, "confusion": [[8, 2], [2, 8]]}
    metrics |= {"balanced_accuracy": 0.8, "macro_f1": 0.8}
    result = {**metrics, "split": "test", "class_names": ["a", "b"]}
    assert "75.8–83.6 %" in format_evaluation({**result, "examples": 400})
    assert "too few" not in format_evaluation({**result, "examples": 400})
    assert "95 %" not in format_evaluation({**result, "examples": 1000})
    assert "too few" in format_evaluation({**result, "examples": 20})


def write_digit_folders(root: Path, classes: Sequence[int], *, name: Callable[[int], str]) -> Path:
    """Write up to 6 images per split and class as PNG files in class folders."""
    source = open_source("embedded:digits")
    for split in ("train", "test"):
        images = source.splits[split]
        for digit in classes:
            folder = root / split / name(digit)
            folder.mkdir(parents=True)
            for index in np.flatnonzero(images.labels == digit)[:6].tolist():
                Image.fromarray(images.decode(index)).save(folder / f"{index}.png")
    return root


def test_subset_of_classes_is_matched_by_name(finished_run, tmp_path: Path) -> None:
    out, _ = finished_run
    write_digit_folders(tmp_path, [7, 3, 5], name=str)
    config = json.loads((out / "model" / "config.json").read_text())
    renamed = tmp_path / "renamed"
    shutil.copytree(out / "model", renamed)
    del config["checksums"]
    # the same model, with class names whose alphabetical order differs from the model's
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    (renamed / "config.json").write_text(json.dumps({**config, "label_names": words}))
    in_words = write_digit_folders(tmp_path / "words", [7, 3, 5], name=lambda digit: words[digit])
    by_digit = evaluate_model(str(out / "model"), data=f"folder:{tmp_path}")
    by_word = evaluate_model(str(renamed), data=f"folder:{in_words}")
    assert by_digit["examples"] == 18
    assert by_word["confusion"] == by_digit["confusion"]
    assert [row["support"] for row in by_word["per_class"]] == [0, 0, 0, 6, 0, 6, 0, 6, 0, 0]
    assert by_word["class_names"] == words


def test_without_class_names_the_number_of_classes_must_match(finished_run, tmp_path: Path) -> None:
    out, results = finished_run
    nameless = tmp_path / "nameless"
    shutil.copytree(out / "model", nameless)
    config = json.loads((nameless / "config.json").read_text())
    del config["label_names"], config["checksums"]
    (nameless / "config.json").write_text(json.dumps(config))
    lines: list[str] = []
    with logged(lines):
        evaluated = evaluate_model(str(nameless), data="embedded:digits")
    assert f"{nameless}: has no class names" in "\n".join(lines)
    assert evaluated["confusion"] == results["test"]["confusion"]
    three = write_digit_folders(tmp_path / "three", [0, 1, 2], name=str)
    with refused("data.wrong_classes", "3 classes", 10):
        evaluate_model(str(nameless), data=f"folder:{three}")


@pytest.mark.parametrize(
    "name, code",
    [("model.safetensors", "weights.damaged"), ("config.json", "weights.changed")],
)
def test_a_model_that_changes_while_a_temperature_is_fitted_is_refused(
    finished_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    folder = shutil.copytree(finished_run[0] / "model", tmp_path / "model")
    measure = evaluate.Evaluator.evaluate

    def change_file(*arguments: Any, **options: Any) -> Any:
        if name == "config.json":
            config = json.loads((folder / name).read_text())
            (folder / name).write_text(
                json.dumps(with_checksums(config, {"model.safetensors": "0" * 64}))
            )
        else:
            (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"?")
        return measure(*arguments, **options)

    monkeypatch.setattr(evaluate.Evaluator, "evaluate", change_file)
    with refused(code, folder):
        evaluate_model(str(folder), data="embedded:digits", split="test", fit_temperature=True)
        evaluate_model(str(folder), data="embedded:digits")  # the old checksum of the weights


def test_recorded_temperature_is_used_and_can_be_refitted(finished_run, tmp_path, capsys) -> None:
    out, results = finished_run
    evaluated = evaluate_model(str(out))
    assert evaluated["calibrated"]["temperature"] == results["temperature"]
    assert "temperature was fitted" not in capsys.readouterr().err
    assert evaluated["calibrated"]["ece"] == pytest.approx(results["test"]["calibrated"]["ece"])
    copy = tmp_path / "copy"
    shutil.copytree(out / "model", copy)
    fitted = evaluate_model(str(copy), data="embedded:digits", split="test", fit_temperature=True)
    stored = json.loads((copy / "config.json").read_text())["calibration"]
    recorded = json.loads((out / "run.json").read_text())["split_fingerprints"]
    fingerprints = {"test": recorded["test"], "classes": recorded["classes"]}
    assert stored == {
        **{"temperature": fitted["temperature"], "split": "test"},
        "fingerprints": fingerprints,
    }
    config = json.loads((copy / "config.json").read_text())
    scores = ValidationScores.from_config(config["validation_scores"], num_classes=10, source="")
    assert (scores.split, len(scores)) == ("test", fitted["examples"])
    assert (scores.nonconformity == 0).mean() == pytest.approx(fitted["top1"])
    assert "validation_scores" not in fitted
    text = format_evaluation(fitted)
    assert "fitted on 'test' of embedded:digits, written to config.json" in text
    assert "results.json" in text
    assert fitted["temperature"] != results["temperature"]
    assert (
        evaluate_model(str(copy), data="embedded:digits")["calibrated"]["temperature"]
        == (fitted["temperature"])
    )
    output = capsys.readouterr().err
    assert "temperature was fitted on a split 'test'" in output
    assert "too sure" not in output
    evaluate_model(str(copy), data="embedded:digits", split="train", fit_temperature=True)
    assert "temperature fitted on training images, or copies of them, makes the model too sure" in (
        capsys.readouterr().err
    )
    for folder in (out, out / "model"):
        with refused("setup.exists", "--out", folder):
            evaluate_model(str(copy), data="embedded:digits", out=str(folder))
    with refused("recipe.conflict", "--fit-temperature", "vit_tiny_patch16_224"):
        evaluate_model("vit_tiny_patch16_224", data="embedded:digits", fit_temperature=True)


def test_leaks_that_the_run_has_recorded_are_named(finished_run, tmp_path, capsys) -> None:
    run = shutil.copytree(finished_run[0], tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    leaks = ["split 'test': 3 of 9 images are copies", "split 'val': another"]
    (run / "run.json").write_text(json.dumps({**record, "leakage": leaks}))
    assert evaluate_model(str(run))["leakage"] == leaks[:1]
    output = capsys.readouterr().err
    assert leaks[0] in output
    assert leaks[1] not in output


def test_classes_of_one_name_are_not_matched_by_name(tmp_path) -> None:
    names = ["crane", "crane", "dog"]
    path = write_parquet(tmp_path / "a.parquet", [0, 1, 2] * 8, names=names)
    overrides = [f"data.source=parquet:{path}", "data.val_fraction=0.25"]
    train(parse_recipe(RECIPE, overrides=overrides), tmp_path / "run")
    evaluate_model(str(tmp_path / "run"), data=f"parquet:{path}", split="train")
    other = write_parquet(tmp_path / "b.parquet", [1, 2, 0] * 8, names=["dog", *names[:2]])
    with refused("data.wrong_classes", "'crane'"):
        evaluate_model(str(tmp_path / "run"), data=f"parquet:{other}", split="train")


def test_streamed_images_are_not_compared_with_training_images(
    finished_run, tmp_path, capsys
) -> None:
    run, path = finished_run[0], write_parquet(tmp_path / "test.parquet", [0, 1])
    source = open_source(f"parquet:{path}", streaming=True)
    assert warn_of_training_images(str(run), load_run_recipe(run), source, "test") == []
    assert "copies of its training images in 'test' are not found" in capsys.readouterr().err


def test_training_images_of_a_changed_folder_are_found(tmp_path, capsys) -> None:
    """B was trained on all images, and has no validation split that A's could be."""
    folder = tmp_path / "photos"
    write_image_folder(folder, {"a": 12, "b": 12})
    for name, fraction in (("a", 0.25), ("b", 0)):
        overrides = [f"data.source=folder:{folder}", f"data.val_fraction={fraction}"]
        train(parse_recipe(RECIPE, overrides=overrides), tmp_path / name)
    capsys.readouterr()
    compare_models(str(tmp_path / "a"), str(tmp_path / "b"))
    assert f"{tmp_path / 'b'}: split 'val': 6 of 6 images are copies" in capsys.readouterr().err
    next((folder / "a").iterdir()).unlink()
    evaluate_model(str(tmp_path / "a"), data=f"folder:{folder}/../photos")
    assert "its training images have changed since the run" in capsys.readouterr().err


def test_copies_of_training_images_promise_no_error_rate(finished_run, tmp_path) -> None:
    run = shutil.copytree(finished_run[0], tmp_path / "run")
    write_digit_folders(tmp_path / "copies", list(range(10)), name=str)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "warn_of_training_images", lambda *_: ["copies"])
        evaluate_model(str(run), data=f"folder:{tmp_path / 'copies'}", fit_temperature=True)
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["validation_scores"] is None


def test_training_images_promise_no_error_rate(finished_run, tmp_path) -> None:
    run = shutil.copytree(finished_run[0], tmp_path / "run")
    evaluate_model(str(run), split="train", fit_temperature=True)
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["validation_scores"] is None
    with refused("weights.no_validation_scores", "--max-error"):
        Classifier.load(run, max_error=0.1)


def test_report_and_files_contain_every_class(finished_run, tmp_path: Path) -> None:
    out, _ = finished_run
    evaluated = evaluate_model(str(out))
    evaluated["class_names"] = ["=cmd|' /C'", *evaluated["class_names"][1:]]
    text = format_evaluation(evaluated)
    assert text.splitlines()[0].startswith("test: top1 ")
    rows = [line.split() for line in text.splitlines()]
    report = {" ".join(row[:-4]): row[-4:] for row in rows if len(row) > 4}
    for name, row in zip(evaluated["class_names"], evaluated["per_class"], strict=True):
        expected = [f"{row[key] or 0:.4f}" for key in ("precision", "recall", "f1")]
        assert report[" ".join(name.split())] == [*expected, str(row["support"])]
    assert ["accuracy", f"{evaluated['top1']:.4f}", str(evaluated["examples"])] in rows
    files = write_evaluation(evaluated, tmp_path / "new" / "folder")
    assert [Path(file).name for file in files] == [
        "results.json",
        "per_class.csv",
        "confusion.png",
        "reliability.png",
    ]
    with open(files[1], newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["class"] == "'=cmd|' /C'"
    assert [int(row["support"]) for row in rows] == [
        class_row["support"] for class_row in evaluated["per_class"]
    ]
    assert json.loads(Path(files[0]).read_text())["top1"] == evaluated["top1"]
    for plot in files[2:]:
        with Image.open(plot) as image:
            assert image.format == "PNG"
    (tmp_path / "file").write_text("")
    with refused("setup.not_writable", "--out"):
        write_evaluation(evaluated, tmp_path / "file")


@pytest.fixture(scope="module")
def sensitive_run(tmp_path_factory, no_plots: None) -> Path:
    """A run with scaled weights, so that small image changes affect the logits after few steps.

    It has 90 of the test images.
    """
    run = tmp_path_factory.mktemp("sharp") / "run"
    train(parse_recipe(RECIPE, overrides=SMALL), run)
    file = run / "model" / "model.safetensors"
    weights = load_file(file)
    forget_checksums(run / "model")
    factors = {"head.weight": 100, "patch_embed.proj.weight": 20}
    save_file({key: value * factors.get(key, 1) for key, value in weights.items()}, file)
    return run


def evaluate_corrupted(run: Path, kind: str, severity: int) -> tuple[float, float]:
    """Return top-1 and loss of a run's model on corrupted test images, one image at a time."""
    built = build_model(str(run))
    recipe = load_recipe(run / "recipe.yaml")
    source = open_data(recipe.data, recipe.run.seed).splits["test"]
    transform = f"resize(18) | center_crop | corrupt('{kind}', {severity})"
    pipeline = build_pipeline(built.preprocessing, transform)
    correct, losses = 0, 0.0
    for index, label in enumerate(source.labels.tolist()):
        image = torch.from_numpy(source.decode(index)).permute(2, 0, 1)[None]
        with torch.no_grad():
            logits = built.model.eval()(pipeline(image, keys=sample_keys(0, 0, [index])))
        correct += int(logits.argmax()) == label
        losses += float(torch.nn.functional.cross_entropy(logits, torch.tensor([label])))
    return correct / len(source), losses / len(source)


def test_corrupted_images_are_evaluated_in_addition_to_clean_ones(sensitive_run: Path) -> None:
    clean, evaluated = (
        evaluate_model(str(sensitive_run)),
        evaluate_model(str(sensitive_run), corrupt="all"),
    )
    corrupted = evaluated.pop("corrupted")
    for result in (clean, evaluated):
        del result["images_per_second"]
    assert evaluated == clean
    corruptions = [(row["kind"], row["severity"]) for row in corrupted["rows"]]
    assert corruptions == list(
        itertools.product(("noise", "blur", "jpeg", "contrast"), range(1, 6))
    )
    rows = dict(zip(corruptions, corrupted["rows"], strict=True))
    for kind in ("noise", "jpeg"):
        top1, loss = evaluate_corrupted(sensitive_run, kind, 5)
        assert rows[kind, 5]["top1"] == pytest.approx(top1)
        assert rows[kind, 5]["loss"] == pytest.approx(loss, rel=1e-5)
        assert abs(rows[kind, 5]["loss"] - clean["loss"]) > 1e-3
    for key in ("top1", "loss", "ece"):
        assert corrupted["mean"][key] == pytest.approx(
            np.mean([row[key] for row in corrupted["rows"]])
        )
    assert evaluate_model(str(sensitive_run), corrupt="noise:5")["corrupted"]["rows"] == [
        rows["noise", 5]
    ]
    of_folder = evaluate_model(
        str(sensitive_run / "model"), data="embedded:digits", corrupt="noise:5"
    )
    (row,) = of_folder["corrupted"]["rows"]
    # a model folder does not record the images and the training precision, so this uses all test
    # images and bfloat16
    assert row["loss"] == pytest.approx(rows["noise", 5]["loss"], rel=0.25)
    assert row["loss"] != of_folder["loss"]
    text = format_evaluation({**evaluated, "corrupted": corrupted})
    assert f"mean of 20 corruptions: top1 {corrupted['mean']['top1']:.4f}" in text
    (line,) = [line for line in text.splitlines() if line.startswith("noise") and "ece" in line]
    assert line.split()[2:] == [f"{rows['noise', severity]['ece']:.4f}" for severity in range(1, 6)]


def test_processes_and_batch_size_do_not_change_corruptions(
    sensitive_run: Path, tmp_path: Path
) -> None:
    expected = evaluate_model(str(sensitive_run), corrupt="noise")["corrupted"]
    small = tmp_path / "small"
    shutil.copytree(sensitive_run, small)
    text = (small / "recipe.yaml").read_text()
    assert "eval_batch_size: 256" in text
    (small / "recipe.yaml").write_text(text.replace("eval_batch_size: 256", "eval_batch_size: 50"))
    finished = run_two_ranks(run_rank_command, "eval", str(small), "--corrupt", "noise", "--json")
    corrupted = json.loads(finished.stdout)["corrupted"]
    assert [row["top1"] for row in corrupted["rows"]] == [row["top1"] for row in expected["rows"]]
    for row, expected_row in zip(corrupted["rows"], expected["rows"], strict=True):
        # sums differ slightly with the batch size
        assert row["loss"] == pytest.approx(expected_row["loss"], abs=1e-5)


def test_run_on_cached_features_is_evaluated_on_corrupted_images(tmp_path: Path) -> None:
    frozen = parse_recipe(
        RECIPE,
        overrides=[*SMALL, "model.freeze=backbone", "data.train=resize", "data.num_train=64"],
    )
    train(frozen, tmp_path / "run")
    evaluated = evaluate_model(str(tmp_path / "run"), corrupt="contrast:5")
    (row,) = evaluated["corrupted"]["rows"]
    assert row["loss"] == pytest.approx(evaluate_corrupted(tmp_path / "run", "contrast", 5)[1])
    assert row["loss"] != pytest.approx(evaluated["loss"], abs=1e-4)


def test_flip_tta_averages_logits_also_after_training_on_features(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["model.freeze=backbone", "data.train=resize", "data.num_train=64", "optim.lr=0.3"]
    overrides += SMALL
    train(parse_recipe(RECIPE, overrides=overrides), run)
    evaluated = evaluate_model(str(run), tta="flip")
    built = build_model(str(run))
    source = open_data(load_recipe(run / "recipe.yaml").data, 0).splits["test"]
    pipeline = build_pipeline(built.preprocessing, "resize(18) | center_crop")
    pixels = torch.from_numpy(np.stack([source.decode(index) for index in range(len(source))]))
    images = pipeline(pixels.permute(0, 3, 1, 2))
    with torch.no_grad():
        logits = (built.model.eval()(images) + built.model(images.flip(3))) / 2
    labels = torch.from_numpy(source.labels)
    loss = float(torch.nn.functional.cross_entropy(logits, labels))
    assert evaluated["loss"] == pytest.approx(loss, abs=1e-5)
    assert evaluated["loss"] != pytest.approx(evaluate_model(str(run))["loss"], abs=1e-4)
    files = write_evaluation(evaluated, tmp_path / "out")
    assert json.loads(Path(files[0]).read_text())["tta"] == "flip"
    with refused("recipe.conflict", "--tta"):
        evaluate_model(str(run), tta="flip", fit_temperature=True)
