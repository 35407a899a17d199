"""Counts: exact whatever the split over batches and processes; figures equal to scikit-learn's."""

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
from refusals import refused
from scipy.stats import binomtest
from sklearn import metrics as sklearn_metrics
from torch.nn import functional

from finetune.errors import DataError
from finetune.evaluation.confusion import DENSE_CLASSES, Confusion, read_confusion
from finetune.evaluation.intervals import interval, wilson
from finetune.evaluation.metrics import (
    NUM_BINS,
    Counts,
    mean_std,
)


def sample(num: int, num_classes: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num, num_classes, generator=generator)
    return logits, torch.randint(num_classes, (num,), generator=generator)


def count(logits: torch.Tensor, labels: torch.Tensor, *, batch: int | None = None) -> Counts:
    counts = Counts(logits.shape[1])
    step = batch or max(1, len(labels))
    for start in range(0, len(labels), step):
        counts.add(logits[start : start + step], labels[start : start + step])
    return counts


def merged(first: Counts, second: Counts) -> Counts:
    """Add the counts of two processes; a gather fills up the one with fewer images."""
    pairs = torch.cat([first.pairs(), torch.full((3,), -1), second.pairs()])
    return Counts(first.num_classes).load(first.tensor() + second.tensor(), pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_split_gives_the_same_bits(dtype: torch.dtype) -> None:
    """N = 1…25, batches of 1…4, one process or two: the sums are equal, not only close."""
    all_logits, all_labels = sample(25, 7)
    all_logits = all_logits.to(dtype)
    compared = 0
    for num, batch in itertools.product(range(1, 26), range(1, 5)):
        logits, labels = all_logits[:num], all_labels[:num]
        whole = count(logits, labels)
        assert whole.result()["examples"] == num
        assert torch.equal(count(logits, labels, batch=batch).tensor(), whole.tensor())
        ranks = [count(logits[r::2], labels[r::2], batch=batch) for r in range(2)]
        assert merged(*ranks).result() == whole.result()
        order = torch.arange(num - 1, -1, -1)
        assert count(logits[order], labels[order], batch=batch).result() == whole.result()
        compared += 1
    assert compared == 100


def _check_class_means(
    result: dict[str, Any], labels: torch.Tensor, predicted: torch.Tensor
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and have no images
        balanced = sklearn_metrics.balanced_accuracy_score(labels, predicted)
    assert result["balanced_accuracy"] == pytest.approx(balanced, abs=1e-12)
    macro = sklearn_metrics.f1_score(labels, predicted, average="macro")
    assert result["macro_f1"] == pytest.approx(macro, abs=1e-12)


def test_means_over_classes_leave_out_those_that_do_not_occur() -> None:
    """Class 3 has no images, 4 no images and no predictions, 5 is never predicted."""
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 5])
    predicted = torch.tensor([0, 0, 3, 1, 2, 2, 0])
    result = count(functional.one_hot(predicted, 6).float(), labels).result()
    _check_class_means(result, labels, predicted)
    assert result["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2 + 1 + 0) / 4)


def test_result_agrees_with_other_libraries() -> None:
    logits, labels = sample(400, 9, seed=1)
    result = count(logits, labels, batch=64).result()
    predicted = logits.argmax(1)
    # the fixed point keeps 2**-40 of each loss
    loss = functional.cross_entropy(logits.double(), labels).item()
    assert result["loss"] == pytest.approx(loss, abs=1e-11)
    assert result["top1"] == sklearn_metrics.accuracy_score(labels, predicted)
    top5 = sklearn_metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(9))
    assert result["top5"] == top5
    assert 0 < result["top1"] < result["top5"] < 1
    _check_class_means(result, labels, predicted)
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


def test_calibration_error_by_its_definition() -> None:
    logits, labels = sample(300, 4, seed=2)
    best, predicted = logits.double().softmax(1).max(1)
    confidence, correct = best.numpy(), (predicted == labels).numpy()
    gaps = 0.0
    for index in range(NUM_BINS):
        inside = (confidence > index / NUM_BINS) & (confidence <= (index + 1) / NUM_BINS)
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            gaps += inside.sum() / len(labels) * gap
    assert 0.05 < gaps < 1
    assert count(logits, labels).result()["ece"] == pytest.approx(gaps, abs=1e-11)


def test_figures_worked_by_hand() -> None:
    rows = [[0.0, 0.0], [0.0, 0.0], [math.log(3.0), 0.0], [0.0, math.log(3.0)]]
    result = count(torch.tensor(rows, dtype=torch.float64), torch.tensor([0, 1, 0, 0])).result()
    expected = (2 * math.log(2) + math.log(4 / 3) + math.log(4)) / 4
    assert result["loss"] == pytest.approx(expected, abs=1e-11)
    assert result["top1"] == 0.5
    assert result["confusion"] == [[2, 1], [1, 0]]
    # two at 0.5 with one right, two at 0.75 with one right
    assert result["ece"] == pytest.approx((0 + 2 * 0.25) / 4, abs=1e-11)


