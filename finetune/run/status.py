"""The status of a run, from its first step to its last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, Interrupted, SetupError
from finetune.recipe.identity import learned, recipe_of
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir

__all__ = ["finished", "status_kept"]


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The content of results.json if a run of this recipe is done there; else None."""
    old, run = recipe_of(folder), RunDir(folder)
    if old is None or learned(old) != learned(recipe):
        return None
    done = (run.read_json("run.json") or {}).get("status") == "done"
    return run.read_json("results.json") if done else None


@contextlib.contextmanager
def status_kept(run: RunDir, *, main: bool) -> Iterator[None]:
    """Keep `status` in run.json true, whatever ends the run."""

    def write(status: str) -> None:
        if main and (record := run.read_json("run.json")) is not None:
            run.write_json("run.json", {**record, "status": status})

    try:
        yield
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        kind = "stopped" if isinstance(error, Interrupted) else "failed"
        # a full disk, a damaged record: what ended the run is to be told
        with contextlib.suppress(SetupError, CheckpointError):
            write(f"{kind} ({code})")
        raise
    write("done")
