"""models/interpretability.py against reference computations in NumPy."""

# B batch, N tokens

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from networks import NETWORKS, TINY_ARGS, build_network, compute_logits, random_images
from refusals import refused
from torch import Tensor, nn

from finetune.models.architectures.position_embeddings import position_table
from finetune.models.interpretability import (
    attention_distances,
    attention_maps,
    attention_rollout,
    attention_weights,
    patch_filters,
    position_similarity,
    uniform_attention_distance,
)

SIZE = 32
WIDE_SIZE = (32, 48)


def make_network(name: str = "vit_tiny_patch16_224", **args: Any) -> Any:
    """Return a small network whose attention is far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**TINY_ARGS, "img_size": SIZE, **args}).eval()
    for parameter_name, parameter in model.named_parameters():
        if "qkv.weight" in parameter_name:
            nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def reference_attention_maps(model: Any, images_BCHW: Tensor) -> list[np.ndarray]:
    """Compute softmax(Q K^T) from the weights of each block."""
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


def reference_rollout(maps: list[np.ndarray]) -> np.ndarray:
    """Multiply the attention of all blocks, image by image. Returns: (B, N, N)."""
    products = []
    for image in range(len(maps[0])):
        product = np.eye(maps[0].shape[-1])
        for weights in maps:
            mixed = weights[image].mean(axis=0) + np.eye(len(product))
            product = (mixed / mixed.sum(axis=1, keepdims=True)) @ product
        products.append(product)
    return np.stack(products)


CASES: dict[str, tuple[Any, slice, int, tuple[int, int]]] = {
    # arguments, tokens that the classifier reads, number of prefix tokens, grid
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


@pytest.mark.parametrize("case", CASES)
def test_maps_and_rollout_equal_the_reference(case: str) -> None:
    args, read_tokens, num_prefix_tokens, grid = CASES[case]
    model = make_network(**args)
    assert model.num_prefix_tokens == num_prefix_tokens
    size = args.get("img_size", (SIZE, SIZE))
    batch = random_images(size, count=3)
    expected_maps = reference_attention_maps(model, batch)
    maps = attention_maps(model, batch)
    assert len(maps) == len(expected_maps) == 2
    for weights, expected in zip(maps, expected_maps, strict=True):
        # float32 versus float64
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-5)
    rollout = attention_rollout(model, batch)
    assert rollout is not None
    assert rollout.shape == (3, *grid)
    assert not rollout.requires_grad
    expected_rollout = reference_rollout(expected_maps)[:, read_tokens].mean(axis=1)[
        :, num_prefix_tokens:
    ]
    assert expected_rollout.std() > 1e-3  # must not be constant
    np.testing.assert_allclose(rollout.flatten(1).numpy(), expected_rollout, atol=1e-5)


def test_the_attended_patch_has_the_largest_rollout() -> None:
    model = make_network(depth=1, num_heads=1, class_token=True)
    with torch.no_grad():
        model.pos_embed.zero_()
        model.pos_embed[0, 0, 0] = 8.0  # marks the class token
        model.pos_embed[0, 1 + 4 * 2 + 3, 1] = 8.0  # marks the patch in row 2, column 3
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.bias.zero_()
        attention = model.blocks[0].attn
        attention.qkv.weight.zero_()
        attention.qkv.bias.zero_()
        attention.qkv.weight[0, 0] = 10.0  # query of the class token
        attention.qkv.weight[32, 1] = 10.0  # key of that patch
    rollout = attention_rollout(model, random_images(SIZE, count=1))
    assert rollout is not None
    assert np.unravel_index(int(rollout[0].argmax()), (4, 4)) == (2, 3)
    assert float(rollout[0, 2, 3]) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("key", ["vit", "vit_average", "distilled", "beit"])
@pytest.mark.parametrize("fused", [True, False])
def test_does_not_change_the_logits(key: str, fused: bool) -> None:
    model = build_network(key).model.eval()
    attention_layers = [module for module in model.modules() if hasattr(module, "fused_attn")]
    assert attention_layers
    for module in attention_layers:
        module.fused_attn = fused  # type: ignore[assignment]
    batch = random_images(SIZE)
    expected = compute_logits(model, batch)
    recorded_logits: list[Tensor] = []
    handle = model.register_forward_hook(lambda _, inputs, output: recorded_logits.append(output))
    maps = attention_maps(model, batch)
    handle.remove()
    assert len(maps) == 2
    assert torch.equal(recorded_logits[0], expected)  # while the attention was recorded
    assert torch.equal(compute_logits(model, batch), expected)
    assert [module.fused_attn for module in attention_layers] == [fused] * len(attention_layers)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02"])
def test_fused_and_unfused_attention_give_the_same_maps(name: str) -> None:
    """Includes the position bias of BEiT and the rotary embeddings of EVA."""
    model = make_network("eva02_tiny_patch14_224" if name == "eva02" else name)
    batch = random_images(SIZE)
    maps_by_path = []
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        maps_by_path.append(attention_maps(model, batch))
    assert len(maps_by_path[0]) == len(maps_by_path[1]) == 2
    for fused_map, unfused_map in zip(*maps_by_path, strict=True):
        # sums in another order
        torch.testing.assert_close(fused_map, unfused_map, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            fused_map.sum(-1), torch.ones(fused_map.shape[:-1]), atol=1e-5, rtol=0
        )


def test_rollout_includes_attention_pooling() -> None:
    model = make_network(global_pool="map")
    batch = random_images(SIZE)
    maps = reference_attention_maps(model, batch)
    pool_inputs: list[Tensor] = []
    model.attn_pool.register_forward_hook(lambda _, inputs, output: pool_inputs.append(inputs[0]))
    rollout = attention_rollout(model, batch)
    pool = model.attn_pool
    with torch.no_grad():
        tokens = pool_inputs[0]
        query = pool.q(pool.latent).view(1, 1, pool.num_heads, pool.head_dim).transpose(1, 2)
        key = pool.kv(tokens).view(2, -1, 2, pool.num_heads, pool.head_dim)[:, :, 0].transpose(1, 2)
        weights = (query @ key.transpose(-2, -1) * pool.scale).softmax(-1).mean(1)[:, 0].numpy()
    assert weights.shape == (2, 16)  # without the class token
    assert rollout is not None
    expected = np.pad(weights, ((0, 0), (1, 0)))[:, None] @ reference_rollout(maps)
    np.testing.assert_allclose(rollout.flatten(1).numpy(), expected[:, 0, 1:], atol=1e-5)


def test_rollout_grid_follows_the_image_size() -> None:
    model = make_network(dynamic_img_size=True)
    rollout = attention_rollout(model, random_images((40, 64)))
    assert rollout is not None
    assert rollout.shape == (2, 5, 8)


@pytest.mark.parametrize("key", ["cait", "swin", "convnext", "resnet", "byobnet"])
def test_networks_without_global_attention_have_no_maps(key: str) -> None:
    model = build_network(key).model.eval()
    batch = random_images(NETWORKS[key][2])
    assert attention_rollout(model, batch) is None
    assert attention_maps(model, batch) == []


def test_cleans_up_after_an_error_in_the_network() -> None:
    model = make_network()

    def raise_error(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.blocks[1].register_forward_hook(raise_error)
    with pytest.raises(RuntimeError, match="in the middle"):
        attention_rollout(model, random_images(SIZE))
    handle.remove()
    assert not torch._C._len_torch_function_stack()
    assert attention_rollout(model, random_images(SIZE)) is not None


def test_is_thread_safe() -> None:
    model = make_network(depth=3)
    batches = [random_images(SIZE, count=1) for _ in range(24)]
    sequential = [attention_rollout(model, batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        concurrent = list(pool.map(lambda batch: attention_rollout(model, batch), batches))
    for expected, actual in zip(sequential, concurrent, strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_weights_equal_fused_attention(scale: float | None) -> None:
    query, key, value = torch.randn(3, 2, 4, 7, 8)
    expected = F.scaled_dot_product_attention(query, key, value, scale=scale)
    weights = attention_weights(query, key, value, scale=scale)
    torch.testing.assert_close(weights @ value, expected)


# --- filters, position embeddings and distances -------------------------------------------------


def test_patch_filters_are_the_principal_components() -> None:
    model = make_network(img_size=WIDE_SIZE)
    first, second = torch.randn(2, 3, 8, 8)
    # make it orthogonal to the first
    second -= first * (first * second).sum() / first.square().sum()
    weights = torch.randn(32, 1, 1, 1) * 5 * first / first.norm()
    weights += torch.randn(32, 1, 1, 1) * second / second.norm() + 3.0  # the mean must be ignored
    model.patch_embed.proj.weight.data.copy_(weights)
    filters = patch_filters(model, num_components=2)
    assert filters.shape == (2, 8, 8, 3)
    for image, direction in zip(filters, (first, second), strict=True):
        flat = (image - 0.5).transpose(2, 0, 1).ravel()
        cosine = flat @ direction.numpy().ravel() / np.linalg.norm(flat) / direction.norm().item()
        assert abs(cosine) > 0.98
        assert image.max() == 1.0  # the sign makes the largest value positive
        assert image.min() >= 0.0


def test_patch_filters_of_other_first_layers() -> None:
    assert patch_filters(make_network(img_size=WIDE_SIZE)).shape == (28, 8, 8, 3)
    assert patch_filters(build_network("resnet").model).shape[-1] == 3
    linear = torch.nn.Module()
    linear.patch_embed = torch.nn.Linear(3 * 4 * 4, 40)
    assert patch_filters(linear).shape == (28, 4, 4, 3)
    with refused("weights.unsupported", "Linear"):
        patch_filters(torch.nn.Linear(4, 4))


def test_position_similarity_is_the_cosine_without_the_class_token() -> None:
    model = make_network(img_size=WIDE_SIZE)
    actual = position_similarity(model)
    assert actual.shape == (4, 6, 4, 6)
    table = model.pos_embed.detach().double()[0, 1:].numpy()
    first, second = table[1 * 6 + 2], table[3 * 6 + 5]
    expected = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert actual[1, 2, 3, 5] == pytest.approx(expected)
    np.testing.assert_allclose(np.einsum("ijij->ij", actual), 1.0)


@pytest.mark.parametrize("location", ["stem", "every_layer", "every_layer_shared"])
@pytest.mark.parametrize("position_kind", ["learned_1d", "learned_2d"])
def test_position_similarity_for_every_position_location(position_kind: str, location: str) -> None:
    args = {
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "position": position_kind,
        "where": location,
    }
    model = timm.create_model("vit_scratch_large_patch8_32", **args)
    actual = position_similarity(model)
    assert actual.shape == (4, 4, 4, 4)
    module = model.blocks[0] if location == "every_layer" else model
    table = position_table(module.pos_embed).detach().double()[0, 1:].numpy()
    expected = table[5] @ table[11] / np.linalg.norm(table[5]) / np.linalg.norm(table[11])
    assert actual[1, 1, 2, 3] == pytest.approx(expected)


@pytest.mark.parametrize("key", ["resnet", "swin", "convnext"])
def test_rejects_networks_without_positions_or_attention(key: str) -> None:
    model = build_network(key).model.eval()
    with refused("weights.unsupported", type(model).__name__):
        position_similarity(model)
    with refused("weights.unsupported", type(model).__name__):
        attention_distances(model, random_images(32 if key == "swin" else 64))


@pytest.mark.parametrize("fused", [True, False])
def test_uniform_attention_has_the_mean_distance(fused: bool) -> None:
    """With zero queries, every patch attends to all patches equally."""
    model = make_network(img_size=WIDE_SIZE)
    for block in model.blocks:
        block.attn.fused_attn = fused
        block.attn.qkv.weight.data[:32] = 0
        block.attn.qkv.bias.data[:32] = 0
    rows, columns = np.divmod(np.arange(24), 6)
    distances_NN = np.hypot(8 * (rows[:, None] - rows), 8 * (columns[:, None] - columns))
    actual = attention_distances(model, random_images(WIDE_SIZE, count=3))
    assert actual.shape == (2, 2)
    np.testing.assert_allclose(actual, distances_NN.mean(), rtol=1e-5)
    assert uniform_attention_distance(model, random_images(WIDE_SIZE)) == pytest.approx(
        distances_NN.mean()
    )


def test_attention_to_the_next_patch_has_the_distance_of_one_patch() -> None:
    """Attention to the class token is not part of the distance."""
    model = make_network(img_size=(8, 16), depth=1, num_heads=1)
    with torch.no_grad():
        for parameter in (*model.patch_embed.parameters(), model.pos_embed, model.cls_token):
            parameter.zero_()
        model.pos_embed[0, 1, 0] = model.pos_embed[0, 2, 1] = 8.0
        model.blocks[0].attn.qkv.weight.zero_()
        model.blocks[0].attn.qkv.bias.zero_()
        for query_patch, key_patch in ((0, 1), (1, 0)):
            model.blocks[0].attn.qkv.weight[query_patch, query_patch] = 10.0
            model.blocks[0].attn.qkv.weight[32 + query_patch, key_patch] = 10.0
    assert attention_distances(model, random_images((8, 16), count=1))[0, 0] == pytest.approx(
        8, abs=1e-3
    )
