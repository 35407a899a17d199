"""Write the results page of the recipes (recipes/README.md): published and measured results.

The page is written from run directories, which need neither checkpoints nor model/. Results whose
run directories no longer exist are kept in `earlier.md` next to the plan. A run that is smaller
than the published experiment (another network or fewer images) cannot confirm or refute the claims
of the experiment; a plan can only ask whether a metric moves in the same direction (`Direction`).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.commands.reproduce_plan import (
    PLAN_FILENAME,
    Direction,
    Plan,
    PlanEntry,
    load_entry_recipe,
    load_plan,
)
from finetune.errors import CheckpointError, redact_urls
from finetune.evaluation.claims import PERCENT_METRICS, VERDICTS, check_claims, format_claim
from finetune.evaluation.metrics import mean_std
from finetune.formatting import MISSING, format_mean_std, markdown_table, pluralize
from finetune.log import logger, warn_once
from finetune.recipe.load import Claim, DataSection, load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import names_other_inputs, training_keys_without_seed
from finetune.report.comparison import (
    data_identity,
    differing_settings,
    have_other_images,
    unstated_differences,
)
from finetune.report.run_data import Run, read_run

__all__ = [
    "RUN_FILES",
    "EntryResult",
    "directions_table",
    "find_other_inputs",
    "hardware_and_commit",
    "render_page",
    "run_hash",
    "summarize_recipe",
]

RUN_FILES = ("recipe.yaml", "run.json", "metrics.jsonl", "results.json")
_EXPECTED_PREFIX = "expected before the run"  # start of `claim.source` for a prediction


@dataclass(frozen=True)
class EntryResult:
    """The results of one entry of a plan.

    Attributes:
        entry: the entry.
        planned: the recipe in the plan, without the overrides of the command line.
        paths: run directories, one per seed; for a probe, the folder of probe.json.
        results: the content of results.json for each path; empty for a probe.
        choices: the results of the grid search; empty without a grid.
        probe: the result of `probe_model`; None unless the entry is a probe.
    """

    entry: PlanEntry
    planned: Recipe
    paths: Sequence[Path]
    results: Sequence[Mapping[str, Any]] = ()
    choices: Sequence[dict[str, Any]] = ()
    probe: dict[str, Any] | None = None

    @cached_property
    def runs(self) -> list[Run]:
        """The run directories; empty for a probe."""
        return [] if self.probe else [read_run(path) for path in self.paths]

    @cached_property
    def planned_runs(self) -> list[Run]:
        """The runs, with the plan's data source. They may have read a copy of it."""
        source = self.planned.data.source
        return [replace(run, recipe=run.recipe.with_source(source)) for run in self.runs]

    @property
    def data_identity(self) -> tuple[Recipe, Mapping[str, str]]:
        """What the plan says about the images, and the fingerprints of whole splits that were read.

        Those of the first run: the runs of an entry are checked to have the same. A probe uses only
        the source.
        """
        if self.probe:
            data = DataSection(source=self.planned.data.source)
            return self.planned.model_copy(update={"data": data}), self.probe["split_fingerprints"]
        return data_identity(self.planned_runs[0])

    def evaluate_claims(self) -> list[dict[str, Any]]:
        """Check the plan's published claims, and the predictions of each run, against each run.

        Returns: a dict for each claim of each run, with the run's name as "run".
        """
        published = [claim for claim in self.planned.claims if not _is_expectation(claim)]
        return [
            {**_answer_claim(claim.model_dump(), run), "run": run.name}
            for run in self.runs
            for claim in (*published, *filter(_is_expectation, run.recipe.claims))
        ]

    @property
    def weights(self) -> tuple[str, str | None]:
        """Name and sha256 of the pretrained weights of the first run; None if they are random.

        A probe has no sha256; `run_plan` compares the weights of probes by their own hash.
        """
        if self.probe:
            return self.probe["model"], None
        return self.runs[0].recipe.model.name, self.runs[0].record.get("weights_sha256")

    @property
    def machines(self) -> list[Mapping[str, Any]]:
        """Dicts with the machine and commit of each run (its run.json), or of the probe."""
        return [self.probe["machine"]] if self.probe else [run.record for run in self.runs]


