"""Export: logits of the exported file, its preprocessing JSON, and refused exports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from refusals import refused
from timm.data import create_transform
from torch import Tensor, nn

from finetune.commands import export as export_module
from finetune.commands.export import export_model, format_export
from finetune.files import file_sha256
from finetune.inference import Classifier
from finetune.model_checksums import add_checksums
from finetune.models.build import build_model
from finetune.models.save import save_model
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

NANO = "embedded:vit_nano"
pytestmark = pytest.mark.usefixtures("equal_exports_run_once")
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}


def run_exported(path: Path, images: Tensor) -> Tensor:
    """Run an exported file without this package."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(images)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


# test_export_certificate.py and test_export_formats.py check the other format
@pytest.fixture(scope="module", params=["onnx", pytest.param("torch", marks=pytest.mark.faults)])
def exported(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    equal_exports_run_once: None,
) -> Any:
    folder = tmp_path_factory.mktemp("exported")
    return export_model(NANO, preprocessing=False, format=request.param, out=str(folder / "below"))


@pytest.fixture
def fake_export(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Replace the exporter by the model itself, for tests of everything else.

    Returns: the exported models.
    """
    models: list[nn.Module] = []

    def save(model: nn.Module, example: Tensor, path: Path, *_: str) -> int:
        models.append(model)
        path.write_bytes(b"weights")
        return 20

    monkeypatch.setattr(export_module, "export_network", save)
    monkeypatch.setattr(export_module, "load_exported", lambda path, format: models[-1])
    return models


@pytest.fixture
def run_of_folder(tmp_path: Path, image_folder: Path) -> Path:
    """A run directory with a model and a recipe, for an image folder with three classes."""
    run = tmp_path / "my-run"
    (run / "model").mkdir(parents=True)
    built = build_model(NANO, num_classes=3, head_init="default")
    save_model(
        run / "model",
        built,
        built.model.state_dict(),
        class_names=["blue", "green", "red"],
        preprocessing=built.preprocessing,
    )
    (run / "run.json").write_text('{"status": "done"}')
    (run / "recipe.yaml").write_text(
        f"model: {{name: '{NANO}'}}\n"
        f"data: {{source: 'folder:{image_folder}', eval: 'resize((32, 32))'}}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    return run


def wave_image(height: int = 90, width: int = 120) -> Image.Image:
    """Smooth color waves: unlike noise, neighboring pixels are similar, as in a photo."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 13)]
    return Image.fromarray(np.rint(127.5 + 127.5 * np.stack(waves, 2)).astype(np.uint8))


def test_any_batch_size_gives_the_models_logits(exported: dict[str, Any]) -> None:
    network = build_model(NANO).model.eval()
    for batch_size in (1, 7):
        images = torch.randn(batch_size, 3, 32, 32)
        with torch.inference_mode():
            expected = network(images)
        actual = run_exported(Path(exported["file"]), images)
        assert actual.shape == expected.shape
        # logits of about 10, with another order of summation
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_result_describes_the_comparison(exported: dict[str, Any]) -> None:
    path = Path(exported["file"])
    suffix = SUFFIXES[exported["format"]]
    assert path.name == f"vit_nano{suffix}"
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.json"]
    assert exported["sha256"] == {path.name: file_sha256(path)}
    assert exported["bytes"] == path.stat().st_size
    assert 0 <= exported["max_difference"] < 1e-4
    assert exported["batch_sizes"] == [1, 2, 5, 16]
    assert (exported["num_images"], exported["images"]) == (16, "embedded:digits")
    text = format_export(exported)
    assert f"{exported['max_difference']:.2g} (limit 0.001) on 16 images of embedded:d" in text
    assert ("opset 2" in text) == (suffix == ".onnx")


def test_preprocessing_json_is_complete(exported: dict[str, Any]) -> None:
    sidecar = json.loads(Path(exported["preprocessing"]).read_text("utf-8"))
    built = build_model(NANO)
    assert sidecar["source"]["model"] == NANO
    assert sidecar["source"]["architecture"] == built.architecture
    assert sidecar["source"]["sha256"] == built.provenance["sha256"]
    assert sidecar["preprocessing"]["input_size"] == [3, 32, 32]
    assert sidecar["classes"] == Classifier.load(NANO).class_names
    assert "temperature" not in sidecar
    assert {"torch", "timm"} <= set(sidecar["versions"])
    assert sidecar["export"] == {k: exported[k] for k in sidecar["export"]}
    assert (sidecar["export"]["opset"] is None) == (exported["format"] == "torch")


def test_preprocessing_json_reproduces_the_pixels(exported: dict[str, Any], tmp_path: Path) -> None:
    """PIL and timm reproduce the pixels from the JSON file alone."""
    wave_image().save(tmp_path / "waves.png")
    preprocessing = json.loads(Path(exported["preprocessing"]).read_text("utf-8"))["preprocessing"]
    keys = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    transform = create_transform(**{key: preprocessing[key] for key in keys}, is_training=False)
    with Image.open(tmp_path / "waves.png") as image:
        pixels = transform(image.convert("RGB"))
    logits = run_exported(Path(exported["file"]), pixels[None])[0]
    classifier = Classifier.load(NANO, device="cpu")
    expected = classifier.logits(
        classifier.pipeline([torch.from_numpy(np.array(wave_image())).permute(2, 0, 1)])
    )[0]
    assert int(logits.argmax()) == int(expected.argmax())
    # PIL rounds resized pixels to integers, an error of 0.004 in the input; ours does not round
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0)
    assert float(expected.std()) > 1, "the logits must be much larger than the tolerance"


