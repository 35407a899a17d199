"""`finetune probe`: protocol and accuracies, the run's own pixels, refusals, two processes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from logs import logged
from networks import save_network
from ranks import run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from small_datasets import random_png, write_file, write_image_folder

from finetune.commands import probe
from finetune.commands.probe import format_probe, parse_shots, probe_model, read_probe
from finetune.data.open_source import open_source
from finetune.evaluation import linear_probe
from finetune.evaluation.linear_probe import evaluate_few_shot
from finetune.model_checksums import json_sha256
from finetune.models.build import build_model
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

FEW_STEPS = 60
SPLITS = ("train", "val", "test")
WHOLE = ("data.num_train=null", "data.num_test=null", "data.val_fraction=0", "data.batch_size=4")
ARGS = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}
RECIPE = tiny_recipe_text(
    "eval: 'resize(10) | center_crop'",
    optim="lr: 3e-3, steps: 2",
    run="precision: fp32, seed: 7",
    size=8,
    width=24,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with random weights, for 8 px images."""
    torch.manual_seed(0)
    built = build_model(
        "vit_tiny_patch16_224", num_classes=2, pretrained=False, image_size=8, args=ARGS
    )
    return save_network(tmp_path_factory.mktemp("probe") / "model", built, ["a", "b"])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("FINETUNE_CACHE", str(folder))
    yield folder
    patch.undo()


def without_timings(result: dict[str, Any]) -> dict[str, Any]:
    varying = ("features", "machine", "sha256")
    return {key: value for key, value in result.items() if key not in varying}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_probe, "MIN_SGD_STEPS", FEW_STEPS)


def test_complete_result_and_its_file(model: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "data": "embedded:digits",
        "linear": True,
        "knn": 20,
        "linear_sgd": True,
        "folds": 2,
    }
    result = probe_model(model, **arguments, out=tmp_path / "new" / "folder")
    assert list(result["shots"]) == [1, 5, 10, 25]
    assert [len(row["seeds"]) for row in result["shots"].values()] == [3, 3, 3, 3]
    accuracies = [row["accuracy"] for row in result["shots"].values()]
    assert 0.1 < accuracies[0] < accuracies[-1] < result["linear"]["accuracy"] < 1
    assert result["protocol"] | {"weights": "", "eval": ""} == {
        "features": "pre-logits",
        "width": 24,
        "train_images": 1442,
        "test_images": 355,
        "classes": 10,
        "l2": 1024.0,
        "bias": 100.0,
        "weights": "",
        "eval": "",
    }
    assert result["linear"]["chosen_on"] == "10% of train"
    assert result["linear"]["val_images"] == 145
    sgd = result["linear_sgd"]
    assert list(sgd) == [
        *("accuracy", "features", "lr", "grid", "at_edge", "chosen_on"),
        "val_images",
    ]
    inputs = ["1 class token", "1 class token, patches"]  # the model has one block
    assert [row["features"] for row in sgd["grid"]] == [name for name in inputs for _ in range(13)]
    assert 0.5 < sgd["accuracy"] < 1
    assert (sgd["chosen_on"], sgd["val_images"]) == ("10% of train", 145)
    assert 0.5 < result["folds"]["accuracy"] < 1
    assert len(result["folds"]["accuracies"]) == 2
    without_linear = probe_model(model, data="embedded:digits", shots=[1, 5])
    for num_shots, row in without_linear["shots"].items():  # pre-logits computed in another way
        assert result["shots"][num_shots]["seeds"] == pytest.approx(row["seeds"], abs=0.006)
    assert without_linear["linear_sgd"] is None
    assert result["knn"]["k"] == 20
    assert result["knn"]["plain"] > 0.5
    saved = json.loads((tmp_path / "new" / "folder" / "probe.json").read_text())
    assert saved.pop("sha256") == json_sha256(saved)
    assert saved == json.loads(json.dumps(result))
    assert read_probe(tmp_path / "new" / "folder") == json.loads(json.dumps(result)) | {
        "shots": result["shots"]
    }
    splits = open_source("embedded:digits").splits
    assert result["split_fingerprints"] == {
        name: splits[name].fingerprint for name in ("train", "test")
    }

    cached_result = probe_model(model, **arguments)
    assert without_timings(cached_result) == without_timings(result)
    assert [split["cached"] for split in cached_result["features"].values()] == [True, True]
    text = format_probe(cached_result)
    for row in result["shots"].values():
        assert f"{row['accuracy']:.4f}  {row['std']:.4f}" in text
    assert f"{result['linear']['accuracy']:.4f}" in text
    assert f"learning rate {sgd['lr']:g} on {sgd['features']}; " in text
    assert f"{sgd['chosen_on']}): {sgd['accuracy']:.4f}" in text
    assert f"{result['knn']['weighted']:.4f} weighted" in text
    assert f"{result['folds']['accuracy']:.4f} ± {result['folds']['std']:.4f}" in text
    assert "train from the cache" in text


