"""Compare the losses of a recipe with those of float32 training without compilation.

    python benchmarks/losses.py recipes/cifar10/nano_32.yaml data.source=parquet:DATA/cifar10

Both trainings use the same images and random numbers from the first step on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

EVERY = 20  # steps per mean
FLOAT32 = ("run.precision=fp32", "model.compile=false")


def main() -> None:
    """Train twice, and print a table of both losses."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=200, help=f"a multiple of {EVERY}")
    arguments = parser.parse_intermixed_args()
    settings = ["optim.epochs=null", f"optim.steps={arguments.steps}", f"run.log_every={EVERY}"]
    settings += ["run.test=false", "data.val_fraction=0"]
    curves = []
    for changes in ((), FLOAT32):
        with TemporaryDirectory(prefix="losses-") as folder:
            # keep the later of two overrides of the same key
            words = [*arguments.overrides, *settings, *changes]
            overrides = {word.partition("=")[0]: word for word in words}.values()
            command = [sys.executable, "-m", "finetune", "train", arguments.recipe, *overrides]
            subprocess.run([*command, "--out", f"{folder}/run"], check=True)
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        curves.append({row["step"]: row["loss"] for row in rows if row["split"] == "train"})
    own, float32 = curves
    print("| up to step | loss | loss in float32 | difference |")
    print("|--:|--:|--:|--:|")
    for step, loss in own.items():
        print(f"| {step} | {loss:.4f} | {float32[step]:.4f} | {loss - float32[step]:+.4f} |")


if __name__ == "__main__":
    main()
