"""`finetune data doctor`: the files it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from recipe_texts import tiny_recipe_text

from finetune.cli.main import main
from finetune.commands import weight_selection
from finetune.data.open_source import open_source
from finetune.doctor.features import choose_weights

NANO = ("--weights", "embedded:vit_nano")


def diagnose(source: Path | str, out: Path, *options: str) -> dict:
    assert main(["data", "doctor", str(source), "--out", str(out), *NANO, *options]) == 0
    return json.loads((out / "doctor.json").read_text())


def test_a_label_error_of_a_folder_is_found(image_folder: Path, tmp_path: Path) -> None:
    train = image_folder / "train"
    shutil.move(train / "red" / "red-3.png", train / "green" / "wrong.png")
    diagnosis = diagnose(image_folder, tmp_path / "out")
    first = diagnosis["label_errors"][0]
    assert (first["split"], first["path"]) == ("train", "train/green/wrong.png")
    assert (first["given"], first["suggested"]) == ("green", "red")
    assert first["score"] > 0.5
    assert diagnosis["splits"]["train"]["images"] == 24
    with (tmp_path / "out" / "label_scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 36
    worst = max(rows, key=lambda row: float(row["score"]))
    assert (worst["split"], int(worst["index"])) == (first["split"], first["index"])


def test_without_cleanlab_nothing_is_computed(
    image_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    assert main(["data", "doctor", str(image_folder), "--out", str(tmp_path / "out")]) == 5
    assert "finetune-vision[doctor]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_copies_and_groups_across_splits(image_folder: Path, tmp_path: Path) -> None:
    train, test = image_folder / "train", image_folder / "test"
    shutil.copy(train / "red" / "red-0.png", test / "red" / "copy.png")
    shutil.copy(train / "blue" / "blue-0.png", train / "blue" / "copy.png")
    with Image.open(train / "green" / "green-5.png") as image:
        image.convert("RGB").save(test / "green" / "near.jpg", quality=95, subsampling=0)
    (train / "blue" / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (32, 32), "white").save(train / "blue" / "white.png")
    diagnosis = diagnose(image_folder, tmp_path / "out", "--group", r"(\w+-1)\.png")
    leaks, duplicates = (
        [{each["path"] for each in group} for group in diagnosis[kind]]
        for kind in ("leaks", "duplicates")
    )
    assert leaks == [
        {"train/red/red-0.png", "test/red/copy.png"},
        {"train/green/green-5.png", "test/green/near.jpg"},
    ]
    assert duplicates == [{"train/blue/blue-0.png", "train/blue/copy.png"}]
    outliers = {each["path"]: each["reason"] for each in diagnosis["outliers"]}
    assert outliers.items() >= {
        ("train/blue/broken.png", "unreadable"),
        ("train/blue/white.png", "blank"),
    }
    assert diagnosis["class_problems"] == []
    assert [len(group) for group in diagnosis["groups"]] == [2, 2, 2]
    assert diagnosis["expected"]["duplicates"] == {"count": 1, "low": 1, "high": 1}
    leaks_expected = diagnosis["expected"]["leaks"]
    assert leaks_expected["low"] < leaks_expected["count"] == 2 < leaks_expected["high"]


def test_neighbors_have_the_given_and_the_suggested_label(
    image_folder: Path, tmp_path: Path
) -> None:
    train = image_folder / "train"
    shutil.move(train / "red" / "red-3.png", train / "green" / "wrong.png")
    diagnosis = diagnose(image_folder, tmp_path / "out")
    splits = open_source(f"folder:{image_folder}").splits
    for error in diagnosis["label_errors"]:
        for kind, keys in error["similar"].items():
            places = [key.split("/") for key in keys]
            names = {splits[split].name_of(int(index)).split("/")[1] for split, index in places}
            assert (len(keys), names) == (4, {error[kind]})
            assert f"{error['split']}/{error['index']}" not in keys


def test_a_small_class_has_example_images(image_folder: Path, tmp_path: Path) -> None:
    for number in range(1, 8):
        (image_folder / "train" / "red" / f"red-{number}.png").unlink()
    (problem,) = diagnose(image_folder, tmp_path / "out")["class_problems"]
    assert (problem["kind"], problem["classes"], problem["sizes"]) == ("too_small", ["red"], [5])
    ((name, keys),) = problem["examples"]
    assert (name, len(keys), len({*keys})) == ("red", 4, 4)
    assert "train/16" in keys


def test_predictions_of_a_run_count_for_its_held_out_images(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_plots: None
) -> None:
    test = image_folder / "test"
    shutil.move(test / "red" / "red-1.png", test / "green" / "x.png")
    run = tmp_path / "run"
    recipe = tiny_recipe_text(source=f"folder:{image_folder}")
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(run)]) == 0
    alone = diagnose(image_folder, tmp_path / "alone")
    both = diagnose(image_folder, tmp_path / "both", "--run", str(run))

    def scores(name: str) -> dict[tuple[str, str], float]:
        with (tmp_path / name / "label_scores.csv").open(newline="") as file:
            return {
                (row["split"], row["index"]): float(row["score"]) for row in csv.DictReader(file)
            }

    changed = {key for key, score in scores("both").items() if score != scores("alone")[key]}
    assert any(split == "test" for split, _ in changed)
    assert alone["weights"] == both["weights"]
    assert (alone["seen_in_training"], both["seen_in_training"]) == ({}, {str(run): 21})
    capsys.readouterr()
    as_weights = diagnose(image_folder, tmp_path / "weights", "--weights", str(run))
    assert as_weights["seen_in_training"] == {str(run): 21}
    assert f"{run} was trained on 21 of these 36 images" in capsys.readouterr().out
    (image_folder / "train" / "red" / "red-5.png").unlink()
    assert diagnose(image_folder, tmp_path / "changed", "--run", str(run))["seen_in_training"] == {}
    assert "of its data have changed since the run" in capsys.readouterr().err


@pytest.mark.faults
def test_a_killed_doctor_continues(image_folder: Path, tmp_path: Path) -> None:
    """It is killed after each file of features; none is computed again."""
    program = """if True:
        import os, signal, sys
        from finetune.cli.main import main
        from finetune.doctor import features
        from finetune.evaluation import feature_extraction
        features.IMAGES_PER_FILE, write = 16, feature_extraction.write_cached_features
        def write_and_stop(*arguments, **options):
            write(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "killed":
            feature_extraction.write_cached_features = write_and_stop
        sys.exit(main(["data", "doctor", *sys.argv[2:]]))
    """
    command = [str(image_folder), "--out", str(tmp_path / "out"), *NANO]
    environment = {**os.environ, "FINETUNE_CACHE": str(tmp_path / "cache")}

    def run(mode: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, mode, *command],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )

    for num_files in range(1, 4):  # 24 training images and 12 test images
        done = run("killed")
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(list((tmp_path / "cache" / "features").glob("*.npy"))) == num_files
    assert not (tmp_path / "out" / "doctor.json").exists()
    assert run("killed").returncode == 0  # all are cached
    continued = json.loads((tmp_path / "out" / "doctor.json").read_text())
    uninterrupted = diagnose(image_folder, tmp_path / "other")
    assert {**continued, "seconds": 0} == {**uninterrupted, "seconds": 0}


def test_networks_are_compared_on_whole_groups(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, compared = r"(\w+-[0-3])\.png", []

    def record(values_ND: np.ndarray, labels: np.ndarray, groups: np.ndarray | None) -> float:
        compared.append(groups)
        return 0.5

    monkeypatch.setattr(weight_selection, "leave_one_out_accuracy", record)
    monkeypatch.setattr(weight_selection, "MAX_SECONDS", 0.0)
    source = open_source(f"folder:{image_folder}", group=group)
    choose_weights(source, [], torch.device("cpu"), group=group)
    assert compared
    assert all("red-3" in each for each in compared)
