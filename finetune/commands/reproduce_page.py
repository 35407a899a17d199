"""The page that stands beside the recipes: what their sources report, and what was measured.

It is written from run directories alone; they need neither checkpoints nor model/. Two files beside
the plan hold the rest: `elsewhere.json`, measurements of other programs, and `earlier.md`, figures
whose run directories are gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from finetune.commands.reproduce_claims import claims_table, directions_table, recipe_files
from finetune.commands.reproduce_measured import (
    EXPECTED,
    MISSING,
    RUN_FILES,
    Measured,
    answer_of,
    in_words,
    is_expectation,
    joined,
    machines_of,
    percent,
    place_of,
    run_hash,
    spread,
    table_if_any,
    verdicts,
)
from finetune.commands.reproduce_plan import Plan
from finetune.errors import RecipeError, nearest
from finetune.evaluation.claims import wording
from finetune.recipe import yaml as recipe_yaml
from finetune.recipe.load import Section, load_recipe
from finetune.recipe.types import Real, Text, Whole
from finetune.recipe.validate import validate

__all__ = ["page_of"]


class _Elsewhere(Section):
    """One measurement of another program, beside an entry of the plan."""

    run: Text = Field(description="the entry")
    program: Text = Field(description="its name and version")
    command: Text = Field(description="as it was called")
    on: Text = Field(description="hardware and versions")
    seeds: tuple[Whole, ...] = Field(min_length=1, description="one figure for each")
    top1: tuple[Real, ...] = Field(description="fractions")
    seconds: tuple[Real, ...] = Field((), description="wall-clock of each command")
    our_seconds: tuple[Real, ...] = Field((), description="wall-clock of ours, on that machine")
    note: Text | None = Field(None, description="what differs")


class _Others(Section):
    """The content of elsewhere.json."""

    rows: tuple[_Elsewhere, ...]


def page_of(
    plan: Plan, path: Path, measured: Sequence[Measured], *, notice: str | None = None
) -> str:
    """Write the page as Markdown.

    Args:
        plan: whose runs are shown.
        path: its file; the recipes are those of the folder `recipes` that it lies in.
        measured: the entries that are done.
        notice: what a reader must know first.
    Raises: CheckpointError if a run directory is damaged, RecipeError for what elsewhere.json has.
    """
    root = next((one for one in path.parents if one.name == "recipes"), path.parent)
    earlier = path.parent / "earlier.md"
    before = earlier.read_text(encoding="utf-8") if earlier.is_file() else ""
    names = [entry.name for entry in plan.runs if entry.probe is None]
    others = () if notice else _read_elsewhere(path.parent / "elsewhere.json", names)
    parts: dict[str, list[str]] = {
        "What was run": _runs_table(measured, path, judged=notice is None),
        "Few training images": _probe_table(measured, path),
        "Beside other programs": _elsewhere_table(others, measured),
        "The review's three experiments, on a smaller network": directions_table(
            plan.directions, measured
        ),
        "What the sources report": claims_table(root, path, measured, before),
        "All recipes": _recipes_table(root),
        "Earlier runs": before.strip().splitlines(),
        "The run directories": _directories_table(measured),
    }
    command = f"finetune reproduce {path.parent.name} --page {root.name}/README.md"
    lines = ["# Recipes, what their sources report and what was measured", ""]
    lines += [f"**{notice}**", ""] if notice else []
    lines += [
        f"`{command}` writes this page from the run directories at its end; with `--done` it "
        "trains nothing. Figures are means ± standard deviations over seeds.",
        "",
    ]
    notes = {run.recipe.run.note for one in measured for run in one.runs} - {None, notice}
    lines += [line for note in sorted(map(str, notes)) for line in (note, "")]
    for title, part in parts.items():
        lines += [f"## {title}", "", *part, ""] if part else []
    return "\n".join(lines).rstrip("\n") + "\n"


# --- the runs ------------------------------------------------------------------------------------


def _runs_table(measured: Sequence[Measured], path: Path, *, judged: bool) -> list[str]:
    rows = []
    for one in measured:
        if not one.runs:
            continue
        split = "test" if one.runs[0].results.get("test") else "val"
        top1 = [run.figures(split)["top1"] for run in one.runs]
        seconds = [run.figures("train").get("seconds") for run in one.runs]
        images = {run.figures(split).get("examples") for run in one.runs}
        rows.append(
            [
                f"`{one.entry.name}`",
                in_words(one.runs[0].recipe, named=_source_of_entry(one, path)),
                _expected(one, judged=judged),
                f"{percent(top1)} on {joined(images)} {split} images",
                joined(run.recipe.run.seed for run in one.runs),
                spread([float(value) for value in seconds if value is not None], "{:.0f}"),
                machines_of(one),
            ]
        )
    heads = ["run", "what", EXPECTED, "top-1, %", "seeds", "training, s", "on, at commit"]
    return table_if_any(heads, rows)


def _source_of_entry(one: Measured, path: Path) -> str:
    """The images that the plan names; a copy of them may have been read."""
    recipe = load_recipe(path.parent / one.entry.recipe, list(one.entry.overrides))
    return recipe.data.source


def _expected(one: Measured, *, judged: bool) -> str:
    """The claims of the first run's own recipe.yaml, and how many of the runs met them."""
    expectations = []
    for claim in one.runs[0].recipe.claims:
        if is_expectation(claim):
            rows = [answer_of(claim, run) for run in one.runs]
            what, reported, _ = wording(rows[0])
            expectations.append(f"{what}: {reported}" + (f"; {verdicts(rows)}" if judged else ""))
    return "; ".join(expectations) or MISSING


