"""Probes on features, compared with reference implementations or plain formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from finetune.evaluation import linear_probe as readout
from finetune.evaluation.linear_probe import (
    BIAS_FEATURE,
    L2_WEIGHT,
    Standardizer,
    cross_validate,
    draw_shots,
    evaluate_few_shot,
    fit_least_squares,
    predict_knn,
    probe_logistic_regression,
    probe_sgd,
    train_sgd_heads,
)

CASES = [
    "primal_5x10_d32",
    "dual_5x3_d32",
    "dual_5x1_d32",
    "constcol_offset_4x20_d16",
    "square_5x10_d49",
    "many_20x5_d64",
]


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, Any]:
    with np.load(shared / "oracles" / "oracle_fewshot.npz") as archive:
        return dict(archive)


def make_blobs(num: int, width: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return points around one center per class, and their labels."""
    generator = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, width))
    labels = np.arange(num) % classes
    values = 3.0 + 2.0 * centers[labels] + 1.5 * generator.normal(size=(num, width))
    return values.astype(np.float32), labels.astype(np.int64)


class TestFewShotAgainstBigVision:
    @pytest.mark.parametrize("case", CASES)
    def test_scores_and_predictions_match(self, oracle: dict[str, Any], case: str) -> None:
        expected = {name: oracle[f"{case}/{name}"] for name in ("x_train", "x_test", "pred", "acc")}
        labels = oracle[f"{case}/y_train"].astype(np.int64)
        num_classes = int(oracle[f"{case}/num_classes"])
        assert len(oracle["l2_grid"]) == 8
        for index, l2 in enumerate(oracle["l2_grid"].tolist()):
            fitted = fit_least_squares(expected["x_train"], labels, num_classes=num_classes, l2=l2)
            scores = fitted.predict_scores(expected["x_test"])
            # both sides use float64; the largest error is 2e-12 for scores up to 16
            np.testing.assert_allclose(
                scores, oracle[f"{case}/score_f64"][index], rtol=0, atol=1e-11
            )
            assert (scores.argmax(1) == oracle[f"{case}/pred_f64"][index]).all()
            if l2 < L2_WEIGHT:
                continue  # the reference's float32 solution is unreliable there
            assert (scores.argmax(1) == expected["pred"][index]).all()
            accuracy = (scores.argmax(1) == oracle[f"{case}/y_test"]).mean()
            assert accuracy == pytest.approx(expected["acc"][index], abs=1e-6)
            # the reference's float32 error: at most 4e-5
            np.testing.assert_allclose(scores, oracle[f"{case}/score"][index], rtol=0, atol=1e-4)
            np.testing.assert_allclose(
                fitted.standardizer.std_D, oracle[f"{case}/std"][0], rtol=1e-5, atol=1e-10
            )

    def test_shots_and_accuracies_match(self, oracle: dict[str, Any]) -> None:
        train, test = (
            (oracle[f"eval/x_{part}"], oracle[f"eval/y_{part}"].astype(np.int64))
            for part in ("train", "test")
        )
        shots, num_classes = (1, 5, 10, 25), int(oracle["eval/num_classes"])
        results = evaluate_few_shot(train, test, num_classes=num_classes, shots=shots, num_seeds=3)
        for seed in range(3):
            for num_shots in shots:
                indices = draw_shots(train[1], num_classes, shots=num_shots, seed=seed)
                assert indices.tolist() == oracle[f"eval/idx/seed{seed}/shots{num_shots}"].tolist()
                expected = float(oracle[f"eval/acc/seed{seed}/shots{num_shots}"])
                assert results[num_shots]["seeds"][seed] == pytest.approx(expected, abs=1e-6)
        for row in results.values():
            assert row["accuracy"] == pytest.approx(np.mean(row["seeds"]), abs=1e-12)
            assert row["std"] == pytest.approx(np.std(row["seeds"], ddof=1), abs=1e-12)

    def test_constants_match(self, oracle: dict[str, Any]) -> None:
        assert float(oracle["bias_constant"]) == BIAS_FEATURE
        assert L2_WEIGHT == 1024.0
        assert L2_WEIGHT in oracle["l2_grid"]


