from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from report_runs import (
    HOSTILE_NAMES,
    metric_lines,
    run_results,
    split_results,
    val_mistakes,
    write_run_dir,
    write_training_images,
)

from finetune import __version__
from finetune.data.open_source import open_source
from finetune.evaluation.confidence_intervals import wilson_interval
from finetune.report import page as page_module
from finetune.report.page import write_comparison, write_report_pages, write_run_report

HERE = Path(__file__).parent
LINE_BREAK = "\f"
BLOCK_TAGS = ("tr", "li", "p", "h1", "h2", "h3", "div", "section", "footer", "summary", "dl")
URL_ATTRIBUTES = ("src", "srcset", "action", "formaction", "data", "poster", "background")


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._pieces: list[str] = []
        self._open: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        self._open.append(tag)
        self._pieces.append(
            LINE_BREAK if tag in BLOCK_TAGS else " | " if tag in ("td", "th", "dd") else " "
        )

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text += data
            if not {"svg", "pre"} & set(self._open):
                self._pieces.append(data)

    def find_all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        return [
            found
            for name, found in self.elements
            if name == tag and attributes.items() <= found.items()
        ]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    @property
    def reviewed_text(self) -> str:
        """The text without figures, recipe and version, one line per paragraph or table row."""
        lines = [" ".join(line.split()) for line in "".join(self._pieces).split(LINE_BREAK)]
        return "\n".join(line for line in lines if line).replace(__version__, "VERSION") + "\n"


def write_and_parse_page(path: Path, *overrides: str, **options: Any) -> Page:
    """Write a run directory with its report page, and parse the page."""
    return Page(write_run_report(write_run_dir(path, *overrides, **options)))


def change_record(run: Path, **changes: Any) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | changes))


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has every section, with its page."""
    run = write_run_dir(tmp_path_factory.mktemp("runs") / "everything")
    write_run_report(run)
    return run


@pytest.fixture(scope="module")
def full_page(full_run: Path) -> Page:
    """The page of a run that has every section."""
    return Page(full_run / "report.html")


class TestRunPage:
    def test_has_every_section(self, full_page: Page) -> None:
        sections = [found["id"] for found in full_page.find_all("section")]
        assert sections == [
            *("curves", "confusion", "calibration", "classes", "mistakes", "claims"),
            *("speed", "data", "provenance", "recipe"),
        ]
        links = [found["href"] for found in full_page.find_all("a")]
        assert links == [f"#{name}" for name in sections]

    def test_matches_the_reviewed_text(self, full_page: Page) -> None:
        assert full_page.reviewed_text == (HERE / "run_page.txt").read_text(encoding="utf-8")
        assert "batch_size: 64" in full_page.words  # part of the recipe

    def test_run_that_changes_meanwhile_is_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The run may have ended and written its page, which an older one must not replace."""
        run, render = write_run_dir(tmp_path / "run"), page_module.render_html
        texts = []

        def change_and_render(*arguments: Any, **content: Any) -> str:
            texts.append(render(*arguments, **content))
            change_record(run, argv=["finetune", "train", "changed"])
            return texts[-1]

        monkeypatch.setattr(page_module, "render_html", change_and_render)
        page = write_run_report(run)
        assert ["train changed" in text for text in texts] == [False, True]
        assert page.read_text() == texts[1]

    def test_embeds_figures_and_images(self, full_page: Page) -> None:
        names = [found["aria-label"] for found in full_page.find_all("svg")]
        assert len(names) == 4 + 1 + 2
        images = full_page.find_all("img")
        assert len(images) == 3
        assert all(found["src"].startswith("data:image/png;base64,") for found in images)
        assert all(found["class"] == "small" for found in images)
        assert all(found["alt"] for found in images)

    def test_loads_no_external_resources(self, full_page: Page) -> None:
        (policy,) = full_page.find_all("meta", **{"http-equiv": "Content-Security-Policy"})
        assert policy["content"].startswith("default-src 'none'; img-src data:;")
        assert "unsafe-eval" not in policy["content"]
        assert "script-src 'sha256-" in policy["content"]
        for tag, attributes in full_page.elements:
            assert tag not in ("iframe", "object", "embed", "base", "form")
            for key in URL_ATTRIBUTES:
                assert attributes.get(key, "data:").startswith("data:"), (tag, attributes)
            href = attributes.get("href", attributes.get("xlink:href", "#"))
            assert href.startswith(("#", "data:")), (tag, attributes)
        assert "@import" not in full_page.html
        assert not re.search(r"url\((?!#)", full_page.html)

    def test_ids_are_unique(self, full_page: Page) -> None:
        ids = [found["id"] for _, found in full_page.elements if "id" in found]
        assert len(ids) > 10
        assert len(ids) == len(set(ids))

    def test_output_is_deterministic(self, full_run: Path) -> None:
        first = (full_run / "report.html").read_bytes()
        assert write_run_report(full_run).read_bytes() == first
        assert not list(full_run.glob(".*"))

    def test_uses_an_open_split(self, tmp_path: Path, no_figures: None) -> None:
        run = write_run_dir(tmp_path / "run", "data.source=folder:nowhere")
        assert "cannot be opened from here" in Page(write_run_report(run)).text
        page = Page(write_run_report(run, split=open_source("embedded:digits").splits["test"]))
        assert len(page.find_all("img")) == 3


