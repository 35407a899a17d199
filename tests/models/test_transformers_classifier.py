"""models/architectures/transformers_classifier.py: tiny networks saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import CLASS_NAMES, compute_logits, random_images, randomize_head, save_network
from PIL import Image
from refusals import refused
from torch import nn

from finetune.models.architectures import transformers_classifier as classifier_module
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.models.weights.read import read_tensors
from finetune.models.weights.transformers_config import resolve_classifier
from finetune.transforms.eval_transforms import build_pipeline

transformers = pytest.importorskip("transformers")

CVT = {
    "embed_dim": [8, 16, 24],
    "depth": [1, 2, 3],  # transformers' drop path rates need at least this many blocks
    # its drop path drops whole samples, including the shortcut
    "drop_path_rate": [0.0, 0.0, 0.0],
    "num_heads": [1, 2, 3],
    "patch_sizes": [7, 3, 3],
}
PVT = {
    "image_size": 64,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 3, 4],
    "mlp_ratios": [2, 2, 2, 2],
}
VIT = {
    "image_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cvt": ("CvtConfig", CVT),
    "pvt": ("PvtConfig", PVT),
    "vit": ("ViTConfig", VIT),
    "resnet": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
}


def save_with_transformers(tmp_path: Path, kind: str) -> str:
    """Save a tiny classifier and its processor with transformers only."""
    name, values = CASES[kind]
    config = getattr(transformers, name)(
        **values, num_labels=5, id2label=dict(enumerate(CLASS_NAMES))
    )
    model = transformers.AutoModelForImageClassification.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / kind)
    if kind == "cvt":
        processor = transformers.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.8)
    else:
        processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(tmp_path / kind)
    return str(tmp_path / kind)


def load_with_transformers(path: str) -> Any:
    return transformers.AutoModelForImageClassification.from_pretrained(path).eval()


def build(path: object, **kwargs: Any) -> BuiltModel:
    return build_model(f"transformers:{path}", **kwargs)


@pytest.mark.parametrize("kind", CASES)
def test_logits_equal_transformers(tmp_path: Path, kind: str) -> None:
    path = save_with_transformers(tmp_path, kind)
    built, x = build(path), random_images(64)
    with torch.no_grad():
        expected = load_with_transformers(path)(pixel_values=x).logits
    assert expected.std() > 0
    assert torch.equal(compute_logits(built.model, x), expected)
    assert built.class_names == CLASS_NAMES
    assert built.preprocessing.image_size == (64, 64)


@pytest.mark.parametrize("kind", CASES)
def test_trains_saves_and_loads_at_another_size(tmp_path: Path, kind: str) -> None:
    built = build(save_with_transformers(tmp_path, kind), num_classes=3, image_size=96)
    model, x, labels = built.model, random_images(96), torch.tensor([0, 2])
    assert torch.equal(compute_logits(model, x), torch.zeros(2, 3))  # the zero head
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    parameters = dict(model.named_parameters())
    names_with_gradient = [
        name
        for name, parameter in parameters.items()
        if parameter.grad is not None and parameter.grad.any()
    ]
    assert len(names_with_gradient) > 0.9 * len(parameters)
    saved_folder = save_network(tmp_path / "ours", built, class_names=["a", "b", "c"])
    loaded = build_model(saved_folder)
    assert torch.equal(compute_logits(loaded.model, x), compute_logits(model, x))
    assert loaded.class_names == ["a", "b", "c"]


def test_rejects_missing_tensors(tmp_path: Path) -> None:
    weights, path, _ = resolve_classifier(f"transformers:{save_with_transformers(tmp_path, 'pvt')}")
    assert path is not None
    tensors = read_tensors(path)
    tensors.pop("classifier.bias")
    with refused("weights.missing_tensors", "it", "1 tensors", "classifier.bias"):
        classifier_module.convert_state_dict(tensors, weights.model_args, source="it")


def test_head_and_features(tmp_path: Path) -> None:
    model = build(save_with_transformers(tmp_path, "pvt")).model
    assert model.num_features == 32
    assert model.get_classifier().out_features == model.num_classes == 5


def test_freezing_the_backbone_leaves_the_head(tmp_path: Path) -> None:
    model = build(save_with_transformers(tmp_path, "cvt"), num_classes=2, freeze="backbone").model
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == ["network.classifier.weight", "network.classifier.bias"]


@pytest.mark.parametrize("kind", ["cvt", "pvt"])
def test_preprocessing_equals_the_processor(tmp_path: Path, kind: str) -> None:
    path = save_with_transformers(tmp_path, kind)
    rng = np.random.default_rng(0)
    small_image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.array(small_image.resize((200, 150), Image.Resampling.BICUBIC))
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    pipeline = build_pipeline(build(path).preprocessing)
    actual = pipeline(torch.from_numpy(pixels).permute(2, 0, 1)[None], device=torch.device("cpu"))
    assert actual.shape == expected.shape
    # rounding to bytes between the two resizes
    assert float((actual - expected).abs().mean()) < 0.02


def test_random_weights_need_no_weights_file(tmp_path: Path) -> None:
    path = save_with_transformers(tmp_path, "cvt")
    (Path(path) / "model.safetensors").unlink()
    built = build(path, pretrained=False, num_classes=4)
    randomize_head(built.model)
    assert compute_logits(built.model, random_images(64)).std() > 0
    with refused("weights.not_found", path, "model.safetensors"):
        build(path)


def test_never_runs_code_of_a_repository(tmp_path: Path) -> None:
    path = save_with_transformers(tmp_path, "cvt")
    file = Path(path) / "config.json"
    content = json.loads(file.read_text())
    content["auto_map"] = {"AutoModelForImageClassification": "evil.Model"}
    file.write_text(json.dumps(content))
    (Path(path) / "evil.py").write_text("raise SystemExit('ran')")
    assert type(build(path).model.network).__module__.startswith("transformers.models.cvt")


@pytest.mark.parametrize(
    "config, code, expected_text",
    [
        ({"architecture": "vit"}, "weights.wrong_format", "model_type"),
        ({"model_type": "bert"}, "weights.unsupported", "'bert'"),
        ({"model_type": "nothing"}, "weights.unsupported", "'nothing'"),
    ],
)
def test_rejects_configs_of_other_models(
    tmp_path: Path, config: dict[str, Any], code: str, expected_text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(code, tmp_path, expected_text):
        build(tmp_path, pretrained=False)
