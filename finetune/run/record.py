"""The record of a run, run.json: its fields, its one writer, its status from first step to last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from finetune.errors import CheckpointError, Interrupted, SetupError
from finetune.recipe.identity import learned, recipe_of
from finetune.recipe.load import DistillSection, Recipe
from finetune.run.directory import RunDir
from finetune.text import percent, short_count

__all__ = [
    "RunRecord",
    "finished",
    "read_record",
    "status_kept",
    "teacher_in_words",
    "write_record",
]


class RunRecord(TypedDict, total=False):
    """The content of run.json; an older version wrote fewer fields, a newer one may add some."""

    started: str  # the first time, ISO 8601
    status: str  # "running", "done", "stopped (exit code)" or "failed (exit code)"
    versions: dict[str, str]  # of Python and the packages
    device: dict[str, Any]  # type, name, threads
    num_processes: int
    commit: str | None  # of finetune; None if it was built from no checkout
    argv: list[str]  # without secrets
    precision: str  # "fp32", "bf16" or "fp16"
    data_fingerprint: str  # sha256 over all of `split_fingerprints`
    split_fingerprints: dict[str, str]  # sha256 of each split, and of the classes
    weights_sha256: str | None  # of the file that training started from
    teacher: dict[str, Any]  # `Distillation.facts`; with `distill`
    plan: dict[str, Any]  # `TrainingSetup.plan`, once the images were decoded
    micro_batch: dict[str, Any]  # images, and on what machine; with `data.micro_batch: auto`
    pushed: dict[str, Any]  # from `push`


def teacher_in_words(section: DistillSection, record: Mapping[str, Any]) -> str:
    """Say what is known of a run's teacher but its name, such as "kind logits, weight 0.5"."""
    facts, words = record.get("teacher", {}), f"kind {section.kind}"
    if section.kind == "logits":
        words += f" at temperature {section.softening:g}"
    words += f", weight {section.weight:g}"
    if facts.get("parameters"):
        words += f"; {facts['architecture']}, {short_count(facts['parameters'])} parameters"
    if "top1" in facts:
        words += (
            f", {percent(facts['top1'])} of its own {facts['examples']:,} {facts['split']} images"
        )
    return words


def read_record(run: RunDir) -> RunRecord:
    """Read run.json. Returns: its content, empty when there is none. Raises: as `read_json`."""
    return cast(RunRecord, run.read_json("run.json") or {})


def write_record(run: RunDir, record: RunRecord) -> None:
    """Write run.json atomically."""
    run.write_json("run.json", dict(record))


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The content of results.json if a run of this recipe is done there; else None."""
    old, run = recipe_of(folder), RunDir(folder)
    if old is None or learned(old) != learned(recipe):
        return None
    return run.read_json("results.json") if read_record(run).get("status") == "done" else None


@contextlib.contextmanager
def status_kept(run: RunDir, *, main: bool) -> Iterator[None]:
    """Keep `status` in run.json true, whatever ends the run."""

    def write(status: str) -> None:
        if main and (record := read_record(run)):
            write_record(run, {**record, "status": status})

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
