"""Hostile class and file names appear unchanged in every output and have no effect there."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
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

HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)<\\script>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)",
    "line\nbreak",
    "\r\ntwo\r",
    "\ttab",
    "=cmd|' calc'!A0",
    "+1+1",
    "-1-1",
    "@SUM(1)",
    "'=quoted",
    "a|b|c",
    "a,b;c",
    "\u202egnp.exe",
    "zero\u200bwidth\ufeff",
    "x" * 200,
    "\U0001f98a\u200d\U0001f525 \u05e9\u05dc\u05d5\u05dd \u732b",
    "{{7*7}}${1}{%x%}",
    "--- yaml: &a [1",
    "```fence `code` **b** [l](javascript:x)",
    "\x1b[31mred\x1b]0;title\x07",
    "$(touch pwned); `id`",
)
# Bytes of the class folder, and the text of the class name in every output.
NAME_BY_FOLDER = {
    **{name.encode(): name for name in HOSTILE_NAMES},
    b"\xff\xfelatin \xe9": "\\xff\\xfelatin \\xe9",
}
CLASS_NAMES = sorted(NAME_BY_FOLDER.values())
PROMISE = "escaped, complete, and read back as the same text"
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


def run_command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(arguments))
    assert "Traceback" not in err.getvalue()
    assert code != 1, err.getvalue()
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a run trained on it."""
    root = tmp_path_factory.mktemp("names")
    for split, count in ((b"train", 2), (b"test", 1)):
        for number, name in enumerate(NAME_BY_FOLDER):
            folder = os.fsencode(root) + b"/data/" + split + b"/" + name
            os.makedirs(folder)
            for index in range(count):
                pixels = np.full((8, 8, 3), 5 * number, np.uint8)
                pixels[index] = 255
                # the file name is hostile too
                Image.fromarray(pixels).save(
                    os.fsdecode(folder + b"/" + name[:180] + b"%d.png" % index)
                )
    (root / "net.yaml").write_text(RECIPE)
    old_cwd = Path.cwd()
    os.chdir(root)
    try:
        code, _, err = run_command("train", "net.yaml", "--out", "run")
        assert code == 0, err
    finally:
        os.chdir(old_cwd)
    return root


@pytest.fixture
def in_trained_folder(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained_folder)
    return trained_folder


def all_test_images() -> set[str]:
    """Return the path of every test image; bytes that are not UTF-8 are lone surrogates."""
    paths = {
        os.fsdecode(os.path.join(top, name))
        for top, _, names in os.walk(b"data/test")
        for name in names
    }
    assert len(paths) == len(CLASS_NAMES)
    return paths


class PageElements(HTMLParser):
    """Elements of a page with their attributes, and its text."""

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

    def check_harmless(self) -> None:
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


def collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def test_hostile_names_in_model_files(in_trained_folder: Path, fault: Callable[..., None]) -> None:
    config = json.loads((in_trained_folder / "run/model/config.json").read_text(encoding="utf-8"))
    assert config["label_names"] == CLASS_NAMES
    results = json.loads((in_trained_folder / "run/results.json").read_text(encoding="utf-8"))
    assert len(results["test"]["per_class"]) == len(CLASS_NAMES)
    published = json.loads(
        (in_trained_folder / "run/model/results.json").read_text(encoding="utf-8")
    )
    listed_names = {row["name"] for row in published["test"]["mistakes"]}
    known_names = {
        os.fsencode(path)[5:].decode("utf-8", "backslashreplace") for path in all_test_images()
    }
    assert listed_names
    assert listed_names <= known_names
    code, out, _ = run_command("info", "run", "--json")
    assert code == 0
    assert json.loads(out)
    fault(
        "Hostile class and file names: config.json, results.json",
        PROMISE,
        f"{len(CLASS_NAMES)} names",
    )


