"""`--on ray`: a search trains several trials at the same time, one on each GPU of a Ray cluster.

Without GPUs, each trial gets as many cores as the smallest machine has. The machines share the run
directory and the images under the same paths, have the same versions of finetune and PyTorch, and
synchronized clocks. If a machine is lost, its trial continues on another one from its checkpoint.

The decisions are those of `successive_halving.py`. Ray Tune's ASHA would end a trial that is not in
the better half; here, it pauses and may continue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from finetune import __version__
from finetune.commands.run_search import SAVE_INTERVAL_SECONDS, SearchSession, train_until
from finetune.commands.successive_halving import Decision, Search, Trial
from finetune.errors import (
    FinetuneError,
    Interrupted,
    SetupError,
    WeightsError,
    install_hint,
    root_cause_message,
)
from finetune.log import logger
from finetune.process_lifecycle import handle_interrupts
from finetune.run.directory import SEARCH_FILE, RunDir

__all__ = ["check_ray_is_installed", "resources_per_trial", "train_on_ray"]

_MAX_LOST = 2  # workers of one trial; then it has failed
_MAX_WAIT = 1.5  # of the minutes, for trials that do not end; they pause by themselves before
_LOCK_SECONDS = 90.0  # a shared disk keeps the lock of a lost machine for that long


def check_ray_is_installed() -> None:
    """Raise SetupError without Ray."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"--on ray: Ray is not installed ({error}); {install_hint('ray')}",
            code="setup.missing_package",
        ) from None


def train_on_ray(session: SearchSession) -> None:
    """Carry out the decisions of a search, as many at the same time as the cluster has room for.

    Args:
        session: a session whose clock is `time.time`, which all machines share.
    Raises: an error of a worker that `SearchSession.execute` raises too; SetupError if
        the machines differ; Interrupted after a signal.
    """
    search, folder = session.search, session.run.path.resolve()
    waiting = [decision for decision in search.decisions if not decision.done]
    running: dict[Any, Decision] = {}  # by Ray's reference of the result
    num_lost = Counter[str]()  # by trial
    signals: list[int] = []  # an exception from a signal handler would break `ray.wait`
    with handle_interrupts(signals.append), _connect() as ray:
        task = ray.remote(max_retries=0)(_train_trial)
        while True:
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            resources, max_concurrent_trials = resources_per_trial(machines)
            while len(running) < max_concurrent_trials:
                decision = waiting.pop(0) if waiting else session.next_decision()
                if decision is None:
                    break
                decision.on_ray = True
                session.log_progress(decision)
                result = task.options(**resources).remote(
                    *(search, decision, folder, session.source_overrides),
                    *(session.clock_at_start, Path.cwd(), _versions()),
                )
                running[result] = decision
            if not running:
                break
            finished, _ = ray.wait(list(running), timeout=SAVE_INTERVAL_SECONDS)
            if signals:
                raise Interrupted("", signals[0])
            for result in finished:
                decision = running.pop(result)
                outcome = _fetch_result(ray, result)
                if outcome is None:
                    num_lost[decision.trial] += 1
                    if num_lost[decision.trial] < _MAX_LOST:
                        logger.warning(f"{decision.trial}: its worker was lost; it continues")
                        waiting.append(decision)
                        continue
                    outcome = _failed(search[decision.trial], "its workers were lost")
                session.record_result(decision, *outcome)
            session.save()
            if search.finished and search.used_seconds > _MAX_WAIT * 60 * search.minutes:
                for result, decision in running.items():
                    ray.cancel(result, force=True)
                    late = _failed(search[decision.trial], "no result in time")
                    session.record_result(decision, *late)
                break


