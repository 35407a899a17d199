"""Frozen features: what the classifier sees, each image once, computed only when they must be."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import make_folder, store_of
from torch import nn

from finetune.data.loader import Loader
from finetune.data.source import open_source
from finetune.errors import DataError, WeightsError
from finetune.evaluation import features
from finetune.evaluation.features import (
    Features,
    compute,
    identity_of,
    places_of,
    pre_logits,
    split_features,
)
from finetune.models.build import build
from finetune.models.saved import Built
from finetune.recipe.load import DataSection, RunSection
from finetune.training.launch import launch
from finetune.transforms.evaluation import make_pipeline

DIGITS = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def small(seed: int = 0) -> Built:
    torch.manual_seed(seed)
    name = "vit_tiny_patch16_224"
    return build(name, num_classes=3, pretrained=False, image_size=8, args=DIGITS)


class Threads:
    """Stands for the accelerator of one of several processes: they are threads here."""

    device = torch.device("cpu")
    mixed_precision = "no"
    autocast = contextlib.nullcontext

    def __init__(self, rank: int, world: int, shared: dict[int, Any], barrier: Any) -> None:
        self.process_index, self.num_processes = rank, world
        self.is_main_process = rank == 0
        self._shared, self._barrier = shared, barrier

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._shared[self.process_index] = tensor
        self._barrier.wait(60)
        whole = torch.cat([self._shared[rank] for rank in range(self.num_processes)])
        self._barrier.wait(60)
        return whole


def on(world: int, network: nn.Module, loader: Loader, batch_size: int) -> np.ndarray:
    """What rank 0 of `world` processes gets; the others must get nothing."""
    shared: dict[int, Any] = {}
    found: dict[int, Any] = {}
    barrier = threading.Barrier(world)

    def process(rank: int) -> None:
        accelerator: Any = Threads(rank, world, shared, barrier)
        found[rank] = compute(network, loader, accelerator, batch_size=batch_size)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[rank] is None for rank in range(1, world)] == [True] * (world - 1)
    return found[0]


def digits_loader(made: Built, count: int) -> Loader:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(count))
    pipeline = make_pipeline(made.preprocessing)
    return Loader(store_of(split), pipeline, num_classes=10, device=torch.device("cpu"))


def test_each_image_once_in_order_to_the_same_bits_on_any_number_of_processes() -> None:
    made = small()
    loader = digits_loader(made, 101)
    one = on(1, made.model, loader, 4)
    assert one.shape == (101, 16)
    assert one.dtype == np.float32
    with torch.no_grad():
        batches = list(loader.once(batch_size=101))
        expected = pre_logits(made.model.eval(), batches[0].images_BCHW)
    np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5)
    assert len(np.unique(one, axis=0)) > 90
    for world in (2, 3, 5):  # 101 images are 4 shares: with 5, one process has none
        assert on(world, made.model, loader, 4).tobytes() == one.tobytes()


def test_damaged_weights_are_refused() -> None:
    made = small()
    nn.init.constant_(made.model.norm.weight, float("nan"))
    with pytest.raises(WeightsError, match="not finite"):
        compute(made.model, digits_loader(made, 5), launch(RunSection()), batch_size=4)


def take(split: Any, made: Built, sentence: str | None = None, **section: Any) -> Features:
    """As on the one process of a probe."""
    found = split_features(
        split,
        network=made.model,
        pipeline=make_pipeline(made.preprocessing, sentence),
        identity=identity_of(made, sentence),
        section=DataSection(source="embedded:digits", **section),
        accelerator=launch(RunSection(precision="fp32")),
    )
    assert found is not None
    return found


def test_the_second_time_nothing_is_computed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    split = open_source("embedded:digits").splits["test"]
    first = take(split, small())
    computed = first.values_ND.tobytes()
    assert not first.cached
    np.testing.assert_array_equal(first.labels_N, split.labels)
    monkeypatch.setattr(features, "open_store", pytest.fail)
    monkeypatch.setattr(features, "compute", pytest.fail)
    again = take(open_source("embedded:digits").splits["test"], small())
    assert again.cached
    assert not again.values_ND.flags.writeable
    assert again.values_ND.tobytes() == computed
    assert len(list(cache.iterdir())) == 1

    monkeypatch.undo()
    monkeypatch.setenv("FINETUNE_CACHE", str(cache.parent))
    (path,) = cache.iterdir()
    body = bytearray(path.read_bytes())
    body[-1] ^= 255
    path.write_bytes(body)
    repaired = take(split, small())
    assert not repaired.cached
    assert "is damaged" in capsys.readouterr().err
    assert repaired.values_ND.tobytes() == computed


def test_other_weights_pixels_or_images_are_computed() -> None:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(20))
    made = small()
    assert not take(split, made).cached
    assert take(split, made).cached
    assert not take(split, small(seed=1)).cached
    assert not take(split, made, "resize(10) | center_crop").cached
    brighter = replace(made, preprocessing=replace(made.preprocessing, mean=(0.4, 0.5, 0.5)))
    assert not take(split, brighter).cached
    assert not take(split.subset(np.arange(19)), made).cached
    assert not take(split.subset(np.arange(20)[::-1]), made).cached
    relabelled = replace(split, labels=9 - split.labels)
    assert not take(relabelled, made).cached
    assert take(split, made).cached


def test_the_identity_is_of_the_tensors_and_of_what_reads_them() -> None:
    one, same = identity_of(small(), None), identity_of(small(), None)
    assert one == same
    changed = small()
    with torch.no_grad():
        changed.model.cls_token[0, 0, 0] += 1e-6
    assert identity_of(changed, None)["weights"] != one["weights"]
    headed = small()
    nn.init.ones_(headed.model.head.weight)
    assert identity_of(headed, None) == one, "no feature depends on the classifier"
    dropping = replace(small(), model_args={**small().model_args, "drop_rate": 0.5})
    assert identity_of(dropping, None) == one, "nor on what only training does"
    assert one["eval"].startswith("resize(")
    assert identity_of(small(), "resize(9) | center_crop")["eval"] != one["eval"]


def test_unreadable_images_stop_it_or_are_left_out_each_time(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "set", {"train/cat": 3, "train/dog": 3})
    broken = tmp_path / "set" / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    split = open_source(source).splits["train"]
    made = small()
    sentence = "resize((8, 8))"
    first = take(split, made, sentence, unreadable="quarantine")
    again = take(split, made, sentence, unreadable="quarantine")
    assert (first.cached, again.cached) == (False, True)
    for found in (first, again):
        assert found.places_N.tolist() == [0, 2, 3, 4, 5]
        assert found.labels_N.tolist() == [0, 0, 1, 1, 1]
        assert found.values_ND.shape == (5, 16)
    np.testing.assert_array_equal(first.values_ND, again.values_ND)
    with pytest.raises(DataError, match=r"1\.png"):
        take(split, made, sentence)


def test_without_room_on_the_disk_the_features_are_there_all_the_same(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    split = open_source("embedded:digits").splits["test"].subset(np.arange(9))
    found = take(split, small())
    assert found.values_ND.shape == (9, 16)
    assert "are not kept" in capsys.readouterr().err
    assert not take(split, small()).cached


def test_numbers_of_another_precision_are_other_features() -> None:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(20))
    made, section = small(), DataSection(source="embedded:digits")

    def taken(precision: str) -> Features:
        found = split_features(
            split,
            network=made.model,
            pipeline=make_pipeline(made.preprocessing, None),
            identity=identity_of(made, None),
            section=section,
            accelerator=launch(RunSection(precision=precision)),
        )
        assert found is not None
        return found

    exact, rounded = taken("fp32"), taken("bf16")
    assert not rounded.cached
    difference = np.abs(exact.values_ND - rounded.values_ND).max()
    assert 1e-4 < difference < 0.1  # bf16 keeps 8 bits of numbers of size 1
    assert taken("bf16").cached


def test_an_empty_split_is_refused() -> None:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(0))
    with pytest.raises(DataError, match="has no images"):
        take(split, small())


def test_places_of_a_part() -> None:
    whole = open_source("embedded:digits").splits["test"]
    part = whole.subset(np.array([2, 5, 9]))
    assert places_of(part, whole).tolist() == [2, 5, 9]
    assert places_of(part.subset(np.array([0, 2])), part).tolist() == [0, 2]
    assert places_of(whole, whole).tolist() == list(range(len(whole)))
