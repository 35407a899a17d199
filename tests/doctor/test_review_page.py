"""doctor.html in Chromium, and its content."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from doctor_findings import write_findings
from refusals import refused
from small_datasets import write_image_folder

from finetune.data.decisions import apply_decisions, read_decisions
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.doctor.findings import open_findings
from finetune.doctor.review_page import write_review_page

NAMES = ["<img src=x onerror=document.title='broken'>", "${1+1} & {{7*7}}", "שלום"]

RIGHT_EDGE = """Math.max(
    ...[...document.querySelectorAll("#finding *")].map((one) => one.getBoundingClientRect().right)
)"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    counts = {f"{split}/{name}": 3 for split in ("train", "test") for name in NAMES}
    return open_source(write_image_folder(tmp_path_factory.mktemp("photos"), counts))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    write_findings(folder, source, num_errors=60)
    return write_review_page(open_findings(source.name, folder), folder)


def embedded_data(page: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_surest_findings_have_pictures_and_the_others_are_counted(page: Path) -> None:
    data = embedded_data(page)
    errors, *others = data["kinds"]
    assert len(errors["keys"]) == len(data["findings"]["label_errors"]) == 50
    assert "60" in errors["left_out"]
    assert not any(kind["left_out"] for kind in others)
    shown = {
        key
        for found in data["findings"].values()
        for one in found
        for keys in ([image["key"] for image in one["images"]], *(k for _, k in one["examples"]))
        for key in keys
    }
    assert data["pictures"].keys() == shown
    assert all(uri.startswith("data:image/png;base64,") for uri in data["pictures"].values())


def test_page_loads_nothing(page: Path) -> None:
    html = page.read_text()
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha" in html
    assert not re.search(r"""(src|href)=["'](?!data:)""", html)
    assert "<img src=x" not in html


def test_unreadable_image_has_no_picture(tmp_path: Path) -> None:
    folder = write_image_folder(
        tmp_path / "photos", {"train/a": 2, "train/b": 2, "test/a": 1, "test/b": 1}
    )
    (tmp_path / "photos/train/b/1.png").write_bytes(b"no image")
    source = open_source(folder)
    write_findings(tmp_path, source, num_errors=1)
    pictures = embedded_data(write_review_page(open_findings(source.name, tmp_path), tmp_path))[
        "pictures"
    ]
    assert pictures["train/3"] == ""
    assert pictures["train/0"]


def test_decisions_are_saved_as_a_file(chromium: Any, page: Path, source: Source) -> None:
    tab = chromium.new_page()
    tab.goto(page.as_uri())
    for key in ("2", "1", "d"):
        tab.keyboard.press(key)
    tab.get_by_role("button", name="Classes").click()
    tab.keyboard.press("m")
    tab.reload()
    tab.click("#finish-button")
    with tab.expect_download() as download:
        tab.click("#download")
    decisions = read_decisions(download.value.path())
    assert [(one.action, one.label) for one in decisions] == [
        ("relabel", source.class_names[1]),
        ("keep", None),
        ("drop", None),
        ("merge", source.class_names[1]),
    ]
    train = source.splits["train"]
    assert [one.path for one in decisions[:3]] == [train.name_of(index) for index in range(3)]
    changed, _ = apply_decisions(source, decisions, on_test=False)
    assert len(changed.splits["train"]) == len(train) - 1


def test_a_class_that_loses_its_images_is_warned_of(
    chromium: Any, page: Path, source: Source
) -> None:
    tab = chromium.new_context().new_page()
    tab.goto(page.as_uri())
    tab.click("#finish-button")
    assert not tab.is_visible("#finish-classes")
    tab.keyboard.press("Escape")
    first = f"“{source.class_names[0]}”"
    tab.keyboard.press("d")
    assert not tab.is_visible("#problem")
    tab.keyboard.press("d")
    assert f"A single training image of {first}" in tab.text_content("#problem")
    tab.keyboard.press("2")  # the third of three images gets another label
    tab.click("#finish-button")
    assert f"No training image of {first}" in tab.text_content("#finish-classes")
    with refused("data.empty", source.class_names[0]), tab.expect_download() as download:
        tab.click("#download")
        apply_decisions(source, read_decisions(download.value.path()), on_test=False)
    tab.keyboard.press("Escape")
    tab.get_by_role("button", name="Classes").click()
    tab.keyboard.press("m")
    tab.click("#finish-button")
    assert not tab.is_visible("#finish-classes")
    with tab.expect_download() as download:
        tab.click("#download")
    changed, _ = apply_decisions(source, read_decisions(download.value.path()), on_test=False)
    assert changed.class_names == source.class_names[1:]
    tab.context.close()


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.faults), 390])
def test_page_in_a_browser(chromium: Any, page: Path, width: int) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 800})
    tab, problems = context.new_page(), []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("request", lambda sent: sent.url[:5] in ("file:", "data:") or problems.append(sent.url))
    tab.goto(page.as_uri())
    for number in range(5):
        tab.locator("#kinds button").nth(number).click()
        assert tab.locator("#finding h2").is_visible()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(RIGHT_EDGE) <= width
    assert tab.title() == f"Review of {embedded_data(page)['source']}"
    assert problems == []
    context.close()
