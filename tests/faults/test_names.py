"""Names that bite, of classes and files: whole in every output, and nothing but names there."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hub_fixtures import hub, sleep_durations
from hub_server import HubServer
from PIL import Image
from recipe_texts import tiny_recipe_text

from finetune.cli import main as cli
from finetune.demo import markup as page
from finetune.demo.predictor import DemoPrediction
from finetune.formatting import escape_csv_formula
from finetune.publish.model_card import CardContent, render_card
from finetune.recipe.load import parse_recipe

__all__ = ["hub", "sleep_durations"]  # fixtures

# The class, as the bytes of its folder, and as the text that stands for it everywhere.
CLASSES: dict[bytes, str] = {
    raw if isinstance(raw, bytes) else raw.encode(): text
    for raw, text in (
        ("<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
        ("<script>alert(1)<\\script>", "<script>alert(1)<\\script>"),
        ('" onmouseover="alert(1)', '" onmouseover="alert(1)'),
        ("' onfocus='alert(1)", "' onfocus='alert(1)"),
        ("line\nbreak", "line\nbreak"),
        ("\r\ntwo\r", "\r\ntwo\r"),
        ("\ttab", "\ttab"),
        ("=cmd|' calc'!A0", "=cmd|' calc'!A0"),
        ("+1+1", "+1+1"),
        ("-1-1", "-1-1"),
        ("@SUM(1)", "@SUM(1)"),
        ("'=quoted", "'=quoted"),
        ("a|b|c", "a|b|c"),
        ("a,b;c", "a,b;c"),
        ("\u202egnp.exe", "\u202egnp.exe"),
        ("zero\u200bwidth\ufeff", "zero\u200bwidth\ufeff"),
        ("x" * 200, "x" * 200),
        (
            "\U0001f98a\u200d\U0001f525 \u05e9\u05dc\u05d5\u05dd \u732b",
            "\U0001f98a\u200d\U0001f525 \u05e9\u05dc\u05d5\u05dd \u732b",
        ),
        (b"\xff\xfelatin \xe9", "\\xff\\xfelatin \\xe9"),
        ("{{7*7}}${1}{%x%}", "{{7*7}}${1}{%x%}"),
        ("--- yaml: &a [1", "--- yaml: &a [1"),
        ("```fence `code` **b** [l](javascript:x)", "```fence `code` **b** [l](javascript:x)"),
        ("\x1b[31mred\x1b]0;title\x07", "\x1b[31mred\x1b]0;title\x07"),
        ("$(touch pwned); `id`", "$(touch pwned); `id`"),
    )
}
NAMES = sorted(CLASSES.values())
PROMISE = "escaped, whole, and read back as the same text"
RECIPE = (
    tiny_recipe_text(
        "eval: 'resize(18) | center_crop', batch_size: 16",
        source="folder:data",
        optim="lr: 3e-3, steps: 2",
        run='precision: fp32, note: "<b>bold</b> | `x`\\n```\\n# head"',
    )
    + """claims:
- {metric: test.top1, value: 0.5, tolerance: 0.1, source: "<i>t</i> | 3\\n```", note: "\\u202ex"}
"""
)


def verb(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(arguments))
    assert "Traceback" not in err.getvalue()
    assert code != 1, err.getvalue()
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, and with a run that was trained on it."""
    top = tmp_path_factory.mktemp("names")
    for split, count in ((b"train", 2), (b"test", 1)):
        for number, name in enumerate(CLASSES):
            folder = os.fsencode(top) + b"/data/" + split + b"/" + name
            os.makedirs(folder)
            for one in range(count):
                pixels = np.full((8, 8, 3), 5 * number, np.uint8)
                pixels[one] = 255
                # the file's own name bites as well
                Image.fromarray(pixels).save(
                    os.fsdecode(folder + b"/" + name[:180] + b"%d.png" % one)
                )
    (top / "net.yaml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(top)
    try:
        code, _, err = verb("train", "net.yaml", "--out", "run")
        assert code == 0, err
    finally:
        os.chdir(before)
    return top


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def paths() -> set[str]:
    """Every test image, as Python names it: bytes that are no text as lone surrogates."""
    found = {
        os.fsdecode(os.path.join(top, name))
        for top, _, names in os.walk(b"data/test")
        for name in names
    }
    assert len(found) == len(NAMES)
    return found


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    VOID = ("img", "meta", "link", "br", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            continue

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data

    def assert_harmless(self) -> None:
        for tag, attributes in self.elements:
            assert not [key for key in attributes if key.startswith("on")], (tag, attributes)
            for key in ("href", "src"):
                value = attributes.get(key) or "#"
                assert value.startswith(("#", "data:")) or value.endswith("report.html"), (
                    tag,
                    value,
                )
                assert ":" not in value or value.startswith("data:"), (tag, value)
        assert sum(tag == "script" for tag, _ in self.elements) <= 1
        assert not {"b", "iframe", "object", "form"} & {tag for tag, _ in self.elements}


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_files_of_the_model(here: Path, fault: Callable[..., None]) -> None:
    config = json.loads((here / "run/model/config.json").read_text(encoding="utf-8"))
    assert config["label_names"] == NAMES
    results = json.loads((here / "run/results.json").read_text(encoding="utf-8"))
    assert len(results["test"]["per_class"]) == len(NAMES)
    published = json.loads((here / "run/model/results.json").read_text(encoding="utf-8"))
    listed = {one["name"] for one in published["test"]["mistakes"]}
    known = {os.fsencode(path)[5:].decode("utf-8", "backslashreplace") for path in paths()}
    assert listed
    assert listed <= known
    code, out, _ = verb("info", "run", "--json")
    assert code == 0
    assert json.loads(out)
    fault("Hostile class and file names: config.json, results.json", PROMISE, f"{len(NAMES)} names")


def test_tables_of_predictions(here: Path, tmp_path: Path, fault: Callable[..., None]) -> None:
    table, lines = str(tmp_path / "p.csv"), str(tmp_path / "p.jsonl")
    for target in (table, lines):
        code, out, _ = verb("predict", "run", "data/test", "--top-k", "24", "--out", target)
        assert code == 0
        assert out.count("\n") == 1
    with open(lines, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert {row["path"] for row in rows} == paths()
    for row in rows:
        assert sorted(one["label"] for one in row["predictions"]) == NAMES
    with open(table, encoding="utf-8", errors="surrogateescape", newline="") as file:
        head, *cells = list(csv.reader(file))
    assert {len(row) for row in cells} == {len(head)}
    assert {row[0] for row in cells} == {escape_csv_formula(path) for path in paths()}
    for row in cells:
        labels = row[1:-1:2]
        assert not [cell for cell in labels if cell[:1] in "=+-@\t\r\n"]
        unmarked = [cell.removeprefix("'") if cell[:1] == "'" else cell for cell in labels]
        assert sorted(unmarked) == NAMES  # one mark off gives every name back
    fault(
        "Hostile names: predictions as CSV (a ' before what a spreadsheet would run) and JSONL",
        PROMISE,
        f"{len(NAMES)} names, {len(rows)} files",
    )


def test_the_output_of_a_terminal(here: Path, tmp_path: Path, fault: Callable[..., None]) -> None:
    said = []
    for line in (
        ["predict", "run", "data/test"],
        ["data", "info", "folder:data"],
        ["data", "scan", "folder:data"],
        ["eval", "run"],
        ["info", "run"],
        ["eval", "run", "--data", "embedded:digits"],
        ["predict", "run", "\x1b[31mnone\u202e.png"],
        ["train", "\x1b[31m\u202e.yaml"],
        ["\x1b[31m"],
        ["data", "info", "folder:\x1b[31m"],
    ):
        _, out, err = verb(*line)
        said.append(out)
        # the bar of the features' pass draws with carriage returns
        told = err.replace("\r", "")
        for text in (out, told):
            assert not re.search(
                "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text
            ), line
    assert "\\u202egnp.exe" in said[0]
    assert "\\x1b[31mred" in said[0]
    assert len(said[0].splitlines()) == len(NAMES)
    fault(
        "Hostile names on a terminal: answers and messages",
        "no control character and nothing that turns the line around; one line for each file",
        f"{len(said)} command lines",
    )


def test_eval(here: Path, tmp_path: Path, fault: Callable[..., None]) -> None:
    assert verb("eval", "run", "--out", str(tmp_path / "measured"))[0] == 0
    with open(tmp_path / "measured/per_class.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [escape_csv_formula(name) for name in NAMES]
    assert json.loads((tmp_path / "measured/results.json").read_text())["examples"] == len(NAMES)
    fault("Hostile names: eval --out", PROMISE, f"{len(rows)} rows")


def test_reports(here: Path, tmp_path: Path, fault: Callable[..., None]) -> None:
    code, _, err = verb("report", "run", "--out", str(tmp_path / "page.html"))
    assert code == 0, err
    page_text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Elements(page_text)
    found.assert_harmless()
    text = squeezed(found.text)
    for name in NAMES:
        # a page has no place for control characters: shown as what stands for them
        shown = squeezed(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f]", "\ufffd", name))
        assert shown in text or shown.replace("\ufffd", "") in text, repr(name)
    # whatever turns the text around stays in its own element
    assert "<bdi>\u202egnp.exe</bdi>" in page_text
    fault("Hostile names: the report, read by html.parser", PROMISE, f"{len(NAMES)} names")


def test_a_comparison(here: Path, tmp_path: Path, fault: Callable[..., None]) -> None:
    import shutil

    other = tmp_path / "<b>run<b> | `x`\n\u202e"
    shutil.copytree(here / "run", other)
    changed = (other / "recipe.yaml").read_text().replace("steps: 2", "steps: 3")
    (other / "recipe.yaml").write_text(changed)
    code, _, err = verb(
        "report", str(here / "run"), str(other), "--out", str(tmp_path / "all.html")
    )
    assert code == 0, err
    found = Elements((tmp_path / "all.html").read_text(encoding="utf-8"))
    found.assert_harmless()
    assert "<b>run<b> | `x`" in found.text
    fault("Hostile names of runs: the comparison", PROMISE, "2 runs")


def blocks(card: str) -> tuple[dict[str, Any], str, str]:
    """The card's YAML, its text without the fenced blocks, and the text of these."""
    _, head, body = re.split(r"^---$", card, maxsplit=2, flags=re.M)
    outside, inside, fence = [], [], ""
    for line in body.splitlines():
        mark = re.match(r" {0,3}(`{3,})", line)
        if mark and (not fence or (len(mark[1]) >= len(fence) and not line.strip(" `"))):
            fence = "" if fence else mark[1]
            continue
        (inside if fence else outside).append(line)
    assert not fence
    return yaml.safe_load(head), "\n".join(outside), "\n".join(inside)


def assert_plain_card(card: str) -> str:
    """No element, no broken table, one heading of the first order. Returns: text outside code."""
    _, outside, _ = blocks(card)
    elements = Elements(re.sub(r"`[^`\n]*`", "", outside)).elements
    assert {tag for tag, _ in elements} <= {"details", "summary"}
    assert not [attributes for _, attributes in elements if attributes]
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", outside)
    lines = outside.splitlines()
    assert sum(line.startswith("# ") for line in lines) == 1
    for number, line in enumerate(lines):
        if line.startswith("|---") or line.startswith("| ---"):
            width = len(re.findall(r"(?<!\\)\|", line))
            rows = [one for one in lines[number - 1 :] if one.startswith("|")]
            table = [one for one in rows[: len(rows)] if one]
            for row in table[: 1 + lines[number:].index("")]:
                assert len(re.findall(r"(?<!\\)\|", row)) == width, row
    return outside


def test_the_card(here: Path, fault: Callable[..., None]) -> None:
    from huggingface_hub import ModelCard

    card = (here / "run/model/README.md").read_text(encoding="utf-8")
    outside = assert_plain_card(card)
    ModelCard(card)
    shown = re.sub(r"\\([\\`*_{}\[\]()#+!|~])", r"\1", outside)
    for name in NAMES:
        text = squeezed(name.replace("\u202e", "\\u202e"))
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert escaped in shown, repr(name)
    fault("Hostile names: the model card and its YAML", PROMISE, f"{len(NAMES)} names")


@pytest.mark.parametrize(
    "name",
    ["<img src=x onerror=y>", "a`b`", "x\n\n# head", "a|b", "\u202eturned", "a: b # c", "[l](x)"],
)
def test_a_card_of_data_with_such_a_name(here: Path, name: str, fault: Callable[..., None]) -> None:
    recipe = parse_recipe(RECIPE)
    data = recipe.data.model_copy(update={"source": f"folder:{name}"})
    model = recipe.model.model_copy(update={"name": f"{name}.npz", "pretrained": True})
    config = json.loads((here / "run/model/config.json").read_text())
    results = json.loads((here / "run/results.json").read_text())
    facts = CardContent(
        recipe=recipe.model_copy(update={"data": data, "model": model}),
        record=json.loads((here / "run/run.json").read_text()),
        results=results,
        config={**config, "label_names": ["a", "half \ud83d of a character"]},
        sha256="0" * 64,
        weights={"source": name, "file": f"{name}.npz"},
    )
    card = render_card(facts)
    card.encode()  # no half characters
    assert_plain_card(card)
    head, _, _ = blocks(card)
    assert head["model-index"][0]["results"][0]["dataset"]["name"] == name
    fault("Hostile names of data and weights: the model card", PROMISE, "")


def test_the_demo(fault: Callable[..., None]) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    reading = DemoPrediction([(name, 0.1) for name in NAMES], pixels, np.zeros((2, 2)))
    parts = page.render_header("<b>title", ["<b>fact"]) + page.render_result(reading)
    parts += page.render_footer(NAMES, ["<b>note"]) + page.render_error("<b>\" onload='x'")
    found = Elements(parts)
    found.assert_harmless()
    for name in NAMES:
        assert found.text.count(name.replace("\r\n", "\n").replace("\r", "\n")) >= 1 or (
            found.text.count(name) >= 2
        ), repr(name)
    fault("Hostile names: the demo's page", PROMISE, f"{len(NAMES)} names")


def test_a_push(here: Path, hub: HubServer, fault: Callable[..., None]) -> None:
    code, _, err = verb("push", "run", "alice/net")
    assert code == 0, err
    held = hub.files("alice/net")
    assert json.loads(held["config.json"])["label_names"] == NAMES
    assert_plain_card(held["README.md"].decode())
    with contextlib.chdir(here) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        code, out, err = verb("predict", "hf-hub:alice/net", "data/test", "--json", "--top-k", "24")
    assert code == 0, err
    for row in json.loads(out):
        assert sorted(one["label"] for one in row["predictions"]) == NAMES
    fault("Hostile names: pushed, and loaded from the hub again", PROMISE, f"{len(NAMES)} names")


@pytest.mark.faults
def test_sheet_export_and_space(here: Path, tmp_path: Path, fault: Callable[..., None]) -> None:
    sheet = tmp_path / "sheet.png"
    assert verb("predict", "run", "data/test", "--sheet", str(sheet))[0] == 0
    Image.open(sheet).verify()
    for kind, suffix in (("torch", ".pt2"), ("onnx", ".onnx")):
        code, _, err = verb(
            "export", "run", "--format", kind, "--out", str(tmp_path / f"net{suffix}")
        )
        assert code == 0, err
        beside = json.loads((tmp_path / f"net{suffix}.json").read_text(encoding="utf-8"))
        assert NAMES in [value for value in beside.values() if isinstance(value, list)]
    space = tmp_path / "space"
    assert verb("demo", "run", "--export-space", str(space))[0] == 0
    assert json.loads((space / "model/config.json").read_text())["label_names"] == NAMES
    for file in space.iterdir():
        assert re.fullmatch(r"[\w.-]+", file.name)
    for file in (space / "examples").iterdir():
        assert re.fullmatch(r"[\w.-]+", file.name)
    head = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert head["title"] == "run"
    fault(
        "Hostile names: contact sheet, exports, an exported Space", PROMISE, f"{len(NAMES)} names"
    )


@pytest.mark.faults
def test_the_served_demo(here: Path, fault: Callable[..., None]) -> None:
    """The whole page of a demo, as a browser gets it."""
    pytest.importorskip("gradio", reason="Gradio is not installed")
    from finetune.demo.app import build_app
    from finetune.inference import Classifier

    classifier = Classifier.load("run")
    about: Any = SimpleNamespace(title="<b>x", facts=["<b>y"], notes=["<b>z"], examples=[])
    app = build_app(classifier, about)
    for part in app.config["components"]:
        value = part["props"].get("value")
        if part["type"] == "html" and isinstance(value, str):
            Elements(value).assert_harmless()
    fault("Hostile names: the parts of a served demo", PROMISE, f"{len(NAMES)} names")
