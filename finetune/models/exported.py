"""Exported ONNX files as models, so that they are evaluated like the model they come from."""

# B batch, C channels, H W pixels, h w the model's input size, K classes

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from finetune.errors import RecipeError, SetupError, WeightsError, install_hint, root_cause_message
from finetune.files import file_sha256, read_untrusted_json
from finetune.model_checksums import json_sha256
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.models.weights.timm_config import validate_config
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing
from finetune.transforms.ragged import RaggedBatch

__all__ = [
    "CERTIFICATE",
    "ExportedPipeline",
    "check_is_changeable",
    "load_model",
    "open_onnx_session",
    "read_export_record",
]

CERTIFICATE = "certificate.json"  # the record of an export with preprocessing


class _Preprocessing(BaseModel):
    input_size: tuple[Literal[3], PositiveInt, PositiveInt]
    mean: tuple[float, float, float]
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    evaluation: str
    decode_size: int | None = None


class _Export(BaseModel):
    """What an export says about itself: as metadata, or in the JSON file next to it."""

    classes: list[str] = Field(min_length=1)
    preprocessing: _Preprocessing
    temperature: PositiveFloat | None = None
    thresholds: list[float] | None = None
    source: dict[str, Any] = {}


class _Files(BaseModel):
    sha256: dict[str, str]  # by file name


class _Record(BaseModel):
    """The checked part of NAME.onnx.json."""

    export: _Files
    checksum: str  # sha256 of all other entries


class _Agreement(BaseModel):
    top1_agreement: NonNegativeFloat
    max_difference: NonNegativeFloat
    latency_ms: NonNegativeFloat


class _RuntimeAgreement(_Agreement):
    version: str


class _Reduced(BaseModel):
    precision: str
    accuracy: NonNegativeFloat
    accuracy_float: NonNegativeFloat
    num_validation_images: PositiveInt
    data_changed: bool


class _CertifiedFiles(_Files, _Agreement):
    bytes: PositiveInt
    num_images: PositiveInt
    num_sizes: PositiveInt
    runtimes: dict[str, _RuntimeAgreement]
    reduced: _Reduced | None = None


class _Source(BaseModel):
    sha256: str | None


class _Calibration(BaseModel):
    temperature: float | None
    thresholds: list[float] | None


class _Versions(BaseModel):
    onnxruntime: str


class _Certificate(_Record):
    """The checked part of certificate.json."""

    export: _CertifiedFiles
    source: _Source
    calibration: _Calibration
    versions: _Versions
    preprocessing: _Preprocessing
    classes: list[str]


def load_model(name: str) -> BuiltModel:
    """Open an exported file NAME.onnx, or build a trained model.

    An exported file has no parameters, and its `pipeline` must be used.

    Raises: same as `build_model`; SetupError if onnxruntime is missing.
    """
    path = Path(name).expanduser()
    if path.suffix == ".onnx" and path.is_file():
        return _open_export(path, name)
    return build_model(name)


def check_is_changeable(built: BuiltModel, name: str, option: str, value: object) -> None:
    """Raise RecipeError if an option that changes the network is set for an exported file."""
    if built.pipeline is not None and value:
        raise RecipeError(
            f"{option}: not possible for {name}, because an exported file cannot be changed; give "
            "the run or the model folder that it was exported from",
            code="recipe.conflict",
        )


