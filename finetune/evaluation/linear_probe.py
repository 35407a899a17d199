"""Probes of frozen features: least squares, logistic regression, SGD and k nearest neighbors.

Source: few-shot protocol: big_vision, evaluators/fewshot_lsr.py; ViT paper, section 4.1.
k-NN: Caron et al. 2021, Emerging Properties in Self-Supervised Vision Transformers.
"""

# N training images, T test images, B batch, D width, K classes, R learning rates

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

from finetune.errors import DataError
from finetune.evaluation.metrics import mean_std
from finetune.log import logger
from finetune.progress import item_bar

__all__ = [
    "BIAS_FEATURE",
    "C_GRID",
    "DINOV2_C_GRID",
    "L2_WEIGHT",
    "LEARNING_RATES",
    "LeastSquaresClassifier",
    "Standardizer",
    "cross_validate",
    "draw_shots",
    "evaluate_few_shot",
    "fit_least_squares",
    "predict_knn",
    "probe_logistic_regression",
    "probe_sgd",
    "train_sgd_heads",
]

BIAS_FEATURE = 100.0  # so large that the weight of this constant feature is hardly regularized
L2_WEIGHT = 2.0**10
_STD_EPSILON = 1e-5
# C of logistic regression: inverse regularization strength
C_GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
DINOV2_C_GRID = tuple(np.logspace(-6, 5, 45).tolist())
MAX_ITERATIONS = 1000
# learning rates of SGD, for a batch size of 256
LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_SGD_BATCH_SIZE, _SGD_EPOCHS, MIN_SGD_STEPS = 256, 10, 1000
CHUNK_ROWS = 8192  # rows converted to float64 per chunk
MAX_SIMILARITIES = 1 << 25  # 128 MiB

FloatArray = NDArray[np.float64]
LabelArray = NDArray[np.int64]


@dataclass(frozen=True)
class Standardizer:
    """Standardize each feature to mean 0 and standard deviation 1, in float64.

    Attributes:
        mean_D: mean of each feature over the training images.
        std_D: population standard deviation of each feature over the training images, plus 1e-5.
    """

    mean_D: FloatArray
    std_D: FloatArray

    @classmethod
    def fit(cls, values_ND: NDArray[np.floating[Any]]) -> Standardizer:
        """Measure the mean and the standard deviation of features."""
        values_ND = np.asarray(values_ND, dtype=np.float64)
        return cls(values_ND.mean(axis=0), values_ND.std(axis=0) + _STD_EPSILON)

    def __call__(self, values_ND: NDArray[np.floating[Any]]) -> FloatArray:
        """Standardize features. Returns: (N, D) float64."""
        return (np.asarray(values_ND, dtype=np.float64) - self.mean_D) / self.std_D


def draw_shots(labels_N: LabelArray, num_classes: int, *, shots: int, seed: int) -> LabelArray:
    """Draw `shots` training images of each class.

    With the same seed, a larger draw contains the smaller ones.

    Args:
        labels_N: class indices in [0, K).
        shots: images per class; a class with fewer images contributes all of them.
        seed: seed of `np.random.default_rng`; the images of each class are permuted in turn, in
            class order.
    Returns: indices of the drawn images, class by class.
    """
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(labels_N == k)) for k in range(num_classes)]
    return np.concatenate([order[:shots] for order in orders])


@dataclass(frozen=True)
class LeastSquaresClassifier:
    """A ridge-regression classifier: standardized features to one score per class.

    Attributes:
        standardizer: the standardizer fitted to the training images.
        weights: (D + 1, K) float64; the last row belongs to the constant feature.
    """

    standardizer: Standardizer
    weights: FloatArray

    def predict_scores(self, values_TD: NDArray[np.floating[Any]]) -> FloatArray:
        """Score images. Returns: (T, K) float64, near 1 for the true class and -1 for others."""
        chunks = [
            values_TD[start : start + CHUNK_ROWS] for start in range(0, len(values_TD), CHUNK_ROWS)
        ]
        return np.concatenate(
            [_append_bias(self.standardizer(chunk)) @ self.weights for chunk in chunks]
        )


