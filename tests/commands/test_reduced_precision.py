"""INT8 and FP16 exports: accurate enough, or refused with the figures and not written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from recipe_texts import tiny_recipe_text
from refusals import refused
from small_datasets import write_image_folder

from finetune.commands.export import export_model, format_export
from finetune.commands.reduced_precision import ReducedPrecision, open_reduced_precision
from finetune.data.open_source import open_source
from finetune.models.build import build_model
from finetune.models.save import save_model
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

RECIPE = tiny_recipe_text(
    "train: resize, eval: resize, val_fraction: 0.3",
    optim="lr: 1e-2, steps: 150",
    size=8,
    width=48,
)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory, no_plots: None) -> Path:
    """A run whose classifier has about 82 % accuracy on digits."""
    folder = tmp_path_factory.mktemp("digits")
    train(parse_recipe(RECIPE), out=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def sensitive_run(
    digits_run: Path, tmp_path_factory: pytest.TempPathFactory, equal_exports_run_once: None
) -> Path:
    """The run with one layer that INT8 would damage."""
    copy = tmp_path_factory.mktemp("sensitive") / "run"
    return with_outliers(digits_run, copy, 3, only="blocks.0.norm2")


@pytest.fixture(scope="module")
def int8(sensitive_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("int8")
    return export_model(str(sensitive_run), out=str(out), precision="int8")


def with_outliers(run: Path, copy: Path, channel: int, only: str = "") -> Path:
    """Copy a run and multiply a channel between normalization and linear layers by 10,000.

    The next layer divides by it again, so the float network computes the same.

    Args:
        only: prefix of the normalization layers to change.
    """
    built = build_model(str(run))
    modules = dict(built.model.named_modules())
    pairs = {"norm": "head"}
    for index in range(len(built.model.blocks)):
        pairs[f"blocks.{index}.norm1"] = f"blocks.{index}.attn.qkv"
        pairs[f"blocks.{index}.norm2"] = f"blocks.{index}.mlp.fc1"
    with torch.no_grad():
        for norm, linear in pairs.items():
            if norm.startswith(only):
                modules[norm].weight[channel] *= 1e4
                modules[norm].bias[channel] *= 1e4
                modules[linear].weight[:, channel] /= 1e4
    (copy / "model").mkdir(parents=True)
    (copy / "run.json").write_text('{"status": "done"}')
    (copy / "recipe.yaml").write_text(RECIPE)
    save_model(
        copy / "model",
        built,
        built.model.state_dict(),
        class_names=built.class_names,
        preprocessing=built.preprocessing,
    )
    return copy


def accuracy(file: str) -> float:
    """Measure an exported file on the validation images, without this package."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    split = open_source("embedded:digits").splits["test"]
    correct = [
        probabilities(session, split.decode(index)).argmax() == label
        for index, label in enumerate(split.labels)
    ]
    return float(np.mean(correct))


def probabilities(session: onnxruntime.InferenceSession, image: np.ndarray) -> np.ndarray:
    return session.run(None, {"image": np.array(image)[None]})[0][0]


def test_int8_file_is_small_and_keeps_accuracy_and_metadata(
    sensitive_run: Path, int8: dict[str, Any], tmp_path: Path
) -> None:
    float_file = export_model(str(sensitive_run), out=str(tmp_path))["file"]
    assert int8["bytes"] == os.path.getsize(int8["file"]) < 0.65 * os.path.getsize(float_file)
    of_int8 = accuracy(int8["file"])
    assert abs(of_int8 - accuracy(float_file)) < 0.02
    assert of_int8 > 0.75
    metadata, float_metadata = (
        onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map
        for file in (int8["file"], float_file)
    )
    assert json.loads(metadata["classes"]) == [str(digit) for digit in range(10)]
    assert metadata.items() >= float_metadata.items()
    assert sorted(os.listdir(Path(int8["file"]).parent)) == ["certificate.json", "model.onnx"]


