"""`export --certify`: the same answers in OpenVINO and in onnxruntime-web, or no file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_web import require_node, require_ort_web
from PIL import Image
from refusals import refused

from finetune.commands import export_runtimes
from finetune.commands.export import export_model, format_export
from finetune.commands.export_runtimes import RUNTIMES, find_ort_web, open_runtime

NANO = "embedded:vit_nano"
pytestmark = pytest.mark.usefixtures("equal_exports_run_once")


@pytest.fixture
def ort_web() -> str:
    require_node()
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    return require_ort_web()


def test_certificate_has_each_runtime(tmp_path: Path, ort_web: str) -> None:
    Image.linear_gradient("L").resize((40, 30)).save(tmp_path / "a.png")
    options = {"images": [str(tmp_path / "a.png")], "ort_web": ort_web}  # few: each takes long
    result = export_model(NANO, out=str(tmp_path / "out"), certify_in=RUNTIMES, **options)
    certificate = json.loads(Path(result["certificate"]).read_text("utf-8"))
    runtimes = certificate["export"]["runtimes"]
    assert list(runtimes) == list(RUNTIMES)
    for figures in runtimes.values():
        assert figures["top1_agreement"] == 1
        assert (figures["num_images"], figures["num_sizes"]) == (3, 3)
        assert 0 <= figures["max_difference"] < 1e-5
        assert figures["latency_ms"] > 0
        assert figures["version"]
    assert "in web 1.30.0: same top-1" in format_export(result)


@pytest.mark.parametrize(
    "runtime",
    [pytest.param(each, marks=[pytest.mark.faults] * (each != "openvino")) for each in RUNTIMES],
)
def test_disagreement_is_not_written(
    runtime: str, tmp_path: Path, ort_web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = export_runtimes.certify

    def certify_mirrored(run: Any, *arguments: Any, **options: Any) -> Any:
        return original(lambda image: run(image.flip(2).contiguous()), *arguments, **options)

    monkeypatch.setattr(export_runtimes, "certify", certify_mirrored)
    with refused("weights.wrong_export", NANO, f"in {runtime}", f"omit {runtime} from --certify"):
        export_model(NANO, out=str(tmp_path), certify_in=[runtime], ort_web=ort_web)
    assert not os.listdir(tmp_path)


def test_file_that_is_no_model(tmp_path: Path, ort_web: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    with refused("weights.wrong_export", "OpenVINO"), open_runtime("openvino", path):
        pass
    image = torch.from_numpy(np.zeros((1, 2, 3, 3), np.uint8))
    with (
        open_runtime("web", path, ort_web=ort_web) as run,
        pytest.raises(RuntimeError, match="load model"),
    ):
        run(image)


def test_missing_runtimes_name_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("setup.missing_package", "--ort-web", "npm install onnxruntime-web@"):
        find_ort_web(None, option="demo --static")
    with refused("setup.missing_package", "not its folder"):
        find_ort_web(str(tmp_path), option="demo --static")
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("setup.missing_package", "Node.js"):
        export_model(NANO, out=str(tmp_path / "out"), certify_in=["web"])
    monkeypatch.setitem(sys.modules, "openvino", None)
    with refused("setup.missing_package", "openvino", "pip install"):
        export_model(NANO, out=str(tmp_path / "out"), certify_in=["openvino"])
    with refused("recipe.conflict", "--certify", "--no-preprocessing"):
        export_model(NANO, out=str(tmp_path / "out"), certify_in=["web"], preprocessing=False)
    assert not (tmp_path / "out").exists()


def test_package_is_found_in_a_parent_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "node_modules" / "onnxruntime-web"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"name": "onnxruntime-web", "version": "1.2.3"}')
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert find_ort_web(None, option="demo --static") == (package.resolve(), "1.2.3")