class ExportedPipeline:
    """Runs an exported file with preprocessing, from images of any size to logits.

    It takes the place of a `Pipeline`, and the network after it does nothing. The logits are those
    of the network, up to a constant: the temperature in the file is undone.

    Args:
        run: function from an image (1, H, W, 3) uint8 to probabilities (1, K).
        image_size: (height, width) of the network's input, in pixels.
        temperature: the temperature in the file; None for 1.
        multilabel: True if the probabilities come from a sigmoid.
    """

    is_random = has_mixing = False
    decode_size = None  # the preprocessing was exported for decoded images of full size

    def __init__(
        self,
        run: Callable[[np.ndarray], np.ndarray],
        *,
        image_size: tuple[int, int],
        temperature: float | None,
        multilabel: bool,
    ) -> None:
        self._run, self.image_size = run, image_size
        self._temperature, self._multilabel = temperature or 1.0, multilabel

    def __call__(
        self,
        images: Tensor | RaggedBatch | Sequence[Tensor],
        *,
        keys: object = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Compute logits (B, K) of uint8 images (3, H_i, W_i). Arguments: see `Pipeline`."""
        rows = []
        for index in range(len(images)):
            image_1HWC = images[index].permute(1, 2, 0)[None].contiguous().cpu().numpy()
            rows.append(torch.from_numpy(self._run(image_1HWC)[0]))
        p_BK = torch.stack(rows).double()
        # float32 probabilities can be rounded to 0 or 1, whose logits are infinite
        if self._multilabel:
            logits_BK = torch.logit(p_BK, eps=torch.finfo(torch.float32).eps)
        else:
            logits_BK = self._temperature * p_BK.clamp(torch.finfo(torch.float32).tiny).log()
        return logits_BK.to(device or images[0].device, dtype)


class _ExportedNetwork(nn.Module):
    """The network of an exported file without preprocessing; else the identity.

    Args:
        run: function from images (B, 3, h, w) to logits (B, K), or None for the identity.
        num_classes: K.
    """

    def __init__(self, run: Callable[[np.ndarray], np.ndarray] | None, num_classes: int) -> None:
        super().__init__()
        self._run, self.num_classes = run, num_classes

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute logits (B, K)."""
        if self._run is None:
            return inputs
        return torch.from_numpy(self._run(inputs.cpu().numpy())).to(inputs.device)


def open_onnx_session(path: Path) -> Any:
    """Open an ONNX file on the CPU, with torch's number of threads. Returns: the session."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _open_export(path: Path, name: str) -> BuiltModel:
    """Open an exported file. Raises: WeightsError if it is damaged or not ours."""
    try:
        session = open_onnx_session(path)
    except ImportError as error:
        raise SetupError(
            f"{name}: an ONNX file needs onnxruntime ({error}); {install_hint('export')}",
            code="setup.missing_package",
        ) from error
    except Exception as error:  # the runtime raises its own error types
        raise WeightsError(
            f"{name}: ONNX Runtime cannot load the file ({root_cause_message(error)}); export the "
            "model again",
            code="weights.damaged",
        ) from error
    export = validate_config(_Export, _read_description(session, path, name), name)
    num_classes = len(export.classes)
    if session.get_outputs()[0].shape[-1] != num_classes:
        raise WeightsError(
            f"{name}: has {session.get_outputs()[0].shape[-1]} outputs, but names {num_classes} "
            "classes; export the model again",
            code="weights.wrong_classes",
        )
    input_name = session.get_inputs()[0].name

    def run(inputs: np.ndarray) -> np.ndarray:
        output: np.ndarray = session.run(None, {input_name: inputs})[0]
        return output

    config = export.preprocessing
    # the crop is part of the evaluation transforms
    preprocessing = Preprocessing(
        config.input_size[1:], config.mean, config.std, config.interpolation, 1.0, "center"
    )
    pipeline: Pipeline | ExportedPipeline
    has_preprocessing = session.get_inputs()[0].type == "tensor(uint8)"
    if has_preprocessing:
        pipeline = ExportedPipeline(
            run,
            image_size=preprocessing.image_size,
            temperature=export.temperature,
            multilabel=export.thresholds is not None,
        )
    else:
        pipeline = build_pipeline(preprocessing, config.evaluation, decode_size=config.decode_size)
    return BuiltModel(
        _ExportedNetwork(None if has_preprocessing else run, num_classes),
        str(export.source.get("architecture", "onnx")),
        {},
        preprocessing,
        {
            "source": name,
            "file": path.name,
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
            "config_sha256": json_sha256(export.model_dump(mode="json")),
            "calibrated_on": export.source.get("calibrated_on"),  # split of the temperature
        },
        export.classes,
        temperature=export.temperature,
        multilabel=export.thresholds is not None,
        thresholds=export.thresholds,
        pipeline=pipeline,
    )


def read_export_record(path: Path, model: Path) -> dict[str, Any]:
    """Read the JSON file next to an exported file: certificate.json, or NAME.onnx.json.

    Args:
        path: the JSON file.
        model: the exported file.
    Returns: its content.
    Raises: WeightsError if it is damaged or was changed, or `model` is not the exported file.
    """
    content = read_untrusted_json(path, str(path))
    schema = _Certificate if path.name == CERTIFICATE else _Record
    record = validate_config(schema, content, str(path))
    if json_sha256({k: v for k, v in content.items() if k != "checksum"}) != record.checksum:
        raise WeightsError(
            f"{path}: was changed after the export (its checksum differs); restore it from a copy, "
            "or export the model again",
            code="weights.damaged",
        )
    expected = record.export.sha256
    # the file may have been renamed, but refers to its .data by the first name
    name = {sha256: name for name, sha256 in expected.items()}.get(file_sha256(model))
    others = [model.parent / Path(other).name for other in expected if other != name]
    if name is None or not all(
        other.is_file() and file_sha256(other) == expected[other.name] for other in others
    ):
        raise WeightsError(
            f"{path}: describes another file than {model}, or the file was changed after its "
            "export; restore it from a copy, or export the model again",
            code="weights.damaged",
        )
    return dict(content)


def _read_description(session: Any, path: Path, name: str) -> dict[str, Any]:
    """Read the metadata of an export, or the JSON file of one without preprocessing."""
    metadata = session.get_modelmeta().custom_metadata_map
    record = path.with_name(f"{path.name}.json")
    if "classes" in metadata:
        if (certificate := path.with_name(CERTIFICATE)).is_file():
            read_export_record(certificate, path)
        try:
            # other tools add metadata of their own
            keys = _Export.model_fields.keys() & metadata.keys()
            return {key: json.loads(metadata[key]) for key in keys}
        except ValueError as error:
            raise WeightsError(
                f"{name}: its metadata cannot be read ({root_cause_message(error)}); export the "
                "model again",
                code="weights.damaged",
            ) from error
    if not record.is_file():
        raise WeightsError(
            f"{name}: not from finetune export: its metadata has no classes, and {record.name} "
            "does not exist; export a model first",
            code="weights.wrong_format",
        )
    return read_export_record(record, path)
