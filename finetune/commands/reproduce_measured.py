"""The outcome of an entry of a plan, read from its run directories, and put in words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.commands.reproduce_plan import Entry
from finetune.errors import CheckpointError
from finetune.evaluation.claims import VERDICTS, answer
from finetune.evaluation.metrics import mean_std
from finetune.recipe.load import Claim, Recipe
from finetune.report.run_data import Run, read_run
from finetune.run.validation import load_json
from finetune.text import MISSING, counted, markdown_table

__all__ = [
    "EXPECTED",
    "MISSING",
    "RUN_FILES",
    "Measured",
    "answer_of",
    "in_words",
    "is_expectation",
    "joined",
    "machines_of",
    "percent",
    "place_of",
    "run_hash",
    "spread",
    "table_if_any",
    "verdicts",
]

RUN_FILES = ("recipe.yaml", "run.json", "metrics.jsonl", "results.json")
EXPECTED = "expected before the run"  # how the source of such a claim begins


@dataclass(frozen=True)
class Measured:
    """The outcome of one entry of a plan.

    Attributes:
        entry: of the plan.
        paths: a run directory for each seed, or the folder of its probe.json.
    """

    entry: Entry
    paths: Sequence[Path]

    @cached_property
    def runs(self) -> list[Run]:
        """Its run directories; none for a probe."""
        return [] if self.entry.probe else [read_run(path) for path in self.paths]

    @cached_property
    def probe(self) -> dict[str, Any]:
        """The content of its probe.json."""
        return load_json(self.paths[0] / "probe.json") if self.entry.probe else {}

    @property
    def machines(self) -> list[Mapping[str, Any]]:
        """The machines and commits of the runs, or of the probe."""
        return [self.probe["machine"]] if self.entry.probe else [run.record for run in self.runs]


def run_hash(path: Path) -> str:
    """The sha256 over the files of a run directory, one after another, or over its probe.json.

    Args:
        path: of the folder.
    Raises: CheckpointError if one of the files is missing.
    """
    probe = path / "probe.json"
    files = [probe] if probe.is_file() else [path / name for name in RUN_FILES]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{file}: is missing, and the hash of a run is over it; copy it with the others",
                code="checkpoint.not_found",
            )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def in_words(recipe: Recipe, *, named: str | None = None) -> str:
    """Network, data and length of a training.

    Args:
        named: the data source that the plan names, where a copy of it may have been read.
    """
    model, data, optim = recipe.model, recipe.data, recipe.optim
    length = f"{optim.steps} steps"
    if optim.epochs:
        length = f"{optim.epochs:g} epoch{'s' if optim.epochs != 1 else ''}"
    weights = "" if model.pretrained else ", random weights"
    frozen = ", classifier alone" if model.freeze == "backbone" else ""
    size = "" if model.image_size is None else f" at {model.image_size} px"
    some = "" if data.num_train is None else f"{data.num_train:,} images of "
    source = data.source if named in (None, data.source) else f"{named}, a copy"
    return (
        f"`{model.name}`{size}{weights}{frozen}; {some}{source}; {length} of batch "
        f"{data.batch_size}, {optim.name} at {optim.lr:g}"
    )


def is_expectation(claim: Claim) -> bool:
    """True if a claim is our own, written before the run, and no source's."""
    return claim.source.startswith(EXPECTED)


def answer_of(claim: Claim, run: Run) -> dict[str, Any]:
    """A claim, also one that the run did not have, answered from its files; see `claims.answer`."""
    claims = [claim.model_dump(mode="json")]
    return answer(claims, run.history, run.results, run.steps_per_epoch or 1.0)[0]


def verdicts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count the runs that meet a claim.

    Args:
        rows: what `answer_of` gave for each.
    """
    met = sum(row["verdict"] == VERDICTS[0] for row in rows)
    return f"met by {met} of {len(rows)}"


def place_of(machine: Mapping[str, Any]) -> tuple[str, str]:
    """Hardware and commit.

    Args:
        machine: a run.json, or the "machine" of a probe.json.
    """
    device, commit = machine.get("device", {}), machine.get("commit")
    name = str(device.get("name", MISSING))
    if device.get("type") == "cpu":
        name += f", {counted(device.get('threads', 1), 'thread')}"
    if commit is None:
        return name, "not known"
    return name, f"{commit[:7]}{'+changes' if '+' in commit else ''}"


def machines_of(one: Measured) -> str:
    """Every different hardware and commit of an entry's runs."""
    return "; ".join(dict.fromkeys(", ".join(place_of(machine)) for machine in one.machines))


def percent(values: Iterable[float | None]) -> str:
    """`spread` of fractions, in per cent."""
    return spread([None if one is None else 100 * one for one in values], "{:.2f}")


def spread(values: Iterable[float | None], form: str) -> str:
    """Mean and standard deviation over what is known.

    Args:
        values: one for each run.
        form: of each of the two, such as "{:.2f}".
    """
    known = [one for one in values if one is not None]
    if not known:
        return MISSING
    mean, std, _ = mean_std(known)
    return form.format(mean) + ("" if std is None else f" ± {form.replace('+', '').format(std)}")


def joined(values: Iterable[Any]) -> str:
    """Different values, in their order."""
    return ", ".join(dict.fromkeys(map(str, values)))


def table_if_any(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; none without rows."""
    return markdown_table(heads, rows) if rows else []