def fit_least_squares(
    values_ND: NDArray[np.floating[Any]],
    labels_N: LabelArray,
    *,
    num_classes: int,
    l2: float = L2_WEIGHT,
) -> LeastSquaresClassifier:
    """Fit ridge regression to targets of +1 (true class) and -1 (other classes), in closed form.

    Solves the primal (features) or the dual (images) problem, whichever is smaller; both have the
    same solution.

    Args:
        values_ND: features of the training images.
        labels_N: class indices in [0, K).
        num_classes: K; all targets of a class without images are -1.
        l2: weight of the L2 penalty, which includes the constant feature.
    """
    standardizer = Standardizer.fit(values_ND)
    inputs = _append_bias(standardizer(values_ND))
    targets_NK = 2.0 * np.eye(num_classes)[labels_N] - 1.0
    num_images, width = inputs.shape
    if num_images >= width:
        gram = inputs.T @ inputs + l2 * np.eye(width)
        weights = np.linalg.solve(gram, inputs.T @ targets_NK)
    else:
        gram = inputs @ inputs.T + l2 * np.eye(num_images)
        weights = inputs.T @ np.linalg.solve(gram, targets_NK)
    return LeastSquaresClassifier(standardizer, weights)


def _append_bias(values_ND: FloatArray) -> FloatArray:
    return np.pad(values_ND, ((0, 0), (0, 1)), constant_values=BIAS_FEATURE)


def evaluate_few_shot(
    train: tuple[NDArray[np.floating[Any]], LabelArray],
    test: tuple[NDArray[np.floating[Any]], LabelArray],
    *,
    num_classes: int,
    shots: Sequence[int],
    num_seeds: int,
) -> dict[int, dict[str, Any]]:
    """Measure the test accuracy of least squares fitted to a few images of each class.

    Args:
        train, test: features (N, D) and labels (N,) in [0, K).
        shots: numbers of images per class; a class with fewer images contributes all of them.
        num_seeds: number of seeds; they are 0 … num_seeds - 1.
    Returns: a dict from the number of shots to {"accuracy": mean over the seeds, "std": sample
        standard deviation over the seeds (None for one seed), "seeds": [accuracy of each seed]}.
    """
    results = {}
    for num_shots in shots:
        accuracies = []
        for seed in range(num_seeds):
            indices = draw_shots(train[1], num_classes, shots=num_shots, seed=seed)
            values, labels = train[0][indices], train[1][indices]
            classifier = fit_least_squares(values, labels, num_classes=num_classes)
            accuracies.append(
                float((classifier.predict_scores(test[0]).argmax(1) == test[1]).mean())
            )
        mean, std, _ = mean_std(accuracies)
        results[int(num_shots)] = {"accuracy": mean, "std": std, "seeds": accuracies}
    return results


