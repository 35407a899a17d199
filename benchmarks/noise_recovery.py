"""Measure how much accuracy `finetune data doctor` wins back from wrong labels.

Flips 20 % of the training labels at random, runs the doctor on the training images, and trains with
four versions of the labels: noisy; checked (the doctor's most suspicious labels, as many as it
expects to be wrong, are compared with the truth); suggested (the same labels are replaced by the
doctor's suggestions, unseen); and clean. The table has the test accuracy of each seed, and which
share of the accuracy that the noise had cost is recovered. Started again with the same folder, it
continues: finished runs are not repeated.

    python benchmarks/noise_recovery.py parquet:CIFAR10 /tmp/noise --weights embedded:vit_nano
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from label_errors import flip
from PIL import Image
from plant_problems import write_image

from finetune.data.decisions import Decision, write_decisions
from finetune.data.open_source import open_source

FRACTION = 0.2
VERSIONS = ("noisy", "checked", "suggested", "clean")
RECIPE = """\
model: {{name: "{weights}"}}
data:
  source: "folder:{images}"
  decisions: {decisions}
  val_fraction: 0
  train: resize | random_crop(padding=4) | flip
  eval: resize
  batch_size: 128
optim: {{name: adamw, lr: 1e-3, weight_decay: 0.05, warmup_steps: 20, epochs: {epochs}}}
run: {{seed: {seed}}}
"""


def plant_noise(source: str, folder: Path, num_images: int) -> dict[str, str]:
    """Write training images with flipped labels, and all test images.

    Returns: the true class of each training image by its file name.
    """
    opened, truth = open_source(source), {}
    train, test = opened.splits["train"], opened.splits["test"]
    rows = np.random.default_rng(0).permutation(len(train))[:num_images]
    given = flip(train.labels[rows], len(opened.class_names), FRACTION, "symmetric")
    for row, label in zip(rows.tolist(), given, strict=True):
        name = f"train/{opened.class_names[label]}/{row}.png"
        write_image(Image.fromarray(train.decode(row)), folder, name)
        truth[Path(name).name] = opened.class_names[train.labels[row]]
    for index in range(len(test)):
        name = f"test/{opened.class_names[test.labels[index]]}/{index}.png"
        write_image(Image.fromarray(test.decode(index)), folder, name)
    return truth


def write_versions(images: Path, out: Path, truth: dict[str, str], findings: Path) -> None:
    """Write the decisions of each version of the labels, and print how good they are."""
    split = open_source(f"folder:{images}").splits["train"]
    names = [Path(split.name_of(index)).name for index in range(len(split))]
    with (findings / "label_scores.csv").open(newline="", encoding="utf-8") as file:
        scores = {int(row["index"]): row for row in csv.DictReader(file)}
    expected = json.loads((findings / "doctor.json").read_text())["expected"]["label_errors"]
    ranked = sorted(scores, key=lambda index: -float(scores[index]["score"]))
    top = ranked[: round(expected["count"])]
    true = [truth[name] for name in names]
    is_wrong = [true[index] != scores[index]["given"] for index in range(len(split))]
    suggested = [scores[index]["suggested"] for index in range(len(split))]
    chosen: dict[str, tuple[list[int], list[str]]] = {
        "noisy": ([], true),
        "checked": (top, true),
        "suggested": (top, suggested),
        "clean": (ranked, true),
    }
    for version, (indices, labels) in chosen.items():
        decisions = [
            Decision(
                "keep" if labels[index] == scores[index]["given"] else "relabel",
                split="train",
                index=index,
                given=scores[index]["given"],
                label=labels[index],
                digest=split.digests[index].tobytes().hex(),
            )
            for index in indices
        ]
        write_decisions(out / f"{version}.csv", decisions)
    print(
        f"{sum(is_wrong)} of {len(split)} labels are wrong, {expected['count']:.0f} expected "
        f"({expected['low']:.0f} to {expected['high']:.0f}); of {len(top)} checked labels, "
        f"{sum(is_wrong[index] for index in top)} are wrong, and the suggestion is right for "
        f"{sum(suggested[index] == true[index] for index in top)}\n",
        flush=True,
    )


def run(*arguments: str) -> dict[str, Any]:
    """Run a command. Returns: its result."""
    command = [sys.executable, "-m", "finetune", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def is_done(folder: Path) -> bool:
    """Return True for the directory of a finished run."""
    record = folder / "run.json"
    return record.exists() and json.loads(record.read_text())["status"] == "done"


def format_row(name: str, values: list[float], digits: int = 2) -> str:
    """Format the values of all seeds in percent, with mean and standard deviation."""
    spread = f" ± {100 * stdev(values):.{digits}f}" if len(values) > 1 else ""
    cells = [f"{100 * value:.{digits}f}" for value in values]
    return f"| {' | '.join([name, *cells, f'{100 * mean(values):.{digits}f}{spread}'])} |"


def main() -> None:
    """Print the test accuracies, and the recovered shares."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("source", help="with the splits train and test")
    parser.add_argument("out", type=Path, help="folder for images, findings and runs")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    out, images = options.out.absolute(), options.out.absolute() / "images"
    if not (out / f"{VERSIONS[-1]}.csv").exists():
        images.mkdir(parents=True)
        truth = plant_noise(options.source, images, options.images)
        # the doctor sees no test image: their labels are right, and would help it
        weights = ("--weights", options.weights)
        run("data", "doctor", f"folder:{images / 'train'}", *weights, "--out", str(out / "doctor"))
        write_versions(images, out, truth, out / "doctor")

    def train(version: str, seed: int) -> float:
        recipe = out / f"{version}-{seed}.yaml"
        folder = recipe.with_suffix("")
        if is_done(folder):
            return float(json.loads((folder / "results.json").read_text())["test"]["top1"])
        shutil.rmtree(folder, ignore_errors=True)
        recipe.write_text(
            RECIPE.format(
                weights=options.weights,
                images=images,
                decisions=out / f"{version}.csv",
                epochs=options.epochs,
                seed=seed,
            )
        )
        accuracy = run("train", str(recipe), "--out", str(folder))["test"]["top1"]
        print(f"{version}, seed {seed}: {accuracy:.4f}", file=sys.stderr, flush=True)
        return float(accuracy)

    accuracies: dict[str, list[float]] = {version: [] for version in VERSIONS}
    for seed in options.seeds:
        for version in VERSIONS:
            accuracies[version].append(train(version, seed))
    print(f"| labels | {' | '.join(f'seed {seed}' for seed in options.seeds)} | mean |")
    print("|---" * (len(options.seeds) + 2) + "|")
    for version, values in accuracies.items():
        print(format_row(f"{version}, top-1 %", values))
    noisy, clean = accuracies["noisy"], accuracies["clean"]
    for version in ("checked", "suggested"):
        triples = zip(noisy, accuracies[version], clean, strict=True)
        shares = [(value - low) / (high - low) for low, value, high in triples]
        print(format_row(f"recovered by {version}, %", shares, 0))


if __name__ == "__main__":
    main()