def render_page(
    plan: Plan, path: Path, entry_results: Sequence[EntryResult], *, disclaimer: str | None = None
) -> str:
    """Render the page as Markdown.

    Args:
        plan: the plan whose runs the page shows.
        path: path of the plan.yaml; the page lists all recipes of the `recipes` folder above it.
        entry_results: results of the finished entries.
        disclaimer: a note shown first, such as for a smoke test; if given, no claim is judged.
    Raises: CheckpointError if a run directory is corrupt.
    """
    root = next((item for item in path.parents if item.name == "recipes"), path.parent)
    files = [file for file in sorted(root.rglob("*.yaml")) if file.parent.name != "accelerate"]
    recipes = {file: load_recipe(file) for file in files if file.name != PLAN_FILENAME}
    earlier = path.parent / "earlier.md"
    earlier_text = earlier.read_text(encoding="utf-8") if earlier.is_file() else ""
    other_inputs = find_other_inputs(entry_results)
    sections: dict[str, list[str]] = {
        "What was run": _runs_table(entry_results, other_inputs, with_verdicts=disclaimer is None),
        "Few training images": _probe_table(entry_results, other_inputs),
        "Comparison with other programs": []
        if disclaimer
        else _other_programs_table(plan, entry_results),
        "Directions that the sources claim, in smaller runs": directions_table(
            plan.directions, entry_results
        ),
        "What the sources report": _claims_table(root, recipes, path, entry_results, earlier_text),
        "All recipes": _recipes_table(root, recipes),
        "Earlier runs": earlier_text.strip().splitlines(),
        "Run directories": _directories_table(entry_results),
    }
    command = f"finetune reproduce {path.parent.name} --page {root.name}/README.md"
    lines = ["# Recipes: reported and measured results", ""]
    lines += [f"**{disclaimer}**", ""] if disclaimer else []
    lines += [
        f"`{command}` writes this page from the run directories when it finishes; with `--done` it "
        "trains nothing. Values are means ± standard deviations over seeds.",
        "",
    ]
    notes = {run.recipe.run.note for item in entry_results for run in item.runs} - {
        None,
        disclaimer,
    }
    lines += [line for note in sorted(map(str, notes)) for line in (note, "")]
    for title, section_lines in sections.items():
        lines += [f"## {title}", "", *section_lines, ""] if section_lines else []
    return "\n".join(lines).rstrip("\n") + "\n"


# --- the runs ------------------------------------------------------------------------------------


def _runs_table(
    entry_results: Sequence[EntryResult], other_inputs: Mapping[str, str], *, with_verdicts: bool
) -> list[str]:
    rows = []
    for entry_result in entry_results:
        if entry_result.probe:
            continue
        split = entry_result.runs[0].reported_split
        metrics = [run.metrics(split) for run in entry_result.runs]
        accuracies = [row.get("top1", row.get("map")) for row in metrics]
        name = "mAP " if entry_result.runs[0].is_multilabel else ""
        num_images = [row.get("examples") for row in metrics]
        seconds = [run.metrics("train").get("seconds") for run in entry_result.runs]
        what = summarize_recipe(
            entry_result.runs[0].recipe, planned_source=entry_result.planned.data.source
        )
        what += other_inputs.get(entry_result.entry.name, "")
        rows.append(
            [
                f"`{entry_result.entry.name}`",
                what,
                _format_expectations(entry_result.runs, with_verdicts=with_verdicts),
                f"{name}{_format_percent_mean(accuracies)} on {_join_unique(num_images)} {split} "
                "images",
                _join_unique(run.recipe.run.seed for run in entry_result.runs),
                _format_mean(seconds, 0),
                _join_unique(
                    (", ".join(hardware_and_commit(machine)) for machine in entry_result.machines),
                    "; ",
                ),
            ]
        )
    header = [
        "run",
        "what",
        _EXPECTED_PREFIX,
        "top-1, %",
        "seeds",
        "training, s",
        "hardware, commit",
    ]
    return _table_lines(header, rows)


