"""Two machines, made of network namespaces: they train as one, and a cut link loses nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import REPOSITORY, Launch, finetune_tracebacks, launch_training, verified_steps
from network_namespaces import create_namespaces, run_ip

from finetune.run.directory import RunDir

TIMEOUT_SECONDS = 20
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
# few enough to wait for, many enough for a link to be cut in the middle
STEPS = 200
SETTINGS = [f"optim.steps={STEPS}", "run.save_every=20", f"run.eval_every={STEPS}"]
# Adam would make of the last bit of a sum, which differs, another digit in every step.
SETTINGS += ["optim.name=sgd", "optim.lr=0.01", f"run.timeout_seconds={TIMEOUT_SECONDS}"]


def cable(names: list[str]) -> None:
    """A cable between two machines, eth0 on both."""
    ends = [("type", "veth"), ("peer",)]
    words = [word for name, end in zip(names, ends, strict=True) for word in end_of(name, end)]
    run_ip("link", "add", *words)
    for name, address in zip(names, (FIRST, SECOND), strict=True):
        run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run_ip("-n", name, "link", "set", "eth0", "up")


def end_of(name: str, kind: tuple[str, ...]) -> list[str]:
    """The words for one end of the cable."""
    device = ["name", "eth0", "netns", name]
    return [*device, *kind] if kind[0] == "type" else [*kind, *device]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with create_namespaces("ab", cable) as names:
        yield names


@contextlib.contextmanager
def two_machines(
    hosts: list[str], folder: Path, out: Path, *words: str, name: str
) -> Iterator[tuple[Launch, Launch]]:
    """Start the same run on both, as the header of recipes/accelerate/two_machines.yaml says."""
    with contextlib.ExitStack() as stack:
        launches = []
        for rank, host in enumerate(hosts):
            config = REPOSITORY / "recipes" / "accelerate" / "two_machines.yaml"
            options = ["--config_file", str(config), "--num_processes", "2"]
            options += ["--main_process_ip", FIRST, "--machine_rank", str(rank)]
            launch = launch_training(
                folder,
                *SETTINGS,
                *words,
                launcher_options=tuple(options),
                command_prefix=("ip", "netns", "exec", host),
                extra_environment={"GLOO_SOCKET_IFNAME": "eth0"},
                out=out,
                name=f"{name}-{rank}",
            )
            launches.append(stack.enter_context(launch))
        yield launches[0], launches[1]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in RunDir(out).read_metrics() if line["split"] == "train"]


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


@pytest.mark.faults
def test_two_machines_train_as_one_and_a_cut_link_loses_nothing(
    hosts: list[str], tmp_path: Path, fault: Any
) -> None:
    with launch_training(
        tmp_path, *SETTINGS, launcher="python", num_processes=1, name="one"
    ) as one:
        one.wait_for_end()
        assert one.process.returncode == 0, one.text
    whole = tmp_path / "whole"
    with two_machines(hosts, tmp_path, whole, name="whole") as machines:
        for launch in machines:
            launch.wait_for_end()
            assert launch.process.returncode == 0, launch.text
        assert machines[0].read_record()["num_processes"] == 2
    differences = [abs(a - b) for a, b in zip(losses(whole), losses(one.out), strict=True)]
    assert len(differences) == STEPS
    assert max(differences) < 1e-5
    fault(
        "two machines (network namespaces) instead of one process",
        "the same losses, within 1e-5",
        f"largest difference {max(differences):.1e} in {STEPS} steps",
    )

    cut = tmp_path / "cut"
    with two_machines(hosts, tmp_path, cut, name="cut") as machines:
        machines[0].wait_for_steps(30)
        run_ip("-n", hosts[1], "link", "set", "eth0", "down")
        seconds = machines[0].wait_for_end()
        machines[1].wait_for_end()
        for rank, launch in enumerate(machines):
            message = f"rank {1 - rank} of 2: no answer within {TIMEOUT_SECONDS} seconds"
            assert launch.text.count(message) == 1, launch.text
            assert launch.process.returncode != 0
            assert not finetune_tracebacks(launch.text)
        assert machines[0].read_record()["status"] == "failed (5)"
        assert verified_steps(cut)
        assert max(verified_steps(cut)) < STEPS
    run_ip("-n", hosts[1], "link", "set", "eth0", "up")
    with two_machines(hosts, tmp_path, cut, "--resume", name="again") as machines:
        for launch in machines:
            launch.wait_for_end()
            assert launch.process.returncode == 0, launch.text
    assert weights(cut) == weights(whole)
    assert losses(cut) == losses(whole)
    fault(
        "the link between two machines is cut in the middle",
        f"both end with a message after run.timeout_seconds ({TIMEOUT_SECONDS} here) and resume "
        "to the same weights once it is back",
        f"{seconds:.0f} s",
    )
