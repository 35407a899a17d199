"""Attention as plain products: what timm's gives, and its gradients."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from finetune.models.attention import attention_maps
from finetune.models.fast_blocks import multiply_plainly

WIDTH, TOKENS = 48, 17


def attention(**args: Any) -> Attention:
    torch.manual_seed(0)
    args = {"num_heads": 3, "qkv_bias": True, **args}
    return Attention(WIDTH, **args).double()


def plainly(module: nn.Module) -> Any:
    """A copy whose attention is computed here."""
    made = copy.deepcopy(module)
    multiply_plainly(made)
    return made


def tokens() -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(2, TOKENS, WIDTH, generator=draws, dtype=torch.float64, requires_grad=True)


def results(module: nn.Module, **args: Any) -> list[Tensor]:
    """What a module gives, and all gradients of a sum over it."""
    torch.manual_seed(2)  # the same draws of dropout
    given_BND = tokens()
    found_BND = module(given_BND, **args)
    asked = [given_BND, *(p for p in module.parameters() if p.requires_grad)]
    return [found_BND, *torch.autograd.grad((found_BND * found_BND.cos()).sum(), asked)]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"num_heads": 1},
    "heads of another width": {"attn_head_dim": 7},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "dropout of what is read": {"proj_drop": 0.3},
    "dropout of the weights": {"attn_drop": 0.3},
    "norms of queries and keys": {"qk_norm": True, "norm_layer": nn.LayerNorm},
    "a norm of what is read": {"scale_norm": True, "norm_layer": nn.LayerNorm},
}
OTHERS = {"norms of queries and keys", "a norm of what is read"}
if "gated" in inspect.signature(Attention).parameters:  # not in every version of timm's
    KINDS["gates"] = {"gated": True}
    OTHERS.add("gates")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_results_and_gradients_are_timms(kind: str, training: bool) -> None:
    theirs = attention(**KINDS[kind]).train(training)
    theirs.fused_attn = False  # which draws its dropout otherwise
    ours = plainly(theirs)
    assert (type(ours) is Attention) is (kind in OTHERS)
    for expected, found in zip(results(theirs), results(ours), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("args", [{"is_causal": True}, {"attn_mask": torch.eye(TOKENS).bool()}])
def test_masks_are_heeded(args: dict[str, Any]) -> None:
    theirs = attention()
    ours = plainly(theirs)
    for expected, found in zip(results(theirs, **args), results(ours, **args), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(ours(tokens(), **args), ours(tokens()))


def test_what_is_frozen_gets_no_gradient_and_passes_it_on() -> None:
    theirs = attention()
    theirs.qkv.requires_grad_(False)
    for expected, found in zip(results(theirs), results(plainly(theirs)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def network() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2}
    return timm.create_model("vit_tiny_patch16_224", num_heads=3, num_classes=4, **sizes).double()


def images() -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 32, 32, generator=draws, dtype=torch.float64)


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def gradients(model: nn.Module) -> list[Tensor]:
    loss = F.cross_entropy(model(images()), torch.arange(4))
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_network_trains_as_before(checkpointing: bool) -> None:
    theirs = network().train()
    ours = plainly(theirs)
    assert sum(type(module) is not Attention for module in attentions(ours)) == 2
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.set_grad_checkpointing(checkpointing)
    for expected, found in zip(gradients(theirs), gradients(ours), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_attention_is_shown_as_before() -> None:
    theirs = network().eval()
    expected, found = (attention_maps(one, images()) for one in (theirs, plainly(theirs)))
    assert len(found) == 2
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)


def test_a_copy_computes_with_its_own_weights() -> None:
    first = plainly(attention())
    second = copy.deepcopy(first)
    before = first(tokens())
    with torch.no_grad():
        second.qkv.weight.zero_()
    assert torch.equal(first(tokens()), before)
    assert not torch.equal(second(tokens()), before)


def test_in_bf16_it_is_timms_to_the_bit() -> None:
    theirs = attention().float()
    theirs.fused_attn = False
    both = []
    for one in (theirs, plainly(theirs)):
        given_BND = tokens().detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found_BND = one(given_BND)
        assert found_BND.dtype == torch.bfloat16
        asked = [given_BND, *one.parameters()]
        both.append([found_BND, *torch.autograd.grad(found_BND.square().sum(), asked)])
    for expected, found in zip(*both, strict=True):
        assert torch.equal(found, expected)


def test_one_token_of_one_image_leaves_its_projection_as_it_is() -> None:
    ours, seen = plainly(attention()), []
    ours.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    given_BND = tokens()[:1, :1]
    ours(given_BND)
    assert torch.equal(seen[0], F.linear(given_BND, ours.qkv.weight, ours.qkv.bias))
