"""The backbones of recipes/backbones: at full size, at other image sizes, and their attention.

Most tests use small networks of the same block types. Full-size networks are on the meta device.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from networks import TINY_ARGS, compute_logits, random_images, randomize_head, save_network
from refusals import refused
from torch import nn

from finetune.models.build import build_model
from finetune.models.fast_layers import limit_last_block_to_class_token, use_unfused_attention
from finetune.models.features import (
    compute_pre_logits,
    enable_feature_input,
    token_feature_slices,
    token_features,
)
from finetune.models.freeze import freeze_parameters
from finetune.models.interpretability import (
    attention_distances,
    attention_rollout,
    position_similarity,
)
from finetune.models.save import BuiltModel
from finetune.models.summary import count_parameters
from finetune.models.weights.resize_posemb import resize_posemb
from finetune.recipe.load import load_recipe
from finetune.training.optim import param_groups

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "backbones").glob("*.yaml"))
RECIPES_IN_THE_SUITE = {"convnext", "dinov2_linear", "hiera", "siglip2"}
CONVNEXT = {"depths": [1, 1, 1, 1], "dims": [8, 16, 32, 64]}
HIERA = {"embed_dim": 16, "num_heads": 1, "stages": [1, 1, 1, 1]}
EVA = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
# timm name, arguments that make it small, number of prefix tokens (None: no position table)
FAMILIES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "dinov2": ("vit_base_patch14_reg4_dinov2", TINY_ARGS, 0),
    "registers": ("vit_betwixt_patch16_reg4_gap_256", TINY_ARGS, 0),
    "dinov3": ("vit_small_patch16_dinov3", EVA, None),
    "dinov3_swiglu": ("vit_small_plus_patch16_dinov3", EVA, None),
    "siglip": ("vit_base_patch16_siglip_224", TINY_ARGS, 0),
    "clip": ("vit_base_patch16_clip_224", TINY_ARGS, 1),
    "eva02": ("eva02_small_patch14_336", EVA, 1),
    "eva02_swiglu": ("eva02_base_patch14_224", EVA, 1),
    "rope": ("vit_medium_patch16_rope_reg1_gap_256", EVA, None),
    "rope_learned": ("vit_small_patch16_rope_mixed_224", EVA, None),
    "rope_and_table": ("vit_small_patch16_rope_ape_224", EVA, 0),
    "relative": ("vit_relpos_small_patch16_224", TINY_ARGS, None),
    "convnext": ("convnext_tiny", CONVNEXT, None),
    "hiera": ("hiera_tiny_224", HIERA, 0),
    "hiera_windows": ("hiera_small_abswin_256", HIERA, None),
    "mobilenetv4": ("mobilenetv4_hybrid_medium", {}, None),
}
# The block types of the others differ in one argument, or the network is not small.
IN_FAULTS = {"mobilenetv4", "dinov3_swiglu", "eva02_swiglu", "rope_learned", "hiera_windows"}
every_family = pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=pytest.mark.faults if key in IN_FAULTS else ()) for key in FAMILIES],
)
KEYS_WITH_ATTENTION = [
    key for key in FAMILIES if not key.startswith(("convnext", "hiera", "mobilenet"))
]
SIZE = 64  # 8 x 8 patches


@functools.cache
def _build_once(key: str) -> BuiltModel:
    torch.manual_seed(0)
    name, args, _ = FAMILIES[key]
    built = build_model(name, num_classes=5, pretrained=False, image_size=SIZE, args=args)
    randomize_head(built.model)
    table = getattr(built.model, "pos_embed", None)
    if isinstance(table, nn.Parameter):  # some are initialized to zeros or to very small values
        nn.init.normal_(table)
    return built


def build_family(key: str, **settings: Any) -> BuiltModel:
    """Return a small network of a family: a copy of a cached one, or a new one with settings."""
    if not settings:
        return copy.deepcopy(_build_once(key))
    name, args, _ = FAMILIES[key]
    settings = {"num_classes": 5, "pretrained": False, "image_size": SIZE, **settings}
    return build_model(name, args=args, **settings)


@pytest.mark.parametrize(
    "path",
    [
        path if path.stem in RECIPES_IN_THE_SUITE else pytest.param(path, marks=pytest.mark.faults)
        for path in RECIPES
    ],
    ids=lambda path: path.stem,
)
def test_recipes_build_their_networks_at_full_size(path: Path) -> None:
    model = load_recipe(str(path)).model
    assert model.name in timm.list_pretrained()
    recipe_text = path.read_text(encoding="utf-8")
    with torch.device("meta"):
        built = build_model(
            model.name,
            num_classes=10,
            pretrained=False,
            image_size=model.image_size,
            freeze=model.freeze,
            drop_path=model.drop_path,
            args=model.args,
        )
    assert built.preprocessing.image_size == (model.image_size, model.image_size)
    num_parameters = re.search(r"# Needs: ([\d,]+) parameters", recipe_text)
    assert num_parameters, "the recipe header names the number of parameters"
    assert int(num_parameters[1].replace(",", "")) == count_parameters(built.model.parameters())
    pretrained_cfg = timm.get_pretrained_cfg(model.name)
    assert f"# Weights: {pretrained_cfg.hf_hub_id}, " in recipe_text


def test_finds_every_recipe() -> None:
    assert len(RECIPES) == 12


@every_family
def test_resizing_equals_timm(key: str, tmp_path: Path) -> None:
    if key == "mobilenetv4":
        pytest.skip("it has no positions")
    built, size = build_family(key), (96, SIZE)
    folder = save_network(tmp_path / key, built)
    size_args = {"img_size": size} if "img_size" in built.model_args else {}
    if key == "hiera":  # timm cannot resize it; use timm's resizing of its other networks
        timm_model: Any = timm.create_model("hiera_tiny_224", num_classes=5, **HIERA, **size_args)
        table = resize_posemb(built.model.pos_embed, (24, 16), method="timm", num_prefix_tokens=0)
        timm_model.load_state_dict({**built.model.state_dict(), "pos_embed": table})
    else:
        timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True, **size_args)
    ours = build_model(folder, image_size=size, posemb="timm").model
    expected, state = timm_model.state_dict(), ours.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, atol=1e-6, rtol=0)
    batch = random_images(size)
    torch.testing.assert_close(compute_logits(ours, batch), compute_logits(timm_model, batch))
    num_prefix_tokens = FAMILIES[key][2]
    paper_resized = build_model(folder, image_size=size, posemb="paper")
    assert paper_resized.provenance["posemb"] == ("none" if num_prefix_tokens is None else "paper")
    if num_prefix_tokens is not None:
        pos_embed: Any = built.model.pos_embed
        patch = SIZE // int((pos_embed.shape[1] - num_prefix_tokens) ** 0.5)
        expected_pos_embed = resize_posemb(
            pos_embed, (96 // patch, SIZE // patch), num_prefix_tokens=num_prefix_tokens
        )
        assert torch.equal(paper_resized.model.pos_embed, expected_pos_embed)
        assert not torch.equal(paper_resized.model.pos_embed, ours.pos_embed)


@every_family
def test_freezing_and_layer_decay(key: str) -> None:
    fully_frozen = build_family(key).model
    freeze_parameters(fully_frozen, "backbone")
    assert sum(parameter.requires_grad for parameter in fully_frozen.parameters()) == 2
    assert enable_feature_input(fully_frozen, (SIZE, SIZE), training=True) in (
        None,
        # dropout in the relative positions; timm's network has no argument for it
        "the network has dropout before the classifier (blocks.0.attn.rel_pos.mlp.drop1)",
    )
    partly_frozen = build_family(key, freeze=1, drop_path=0.1)
    frozen = [
        name
        for name, parameter in partly_frozen.model.named_parameters()
        if not parameter.requires_grad
    ]
    assert any("patch_embed" in name or "stem" in name for name in frozen)
    groups = param_groups(partly_frozen.model, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    assert {0.5, 1.0} <= {group["lr_scale"] for group in groups}


@every_family
def test_attention_maps_or_a_clear_error(key: str) -> None:
    model, batch = build_family(key).model.eval(), random_images(SIZE)
    rollout = attention_rollout(model, batch)
    if key in KEYS_WITH_ATTENTION:
        assert rollout is not None
        assert rollout.shape[0] == 2
        assert attention_distances(model, batch).shape == (2, 2)
    else:
        assert rollout is None
        with refused("weights.unsupported", type(model).__name__):
            attention_distances(model, batch)


def test_rotary_networks_have_no_position_similarity() -> None:
    with refused("weights.unsupported", "Eva", "rotary"):
        position_similarity(build_family("dinov3").model)


@pytest.mark.parametrize("key", KEYS_WITH_ATTENTION)
def test_fast_layers_compute_the_same(key: str) -> None:
    model = build_family(key).model.eval()
    expected = compute_logits(model, batch := random_images(SIZE))
    assert limit_last_block_to_class_token(model) == (key in ("dinov2", "clip"))
    use_unfused_attention(model)
    fast_modules = {
        type(module).__name__
        for module in model.modules()
        if "fast_layers" in type(module).__module__
    }
    assert bool(fast_modules) == (type(model).__name__ == "VisionTransformer")
    with torch.enable_grad():  # without gradients timm's own code runs
        actual = model(batch).detach()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("key", KEYS_WITH_ATTENTION)
@torch.no_grad()
def test_token_features_equal_the_dino_probe(key: str) -> None:
    model, batch = build_family(key).model.eval(), random_images(SIZE)
    features, layer_outputs, pre_logits = (
        token_features(model, batch),
        [],
        compute_pre_logits(model, batch),
    )
    for block in model.blocks:
        block.register_forward_hook(
            lambda _, inputs, output: layer_outputs.append(model.norm(output))
        )
    model(batch)
    columns = token_feature_slices(model, features.shape[1])
    torch.testing.assert_close(features[:, columns.pop("pre-logits")], pre_logits)
    if model.cls_token is None:
        assert columns == {}
        return
    class_tokens, patches = (
        [layer_output[:, 0] for layer_output in layer_outputs],
        layer_outputs[-1][:, -64:].mean(dim=1),
    )
    expected = {
        "1 class token": class_tokens[-1:],
        "1 class token, patches": [*class_tokens[-1:], patches],
        "2 class tokens": class_tokens,
        "2 class tokens, patches": [*class_tokens, patches],
    }
    assert columns.keys() == expected.keys()
    for name, expected_parts in expected.items():
        torch.testing.assert_close(features[:, columns[name]], torch.cat(expected_parts, dim=1))


@pytest.mark.parametrize("key, size", [("hiera", 80), ("dinov3", 68), ("relative", 68)])
def test_rejects_impossible_image_sizes(key: str, size: int) -> None:
    with refused("recipe.wrong_size", "model.image_size", str(size)):
        build_family(key, image_size=size)


def test_rejects_windows_that_do_not_divide_the_size() -> None:
    settings: dict[str, Any] = {"num_classes": 5, "pretrained": False}
    with refused("recipe.wrong_size", "200x200", "window"):
        build_model("maxvit_pico_rw_256", image_size=200, args={"depths": (1, 1, 1, 1)}, **settings)
    assert build_model("mobilenetv4_conv_small", image_size=67, **settings)
