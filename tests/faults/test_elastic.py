"""Machines that come and go: a run goes on with the processes that are there, and ends the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_recorder
from forked_runs import KillPoints, run_in_child, start_ranks, wait_for_ranks
from launches import RECIPE, Launch, finetune_tracebacks, launch_training
from network_namespaces import create_namespaces, run_ip
from sample_recorder import read_samples, record_samples

from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

PROMISE = "each sample once an epoch, in the same steps; losses within 1e-5 of the undisturbed run"
# Adam would make of the last bit of a sum, which differs, another digit in every step.
SETTINGS = ["optim.name=sgd", "data.num_train=128", "run.test=false"]

pytestmark = pytest.mark.usefixtures("no_pictures")


def samples_of(run: Path) -> Path:
    """The folder for the records of a run's samples."""
    place = run.with_name(f"{run.name}-samples")
    place.mkdir(exist_ok=True)
    return place


def check_same(run: Path, whole: Path) -> tuple[float, list[int]]:
    """Two runs are one and the same.

    Returns: the largest difference of a loss; the number of processes of each step.
    """
    samples, worlds = read_samples(samples_of(run))
    assert samples == read_samples(samples_of(whole))[0]
    seen = [index for step in samples for index in step]
    images = json.loads((run / "run.json").read_text())["plan"]["images_read"]
    assert len(seen) >= 5 * images
    for first in range(0, len(seen) - images + 1, images):
        assert sorted(seen[first : first + images]) == list(range(images))
    ours, theirs = (
        [line["loss"] for line in RunDir(out).read_metrics() if line["split"] == "train"]
        for out in (run, whole)
    )
    assert len(ours) == len(samples)
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert difference < 1e-5
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    return difference, worlds


# Processes, each start by hand --------------------------------------------------------------------

# How many processes, which of them dies, and at which of its moments.
KILLS = [(3, 1, 8), (2, 0, 60), (3, 2, 6), (2, 1, 4), (3, 0, 40)]


@pytest.mark.faults
def test_three_processes_then_two_then_three(tmp_path: Path, fault: Any) -> None:
    words = [*SETTINGS, "optim.lr=0.01", "optim.steps=32", "run.eval_every=32"]
    recipe = parse_recipe(RECIPE, overrides=[*words, "run.save_every=3"])
    whole, out = tmp_path / "whole", tmp_path / "run"

    def work(run: Path, moment: int = 0) -> None:
        record_samples(samples_of(run))
        KillPoints(moment).install()
        train(recipe, run, resume=True)  # also where there is nothing yet to go on with

    assert run_in_child(lambda: work(whole)).exit_code == 0
    with tempfile.TemporaryFile() as said:
        for world, victim, moment in [*KILLS, (3, -1, 0)]:
            moments = [moment if rank == victim else 0 for rank in range(world)]
            ranks = start_ranks([lambda m=m: work(out, m) for m in moments], said.fileno())
            codes = wait_for_ranks(ranks)
            said.seek(0)
            assert (-signal.SIGKILL in codes) == (victim >= 0), said.read().decode()
    assert codes == [0, 0, 0]
    difference, worlds = check_same(out, whole)
    assert {2, 3} <= set(worlds)
    fault(
        "3 processes, then 2, then 3 …, each start ended by a SIGKILL",
        PROMISE,
        f"{len(KILLS)} kills, largest difference of a loss {difference:.1e}",
    )


# Machines, under one torchrun ---------------------------------------------------------------------

ROUNDS = 12
STEPS = 300
SLOW = "optim.lr=2e-4"  # where faster learning leaves its first plateau, roundings grow to 1e-3
FIRST = "10.78.0.1"


def switch(names: list[str]) -> None:
    """A switch between three machines, which the first one has; eth0 on all."""
    first = names[0]
    run_ip("-n", first, "link", "add", "eth0", "type", "bridge")
    for number, name in enumerate(names):
        run_ip("-n", first, "link", "add", f"port{number}", "type", "veth", "peer", f"end{number}")
        if number:
            run_ip("-n", first, "link", "set", f"end{number}", "netns", name, "name", "eth0")
        run_ip("-n", first, "link", "set", f"port{number}", "master", "eth0")
        run_ip("-n", first, "link", "set", f"port{number}", "up")
        run_ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
        run_ip("-n", name, "link", "set", "eth0", "up")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with create_namespaces("abc", switch) as names:
        yield names


