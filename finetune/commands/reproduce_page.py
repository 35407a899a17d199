"""The page that stands beside the recipes: what their sources report, and what was measured.

It is written from run directories alone; they need neither checkpoints nor model/. Figures whose
run directories are gone stand in `earlier.md` beside the plan. A smaller run, of another network or
fewer images, answers no claim; a plan may ask it which way the figures go.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.commands.reproduce_plan import (
    PLAN,
    Direction,
    Entry,
    Plan,
    load_plan,
    recipe_for,
    with_source_of,
)
from finetune.errors import CheckpointError
from finetune.evaluation.claims import ACCURACIES, VERDICTS, answer, wording
from finetune.evaluation.metrics import mean_std
from finetune.recipe.identity import without_seed
from finetune.recipe.load import Claim, Recipe, load_recipe
from finetune.report.run_data import Run, read_run
from finetune.text import MISSING, counted, markdown_table, mean_and_std

__all__ = [
    "RUN_FILES",
    "Outcome",
    "directions_table",
    "in_words",
    "page_of",
    "place_of",
    "run_hash",
]

RUN_FILES = ("recipe.yaml", "run.json", "metrics.jsonl", "results.json")
_EXPECTED = "expected before the run"  # how the source of such a claim begins


@dataclass(frozen=True)
class Outcome:
    """The outcome of an entry of a plan.

    Attributes:
        entry: of the plan.
        paths: a run directory for each seed, or the folder of its probe.json.
        results: the content of results.json, for each run.
        choices: the rows of its grid, if it has one.
        probe: the content of probe.json, if it is one.
    """

    entry: Entry
    paths: Sequence[Path]
    results: Sequence[Mapping[str, Any]] = ()
    choices: Sequence[dict[str, Any]] = ()
    probe: dict[str, Any] | None = None

    @cached_property
    def runs(self) -> list[Run]:
        """Its run directories; none for a probe."""
        return [] if self.probe else [read_run(path) for path in self.paths]

    @property
    def machines(self) -> list[Mapping[str, Any]]:
        """The machines and commits of the runs, or of the probe."""
        return [self.probe["machine"]] if self.probe else [run.record for run in self.runs]


def page_of(
    plan: Plan, path: Path, outcomes: Sequence[Outcome], *, notice: str | None = None
) -> str:
    """Write the page as Markdown.

    Args:
        plan: whose runs are shown.
        path: its file; the recipes are those of the folder `recipes` that it lies in.
        outcomes: of the entries that are done.
        notice: what a reader must know first; nothing is judged then.
    Raises: CheckpointError if a run directory is damaged.
    """
    root = next((one for one in path.parents if one.name == "recipes"), path.parent)
    files = [file for file in sorted(root.rglob("*.yaml")) if file.parent.name != "accelerate"]
    recipes = {file: load_recipe(file) for file in files if file.name != PLAN}
    earlier = path.parent / "earlier.md"
    before = earlier.read_text(encoding="utf-8") if earlier.is_file() else ""
    parts: dict[str, list[str]] = {
        "What was run": _runs_table(outcomes, path, judged=notice is None),
        "Few training images": _probe_table(outcomes, path),
        "Beside other programs": [] if notice else _beside_table(plan, outcomes),
        "The review's three experiments, on a smaller network": directions_table(
            plan.directions, outcomes
        ),
        "What the sources report": _claims_table(root, recipes, path, outcomes, before),
        "All recipes": _recipes_table(root, recipes),
        "Earlier runs": before.strip().splitlines(),
        "The run directories": _directories_table(outcomes),
    }
    command = f"finetune reproduce {path.parent.name} --page {root.name}/README.md"
    lines = ["# Recipes, what their sources report and what was measured", ""]
    lines += [f"**{notice}**", ""] if notice else []
    lines += [
        f"`{command}` writes this page from the run directories at its end; with `--done` it "
        "trains nothing. Figures are means ± standard deviations over seeds.",
        "",
    ]
    notes = {run.recipe.run.note for one in outcomes for run in one.runs} - {None, notice}
    lines += [line for note in sorted(map(str, notes)) for line in (note, "")]
    for title, part in parts.items():
        lines += [f"## {title}", "", *part, ""] if part else []
    return "\n".join(lines).rstrip("\n") + "\n"


# --- the runs ------------------------------------------------------------------------------------


def _runs_table(outcomes: Sequence[Outcome], path: Path, *, judged: bool) -> list[str]:
    rows = []
    for one in outcomes:
        if one.probe:
            continue
        split = one.runs[0].shown_split
        figures = [run.figures(split) for run in one.runs]
        shares = [row.get("top1", row.get("map")) for row in figures]
        name = "mAP " if one.runs[0].is_multilabel else ""
        images = [row.get("examples") for row in figures]
        seconds = [run.figures("train").get("seconds") for run in one.runs]
        named = recipe_for(one.entry, path).data.source
        rows.append(
            [
                f"`{one.entry.name}`",
                in_words(one.runs[0].recipe, named=named),
                _expected(one.runs, judged=judged),
                f"{name}{_percent(shares)} on {_joined(images)} {split} images",
                _joined(run.recipe.run.seed for run in one.runs),
                _spread(seconds, 0),
                _joined((", ".join(place_of(machine)) for machine in one.machines), "; "),
            ]
        )
    heads = ["run", "what", _EXPECTED, "top-1, %", "seeds", "training, s", "on, at commit"]
    return _table(heads, rows)


def _expected(runs: Sequence[Run], *, judged: bool) -> str:
    """The claims of the first run's own recipe.yaml, and how many of the runs met them."""
    expectations = []
    for claim in runs[0].recipe.claims:
        if claim.source.startswith(_EXPECTED):
            rows = [_answer(claim.model_dump(), run) for run in runs]
            what, reported, _ = wording(rows[0])
            expectations.append(f"{what}: {reported}" + (f"; {_met(rows)}" if judged else ""))
    return "; ".join(expectations) or MISSING


