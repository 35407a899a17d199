"""The page of a search for a recipe: all trials with their curves, cost and end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.files import write_atomically
from finetune.formatting import format_duration, format_percent
from finetune.report import plots
from finetune.report.figure_style import to_svg
from finetune.report.html import render_html

__all__ = ["write_search_page"]


def write_search_page(folder: Path, search: Mapping[str, Any]) -> None:
    """Write trials.html into the folder of a search.

    Args:
        folder: the run directory.
        search: the content of tune.json.
    """
    metric = search["metric"]
    rows: list[dict[str, Any]] = []
    histories: list[tuple[str, list[dict[str, Any]]]] = []
    tried = {each["trial"] for each in search["decisions"]}
    for trial in search["trials"]:
        if trial["name"] not in tried:
            continue
        row = {**trial, "color": None, "value": None, "accuracy": "", "steps": "", "time": ""}
        if curve := trial["curve"]:
            points = [{"split": "val", **point, metric: point["value"]} for point in curve]
            row["color"] = len(histories) % 8 + 1
            histories.append((trial["name"], points))
            last = curve[-1]
            row |= {"value": last["value"], "accuracy": format_percent(last["value"], 1)}
            row |= {"steps": f"{last['step']} of {trial['num_steps']}"}
            row |= {"time": format_duration(trial["seconds"])}
        rows.append(row)
    html = render_html(
        "search.html",
        script="sort.js",
        title="Search for a recipe",
        contents=[(key, key.capitalize()) for key in ("trials", "curves", "decisions")],
        source=search["source"],
        used=format_duration(search["used_seconds"]),
        minutes=f"{search['minutes']:g}",
        metric="mAP" if metric == "map" else "Accuracy",
        trials=rows,
        num_tried=sum(not row["repeat_of"] for row in rows),
        untried=[trial["name"] for trial in search["trials"] if trial["name"] not in tried],
        curves=[to_svg(plots.plot_run_comparison(histories, key=key)) for key in (metric, "loss")],
        chosen=search["chosen"],
        decisions=[
            (format_duration(each["used_seconds"]), each["trial"], each["until"], each["reason"])
            for each in search["decisions"]
        ],
    )
    write_atomically(folder / "trials.html", html)
