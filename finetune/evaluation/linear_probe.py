"""Classifiers on frozen features: least squares, logistic regression, SGD, nearest neighbours.

Source of the few-shot protocol: big_vision, evaluators/fewshot_lsr.py; ViT paper, section 4.1. Of
the neighbours: Caron et al. 2021, Emerging Properties in Self-Supervised Vision Transformers.
"""

# N images to learn from, T images to measure on, B batch, D width, K classes, R learning rates

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from finetune.evaluation.metrics import mean_std

__all__ = [
    "BIAS",
    "GRID",
    "L2",
    "RATES",
    "LeastSquares",
    "Whitening",
    "draw_shots",
    "few_shot",
    "fit_least_squares",
    "logistic_regression",
    "neighbours",
    "sgd_heads",
    "train_heads",
]

BIAS = 100.0  # a constant feature this large makes its weight almost unregularised
L2 = 2.0**10
EPSILON = 1e-5
# C of logistic regression: the inverse of the regularisation
GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_MAX_ITERATIONS = 1000
# learning rates of SGD, for 256 images in a batch
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_BATCH, _EPOCHS, _LEAST_STEPS = 256, 10, 1000
_ROWS = 8192  # taken to float64 at once
_SIMILARITIES = 1 << 25  # held at once: 128 MiB

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Whitening:
    """Shift and scale of each feature, in float64.

    Attributes:
        mean_D: of the images that are learned from.
        std_D: their population standard deviation + 1e-5.
    """

    mean_D: Array
    std_D: Array

    @classmethod
    def of(cls, values_ND: NDArray[np.floating[Any]]) -> Whitening:
        """Measure features."""
        values_ND = np.asarray(values_ND, dtype=np.float64)
        return cls(values_ND.mean(axis=0), values_ND.std(axis=0) + EPSILON)

    def __call__(self, values_ND: NDArray[np.floating[Any]]) -> Array:
        """Apply it. Returns: (N, D) float64."""
        return (np.asarray(values_ND, dtype=np.float64) - self.mean_D) / self.std_D


def draw_shots(labels_N: Labels, num_classes: int, *, shots: int, seed: int) -> Labels:
    """Choose the images of each class that are learned from.

    More shots of the same seed contain the fewer ones.

    Args:
        labels_N: in [0, K).
        shots: of each class; a class with fewer images gives all that it has.
        seed: of NumPy's default_rng, which permutes one class after the other.
    Returns: places, class by class.
    """
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(labels_N == k)) for k in range(num_classes)]
    return np.concatenate([order[:shots] for order in orders])


@dataclass(frozen=True)
class LeastSquares:
    """A regularised linear map from whitened features to one score for each class.

    Attributes:
        whitening: of the shots.
        weights: (D + 1, K) float64; the last row belongs to the constant feature.
    """

    whitening: Whitening
    weights: Array

    def scores(self, values_TD: NDArray[np.floating[Any]]) -> Array:
        """Score images. Returns: (T, K) float64, near 1 for the class and -1 for the others."""
        parts = [values_TD[at : at + _ROWS] for at in range(0, len(values_TD), _ROWS)]
        return np.concatenate([_with_bias(self.whitening(part)) @ self.weights for part in parts])


def fit_least_squares(
    values_ND: NDArray[np.floating[Any]], labels_N: Labels, *, num_classes: int, l2: float = L2
) -> LeastSquares:
    """Fit targets of +1 for the class and -1 for the others, in closed form.

    The equations are over features or over images, whichever are fewer: the same minimum.

    Args:
        values_ND: features of the shots.
        labels_N: in [0, K).
        num_classes: K; the targets of one without a shot are all -1.
        l2: weight of the squared weights, the constant feature's among them.
    """
    whitening = Whitening.of(values_ND)
    inputs = _with_bias(whitening(values_ND))
    targets_NK = 2.0 * np.eye(num_classes)[labels_N] - 1.0
    num_images, width = inputs.shape
    if num_images >= width:
        gram = inputs.T @ inputs + l2 * np.eye(width)
        weights = np.linalg.solve(gram, inputs.T @ targets_NK)
    else:
        gram = inputs @ inputs.T + l2 * np.eye(num_images)
        weights = inputs.T @ np.linalg.solve(gram, targets_NK)
    return LeastSquares(whitening, weights)


def _with_bias(values_ND: Array) -> Array:
    return np.pad(values_ND, ((0, 0), (0, 1)), constant_values=BIAS)


