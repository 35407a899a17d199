"""The results of a plan as Markdown: a table of its runs, the choices of its grids, its claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.commands.probe import describe as describe_probe
from finetune.evaluation.claims import VERDICTS, table
from finetune.text import markdown_table, mean_and_std

__all__ = ["FIGURES", "SMOKE", "describe"]

SMOKE = (
    "A smoke test of the whole path in minutes. It is not the experiment, and its figures say "
    "nothing about it."
)
FIGURES = {"top1": "top-1, %", "top5": "top-5, %", "loss": "loss", "ece": "calibration error"}


def describe(answer: Mapping[str, Any]) -> str:
    """The result of a plan as Markdown: runs, choices and claims.

    Args:
        answer: of `reproduce`.
    """
    lines = [f"# {answer['title']}", ""]
    smoke = answer["scale"] == "smoke"
    if smoke:
        lines += [f"**{SMOKE}**", ""]
    reported = any(row.get("reported") for row in answer["runs"])
    heads = ["run", "seeds", "images", *FIGURES.values(), *(["reported"] if reported else [])]
    runs = []
    for row in answer["runs"]:
        images = f"{row['examples']:,}" if "examples" in row else "–"
        cells = [row["name"], str(row["seeds"]), images]
        cells += [_spread(key, row[key]) if key in row else "–" for key in FIGURES]
        cells += [row["reported"] or "–"] if reported else []
        runs.append(cells)
    lines += markdown_table(heads, runs)
    for name, rows in answer["choices"].items():
        lines += ["", f"Chosen for {name}, without reading the test split:", ""]
        lines += _choice_table(rows)
    for name, probe in answer["probes"].items():
        lines += ["", f"Features of {name}:", "", "```", describe_probe(probe), "```"]
    if claims := answer["claims"]:
        met = sum(claim["verdict"] == VERDICTS[0] for claim in claims)
        of_what = f"{met} of {len(claims)} met"
        if smoke:
            of_what = "of another experiment than this"
            claims = [{**claim, "verdict": "–"} for claim in claims]
        lines += ["", f"## Claims: {of_what}", "", table(claims)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _choice_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    by = next(key for key in rows[0] if key.startswith("val."))
    cells = [
        [", ".join(row["overrides"]), f"{row[by]:.4f}", "chosen" if row["chosen"] else ""]
        for row in rows
    ]
    return markdown_table(["settings", by, ""], cells)


def _spread(key: str, figure: Mapping[str, float | None]) -> str:
    """A mean with its spread, accuracies in per cent."""
    factor, digits = (100.0, 2) if key.startswith("top") else (1.0, 4)
    mean, std = figure["mean"], figure["std"]
    return mean_and_std(factor * float(mean or 0), None if std is None else factor * std, digits)