class TestTrainingImages:
    def test_one_row_per_image(self, tmp_path: Path, no_figures: None) -> None:
        run = write_run_dir(tmp_path / "run", class_names=HOSTILE_NAMES)
        assert not Page(write_run_report(run)).find_all("section", id="images")
        write_training_images(run)
        page = Page(write_run_report(run))
        assert len(page.find_all("img")) == 3 + 3 * 10
        assert page.find_all("a", href="#images")
        epochs = " | ".join(f"epoch {number}" for number in range(1, 9))
        assert f"| Class | decoded | {epochs} | evaluation" in page.reviewed_text
        assert HOSTILE_NAMES[0] in page.text

    def test_one_column_without_random_transforms(self, tmp_path: Path, no_figures: None) -> None:
        run = write_run_dir(tmp_path / "run")
        write_training_images(run, epochs=1)
        text = Page(write_run_report(run)).reviewed_text
        assert "decoded | every epoch | evaluation" in text
        assert "epoch 1" not in text

    def test_note_when_no_images_are_recorded(self, tmp_path: Path, no_figures: None) -> None:
        run = write_run_dir(tmp_path / "run")
        (run / "training_images.json").write_text('{"note": "They are streamed.", "rows": []}')
        page = Page(write_run_report(run))
        assert "They are streamed." in page.text
        assert len(page.find_all("img")) == 3


