"""A data set on the loopback hub for the tests of streaming, with many small row groups."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer
from PIL import Image

from finetune.data.items import Items
from finetune.data.source import Split
from finetune.data.streaming import remote_file
from finetune.data.streaming.parquet_shards import open_shards
from finetune.data.streaming.remote_file import LocalFile
from finetune.data.streaming.row_groups import ShardItems
from finetune.hub import client

NAME = "someone/colours"
GROUP = 6  # rows of a row group
CLASSES = ["red", "green", "blue"]


def without_waits(patch: pytest.MonkeyPatch) -> None:
    """Let failed reads of the hub be tried again at once, and not for a minute."""
    for owner, name, value in (
        (client, "FIRST_WAIT_SECONDS", 0.01),
        (client, "_said", set()),
        (remote_file, "PATIENCE_SECONDS", 0.0),
        (remote_file, "_PAUSE_SECONDS", 0.01),
        (remote_file, "_places", {}),
    ):
        patch.setattr(owner, name, value)


def picture(number: int, label: int) -> bytes:
    """A class that a small network can learn: its brightest channel. Sizes differ."""
    generator = np.random.default_rng(number)
    height, width = generator.integers(12, 20, size=2)
    pixels = generator.integers(0, 96, size=(height, width, 3), dtype=np.uint8)
    pixels[..., label] += 140
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def shard(first: int, number: int) -> bytes:
    """A parquet file of `number` images, as `datasets` writes them."""
    labels = [(first + row) * 7 % 3 for row in range(number)]
    images = [
        {"bytes": picture(first + row, label), "path": f"{first + row}.png"}
        for row, label in enumerate(labels)
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(images, kind), "label": pa.array(labels)})
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}
    table = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    stream = io.BytesIO()
    pq.write_table(table, stream, row_group_size=GROUP, write_page_checksum=True)
    return stream.getvalue()


def shards(train: int = 4, rows: int = 40) -> dict[str, bytes]:
    """Some shards of `rows` images for training, and one for the test."""
    made = {
        f"data/train-{number:05}-of-{train:05}.parquet": shard(number * rows, rows)
        for number in range(train)
    }
    return {**made, "data/test-00000-of-00001.parquet": shard(1000, 20)}


def on_disk(folder: Path, files: dict[str, bytes]) -> str:
    """Returns: the source string of the same files on this machine."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return f"parquet:{folder / 'data'}"


def split_of(folder: Path, *, rows: int = 60, chosen: np.ndarray | None = None) -> Split:
    """A streamed split of one file on this machine."""
    path = folder / "train.parquet"
    path.write_bytes(shard(0, rows))
    items: Items = ShardItems(open_shards([LocalFile.at(path)]), "image")
    split = Split("train", np.arange(rows) * 7 % 3, items)
    return split if chosen is None else split.subset(chosen)


def bytes_sent(hub: HubServer) -> int:
    """Bytes of the ranges that the file store was asked for."""
    spans = [
        headers["range"].removeprefix("bytes=").split("-")
        for (_, path), headers in zip(hub.requests, hub.headers, strict=True)
        if path.startswith("/cdn/") and "range" in headers
    ]
    return sum(int(last) - int(first) + 1 for first, last in spans)
