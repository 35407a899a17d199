"""Standard streams that are closed or no longer read: no traceback, no lost work."""

from __future__ import annotations

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
)
from launches import REPOSITORY, finetune_tracebacks
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import EXIT_CODES

RECIPE = tiny_recipe_text(
    optim="lr: 3e-3, steps: 4", run="precision: fp32, log_every: 1, save_every: 2"
)
BROKEN_PIPE_EXIT_CODE = 141  # the exit code that a shell reports for SIGPIPE

# Replaces `-m finetune`: after every step a library writes directly to file descriptors 1 and 2.
PRINTING_PROGRAM = """
import gc, os, sys
gc.disable()  # as finetune does during imports
from finetune.training.trainer_state import TrainerState

step = TrainerState.train_step

def printing(self, *arguments):
    step(self, *arguments)
    os.write(1, b"from a library")
    os.write(2, b"from a library")

TrainerState.train_step = printing
{before}
from finetune.cli.main import main
sys.exit(main())
"""
# Python opens the program file before a closed stream could be opened.
KEEP_STREAMS_CLOSED = "import finetune.cli.runner as r; r.open_closed_streams = lambda: None"


@pytest.fixture(scope="module")
def finished_run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and images."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for number in range(1500):  # their rows exceed the 64 KiB of a pipe
        Image.fromarray(pixels).save(folder / "images" / f"image-{number:04}.png")
    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        check_child_success(
            run_command_in_child("train", folder / "recipe.yaml", "--out", folder / "run")
        )
    return folder


def run_in_shell(
    folder: Path,
    command: str,
    redirection: str = "",
    *,
    shell_prefix: str = "",
    program: str = "-m finetune",
    unbuffered: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command in bash, with redirections or a pipe."""
    return subprocess.run(
        [
            "bash",
            "-c",
            f"set -o pipefail; {shell_prefix} '{sys.executable}' {program} {command} {redirection}",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=240,
    )


def write_printing_program(folder: Path, setup_code: str = "") -> str:
    """Write the program whose libraries print. Returns: its path."""
    path = folder / f"printing-{bool(setup_code)}.py"
    path.write_text(PRINTING_PROGRAM.format(before=setup_code))
    return str(path)


def files_that_contain(folder: Path, text: bytes) -> list[str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert paths
    return [str(path.relative_to(folder)) for path in paths if text in path.read_bytes()]


CLOSED_STREAMS = ["0<&- 1>&- 2>&-", "0<&-", "1>&-", "2>&-"]


@pytest.mark.parametrize("redirection", CLOSED_STREAMS)
def test_train_with_closed_streams(
    redirection: str, finished_run_folder: Path, tmp_path: Path, fault: Any
) -> None:
    program = write_printing_program(tmp_path)
    result = run_in_shell(
        tmp_path, f"train {finished_run_folder}/recipe.yaml --out run", redirection, program=program
    )
    assert result.returncode == 0, result.stderr
    assert read_weights(tmp_path / "run") == read_weights(finished_run_folder / "run")
    assert files_that_contain(tmp_path / "run", b"from a library") == []
    assert not finetune_tracebacks(result.stderr)
    fault(
        "standard streams that are closed (0<&- 1>&- 2>&-): train",
        "0, the same weights, and no library output in a file of the run",
    )


def test_control_library_output_goes_to_a_file_of_the_run(
    finished_run_folder: Path, tmp_path: Path, fault: Any
) -> None:
    """The control: files of the run get the file descriptors of the closed streams."""
    program = write_printing_program(tmp_path, KEEP_STREAMS_CLOSED)
    result = run_in_shell(
        tmp_path,
        f"train {finished_run_folder}/recipe.yaml --out run",
        CLOSED_STREAMS[0],
        program=program,
    )
    assert result.returncode or files_that_contain(tmp_path / "run", b"from a library")
    fault(
        "closed streams, file descriptors left free",
        "the control: the same test must fail",
        "library output is in a file of the run",
    )


@pytest.mark.parametrize("redirection", CLOSED_STREAMS)
@pytest.mark.parametrize(
    "command, output_name",
    [
        pytest.param("predict run images --out {out}/a.csv", "a.csv", id="predict"),
        pytest.param("eval run --out {out}/e", "e/results.json", id="eval"),
        pytest.param("report run --out {out}/r.html", "r.html", id="report"),
    ],
)
def test_commands_with_closed_streams(
    command: str,
    output_name: str,
    redirection: str,
    finished_run_folder: Path,
    tmp_path: Path,
    fault: Any,
) -> None:
    result = run_in_shell(finished_run_folder, command.format(out=tmp_path), redirection)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / output_name).stat().st_size > 1000
    assert not finetune_tracebacks(result.stderr)
    fault("standard streams that are closed: predict, eval, report", "0, and the files are written")


COMMANDS_WITH_OUTPUT = [
    *("predict run images --json", "recipes schema", "recipes help"),
    *(f"recipes list {REPOSITORY}/recipes", "train --help"),
    "train recipe.yaml --json --out run2 --dry-run",
    *("eval run --json", "info run --json", "info recipe.yaml --plan"),
    "data info embedded:digits --json",
    "probe run --data embedded:digits --shots 1 --seeds 1 --json",
    *("report run", "trian"),
]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("redirection", ["| head -1", "| true"])
@pytest.mark.parametrize("command", COMMANDS_WITH_OUTPUT)
def test_a_pipe_reader_that_exits_early(
    command: str, redirection: str, unbuffered: str, finished_run_folder: Path, fault: Any
) -> None:
    """Most outputs fit into the pipe: its reader may have exited before or after."""
    result = run_in_shell(finished_run_folder, command, redirection, unbuffered=unbuffered)
    assert result.returncode in {0, BROKEN_PIPE_EXIT_CODE, 2 if command == "trian" else 0}
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert "BrokenPipe" not in result.stderr
    if command.startswith("predict") and "head" in redirection:
        assert result.returncode == BROKEN_PIPE_EXIT_CODE  # a pipe holds at most 64 KiB
    fault(
        "| head -1 and | true after every command with long output",
        "0, or 141 if the output is truncated; no traceback",
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_is_complete_or_an_error(
    unbuffered: str, finished_run_folder: Path, tmp_path: Path, fault: Any
) -> None:
    """A limit on the file size stands for a disk that becomes full."""
    command, output_path = "predict run images --json", tmp_path / "part"

    limit = "ulimit -f 100; trap '' XFSZ;"  # KiB
    result = run_in_shell(
        finished_run_folder, command, f"> {output_path}", shell_prefix=limit, unbuffered=unbuffered
    )
    assert output_path.stat().st_size == 100 * 1024
    assert result.returncode == EXIT_CODES["setup"], result.stderr
    assert len(result.stderr.splitlines()) == 1
    fault(
        "standard output is a file on a disk that becomes full",
        "5 in one line, also with PYTHONUNBUFFERED",
    )
