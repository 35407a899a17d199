"""What a demo tells of its model: name, figures, examples; nothing where nothing is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from demo_server import save_small_model
from PIL import Image
from small_datasets import write_image_folder
from tar_shards import write_tar_shards

from finetune.demo import model_summary as about
from finetune.demo.model_summary import (
    copy_example_images,
    local_model_folder,
    model_title,
    summarize_model,
)
from finetune.errors import WeightsError
from finetune.formatting import TOO_FEW_IMAGES_NOTE
from finetune.hub.download import CachedHubFile

CLASSIFIER: Any = SimpleNamespace(
    class_names=["a", "b", "c"], pipeline=SimpleNamespace(image_size=(32, 48))
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run directory: a model, its results, its recipe with a data set of seven classes."""
    run = tmp_path / "runs" / "birds-s1"
    save_small_model(run / "model")
    (run / "run.json").write_text("{}")
    results = {"test": {"top1": 0.66563, "examples": 10_000}}
    (run / "results.json").write_text(json.dumps(results))
    counts = {f"{split}/class {n}/": 2 for split in ("train", "test") for n in range(7)}
    source = write_image_folder(tmp_path / "data", counts)
    (run / "recipe.yaml").write_text(recipe(source))
    return run


def recipe(source: str) -> str:
    return (
        f"model: {{name: 'embedded:vit_nano'}}\ndata: {{source: '{source}'}}\n"
        "optim: {name: sgd, lr: 0.1, steps: 2}\nrun: {seed: 0}\n"
    )


def test_names(run_folder: Path, tmp_path: Path) -> None:
    assert model_title(str(run_folder)) == "birds-s1"
    assert model_title(str(run_folder / "model")) == "birds-s1"
    assert model_title("hf-hub:alice/vit-birds@v2") == "alice/vit-birds"
    assert model_title("embedded:vit_nano") == "vit_nano"
    assert model_title("vit_tiny_patch16_224") == "vit_tiny_patch16_224"
    assert model_title(save_small_model(tmp_path / "export")) == "export"


def test_a_run_s_figures(run_folder: Path) -> None:
    expected = ["3 classes", "reads 48 × 32 pixels", "66.6 % of 10,000 test images right"]
    assert summarize_model(str(run_folder), CLASSIFIER) == expected
    assert summarize_model(str(run_folder / "model"), CLASSIFIER) == expected


def test_the_figures_beside_the_model_come_first(run_folder: Path) -> None:
    (run_folder / "model" / "results.json").write_text('{"test": {"top1": 0.5, "examples": 8}}')
    figure = "50.0 % of 8 test images right (95 % interval 21.5–78.5 %)"
    assert summarize_model(str(run_folder), CLASSIFIER)[2:] == [figure, TOO_FEW_IMAGES_NOTE]


def test_without_a_test_split_the_figure_and_the_pictures_are_those_of_validation(
    run_folder: Path, tmp_path: Path
) -> None:
    (run_folder / "results.json").write_text('{"val": {"top1": 0.9, "examples": 1000}}')
    assert summarize_model(str(run_folder), CLASSIFIER)[2:] == [
        "90.0 % of 1,000 validation images right"
    ]
    shutil.rmtree(tmp_path / "data" / "test")
    into = tmp_path / "into"
    into.mkdir()
    assert len(copy_example_images(str(run_folder), into)) == 6


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"test": null}',
        '{"test": {"top1": "high"}}',
        '{"test": {"top1": 7}}',
    ],
)
def test_no_figures_are_invented(run_folder: Path, text: str | None) -> None:
    results = run_folder / "results.json"
    results.unlink() if text is None else results.write_text(text)
    assert summarize_model(str(run_folder), CLASSIFIER) == ["3 classes", "reads 48 × 32 pixels"]


def test_results_of_something_else_are_not_the_model_s(run_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other" / "model"
    shutil.copytree(run_folder / "model", elsewhere)
    shutil.copyfile(run_folder / "results.json", tmp_path / "other" / "results.json")
    assert len(summarize_model(str(elsewhere), CLASSIFIER)) == 2  # no run.json: not a run directory


def test_a_hub_model_s_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def answer(repository: str, filename: str, revision: str | None) -> CachedHubFile:
        asked.append((repository, filename, revision))
        (tmp_path / filename).write_text('{"test": {"top1": 0.9}}')
        return CachedHubFile(tmp_path / filename, "sha", None)

    monkeypatch.setattr(about, "download_hub_file", answer)
    found = summarize_model("hf-hub:alice/birds@v1", CLASSIFIER)
    assert found[2] == "90.0 % of the test images right"
    assert asked == [("alice/birds", "results.json", "v1")]
    assert summarize_model("hf-hub:alice/birds", CLASSIFIER)[2:] == found[2:]

    def refuse(*_: Any) -> None:
        raise WeightsError("no such file")

    monkeypatch.setattr(about, "download_hub_file", refuse)
    assert len(summarize_model("hf-hub:alice/birds", CLASSIFIER)) == 2


def test_a_run_brings_pictures_of_its_test_data(run_folder: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    files = copy_example_images(str(run_folder), into)
    assert len(files) == 6
    assert [file.name for file in files][:2] == ["0-class-0.png", "1-class-1.png"]
    for file in files:
        number = file.stem.rsplit("-", 1)[1]
        original = tmp_path / "data" / "test" / f"class {number}" / "0.png"
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(Image.open(original)))


def test_the_folder_s_own_examples_come_first(run_folder: Path, tmp_path: Path) -> None:
    own = run_folder / "model" / "examples"
    own.mkdir()
    for number in range(9):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(own / f"{number}.png")
    (own / "notes.txt").write_text("not a picture")
    into = tmp_path / "into"
    into.mkdir()
    files = copy_example_images(str(run_folder), into)
    assert [file.parent for file in files] == [into] * 6
    assert files[3].read_bytes() == (own / "3.png").read_bytes()


def test_pictures_come_from_tar_shards_on_this_machine_alone(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar_shards(tmp_path / "shards")
    (run_folder / "recipe.yaml").write_text(recipe(f"tar:{tmp_path}/shards"))
    into = tmp_path / "into"
    into.mkdir()
    assert [file.name for file in copy_example_images(str(run_folder), into)] == [
        "0-0.png",
        "1-1.png",
    ]
    opened: list[Any] = []
    monkeypatch.setattr(about, "open_full_data", lambda *section: opened.append(section))
    for source in ("tar:https://example.org/t.tar", "tar:hf://datasets/a/b/t.tar", "hub:a/b"):
        (run_folder / "recipe.yaml").write_text(recipe(source))
        assert copy_example_images(str(run_folder), into) == []
    assert opened == []


def test_data_that_is_gone_costs_only_the_examples(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "data")
    into = tmp_path / "into"
    into.mkdir()
    assert copy_example_images(str(run_folder), into) == []
    assert "the demo has no examples: folder:" in capsys.readouterr().err


def test_hub_data_is_not_downloaded_for_examples(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "recipe.yaml").write_text(recipe("hub:alice/birds"))
    assert copy_example_images(str(run_folder), tmp_path) == []
    assert not capsys.readouterr().err
    assert copy_example_images("hf-hub:alice/birds", tmp_path) == []
    assert copy_example_images("embedded:vit_nano", tmp_path) == []


def test_where_the_model_is(run_folder: Path) -> None:
    assert local_model_folder(str(run_folder)) == run_folder / "model"
    assert local_model_folder("hf-hub:alice/birds") is None
    assert local_model_folder("vit_tiny_patch16_224") is None
    assert local_model_folder(str(run_folder / "model" / "model.safetensors")) is None
