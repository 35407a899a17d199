"""Every command refuses an output path that cannot be written: one message, exit code 5."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import Double
from PIL import Image
from recipe_texts import tiny_recipe_text

from finetune.cli.main import main

MODEL = "embedded:vit_nano"
DIGITS = ["--data", "embedded:digits"]
# The last word of each command is an option that takes a path.
FOLDER_OPTIONS = {
    "eval": ["eval", MODEL, *DIGITS, "--split", "val", "--out"],
    "probe": ["probe", MODEL, *DIGITS, "--out"],
    "show": ["show", MODEL, "--out"],
    "export": ["export", MODEL, "--format", "torch", "--out"],
    "report": ["report", "a-run", "--out"],
    "bench --profile": ["bench", "tiny.yaml", "--profile"],
}
OPTIONS = {
    **FOLDER_OPTIONS,
    "predict": ["predict", MODEL, "a.png", "--out"],
    "predict --sheet": ["predict", MODEL, "a.png", "--sheet"],
    "predict --features": ["predict", MODEL, "a.png", "--features"],
    "show --images": ["show", "embedded:digits", "--images", "--out"],
    "data info": ["data", "info", "embedded:digits", "--sheet"],
    "report of two": ["report", "a-run", "another", "--out"],
    "reproduce": ["reproduce", "plan.yaml", "--out"],
    "demo": ["demo", MODEL, "--export-space"],
    "bench": ["bench", "tiny.yaml", "--profile"],
    "train": ["train", "tiny.yaml", "--out"],
    "tune": ["tune", "tiny.yaml", "--minutes", "1", "--out"],
}
SUFFIXES = {"predict": ".csv", "predict --sheet": ".png", "predict --features": ".parquet"}
# Path and cause, for a name, a link and a whole path that the system refuses.
IMPOSSIBLE_PATHS = {
    "a long name": ("there/" + "y" * 300, "File name too long"),
    "a loop of links": ("loop/x/y", "Too many levels of symbolic links"),
    "a long path": ("/".join(["d" * 200] * 30), "File name too long"),
}

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("loop").symlink_to("pool")
    Path("pool").symlink_to("loop")
    Path("tiny.yaml").write_text(tiny_recipe_text())
    Image.new("RGB", (8, 8)).save("a.png")


@pytest.mark.parametrize(
    "command, kind",
    [*((command, "a long name") for command in OPTIONS), *(("train", k) for k in IMPOSSIBLE_PATHS)],
)
def test_an_impossible_path_is_refused_before_any_work(
    command: str, kind: str, capsys: Captured
) -> None:
    path, cause = IMPOSSIBLE_PATHS[kind]
    *arguments, option = OPTIONS[command]
    assert main([*arguments, option, path + SUFFIXES.get(command, "")]) == 5
    message = capsys.readouterr().err
    assert message.startswith(f"{option}: '")
    assert message.endswith(f"cannot be written ({cause}); choose another {option}\n")
    assert message.strip().isprintable()


@pytest.mark.parametrize("command", FOLDER_OPTIONS)
@pytest.mark.parametrize("path", ["new/" + "y" * 300, "file", "file/x", "loop"])
def test_a_folder_that_cannot_be_created_gives_one_message(
    command: str, path: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = SimpleNamespace(is_multilabel=False)
    monkeypatch.setattr("finetune.report.page.read_run", Double(run))
    monkeypatch.setattr("finetune.report.run_data.check_run_directory", Double(None))
    Path("file").write_text("")
    exit_code = main([*FOLDER_OPTIONS[command], path])
    message = capsys.readouterr().err
    # report does not overwrite a file that is no page
    assert exit_code == (2 if (command, path) == ("report", "file") else 5), message
    assert "internal error" not in message
    assert message.count("\n") == 1


def test_the_command_itself_checks_whether_a_folder_exists(capsys: Captured) -> None:
    assert main(["predict", MODEL, "a.png", "--out", "new/a.csv"]) == 5
    assert "'new'" in capsys.readouterr().err