class TestIncompleteRuns:
    def test_unfinished_run(self, tmp_path: Path) -> None:
        page = write_and_parse_page(
            tmp_path / "run", status="running", metrics=metric_lines(steps=20)
        )
        assert "running, or killed: 20 of 40 steps are logged" in page.words
        assert len(page.find_all("svg")) == 4
        assert not page.find_all("section", id="mistakes")

    def test_failed_run(self, tmp_path: Path, no_figures: None) -> None:
        page = write_and_parse_page(
            tmp_path / "run", status="failed (6)", metrics=metric_lines(steps=10)
        )
        assert "failed (6): 10 of 40 steps are logged" in page.words

    def test_run_of_an_older_version(self, tmp_path: Path) -> None:
        old = split_results()
        del old["calibration"]
        results = {"val": old, "test": old, "best_step": 20, "steps": 40, "claims": []}
        page = write_and_parse_page(tmp_path / "run", results=results)
        assert "did not record individual mistakes" in page.words
        assert "did not record calibration bins" in page.words
        assert "error is 0.0310" in page.words

    def test_run_without_validation_test_or_metrics(self, tmp_path: Path) -> None:
        run = write_run_dir(tmp_path / "run", results={"best_step": 40, "steps": 40})
        (run / "metrics.jsonl").unlink()
        page = Page(write_run_report(run))
        assert "there are no curves" in page.words
        assert "Neither a test nor a validation split was evaluated." in page.words

    def test_undefined_metrics_are_shown_as_dashes(self, tmp_path: Path) -> None:
        lines = [*metric_lines(), {"step": 50, "split": "train", "loss": None, "lr": None}]
        test = {"examples": 400, "mistakes": [{"index": 0}]}
        results = run_results(test=test)
        assert "–" in write_and_parse_page(tmp_path / "run", metrics=lines, results=results).text

    def test_without_a_test_split_the_page_shows_validation(
        self, tmp_path: Path, no_figures: None
    ) -> None:
        results = run_results(val={**split_results(top1=0.7), "mistakes": val_mistakes()})
        del results["test"]
        page = write_and_parse_page(tmp_path / "run", results=results)
        assert "Validation top-1 | 70.00" in page.reviewed_text
        assert "The 3 validation images with the largest loss." in page.words
        assert "Expected calibration error on the validation split 0.0310." in page.words
        assert page.words.count("on the validation split") == 2  # and once at the matrix
        assert len(page.find_all("img")) == 3
        assert page.find_all("div", **{"class": "beside"})  # one diagram fits next to the matrix
        assert "on the test split" not in page.words

    def test_each_class_has_a_thumbnail(self, tmp_path: Path, no_figures: None) -> None:
        labels = open_source("embedded:digits").splits["test"].labels
        test = split_results()
        for label, row in enumerate(test["per_class"]):
            row["support"] = int((labels == label).sum())
        page = write_and_parse_page(tmp_path / "run", results=run_results(test=test))
        assert len(page.find_all("span", **{"class": "thumb"})) == 10
        assert len(page.find_all("img", alt="")) == 10

    def test_metrics_on_few_images_are_marked(self, tmp_path: Path, no_figures: None) -> None:
        pages = {
            images: write_and_parse_page(
                tmp_path / f"{images}",
                results=run_results(test={**split_results(), "examples": images}),
            )
            for images in (20, 400, 1000)
        }
        low, high = (f"{100 * end:.1f}" for end in wilson_interval(16, 20))
        tile = next(line for line in pages[20].reviewed_text.splitlines() if "Test top-1" in line)
        assert f"interval {low}–{high}" in tile
        assert "Test top-1 too few images" in tile
        assert "Test top-1 |" in pages[400].reviewed_text
        assert "interval 75.8–83.6" in pages[400].reviewed_text
        assert "on 1,000 images\n" in pages[1000].reviewed_text

    def test_top5_needs_more_than_five_classes(self, tmp_path: Path, no_figures: None) -> None:
        run = write_run_dir(
            tmp_path / "run", results=run_results(test=split_results(6), val=split_results(6))
        )
        for classes, shown in ((5, False), (6, True)):
            change_record(run, plan={"classes": classes, "images": {}})
            assert ("top-5" in Page(write_run_report(run)).words) == shown


class TestEscaping:
    def test_run_contents_never_become_markup(self, tmp_path: Path) -> None:
        results = run_results()
        results["test"]["mistakes"][0]["name"] = HOSTILE_NAMES[1]
        results["claims"][0] |= {
            "source": HOSTILE_NAMES[0],
            "note": HOSTILE_NAMES[1],
            "how": HOSTILE_NAMES[2],
        }
        overrides = ("data.source=folder:<img src=x onerror=alert(1)>",)
        run = write_run_dir(
            tmp_path / "<i>run<i>", *overrides, class_names=HOSTILE_NAMES, results=results
        )
        change_record(run, argv=HOSTILE_NAMES, versions={HOSTILE_NAMES[1]: HOSTILE_NAMES[0]})
        page = Page(write_run_report(run))
        assert len(page.find_all("script")) == 1
        assert all("style" in found for tag in ("b", "i") for found in page.find_all(tag))
        assert not page.find_all("img", src="x")
        for index in (0, 1, 2, 4, 5, 6, 8):  # the last name is long; the table has all of it
            assert HOSTILE_NAMES[index] in page.text
        assert "lone \\ud83d surrogate \ufffd nul" in page.text
        assert "\x00" not in page.html
        assert "<i>run<i>" in page.text

    def test_token_is_redacted(self, tmp_path: Path, no_figures: None) -> None:
        run = write_run_dir(tmp_path / "run")
        token = "hf_" + "aB3" * 10
        change_record(run, argv=["finetune", "train", f"data.source=hub:x?token={token}"])
        page = Page(write_run_report(run))
        assert token not in page.html
        assert "hf_…" in page.text