def probe_logistic_regression(
    train: tuple[NDArray[np.floating[Any]], LabelArray],
    selection: tuple[LabelArray, tuple[NDArray[np.floating[Any]], LabelArray]],
    test: tuple[NDArray[np.floating[Any]], LabelArray],
    *,
    raw_features: bool = False,
) -> dict[str, Any]:
    """Select C on validation, fit again on all of train, and compute the test accuracy once.

    Args:
        train: features (N, D) and labels (N,).
        selection: (indices, validation): the indices of the training images to fit on while
            selecting C, and the features and labels of the validation images.
        test: features (T, D) and labels (T,).
        raw_features: True for DINOv2's protocol: raw features, and the best of DINOV2_C_GRID; False
            for standardized features, and the best of C_GRID. The smallest C wins a tie.
    Returns: a dict with keys "accuracy", "c", "grid" [{"c", "val_accuracy"}], "at_edge" (True if
        the best C is the first or the last, so a better one may be outside the grid) and
        "converged".
    Source: DINOv2 (Oquab et al. 2023), dinov2/eval/log_regression.py, for `raw_features`.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    grid = DINOV2_C_GRID if raw_features else C_GRID
    # on raw features, lbfgs may need more than 10,000 iterations
    settings: dict[str, Any] = {"solver": "newton-cg", "tol": 1e-6} if raw_features else {}

    def make_standardizer(values_ND: NDArray[np.floating[Any]]) -> Standardizer:
        return (
            Standardizer(np.zeros(1), np.ones(1)) if raw_features else Standardizer.fit(values_ND)
        )

    def fit(values_ND: FloatArray, labels_N: LabelArray, c: float, start: Any = None) -> Any:
        model = start or LogisticRegression(max_iter=MAX_ITERATIONS, warm_start=True, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # reported as "converged"
            return model.set_params(C=c).fit(values_ND, labels_N)

    indices, (val_values, val_labels) = selection
    standardizer = make_standardizer(train[0][indices])
    inputs, val_inputs = standardizer(train[0][indices]), standardizer(val_values)
    grid_rows, model = [], None
    bar = item_bar(len(grid) + 1, label="logistic regression", unit="fit")
    for c in grid:
        model = fit(inputs, train[1][indices], c, model)
        bar.update()
        grid_rows.append({"c": c, "val_accuracy": _accuracy(model.predict(val_inputs), val_labels)})
    best = max(grid_rows, key=lambda row: row["val_accuracy"])["c"]  # the first one wins a tie

    standardizer = make_standardizer(train[0])
    model = fit(standardizer(train[0]), train[1], best)
    bar.update()
    bar.close()
    return {
        "accuracy": _accuracy(model.predict(standardizer(test[0])), test[1]),
        "c": best,
        "grid": grid_rows,
        "at_edge": best in (grid[0], grid[-1]),
        "converged": bool(max(model.n_iter_) < MAX_ITERATIONS),
    }


def cross_validate(
    values_ND: NDArray[np.floating[Any]],
    labels_N: LabelArray,
    *,
    folds: int,
    groups_N: LabelArray | None = None,
) -> dict[str, Any]:
    """Cross-validate logistic regression on standardized features, in stratified folds.

    Args:
        values_ND: features.
        labels_N: class indices; each class has at least `folds` images.
        folds: number of folds, at least 2; the images are shuffled with seed 0.
        groups_N: group of each image, from 0; a group stays in one fold. None: no groups.
    Returns: a dict with keys "accuracies" (of each fold), "accuracy" (their mean), "std" (their
        sample standard deviation) and "c". All folds have the same C, the value of C_GRID with the
        highest mean accuracy, so the accuracy is slightly optimistic.
    Raises: DataError if the groups are too few for this number of folds.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    splitter = (StratifiedKFold if groups_N is None else StratifiedGroupKFold)(
        folds, shuffle=True, random_state=0
    )
    parts = []
    if groups_N is None or len(np.unique(groups_N)) >= folds:
        parts = list(splitter.split(values_ND, labels_N, groups_N))
    if not parts or any(
        len(held_out) == 0 or len(np.unique(labels_N[rest])) < 2 for rest, held_out in parts
    ):
        raise DataError(
            f"--folds {folds}: needs at least that many groups (data.group) in train, and two "
            "classes outside each fold; use fewer --folds",
            code="data.too_few_images",
        )
    search = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=MAX_ITERATIONS)),
        {"logisticregression__C": C_GRID},
        cv=parts,
        refit=False,
    )
    logger.info(f"cross-validation: {folds} folds of {len(C_GRID)} values of C")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # 1,000 iterations are enough to compare
        search.fit(np.asarray(values_ND, dtype=np.float64), labels_N)
    best = search.best_index_
    accuracies = [
        float(search.cv_results_[f"split{fold}_test_score"][best]) for fold in range(folds)
    ]
    mean, std, _ = mean_std(accuracies)
    return {"accuracies": accuracies, "accuracy": mean, "std": std, "c": C_GRID[best]}


