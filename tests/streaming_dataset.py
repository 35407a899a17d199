"""A parquet dataset for the streaming tests, with many small row groups."""

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

from finetune.data.encoded_images import EncodedImages
from finetune.data.source import Split
from finetune.data.streaming import shard_file
from finetune.data.streaming.parquet_shards import open_shards
from finetune.data.streaming.shard_file import LocalFile
from finetune.data.streaming.streamed_images import StreamedImages
from finetune.hub import client

REPO_NAME = "someone/colors"
ROW_GROUP_SIZE = 6  # rows
CLASSES = ["red", "green", "blue"]


def disable_retry_waits(patch: pytest.MonkeyPatch) -> None:
    """Retry failed reads from the hub immediately."""
    patch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    patch.setattr(shard_file, "MAX_READ_TRIES", 5)


def image_png(number: int, label: int) -> bytes:
    """Return a PNG whose brightest channel is its label; sizes differ."""
    generator = np.random.default_rng(number)
    height, width = generator.integers(12, 20, size=2)
    pixels = generator.integers(0, 96, size=(height, width, 3), dtype=np.uint8)
    pixels[..., label] += 140
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def shard_bytes(first: int, number: int) -> bytes:
    """Return a parquet file of `number` images as `datasets` writes it."""
    labels = [(first + row) * 7 % 3 for row in range(number)]
    images = [
        {"bytes": image_png(first + row, label), "path": f"{first + row}.png"}
        for row, label in enumerate(labels)
    ]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(images, image_type), "label": pa.array(labels)})
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}
    table = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    stream = io.BytesIO()
    pq.write_table(table, stream, row_group_size=ROW_GROUP_SIZE, write_page_checksum=True)
    return stream.getvalue()


def dataset_shards(train: int = 4, rows: int = 40) -> dict[str, bytes]:
    """Return `train` training shards of `rows` images each, and one test shard."""
    train_shards = {
        f"data/train-{number:05}-of-{train:05}.parquet": shard_bytes(number * rows, rows)
        for number in range(train)
    }
    return {**train_shards, "data/test-00000-of-00001.parquet": shard_bytes(1000, 20)}


def write_to_disk(folder: Path, files: dict[str, bytes]) -> str:
    """Write the files to a folder. Returns: their source string."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return f"parquet:{folder / 'data'}"


def make_streamed_split(
    folder: Path, *, rows: int = 60, indices: np.ndarray | None = None
) -> Split:
    """Return a streamed split of one local file."""
    path = folder / "train.parquet"
    path.write_bytes(shard_bytes(0, rows))
    items: EncodedImages = StreamedImages(open_shards([LocalFile.from_path(path)]), "image")
    split = Split("train", np.arange(rows) * 7 % 3, items)
    return split if indices is None else split.subset(indices)


def bytes_requested(hub: HubServer) -> int:
    """Return the total size of the byte ranges requested from the file store."""
    spans = [
        headers["range"].removeprefix("bytes=").split("-")
        for (_, path), headers in zip(hub.requests, hub.headers, strict=True)
        if path.startswith("/cdn/") and "range" in headers
    ]
    return sum(int(last) - int(first) + 1 for first, last in spans)
