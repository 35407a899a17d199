"""Measure how well `finetune data doctor` finds planted label errors.

Flips 5 % and 20 % of the labels, at random ("symmetric") or from each class to the next one ("by
class"), and compares the average precision of the doctor's scores with two methods of cleanlab on
the same probabilities, and with self-confidence on the probabilities of 30 nearest neighbors.

    python benchmarks/label_errors.py embedded:digits parquet:CIFAR10 --weights embedded:vit_ti
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
from cleanlab.rank import get_label_quality_scores
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors

from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.doctor.features import choose_weights, compute_features
from finetune.doctor.label_errors import find_label_errors, out_of_fold_probabilities
from finetune.recipe.load import RunSection
from finetune.training.accelerator import create_accelerator

NUM_NEIGHBORS = 30


def flip(labels_N: NDArray[np.int64], num_classes: int, fraction: float, kind: str) -> NDArray:
    """Return labels of which a fraction is wrong."""
    generator = np.random.default_rng(0)
    rows = generator.permutation(len(labels_N))[: int(fraction * len(labels_N))]
    shift = generator.integers(1, num_classes, len(rows)) if kind == "symmetric" else 1
    flipped_N = labels_N.copy()
    flipped_N[rows] = (labels_N[rows] + shift) % num_classes
    return flipped_N


def knn_probabilities(values_ND: NDArray, labels_N: NDArray, num_classes: int) -> NDArray:
    """Return the fraction of each class among the nearest neighbors of each image."""
    unit_ND = values_ND - values_ND.mean(axis=0)
    unit_ND /= np.linalg.norm(unit_ND, axis=1, keepdims=True)
    search = NearestNeighbors(n_neighbors=NUM_NEIGHBORS).fit(unit_ND)
    neighbors = search.kneighbors(return_distance=False)  # without the image itself
    counts_NK = np.eye(num_classes)[labels_N[neighbors]].sum(axis=1) + 1.0 / num_classes
    return counts_NK / counts_NK.sum(axis=1, keepdims=True)


def main() -> None:
    """Print one line for each dataset, kind and rate of errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--weights", action="append", required=True, help="several are averaged")
    parser.add_argument("--images", type=int, default=5000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    accelerator = create_accelerator(RunSection())
    print("source, errors: doctor / self-confidence / normalized margin / k-NN; planted, expected")
    for name in options.sources:
        opened = open_source(name)
        split, num_classes = opened.splits["train"], len(opened.class_names)
        rows = np.random.default_rng(0).permutation(len(split))[: options.images]
        split = split.subset(np.sort(rows))
        source = Source(name, {"train": split}, opened.class_names, "")
        candidates = choose_weights(source, options.weights, accelerator.device)
        features = [compute_features(source, each, accelerator) for each in candidates]
        for kind, fraction in (
            ("none", 0.0),
            ("symmetric", 0.05),
            ("symmetric", 0.2),
            ("by class", 0.05),
            ("by class", 0.2),
        ):
            labels_N = flip(split.labels, num_classes, fraction, kind)
            is_wrong_N = labels_N != split.labels
            probabilities_NK = out_of_fold_probabilities(
                features, labels_N, np.arange(len(labels_N)), num_classes=num_classes
            )
            errors = find_label_errors(probabilities_NK, labels_N)
            knn_NK = knn_probabilities(features[0], labels_N, num_classes)
            scores = [
                errors.scores_N,
                -get_label_quality_scores(labels_N, probabilities_NK),
                -get_label_quality_scores(labels_N, probabilities_NK, method="normalized_margin"),
                -get_label_quality_scores(labels_N, knn_NK),
            ]
            precisions = [
                f"{average_precision_score(is_wrong_N, each):.3f}" if fraction else "-"
                for each in scores
            ]
            count, low, high = errors.expected
            print(
                f"{name}, {kind} {fraction:.0%}: {' / '.join(precisions)}; {is_wrong_N.sum()}, "
                f"{count:.0f} ({low:.0f} to {high:.0f}), {len(errors.indices)} listed",
                flush=True,
            )


if __name__ == "__main__":
    main()
