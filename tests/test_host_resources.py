"""Memory and cores of the host: those of the machine, unless a container has less."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune import host_resources
from finetune.host_resources import (
    available_memory_bytes,
    configure_openmp,
    num_cores,
    total_memory_bytes,
)


def test_available_memory_is_less_than_total_memory() -> None:
    assert 2**20 < available_memory_bytes() < total_memory_bytes()


@pytest.mark.parametrize(
    "limit, used",
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_the_memory_limit_of_a_container_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str
) -> None:
    monkeypatch.setattr(host_resources, "CGROUP_ROOT", tmp_path)
    machine_total = total_memory_bytes()
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("max\n")
    assert total_memory_bytes() == machine_total
    assert available_memory_bytes() > 2**20
    (tmp_path / limit).write_text("5000000\n")
    (tmp_path / used).write_text("4000000\n")
    assert (total_memory_bytes(), available_memory_bytes()) == (5_000_000, 1_000_000)
    (tmp_path / used).write_text("6000000\n")
    assert available_memory_bytes() == 0


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "350000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "200000"}, 3),
    ],
)
def test_the_cpu_quota_of_a_container_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(host_resources, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(host_resources.os, "sched_getaffinity", lambda process: set(range(8)))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert num_cores() == cores


@pytest.mark.parametrize(
    "environment, spin_count, num_threads",
    [
        ({}, "3000", "1"),
        ({"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "2"}, "7", "2"),
        ({"OMP_WAIT_POLICY": "active"}, None, "1"),
    ],
    ids=["default", "set by the user", "wait policy of the user"],
)
def test_openmp_threads_of_a_command_sleep_soon_and_fit_the_quota(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    spin_count: str | None,
    num_threads: str,
) -> None:
    """As if torch were not loaded; the next test starts a command."""
    (tmp_path / "cpu.max").write_text("150000 100000")
    monkeypatch.setattr(host_resources, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(host_resources.os, "sched_getaffinity", lambda process: set(range(8)))
    variables = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    for name in variables:
        monkeypatch.setenv(name, "")  # what configure_openmp sets is undone too
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch")
    configure_openmp()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count
    assert os.environ["OMP_NUM_THREADS"] == num_threads


def test_a_command_configures_openmp_before_it_loads_torch(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000")
    program = f"""
import os
from pathlib import Path
from finetune import host_resources
from finetune.cli.main import main
host_resources.CGROUP_ROOT = Path({str(tmp_path)!r})
os.sched_getaffinity = lambda process: set(range(8))
main(["--version"])
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_NUM_THREADS"))
"""
    variables = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    inherited = {name: value for name, value in os.environ.items() if name not in variables}
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=inherited,
        check=True,
    ).stdout
    assert printed.splitlines()[-1] == "3000 1"  # neither is set once torch is loaded


def test_a_program_that_has_loaded_torch_keeps_its_openmp_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch  # noqa: F401

    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    configure_openmp()
    assert "GOMP_SPINCOUNT" not in os.environ


STEPS = """
import resource, sys
import numpy as np
from finetune.host_resources import disable_malloc_trim
if sys.argv[1] == "keep":
    disable_malloc_trim()
def step():
    kept = [np.ones(2**20, dtype=np.uint64) for _ in range(12)]  # 8 MiB each
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(), step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no mallopt: not glibc")
def test_freed_memory_is_kept_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def page_faults(mode: str) -> int:
        command = [sys.executable, "-c", STEPS, mode]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return int(result.stdout)

    num_pages = 2 * 12 * 2**23 // 4096
    assert (
        page_faults("leave") > num_pages / 10
    )  # the normal behavior: each step faults its pages in again
    assert page_faults("keep") < num_pages / 100
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")  # a setting of the user wins
    assert page_faults("keep") > num_pages / 10