def find_other_inputs(entry_results: Sequence[EntryResult]) -> dict[str, str]:
    """Find entries that read other images or weights than others for which the plan has the same.

    Returns: a dict from the name of an entry to a note with the entries that differ from it; also
        logs a warning for each.
    """
    notes: dict[str, str] = {}
    for what, differ in (
        ("images or labels", _have_other_images),
        ("pretrained weights", _have_other_weights),
    ):
        for one in entry_results:
            name = one.entry.name
            others = ", ".join(
                f"`{other.entry.name}`" for other in entry_results if differ(one, other)
            )
            if others:
                notes[name] = f"{notes.get(name, '')}; its {what} differ from those of {others}"
                warn_once(
                    f"{name}: read other {what} than {others}, although the plan gives both "
                    "the same; remove the wrong ones and run the command again"
                )
    return notes


def _have_other_images(one: EntryResult, other: EntryResult) -> bool:
    return have_other_images([one.data_identity, other.data_identity])


def _have_other_weights(one: EntryResult, other: EntryResult) -> bool:
    (name, sha256), (other_name, other_sha256) = one.weights, other.weights
    return name == other_name and None not in (sha256, other_sha256) and sha256 != other_sha256


def _format_expectations(runs: Sequence[Run], *, with_verdicts: bool) -> str:
    """Format the claims written before the run, and how many of the runs met each."""
    expectations = []
    for claim in runs[0].recipe.claims:
        if _is_expectation(claim):
            rows = [_answer_claim(claim.model_dump(), run) for run in runs]
            what, reported, _ = format_claim(rows[0])
            expectations.append(
                f"{what}: {reported}" + (f"; {_format_num_met(rows)}" if with_verdicts else "")
            )
    return "; ".join(expectations) or MISSING


def _probe_table(
    entry_results: Sequence[EntryResult], other_inputs: Mapping[str, str]
) -> list[str]:
    probed = [
        (entry_result, entry_result.entry.probe, entry_result.probe)
        for entry_result in entry_results
        if entry_result.probe
    ]
    shots = sorted({count for _, _, probe_result in probed for count in probe_result["shots"]})
    rows = []
    for entry_result, settings, probe_result in probed:
        assert settings is not None
        name = f"`{entry_result.entry.name}`: `{probe_result['model']}`, "
        note = other_inputs.get(entry_result.entry.name, "")
        cells = [name + redact_urls(entry_result.planned.data.source) + note]
        expected = dict(zip(settings.shots, settings.expected, strict=False))
        for count in shots:
            text = _format_percent_mean(probe_result["shots"].get(count, {}).get("seeds", ()))
            if count in expected:
                lowest, highest = expected[count]
                text += f" (expected {100 * lowest:.1f} to {100 * highest:.1f})"
            cells.append(text)
        cells += [f"{probe_result['protocol']['test_images']:,}", str(settings.draws)]
        rows.append([*cells, ", ".join(hardware_and_commit(probe_result["machine"]))])
    header = ["run", *(f"{count} per class" for count in shots)]
    table = _table_lines([*header, "test images", "draws", "hardware, commit"], rows)
    caption = (
        "Top-1 in percent of a linear classifier on frozen features, at the weights' own image "
        "size."
    )
    return [caption, "", *table] if table else []


