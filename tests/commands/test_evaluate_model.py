"""Measuring a saved model: the run's own figures, and no figure where the classes differ."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.commands import evaluate
from finetune.commands.evaluate import evaluate_model, format_evaluation, write_evaluation
from finetune.data.open_source import open_source
from finetune.errors import SetupError
from finetune.models.build import build_model
from finetune.recipe.load import parse_recipe
from finetune.training.train import train
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.sample_rng import sample_keys

RECIPE = tiny_recipe_text("eval: 'resize(18) | center_crop'", optim="lr: 3e-3, steps: 6")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("evaluate") / "run"
    return out, train(parse_recipe(RECIPE), out)


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_runs_figures_are_repeated(finished, split: str) -> None:
    out, results = finished
    measured = evaluate_model(str(out), split=split)
    assert measured["confusion"] == results[split]["confusion"]
    assert measured["loss"] == pytest.approx(results[split]["loss"], abs=1e-6)
    assert (measured["split"], measured["data"]) == (split, "embedded:digits")


def test_the_network_computes_as_it_does_in_training(finished, monkeypatch) -> None:
    chosen: list[dict[str, Any]] = []
    monkeypatch.setattr(evaluate, "choose_kernels", lambda network, **given: chosen.append(given))
    evaluate_model(str(finished[0]), split="val")
    assert [(each["device"].type, each["dtype"]) for each in chosen] == [("cpu", torch.float32)]


def test_the_model_folder_alone_gives_the_same_pixels(finished) -> None:
    out, results = finished
    measured = evaluate_model(str(out / "model"), data="embedded:digits")
    assert measured["confusion"] == results["test"]["confusion"]


def test_what_the_training_was_launched_with_does_not_bind_evaluation(finished) -> None:
    out, _ = finished
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


def test_wrong_splits_data_and_classes_are_refused(finished, image_folder: Path) -> None:
    out, _ = finished
    with refused("recipe.unknown_name", "--split", "'tset'", "'test'"):
        evaluate_model(str(out), split="tset")
    with refused("data.wrong_classes", "3 classes", out):
        evaluate_model(str(out), data=f"folder:{image_folder}")
    with refused("recipe.missing_option", "--data"):
        evaluate_model(str(out / "model"))


def test_without_a_test_split_validation_is_measured(
    finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = finished
    photos = digits_in_folders(tmp_path, range(10), name=str) / "train"
    others = tmp_path / "others"
    shutil.copytree(photos, others)
    overrides = [f"data.source=folder:{photos}", "data.unreadable=quarantine"]
    results = train(parse_recipe(RECIPE, overrides=overrides), tmp_path / "run")
    capsys.readouterr()
    measured = evaluate_model(str(tmp_path / "run"))
    assert measured["split"] == "val"
    assert measured["confusion"] == results["val"]["confusion"]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no test split" in line]
    assert f"folder:{photos}" in line
    assert "validation, 10 images" in line
    assert "too few images" in format_evaluation(measured)
    with refused("data.no_split", f"folder:{photos}", "'test'"):
        evaluate_model(str(tmp_path / "run"), split="test")
    evaluate_model(str(out))
    assert "no test split" not in capsys.readouterr().err
    images = len(list(photos.rglob("*.png")))  # all of them, not a tenth
    measured = evaluate_model(str(out), data=f"folder:{photos}")
    assert (measured["split"], measured["examples"]) == ("train", images)
    assert "all of it" in capsys.readouterr().err
    (others / "0" / "broken.png").touch()  # left out, as in the run's training
    measured = evaluate_model(str(tmp_path / "run"), data=f"folder:{others}", split="train")
    assert measured["examples"] == images


def test_figures_on_few_images_have_their_interval() -> None:
    figures = {"loss": 0.5, "top1": 0.8, "top5": 1.0, "ece": 0.1, "confusion": [[8, 2], [2, 8]]}
    figures |= {"balanced_accuracy": 0.8, "macro_f1": 0.8}
    result = {**figures, "split": "test", "class_names": ["a", "b"]}
    assert "75.8–83.6 %" in format_evaluation({**result, "examples": 400})
    assert "too few" not in format_evaluation({**result, "examples": 400})
    assert "95 %" not in format_evaluation({**result, "examples": 1000})
    assert "too few" in format_evaluation({**result, "examples": 20})


def digits_in_folders(root: Path, classes: Sequence[int], *, name: Callable[[int], str]) -> Path:
    """The digits of some classes as a folder of PNG files, half of each class for testing."""
    source = open_source("embedded:digits")
    for split in ("train", "test"):
        images = source.splits[split]
        for digit in classes:
            folder = root / split / name(digit)
            folder.mkdir(parents=True)
            for place in np.flatnonzero(images.labels == digit)[:6].tolist():
                Image.fromarray(images.decode(place)).save(folder / f"{place}.png")
    return root


def test_some_of_the_models_classes_in_another_order_are_numbered_as_the_models(
    finished, tmp_path: Path
) -> None:
    out, _ = finished
    digits_in_folders(tmp_path, [7, 3, 5], name=str)
    config = json.loads((out / "model" / "config.json").read_text())
    renamed = tmp_path / "renamed"
    shutil.copytree(out / "model", renamed)
    # the same network, with names whose alphabetical order is not the model's
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    (renamed / "config.json").write_text(json.dumps({**config, "label_names": words}))
    in_words = digits_in_folders(tmp_path / "words", [7, 3, 5], name=lambda digit: words[digit])
    by_digit = evaluate_model(str(out / "model"), data=f"folder:{tmp_path}")
    by_word = evaluate_model(str(renamed), data=f"folder:{in_words}")
    assert by_digit["examples"] == 18
    assert by_word["confusion"] == by_digit["confusion"]
    assert [row["support"] for row in by_word["per_class"]] == [0, 0, 0, 6, 0, 6, 0, 6, 0, 0]
    assert by_word["class_names"] == words


def test_without_class_names_the_number_of_classes_decides(finished, tmp_path: Path) -> None:
    out, results = finished
    nameless = tmp_path / "nameless"
    shutil.copytree(out / "model", nameless)
    config = json.loads((nameless / "config.json").read_text())
    del config["label_names"]
    (nameless / "config.json").write_text(json.dumps(config))
    measured = evaluate_model(str(nameless), data="embedded:digits")
    assert measured["confusion"] == results["test"]["confusion"]
    three = digits_in_folders(tmp_path / "three", [0, 1, 2], name=str)
    with refused("data.wrong_classes", "3 classes", 10):
        evaluate_model(str(nameless), data=f"folder:{three}")


def test_the_temperature_of_the_run_is_used_and_can_be_fitted_anew(finished, tmp_path) -> None:
    out, results = finished
    measured = evaluate_model(str(out))
    assert measured["calibrated"]["temperature"] == results["temperature"]
    assert measured["calibrated"]["ece"] == pytest.approx(results["test"]["calibrated"]["ece"])
    copy = tmp_path / "copy"
    shutil.copytree(out / "model", copy)
    fitted = evaluate_model(str(copy), data="embedded:digits", split="test", fit_temperature=True)
    stored = json.loads((copy / "config.json").read_text())["calibration"]
    assert stored == {"temperature": fitted["temperature"], "split": "test"}
    assert fitted["temperature"] != results["temperature"]
    assert (
        evaluate_model(str(copy), data="embedded:digits")["calibrated"]["temperature"]
        == (fitted["temperature"])
    )
    with refused("recipe.conflict", "--fit-temperature", "vit_tiny_patch16_224"):
        evaluate_model("vit_tiny_patch16_224", data="embedded:digits", fit_temperature=True)


def test_the_report_names_every_class_and_the_files_hold_it(finished, tmp_path: Path) -> None:
    out, _ = finished
    measured = evaluate_model(str(out))
    measured["class_names"] = ["=cmd|' /C'", *measured["class_names"][1:]]
    text = format_evaluation(measured)
    assert text.splitlines()[0].startswith("test: top1 ")
    rows = [line.split() for line in text.splitlines()]
    report = {" ".join(row[:-4]): row[-4:] for row in rows if len(row) > 4}
    for name, row in zip(measured["class_names"], measured["per_class"], strict=True):
        figures = [f"{row[key] or 0:.4f}" for key in ("precision", "recall", "f1")]
        assert report[" ".join(name.split())] == [*figures, str(row["support"])]
    assert ["accuracy", f"{measured['top1']:.4f}", str(measured["examples"])] in rows
    written = write_evaluation(measured, tmp_path / "new" / "folder")
    assert [Path(file).name for file in written] == [
        "results.json",
        "per_class.csv",
        "confusion.png",
        "reliability.png",
    ]
    with open(written[1], newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["class"] == "'=cmd|' /C'"
    assert [int(row["support"]) for row in rows] == [
        one["support"] for one in measured["per_class"]
    ]
    assert json.loads(Path(written[0]).read_text())["top1"] == measured["top1"]
    for picture in written[2:]:
        with Image.open(picture) as opened:
            assert opened.format == "PNG"
    (tmp_path / "file").write_text("")
    with refused("setup.not_writable", "--out"):
        write_evaluation(measured, tmp_path / "file")


@pytest.fixture(scope="module")
def sharp(finished, tmp_path_factory) -> Path:
    """A run whose network answers to small changes of an image, after so few steps."""
    run = tmp_path_factory.mktemp("sharp") / "run"
    shutil.copytree(finished[0], run)
    file = run / "model" / "model.safetensors"
    state = load_file(file)
    steep = {"head.weight": 100, "patch_embed.proj.weight": 20}
    save_file({key: value * steep.get(key, 1) for key, value in state.items()}, file)
    return run


def corrupted_by_hand(run: Path, kind: str, severity: int) -> tuple[float, float]:
    """Top-1 and loss of a run's network on its corrupted test images, one at a time."""
    built = build_model(str(run))
    source = open_source("embedded:digits").splits["test"]
    sentence = f"resize(18) | center_crop | corrupt('{kind}', {severity})"
    pipeline = build_pipeline(built.preprocessing, sentence)
    right, losses = 0, 0.0
    for place, label in enumerate(source.labels.tolist()):
        image = torch.from_numpy(source.decode(place)).permute(2, 0, 1)[None]
        with torch.no_grad():
            logits = built.model.eval()(pipeline(image, keys=sample_keys(0, 0, [place])))
        right += int(logits.argmax()) == label
        losses += float(torch.nn.functional.cross_entropy(logits, torch.tensor([label])))
    return right / len(source), losses / len(source)


