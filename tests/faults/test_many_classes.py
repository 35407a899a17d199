"""100,000 files in 21,843 classes: train, eval and report with the memory of a small machine.

ImageNet-21k has as many classes; a dense confusion matrix would take 4 GB.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from launches import REPOSITORY, finetune_tracebacks
from PIL import Image
from recipe_texts import tiny_recipe_text

NUM_CLASSES, NUM_FILES, NUM_TEST = 21_843, 100_000, 50_000
MAX_EXTRA_BYTES = 1_500 << 20  # more than a run with few classes
MAX_RESULTS_BYTES = 20 << 20
CONTROL_LIMIT = 12 << 30  # address space of the control, in bytes

# Replaces `-m finetune`: a dense confusion matrix, as for few classes.
DENSE = """
import resource, sys
from finetune.evaluation import confusion
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
confusion.MAX_DENSE_CLASSES = 1 << 30
from finetune.cli.main import main
sys.exit(main())
"""


class CommandResult(NamedTuple):
    """Result of a command: exit code, standard output and error, peak memory, seconds."""

    exit_code: int
    text: str
    peak_bytes: int
    seconds: float


def run_command(
    folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "finetune")
) -> CommandResult:
    """Run a command in a subprocess."""
    started = time.monotonic()
    with (folder / "log.txt").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *program, *arguments], cwd=REPOSITORY, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
    seconds = time.monotonic() - started
    return CommandResult(process.returncode, text, usage.ru_maxrss * 1024, seconds)


def write_recipe(folder: Path, source: str, name: str) -> Path:
    path = folder / name
    text = tiny_recipe_text(
        "train: resize, eval: resize, batch_size: 64, val_fraction: 0.02",
        source=source,
        optim="lr: 1e-3, steps: 3",
        run="precision: fp32, log_every: 1, eval_every: 3",
        size=8,
    )
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def many_classes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 8 x 8 images, half of them test images; no class is empty."""
    folder = tmp_path_factory.mktemp("many")
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)
    for number in range(64):
        Image.fromarray(pixels[number]).save(folder / f"{number}.png")
    images = [(folder / f"{number}.png").read_bytes() for number in range(64)]
    for split, count in (("train", NUM_FILES - NUM_TEST), ("test", NUM_TEST)):
        for label in range(NUM_CLASSES):
            (folder / "data" / split / f"n{label:08}").mkdir(parents=True)
        for index, label in zip(range(count), itertools.cycle(range(NUM_CLASSES)), strict=False):
            path = folder / "data" / split / f"n{label:08}" / f"{index}.png"
            path.write_bytes(images[index % 64])
    return folder


def test_100000_files_in_21843_classes(many_classes_folder: Path, fault: Any) -> None:
    reference = run_command(
        many_classes_folder,
        *("train", str(write_recipe(many_classes_folder, "embedded:digits", "few.yaml"))),
        *("--out", str(many_classes_folder / "few/run")),
    )
    assert reference.exit_code == 0, reference.text
    recipe = write_recipe(
        many_classes_folder, f"folder:{many_classes_folder / 'data'}", "many.yaml"
    )
    result = run_command(
        many_classes_folder, "train", str(recipe), "--out", str(many_classes_folder / "many/run")
    )
    assert result.exit_code == 0, result.text
    assert not finetune_tracebacks(result.text)
    path = many_classes_folder / "many/run/results.json"
    results = json.loads(path.read_text())
    test = results["test"]
    assert len(test["per_class"]) == NUM_CLASSES
    assert test["examples"] == sum(test["confusion"]["count"]) == NUM_TEST
    assert sum(row["support"] for row in test["per_class"]) == NUM_TEST
    assert path.stat().st_size < MAX_RESULTS_BYTES
    assert (many_classes_folder / "many/run/report.html").stat().st_size < 2_000_000
    extra_bytes = result.peak_bytes - reference.peak_bytes
    assert extra_bytes < MAX_EXTRA_BYTES
    measured = [
        f"{result.seconds:.0f} s, {extra_bytes >> 20:,} MiB more than a run with 10 classes, "
        f"results.json {path.stat().st_size / 1e6:.1f} MB"
    ]
    for arguments in (
        (
            "eval",
            str(many_classes_folder / "many/run"),
            "--out",
            str(many_classes_folder / "measured"),
        ),
        ("report", str(many_classes_folder / "many/run"), str(many_classes_folder / "few/run")),
    ):
        result = run_command(many_classes_folder, *arguments)
        assert result.exit_code == 0, result.text
        assert not finetune_tracebacks(result.text)
        assert result.peak_bytes - reference.peak_bytes < MAX_EXTRA_BYTES
        measured.append(f"{arguments[0]} {result.seconds:.0f} s")
    evaluated = json.loads((many_classes_folder / "measured/results.json").read_text())
    assert evaluated["confusion"] == test["confusion"]
    fault(
        "100,000 files in 21,843 classes: train, eval, report, comparison",
        "each image once; at most 1.5 GB more memory, results.json at most 20 MB",
        "; ".join(measured),
    )


def test_control_with_a_dense_confusion_matrix(many_classes_folder: Path, fault: Any) -> None:
    program = many_classes_folder / "dense.py"
    program.write_text(DENSE.format(limit=CONTROL_LIMIT))
    recipe = write_recipe(
        many_classes_folder, f"folder:{many_classes_folder / 'data'}", "many.yaml"
    )
    result = run_command(
        many_classes_folder,
        *("train", str(recipe), "run.test=false", "--out", str(many_classes_folder / "dense")),
        program=(str(program),),
    )
    assert result.exit_code == 5, result.text
    assert "out of memory" in result.text
    fault(
        "the same with a dense confusion matrix",
        "the control: the same test must fail",
        f"exit code 5 with {CONTROL_LIMIT >> 30} GiB of address space",
    )
