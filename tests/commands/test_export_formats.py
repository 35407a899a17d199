"""The file formats of an export: written for any batch, read back, silent, without local paths."""

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
    root_cause_message,
    suppress_exporter_output,
)
from finetune.errors import WeightsError

FORMATS = ("onnx", "torch")


class Small(nn.Module):
    """A convolution and attention, enough for each exporter to do its work."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        heads = tokens[:, None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
        return self.head(mixed.mean(1))


class FixedBatch(Small):
    """One that counts on the batch that it was traced with."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.reshape(2, 3, 8, 8))


def written(format: str, folder: Path, network: nn.Module) -> Path:
    path = folder / f"small{exporters.SUFFIXES[format]}"
    with suppress_exporter_output():
        export_network(network.eval(), torch.zeros(2, 3, 8, 8), path, "small", format)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_any_batch_gives_the_networks_logits_and_nothing_is_printed(
    format: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    network = Small()
    path = written(format, tmp_path, network)
    with suppress_exporter_output():
        run = load_exported(path, format)
    for batch in (1, 2, 7):
        images = torch.randn(batch, 3, 8, 8)
        found = run(images)
        assert found.shape == (batch, 5)
        assert found.dtype == torch.float32
        # other kernels sum in another order: float32 roundings of numbers below 1
        torch.testing.assert_close(found, network(images), atol=1e-6, rtol=0)
    assert capfd.readouterr() == ("", "")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("format", FORMATS)
def test_no_folder_of_this_machine_is_in_the_file(format: str, tmp_path: Path) -> None:
    content = written(format, tmp_path, Small()).read_bytes()
    for folder in (Path(__file__).parents[2], Path(torch.__file__).parents[1], Path(sys.prefix)):
        assert str(folder).encode() not in content


def test_the_onnx_file_is_valid_and_names_its_ends(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    with suppress_exporter_output():
        opset = export_network(Small().eval(), torch.zeros(2, 3, 8, 8), path, "small", "onnx")
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path)
    assert opset == next(each.version for each in model.opset_import if not each.domain) >= 18
    (images,), (logits,) = model.graph.input, model.graph.output
    sides = [side.dim_param or side.dim_value for side in images.type.tensor_type.shape.dim]
    assert (images.name, sides) == ("images", ["batch", 3, 8, 8])
    sides = [side.dim_param or side.dim_value for side in logits.type.tensor_type.shape.dim]
    assert (logits.name, sides) == ("logits", ["batch", 5])


def test_weights_too_large_for_a_protobuf_stand_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters, "_MAX_PROTOBUF_BYTES", 0)
    network = Small()
    path = written("onnx", tmp_path, network)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["small.onnx", "small.onnx.data"]
    images = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(
        load_exported(path, "onnx")(images), network(images), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_network_for_one_batch_size_is_refused(format: str, tmp_path: Path) -> None:
    with refused("weights.unsupported", "small", format):
        written(format, tmp_path, FixedBatch())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_no_export_is_refused(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{exporters.SUFFIXES[format]}"
    path.write_bytes(b"not a network")
    with suppress_exporter_output(), refused("weights.wrong_export", path.name):
        load_exported(path, format)


def test_a_package_that_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.import_module

    def without_onnxscript(name: str) -> object:
        if name == "onnxscript":
            raise ImportError("No module named 'onnxscript'")
        return find(name)

    monkeypatch.setattr(importlib, "import_module", without_onnxscript)
    with refused("setup.missing_package", "onnxscript", "finetune-vision[export]"):
        require_packages("onnx")
    require_packages("torch")


def test_quiet_hides_noise_and_not_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy() -> None:
        with suppress_exporter_output():
            print("progress")
            print("progress", file=sys.stderr)
            warnings.warn("deprecated", stacklevel=1)
            raise WeightsError("the cause")

    with pytest.raises(WeightsError, match="the cause"):
        noisy()
    assert capsys.readouterr() == ("", "")
    print("heard")
    assert capsys.readouterr().out == "heard\n"


def test_the_innermost_cause_is_one_short_line() -> None:
    def fail() -> None:
        try:
            raise ValueError("a\n  long cause" + "x" * 300)
        except ValueError as error:
            raise RuntimeError("step 1 of 3 failed") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert root_cause_message(caught.value).startswith("a long causexxx")
    assert len(root_cause_message(caught.value)) == 201
    assert root_cause_message(KeyError()) == "KeyError"
