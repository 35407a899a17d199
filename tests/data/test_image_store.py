"""Pixels are kept where there is room, and what cannot be read is named."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import store_of

from finetune.data import image_store as store_module
from finetune.data.device_copy import of_one_size, pack
from finetune.data.image_store import Store, num_workers
from finetune.data.source import open_source
from finetune.errors import DataError
from finetune.transforms.pipeline import Pipeline, sample_keys


@pytest.fixture(scope="module")
def digits():
    return open_source("embedded:digits").splits["test"]


def test_an_image_that_vanishes_while_training_is_a_data_error(image_folder) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    store = store_of(split, "none", workers=2)
    next(image_folder.rglob("*.png"))
    for path in (image_folder / "train").rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match=r"\.png"):
        list(store.read_all([np.arange(4)]))


def test_what_does_not_fit_in_memory_is_said(digits, monkeypatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr("finetune.data.image_store.decoded_bytes", lambda split: 2**60)
    store = store_of(digits, notice=notices.append)
    assert store.images is None
    assert len(notices) == 1
    assert "are not kept on disk" in notices[0]
    assert "too little room" in notices[0]
    assert "do not fit in memory; 1 workers decode it in every epoch" in notices[0]


def test_unreadable_images_are_left_out_of_a_store_that_keeps_nothing(image_folder) -> None:
    (image_folder / "train" / "red" / "red-0.png").write_bytes(b"no image")
    split = open_source(f"folder:{image_folder}").splits["train"]
    with pytest.raises(DataError, match="red-0"):  # it is found when it is needed
        list(store_of(split, "none").read_all([np.arange(len(split))]))
    store = store_of(split, "none", unreadable="quarantine")
    assert len(store.split) == len(split) - 1
    (images,) = store.read_all([np.arange(len(store.split))])
    assert len(images) == len(split) - 1


def test_a_store_that_keeps_nothing_decodes_nothing_before_it_is_needed(
    image_folder, monkeypatch
) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    many = split.subset(np.tile(np.arange(len(split)), 50))
    decoded: list[int] = []
    read = type(many).read
    monkeypatch.setattr(
        type(many), "read", lambda self, index, *room: decoded.append(index) or read(self, index)
    )
    store_of(many, "none")
    assert 0 < len(decoded) <= 40, "samples, for what the images take and their size"


def test_one_image_of_another_size_does_not_change_those_beside_it(digits) -> None:
    arrays = [np.array(digits.read(index)) for index in range(4)]
    odd = np.tile(arrays[0], (2, 3, 1))
    half = (0.5, 0.5, 0.5)
    pipeline = Pipeline(
        "resize | random_crop(padding=2) | flip", image_size=(13, 11), mean=half, std=half
    )
    keys = sample_keys(0, 0, np.arange(5))
    cpu = torch.device("cpu")
    mixed = of_one_size(pack([*arrays[:2], odd, *arrays[2:]], cpu), (8, 8))
    alone = pipeline(
        of_one_size(pack(arrays, cpu), (8, 8)).permute(0, 3, 1, 2), keys=keys[[0, 1, 3, 4]]
    )
    both = pipeline(mixed, keys=keys)
    assert torch.equal(both[[0, 1, 3, 4]], alone)
    assert torch.equal(both[2:3], pipeline(pack([odd], cpu), keys=keys[2:3]))


@pytest.mark.parametrize("image_bytes", [1, 2**20])
def test_workers_hand_over_many_batches_in_the_same_memory(image_folder, image_bytes: int) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    store = Store(split, None, workers=2, image_bytes=image_bytes)  # 1: most do not fit
    batches = [np.random.default_rng(n).integers(0, len(split), 1 + n % 3) for n in range(40)]
    read = store.read_all(iter(batches))
    for indices, images in zip(batches, read, strict=True):
        time.sleep(0.005)  # the workers are ahead
        for index, image in zip(indices.tolist(), images, strict=True):
            np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), split.read(index))


def test_workers_follow_the_cores_and_the_processes_that_share_them(monkeypatch) -> None:
    monkeypatch.setattr(store_module, "num_cores", lambda: 24)
    found = [num_workers("auto", processes) for processes in (1, 4, 5, 48)]
    assert found == [24, 6, 4, 1]
    assert num_workers(3, 8) == 3
    monkeypatch.setattr(store_module, "num_cores", lambda: 192)
    assert num_workers("auto", 1) == 32


def test_a_mapped_file_is_said_where_memory_is_too_small(
    image_folder, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(store_module, "total_bytes", lambda: 1000)
    split = open_source(f"folder:{image_folder}").splits["train"]
    notices: list[str] = []
    store = store_of(split, notice=notices.append)
    assert store.images is not None
    assert len(notices) == 1
    assert "do not fit in memory; they are read from" in notices[0]
    monkeypatch.setattr(store_module, "cached_images", lambda *_, **__: "no disk")
    with pytest.raises(DataError, match=r"do not fit in memory; set data.keep: none"):
        store_of(split, "memory", notice=notices.append)
    assert store_of(split, "auto", notice=notices.append).images is None
    assert "not kept on disk (no disk) and do not fit in memory" in notices[-1]
