"""Classifiers on features: equal to the reference, or to plain formulas where there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from finetune.evaluation import linear_probe as readout
from finetune.evaluation.linear_probe import (
    BIAS,
    L2,
    Whitening,
    draw_shots,
    few_shot,
    fit_least_squares,
    logistic_regression,
    neighbours,
    sgd_heads,
    train_heads,
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


def blobs(num: int, width: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points around a centre for each class."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    labels = np.arange(num) % classes
    values = 3.0 + 2.0 * centres[labels] + 1.5 * generator.normal(size=(num, width))
    return values.astype(np.float32), labels.astype(np.int64)


class TestFewShotAgainstBigVision:
    @pytest.mark.parametrize("case", CASES)
    def test_scores_and_predictions(self, oracle: dict[str, Any], case: str) -> None:
        one = {name: oracle[f"{case}/{name}"] for name in ("x_train", "x_test", "pred", "acc")}
        labels = oracle[f"{case}/y_train"].astype(np.int64)
        num_classes = int(oracle[f"{case}/num_classes"])
        assert len(oracle["l2_grid"]) == 8
        for place, l2 in enumerate(oracle["l2_grid"].tolist()):
            fitted = fit_least_squares(one["x_train"], labels, num_classes=num_classes, l2=l2)
            scores = fitted.scores(one["x_test"])
            # float64 on both sides; the worst measured is 2e-12, of scores up to 16
            np.testing.assert_allclose(
                scores, oracle[f"{case}/score_f64"][place], rtol=0, atol=1e-11
            )
            assert (scores.argmax(1) == oracle[f"{case}/pred_f64"][place]).all()
            if l2 < L2:
                continue  # the reference's own float32 solution is not reliable there
            assert (scores.argmax(1) == one["pred"][place]).all()
            right = (scores.argmax(1) == oracle[f"{case}/y_test"]).mean()
            assert right == pytest.approx(one["acc"][place], abs=1e-6)
            # what float32 costs the reference: the worst measured is 4e-5
            np.testing.assert_allclose(scores, oracle[f"{case}/score"][place], rtol=0, atol=1e-4)
            np.testing.assert_allclose(
                fitted.whitening.std_D, oracle[f"{case}/std"][0], rtol=1e-5, atol=1e-10
            )

    def test_the_shots_and_their_accuracies(self, oracle: dict[str, Any]) -> None:
        train, test = (
            (oracle[f"eval/x_{part}"], oracle[f"eval/y_{part}"].astype(np.int64))
            for part in ("train", "test")
        )
        shots, num_classes = (1, 5, 10, 25), int(oracle["eval/num_classes"])
        found = few_shot(train, test, num_classes=num_classes, shots=shots, seeds=3)
        for seed in range(3):
            for count in shots:
                places = draw_shots(train[1], num_classes, shots=count, seed=seed)
                assert places.tolist() == oracle[f"eval/idx/seed{seed}/shots{count}"].tolist()
                expected = float(oracle[f"eval/acc/seed{seed}/shots{count}"])
                assert found[count]["seeds"][seed] == pytest.approx(expected, abs=1e-6)
        for row in found.values():
            assert row["accuracy"] == pytest.approx(np.mean(row["seeds"]), abs=1e-12)
            assert row["std"] == pytest.approx(np.std(row["seeds"], ddof=1), abs=1e-12)

    def test_the_constants_are_the_protocols(self, oracle: dict[str, Any]) -> None:
        assert float(oracle["bias_constant"]) == BIAS
        assert L2 == 1024.0
        assert L2 in oracle["l2_grid"]


@pytest.mark.parametrize("num, width", [(12, 30), (31, 30), (30, 30), (90, 30)])
def test_fewer_images_than_features_or_more_the_minimum_is_the_same(num: int, width: int) -> None:
    values, labels = blobs(num, width, 3)
    fitted = fit_least_squares(values, labels, num_classes=3)
    exact = values.astype(np.float64)
    whitened = (exact - exact.mean(0)) / (exact.std(0) + 1e-5)
    inputs = np.hstack([whitened, np.full((num, 1), 100.0)])
    targets = np.where(labels[:, None] == np.arange(3), 1.0, -1.0)
    # at the minimum of |inputs w - targets|² + l2 |w|² the gradient is zero, bias included
    gradient = inputs.T @ (inputs @ fitted.weights - targets) + 1024 * fitted.weights
    assert np.abs(gradient).max() < 1e-8
    over_images = inputs.T @ np.linalg.solve(inputs @ inputs.T + 1024 * np.eye(num), targets)
    np.testing.assert_allclose(fitted.weights, over_images, rtol=0, atol=1e-13)


def test_many_images_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = fit_least_squares(*blobs(30, 5, 3), num_classes=3)
    values, _ = blobs(25, 5, 3, seed=1)
    whole = fitted.scores(values)
    monkeypatch.setattr(readout, "_ROWS", 7)
    assert fitted.scores(values).shape == (25, 3)
    np.testing.assert_allclose(fitted.scores(values), whole, rtol=0, atol=1e-14)


def test_more_shots_contain_the_fewer_and_a_class_without_images_changes_nothing() -> None:
    labels = np.repeat(np.arange(4), [9, 4, 0, 7])
    few, many = (draw_shots(labels, 4, shots=count, seed=5) for count in (2, 5))
    assert set(few) < set(many)
    assert np.bincount(labels[many], minlength=4).tolist() == [5, 4, 0, 5]
    assert draw_shots(labels, 4, shots=2, seed=6).tolist() != few.tolist()
    without = np.where(labels == 3, 2, labels)
    assert draw_shots(without, 3, shots=5, seed=5).tolist() == many.tolist()
    values = np.random.default_rng(0).normal(size=(20, 6))
    with_it, without_it = (
        few_shot((values, y), (values, y), num_classes=k, shots=[3], seeds=2)
        for y, k in ((labels, 4), (without, 3))
    )
    assert with_it == without_it


def test_one_seed_has_no_spread() -> None:
    data = blobs(40, 6, 2)
    assert few_shot(data, data, num_classes=2, shots=[3], seeds=1)[3]["std"] is None


class TestLogisticRegression:
    def test_it_is_scikit_learns_on_standardised_features(self) -> None:
        from sklearn.linear_model import LogisticRegression

        train, val, test = blobs(300, 8, 6), blobs(90, 8, 6, seed=1), blobs(200, 8, 6, seed=2)
        found = logistic_regression(train, (np.arange(200), val), test)
        assert [row["c"] for row in found["grid"]] == list(readout.GRID)
        best = max(row["val_accuracy"] for row in found["grid"])
        first = next(row["c"] for row in found["grid"] if row["val_accuracy"] == best)
        assert found["c"] == first
        assert found["converged"]
        assert found["at_edge"] == (found["c"] in (readout.GRID[0], readout.GRID[-1]))

        exact = train[0].astype(np.float64)
        mean, std = exact.mean(0), exact.std(0) + 1e-5
        plain = LogisticRegression(C=found["c"], max_iter=1000, tol=1e-8)
        plain.fit((exact - mean) / std, train[1])
        expected = plain.score((test[0] - mean) / std, test[1])
        assert found["accuracy"] == pytest.approx(expected, abs=0.006)  # one image of 200
        assert 0.3 < found["accuracy"] < 1

    def test_what_it_is_measured_on_chooses_nothing(self) -> None:
        train, val, test = blobs(120, 8, 3), blobs(60, 8, 3, seed=1), blobs(60, 8, 3, seed=2)
        wrong = (test[0], (test[1] + 1) % 3)
        told, mistold = (
            logistic_regression(train, (np.arange(90), val), one) for one in (test, wrong)
        )
        assert told["grid"] == mistold["grid"]
        assert told["c"] == mistold["c"]
        assert told["accuracy"] > 0.8 > 0.3 > mistold["accuracy"]

    def test_the_figure_is_of_a_fit_on_all_of_train(self) -> None:
        # the places to choose on know nothing of the last class
        train, test = blobs(90, 8, 3), blobs(90, 8, 3, seed=2)
        places = np.flatnonzero(train[1] < 2)
        found = logistic_regression(train, (places, train), test)
        assert max(row["val_accuracy"] for row in found["grid"]) < 0.7
        assert found["accuracy"] > 0.9

    def test_a_fit_that_stops_early_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readout, "_MAX_ITERATIONS", 2)
        data = blobs(90, 8, 3)
        assert not logistic_regression(data, (np.arange(60), data), data)["converged"]


class TestManyHeads:
    COLUMNS = {"narrow": slice(2, 6), "wide": slice(0, 8)}  # noqa: RUF012
    RATES = (1e-3, 0.1, 0.02)

    @pytest.fixture(autouse=True)
    def few_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readout, "_LEAST_STEPS", 60)

    def trained(self, train: Any, columns: Any, rates: Any) -> dict[str, nn.Linear]:
        return train_heads(train, columns, rates, num_classes=3, device=torch.device("cpu"))

    def test_each_becomes_what_torchs_sgd_makes_of_it_alone(self) -> None:
        values, labels = train = blobs(300, 8, 3)
        together = self.trained(train, self.COLUMNS, self.RATES)
        steps = 60  # 256 of 300 images make one step an epoch
        for name, part in self.COLUMNS.items():
            weights_RKD = together[name].weight.detach().unflatten(0, (len(self.RATES), 3))
            biases_RK = together[name].bias.detach().unflatten(0, (len(self.RATES), 3))
            for rate, weight, bias in zip(self.RATES, weights_RKD, biases_RK, strict=True):
                alone = nn.Linear(part.stop - part.start, 3)
                nn.init.zeros_(alone.bias)
                nn.init.normal_(alone.weight, std=0.01, generator=torch.Generator().manual_seed(0))
                optimizer = torch.optim.SGD(alone.parameters(), lr=rate, momentum=0.9)
                draws = torch.Generator().manual_seed(0)
                for step in range(steps):
                    rows = torch.randperm(300, generator=draws)[:256]
                    optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / 60)) / 2
                    logits = alone(torch.from_numpy(values[:, part])[rows])
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(logits, torch.from_numpy(labels)[rows]).backward()
                    optimizer.step()
                torch.testing.assert_close(weight, alone.weight.detach(), atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(bias, alone.bias.detach(), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(weights_RKD[0], weights_RKD[1], atol=0.1), "the rates differ"

    def test_one_that_diverges_leaves_the_others_alone(self) -> None:
        train = blobs(90, 8, 3)
        both = self.trained((train[0] * 1e18, train[1]), self.COLUMNS, (1e3, 0.0))["wide"]
        first, second = both.weight.detach().unflatten(0, (2, 3))
        assert not first.isfinite().all()
        assert second.isfinite().all()

    def test_the_best_on_validation_is_read_once_on_test(self) -> None:
        train, val, test = blobs(300, 8, 3), blobs(90, 8, 3, seed=1), blobs(90, 8, 3, seed=2)
        wrong = (test[0], (test[1] + 1) % 3)
        settings = {"columns": self.COLUMNS, "num_classes": 3, "device": torch.device("cpu")}
        told, mistold = (
            sgd_heads(train, (np.arange(250), val), t, **settings) for t in (test, wrong)
        )
        assert told["grid"] == mistold["grid"]
        assert len(told["grid"]) == 2 * 13
        best = max(row["val_accuracy"] for row in told["grid"])
        first = next(row for row in told["grid"] if row["val_accuracy"] == best)
        assert (first["features"], first["lr"]) == (told["features"], told["lr"])
        # trained again, alone and on all of train
        part = {told["features"]: self.COLUMNS[told["features"]]}
        head = self.trained(train, part, (told["lr"],))[told["features"]]
        with torch.no_grad():
            predicted = head(torch.from_numpy(test[0][:, part[told["features"]]])).argmax(1).numpy()
        assert told["accuracy"] == (predicted == test[1]).mean()
        assert told["accuracy"] > 0.8 > 0.3 > mistold["accuracy"]


@pytest.mark.parametrize("k", [1, 5, 20])
def test_neighbours_are_scikit_learns(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    monkeypatch.setattr(readout, "_SIMILARITIES", 1000)  # in parts
    train, test = blobs(150, 8, 5), blobs(70, 8, 5, seed=1)
    weighted, plain = neighbours(train, test[0], num_classes=5, k=k)
    kinds = ("uniform", lambda distance: np.exp((1 - distance) / 0.07))
    for mine, weights in zip((plain, weighted), kinds, strict=True):
        other = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=weights)
        expected = other.fit(*train).predict(test[0])
        assert mine.tolist() == expected.tolist()
    assert 0.3 < (plain == test[1]).mean() < 1


def test_a_close_neighbour_outweighs_many_far_ones() -> None:
    train = (np.array([[1, 0], [0, 1], [0.1, 1]], dtype=np.float32), np.array([0, 1, 1]))
    weighted, plain = neighbours(train, np.array([[1, 0.1]], dtype=np.float32), num_classes=2, k=3)
    assert (weighted.tolist(), plain.tolist()) == ([0], [1])


def test_whitening_uses_the_population_and_survives_a_constant_feature() -> None:
    values = np.array([[1, 7], [3, 7]], dtype=np.float32)
    whitening = Whitening.of(values)
    assert whitening.std_D.tolist() == [1 + 1e-5, 1e-5]
    assert whitening(values).tolist() == [[-1 / (1 + 1e-5), 0], [1 / (1 + 1e-5), 0]]
