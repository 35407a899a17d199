"""doctor.html: a self-contained page to inspect the surest findings of each kind and decide.

`review_server.py` serves a page with the same templates. In doctor.html, the findings and their
pictures are JSON in the page itself, and the browser saves the decisions as a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.class_balance import count_images_per_class
from finetune.data.source import Source
from finetune.doctor.findings import KINDS, Findings, class_key
from finetune.errors import FinetuneError, redact_urls
from finetune.files import write_atomically
from finetune.progress import item_bar
from finetune.report.html import render_html
from finetune.report.thumbnails import to_data_uri

__all__ = ["DECISIONS_FILE", "PAGE_FILE", "render_review", "training_command", "write_review_page"]

PAGE_FILE = "doctor.html"
DECISIONS_FILE = "decisions.csv"
_MAX_FINDINGS = 50  # of each kind; with pictures they take about 5 MB
_MAX_GROUP = 12  # images of a group
_PICTURE_PIXELS = 384  # longer side
_GROUP_PIXELS = 256
_EXAMPLE_PIXELS = 96


def write_review_page(findings: Findings, folder: Path) -> Path:
    """Write doctor.html to the folder of doctor.json. Returns: path of the page."""
    shown = {kind: findings.describe(kind, 0, _MAX_FINDINGS) for kind in KINDS}
    for kind in ("leaks", "duplicates", "groups"):
        # leave out large groups: a group is decided as a whole, so all its images must be shown
        shown[kind] = [group for group in shown[kind] if len(group["images"]) <= _MAX_GROUP]
    sides: dict[str, int] = {}
    images = {}
    for finding in itertools.chain.from_iterable(shown.values()):
        side = _PICTURE_PIXELS if len(finding["images"]) == 1 else _GROUP_PIXELS
        wanted = [(image["key"], side) for image in finding["images"]]
        wanted += [(key, _EXAMPLE_PIXELS) for _, keys in finding["examples"] for key in keys]
        sides |= {key: max(side, sides.get(key, 0)) for key, side in wanted}
        for image in finding["images"]:
            images[image["key"]] = {**findings.images[image["key"]], "given": image["given"]}
    embedded = {
        "findings": shown,
        "pictures": _picture_uris(findings, sides),
        "images": images,
    }
    write_atomically(folder / PAGE_FILE, render_review(findings, folder, embedded=embedded))
    return folder / PAGE_FILE


def _picture_uris(findings: Findings, sides: Mapping[str, int]) -> dict[str, str]:
    """Encode pictures. Returns: data URIs by key, empty for images that cannot be read."""
    splits = {
        name: dataclasses.replace(split, decode_size=_PICTURE_PIXELS)
        for name, split in findings.source.splits.items()
    }
    uris = {}
    with item_bar(len(sides), label="pictures") as bar:
        for key, side in sides.items():
            split, index = findings.locate(key)
            try:
                pixels_HWC = splits[split].decode(index)
                uris[key] = to_data_uri(pixels_HWC, max_side=side)
            except FinetuneError:
                uris[key] = ""
            bar.update(1)
    return uris


def render_review(
    findings: Findings,
    folder: Path,
    *,
    decisions: Mapping[str, Any] | None = None,
    sources: str = "img-src data:",
    embedded: Mapping[str, Any] | None = None,
) -> str:
    """Render the review page.

    Args:
        findings: the findings.
        folder: folder of decisions.csv, which need not exist yet.
        decisions: earlier decisions by key.
        sources: directives for what the page may load, see `render_html`.
        embedded: for the static page: "findings" by kind, "pictures" and "images" by key.
    Returns: the page.
    """
    source = redact_urls(findings.source.name)
    review = shlex.join(["finetune", "data", "doctor", source, "--out", str(folder), "--review"])
    decisions_file = folder / DECISIONS_FILE if not embedded else Path(DECISIONS_FILE)
    fingerprints = [split.fingerprint for split in findings.source.splits.values()]
    kinds = []
    for kind, title in KINDS.items():
        keys, left_out = findings.keys[kind], ""
        if kind == "groups" and not keys:
            continue  # only with data.group
        if embedded and len(embedded["findings"][kind]) < len(keys):
            left_out = (
                f"{len(embedded['findings'][kind])} of {len(keys):,} are on this page, the surest "
                f"that are not too large; all are in: {review}"
            )
        if embedded:
            keys = [_keys_of(finding) for finding in embedded["findings"][kind]]
        kinds.append(
            {
                "name": kind,
                "title": title,
                "keys": keys,
                "expected": _describe_expected(findings.expected.get(kind, {})),
                "left_out": left_out,
            }
        )
    train = findings.source.splits.get("train")
    num_classes = len(findings.source.class_names)
    train_labels = np.empty(0, np.int64) if train is None else train.labels
    data = {
        "id": hashlib.sha256("".join(fingerprints).encode()).hexdigest()[:16],
        "source": source,
        "classes": findings.source.class_names,
        "train_sizes": count_images_per_class(train_labels, num_classes).tolist(),
        "multilabel": findings.is_multilabel,
        "kinds": kinds,
        "decisions": dict(decisions or {}),
        "decisions_file": str(decisions_file),
        "command": training_command(findings.source, decisions_file),
        **(embedded or {"findings": None, "pictures": None}),
    }
    return render_html(
        "review.html",
        script="review.js",
        package="finetune.doctor",
        sources=sources,
        title=f"Review of {source}",
        data=data,
    )


def training_command(source: Source, decisions_file: Path) -> str:
    """Return the command that trains with the decisions."""
    arguments = [redact_urls(source.name), f"data.decisions={decisions_file}"]
    return shlex.join(["finetune", "train", *arguments])


def _keys_of(finding: Mapping[str, Any]) -> list[str]:
    """Return the keys to decide on for a finding."""
    return [image["key"] for image in finding["images"]] or [class_key(finding["classes"])]


def _describe_expected(expected: Mapping[str, float]) -> str:
    """Describe how many findings of a kind are expected to be true problems; "" if it is exact."""
    count = expected.get("count", 0)
    low, high = expected.get("low", count), expected.get("high", count)
    return "" if low == high else f"About {count:,.0f} are expected ({low:,.0f} to {high:,.0f})."
