"""doctor.html: a self-contained page to inspect the surest findings of each kind and decide.

`review_server.py` serves a page with the same templates. In doctor.html, the findings and their
pictures are JSON in the page itself, and the browser saves the decisions as a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.class_balance import count_images_per_class
from finetune.data.source import Source
from finetune.doctor.findings import KINDS, Findings
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
    shown = {
        kind: [each for each in findings.describe(kind, 0, _MAX_FINDINGS) if _fits(each["images"])]
        for kind in KINDS
    }
    sides: dict[str, int] = {}  # of the pictures
    images = {}
    for finding in itertools.chain.from_iterable(shown.values()):
        side = _PICTURE_PIXELS if len(finding["images"]) == 1 else _GROUP_PIXELS
        for image in finding["images"]:
            key = image["key"]
            sides[key] = max(side, sides.get(key, 0))
            images[key] = {**findings.images[key], "given": image["given"]}
        for key in itertools.chain.from_iterable(keys for _, keys in finding["examples"]):
            sides.setdefault(key, _EXAMPLE_PIXELS)
    pictures = _encode_pictures(findings, sides)
    embedded = {"findings": shown, "pictures": pictures, "images": images}
    write_atomically(folder / PAGE_FILE, render_review(findings, folder, embedded=embedded))
    return folder / PAGE_FILE


def _fits(group: Sequence[Any]) -> bool:
    """Return True if doctor.html shows a group: all its images, as it is decided as a whole."""
    return len(group) <= _MAX_GROUP


def _encode_pictures(findings: Findings, sides: Mapping[str, int]) -> dict[str, str]:
    """Encode pictures. Returns: data URIs by key, empty for images that cannot be read."""
    uris = dict.fromkeys(sides, "")
    with item_bar(len(sides), label="pictures") as bar:
        for key, side in sides.items():
            split, index = findings.locate(key)
            split = dataclasses.replace(split, decode_size=side)
            with contextlib.suppress(FinetuneError):
                uris[key] = to_data_uri(split.decode(index), max_side=side)
            bar.update()
    return uris


def render_review(
    findings: Findings,
    folder: Path,
    *,
    decisions: Mapping[str, Any] | None = None,
    embedded: Mapping[str, Any] | None = None,
) -> str:
    """Render the review page.

    Args:
        folder: folder of decisions.csv, which need not exist yet.
        decisions: earlier decisions by key.
        embedded: for the static page: "findings" by kind, "pictures" and "images" by key.
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
        if embedded:
            keys = [each for each in keys[:_MAX_FINDINGS] if _fits(each)]
        if len(keys) < len(findings.keys[kind]):
            left_out = (
                f"{len(keys)} of {len(findings.keys[kind]):,} are on this page, the surest "
                f"that are not too large; all are in: {review}"
            )
        expected = _describe_expected(findings.expected.get(kind, {}))
        kinds.append(
            {"name": kind, "title": title, "keys": keys, "expected": expected, "left_out": left_out}
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
        sources="img-src data:" if embedded else "img-src 'self' data:; connect-src 'self'",
        title=f"Review of {source}",
        data=data,
    )


def training_command(source: Source, decisions_file: Path) -> str:
    """Return the command that trains with the decisions."""
    arguments = [redact_urls(source.name), f"data.decisions={decisions_file}"]
    return shlex.join(["finetune", "train", *arguments])


def _describe_expected(expected: Mapping[str, float]) -> str:
    """Describe how many findings of a kind are expected to be true problems; "" if it is exact."""
    count = expected.get("count", 0)
    low, high = expected.get("low", count), expected.get("high", count)
    return "" if low == high else f"About {count:,.0f} are expected ({low:,.0f} to {high:,.0f})."
