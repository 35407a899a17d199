"""The page of `finetune compare`: flipped answers, slices and costs of two models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.data.source import Split
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES
from finetune.evaluation.paired import MIN_SLICE_IMAGES, describe_difference, format_p_value
from finetune.formatting import TOO_FEW_IMAGES_NOTE, format_bytes, format_short_count
from finetune.report.html import render_html
from finetune.report.run_data import SPLIT_NAMES, format_percent
from finetune.report.thumbnails import split_thumbnail
from finetune.run.record import describe_split_decisions

__all__ = ["render_model_comparison"]

_NUM_PICTURES = 24  # of each kind of flip


def render_model_comparison(result: Mapping[str, Any], split: Split) -> str:
    """Render a comparison of two models as one self-contained HTML page.

    Args:
        result: the result of `compare_models`.
        split: the compared images, to draw the flipped ones.
    """
    top1, num_images = result["top1"], result["images"]
    broken, fixed = (
        [flip for flip in result["flips"] if flip["fixed"] is is_fixed]
        for is_fixed in (False, True)
    )
    metrics = [key for key in ("top1", "top5", "loss") if key != "top5" or _has_top5(result)]
    return render_html(
        "model_comparison.html",
        script="sort.js",
        title="Two models compared",
        contents=[
            (key, key.capitalize()) for key in ("metrics", "broken", "fixed", "slices", "cost")
        ],
        models=[(key.upper(), result[key]) for key in ("a", "b")],
        source=result["data"],
        split_name=SPLIT_NAMES[result["split"]],
        num_images=num_images,
        decisions=describe_split_decisions(result),
        too_few=TOO_FEW_IMAGES_NOTE if num_images < TOO_FEW_IMAGES else "",
        points=_format_points(top1["difference"]),
        interval=_format_interval(top1["interval"]),
        p_value=format_p_value(top1["p_value"]),
        top1=top1,
        negative_flip_rate=result["negative_flip_rate"],
        both_wrong=result["both_wrong"],
        metrics=[(key, describe_difference(key, result[key], num_images)) for key in metrics],
        p_value_exact=format_p_value(top1["p_value_exact"]),
        notes=[
            *["The images or labels have changed since the run of A."] * result["data_changed"],
            *(f"{key.upper()}: {leak}" for key in ("a", "b") for leak in result[key]["leakage"]),
        ],
        failure=(result["fail_if"] or {}).get("message", ""),
        flips=[
            ("broken", "Broken by B", len(broken), _flip_rows(broken, split)),
            ("fixed", "Fixed by B", len(fixed), _flip_rows(fixed, split)),
        ],
        slices=[
            {
                **row,
                "points": _format_points(row["difference"]),
                "bounds": _format_interval(row["interval"]),
                "p": f"{row['p_adjusted']:.3f}",
            }
            for row in result["slices"]
        ],
        small_slices=result["small_slices"],
        min_slice_images=MIN_SLICE_IMAGES,
        costs=[
            (
                key.upper(),
                format_short_count(result[key]["parameters"]),
                format_bytes(result[key]["size_bytes"]),
                " × ".join(map(str, result[key]["image_size"])),
                f"{result[key]['latency_ms']:.2f} ms",
            )
            for key in ("a", "b")
        ],
    )


def _has_top5(result: Mapping[str, Any]) -> bool:
    return len(result["class_names"]) > 5


def _format_points(difference: float) -> str:
    return f"{100 * difference:+.2f} points"


def _format_interval(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def _flip_rows(flips: list[dict[str, Any]], split: Split) -> list[dict[str, Any]]:
    """Add pictures to the first flips: "picture" is a data URI, "small" True to enlarge it."""
    rows = []
    for flip in flips[:_NUM_PICTURES]:
        index = flip["index"]
        picture, small = split_thumbnail(
            split, {"index": index, "labels": split.class_indices(index)}
        )
        sure = {key: format_percent(flip[f"confidence_{key}"], 1) for key in ("a", "b")}
        rows.append({**flip, "picture": picture, "small": small, "sure": sure})
    return rows
