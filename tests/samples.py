"""Small data sets that tests make for themselves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from finetune.data.image_store import Store, open_store
from finetune.data.source import Source, Split


def png(number: int, size: tuple[int, int] = (5, 4), **options: Any) -> bytes:
    """A small image of its own for each number; size is (H, W)."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", **options)
    return stream.getvalue()


def write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def make_folder(root: Path, counts: dict[str, int]) -> str:
    """counts: images per folder, such as {"train/cat": 3}. Returns: the source string."""
    number = 0
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            write(root / folder / f"{index}.png", png(number))
            number += 1
    return f"folder:{root}"


def make_parquet(
    file: Path,
    labels: list[Any],
    *,
    names: list[str] | None = None,
    image: str = "img",
    label: str = "label",
    label_type: pa.DataType | None = None,
    images: list[Any] | None = None,
) -> Path:
    """A parquet file as the hub has them; names: written as a ClassLabel."""
    if images is None:
        images = [{"bytes": png(number), "path": None} for number in range(len(labels))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(images, kind), label: pa.array(labels, label_type)})
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"_type": "ClassLabel", "names": names}}
        recorded = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": recorded})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=3)
    return file


def counts(source: Source) -> dict[str, list[int]]:
    return {
        name: np.bincount(split.labels, minlength=len(source.class_names)).tolist()
        for name, split in source.splits.items()
    }


def store_of(split: Split, keep: str = "auto", **changes: Any) -> Store:
    """A split's store on the CPU; a notice that is not expected fails the test."""
    settings: dict[str, Any] = {
        "device": torch.device("cpu"),
        "workers": 1,
        "unreadable": "stop",
        "local_processes": 1,
        "progress": False,
        "notice": pytest.fail,
    }
    return open_store(split, keep=keep, **{**settings, **changes})