def _other_programs_table(plan: Plan, entry_results: Sequence[EntryResult]) -> list[str]:
    """Tabulate the results of other programs next to ours, and list their commands."""
    runs_by_entry = {entry_result.entry.name: entry_result.runs for entry_result in entry_results}
    rows, commands = [], []
    for entry in plan.runs:
        own = runs_by_entry.get(entry.name, [])
        top1 = _format_percent_mean(run.metrics(own[0].reported_split).get("top1") for run in own)
        for other in entry.beside:
            cells = [f"`{entry.name}`", other.program, _format_percent_mean(other.top1), top1]
            cells += [_format_mean(other.seconds, 0), _format_mean(other.our_seconds, 0)]
            where = other.machine + (f"; {other.note}" if other.note else "")
            rows.append([*cells, _join_unique(other.seeds), where])
            commands += ["", f"`{entry.name}`, {other.program}:", ""]
            commands += ["```bash", other.command, "```"]
    header = ["run", "program", "top-1, %", "finetune's", "wall-clock, s", "finetune's"]
    return [*_table_lines([*header, "seeds", "hardware"], rows), *commands]


# --- claims --------------------------------------------------------------------------------------


def directions_table(
    directions: Sequence[Direction], entry_results: Sequence[EntryResult]
) -> list[str]:
    """Answer a plan's questions about the direction of metrics, for each seed.

    Args:
        directions: the questions of a plan.
        entry_results: results of the entries that `directions` name; the question about an entry
            without results is answered "open".
    Returns: the lines of a Markdown table.
    """
    runs_by_entry = {value.entry.name: value.planned_runs for value in entry_results}
    rows = []
    for direction in directions:
        claim = direction.model_dump(include={"metric", "when", "trend"})
        ours, theirs = (
            {
                run.recipe.run.seed: _answer_claim(claim, run)["measured"]
                for run in runs_by_entry.get(name, ())
            }
            for name in (direction.run, direction.below or "")
        )
        if direction.trend:
            slope_sign = 1 if direction.trend == "rising" else -1
            answers = [slope_sign * value > 0 for value in ours.values() if value is not None]
            slope = _format_mean(ours.values(), 4, signed=True)
            measured = f"{direction.metric}, slope per epoch: {slope}"
        else:
            pairs = [(value, theirs.get(seed)) for seed, value in ours.items()]
            if _warn_of_other_inputs(runs_by_entry, direction):
                pairs = []
            answers = [value < other for value, other in pairs if None not in (value, other)]
            both = (_format_metric_mean(direction.metric, part.values()) for part in (ours, theirs))
            measured = f"{direction.metric}: {' and '.join(both)}"
        verdict = f"yes for {sum(answers)} of {len(answers)} seeds" if answers else "open"
        names = f"`{direction.run}`" + (f", `{direction.below}`" if direction.below else "")
        cells = [direction.question, direction.source, direction.expected or MISSING, verdict]
        rows.append([*cells, measured if answers else MISSING, names])
    header = ["question", "claimed by", _EXPECTED_PREFIX, "answer", "measured", "runs"]
    return _table_lines(header, rows)


def _warn_of_other_inputs(runs_by_entry: Mapping[str, Sequence[Run]], direction: Direction) -> bool:
    """Log a warning if the runs of two entries used different images or weights of one name.

    Returns: True if they did, so that the runs are not comparable.
    """
    names = (direction.run, direction.below or "")
    runs = [run for name in names for run in runs_by_entry.get(name, ())]
    keys = [key for key, _ in differing_settings([run.recipe for run in runs])]
    inputs: Sequence[str] = []
    if have_other_images([data_identity(run) for run in runs]):
        inputs = ["images or labels"]
    elif runs and not names_other_inputs(keys, "data"):
        inputs = unstated_differences(runs)
    if not inputs:
        return False
    logger.warning(
        f"{direction.run} and {direction.below}: their runs used different {' and '.join(inputs)}, "
        "so they are not compared; remove the older runs and run the command again"
    )
    return True


