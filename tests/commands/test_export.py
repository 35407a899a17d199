"""Export: the logits of the exported file, its preprocessing beside it, and what is refused."""

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
from finetune.models.build import build_model
from finetune.models.save import save_model

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
NANO = "embedded:vit_nano"
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}


def logits_of(path: Path, images: Tensor) -> Tensor:
    """Run an exported file as somebody without this package would."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(images)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@pytest.fixture(scope="module", params=SUFFIXES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exported")
    return export_model(NANO, format=request.param, out=str(folder / "below"))


@pytest.fixture
def instant(monkeypatch: Patch) -> None:
    """Exports that are the network itself, for tests of everything around them."""
    networks: list[nn.Module] = []

    def write(network: nn.Module, example: Tensor, path: Path, *_: str) -> int:
        networks.append(network)
        path.write_bytes(b"weights")
        return 20

    monkeypatch.setattr(export_module, "export_network", write)
    monkeypatch.setattr(export_module, "load_exported", lambda path, format: networks[-1])


@pytest.fixture
def run_of_folder(tmp_path: Path, image_folder: Path) -> Path:
    """A run directory as its model and its recipe: trained on a folder, of three classes."""
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
    (run / "run.json").write_text("{}")
    (run / "recipe.yaml").write_text(
        f"model: {{name: '{NANO}'}}\n"
        f"data: {{source: 'folder:{image_folder}', eval: 'resize((32, 32))'}}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    return run


def picture(height: int = 90, width: int = 120) -> Image.Image:
    """Waves of colour: what a photo has and noise has not, neighbours that are alike."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 13)]
    return Image.fromarray(np.rint(127.5 + 127.5 * np.stack(waves, 2)).astype(np.uint8))


def test_any_batch_gives_the_models_logits(exported: dict[str, Any]) -> None:
    network = build_model(NANO).model.eval()
    for batch in (1, 7):
        images = torch.randn(batch, 3, 32, 32)
        with torch.inference_mode():
            expected = network(images)
        found = logits_of(Path(exported["file"]), images)
        assert found.shape == expected.shape
        # logits of about 10, summed in another order
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_answer_says_what_was_compared(exported: dict[str, Any]) -> None:
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


def test_what_stands_beside_is_whole(exported: dict[str, Any]) -> None:
    facts = json.loads(Path(exported["preprocessing"]).read_text("utf-8"))
    built = build_model(NANO)
    assert facts["source"]["model"] == NANO
    assert facts["source"]["architecture"] == built.architecture
    assert facts["source"]["sha256"] == built.provenance["sha256"]
    assert facts["input"]["shape"] == ["batch", 3, 32, 32]
    assert facts["output"]["shape"] == ["batch", len(facts["class_names"])]
    assert facts["class_names"] == Classifier.load(NANO).class_names
    assert facts["temperature"] is None
    assert {"torch", "timm"} <= set(facts["versions"])
    assert facts["export"] == {k: exported[k] for k in facts["export"]}
    assert (facts["export"]["opset"] is None) == (exported["format"] == "torch")


def test_what_stands_beside_gives_the_pixels(exported: dict[str, Any], tmp_path: Path) -> None:
    """A stranger decodes with PIL and transforms with timm, from the JSON file alone."""
    picture().save(tmp_path / "waves.png")
    facts = json.loads(Path(exported["preprocessing"]).read_text("utf-8"))["preprocessing"]
    keys = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    transform = create_transform(**{key: facts[key] for key in keys}, is_training=False)
    with Image.open(tmp_path / "waves.png") as image:
        pixels = transform(image.convert("RGB"))
    theirs = logits_of(Path(exported["file"]), pixels[None])[0]
    classifier = Classifier.load(NANO, device="cpu")
    ours = classifier.logits(
        classifier.pipeline([torch.from_numpy(np.array(picture())).permute(2, 0, 1)])
    )[0]
    assert int(theirs.argmax()) == int(ours.argmax())
    # PIL rounds its resized pixels to whole numbers, 0.004 of what the network sees; ours are not
    torch.testing.assert_close(theirs, ours, atol=0.05, rtol=0)
    assert float(ours.std()) > 1, "the tolerance is small beside the logits"


@pytest.mark.parametrize("damage", [0.01, float("nan")])
def test_an_export_that_differs_is_refused_and_leaves_the_old(
    damage: float, tmp_path: Path, monkeypatch: Patch
) -> None:
    real_write = export_module.export_network

    def write_and_damage(network: Any, example: Any, path: Path, *rest: str) -> Any:
        opset = real_write(network, example, path, *rest)
        model = onnx.load(path)
        largest = max(model.graph.initializer, key=lambda each: len(each.raw_data))
        weights = onnx.numpy_helper.to_array(largest) + np.float32(damage)
        largest.CopyFrom(onnx.numpy_helper.from_array(weights, largest.name))
        onnx.save(model, path)
        return opset

    monkeypatch.setattr(export_module, "export_network", write_and_damage)
    (tmp_path / "vit_nano.onnx").write_text("old")
    with refused("weights.wrong_export", "vit_nano", "0.001"):
        export_model(NANO, out=str(tmp_path))
    assert os.listdir(tmp_path) == ["vit_nano.onnx"]
    assert (tmp_path / "vit_nano.onnx").read_text() == "old"


def test_each_batch_size_is_compared(instant: None, tmp_path: Path, monkeypatch: Patch) -> None:
    network = build_model(NANO).model.eval()

    def run(images: Tensor) -> Tensor:
        if len(images) == 5:
            raise RuntimeError("shape mismatch")
        return network(images)

    monkeypatch.setattr(export_module, "load_exported", lambda path, format: run)
    with refused("weights.wrong_export", "batch of 5", "shape mismatch"):
        export_model(NANO, out=str(tmp_path))
    assert not os.listdir(tmp_path)


