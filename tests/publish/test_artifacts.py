"""publish/artifacts.py: published files are complete and contain no local paths or tokens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_runs import disable_plots, disable_report_and_plots
from logs import logged
from networks import forget_checksums
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.files import file_sha256
from finetune.model_checksums import json_sha256, verify_card_results, verify_model_folder
from finetune.publish.artifacts import (
    EXPORT_FILES,
    PUBLISHED_FILES,
    publishable_recipe,
    rewrite_artifacts,
)
from finetune.publish.push import push
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

RECIPE = tiny_recipe_text("eval: 'resize(18) | center_crop'", optim="lr: 3e-3, steps: 6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Three runs in one folder: two seeds of one recipe, and another recipe.

    Only the first one writes a report and plots.
    """
    folder = tmp_path_factory.mktemp("evidence")
    with pytest.MonkeyPatch.context() as patch:
        for name, override in (("a", "run.seed=0"), ("b", "run.seed=1"), ("c", "optim.lr=1e-3")):
            train(parse_recipe(RECIPE, overrides=[override]), folder / name)
            disable_report_and_plots(patch)
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plots out where a test does not look at them."""
    disable_plots(monkeypatch)


def test_finished_run_has_every_published_file(runs: Path) -> None:
    model = runs / "a" / "model"
    assert sorted(os.listdir(model)) == sorted(PUBLISHED_FILES)
    for name in PUBLISHED_FILES:
        if name.endswith(".png"):
            with Image.open(model / name) as image:
                assert min(image.size) > 200
    results = json.loads((runs / "a" / "results.json").read_text())
    assert json.loads((model / "results.json").read_text()) == results
    config = json.loads((model / "config.json").read_text())
    assert config["calibration"] == {"temperature": results["temperature"], "split": "val"}
    assert file_sha256(model / "model.safetensors") in (model / "README.md").read_text()


@pytest.mark.parametrize("name", ["recipe.yaml", "results.json", "curves.png"])
def test_published_files_are_bound_to_the_weights(runs: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(runs / "a" / "model", tmp_path / "pushed")
    verify_model_folder(folder, source="pushed")
    (folder / "README.md").write_text("an edited card")
    verify_model_folder(folder, source="pushed")
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with refused("weights.damaged", str(folder), name):
        push(folder, "alice/digits")
    (folder / name).unlink()
    verify_model_folder(folder, source="pushed")


def test_a_card_names_metrics_that_were_changed_after_the_run(runs: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(runs / "a", tmp_path / "run"))
    rewrite_artifacts(run)
    assert "**Changed metrics:**" not in (run.model_folder / "README.md").read_text()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    rewrite_artifacts(run)
    assert "**Changed metrics:**" in (run.model_folder / "README.md").read_text()


def test_results_in_a_card_cannot_be_edited_before_a_push(runs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(runs / "a" / "model", tmp_path / "pushed")
    card = folder / "README.md"
    text = card.read_text()
    top1 = json.loads((folder / "results.json").read_text())["test"]["top1"]
    for old, spaced in (
        (f"| {top1:.4f} |", text.replace("## Results", "##  Results")),
        (f"value: {round(top1, 6)}", text.replace("model-index:", "'model-index':")),
    ):
        card.write_text(spaced.replace(old, old.replace("0.", "0.9")))
        assert card.read_text() != text
        with refused("weights.damaged", card):
            push(folder, "alice/digits")
    card.write_text(text.replace("## Limits", "## Intended use\n\nNone.\n\n## Limits"))
    verify_card_results(folder, source="pushed")
    card.write_text("a card without results")
    verify_card_results(folder, source="pushed")


def test_rewrite_adds_other_seeds_and_the_repository_name(undrawn: None, runs: Path) -> None:
    model = runs / "a" / "model"
    weights = file_sha256(model / "model.safetensors")
    (model / "mine").mkdir()
    (model / "mine" / "notes.txt").write_text("of the user")
    rewrite_artifacts(RunDir(runs / "a"), repository="alice/digits")
    assert (model / "mine" / "notes.txt").read_text() == "of the user"
    shutil.rmtree(model / "mine")
    card = (model / "README.md").read_text()
    assert "mean ± std of 2 seeds (0, 1)" in card
    assert "hf-hub:alice/digits" in card
    assert file_sha256(model / "model.safetensors") == weights
    first = {path.name: file_sha256(path) for path in model.iterdir()}
    rewrite_artifacts(RunDir(runs / "a"), repository="alice/digits")
    assert {path.name: file_sha256(path) for path in model.iterdir()} == first

    record = json.loads((runs / "b" / "run.json").read_text())
    trained_further = {**record, "model_sha256": "0" * 64}
    (runs / "b" / "run.json").write_text(json.dumps(trained_further))
    rewrite_artifacts(RunDir(runs / "a"))
    assert "seeds (0, 1)" not in (model / "README.md").read_text()
    (runs / "b" / "run.json").write_text(json.dumps(record))

    results = (runs / "b" / "results.json").read_bytes()
    (runs / "b" / "results.json").write_bytes(results[:-20])
    with logged() as messages:
        rewrite_artifacts(RunDir(runs / "a"))
    assert "left out of the mean over seeds" in "".join(messages)
    assert "seeds (0, 1)" not in (model / "README.md").read_text()
    (runs / "b" / "results.json").write_bytes(results)

    for run in "ab":  # streamed shards were replaced between the runs
        record = json.loads((runs / run / "run.json").read_text())
        changed = {**record, "shard_times": {"train": run}}
        (runs / run / "run.json").write_text(json.dumps(changed))
    rewrite_artifacts(RunDir(runs / "a"))
    assert "seeds (0, 1)" not in (model / "README.md").read_text()


def test_rewrite_ignores_runs_with_other_pretrained_weights(undrawn: None, runs: Path) -> None:
    path = runs / "b" / "run.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "weights_sha256": "0" * 64}))
    try:
        rewrite_artifacts(RunDir(runs / "a"))
    finally:
        path.write_text(text)
    assert "mean ± std" not in (runs / "a" / "model" / "README.md").read_text()


def test_rewrite_ignores_a_damaged_neighboring_run(undrawn: None, runs: Path) -> None:
    broken = runs / "broken"
    shutil.copytree(runs / "b", broken)
    (broken / "results.json").write_text("{")
    try:
        rewrite_artifacts(RunDir(runs / "a"))
    finally:
        shutil.rmtree(broken)


@pytest.mark.parametrize("denied", ["neighbor", "list"])
def test_rewrite_ignores_unreadable_neighboring_runs(
    undrawn: None, runs: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    """Like folders of other users in /tmp; simulated, because root can read every folder."""
    original_is_file, original_iterdir = Path.is_file, Path.iterdir

    def is_file(path: Path, **options: bool) -> bool:
        if denied == "neighbor" and path.parent == runs.resolve() / "b":
            raise PermissionError(13, "Permission denied", str(path))
        return original_is_file(path, **options)

    def iterdir(path: Path) -> Iterator[Path]:
        if denied == "list" and path == runs.resolve():
            raise PermissionError(13, "Permission denied", str(path))
        return iter(original_iterdir(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    monkeypatch.setattr(Path, "iterdir", iterdir)
    rewrite_artifacts(RunDir(runs / "a"))
    assert "mean ± std" not in (runs / "a" / "model" / "README.md").read_text()


def test_rewrite_needs_a_finished_model(runs: Path, tmp_path: Path) -> None:
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
        ("tar:/secret/train-{000..009}.tar", "tar:train-{000..009}.tar"),
        ("tar:https://example.org/a/train.tar?***", "tar:train.tar"),
        ("folder:/secret/photos:v2", "folder:photos:v2"),
        ("folder:..", "folder:data"),
        ("folder:~alice", "folder:data"),
        ("hub:uoft-cs/cifar10@main:plain_text", "hub:uoft-cs/cifar10@main:plain_text"),
        ("embedded:digits", "embedded:digits"),
    ],
)
def test_published_recipe_strips_folders_from_the_source(source: str, shown: str) -> None:
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
        ("transformers:microsoft/cvt-13", "transformers:microsoft/cvt-13"),
        ("transformers:/data/alice/cvt", "transformers:cvt"),
        ("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224.augreg_in21k"),
    ],
)
def test_published_recipe_strips_folders_from_the_model_name(name: str, shown: str) -> None:
    recipe = parse_recipe(RECIPE, overrides=[f"model.name={name}"])
    assert publishable_recipe(recipe).model.name == shown


@pytest.mark.parametrize("split", ["val", "test"])
def test_published_mistakes_have_no_absolute_paths(
    undrawn: None, runs: Path, tmp_path: Path, split: str
) -> None:
    run = shutil.copytree(runs / "c", tmp_path / "run")
    forget_checksums(run / "model")
    results = json.loads((run / "results.json").read_text())
    names = ["/secret/photos/a.png", "cats/b.png"]
    results[split]["mistakes"] = [{"name": name, "index": 3} for name in names]
    (run / "results.json").write_text(json.dumps(results))
    rewrite_artifacts(RunDir(run))
    published = json.loads((run / "model" / "results.json").read_text())[split]["mistakes"]
    assert published == [{"name": "a.png", "index": 3}, {"name": "cats/b.png", "index": 3}]


def test_published_files_contain_no_local_paths_or_tokens(
    undrawn: None, tmp_path: Path, image_folder: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_token_that_must_not_be_seen")
    first_run = tmp_path / "first"
    overrides = [f"data.source=folder:{image_folder}", "optim.steps=2", "data.batch_size=4"]
    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        train(parse_recipe(RECIPE, overrides=overrides), first_run)
    second_overrides = [
        *overrides,
        f"model.name={first_run}",
        "model.args={}",
        "model.pretrained=true",
    ]
    second_run = tmp_path / "second"
    train(parse_recipe(RECIPE, overrides=second_overrides), second_run)
    model = second_run / "model"
    text_files = [path for path in model.iterdir() if path.suffix in (".json", ".md", ".yaml")]
    assert len(text_files) == 4
    for path in text_files:
        text = path.read_text()
        assert str(tmp_path) not in text, path.name
        assert str(image_folder.parent) not in text, path.name
        assert "canary" not in text
    assert load_recipe(model / "recipe.yaml").model.name == "first"
    for path in second_run.rglob("*"):
        if path.is_file():
            assert b"canary" not in path.read_bytes(), path


def test_exported_model_is_kept_and_described(undrawn: None, runs: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(runs / "a", tmp_path / "a"))
    model, certificate = (run.model_folder / name for name in EXPORT_FILES)
    model.write_bytes(b"exported")
    figures = {"top1_agreement": 1.0, "max_difference": 0.0, "latency_ms": 1.0, "runtimes": {}}
    figures |= {"bytes": 8, "num_images": 48, "num_sizes": 11}
    config = json.loads((run.model_folder / "config.json").read_text())
    fitted = config["calibration"]["temperature"]
    keys = ("input_size", "mean", "std", "interpolation")
    preprocessing = {key: config["pretrained_cfg"][key] for key in keys}
    content = {
        "source": {"sha256": file_sha256(run.model_folder / "model.safetensors")},
        "versions": {"onnxruntime": "1.32.0"},
        "calibration": {"temperature": fitted, "thresholds": None},
        "classes": config["label_names"],
        "preprocessing": {**preprocessing, "evaluation": "resize(18) | center_crop((16, 16))"},
        "export": {**figures, "sha256": {"model.onnx": file_sha256(model)}},
    }

    def write_certificate(checksum: str | None = None, **changes: Any) -> None:
        changed = {**content, **changes}
        changed["checksum"] = checksum or json_sha256(changed)
        certificate.write_text(json.dumps(changed))

    write_certificate()
    rewrite_artifacts(run)
    assert model.read_bytes() == b"exported"
    assert "48 images of 11 sizes" in (run.model_folder / "README.md").read_text()
    better = {**content["export"], "latency_ms": 0.001}
    write_certificate(checksum=json_sha256(content), export=better)
    with refused("weights.damaged", "certificate.json", "was changed after the export"):
        rewrite_artifacts(run)
    write_certificate(export={**better, "latency_ms": "fast"})
    with refused("weights.wrong_config", "certificate.json", "export.latency_ms"):
        rewrite_artifacts(run)
    write_certificate(source={"sha256": "0" * 64})
    with refused("weights.damaged", "certificate.json", "export again"):
        rewrite_artifacts(run)
    write_certificate(calibration={"temperature": fitted / 2, "thresholds": None})
    with refused("weights.damaged", "temperature", fitted / 2, fitted, "export again"):
        rewrite_artifacts(run)
    for changed in (
        {"input_size": [3, 32, 32]},
        {"mean": [0.1, 0.2, 0.3]},
        {"evaluation": "resize(17) | center_crop"},
    ):
        write_certificate(preprocessing={**content["preprocessing"], **changed})
        with refused("weights.damaged", "model.onnx", *changed, "export again"):
            rewrite_artifacts(run)
        with refused("weights.damaged", "model.onnx", *changed, "export again"):
            push(run.path, "alice/digits")
    path = run.path / "run.json"
    record = json.loads(path.read_text())
    unpublishable = {**record["plan"], "eval_pipeline": "center_crop(8) | resize(16)"}
    path.write_text(json.dumps({**record, "plan": unpublishable}))
    write_certificate()  # an export of model/, whose config.json cannot store these transforms
    with refused("weights.damaged", "model.onnx", "evaluation", "center_crop(8)"):
        push(run.path, "alice/digits")
    path.write_text(json.dumps(record))
    write_certificate(classes=[*reversed(content["classes"])])
    with refused("weights.damaged", "model.onnx", "classes", "export again"):
        rewrite_artifacts(run)
    write_certificate()
    model.write_bytes(b"another")
    with refused("weights.damaged", "certificate.json", "another file than", "model.onnx"):
        rewrite_artifacts(run)