def test_hostile_names_in_predictions(
    in_trained_folder: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    table, lines = str(tmp_path / "p.csv"), str(tmp_path / "p.jsonl")
    for target in (table, lines):
        code, out, _ = run_command("predict", "run", "data/test", "--top-k", "24", "--out", target)
        assert code == 0
        assert out.count("\n") == 1
    with open(lines, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert {row["path"] for row in rows} == all_test_images()
    for row in rows:
        assert sorted(prediction["label"] for prediction in row["predictions"]) == CLASS_NAMES
    with open(table, encoding="utf-8", errors="surrogateescape", newline="") as file:
        header, *cells = list(csv.reader(file))
    assert {len(row) for row in cells} == {len(header)}
    assert {row[0] for row in cells} == {escape_csv_formula(path) for path in all_test_images()}
    for row in cells:
        labels = row[1:-1:2]
        assert not [cell for cell in labels if cell[:1] in "=+-@\t\r\n"]
        unmarked = [cell.removeprefix("'") if cell[:1] == "'" else cell for cell in labels]
        assert sorted(unmarked) == CLASS_NAMES  # removing one quote gives the name
    fault(
        "Hostile names: predictions as CSV (a ' before spreadsheet formulas) and JSONL",
        PROMISE,
        f"{len(CLASS_NAMES)} names, {len(rows)} files",
    )


def test_hostile_names_on_a_terminal(
    in_trained_folder: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    outputs = []
    for arguments in (
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
        _, out, err = run_command(*arguments)
        outputs.append(out)
        # the progress bar uses carriage returns
        errors = err.replace("\r", "")
        for text in (out, errors):
            assert not re.search(
                "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text
            ), arguments
    assert "\\u202egnp.exe" in outputs[0]
    assert "\\x1b[31mred" in outputs[0]
    assert len(outputs[0].splitlines()) == len(CLASS_NAMES)
    fault(
        "Hostile names on a terminal: results and messages",
        "no control or bidirectional character; one line for each file",
        f"{len(outputs)} command lines",
    )


def test_hostile_names_in_eval(
    in_trained_folder: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    assert run_command("eval", "run", "--out", str(tmp_path / "measured"))[0] == 0
    with open(tmp_path / "measured/per_class.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [escape_csv_formula(name) for name in CLASS_NAMES]
    assert json.loads((tmp_path / "measured/results.json").read_text())["examples"] == len(
        CLASS_NAMES
    )
    fault("Hostile names: eval --out", PROMISE, f"{len(rows)} rows")


def test_hostile_names_in_the_report(
    in_trained_folder: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    code, _, err = run_command("report", "run", "--out", str(tmp_path / "page.html"))
    assert code == 0, err
    page_text = (tmp_path / "page.html").read_text(encoding="utf-8")
    elements = PageElements(page_text)
    elements.check_harmless()
    text = collapse_whitespace(elements.text)
    for name in CLASS_NAMES:
        # HTML cannot contain control characters: the page shows a replacement
        shown = collapse_whitespace(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f]", "\ufffd", name))
        assert shown in text or shown.replace("\ufffd", "") in text, repr(name)
    # bidirectional text stays in its own element
    assert "<bdi>\u202egnp.exe</bdi>" in page_text
    fault("Hostile names: the report, read by html.parser", PROMISE, f"{len(CLASS_NAMES)} names")


def test_hostile_run_names_in_the_comparison(
    in_trained_folder: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    other = tmp_path / "<b>run<b> | `x`\n\u202e"
    shutil.copytree(in_trained_folder / "run", other)
    for file, old, new in (
        ("recipe.yaml", "steps: 2", "steps: 3"),
        ("run.json", '"steps": 2', '"steps": 3'),
    ):
        (other / file).write_text((other / file).read_text().replace(old, new))
    code, _, err = run_command(
        "report", str(in_trained_folder / "run"), str(other), "--out", str(tmp_path / "all.html")
    )
    assert code == 0, err
    elements = PageElements((tmp_path / "all.html").read_text(encoding="utf-8"))
    elements.check_harmless()
    assert "<b>run<b> | `x`" in elements.text
    fault("Hostile names of runs: the comparison", PROMISE, "2 runs")


def split_card(card: str) -> tuple[dict[str, Any], str, str]:
    """Return the YAML of a card, its text outside fenced blocks, and the text inside."""
    _, front_matter, body = re.split(r"^---$", card, maxsplit=2, flags=re.M)
    outside, inside, fence = [], [], ""
    for line in body.splitlines():
        mark = re.match(r" {0,3}(`{3,})", line)
        if mark and (not fence or (len(mark[1]) >= len(fence) and not line.strip(" `"))):
            fence = "" if fence else mark[1]
            continue
        (inside if fence else outside).append(line)
    assert not fence
    return yaml.safe_load(front_matter), "\n".join(outside), "\n".join(inside)


def check_card_is_plain(card: str) -> str:
    """Check: no HTML, no broken table, one level-1 heading. Returns: the text outside code."""
    _, outside, _ = split_card(card)
    elements = PageElements(re.sub(r"`[^`\n]*`", "", outside)).elements
    assert {tag for tag, _ in elements} <= {"details", "summary"}
    assert not [attributes for _, attributes in elements if attributes]
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", outside)
    lines = outside.splitlines()
    assert sum(line.startswith("# ") for line in lines) == 1
    for number, line in enumerate(lines):
        if line.startswith("|---") or line.startswith("| ---"):
            num_bars = len(re.findall(r"(?<!\\)\|", line))
            rows = [text for text in lines[number - 1 :] if text.startswith("|")]
            table = [text for text in rows[: len(rows)] if text]
            for row in table[: 1 + lines[number:].index("")]:
                assert len(re.findall(r"(?<!\\)\|", row)) == num_bars, row
    return outside


def test_hostile_names_in_the_card(in_trained_folder: Path, fault: Callable[..., None]) -> None:
    from huggingface_hub import ModelCard

    card = (in_trained_folder / "run/model/README.md").read_text(encoding="utf-8")
    outside = check_card_is_plain(card)
    ModelCard(card)
    unescaped = re.sub(r"\\([\\`*_{}\[\]()#+!|~])", r"\1", outside)
    for name in CLASS_NAMES:
        text = collapse_whitespace(name.replace("\u202e", "\\u202e"))
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert escaped in unescaped, repr(name)
    fault("Hostile names: the model card and its YAML", PROMISE, f"{len(CLASS_NAMES)} names")


@pytest.mark.parametrize(
    "name",
    ["<img src=x onerror=y>", "a`b`", "x\n\n# head", "a|b", "\u202eturned", "a: b # c", "[l](x)"],
)
def test_hostile_data_and_weight_names_in_the_card(
    in_trained_folder: Path, name: str, fault: Callable[..., None]
) -> None:
    recipe = parse_recipe(RECIPE)
    data = recipe.data.model_copy(update={"source": f"folder:{name}"})
    model = recipe.model.model_copy(update={"name": f"{name}.npz", "pretrained": True})
    config = json.loads((in_trained_folder / "run/model/config.json").read_text())
    del config["validation_scores"]  # of more classes
    results = json.loads((in_trained_folder / "run/results.json").read_text())
    content = CardContent(
        recipe=recipe.model_copy(update={"data": data, "model": model}),
        record=json.loads((in_trained_folder / "run/run.json").read_text()),
        results=results,
        config={**config, "label_names": ["a", "lone \ud83d surrogate"]},
        sha256="0" * 64,
        weights={"source": name, "file": f"{name}.npz"},
    )
    card = render_card(content)
    card.encode()  # no lone surrogates
    check_card_is_plain(card)
    front_matter, _, _ = split_card(card)
    assert front_matter["model-index"][0]["results"][0]["dataset"]["name"] == name
    fault("Hostile names of data and weights: the model card", PROMISE, "")


def test_hostile_names_in_the_demo_page(fault: Callable[..., None]) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    prediction = DemoPrediction([(name, 0.1) for name in CLASS_NAMES], pixels, np.zeros((2, 2)))
    page_text = page.render_header("<b>title", ["<b>fact"]) + page.render_result(prediction)
    page_text += page.render_footer(CLASS_NAMES, ["<b>note"]) + page.render_error(
        "<b>\" onload='x'"
    )
    elements = PageElements(page_text)
    elements.check_harmless()
    for name in CLASS_NAMES:
        assert elements.text.count(name.replace("\r\n", "\n").replace("\r", "\n")) >= 1 or (
            elements.text.count(name) >= 2
        ), repr(name)
    fault("Hostile names: the demo's page", PROMISE, f"{len(CLASS_NAMES)} names")


def test_hostile_names_survive_a_push(
    in_trained_folder: Path, hub: HubServer, fault: Callable[..., None]
) -> None:
    code, _, err = run_command("push", "run", "alice/net")
    assert code == 0, err
    files = hub.files("alice/net")
    assert json.loads(files["config.json"])["label_names"] == CLASS_NAMES
    check_card_is_plain(files["README.md"].decode())
    code, out, err = run_command(
        "predict", "hf-hub:alice/net", "data/test", "--json", "--top-k", "24"
    )
    assert code == 0, err
    for row in json.loads(out):
        assert sorted(one["label"] for one in row["predictions"]) == CLASS_NAMES
    fault(
        "Hostile names: pushed, and loaded from the hub again", PROMISE, f"{len(CLASS_NAMES)} names"
    )


def test_hostile_names_in_sheet_exports_and_space(
    in_trained_folder: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    sheet = tmp_path / "sheet.png"
    assert run_command("predict", "run", "data/test", "--sheet", str(sheet))[0] == 0
    Image.open(sheet).verify()
    for export_format, suffix in (("torch", ".pt2"), ("onnx", ".onnx")):
        code, _, err = run_command(
            *("export", "run", "--no-preprocessing", "--format", export_format),
            *("--out", str(tmp_path / f"net{suffix}")),
        )
        assert code == 0, err
        metadata = json.loads((tmp_path / f"net{suffix}.json").read_text(encoding="utf-8"))
        assert CLASS_NAMES in [value for value in metadata.values() if isinstance(value, list)]
    space = tmp_path / "space"
    assert run_command("demo", "run", "--export-space", str(space))[0] == 0
    assert json.loads((space / "model/config.json").read_text())["label_names"] == CLASS_NAMES
    for file in space.iterdir():
        assert re.fullmatch(r"[\w.-]+", file.name)
    for file in (space / "examples").iterdir():
        assert re.fullmatch(r"[\w.-]+", file.name)
    front_matter = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert front_matter["title"] == "run"
    fault(
        "Hostile names: contact sheet, exports, an exported Space",
        PROMISE,
        f"{len(CLASS_NAMES)} names",
    )


def test_hostile_names_in_the_served_demo(
    in_trained_folder: Path, fault: Callable[..., None]
) -> None:
    """All parts of the page that a browser gets."""
    pytest.importorskip("gradio", reason="Gradio is not installed")
    from finetune.demo.app import build_app
    from finetune.inference import Classifier

    classifier = Classifier.load("run")
    page_facts: Any = SimpleNamespace(title="<b>x", facts=["<b>y"], notes=["<b>z"], examples=[])
    app = build_app(classifier, page_facts)
    for part in app.config["components"]:
        value = part["props"].get("value")
        if part["type"] == "html" and isinstance(value, str):
            PageElements(value).check_harmless()
    fault("Hostile names: the parts of a served demo", PROMISE, f"{len(CLASS_NAMES)} names")
