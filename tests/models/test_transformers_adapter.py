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

from finetune.models.architectures import transformers_classifier as adapter
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.models.weights.read import read_tensors
from finetune.models.weights.transformers_config import resolve_classifier
from finetune.transforms.eval_transforms import build_pipeline

transformers = pytest.importorskip("transformers")

CVT = {
    "embed_dim": [8, 16, 24],
    "depth": [1, 2, 3],  # transformers' own drop path counts no fewer
    # and what it drops is a whole sample, its shortcut included
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
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "cvt": ("CvtConfig", CVT),
    "pvt": ("PvtConfig", PVT),
    "vit": ("ViTConfig", VIT),
    "resnet": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
}


def folder(tmp_path: Path, kind: str) -> str:
    """Written by transformers alone."""
    name, values = KINDS[kind]
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


def reference(path: str) -> Any:
    return transformers.AutoModelForImageClassification.from_pretrained(path).eval()


def made(path: object, **kwargs: Any) -> BuiltModel:
    return build_model(f"transformers:{path}", **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers_own(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path, kind)
    built, x = made(path), random_images(64)
    with torch.no_grad():
        expected = reference(path)(pixel_values=x).logits
    assert expected.std() > 0
    assert torch.equal(compute_logits(built.model, x), expected)
    assert built.class_names == CLASS_NAMES
    assert built.preprocessing.image_size == (64, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_at_another_size_then_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    built = made(folder(tmp_path, kind), num_classes=3, image_size=96)
    model, x, labels = built.model, random_images(96), torch.tensor([0, 2])
    assert torch.equal(compute_logits(model, x), torch.zeros(2, 3))  # the zero head
    model.train()
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        step.step()
    parameters = dict(model.named_parameters())
    reached = [name for name, p in parameters.items() if p.grad is not None and p.grad.any()]
    assert len(reached) > 0.9 * len(parameters)
    saved = save_network(tmp_path / "ours", built, class_names=["a", "b", "c"])
    again = build_model(saved)
    assert torch.equal(compute_logits(again.model, x), compute_logits(model, x))
    assert again.class_names == ["a", "b", "c"]


def test_a_file_with_too_few_tensors(tmp_path: Path) -> None:
    weights, path, _ = resolve_classifier(f"transformers:{folder(tmp_path, 'pvt')}")
    assert path is not None
    tensors = read_tensors(path)
    tensors.pop("classifier.bias")
    with refused("weights.missing_tensors", "it", "1 tensors", "classifier.bias"):
        adapter.convert_state_dict(tensors, weights.model_args, source="it")


def test_head_and_features(tmp_path: Path) -> None:
    model = made(folder(tmp_path, "pvt")).model
    assert model.num_features == 32
    assert model.get_classifier().out_features == model.num_classes == 5
    model.reset_classifier(7)
    assert compute_logits(model, random_images(64)).shape == (2, 7)
    model.reset_classifier(0)
    assert compute_logits(model, random_images(64)).shape == (2, 32)


def test_freezing_leaves_the_head(tmp_path: Path) -> None:
    model = made(folder(tmp_path, "cvt"), num_classes=2, freeze="backbone").model
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learned == ["network.classifier.weight", "network.classifier.bias"]


@pytest.mark.parametrize("kind", ["cvt", "pvt"])
def test_images_are_prepared_as_their_processor_does(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path, kind)
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.array(coarse.resize((200, 150), Image.Resampling.BICUBIC))
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    theirs = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    pipeline = build_pipeline(made(path).preprocessing)
    ours = pipeline(torch.from_numpy(pixels).permute(2, 0, 1)[None], device=torch.device("cpu"))
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().mean()) < 0.02  # rounding to bytes between the two resizes


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    path = folder(tmp_path, "cvt")
    (Path(path) / "model.safetensors").unlink()
    built = made(path, pretrained=False, num_classes=4)
    randomize_head(built.model)
    assert compute_logits(built.model, random_images(64)).std() > 0
    with refused("weights.not_found", path, "model.safetensors"):
        made(path)


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    path = folder(tmp_path, "cvt")
    file = Path(path) / "config.json"
    content = json.loads(file.read_text())
    content["auto_map"] = {"AutoModelForImageClassification": "evil.Model"}
    file.write_text(json.dumps(content))
    (Path(path) / "evil.py").write_text("raise SystemExit('ran')")
    assert type(made(path).model.network).__module__.startswith("transformers.models.cvt")


@pytest.mark.parametrize(
    "config, code, named",
    [
        ({"architecture": "vit"}, "weights.wrong_format", "model_type"),
        ({"model_type": "bert"}, "weights.unsupported", "'bert'"),
        ({"model_type": "nothing"}, "weights.unsupported", "'nothing'"),
    ],
)
def test_what_is_no_image_classifier(
    tmp_path: Path, config: dict[str, Any], code: str, named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(code, tmp_path, named):
        made(tmp_path, pretrained=False)
