"""Format results for standard output: as JSON, and as text for a terminal."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

from finetune.formatting import MISSING, format_percent, format_percent_range, pluralize

__all__ = ["format_nested", "format_next_steps", "format_results", "to_json"]


def to_json(data: Any) -> str:
    """Format data as strict JSON: NaN and infinity become null, arrays lists, paths strings."""
    return json.dumps(_to_json_types(data), indent=2, allow_nan=False)


def _to_json_types(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_types(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return _to_json_types(value.tolist()) if hasattr(value, "tolist") else str(value)


def format_results(results: dict[str, Any]) -> str:
    """Format a run's results: one line per split, claim and warning."""
    from finetune.evaluation.claims import format_claim  # imports torch

    lines = []
    for split in ("test", "val"):
        if metrics := _format_metrics(results.get(split) or {}):
            lines.append(f"{split}: {metrics}")
    for claim in results.get("claims") or []:
        name, reported, measured = format_claim(claim)
        if claim.get("measured") is None:
            lines.append(f"claim {name}: not measured: {claim.get('how') or 'no figure'}")
        else:
            reference = "" if reported == MISSING else f", reported {reported}"
            lines.append(f"claim {name}: {claim.get('verdict')}: measured {measured}{reference}")
    lines += [f"warning: {warning}" for warning in results.get("warnings") or []]
    return "\n".join(lines)


def _format_metrics(metrics: dict[str, Any]) -> str:
    """Format a split's metrics on one line, with a confidence interval below 1,000 images."""
    from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES, accuracy_interval
    from finetune.run.record import describe_split_decisions

    parts = []
    num_images, num_classes = metrics.get("examples"), len(metrics.get("per_class") or [])
    names = {"top1": "accuracy", "top5": "top-5 accuracy", "balanced_accuracy": "balanced accuracy"}
    if "map" in metrics:
        names = {"map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1"}
    for key, name in names.items():
        fraction = metrics.get(key)
        if not isinstance(fraction, (int, float)) or (key == "top5" and 0 < num_classes <= 5):
            continue
        interval = accuracy_interval(fraction, num_images) if key == "top1" and num_images else None
        suffix = f" (95 % interval {format_percent_range(*interval)})" if interval else ""
        parts.append(f"{name} {format_percent(fraction)}{suffix}")
    for key, name in (("loss", "loss"), ("ece", "calibration error")):
        if isinstance(metrics.get(key), (int, float)):
            parts.append(f"{name} {metrics[key]:.4f}")
    if parts and num_images:
        caveat = " (too few to judge by)" if num_images < TOO_FEW_IMAGES else ""
        parts.append(f"on {pluralize(num_images, 'image')}{caveat}")
    if parts and (decisions_note := describe_split_decisions(metrics)):
        parts.append(decisions_note)
    return ", ".join(parts)


def format_next_steps(run: Path) -> str:
    """Format the paths of a finished run and its report, and two commands to try next."""
    quoted = shlex.quote(str(run))
    report = run / "report.html"
    lines = [f"report: {report}"] if report.is_file() else []
    lines += [f"next: finetune predict {quoted} IMAGE", f"next: finetune demo {quoted}"]
    return "\n".join([*lines, f"run: {run}"])


def format_nested(data: Any, name: str = "") -> str:
    """Format nested data as lines of `dotted.name: value`."""
    if isinstance(data, dict):
        lines = (format_nested(item, f"{name}.{key}".lstrip(".")) for key, item in data.items())
        return "\n".join(line for line in lines if line)
    return f"{name}: {', '.join(map(str, data)) if isinstance(data, (list, tuple)) else data}"
