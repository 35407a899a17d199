"""The npm packages of the tests, and test images as files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

NODE_MODULES = Path(__file__).parent / "node" / "node_modules"


def require_ort_web() -> str:
    """Return the folder of onnxruntime-web; skip the test if the package is not installed."""
    folder = NODE_MODULES / "onnxruntime-web"
    if not folder.is_dir():
        pytest.skip("onnxruntime-web is not installed: npm ci --prefix tests/node")
    return str(folder)


def require_node() -> None:
    """Skip the test without Node."""
    if shutil.which("node") is None:
        pytest.skip("node is not on the PATH")