@pytest.mark.parametrize("num, width", [(12, 30), (31, 30), (30, 30), (90, 30)])
def test_primal_and_dual_least_squares_agree(num: int, width: int) -> None:
    values, labels = make_blobs(num, width, 3)
    fitted = fit_least_squares(values, labels, num_classes=3)
    values64 = values.astype(np.float64)
    whitened = (values64 - values64.mean(0)) / (values64.std(0) + 1e-5)
    inputs = np.hstack([whitened, np.full((num, 1), 100.0)])
    targets = np.where(labels[:, None] == np.arange(3), 1.0, -1.0)
    # at the minimum of |inputs w - targets|² + l2 |w|² the gradient is zero, bias included
    gradient = inputs.T @ (inputs @ fitted.weights - targets) + 1024 * fitted.weights
    assert np.abs(gradient).max() < 1e-8
    dual_weights = inputs.T @ np.linalg.solve(inputs @ inputs.T + 1024 * np.eye(num), targets)
    np.testing.assert_allclose(fitted.weights, dual_weights, rtol=0, atol=1e-13)


def test_scores_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = fit_least_squares(*make_blobs(30, 5, 3), num_classes=3)
    values, _ = make_blobs(25, 5, 3, seed=1)
    expected = fitted.predict_scores(values)
    monkeypatch.setattr(readout, "CHUNK_ROWS", 7)
    assert fitted.predict_scores(values).shape == (25, 3)
    np.testing.assert_allclose(fitted.predict_scores(values), expected, rtol=0, atol=1e-14)


def test_draw_shots_is_nested_and_ignores_empty_classes() -> None:
    labels = np.repeat(np.arange(4), [9, 4, 0, 7])
    few, many = (draw_shots(labels, 4, shots=num_shots, seed=5) for num_shots in (2, 5))
    assert set(few) < set(many)
    assert np.bincount(labels[many], minlength=4).tolist() == [5, 4, 0, 5]
    assert draw_shots(labels, 4, shots=2, seed=6).tolist() != few.tolist()
    labels_of_three = np.where(labels == 3, 2, labels)
    assert draw_shots(labels_of_three, 3, shots=5, seed=5).tolist() == many.tolist()
    values = np.random.default_rng(0).normal(size=(20, 6))
    four_classes, three_classes = (
        evaluate_few_shot((values, y), (values, y), num_classes=k, shots=[3], num_seeds=2)
        for y, k in ((labels, 4), (labels_of_three, 3))
    )
    assert four_classes == three_classes


def test_std_needs_several_seeds() -> None:
    data = make_blobs(40, 6, 2)
    assert evaluate_few_shot(data, data, num_classes=2, shots=[3], num_seeds=1)[3]["std"] is None


class TestLogisticRegression:
    def test_accuracy_matches_scikit_learn_on_standardized_features(self) -> None:
        from sklearn.linear_model import LogisticRegression

        train, val, test = (
            make_blobs(300, 8, 6),
            make_blobs(90, 8, 6, seed=1),
            make_blobs(200, 8, 6, seed=2),
        )
        result = probe_logistic_regression(train, (np.arange(200), val), test)
        assert [row["c"] for row in result["grid"]] == list(readout.C_GRID)
        best = max(row["val_accuracy"] for row in result["grid"])
        first = next(row["c"] for row in result["grid"] if row["val_accuracy"] == best)
        assert result["c"] == first
        assert result["converged"]
        assert result["at_edge"] == (result["c"] in (readout.C_GRID[0], readout.C_GRID[-1]))

        values64 = train[0].astype(np.float64)
        mean, std = values64.mean(0), values64.std(0) + 1e-5
        reference = LogisticRegression(C=result["c"], max_iter=1000, tol=1e-8)
        reference.fit((values64 - mean) / std, train[1])
        expected = reference.score((test[0] - mean) / std, test[1])
        assert result["accuracy"] == pytest.approx(expected, abs=0.006)  # one image of 200
        assert 0.3 < result["accuracy"] < 1

    def test_test_labels_do_not_affect_the_selection(self) -> None:
        train, val, test = (
            make_blobs(120, 8, 3),
            make_blobs(60, 8, 3, seed=1),
            make_blobs(60, 8, 3, seed=2),
        )
        wrong_labels = (test[0], (test[1] + 1) % 3)
        result, wrong_result = (
            probe_logistic_regression(train, (np.arange(90), val), test_set)
            for test_set in (test, wrong_labels)
        )
        assert result["grid"] == wrong_result["grid"]
        assert result["c"] == wrong_result["c"]
        assert result["accuracy"] > 0.8 > 0.3 > wrong_result["accuracy"]

    def test_reported_accuracy_is_of_a_refit_on_all_training_images(self) -> None:
        # the rows that select C contain no image of the last class
        train, test = make_blobs(90, 8, 3), make_blobs(90, 8, 3, seed=2)
        indices = np.flatnonzero(train[1] < 2)
        result = probe_logistic_regression(train, (indices, train), test)
        assert max(row["val_accuracy"] for row in result["grid"]) < 0.7
        assert result["accuracy"] > 0.9

    def test_early_stop_is_reported_as_not_converged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readout, "MAX_ITERATIONS", 2)
        data = make_blobs(90, 8, 3)
        assert not probe_logistic_regression(data, (np.arange(60), data), data)["converged"]