def test_few_shot_accuracies_match_features_from_timm(model: str) -> None:
    """The expected values use timm; only the images and the solver come from this package."""
    model_from_timm = timm.create_model(f"local-dir:{model}", pretrained=True).eval()
    config = model_from_timm.pretrained_cfg
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    features = {}
    for name, split in open_source("embedded:digits").splits.items():
        pixels = torch.from_numpy(np.stack([split.decode(index) for index in range(len(split))]))
        images_BCHW = (pixels.permute(0, 3, 1, 2) / 255 - mean) / std
        with torch.no_grad():
            tokens = model_from_timm.forward_features(images_BCHW)
        features[name] = (tokens[:, 0].numpy(), split.labels)
    expected = evaluate_few_shot(
        features["train"], features["test"], num_classes=10, shots=[1, 5], num_seeds=2
    )
    result = probe_model(model, data="embedded:digits", shots=[1, 5], seeds=2)
    assert result["protocol"]["train_images"] == len(features["train"][1])
    # only features of the shots are computed
    assert 50 < result["features"]["train"]["images"] <= 100
    # changes nothing at 8 px
    assert result["protocol"]["eval"] == "resize(8) | center_crop((8, 8))"
    for num_shots, row in expected.items():
        # near ties may be decided differently: two of 355 images
        assert result["shots"][num_shots]["seeds"] == pytest.approx(row["seeds"], abs=0.006)