def few_shot(
    train: tuple[NDArray[np.floating[Any]], Labels],
    test: tuple[NDArray[np.floating[Any]], Labels],
    *,
    num_classes: int,
    shots: Sequence[int],
    seeds: int,
) -> dict[int, dict[str, Any]]:
    """Accuracy of least squares on a few images of each class.

    Args:
        train, test: features (N, D) and labels (N,) in [0, K).
        shots: images of each class; a class with fewer gives all that it has.
        seeds: seeds 0 … seeds - 1.
    Returns: for each number of shots {"accuracy": mean, "std", "seeds": [accuracy of each]}.
    """
    results = {}
    for count in shots:
        accuracies = []
        for seed in range(seeds):
            places = draw_shots(train[1], num_classes, shots=count, seed=seed)
            values, labels = train[0][places], train[1][places]
            fitted = fit_least_squares(values, labels, num_classes=num_classes)
            accuracies.append(float((fitted.scores(test[0]).argmax(1) == test[1]).mean()))
        mean, std, _ = mean_std(accuracies)
        results[int(count)] = {"accuracy": mean, "std": std, "seeds": accuracies}
    return results


def logistic_regression(
    train: tuple[NDArray[np.floating[Any]], Labels],
    choice: tuple[Labels, tuple[NDArray[np.floating[Any]], Labels]],
    test: tuple[NDArray[np.floating[Any]], Labels],
    *,
    grid: tuple[float, ...] = GRID,
) -> dict[str, Any]:
    """Choose C on validation, fit again on all of train, and read test once.

    Args:
        train: features (N, D) and labels (N,).
        choice: which places of train to fit on while C is chosen, and the features and labels to
            choose it on.
        test: features (T, D) and labels (T,).
        grid: of C, ascending; the smallest wins among equals.
    Returns: "accuracy", "c", "grid" [{"c", "val_accuracy"}], "at_edge" (the best C is the first
        or the last, so a better one may lie beyond) and "converged".
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    def fitted(values_ND: Array, labels_N: Labels, c: float, start: Any = None) -> Any:
        model = start or LogisticRegression(max_iter=_MAX_ITERATIONS, warm_start=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # reported as "converged"
            return model.set_params(C=c).fit(values_ND, labels_N)

    places, (val_values, val_labels) = choice
    whitening = Whitening.of(train[0][places])
    inputs, val_inputs = whitening(train[0][places]), whitening(val_values)
    rows, model = [], None
    for c in grid:
        model = fitted(inputs, train[1][places], c, model)
        rows.append({"c": c, "val_accuracy": _accuracy(model.predict(val_inputs), val_labels)})
    best = max(rows, key=lambda row: row["val_accuracy"])["c"]  # the first of equals

    whitening = Whitening.of(train[0])
    model = fitted(whitening(train[0]), train[1], best)
    return {
        "accuracy": _accuracy(model.predict(whitening(test[0])), test[1]),
        "c": best,
        "grid": rows,
        "at_edge": best in (grid[0], grid[-1]),
        "converged": bool(max(model.n_iter_) < _MAX_ITERATIONS),
    }


def sgd_heads(
    train: tuple[NDArray[np.float32], Labels],
    choice: tuple[Labels, tuple[NDArray[np.float32], Labels]],
    test: tuple[NDArray[np.float32], Labels],
    *,
    columns: Mapping[str, slice],
    num_classes: int,
    device: torch.device,
) -> dict[str, Any]:
    """Choose learning rate and input on validation, train again on all of train, read test once.

    Args:
        train, choice, test: as for `logistic_regression`.
        columns: of the features, by the name of the input.
    Returns: "accuracy", "features" (a key of `columns`), "lr", "grid" [{"features", "lr",
        "val_accuracy"}] and "at_edge"; of equals the first input and the lowest rate.
    Source: DINOv2 (Oquab et al. 2023), dinov2/eval/linear.py: its rates, momentum, decay and
        inputs. Ours: features are computed once, so images are not augmented; 256 images in a
        batch; 1,000 steps at least.
    """
    places, (val_values, val_labels) = choice
    rows = []
    of_train = (train[0][places], train[1][places])
    heads = train_heads(of_train, columns, RATES, num_classes=num_classes, device=device)
    for name, head in heads.items():
        predicted_TR = _predicted(head, val_values[:, columns[name]], num_classes)
        for lr, predicted_T in zip(RATES, predicted_TR.T, strict=True):
            accuracy = _accuracy(predicted_T, val_labels)
            rows.append({"features": name, "lr": lr, "val_accuracy": accuracy})
    best: dict[str, Any] = max(rows, key=lambda row: row["val_accuracy"])  # the first of equals
    name, lr = best["features"], best["lr"]
    part = {name: columns[name]}
    head = train_heads(train, part, (lr,), num_classes=num_classes, device=device)[name]
    predicted_T1 = _predicted(head, test[0][:, columns[name]], num_classes)
    return {
        "accuracy": _accuracy(predicted_T1[:, 0], test[1]),
        "features": name,
        "lr": lr,
        "grid": rows,
        "at_edge": lr in (RATES[0], RATES[-1]),
    }


def train_heads(
    train: tuple[NDArray[np.float32], Labels],
    columns: Mapping[str, slice],
    rates: Sequence[float],
    *,
    num_classes: int,
    device: torch.device,
) -> dict[str, nn.Linear]:
    """Train a linear classifier for each input and learning rate, all in one pass over the data.

    Each becomes what it would alone: the rate is the weight of its loss, so with momentum, and
    without weight decay, its steps are those of SGD at this rate.

    Args:
        train: features (N, …) and labels (N,) in [0, K).
        columns: of the features, by the name of the input.
        rates: R, for 256 images in a batch.
    Returns: for each input one layer with R K outputs, those of the first rate first.
    """
    values_ND, labels_N = train[0], torch.from_numpy(np.asarray(train[1]))
    batch = min(_BATCH, len(labels_N))
    per_epoch = len(labels_N) // batch
    steps = max(_EPOCHS * per_epoch, _LEAST_STEPS)
    heads = {}
    for name, part in columns.items():
        width = part.stop - part.start
        heads[name] = head = nn.Linear(width, len(rates) * num_classes)
        draws = torch.Generator().manual_seed(0)  # all rates start from the same weights
        first_KD = torch.empty(num_classes, width).normal_(std=0.01, generator=draws)
        head.weight.data = first_KD.repeat(len(rates), 1)
        nn.init.zeros_(head.bias)
        head.to(device)
    parameters = [p for head in heads.values() for p in head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    weights_R = torch.tensor(rates, device=device) * (batch / _BATCH)
    draws = torch.Generator().manual_seed(0)
    for step in range(steps):
        if step % per_epoch == 0:
            order_N = torch.randperm(len(labels_N), generator=draws)
        rows_B = order_N[step % per_epoch * batch :][:batch]
        values_BD = torch.from_numpy(values_ND[rows_B.numpy()]).to(device)
        labels_RB = labels_N[rows_B].to(device).expand(len(rates), -1)
        loss = torch.zeros((), device=device)
        for name, head in heads.items():
            # images last: a softmax over few neighbouring numbers is slow on a CPU
            inputs_DB = values_BD[:, columns[name]].T
            logits_RKB = torch.addmm(head.bias[:, None], head.weight, inputs_DB).view(
                len(rates), num_classes, batch
            )
            losses_RB = cross_entropy(logits_RKB, labels_RB, reduction="none")
            loss = loss + losses_RB.mean(dim=1) @ weights_R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return heads


@torch.no_grad()
def _predicted(head: nn.Linear, values_TD: NDArray[np.float32], num_classes: int) -> Labels:
    """The classes (T, R) that the heads of one input predict."""
    parts: list[Tensor] = []
    for at in range(0, len(values_TD), _ROWS):
        rows_TD = torch.from_numpy(np.array(values_TD[at : at + _ROWS])).to(head.weight.device)
        parts.append(head(rows_TD).unflatten(1, (-1, num_classes)).argmax(dim=2).cpu())
    return torch.cat(parts).numpy()


def neighbours(
    train: tuple[NDArray[np.floating[Any]], Labels],
    values_TD: NDArray[np.floating[Any]],
    *,
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> tuple[Labels, Labels]:
    """Let the k most similar images vote, by the cosine of their features.

    Args:
        train: features (N, D) and labels (N,).
        values_TD: features to classify.
        k: at most N.
        temperature: a vote weighs exp(cosine / temperature).
    Returns: the classes (T,) by weighted votes, and by plain ones; of equal sums the first class.
    """
    keys_ND = normalize(torch.from_numpy(np.array(train[0], dtype=np.float32)), dim=1)
    labels_N = torch.from_numpy(np.asarray(train[1]))
    weighted, plain = [], []
    rows = max(1, _SIMILARITIES // len(keys_ND))
    for at in range(0, len(values_TD), rows):
        part = torch.from_numpy(np.array(values_TD[at : at + rows], dtype=np.float32))
        nearest = (normalize(part, dim=1) @ keys_ND.T).topk(k, dim=1)
        classes = labels_N[nearest.indices]
        votes = torch.zeros(len(part), num_classes, dtype=torch.float64)
        # the largest weight becomes 1: only their ratios matter
        closer = nearest.values.double() - nearest.values[:, :1].double()
        weights = (closer / temperature).exp()
        weighted.append(votes.scatter_add(1, classes, weights).argmax(1))
        plain.append(votes.scatter_add(1, classes, torch.ones_like(weights)).argmax(1))
    return torch.cat(weighted).numpy(), torch.cat(plain).numpy()


def _accuracy(predicted_T: NDArray[Any], labels_T: Labels) -> float:
    return float(np.mean(predicted_T == labels_T))