@contextlib.contextmanager
def _connect() -> Iterator[Any]:
    """Connect to a running cluster, or start Ray on this machine; yield the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    handler, was_connected = signal.getsignal(signal.SIGTERM), ray.is_initialized()
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(include_dashboard=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        problem = (
            f"cannot connect to the cluster RAY_ADDRESS={address}" if address else "cannot start"
        )
        raise SetupError(
            f"--on ray: {problem} ({root_cause_message(error)}); start the cluster with ray start "
            "--head, or end a broken one with ray stop",
            code="setup.no_cluster",
        ) from error
    with contextlib.suppress(ValueError):  # outside the main thread, Ray sets no handler
        signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        if not was_connected:
            ray.shutdown()


def resources_per_trial(machines: Sequence[Mapping[str, float]]) -> tuple[dict[str, int], int]:
    """Return what a trial takes, as arguments of `ray.remote`, and how many run at the same time.

    Args:
        machines: number of "CPU" and "GPU" of each machine.
    Raises: SetupError if no machine has cores.
    """
    with_cores = [machine for machine in machines if machine.get("CPU")]
    with_gpus = [machine for machine in with_cores if machine.get("GPU")]
    if not with_cores:
        raise SetupError(
            "--on ray: no machine of the cluster has cores for a trial; add one with ray start "
            "--num-cpus N",
            code="setup.no_resources",
        )
    if with_gpus:
        cores = max(1, min(int(machine["CPU"] // machine["GPU"]) for machine in with_gpus))
        fitting = [min(int(each["GPU"]), int(each["CPU"] // cores)) for each in with_gpus]
        return {"num_gpus": 1, "num_cpus": cores}, sum(fitting)
    cores = int(min(machine["CPU"] for machine in with_cores))
    return {"num_cpus": cores}, sum(int(machine["CPU"] // cores) for machine in with_cores)


def _versions() -> dict[str, str]:
    return {"finetune": __version__, "torch": torch.__version__}


def _train_trial(
    search: Search,
    decision: Decision,
    folder: Path,
    source_overrides: Sequence[str],
    clock_at_start: float,
    working_directory: Path,
    versions: Mapping[str, str],
) -> tuple[Trial, list[Exception]] | None:
    """Train a trial in a worker of the cluster, as decided.

    Args:
        search: a copy of the search when the trial was submitted.
        decision: the decision.
        folder: absolute path of the run directory.
        source_overrides: see `run_search`.
        clock_at_start: start of the search, in seconds of `time.time`.
        working_directory: that of the process that submits trials, for relative paths.
        versions: those of that process.
    Returns: the trial, and the error with which it has failed, if any. None if the worker was asked
        to stop, after the trial has saved a checkpoint.
    Raises: SetupError if this machine differs; errors of `SearchSession.train_trial`.
    """
    host = os.uname().nodename
    if _versions() != versions:
        raise SetupError(
            f"--on ray: {host} has {_versions()}, and the search was started with {versions}; "
            "install the same versions on all machines",
            code="setup.wrong_version",
        )
    for path in (working_directory, folder / SEARCH_FILE):
        if not path.exists():
            raise SetupError(
                f"--on ray: {host} has no {path}; work on a disk that all machines share",
                code="setup.not_shared",
            )
    os.chdir(working_directory)
    session = SearchSession(
        search, RunDir(folder), source_overrides, time.time, train_until, writes_record=False
    )
    session.clock_at_start = clock_at_start
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            session.train_trial(decision)
            break
        except Interrupted:
            return None
        except SetupError as in_use:
            if in_use.code != "setup.in_use" or time.monotonic() > deadline:
                raise
            time.sleep(SAVE_INTERVAL_SECONDS)
    trial = search[decision.trial]
    for error in session.errors:
        if isinstance(error, WeightsError) and not trial.curve:
            raise SetupError(
                f"--on ray: {host} cannot read the weights of {trial.name} ({error}); copy them to "
                "all machines",
                code="setup.not_shared",
            )
    return trial, session.errors


def _fetch_result(ray: Any, result: Any) -> tuple[Trial, list[Exception]] | None:
    """Return the result of `_train_trial`; None if its worker was lost, or asked to stop."""
    try:
        outcome: tuple[Trial, list[Exception]] | None = ray.get(result)
        return outcome
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FinetuneError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError:
        return None


def _failed(trial: Trial, reason: str) -> tuple[Trial, list[Exception]]:
    error = SetupError(f"{trial.name}: {reason}", code="setup.lost_worker")
    return replace(trial, end_reason=f"failed: {reason}"), [error]