def test_certainty_is_in_the_last_calibration_bin() -> None:
    confidence = 0.97
    logits = torch.tensor([[100.0, 0.0], [math.log(confidence / (1 - confidence)), 0.0]])
    result = count(logits, torch.tensor([1, 0])).result()
    # one bin: (1 + 0.97) / 2 confident, half right; float32 logits give 0.97 to 1e-7
    assert result["ece"] == pytest.approx((1 + confidence) / 2 - 0.5, abs=1e-7)


def test_a_zero_head_has_loss_ln_k_and_predicts_the_first_class() -> None:
    for num_classes in (2, 10, 1000):
        labels = torch.arange(num_classes)
        result = count(torch.zeros(num_classes, num_classes), labels).result()
        assert result["loss"] == pytest.approx(math.log(num_classes), abs=1e-11)
        assert result["top1"] == 1 / num_classes
        assert result["top5"] == min(5, num_classes) / num_classes


def test_ties_go_to_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    top1 = {label: count(logits, torch.tensor([label])).result()["top1"] for label in range(7)}
    assert top1 == {0: 0, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0}
    top5 = {label: count(logits, torch.tensor([label])).result()["top5"] for label in range(7)}
    assert top5 == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 0, 6: 0}


def test_fewer_than_five_classes_have_top5_one() -> None:
    logits, labels = sample(50, 3)
    result = count(logits, labels).result()
    assert result["top5"] == 1.0 > result["top1"]


def test_a_class_without_examples_or_predictions_has_no_figures() -> None:
    rows = count(torch.eye(4)[[0, 0, 1]], torch.tensor([0, 0, 2])).result()["per_class"]
    assert rows[0] == {"support": 2, "recall": 1.0, "precision": 1.0, "f1": 1.0}
    assert rows[1] == {"support": 0, "recall": None, "precision": 0.0, "f1": 0.0}
    assert rows[2] == {"support": 1, "recall": 0.0, "precision": None, "f1": 0.0}
    assert rows[3] == {"support": 0, "recall": None, "precision": None, "f1": None}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("place", [0, 1])
def test_outputs_that_are_not_finite_are_an_error_and_never_an_accuracy(
    bad: float, place: int
) -> None:
    logits, labels = sample(6, 3)
    labels[4] = 0
    logits[4, place] = bad
    logits[4, 2] = -bad  # so that 1e30 is a loss of 2e30 whichever place
    counts = count(logits, labels, batch=2)
    if bad == 1e30 and place == 0:  # certain and right: a loss of 0
        assert counts.result()["examples"] == 6
        return
    with refused("diverged.outputs", "1 of 6"):
        counts.result()


def test_one_infinite_output_beside_the_label_is_an_error_too() -> None:
    """The loss would be finite: -inf for another class is a probability of 0."""
    with refused("diverged.outputs", "1 of 1"):
        count(torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([1])).result()


@pytest.mark.parametrize("bad", [-1, 3, -100])
def test_a_label_out_of_range_is_an_error(bad: int) -> None:
    logits, labels = sample(6, 3)
    labels[1] = bad
    with refused("data.wrong_labels", "1 labels", "0…2"):
        count(logits, labels).result()


def test_no_examples_is_an_error_but_an_empty_rank_is_not() -> None:
    logits, labels = sample(1, 3)
    empty = Counts(3)
    empty.add(logits[:0], labels[:0])
    with pytest.raises(DataError) as caught:
        empty.result()
    assert caught.value.code == "data.empty"
    assert merged(empty, count(logits, labels)).result()["examples"] == 1


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Counts(3).add(torch.zeros(2, 4), torch.zeros(2))
    with pytest.raises(ValueError, match="do not fit"):
        Counts(3).add(torch.zeros(2, 3), torch.zeros(1))
    with pytest.raises(ValueError, match="int64"):
        Counts(3).load(Counts(3).tensor().double(), Counts(3).pairs())


def test_load_copies() -> None:
    logits, labels = sample(5, 3)
    source = count(logits, labels)
    copy = Counts(3).load(source.tensor(), source.pairs())
    copy.add(logits, labels)
    assert source.result()["examples"] == 5
    assert copy.result()["examples"] == 10


def test_many_large_losses_keep_their_fractions() -> None:
    """The carry: fractions summed far past one unit, and a million whole losses."""
    counts = Counts(2)
    logits = torch.tensor([[0.0, 1000.75]]).double().expand(50_000, 2)
    labels = torch.zeros(50_000, dtype=torch.int64)
    for _ in range(20):
        counts.add(logits, labels)
    assert counts.result()["loss"] == 1000.75
    assert counts.tensor().min() >= 0