def probe_sgd(
    train: tuple[NDArray[np.float32], LabelArray],
    selection: tuple[LabelArray, tuple[NDArray[np.float32], LabelArray]],
    test: tuple[NDArray[np.float32], LabelArray],
    *,
    feature_slices: Mapping[str, slice],
    num_classes: int,
    device: torch.device,
) -> dict[str, Any]:
    """Select learning rate and input features on validation, retrain on all of train, and test.

    Args:
        train, selection, test: same as for `probe_logistic_regression`.
        feature_slices: name and columns of each candidate input, a slice of the D features.
    Returns: a dict with keys "accuracy", "features" (a key of `feature_slices`), "lr", "grid"
        [{"features", "lr", "val_accuracy"}] and "at_edge" (True if the best rate is the first or
        the last). In a tie, the first input and the lowest rate win.
    Source: DINOv2 (Oquab et al. 2023), dinov2/eval/linear.py: its rates, momentum, weight decay
        and inputs. Differences: features are computed once, so images are not augmented; the batch
        size is 256; at least 1,000 steps.
    """
    indices, (val_values, val_labels) = selection
    grid_rows = []
    selection_train = (train[0][indices], train[1][indices])
    heads = train_sgd_heads(
        selection_train, feature_slices, LEARNING_RATES, num_classes=num_classes, device=device
    )
    for name, head in heads.items():
        predicted_TR = _predict_classes(head, val_values[:, feature_slices[name]], num_classes)
        for lr, predicted_T in zip(LEARNING_RATES, predicted_TR.T, strict=True):
            accuracy = _accuracy(predicted_T, val_labels)
            grid_rows.append({"features": name, "lr": lr, "val_accuracy": accuracy})
    # the first one wins a tie
    best: dict[str, Any] = max(grid_rows, key=lambda row: row["val_accuracy"])
    name, lr = best["features"], best["lr"]
    slices = {name: feature_slices[name]}
    head = train_sgd_heads(train, slices, (lr,), num_classes=num_classes, device=device)[name]
    predicted_T1 = _predict_classes(head, test[0][:, feature_slices[name]], num_classes)
    return {
        "accuracy": _accuracy(predicted_T1[:, 0], test[1]),
        "features": name,
        "lr": lr,
        "grid": grid_rows,
        "at_edge": lr in (LEARNING_RATES[0], LEARNING_RATES[-1]),
    }


