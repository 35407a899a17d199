"""Write small datasets of random images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from logs import logged, logging_nothing
from PIL import Image

from finetune.data.pixel_store import PixelStore, build_pixel_store
from finetune.data.source import Source, Split


def random_png(number: int, size: tuple[int, int] = (5, 4), **options: Any) -> bytes:
    """Return a small PNG that depends on `number`; size is (H, W)."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", **options)
    return stream.getvalue()


def write_file(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def write_image_folder(root: Path, counts: dict[str, int]) -> str:
    """Write an image folder; counts: images per folder, such as {"train/cat": 3}.

    Returns: the source string.
    """
    number = 0
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            write_file(root / folder / f"{index}.png", random_png(number))
            number += 1
    return f"folder:{root}"


def write_parquet(
    file: Path,
    labels: list[Any],
    *,
    names: list[str] | None = None,
    image: str = "img",
    label: str = "label",
    label_type: pa.DataType | None = None,
    images: list[Any] | None = None,
    **columns: list[Any],
) -> Path:
    """Write a parquet file as on the hub; `names` are stored as a ClassLabel."""
    if images is None:
        images = [{"bytes": random_png(number), "path": None} for number in range(len(labels))]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays = {image: pa.array(images, image_type), label: pa.array(labels, label_type)}
    table = pa.table({**arrays, **columns})
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"_type": "ClassLabel", "names": names}}
        metadata = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": metadata})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=3)
    return file


def class_counts(source: Source) -> dict[str, list[int]]:
    return {
        name: np.bincount(split.labels, minlength=len(source.class_names)).tolist()
        for name, split in source.splits.items()
    }


def make_pixel_store(
    split: Split, keep: str = "auto", *, messages: list[str] | None = None, **changes: Any
) -> PixelStore:
    """Build the pixel store of a split on the CPU; without `messages`, log messages are errors."""
    settings: dict[str, Any] = {
        "device": torch.device("cpu"),
        "num_workers": 1,
        "unreadable": "stop",
        "local_world_size": 1,
        "progress": False,
    }
    with logging_nothing() if messages is None else logged(messages):
        return build_pixel_store(split, keep=keep, **{**settings, **changes})
