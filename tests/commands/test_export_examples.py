"""The examples of docs/export.md in Node and C++ give the answer of `Classifier`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from onnx_web import NODE_MODULES, require_node, require_ort_web
from PIL import Image

from finetune.commands.export import export_model
from finetune.inference import Classifier

# each compiles its program or runtime, seconds; test_export_certificate.py runs the Python example
pytestmark = pytest.mark.faults
NANO = "embedded:vit_nano"
DOCUMENT = (Path(__file__).parents[2] / "docs/export.md").read_text("utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, equal_exports_run_once: None) -> Path:
    """The exported model and images: RGB, gray, transparent, and turned by EXIF orientation."""
    folder = tmp_path_factory.mktemp("examples")
    export_model(NANO, out=str(folder))
    y, x = np.mgrid[:90, :120]
    disc = (y - 45) ** 2 + (x - 40) ** 2 < 900
    pixels = np.stack([255 * y / 90, 255 * x / 120, 200 * disc], 2).astype(np.uint8)
    image = Image.fromarray(pixels)
    image.save(folder / "rgb.png")
    image.convert("L").save(folder / "gray.png")
    image.putalpha(Image.fromarray((255 * disc).astype(np.uint8)))
    image.save(folder / "transparent.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels).save(folder / "turned.jpg", exif=turned, quality=95)
    return folder


def code_block(language: str) -> str:
    return DOCUMENT.partition(f"```{language}\n")[2].partition("```")[0]


def check_answers(command: list[str], folder: Path, *names: str) -> None:
    """Run an example on each image, and compare its answer."""
    classifier = Classifier.load(NANO, device="cpu")
    for name in names:
        run = subprocess.run([*command, name], cwd=folder, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        index, probability = re.fullmatch(r"class (\d+): (\S+)\n", run.stdout).groups()
        [row] = classifier.predict(folder / name, top_k=1)
        assert int(index) == row["predictions"][0]["index"], name
        assert float(probability) == pytest.approx(row["predictions"][0]["confidence"], abs=1e-4)


def test_node_example(folder: Path) -> None:
    require_node()
    require_ort_web()
    (folder / "classify.mjs").write_text(code_block("js"), encoding="utf-8")
    (folder / "node_modules").symlink_to(NODE_MODULES)
    # the C++ example reads the other two
    check_answers(["node", "classify.mjs"], folder, "transparent.png", "turned.jpg")


def test_cpp_example(folder: Path) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    if shutil.which("g++") is None or not Path("/usr/include/png.h").is_file():
        pytest.skip("g++ or libpng's header is not installed")
    (folder / "classify.cpp").write_text(code_block("cpp"), encoding="utf-8")
    command = next(
        line for line in DOCUMENT.splitlines() if line.startswith("g++") and "classify.cpp" in line
    )
    script = f'openvino="{openvino.__path__[0]}"\n{command}'
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True, capture_output=True)
    check_answers(["./classify"], folder, "rgb.png", "gray.png", "transparent.png")