def test_corrupted_images_are_measured_beside_clean_ones(sharp: Path) -> None:
    clean, measured = evaluate_model(str(sharp)), evaluate_model(str(sharp), corrupt="all")
    found = measured.pop("corrupted")
    for result in (clean, measured):
        del result["images_per_second"]
    assert measured == clean
    places = [(row["kind"], row["severity"]) for row in found["rows"]]
    assert places == list(itertools.product(("noise", "blur", "jpeg", "contrast"), range(1, 6)))
    rows = dict(zip(places, found["rows"], strict=True))
    for kind in ("noise", "jpeg"):
        top1, loss = corrupted_by_hand(sharp, kind, 5)
        assert rows[kind, 5]["top1"] == pytest.approx(top1)
        assert rows[kind, 5]["loss"] == pytest.approx(loss, rel=1e-5)
        assert abs(rows[kind, 5]["loss"] - clean["loss"]) > 1e-3
    for key in ("top1", "loss", "ece"):
        assert found["mean"][key] == pytest.approx(np.mean([row[key] for row in found["rows"]]))
    assert evaluate_model(str(sharp), corrupt="noise:5")["corrupted"]["rows"] == [rows["noise", 5]]
    alone = evaluate_model(str(sharp / "model"), data="embedded:digits", corrupt="noise:5")
    (row,) = alone["corrupted"]["rows"]
    # a folder does not say in which precision it was trained: in bfloat16 here
    assert row["loss"] == pytest.approx(rows["noise", 5]["loss"], rel=0.01)
    text = format_evaluation({**measured, "corrupted": found})
    assert f"mean of 20 corruptions: top1 {found['mean']['top1']:.4f}" in text
    (line,) = [line for line in text.splitlines() if line.startswith("noise") and "ece" in line]
    assert line.split()[2:] == [f"{rows['noise', severity]['ece']:.4f}" for severity in range(1, 6)]