@pytest.mark.parametrize("damage", [0.01, float("nan")])
def test_differing_export_is_refused_and_keeps_the_old_file(
    damage: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_network = export_module.export_network

    def export_and_damage(network: Any, example: Any, path: Path, *rest: str) -> Any:
        opset = export_network(network, example, path, *rest)
        model = onnx.load(path)
        largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        weights = onnx.numpy_helper.to_array(largest) + np.float32(damage)
        largest.CopyFrom(onnx.numpy_helper.from_array(weights, largest.name))
        onnx.save(model, path)
        return opset

    monkeypatch.setattr(export_module, "export_network", export_and_damage)
    (tmp_path / "vit_nano.onnx").write_text("old")
    metadata = {"export": {"sha256": {"vit_nano.onnx": "0" * 64}}}
    (tmp_path / "vit_nano.onnx.json").write_text(json.dumps(metadata))
    with refused("weights.wrong_export", "vit_nano", "0.001"):
        export_model(NANO, preprocessing=False, out=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["vit_nano.onnx", "vit_nano.onnx.json"]
    assert (tmp_path / "vit_nano.onnx").read_text() == "old"


def test_every_batch_size_is_compared(
    fake_export: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = build_model(NANO).model.eval()

    def run(images: Tensor) -> Tensor:
        if len(images) == 5:
            raise RuntimeError("shape mismatch")
        return network(images)

    monkeypatch.setattr(export_module, "load_exported", lambda path, format: run)
    with refused("weights.wrong_export", "batch of 5", "shape mismatch"):
        export_model(NANO, preprocessing=False, out=str(tmp_path))
    assert not os.listdir(tmp_path)


def test_run_is_compared_on_its_own_images(
    fake_export: None, run_of_folder: Path, image_folder: Path, tmp_path: Path
) -> None:
    result = export_model(str(run_of_folder), preprocessing=False, out=str(tmp_path / "out"))
    assert Path(result["file"]).name == "my-run.onnx"
    assert (result["num_images"], result["images"]) == (12, f"folder:{image_folder.name}")
    text = Path(result["preprocessing"]).read_text("utf-8")
    assert str(tmp_path) not in text
    sidecar = json.loads(text)
    assert sidecar["classes"] == ["blue", "green", "red"]
    assert sidecar["source"]["model"] == "my-run"
    assert sidecar["preprocessing"]["evaluation"] == "resize((32, 32))"


def test_record_has_no_path_of_a_local_model(
    fake_export: None, run_of_folder: Path, tmp_path: Path
) -> None:
    model = f"local-dir:{run_of_folder / 'model'}"
    result = export_model(model, preprocessing=False, out=str(tmp_path / "out"))
    text = Path(result["preprocessing"]).read_text("utf-8")
    assert str(tmp_path) not in text
    assert json.loads(text)["source"]["model"] == "local-dir:model"


def test_missing_images_are_replaced_with_a_warning(
    fake_export: None,
    run_of_folder: Path,
    image_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image_folder.rename(tmp_path / "elsewhere")
    result = export_model(
        str(run_of_folder / "model" / ".."), preprocessing=False, out=str(tmp_path / "out")
    )
    assert result["images"] == "embedded:digits"
    assert "cannot be read" in capsys.readouterr().err


def test_images_option_selects_the_compared_images(fake_export: None, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        wave_image(40 + number).save(tmp_path / "in" / f"{number}.png")
    result = export_model(
        NANO, preprocessing=False, images=[str(tmp_path / "in")], out=str(tmp_path)
    )
    assert (result["num_images"], result["images"]) == (3, "--images")
    assert result["batch_sizes"] == [1, 2, 5, 16], "images are repeated to fill a batch"
    (tmp_path / "in" / "3.png").touch()
    with refused("data.unreadable", "3.png"):
        export_model(NANO, preprocessing=False, images=[str(tmp_path / "in")], out=str(tmp_path))
    with refused("data.unreadable", "*.jpg"):
        export_model(NANO, preprocessing=False, images=[str(tmp_path / "*.jpg")], out=str(tmp_path))


def test_temperature_is_exported(fake_export: None, run_of_folder: Path, tmp_path: Path) -> None:
    path = run_of_folder / "model" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["calibration"] = {"temperature": 1.75, "split": "val"}
    path.write_text(json.dumps(add_checksums(config, path.parent)), "utf-8")
    result = export_model(str(run_of_folder), preprocessing=False, out=str(tmp_path / "out"))
    assert json.loads(Path(result["preprocessing"]).read_text("utf-8"))["temperature"] == 1.75


def test_adapter_is_merged(fake_export: list[nn.Module], tmp_path: Path, no_plots: None) -> None:
    recipe = parse_recipe(f"""
model: {{name: "{NANO}", adapter: {{rank: 2, targets: [attention]}}}}
data: {{source: "embedded:digits", train: resize, eval: resize, num_train: 32, num_val: 10}}
optim: {{lr: 1.0e-2, steps: 1}}
run: {{test: false}}
""")
    train(recipe, tmp_path / "run")
    assert (tmp_path / "run/model/adapter").is_dir()
    export_model(str(tmp_path / "run"), preprocessing=False, out=str(tmp_path))
    [network] = fake_export
    assert network.state_dict().keys() == build_model(NANO).model.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    expected = Classifier.load(tmp_path / "run", device="cpu").logits(images)
    torch.testing.assert_close(network(images), expected, atol=1e-5, rtol=0)


def test_another_image_size_ignores_the_runs_eval_transform(
    fake_export: None, run_of_folder: Path, tmp_path: Path
) -> None:
    result = export_model(
        str(run_of_folder), preprocessing=False, out=str(tmp_path / "out"), image_size=48
    )
    sidecar = json.loads(Path(result["preprocessing"]).read_text("utf-8"))
    assert sidecar["preprocessing"]["input_size"] == [3, 48, 48]


@pytest.mark.parametrize(
    "out, expected",
    [
        (None, "vit_nano.onnx"),
        (".", "vit_nano.onnx"),
        ("new/folder", "new/folder/vit_nano.onnx"),
        ("x.onnx", "x.onnx"),
        ("new/x.onnx", "new/x.onnx"),
        ("v1.2", "v1.2/vit_nano.onnx"),
    ],
)
def test_out_may_be_a_file_or_a_folder(out: str | None, expected: str) -> None:
    path = export_module.resolve_output_path(NANO, "onnx", out, preprocessing=False)
    assert path == Path(expected)


def test_missing_folders_are_created(fake_export: None, tmp_path: Path) -> None:
    file = tmp_path / "new/x.onnx"
    assert export_model(NANO, preprocessing=False, out=str(file))["file"] == str(file)
    assert file.is_file()
    assert Path(f"{file}.json").is_file()


@pytest.mark.parametrize(
    "model, name",
    [
        ("embedded:vit_nano", "vit_nano"),
        ("hf-hub:owner/name@v1.0", "name"),
        ("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224.augreg_in21k"),
    ],
)
def test_file_is_named_after_the_model(model: str, name: str) -> None:
    assert export_module.resolve_output_path(model, "torch", None, preprocessing=False) == Path(
        f"{name}.pt2"
    )


def test_wrong_suffix_is_refused_before_loading_the_model() -> None:
    for out in ("x.pt2", "x.pt"):
        with refused("recipe.wrong_value", "--out", ".onnx"):
            export_model("no such model", out=out)


def test_unwritable_out_is_refused(fake_export: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("setup.not_writable", "--out"):
        export_model(NANO, preprocessing=False, out=str(tmp_path / "file" / "x.onnx"))


@pytest.mark.parametrize("name", ["vit_nano.onnx", "vit_nano.onnx.json", "vit_nano.onnx.data"])
def test_file_that_is_not_an_export_is_not_overwritten(
    name: str, fake_export: None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("{}")
    with refused("setup.exists", tmp_path / name):
        export_model(NANO, preprocessing=False, out=str(tmp_path))
    assert (tmp_path / name).read_text() == "{}"
    (tmp_path / name).unlink()
    for _ in range(2):  # an earlier export is replaced
        export_model(NANO, preprocessing=False, out=str(tmp_path))


def test_without_out_an_export_of_another_model_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_bytes(b"weights")
    record = {"source": {"model": "birds"}, "export": {"sha256": {"model.onnx": ""}}}
    Path("certificate.json").write_text(json.dumps(record))
    with refused("setup.exists", "model.onnx", "birds", "--out"):
        export_model(NANO)
    assert Path("model.onnx").read_bytes() == b"weights"


def test_an_export_into_the_folder_of_another_one_that_ends_first_is_refused(
    fake_export: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "net.onnx.json"
    network = export_module.export_network

    def export_beside_another(*arguments: Any) -> int:
        record.write_text('{"export": {"sha256": {"another.onnx": ""}}}')
        return network(*arguments)

    monkeypatch.setattr(export_module, "export_network", export_beside_another)
    with refused("setup.exists", record, "another.onnx", "--out"):
        export_model(NANO, preprocessing=False, out=str(tmp_path / "net.onnx"))
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx.json"]


def test_failed_replace_removes_the_old_preprocessing(
    fake_export: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model(NANO, preprocessing=False, out=str(tmp_path))

    def fail(source: Any, target: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with refused("setup.not_writable", "Input/output error"):
            export_model(NANO, preprocessing=False, out=str(tmp_path))
    assert os.listdir(tmp_path) == ["vit_nano.onnx"], "no old preprocessing next to a new file"


def test_external_weights_of_an_older_export_are_removed(fake_export: None, tmp_path: Path) -> None:
    names = ["vit_nano.onnx", "vit_nano.onnx.data"]
    for name in names:
        (tmp_path / name).write_text("weights of another model")
    record = {"export": {"sha256": dict.fromkeys(names, "of an earlier export")}}
    (tmp_path / "vit_nano.onnx.json").write_text(json.dumps(record))
    export_model(NANO, preprocessing=False, out=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["vit_nano.onnx", "vit_nano.onnx.json"]


# Small, but with every kind of layer; the second block of Swin's first stage shifts its windows.
SWIN = {"depths": [2, 1], "num_heads": [1, 2], "embed_dim": 16, "window_size": 4}
ARCHITECTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (96, {"depth": 1, "embed_dim": 32, "num_heads": 2}),
    "resnet18": (64, {"layers": [1, 1, 1, 1], "channels": [8, 16, 32, 64]}),
    "convnext_atto": (64, {"depths": [1, 1, 1, 1], "dims": [8, 16, 16, 16]}),
    "swin_tiny_patch4_window7_224": (32, SWIN),
}


@pytest.mark.faults  # the small sibling exports every kind of layer: test_export_formats.py
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exports_of_other_architectures_match(architecture: str, tmp_path: Path) -> None:
    size, args = ARCHITECTURES[architecture]
    built = build_model(
        architecture,
        pretrained=False,
        num_classes=5,
        head_init="default",
        image_size=size,
        args=args,
    )
    (tmp_path / "saved").mkdir()
    save_model(
        tmp_path / "saved",
        built,
        built.model.state_dict(),
        class_names=list("abcde"),
        preprocessing=built.preprocessing,
    )
    for format in SUFFIXES:
        result = export_model(
            str(tmp_path / "saved"), preprocessing=False, format=format, out=str(tmp_path)
        )
        assert result["max_difference"] < 1e-4
        images = torch.randn(7, 3, size, size)
        with torch.inference_mode():
            expected = built.model.eval()(images)
        actual = run_exported(Path(result["file"]), images)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
