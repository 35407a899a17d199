"""The demo's page in a real browser, and what its functions answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from demo_server import ODD_NAMES, DemoServer, browser, run_demo, save_small_model
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
    """A model with examples beside it."""
    folder = tmp_path_factory.mktemp("models") / "odd-names"
    name = save_small_model(folder)
    (folder / "examples").mkdir()
    for number in range(3):
        paint(folder / "examples" / f"{number}.png", number)
    return name


@pytest.fixture(scope="module")
def classifier(model: str) -> Classifier:
    return Classifier.load(model, device="cpu")


def paint(file: Path, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def turned(file: Path) -> Path:
    """A JPEG with a camera's orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(3).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((320, 200)).save(file, exif=exif)
    return file


class TestAnswers:
    @pytest.fixture
    def answers(self, classifier: Classifier, model: str) -> _EventHandlers:
        pytest.importorskip("gradio")
        examples = sorted(Path(model).glob("examples/*.png"))
        return _EventHandlers(import_gradio(), DemoPredictor(classifier), examples)

    def test_a_picture_that_a_browser_shows_stays(
        self, answers: _EventHandlers, tmp_path: Path
    ) -> None:
        for name in ("a.png", "a.jpg", "a.webp", "a.gif", "a.bmp"):
            kept, shown = answers.on_upload({"path": str(paint(tmp_path / name))})
            assert kept == import_gradio().update()
            assert "ft-result" in shown

    def test_another_is_shown_as_it_was_decoded(
        self, answers: _EventHandlers, tmp_path: Path
    ) -> None:
        file = paint(tmp_path / "a.tiff")
        kept, shown = answers.on_upload({"path": str(file)})
        assert np.array_equal(kept, np.asarray(Image.open(file)))
        assert "ft-result" in shown
        Image.new("RGB", (3000, 20)).save(tmp_path / "b.tiff")
        assert answers.on_upload({"path": str(tmp_path / "b.tiff")})[0].shape == (7, 1000, 3)

    def test_what_is_no_picture_is_refused_in_words(
        self, answers: _EventHandlers, tmp_path: Path
    ) -> None:
        file = tmp_path / "a.png"
        file.write_bytes(b"<script>alert(1)</script>")
        kept, shown = answers.on_upload({"path": str(file)})
        assert kept is None
        assert "not an image" in shown
        assert "<script>" not in shown
        with pytest.raises(import_gradio().Error, match="not an image") as caught:
            answers.on_api_call({"path": str(file)})
        assert "<script>" not in str(caught.value)

    def test_without_a_picture(self, answers: _EventHandlers) -> None:
        assert answers.on_upload(None)[1] == page.EMPTY_RESULT
        with pytest.raises(import_gradio().Error, match="no picture"):
            answers.on_api_call(None)

    def test_a_program_gets_figures(
        self, answers: _EventHandlers, classifier: Classifier, tmp_path: Path
    ) -> None:
        file = turned(tmp_path / "turned.jpg")
        (row,) = classifier.predict(file, top_k=5)
        assert answers.on_api_call({"path": str(file)}) == [
            {"label": one["label"], "confidence": one["confidence"]} for one in row["predictions"]
        ]

    def test_an_example_is_answered(self, answers: _EventHandlers, model: str) -> None:
        path, shown = answers.on_example_click(1)
        assert path == str(Path(model) / "examples" / "1.png")
        assert "ft-result" in shown
        for number in (-1, 3):
            path, shown = answers.on_example_click(number)
            assert path is None
            assert "ft-refusal" in shown


def test_one_function_is_open_to_programs(classifier: Classifier) -> None:
    pytest.importorskip("gradio")
    app = build_app(classifier, PageContent(title="a", examples=[]))
    named = app.get_api_info()["named_endpoints"]
    assert list(named) == ["/predict"]
    assert not app.analytics_enabled


def test_the_theme_has_fonts_of_the_system_only() -> None:
    gr = pytest.importorskip("gradio")
    theme = theme_options(gr)["theme"]
    assert not theme._stylesheets
    assert "http" not in theme._get_theme_css().replace("http://www.w3.org/2000/svg", "")


