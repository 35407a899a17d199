"""Frozen features: the classifier's inputs, each image once, computed only when not cached."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logs import forget_warnings, logged
from small_datasets import make_pixel_store, write_image_folder
from torch import nn

from finetune.data import decode as image_decoder
from finetune.data.encoded_images import FileImages
from finetune.data.loader import ImageLoader
from finetune.data.open_source import open_source
from finetune.errors import DataError, WeightsError
from finetune.evaluation import feature_extraction
from finetune.evaluation.feature_extraction import (
    Features,
    compute_features,
    compute_pre_logits,
    feature_identity,
    load_or_compute_features,
    subset_indices,
)
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.recipe.load import DataSection, RunSection
from finetune.training.accelerator import create_accelerator
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.pipeline import Pipeline

DIGITS = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def make_model(seed: int = 0) -> BuiltModel:
    torch.manual_seed(seed)
    name = "vit_tiny_patch16_224"
    return build_model(name, num_classes=3, pretrained=False, image_size=8, args=DIGITS)


class ThreadAccelerator:
    """Replaces the accelerator of one of several processes, which are threads here."""

    device = torch.device("cpu")
    mixed_precision = "no"
    autocast = contextlib.nullcontext

    def __init__(self, rank: int, world_size: int, shared: dict[int, Any], barrier: Any) -> None:
        self.process_index, self.num_processes = rank, world_size
        self.is_main_process = rank == 0
        self._shared, self._barrier = shared, barrier

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._shared[self.process_index] = tensor
        self._barrier.wait(60)
        gathered = torch.cat([self._shared[rank] for rank in range(self.num_processes)])
        self._barrier.wait(60)
        return gathered


def compute_on(
    world_size: int, network: nn.Module, loader: ImageLoader, batch_size: int
) -> np.ndarray:
    """Return what rank 0 of `world_size` processes gets; check that the others get None."""
    shared: dict[int, Any] = {}
    results: dict[int, Any] = {}
    barrier = threading.Barrier(world_size)

    def compute_on_rank(rank: int) -> None:
        accelerator: Any = ThreadAccelerator(rank, world_size, shared, barrier)
        results[rank] = compute_features(network, loader, accelerator, batch_size=batch_size)

    threads = [threading.Thread(target=compute_on_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[rank] is None for rank in range(1, world_size)] == [True] * (world_size - 1)
    return results[0]


def digits_loader(built: BuiltModel, num_images: int) -> ImageLoader:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(num_images))
    pipeline = build_pipeline(built.preprocessing)
    return ImageLoader(
        make_pixel_store(split), pipeline, num_classes=10, device=torch.device("cpu")
    )


def test_features_are_bit_identical_on_any_number_of_processes() -> None:
    built = make_model()
    loader = digits_loader(built, 101)
    single = compute_on(1, built.model, loader, 4)
    assert single.shape == (101, 16)
    assert single.dtype == np.float32
    with torch.no_grad():
        batches = list(loader.eval_batches(batch_size=101))
        expected = compute_pre_logits(built.model.eval(), batches[0].images_BCHW)
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-5)
    assert len(np.unique(single, axis=0)) > 90
    for world_size in (2, 3, 5):  # 101 images make 4 shares, so one of 5 processes gets none
        assert compute_on(world_size, built.model, loader, 4).tobytes() == single.tobytes()


def test_non_finite_features_are_refused() -> None:
    built = make_model()
    nn.init.constant_(built.model.norm.weight, float("nan"))
    with pytest.raises(WeightsError, match="not finite"):
        compute_features(
            built.model, digits_loader(built, 5), create_accelerator(RunSection()), batch_size=4
        )


def load_features(
    split: Any,
    built: BuiltModel,
    transform: str | None = None,
    *,
    pipeline: Pipeline | None = None,
    **data: Any,
) -> Features:
    """Load or compute features in one process, as a probe does."""
    features = load_or_compute_features(
        split,
        model=built.model,
        pipeline=pipeline or build_pipeline(built.preprocessing, transform),
        identity=feature_identity(built, transform),
        data_config=DataSection(source="embedded:digits", **data),
        accelerator=create_accelerator(RunSection(precision="fp32")),
    )
    assert features is not None
    return features


def test_second_call_reads_the_cache_and_damage_is_repaired(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    split = open_source("embedded:digits").splits["test"]
    first = load_features(split, make_model())
    computed = first.values_ND.tobytes()
    assert not first.is_cached
    np.testing.assert_array_equal(first.labels_N, split.labels)
    monkeypatch.setattr(feature_extraction, "build_pixel_store", pytest.fail)
    monkeypatch.setattr(feature_extraction, "compute_features", pytest.fail)
    again = load_features(open_source("embedded:digits").splits["test"], make_model())
    assert again.is_cached
    assert not again.values_ND.flags.writeable
    assert again.values_ND.tobytes() == computed
    assert len(list(cache.iterdir())) == 1

    monkeypatch.undo()
    monkeypatch.setenv("FINETUNE_CACHE", str(cache.parent))
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)
    repaired = load_features(split, make_model())
    assert not repaired.is_cached
    assert "is damaged" in capsys.readouterr().err
    assert repaired.values_ND.tobytes() == computed


def test_other_weights_pixels_images_or_decoders_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(20))
    built = make_model()
    assert not load_features(split, built).is_cached
    assert load_features(split, built).is_cached
    assert not load_features(split, make_model(seed=1)).is_cached
    assert not load_features(split, built, "resize(10) | center_crop").is_cached
    brighter = replace(built, preprocessing=replace(built.preprocessing, mean=(0.4, 0.5, 0.5)))
    assert not load_features(split, brighter).is_cached
    assert not load_features(split.subset(np.arange(19)), built).is_cached
    assert not load_features(split.subset(np.arange(20)[::-1]), built).is_cached
    relabelled = replace(split, labels=9 - split.labels)
    assert not load_features(relabelled, built).is_cached
    assert load_features(split, built).is_cached
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert not load_features(split, built).is_cached
    # a HEIC photo that could not be decoded before must not stay left out
    monkeypatch.setattr(image_decoder, "heif_decoder_version", lambda: "another")
    assert not load_features(split, built).is_cached


@pytest.mark.parametrize(
    "spec, is_used", [("resize", True), ("resize(interpolation='nearest')", False)]
)
def test_default_interpolation_is_part_of_the_key_if_it_is_used(spec: str, is_used: bool) -> None:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(20))
    built = make_model()
    assert not load_features(split, built, spec).is_cached
    bilinear = replace(built.preprocessing, interpolation="bilinear")
    again = load_features(split, built, spec, pipeline=build_pipeline(bilinear, spec))
    assert again.is_cached is not is_used


def test_feature_identity_depends_on_backbone_weights_and_transforms() -> None:
    identity, same = feature_identity(make_model(), None), feature_identity(make_model(), None)
    assert identity == same
    changed = make_model()
    with torch.no_grad():
        changed.model.cls_token[0, 0, 0] += 1e-6
    assert feature_identity(changed, None)["weights"] != identity["weights"]
    other_head = make_model()
    nn.init.ones_(other_head.model.head.weight)
    assert feature_identity(other_head, None) == identity, (
        "features do not depend on the classifier"
    )
    with_dropout = replace(make_model(), model_args={**make_model().model_args, "drop_rate": 0.5})
    assert feature_identity(with_dropout, None) == identity, (
        "features do not depend on training-only settings"
    )
    assert identity["eval"].startswith("resize(")
    assert feature_identity(make_model(), "resize(9) | center_crop")["eval"] != identity["eval"]


def test_unreadable_images_raise_or_are_quarantined(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "set", {"train/cat": 3, "train/dog": 3})
    broken = tmp_path / "set" / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    split = open_source(source).splits["train"]
    built = make_model()
    transform = "resize((8, 8))"
    messages: list[list[str]] = []
    results = []
    for _ in range(2):
        forget_warnings()  # as in a new process
        with logged() as logged_messages:
            results.append(load_features(split, built, transform, unreadable="quarantine"))
        messages.append(logged_messages)
    first, again = results
    assert "1.png" in messages[0][0]
    assert messages[0] == messages[1]
    assert (first.is_cached, again.is_cached) == (False, True)
    for features in (first, again):
        assert features.indices_N.tolist() == [0, 2, 3, 4, 5]
        assert features.labels_N.tolist() == [0, 0, 1, 1, 1]
        assert features.values_ND.shape == (5, 16)
    np.testing.assert_array_equal(first.values_ND, again.values_ND)
    with pytest.raises(DataError, match=r"1\.png"):
        load_features(split, built, transform)


def test_an_image_that_was_unreadable_for_a_moment_is_computed_later(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = open_source(write_image_folder(tmp_path / "set", {"cat": 3, "dog": 3})).splits["train"]
    decode = FileImages.decode

    def fail_for_row_1(self: FileImages, row: int, *arguments: Any) -> np.ndarray:
        if row == 1:
            raise DataError("1: cannot be opened (Input/output error)", code="data.unreadable")
        return decode(self, row, *arguments)

    options: dict[str, Any] = {"transform": "resize((8, 8))", "unreadable": "quarantine"}
    with monkeypatch.context() as patch:
        patch.setattr(FileImages, "decode", fail_for_row_1)
        assert load_features(split, make_model(), **options).indices_N.tolist() == [0, 2, 3, 4, 5]
    for is_cached in (False, True):
        features = load_features(split, make_model(), **options)
        assert (features.is_cached, len(features.indices_N)) == (is_cached, 6)
    assert len(list(cache.iterdir())) == 1


def test_unwritable_cache_still_returns_features(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    split = open_source("embedded:digits").splits["test"].subset(np.arange(9))
    features = load_features(split, make_model())
    assert features.values_ND.shape == (9, 16)
    assert "are not kept" in capsys.readouterr().err
    assert not load_features(split, make_model()).is_cached


def test_precisions_have_separate_cache_entries() -> None:
    split = open_source("embedded:digits").splits["test"].subset(np.arange(20))
    built, data = make_model(), DataSection(source="embedded:digits")

    def load_with(precision: str) -> Features:
        features = load_or_compute_features(
            split,
            model=built.model,
            pipeline=build_pipeline(built.preprocessing, None),
            identity=feature_identity(built, None),
            data_config=data,
            accelerator=create_accelerator(RunSection(precision=precision)),
        )
        assert features is not None
        return features

    fp32, bf16 = load_with("fp32"), load_with("bf16")
    assert not bf16.is_cached
    difference = np.abs(fp32.values_ND - bf16.values_ND).max()
    assert 1e-4 < difference < 0.1  # bf16 has 8 significant bits, and features are about 1
    assert load_with("bf16").is_cached


def test_subset_indices_returns_positions_in_the_whole_split() -> None:
    whole = open_source("embedded:digits").splits["test"]
    part = whole.subset(np.array([2, 5, 9]))
    assert subset_indices(part, whole).tolist() == [2, 5, 9]
    assert subset_indices(part.subset(np.array([0, 2])), part).tolist() == [0, 2]
    assert subset_indices(whole, whole).tolist() == list(range(len(whole)))
