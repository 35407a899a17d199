"""The child process of the GPU tests: a run with a memory limit, deterministic, or killed.

The only argument is JSON:
    argv        arguments of a `finetune` command, instead of a run
    recipe, overrides, out, resume      a run
    limit_bytes         the device memory that torch may use
    deterministic       use only deterministic kernels
    strict              disable TF32 in convolutions
    kill_before         end by SIGKILL before this step, after pending checkpoints are written
    backend             the communication backend of a launch
    memory_path         a file for "peak" and "reserved", bytes of device memory
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> int:
    import pytest
    import torch
    from forked_runs import disable_report_and_plots

    disable_report_and_plots(pytest.MonkeyPatch())
    on_gpu = os.environ["FINETUNE_GPU_TESTS_ON"] == "cuda"
    if not on_gpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if (limit := job.get("limit_bytes")) and on_gpu:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total_bytes)
    torch.use_deterministic_algorithms(bool(job.get("deterministic")))
    if job.get("strict"):
        torch.backends.cudnn.allow_tf32 = False
    if step := job.get("kill_before"):
        kill_before_step(step)
    if (backend := job.get("backend")) and on_gpu:
        os.environ["LOCAL_RANK"] = "0"  # all ranks use the first GPU
        from finetune.training import accelerator

        partial_state = functools.partial(accelerator.PartialState, backend=backend)
        accelerator.PartialState = partial_state
    if argv := job.get("argv"):
        from finetune.cli.main import main as run_command

        return run_command(argv)
    from finetune.recipe.load import parse_recipe
    from finetune.training.train import train

    recipe = parse_recipe(job["recipe"], overrides=job.get("overrides", ()))
    train(recipe, job["out"], resume=job.get("resume", False))
    if memory_path := job.get("memory_path"):
        memory = {"peak": 0, "reserved": 0}
        if on_gpu:
            memory["peak"] = torch.cuda.max_memory_allocated()
            memory["reserved"] = torch.cuda.max_memory_reserved()
        Path(memory_path).write_text(json.dumps(memory), encoding="utf-8")
    return 0


def kill_before_step(step: int) -> None:
    from finetune.training.trainer_state import TrainerState

    train_step = TrainerState.train_step

    def step_or_kill(trainer: TrainerState, *arguments: Any) -> None:
        if trainer.counters.step + 1 == step:
            trainer.checkpoint_writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(trainer, *arguments)

    TrainerState.train_step = step_or_kill  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
