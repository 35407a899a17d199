"""Decoded images are kept where they fit; unreadable ones are reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_datasets import make_pixel_store

from finetune.data import pixel_store as store_module
from finetune.data.device_prefetch import as_dense, collate_ragged
from finetune.data.open_source import open_source
from finetune.data.pixel_store import resolve_num_workers
from finetune.errors import DataError
from finetune.transforms.pipeline import Pipeline, sample_keys


@pytest.fixture(scope="module")
def digits():
    return open_source("embedded:digits").splits["test"]


def test_an_image_deleted_during_training_is_a_data_error(image_folder) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    store = make_pixel_store(split, "none", num_workers=2)
    next(image_folder.rglob("*.png"))
    for path in (image_folder / "train").rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match=r"\.png"):
        list(store.read_batches([np.arange(4)]))


def test_warns_if_the_images_do_not_fit_in_memory(digits, monkeypatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr("finetune.data.pixel_store.estimate_decoded_bytes", lambda split: 2**60)
    store = make_pixel_store(digits, messages=messages)
    assert store.images is None
    assert len(messages) == 1
    assert "cannot be cached on disk" in messages[0]
    assert "too little space" in messages[0]
    assert "do not fit in memory; 1 workers decode them in every epoch" in messages[0]


def test_quarantine_without_cached_images(image_folder) -> None:
    (image_folder / "train" / "red" / "red-0.png").write_bytes(b"no image")
    split = open_source(f"folder:{image_folder}").splits["train"]
    with pytest.raises(DataError, match="red-0"):  # found only when it is read
        list(make_pixel_store(split, "none").read_batches([np.arange(len(split))]))
    messages: list[str] = []
    store = make_pixel_store(split, "none", unreadable="quarantine", messages=messages)
    assert ["they are left out" in message for message in messages] == [True]
    assert len(store.split) == len(split) - 1
    (images,) = store.read_batches([np.arange(len(store.split))])
    assert len(images) == len(split) - 1


def test_keep_none_decodes_only_a_sample_in_advance(image_folder, monkeypatch) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    many = split.subset(np.tile(np.arange(len(split)), 50))
    decoded: list[int] = []
    decode = type(many).decode
    monkeypatch.setattr(
        type(many),
        "decode",
        lambda self, index, *buffer: decoded.append(index) or decode(self, index),
    )
    make_pixel_store(many, "none")
    assert 0 < len(decoded) <= 40, "only a sample, to estimate memory and image size"


def test_an_image_of_another_size_does_not_change_the_rest_of_the_batch(digits) -> None:
    arrays = [np.array(digits.decode(index)) for index in range(4)]
    other_image = np.tile(arrays[0], (2, 3, 1))
    half = (0.5, 0.5, 0.5)
    pipeline = Pipeline(
        "resize | random_crop(padding=2) | flip", image_size=(13, 11), mean=half, std=half
    )
    keys = sample_keys(0, 0, np.arange(5))
    cpu = torch.device("cpu")
    batch = as_dense(collate_ragged([*arrays[:2], other_image, *arrays[2:]], cpu), (8, 8))
    output = pipeline(
        as_dense(collate_ragged(arrays, cpu), (8, 8)).permute(0, 3, 1, 2), keys=keys[[0, 1, 3, 4]]
    )
    mixed_output = pipeline(batch, keys=keys)
    assert torch.equal(mixed_output[[0, 1, 3, 4]], output)
    assert torch.equal(
        mixed_output[2:3], pipeline(collate_ragged([other_image], cpu), keys=keys[2:3])
    )


def test_num_workers_follows_cores_and_local_processes(monkeypatch) -> None:
    monkeypatch.setattr(store_module, "num_cores", lambda: 24)
    num_workers = [resolve_num_workers("auto", processes) for processes in (1, 4, 5, 48)]
    assert num_workers == [24, 6, 4, 1]
    assert resolve_num_workers(3, 8) == 3
    monkeypatch.setattr(store_module, "num_cores", lambda: 192)
    assert resolve_num_workers("auto", 1) == 32


def test_warns_if_images_are_mapped_from_disk_for_lack_of_memory(
    image_folder, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_module, "SMALL_SPLIT_BYTES", 0)
    monkeypatch.setattr(store_module, "total_memory_bytes", lambda: 1000)
    split = open_source(f"folder:{image_folder}").splits["train"]
    messages: list[str] = []
    store = make_pixel_store(split, messages=messages)
    assert store.images is not None
    assert len(messages) == 1
    assert "do not fit in memory; they are read from" in messages[0]
    monkeypatch.setattr(store_module, "decode_with_cache", lambda *_, **__: "no disk")
    with pytest.raises(DataError, match=r"do not fit in memory; set data.keep=none"):
        make_pixel_store(split, "memory", messages=messages)
    assert make_pixel_store(split, "auto", messages=messages).images is None
    assert "cannot be cached on disk (no disk) and do not fit in memory" in messages[-1]