def test_certificate_has_the_paired_accuracy(int8: dict[str, Any]) -> None:
    certificate = json.loads(Path(int8["certificate"]).read_text("utf-8"))
    reduced = certificate["export"]["reduced"]
    assert reduced == int8["reduced"]
    assert (reduced["precision"], reduced["num_calibration_images"]) == ("int8", 128)
    assert not reduced["data_changed"]
    assert reduced["num_validation_images"] > 400
    low, high = reduced["drop_interval"]
    assert low < reduced["drop"] <= min(high, reduced["max_drop"])
    assert reduced["drop"] == pytest.approx(
        100 * (reduced["accuracy_float"] - reduced["accuracy"]), abs=1e-9
    )
    text = format_export(int8)
    assert f"{low:.2f} to {high:.2f}" in text
    assert ("too few" in text) == (high > 0.5)


def test_layers_with_weights_are_in_int8_and_the_preprocessing_is_not(int8: dict[str, Any]) -> None:
    graph = onnx.load(int8["file"]).graph
    producers = {name: node for node in graph.node for name in node.output}
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    num_quantized = 0
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in producers:
            weight = producers[node.input[1]]
            if weight.op_type == "DequantizeLinear" and weight.input[0] in stored:
                assert stored[weight.input[0]] == onnx.TensorProto.INT8
                num_quantized += 1
    reduced = int8["reduced"]
    assert num_quantized == reduced["num_layers"] - len(reduced["float_layers"])
    assert reduced["num_layers"] == 6  # patch embedding, four layers of a block, classifier


def test_one_sensitive_layer_stays_in_float_and_is_listed(int8: dict[str, Any]) -> None:
    assert int8["reduced"]["float_layers"] == ["blocks.0.mlp.fc1"]
    assert "1 of 6 layers stay in float: blocks.0.mlp.fc1" in format_export(int8)


@pytest.mark.faults
@pytest.mark.parametrize("channel", range(20))
def test_network_that_collapses_is_refused_and_not_written(
    channel: int, digits_run: Path, tmp_path: Path
) -> None:
    run = with_outliers(digits_run, tmp_path / "run", channel)
    out = tmp_path / "out"
    # the first 200 of 434 images suffice
    with refused("weights.accuracy_drop", "int8", "on 200 validation", "limit 0.5", "points"):
        export_model(str(run), out=str(out), precision="int8")
    assert not os.listdir(out)


@pytest.mark.parametrize("precision, words", [("int8", "with 2 of 6 layers"), ("fp16", "points")])
def test_max_drop_is_the_limit(
    precision: Any, words: str, sensitive_run: Path, tmp_path: Path
) -> None:
    """INT8 is tried with more and more layers in float; 200 of 434 images suffice each time."""
    named = (precision, "on 200 validation images", "limit -100", words, "not written")
    with refused("weights.accuracy_drop", *named):
        export_model(str(sensitive_run), out=str(tmp_path), precision=precision, max_drop=-100)
    assert not os.listdir(tmp_path)


def test_fp16_halves_the_network(sensitive_run: Path, tmp_path: Path) -> None:
    exported = export_model(str(sensitive_run), out=str(tmp_path), precision="fp16")
    assert exported["reduced"]["precision"] == "fp16"
    weights = [t for t in onnx.load(exported["file"]).graph.initializer if len(t.dims) > 1]
    in_half = [len(t.raw_data) for t in weights if t.data_type == onnx.TensorProto.FLOAT16]
    assert len(in_half) >= 6
    assert 2 * sum(in_half) > 0.8 * exported["reduced"]["bytes_float"]
    assert exported["bytes"] == os.path.getsize(exported["file"])
    assert exported["bytes"] < 0.75 * exported["reduced"]["bytes_float"]
    session = onnxruntime.InferenceSession(exported["file"])
    assert session.get_inputs()[0].type == "tensor(uint8)"
    assert session.get_outputs()[0].type == "tensor(float)"
    assert "classes" in session.get_modelmeta().custom_metadata_map