class TestComparison:
    @pytest.fixture
    def runs(self, tmp_path: Path) -> list[Path]:
        return [
            write_run_dir(tmp_path / f"lr{lr}-s{seed}", f"optim.lr={lr}", f"run.seed={seed}")
            for lr in (0.1, 0.2)
            for seed in (0, 1)
        ]

    def test_compares_several_runs(
        self, runs: list[Path], tmp_path: Path, no_figures: None
    ) -> None:
        found = write_report_pages([str(run) for run in runs])
        assert found == {
            "reports": [str(run / "report.html") for run in runs],
            "comparison": str(tmp_path / "comparison.html"),
        }
        page = Page(tmp_path / "comparison.html")
        assert page.reviewed_text == (HERE / "comparison_page.txt").read_text(encoding="utf-8")
        assert len(page.find_all("svg")) == 4
        links = [found["href"] for found in page.find_all("a") if not found["href"].startswith("#")]
        assert links == [f"{run.name}/report.html" for run in runs]
        assert len(page.find_all("span", **{"class": "badge good"})) == 4 * 3

    def test_out_names_a_folder_or_a_file(
        self, runs: list[Path], tmp_path: Path, no_figures: None
    ) -> None:
        out = tmp_path / "deep" / "er"
        found = write_report_pages([str(run) for run in runs], out=str(out))
        assert found["comparison"] == str(out / "comparison.html")
        links = [a["href"] for a in Page(out / "comparison.html").find_all("a")]
        assert f"../../{runs[0].name}/report.html" in links
        file = tmp_path / "other.html"
        assert write_report_pages([str(run) for run in runs], out=str(file))["comparison"] == str(
            file
        )

    def test_runs_in_different_folders(self, tmp_path: Path, no_figures: None) -> None:
        runs = [write_run_dir(tmp_path / name / "run") for name in ("a", "b")]
        assert write_report_pages(map(str, runs))["comparison"] == str(tmp_path / "comparison.html")

    def test_links_to_odd_names_are_escaped(self, tmp_path: Path, no_figures: None) -> None:
        runs = [write_run_dir(tmp_path / name) for name in ('"<a>&#?%', "plain")]
        write_report_pages(map(str, runs))
        page = Page(tmp_path / "comparison.html")
        assert page.find_all("a", href="%22%3Ca%3E%26%23%3F%25/report.html")
        assert '"<a>&#?%' in page.text

    def test_comparison_without_run_pages_has_no_links(
        self, runs: list[Path], tmp_path: Path, no_figures: None
    ) -> None:
        page = Page(write_comparison(runs, tmp_path / "c.html"))
        assert all(found["href"].startswith("#") for found in page.find_all("a"))

    def test_unfinished_run_has_a_waiting_badge(
        self, runs: list[Path], tmp_path: Path, no_figures: None
    ) -> None:
        write_run_dir(tmp_path / "late", status="running", metrics=metric_lines(steps=10))
        page = Page(write_comparison([*runs, tmp_path / "late"], tmp_path / "c.html"))
        assert page.find_all("span", **{"class": "badge wait"})

    def test_only_unfinished_runs(self, tmp_path: Path, no_figures: None) -> None:
        runs = [
            write_run_dir(tmp_path / n, status="running", metrics=metric_lines(steps=10))
            for n in "ab"
        ]
        page = Page(write_comparison(runs, tmp_path / "c.html"))
        assert not page.find_all("div", role="img")


