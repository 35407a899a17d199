"""SIGKILL at any time: the run continues from a verified checkpoint to the same weights.

Each trial kills a run with everything on that is random or has state. Its number seeds the time of
the kill: before a step or file operation, in the middle of a file, or at a random time. The plots
and the report are replaced by small files.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked_runs import (
    SMALL_OVERRIDES,
    KillPoints,
    check_all_checkpoints,
    check_child_success,
    child_exit_code,
    count_kill_points,
    fork_process,
    read_train_losses,
    read_weights,
    run_in_child,
    run_ranks,
    start_ranks,
    temporary_files,
    tiny_recipe,
    train_until_kill_point,
    wait_for_ranks,
)

from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
PROMISE = "it resumes from the newest verified checkpoint to bit-identical final weights"


class ReferenceRun(NamedTuple):
    """Results of an uninterrupted run."""

    weights: bytes
    losses: list[float]
    num_kill_points: int
    seconds: float


@pytest.fixture(scope="module")
def reference(no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(RECIPE, out)  # in this process, so that the children have all imports
    started = time.monotonic()
    num_kill_points = count_kill_points(RECIPE, out.with_name("counted"))
    assert num_kill_points > 100, "too few: each save has many file operations"
    assert read_weights(out.with_name("counted")) == read_weights(out)
    return ReferenceRun(
        read_weights(out), read_train_losses(out), num_kill_points, time.monotonic() - started
    )


def finish(out: Path) -> None:
    check_child_success(run_in_child(lambda: train(RECIPE, out, resume=True)))


def differences(out: Path, reference: ReferenceRun) -> list[str]:
    """Return the names of the parts that differ; pytest would compare the values line by line."""
    same = {
        "weights": read_weights(out) == reference.weights,
        "losses": read_train_losses(out) == reference.losses,
    }
    return [name for name, is_same in same.items() if not is_same]


def check_same_result(out: Path, reference: ReferenceRun) -> None:
    assert differences(out, reference) == []
    assert json.loads((out / "run.json").read_text())["status"] == "done"
    assert check_all_checkpoints(out)[-1] == 8
    assert temporary_files(out) == []


@pytest.mark.parametrize("trial", range(75))
def test_kill_at_a_kill_point(trial: int, reference: ReferenceRun, tmp_path: Path, fault) -> None:
    rng, out = random.Random(trial), tmp_path / "run"
    kill_at = rng.randrange(1, reference.num_kill_points + 1)
    assert child_exit_code(lambda: train_until_kill_point(kill_at, RECIPE, out)) == -signal.SIGKILL
    for _ in range(trial % 3):  # kill again during or after the resume
        next_kill_at = rng.randrange(1, reference.num_kill_points // 2)
        assert child_exit_code(lambda n=next_kill_at: train_until_kill_point(n, RECIPE, out)) in (
            0,
            -signal.SIGKILL,
        )
    finish(out)
    check_same_result(out, reference)
    fault("SIGKILL of one process", PROMISE, "killed before and in file operations, steps, writes")


@pytest.mark.parametrize("trial", range(25))
def test_kill_at_a_random_time(trial: int, reference: ReferenceRun, tmp_path: Path, fault) -> None:
    rng, out = random.Random(1000 + trial), tmp_path / "run"
    with tempfile.TemporaryFile() as output:
        child = fork_process(lambda: train(RECIPE, out, resume=True), output.fileno())
        time.sleep(rng.uniform(0.1, 1) * reference.seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finish(out)
    check_same_result(out, reference)
    fault("SIGKILL of one process", PROMISE, "killed at random times")


@pytest.mark.parametrize("trial", range(5))
def test_control_without_keyed_augmentation(
    trial: int, reference: ReferenceRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault
) -> None:
    import numpy as np

    def random_keys(seed: int, epoch: int, indices: Any) -> Any:
        return np.random.default_rng(os.getpid()).integers(2**63, size=len(indices)).astype("u8")

    monkeypatch.setattr("finetune.data.sampler.sample_keys", random_keys)
    out = tmp_path / "run"
    kill_at = random.Random(trial).randrange(
        reference.num_kill_points // 4, reference.num_kill_points // 2
    )
    assert child_exit_code(lambda: train_until_kill_point(kill_at, RECIPE, out)) == -signal.SIGKILL
    finish(out)
    assert "weights" in differences(out, reference)
    fault(
        "SIGKILL, without keyed augmentation",
        "the control: the same test must fail",
        "the weights differ",
    )


# Two processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference_of_two(tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    out = tmp_path_factory.mktemp("two") / "run"
    counts = [out.with_name(f"moments-{rank}") for rank in (0, 1)]

    def train_and_count(rank: int) -> None:
        kill_points = KillPoints().install()
        train(RECIPE, out)
        counts[rank].write_text(str(kill_points.count))

    started = time.monotonic()
    codes, output = run_ranks([lambda: train_and_count(0), lambda: train_and_count(1)])
    assert codes == [0, 0], output
    assert json.loads((out / "run.json").read_text())["num_processes"] == 2
    return ReferenceRun(
        read_weights(out),
        read_train_losses(out),
        int(counts[0].read_text()),
        time.monotonic() - started,
    )


@pytest.mark.parametrize("trial", range(20))
def test_kill_on_two_processes(
    trial: int, reference_of_two: ReferenceRun, tmp_path: Path, fault
) -> None:
    """In turn: kill both at a kill point of rank 0, rank 0, rank 1, or both at a random time."""
    rng, out, kind = random.Random(trial), tmp_path / "run", trial % 4
    kill_at = rng.randrange(1, reference_of_two.num_kill_points + 1)

    def train_normally() -> None:
        train(RECIPE, out, resume=True)

    def kill_both() -> None:
        KillPoints(kill_at, lambda: os.killpg(0, signal.SIGKILL)).install()
        train_normally()

    def kill_self() -> None:
        train_until_kill_point(kill_at, RECIPE, out)

    def kill_self_early() -> None:
        train_until_kill_point(rng.randrange(1, 9), RECIPE, out)

    works = [
        (kill_both, train_normally),
        (kill_self, train_normally),
        (train_normally, kill_self_early),
        (train_normally, train_normally),
    ][kind]
    with tempfile.TemporaryFile() as output_file:
        ranks = start_ranks(works, output_file.fileno())
        if kind == 3:
            time.sleep(rng.uniform(0.1, 1) * reference_of_two.seconds)
            os.killpg(ranks[0], signal.SIGKILL)
        codes = wait_for_ranks(ranks)
    assert kind == 3 or -signal.SIGKILL in codes
    codes, output = run_ranks([train_normally, train_normally])
    assert codes == [0, 0], output
    check_same_result(out, reference_of_two)
    fault("SIGKILL on two processes (gloo)", PROMISE, "one rank or both")
