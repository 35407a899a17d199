"""The losses of a recipe's first steps, beside those of the same steps computed plainly.

Plainly is in float32 and not compiled: what differs is what the fast path does to the numbers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from finetune.engine import launch
from finetune.job import open_job
from finetune.live import Live
from finetune.progress import Meter
from finetune.provenance import DTYPES
from finetune.recipe import Recipe
from finetune.rundir import RunDir

__all__ = ["Curve", "compared"]


class Curve:
    """A recipe's training on this process, from its first step.

    Args:
        line: told of steps and notices.
        recipe: to be trained as `train` would.
        folder: for the run directory; whoever made it removes it.
    """

    def __init__(self, line: Any, *, recipe: Recipe, folder: str) -> None:
        self.line = line
        self.recipe = recipe
        self.folder = Path(folder)

    def losses(self, *, steps: int, every: int) -> dict[str, Any]:
        """Train.

        Args:
            steps: to take.
            every: over how many steps each mean goes.
        Returns: "losses", the means; "precision"; "compiled".
        """
        run = RunDir(self.folder / "curve")
        accelerator = launch(self.recipe.run, out=run.path)
        job = open_job(
            self.recipe, device=accelerator.device, notice=self.line.notice, progress=False
        )
        live = Live(job, accelerator, run)
        precision = accelerator.mixed_precision.replace("no", "fp32")
        feed = job.feed(job.source.splits["train"], train=True, dtype=DTYPES[precision])
        meter, found = Meter(accelerator.device, 0.0), []
        batches = feed.train(job.stream, range(steps), micro_batch=live.micro_batch)
        with contextlib.closing(run), contextlib.closing(batches) as planned:
            run.open()
            live.go_on(meter)
            for number, micro_batches in planned:
                live.step(number, micro_batches, meter)
                self.line.tick()
                if live.counters.step % every == 0:
                    found.append(live.log(meter)["loss"])
        return {"losses": found, "precision": precision, "compiled": live.compiled}


def compared(own: dict[str, Any], plain: dict[str, Any], *, every: int) -> dict[str, Any]:
    """Put two curves side by side.

    Returns: "rows", each {"step", "loss", "plain", "difference"}, a mean over the `every` steps
        that end there; "largest", the largest difference; "precision" and "compiled" of the first.
    """
    pairs = zip(own["losses"], plain["losses"], strict=True)
    rows = [
        {"step": number * every, "loss": loss, "plain": other, "difference": loss - other}
        for number, (loss, other) in enumerate(pairs, start=1)
    ]
    largest = max(abs(row["difference"]) for row in rows)
    told = {key: own[key] for key in ("precision", "compiled")}
    return {"rows": rows, "largest": largest, **told}