# --- frozen features -----------------------------------------------------------------------------


def _probe_table(measured: Sequence[Measured], path: Path) -> list[str]:
    probed = [one for one in measured if one.entry.probe]
    shots = sorted({int(count) for one in probed for count in one.probe["shots"]})
    rows = []
    for one in probed:
        probe, measured_shots = one.entry.probe, one.probe["shots"]
        assert probe is not None
        cells = []
        for count in shots:
            figures = measured_shots.get(str(count))
            text = percent(figures["seeds"]) if figures else MISSING
            if probe.expected and count in probe.shots:
                low, high = probe.expected[probe.shots.index(count)]
                text += f" (expected {100 * low:.1f} to {100 * high:.1f})"
            cells.append(text)
        name = f"`{one.entry.name}`: `{one.probe['model']}`, {_source_of_entry(one, path)}"
        images = f"{one.probe['protocol']['test_images']:,}"
        rows.append([name, *cells, images, str(probe.draws), machines_of(one)])
    heads = ["run", *(f"{count} of each class" for count in shots)]
    table = table_if_any([*heads, "test images", "draws", "on, at commit"], rows)
    caption = (
        "Top-1 in per cent of a linear classifier on frozen features, at the weights' own size."
    )
    return [caption, "", *table] if table else []


# --- other programs ------------------------------------------------------------------------------


def _read_elsewhere(path: Path, names: Sequence[str]) -> tuple[_Elsewhere, ...]:
    """Read the measurements of other programs; none without the file.

    Raises: RecipeError for a row that is of no entry, or has not one figure for each seed.
    """
    if not path.is_file():
        return ()
    text = recipe_yaml.read_text(path)
    rows = validate(recipe_yaml.read_document(text, name=str(path)), _Others).rows
    for number, row in enumerate(rows, 1):
        if row.run not in names:
            problem = f"no run '{row.run}'{nearest(row.run, names)}"
        elif {len(row.top1), len(row.seconds or row.seeds)} != {len(row.seeds)}:
            problem = "give one figure for each of the seeds"
        else:
            continue
        raise RecipeError(f"{path}: row {number}: {problem}", code="recipe.wrong_value")
    return rows


def _elsewhere_table(others: Sequence[_Elsewhere], measured: Sequence[Measured]) -> list[str]:
    known = {one.entry.name: one for one in measured}
    rows, commands = [], []
    for row in others:
        ours = known.get(row.run)
        split = "test" if ours and ours.runs[0].results.get("test") else "val"
        own = [run.figures(split)["top1"] for run in ours.runs] if ours else []
        rows.append(
            [
                f"`{row.run}`",
                row.program,
                percent(row.top1),
                percent(own),
                spread(row.seconds, "{:.0f}"),
                spread(row.our_seconds, "{:.0f}"),
                joined(row.seeds),
                row.on + (f"; {row.note}" if row.note else ""),
            ]
        )
        commands += ["", f"`{row.run}`, {row.program}:", "", "```bash", row.command, "```"]
    heads = ["run", "program", "top-1, %", "finetune's", "wall-clock, s", "finetune's"]
    return [*table_if_any([*heads, "seeds", "on"], rows), *commands]


# --- recipes and directories ---------------------------------------------------------------------


def _recipes_table(root: Path) -> list[str]:
    rows = []
    for file in recipe_files(root):
        name = file.relative_to(root).as_posix()
        rows.append([f"[`{name}`]({name})", in_words(load_recipe(file)), _source_of(file)])
    return table_if_any(["recipe", "what", "source"], rows)


def _source_of(file: Path) -> str:
    """The first sentence of a recipe's "# Source: …"."""
    lines = file.read_text(encoding="utf-8").splitlines()
    head = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    match = re.search(r"Source: (.+?[.;])(?= |$)", head)
    return match[1].rstrip(".;") if match else MISSING


def _directories_table(measured: Sequence[Measured]) -> list[str]:
    rows = [
        [f"`{path.name}`", *place_of(machine), f"`{run_hash(path)}`"]
        for one in measured
        for path, machine in zip(one.paths, one.machines, strict=True)
    ]
    lines = table_if_any(["directory", "on", "at commit", "sha256"], rows)
    if not lines:
        return []
    caption = (
        f"`cat {' '.join(RUN_FILES)} | sha256sum` (of a probe: `probe.json`) gives the last column."
    )
    return [caption, "", *lines, "", *_versions(measured)]


def _versions(measured: Sequence[Measured]) -> list[str]:
    """The versions that the runs were made with, a line for each set."""
    counts: dict[str, int] = {}
    for machine in (machine for one in measured for machine in one.machines):
        text = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        counts[text] = counts.get(text, 0) + 1
    return [f"{number} with {text}." for text, number in counts.items()]