@pytest.mark.parametrize(
    "options, named",
    [
        ({"format": "torch"}, "--format torch"),
        ({"preprocessing": False}, "--no-preprocessing"),
        ({}, "embedded:vit_nano is not a run directory"),
    ],
)
def test_conflicting_options_are_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with refused("recipe.conflict", "--int8", named):
        export_model("embedded:vit_nano", out=str(tmp_path), precision="int8", **options)
    assert not os.listdir(tmp_path)


def test_data_of_a_model_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with refused("recipe.conflict", "--data", "embedded:vit_nano", "--images"):
        export_model("embedded:vit_nano", out=str(tmp_path), data="embedded:digits")


def test_run_without_validation_images_is_refused(digits_run: Path, tmp_path: Path) -> None:
    run = with_outliers(digits_run, tmp_path / "run", 0)
    text = RECIPE.replace("val_fraction: 0.3", "val_fraction: 0.0")
    (run / "recipe.yaml").write_text(text)
    with refused("data.no_split", "--int8", "val_fraction"):
        export_model(str(run), out=str(tmp_path / "out"), precision="int8")
    assert not (tmp_path / "out").exists()


def test_a_run_whose_classes_have_changed_is_refused(digits_run: Path, tmp_path: Path) -> None:
    run = with_outliers(digits_run, tmp_path / "run", 0)
    record = json.loads((run / "run.json").read_text())
    record["split_fingerprints"] = {"classes": "0" * 64}
    (run / "run.json").write_text(json.dumps(record))
    with refused("data.changed", "classes, or their order", run, "--int8"):
        export_model(str(run), out=str(tmp_path / "out"), precision="int8")


def open_validation(run: Path, data: str | None = None) -> ReducedPrecision:
    return open_reduced_precision(
        str(run), "int8", max_drop=0.5, format="onnx", preprocessing=True, data=data
    )


def test_unfit_validation_images_are_reported(
    tmp_path: Path, no_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_image_folder(
        tmp_path / "data", {f"{split}/{name}": 4 for split in ("train", "val") for name in "ab"}
    )
    shutil.copy(tmp_path / "data/train/a/0.png", tmp_path / "data/val/a/copy.png")
    run = tmp_path / "run"
    train(parse_recipe(tiny_recipe_text(source=source)), out=run)
    moved = f"folder:{shutil.copytree(tmp_path / 'data', tmp_path / 'moved')}"

    def check(*, num_copies: int, data_changed: bool, data: str | None = None) -> None:
        capsys.readouterr()
        assert open_validation(run, data).data_changed == data_changed
        said = capsys.readouterr().err
        assert f"{num_copies} of 9 images are copies of train images" in said
        assert ("images, labels or classes of 'val' have changed" in said) == data_changed

    check(num_copies=1, data_changed=False)
    check(num_copies=1, data_changed=False, data=moved)
    shutil.copy(tmp_path / "data/train/b/0.png", tmp_path / "data/val/b/0.png")
    check(num_copies=2, data_changed=True)
    check(num_copies=1, data_changed=False, data=moved)


def test_images_that_the_run_left_out_are_left_out(tmp_path: Path, no_plots: None) -> None:
    source = write_image_folder(
        tmp_path / "data", {f"{split}/{name}": 4 for split in ("train", "val") for name in "ab"}
    )
    for name in ("train/a", "val/b"):
        (tmp_path / "data" / name / "2.png").write_bytes(b"not an image")
    recipe = tiny_recipe_text("unreadable: quarantine", source=source)
    train(parse_recipe(recipe), out=tmp_path / "run")
    opened = open_validation(tmp_path / "run")
    for split, label in ((opened.calibration, 0), (opened.validation, 1)):
        assert np.bincount(split.labels).tolist() == [3 + label, 4 - label]
        assert len([split.decode(index) for index in range(len(split))]) == 7
