"""`--on ray`: trials of a search at the same time, on machines with the same versions."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from launches import process_command, running_process_ids
from recipe_texts import tiny_recipe_text
from refusals import refused

from finetune.cli import main as cli
from finetune.commands import ray_trials, tune
from finetune.commands.ray_trials import resources_per_trial
from finetune.commands.successive_halving import Decision, Search, Trial, decide
from finetune.commands.tune import read_search


@pytest.mark.parametrize(
    "machines, resources, num_trials",
    [
        ([{"CPU": 8}], {"num_cpus": 8}, 1),
        ([{"CPU": 8}, {"CPU": 4}, {}], {"num_cpus": 4}, 3),
        ([{"CPU": 16, "GPU": 4}, {"CPU": 4}], {"num_gpus": 1, "num_cpus": 4}, 4),
        (
            [{"CPU": 2, "GPU": 8}, {"CPU": 64, "GPU": 8}, {"GPU": 8}],
            {"num_gpus": 1, "num_cpus": 1},
            10,
        ),
    ],
)
def test_resources_of_a_trial(
    machines: list[dict[str, float]], resources: dict[str, int], num_trials: int
) -> None:
    assert resources_per_trial(machines) == (resources, num_trials)


def test_a_cluster_without_cores_is_refused() -> None:
    with refused("setup.no_resources", "--num-cpus"):
        resources_per_trial([{"memory": 1.0}])


def make_search(names: str, *, minutes: float = 10) -> Search:
    recipe = tiny_recipe_text("eval: resize", optim="lr: 1e-3, epochs: 10")
    trials = [
        Trial(name, f"trial {name}", "full", recipe, estimated_seconds=100, final_seconds=5)
        for name in names.split()
    ]
    return Search("photos", [], minutes, "top1", 5000, False, trials)


class TestDecisions:
    def test_a_trial_is_not_decided_twice(self) -> None:
        search = make_search("start a b")
        while (decision := decide(search)) is not None:
            search.decisions.append(decision)
        assert [(each.trial, each.until) for each in search.decisions] == [
            *(("start", 1.0), ("a", 0.25), ("b", 0.25)),
        ]
        assert not any(trial.end_reason for trial in search.trials)

    def test_trials_that_do_not_fit_wait_for_those_that_are_trained(self) -> None:
        """The one that is trained may turn out to be faster, and then the next one fits."""
        search = make_search("start a", minutes=0.3)
        search.decisions = [Decision("start", 1.0, "", 0.0)]
        assert decide(search) is None
        assert search["a"].end_reason == ""
        search.decisions[0].done = True
        decision = decide(search)
        assert decision is not None
        assert decision.must_finish


@pytest.fixture
def tuned(no_plots: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a search over three configurations of a tiny network, two at a time."""
    pytest.importorskip("ray")
    monkeypatch.setattr(tune, "TRIAL_SECONDS", 0.1)
    monkeypatch.setattr(ray_trials, "resources_per_trial", lambda _: ({"num_cpus": 0}, 2))
    path = tmp_path / "digits.yaml"
    data = "eval: resize, batch_size: 32, num_train: 120, num_test: 30, val_fraction: 0.2"
    optim, run = "lr: 1e-3, steps: 6", "precision: fp32, eval_every: 3"
    space = "tune: {optim.lr: [1e-3, 3e-3, 1e-2]}\n"
    path.write_text(tiny_recipe_text(data, optim=optim, run=run) + space)
    return ["tune", str(path), "--out", str(tmp_path / "run"), "--minutes", "30", "--on", "ray"]


@pytest.mark.faults
class TestSearch:
    def test_two_trials_at_the_same_time(self, tuned: list[str], tmp_path: Path) -> None:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        assert cli.main(tuned) == 0
        search = read_search(tmp_path / "run")
        first, second, *_ = search.decisions
        assert second.used_seconds < first.used_seconds + search[first.trial].seconds
        assert all(trial.is_finished or trial.end_reason for trial in search.trials)
        assert len({str(trial.inputs) for trial in search.trials}) == 1
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["test"]["examples"] == 30
        assert handlers == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_a_trial_continues_if_its_worker_is_lost(
        self, number: signal.Signals, tuned: list[str], tmp_path: Path
    ) -> None:
        killed: list[int] = []

        def kill_a_worker() -> None:
            while not killed:
                time.sleep(0.05)
                if (tmp_path / "run" / "trials" / "recipe" / "metrics.jsonl").exists():
                    workers = [
                        each
                        for each in running_process_ids()
                        if "ray::_train_trial" in process_command(each)
                    ]
                    for worker in workers:
                        os.kill(worker, number)
                    killed.extend(workers)

        thread = threading.Thread(target=kill_a_worker, daemon=True)
        thread.start()
        assert cli.main([*tuned, "optim.steps=200", "run.save_every=10"]) == 0
        assert killed
        search = read_search(tmp_path / "run")
        assert not any(trial.end_reason.startswith("failed") for trial in search.trials)
        assert search["recipe"].is_finished


@pytest.mark.parametrize(
    "versions, folder, code, named",
    [
        ({"finetune": "0.0.1"}, "run", "setup.wrong_version", "0.0.1"),
        (None, "elsewhere", "setup.not_shared", "tune.json"),
    ],
)
def test_machines_that_differ_are_refused(
    versions: dict[str, str] | None, folder: str, code: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tune.json").touch()
    search, decision = make_search("start"), Decision("start", 1.0, "", 0.0)
    places = (tmp_path / folder, (), 0.0, tmp_path)
    with refused(code, "--on ray", named):
        ray_trials._train_trial(search, decision, *places, versions or ray_trials._versions())


def test_ray_is_not_installed(
    tuned: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(tuned) == 5
    assert "finetune-vision[ray]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_on_ray_needs_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "recipes/quickstart.yaml", "--on", "ray"]) == 2
    assert "--minutes" in capsys.readouterr().err
