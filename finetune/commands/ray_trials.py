"""`--on ray`: a search trains several trials at the same time, one on each GPU of a Ray cluster.

Without GPUs, a trial takes all cores of a machine. The machines share the run directory and the
images under the same paths, and have the same versions of finetune and PyTorch. If a machine is
lost, its trial continues on another one from its checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from finetune import __version__
from finetune.commands.run_search import SAVE_SECONDS, SearchSession, train_until
from finetune.commands.successive_halving import Decision, Search, Trial
from finetune.errors import FinetuneError, Interrupted, SetupError, install_hint, root_cause_message
from finetune.log import logger
from finetune.process_lifecycle import handle_interrupts
from finetune.run.directory import SEARCH_FILE, RunDir

__all__ = ["find_resources", "train_on_ray"]


def train_on_ray(session: SearchSession) -> None:
    """Carry out the decisions of a search, as many at the same time as the cluster has room for.

    Args:
        session: a session whose clock is `time.time`, which all machines share.
    Raises: what `SearchSession.execute` raises; SetupError if Ray is not installed, or the machines
        differ.
    """
    search, folder = session.search, session.run.path.resolve()
    interrupted = [decision for decision in search.decisions if not decision.done]
    running: dict[Any, Decision] = {}  # by Ray's reference of the result
    signals: list[int] = []  # an exception from a signal handler would break `ray.wait`
    with handle_interrupts(signals.append), _cluster() as ray:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        resources, num_slots = find_resources(machines)
        logger.info(f"--on ray: {num_slots} trials at the same time")
        task = ray.remote(max_retries=1, **resources)(_train_trial)
        while not search.chosen:
            while len(running) < num_slots:
                decision = interrupted.pop() if interrupted else session.next_decision()
                if decision is None:
                    break
                session.log_progress(decision)
                arguments = (search, decision, folder, session.source_overrides)
                result = task.remote(*arguments, session.clock_at_start, Path.cwd(), _versions())
                running[result] = decision
            if not running:
                break
            finished, _ = ray.wait(list(running), timeout=SAVE_SECONDS)
            if signals:
                raise Interrupted("", signals[0])
            for result in finished:
                decision = running.pop(result)
                session.finish(decision, *_get(ray, result, search[decision.trial]))
            session.save()


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """Connect to the cluster of RAY_ADDRESS, or start one on this machine; yield the module."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise SetupError(
            f"--on ray: Ray is not installed ({error}); {install_hint('ray')}",
            code="setup.missing_package",
        ) from None

    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SetupError(
            f"--on ray: no cluster at RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')} "
            f"({root_cause_message(error)}); start it, or unset RAY_ADDRESS to use this machine",
            code="setup.no_cluster",
        ) from error
    signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
    try:
        yield ray
    finally:
        ray.shutdown()


def find_resources(machines: Sequence[Mapping[str, float]]) -> tuple[dict[str, int], int]:
    """Return what a trial takes, as arguments of `ray.remote`, and how many fit at the same time.

    Args:
        machines: number of "CPU" and "GPU" of each machine.
    Raises: SetupError if no machine has cores.
    """
    with_gpus = [machine for machine in machines if machine.get("GPU")]
    if with_gpus:
        cores = min(int(machine["CPU"] // machine["GPU"]) for machine in with_gpus)
        num_gpus = sum(int(machine["GPU"]) for machine in with_gpus)
        return {"num_gpus": 1, "num_cpus": max(1, cores)}, num_gpus
    all_cores = [int(machine["CPU"]) for machine in machines if machine.get("CPU")]
    if not all_cores:
        raise SetupError(
            "--on ray: no machine of the cluster has cores for a trial; add one with ray start "
            "--num-cpus N",
            code="setup.no_cluster",
        )
    cores = min(all_cores)
    return {"num_cpus": cores}, sum(each // cores for each in all_cores)


def _versions() -> dict[str, str]:
    return {"finetune": __version__, "torch": torch.__version__}


class _WorkerSession(SearchSession):
    """The session of one trial; the process that decides writes tune.json."""

    def save(self) -> None:
        self.update_time()


def _train_trial(
    search: Search,
    decision: Decision,
    folder: Path,
    source_overrides: Sequence[str],
    clock_at_start: float,
    working_directory: Path,
    versions: Mapping[str, str],
) -> tuple[Trial, list[Exception]]:
    """Train a trial in a worker of the cluster, as decided.

    Args:
        search: a copy of the search when it was decided.
        clock_at_start: start of the search, in seconds of `time.time`.

    The others are those of the process that decides. Returns: the trial, and why it has failed.
    """
    host = os.uname().nodename
    if _versions() != versions:
        raise SetupError(
            f"--on ray: {host} has {_versions()}, and the search was started with {versions}; "
            "install the same versions on all machines",
            code="setup.wrong_version",
        )
    if not (folder / SEARCH_FILE).is_file():
        raise SetupError(
            f"--on ray: {host} has no {folder / SEARCH_FILE}; use an --out on a disk that all "
            "machines share",
            code="setup.not_shared",
        )
    os.chdir(working_directory)
    session = _WorkerSession(search, RunDir(folder), source_overrides, time.time, train_until)
    session.clock_at_start = clock_at_start
    session.train_trial(decision)
    return search[decision.trial], session.errors


def _get(ray: Any, result: Any, trial: Trial) -> tuple[Trial, list[Exception]]:
    """Return the result of `_train_trial`; a trial has failed if its worker was lost twice."""
    try:
        outcome: tuple[Trial, list[Exception]] = ray.get(result)
        return outcome
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FinetuneError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        problem = SetupError(
            f"{trial.name}: its worker was lost ({root_cause_message(error)})",
            code="setup.lost_worker",
        )
        logger.warning(str(problem))
        return replace(trial, end_reason=f"failed: {problem}"), [problem]
