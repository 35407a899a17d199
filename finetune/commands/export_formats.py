"""Export formats: write a network to ONNX or torch.export, load it back, and run it."""

# B batch, K classes, h w the model's input size

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models.hiera import MaskUnitAttention
from torch import Tensor, nn

from finetune.errors import SetupError, WeightsError, install_hint, root_cause_message
from finetune.models.exported import open_onnx_session

__all__ = [
    "IMAGE_SIGNATURE",
    "MAX_DIFFERENCE",
    "SUFFIXES",
    "ExportedModel",
    "Signature",
    "check_exported",
    "export_network",
    "load_exported",
    "require_packages",
    "suppress_exporter_output",
    "wrong_export",
]


class Signature(NamedTuple):
    """Names of the input and the output, and the dynamic axes of the input {axis: name}."""

    input: str
    output: str
    dynamic: dict[int, str]

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any]]:
        return ({axis: torch.export.Dim(name, min=1) for axis, name in self.dynamic.items()},)


NETWORK_SIGNATURE = Signature("images", "logits", {0: "batch"})
IMAGE_SIGNATURE = Signature("image", "probabilities", {1: "height", 2: "width"})

ExportedModel = Callable[[Tensor], Tensor]

MAX_DIFFERENCE = 1e-3  # of a probability or a logit
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
_REQUIRED_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}
# protobuf is limited to 2 GiB; larger weights go to a separate file
MAX_PROTOBUF_BYTES = 1_900_000_000


def require_packages(format: str) -> None:
    """Raise SetupError with the install command if a package of the format is missing."""
    for name in _REQUIRED_PACKAGES[format]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SetupError(
                f"--format {format}: {name} cannot be imported ({error}); {install_hint('export')}",
                code="setup.missing_package",
            ) from error


@contextlib.contextmanager
def suppress_exporter_output() -> Iterator[None]:
    """Suppress the exporters' progress, warnings and logs; errors are still raised."""
    before = logging.root.manager.disable
    noise = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(noise),
            contextlib.redirect_stderr(noise),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@suppress_exporter_output()
def export_network(
    network: nn.Module,
    example: Tensor,
    path: Path,
    architecture: str,
    format: str,
    *,
    signature: Signature = NETWORK_SIGNATURE,
    metadata: Mapping[str, str] | None = None,
) -> int | None:
    """Export a network with dynamic axes: the batch size, or height and width of an image.

    Args:
        network: the network, in evaluation mode, on the CPU, in float32.
        example: example input to trace with, (2, 3, h, w); a .pt2 file stores it.
        path: the file to write; weights too large for one ONNX file go to a second file next to it.
        architecture: the network's name for error messages.
        format: a key of SUFFIXES.
        signature: names of the input and output, and the dynamic axes.
        metadata: stored in the file: metadata_props of ONNX, extra files of torch.export.
    Returns: the opset of an ONNX file, None otherwise.
    Raises: WeightsError if the network cannot be exported with dynamic axes; SetupError if the
        file cannot be written.
    """
    convert = _convert_to_onnx if format == "onnx" else _convert_to_torch
    try:
        save, opset = convert(network, example, signature, metadata or {})
    except Exception as error:  # each exporter raises its own error types
        other = next(name for name in SUFFIXES if name != format)
        raise WeightsError(
            f"{architecture}: cannot be exported to {format} with a dynamic "
            f"{' and '.join(signature.dynamic.values())} "
            f"({root_cause_message(error)}); try --format {other}",
            code="weights.unsupported",
        ) from error
    try:
        save(path)
    except RuntimeError as error:  # torch's writer raises RuntimeError on a full disk
        raise SetupError(
            f"--out: {path.name} cannot be written ({root_cause_message(error)}); "
            "free space on the disk",
            code="setup.not_writable",
        ) from error
    return opset


