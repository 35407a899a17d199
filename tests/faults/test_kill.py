"""SIGKILL at any moment: the run goes on from a verified checkpoint to the same weights.

Each trial kills a run in which everything that is random or has a state is on, at moments that
its number draws: before a step or file operation, in the middle of a file, or at any time. Only
the pictures of the card and the report are not drawn; their files are written.
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

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
PROMISE = "it resumes from the newest verified checkpoint to bit-identical final weights"


class Whole(NamedTuple):
    """A run that nothing has stopped."""

    weights: bytes
    losses: list[float]
    moments: int
    seconds: float


@pytest.fixture(scope="module")
def whole(no_pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(RECIPE, out)  # here, so that the children find everything imported
    began = time.monotonic()
    moments = count_kill_points(RECIPE, out.with_name("counted"))
    assert moments > 100, "steps and the operations on files, of several saves"
    assert read_weights(out.with_name("counted")) == read_weights(out)
    return Whole(read_weights(out), read_train_losses(out), moments, time.monotonic() - began)


def finish(out: Path) -> None:
    check_child_success(run_in_child(lambda: train(RECIPE, out, resume=True)))


def differences(out: Path, whole: Whole) -> list[str]:
    """Names of the parts that differ: pytest would compare the values line by line."""
    same = {
        "weights": read_weights(out) == whole.weights,
        "losses": read_train_losses(out) == whole.losses,
    }
    return [name for name, is_same in same.items() if not is_same]


def check(out: Path, whole: Whole) -> None:
    assert differences(out, whole) == []
    assert json.loads((out / "run.json").read_text())["status"] == "done"
    assert check_all_checkpoints(out)[-1] == 8
    assert temporary_files(out) == []


def trials(count: int, quick: int) -> list[Any]:
    """The numbers of the trials; all but the quick ones are the long part."""
    return [pytest.param(n, marks=[pytest.mark.faults] if n >= quick else []) for n in range(count)]


@pytest.mark.parametrize("trial", trials(75, 3))
def test_killed_between_two_operations(trial: int, whole: Whole, tmp_path: Path, fault) -> None:
    draw, out = random.Random(trial), tmp_path / "run"
    first = draw.randrange(1, whole.moments + 1)
    assert child_exit_code(lambda: train_until_kill_point(first, RECIPE, out)) == -signal.SIGKILL
    for _ in range(trial % 3):  # and again while it resumes, or later
        moment = draw.randrange(1, whole.moments // 2)
        assert child_exit_code(lambda at=moment: train_until_kill_point(at, RECIPE, out)) in (
            0,
            -signal.SIGKILL,
        )
    finish(out)
    check(out, whole)
    fault("SIGKILL of one process", PROMISE, "killed before and in file operations, steps, writes")


@pytest.mark.parametrize("trial", trials(25, 1))
def test_killed_at_any_time(trial: int, whole: Whole, tmp_path: Path, fault) -> None:
    draw, out = random.Random(1000 + trial), tmp_path / "run"
    with tempfile.TemporaryFile() as said:
        child = fork_process(lambda: train(RECIPE, out, resume=True), said.fileno())
        time.sleep(draw.uniform(0.1, 1) * whole.seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finish(out)
    check(out, whole)
    fault("SIGKILL of one process", PROMISE, "killed at random times")


@pytest.mark.parametrize("trial", trials(5, 1))
def test_the_control_without_keyed_augmentation(
    trial: int, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault
) -> None:
    import numpy as np

    def unkeyed(seed: int, epoch: int, indices: Any) -> Any:
        return np.random.default_rng(os.getpid()).integers(2**63, size=len(indices)).astype("u8")

    monkeypatch.setattr("finetune.data.loader.sample_keys", unkeyed)
    out = tmp_path / "run"
    moment = random.Random(trial).randrange(whole.moments // 4, whole.moments // 2)
    assert child_exit_code(lambda: train_until_kill_point(moment, RECIPE, out)) == -signal.SIGKILL
    finish(out)
    assert "weights" in differences(out, whole)
    fault(
        "SIGKILL, keyed augmentation switched off",
        "the control: the same test must fail",
        "the weights differ",
    )


# Two processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out = tmp_path_factory.mktemp("two") / "run"
    counts = [out.with_name(f"moments-{rank}") for rank in (0, 1)]

    def counted(rank: int) -> None:
        moments = KillPoints().install()
        train(RECIPE, out)
        counts[rank].write_text(str(moments.count))

    began = time.monotonic()
    codes, said = run_ranks([lambda: counted(0), lambda: counted(1)])
    assert codes == [0, 0], said
    assert json.loads((out / "run.json").read_text())["num_processes"] == 2
    return Whole(
        read_weights(out),
        read_train_losses(out),
        int(counts[0].read_text()),
        time.monotonic() - began,
    )


@pytest.mark.faults
@pytest.mark.parametrize("trial", range(20))
def test_killed_on_two_processes(trial: int, whole_of_two: Whole, tmp_path: Path, fault) -> None:
    """By turns: both at a moment of rank 0, rank 0 alone, rank 1 before a step, both at a time."""
    draw, out, kind = random.Random(trial), tmp_path / "run", trial % 4
    moment = draw.randrange(1, whole_of_two.moments + 1)

    def plain() -> None:
        train(RECIPE, out, resume=True)

    def all_die() -> None:
        KillPoints(moment, lambda: os.killpg(0, signal.SIGKILL)).install()
        plain()

    def dies() -> None:
        train_until_kill_point(moment, RECIPE, out)

    def dies_before_a_step() -> None:
        train_until_kill_point(draw.randrange(1, 9), RECIPE, out)

    works = [(all_die, plain), (dies, plain), (plain, dies_before_a_step), (plain, plain)][kind]
    with tempfile.TemporaryFile() as said:
        ranks = start_ranks(works, said.fileno())
        if kind == 3:
            time.sleep(draw.uniform(0.1, 1) * whole_of_two.seconds)
            os.killpg(ranks[0], signal.SIGKILL)
        codes = wait_for_ranks(ranks)
    assert kind == 3 or -signal.SIGKILL in codes
    codes, told = run_ranks([plain, plain])
    assert codes == [0, 0], told
    check(out, whole_of_two)
    fault("SIGKILL on two processes (gloo)", PROMISE, "one rank or both")
