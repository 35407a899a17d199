"""Export formats: any batch size, loadable, silent, without local paths."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from refusals import refused
from torch import Tensor, nn

from finetune.commands import export_formats as exporters
from finetune.commands.export_formats import (
    export_network,
    load_exported,
    require_packages,
    suppress_exporter_output,
)
from finetune.errors import WeightsError

FORMATS = ("onnx", "torch")


class SmallModel(nn.Module):
    """Convolution, both normalizations, pooling and attention, which exercise both exporters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.pool = nn.Conv2d(3, 8, 2, 2), nn.MaxPool2d(2)
        self.batch_norm, self.layer_norm = nn.BatchNorm2d(8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)
        nn.init.normal_(self.batch_norm.running_mean)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.pool(self.batch_norm(self.patches(images)).relu())
        tokens = self.layer_norm(maps.flatten(2).transpose(1, 2))
        heads = tokens[:, None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
        return self.head(nn.functional.gelu(mixed).mean(1))


class FixedBatchModel(SmallModel):
    """A model that only works with the batch size of its tracing."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.reshape(2, 3, 8, 8))


def export(format: str, folder: Path, model: nn.Module) -> Path:
    path = folder / f"small{exporters.SUFFIXES[format]}"
    export_network(model.eval(), torch.zeros(2, 3, 8, 8), path, "small", format)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_export_is_silent_valid_and_without_local_paths(
    format: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, path = SmallModel().eval(), tmp_path / f"small{exporters.SUFFIXES[format]}"
    opset = export_network(model, torch.zeros(2, 3, 8, 8), path, "small", format)
    run = load_exported(path, format)
    for batch_size in (1, 2, 7):
        images = torch.randn(batch_size, 3, 8, 8)
        actual = run(images)
        assert actual.shape == (batch_size, 5)
        assert actual.dtype == torch.float32
        # other kernels sum in another order: float32 rounding of values below 3
        torch.testing.assert_close(actual, model(images), atol=2e-6, rtol=0)
    assert capfd.readouterr() == ("", "")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    content = path.read_bytes()
    for folder in (Path(__file__).parents[2], Path(torch.__file__).parents[1], Path(sys.prefix)):
        assert str(folder).encode() not in content
    if format == "onnx":
        check_onnx(path, opset)


def check_onnx(path: Path, opset: int | None) -> None:
    """Check the file with ONNX's own checker, and its opset, inputs and outputs."""
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path)
    [version] = [each.version for each in model.opset_import if not each.domain]
    assert opset == version >= 18
    (images,), (logits,) = model.graph.input, model.graph.output
    shape = [dim.dim_param or dim.dim_value for dim in images.type.tensor_type.shape.dim]
    assert (images.name, shape) == ("images", ["batch", 3, 8, 8])
    shape = [dim.dim_param or dim.dim_value for dim in logits.type.tensor_type.shape.dim]
    assert (logits.name, shape) == ("logits", ["batch", 5])


def test_weights_too_large_for_a_protobuf_go_into_a_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters, "MAX_PROTOBUF_BYTES", 0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    path = export("onnx", tmp_path, model)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["small.onnx", "small.onnx.data"]
    images = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(
        load_exported(path, "onnx")(images), model(images), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("format", FORMATS)
def test_model_with_a_fixed_batch_size_is_refused(format: str, tmp_path: Path) -> None:
    with refused("weights.unsupported", "small", format):
        export(format, tmp_path, FixedBatchModel())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_file_that_is_not_an_export_is_refused(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{exporters.SUFFIXES[format]}"
    path.write_bytes(b"not a network")
    with refused("weights.wrong_export", path.name):
        load_exported(path, format)


def test_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_module = importlib.import_module

    def without_onnxscript(name: str) -> object:
        if name == "onnxscript":
            raise ImportError("No module named 'onnxscript'")
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", without_onnxscript)
    with refused("setup.missing_package", "onnxscript", "finetune-vision[export]"):
        require_packages("onnx")
    require_packages("torch")


def test_suppress_exporter_output_hides_output_but_not_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def noisy() -> None:
        with suppress_exporter_output():
            print("progress")
            print("progress", file=sys.stderr)
            warnings.warn("deprecated", stacklevel=1)
            raise WeightsError("the cause")

    with pytest.raises(WeightsError, match="the cause"):
        noisy()
    assert capsys.readouterr() == ("", "")
    print("visible")
    assert capsys.readouterr().out == "visible\n"
