"""What a demo shows of its model: title, metrics and examples, omitted where unknown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from demo_server import save_small_model
from logs import logged
from PIL import Image
from small_datasets import write_image_folder
from tar_shards import write_tar_shards

from finetune.demo import model_summary as summary_module
from finetune.demo.model_summary import (
    copy_example_images,
    local_model_folder,
    model_title,
    pin_hub_commit,
    summarize_model,
)
from finetune.errors import WeightsError
from finetune.files import file_sha256
from finetune.formatting import TOO_FEW_IMAGES_NOTE
from finetune.hub.download import CachedHubFile
from finetune.inference import Classifier
from finetune.model_checksums import add_description_checksums

CLASSIFIER: Any = SimpleNamespace(
    class_names=["a", "b", "c"],
    pipeline=SimpleNamespace(image_size=(32, 48)),
    weights_sha256=None,
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run directory: a model, its results, and its recipe with a dataset of seven classes."""
    run = tmp_path / "runs" / "birds-s1"
    save_small_model(run / "model")
    (run / "run.json").write_text('{"status": "done"}')
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


def test_model_titles(run_folder: Path, tmp_path: Path) -> None:
    assert model_title(str(run_folder)) == "birds-s1"
    assert model_title(str(run_folder / "model")) == "birds-s1"
    assert model_title("hf-hub:alice/vit-birds@v2") == "alice/vit-birds"
    assert model_title("embedded:vit_nano") == "vit_nano"
    assert model_title("vit_tiny_patch16_224") == "vit_tiny_patch16_224"
    assert model_title(save_small_model(tmp_path / "export")) == "export"


def test_metrics_of_a_run(run_folder: Path) -> None:
    expected = ["3 classes", "input 48 × 32 pixels", "accuracy 66.6 % on 10,000 test images"]
    assert summarize_model(str(run_folder), CLASSIFIER) == expected
    assert summarize_model(str(run_folder / "model"), CLASSIFIER) == expected