def test_add_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*args: object, **kwargs: object) -> None:
        raise AssertionError("a device-to-host copy")

    logits, labels = sample(6, 7)
    counts = Counts(7)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, copied)
        counts.add(logits, labels)
        with pytest.raises(AssertionError, match="device-to-host"):
            counts.result()
    assert counts.result()["examples"] == 6


@pytest.mark.parametrize("num_classes", [DENSE_CLASSES, DENSE_CLASSES + 1, 21843])
def test_the_confusion_of_many_classes_is_what_scikit_learn_counts(num_classes: int) -> None:
    """A matrix up to 1,000 classes, the pairs that occur beyond; both are read alike."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (60,), generator=generator) * (num_classes // 7)
    logits = torch.zeros(60, num_classes)
    predicted = torch.randint(7, (60,), generator=generator) * (num_classes // 7)
    logits[torch.arange(60), predicted] = 5.0
    result = count(logits, labels, batch=7).result()
    halves = [count(logits[r::2], labels[r::2], batch=7) for r in range(2)]
    assert merged(*halves).result() == result
    sparse = sklearn_metrics.confusion_matrix(
        labels, predicted, labels=torch.arange(7) * (num_classes // 7)
    )
    assert isinstance(result["confusion"], dict if num_classes > DENSE_CLASSES else list)
    read = read_confusion(json.loads(json.dumps(result)))
    assert read is not None
    assert read.num_classes == num_classes == len(result["per_class"])
    shown = np.arange(7) * (num_classes // 7)
    assert np.array_equal(read.dense(shown), sparse)
    assert read.count_M.sum() == result["examples"] == 60
    assert result["top1"] == np.trace(sparse) / 60
    assert [result["per_class"][k]["support"] for k in shown] == sparse.sum(1).tolist()
    # and no row of another class
    assert sum(row["support"] for row in result["per_class"]) == 60


def test_the_most_confused_pairs_and_their_classes_come_first() -> None:
    rows = np.diag([9, 1, 1, 1, 8])
    rows[3, 1], rows[1, 2], rows[2, 1] = 5, 2, 2
    counts = Confusion.of(rows.tolist())
    assert counts.most_confused(9) == [(3, 1, 5), (1, 2, 2), (2, 1, 2)]
    assert counts.most_confused(1) == [(3, 1, 5)]
    assert counts.classes_to_show(4).tolist() == [0, 1, 2, 3]  # 0 has the most images of the others
    assert counts.classes_to_show(2).tolist() == [1, 3]
    assert counts.classes_to_show(9).tolist() == [0, 1, 2, 3, 4]
    assert counts.dense(np.array([1, 3])).tolist() == [[1, 0], [5, 1]]
    assert counts.dense().tolist() == rows.tolist()
    assert counts.to_json() == rows.tolist()
    assert counts.predicted_K.tolist() == rows.sum(0).tolist()


_PAIRS = {"true": [0, 1], "said": [1, 1], "count": [2, 3]}


@pytest.mark.parametrize(
    "confusion",
    [
        *(None, 5, [[1, 2]], [[1, None], [0, 1]], [[True]], [["3"]], [[-1]], {}),
        *({**_PAIRS, "said": [1]}, {**_PAIRS, "true": [0, 2]}, {**_PAIRS, "count": [2, 1.5]}),
        {**_PAIRS, "true": "01"},
    ],
    ids=str,
)
def test_a_damaged_confusion_is_none(confusion: object) -> None:
    per_class = [{}, {}]
    assert read_confusion({"confusion": _PAIRS, "per_class": per_class}) is not None
    assert read_confusion({"confusion": confusion, "per_class": per_class}) is None
    assert read_confusion({"confusion": _PAIRS}) is None


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
def test_the_interval_is_the_inverse_of_the_score_test(correct: int, total: int) -> None:
    """At each end p, |share - p| is 1.96 standard errors of p itself: Wilson's definition."""
    low, high = wilson(correct, total)
    share, z = correct / total, 1.959963984540054
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if end != share:  # at 0 and 1 one end is the share itself
            assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / total))


@pytest.mark.parametrize("total", [1, 2, 30, 97, 145, 999])
def test_the_interval_is_that_of_scipy(total: int) -> None:
    for correct in range(total + 1):
        ends = binomtest(correct, total).proportion_ci(confidence_level=0.95, method="wilson")
        assert wilson(correct, total) == (ends.low, ends.high)


def test_the_interval_needs_no_scipy() -> None:
    """It is in the last second of each run, and scipy.stats takes half a second to load."""
    words = "from finetune.evaluation.intervals import wilson; wilson(3, 9); import sys; "
    words += "assert not {'scipy', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", words], check=True)


def test_only_an_accuracy_on_few_images_has_an_interval() -> None:
    assert interval(0.8, 400) == wilson(320, 400)
    assert interval(0.1, 999) is not None
    assert interval(0.8, 1000) is None
    assert interval(0.8, 0) is None
