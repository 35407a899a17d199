"""100,000 files in 21,843 classes: trained, measured and reported in the memory of a small machine.

ImageNet-21k has as many classes; a matrix of all their pairs would be 4 GB.
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
MOST_BYTES = 1_500 << 20  # beyond a run of few classes
LARGEST_RESULTS = 20 << 20
_LIMIT = 12 << 30  # of the control's address space: so much is not taken from others

# Stands before the command line: a matrix of all pairs, as it is written for few classes.
DENSE = """
import resource, sys
from finetune.evaluation import confusion
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
confusion.DENSE_CLASSES = 1 << 30
from finetune.cli.main import main
sys.exit(main())
"""

pytestmark = [pytest.mark.faults]


class Ended(NamedTuple):
    """The end of a command: exit code, both its outputs, the most memory it had, its time."""

    code: int
    text: str
    most_bytes: int
    seconds: float


def command(folder: Path, *words: str, before: tuple[str, ...] = ("-m", "finetune")) -> Ended:
    """Run a command line in a process of its own."""
    started = time.monotonic()
    with (folder / "log.txt").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *before, *words], cwd=REPOSITORY, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
    seconds = time.monotonic() - started
    return Ended(process.returncode, text, usage.ru_maxrss * 1024, seconds)


def recipe(folder: Path, source: str, name: str) -> Path:
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images of 8 pixels, half of them to test on; every class has at least one."""
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


def test_100000_files_of_21843_classes(place: Path, fault: Any) -> None:
    few = command(
        place,
        *("train", str(recipe(place, "embedded:digits", "few.yaml"))),
        *("--out", str(place / "few/run")),
    )
    assert few.code == 0, few.text
    many = recipe(place, f"folder:{place / 'data'}", "many.yaml")
    ended = command(place, "train", str(many), "--out", str(place / "many/run"))
    assert ended.code == 0, ended.text
    assert not finetune_tracebacks(ended.text)
    path = place / "many/run/results.json"
    results = json.loads(path.read_text())
    test = results["test"]
    assert len(test["per_class"]) == NUM_CLASSES
    assert test["examples"] == sum(test["confusion"]["count"]) == NUM_TEST
    assert sum(row["support"] for row in test["per_class"]) == NUM_TEST
    assert path.stat().st_size < LARGEST_RESULTS
    assert (place / "many/run/report.html").stat().st_size < 2_000_000
    more = ended.most_bytes - few.most_bytes
    assert more < MOST_BYTES
    measured = [
        f"{ended.seconds:.0f} s, {more >> 20:,} MiB more than a run of 10 classes, "
        f"results.json {path.stat().st_size / 1e6:.1f} MB"
    ]
    for words in (
        ("eval", str(place / "many/run"), "--out", str(place / "measured")),
        ("report", str(place / "many/run"), str(place / "few/run")),
    ):
        ended = command(place, *words)
        assert ended.code == 0, ended.text
        assert not finetune_tracebacks(ended.text)
        assert ended.most_bytes - few.most_bytes < MOST_BYTES
        measured.append(f"{words[0]} {ended.seconds:.0f} s")
    again = json.loads((place / "measured/results.json").read_text())
    assert again["confusion"] == test["confusion"]
    fault(
        "100,000 files in 21,843 classes: train, eval, report, comparison",
        "each image once; at most 1.5 GB more memory, results.json at most 20 MB",
        "; ".join(measured),
    )


def test_a_matrix_of_all_pairs_does_not_fit(place: Path, fault: Any) -> None:
    program = place / "dense.py"
    program.write_text(DENSE.format(limit=_LIMIT))
    many = recipe(place, f"folder:{place / 'data'}", "many.yaml")
    ended = command(
        place,
        *("train", str(many), "run.test=false", "--out", str(place / "dense")),
        before=(str(program),),
    )
    assert ended.code == 5, ended.text
    assert "out of memory" in ended.text
    fault(
        "the same with a matrix of all pairs of classes",
        "the control: the same test must fail",
        f"exit code 5 with {_LIMIT >> 30} GiB of address space",
    )