class Machines:
    """The same torchrun on each machine that is up, as recipes/accelerate/README.md says."""

    def __init__(self, hosts: list[str], folder: Path, stack: contextlib.ExitStack) -> None:
        self.hosts, self.folder, self.out = hosts, folder, folder / "run"
        self._stack = stack
        self.launches: dict[int, Launch] = {}

    def start(self, number: int) -> None:
        """Start torchrun on a machine."""
        first = (
            f"is_host={int(number == 0)}"  # these have one name, by which torchrun would know it
        )
        options = ["--nnodes", "1:3", "--nproc_per_node", "1", "--max_restarts", "100"]
        options += ["--rdzv_id", "run", "--rdzv_backend", "c10d"]
        options += ["--rdzv_endpoint", f"{FIRST}:29400", "--local_addr", f"10.78.0.{number + 1}"]
        options += ["--rdzv_conf", f"{first},last_call_timeout=3"]
        launch = launch_training(
            self.folder,
            *(*SETTINGS, f"optim.steps={STEPS}", f"run.eval_every={STEPS}", "run.save_every=5"),
            *(SLOW, "run.timeout_seconds=60", "--resume"),
            launcher="torchrun",
            launcher_options=tuple(options),
            command_prefix=("ip", "netns", "exec", self.hosts[number]),
            extra_environment={
                "GLOO_SOCKET_IFNAME": "eth0",
                "SAMPLES": str(samples_of(self.out)),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            out=self.out,
            name=f"machine-{number}",
            program=(sample_recorder.__file__,),
        )
        self.launches[number] = self._stack.enter_context(launch)

    def kill(self, number: int) -> None:
        """Take a machine away: SIGKILL to all that runs on it."""
        launch = self.launches.pop(number)
        while pids := [int(pid) for pid in run_ip("netns", "pids", self.hosts[number]).split()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        launch.process.wait()

    def kill_ranks(self, numbers: list[int]) -> None:
        """SIGKILL to those that train on these machines, whose torchruns stay."""
        here = [run_ip("netns", "pids", self.hosts[number]).split() for number in numbers]
        for pid in {int(pid) for pids in here for pid in pids} & set(
            self.launches[0].rank_process_ids()
        ):
            os.kill(pid, signal.SIGKILL)

    def world(self) -> int:
        """The number of processes that took the newest step."""
        texts = [path.read_text() for path in samples_of(self.out).iterdir()]
        lines = [json.loads(text.splitlines()[-1]) for text in texts if text.endswith("\n")]
        newest = max(lines, key=lambda line: line["started"], default={"world": 0})
        return int(newest["world"])

    def steps(self) -> int:
        log = self.out / "metrics.jsonl"
        return log.read_text().count('"train"') if log.exists() else 0

    def wait_for(self, steps: int, world: int) -> None:
        self.launches[0].wait_until(
            lambda: self.steps() >= steps and self.world() == world,
            f"{steps} steps, on {world} processes",
        )


@pytest.mark.faults
def test_three_machines_then_two_then_three(hosts: list[str], tmp_path: Path, fault: Any) -> None:
    whole, draw, kills = tmp_path / "whole", random.Random(0), 0
    words = [*SETTINGS, SLOW, f"optim.steps={STEPS}", f"run.eval_every={STEPS}"]

    def undisturbed() -> None:
        record_samples(samples_of(whole))
        train(parse_recipe(RECIPE, overrides=words), whole)

    assert run_in_child(undisturbed).exit_code == 0
    with contextlib.ExitStack() as stack:
        machines = Machines(hosts, tmp_path, stack)
        for number in range(3):
            machines.start(number)
        for turn in range(ROUNDS):
            up = sorted(machines.launches)
            machines.wait_for(steps=machines.steps() + draw.randrange(1, 10), world=len(up))
            if turn % 5 == 2:  # not the first machine, which holds what all torchruns have to know
                machines.kill(draw.choice((1, 2)))
                kills += 1
            else:
                victims = draw.sample(up, min(turn % 3 + 1, len(up)))
                machines.kill_ranks(victims)
                kills += len(victims)
            if turn % 5 == 4:
                machines.start(*{1, 2} - set(machines.launches))
        machines.wait_for(steps=machines.steps() + 1, world=3)
        for launch in machines.launches.values():
            launch.wait_for_end()
            assert launch.process.returncode == 0, launch.text
            assert not finetune_tracebacks(launch.text)
    difference, worlds = check_same(machines.out, whole)
    changes = [new for old, new in zip([0, *worlds], worlds, strict=False) if new != old]
    assert "323" in "".join(map(str, changes))
    fault(
        "torchrun --nnodes 1:3 on three machines (network namespaces): processes and whole "
        "machines are killed, machines come back",
        PROMISE,
        f"{kills} kills, largest difference of a loss {difference:.1e}",
    )
