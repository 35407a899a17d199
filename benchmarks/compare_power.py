"""False alarms and power of `finetune compare`, on simulated answers of two models.

    python benchmarks/compare_power.py [--repeats 2000]
    python benchmarks/compare_power.py --runs runs/seed*

An image is answered correctly by both models, by one of them, or by neither, independently of the
others. A pair of models differs on a share of the images, the disagreement: the images that only
one of them has right. Each row is a goal, with a 95 % interval over the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import numpy as np
from numpy.typing import NDArray

from finetune.data.decode import hwc_to_chw
from finetune.data.from_recipe import open_full_data
from finetune.data.source import Split
from finetune.evaluation.confidence_intervals import wilson_interval
from finetune.evaluation.paired import compare_correct, quartile_slices, rank_slices
from finetune.formatting import format_percent, format_percent_range
from finetune.inference import Classifier
from finetune.run.record import load_run_recipe

ACCURACY = 0.9
ALPHA = 0.05
BATCH_SIZE = 100


def simulate(
    rng: np.random.Generator, difference_N: NDArray[np.float64], disagreement: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Draw the answers of two models.

    Args:
        difference_N: the accuracy of the second model minus that of the first, for each image.
        disagreement: probability that only one model is right, at least abs(difference_N).
    Returns: whether each model is right, (N,) each.
    """
    draws_N = rng.random(len(difference_N))
    fixed_N = draws_N < (disagreement + difference_N) / 2
    broken_N = ~fixed_N & (draws_N < disagreement)
    both_N = ~fixed_N & ~broken_N & (draws_N < disagreement / 2 + ACCURACY)
    return both_N | broken_N, both_N | fixed_N


def false_alarms(
    rng: np.random.Generator, num_images: int, disagreement: float, repeats: int
) -> list[int]:
    """Count pairs without a difference that are found different: by mid-p, exactly, by interval."""
    counts = np.zeros(3, dtype=int)
    for _ in range(repeats):
        row = compare_correct(*simulate(rng, np.zeros(num_images), disagreement))
        low, high = row["interval"]
        counts += [row["p_value"] < ALPHA, row["p_value_exact"] < ALPHA, not low <= 0 <= high]
    return counts.tolist()


def found(rng: np.random.Generator, num_images: int, disagreement: float, repeats: int) -> int:
    """Count pairs in which a drop of one point is found."""
    drop_N = np.full(num_images, -0.01)
    rows = (compare_correct(*simulate(rng, drop_N, disagreement)) for _ in range(repeats))
    return sum(row["p_value"] < ALPHA and row["difference"] < 0 for row in rows)


def ranked_first(
    rng: np.random.Generator, num_images: int, drop: float, disagreement: float, repeats: int
) -> tuple[int, int]:
    """Plant a drop in one slice, each time another.

    There are ten classes, eight folders, and quartiles of size and brightness.

    Returns: how often this slice is first, and how often any slice is significant.
    """
    num_first = num_significant = 0
    for _ in range(repeats):
        labels_N, folders_N = rng.integers(10, size=num_images), rng.integers(8, size=num_images)
        pixels_2N = rng.integers(0, 256, size=(2, num_images)).astype(float)
        slices = {
            "class": {str(k): labels_N == k for k in range(10)},
            "folder": {str(k): folders_N == k for k in range(8)},
            "size": quartile_slices(pixels_2N[0], "{low}–{high} px"),
            "brightness": quartile_slices(pixels_2N[1], "{low}–{high} of 255"),
        }
        names = [(kind, name) for kind, members in slices.items() for name in members]
        planted = names[rng.integers(len(names))]
        drop_N = np.where(slices[planted[0]][planted[1]], -drop, 0.0)
        rows, _ = rank_slices(slices, *simulate(rng, drop_N, disagreement))
        num_first += (rows[0]["kind"], rows[0]["name"]) == planted
        num_significant += rows[0]["p_adjusted"] < ALPHA
    return num_first, num_significant


