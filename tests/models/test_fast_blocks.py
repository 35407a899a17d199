"""models/fast_layers.py: the same results as timm's blocks, and their gradients."""

# B batch, N tokens, D width

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.models.fast_layers import (
    is_equivalent,
    limit_last_block_to_class_token,
    use_onednn_linear,
    use_unfused_attention,
)
from finetune.models.features import compute_pre_logits, enable_feature_input
from finetune.models.interpretability import attention_maps
from finetune.models.summary import summarize_model

NUM_CLASSES, DEPTH, WIDTH, TOKENS = 7, 2, 48, 17
SIZES: dict[str, Any] = {
    "patch_size": 8,
    "embed_dim": WIDTH,
    "depth": DEPTH,
    "num_heads": 3,
    "img_size": 32,
}


def network(name: str = "vit_tiny_patch16_224", **args: Any) -> Any:
    """A small network of timm's whose every parameter matters."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=NUM_CLASSES, **{**SIZES, **args})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loss(model: nn.Module) -> Tensor:
    torch.manual_seed(2)  # the same draws of dropout
    return F.cross_entropy(model(images(next(model.parameters()).dtype)), torch.arange(4))


# --- the last block for the class token alone ---------------------------------------------------


def shortened(model: nn.Module) -> Any:
    """A copy whose last block computes the class token alone."""
    twin = copy.deepcopy(model)
    assert limit_last_block_to_class_token(twin)
    return twin


BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_tiny_patch16_224", {}),
    "layer scale": ("vit_tiny_patch16_224", {"init_values": 0.5}),
    "no biases": ("vit_tiny_patch16_224", {"qkv_bias": False, "proj_bias": False}),
    "stochastic depth": ("vit_tiny_patch16_224", {"drop_path_rate": 0.5}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "a norm before the blocks": ("vit_base_patch16_clip_224", {}),
    "one block": ("vit_tiny_patch16_224", {"depth": 1}),
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("training", [False, True])
def test_losses_and_gradients_are_those_of_the_whole_block(kind: str, training: bool) -> None:
    name, args = BLOCKS[kind]
    whole = network(name, **args).train(training)
    short = shortened(whole)
    assert short.state_dict().keys() == whole.state_dict().keys()
    expected, actual = loss(whole), loss(short)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    expected.backward()
    actual.backward()
    gradients = dict(short.named_parameters())
    for each, parameter in whole.named_parameters():
        assert parameter.grad is not None, each
        # products of other shapes sum in another order; the gradient of the keys' bias is 0
        scale = max(float(parameter.grad.abs().max()), 1e-3)
        assert float((gradients[each].grad - parameter.grad).abs().max()) < 1e-5 * scale, each


class Halved(nn.Module):
    """Stands for dropout: keeps every other value, always the same ones."""

    def forward(self, values: Tensor) -> Tensor:
        kept = torch.arange(values.shape[-1]) % 2
        return 2 * kept * values


@pytest.mark.parametrize("place", ["attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2"])
def test_dropout_drops_what_it_does_in_the_whole_block(place: str) -> None:
    whole = network().train()
    whole.blocks[-1].set_submodule(place, Halved())
    whole.blocks[-1].attn.fused_attn = False
    short = shortened(whole)
    torch.testing.assert_close(loss(short), loss(whole), rtol=1e-5, atol=0)
    assert abs(loss(short) - loss(network().train())) > 1e-3


def test_a_block_is_nearly_free() -> None:
    whole = network(img_size=64, depth=4)  # 65 tokens
    before = summarize_model(whole.eval(), (64, 64))["macs"]
    assert limit_last_block_to_class_token(whole)
    assert 0.74 < summarize_model(whole, (64, 64))["macs"] / before < 0.78


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
    model = timm.create_model(name) if args is None else network(name, **args)
    assert not limit_last_block_to_class_token(model)
    assert all(
        type(module).__module__.startswith(("timm.", "torch.")) for module in model.modules()
    )


def test_it_is_gone_with_its_last_reference() -> None:
    model = network()
    assert limit_last_block_to_class_token(model)
    block = weakref.ref(model.blocks[-1])
    gc.disable()  # a block that held itself would keep its part of a GPU
    try:
        del model
        assert block() is None
    finally:
        gc.enable()


def test_pre_logits_and_features_are_taken_as_before() -> None:
    whole = network().eval()
    short = shortened(whole)
    with torch.no_grad():
        expected_BD = compute_pre_logits(whole, images())
        torch.testing.assert_close(
            compute_pre_logits(short, images()), expected_BD, rtol=0, atol=1e-5
        )
        logits_BK = whole(images())
        assert enable_feature_input(short, (32, 32), training=False) is None
        torch.testing.assert_close(short(expected_BD), logits_BK)
        torch.testing.assert_close(short(images()), logits_BK, rtol=0, atol=1e-5)


def test_attention_is_not_shown_of_one_query() -> None:
    """Maps are of networks as they were published; these have one block less to show."""
    whole = network().eval()
    assert len(attention_maps(whole, images())) == DEPTH
    assert limit_last_block_to_class_token(whole)
    assert attention_maps(whole, images()) == []


def test_gradient_checkpointing_goes_on() -> None:
    whole = network().train()
    short = shortened(whole)
    short.set_grad_checkpointing()
    expected, actual = loss(whole), loss(short)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    actual.backward()
    assert all(parameter.grad is not None for parameter in short.parameters())


# --- attention as plain products ----------------------------------------------------------------


def attention(**args: Any) -> Attention:
    torch.manual_seed(0)
    args = {"num_heads": 3, "qkv_bias": True, **args}
    return Attention(WIDTH, **args).double()


def plainly(module: nn.Module) -> Any:
    """A copy whose attention is computed without timm's fused kernel."""
    twin = copy.deepcopy(module)
    use_unfused_attention(twin)
    return twin


