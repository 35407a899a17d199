"""models/summary.py: counts equal hand-computed values, and the network stays unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from networks import build_network, compute_logits, random_images
from torch import nn

from finetune.models.summary import blocks_per_stage, count_parameters, summarize_model

WIDTH, DEPTH, MLP, PATCH, CLASSES = 32, 2, 128, 8, 5


def test_macs_of_a_vit_equal_the_formula() -> None:
    """Includes the two attention products, which grow with the square of the token count."""
    num_patches, num_tokens = 4 * 6, 4 * 6 + 1
    patch_embed_macs = num_patches * WIDTH * 3 * PATCH**2
    attention_macs = num_tokens * WIDTH * 4 * WIDTH + 2 * num_tokens**2 * WIDTH
    block_macs = attention_macs + 2 * num_tokens * WIDTH * MLP
    built = build_network("vit", image_size=(32, 48))
    for device in ("cpu", "meta"):
        for fused in (True, False):
            for layer in built.model.modules():
                if hasattr(layer, "fused_attn"):
                    layer.fused_attn = fused  # type: ignore[assignment]
            macs = summarize_model(built.model.eval().to(device), (32, 48))["macs"]
            assert macs == patch_embed_macs + DEPTH * block_macs + WIDTH * CLASSES


def test_layers_add_up_to_the_network() -> None:
    for key in ("vit", "distilled", "swin", "convnext", "resnet", "beit", "cait"):
        model = build_network(key).model.eval()
        summary = summarize_model(model, (64, 64) if key in ("convnext", "resnet") else (32, 32))
        layers = summary["layers"]
        assert sum(layer["parameters"] for layer in layers) == count_parameters(
            model.parameters()
        ), key
        assert sum(layer["macs"] for layer in layers) == summary["macs"] > 0, key


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
def test_token_counts(key: str, total: int, grid: list[int], prefix: int) -> None:
    tokens = summarize_model(build_network(key).model.eval(), (32, 32))["tokens"]
    assert tokens == {"total": total, "grid": grid, "prefix": prefix}


@pytest.mark.parametrize(
    "name, args, total, blocks",
    [
        ("tnt_s_patch16_224", {"depth": 2}, 197, [2]),
        ("pvt_v2_b0", {}, 56 * 56, [2, 2, 2, 2]),
        ("vit_small_r26_s32_224", {"depth": 2}, 50, [2]),
        ("resnet26", {}, None, [2, 2, 2, 2]),
        ("efficientnet_b0", {}, None, [1, 2, 2, 3, 3, 4, 1]),
        ("convnext_atto", {}, None, [2, 2, 6, 2]),
    ],
)
def test_tokens_and_blocks_of_other_families(
    name: str, args: dict[str, int], total: int | None, blocks: Any
) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **args).eval()
    tokens = summarize_model(model, (224, 224))["tokens"]
    assert (tokens and tokens["total"]) == total
    assert blocks_per_stage(model) == blocks


def test_does_not_change_the_network() -> None:
    model = build_network("vit", freeze="backbone").model.eval()
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    expected = compute_logits(model, x := random_images(32))
    summarize_model(model, (32, 32))
    assert [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ] == trainable
    assert trainable == ["head.weight", "head.bias"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(compute_logits(model, x), expected)


def test_a_shared_tensor_counts_once() -> None:
    layer = nn.Linear(3, 2)
    assert count_parameters([*layer.parameters(), *layer.parameters()]) == 8