def test_two_processes_and_small_batches_corrupt_alike(sharp: Path, tmp_path: Path) -> None:
    expected = evaluate_model(str(sharp), corrupt="noise")["corrupted"]
    small = tmp_path / "small"
    shutil.copytree(sharp, small)
    text = (small / "recipe.yaml").read_text()
    assert "eval_batch_size: 256" in text
    (small / "recipe.yaml").write_text(text.replace("eval_batch_size: 256", "eval_batch_size: 50"))
    ended = run_two_ranks(run_rank_command, "eval", str(small), "--corrupt", "noise", "--json")
    found = json.loads(ended.stdout)["corrupted"]
    assert [row["top1"] for row in found["rows"]] == [row["top1"] for row in expected["rows"]]
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        # the network's sums in batches of another size
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_a_run_on_features_is_measured_on_corrupted_images(tmp_path: Path) -> None:
    frozen = parse_recipe(
        RECIPE, overrides=["model.freeze=backbone", "data.train=resize", "data.num_train=64"]
    )
    train(frozen, tmp_path / "run")
    measured = evaluate_model(str(tmp_path / "run"), corrupt="contrast:5")
    (row,) = measured["corrupted"]["rows"]
    assert row["loss"] == pytest.approx(corrupted_by_hand(tmp_path / "run", "contrast", 5)[1])
    assert row["loss"] != pytest.approx(measured["loss"], abs=1e-4)
