"""Standard streams that are closed, or that nobody reads any more: no traceback, no lost work."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_runs import (
    check_child_success,
    disable_report_and_plots,
    read_weights,
    run_command_in_child,
    run_in_child,
)
from launches import REPOSITORY, finetune_tracebacks
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import EXIT_CODES

from finetune.cli.main import main

RECIPE = tiny_recipe_text(
    optim="lr: 3e-3, steps: 4", run="precision: fp32, log_every: 1, save_every: 2"
)
BROKEN_PIPE = 141  # what a shell reports of a program that SIGPIPE has ended

# Stands before the command line: in every step a library prints, past Python's own streams.
PRINTING = """
import gc, os, sys
gc.disable()  # as the command line does while it imports
from finetune.training.trainer_state import TrainerState

step = TrainerState.step

def printing(self, *arguments):
    step(self, *arguments)
    os.write(1, b"from a library")
    os.write(2, b"from a library")

TrainerState.step = printing
{before}
from finetune.cli.main import main
sys.exit(main())
"""
# Python runs the program from a file: it knows of no closed stream that is opened late.
LEFT_CLOSED = "import finetune.cli.runner as r; r.open_closed_streams = lambda: None"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and some images."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for number in range(1500):  # their rows are more than a pipe holds, 64 KiB
        Image.fromarray(pixels).save(folder / "images" / f"image-{number:04}.png")
    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        check_child_success(
            run_command_in_child("train", folder / "recipe.yaml", "--out", folder / "run")
        )
    return folder


def shell(
    folder: Path,
    words: str,
    behind: str = "",
    *,
    before: str = "",
    program: str = "-m finetune",
    unbuffered: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command line in bash; what stands behind it are redirections, or a pipe."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {before} '{sys.executable}' {program} {words} {behind}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=240,
    )


def printing(folder: Path, before: str = "") -> str:
    """The program whose libraries print."""
    path = folder / f"printing-{bool(before)}.py"
    path.write_text(PRINTING.format(before=before))
    return str(path)


def files_with(folder: Path, text: bytes) -> list[str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert paths
    return [str(path.relative_to(folder)) for path in paths if text in path.read_bytes()]


CLOSED = ["0<&- 1>&- 2>&-", "0<&-", "1>&-", "2>&-"]
_LONG = pytest.mark.faults


@pytest.mark.parametrize(
    "behind", [CLOSED[0], *(pytest.param(one, marks=_LONG) for one in CLOSED[1:])]
)
def test_train_with_closed_streams(behind: str, place: Path, tmp_path: Path, fault: Any) -> None:
    program = printing(tmp_path)
    done = shell(tmp_path, f"train {place}/recipe.yaml --out run", behind, program=program)
    assert done.returncode == 0, done.stderr
    assert read_weights(tmp_path / "run") == read_weights(place / "run")
    assert files_with(tmp_path / "run", b"from a library") == []
    assert not finetune_tracebacks(done.stderr)
    fault(
        "standard streams that are closed (0<&- 1>&- 2>&-): train",
        "0, the same weights, and what libraries print is in no file of the run",
    )


@pytest.mark.faults
def test_without_streams_of_its_own_a_file_is_printed_into(
    place: Path, tmp_path: Path, fault: Any
) -> None:
    """The control: the files of the run take the numbers of the streams."""
    program = printing(tmp_path, LEFT_CLOSED)
    done = shell(tmp_path, f"train {place}/recipe.yaml --out run", CLOSED[0], program=program)
    assert done.returncode or files_with(tmp_path / "run", b"from a library")
    fault(
        "closed streams, the numbers left free",
        "the control: the same test must fail",
        "a library's text is in a file of the run",
    )


@pytest.mark.parametrize(
    "behind", [CLOSED[0], *(pytest.param(one, marks=_LONG) for one in CLOSED[1:])]
)
@pytest.mark.parametrize(
    "words, written",
    [
        pytest.param("predict run images --out {out}/a.csv", "a.csv", id="predict"),
        pytest.param("eval run --out {out}/e", "e/results.json", id="eval", marks=_LONG),
        pytest.param("report run --out {out}/r.html", "r.html", id="report", marks=_LONG),
    ],
)
def test_verbs_with_closed_streams(
    words: str, written: str, behind: str, place: Path, tmp_path: Path, fault: Any
) -> None:
    done = shell(place, words.format(out=tmp_path), behind)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / written).stat().st_size > 1000
    assert not finetune_tracebacks(done.stderr)
    fault("standard streams that are closed: predict, eval, report", "0, and the files are written")


@pytest.mark.faults
def test_a_list_from_a_closed_stream(place: Path, fault: Any) -> None:
    done = shell(place, "predict run -", "0<&-")
    assert done.returncode in (2, 3)
    assert "internal error" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    fault("predict - with standard input closed", "an error of ours: there is no image")


READ = [
    *("predict run images --json", "recipes schema", "recipes help"),
    *(f"recipes list {REPOSITORY}/recipes", "train --help"),
    "train recipe.yaml --json --out run2 --dry-run",
    *("eval run --json", "info run --json", "info recipe.yaml --plan"),
    "data info embedded:digits --json",
    "probe run --data embedded:digits --shots 1 --seeds 1 --json",
    *("report run", "trian"),
]
QUICK = ((READ[0], "| head -1"), (READ[1], "| head -1"), (READ[1], "| true"))


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=_LONG)])
@pytest.mark.parametrize(
    "words, behind",
    [
        pytest.param(words, behind, marks=[] if (words, behind) in QUICK else [_LONG])
        for words in READ
        for behind in ("| head -1", "| true")
    ],
)
def test_a_reader_that_leaves(
    words: str, behind: str, unbuffered: str, place: Path, fault: Any
) -> None:
    """Most answers fit into the pipe: its reader may have left before or after they came."""
    done = shell(place, words, behind, unbuffered=unbuffered)
    assert done.returncode in {0, BROKEN_PIPE, 2 if words == "trian" else 0}
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    if words.startswith("predict") and "head" in behind:
        assert done.returncode == BROKEN_PIPE  # 64 KiB are the most that a pipe takes
    fault(
        "| head -1 and | true behind every verb that prints much",
        "0, or 141 where the answer is cut; no traceback",
    )


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=_LONG)])
def test_an_answer_is_whole_or_refused(
    unbuffered: str, place: Path, tmp_path: Path, fault: Any
) -> None:
    """A limit on the size of a file is a disk that takes a part."""
    words, part = "predict run images --json", tmp_path / "part"

    def work() -> None:
        os.chdir(place)
        with (tmp_path / "whole").open("w") as stream, contextlib.redirect_stdout(stream):
            raise SystemExit(main(words.split()))

    check_child_success(run_in_child(work))
    assert (tmp_path / "whole").stat().st_size > 200_000
    limit = "ulimit -f 100; trap '' XFSZ;"  # KiB
    ended = shell(place, words, f"> {part}", before=limit, unbuffered=unbuffered)
    assert part.stat().st_size == 100 * 1024
    assert ended.returncode == EXIT_CODES["setup"], ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    fault(
        "standard output is a file on a disk that takes a part of the answer",
        "5 in one line, also with PYTHONUNBUFFERED",
    )


def test_a_reader_that_is_gone_from_the_start(place: Path, fault: Any) -> None:
    """The control for the trials above: without our handling Python complains."""
    careless = place / "careless.py"
    careless.write_text("print('x' * 100000)")
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, careless], stdout=write, stderr=subprocess.PIPE, text=True
        )
        ours = subprocess.run(
            [sys.executable, "-m", "finetune", "recipes", "schema"],
            cwd=REPOSITORY,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(write)
    assert "BrokenPipeError" in done.stderr
    assert (ours.returncode, ours.stderr) == (BROKEN_PIPE, "")
    fault(
        "a reader that is gone before the answer",
        "141 and nothing said; Python alone complains (the control)",
    )