def test_a_run_is_compared_on_its_own_data(
    instant: None, run_of_folder: Path, image_folder: Path, tmp_path: Path
) -> None:
    result = export_model(str(run_of_folder), out=str(tmp_path / "out"))
    assert Path(result["file"]).name == "my-run.onnx"
    assert (result["num_images"], result["images"]) == (12, f"folder:{image_folder}")
    facts = json.loads(Path(result["preprocessing"]).read_text("utf-8"))
    assert facts["class_names"] == ["blue", "green", "red"]
    assert facts["source"]["model"] == "my-run", "no folder of this machine"
    assert facts["preprocessing"]["evaluation"] == "resize((32, 32))"


def test_data_that_is_not_there_is_replaced_and_that_is_said(
    instant: None, run_of_folder: Path, image_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    image_folder.rename(tmp_path / "elsewhere")
    result = export_model(str(run_of_folder / "model" / ".."), out=str(tmp_path / "out"))
    assert result["images"] == "embedded:digits"
    assert "cannot be read here" in capsys.readouterr().err


def test_images_can_be_named(instant: None, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        picture(40 + number).save(tmp_path / "in" / f"{number}.png")
    result = export_model(NANO, images=[str(tmp_path / "in")], out=str(tmp_path))
    assert (result["num_images"], result["images"]) == (3, "--images")
    assert result["batch_sizes"] == [1, 2, 5, 16], "with repeated images"
    (tmp_path / "in" / "3.png").touch()
    with refused("data.unreadable", "3.png"):
        export_model(NANO, images=[str(tmp_path / "in")], out=str(tmp_path))
    with refused("data.unreadable", "*.jpg"):
        export_model(NANO, images=[str(tmp_path / "*.jpg")], out=str(tmp_path))


def test_a_temperature_travels_along(instant: None, run_of_folder: Path, tmp_path: Path) -> None:
    path = run_of_folder / "model" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["calibration"] = {"temperature": 1.75, "split": "val"}
    path.write_text(json.dumps(config), "utf-8")
    result = export_model(str(run_of_folder), out=str(tmp_path / "out"))
    assert json.loads(Path(result["preprocessing"]).read_text("utf-8"))["temperature"] == 1.75


def test_another_size_leaves_the_runs_sentence_aside(
    instant: None, run_of_folder: Path, tmp_path: Path
) -> None:
    result = export_model(str(run_of_folder), out=str(tmp_path / "out"), image_size=48)
    facts = json.loads(Path(result["preprocessing"]).read_text("utf-8"))
    assert facts["input"]["shape"] == ["batch", 3, 48, 48]


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
def test_out_is_a_file_or_a_folder(
    out: str | None, expected: str, instant: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export_model(NANO, out=out)["file"] == expected
    assert Path(expected).is_file()
    assert Path(f"{expected}.json").is_file()


@pytest.mark.parametrize(
    "model, name",
    [
        ("embedded:vit_nano", "vit_nano"),
        ("hf-hub:owner/name@v1.0", "name"),
        ("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224.augreg_in21k"),
    ],
)
def test_the_file_is_called_after_the_model(model: str, name: str) -> None:
    assert export_module._resolve_output_path(model, "torch", None) == Path(f"{name}.pt2")


def test_another_formats_suffix_is_refused_before_any_work() -> None:
    for out in ("x.pt2", "x.pt"):
        with refused("recipe.wrong_value", "--out", ".onnx"):
            export_model("no such model", out=out)


def test_a_place_that_cannot_be_written(instant: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("setup.not_writable", "--out"):
        export_model(NANO, out=str(tmp_path / "file" / "x.onnx"))


def test_a_failure_while_publishing_vouches_for_nothing(
    instant: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    for name in ("vit_nano.onnx", "vit_nano.onnx.json"):
        (tmp_path / name).write_text("old")

    def refuse(source: Any, target: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with refused("setup.not_writable", "Input/output error"):
            export_model(NANO, out=str(tmp_path))
    assert os.listdir(tmp_path) == ["vit_nano.onnx"], "never old facts beside a new file"


def test_weights_of_an_older_export_do_not_stay(instant: None, tmp_path: Path) -> None:
    (tmp_path / "vit_nano.onnx.data").write_text("of another model")
    export_model(NANO, out=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["vit_nano.onnx", "vit_nano.onnx.json"]


# Small, but with every kind of layer; the second block of swin's first stage shifts its windows.
SWIN = {"depths": [2, 1], "num_heads": [1, 2], "embed_dim": 16, "window_size": 4}
ARCHITECTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (96, {"depth": 1, "embed_dim": 32, "num_heads": 2}),
    "resnet18": (64, {"layers": [1, 1, 1, 1], "channels": [8, 16, 32, 64]}),
    "convnext_atto": (64, {"depths": [1, 1, 1, 1], "dims": [8, 16, 16, 16]}),
    "swin_tiny_patch4_window7_224": (32, SWIN),
}
IN_THE_LONG_RUN = ("convnext_atto", "swin_tiny_patch4_window7_224")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.faults] * (name in IN_THE_LONG_RUN))
        for name in ARCHITECTURES
    ],
)
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
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
        result = export_model(str(tmp_path / "saved"), format=format, out=str(tmp_path))
        assert result["max_difference"] < 1e-4
        images = torch.randn(7, 3, size, size)
        with torch.inference_mode():
            expected = built.model.eval()(images)
        found = logits_of(Path(result["file"]), images)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
