"""The file formats of an export: a network is written, read back and run."""

# B batch, K classes, h w the model's input size

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timm.models.hiera import MaskUnitAttention
from torch import Tensor, nn

from finetune.errors import SetupError, WeightsError

__all__ = ["SUFFIXES", "Run", "innermost", "opened", "quiet", "require_packages", "write"]

Run = Callable[[Tensor], Tensor]

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
_NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}
_SHAPES = ({0: torch.export.Dim("batch")},)
_PROTOBUF_BYTES = 1_900_000_000  # a protobuf ends at 2 GiB; larger weights get a file of their own


def require_packages(format: str) -> None:
    """Raise SetupError, with what to install, if a format's packages are not there."""
    for name in _NEEDED[format]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SetupError(
                f"--format {format}: {name} cannot be imported ({error}); "
                "pip install 'finetune[export]'",
                code="setup.missing_package",
            ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' progress, warnings and logs from the user; errors come as exceptions."""
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


def write(
    network: nn.Module, example: Tensor, path: Path, architecture: str, format: str
) -> int | None:
    """Export a network for batches of any size.

    Args:
        network: in evaluation mode, on the CPU, in float32.
        example: (2, 3, h, w); a .pt2 keeps it.
        path: of the file; weights too large for one ONNX file go to another beside it.
        architecture: what to call the network in an error.
        format: a key of SUFFIXES.
    Returns: the opset of an ONNX file, None otherwise.
    Raises: WeightsError if it cannot be done for a batch of any size.
    """
    convert = _convert_to_onnx if format == "onnx" else _convert_to_torch
    try:
        save, opset = convert(network, example)
    except Exception as error:  # the exporters raise their own of many kinds
        other = next(name for name in SUFFIXES if name != format)
        raise WeightsError(
            f"{architecture}: does not export to {format} with a dynamic batch "
            f"({innermost(error)}); try --format {other}",
            code="weights.unsupported",
        ) from error
    try:
        save(path)
    except RuntimeError as error:  # torch's own writer for a full disk
        raise SetupError(
            f"--out: {path.name} cannot be written ({innermost(error)}); free space on the disk",
            code="setup.not_writable",
        ) from error
    return opset


def _convert_to_onnx(network: nn.Module, example: Tensor) -> tuple[Callable[[Path], None], int]:
    for module in network.modules():
        if isinstance(module, MaskUnitAttention):  # Hiera's has five axes, fused ONNX's has four
            module.fused_attn = False  # type: ignore[misc]
    # traced here: torch.onnx would go on with a fixed batch where a dynamic one fails
    program: Any = torch.onnx.export(
        _traced(network, example),
        dynamo=True,
        dynamic_shapes=_SHAPES,  # for the name of the batch only
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    for graph in (program.model.graph, *program.model.functions.values()):
        for node in graph:
            node.metadata_props.clear()  # the folders of this machine
    large = sum(p.numel() * p.element_size() for p in network.parameters()) > _PROTOBUF_BYTES
    opset = int(program.model.opset_imports[""])
    return lambda path: program.save(path, external_data=large), opset


def _convert_to_torch(network: nn.Module, example: Tensor) -> tuple[Callable[[Path], None], None]:
    program = _traced(network, example)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the folders of this machine

    def save(path: Path) -> None:
        # through memory: torch's own writer ends the process when it meets a full disk
        content = io.BytesIO()
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())

    return save, None


def _traced(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(network, (example,), dynamic_shapes=_SHAPES)


def innermost(error: BaseException) -> str:
    """The first cause of an error, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


def opened(path: Path, format: str) -> Run:
    """Read an exported file back, as its users would.

    Returns: a function from images (B, 3, h, w) to logits (B, K), both float32 on the CPU.
    Raises: WeightsError if it is not valid, or the runtime does not take it.
    """
    try:
        return _opened_torch(path) if format == "torch" else _opened_onnx(path)
    except Exception as error:  # see write
        raise WeightsError(
            f"{path.name}: the export cannot be read back ({innermost(error)}); it is not "
            "written; try another --format",
            code="weights.wrong_export",
        ) from error


def _opened_torch(path: Path) -> Run:
    module = torch.export.load(path).module()
    return lambda images: module(images)


def _opened_onnx(path: Path) -> Run:
    onnx, runtime = map(importlib.import_module, ("onnx", "onnxruntime"))
    onnx.checker.check_model(str(path))
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
