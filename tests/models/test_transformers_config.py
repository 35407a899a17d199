"""models/weights/transformers_config.py: names, classes, and processors as timm configs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from finetune.errors import WeightsError
from finetune.hub.download import CachedHubFile, FileNotInRepoError
from finetune.models.weights import transformers_config
from finetune.models.weights.transformers_config import resolve_classifier

pytest.importorskip("transformers")

CONFIG = {"model_type": "cvt", "architectures": ["X"], "id2label": {"1": "b", "0": "a"}}
MEAN_AND_STD = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


def write_config(folder: Path, processor: dict[str, Any] | None, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return f"transformers:{folder}"


@pytest.mark.parametrize(
    "processor, expected",
    [
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, ((3, 224, 224), 0.875, "center")),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, ((3, 384, 384), 1.0, "squash")),
        ({"size": {"height": 224, "width": 192}}, ((3, 224, 192), 1.0, "squash")),
        (
            {"size": {"shortest_edge": 256}, "crop_size": 224, "do_center_crop": True},
            ((3, 224, 224), 0.875, "center"),
        ),
    ],
)
def test_converts_processor_sizes(tmp_path: Path, processor: Any, expected: Any) -> None:
    name = write_config(tmp_path, {**processor, **MEAN_AND_STD, "resample": 2})
    config = resolve_classifier(name, pretrained=False)[0].config
    assert (config["input_size"], config["crop_pct"], config["crop_mode"]) == expected
    assert (config["mean"], config["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert config["interpolation"] == "bilinear"


def test_class_names_are_ordered_by_index(tmp_path: Path) -> None:
    weights, path, _ = resolve_classifier(write_config(tmp_path, None), pretrained=False)
    assert path is None
    assert weights.class_names == ["a", "b"]
    assert weights.config["num_classes"] == 2
    assert weights.model_args == {
        "transformers_config": {"model_type": "cvt", "architectures": ["X"]}
    }
    default_names = write_config(tmp_path, None, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    assert resolve_classifier(default_names, pretrained=False)[0].class_names is None


@pytest.mark.parametrize("is_missing", [True, False])
def test_only_a_processor_that_the_repository_lacks_is_left_out(
    is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, None)
    error = (
        FileNotInRepoError("no file")
        if is_missing
        else WeightsError("transformers:me/cvt: it is damaged; delete it")
    )

    def download(repository: str, filename: str, *_: Any, **__: Any) -> CachedHubFile:
        if filename == "preprocessor_config.json":
            raise error
        return CachedHubFile(tmp_path / filename, "abc", None)

    monkeypatch.setattr(transformers_config, "download_hub_file", download)
    with contextlib.nullcontext() if is_missing else refused("weights", "it is damaged"):
        resolve_classifier("transformers:me/cvt", pretrained=False)


@pytest.mark.parametrize("name", ["transformers:nowhere", "transformers:./nowhere/at/all"])
def test_rejects_folders_that_do_not_exist(name: str) -> None:
    with refused("weights.unknown_name", name, "transformers:owner/name"):
        resolve_classifier(name)


@pytest.mark.parametrize(
    "config, processor, expected",
    [
        ({"id2label": {"a": "b"}}, None, "config.json: id2label"),
        ({"id2label": ["a"]}, None, "config.json: id2label"),
        ({"model_type": [1]}, None, "config.json: model_type"),
        ({"image_size": "large"}, None, "config.json: image_size"),
        ({"num_labels": -1}, None, "config.json: num_labels"),
        ({}, {"size": "x"}, "preprocessor_config.json: size"),
        ({}, {"size": {"longest_edge": 3}}, "preprocessor_config.json: size"),
        ({}, {"size": 10**6}, "preprocessor_config.json: size"),
        ({}, {"image_mean": 3}, "preprocessor_config.json: image_mean"),
        ({}, {"image_std": [0, 0, 0]}, "preprocessor_config.json: image_std"),
        ({}, {"resample": [3]}, "preprocessor_config.json: resample"),
    ],
)
def test_rejects_invalid_values(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any] | None, expected: str
) -> None:
    name = write_config(tmp_path, processor, **config)
    with refused("weights.wrong_config", f"{name}: {expected}"):
        resolve_classifier(name, pretrained=False)
