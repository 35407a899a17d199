"""Trials of training only the classifier, and of training all weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logs import logged

from finetune.commands import freeze_trial
from finetune.commands.freeze_trial import compare_frozen_and_full, find_reason_to_freeze
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.trial import TrialEvaluation, run_trial


def evaluation(correct: float, loss: float) -> TrialEvaluation:
    """Return an evaluation of 100 images, a fraction of which is correct."""
    hits = (np.arange(100) < 100 * correct).astype(float)
    losses = loss + 0.1 * np.sin(np.arange(100))
    return TrialEvaluation(losses, hits, {"weight": loss})


@pytest.fixture
def run_fake_trials(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that compares two trials with given evaluations.

    It returns the result, and the evaluations of all weights that were reached.
    """

    def compare(
        head: TrialEvaluation | type[BaseException],
        full: Sequence[TrialEvaluation | type[BaseException]],
    ) -> tuple[bool, list[Any]]:
        reached: list[Any] = []

        def trial(recipe: Any, *, label: str, init_from: Any = None) -> Iterator[TrialEvaluation]:
            assert label.startswith(f"trial {1 if recipe == 'frozen' else 2} of 2")
            for each in [head] if recipe == "frozen" else full:
                if recipe == "full":
                    assert init_from is head.state
                    reached.append(each)
                if isinstance(each, type):
                    raise each
                yield each

        monkeypatch.setattr(freeze_trial, "run_trial", trial)
        is_full, reason = compare_frozen_and_full("frozen", "full", size="32 px")
        assert reason
        return is_full, reached

    return compare


HEAD = evaluation(0.6, 1.0)


@pytest.mark.parametrize(
    "full, expected",
    [
        (evaluation(0.59, 0.5), True),  # a single image does not count
        (evaluation(0.9, 0.5), True),
        (evaluation(0.55, 0.5), False),  # a lower loss alone is not enough
        (evaluation(0.7, 1.1), False),  # nor is a higher accuracy
        (evaluation(0.6, 1.0), False),
    ],
)
def test_all_weights_must_improve_the_loss_and_keep_the_accuracy(
    full: TrialEvaluation, expected: bool, run_fake_trials: Any
) -> None:
    assert run_fake_trials(HEAD, [full]) == (expected, [full])


def test_a_lower_accuracy_needs_a_clearly_lower_loss(run_fake_trials: Any) -> None:
    full = evaluation(0.59, 0.9)
    noise_N = np.random.default_rng(0).permutation(np.linspace(-1, 1, 100))
    assert run_fake_trials(HEAD, [full])[0]
    noisy = full._replace(loss_N=full.loss_N + noise_N)
    assert not run_fake_trials(HEAD, [noisy])[0]


def test_a_trial_that_is_clearly_worse_is_abandoned(run_fake_trials: Any) -> None:
    worse = evaluation(0.4, 2.0)
    perhaps_worse = evaluation(0.59, 2.0)
    better = evaluation(0.9, 0.1)
    assert run_fake_trials(HEAD, [worse, better]) == (False, [worse])
    assert run_fake_trials(HEAD, [perhaps_worse, better]) == (True, [perhaps_worse, better])


def test_no_second_trial_if_nothing_is_left_to_gain(run_fake_trials: Any) -> None:
    assert run_fake_trials(evaluation(1.0, 0.1), []) == (False, [])
    assert run_fake_trials(evaluation(0.97, 0.1), []) == (False, [])


@pytest.mark.parametrize("informative, is_enough", [("last", True), ("earlier", False)])
def test_last_layers_suffice_if_earlier_ones_only_add_noise(
    informative: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(model: Any, loader: Any, *_: object, **__: object) -> np.ndarray:
        width = model.num_features
        values = np.random.default_rng(0).normal(size=(len(loader.labels), 9 * width))
        first = 0 if informative == "last" else width
        values[:, first : first + 10] += 3 * np.eye(10)[loader.labels]
        return values.astype(np.float32)

    assert find_reason_to_freeze(recipe("model.freeze=backbone")) is None  # of digits, measured
    monkeypatch.setattr(freeze_trial, "compute_features", compute)
    assert (find_reason_to_freeze(recipe("model.freeze=backbone")) is not None) is is_enough


def test_layers_are_compared_on_whole_groups(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def record(values_ND: np.ndarray, labels: np.ndarray, groups: Any = None) -> float:
        compared.append(groups)
        return 0.5

    monkeypatch.setattr(freeze_trial, "leave_one_out_accuracy", record)
    source = [f"data.source=folder:{image_folder}", "data.num_train=null"]
    find_reason_to_freeze(recipe("model.freeze=backbone", "data.group=(\\w+-[0-3])", *source))
    assert len(compared) == 2
    assert all("red-3" in groups for groups in compared)


def test_after_ctrl_c_the_classifier_alone_is_trained(run_fake_trials: Any) -> None:
    assert run_fake_trials(HEAD, [KeyboardInterrupt])[0] is False
    assert run_fake_trials(KeyboardInterrupt, [])[0] is False


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(
        """
model: {name: "embedded:vit_nano"}
data: {source: "embedded:digits", num_train: 120, val_fraction: 0.2, train: resize, batch_size: 24}
optim: {lr: 3e-3, steps: 20}
run: {threads: 1, eval_every: 20}
""",
        overrides=overrides,
    )


def test_trials_start_from_the_trained_classifier() -> None:
    with logged() as messages:
        (head,) = run_trial(recipe("model.freeze=backbone"), label="head")
        evaluations = run_trial(
            recipe("optim.lr=1e-12", "run.eval_every=5"), label="all", init_from=head.state
        )
        first, *_, last = evaluations
    assert len(head.loss_N) == len(last.loss_N) == 20
    assert head.correct_N.mean() > 0.5
    np.testing.assert_allclose(first.loss_N, head.loss_N, rtol=0.05)  # nothing was trained
    assert not any("val" in message for message in messages)  # no lines like those of a run
