"""Quantize an exported ONNX file to INT8, with some layers in float, or convert it to FP16."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.export_formats import IMAGE_SIGNATURE, suppress_exporter_output
from finetune.data.source import Split

__all__ = ["Int8Quantizer", "convert_to_fp16"]

_WEIGHTED_OPS = ("Conv", "Gemm", "MatMul")
# Between two convolutions, integers pass through these. In networks with layer normalization a few
# channels are much larger than the others, so there only the inputs of layers are quantized: for
# vit_ti on CIFAR-10, INT8 then moves 0.018 of the probability to other classes instead of 0.028.
_INTEGER_OPS = ("Add", "Clip", "Relu", "GlobalAveragePool", "ReduceMean")
_LOWEST = "lowest_float32"


class Int8Quantizer:
    """Quantizes one exported file, with one calibration for all choices of float layers.

    Args:
        path: the exported file, with preprocessing; its folder gets temporary files.
        images: training images, to compute the ranges of the activations from.
    """

    @suppress_exporter_output()
    def __init__(self, path: Path, images: Split) -> None:
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        folded = path.with_name("folded.onnx")
        # constants and batch normalization, as the quantizer expects; symbolic inference is for
        # transformers of unknown shape, and here only the image size is unknown
        quant_pre_process(path, folded, skip_symbolic_shape=True)
        self._images, self._cache = images, path.with_name("calibration.json")
        self._graph = _Graph(onnx.load(str(folded)))
        self.layers = self._graph.layers

    def weight_name(self, layer: str) -> str:
        """Return the PyTorch name of a layer, from its bias or weight; else the node's name."""
        node = next(node for node in self._graph.nodes if node.name == layer)
        names = [name for name in node.input[1:] if "." in name]
        return names[-1].removeprefix("network.").rpartition(".")[0] if names else layer

    @suppress_exporter_output()
    def quantize(self, target: Path, *, float_layers: Collection[str]) -> None:
        """Write the file with all layers in INT8 but `float_layers`."""
        from onnxruntime.quantization import QuantType, quantize_static

        float_outputs = _WEIGHTED_OPS if self._graph.has_layer_norm else ()
        quantize_static(
            _guarded(self._graph.model, float_layers),
            target,
            _CalibrationReader(self._images),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=[*_WEIGHTED_OPS, *_INTEGER_OPS],
            nodes_to_quantize=self._graph.quantizable_nodes(float_layers),
            calibration_cache_path=self._cache,  # the first call fills it
            extra_options={"OpTypesToExcludeOutputQuantization": list(float_outputs)},
        )


class _CalibrationReader:
    """Feeds images to ONNX Runtime's calibration, one at a time."""

    def __init__(self, images: Split) -> None:
        self._decoded = map(images.decode, range(len(images)))

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self._decoded, None)
        return None if image is None else {IMAGE_SIGNATURE.input: np.array(image)[None]}


class _Graph:
    """The nodes of an ONNX model, and the names of those with weights: the layers."""

    def __init__(self, model: Any) -> None:
        self.model, self.nodes = model, list(model.graph.node)
        self._constants = {tensor.name for tensor in model.graph.initializer}
        # the preprocessing computes its resampling matrices, so these products have no weights
        self.layers = [
            node.name
            for node in self.nodes
            if node.op_type in _WEIGHTED_OPS and self._constants.intersection(node.input[1:2])
        ]
        self.has_layer_norm = any(node.op_type == "LayerNormalization" for node in self.nodes)

    def quantizable_nodes(self, float_layers: Collection[str]) -> list[str]:
        """Return the nodes to quantize: all layers but `float_layers`, and what is between them."""
        names: list[str] = []
        integer_tensors: set[str] = set()
        for node in self.nodes:
            inputs = [name for name in node.input if name and name not in self._constants]
            if (node.name in self.layers and node.name not in float_layers) or (
                not self.has_layer_norm
                and node.op_type in _INTEGER_OPS
                and inputs
                and integer_tensors.issuperset(inputs)
            ):
                names.append(node.name)
                integer_tensors.update(node.output)
        return names

    def outside_network(self) -> list[str]:
        """Return the nodes before the first layer, and the final softmax."""
        names = [node.name for node in self.nodes]
        return [*names[: names.index(self.layers[0])], names[-1]]


def _guarded(model: Any, float_layers: Collection[str]) -> Any:
    """Return a copy of a model with a node without effect before each layer of `float_layers`.

    ONNX Runtime quantizes the weights of a float convolution between DequantizeLinear and
    QuantizeLinear when it loads the file, with one scale for all channels. The maximum with the
    lowest float32 hides this pattern.
    """
    from onnx import helper, numpy_helper

    copy = type(model)()
    copy.CopyFrom(model)
    if float_layers:
        lowest = np.array(np.finfo(np.float32).min)
        copy.graph.initializer.append(numpy_helper.from_array(lowest, _LOWEST))
    nodes = []
    for node in copy.graph.node:
        if node.name in float_layers:
            name = f"{node.name}_input"
            nodes.append(helper.make_node("Max", [node.input[0], _LOWEST], [name], name))
            node.input[0] = name
        nodes.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


@suppress_exporter_output()
def convert_to_fp16(path: Path, target: Path) -> None:
    """Convert the network to FP16; the preprocessing and the softmax stay in float32."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    model = onnx.load(str(path))
    blocked = _Graph(model).outside_network()
    model = convert_float_to_float16(model, keep_io_types=True, node_block_list=blocked)
    # ONNX Runtime 1.30 repeats the cast of a value for each node that reads it
    nodes = {node.output[0]: node for node in model.graph.node}
    del model.graph.node[:]
    model.graph.node.extend(nodes.values())
    OnnxModel(model).topological_sort()  # the converter appends its casts at the end
    onnx.save(model, str(target))
