"""Elastic runs: machines leave and join, and the run ends with the same result."""

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
from forked_runs import KillPoints, read_train_losses, run_in_child, start_ranks, wait_for_ranks
from launches import RECIPE, Launch, finetune_tracebacks, launch_training
from network_namespaces import create_namespaces, run_ip
from sample_recorder import read_samples, record_samples

from finetune.recipe.load import parse_recipe
from finetune.training.train import train

PROMISE = "each sample once an epoch, in the same steps; losses within 1e-5 of an uninterrupted run"
# SGD: Adam would amplify differences in the last bit of a sum at every step.
SETTINGS = ["optim.name=sgd", "data.num_train=128", "run.test=false"]

pytestmark = pytest.mark.usefixtures("no_plots")


def samples_folder(run: Path) -> Path:
    """Return the folder for the recorded samples of a run."""
    folder = run.with_name(f"{run.name}-samples")
    folder.mkdir(exist_ok=True)
    return folder


def check_same_training(run: Path, reference: Path) -> tuple[float, list[int]]:
    """Check that a run used the same samples as the reference, with nearly equal losses.

    Returns: the largest difference of a loss; the number of processes of each step.
    """
    samples, worlds = read_samples(samples_folder(run))
    assert samples == read_samples(samples_folder(reference))[0]
    all_samples = [index for step in samples for index in step]
    images = json.loads((run / "run.json").read_text())["plan"]["images_read"]
    assert len(all_samples) >= 5 * images
    for first in range(0, len(all_samples) - images + 1, images):
        assert sorted(all_samples[first : first + images]) == list(range(images))
    ours, theirs = read_train_losses(run), read_train_losses(reference)
    assert len(ours) == len(samples)
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert difference < 1e-5
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    return difference, worlds


# Processes, started one by one --------------------------------------------------------------------

# Number of processes, the rank to kill, and its kill point. A rank other than 0 has two points per
# step; rank 0 also counts those of its checkpoint thread, so where it is killed depends on the
# load. Nine steps of rank 1 always leave a published checkpoint of two processes.
KILL_PLAN = [(3, 1, 8), (2, 0, 60), (3, 2, 6), (2, 1, 20), (3, 0, 40)]


def test_a_run_continues_on_three_then_two_then_three_processes(tmp_path: Path, fault: Any) -> None:
    overrides = [*SETTINGS, "optim.lr=0.01", "optim.steps=32", "run.eval_every=32"]
    recipe = parse_recipe(RECIPE, overrides=[*overrides, "run.save_every=3"])
    reference, out = tmp_path / "whole", tmp_path / "run"

    def work(run: Path, kill_at: int = 0) -> None:
        record_samples(samples_folder(run))
        KillPoints(kill_at).install()
        train(recipe, run, resume=True)  # also at the first start

    assert run_in_child(lambda: work(reference)).exit_code == 0
    with tempfile.TemporaryFile() as output:
        for num_processes, victim, kill_at in [*KILL_PLAN, (3, -1, 0)]:
            kill_points = [kill_at if rank == victim else 0 for rank in range(num_processes)]
            ranks = start_ranks([lambda m=m: work(out, m) for m in kill_points], output.fileno())
            codes = wait_for_ranks(ranks)
            output.seek(0)
            assert (-signal.SIGKILL in codes) == (victim >= 0), output.read().decode()
    assert codes == [0, 0, 0]
    difference, worlds = check_same_training(out, reference)
    assert {2, 3} <= set(worlds)
    fault(
        "3 processes, then 2, then 3 …, each start ends by SIGKILL",
        PROMISE,
        f"{len(KILL_PLAN)} kills, largest difference of a loss {difference:.1e}",
    )


# Machines, under torchrun -------------------------------------------------------------------------

NUM_ROUNDS = 12
NUM_STEPS = 300
SMALL_LR = (
    "optim.lr=2e-4"  # a larger lr leaves the first plateau, where rounding errors grow to 1e-3
)
FIRST_ADDRESS = "10.78.0.1"


def connect_with_switch(names: list[str]) -> None:
    """Connect three namespaces by a switch on the first; eth0 on all."""
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
    with create_namespaces("abc", connect_with_switch) as names:
        yield names