def test_metrics_of_other_weights_are_not_shown(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classifier = Classifier.load(run_folder)
    path = run_folder / "results.json"
    results = json.loads(path.read_text())
    path.write_text(json.dumps(results | {"model_sha256": classifier.weights_sha256}))
    assert "66.6 %" in summarize_model(str(run_folder), classifier)[2]
    path.write_text(json.dumps(results | {"model_sha256": "0" * 64}))
    assert len(summarize_model(str(run_folder), classifier)) == 2
    assert "belongs to other weights" in caplog.text


def test_results_in_the_model_folder_take_precedence(run_folder: Path) -> None:
    (run_folder / "model" / "results.json").write_text('{"test": {"top1": 0.5, "examples": 8}}')
    metric = "accuracy 50.0 % on 8 test images (95 % interval 21.5–78.5 %)"
    assert summarize_model(str(run_folder), CLASSIFIER)[2:] == [metric, TOO_FEW_IMAGES_NOTE]


@pytest.mark.parametrize("name", ["model/results.json", "results.json"])
def test_changed_results_are_not_shown(
    run_folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, record = run_folder / name, {"status": "done"}
    path.write_text('{"test": {"top1": 0.5, "examples": 8}}')
    if name.startswith("model"):
        add_description_checksums(path.parent)
    else:
        record["results_sha256"] = file_sha256(path)
    (run_folder / "run.json").write_text(json.dumps(record))
    assert "50.0 %" in summarize_model(str(run_folder), CLASSIFIER)[2]
    path.write_text(path.read_text().replace("0.5", "0.9"))
    assert len(summarize_model(str(run_folder), CLASSIFIER)) == 2
    assert "no metrics are shown" in caplog.text


def test_without_a_test_split_metric_and_examples_come_from_validation(
    run_folder: Path, tmp_path: Path
) -> None:
    (run_folder / "results.json").write_text('{"val": {"top1": 0.9, "examples": 1000}}')
    assert summarize_model(str(run_folder), CLASSIFIER)[2:] == [
        "accuracy 90.0 % on 1,000 validation images"
    ]
    shutil.rmtree(tmp_path / "data" / "test")
    examples_folder = tmp_path / "into"
    examples_folder.mkdir()
    assert len(copy_example_images(str(run_folder), examples_folder)) == 6


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
def test_invalid_results_show_no_metric(run_folder: Path, text: str | None) -> None:
    results = run_folder / "results.json"
    results.unlink() if text is None else results.write_text(text)
    assert summarize_model(str(run_folder), CLASSIFIER) == ["3 classes", "input 48 × 32 pixels"]


def test_results_outside_a_run_directory_are_ignored(run_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other" / "model"
    shutil.copytree(run_folder / "model", elsewhere)
    shutil.copyfile(run_folder / "results.json", tmp_path / "other" / "results.json")
    assert len(summarize_model(str(elsewhere), CLASSIFIER)) == 2  # no run.json: not a run directory


def test_metrics_of_a_hub_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = []

    def download(repository: str, filename: str, revision: str | None) -> CachedHubFile:
        requests.append((repository, filename, revision))
        (tmp_path / filename).write_text('{"test": {"top1": 0.9}}')
        return CachedHubFile(tmp_path / filename, "sha", None)

    monkeypatch.setattr(summary_module, "download_hub_file", download)
    summary = summarize_model("hf-hub:alice/birds@v1", CLASSIFIER)
    assert summary[2] == "accuracy 90.0 % on the test images"
    assert requests == [("alice/birds", "results.json", "v1")]
    assert summarize_model("hf-hub:alice/birds", CLASSIFIER)[2:] == summary[2:]

    def fail_download(*_: Any) -> None:
        raise WeightsError("no such file")

    monkeypatch.setattr(summary_module, "download_hub_file", fail_download)
    assert len(summarize_model("hf-hub:alice/birds", CLASSIFIER)) == 2


def test_all_files_of_a_hub_model_are_of_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CachedHubFile(Path("config.json"), "0123abc", None)
    monkeypatch.setattr(summary_module, "download_hub_file", lambda *_: config)
    assert pin_hub_commit("hf-hub:alice/birds@main") == "hf-hub:alice/birds@0123abc"
    assert pin_hub_commit("embedded:vit_nano") == "embedded:vit_nano"


def test_examples_come_from_the_test_data_of_the_run(run_folder: Path, tmp_path: Path) -> None:
    examples_folder = tmp_path / "into"
    examples_folder.mkdir()
    files = copy_example_images(str(run_folder), examples_folder)
    assert len(files) == 6
    assert [file.name for file in files][:2] == ["0-class-0.png", "1-class-1.png"]
    for file in files:
        number = file.stem.rsplit("-", 1)[1]
        original = tmp_path / "data" / "test" / f"class {number}" / "0.png"
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(Image.open(original)))


def test_no_examples_of_data_that_has_changed(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "run.json").write_text('{"split_fingerprints": {"test": "' + "0" * 64 + '"}}')
    (examples_folder := tmp_path / "into").mkdir()
    with logged() as messages:
        assert copy_example_images(str(run_folder), examples_folder) == []
    assert "has no examples: folder:" in messages[0]
    assert "has changed since the run" in messages[0]


def test_own_examples_take_precedence(run_folder: Path, tmp_path: Path) -> None:
    own_examples = run_folder / "model" / "examples"
    own_examples.mkdir()
    for number in range(9):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(own_examples / f"{number}.png")
    (own_examples / "notes.txt").write_text("not a picture")
    examples_folder = tmp_path / "into"
    examples_folder.mkdir()
    files = copy_example_images(str(run_folder), examples_folder)
    assert [file.parent for file in files] == [examples_folder] * 6
    assert Image.open(files[3]).getpixel((0, 0)) == (3, 0, 0)


@pytest.mark.parametrize("linked", ["file", "folder", "hidden"])
def test_a_link_or_text_among_the_examples_is_not_copied(
    run_folder: Path, tmp_path: Path, linked: str
) -> None:
    own_examples, private = run_folder / "model" / "examples", tmp_path / "private"
    private.mkdir()
    Image.new("RGB", (8, 8)).save(private / "a.png")
    (private / "b.png").write_text("machine x password y")
    if linked == "folder":
        own_examples.symlink_to(private)
    else:
        own_examples.mkdir()
        Image.new("RGB", (8, 8), (9, 0, 0)).save(own_examples / "c.png")
        shutil.copyfile(private / "b.png", own_examples / "b.png")
        shutil.copyfile(private / "a.png", own_examples / ".hidden")
        target = private / "a.png" if linked == "file" else own_examples / ".hidden"
        (own_examples / "a.png").symlink_to(target)
    (examples_folder := tmp_path / "into").mkdir()
    with logged() as messages:
        files = copy_example_images(str(run_folder), examples_folder)
    assert sum("left out of the examples" in message for message in messages) == 2
    if linked == "folder":
        assert files[0].name == "0-class-0.png"  # from the test data
    else:
        assert [Image.open(file).getpixel((0, 0)) for file in files] == [(9, 0, 0)]


def test_examples_come_from_local_tar_shards_only(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar_shards(tmp_path / "shards")
    (run_folder / "recipe.yaml").write_text(recipe(f"tar:{tmp_path}/shards"))
    examples_folder = tmp_path / "into"
    examples_folder.mkdir()
    assert [file.name for file in copy_example_images(str(run_folder), examples_folder)] == [
        "0-0.png",
        "1-1.png",
    ]
    opened: list[Any] = []
    monkeypatch.setattr(summary_module, "open_full_data", lambda *section: opened.append(section))
    for source in ("tar:https://example.org/t.tar", "tar:hf://datasets/a/b/t.tar", "hub:a/b"):
        (run_folder / "recipe.yaml").write_text(recipe(source))
        assert copy_example_images(str(run_folder), examples_folder) == []
    assert opened == []


def test_missing_data_omits_only_the_examples(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "data")
    examples_folder = tmp_path / "into"
    examples_folder.mkdir()
    assert copy_example_images(str(run_folder), examples_folder) == []
    assert "the demo has no examples: folder:" in capsys.readouterr().err


def test_hub_data_is_not_downloaded_for_examples(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "recipe.yaml").write_text(recipe("hub:alice/birds"))
    assert copy_example_images(str(run_folder), tmp_path) == []
    assert not capsys.readouterr().err
    assert copy_example_images("hf-hub:alice/birds", tmp_path) == []
    assert copy_example_images("embedded:vit_nano", tmp_path) == []


def test_local_model_folder(run_folder: Path) -> None:
    assert local_model_folder(str(run_folder)) == run_folder / "model"
    assert local_model_folder("hf-hub:alice/birds") is None
    assert local_model_folder("vit_tiny_patch16_224") is None
    assert local_model_folder(str(run_folder / "model" / "model.safetensors")) is None