def _claims_table(
    root: Path,
    recipes: Mapping[Path, Recipe],
    path: Path,
    entry_results: Sequence[EntryResult],
    earlier_text: str,
) -> list[str]:
    """Tabulate every claim of every recipe, with the measured values of the runs of that recipe."""
    rows = []
    for file, recipe in recipes.items():
        matching = [
            entry_result
            for entry_result in entry_results
            if entry_result.runs
            and (path.parent / entry_result.entry.recipe).resolve() == file.resolve()
        ]
        name = file.relative_to(root).as_posix()
        hint = "; see the earlier run below" if f"{root.name}/{name}" in earlier_text else ""
        unanswered = [f"open{hint}", MISSING, summarize_recipe(recipe)]
        for claim in recipe.claims:
            if not _is_expectation(claim):
                what, reported, _ = format_claim(claim.model_dump())
                claim_cells = [f"`{name}`", what, claim.source, reported]
                answers = [
                    _format_answer(claim, recipe, entry_result) for entry_result in matching
                ] or [unanswered]
                rows += [[*claim_cells, *cells] for cells in answers]
    for file in sorted(root.rglob(PLAN_FILENAME)):
        for entry in load_plan(file).runs:
            if entry.reported:
                name = f"`{file.parent.relative_to(root).as_posix()}: {entry.name}`"
                row = [name, "reported", "its plan", entry.reported, "open", MISSING]
                rows.append([*row, summarize_recipe(load_entry_recipe(entry, file))])
    header = ["recipe", "claim", "source", "reported", "answered", "measured"]
    return _table_lines([*header, "full experiment"], rows)


def _format_answer(claim: Claim, recipe: Recipe, entry_result: EntryResult) -> list[str]:
    """Format the last three cells of a claim's row: answer, measured values, full experiment."""
    rows = [_answer_claim(claim.model_dump(), run) for run in entry_result.runs]
    values = [row["measured"] for row in rows if row["measured"] is not None]
    measured = _format_metric_mean(claim.metric, values)
    if claim.trend:
        measured = f"{_format_mean(values, 4, signed=True)} per epoch"
    if claim.below and all("measured_other" in row for row in rows):
        measured += (
            f" and {_format_metric_mean(claim.below, [row['measured_other'] for row in rows])}"
        )
    measured = f"{measured} ({len(values)} runs)" if values else MISSING
    run_recipe = entry_result.planned_runs[0].recipe
    if training_keys_without_seed(recipe) == training_keys_without_seed(run_recipe):
        return [
            f"by a run, `{entry_result.entry.name}`: {_format_num_met(rows)}",
            measured,
            MISSING,
        ]
    return [f"by a smaller run, `{entry_result.entry.name}`", measured, summarize_recipe(recipe)]


def _answer_claim(claim: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Check a claim against a run's files, even if the run's recipe does not contain the claim."""
    return check_claims([claim], run.history, run.results, run.steps_per_epoch or 1.0)[0]


def _is_expectation(claim: Claim) -> bool:
    """Return True for a prediction, written before the run, not a published result."""
    return claim.source.startswith(_EXPECTED_PREFIX)


def _format_num_met(rows: Sequence[Mapping[str, Any]]) -> str:
    met = sum(row["verdict"] == VERDICTS[0] for row in rows)
    return f"met by {met} of {len(rows)}"


# --- recipes and directories ---------------------------------------------------------------------


def _recipes_table(root: Path, recipes: Mapping[Path, Recipe]) -> list[str]:
    rows = []
    for file, recipe in recipes.items():
        name = file.relative_to(root).as_posix()
        rows.append([f"[`{name}`]({name})", summarize_recipe(recipe), _read_recipe_source(file)])
    return _table_lines(["recipe", "what", "source"], rows)


def _read_recipe_source(file: Path) -> str:
    """Return the first sentence of a recipe's "# Source: …" comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    match = re.search(r"Source: (.+?[.;])(?= |$)", comments)
    return match[1].rstrip(".;") if match else MISSING


def _directories_table(entry_results: Sequence[EntryResult]) -> list[str]:
    directories = [
        directory
        for entry_result in entry_results
        for directory in zip(entry_result.paths, entry_result.machines, strict=True)
    ]
    rows = [
        [f"`{path.name}`", *hardware_and_commit(machine), f"`{run_hash(path)}`"]
        for path, machine in directories
    ]
    if not rows:
        return []
    caption = (
        f"`cat {' '.join(RUN_FILES)} | sha256sum` gives the last column (for a probe, of "
        "`probe.json`)."
    )
    table = _table_lines(["directory", "hardware", "commit", "sha256"], rows)
    versions = Counter(
        ", ".join(map(" ".join, machine["versions"].items())) for _, machine in directories
    )
    made_with = [f"{count} with {text}." for text, count in versions.items()]
    return [caption, "", *table, "", *made_with]


def run_hash(path: Path) -> str:
    """Compute the sha256 of a folder's concatenated RUN_FILES or, for a probe, of probe.json.

    Args:
        path: the run directory, or the folder of probe.json.
    Raises: CheckpointError if a file is missing.
    """
    probe = path / "probe.json"
    files = [probe] if probe.is_file() else [path / name for name in RUN_FILES]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{file}: not found, but the run's hash includes it; copy all files of the run",
                code="checkpoint.not_found",
            )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# --- text ----------------------------------------------------------------------------------------


