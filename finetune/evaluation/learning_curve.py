"""Accuracy against the number of training images: would more images help?

A linear classifier on frozen features is fitted to growing subsets of the training images. A curve
through the error rates predicts what twice as many images would bring.

Source: Hestness et al. 2017, "Deep Learning Scaling is Predictable, Empirically", for error rates
that follow a power law above a floor. Five sizes determine the exponent badly, so the prediction
uses -1/2, and its interval exponents from -1 to -0.2. On CIFAR-10, the interval contained the
accuracy of the next doubling in 95 % of the cases.
"""

# N training images, T test images, D width, S sizes, R draws

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.evaluation.linear_probe import fit_least_squares
from finetune.progress import item_bar

__all__ = ["format_gain", "measure_learning_curve"]

MAX_SIZES = 5  # each half as large as the next one
_MIN_SIZES = 3
_NUM_DRAWS = 3
_MIN_IMAGES_PER_CLASS = 2  # on average, in the smallest subset
_L2_PER_FEATURE = 2.0
_EXPONENT, _EXPONENT_RANGE = -0.5, (-1.0, -0.2)
_NUM_RESAMPLES = 1000


def measure_learning_curve(
    train: tuple[NDArray[np.floating[Any]], NDArray[np.int64]],
    test: tuple[NDArray[np.floating[Any]], NDArray[np.int64]],
    *,
    num_classes: int,
) -> dict[str, Any] | None:
    """Measure test accuracy on up to five training set sizes and extrapolate to twice the images.

    Each size is measured on three random subsets of the training images, the draws. The model
    accuracy = ceiling - scale * size ** exponent is fitted to the measured accuracies.

    Args:
        train: features (N, D) and labels (N,) in [0, K).
        test: features (T, D) and labels (T,).
        num_classes: number of classes, K.
    Returns: None with too few images, else a dict with these keys. "sizes": numbers of training
        images, the last one N. "accuracies": test accuracy of each draw, for each size. "fitted":
        fitted accuracy at each size, and at 2 N. "gain": a dict with "images", 2 N; "value", the
        growth of the fitted accuracy from N to 2 N; and "low" and "high", its 95 % interval, from
        resampled draws and test images and various exponents.
    """
    values_ND, labels_N = train
    num_images, num_test = len(labels_N), len(test[1])
    sizes = [num_images >> halvings for halvings in reversed(range(MAX_SIZES))]
    sizes = [size for size in sizes if size >= _MIN_IMAGES_PER_CLASS * num_classes]
    if len(sizes) < _MIN_SIZES:
        return None
    correct_SRT = np.empty((len(sizes), _NUM_DRAWS, num_test), dtype=bool)
    with item_bar((len(sizes) - 1) * _NUM_DRAWS + 1, label="learning curve", unit="fit") as bar:
        for draw in range(_NUM_DRAWS):
            order_N = _stratified_order(labels_N, seed=draw)
            for row, size in enumerate(sizes):
                if size == num_images and draw > 0:  # the same images as in the first draw
                    correct_SRT[row, draw] = correct_SRT[row, 0]
                    continue
                classifier = fit_least_squares(
                    values_ND[order_N[:size]],
                    labels_N[order_N[:size]],
                    num_classes=num_classes,
                    l2=_L2_PER_FEATURE * values_ND.shape[1],
                )
                predicted_T = classifier.predict_scores(test[0]).argmax(axis=1)
                correct_SRT[row, draw] = predicted_T == test[1]
                bar.update()
    fitted = _fit_curve(sizes, correct_SRT.mean(axis=(1, 2)), _EXPONENT)
    generator = np.random.default_rng(0)
    gains = []
    for _ in range(_NUM_RESAMPLES):
        draws = correct_SRT[:, generator.integers(_NUM_DRAWS, size=_NUM_DRAWS)].mean(axis=1)
        images = generator.integers(num_test, size=num_test)
        exponent = generator.uniform(*_EXPONENT_RANGE)
        resampled = _fit_curve(sizes, draws[:, images].mean(axis=1), exponent)
        gains.append(resampled[-1] - resampled[-2])
    low, high = np.quantile(gains, [0.025, 0.975]).tolist()
    gain = {"images": 2 * num_images, "value": fitted[-1] - fitted[-2], "low": low, "high": high}
    accuracies = correct_SRT.mean(axis=2).tolist()
    return {"sizes": sizes, "accuracies": accuracies, "fitted": fitted, "gain": gain}


def format_gain(curve: dict[str, Any]) -> str:
    """Format what twice as many training images would bring, as one sentence."""
    gain = curve["gain"]
    points = f"{100 * gain['value']:.1f} points"
    interval = f"95 % interval {100 * gain['low']:.1f} to {100 * gain['high']:.1f}"
    return (
        f"With {gain['images']:,} training images, twice as many, a linear classifier on these "
        f"features would gain about {points} of accuracy ({interval})."
    )


def _stratified_order(labels_N: NDArray[np.int64], *, seed: int) -> NDArray[np.int64]:
    """Return a random order in which the first images have about the class shares of all."""
    shuffled_N = np.random.default_rng(seed).permutation(len(labels_N))
    quantile_N = np.empty(len(labels_N))  # position of an image among those of its class
    for label in np.unique(labels_N):
        members = shuffled_N[labels_N[shuffled_N] == label]
        quantile_N[members] = (np.arange(len(members)) + 0.5) / len(members)
    return shuffled_N[np.argsort(quantile_N[shuffled_N], kind="stable")]


def _fit_curve(sizes: list[int], accuracies_S: NDArray[np.float64], exponent: float) -> list[float]:
    """Fit accuracy = ceiling - scale * size ** exponent with scale >= 0 by least squares.

    Returns: the fitted accuracy at each size, and at twice the last one.
    """
    inputs = np.power([*sizes, 2.0 * sizes[-1]], exponent)
    slope, ceiling = np.polyfit(inputs[:-1], accuracies_S, 1)
    if slope > 0:
        slope, ceiling = 0.0, float(accuracies_S.mean())
    return [float(accuracy) for accuracy in np.clip(ceiling + slope * inputs, 0, 1)]