def train_sgd_heads(
    train: tuple[NDArray[np.float32], LabelArray],
    feature_slices: Mapping[str, slice],
    learning_rates: Sequence[float],
    *,
    num_classes: int,
    device: torch.device,
) -> dict[str, nn.Linear]:
    """Train a linear classifier per feature slice and learning rate, in one pass over the data.

    The result is the same as training each classifier alone: its learning rate is used as the
    weight of its loss, which is equivalent for SGD with momentum and without weight decay.

    Args:
        train: features (N, …) and labels (N,) in [0, K).
        feature_slices: same as for `probe_sgd`.
        learning_rates: R learning rates, for a batch size of 256.
    Returns: a dict from the name of each feature slice to one layer with R * K outputs; the first K
        belong to the first learning rate.
    """
    values_ND, labels_N = train[0], torch.from_numpy(np.asarray(train[1]))
    batch_size = min(_SGD_BATCH_SIZE, len(labels_N))
    steps_per_epoch = len(labels_N) // batch_size
    num_steps = max(_SGD_EPOCHS * steps_per_epoch, MIN_SGD_STEPS)
    heads = {}
    for name, columns in feature_slices.items():
        width = columns.stop - columns.start
        heads[name] = head = nn.Linear(width, len(learning_rates) * num_classes)
        generator = torch.Generator().manual_seed(0)  # the same initial weights for all rates
        initial_KD = torch.empty(num_classes, width).normal_(std=0.01, generator=generator)
        head.weight.data = initial_KD.repeat(len(learning_rates), 1)
        nn.init.zeros_(head.bias)
        head.to(device)
    parameters = [p for head in heads.values() for p in head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    weights_R = torch.tensor(learning_rates, device=device) * (batch_size / _SGD_BATCH_SIZE)
    generator = torch.Generator().manual_seed(0)
    bar = item_bar(num_steps, label="linear heads", unit="step")
    for step in range(num_steps):
        if step % steps_per_epoch == 0:
            order_N = torch.randperm(len(labels_N), generator=generator)
        rows_B = order_N[step % steps_per_epoch * batch_size :][:batch_size]
        values_BD = torch.from_numpy(values_ND[rows_B.numpy()]).to(device)
        labels_RB = labels_N[rows_B].to(device).expand(len(learning_rates), -1)
        loss = torch.zeros((), device=device)
        for name, head in heads.items():
            # images last: a softmax over a short innermost dimension is slow on a CPU
            inputs_DB = values_BD[:, feature_slices[name]].T
            logits_RKB = torch.addmm(head.bias[:, None], head.weight, inputs_DB).view(
                len(learning_rates), num_classes, batch_size
            )
            losses_RB = cross_entropy(logits_RKB, labels_RB, reduction="none")
            loss = loss + losses_RB.mean(dim=1) @ weights_R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.update()
    bar.close()
    return heads


@torch.no_grad()
def _predict_classes(
    head: nn.Linear, values_TD: NDArray[np.float32], num_classes: int
) -> LabelArray:
    """Predict the classes (T, R) with the R heads of one input."""
    predictions: list[Tensor] = []
    for start in range(0, len(values_TD), CHUNK_ROWS):
        chunk_TD = torch.from_numpy(np.array(values_TD[start : start + CHUNK_ROWS])).to(
            head.weight.device
        )
        predictions.append(head(chunk_TD).unflatten(1, (-1, num_classes)).argmax(dim=2).cpu())
    return torch.cat(predictions).numpy()


def predict_knn(
    train: tuple[NDArray[np.floating[Any]], LabelArray],
    values_TD: NDArray[np.floating[Any]],
    *,
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> tuple[LabelArray, LabelArray]:
    """Classify by a vote of the k nearest neighbors in cosine similarity.

    Args:
        train: features (N, D) and labels (N,).
        values_TD: features to classify.
        k: number of neighbors, at most N.
        temperature: a neighbor's vote weighs exp(cosine / temperature).
    Returns: the predicted classes (T,) by weighted votes, and those by unweighted votes; the first
        class wins a tie.
    """
    keys_ND = normalize(torch.from_numpy(np.array(train[0], dtype=np.float32)), dim=1)
    labels_N = torch.from_numpy(np.asarray(train[1]))
    weighted, unweighted = [], []
    chunk_size = max(1, MAX_SIMILARITIES // len(keys_ND))
    for start in range(0, len(values_TD), chunk_size):
        chunk = torch.from_numpy(np.array(values_TD[start : start + chunk_size], dtype=np.float32))
        nearest = (normalize(chunk, dim=1) @ keys_ND.T).topk(k, dim=1)
        classes = labels_N[nearest.indices]
        votes = torch.zeros(len(chunk), num_classes, dtype=torch.float64)
        # scale the largest weight to 1: only the ratios matter
        differences = nearest.values.double() - nearest.values[:, :1].double()
        weights = (differences / temperature).exp()
        weighted.append(votes.scatter_add(1, classes, weights).argmax(1))
        unweighted.append(votes.scatter_add(1, classes, torch.ones_like(weights)).argmax(1))
    return torch.cat(weighted).numpy(), torch.cat(unweighted).numpy()


def _accuracy(predicted_T: NDArray[Any], labels_T: LabelArray) -> float:
    return float(np.mean(predicted_T == labels_T))
