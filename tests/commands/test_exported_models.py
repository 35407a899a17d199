"""Exported files in `eval`, `predict` and `compare`: the same figures as the model's."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.cli.main import main
from finetune.commands.compare import compare_models, format_comparison
from finetune.commands.evaluate import evaluate_model, format_evaluation
from finetune.commands.export import export_model
from finetune.commands.predict import predict
from finetune.data.from_recipe import open_data
from finetune.data.open_source import open_source
from finetune.files import file_sha256
from finetune.inference import Classifier
from finetune.model_checksums import json_sha256, weights_hashes
from finetune.models.exported import load_model, read_export_record
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

DIGITS = "embedded:digits"
MULTILABEL = "task: multilabel, train: resize, eval: resize"
TASKS = {
    "multiclass": tiny_recipe_text("eval: 'resize(18) | center_crop'", optim="lr: 3e-3, steps: 12"),
    "multilabel": tiny_recipe_text(
        MULTILABEL, source="embedded:digit_pairs", optim="lr: 5e-3, steps: 40", width=48
    ),
}


CASES = pytest.mark.parametrize(
    "task, preprocessing",
    [
        ("multiclass", True),
        ("multiclass", False),
        ("multilabel", True),
        # repeats the path of the two before it
        pytest.param("multilabel", False, marks=pytest.mark.faults),
    ],
)


@pytest.fixture(scope="module")
def exports(
    tmp_path_factory: pytest.TempPathFactory, no_plots: None, equal_exports_run_once: None
) -> Callable[..., Path]:
    """Return a function that exports a run: folder "run" next to folders of files."""
    top = tmp_path_factory.mktemp("exported")

    def export(task: str, **options: Any) -> Path:
        options = {"preprocessing": True, **options}
        run = top / task / "run"
        if not run.is_dir():
            train(parse_recipe(TASKS[task]), run)
        out = run.with_name("-".join(["out", *map(str, options.values())]))
        suffix = "model.onnx" if options["preprocessing"] else "run.onnx"
        return (
            out / suffix
            if out.is_dir()
            else Path(export_model(str(run), out=str(out), **options)["file"])
        )

    return export


def run_of(file: Path) -> str:
    return str(file.parents[1] / "run")


@CASES
def test_eval_gives_the_figures_of_the_run(
    task: str, preprocessing: bool, exports: Callable[..., Path]
) -> None:
    file = exports(task, preprocessing=preprocessing)
    data = DIGITS if task == "multiclass" else "embedded:digit_pairs"
    expected = evaluate_model(run_of(file), data=data, split="test")
    actual = evaluate_model(str(file), data=data, split="test")
    assert actual.keys() == expected.keys()
    keys = ("top1", "balanced_accuracy", "loss", "ece", "map", "macro_f1", "micro_f1")
    for key in expected.keys() & keys:
        assert actual[key] == pytest.approx(expected[key], abs=2e-5)
    if task == "multiclass":
        assert actual["confusion"] == expected["confusion"]
        assert actual["calibrated"]["temperature"] != 1
        for key in ("temperature", "loss", "ece"):
            assert actual["calibrated"][key] == pytest.approx(expected["calibrated"][key], abs=2e-5)
    assert f"{actual['examples']} images" in format_evaluation(actual)


# with preprocessing, the network is traced again with the other temperature
@pytest.mark.parametrize("preprocessing", [pytest.param(True, marks=pytest.mark.faults), False])
def test_a_temperature_that_was_fitted_on_the_same_split_is_said(
    preprocessing: bool, exports: Callable[..., Path], tmp_path: Path, capsys
) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(run_of(exports("multiclass", preprocessing=True))) / "model", model)
    evaluate_model(str(model), data=DIGITS, split="test", fit_temperature=True)
    exported = export_model(str(model), out=str(tmp_path / "out"), preprocessing=preprocessing)
    for split in ("train", "test"):
        capsys.readouterr()
        evaluate_model(exported["file"], data=DIGITS, split=split)
        is_said = "its temperature was fitted on a split 'test'" in capsys.readouterr().err
        assert is_said == (split == "test")


@CASES
def test_predict_gives_the_answers_of_the_run(
    task: str, preprocessing: bool, exports: Callable[..., Path], tmp_path: Path
) -> None:
    file = exports(task, preprocessing=preprocessing)
    split = open_source(DIGITS).splits["test"]
    for index in range(12):
        image = Image.fromarray(split.decode(index))
        image.resize((20 + 9 * index, 30)).save(tmp_path / f"{index:02}.png")
    options: dict[str, Any] = {"top_k": 10, "calibrated": task == "multiclass"}
    expected = predict(run_of(file), [str(tmp_path)], **options)
    actual = predict(str(file), [str(tmp_path)], **options)
    assert len(actual) == 12
    for row, expected_row in zip(actual, expected, strict=True):
        confidences = {item["label"]: item["confidence"] for item in row["predictions"]}
        assert confidences == pytest.approx(
            {item["label"]: item["confidence"] for item in expected_row["predictions"]}, abs=1e-4
        )
        labels = [
            [item["label"] for item in each.get("labels", ())] for each in (row, expected_row)
        ]
        assert labels[0] == labels[1]


def test_int8_file_is_measured_itself(exports: Callable[..., Path]) -> None:
    """The accuracy in the certificate, measured on the run's own validation images."""
    file = exports("multiclass", precision="int8", max_drop=100)
    [reduced] = [json.loads((file.parent / "certificate.json").read_text())["export"]["reduced"]]
    run, other = run_of(file), exports("multiclass", preprocessing=True)
    losses = [evaluate_model(str(each), data=DIGITS)["loss"] for each in (file, other)]
    assert 1e-5 < abs(losses[0] - losses[1]) < 0.2
    result, _ = compare_models(run, str(file), split="val")
    assert result["top1"]["a"] == pytest.approx(reduced["accuracy_float"])
    assert result["top1"]["b"] == pytest.approx(reduced["accuracy"])
    assert result["b"]["parameters"] is None
    assert result["b"]["size_bytes"] == file.stat().st_size
    assert result["b"]["latency_ms"] > 0
    assert "B           –" in format_comparison(result, out=None)


