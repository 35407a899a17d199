"""Classes that overlap, are the same, or are too small."""

from __future__ import annotations

import numpy as np

from finetune.doctor.class_overlap import find_class_problems


def test_class_problems() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), [400, 40, 200, 200, 300, 4])
    logits = rng.normal(0, 0.5, (len(labels), 6))
    logits[np.arange(len(labels)), labels] += 4
    # 0 and 1 are the same class, and 0 is the more frequent one
    same = labels < 2
    logits[same, :2] = rng.normal([3.0, 0.7], 0.5, (same.sum(), 2))
    # a third of the images of 2 and 3 are taken for the other
    swapped = np.isin(labels, [2, 3]) & (rng.random(len(labels)) < 0.36)
    logits[swapped, 2], logits[swapped, 3] = logits[swapped, 3], logits[swapped, 2]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    problems = find_class_problems(probabilities, labels, list("abcdef"))
    kinds = {tuple(problem["classes"]): problem["kind"] for problem in problems}
    assert kinds == {("a", "b"): "same", ("c", "d"): "overlap", ("f",): "too_small"}
    by_kind = {problem["kind"]: problem for problem in problems}
    assert by_kind["overlap"]["images"] == swapped.sum()
    assert by_kind["too_small"] == {
        "kind": "too_small", "classes": ["f"], "score": 0.6, "images": 4,
    }  # fmt: skip
    scores = [problem["score"] for problem in problems]
    assert scores == sorted(scores, reverse=True)


def test_multilabel_and_empty_classes() -> None:
    indicators = np.zeros((30, 2), np.uint8)
    indicators[:25, 0] = 1
    found = find_class_problems(np.full((30, 2), 0.5), indicators, ["a", "b"])
    assert [(each["kind"], each["classes"], each["score"]) for each in found] == [
        ("too_small", ["b"], 1.0)
    ]
