"""Export with preprocessing: the exported file alone gives the answers of `Classifier`."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from forked_runs import child_exit_code
from networks import TINY_ARGS, build_network, randomize_head, save_network
from PIL import Image
from refusals import refused

from finetune.commands import export as export_module
from finetune.commands.export import export_model, format_export
from finetune.commands.export_certificate import certify, vary_sizes
from finetune.files import file_sha256
from finetune.inference import Classifier
from finetune.models.build import build_model
from finetune.models.save import save_model

NANO = "embedded:vit_nano"
METADATA = ("classes", "preprocessing", "license", "source", "versions")
pytestmark = pytest.mark.usefixtures("equal_exports_run_once")


def gradient_image(height: int, width: int) -> Image.Image:
    """Colors that change with the position, and a bright disc."""
    y, x = np.mgrid[:height, :width]
    disc = (y - height / 2) ** 2 + (x - width / 3) ** 2 < (min(height, width) / 3) ** 2
    channels = [255 * y / height, 255 * x / width, 200 * disc]
    return Image.fromarray(np.stack(channels, 2).astype(np.uint8))


def probabilities(file: str, image: Image.Image) -> np.ndarray:
    """Run an exported file without this package."""
    pixels = np.asarray(image)[None]
    if file.endswith(".pt2"):
        return load_program(file)[0](torch.from_numpy(pixels))[0].numpy()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"image": pixels})[0][0]


@functools.cache
def load_program(file: str) -> tuple[Any, dict[str, str]]:
    """Return the function of a file, and its metadata."""
    files = dict.fromkeys(METADATA, "")
    return torch.export.load(file, extra_files=files).module(), files


@pytest.fixture(scope="module", params=["onnx", "torch"])
def exported(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    equal_exports_run_once: None,
) -> Any:
    folder = tmp_path_factory.mktemp("exported")
    return export_model(NANO, format=request.param, out=str(folder / "below"))


@pytest.mark.parametrize("size", [(1, 1), (17, 900), (333, 500), (40, 32), (1500, 1100)])
def test_image_of_any_size_gives_predicts_probabilities(
    size: tuple[int, int], exported: dict[str, Any]
) -> None:
    image = gradient_image(*size)
    classifier = Classifier.load(NANO, device="cpu")
    [row] = classifier.predict(image, top_k=len(classifier.class_names))
    actual = probabilities(exported["file"], image)
    assert actual.dtype == np.float32
    for prediction in row["predictions"]:
        assert actual[prediction["index"]] == pytest.approx(prediction["confidence"], abs=1e-5)


def test_files_and_certificate(exported: dict[str, Any]) -> None:
    path = Path(exported["file"])
    assert path.name == {"onnx": "model.onnx", "torch": "model.pt2"}[exported["format"]]
    assert sorted(os.listdir(path.parent)) == ["certificate.json", path.name]
    certificate = json.loads(Path(exported["certificate"]).read_text("utf-8"))
    export = certificate["export"]
    assert export["sha256"] == {path.name: file_sha256(path)}
    assert export["bytes"] == path.stat().st_size
    assert (export["top1_agreement"], export["num_images"], export["num_sizes"]) == (1, 48, 11)
    assert 0 <= export["max_difference"] < 1e-5
    assert export["latency_ms"] > 0
    assert certificate["source"]["model"] == NANO
    assert "same top-1 as the model on 48 images of embedded:digits" in format_export(exported)


def test_metadata_is_in_the_file(exported: dict[str, Any]) -> None:
    if exported["format"] == "torch":
        files = load_program(exported["file"])[1]
    else:
        session = onnxruntime.InferenceSession(exported["file"])
        assert session.get_inputs()[0].shape == [1, "height", "width", 3]
        assert session.get_inputs()[0].type == "tensor(uint8)"
        files = session.get_modelmeta().custom_metadata_map
    assert all(files[key] for key in METADATA)
    assert json.loads(files["classes"]) == Classifier.load(NANO).class_names
    assert json.loads(files["preprocessing"])["input_size"] == [3, 32, 32]
    assert json.loads(files["source"])["sha256"] == build_model(NANO).provenance["sha256"]


def test_disagreeing_export_is_refused_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_negative(path: Path, format: str) -> Any:
        model = load_exported(path, format)
        return lambda image: model(255 - image)

    load_exported = export_module.load_exported
    monkeypatch.setattr(export_module, "load_exported", load_negative)
    with refused("weights.wrong_export", NANO, "0.001", "--no-preprocessing"):
        export_model(NANO, out=str(tmp_path))
    assert not os.listdir(tmp_path)


def test_certify_refuses_wrong_outputs_and_failures() -> None:
    classifier = Classifier.load(NANO, device="cpu")
    images = [np.asarray(gradient_image(40, 60))]
    with refused("weights.wrong_export", "40x60", "by inf"):
        certify(lambda image: torch.zeros(1, 3), classifier, images, "net")
    with refused("weights.wrong_export", "40x60", "nan"):
        nan_1K = torch.full((1, len(classifier.class_names)), float("nan"))
        certify(lambda image: nan_1K, classifier, images, "net")
    with refused("weights.wrong_export", "40x60", "no kernel"):
        certify(_fail, classifier, images, "net")


def _fail(image: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel")


def test_sizes_of_the_comparison_vary() -> None:
    varied = vary_sizes([np.asarray(gradient_image(30, 40))] * 8)
    assert len(varied) == 24
    ratios = [image.shape[0] / image.shape[1] for image in varied]
    assert min(ratios) < 0.05
    assert max(ratios) > 20


def test_second_format_needs_another_folder(exported: dict[str, Any]) -> None:
    path = Path(exported["file"])
    other = {"onnx": "torch", "torch": "onnx"}[exported["format"]]
    with refused("setup.exists", "certificate.json", path.name, "--out"):
        export_model(NANO, format=other, out=str(path.parent))
    assert sorted(os.listdir(path.parent)) == ["certificate.json", path.name]


def test_killed_export_leaves_no_file_and_the_next_one_removes_the_rest(
    exported_files: Callable[..., int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_die(*arguments: Any, **options: Any) -> None:
        exported_files(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "export_network", write_and_die)
        assert child_exit_code(lambda: export_model(NANO, out=str(tmp_path))) == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".model.onnx.tmp"]
    export_model(NANO, out=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["certificate.json", "model.onnx"]


@pytest.mark.faults  # the small sibling is test_metadata_is_in_the_file
def test_many_classes(tmp_path: Path) -> None:
    built = build_network("vit", num_classes=21_843, args={**TINY_ARGS, "depth": 1})
    randomize_head(built.model)
    model = save_network(tmp_path / "m", built, [f"class {index}" for index in range(21_843)])
    exported = export_model(model, out=str(tmp_path))
    assert exported["top1_agreement"] == 1
    image = gradient_image(50, 70)
    [row] = Classifier.load(model, device="cpu").predict(image, top_k=1)
    assert probabilities(exported["file"], image).argmax() == row["predictions"][0]["index"]
    session = onnxruntime.InferenceSession(exported["file"])
    classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    assert (len(classes), classes[-1]) == (21_843, "class 21842")


def test_spec_outside_the_graph_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    built = build_model(NANO, num_classes=3, head_init="default")
    save_model(
        run / "model",
        built,
        built.model.state_dict(),
        class_names=list("abc"),
        preprocessing=built.preprocessing,
    )
    (run / "run.json").write_text('{"status": "done"}')
    (run / "recipe.yaml").write_text(
        f"model: {{name: '{NANO}'}}\n"
        "data: {source: 'embedded:digits', eval: 'center_crop(40) | resize((32, 32))'}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    with refused("recipe.unsupported", "center_crop(40)", "--no-preprocessing"):
        export_model(str(run), out=str(tmp_path / "out"))


def test_documented_example_gives_predicts_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A photo with EXIF orientation, so that an example that ignores it fails."""
    exif = Image.Exif()
    exif[0x0112] = 6
    gradient_image(300, 200).save(tmp_path / "photo.png", exif=exif)
    export_model(NANO, out=str(tmp_path), images=[str(tmp_path / "photo.png")])
    text = (Path(__file__).parents[2] / "docs/export.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["example.py", "photo.png"])
    capsys.readouterr()
    exec(text.partition("```python\n")[2].partition("```")[0], {})
    name, probability = capsys.readouterr().out.rsplit(maxsplit=1)
    [row] = Classifier.load(NANO, device="cpu").predict(tmp_path / "photo.png", top_k=1)
    assert name == row["predictions"][0]["label"]
    assert float(probability) == pytest.approx(row["predictions"][0]["confidence"], abs=1e-5)