class TestDinov2LogisticRegression:
    def test_equals_the_protocol_in_scikit_learn(self) -> None:
        """Raw features with a mean, 45 values of C, a refit on all of train."""
        from sklearn.linear_model import LogisticRegression

        train, val, test = (
            make_blobs(120, 4, 4),
            make_blobs(60, 4, 4, seed=1),
            make_blobs(200, 4, 4, seed=2),
        )

        def fit(values: np.ndarray, labels: np.ndarray, c: float) -> LogisticRegression:
            settings = {"tol": 1e-10, "max_iter": 10_000}
            return LogisticRegression(C=c, **settings).fit(values.astype(np.float64), labels)

        grid = 10 ** torch.linspace(-6, 5, 45, dtype=torch.float64).numpy()
        result = probe_logistic_regression(train, (np.arange(100), val), test, raw_features=True)
        expected = [fit(train[0][:100], train[1][:100], c).score(*val) for c in grid[::4]]
        np.testing.assert_allclose([row["c"] for row in result["grid"]], grid, rtol=1e-12)
        actual = [row["val_accuracy"] for row in result["grid"]]
        np.testing.assert_allclose(actual[::4], expected, atol=1 / 60 + 1e-9)  # one image
        assert np.mean(np.array(actual[::4]) == expected) > 0.9
        assert result["c"] == result["grid"][int(np.argmax(actual))]["c"]
        assert result["accuracy"] == fit(*train, result["c"]).score(*test)
        assert result["converged"]
        # standardized features are another protocol
        assert result["c"] not in readout.C_GRID


def test_cross_validation_equals_a_loop_over_folds() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    values, labels = make_blobs(120, 8, 4)
    result = cross_validate(values, labels, folds=3)
    accuracies = []
    for train, test in StratifiedKFold(3, shuffle=True, random_state=0).split(values, labels):
        mean, std = values[train].mean(0), values[train].std(0)
        model = LogisticRegression(C=result["c"], max_iter=1000)
        model.fit((values[train] - mean) / std, labels[train])
        accuracies.append(model.score((values[test] - mean) / std, labels[test]))
    assert result["accuracies"] == pytest.approx(accuracies, abs=1 / 40 + 1e-9)  # one image
    assert result["accuracy"] == pytest.approx(np.mean(result["accuracies"]))
    assert result["std"] == pytest.approx(np.std(result["accuracies"], ddof=1))
    assert 0.3 < result["accuracy"] < 1


def test_cross_validation_keeps_groups_together() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 5)
    labels = np.repeat(rng.permutation(np.arange(40) % 2), 5)  # unrelated to the features
    values = rng.normal(size=(40, 20))[groups] + 0.01 * rng.normal(size=(200, 20))
    assert cross_validate(values, labels, folds=4)["accuracy"] > 0.8
    assert cross_validate(values, labels, folds=4, groups_N=groups)["accuracy"] < 0.65
    for folds, few_groups in ((4, np.arange(200) % 3), (2, labels)):
        with refused("data.too_few_images", "--folds", "data.group"):
            cross_validate(values, labels, folds=folds, groups_N=few_groups)


