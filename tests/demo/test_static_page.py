"""The page of `demo --static` in Chromium: its answers, and that it needs no server."""

from __future__ import annotations

import base64
import functools
import http.server
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import browser
from demo_server import ODD_NAMES, save_small_model
from hub_fixtures import WRITE_TOKEN, hub, sleep_durations, upload_in_fork
from hub_server import HubServer
from networks import TINY_ARGS, build_network
from onnx_web import require_ort_web
from PIL import Image
from refusals import refused

from finetune.cli.main import main
from finetune.demo import static_page
from finetune.demo.static_page import write_static_page
from finetune.files import file_sha256
from finetune.formatting import format_probability
from finetune.inference import Classifier
from finetune.models.save import save_model

__all__ = ["hub", "sleep_durations", "upload_in_fork"]  # fixtures

NANO = "embedded:vit_nano"
FILES = {
    *("README.md", "certificate.json", "index.html", "model.onnx"),
    *("ort.js", "ort-wasm-simd-threaded.wasm"),
}
CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
MODES = ("RGB", "L", "P", "RGBA")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, equal_exports_run_once: None) -> Path:
    folder = tmp_path_factory.mktemp("static") / "page"
    written = write_static_page(NANO, folder, ort_web=require_ort_web())
    assert set(written["files"]) == {path.name for path in folder.iterdir()} == FILES
    assert os.listdir(folder.parent) == ["page"]
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser(*CAMERA) as running:
        yield running


class FileHost(http.server.SimpleHTTPRequestHandler):
    """Serve files, and know few of their types, as simple file hosts."""

    def guess_type(self, path: Any) -> str:
        known = {".html": "text/html", ".js": "text/javascript"}
        return known.get(Path(path).suffix, "application/octet-stream")

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def opened(chromium: Any, page: Path) -> Iterator[Any]:
    with open_page(chromium, page) as tab:
        yield tab


@pytest.fixture
def tab(opened: Any) -> Any:
    """The page without the result of another test."""
    opened.evaluate("document.querySelector('#ft-output').replaceChildren()")
    return opened


@contextmanager
def serve(folder: Path) -> Iterator[tuple[http.server.ThreadingHTTPServer, str]]:
    """Serve a folder. Yields: the server and its URL."""
    handler = functools.partial(FileHost, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def open_page(chromium: Any, folder: Path) -> Iterator[Any]:
    """Serve the folder, open the page, and go offline when the model is loaded.

    Returns: a tab; it fails the test if the page logs an error or asks another host.
    """
    problems: list[str] = []
    with serve(folder) as (server, host):
        context = chromium.new_context(viewport={"width": 1280, "height": 800})
        tab = context.new_page()
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text))  # also CSP violations
        tab.on(
            "request",
            lambda request: None if request.url.startswith(host) else problems.append(request.url),
        )
        tab.goto(f"{host}index.html")
        tab.get_by_text("The model is loaded").wait_for(timeout=120_000)
        context.set_offline(True)
        server.shutdown()
        try:
            yield tab
        finally:
            context.close()
    # onnxruntime-web says that it does without the type application/wasm
    assert [
        text for text in problems if "wasm streaming" not in text and "falling" not in text
    ] == []


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth random colors with noise."""
    rng = np.random.default_rng(seed)
    grid = Image.fromarray(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    pixels = np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noise = rng.integers(-15, 16, (height, width, 1))
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def classify(tab: Any, content: bytes) -> np.ndarray:
    """Classify a file with the page's own function. Returns: the probabilities."""
    return np.array(
        tab.evaluate(
            """async (text) => {
                const bytes = Uint8Array.from(atob(text), (byte) => byte.charCodeAt(0));
                return [...await classify(new Blob([bytes]))];
            }""",
            base64.b64encode(content).decode(),
        )
    )


def expected_probabilities(model: str, content: bytes, folder: Path) -> np.ndarray:
    path = folder / "image"
    path.write_bytes(content)
    classifier = Classifier.load(model, device="cpu")
    [row] = classifier.predict(str(path), top_k=len(classifier.class_names))
    values = np.empty(len(classifier.class_names))
    for prediction in row["predictions"]:
        values[prediction["index"]] = prediction["confidence"]
    return values


