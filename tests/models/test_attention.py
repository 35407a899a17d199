"""Attention weights and their rollout, against a computation written out by hand."""

# B batch, N tokens

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from networks import NETWORKS, TINY, built, images, logits
from torch import Tensor, nn

from finetune.models import attention
from finetune.models.attention import attention_maps, attention_rollout

SIZE = 32


def network(name: str = "vit_tiny_patch16_224", **args: Any) -> Any:
    """A small network with weights large enough for its attention to be far from even."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**TINY, "img_size": SIZE, **args}).eval()
    for parameter_name, parameter in model.named_parameters():
        if "qkv.weight" in parameter_name:
            nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def maps_by_hand(model: Any, images_BCHW: Tensor) -> list[np.ndarray]:
    """Queries times keys, through softmax, from each block's own weights."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(images_BCHW)))
    found = []
    for block in model.blocks:
        batch, tokens, width = x.shape
        heads = block.attn.num_heads
        qkv = block.attn.qkv(block.norm1(x)).view(batch, tokens, 3, heads, width // heads)
        weights = np.zeros((batch, heads, tokens, tokens))
        for image in range(batch):
            for head in range(heads):
                query, key = (qkv[image, :, part, head].double().numpy() for part in (0, 1))
                scores = np.exp(query @ key.T / np.sqrt(width // heads))
                weights[image, head] = scores / scores.sum(axis=1, keepdims=True)
        found.append(weights)
        x = block(x)
    return found


def rollout_by_hand(maps: list[np.ndarray], rows: slice, prefix: int) -> np.ndarray:
    """(B, patches), one image and one block after the other."""
    answers = []
    for image in range(len(maps[0])):
        product = np.eye(maps[0].shape[-1])
        for weights in maps:
            mixed = weights[image].mean(axis=0) + np.eye(len(product))
            product = (mixed / mixed.sum(axis=1, keepdims=True)) @ product
        answers.append(product[rows].mean(axis=0)[prefix:])
    return np.stack(answers)


KINDS: dict[str, tuple[Any, slice, int, tuple[int, int]]] = {
    # arguments, the rows that the classifier reads, prefix tokens, grid
    "class token": ({}, slice(0, 1), 1, (4, 4)),
    "wide": ({"img_size": (32, 48)}, slice(0, 1), 1, (4, 6)),
    "tall": ({"img_size": (48, 24)}, slice(0, 1), 1, (6, 3)),
    "average": ({"global_pool": "avg"}, slice(1, None), 1, (4, 4)),
    "average, no class token": (
        {"global_pool": "avg", "class_token": False},
        slice(0, None),
        0,
        (4, 4),
    ),
    "distilled": ({"name": "deit_tiny_distilled_patch16_224"}, slice(0, 2), 2, (4, 4)),
    "registers": ({"reg_tokens": 4}, slice(0, 1), 5, (4, 4)),
    "registers, average": ({"reg_tokens": 4, "global_pool": "avg"}, slice(5, None), 5, (4, 4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_a_hand_computes(kind: str) -> None:
    args, rows, prefix, grid = KINDS[kind]
    model = network(**args)
    assert model.num_prefix_tokens == prefix
    size = args.get("img_size", (SIZE, SIZE))
    batch = images(size, count=3)
    expected_maps = maps_by_hand(model, batch)
    found = attention_maps(model, batch)
    assert len(found) == len(expected_maps) == 2
    for weights, expected in zip(found, expected_maps, strict=True):
        # float32 against float64
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-5)
    rollout = attention_rollout(model, batch)
    assert rollout is not None
    assert rollout.shape == (3, *grid)
    by_hand = rollout_by_hand(expected_maps, rows, prefix)
    assert by_hand.std() > 1e-3  # not merely the same everywhere
    np.testing.assert_allclose(rollout.flatten(1).numpy(), by_hand, atol=1e-5)


def test_a_patch_that_alone_is_attended_to_is_where_it_looked() -> None:
    model = network(depth=1, num_heads=1, class_token=True)
    with torch.no_grad():
        model.pos_embed.zero_()
        model.pos_embed[0, 0, 0] = 8.0  # the class token's own mark
        model.pos_embed[0, 1 + 4 * 2 + 3, 1] = 8.0  # the mark of row 2, column 3
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.bias.zero_()
        attention = model.blocks[0].attn
        attention.qkv.weight.zero_()
        attention.qkv.bias.zero_()
        attention.qkv.weight[0, 0] = 10.0  # the class token asks
        attention.qkv.weight[32, 1] = 10.0  # and that patch answers
    rollout = attention_rollout(model, images(SIZE, count=1))
    assert rollout is not None
    assert np.unravel_index(int(rollout[0].argmax()), (4, 4)) == (2, 3)
    assert float(rollout[0, 2, 3]) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("key", ["vit", "vit_average", "distilled", "beit"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_logits_stay_as_they_are(key: str, fused: bool) -> None:
    model = built(key).model.eval()
    paths = [module for module in model.modules() if hasattr(module, "fused_attn")]
    assert paths
    for module in paths:
        module.fused_attn = fused  # type: ignore[assignment]
    batch = images(SIZE)
    before = logits(model, batch)
    seen: list[Tensor] = []
    handle = model.register_forward_hook(lambda _, inputs, output: seen.append(output))
    maps = attention_maps(model, batch)
    handle.remove()
    assert len(maps) == 2
    assert torch.equal(seen[0], before)  # while it was watched
    assert torch.equal(logits(model, batch), before)
    assert [module.fused_attn for module in paths] == [fused] * len(paths)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02"])
def test_both_ways_to_compute_attention_give_one_answer(name: str) -> None:
    """Of BEiT with its position bias as of EVA with its rotations: by the network's own values."""
    model = network("eva02_tiny_patch14_224" if name == "eva02" else name)
    batch = images(SIZE)
    answers = []
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        answers.append(attention_maps(model, batch))
    assert len(answers[0]) == len(answers[1]) == 2
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)  # another order of sums
        torch.testing.assert_close(one.sum(-1), torch.ones(one.shape[:-1]), atol=1e-5, rtol=0)


def test_pooling_by_attention_reads_through_its_own_weights() -> None:
    model = network(global_pool="map")
    batch = images(SIZE)
    maps = maps_by_hand(model, batch)
    kept: list[Tensor] = []
    model.attn_pool.register_forward_hook(lambda _, inputs, output: kept.append(inputs[0]))
    rollout = attention_rollout(model, batch)
    pool = model.attn_pool
    with torch.no_grad():
        tokens = kept[0]
        query = pool.q(pool.latent).view(1, 1, pool.num_heads, pool.head_dim).transpose(1, 2)
        key = pool.kv(tokens).view(2, -1, 2, pool.num_heads, pool.head_dim)[:, :, 0].transpose(1, 2)
        weights = (query @ key.transpose(-2, -1) * pool.scale).softmax(-1).mean(1)[:, 0].numpy()
    assert weights.shape == (2, 16)  # without the class token
    assert rollout is not None
    for image in range(2):
        product = np.eye(17)
        for layer in maps:
            mixed = layer[image].mean(axis=0) + np.eye(17)
            product = (mixed / mixed.sum(axis=1, keepdims=True)) @ product
        expected = (np.concatenate([[0.0], weights[image]]) @ product)[1:]
        np.testing.assert_allclose(rollout[image].flatten().numpy(), expected, atol=1e-5)


def test_an_image_of_another_size_has_its_own_grid() -> None:
    model = network(dynamic_img_size=True)
    rollout = attention_rollout(model, images((40, 64)))
    assert rollout is not None
    assert rollout.shape == (2, 5, 8)


@pytest.mark.parametrize("key", ["cait", "swin", "convnext", "resnet", "byobnet"])
def test_a_network_without_such_attention_has_no_map(key: str) -> None:
    model = built(key).model.eval()
    batch = images(NETWORKS[key][2])
    assert attention_rollout(model, batch) is None
    assert attention_maps(model, batch) == []


def test_a_failing_network_leaves_nothing_behind() -> None:
    model = network()

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        attention_rollout(model, images(SIZE))
    handle.remove()
    assert not torch._C._len_torch_function_stack()
    assert attention_rollout(model, images(SIZE)) is not None


def test_threads_do_not_see_each_other() -> None:
    model = network(depth=3)
    batches = [images(SIZE, count=1) for _ in range(24)]
    alone = [attention_rollout(model, batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda batch: attention_rollout(model, batch), batches))
    for one, other in zip(alone, together, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_nothing_is_kept_for_gradients() -> None:
    rollout = attention_rollout(network(), images(SIZE))
    assert rollout is not None
    assert not rollout.requires_grad


@pytest.mark.parametrize("scale", [None, 0.3])
def test_weights_are_those_of_fused_attention(scale: float | None) -> None:
    query, key, value = torch.randn(3, 2, 4, 7, 8)
    read = F.scaled_dot_product_attention(query, key, value, scale=scale)
    weights = attention._weights(query, key, value, scale=scale)
    torch.testing.assert_close(weights @ value, read)