class TestSgdHeads:
    COLUMNS = {"narrow": slice(2, 6), "wide": slice(0, 8)}  # noqa: RUF012
    LEARNING_RATES = (1e-3, 0.1, 0.02)

    @pytest.fixture(autouse=True)
    def few_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readout, "MIN_SGD_STEPS", 60)

    def train_heads(self, train: Any, columns: Any, rates: Any) -> dict[str, nn.Linear]:
        return train_sgd_heads(train, columns, rates, num_classes=3, device=torch.device("cpu"))

    def test_heads_trained_together_match_torch_sgd(self) -> None:
        values, labels = train = make_blobs(300, 8, 3)
        heads = self.train_heads(train, self.COLUMNS, self.LEARNING_RATES)
        steps = 60  # with batches of 256 of 300 images, an epoch is one step
        for name, columns in self.COLUMNS.items():
            weights_RKD = heads[name].weight.detach().unflatten(0, (len(self.LEARNING_RATES), 3))
            biases_RK = heads[name].bias.detach().unflatten(0, (len(self.LEARNING_RATES), 3))
            for lr, weight, bias in zip(self.LEARNING_RATES, weights_RKD, biases_RK, strict=True):
                alone = nn.Linear(columns.stop - columns.start, 3)
                nn.init.zeros_(alone.bias)
                nn.init.normal_(alone.weight, std=0.01, generator=torch.Generator().manual_seed(0))
                optimizer = torch.optim.SGD(alone.parameters(), lr=lr, momentum=0.9)
                generator = torch.Generator().manual_seed(0)
                for step in range(steps):
                    rows = torch.randperm(300, generator=generator)[:256]
                    optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / 60)) / 2
                    logits = alone(torch.from_numpy(values[:, columns])[rows])
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(logits, torch.from_numpy(labels)[rows]).backward()
                    optimizer.step()
                torch.testing.assert_close(weight, alone.weight.detach(), atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(bias, alone.bias.detach(), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(weights_RKD[0], weights_RKD[1], atol=0.1), "the rates differ"

    def test_diverging_head_does_not_affect_the_others(self) -> None:
        train = make_blobs(90, 8, 3)
        both = self.train_heads((train[0] * 1e18, train[1]), self.COLUMNS, (1e3, 0.0))["wide"]
        first, second = both.weight.detach().unflatten(0, (2, 3))
        assert not first.isfinite().all()
        assert second.isfinite().all()

    def test_best_head_on_validation_is_retrained_and_tested(self) -> None:
        train, val, test = (
            make_blobs(300, 8, 3),
            make_blobs(90, 8, 3, seed=1),
            make_blobs(90, 8, 3, seed=2),
        )
        wrong_labels = (test[0], (test[1] + 1) % 3)
        settings = {"feature_slices": self.COLUMNS, "num_classes": 3, "device": torch.device("cpu")}
        result, wrong_result = (
            probe_sgd(train, (np.arange(250), val), test_set, **settings)
            for test_set in (test, wrong_labels)
        )
        assert result["grid"] == wrong_result["grid"]
        assert len(result["grid"]) == 2 * 13
        best = max(row["val_accuracy"] for row in result["grid"])
        first = next(row for row in result["grid"] if row["val_accuracy"] == best)
        assert (first["features"], first["lr"]) == (result["features"], result["lr"])
        # retrained alone on all training images
        columns = {result["features"]: self.COLUMNS[result["features"]]}
        head = self.train_heads(train, columns, (result["lr"],))[result["features"]]
        with torch.no_grad():
            predicted = (
                head(torch.from_numpy(test[0][:, columns[result["features"]]])).argmax(1).numpy()
            )
        assert result["accuracy"] == (predicted == test[1]).mean()
        assert result["accuracy"] > 0.8 > 0.3 > wrong_result["accuracy"]


@pytest.mark.parametrize("k", [1, 5, 20])
def test_knn_matches_scikit_learn(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    monkeypatch.setattr(readout, "MAX_SIMILARITIES", 1000)  # several chunks
    train, test = make_blobs(150, 8, 5), make_blobs(70, 8, 5, seed=1)
    weighted, plain = predict_knn(train, test[0], num_classes=5, k=k)
    weightings = ("uniform", lambda distance: np.exp((1 - distance) / 0.07))
    for predicted, weights in zip((plain, weighted), weightings, strict=True):
        reference = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=weights)
        expected = reference.fit(*train).predict(test[0])
        assert predicted.tolist() == expected.tolist()
    assert 0.3 < (plain == test[1]).mean() < 1


def test_weighted_knn_prefers_one_close_neighbor() -> None:
    train = (np.array([[1, 0], [0, 1], [0.1, 1]], dtype=np.float32), np.array([0, 1, 1]))
    weighted, plain = predict_knn(train, np.array([[1, 0.1]], dtype=np.float32), num_classes=2, k=3)
    assert (weighted.tolist(), plain.tolist()) == ([0], [1])


def test_standardizer_uses_the_population_std_and_handles_constant_features() -> None:
    values = np.array([[1, 7], [3, 7]], dtype=np.float32)
    whitening = Standardizer.fit(values)
    assert whitening.std_D.tolist() == [1 + 1e-5, 1e-5]
    assert whitening(values).tolist() == [[-1 / (1 + 1e-5), 0], [1 / (1 + 1e-5), 0]]
