"""Memory of a host: the machine's, unless a container has less."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from finetune import processes as host_memory
from finetune.processes import free_bytes, num_cores, total_bytes


def test_a_machine_has_more_than_is_free() -> None:
    assert 2**20 < free_bytes() < total_bytes()


@pytest.mark.parametrize(
    "limit, used",
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str
) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    whole = total_bytes()
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("max\n")
    assert total_bytes() == whole
    assert free_bytes() > 2**20
    (tmp_path / limit).write_text("5000000\n")
    (tmp_path / used).write_text("4000000\n")
    assert (total_bytes(), free_bytes()) == (5_000_000, 1_000_000)
    (tmp_path / used).write_text("6000000\n")
    assert free_bytes() == 0


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
def test_a_containers_cores_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_memory.os, "sched_getaffinity", lambda process: set(range(8)))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert num_cores() == cores


STEPS = """
import resource, sys
import numpy as np
from finetune.processes import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    kept = [np.ones(2**20, dtype=np.uint64) for _ in range(12)]  # 8 MiB each
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(), step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no mallopt: not glibc")
def test_a_step_finds_its_memory_where_the_last_one_left_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faults(what: str) -> int:
        command = [sys.executable, "-c", STEPS, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return int(done.stdout)

    pages = 2 * 12 * 2**23 // 4096
    assert faults("leave") > pages / 10  # the fault itself
    assert faults("keep") < pages / 100
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")  # a user's own choice
    assert faults("keep") > pages / 10