class MachineGroup:
    """The same torchrun on each running machine, as in recipes/accelerate/README.md."""

    def __init__(self, hosts: list[str], folder: Path, stack: contextlib.ExitStack) -> None:
        self.hosts, self.folder, self.out = hosts, folder, folder / "run"
        self._stack = stack
        self.launches: dict[int, Launch] = {}

    def start(self, number: int) -> None:
        """Start torchrun on a machine."""
        is_host = f"is_host={int(number == 0)}"  # they share one host name
        options = ["--nnodes", "1:3", "--nproc_per_node", "1", "--max_restarts", "100"]
        options += ["--rdzv_id", "run", "--rdzv_backend", "c10d"]
        options += [
            "--rdzv_endpoint",
            f"{FIRST_ADDRESS}:29400",
            "--local_addr",
            f"10.78.0.{number + 1}",
        ]
        options += ["--rdzv_conf", f"{is_host},last_call_timeout=3"]
        launch = launch_training(
            self.folder,
            *(
                *SETTINGS,
                f"optim.steps={NUM_STEPS}",
                f"run.eval_every={NUM_STEPS}",
                "run.save_every=5",
            ),
            *(SMALL_LR, "run.timeout_seconds=60", "--resume"),
            launcher="torchrun",
            launcher_options=tuple(options),
            command_prefix=("ip", "netns", "exec", self.hosts[number]),
            extra_environment={
                "GLOO_SOCKET_IFNAME": "eth0",
                "SAMPLES": str(samples_folder(self.out)),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            out=self.out,
            name=f"machine-{number}",
            program=(sample_recorder.__file__,),
        )
        self.launches[number] = self._stack.enter_context(launch)

    def kill(self, number: int) -> None:
        """Remove a machine: SIGKILL to all its processes."""
        launch = self.launches.pop(number)
        while pids := [int(pid) for pid in run_ip("netns", "pids", self.hosts[number]).split()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        launch.process.wait()

    def kill_ranks(self, numbers: list[int]) -> None:
        """SIGKILL to the ranks on these machines; their torchrun processes stay."""
        process_ids = [run_ip("netns", "pids", self.hosts[number]).split() for number in numbers]
        for pid in {int(pid) for pids in process_ids for pid in pids} & set(
            self.launches[0].rank_process_ids()
        ):
            os.kill(pid, signal.SIGKILL)

    def num_processes(self) -> int:
        """Return the number of processes of the newest step."""
        texts = [path.read_text() for path in samples_folder(self.out).iterdir()]
        lines = [json.loads(text.splitlines()[-1]) for text in texts if text.endswith("\n")]
        newest = max(lines, key=lambda line: line["started"], default={"world": 0})
        return int(newest["world"])

    def steps(self) -> int:
        log = self.out / "metrics.jsonl"
        return log.read_text().count('"train"') if log.exists() else 0

    def wait_for(self, steps: int, num_processes: int) -> None:
        self.launches[0].wait_until(
            lambda: self.steps() >= steps and self.num_processes() == num_processes,
            f"{steps} steps, on {num_processes} processes",
        )


def test_a_run_continues_on_three_then_two_then_three_machines(
    hosts: list[str], tmp_path: Path, fault: Any
) -> None:
    reference, rng, kills = tmp_path / "whole", random.Random(0), 0
    overrides = [*SETTINGS, SMALL_LR, f"optim.steps={NUM_STEPS}", f"run.eval_every={NUM_STEPS}"]

    def train_reference() -> None:
        record_samples(samples_folder(reference))
        train(parse_recipe(RECIPE, overrides=overrides), reference)

    assert run_in_child(train_reference).exit_code == 0
    with contextlib.ExitStack() as stack:
        machines = MachineGroup(hosts, tmp_path, stack)
        for number in range(3):
            machines.start(number)
        for round_number in range(NUM_ROUNDS):
            running = sorted(machines.launches)
            machines.wait_for(
                steps=machines.steps() + rng.randrange(1, 10), num_processes=len(running)
            )
            if round_number % 5 == 2:  # never the first machine: it has the rendezvous store
                machines.kill(rng.choice((1, 2)))
                kills += 1
            else:
                victims = rng.sample(running, min(round_number % 3 + 1, len(running)))
                machines.kill_ranks(victims)
                kills += len(victims)
            if round_number % 5 == 4:
                machines.start(*{1, 2} - set(machines.launches))
        machines.wait_for(steps=machines.steps() + 1, num_processes=3)
        for launch in machines.launches.values():
            launch.wait_for_end()
            assert launch.process.returncode == 0, launch.text
            assert not finetune_tracebacks(launch.text)
    difference, worlds = check_same_training(machines.out, reference)
    changes = [new for old, new in zip([0, *worlds], worlds, strict=False) if new != old]
    assert "323" in "".join(map(str, changes))
    fault(
        "torchrun --nnodes 1:3 on three machines (network namespaces): processes and whole "
        "machines are killed, machines come back",
        PROMISE,
        f"{kills} kills, largest difference of a loss {difference:.1e}",
    )
