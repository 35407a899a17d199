"""models/summary.py: counts against arithmetic by hand, and the network left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from networks import build_network, compute_logits, random_images
from torch import nn

from finetune.models.summary import blocks_per_stage, count_parameters, summarize_model

WIDTH, DEPTH, MLP, PATCH, CLASSES = 32, 2, 128, 8, 5


def test_macs_of_a_vit_are_what_a_hand_computes() -> None:
    """Also with attention's own two products, which grow with the square of the tokens."""
    patches, tokens = 4 * 6, 4 * 6 + 1
    embedding = patches * WIDTH * 3 * PATCH**2
    attention = tokens * WIDTH * 4 * WIDTH + 2 * tokens**2 * WIDTH
    block = attention + 2 * tokens * WIDTH * MLP
    made = build_network("vit", image_size=(32, 48))
    for device in ("cpu", "meta"):
        for fused in (True, False):
            for layer in made.model.modules():
                if hasattr(layer, "fused_attn"):
                    layer.fused_attn = fused  # type: ignore[assignment]
            counted = summarize_model(made.model.eval().to(device), (32, 48))["macs"]
            assert counted == embedding + DEPTH * block + WIDTH * CLASSES


def test_layers_add_up_to_the_network() -> None:
    for key in ("vit", "distilled", "swin", "convnext", "resnet", "beit", "cait"):
        model = build_network(key).model.eval()
        found = summarize_model(model, (64, 64) if key in ("convnext", "resnet") else (32, 32))
        rows = found["layers"]
        assert sum(row["parameters"] for row in rows) == count_parameters(model.parameters()), key
        assert sum(row["macs"] for row in rows) == found["macs"] > 0, key


def test_rows_of_a_vit() -> None:
    rows = summarize_model(build_network("vit").model.eval(), (32, 32))["layers"]
    assert [row["name"] for row in rows] == [
        "cls_token, pos_embed",
        "patch_embed",
        "blocks.0",
        "blocks.1",
        "norm",
        "head",
    ]
    assert [row["output"] for row in rows] == [[], [16, 32], [17, 32], [17, 32], [17, 32], [5]]


@pytest.mark.parametrize(
    "key, total, grid, prefix",
    [
        ("vit", 17, [4, 4], 1),
        ("vit_average", 17, [4, 4], 1),
        ("distilled", 18, [4, 4], 2),
        ("registers", 21, [4, 4], 5),
        ("swin", 64, [8, 8], 0),
    ],
)
def test_tokens(key: str, total: int, grid: list[int], prefix: int) -> None:
    found = summarize_model(build_network(key).model.eval(), (32, 32))["tokens"]
    assert found == {"total": total, "grid": grid, "prefix": prefix}


@pytest.mark.parametrize(
    "name, total, blocks",
    [
        ("tnt_s_patch16_224", 197, [12]),
        ("pvt_v2_b0", 56 * 56, [2, 2, 2, 2]),
        ("vit_small_r26_s32_224", 50, [12]),
        ("resnet26", None, [2, 2, 2, 2]),
        ("efficientnet_b0", None, [1, 2, 2, 3, 3, 4, 1]),
        ("convnext_atto", None, [2, 2, 6, 2]),
    ],
)
def test_tokens_and_blocks_of_other_families(name: str, total: int | None, blocks: Any) -> None:
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    tokens = summarize_model(model, (224, 224))["tokens"]
    assert (tokens and tokens["total"]) == total
    assert blocks_per_stage(model) == blocks


def test_it_leaves_the_network_as_it_was() -> None:
    model = build_network("vit", freeze="backbone").model.eval()
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    before = compute_logits(model, x := random_images(32))
    summarize_model(model, (32, 32))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == learned
    assert learned == ["head.weight", "head.bias"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(compute_logits(model, x), before)


def test_a_shared_tensor_counts_once() -> None:
    layer = nn.Linear(3, 2)
    assert count_parameters([*layer.parameters(), *layer.parameters()]) == 8
