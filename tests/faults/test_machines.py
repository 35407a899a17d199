"""Two machines (network namespaces) match one process; a broken link loses no progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_runs import read_train_losses, read_weights
from launches import REPOSITORY, Launch, finetune_tracebacks, launch_training, verified_steps
from network_namespaces import create_namespaces, run_ip

TIMEOUT_SECONDS = 20
FIRST_ADDRESS, SECOND_ADDRESS = "10.77.0.1", "10.77.0.2"
# few enough for a quick test, many enough to break the link in the middle
NUM_STEPS = 200
SETTINGS = [f"optim.steps={NUM_STEPS}", "run.save_every=20", f"run.eval_every={NUM_STEPS}"]
# SGD: Adam would amplify differences in the last bit of a sum at every step.
SETTINGS += ["optim.name=sgd", "optim.lr=0.01", f"run.timeout_seconds={TIMEOUT_SECONDS}"]


def connect_pair(names: list[str]) -> None:
    """Connect two namespaces by a link; eth0 on both."""
    ends = [("type", "veth"), ("peer",)]
    arguments = [
        argument
        for name, end in zip(names, ends, strict=True)
        for argument in link_end_arguments(name, end)
    ]
    run_ip("link", "add", *arguments)
    for name, address in zip(names, (FIRST_ADDRESS, SECOND_ADDRESS), strict=True):
        run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run_ip("-n", name, "link", "set", "eth0", "up")


def link_end_arguments(name: str, end: tuple[str, ...]) -> list[str]:
    """Return the arguments of `ip link add` for one end of the link."""
    device = ["name", "eth0", "netns", name]
    return [*device, *end] if end[0] == "type" else [*end, *device]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with create_namespaces("ab", connect_pair) as names:
        yield names


@contextlib.contextmanager
def launch_on_both(
    hosts: list[str], folder: Path, out: Path, *overrides: str, name: str
) -> Iterator[tuple[Launch, Launch]]:
    """Start one run on both, as in the header of recipes/accelerate/two_machines.yaml."""
    with contextlib.ExitStack() as stack:
        launches = []
        for rank, host in enumerate(hosts):
            config = REPOSITORY / "recipes" / "accelerate" / "two_machines.yaml"
            options = ["--config_file", str(config), "--num_processes", "2"]
            options += ["--main_process_ip", FIRST_ADDRESS, "--machine_rank", str(rank)]
            launch = launch_training(
                folder,
                *SETTINGS,
                *overrides,
                launcher_options=tuple(options),
                command_prefix=("ip", "netns", "exec", host),
                extra_environment={"GLOO_SOCKET_IFNAME": "eth0"},
                out=out,
                name=f"{name}-{rank}",
            )
            launches.append(stack.enter_context(launch))
        yield launches[0], launches[1]


def test_two_machines_match_one_process_and_survive_a_broken_link(
    hosts: list[str], tmp_path: Path, fault: Any
) -> None:
    with launch_training(
        tmp_path, *SETTINGS, launcher="python", num_processes=1, name="one"
    ) as single:
        single.wait_for_end()
        assert single.process.returncode == 0, single.text
    uninterrupted = tmp_path / "whole"
    with launch_on_both(hosts, tmp_path, uninterrupted, name="whole") as launches:
        for launch in launches:
            launch.wait_for_end()
            assert launch.process.returncode == 0, launch.text
        assert launches[0].read_record()["num_processes"] == 2
    losses = read_train_losses(uninterrupted), read_train_losses(single.out)
    differences = [abs(a - b) for a, b in zip(*losses, strict=True)]
    assert len(differences) == NUM_STEPS
    assert max(differences) < 1e-5
    fault(
        "two machines (network namespaces) instead of one process",
        "the same losses, within 1e-5",
        f"largest difference {max(differences):.1e} in {NUM_STEPS} steps",
    )

    interrupted = tmp_path / "cut"
    with launch_on_both(hosts, tmp_path, interrupted, name="cut") as launches:
        launches[0].wait_for_steps(30)
        run_ip("-n", hosts[1], "link", "set", "eth0", "down")
        seconds = launches[0].wait_for_end()
        launches[1].wait_for_end()
        for rank, launch in enumerate(launches):
            message = f"rank {1 - rank} of 2: no answer within {TIMEOUT_SECONDS} seconds"
            assert launch.text.count(message) == 1, launch.text
            assert launch.process.returncode != 0
            assert not finetune_tracebacks(launch.text)
        assert launches[0].read_record()["status"] == "failed (5)"
        assert verified_steps(interrupted)
        assert max(verified_steps(interrupted)) < NUM_STEPS
    run_ip("-n", hosts[1], "link", "set", "eth0", "up")
    with launch_on_both(hosts, tmp_path, interrupted, "--resume", name="again") as launches:
        for launch in launches:
            launch.wait_for_end()
            assert launch.process.returncode == 0, launch.text
    assert read_weights(interrupted) == read_weights(uninterrupted)
    assert read_train_losses(interrupted) == read_train_losses(uninterrupted)
    fault(
        "the link between two machines breaks in the middle",
        f"both end with a message after run.timeout_seconds ({TIMEOUT_SECONDS} here) and resume "
        "to the same weights once it works again",
        f"{seconds:.0f} s",
    )
