"""Pixels are kept where there is room, and what cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from samples import store_of

from finetune.data import store as store_module
from finetune.data.sources import open_source
from finetune.errors import DataError


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
    monkeypatch.setattr("finetune.data.store.decoded_bytes", lambda split: 2**60)
    store = store_of(digits, notice=notices.append)
    assert store.images is None
    assert len(notices) == 1
    assert "do not fit in memory" in notices[0]


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch) -> None:
    whole = store_module._host_memory()
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    monkeypatch.setattr(store_module, "_CGROUP", tmp_path)
    assert store_module._host_memory() == whole
    limit.write_text("1000000\n")
    assert store_module._host_memory() == 1_000_000


def test_unreadable_images_are_left_out_of_a_store_that_keeps_nothing(image_folder) -> None:
    (image_folder / "train" / "red" / "red-0.png").write_bytes(b"no image")
    split = open_source(f"folder:{image_folder}").splits["train"]
    with pytest.raises(DataError, match="red-0"):
        store_of(split, "none")
    store = store_of(split, "none", unreadable="quarantine")
    assert len(store.split) == len(split) - 1
    (images,) = store.read_all([np.arange(len(store.split))])
    assert len(images) == len(split) - 1