def test_probabilities_are_those_of_predict(tab: Any, tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # EXIF orientation: turn by 90 degrees
    files = [
        encode(photo(*size, seed).convert(MODES[seed % 4]))
        for seed, size in enumerate([(1, 1), (17, 900), (133, 200), (40, 32)])
    ]
    # large, so that the page reads it in strips; and a small file
    large = photo(21, 25).resize((2500, 2100), Image.Resampling.NEAREST)
    files.append(encode(large))
    files.append(encode(photo(150, 100), "JPEG", quality=95, exif=turned))
    transparent = photo(100, 150).convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize((150, 100)))
    files.append(encode(transparent))
    for number, content in enumerate(files):
        expected = expected_probabilities(NANO, content, tmp_path)
        actual = classify(tab, content)
        assert actual.argmax() == expected.argmax(), number
        # JPEG decoders differ by one level, as do the ways to blend with white
        assert actual == pytest.approx(expected, abs=1e-5 if number < 5 else 5e-3), number


def test_chosen_dropped_and_unreadable_files(tab: Any, tmp_path: Path) -> None:
    content = encode(photo(60, 90))
    expected = expected_probabilities(NANO, content, tmp_path)
    order = np.argsort(-expected)[:5]
    names = Classifier.load(NANO).class_names
    rows = [f"{names[k]}\n{format_probability(expected[k])}" for k in order]
    tab.locator("body").press("Tab")
    tab.wait_for_function("document.activeElement.id === 'choose'")  # the first button
    tab.evaluate("document.querySelector('#file').click = () => { window.isAsked = true; }")
    tab.locator("#choose").press("Enter")
    tab.wait_for_function("window.isAsked")  # Chromium's own dialog may not open on a busy machine
    tab.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": content})
    tab.locator(".ft-top").wait_for()
    assert tab.locator(".ft-top li").all_inner_texts() == rows
    tab.set_input_files("#file", {"name": "b.png", "mimeType": "image/png", "buffer": b"no image"})
    tab.get_by_role("alert").wait_for()
    assert "could not be classified" in tab.inner_text("#ft-output")
    tab.evaluate(
        """(bytes) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "a.png"));
            document.body.dispatchEvent(
                new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        list(content),
    )
    tab.locator(".ft-top").wait_for()
    assert tab.locator(".ft-top li").all_inner_texts() == rows


def test_page_opened_as_a_file_says_what_to_do(chromium: Any, page: Path) -> None:
    tab = chromium.new_page()
    tab.goto((page / "index.html").as_uri())
    tab.get_by_text("python -m http.server").wait_for()
    tab.close()


def test_model_of_another_page_is_not_used(chromium: Any, page: Path, tmp_path: Path) -> None:
    """After a new page was published, a browser has a cached model, or a host some old files."""
    folder = shutil.copytree(page, tmp_path / "page")
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"changed")
    tab = chromium.new_page()
    with serve(folder) as (_, host), tab.expect_request("**/model.onnx*") as request:
        tab.goto(f"{host}index.html")
        tab.get_by_text("does not belong to this page").wait_for()
    assert request.value.url == f"{host}model.onnx?sha256={file_sha256(page / 'model.onnx')}"
    tab.close()


def test_camera(tab: Any) -> None:
    tab.get_by_role("button", name="Use the camera").click()
    tab.get_by_role("button", name="Take a photo").click()
    tab.locator(".ft-top").wait_for()
    assert tab.get_by_role("button", name="Use the camera").is_visible()
    assert tab.locator("#preview").is_visible()
    assert tab.locator("#video").is_hidden()


def test_page_fits_the_screen(tab: Any) -> None:
    tab.set_input_files(
        "#file", {"name": "a.png", "mimeType": "image/png", "buffer": encode(photo(900, 40))}
    )
    tab.locator(".ft-top").wait_for()
    for width in (390, 1280):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        image, result = (tab.locator(name).bounding_box() for name in ("#ft-image", ".ft-top"))
        is_below = result["y"] >= image["y"] + image["height"]
        assert is_below == (width == 390)


def test_multilabel_names_and_thresholds(
    chromium: Any, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has the exported file of another model, because an export takes seconds."""
    names = ODD_NAMES + Classifier.load(NANO).class_names[len(ODD_NAMES) :]
    built = build_network("vit", num_classes=len(names), args={**TINY_ARGS, "depth": 1})
    thresholds = [0.0, 1.0, 0.0, *[1.0] * (len(names) - 3)]
    options: dict[str, Any] = {"class_names": names, "preprocessing": built.preprocessing}
    options |= {"multilabel": True, "thresholds": thresholds}
    (tmp_path / "saved").mkdir()
    save_model(tmp_path / "saved", built, built.model.state_dict(), **options)

    def copy_export(model: str, out: str) -> None:
        shutil.copy(page / "model.onnx", out)
        record = json.loads((page / "certificate.json").read_text())
        record["source"]["sha256"] = Classifier.load(model).weights_sha256
        (Path(out) / "certificate.json").write_text(json.dumps(record))

    monkeypatch.setattr(static_page, "export_model", copy_export)
    write_static_page(str(tmp_path / "saved"), tmp_path / "page", ort_web=require_ort_web())
    with open_page(chromium, tmp_path / "page") as tab:
        tab.set_input_files(
            "#file", {"name": "a.png", "mimeType": "image/png", "buffer": encode(photo(64, 64))}
        )
        tab.locator(".ft-top").wait_for()
        predicted = tab.locator(".ft-predicted .ft-name").all_inner_texts()
        assert sorted(predicted) == sorted([ODD_NAMES[0], ODD_NAMES[2]])
        assert tab.inner_text(".ft-labels") == ", ".join(predicted)
        assert "threshold 100.0 %" in tab.locator(".ft-top").text_content()


def test_space_on_the_hub(
    hub: HubServer,
    upload_in_fork: None,
    tmp_path: Path,
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copy_page(model: str, folder: Path, *, ort_web: str | None) -> None:
        shutil.copytree(page, folder)
        os.truncate(folder / "ort-wasm-simd-threaded.wasm", 1000)  # its upload takes 10 s

    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    monkeypatch.setattr(static_page, "write_static_page", copy_page)
    save_small_model(tmp_path / "saved")
    command = ["push", str(tmp_path / "saved"), "--static-space", "alice/page"]
    assert main([*command, "--private"]) == 0
    repository = hub.store.repositories["space", "alice/page"]
    assert repository.private
    files = repository.find("main").files
    assert set(files) - {".gitattributes"} == FILES
    assert b"sdk: static\napp_file: index.html" in files["README.md"].content
    assert files["model.onnx"].content == (page / "model.onnx").read_bytes()
    assert main([*command, "--adapter"]) == 2
    assert main(["push", str(tmp_path / "saved"), "--static-space", "nobody/page"]) == 7


def test_refusals_and_failures_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort_web = require_ort_web()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with refused("recipe.wrong_value", "--static", "full", "empty folder"):
        write_static_page(NANO, tmp_path / "full", ort_web=ort_web)
    with refused("recipe.wrong_value", "this is a file"):
        write_static_page(NANO, tmp_path / "full" / "notes.txt", ort_web=ort_web)
    with refused("setup.missing_package", "--static", "npm install"):
        write_static_page(NANO, tmp_path / "new", ort_web=str(tmp_path))

    def export_other_weights(model: str, *, out: str) -> None:
        record = {"source": {"sha256": "0" * 64}, "export": {}}
        (Path(out) / "certificate.json").write_text(json.dumps(record))

    with monkeypatch.context() as patch, refused("weights.changed", "while it was read"):
        patch.setattr(static_page, "export_model", export_other_weights)
        write_static_page(NANO, tmp_path / "new", ort_web=ort_web)

    def fail(*arguments: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(static_page, "_render_page", fail)
    with pytest.raises(KeyboardInterrupt):
        write_static_page(NANO, tmp_path / "new", ort_web=ort_web)
    assert os.listdir(tmp_path) == ["full"]