def _probe_table(outcomes: Sequence[Outcome], path: Path) -> list[str]:
    probed = [(one, one.entry.probe, one.probe) for one in outcomes if one.probe]
    shots = sorted({count for _, _, measured in probed for count in measured["shots"]})
    rows = []
    for one, probe, measured in probed:
        assert probe is not None
        name = f"`{one.entry.name}`: `{measured['model']}`, "
        cells = [name + recipe_for(one.entry, path).data.source]
        expected = dict(zip(probe.shots, probe.expected, strict=False))
        for count in shots:
            text = _percent(measured["shots"].get(count, {}).get("seeds", ()))
            if count in expected:
                low, high = expected[count]
                text += f" (expected {100 * low:.1f} to {100 * high:.1f})"
            cells.append(text)
        cells += [f"{measured['protocol']['test_images']:,}", str(probe.draws)]
        rows.append([*cells, ", ".join(place_of(measured["machine"]))])
    heads = ["run", *(f"{count} of each class" for count in shots)]
    table = _table([*heads, "test images", "draws", "on, at commit"], rows)
    caption = (
        "Top-1 in per cent of a linear classifier on frozen features, at the weights' own size."
    )
    return [caption, "", *table] if table else []


def _beside_table(plan: Plan, outcomes: Sequence[Outcome]) -> list[str]:
    """Measurements of other programs, and the commands that made them."""
    known = {one.entry.name: one.runs for one in outcomes}
    rows, commands = [], []
    for entry in plan.runs:
        own = known.get(entry.name, [])
        top1 = _percent(run.figures(own[0].shown_split).get("top1") for run in own)
        for other in entry.beside:
            cells = [f"`{entry.name}`", other.program, _percent(other.top1), top1]
            cells += [_spread(other.seconds, 0), _spread(other.our_seconds, 0)]
            on = other.machine + (f"; {other.note}" if other.note else "")
            rows.append([*cells, _joined(other.seeds), on])
            commands += ["", f"`{entry.name}`, {other.program}:", ""]
            commands += ["```bash", other.command, "```"]
    heads = ["run", "program", "top-1, %", "finetune's", "wall-clock, s", "finetune's"]
    return [*_table([*heads, "seeds", "on"], rows), *commands]


