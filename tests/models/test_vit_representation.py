"""models/architectures/vit_representation.py: the layer before the head, registered in timm."""

from __future__ import annotations

import timm
import torch
from networks import NETWORKS, compute_logits, random_images

ARGS = NETWORKS["representation"][1]


def test_the_layer_is_between_pooling_and_head() -> None:
    model = timm.create_model("vit_representation", num_classes=5, **ARGS).eval()
    tokens_BND = model.forward_features(random_images(32))
    expected = torch.tanh(model.fc_norm.fc(tokens_BND[:, 0]))
    assert expected.shape == (2, 12)
    assert torch.equal(model.forward_head(tokens_BND, pre_logits=True), expected)
    assert torch.equal(model.forward_head(tokens_BND), model.head(expected))


def test_without_classes_returns_the_representation() -> None:
    model = timm.create_model("vit_representation", num_classes=0, **ARGS)
    assert compute_logits(model, random_images(32)).shape == (2, 12)
