"""vit_representation.py: the layer before the head, known to timm."""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from networks import (
    TINY,
    images,
    logits,
    save,
    shuffle,
)

from finetune.models.build import build

ARGS = {**TINY, "img_size": 32, "representation_size": 12}


def test_the_layer_stands_between_pooling_and_head() -> None:
    model = timm.create_model("vit_representation", num_classes=5, **ARGS).eval()
    tokens_BND = model.forward_features(images(32))
    expected = torch.tanh(model.fc_norm.fc(tokens_BND[:, 0]))
    assert expected.shape == (2, 12)
    assert torch.equal(model.forward_head(tokens_BND, pre_logits=True), expected)
    assert torch.equal(model.forward_head(tokens_BND), model.head(expected))


def test_it_moves_like_any_network(tmp_path: Path) -> None:
    made = build("vit_representation", num_classes=5, pretrained=False, image_size=32, args=ARGS)
    assert torch.equal(logits(made.model, images(32)), torch.zeros(2, 5))
    shuffle(made.model)
    folder = save(tmp_path / "net", made)
    plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
    x = images(32)
    assert torch.equal(logits(plain, x), logits(made.model, x))
    moved = build(folder, num_classes=3, image_size=48, freeze="backbone")
    assert moved.model.fc_norm.fc.weight.equal(made.model.fc_norm.fc.weight)
    trainable = {name for name, p in moved.model.named_parameters() if p.requires_grad}
    assert trainable == {"head.weight", "head.bias"}


def test_without_classes_it_gives_the_layer() -> None:
    model = timm.create_model("vit_representation", num_classes=0, **ARGS)
    assert logits(model, images(32)).shape == (2, 12)
