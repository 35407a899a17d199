"""models/weights/transformers_config.py: names, classes, and processors as timm configs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import logged
from refusals import refused

from finetune.errors import WeightsError
from finetune.hub.download import CachedHubFile, FileNotInRepoError
from finetune.models.weights import transformers_config
from finetune.models.weights.transformers_config import resolve_classifier
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.preprocessing import resolve_preprocessing

transformers = pytest.importorskip("transformers")

CONFIG = {"model_type": "cvt", "architectures": ["X"], "id2label": {"1": "b", "0": "a"}}
VIT = {"image_processor_type": "ViTImageProcessor"}
CLIP = {"image_processor_type": "CLIPImageProcessor"}
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
        ({**VIT, "size": {"height": 224, "width": 192}}, ((3, 224, 192), 1.0, "squash")),
        (
            {**CLIP, "size": {"shortest_edge": 256}, "crop_size": 224},
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


PROCESSORS = {
    "ViTImageProcessor": {"size": 32},  # a number is squashed by this class
    "BeitImageProcessor": {"size": 40, "crop_size": 32, "do_center_crop": True},
    "BitImageProcessor": {"size": {"shortest_edge": 40}, "crop_size": 32},
    "ConvNextImageProcessor": {"size": {"shortest_edge": 32}, "crop_pct": 0.8},
    "DeiTImageProcessor": {"size": 40, "crop_size": 32},
    "EfficientNetImageProcessor": {"size": 32, "include_top": True},
    "LevitImageProcessor": {"size": 32, "crop_size": 32},
    "MobileNetV2ImageProcessor": {"size": 40, "crop_size": 32},
    "MobileViTImageProcessor": {"size": 40, "crop_size": 32, "do_flip_channel_order": False},
    "PoolFormerImageProcessor": {"size": 32, "crop_size": 32, "crop_pct": 0.8},
    "SiglipImageProcessor": {"size": {"height": 32, "width": 24}, "rescale_factor": 1 / 127.5},
    "PvtImageProcessor": {"size": 32, "do_rescale": False, "do_normalize": False},
}


@pytest.mark.parametrize("processor_class", PROCESSORS)
def test_images_are_prepared_as_by_the_processor(tmp_path: Path, processor_class: str) -> None:
    processor = {"image_processor_type": processor_class, **PROCESSORS[processor_class]}
    name, lines = write_config(tmp_path, processor), list[str]()
    with logged(lines):
        config = resolve_classifier(name, pretrained=False)[0].config
    assert lines == []
    own = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    image_3HW = torch.linspace(0, 255, 3 * 100 * 140).byte().view(100, 3, 140).transpose(0, 1)
    expected = own(image_3HW, return_tensors="pt")["pixel_values"]
    preprocessing = resolve_preprocessing(config, config["input_size"][1:])
    actual = build_pipeline(preprocessing)([image_3HW.contiguous()])
    assert actual.shape == expected.shape
    difference = (actual - expected) * torch.tensor(preprocessing.std)[:, None, None]
    assert float(difference.abs().mean()) < 0.01


@pytest.mark.parametrize(
    "processor",
    [
        {"image_processor_type": "MobileViTImageProcessor", "size": 40, "crop_size": 32},  # BGR
        {"image_processor_type": "ViTImageProcessor", "do_resize": False},
        {"image_processor_type": "PerceiverImageProcessor"},  # crops before it resizes
    ],
)
def test_says_that_a_processor_prepares_images_differently(
    tmp_path: Path, processor: dict[str, Any]
) -> None:
    name, lines = write_config(tmp_path, processor), list[str]()
    with logged(lines):
        resolve_classifier(name, pretrained=False)
    assert len(lines) == 1
    assert processor["image_processor_type"] in lines[0]
    assert name in lines[0]


@pytest.mark.parametrize(
    "labels, problem_type, is_multilabel",
    [
        ("ab", "multi_label_classification", True),
        ("a", None, True),
        ("ab", "single_label_classification", False),
        ("ab", None, False),
        ("a", "regression", False),
    ],
)
def test_multilabel_classifiers(
    tmp_path: Path, labels: str, problem_type: str | None, is_multilabel: bool
) -> None:
    """As in transformers' pipeline."""
    id2label = dict(enumerate(labels))
    name = write_config(tmp_path, None, id2label=id2label, problem_type=problem_type)
    assert resolve_classifier(name, pretrained=False)[0].multilabel is is_multilabel


def test_the_code_of_a_processor_does_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto_map = {"AutoImageProcessor": "modeling.Net"}
    name = write_config(tmp_path, {"auto_map": auto_map, "size": 32, **MEAN_AND_STD})
    assert resolve_classifier(name, pretrained=False)[0].config["mean"] == (0.1, 0.2, 0.3)
    assert "which is not run" in caplog.text


def test_unknown_processor_is_refused(tmp_path: Path) -> None:
    name = write_config(tmp_path, {"image_processor_type": "NoSuchProcessor"})
    with refused("weights.wrong_config", name, "preprocessor_config.json", "image_processor_type"):
        resolve_classifier(name, pretrained=False)
