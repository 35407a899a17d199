"""What came of a plan as Markdown: a table of its runs, what its grids chose, and its claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.commands.probe import describe as describe_probe
from finetune.evaluation.claims import VERDICTS, table

__all__ = ["FIGURES", "SMOKE", "describe"]

SMOKE = (
    "A smoke test of the whole path in minutes. It is not the experiment, and its figures say "
    "nothing about it."
)
FIGURES = {"top1": "top-1, %", "top5": "top-5, %", "loss": "loss", "ece": "calibration error"}


def describe(told: Mapping[str, Any]) -> str:
    """The result of a plan as Markdown: runs, choices and claims.

    Args:
        told: of `reproduce`.
    """
    lines = [f"# {told['title']}", ""]
    smoke = told["scale"] == "smoke"
    if smoke:
        lines += [f"**{SMOKE}**", ""]
    reported = any(row.get("reported") for row in told["runs"])
    heads = ["run", "seeds", "images", *FIGURES.values(), *(["reported"] if reported else [])]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in told["runs"]:
        images = f"{row['examples']:,}" if "examples" in row else "–"
        cells = [row["name"], str(row["seeds"]), images]
        cells += [_spread(key, row[key]) if key in row else "–" for key in FIGURES]
        cells += [row["reported"] or "–"] if reported else []
        lines.append(f"| {' | '.join(cells)} |")
    for name, rows in told["choices"].items():
        lines += ["", f"Chosen for {name}, without reading the test split:", ""]
        lines += _choice_table(rows)
    for name, probe in told["probes"].items():
        lines += ["", f"Features of {name}:", "", "```", describe_probe(probe), "```"]
    if claims := told["claims"]:
        met = sum(claim["verdict"] == VERDICTS[0] for claim in claims)
        of_what = f"{met} of {len(claims)} met"
        if smoke:
            of_what = "of another experiment than this"
            claims = [{**claim, "verdict": "–"} for claim in claims]
        lines += ["", f"## Claims: {of_what}", "", table(claims)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _choice_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    by = next(key for key in rows[0] if key.startswith("val."))
    lines = [f"| settings | {by} | |", "|---|---|---|"]
    for row in rows:
        settings = ", ".join(row["overrides"])
        lines.append(f"| {settings} | {row[by]:.4f} | {'chosen' if row['chosen'] else ''} |")
    return lines


def _spread(key: str, figure: Mapping[str, float | None]) -> str:
    """A mean with its spread, accuracies in per cent."""
    factor, digits = (100.0, 2) if key.startswith("top") else (1.0, 4)
    mean, std = figure["mean"], figure["std"]
    shown = f"{factor * float(mean or 0):.{digits}f}"
    return shown if std is None else f"{shown} ± {factor * std:.{digits}f}"