class TestReportCommand:
    def test_one_run(self, tmp_path: Path, no_figures: None) -> None:
        run = write_run_dir(tmp_path / "run")
        found = write_report_pages([str(run)])
        assert found == {"reports": [str(run / "report.html")], "comparison": None}
        assert write_report_pages([str(run)] * 2) == found
        out = tmp_path / "pages"
        assert write_report_pages([str(run)], out=str(out))["reports"] == [str(out / "report.html")]
        file = str(tmp_path / "x" / "my.html")
        assert write_report_pages([str(run)], out=file)["reports"] == [file]
        assert "run" in Page(Path(file)).text

    def test_reads_all_runs_before_writing_a_page(self, tmp_path: Path) -> None:
        run = write_run_dir(tmp_path / "run")
        with refused("recipe.not_found", tmp_path / "nowhere"):
            write_report_pages([str(run), str(tmp_path / "nowhere")])
        assert not (run / "report.html").exists()

    def test_invalid_out(self, tmp_path: Path) -> None:
        run = write_run_dir(tmp_path / "run")
        (tmp_path / "file").write_text("x")
        with refused("recipe.wrong_value", "--out", tmp_path / "file"):
            write_report_pages([str(run)], out=str(tmp_path / "file"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a page, with hostile class names and wide tables."""
    folder = tmp_path_factory.mktemp("browser")
    runs = [
        write_run_dir(folder / f"run-s{n}", f"run.seed={n}", class_names=HOSTILE_NAMES)
        for n in range(3)
    ]
    write_training_images(runs[0])
    unfinished = write_run_dir(folder / "late", status="running", metrics=metric_lines(steps=20))
    many = split_results(60)
    write_run_dir(
        folder / "many",
        results=run_results(test=many, val=many),
        class_names=[HOSTILE_NAMES[8]] * 60,
    )

    @cache
    def write(kind: str) -> Path:
        if kind == "comparison":
            return write_comparison([*runs, unfinished], folder / "comparison.html")
        shown = {"run": runs[0], "unfinished": unfinished, "many classes": folder / "many"}
        return write_run_report(shown[kind])

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "run",
        "comparison",
        pytest.param("unfinished", marks=pytest.mark.faults),
        pytest.param("many classes", marks=pytest.mark.faults),
    ],
)
def test_renders_in_a_browser(chromium: Any, pages: Callable[[str], Path], kind: str) -> None:
    """On a phone and on a desk, in light and dark colors."""
    page = chromium.new_page()
    console_messages: list[str] = []
    requested_urls: list[str] = []
    page.on("console", lambda message: console_messages.append(message.text))
    page.on("pageerror", lambda error: console_messages.append(str(error)))
    page.on("request", lambda request: requested_urls.append(request.url))
    page.goto(pages(kind).as_uri())
    colors = {}
    for width, scheme in itertools.product((390, 1280), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        colors[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        svg = "getComputedStyle(document.querySelector('svg text')).fill"
        colors[f"{scheme} text"] = page.evaluate(svg)
    assert len(set(colors.values())) == 4, colors
    broken = "[...document.images].filter((one) => !one.naturalWidth).length"
    assert page.evaluate(broken) == 0
    page.close()
    assert not console_messages
    loaded = [url for url in requested_urls if not url.startswith("data:")]
    assert loaded == [pages(kind).as_uri()]


@pytest.mark.slow
def test_narrow_screen_shows_the_scroll_hint(chromium: Any, pages: Callable[[str], Path]) -> None:
    page = chromium.new_page()
    page.goto(pages("run").as_uri())
    for width, narrow in ((390, True), (1280, False)):
        page.set_viewport_size({"width": width, "height": 844})
        matrix = "document.querySelector('.matrix')"
        assert page.evaluate(f"{matrix}.scrollWidth > {matrix}.clientWidth") == narrow
        assert page.locator(".phone").is_visible() == narrow
        widths = "[...document.querySelectorAll('.diagrams figure')].map((one) => one.clientWidth)"
        assert max(page.evaluate(widths)) <= 480  # 30rem
    page.close()


@pytest.mark.slow
def test_table_sorts_by_column_header(chromium: Any, pages: Callable[[str], Path]) -> None:
    page = chromium.new_page()
    page.goto(pages("run").as_uri())
    cells = "[...document.querySelectorAll('#classes tbody tr')].map((r) => r.cells[1].innerText)"
    head = page.locator("#classes thead th").nth(1)
    page.locator("#classes thead button").nth(1).click()
    assert head.get_attribute("aria-sort") == "descending"
    assert page.evaluate(cells)[-1] == "0"
    page.locator("#classes thead button").nth(1).click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert page.evaluate(cells)[0] == "0"
    page.close()