def _convert_to_onnx(
    network: nn.Module, example: Tensor, signature: Signature, metadata: Mapping[str, str]
) -> tuple[Callable[[Path], None], int]:
    for module in network.modules():
        # Hiera's attention tensors have five axes; ONNX's fused attention supports four
        if isinstance(module, MaskUnitAttention):
            module.fused_attn = False  # type: ignore[misc]
    # trace explicitly: torch.onnx would fall back to a fixed batch size if a dynamic one fails
    program: Any = torch.onnx.export(
        _trace(network, example, signature),
        dynamo=True,
        dynamic_shapes=signature.dynamic_shapes,  # here only for the names of the axes
        input_names=[signature.input],
        output_names=[signature.output],
        verbose=False,
    )
    for graph in (program.model.graph, *program.model.functions.values()):
        for node in graph:
            node.metadata_props.clear()  # contains paths of this machine
    program.model.metadata_props.update(metadata)
    large = sum(p.numel() * p.element_size() for p in network.parameters()) > MAX_PROTOBUF_BYTES
    opset = int(program.model.opset_imports[""])
    return lambda path: program.save(path, external_data=large), opset


def _convert_to_torch(
    network: nn.Module, example: Tensor, signature: Signature, metadata: Mapping[str, str]
) -> tuple[Callable[[Path], None], None]:
    program = _trace(network, example, signature)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of this machine

    def save(path: Path) -> None:
        # serialize to memory first: torch's file writer aborts the process on a full disk
        content = io.BytesIO()
        torch.export.save(program, content, extra_files=dict(metadata))
        path.write_bytes(content.getbuffer())

    return save, None


def _trace(
    network: nn.Module, example: Tensor, signature: Signature
) -> torch.export.ExportedProgram:
    return torch.export.export(network, (example,), dynamic_shapes=signature.dynamic_shapes)


@suppress_exporter_output()
def load_exported(path: Path, format: str) -> ExportedModel:
    """Load an exported file with its runtime, as a user would.

    Returns: a function from the input to the output of its signature, both on the CPU.
    Raises: WeightsError if the runtime cannot load the file.
    """
    try:
        if format == "torch":
            module = torch.export.load(path).module()
            return lambda images: module(images)
        importlib.import_module("onnx").checker.check_model(str(path))
        session = open_onnx_session(path)
        name = session.get_inputs()[0].name
        return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])
    except Exception as error:  # each runtime raises its own error types
        problem = f"{path.name}: the export cannot be loaded ({root_cause_message(error)})"
        raise wrong_export(problem, "try another --format") from error


def check_exported(
    exported: ExportedModel,
    inputs: Tensor,
    expected_BK: Tensor,
    name: str,
    inputs_name: str,
    *,
    advice: str,
) -> Tensor:
    """Run an exported model, and compare its outputs with those of the model.

    Args:
        name, inputs_name: names of the export and of the inputs, for error messages.
        advice: what to do about a difference, for error messages.
    Returns: the outputs, (B, K).
    Raises: WeightsError if the runtime fails, or an output differs by more than MAX_DIFFERENCE.
    """
    try:
        actual_BK = exported(inputs)
    except Exception as error:  # each runtime raises its own error types
        problem = f"{name}: the export fails for {inputs_name} ({root_cause_message(error)})"
        raise wrong_export(problem, advice) from error
    is_same_shape = actual_BK.shape == expected_BK.shape
    difference = float((actual_BK - expected_BK).abs().max()) if is_same_shape else math.inf
    if not difference <= MAX_DIFFERENCE:  # `not <=` instead of `>`, so that NaN fails too
        problem = (
            f"{name}: an output differs from the model's by {difference:.3g} for {inputs_name} "
            f"(limit {MAX_DIFFERENCE:g})"
        )
        raise wrong_export(problem, advice)
    return actual_BK


def wrong_export(problem: str, advice: str) -> WeightsError:
    """Return the error for an export that is not written."""
    return WeightsError(f"{problem}, so it was not written; {advice}", code="weights.wrong_export")
