"""Batches from workers against plain decoding: both decode the same images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from finetune.bench.input_rate import input_rates
from finetune.data.open_source import open_source
from finetune.data.source import Split


def test_both_decode_every_image_in_every_round(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    original_decode, parent, log = Split.decode, os.getpid(), tmp_path / "log"

    def logged_decode(self: Split, index: int, buffer: np.ndarray | None = None) -> np.ndarray:
        with log.open("a") as file:  # each append is atomic across processes
            file.write(f"{index} {os.getpid() != parent}\n")
        return original_decode(self, index, buffer)

    monkeypatch.setattr(Split, "decode", logged_decode)
    options = {"repeats": 2, "seconds": 0.0}
    found = input_rates(split, workers=2, batch_size=5, num_images=2 * len(split), **options)
    assert [len(found[name]) for name in ("decode", "workers")] == [2, 2]
    assert found["share"] > 0
    # two rounds each, and one warm-up round
    expected = sorted(f"{index} True" for index in range(len(split))) * 10
    assert sorted(log.read_text().splitlines()) == sorted(expected)


def test_unreadable_image_is_an_error(image_folder: Path) -> None:
    (image_folder / "train" / "red" / "red-0.png").write_bytes(b"")
    split = open_source(f"folder:{image_folder}").splits["train"]
    with refused("data.unreadable", "finetune data scan"):
        input_rates(split, workers=1, batch_size=5, num_images=len(split), repeats=1)
