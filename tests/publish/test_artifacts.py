"""publish/artifacts.py: the files beside the weights are complete and do not name the machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_runs import disable_report_and_plots
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.files import file_sha256
from finetune.publish.artifacts import (
    PUBLISHED_FILES,
    _publishable_results,
    publishable_recipe,
    rewrite_artifacts,
)
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

RECIPE = tiny_recipe_text("eval: 'resize(18) | center_crop'", optim="lr: 3e-3, steps: 6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Three runs side by side: two seeds of one recipe, and another recipe.

    The first has pictures; the other two, and what is refreshed, do without.
    """
    folder = tmp_path_factory.mktemp("evidence")
    with pytest.MonkeyPatch.context() as patch:
        for name, change in (("a", "run.seed=0"), ("b", "run.seed=1"), ("c", "optim.lr=1e-3")):
            train(parse_recipe(RECIPE, overrides=[change]), folder / name)
            disable_report_and_plots(patch)
    return folder


def test_a_run_ends_with_all_the_evidence(runs: Path) -> None:
    model = runs / "a" / "model"
    assert sorted(os.listdir(model)) == sorted(PUBLISHED_FILES)
    for name in PUBLISHED_FILES:
        if name.endswith(".png"):
            with Image.open(model / name) as picture:
                assert min(picture.size) > 200
    results = json.loads((runs / "a" / "results.json").read_text())
    assert json.loads((model / "results.json").read_text()) == results
    config = json.loads((model / "config.json").read_text())
    assert config["calibration"] == {"temperature": results["temperature"], "split": "val"}
    assert file_sha256(model / "model.safetensors") in (model / "README.md").read_text()


def test_refreshing_finds_the_other_seeds_and_names_the_repository(runs: Path) -> None:
    model = runs / "a" / "model"
    weights = file_sha256(model / "model.safetensors")
    rewrite_artifacts(RunDir(runs / "a"), repository="alice/digits")
    card = (model / "README.md").read_text()
    assert "mean ± std of 2 seeds (0, 1)" in card
    assert "hf-hub:alice/digits" in card
    assert file_sha256(model / "model.safetensors") == weights
    first = {path.name: file_sha256(path) for path in model.iterdir()}
    rewrite_artifacts(RunDir(runs / "a"), repository="alice/digits")
    assert {path.name: file_sha256(path) for path in model.iterdir()} == first


def test_a_broken_neighbour_is_left_alone(runs: Path) -> None:
    broken = runs / "broken"
    shutil.copytree(runs / "b", broken)
    (broken / "results.json").write_text("{")
    try:
        rewrite_artifacts(RunDir(runs / "a"))
    finally:
        shutil.rmtree(broken)


@pytest.mark.parametrize("denied", ["neighbour", "list"])
def test_a_neighbour_that_may_not_be_looked_at_costs_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    """As in /tmp, where other users have folders; root, who runs tests too, may look anywhere."""
    look, list_folder = Path.is_file, Path.iterdir

    def is_file(path: Path, **options: bool) -> bool:
        if denied == "neighbour" and path.parent == runs.resolve() / "b":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    def iterdir(path: Path) -> Iterator[Path]:
        if denied == "list" and path == runs.resolve():
            raise PermissionError(13, "Permission denied", str(path))
        return iter(list_folder(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    monkeypatch.setattr(Path, "iterdir", iterdir)
    rewrite_artifacts(RunDir(runs / "a"))
    assert "mean ± std" not in (runs / "a" / "model" / "README.md").read_text()


def test_without_a_finished_model_there_is_nothing_to_refresh(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs / "c", copy)
    (copy / "results.json").unlink()
    with refused("checkpoint.not_finished", "--resume"):
        rewrite_artifacts(RunDir(copy))


@pytest.mark.parametrize(
    "source, shown",
    [
        ("folder:/data/secret/photos/", "folder:photos"),
        ("folder:../photos", "folder:photos"),
        ("parquet:~/x/cifar10", "parquet:cifar10"),
        ("csv:/data/secret/labels.csv", "csv:labels.csv"),
        ("folder:/secret/a:b/photos", "folder:photos"),
        ("folder:/secret/photos:v2", "folder:photos:v2"),
        ("folder:..", "folder:data"),
        ("folder:~alice", "folder:data"),
        ("hub:uoft-cs/cifar10@main:plain_text", "hub:uoft-cs/cifar10@main:plain_text"),
        ("embedded:digits", "embedded:digits"),
    ],
)
def test_the_published_recipe_knows_no_folders(source: str, shown: str) -> None:
    recipe = parse_recipe(RECIPE, overrides=[f"data.source={source}", "run.push_to=alice/x"])
    published = publishable_recipe(recipe)
    assert published.data.source == shown
    assert published.run.push_to is None
    assert published.optim == recipe.optim


@pytest.mark.parametrize(
    "name, shown",
    [
        ("/data/alice/weights/vit.npz", "vit.npz"),
        ("./runs/first", "first"),
        ("local-dir:runs/first/model", "local-dir:model"),
        ("/secret/12:30/model.safetensors", "model.safetensors"),
        ("hf-hub:timm/vit@v1", "hf-hub:timm/vit@v1"),
        ("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224.augreg_in21k"),
    ],
)
def test_the_published_recipe_names_weights_without_their_place(name: str, shown: str) -> None:
    recipe = parse_recipe(RECIPE, overrides=[f"model.name={name}"])
    assert publishable_recipe(recipe).model.name == shown


@pytest.mark.parametrize("split", ["val", "test"])
def test_mistakes_are_published_without_their_folders(split: str) -> None:
    names = ["/secret/photos/a.png", "cats/b.png"]
    results = {split: {"top1": 0.5, "mistakes": [{"name": name, "index": 3} for name in names]}}
    shown = _publishable_results(results)[split]
    assert shown["top1"] == 0.5
    assert shown["mistakes"] == [{"name": "a.png", "index": 3}, {"name": "cats/b.png", "index": 3}]


def test_nothing_published_tells_where_it_was_made(
    tmp_path: Path, image_folder: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_token_that_must_not_be_seen")
    start = tmp_path / "first"
    changes = [f"data.source=folder:{image_folder}", "optim.steps=2", "data.batch_size=4"]
    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        train(parse_recipe(RECIPE, overrides=changes), start)
    again = [*changes, f"model.name={start}", "model.args={}", "model.pretrained=true"]
    out = tmp_path / "second"
    train(parse_recipe(RECIPE, overrides=again), out)
    model = out / "model"
    texts = [path for path in model.iterdir() if path.suffix in (".json", ".md", ".yaml")]
    assert len(texts) == 4
    for path in texts:
        text = path.read_text()
        assert str(tmp_path) not in text, path.name
        assert str(image_folder.parent) not in text, path.name
        assert "canary" not in text
    assert load_recipe(model / "recipe.yaml").model.name == "first"
    for path in out.rglob("*"):
        if path.is_file():
            assert b"canary" not in path.read_bytes(), path
