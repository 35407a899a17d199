"""The Slurm batch script: the processes it starts, and when it requeues the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launches import TIMEOUT_SECONDS
from slurm_jobs import requeue_requests, submit

__all__ = ["submit"]  # fixture


def test_only_a_job_that_saved_at_the_time_limit_is_requeued(submit: Any, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    for code in (0, 1, 2, 5, 137, 143, 138):
        assert requeue_requests(tmp_path) == []
        python.write_text(f'#!/bin/bash\necho "$RANK/$WORLD_SIZE $MASTER_ADDR $*"\nexit {code}\n')
        python.chmod(0o755)
        with submit("run.seed=1") as launch:
            assert launch.process.wait(TIMEOUT_SECONDS) == (0 if code == 138 else code)
    assert requeue_requests(tmp_path) == ["requeue 4711"]
    lines = launch.text.splitlines()
    for rank in range(2):
        command = f"-m finetune train {tmp_path}/recipe.yaml run.seed=1 --out {launch.out} --resume"
        assert f"{rank}/2 127.0.0.1 {command}" in lines