def tokens() -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(2, TOKENS, WIDTH, generator=draws, dtype=torch.float64, requires_grad=True)


def results(module: nn.Module, **args: Any) -> list[Tensor]:
    """The output of a module, and all gradients of a sum over it."""
    torch.manual_seed(2)  # the same draws of dropout
    tokens_BND = tokens()
    output_BND = module(tokens_BND, **args)
    inputs = [tokens_BND, *(p for p in module.parameters() if p.requires_grad)]
    return [output_BND, *torch.autograd.grad((output_BND * output_BND.cos()).sum(), inputs)]


ATTENTIONS: dict[str, dict[str, Any]] = {
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
    ATTENTIONS["gates"] = {"gated": True}
    OTHERS.add("gates")


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("training", [False, True])
def test_results_and_gradients_are_timms(kind: str, training: bool) -> None:
    theirs = attention(**ATTENTIONS[kind]).train(training)
    theirs.fused_attn = False  # which draws its dropout otherwise
    ours = plainly(theirs)
    assert (type(ours) is Attention) is (kind in OTHERS)
    torch.testing.assert_close(results(ours), results(theirs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("args", [{"is_causal": True}, {"attn_mask": torch.eye(TOKENS).bool()}])
def test_masks_are_heeded(args: dict[str, Any]) -> None:
    theirs = attention()
    ours = plainly(theirs)
    expected, actual = results(theirs, **args), results(ours, **args)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(ours(tokens(), **args), ours(tokens()))


def test_what_is_frozen_gets_no_gradient_and_passes_it_on() -> None:
    theirs = attention()
    theirs.qkv.requires_grad_(False)
    expected, actual = results(theirs), results(plainly(theirs))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_network_trains_as_before(checkpointing: bool) -> None:
    theirs = network().double().train()
    ours = plainly(theirs)
    assert sum(type(m) is not Attention for m in ours.modules() if isinstance(m, Attention)) == 2
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.set_grad_checkpointing(checkpointing)
    expected, actual = (torch.autograd.grad(loss(m), list(m.parameters())) for m in (theirs, ours))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_attention_is_shown_as_before() -> None:
    theirs = network().eval()
    expected, actual = (attention_maps(one, images()) for one in (theirs, plainly(theirs)))
    assert len(actual) == DEPTH
    torch.testing.assert_close(actual, expected)


def test_in_bf16_it_is_timms_to_the_bit() -> None:
    theirs = attention().float()
    theirs.fused_attn = False
    both = []
    for one in (theirs, plainly(theirs)):
        tokens_BND = tokens().detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output_BND = one(tokens_BND)
        assert output_BND.dtype == torch.bfloat16
        inputs = [tokens_BND, *one.parameters()]
        both.append([output_BND, *torch.autograd.grad(output_BND.square().sum(), inputs)])
    for expected, actual in zip(*both, strict=True):
        assert torch.equal(actual, expected)


def test_one_token_of_one_image_leaves_its_projection_as_it_is() -> None:
    ours, seen = plainly(attention()), []
    ours.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    tokens_BND = tokens()[:1, :1]
    ours(tokens_BND)
    assert torch.equal(seen[0], F.linear(tokens_BND, ours.qkv.weight, ours.qkv.bias))


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [shortened, plainly])
def test_a_copy_computes_with_its_own_weights(replace: Any) -> None:
    first = replace(network().eval())
    second = copy.deepcopy(first)
    before = first(images())
    with torch.no_grad():
        second.blocks[-1].attn.qkv.weight.zero_()
    assert torch.equal(first(images()), before)
    assert not torch.equal(second(images()), before)


class Scaled(nn.Module):
    """A layer, a norm, and a factor for each channel that can hide both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, tokens_BND: Tensor) -> Tensor:
        result: Tensor = tokens_BND + self.scale * self.drop(self.linear(tokens_BND))
        return result


def alike(module: Any, tokens_BND: Tensor) -> Tensor:
    linear_BND = nn.functional.linear(tokens_BND, module.linear.weight, module.linear.bias)
    result: Tensor = tokens_BND + module.scale * module.drop(linear_BND)
    return result


def first(module: Any, tokens_BND: Tensor) -> Tensor:
    return alike(module, tokens_BND[:, :1])


def without_bias(module: Any, tokens_BND: Tensor) -> Tensor:
    result: Tensor = tokens_BND + module.scale * (tokens_BND @ module.linear.weight.mT)
    return result


@pytest.mark.parametrize("grad", [True, False])
def test_weights_do_not_hide_a_difference(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        assert is_equivalent(Scaled(), alike, 8)
        assert is_equivalent(Scaled(), first, 8)
        assert not is_equivalent(Scaled(), without_bias, 8)


def test_a_module_that_was_changed_is_found_out() -> None:
    changed = Scaled()
    changed.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    assert not is_equivalent(changed, alike, 8)


def test_it_leaves_no_trace() -> None:
    module = Scaled().train()
    module.linear.eval()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    assert is_equivalent(module, alike, 8)
    assert [one.training for one in module.modules()] == [True, False, True]
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# --- products by oneDNN -------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Notes the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="only where MKL would multiply")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_convnext", "test_mambaout"])
def test_onednn_gives_the_same_logits(name: str) -> None:
    plain = network(name) if "vit" in name else timm.create_model(name, num_classes=NUM_CLASSES)
    twin = copy.deepcopy(plain.eval())
    use_onednn_linear(twin)
    assert twin.state_dict().keys() == plain.state_dict().keys()
    with torch.inference_mode():
        expected_BK = plain(images())
        with Operations() as seen:
            logits_BK = twin(images())
        # sums in another order
        torch.testing.assert_close(logits_BK, expected_BK, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(twin(images()), plain(images()))
    assert {"mkldnn._linear_pointwise.default"} <= seen.names
    assert not any("addmm" in name for name in seen.names)


def test_gradients_do_not_come_from_onednn() -> None:
    plain = network()
    twin = copy.deepcopy(plain)
    use_onednn_linear(twin)
    for model in (plain, twin):
        loss(model).backward()
    assert torch.equal(plain.head.weight.grad, twin.head.weight.grad)
