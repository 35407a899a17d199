"""Classification metrics: exact for any batches and processes; equal to scikit-learn."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lockstep import run_in_lockstep
from refusals import refused
from scipy.stats import binomtest
from sklearn import metrics as sklearn_metrics
from torch.nn import functional

from finetune.errors import DataError
from finetune.evaluation.confidence_intervals import accuracy_interval, wilson_interval
from finetune.evaluation.confusion import MAX_DENSE_CLASSES, ConfusionMatrix, parse_confusion_matrix
from finetune.evaluation.metrics import (
    NUM_BINS,
    ClassificationMetrics,
    mean_std,
)


def make_sample(num: int, num_classes: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num, num_classes, generator=generator)
    return logits, torch.randint(num_classes, (num,), generator=generator)


def count_metrics(
    logits: torch.Tensor, labels: torch.Tensor, *, batch_size: int | None = None
) -> ClassificationMetrics:
    metrics = ClassificationMetrics(logits.shape[1])
    step = batch_size or max(1, len(labels))
    for start in range(0, len(labels), step):
        metrics.update(logits[start : start + step], labels[start : start + step])
    return metrics


def compute_on_ranks(first: ClassificationMetrics, second: ClassificationMetrics) -> dict[str, Any]:
    """Compute the metrics of the images of two processes."""
    ranks = (first, second)
    result: dict[str, Any] = run_in_lockstep(
        lambda rank, accelerator: ranks[rank].compute(accelerator)
    )
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_and_processes_do_not_change_the_bits(dtype: torch.dtype) -> None:
    """With N up to 25, batches of 1…4, and one or two processes, the sums are bit-identical."""
    all_logits, all_labels = make_sample(25, 7)
    all_logits = all_logits.to(dtype)
    for num, batch_size in itertools.product((1, 2, 5, 13, 25), (1, 2, 3, 4)):
        logits, labels = all_logits[:num], all_labels[:num]
        expected = count_metrics(logits, labels)
        assert expected.compute()["examples"] == num
        batches = count_metrics(logits, labels, batch_size=batch_size)
        assert batches.compute() == expected.compute()
        ranks = [count_metrics(logits[r::2], labels[r::2], batch_size=batch_size) for r in range(2)]
        assert compute_on_ranks(*ranks) == expected.compute()
        order = torch.arange(num - 1, -1, -1)
        assert (
            count_metrics(logits[order], labels[order], batch_size=batch_size).compute()
            == expected.compute()
        )


def check_class_means(
    result: dict[str, Any], labels: torch.Tensor, predicted: torch.Tensor
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about predicted classes without images
        balanced = sklearn_metrics.balanced_accuracy_score(labels, predicted)
    assert result["balanced_accuracy"] == pytest.approx(balanced, abs=1e-12)
    macro_f1 = sklearn_metrics.f1_score(labels, predicted, average="macro")
    assert result["macro_f1"] == pytest.approx(macro_f1, abs=1e-12)


def test_class_means_ignore_absent_classes() -> None:
    """Class 3 has no images, 4 no images and no predictions, 5 is never predicted."""
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 5])
    predicted = torch.tensor([0, 0, 3, 1, 2, 2, 0])
    result = count_metrics(functional.one_hot(predicted, 6).float(), labels).compute()
    check_class_means(result, labels, predicted)
    assert result["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2 + 1 + 0) / 4)


def test_metrics_match_torch_and_scikit_learn() -> None:
    logits, labels = make_sample(400, 9, seed=1)
    result = count_metrics(logits, labels, batch_size=64).compute()
    predicted = logits.argmax(1)
    # fixed-point sums keep 2**-40 of each loss
    loss = functional.cross_entropy(logits.double(), labels).item()
    assert result["loss"] == pytest.approx(loss, abs=1e-11)
    assert result["top1"] == sklearn_metrics.accuracy_score(labels, predicted)
    top5 = sklearn_metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(9))
    assert result["top5"] == top5
    assert 0 < result["top1"] < result["top5"] < 1
    check_class_means(result, labels, predicted)
    matrix = sklearn_metrics.confusion_matrix(labels, predicted, labels=range(9))
    assert result["confusion"] == matrix.tolist()
    precision, recall, f1, support = sklearn_metrics.precision_recall_fscore_support(
        labels, predicted, labels=range(9)
    )
    assert len(result["per_class"]) == 9
    for index, row in enumerate(result["per_class"]):
        assert row["support"] == support[index]
        assert row["precision"] == pytest.approx(precision[index], rel=1e-14)
        assert row["recall"] == pytest.approx(recall[index], rel=1e-14)
        assert row["f1"] == pytest.approx(f1[index], rel=1e-14)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_ece_matches_its_definition() -> None:
    logits, labels = make_sample(300, 4, seed=2)
    max_probability, predicted = logits.double().softmax(1).max(1)
    confidence, correct = max_probability.numpy(), (predicted == labels).numpy()
    gaps = 0.0
    for index in range(NUM_BINS):
        in_bin = (confidence > index / NUM_BINS) & (confidence <= (index + 1) / NUM_BINS)
        if in_bin.any():
            gap = abs(correct[in_bin].mean() - confidence[in_bin].mean())
            gaps += in_bin.sum() / len(labels) * gap
    assert 0.05 < gaps < 1
    assert count_metrics(logits, labels).compute()["ece"] == pytest.approx(gaps, abs=1e-11)


def test_metrics_computed_by_hand() -> None:
    rows = [[0.0, 0.0], [0.0, 0.0], [math.log(3.0), 0.0], [0.0, math.log(3.0)]]
    result = count_metrics(
        torch.tensor(rows, dtype=torch.float64), torch.tensor([0, 1, 0, 0])
    ).compute()
    expected = (2 * math.log(2) + math.log(4 / 3) + math.log(4)) / 4
    assert result["loss"] == pytest.approx(expected, abs=1e-11)
    assert result["top1"] == 0.5
    assert result["confusion"] == [[2, 1], [1, 0]]
    # two at confidence 0.5, one correct; two at 0.75, one correct
    assert result["ece"] == pytest.approx((0 + 2 * 0.25) / 4, abs=1e-11)


def test_confidence_of_one_is_in_the_last_bin() -> None:
    confidence = 0.97
    logits = torch.tensor([[100.0, 0.0], [math.log(confidence / (1 - confidence)), 0.0]])
    result = count_metrics(logits, torch.tensor([1, 0])).compute()
    # one bin: mean confidence (1 + 0.97) / 2, half correct; float32 logits give 0.97 to 1e-7
    assert result["ece"] == pytest.approx((1 + confidence) / 2 - 0.5, abs=1e-7)


def test_zero_logits_have_loss_ln_k_and_predict_the_first_class() -> None:
    for num_classes in (2, 10, 1000):
        labels = torch.arange(num_classes)
        result = count_metrics(torch.zeros(num_classes, num_classes), labels).compute()
        assert result["loss"] == pytest.approx(math.log(num_classes), abs=1e-11)
        assert result["top1"] == 1 / num_classes
        assert result["top5"] == min(5, num_classes) / num_classes


def test_ties_are_broken_by_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    top1 = {
        label: count_metrics(logits, torch.tensor([label])).compute()["top1"] for label in range(7)
    }
    assert top1 == {0: 0, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0}
    top5 = {
        label: count_metrics(logits, torch.tensor([label])).compute()["top5"] for label in range(7)
    }
    assert top5 == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 0, 6: 0}


def test_top5_is_one_for_fewer_than_five_classes() -> None:
    logits, labels = make_sample(50, 3)
    result = count_metrics(logits, labels).compute()
    assert result["top5"] == 1.0 > result["top1"]


def test_class_without_images_or_predictions_has_null_metrics() -> None:
    rows = count_metrics(torch.eye(4)[[0, 0, 1]], torch.tensor([0, 0, 2])).compute()["per_class"]
    assert rows[0] == {"support": 2, "recall": 1.0, "precision": 1.0, "f1": 1.0}
    assert rows[1] == {"support": 0, "recall": None, "precision": 0.0, "f1": 0.0}
    assert rows[2] == {"support": 1, "recall": 0.0, "precision": None, "f1": 0.0}
    assert rows[3] == {"support": 0, "recall": None, "precision": None, "f1": None}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("column", [0, 1])
def test_non_finite_or_huge_outputs_are_refused(bad: float, column: int) -> None:
    logits, labels = make_sample(6, 3)
    labels[4] = 0
    logits[4, column] = bad
    logits[4, 2] = -bad  # a loss of 2e30 for 1e30 at either position
    metrics = count_metrics(logits, labels, batch_size=2)
    if bad == 1e30 and column == 0:  # certain and correct: a loss of 0
        assert metrics.compute()["examples"] == 6
        return
    with refused("diverged.outputs", "1 of 6"):
        metrics.compute()


def test_negative_infinity_for_another_class_is_refused() -> None:
    """The loss alone would be finite, because -inf for another class is a probability of 0."""
    with refused("diverged.outputs", "1 of 1"):
        count_metrics(torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([1])).compute()


@pytest.mark.parametrize("bad", [-1, 3, -100])
def test_label_out_of_range_is_refused(bad: int) -> None:
    logits, labels = make_sample(6, 3)
    labels[1] = bad
    with refused("data.wrong_labels", "1 labels", "0…2"):
        count_metrics(logits, labels).compute()


def test_no_images_is_an_error_but_an_empty_rank_is_not() -> None:
    logits, labels = make_sample(1, 3)
    empty = ClassificationMetrics(3)
    empty.update(logits[:0], labels[:0])
    with pytest.raises(DataError) as caught:
        empty.compute()
    assert caught.value.code == "data.empty"
    assert compute_on_ranks(empty, count_metrics(logits, labels))["examples"] == 1


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        ClassificationMetrics(3).update(torch.zeros(2, 4), torch.zeros(2))
    with pytest.raises(ValueError, match="do not fit"):
        ClassificationMetrics(3).update(torch.zeros(2, 3), torch.zeros(1))


def test_compute_does_not_change_the_counts() -> None:
    logits, labels = make_sample(5, 3)
    metrics = count_metrics(logits, labels)
    assert compute_on_ranks(metrics, count_metrics(logits, labels))["examples"] == 10
    assert metrics.compute()["examples"] == 5
    metrics.update(logits, labels)
    assert metrics.compute()["examples"] == 10


def test_sum_of_many_large_losses_is_exact() -> None:
    """Tests the carry of the fixed-point sum: large fractions, and a million losses."""
    metrics = ClassificationMetrics(2)
    logits = torch.tensor([[0.0, 1000.75]]).double().expand(50_000, 2)
    labels = torch.zeros(50_000, dtype=torch.int64)
    for _ in range(20):
        metrics.update(logits, labels)
    assert metrics.compute()["loss"] == 1000.75


def test_update_does_not_sync_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a device-to-host copy")

    logits, labels = make_sample(6, 7)
    metrics = ClassificationMetrics(7)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, fail)
        metrics.update(logits, labels)
        with pytest.raises(AssertionError, match="device-to-host"):
            metrics.compute()
    assert metrics.compute()["examples"] == 6


@pytest.mark.parametrize("num_classes", [MAX_DENSE_CLASSES, MAX_DENSE_CLASSES + 1, 21843])
def test_dense_and_sparse_confusion_match_scikit_learn(num_classes: int) -> None:
    """Dense up to 1,000 classes, sparse beyond; `parse_confusion_matrix` reads both."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (60,), generator=generator) * (num_classes // 7)
    logits = torch.zeros(60, num_classes)
    predicted = torch.randint(7, (60,), generator=generator) * (num_classes // 7)
    logits[torch.arange(60), predicted] = 5.0
    result = count_metrics(logits, labels, batch_size=7).compute()
    halves = [count_metrics(logits[r::2], labels[r::2], batch_size=7) for r in range(2)]
    assert compute_on_ranks(*halves) == result
    expected = sklearn_metrics.confusion_matrix(
        labels, predicted, labels=torch.arange(7) * (num_classes // 7)
    )
    assert isinstance(result["confusion"], dict if num_classes > MAX_DENSE_CLASSES else list)
    matrix = parse_confusion_matrix(json.loads(json.dumps(result)))
    assert matrix is not None
    assert matrix.num_classes == num_classes == len(result["per_class"])
    classes = np.arange(7) * (num_classes // 7)
    assert np.array_equal(matrix.to_dense(classes), expected)
    assert matrix.count_M.sum() == result["examples"] == 60
    assert result["top1"] == np.trace(expected) / 60
    assert [result["per_class"][k]["support"] for k in classes] == expected.sum(1).tolist()
    # no other class has images
    assert sum(row["support"] for row in result["per_class"]) == 60


def test_most_confused_pairs_and_classes_come_first() -> None:
    rows = np.diag([9, 1, 1, 1, 8])
    rows[3, 1], rows[1, 2], rows[2, 1] = 5, 2, 2
    matrix = ConfusionMatrix.from_dense(rows.tolist())
    assert matrix.most_confused_pairs(9) == [(3, 1, 5), (1, 2, 2), (2, 1, 2)]
    assert matrix.most_confused_pairs(1) == [(3, 1, 5)]
    # of the other classes, 0 has the most images
    assert matrix.select_classes(4).tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert matrix.select_classes(2).tolist() == [1, 3]
    assert matrix.select_classes(9).tolist() == [0, 1, 2, 3, 4]
    assert matrix.to_dense(np.array([1, 3])).tolist() == [[1, 0], [5, 1]]
    assert matrix.to_dense().tolist() == rows.tolist()
    assert matrix.to_json() == rows.tolist()
    assert matrix.num_predicted_K.tolist() == rows.sum(0).tolist()


_PAIRS = {"true": [0, 1], "predicted": [1, 1], "count": [2, 3]}


@pytest.mark.parametrize(
    "confusion",
    [
        *(None, 5, [[1, 2]], [[1, None], [0, 1]], [[True]], [["3"]], [[-1]], {}),
        *({**_PAIRS, "predicted": [1]}, {**_PAIRS, "true": [0, 2]}, {**_PAIRS, "count": [2, 1.5]}),
        {**_PAIRS, "true": "01"},
    ],
    ids=str,
)
def test_invalid_confusion_is_none(confusion: object) -> None:
    per_class = [{}, {}]
    assert parse_confusion_matrix({"confusion": _PAIRS, "per_class": per_class}) is not None
    assert parse_confusion_matrix({"confusion": confusion, "per_class": per_class}) is None
    assert parse_confusion_matrix({"confusion": _PAIRS}) is None


def test_mean_std() -> None:
    values = [0.95, 0.97, 0.96]
    mean, std, num = mean_std(values)
    assert mean == pytest.approx(0.96, rel=1e-15)
    assert num == 3
    assert std == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert mean_std(iter([0.5])) == (0.5, None, 1)
    assert mean_std([2, 2, 2]) == (2.0, 0.0, 3)
    with pytest.raises(ValueError, match="at least one"):
        mean_std([])


@pytest.mark.parametrize("correct, total", [(0, 1), (1, 1), (3, 10), (359, 400), (0, 12)])
def test_wilson_interval_inverts_the_score_test(correct: int, total: int) -> None:
    """Wilson's definition: at each end p, |accuracy - p| is 1.96 standard errors of p."""
    low, high = wilson_interval(correct, total)
    observed, z = correct / total, 1.959963984540054
    assert 0 <= low <= observed <= high <= 1
    for end in (low, high):
        if end != observed:  # at 0 and 1 one end equals the accuracy
            assert abs(observed - end) == pytest.approx(z * math.sqrt(end * (1 - end) / total))


@pytest.mark.parametrize("total", [1, 2, 97, 999])
def test_wilson_interval_matches_scipy(total: int) -> None:
    for correct in {*range(0, total, 1 + total // 50), total}:
        ends = binomtest(correct, total).proportion_ci(confidence_level=0.95, method="wilson")
        assert wilson_interval(correct, total) == (ends.low, ends.high)


def test_wilson_interval_does_not_import_scipy() -> None:
    """Every run computes intervals at its end, and importing scipy.stats takes 0.5 s."""
    code = "from finetune.evaluation.confidence_intervals import wilson_interval; "
    code += "wilson_interval(3, 9); import sys; "
    code += "assert not {'scipy', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_accuracy_interval_only_below_1000_images() -> None:
    assert accuracy_interval(0.8, 400) == wilson_interval(320, 400)
    assert accuracy_interval(0.1, 999) is not None
    assert accuracy_interval(0.8, 1000) is None
    assert accuracy_interval(0.8, 0) is None
