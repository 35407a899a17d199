from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from report_runs import run_results, split_results, write_and_read_run

from finetune.data.encoded_images import ArrayImages
from finetune.data.open_source import open_source
from finetune.data.source import Split
from finetune.report.run_data import Run
from finetune.report.thumbnails import (
    class_thumbnails,
    denormalize,
    mistake_rows,
    no_mistakes_reason,
    open_reported_split,
    to_data_uri,
)


def decode_data_uri(uri: str) -> np.ndarray:
    head, _, body = uri.partition(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


def load_mistake_rows(run: Run) -> tuple[list[dict[str, Any]], str]:
    return mistake_rows(run, *open_reported_split(run))


class TestMistakes:
    def test_thumbnails_match_the_dataset_images(self, tmp_path: Path) -> None:
        rows, note = load_mistake_rows(write_and_read_run(tmp_path / "run"))
        assert note == ""
        assert len(rows) == 3
        split = open_source("embedded:digits").splits["test"]
        for index, row in enumerate(rows):
            assert np.array_equal(decode_data_uri(row["picture"]), split.decode(index))
            assert row["small"]
            assert row["name"] == split.name_of(index)
            assert row["label"] == str(split.labels[index])

    def test_uses_an_open_split(self, tmp_path: Path) -> None:
        run = write_and_read_run(tmp_path / "run")
        run.results["test"]["mistakes"] = [{"index": 0, "label": 1, "predicted": 0, "name": "x"}]
        pixels = np.zeros((1, 600, 300, 3), dtype=np.uint8)
        split = Split("test", np.array([1]), ArrayImages(pixels, "mine"))
        rows, _ = mistake_rows(run, split)
        assert decode_data_uri(rows[0]["picture"]).shape == (192, 96, 3)
        assert not rows[0]["small"]

    def test_missing_data_omits_only_the_thumbnails(self, tmp_path: Path) -> None:
        run = write_and_read_run(tmp_path / "run", "data.source=folder:nowhere/at/all")
        rows, note = load_mistake_rows(run)
        assert len(rows) == 3
        assert not any(row["picture"] for row in rows)
        assert "the data cannot be opened from here" in note

    def test_changed_data_shows_no_thumbnails(self, tmp_path: Path) -> None:
        run = write_and_read_run(tmp_path / "run")
        split, _ = open_reported_split(run)
        assert split is not None
        for fingerprint in (split.fingerprint, "0" * 64):
            run.record["split_fingerprints"] = {"test": fingerprint}
            rows, note = load_mistake_rows(run)
            is_same = fingerprint == split.fingerprint
            assert [bool(row["picture"]) for row in rows] == [is_same] * 3
            assert ("the data has changed since the run" in note) == (not is_same)
        del run.record["split_fingerprints"]
        for mistake in run.results["test"]["mistakes"]:
            mistake["label"] = (mistake["label"] + 1) % 10
        rows, note = load_mistake_rows(run)
        assert not any(row["picture"] for row in rows)
        assert "the data has changed since the run" in note

    @pytest.mark.parametrize("index", [None, -1, 10**9])
    def test_invalid_index_has_no_thumbnail(self, tmp_path: Path, index: object) -> None:
        run = write_and_read_run(tmp_path / "run")
        run.results["test"]["mistakes"] = [{"index": index, "label": 5}]
        rows, _ = load_mistake_rows(run)
        assert [row["picture"] for row in rows] == [""]

    def test_run_without_recorded_mistakes_states_the_reason(self, tmp_path: Path) -> None:
        outcome = run_results(test={key: split_results()[key] for key in ("top1", "examples")})
        run = write_and_read_run(tmp_path / "run", results=outcome)
        assert load_mistake_rows(run) == ([], "")
        assert no_mistakes_reason(run) == "This run did not record individual mistakes."
        run.results["test"]["top1"] = 1.0
        assert no_mistakes_reason(run).startswith("There are none")
        del run.results["test"]
        assert "test" not in no_mistakes_reason(run)  # the page is about validation
        run.results["val"]["top1"] = 1.0
        assert "every validation image" in no_mistakes_reason(run)
        del run.results["val"]
        assert "evaluated" in no_mistakes_reason(run)


class TestClassThumbnails:
    def test_first_image_of_each_class(self, tmp_path: Path) -> None:
        run = write_and_read_run(tmp_path / "run")
        split, _ = open_reported_split(run)
        assert split is not None
        assert class_thumbnails(run, split) == []  # these are not the evaluated images
        measured = run.results["test"]["per_class"]
        for label, row in enumerate(measured):
            row["support"] = int((split.labels == label).sum())
        thumbnails = class_thumbnails(run, split)
        assert len(thumbnails) == 10
        for label, (uri, small) in enumerate(thumbnails):
            index = int(np.flatnonzero(split.labels == label)[0])
            assert np.array_equal(decode_data_uri(uri), split.decode(index))
            assert small
        assert class_thumbnails(run, None) == []
        run.results["test"]["per_class"] = [{"support": 0}] * 51
        assert class_thumbnails(run, split) == []

    def test_class_without_images_has_no_thumbnail(self, tmp_path: Path) -> None:
        run = write_and_read_run(tmp_path / "run")
        run.results["test"]["per_class"] = [{"support": 0}, {"support": 1}]
        pixels = np.full((1, 300, 200, 3), 7, dtype=np.uint8)
        split = Split("test", np.array([1]), ArrayImages(pixels, "mine"))
        (missing, _), (uri, small) = class_thumbnails(run, split)
        assert missing == ""
        assert decode_data_uri(uri).shape == (64, 43, 3)
        assert not small


def test_small_images_are_lossless_and_photos_are_compressed() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (400, 300, 3), dtype=np.uint8)
    assert np.array_equal(
        decode_data_uri(to_data_uri(pixels[:95, :95], max_side=128)), pixels[:95, :95]
    )
    smooth = np.asarray(
        Image.fromarray(pixels[:4, :3]).resize((300, 400), Image.Resampling.BICUBIC)
    )
    uri = to_data_uri(smooth, max_side=128)
    assert uri.startswith("data:image/jpeg;")
    assert decode_data_uri(uri).shape == (128, 96, 3)
    assert len(uri) < 6000  # a PNG would take three times as much
    expected = Image.fromarray(smooth).resize((96, 128), Image.Resampling.LANCZOS)
    difference = np.abs(decode_data_uri(uri).astype(int) - np.asarray(expected).astype(int))
    assert difference.mean() < 4


def test_denormalize_inverts_normalization() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    plain = torch.rand(2, 3, 4, 5)
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (std, mean))
    shown = denormalize((plain - shift) / scale, mean=mean, std=std)
    assert shown.shape == (2, 4, 5, 3)
    assert np.allclose(shown, plain.permute(0, 2, 3, 1).numpy(), atol=1e-6)
    overshoot = denormalize(torch.full((1, 3, 1, 1), 9.0), mean=mean, std=std)
    assert overshoot.max() == 1  # an overshoot is white
