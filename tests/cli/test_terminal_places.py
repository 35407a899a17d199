"""Every verb that writes refuses a place that cannot be, in one message, with exit code 5."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import Double
from PIL import Image
from recipe_texts import tiny_text

from finetune.cli.main import main

NET = "embedded:vit_nano"
DIGITS = ["--data", "embedded:digits"]
FOLDERS = {
    "eval": ["eval", NET, *DIGITS, "--split", "val", "--out"],
    "probe": ["probe", NET, *DIGITS, "--out"],
    "show": ["show", NET, "--out"],
    "export": ["export", NET, "--format", "torch", "--out"],
    "report": ["report", "a-run", "--out"],
    "bench --profile": ["bench", "tiny.yaml", "--profile"],
}
VERBS = {
    **FOLDERS,
    "predict": ["predict", NET, "a.png", "--out"],
    "predict --sheet": ["predict", NET, "a.png", "--sheet"],
    "show --images": ["show", "embedded:digits", "--images", "--out"],
    "data info": ["data", "info", "embedded:digits", "--sheet"],
    "report of two": ["report", "a-run", "another", "--out"],
    "reproduce": ["reproduce", "plan.yaml", "--out"],
    "demo": ["demo", NET, "--export-space"],
    "bench": ["bench", "tiny.yaml", "--out"],
    "train": ["train", "tiny.yaml", "--out"],
}
SUFFIXES = {"predict": ".csv", "predict --sheet": ".png"}
# as the system sees them: a name, a link, a character, a whole path
CANNOT_BE = {
    "a long name": ("there/" + "y" * 300, "File name too long"),
    "a loop of links": ("loop/x/y", "Too many levels of symbolic links"),
    "a NUL": ("there/\0x", "no path has such characters"),
    "no UTF-8": ("there/\ud800", "no path has such characters"),
    "a long path": ("/".join(["d" * 200] * 30), "File name too long"),
}

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("loop").symlink_to("pool")
    Path("pool").symlink_to("loop")
    Path("tiny.yaml").write_text(tiny_text())
    Image.new("RGB", (8, 8)).save("a.png")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", CANNOT_BE)
def test_a_place_that_cannot_be_is_refused_before_any_work(
    verb: str, place: str, capsys: Captured
) -> None:
    path, why = CANNOT_BE[place]
    *words, option = VERBS[verb]
    assert main([*words, option, path + SUFFIXES.get(verb, "")]) == 5
    said = capsys.readouterr().err
    assert said.startswith(f"{option}: '")
    assert said.endswith(f"cannot be written ({why}); choose another {option}\n")
    assert said.strip().isprintable()


@pytest.mark.parametrize("verb", FOLDERS)
@pytest.mark.parametrize("path", ["new/" + "y" * 300, "file", "file/x", "loop"])
def test_a_folder_that_cannot_be_made_is_one_message_too(
    verb: str, path: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = SimpleNamespace(is_multilabel=False)
    monkeypatch.setattr("finetune.report.page.read_run", Double(run))
    monkeypatch.setattr("finetune.report.run_data.check_run", Double(None))
    Path("file").write_text("")
    code = main([*FOLDERS[verb], path])
    said = capsys.readouterr().err
    # a file that is there is no page, either
    assert code == (2 if (verb, path) == ("report", "file") else 5), said
    assert "internal error" not in said
    assert said.count("\n") == 1


def test_a_place_that_may_be_made_is_left_to_the_verb(capsys: Captured) -> None:
    assert main(["predict", NET, "a.png", "--out", "new/a.csv"]) == 5
    assert "the folder 'new' does not exist; make it first" in capsys.readouterr().err
