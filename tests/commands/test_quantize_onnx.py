"""Quantizing an exported file: which layers ONNX Runtime computes in INT8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from finetune.commands.export_formats import IMAGE_SIGNATURE, export_network, load_exported
from finetune.commands.quantize_onnx import Int8Quantizer


class UnevenConvolutions(nn.Module):
    """The weights of `second` are 1000 and 1, so that one scale for both would round 1 to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)
        self.third, self.head = nn.Conv2d(2, 2, 1), nn.Linear(2, 2)
        for layer in self.children():
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            for layer, values in (
                (self.first, (0.001, 1)),
                (self.second, (1000, 1)),
                (self.third, (1, 1)),
                (self.head, (1, 1)),
            ):
                layer.weight[0, 0], layer.weight[1, 1] = values

    def forward(self, image_1HW3: Tensor) -> Tensor:
        x = image_1HW3.permute(0, 3, 1, 2) / 255
        for layer in (self.first, self.second, self.third):
            x = layer(x).relu()
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (1, 1, 3), dtype=np.uint8).repeat(8, 0) for _ in range(64)]


class Images(list[np.ndarray]):
    """What the quantizer needs of a `Split`."""

    decode = list.__getitem__


def green(file: Path, images: list[np.ndarray]) -> np.ndarray:
    """Return the second output for each image: the mean of the green channel."""
    model = load_exported(file, "onnx")
    return np.array([float(model(torch.from_numpy(image)[None])[0, 1]) for image in images])


def test_float_layer_between_integer_layers_keeps_its_weights(
    images: list[np.ndarray], tmp_path: Path
) -> None:
    file = tmp_path / "float.onnx"
    example = torch.zeros(1, 8, 12, 3, dtype=torch.uint8)
    network = UnevenConvolutions().eval()
    export_network(network, example, file, "net", "onnx", signature=IMAGE_SIGNATURE)
    expected = green(file, images)
    np.testing.assert_allclose(expected, [image[0, 0, 1] / 255 for image in images], atol=1e-5)
    quantizer = Int8Quantizer(file, Images(images))  # type: ignore[arg-type]
    names = {quantizer.weight_name(layer): layer for layer in quantizer.layers}
    assert list(names) == ["first", "second", "third", "head"]
    for float_layers in ([], [names["second"]]):
        quantizer.quantize(tmp_path / "int8.onnx", float_layers=float_layers)
        np.testing.assert_allclose(green(tmp_path / "int8.onnx", images), expected, atol=0.02)
    graph = onnx.load(tmp_path / "int8.onnx").graph
    weights = [t for t in graph.initializer if t.data_type == onnx.TensorProto.INT8 and t.dims]
    assert sum(tensor.name.startswith(("first", "third", "head")) for tensor in weights) >= 3
