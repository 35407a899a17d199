"""What else a bench can show of a recipe: its losses beside float32's, and sets of other sizes."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from finetune.bench.flops import spread
from finetune.bench.subprocess import Host
from finetune.console import bar, say
from finetune.recipe.load import Recipe

__all__ = ["LOSSES_EVERY", "PLAINLY", "study_losses", "study_sizes"]

LOSSES_EVERY = 20  # steps that make one point of a curve
PLAINLY = ("run.precision=fp32", "model.compile=false")  # what the losses are compared with


def study_losses(recipe: Recipe, plain: Recipe, *, steps: int) -> dict[str, Any]:
    """Train twice from the first step on, each time in a process of its own.

    Args:
        recipe: as it is.
        plain: the same with `PLAINLY`.
        steps: a multiple of LOSSES_EVERY.
    Returns: of `losses.compared`.
    """
    from finetune.bench.losses import Curve, compared

    found = []
    with bar(total=2 * steps, start=0, shown=True) as shown:
        for name, each in (("finetune", recipe), ("in float32", plain)):
            shown.set_description(f"losses {name}")
            with tempfile.TemporaryDirectory(prefix="finetune-bench-") as folder:
                arguments = {"recipe": each, "folder": folder}
                with Host(name, Curve, arguments, steps=shown.update, notice=say) as host:
                    found.append(host.ask("losses", steps=steps, every=LOSSES_EVERY))
    return compared(*found, every=LOSSES_EVERY)


def study_sizes(
    recipe: Recipe, sizes: Sequence[int], *, warmup: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Train on sets of several sizes, in turn, each in a process of its own.

    Args:
        recipe: whose images are repeated.
        sizes: numbers of images.
        warmup, steps, repeats: as for `bench`.
    Returns: "rows", each {"images", "train" of `spread`, "own_bytes"}; "per_image",
        of `scaling.per_image`.
    """
    from finetune.bench.scaling import Grown, per_image

    numbers = sorted(set(sizes))
    turns: dict[int, list[dict[str, Any]]] = {size: [] for size in numbers}
    total = repeats * len(turns) * (warmup + 1 + steps)
    with (
        bar(total=total, start=0, shown=True) as shown,
        contextlib.ExitStack() as stack,
    ):
        hosts = {}
        for size in numbers:  # memory that one had and gave back would hide what another needs
            shown.set_description(f"preparing {size:,} images")
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="finetune-bench-"))
            host = Host(
                f"{size:,} images",
                Grown,
                {"recipe": recipe, "folder": folder},
                steps=shown.update,
                notice=say,
            )
            hosts[size] = stack.enter_context(host)
            host.ask("prepare")
        for _ in range(repeats):
            for size, host in hosts.items():
                shown.set_description(f"{size:,} images")
                found = host.ask("grow", images=size, warmup=warmup, steps=steps)
                turns[size].append(found)
    rows = [_middle(size, found) for size, found in turns.items()]
    return {"rows": rows, "per_image": per_image(rows)}


def _middle(size: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [each["rate"] for each in found]
    return {
        "images": size,
        "train": spread(rates),
        "own_bytes": int(statistics.median(each["own_bytes"] for each in found)),
    }
