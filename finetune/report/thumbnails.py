"""Images on a run's page: worst mistakes, an example per class, and training images."""

# B batch, H W pixels, C channels

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from finetune.data.fingerprint import compute_digests
from finetune.data.from_recipe import open_data, open_full_data
from finetune.data.source import Split
from finetune.errors import FinetuneError
from finetune.report.doctor_findings import DoctorFindings
from finetune.report.run_data import SPLIT_NAMES, Run
from finetune.run.record import has_changed

__all__ = [
    "class_thumbnails",
    "denormalize",
    "encode_thumbnail",
    "mistake_rows",
    "no_mistakes_reason",
    "open_reported_split",
    "split_thumbnail",
    "to_data_uri",
    "training_image_rows",
]

_THUMBNAIL_PIXELS = 192  # longer side
_CLASS_THUMBNAIL_PIXELS = 64
_PIXELATED_BELOW_PIXELS = 96  # smaller images are enlarged without smoothing
_MAX_CLASS_THUMBNAILS = 50


def mistake_rows(
    run: Run, split: Split | None, note: str = "", findings: DoctorFindings | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Build a row for each of the worst mistakes in the reported split.

    Args:
        run: the run, whose results list the mistakes.
        split: the reported split, to read the images from; None if it cannot be opened.
        note: reason why the split cannot be opened; empty if it is open.
        findings: findings of the doctor; None without them.
    Returns: the rows, each a dict in which "picture" is a data URI or empty, "small" is True if the
        page enlarges the image, and "doctor" is the doctor's opinion, or empty; and a note for the
        page that explains missing images, or an empty string.
    """
    rows = []
    for mistake in run.metrics(run.reported_split).get("mistakes", ()):
        row = {key: mistake.get(key) for key in ("name", "confidence", "loss")}
        row |= {
            "label": _class_names(run, mistake),
            "predicted": run.class_name(mistake.get("predicted")),
        }
        picture, small = split_thumbnail(split, mistake) if split is not None else ("", False)
        row |= {"name": row["name"] or "", "picture": picture, "small": small, "doctor": ""}
        if findings is not None:
            digest = _digest(split, mistake) if split is not None and picture else None
            row["doctor"] = findings.describe(run, row, digest)
        rows.append(row)
    if split is not None and rows and not any(row["picture"] for row in rows):
        note = "Images are not shown: the data has changed since the run."
    return rows, note if rows else ""


def class_thumbnails(run: Run, split: Split | None) -> list[tuple[str, bool]]:
    """Return a thumbnail of the first image of each class.

    Returns: a pair (data URI, whether the page enlarges the image) per class. The list is empty if
        split is None, multi-label or streamed (each image would cost reading a whole shard), or has
        more than 50 classes. It is also empty if the split's number of images per class differs
        from that in the results, because the labels may then have another meaning.
    """
    rows = run.metrics(run.reported_split).get("per_class", ())
    if split is None or split.is_streamed or split.is_multilabel:
        return []
    if not 0 < len(rows) <= _MAX_CLASS_THUMBNAILS:
        return []
    classes, first_indices, counts = np.unique(split.labels, return_index=True, return_counts=True)
    first_index = dict(zip(classes.tolist(), first_indices.tolist(), strict=True))
    num_images = dict(zip(classes.tolist(), counts.tolist(), strict=True))
    if [row["support"] for row in rows] != [num_images.get(k, 0) for k in range(len(rows))]:
        return []
    return [
        split_thumbnail(
            split,
            {"index": first_index.get(label), "label": label},
            max_side=_CLASS_THUMBNAIL_PIXELS,
        )
        for label in range(len(rows))
    ]


def training_image_rows(run: Run) -> tuple[list[dict[str, Any]], str]:
    """Build a row per saved training image: as decoded, as augmented, and as evaluated.

    Returns: the rows, each a dict with keys "class", "name" and "pictures" (pairs of a data URI and
        whether the page enlarges the image); and a note for the page if there are no rows. Both are
        empty if the run saved no images.
    """
    rows = [
        {
            "class": _class_names(run, image),
            "name": image["name"],
            "pictures": [(uri, uri.startswith("data:image/png")) for uri in image["pictures"]],
        }
        for image in run.training_images.get("rows", ())
    ]
    return rows, "" if rows else run.training_images.get("note", "")


def _class_names(run: Run, image: dict[str, Any]) -> str:
    """Return the class name of an image; for multi-label, the names of all its labels."""
    return run.class_name(image.get("labels", image.get("label")))


def open_reported_split(run: Run) -> tuple[Split | None, str]:
    """Open the reported split. Returns: the split, or None and the reason for the page."""
    name = run.reported_split
    if not run.metrics(name):
        return None, ""
    data, seed = run.recipe.data, run.recipe.run.seed
    try:
        source = open_full_data(data, seed) if name == "test" else open_data(data, seed)
    except (FinetuneError, OSError, ValueError):
        return None, (
            "Images are not shown: the data cannot be opened from here; write the report in the "
            "folder where the run was started."
        )
    if name not in source.splits:
        split_title = SPLIT_NAMES[name]
        return None, f"Images are not shown: the data no longer has a {split_title} split."
    split = source.splits[name]
    if has_changed(run.record, split):
        return None, "Images are not shown: the data has changed since the run."
    return split, ""


def split_thumbnail(
    split: Split, image: dict[str, Any], max_side: int = _THUMBNAIL_PIXELS
) -> tuple[str, bool]:
    """Return a thumbnail as a data URI (empty if unreadable), and whether the page enlarges it."""
    index = image.get("index")
    if index is None or not 0 <= index < len(split):
        return "", False
    if split.class_indices(index) != image.get("labels", [image.get("label")]):
        return "", False  # the data now has another image at this index
    try:
        pixels_HWC: np.ndarray = split.decode(index)
    except FinetuneError:
        return "", False
    return to_data_uri(pixels_HWC, max_side=max_side), max(
        pixels_HWC.shape
    ) < _PIXELATED_BELOW_PIXELS


def _digest(split: Split, image: dict[str, Any]) -> str | None:
    """Return the hexadecimal digest of an image; None if it is streamed."""
    if split.is_streamed:
        return None
    row = split.image_rows[[image["index"]]]
    return compute_digests(split.images, row).tobytes().hex()


def to_data_uri(pixels_HWC: NDArray[np.uint8], *, max_side: int) -> str:
    """Encode an image as a data URI, see `encode_thumbnail`."""
    body, media_type = encode_thumbnail(pixels_HWC, max_side=max_side)
    return f"data:{media_type};base64,{base64.b64encode(body).decode()}"


def encode_thumbnail(pixels_HWC: NDArray[np.uint8], *, max_side: int) -> tuple[bytes, str]:
    """Encode an image: PNG below 96 pixels, else JPEG, which is 10x smaller.

    Args:
        pixels_HWC: an RGB image, uint8.
        max_side: maximum longer side in pixels; a larger image is scaled down.
    Returns: the file's bytes, and its media type.
    """
    image = Image.fromarray(pixels_HWC)
    kind = "png" if max(image.size) < _PIXELATED_BELOW_PIXELS else "jpeg"
    image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, kind, optimize=True, quality=85)  # PNG ignores the quality
    return stream.getvalue(), f"image/{kind}"


def denormalize(
    batch_BCHW: Tensor, *, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.float32]:
    """Undo the normalization of images, for display.

    Args:
        batch_BCHW: normalized images.
        mean, std: the mean and std that normalized the images.
    Returns: (B, H, W, C) in [0, 1].
    """
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (std, mean))
    restored: NDArray[np.float32] = (
        (batch_BCHW * scale + shift).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    )
    return restored


def no_mistakes_reason(run: Run) -> str:
    """Explain why no mistakes are shown."""
    metrics = run.metrics(run.reported_split)
    if not metrics:
        return "Neither a test nor a validation split was evaluated."
    if metrics.get("top1") == 1 or metrics.get("mistakes") == []:
        name = SPLIT_NAMES[run.reported_split]
        return f"There are none: every {name} image was classified correctly."
    return "This run did not record individual mistakes."