def correct_images(file: Path) -> np.ndarray:
    """Return for each validation image whether a multi-label file has all labels right."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    thresholds = json.loads(session.get_modelmeta().custom_metadata_map["thresholds"])
    split = open_data(parse_recipe(TASKS["multilabel"]).data, 0).splits["val"]
    correct = []
    for index, label in enumerate(split.labels):
        [[probabilities]] = session.run(None, {"image": np.array(split.decode(index))[None]})
        correct.append(bool(((probabilities >= thresholds) == label).all()))
    return np.array(correct)


def test_int8_file_is_right_on_a_multilabel_image_if_all_labels_are(
    exports: Callable[..., Path],
) -> None:
    file = exports("multilabel", precision="int8", max_drop=100)
    reduced = json.loads((file.parent / "certificate.json").read_text())["export"]["reduced"]
    assert reduced["float_layers"] == []
    accuracy = correct_images(file).mean()
    assert 0 < accuracy < 1
    assert reduced["accuracy"] == pytest.approx(accuracy, abs=0.02)
    assert reduced["accuracy_float"] == pytest.approx(
        correct_images(exports("multilabel", preprocessing=True)).mean(), abs=0.02
    )


@pytest.mark.parametrize("task", TASKS)
def test_temperature_and_sigmoid_are_in_the_graph(task: str, exports: Callable[..., Path]) -> None:
    file = exports(task, preprocessing=True)
    classifier = Classifier.load(run_of(file), device="cpu")
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    prepared = classifier.pipeline([torch.from_numpy(pixels).permute(2, 0, 1)])
    logits_K = classifier.logits(prepared)[0]
    config = json.loads((file.parents[1] / "run/model/config.json").read_text())
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [[actual]] = session.run(["probabilities"], {"image": pixels[None]})
    if task == "multilabel":
        expected = logits_K.sigmoid()
        thresholds = json.loads(session.get_modelmeta().custom_metadata_map["thresholds"])
        assert thresholds == config["calibration"]["thresholds"]
    else:
        temperature = config["calibration"]["temperature"]
        assert abs(temperature - 1) > 0.01
        expected = (logits_K / temperature).softmax(0)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("option", [{"tta": "flip"}, {"corrupt": "noise:3"}])
def test_options_that_change_the_network_are_refused(
    option: dict[str, Any], exports: Callable[..., Path]
) -> None:
    file = str(exports("multiclass"))
    with refused("recipe.conflict", f"--{next(iter(option))}", file):
        evaluate_model(file, data=DIGITS, **option)
    with refused("recipe.conflict", "--features", file):
        predict(file, [__file__], features="features.parquet")


@pytest.mark.parametrize("command", ["demo", "info", "probe", "export"])
def test_commands_that_need_the_network_are_refused(
    command: str, exports: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(exports("multiclass"))
    data = ["--data", DIGITS] if command == "probe" else []
    assert main([command, file, *data]) in (2, 4)
    assert f"{file}: an exported file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, exit_code, named", [(b"", 4, "ONNX Runtime"), (None, 3, "no class")]
)
def test_exit_codes(
    content: bytes | None,
    exit_code: int,
    named: str,
    exports: Callable[..., Path],
    image_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path(shutil.copy(exports("multiclass"), tmp_path / "x.onnx"))
    if content is not None:
        file.write_bytes(content)
    assert main(["eval", str(file), "--data", f"folder:{image_folder}"]) == exit_code
    error = capsys.readouterr().err
    assert str(file) in error
    assert named in error


def test_data_of_other_classes_is_refused(exports: Callable[..., Path], image_folder: Path) -> None:
    file = str(exports("multiclass"))
    with refused("data.wrong_classes", "3 classes", file):
        evaluate_model(file, data=f"folder:{image_folder}")
    with refused("recipe.missing_option", "--data", file):
        evaluate_model(file)


def test_foreign_and_damaged_files_are_refused(
    exports: Callable[..., Path], tmp_path: Path
) -> None:
    good, network = exports("multiclass"), exports("multiclass", preprocessing=False)
    foreign = Path(shutil.copy(network, tmp_path / "net.onnx"))
    with refused("weights.wrong_format", foreign, "net.onnx.json", "classes"):
        Classifier.load(foreign)
    shutil.copy(f"{network}.json", tmp_path / "net.onnx.json")
    assert Classifier.load(foreign).class_names == Classifier.load(good).class_names
    shutil.copy(good, foreign)
    model = onnx.load(foreign)
    kept = [entry for entry in model.metadata_props if entry.key != "classes"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, foreign)
    with refused("weights.damaged", "net.onnx.json", "another file"):
        Classifier.load(foreign)
    (tmp_path / "net.onnx.json").write_text("{")
    with refused("weights.damaged", "net.onnx.json"):
        Classifier.load(foreign)
    foreign.write_bytes(good.read_bytes()[:5000])
    with refused("weights.damaged", foreign, "ONNX Runtime"):
        Classifier.load(foreign)
    with refused("weights.unknown_name", "missing.onnx"):
        Classifier.load("missing.onnx")


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("classes", ["a", "b"], "2 classes"),
        ("classes", {}, "classes"),
        ("temperature", -1, "temperature"),
        ("preprocessing", {}, "preprocessing"),
    ],
)
def test_wrong_metadata_is_refused(
    key: str, value: object, named: str, exports: Callable[..., Path], tmp_path: Path
) -> None:
    model = onnx.load(exports("multiclass"))
    [entry] = [entry for entry in model.metadata_props if entry.key == key]
    entry.value = json.dumps(value)
    onnx.save(model, tmp_path / "x.onnx")
    code = "weights.wrong_classes" if value == ["a", "b"] else "weights.wrong_config"
    with refused(code, tmp_path / "x.onnx", named):
        Classifier.load(tmp_path / "x.onnx")


def test_file_that_was_changed_after_its_export_is_refused(
    exports: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(exports("multiclass").parent, tmp_path / "export")
    model = onnx.load(folder / "model.onnx")
    [entry] = [entry for entry in model.metadata_props if entry.key == "classes"]
    entry.value = json.dumps(json.loads(entry.value)[::-1])
    onnx.save(model, folder / "model.onnx")
    with refused("weights.damaged", folder / "model.onnx", "certificate.json"):
        Classifier.load(folder / "model.onnx")
    renamed = (folder / "model.onnx").rename(folder / "renamed.onnx")
    with refused("weights.damaged", renamed, "certificate.json"):
        Classifier.load(renamed)


@pytest.mark.parametrize("key", ["classes", "temperature", "checksum"])
def test_changed_json_of_an_export_is_refused(
    key: str, exports: Callable[..., Path], tmp_path: Path
) -> None:
    source = exports("multiclass", preprocessing=False)
    folder = shutil.copytree(source.parent, tmp_path / "export")
    record = folder / f"{source.name}.json"
    content = json.loads(record.read_text())
    changed = {"classes": content["classes"][::-1], "temperature": 3.0, "checksum": "0"}
    record.write_text(json.dumps({**content, key: changed[key]}))
    with refused("weights.damaged", record, "was changed after the export"):
        Classifier.load(folder / source.name)
    del content["checksum"]
    record.write_text(json.dumps(content))
    with refused("weights.wrong_config", record, "checksum"):
        Classifier.load(folder / source.name)


def test_missing_onnxruntime_is_named(
    exports: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = exports("multiclass")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refused("setup.missing_package", file, "finetune-vision[export]"):
        Classifier.load(file)


def test_rounded_probabilities_give_finite_metrics(
    exports: Callable[..., Path], tmp_path: Path
) -> None:
    """Extreme logits, so that float32 probabilities are 0 and 1."""
    model = onnx.load(exports("multiclass"))
    [entry] = [entry for entry in model.metadata_props if entry.key == "classes"]
    softmax = model.graph.node[-1]
    assert softmax.op_type == "Softmax"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1e5), "scale"))
    scaled = onnx.helper.make_node("Mul", [softmax.input[0], "scale"], ["scaled"])
    softmax.input[0] = "scaled"
    model.graph.node.insert(len(model.graph.node) - 1, scaled)
    file = tmp_path / "scaled.onnx"
    onnx.save(model, file)
    evaluated = evaluate_model(str(file), data=DIGITS)
    assert 1 < evaluated["calibrated"]["loss"] < 90
    assert len(json.loads(entry.value)) == 10


def test_the_record_covers_the_weights_of_a_renamed_file(tmp_path: Path) -> None:
    file, weights = tmp_path / "a.onnx", tmp_path / "a.onnx.data"
    file.write_text("the graph, which names a.onnx.data")
    weights.write_text("the weights")
    content: dict[str, Any] = {
        "export": {"sha256": {f.name: file_sha256(f) for f in (file, weights)}}
    }
    path = tmp_path / "a.onnx.json"
    path.write_text(json.dumps({**content, "checksum": json_sha256(content)}))
    renamed = file.rename(tmp_path / "b.onnx")
    assert read_export_record(path, renamed)["export"] == content["export"]
    for damage in (lambda: weights.write_text("other weights"), weights.unlink):
        damage()
        with refused("weights.damaged", "b.onnx"):
            read_export_record(path, renamed)


def test_an_exported_model_has_the_hashes_that_ranks_compare(exports: Callable[..., Path]) -> None:
    hashes = [
        weights_hashes(load_model(str(exports("multiclass", preprocessing=each))).provenance)
        for each in (True, False)
    ]
    assert None not in {*hashes[0], *hashes[1]}
    assert hashes[0][0] != hashes[1][0]
