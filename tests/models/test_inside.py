"""models/attention.py, what a network has inside: each array against one that is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch
from networks import TINY, built, images

from finetune.errors import WeightsError
from finetune.models.architectures.position_embeddings import position_table
from finetune.models.attention import (
    attention_distances,
    even_distance,
    patch_filters,
    position_similarity,
)


def network(**args: Any) -> Any:
    settings = {**TINY, "img_size": (32, 48), **args}
    return timm.create_model("vit_tiny_patch16_224", **settings).eval()


def test_filters_are_the_directions_that_vary_most() -> None:
    model = network()
    one, other = torch.randn(2, 3, 8, 8)
    other -= one * (one * other).sum() / one.square().sum()  # at right angles
    weights = torch.randn(32, 1, 1, 1) * 5 * one / one.norm()
    weights += torch.randn(32, 1, 1, 1) * other / other.norm() + 3.0  # the mean says nothing
    model.patch_embed.proj.weight.data.copy_(weights)
    found = patch_filters(model, components=2)
    assert found.shape == (2, 8, 8, 3)
    for image, direction in zip(found, (one, other), strict=True):
        flat = (image - 0.5).transpose(2, 0, 1).ravel()
        cosine = flat @ direction.numpy().ravel() / np.linalg.norm(flat) / direction.norm().item()
        assert abs(cosine) > 0.98
        assert image.max() == 1.0  # the largest value is made positive
        assert image.min() >= 0.0


def test_filters_of_other_first_layers() -> None:
    assert patch_filters(network()).shape == (28, 8, 8, 3)
    assert patch_filters(built("resnet").model).shape[-1] == 3
    linear = torch.nn.Module()
    linear.patch_embed = torch.nn.Linear(3 * 4 * 4, 40)
    assert patch_filters(linear).shape == (28, 4, 4, 3)
    with pytest.raises(WeightsError, match="does not read RGB patches"):
        patch_filters(torch.nn.Linear(4, 4))


def test_similarity_is_the_cosine_without_the_class_token() -> None:
    model = network()
    found = position_similarity(model)
    assert found.shape == (4, 6, 4, 6)
    table = model.pos_embed.detach().double()[0, 1:].numpy()
    one, other = table[1 * 6 + 2], table[3 * 6 + 5]
    expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert found[1, 2, 3, 5] == pytest.approx(expected)
    np.testing.assert_allclose(np.einsum("ijij->ij", found), 1.0)


@pytest.mark.parametrize("where", ["stem", "every_layer", "every_layer_shared"])
@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d"])
def test_similarity_wherever_our_own_networks_have_their_positions(kind: str, where: str) -> None:
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2, "position": kind, "where": where}
    model = timm.create_model("vit_scratch_large_patch8_32", **small)
    found = position_similarity(model)
    assert found.shape == (4, 4, 4, 4)
    holder = model.blocks[0] if where == "every_layer" else model
    table = position_table(holder.pos_embed).detach().double()[0, 1:].numpy()
    expected = table[5] @ table[11] / np.linalg.norm(table[5]) / np.linalg.norm(table[11])
    assert found[1, 1, 2, 3] == pytest.approx(expected)


@pytest.mark.parametrize("key", ["resnet", "swin", "convnext"])
def test_networks_without_positions_say_so(key: str) -> None:
    model = built(key).model.eval()
    with pytest.raises(WeightsError, match="no table of position embeddings"):
        position_similarity(model)
    with pytest.raises(WeightsError, match="do not all attend"):
        attention_distances(model, images(32 if key == "swin" else 64))


@pytest.mark.parametrize("fused", [True, False])
def test_even_attention_has_the_mean_distance(fused: bool) -> None:
    """With queries of zero every patch attends to all alike."""
    model = network()
    for block in model.blocks:
        block.attn.fused_attn = fused
        block.attn.qkv.weight.data[:32] = 0
        block.attn.qkv.bias.data[:32] = 0
    rows, columns = np.divmod(np.arange(24), 6)
    apart = np.hypot(8 * (rows[:, None] - rows), 8 * (columns[:, None] - columns))
    found = attention_distances(model, images((32, 48), count=3))
    assert found.shape == (2, 2)
    np.testing.assert_allclose(found, apart.mean(), rtol=1e-5)
    assert even_distance(model, images((32, 48))) == pytest.approx(apart.mean())


def test_a_head_that_looks_one_patch_to_the_side() -> None:
    """Its distance is the patch; the class token's share does not count."""
    model = network(img_size=(8, 16), depth=1, num_heads=1)
    with torch.no_grad():
        for parameter in (*model.patch_embed.parameters(), model.pos_embed, model.cls_token):
            parameter.zero_()
        model.pos_embed[0, 1, 0] = model.pos_embed[0, 2, 1] = 8.0
        model.blocks[0].attn.qkv.weight.zero_()
        model.blocks[0].attn.qkv.bias.zero_()
        for asks, answers in ((0, 1), (1, 0)):
            model.blocks[0].attn.qkv.weight[asks, asks] = 10.0
            model.blocks[0].attn.qkv.weight[32 + asks, answers] = 10.0
    assert attention_distances(model, images((8, 16), count=1))[0, 0] == pytest.approx(8, abs=1e-3)