def test_run_is_probed_on_its_own_data_and_transform(tmp_path: Path, monkeypatch) -> None:
    out, calls = tmp_path / "run", []
    results = train(parse_recipe(RECIPE), out)
    choose_kernels = probe.choose_kernels
    monkeypatch.setattr(
        probe,
        "choose_kernels",
        lambda *args, **kwargs: calls.append(kwargs) or choose_kernels(*args, **kwargs),
    )
    result = probe_model(str(out), shots=[2], seeds=1)
    assert result["data"] == "embedded:digits"
    assert result["protocol"]["eval"] == "resize(10) | center_crop"
    assert result["shots"][2]["std"] is None
    assert [kwargs["dtype"] for kwargs in calls] == [torch.float32]
    assert "–" in format_probe(result)
    held_out = probe_model(str(out), split="val", shots=[2], seeds=1)
    num_images = [held_out["protocol"][f"{part}_images"] for part in ("train", "test")]
    assert num_images[1] == results["val"]["examples"]
    assert sum(num_images) == result["protocol"]["train_images"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_changed_images_of_the_run_are_said(tmp_path: Path, split: str) -> None:
    source = write_image_folder(tmp_path / "set", {f"{s}/{c}": 6 for s in SPLITS for c in "ab"})
    run, lines = tmp_path / "run", list[str]()
    train(parse_recipe(RECIPE, overrides=[f"data.source={source}", *WHOLE]), run)
    with logged(lines):
        probe_model(str(run), shots=[1], seeds=1)
        assert lines == []
        write_file(tmp_path / "set" / split / "a" / "0.png", random_png(99, size=(8, 8)))
        probe_model(str(run), shots=[1], seeds=1)
    (line,) = lines
    assert f"'{split}' have changed since the run" in line


def test_test_images_that_are_training_images_are_named(model: str, tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "set", {f"{s}/{c}": 6 for s in SPLITS for c in "ab"})
    shutil.copy(tmp_path / "set/train/a/0.png", tmp_path / "set/test/a/0.png")
    lines = list[str]()
    with logged(lines):
        probe_model(model, data=source, shots=[1], seeds=1)
    assert any("are copies of train images" in line for line in lines)


def test_val_split_selects_c_and_replaces_a_missing_test_split(model: str, tmp_path: Path) -> None:
    counts = {f"{split}/{name}": 6 for split in ("train", "val", "test") for name in "ab"}
    source = write_image_folder(tmp_path / "set", counts)
    for number, image in enumerate(sorted((tmp_path / "set").rglob("*.png"))):
        write_file(image, random_png(number, size=(8, 8)))
    result = probe_model(model, data=source, shots=[2], linear=True, logreg=True)
    assert list(result["features"]) == ["train", "test", "val"]
    for kind in ("linear", "logreg"):
        assert (result[kind]["chosen_on"], result[kind]["val_images"]) == ("val", 12)
    assert [len(result[kind]["grid"]) for kind in ("linear", "logreg")] == [6, 45]
    assert result["split"] == "test"
    shutil.rmtree(tmp_path / "set" / "test")
    result = probe_model(model, data=source, shots=[2], linear=True)
    assert (result["split"], result["linear"]["chosen_on"]) == ("val", "10% of train")


def test_copies_in_a_cross_validation_are_said(model: str, tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "set", {"train/cat": 4, "train/dog": 4, "test/cat": 1})
    image = next((tmp_path / "set" / "train" / "cat").iterdir())
    shutil.copy(image, image.with_name(f"copy{image.suffix}"))
    for folds in (None, 2):
        with logged() as messages:
            probe_model(model, data=source, shots=[1], folds=folds)
        assert bool(folds) == any("1 of 9 images are copies" in text for text in messages)


def test_unsuitable_data_is_refused_before_computing_features(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "load_or_compute_features", pytest.fail)
    train_only = write_image_folder(
        tmp_path / "one", {"train/cat": 9, "train/dog": 3, "train/elk": 9}
    )
    with refused("data.no_split", "neither test nor val", "--split val"):
        probe_model(model, data=train_only)
    with refused("data.no_split", "'test'", "only train"):
        probe_model(model, data=train_only, split="test")
    test_only = write_image_folder(tmp_path / "two", {"test/cat": 3, "test/dog": 3})
    with refused("data.no_split", "train"):
        probe_model(model, data=test_only)
    train_and_test = write_image_folder(
        tmp_path / "one", {"test/cat": 1, "test/dog": 1, "test/elk": 1}
    )
    with refused("data.too_few_images", "--shots 5", "1 of 3 classes", "'dog' has 3", "--shots"):
        probe_model(model, data=train_and_test, shots=[1, 5])
    with refused("data.too_few_images", "--folds 4", "'dog' has 3"):
        probe_model(model, data=train_and_test, shots=[1], folds=4)


def test_invalid_shots_are_refused(model: str) -> None:
    for shots in ([], [0], [5, 5]):
        with refused("recipe.wrong_value", "--shots"):
            probe_model(model, data="embedded:digits", shots=shots)
    assert parse_shots("1,5, 10") == (1, 5, 10)
    for text in ("", "1,,5", "a", "-1", "1.5"):
        with refused("recipe.wrong_value", "--shots"):
            parse_shots(text)


def probe_on_rank(model: str, out: str) -> None:
    linear_probe.MIN_SGD_STEPS = FEW_STEPS
    result = probe_model(model, data="embedded:digits", linear_sgd=True, knn=5, out=out)
    assert bool(format_probe(result)) == (os.environ["RANK"] == "0")


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(
    model: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"FINETUNE_CACHE": str(tmp_path / "cache")}
    run_two_ranks(probe_on_rank, model, str(tmp_path / "two"), environment=environment)
    two = json.loads((tmp_path / "two" / "probe.json").read_text())
    assert two["machine"]["num_processes"] == 2
    assert not any(split["cached"] for split in two["features"].values())
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "another"))
    single = probe_model(model, data="embedded:digits", linear_sgd=True, knn=5)
    assert without_timings(json.loads(json.dumps(single))) == without_timings(two)
    files = [
        {path.name for path in (tmp_path / folder / "features").iterdir()}
        for folder in ("cache", "another")
    ]
    # file names contain the sha256 of the features, so they are bit-identical
    assert len(files[0]) == 2
    assert files[0] == files[1]
