"""Memory of a host: the machine's, unless a container has less."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune import host_memory
from finetune.host_memory import free_bytes, total_bytes


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