def compare_seeds(runs: list[str]) -> None:
    """Compare each pair of runs on the test images, and print how many are found different."""
    recipe = load_run_recipe(runs[0])
    assert recipe is not None
    test = open_full_data(recipe.data, recipe.run.seed).splits["test"]
    correct = [find_correct(run, test) for run in runs]
    rows = [compare_correct(*pair) for pair in itertools.combinations(correct, 2)]
    flips = statistics.mean(row["fixed"] + row["broken"] for row in rows) / len(test)
    count = sum(row["p_value"] < ALPHA for row in rows)
    print_row("two seeds, found by mid-p", len(test), flips, count, len(rows))
    points = 100 * accuracy_deviation(np.stack(correct))
    print(f"standard deviation of the accuracy over seeds, without sampling: {points:.2f} points")


def accuracy_deviation(correct_RN: NDArray[np.bool_], repeats: int = 200) -> float:
    """Estimate how much the runs differ, without the randomness of the images.

    It is the covariance of the accuracies on two halves of the images, averaged over many halvings.
    """
    rng, num_images = np.random.default_rng(0), correct_RN.shape[1]
    covariances = []
    for _ in range(repeats):
        halves = np.array_split(rng.permutation(num_images), 2)
        covariances.append(np.cov(*(correct_RN[:, half].mean(1) for half in halves))[0, 1])
    return float(np.sqrt(max(0.0, np.mean(covariances))))


def find_correct(run: str, test: Split) -> NDArray[np.bool_]:
    """Return whether a run's answers to the test images are right, (N,)."""
    classifier = Classifier.load(run)
    predicted: list[int] = []
    for first in range(0, len(test), BATCH_SIZE):
        indices = range(first, min(first + BATCH_SIZE, len(test)))
        batch = [hwc_to_chw(test.decode(index)) for index in indices]
        predicted += classifier.logits(classifier.pipeline(batch)).argmax(1).tolist()
    return np.array(predicted) == test.labels


def print_row(name: str, images: int, disagreement: float, count: int, repeats: int) -> None:
    """Print a row of the table."""
    interval = format_percent_range(*wilson_interval(count, repeats))
    share = f"{format_percent(count / repeats, 1)} ({interval})"
    print(f"| {name} | {images:,} | {format_percent(disagreement, 1)} | {share} |", flush=True)


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--runs", nargs="+", metavar="RUN")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    rng = np.random.default_rng(0)
    print("| what | images | disagreement | pairs |")
    print("|---|--:|--:|--:|", flush=True)
    if arguments.runs:
        compare_seeds(arguments.runs)
        return
    for images, disagreement in ((300, 0.05), (1000, 0.05), (10_000, 0.02), (10_000, 0.1)):
        alarms = false_alarms(rng, images, disagreement, repeats)
        for name, count in zip(("mid-p", "exact test", "interval without 0"), alarms, strict=True):
            print_row(f"no difference, found by {name}", images, disagreement, count, repeats)
    for images, disagreement in (
        *((10_000, share) for share in (0.02, 0.05, 0.08, 0.09, 0.1, 0.15)),
        *((1000, share) for share in (0.02, 0.05)),
    ):
        count = found(rng, images, disagreement, repeats)
        print_row("1 point lower, found", images, disagreement, count, repeats)
    for images, drop, disagreement in (
        *((10_000, 0.04, 0.05), (10_000, 0.05, 0.08), (2000, 0.08, 0.1), (2000, 0.05, 0.06)),
    ):
        first, _ = ranked_first(rng, images, drop, disagreement, repeats)
        points = f"{100 * drop:.0f} points lower in one slice of 26"
        print_row(f"{points}: it is first", images, disagreement, first, repeats)
    _, significant = ranked_first(rng, 10_000, 0.0, 0.05, repeats)
    print_row("no difference, a slice of 26 is significant", 10_000, 0.05, significant, repeats)


if __name__ == "__main__":
    main()
