"""The losses of a recipe's first steps, beside those of the same steps computed plainly.

Plainly is in float32 and not compiled: what differs is what the fast path does to the numbers.
"""

from __future__ import annotations

import contextlib
from typing import Any

from finetune.bench.ours import Ours

__all__ = ["Curve", "compared"]


class Curve(Ours):
    """A recipe's training on this process, from its first step."""

    def losses(self, *, steps: int, every: int) -> dict[str, Any]:
        """Train.

        Args:
            steps: to take.
            every: over how many steps each mean goes.
        Returns: "losses", the means; "precision"; "compiled".
        """
        self._open()
        live, found = self.live, []
        with contextlib.closing(live.run), contextlib.closing(self._batches(steps)) as planned:
            for number, micro_batches in planned:
                live.step(number, micro_batches, self.meter)
                self.line.tick()
                if live.counters.step % every == 0:
                    found.append(live.log(self.meter)["loss"])
        return {"losses": found, "precision": self.precision, "compiled": live.compiled}


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
