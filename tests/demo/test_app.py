"""The demo page in a real browser, and its event handlers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from demo_server import ODD_NAMES, DemoServer, run_demo, save_small_model
from PIL import Image
from refusals import refused

from finetune.demo import markup as page
from finetune.demo.app import (
    PageContent,
    _EventHandlers,
    build_app,
    import_gradio,
    theme_options,
)
from finetune.demo.predictor import DemoPredictor
from finetune.formatting import format_probability
from finetune.inference import Classifier

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with an examples folder."""
    folder = tmp_path_factory.mktemp("models") / "odd-names"
    name = save_small_model(folder)
    (folder / "examples").mkdir()
    for number in range(3):
        save_random_image(folder / "examples" / f"{number}.png", number)
    return name


@pytest.fixture(scope="module")
def classifier(model: str) -> Classifier:
    return Classifier.load(model, device="cpu")


def save_random_image(file: Path, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def save_rotated_jpeg(file: Path) -> Path:
    """Save a JPEG with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(3).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((320, 200)).save(file, exif=exif)
    return file


class TestEventHandlers:
    @pytest.fixture
    def handlers(self, classifier: Classifier, model: str) -> _EventHandlers:
        pytest.importorskip("gradio")
        examples = sorted(Path(model).glob("examples/*.png"))
        return _EventHandlers(import_gradio(), DemoPredictor(classifier), examples)

    def test_browser_formats_keep_the_uploaded_image(
        self, handlers: _EventHandlers, tmp_path: Path
    ) -> None:
        for name in ("a.png", "a.jpg", "a.webp", "a.gif", "a.bmp"):
            image_update, html = handlers.on_upload(
                {"path": str(save_random_image(tmp_path / name))}
            )
            assert image_update == import_gradio().update()
            assert "ft-result" in html

    def test_other_formats_are_shown_decoded(
        self, handlers: _EventHandlers, tmp_path: Path
    ) -> None:
        file = save_random_image(tmp_path / "a.tiff")
        image_update, html = handlers.on_upload({"path": str(file)})
        assert np.array_equal(image_update, np.asarray(Image.open(file)))
        assert "ft-result" in html
        Image.new("RGB", (3000, 20)).save(tmp_path / "b.tiff")
        assert handlers.on_upload({"path": str(tmp_path / "b.tiff")})[0].shape == (7, 1000, 3)

    def test_invalid_image_shows_an_error(self, handlers: _EventHandlers, tmp_path: Path) -> None:
        file = tmp_path / "a.png"
        file.write_bytes(b"<script>alert(1)</script>")
        image_update, html = handlers.on_upload({"path": str(file)})
        assert image_update is None
        assert "not an image" in html
        assert "<script>" not in html
        with pytest.raises(import_gradio().Error, match="not an image") as caught:
            handlers.on_api_call({"path": str(file)})
        assert "<script>" not in str(caught.value)

    def test_missing_image(self, handlers: _EventHandlers) -> None:
        assert handlers.on_upload(None)[1] == page.EMPTY_RESULT
        with pytest.raises(import_gradio().Error, match="no image"):
            handlers.on_api_call(None)

    def test_api_returns_labels_and_confidences(
        self, handlers: _EventHandlers, classifier: Classifier, tmp_path: Path
    ) -> None:
        file = save_rotated_jpeg(tmp_path / "turned.jpg")
        (row,) = classifier.predict(file, top_k=5)
        assert handlers.on_api_call({"path": str(file)}) == [
            {"label": prediction["label"], "confidence": prediction["confidence"]}
            for prediction in row["predictions"]
        ]

    def test_example_click_is_classified(self, handlers: _EventHandlers, model: str) -> None:
        path, html = handlers.on_example_click(1)
        assert path == str(Path(model) / "examples" / "1.png")
        assert "ft-result" in html
        for number in (-1, 3):
            path, html = handlers.on_example_click(number)
            assert path is None
            assert "ft-refusal" in html


def test_api_exposes_only_predict(classifier: Classifier) -> None:
    pytest.importorskip("gradio")
    app = build_app(classifier, PageContent(title="a", examples=[]))
    named = app.get_api_info()["named_endpoints"]
    assert list(named) == ["/predict"]
    assert not app.analytics_enabled


def test_theme_uses_system_fonts_only() -> None:
    gr = pytest.importorskip("gradio")
    theme = theme_options(gr)["theme"]
    assert not theme._stylesheets
    assert "http" not in theme._get_theme_css().replace("http://www.w3.org/2000/svg", "")


def test_missing_gradio_shows_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with refused("setup.missing_package", "finetune-vision[demo]"):
        import_gradio()


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[DemoServer]:
    with run_demo(model) as server:
        yield server
    assert not [line for line in server.lines if "OUTSIDE" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def context(chromium: Any) -> Any:
    """One for all tests, so that the scripts are compiled once."""
    return chromium.new_context(viewport={"width": 1280, "height": 900})


@SLOW
class TestBrowser:
    @pytest.fixture
    def tab(self, context: Any, server: DemoServer) -> Iterator[Any]:
        """The demo in a browser tab, with the URLs that it requested."""
        tab = context.new_page()
        requested_urls: list[str] = []
        errors: list[str] = []
        tab.on("request", lambda request: requested_urls.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(server.url)
        tab.wait_for_selector("#ft-image input[type=file]", state="attached")
        yield SimpleNamespace(page=tab, requested_urls=requested_urls)
        own_prefixes = (server.url, "data:", f"blob:{server.url}")
        assert len(requested_urls) > 10
        assert [address for address in requested_urls if not address.startswith(own_prefixes)] == []
        assert errors == []
        tab.close()

    @staticmethod
    def drop(tab: Any, file: Path) -> None:
        tab.page.set_input_files("#ft-image input[type=file]", str(file))

    def test_image_is_classified_with_an_attention_map(
        self, tab: Any, classifier: Classifier, tmp_path: Path
    ) -> None:
        """The original bytes arrive: a JPEG with an EXIF rotation gives the result of `predict`."""
        file = save_rotated_jpeg(tmp_path / "turned.jpg")
        self.drop(tab, file)
        tab.page.wait_for_selector(".ft-result")
        (row,) = classifier.predict(file, top_k=5)
        names = [item.inner_text() for item in tab.page.query_selector_all(".ft-name")]
        confidences = [item.inner_text() for item in tab.page.query_selector_all(".ft-share")]
        assert names == [prediction["label"] for prediction in row["predictions"]]
        assert confidences == [
            format_probability(prediction["confidence"]) for prediction in row["predictions"]
        ]
        assert sorted(names) == sorted(ODD_NAMES)  # as text, not as markup
        assert tab.page.title() != "broken"
        assert tab.page.query_selector("#ft-output img[src=x]") is None
        for image in tab.page.query_selector_all(".ft-figure img"):
            assert image.evaluate("image => image.complete && image.naturalWidth") > 0
        assert len(tab.page.query_selector_all(".ft-stack img")) == 2
        tab.page.set_viewport_size({"width": 390, "height": 844})
        check_layout(tab.page, 390)

    def test_example_click_and_clear_without_branding(self, tab: Any) -> None:
        tab.page.click("#ft-examples .gallery-item >> nth=1")
        tab.page.wait_for_selector(".ft-result")
        tab.page.wait_for_selector("#ft-image .image-frame img")
        tab.page.click("#ft-image .icon-button-wrapper button")
        tab.page.wait_for_selector(".ft-empty")
        assert tab.page.query_selector(".ft-result") is None
        assert tab.page.locator("footer").count() == 1  # ours, without Gradio's links
        text = tab.page.inner_text("body")
        assert "Gradio" not in text
        assert "API" not in text
        assert "odd-names" in text
        assert "Images stay on this machine" in text

    def test_invalid_files_show_an_error(self, tab: Any, tmp_path: Path) -> None:
        """The browser rejects two. For other invalid files, see test_demo_predictor.py."""
        text_file, large = tmp_path / "notes.txt", tmp_path / "big.png"
        text_file.write_bytes(b"hello")
        large.write_bytes(os.urandom(11 * 2**20))
        for file, words in ((text_file, "notes.txt"), (large, "maximum allowed size of 10")):
            self.drop(tab, file)
            tab.page.locator(".toast-wrap .error").get_by_text(words).wait_for()
            assert tab.page.query_selector(".ft-result") is None
        file = tmp_path / "a.png"
        Image.new("1", (9000, 9000)).save(file)
        self.drop(tab, file)
        tab.page.wait_for_selector(".ft-refusal")
        text = tab.page.inner_text(".ft-refusal")
        assert "The image could not be classified" in text
        assert "9000 x 9000 pixels" in text
        assert "Traceback" not in tab.page.inner_text("body")
        assert str(tmp_path) not in text
        # and the page still works
        self.drop(tab, save_random_image(tmp_path / "good.png"))
        tab.page.wait_for_selector(".ft-result")

    @pytest.mark.parametrize(
        "width, scheme",
        [
            (1280, "light"),
            (390, "dark"),
            (1280, "dark"),
            (390, "light"),
        ],
    )
    @pytest.mark.faults  # the first test checks a narrow screen
    def test_layout_fits_the_screen_with_readable_contrast(
        self, chromium: Any, server: DemoServer, tmp_path: Path, width: int, scheme: str
    ) -> None:
        tab = chromium.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        tab.goto(server.url)
        tab.wait_for_selector("#ft-image input[type=file]", state="attached")
        tab.set_input_files(
            "#ft-image input[type=file]", str(save_random_image(tmp_path / "a.png"))
        )
        tab.wait_for_selector(".ft-result")
        check_layout(tab, width)
        tab.close()


def check_layout(tab: Any, width: int) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for selector in ("h1", ".ft-facts", ".ft-name", ".ft-figure figcaption", ".ft-foot p"):
        assert tab.evaluate(CONTRAST, selector) >= 4.5, selector


# WCAG contrast ratio between the text of an element and the page background.
CONTRAST = """place => {
  const level = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => {
      v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ink = level(getComputedStyle(document.querySelector(place)).color);
  const paper = level(
    getComputedStyle(document.querySelector('.gradio-container')).backgroundColor);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); }"""
