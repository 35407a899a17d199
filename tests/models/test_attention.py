"""models/attention.py, against computations written out by hand."""

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
from refusals import refused
from torch import Tensor, nn

from finetune.models import attention
from finetune.models.architectures.position_embeddings import position_table
from finetune.models.attention import (
    attention_distances,
    attention_maps,
    attention_rollout,
    even_distance,
    patch_filters,
    position_similarity,
)

SIZE = 32
WIDE = (32, 48)


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
    maps = []
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
        maps.append(weights)
        x = block(x)
    return maps


def products_by_hand(maps: list[np.ndarray]) -> np.ndarray:
    """(B, N, N): the product of the blocks, one image and one block after the other."""
    products = []
    for image in range(len(maps[0])):
        product = np.eye(maps[0].shape[-1])
        for weights in maps:
            mixed = weights[image].mean(axis=0) + np.eye(len(product))
            product = (mixed / mixed.sum(axis=1, keepdims=True)) @ product
        products.append(product)
    return np.stack(products)


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
    maps = attention_maps(model, batch)
    assert len(maps) == len(expected_maps) == 2
    for weights, expected in zip(maps, expected_maps, strict=True):
        # float32 against float64
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-5)
    rollout = attention_rollout(model, batch)
    assert rollout is not None
    assert rollout.shape == (3, *grid)
    assert not rollout.requires_grad
    by_hand = products_by_hand(expected_maps)[:, rows].mean(axis=1)[:, prefix:]
    assert by_hand.std() > 1e-3  # not merely the same everywhere
    np.testing.assert_allclose(rollout.flatten(1).numpy(), by_hand, atol=1e-5)


def test_the_only_patch_that_is_attended_to_has_the_largest_share() -> None:
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
    by_hand = np.pad(weights, ((0, 0), (1, 0)))[:, None] @ products_by_hand(maps)
    np.testing.assert_allclose(rollout.flatten(1).numpy(), by_hand[:, 0, 1:], atol=1e-5)


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


@pytest.mark.parametrize("scale", [None, 0.3])
def test_weights_are_those_of_fused_attention(scale: float | None) -> None:
    query, key, value = torch.randn(3, 2, 4, 7, 8)
    read = F.scaled_dot_product_attention(query, key, value, scale=scale)
    weights = attention._weights(query, key, value, scale=scale)
    torch.testing.assert_close(weights @ value, read)


# --- filters, position embeddings and distances -------------------------------------------------


def test_filters_are_the_directions_that_vary_most() -> None:
    model = network(img_size=WIDE)
    one, other = torch.randn(2, 3, 8, 8)
    other -= one * (one * other).sum() / one.square().sum()  # at right angles
    weights = torch.randn(32, 1, 1, 1) * 5 * one / one.norm()
    weights += torch.randn(32, 1, 1, 1) * other / other.norm() + 3.0  # the mean says nothing
    model.patch_embed.proj.weight.data.copy_(weights)
    filters = patch_filters(model, components=2)
    assert filters.shape == (2, 8, 8, 3)
    for image, direction in zip(filters, (one, other), strict=True):
        flat = (image - 0.5).transpose(2, 0, 1).ravel()
        cosine = flat @ direction.numpy().ravel() / np.linalg.norm(flat) / direction.norm().item()
        assert abs(cosine) > 0.98
        assert image.max() == 1.0  # the largest value is made positive
        assert image.min() >= 0.0


def test_filters_of_other_first_layers() -> None:
    assert patch_filters(network(img_size=WIDE)).shape == (28, 8, 8, 3)
    assert patch_filters(built("resnet").model).shape[-1] == 3
    linear = torch.nn.Module()
    linear.patch_embed = torch.nn.Linear(3 * 4 * 4, 40)
    assert patch_filters(linear).shape == (28, 4, 4, 3)
    with refused("weights.unsupported", "Linear"):
        patch_filters(torch.nn.Linear(4, 4))


def test_similarity_is_the_cosine_without_the_class_token() -> None:
    model = network(img_size=WIDE)
    actual = position_similarity(model)
    assert actual.shape == (4, 6, 4, 6)
    table = model.pos_embed.detach().double()[0, 1:].numpy()
    one, other = table[1 * 6 + 2], table[3 * 6 + 5]
    expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert actual[1, 2, 3, 5] == pytest.approx(expected)
    np.testing.assert_allclose(np.einsum("ijij->ij", actual), 1.0)


@pytest.mark.parametrize("where", ["stem", "every_layer", "every_layer_shared"])
@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d"])
def test_similarity_wherever_our_own_networks_have_their_positions(kind: str, where: str) -> None:
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2, "position": kind, "where": where}
    model = timm.create_model("vit_scratch_large_patch8_32", **small)
    actual = position_similarity(model)
    assert actual.shape == (4, 4, 4, 4)
    holder = model.blocks[0] if where == "every_layer" else model
    table = position_table(holder.pos_embed).detach().double()[0, 1:].numpy()
    expected = table[5] @ table[11] / np.linalg.norm(table[5]) / np.linalg.norm(table[11])
    assert actual[1, 1, 2, 3] == pytest.approx(expected)


@pytest.mark.parametrize("key", ["resnet", "swin", "convnext"])
def test_networks_without_positions_or_attention_are_refused(key: str) -> None:
    model = built(key).model.eval()
    with refused("weights.unsupported", type(model).__name__):
        position_similarity(model)
    with refused("weights.unsupported", type(model).__name__):
        attention_distances(model, images(32 if key == "swin" else 64))


@pytest.mark.parametrize("fused", [True, False])
def test_even_attention_has_the_mean_distance(fused: bool) -> None:
    """With queries of zero every patch attends to all alike."""
    model = network(img_size=WIDE)
    for block in model.blocks:
        block.attn.fused_attn = fused
        block.attn.qkv.weight.data[:32] = 0
        block.attn.qkv.bias.data[:32] = 0
    rows, columns = np.divmod(np.arange(24), 6)
    distances_NN = np.hypot(8 * (rows[:, None] - rows), 8 * (columns[:, None] - columns))
    actual = attention_distances(model, images(WIDE, count=3))
    assert actual.shape == (2, 2)
    np.testing.assert_allclose(actual, distances_NN.mean(), rtol=1e-5)
    assert even_distance(model, images(WIDE)) == pytest.approx(distances_NN.mean())


def test_a_head_that_attends_to_the_next_patch() -> None:
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
