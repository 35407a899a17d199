"""The samples that each rank trains on, written down step by step; also a program that does so.

As a program it is the command line, with the folder for the records in $SAMPLES and a pause after
each step, so that kills come between the steps of a network that takes a millisecond for one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finetune.data.loader import Loader
from finetune.training.trainer_state import TrainerState


def record(folder: Path, *, pause_seconds: float = 0.0) -> None:
    """Let this process write a line for each step that it takes into a file of its own."""
    make, step, started, samples = Loader._train_batch, TrainerState.step, [0], []

    def noted_batch(loader: Loader, pixels: Any, keys: Any, indices: Any) -> Any:
        samples.extend(indices.tolist())
        return make(loader, pixels, keys, indices)

    def noted_step(trainer: TrainerState, *arguments: Any) -> None:
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        if not started[0]:  # what all ranks of this start have in common
            started[0] = time.time_ns()
            if world > 1:
                torch.distributed.broadcast_object_list(started)
        samples.clear()
        step(trainer, *arguments)
        facts = {"started": started[0], "step": trainer.counters.step, "rank": rank, "world": world}
        with (folder / f"{started[0]}-{rank}").open("a") as file:
            file.write(json.dumps({**facts, "samples": samples}) + "\n")
        time.sleep(pause_seconds)

    Loader._train_batch = noted_batch  # type: ignore[method-assign]
    TrainerState.step = noted_step  # type: ignore[method-assign]


def trained_on(folder: Path) -> tuple[list[list[int]], list[int]]:
    """The samples of each step, and how many processes took it, as the final weights know them.

    A step that was taken again after a kill counts as it was taken last.
    """
    steps: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            found = json.loads(line)
            steps.setdefault(found["step"], {}).setdefault(found["started"], []).append(found)
    assert sorted(steps) == list(range(1, len(steps) + 1))
    samples, worlds = [], []
    for step in sorted(steps):
        ranks = sorted(steps[step][max(steps[step])], key=lambda each: each["rank"])
        assert [each["rank"] for each in ranks] == list(range(ranks[0]["world"])), step
        samples.append([index for each in ranks for index in each["samples"]])
        worlds.append(len(ranks))
    return samples, worlds


if __name__ == "__main__":
    from finetune.cli.main import main

    record(Path(os.environ["SAMPLES"]), pause_seconds=0.05)
    sys.exit(main())