def test_without_gradio_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with refused("setup.missing_package", "finetune-vision[demo]"):
        import_gradio()


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[DemoServer]:
    with run_demo(model) as server:
        yield server
    assert not [line for line in server.lines if "OUTSIDE" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as chromium:
        yield chromium


@SLOW
class TestBrowser:
    @pytest.fixture
    def tab(self, chromium: Any, server: DemoServer) -> Iterator[Any]:
        """A page with the demo, and what it asked for."""
        tab = chromium.new_page(viewport={"width": 1280, "height": 900})
        asked: list[str] = []
        errors: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(server.url)
        tab.wait_for_selector("#ft-picture input[type=file]", state="attached")
        yield SimpleNamespace(page=tab, asked=asked)
        own = (server.url, "data:", f"blob:{server.url}")
        assert len(asked) > 10
        assert [address for address in asked if not address.startswith(own)] == []
        assert errors == []
        tab.close()

    @staticmethod
    def drop(tab: Any, file: Path) -> None:
        tab.page.set_input_files("#ft-picture input[type=file]", str(file))

    def test_a_picture_is_classified_and_mapped(
        self, tab: Any, classifier: Classifier, tmp_path: Path
    ) -> None:
        """The original bytes arrive: a turned JPEG gives the numbers of `predict`."""
        file = turned(tmp_path / "turned.jpg")
        self.drop(tab, file)
        tab.page.wait_for_selector(".ft-result")
        (row,) = classifier.predict(file, top_k=5)
        names = [item.inner_text() for item in tab.page.query_selector_all(".ft-name")]
        shares = [item.inner_text() for item in tab.page.query_selector_all(".ft-share")]
        assert names == [one["label"] for one in row["predictions"]]
        assert shares == [format_probability(one["confidence"]) for one in row["predictions"]]
        assert sorted(names) == sorted(ODD_NAMES)  # as text: none of them became markup
        assert tab.page.title() != "broken"
        assert tab.page.query_selector("#ft-answer img[src=x]") is None
        for picture in tab.page.query_selector_all(".ft-figure img"):
            assert picture.evaluate("image => image.complete && image.naturalWidth") > 0
        assert len(tab.page.query_selector_all(".ft-stack img")) == 2

    def test_nothing_of_gradio_s_own_is_seen(self, tab: Any) -> None:
        tab.page.wait_for_timeout(300)
        text = tab.page.inner_text("body")
        assert "Gradio" not in text
        assert "API" not in text
        assert "odd-names" in text
        assert "Pictures stay on this machine" in text

    def test_examples_and_another_picture(self, tab: Any) -> None:
        tab.page.click("#ft-examples .gallery-item >> nth=1")
        tab.page.wait_for_selector(".ft-result")
        tab.page.wait_for_selector("#ft-picture .image-frame img")
        tab.page.click("#ft-picture .icon-button-wrapper button")
        tab.page.wait_for_selector(".ft-empty")
        assert tab.page.query_selector(".ft-result") is None

    @pytest.mark.parametrize("is_cut, words", [(False, "9000 x 9000 pixels"), (True, "truncated")])
    def test_a_file_that_is_no_picture_is_refused(
        self, tab: Any, tmp_path: Path, is_cut: bool, words: str
    ) -> None:
        """Others: tests/demo/test_inference.py."""
        file = tmp_path / "a.png"
        if is_cut:
            file.write_bytes(paint(file).read_bytes()[:3000])
        else:
            Image.new("1", (9000, 9000)).save(file)
        self.drop(tab, file)
        tab.page.wait_for_selector(".ft-refusal")
        text = tab.page.inner_text(".ft-refusal")
        assert "This picture was not classified" in text
        assert words in text
        assert "Traceback" not in tab.page.inner_text("body")
        assert str(tmp_path) not in text
        # and the page still works
        self.drop(tab, paint(tmp_path / "good.png"))
        tab.page.wait_for_selector(".ft-result")

    @pytest.mark.parametrize(
        "name, words", [("notes.txt", "notes.txt"), ("big.png", "maximum allowed size of 10")]
    )
    def test_what_is_not_even_sent_is_refused(
        self, tab: Any, tmp_path: Path, name: str, words: str
    ) -> None:
        file = tmp_path / name
        file.write_bytes(b"hello" if name == "notes.txt" else os.urandom(11 * 2**20))
        self.drop(tab, file)
        tab.page.wait_for_selector(".toast-wrap .error")
        assert words in tab.page.inner_text(".toast-wrap")
        assert tab.page.query_selector(".ft-result") is None

    @pytest.mark.parametrize(
        "width, scheme",
        [
            (1280, "light"),
            (390, "dark"),
            pytest.param(1280, "dark", marks=pytest.mark.faults),
            pytest.param(390, "light", marks=pytest.mark.faults),
        ],
    )
    def test_it_fits_the_screen_and_can_be_read(
        self, chromium: Any, server: DemoServer, tmp_path: Path, width: int, scheme: str
    ) -> None:
        tab = chromium.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        tab.goto(server.url)
        tab.wait_for_selector("#ft-picture input[type=file]", state="attached")
        tab.set_input_files("#ft-picture input[type=file]", str(paint(tmp_path / "a.png")))
        tab.wait_for_selector(".ft-result")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for place in ("h1", ".ft-facts", ".ft-name", ".ft-figure figcaption", ".ft-foot p"):
            assert tab.evaluate(CONTRAST, place) >= 4.5, place
        tab.close()


# WCAG's ratio between an element's text and the page behind it.
CONTRAST = """place => {
  const level = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => {
      v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ink = level(getComputedStyle(document.querySelector(place)).color);
  const paper = level(
    getComputedStyle(document.querySelector('.gradio-container')).backgroundColor);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); }"""
