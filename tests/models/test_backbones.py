"""The backbones of recipes/backbones: at true size, at other sizes as timm has it, looked into.

The networks are small, of the same kinds of blocks; the recipes' own are built without memory.
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
from networks import TINY, images, logits, save, shuffle
from refusals import refused
from torch import nn

from finetune.models.attention import attention_distances, attention_rollout, position_similarity
from finetune.models.build import build
from finetune.models.fast_blocks import compute_class_token, multiply_plainly
from finetune.models.features import (
    accept_features,
    pre_logits,
    token_columns,
    token_features,
)
from finetune.models.head import freeze_parameters
from finetune.models.profile import count_parameters
from finetune.models.saved import Built
from finetune.models.weights.resize_posemb import resize_grid
from finetune.recipe.load import load_recipe
from finetune.training.optim import param_groups

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "backbones").glob("*.yaml"))
CONVNEXT = {"depths": [1, 1, 1, 1], "dims": [8, 16, 32, 64]}
HIERA = {"embed_dim": 16, "num_heads": 1, "stages": [1, 1, 1, 1]}
EVA = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
# timm name, arguments that make it small, tokens before the patches (None: no table of positions)
FAMILIES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "dinov2": ("vit_base_patch14_reg4_dinov2", TINY, 0),
    "registers": ("vit_betwixt_patch16_reg4_gap_256", TINY, 0),
    "dinov3": ("vit_small_patch16_dinov3", EVA, None),
    "dinov3_swiglu": ("vit_small_plus_patch16_dinov3", EVA, None),
    "siglip": ("vit_base_patch16_siglip_224", TINY, 0),
    "clip": ("vit_base_patch16_clip_224", TINY, 1),
    "eva02": ("eva02_small_patch14_336", EVA, 1),
    "eva02_swiglu": ("eva02_base_patch14_224", EVA, 1),
    "rope": ("vit_medium_patch16_rope_reg1_gap_256", EVA, None),
    "rope_learned": ("vit_small_patch16_rope_mixed_224", EVA, None),
    "rope_and_table": ("vit_small_patch16_rope_ape_224", EVA, 0),
    "relative": ("vit_relpos_small_patch16_224", TINY, None),
    "convnext": ("convnext_tiny", CONVNEXT, None),
    "hiera": ("hiera_tiny_224", HIERA, 0),
    "hiera_windows": ("hiera_small_abswin_256", HIERA, None),
    "mobilenetv4": ("mobilenetv4_hybrid_medium", {}, None),
}
ALL = pytest.mark.parametrize("key", FAMILIES)
ATTENDING = [key for key in FAMILIES if not key.startswith(("convnext", "hiera", "mobilenet"))]
SIZE = 64  # 8 x 8 patches


@functools.cache
def _built(key: str) -> Built:
    torch.manual_seed(0)
    name, args, _ = FAMILIES[key]
    made = build(name, num_classes=5, pretrained=False, image_size=SIZE, args=args)
    shuffle(made.model)
    table = getattr(made.model, "pos_embed", None)
    if isinstance(table, nn.Parameter):  # some begin with zeros, or so small that they do not tell
        nn.init.normal_(table)
    return made


def built(key: str, **settings: Any) -> Built:
    """A small network of a family; a new one where settings are given."""
    if not settings:
        return copy.deepcopy(_built(key))
    name, args, _ = FAMILIES[key]
    settings = {"num_classes": 5, "pretrained": False, "image_size": SIZE, **settings}
    return build(name, args=args, **settings)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_its_network_at_true_size(path: Path) -> None:
    model = load_recipe(str(path)).model
    assert model.name in timm.list_pretrained()
    head = path.read_text(encoding="utf-8")
    with torch.device("meta"):
        made = build(
            model.name,
            num_classes=10,
            pretrained=False,
            image_size=model.image_size,
            freeze=model.freeze,
            drop_path=model.drop_path,
            args=model.args,
        )
    assert made.preprocessing.image_size == (model.image_size, model.image_size)
    stated = re.search(r"# Needs: ([\d,]+) parameters", head)
    assert stated, "the head of the recipe says what it needs"
    assert int(stated[1].replace(",", "")) == count_parameters(made.model.parameters())
    entry = timm.get_pretrained_cfg(model.name)
    assert f"# Weights: {entry.hf_hub_id}, " in head


def test_every_recipe_is_tried() -> None:
    assert len(RECIPES) == 12


@pytest.mark.parametrize("key", [key for key in FAMILIES if key != "mobilenetv4"])
def test_another_size_is_that_of_timm(key: str, tmp_path: Path) -> None:
    made, size = built(key), (96, SIZE)
    folder = save(tmp_path / key, made)
    sized = {"img_size": size} if "img_size" in made.model_args else {}
    if key == "hiera":  # timm has no resizing for it: this is the one of its other networks
        plain: Any = timm.create_model("hiera_tiny_224", num_classes=5, **HIERA, **sized)
        table = resize_grid(made.model.pos_embed, (24, 16), method="timm", num_prefix=0)
        plain.load_state_dict({**made.model.state_dict(), "pos_embed": table})
    else:
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True, **sized)
    ours = build(folder, image_size=size, posemb="timm").model
    expected, state = plain.state_dict(), ours.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, atol=1e-6, rtol=0)
    batch = images(size)
    torch.testing.assert_close(logits(ours, batch), logits(plain, batch))
    prefix, paper = FAMILIES[key][2], build(folder, image_size=size)
    assert paper.provenance["posemb"] == ("none" if prefix is None else "paper")
    if prefix is not None:
        before: Any = made.model.pos_embed
        patch = SIZE // int((before.shape[1] - prefix) ** 0.5)
        resized = resize_grid(before, (96 // patch, SIZE // patch), num_prefix=prefix)
        assert torch.equal(paper.model.pos_embed, resized)
        assert not torch.equal(paper.model.pos_embed, ours.pos_embed)


@ALL
def test_it_freezes_and_takes_rates_by_layer(key: str) -> None:
    whole = built(key).model
    freeze_parameters(whole, "backbone")
    assert sum(p.requires_grad for p in whole.parameters()) == 2
    assert accept_features(whole, (SIZE, SIZE), training=True) in (
        None,
        # of its relative positions; timm's network has no argument for it
        "there is dropout before the classifier (blocks.0.attn.rel_pos.mlp.drop1)",
    )
    part = built(key, freeze=1, drop_path=0.1)
    frozen = [name for name, p in part.model.named_parameters() if not p.requires_grad]
    assert any("patch_embed" in name or "stem" in name for name in frozen)
    groups = param_groups(part.model, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    assert {0.5, 1.0} <= {group["lr_scale"] for group in groups}


@ALL
def test_attention_is_shown_or_refused(key: str) -> None:
    model, batch = built(key).model.eval(), images(SIZE)
    rollout = attention_rollout(model, batch)
    if key in ATTENDING:
        assert rollout is not None
        assert rollout.shape[0] == 2
        assert attention_distances(model, batch).shape == (2, 2)
    else:
        assert rollout is None
        with refused("weights.unsupported", type(model).__name__):
            attention_distances(model, batch)


def test_rotary_positions_have_no_table() -> None:
    with refused("weights.unsupported", "Eva", "rotary"):
        position_similarity(built("dinov3").model)


@pytest.mark.parametrize("key", ATTENDING)
def test_faster_blocks_compute_the_same_or_leave_it_alone(key: str) -> None:
    model = built(key).model.eval()
    expected = logits(model, batch := images(SIZE))
    assert compute_class_token(model) == (key in ("dinov2", "clip"))
    multiply_plainly(model)
    swapped = {type(m).__name__ for m in model.modules() if "fast_blocks" in type(m).__module__}
    assert bool(swapped) == (type(model).__name__ == "VisionTransformer")
    with torch.enable_grad():  # else timm's code computes the products
        actual = model(batch).detach()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("key", ATTENDING)
@torch.no_grad()
def test_tokens_are_those_of_dinos_probe(key: str) -> None:
    model, batch = built(key).model.eval(), images(SIZE)
    values, layers, read = token_features(model, batch), [], pre_logits(model, batch)
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: layers.append(model.norm(output)))
    model(batch)
    columns = token_columns(model, values.shape[1])
    torch.testing.assert_close(values[:, columns.pop("pre-logits")], read)
    if model.cls_token is None:
        assert columns == {}
        return
    classes, patches = [layer[:, 0] for layer in layers], layers[-1][:, -64:].mean(dim=1)
    expected = {
        "1 class token": classes[-1:],
        "1 class token, patches": [*classes[-1:], patches],
        "2 class tokens": classes,
        "2 class tokens, patches": [*classes, patches],
    }
    assert columns.keys() == expected.keys()
    for name, parts in expected.items():
        torch.testing.assert_close(values[:, columns[name]], torch.cat(parts, dim=1))


@pytest.mark.parametrize("key, size", [("hiera", 80), ("dinov3", 68), ("relative", 68)])
def test_a_size_that_it_cannot_compute_is_refused(key: str, size: int) -> None:
    with refused("recipe.wrong_size", "model.image_size", str(size)):
        built(key, image_size=size)


def test_windows_that_do_not_divide_the_size_are_refused() -> None:
    settings: dict[str, Any] = {"num_classes": 5, "pretrained": False}
    with refused("recipe.wrong_size", "200x200", "window"):
        build("maxvit_pico_rw_256", image_size=200, args={"depths": (1, 1, 1, 1)}, **settings)
    assert build("mobilenetv4_conv_small", image_size=67, **settings)
