"""Two plain tables that papers and reviews print: what a network is, and how each class fares."""

# K classes, H W pixels

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import nn

from finetune.errors import FinetuneError
from finetune.models.anatomy import survey

__all__ = ["classification_report", "model_summary"]


def model_summary(model: nn.Module, image_size: tuple[int, int]) -> str:
    """Layers with their outputs, parameters and MACs for one image, and the totals.

    Layers in a row that are alike share a line; its figures are those of each of them. MACs are
    multiply-accumulates of matrix products and convolutions, attention included.

    Args:
        model: in evaluation mode, on any device, also "meta".
        image_size: (H, W).
    Returns: lines of text. Outputs are shapes without the batch.
    """
    found = survey(model, image_size)
    rows: list[tuple[str, ...]] = [("layer", "output", "parameters", "MACs")]
    for _, run in groupby(found["layers"], key=_alike):
        first, *others = run
        name = f"{first['name']} … {others[-1]['name']} (each)" if others else first["name"]
        kind = f" ({first['kind']})" if first["kind"] and not others else ""
        shape = " × ".join(map(str, first["output"]))
        rows.append((name + kind, shape, f"{first['parameters']:,}", f"{first['macs']:,}"))
    parameters = {id(p): p for p in model.parameters()}.values()
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    rows.append(("total", "", f"{total:,}", f"{found['macs']:,}"))
    lines = _aligned(rows)
    rule = "-" * max(map(len, lines))
    lines[1:1] = [rule]
    lines[-1:-1] = [rule]
    tokens = found["tokens"]
    entering = f"; {tokens['total']} tokens" if tokens else ""
    height, width = image_size
    lines.append(
        f"{found['macs'] / 1e9:.2f} GMACs for one image of {height}×{width} px{entering}; "
        f"{trained:,} parameters are trained"
    )
    return "\n".join(lines)


def _alike(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["output"], row["parameters"], row["macs"]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first two columns to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def classification_report(confusion: Sequence[Sequence[int]], class_names: Sequence[str]) -> str:
    """Precision, recall and F1 of each class, in scikit-learn's layout.

    Args:
        confusion: a row for each true class, a column for each predicted one: "confusion" in a
            run's results.json.
        class_names: K names, in the order of the rows.
    Returns: lines of text. A class without predictions has precision 0, as in scikit-learn.
    Raises: FinetuneError if there is not one name for each row and column.
    """
    if any(len(row) != len(class_names) for row in [*confusion, list(confusion)]):
        raise FinetuneError(
            f"classification report: {len(class_names)} class names for a matrix with "
            f"{len(confusion)} rows; give one name for each class"
        )
    support = [sum(row) for row in confusion]
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    hits = [row[index] for index, row in enumerate(confusion)]
    total = sum(support)
    scores = [
        (_ratio(hit, guessed), _ratio(hit, there), _ratio(2 * hit, guessed + there))
        for hit, guessed, there in zip(hits, predicted, support, strict=True)
    ]
    means = [_ratio(sum(column), len(scores)) for column in zip(*scores, strict=True)]
    weighted = [
        _ratio(sum(s * n for s, n in zip(column, support, strict=True)), total)
        for column in zip(*scores, strict=True)
    ]
    width = max(len("weighted avg"), *map(len, class_names))
    heads = ("precision", "recall", "f1-score", "support")
    lines = [" " * width + " " + "".join(f" {head:>9}" for head in heads), ""]
    lines += [_line(*row, width) for row in zip(class_names, scores, support, strict=True)]
    accuracy = f"{_ratio(sum(hits), total):>9.2f} {total:>9}"
    lines += ["", f"{'accuracy':>{width}}  {'':>9} {'':>9} {accuracy}"]
    lines += [
        _line("macro avg", means, total, width),
        _line("weighted avg", weighted, total, width),
    ]
    return "\n".join(lines)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _line(name: str, scores: Sequence[float], support: int, width: int) -> str:
    figures = "".join(f" {score:>9.2f}" for score in scores)
    return f"{name:>{width}} {figures} {support:>9}"
