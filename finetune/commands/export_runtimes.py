"""Runtimes in which `--certify` compares an export: OpenVINO, and onnxruntime-web in Node.

onnxruntime-web is WebAssembly, the same code as in a browser. Its npm package is installed by the
user; nothing is downloaded here.
"""

# H W pixels, K classes

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from finetune.commands.export_certificate import certify
from finetune.commands.export_formats import ExportedModel, wrong_export
from finetune.errors import RecipeError, SetupError, install_hint, root_cause_message
from finetune.inference import Classifier

__all__ = ["RUNTIMES", "certify_runtimes", "check_runtimes", "find_ort_web", "open_runtime"]

RUNTIMES = ("openvino", "web")
_ORT_WEB = "onnxruntime-web"
_ORT_WEB_VERSION = "1.30.0"  # the tested version, in the install command


def find_ort_web(path: str | None, *, option: str) -> tuple[Path, str]:
    """Find the npm package onnxruntime-web, as Node does, or in a given folder.

    Args:
        path: the folder of the package; None searches node_modules in the working directory and
            its parents.
        option: the option that needs the package, for the error message.
    Returns: the folder and the version of the package.
    Raises: SetupError with the install command.
    """
    here = Path.cwd()
    folders = [Path(path).expanduser()] if path else []
    folders = folders or [one / "node_modules" / _ORT_WEB for one in (here, *here.parents)]
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            package = json.loads((folder / "package.json").read_bytes())
            if package["name"] == _ORT_WEB:
                return folder.resolve(), str(package["version"])
    where = f"{path} is not its folder" if path else "it is in no node_modules folder from here up"
    raise SetupError(
        f"{option}: needs the npm package {_ORT_WEB}, but {where}; run: npm install "
        f"{_ORT_WEB}@{_ORT_WEB_VERSION}, or give its folder with --ort-web",
        code="setup.missing_package",
    )


def check_runtimes(
    names: Sequence[str],
    ort_web: str | None,
    *,
    format: str,
    preprocessing: bool,
    precision: str | None,
) -> dict[str, str]:
    """Return the versions of runtimes of RUNTIMES, by name.

    Raises: SetupError if one is not installed; RecipeError if the export is no float32
        ONNX file with preprocessing.
    """
    others = [
        *([f"--format {format}"] if format != "onnx" else []),
        *([] if preprocessing else ["--no-preprocessing"]),
        *([f"--{precision}"] if precision else []),
    ]
    if names and others:
        raise RecipeError(
            f"--certify: not allowed with {others[0]}; remove one of them",
            code="recipe.conflict",
        )
    return {name: _runtime_version(name, ort_web) for name in names}


def _runtime_version(name: str, ort_web: str | None) -> str:
    if name == "web":
        if shutil.which("node") is None:
            raise SetupError(
                "--certify web: node is not on the PATH; install Node.js 20 or newer",
                code="setup.missing_package",
            )
        return find_ort_web(ort_web, option="--certify web")[1]
    try:
        return str(importlib.import_module("openvino").__version__)
    except ImportError as error:
        raise SetupError(
            f"--certify openvino: openvino cannot be imported ({error}); "
            f"{install_hint('openvino')}",
            code="setup.missing_package",
        ) from error


def certify_runtimes(
    versions: Mapping[str, str],
    path: Path,
    classifier: Classifier,
    images: Sequence[np.ndarray],
    name: str,
    *,
    ort_web: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Compare an exported ONNX file with a classifier in each runtime.

    Args:
        versions: from `check_runtimes`.
        path: the file.
        classifier, images, name: see `certify`.
        ort_web: see `find_ort_web`.
    Returns: for each runtime its "version" and the figures of `certify`.
    Raises: WeightsError if the answers of a runtime differ, or it fails.
    """
    figures = {}
    for runtime, version in versions.items():
        advice = f"omit {runtime} from --certify"
        with open_runtime(runtime, path, ort_web=ort_web) as run:
            result = certify(run, classifier, images, f"{name} in {runtime}", advice=advice)
        figures[runtime] = {"version": version, **result}
    return figures


@contextlib.contextmanager
def open_runtime(name: str, path: Path, *, ort_web: str | None = None) -> Iterator[ExportedModel]:
    """Load an ONNX file with preprocessing in a runtime.

    Args:
        name: one of RUNTIMES, which `check_runtimes` has accepted.
        path: the file.
        ort_web: see `find_ort_web`.
    Returns: a function from a uint8 image (1, H, W, 3) to probabilities (1, K).
    """
    if name == "openvino":
        openvino = importlib.import_module("openvino")
        # float32, because CPUs with bfloat16 would use it
        try:
            model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        except RuntimeError as error:
            problem = f"{path.name}: OpenVINO cannot load the export ({root_cause_message(error)})"
            raise wrong_export(problem, "omit openvino from --certify") from error
        yield lambda image_1HW3: torch.from_numpy(model(image_1HW3.numpy())[0])
        return
    script = resources.files("finetune.commands").joinpath("onnxruntime_web.mjs")
    package = find_ort_web(ort_web, option="--certify web")[0]
    with resources.as_file(script) as program, tempfile.TemporaryFile() as errors:
        pipe = subprocess.PIPE
        command = ["node", str(program), str(package), str(path)]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                stdin, stdout = process.stdin, process.stdout
                yield lambda image_1HW3: _run_in_node(stdin, stdout, errors, image_1HW3)
            finally:
                process.kill()


def _run_in_node(
    stdin: IO[bytes], stdout: IO[bytes], errors: IO[bytes], image_1HW3: Tensor
) -> Tensor:
    """Send an image to onnxruntime_web.mjs. Returns: probabilities (1, K)."""
    with contextlib.suppress(BrokenPipeError):  # the error output has the cause
        stdin.write(struct.pack("<2I", *image_1HW3.shape[1:3]))
        stdin.write(image_1HW3.numpy().tobytes())
        stdin.flush()
    header = stdout.read(4)
    size = 4 * struct.unpack("<I", header)[0] if len(header) == 4 else 0
    answer = stdout.read(size)
    if not size or len(answer) < size:
        errors.seek(0)
        lines = errors.read().decode(errors="replace").split("\n")
        raise RuntimeError(next((line for line in reversed(lines) if line), "node has ended"))
    return torch.from_numpy(np.frombuffer(answer, np.float32).copy())[None]