# --- claims --------------------------------------------------------------------------------------


def directions_table(directions: Sequence[Direction], outcomes: Sequence[Outcome]) -> list[str]:
    """Answer which way figures go, for each seed.

    Args:
        directions: of a plan.
        outcomes: of the entries that they name; what is not there stays open.
    Returns: the lines of a table, in Markdown.
    """
    known = {one.entry.name: one.runs for one in outcomes}
    rows = []
    for asked in directions:
        claim = asked.model_dump(include={"metric", "when", "trend"})
        ours, theirs = (
            {run.recipe.run.seed: _answer(claim, run)["measured"] for run in known.get(name, ())}
            for name in (asked.run, asked.below or "")
        )
        if asked.trend:
            sign = 1 if asked.trend == "rising" else -1
            answers = [sign * one > 0 for one in ours.values() if one is not None]
            shown = f"{asked.metric}, slope an epoch: {_spread(ours.values(), 4, signed=True)}"
        else:
            pairs = [(one, theirs.get(seed)) for seed, one in ours.items()]
            answers = [one < other for one, other in pairs if None not in (one, other)]
            both = (_as_is(asked.metric, part.values()) for part in (ours, theirs))
            shown = f"{asked.metric}: {' and '.join(both)}"
        verdict = f"yes for {sum(answers)} of {len(answers)} seeds" if answers else "open"
        names = f"`{asked.run}`" + (f", `{asked.below}`" if asked.below else "")
        cells = [asked.question, asked.source, asked.expected or MISSING, verdict]
        rows.append([*cells, shown if answers else MISSING, names])
    heads = ["question", "yes is claimed by", _EXPECTED, "answer", "measured", "runs"]
    return _table(heads, rows)


def _claims_table(
    root: Path,
    recipes: Mapping[Path, Recipe],
    path: Path,
    outcomes: Sequence[Outcome],
    earlier: str,
) -> list[str]:
    """Every claim of every recipe, and who has answered it."""
    rows = []
    for file, recipe in recipes.items():
        used = [
            one
            for one in outcomes
            if one.runs and (path.parent / one.entry.recipe).resolve() == file.resolve()
        ]
        name = file.relative_to(root).as_posix()
        see = "; for an earlier run see below" if f"{root.name}/{name}" in earlier else ""
        unanswered = [f"open{see}", MISSING, in_words(recipe)]
        for claim in recipe.claims:
            if not claim.source.startswith(_EXPECTED):
                what, reported, _ = wording(claim.model_dump())
                head = [f"`{name}`", what, claim.source, reported]
                answers = [_answered(claim, recipe, one) for one in used] or [unanswered]
                rows += [[*head, *cells] for cells in answers]
    for file in sorted(root.rglob(PLAN)):
        for entry in load_plan(file).runs:
            if entry.reported:
                name = f"`{file.parent.relative_to(root).as_posix()}: {entry.name}`"
                row = [name, "reported", "its plan", entry.reported, "open", MISSING]
                rows.append([*row, in_words(recipe_for(entry, file))])
    heads = ["recipe", "claim", "source", "reported", "answered", "measured"]
    return _table([*heads, "a full answer needs"], rows)


