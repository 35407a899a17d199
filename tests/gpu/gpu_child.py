"""A run in a process of its own, as a test of a GPU wants it: limited, deterministic, or killed.

The one argument is JSON:
    argv        a command line, without `finetune`, instead of a run
    recipe, overrides, out, resume      a run
    limit_bytes         that torch may take of the device
    deterministic       whether torch may use deterministic kernels alone
    strict              whether float32 products are rounded to TF32 nowhere
    kill_before         the step before which the process dies by SIGKILL, once all is saved
    backend             what processes of a launch talk through
    facts               a file for "peak" and "reserved", bytes of the device's memory
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(what: dict[str, Any]) -> int:
    import pytest
    import torch
    from forked_runs import disable_report_and_plots

    disable_report_and_plots(pytest.MonkeyPatch())
    on_gpu = os.environ["FINETUNE_GPU_TESTS_ON"] == "cuda"
    if not on_gpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if (limit := what.get("limit_bytes")) and on_gpu:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / whole)
    torch.use_deterministic_algorithms(bool(what.get("deterministic")))
    if what.get("strict"):
        torch.backends.cudnn.allow_tf32 = False
    if step := what.get("kill_before"):
        _die_before(step)
    if (backend := what.get("backend")) and on_gpu:
        os.environ["LOCAL_RANK"] = "0"  # all of them are on the first GPU
        from finetune.training import accelerator

        joined = functools.partial(accelerator.PartialState, backend=backend)
        accelerator.PartialState = joined
    if argv := what.get("argv"):
        from finetune.cli.main import main as command

        return command(argv)
    from finetune.recipe.load import parse_recipe
    from finetune.training.train import train

    recipe = parse_recipe(what["recipe"], overrides=what.get("overrides", ()))
    train(recipe, what["out"], resume=what.get("resume", False))
    if place := what.get("facts"):
        facts = {"peak": 0, "reserved": 0}
        if on_gpu:
            facts["peak"] = torch.cuda.max_memory_allocated()
            facts["reserved"] = torch.cuda.max_memory_reserved()
        Path(place).write_text(json.dumps(facts), encoding="utf-8")
    return 0


def _die_before(step: int) -> None:
    from finetune.training.trainer_state import TrainerState

    take = TrainerState.train_step

    def checked(trainer: TrainerState, *arguments: Any) -> None:
        if trainer.counters.step + 1 == step:
            trainer.checkpoint_writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        take(trainer, *arguments)

    TrainerState.train_step = checked  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
