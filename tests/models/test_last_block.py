"""The last block computes the class token alone, and nothing that is read changes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from finetune.models.attention import attention_maps
from finetune.models.fast_blocks import compute_class_token
from finetune.models.features import accept_features, pre_logits
from finetune.models.profile import count_macs

NUM_CLASSES, DEPTH = 7, 2
SIZES: dict[str, Any] = {
    "patch_size": 8,
    "embed_dim": 48,
    "depth": DEPTH,
    "num_heads": 3,
    "img_size": 32,
}


def network(name: str = "vit_tiny_patch16_224", **args: Any) -> nn.Module:
    """A small network of timm's whose every parameter matters."""
    torch.manual_seed(0)
    made: nn.Module = timm.create_model(name, num_classes=NUM_CLASSES, **{**SIZES, **args})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def images(number: int = 4) -> torch.Tensor:
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(2)  # the same draws of dropout
    return F.cross_entropy(model(images()), torch.tensor([0, 1, 2, 3]))


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_tiny_patch16_224", {}),
    "layer scale": ("vit_tiny_patch16_224", {"init_values": 0.5}),
    "no biases": ("vit_tiny_patch16_224", {"qkv_bias": False, "proj_bias": False}),
    "stochastic depth": ("vit_tiny_patch16_224", {"drop_path_rate": 0.5}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "a norm before the blocks": ("vit_base_patch16_clip_224", {}),
    "one block": ("vit_tiny_patch16_224", {"depth": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_losses_and_gradients_are_those_of_the_whole_block(kind: str, training: bool) -> None:
    name, args = KINDS[kind]
    whole = network(name, **args).train(training)
    short = copy.deepcopy(whole)
    assert compute_class_token(short)
    assert short.state_dict().keys() == whole.state_dict().keys()
    expected, found = loss(whole), loss(short)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    expected.backward()
    found.backward()
    gradients = dict(short.named_parameters())
    for where, parameter in whole.named_parameters():
        assert parameter.grad is not None, where
        # products of other shapes sum in another order; the gradient of the keys' bias is 0
        scale = max(float(parameter.grad.abs().max()), 1e-3)
        assert float((gradients[where].grad - parameter.grad).abs().max()) < 1e-5 * scale, where


class Halved(nn.Module):
    """Stands for dropout: keeps every other value, always the same ones."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(values.shape[-1]) % 2
        return 2 * kept * values


@pytest.mark.parametrize("where", ["attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2"])
def test_dropout_drops_what_it_does_in_the_whole_block(where: str) -> None:
    whole = network().train()
    whole.blocks[-1].set_submodule(where, Halved())  # type: ignore[index, union-attr, operator]
    whole.blocks[-1].attn.fused_attn = False  # type: ignore[index, union-attr]
    short = copy.deepcopy(whole)
    assert compute_class_token(short)
    torch.testing.assert_close(loss(short), loss(whole), rtol=1e-5, atol=0)
    assert abs(loss(short) - loss(network().train())) > 1e-3


def test_a_block_is_nearly_free() -> None:
    whole = network(img_size=64, depth=4)  # 65 tokens
    before = count_macs(whole.eval(), (64, 64))
    assert compute_class_token(whole)
    assert 0.74 < count_macs(whole, (64, 64)) / before < 0.78


@pytest.mark.parametrize(
    "name, args",
    [
        ("vit_tiny_patch16_224", {"global_pool": "avg"}),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
        ("vit_tiny_patch16_224", {"qk_norm": True}),
        ("vit_tiny_patch16_224", {"qk_norm": True, "init_values": 1e-5}),
        ("vit_tiny_patch16_224", {"scale_attn_norm": True, "init_values": 1e-5}),
        ("vit_tiny_patch16_224", {"depth": 0}),
        ("vit_base_patch16_siglip_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("resnet18", None),
    ],
)
def test_what_reads_more_or_computes_otherwise_is_left_alone(
    name: str, args: dict[str, Any] | None
) -> None:
    made = timm.create_model(name) if args is None else network(name, **args)
    assert not compute_class_token(made)
    assert all(type(module).__module__.startswith(("timm.", "torch.")) for module in made.modules())


def test_it_is_gone_with_its_last_reference() -> None:
    made = network()
    assert compute_class_token(made)
    block = weakref.ref(made.blocks[-1])  # type: ignore[index]
    gc.disable()  # a block that held itself would keep its part of a GPU
    try:
        del made
        assert block() is None
    finally:
        gc.enable()


def test_a_copy_computes_with_its_own_weights() -> None:
    first = network().eval()
    assert compute_class_token(first)
    second = copy.deepcopy(first)
    before = first(images())
    with torch.no_grad():
        second.blocks[-1].attn.qkv.weight.zero_()  # type: ignore[index, union-attr, operator]
    torch.testing.assert_close(first(images()), before, rtol=0, atol=0)
    assert not torch.equal(second(images()), before)


def test_pre_logits_and_features_are_taken_as_before() -> None:
    whole = network().eval()
    short = copy.deepcopy(whole)
    assert compute_class_token(short)
    with torch.no_grad():
        expected_BD = pre_logits(whole, images())
        torch.testing.assert_close(pre_logits(short, images()), expected_BD, rtol=0, atol=1e-5)
        logits_BK = whole(images())
        assert accept_features(short, (32, 32), training=False) is None
        torch.testing.assert_close(short(expected_BD), logits_BK)
        torch.testing.assert_close(short(images()), logits_BK, rtol=0, atol=1e-5)


def test_attention_is_not_shown_of_one_query() -> None:
    """Maps are of networks as they were published; these have one block less to show."""
    whole = network().eval()
    assert len(attention_maps(whole, images())) == DEPTH
    assert compute_class_token(whole)
    assert attention_maps(whole, images()) == []


def test_gradient_checkpointing_goes_on() -> None:
    whole = network().train()
    short = copy.deepcopy(whole)
    assert compute_class_token(short)
    short.set_grad_checkpointing()  # type: ignore[operator]
    expected, found = loss(whole), loss(short)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found.backward()
    assert all(parameter.grad is not None for parameter in short.parameters())
