"""Summary of a data source: splits, classes and image sizes, for `finetune data info`."""

from __future__ import annotations

from typing import Any

import numpy as np

from finetune.data.class_balance import count_images_per_class, describe_imbalance
from finetune.data.decode_split import sample_image_sizes
from finetune.data.source import Source
from finetune.errors import redact_urls

__all__ = ["summarize_source"]


def summarize_source(source: Source) -> dict[str, Any]:
    """Summarize a dataset: classes, counts, and the image sizes of a sample.

    Returns: a JSON-serializable dict with the keys "name", "description", "class_names", "splits"
        and, if a training class is rare, "imbalance", a sentence. "splits" maps each split to a
        dict. It holds image counts: "images", "per_class" (K,), "without_label" (only if
        multi-label), "sampled" and "unreadable_in_sample". It also holds "min_size" and "max_size",
        [H, W], the minimum and maximum of each side in the sample; None if no sampled image is
        readable.
    """
    splits = {}
    for name, split in source.splits.items():
        sizes, unreadable = sample_image_sizes(split, 64)
        counts = count_images_per_class(split.labels, len(source.class_names))
        split_summary: dict[str, Any] = {"images": len(split), "per_class": counts.tolist()}
        if split.is_multilabel:
            split_summary["without_label"] = int((split.labels.sum(axis=1) == 0).sum())
        split_summary["sampled"] = len(sizes) + unreadable
        split_summary["unreadable_in_sample"] = unreadable
        split_summary["min_size"] = np.min(sizes, axis=0).tolist() if sizes else None
        split_summary["max_size"] = np.max(sizes, axis=0).tolist() if sizes else None
        splits[name] = split_summary
    train = np.array(splits.get("train", {}).get("per_class", [0]))
    rare = describe_imbalance(train, source.class_names)
    summary: dict[str, Any] = {
        "name": redact_urls(source.name),
        "description": source.description,
        "class_names": source.class_names,
        "splits": splits,
    }
    if rare:
        summary["imbalance"] = rare
    return summary
