"""Record the samples that each rank trains on, step by step.

Run as a program, this is the `finetune` command that records into the folder $SAMPLES. It pauses
after each step, so that kills fall between the steps of a network whose step takes a millisecond.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finetune.data.loader import ImageLoader
from finetune.training.trainer_state import TrainerState


def record_samples(folder: Path, *, pause_seconds: float = 0.0) -> None:
    """Make this process write a line for each of its training steps to a file of its own."""
    make_batch, train_step, started, samples = (
        ImageLoader._train_batch,
        TrainerState.train_step,
        [0],
        [],
    )

    def recorded_batch(loader: ImageLoader, pixels: Any, keys: Any, indices: Any) -> Any:
        samples.extend(indices.tolist())
        return make_batch(loader, pixels, keys, indices)

    def recorded_step(trainer: TrainerState, *arguments: Any) -> None:
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        if not started[0]:  # the same number on all ranks of this start
            started[0] = time.time_ns()
            if world > 1:
                torch.distributed.broadcast_object_list(started)
        samples.clear()
        train_step(trainer, *arguments)
        entry = {"started": started[0], "step": trainer.counters.step, "rank": rank, "world": world}
        with (folder / f"{started[0]}-{rank}").open("a") as file:
            file.write(json.dumps({**entry, "samples": samples}) + "\n")
        time.sleep(pause_seconds)

    ImageLoader._train_batch = recorded_batch  # type: ignore[method-assign]
    TrainerState.train_step = recorded_step  # type: ignore[method-assign]


def read_samples(folder: Path) -> tuple[list[list[int]], list[int]]:
    """Return the samples and the number of processes of each step behind the final weights.

    For a step that was repeated after a kill, the last repetition counts.
    """
    steps: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {}).setdefault(entry["started"], []).append(entry)
    assert sorted(steps) == list(range(1, len(steps) + 1))
    samples, worlds = [], []
    for step in sorted(steps):
        ranks = sorted(
            steps[step][max(steps[step])], key=lambda entry_of_rank: entry_of_rank["rank"]
        )
        assert [entry_of_rank["rank"] for entry_of_rank in ranks] == list(
            range(ranks[0]["world"])
        ), step
        samples.append([index for entry_of_rank in ranks for index in entry_of_rank["samples"]])
        worlds.append(len(ranks))
    return samples, worlds


if __name__ == "__main__":
    from finetune.cli.main import main

    record_samples(Path(os.environ["SAMPLES"]), pause_seconds=0.05)
    sys.exit(main())