def _answered(claim: Claim, recipe: Recipe, one: Outcome) -> list[str]:
    """Who answers a claim of a recipe, with what, and what is missing."""
    rows = [_answer(claim.model_dump(), run) for run in one.runs]
    values = [row["measured"] for row in rows if row["measured"] is not None]
    shown = _as_is(claim.metric, values)
    if claim.trend:
        shown = f"{_spread(values, 4, signed=True)} an epoch"
    if claim.below and all("measured_other" in row for row in rows):
        shown += f" and {_as_is(claim.below, [row['measured_other'] for row in rows])}"
    shown = f"{shown} ({len(values)} runs)" if values else MISSING
    own = one.runs[0].recipe
    if without_seed(with_source_of(recipe, own)) == without_seed(own):
        return [f"by a run, `{one.entry.name}`: {_met(rows)}", shown, MISSING]
    return [f"by a smaller run, `{one.entry.name}`", shown, in_words(recipe)]


def _answer(claim: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """A claim, also one that the run did not have, answered from its files; see `claims.answer`."""
    return answer([claim], run.history, run.results, run.steps_per_epoch or 1.0)[0]


def _met(rows: Sequence[Mapping[str, Any]]) -> str:
    met = sum(row["verdict"] == VERDICTS[0] for row in rows)
    return f"met by {met} of {len(rows)}"


# --- recipes and directories ---------------------------------------------------------------------


def _recipes_table(root: Path, recipes: Mapping[Path, Recipe]) -> list[str]:
    rows = []
    for file, recipe in recipes.items():
        name = file.relative_to(root).as_posix()
        rows.append([f"[`{name}`]({name})", in_words(recipe), _source_of(file)])
    return _table(["recipe", "what", "source"], rows)


def _source_of(file: Path) -> str:
    """The first sentence of a recipe's "# Source: …"."""
    lines = file.read_text(encoding="utf-8").splitlines()
    head = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    match = re.search(r"Source: (.+?[.;])(?= |$)", head)
    return match[1].rstrip(".;") if match else MISSING


def _directories_table(outcomes: Sequence[Outcome]) -> list[str]:
    places = [place for one in outcomes for place in zip(one.paths, one.machines, strict=True)]
    rows = [[f"`{path.name}`", *place_of(on), f"`{run_hash(path)}`"] for path, on in places]
    if not rows:
        return []
    caption = (
        f"`cat {' '.join(RUN_FILES)} | sha256sum` (of a probe: `probe.json`) gives the last column."
    )
    table = _table(["directory", "on", "at commit", "sha256"], rows)
    versions = Counter(", ".join(map(" ".join, on["versions"].items())) for _, on in places)
    made_with = [f"{number} with {text}." for text, number in versions.items()]
    return [caption, "", *table, "", *made_with]


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


# --- in words ------------------------------------------------------------------------------------


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


def place_of(machine: Mapping[str, Any]) -> tuple[str, str]:
    """Hardware and commit.

    Args:
        machine: a run.json, or the "machine" of a probe.json.
    """
    device, commit = machine.get("device", {}), machine.get("commit") or ""
    name = str(device.get("name", MISSING))
    if device.get("type") == "cpu":
        name += f", {counted(device.get('threads', 1), 'thread')}"
    return name, f"{commit[:7]}{'+changes' if '+' in commit else ''}" or "not known"


def _as_is(metric: str, values: Iterable[float | None]) -> str:
    """Mean and spread of a metric, accuracies in per cent."""
    is_share = metric.endswith(ACCURACIES)
    return f"{_percent(values)} %" if is_share else _spread(values, 4)


def _percent(values: Iterable[float | None]) -> str:
    return _spread((None if one is None else 100 * one for one in values), 2)


def _spread(values: Iterable[float | None], digits: int, *, signed: bool = False) -> str:
    """Mean and standard deviation over the runs whose figure is known."""
    known = [one for one in values if one is not None]
    if not known:
        return MISSING
    mean, std, _ = mean_std(known)
    return ("+" if signed and mean >= 0 else "") + mean_and_std(mean, std, digits)


def _joined(values: Iterable[Any], sign: str = ", ") -> str:
    """Different values, in their order."""
    return sign.join(dict.fromkeys(map(str, values)))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; none without rows."""
    return markdown_table(heads, rows) if rows else []