def summarize_recipe(recipe: Recipe, *, planned_source: str | None = None) -> str:
    """Summarize a recipe in one line: network, data and optimizer settings.

    Passwords and queries in URLs are redacted.

    Args:
        planned_source: the data source in the plan; shown if the recipe reads a copy of it.
    """
    model, data, optim = recipe.model, recipe.redacted().data, recipe.optim
    length = f"{optim.steps} steps"
    if optim.epochs:
        length = f"{optim.epochs:g} epoch{'s' if optim.epochs != 1 else ''}"
    weights = "" if model.pretrained else ", random weights"
    frozen = ", classifier only" if model.freeze == "backbone" else ""
    image_size = "" if model.image_size is None else f" at {model.image_size} px"
    subset = "" if data.num_train is None else f"{data.num_train:,} images of "
    source = data.source
    if planned_source is not None and redact_urls(planned_source) != source:
        source = f"{redact_urls(planned_source)}, a copy"
    return (
        f"`{model.name}`{image_size}{weights}{frozen}; {subset}{source}; {length} of batch "
        f"{data.batch_size}, {optim.name} at {optim.lr:g}"
    )


def hardware_and_commit(machine: Mapping[str, Any]) -> tuple[str, str]:
    """Return the hardware (device name) and the commit of a run, as text.

    Args:
        machine: the content of run.json, or the "machine" of probe.json.
    """
    device, commit = machine.get("device", {}), machine.get("commit") or ""
    name = str(device.get("name", MISSING))
    if device.get("type") == "cpu":
        name += f", {pluralize(device.get('threads', 1), 'thread')}"
    return name, f"{commit[:7]}{'+changes' if '+' in commit else ''}" or "not known"


def _format_metric_mean(metric: str, values: Iterable[float | None]) -> str:
    """Format the mean and standard deviation of a metric over runs, accuracies in percent."""
    is_percent = metric.endswith(PERCENT_METRICS)
    return f"{_format_percent_mean(values)} %" if is_percent else _format_mean(values, 4)


def _format_percent_mean(values: Iterable[float | None]) -> str:
    return _format_mean((None if value is None else 100 * value for value in values), 2)


def _format_mean(values: Iterable[float | None], digits: int, *, signed: bool = False) -> str:
    """Format the mean and standard deviation of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    mean, std, _ = mean_std(known)
    return ("+" if signed and mean >= 0 else "") + format_mean_std(mean, std, digits)


def _join_unique(values: Iterable[Any], separator: str = ", ") -> str:
    """Join the distinct values, in order of first occurrence."""
    return separator.join(dict.fromkeys(map(str, values)))


def _table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; an empty list without rows."""
    return markdown_table(header, rows) if rows else []
