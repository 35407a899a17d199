"""models/fast_layers.py: the same outputs and gradients as timm's blocks."""

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


def make_network(name: str = "vit_tiny_patch16_224", **args: Any) -> Any:
    """Return a small timm network in which every parameter has an effect."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=NUM_CLASSES, **{**SIZES, **args})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


def compute_loss(model: nn.Module) -> Tensor:
    torch.manual_seed(2)  # the same dropout masks
    return F.cross_entropy(model(random_images(next(model.parameters()).dtype)), torch.arange(4))


# --- the last block computes only the class token ------------------------------------------------


def with_short_last_block(model: nn.Module) -> Any:
    """Return a copy whose last block computes only the class token."""
    short = copy.deepcopy(model)
    assert limit_last_block_to_class_token(short)
    return short


BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_tiny_patch16_224", {}),
    "layer scale": ("vit_tiny_patch16_224", {"init_values": 0.5}),
    "no biases": ("vit_tiny_patch16_224", {"qkv_bias": False, "proj_bias": False}),
    "stochastic depth": ("vit_tiny_patch16_224", {"drop_path_rate": 0.5}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "a norm before the blocks": ("vit_base_patch16_clip_224", {}),
    "one block": ("vit_tiny_patch16_224", {"depth": 1}),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("training", [False, True])
def test_loss_and_gradients_equal_the_full_block(block: str, training: bool) -> None:
    timm_name, args = BLOCKS[block]
    full = make_network(timm_name, **args).train(training)
    short = with_short_last_block(full)
    assert short.state_dict().keys() == full.state_dict().keys()
    expected, actual = compute_loss(full), compute_loss(short)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    expected.backward()
    actual.backward()
    gradients = dict(short.named_parameters())
    for name, parameter in full.named_parameters():
        assert parameter.grad is not None, name
        # products of other shapes sum in another order; the gradient of the key bias is 0
        scale = max(float(parameter.grad.abs().max()), 1e-3)
        assert float((gradients[name].grad - parameter.grad).abs().max()) < 1e-5 * scale, name


class FixedDropout(nn.Module):
    """Stands in for dropout: always keeps every other value."""

    def forward(self, values: Tensor) -> Tensor:
        mask = torch.arange(values.shape[-1]) % 2
        return 2 * mask * values


@pytest.mark.parametrize(
    "module_name", ["attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2"]
)
def test_dropout_equals_the_full_block(module_name: str) -> None:
    full = make_network().train()
    full.blocks[-1].set_submodule(module_name, FixedDropout())
    full.blocks[-1].attn.fused_attn = False
    short = with_short_last_block(full)
    torch.testing.assert_close(compute_loss(short), compute_loss(full), rtol=1e-5, atol=0)
    assert abs(compute_loss(short) - compute_loss(make_network().train())) > 1e-3


def test_saves_nearly_one_block_of_macs() -> None:
    full = make_network(img_size=64, depth=4)  # 65 tokens
    macs_before = summarize_model(full.eval(), (64, 64))["macs"]
    assert limit_last_block_to_class_token(full)
    assert 0.74 < summarize_model(full, (64, 64))["macs"] / macs_before < 0.78


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
def test_leaves_other_networks_unchanged(name: str, args: dict[str, Any] | None) -> None:
    model = timm.create_model(name) if args is None else make_network(name, **args)
    assert not limit_last_block_to_class_token(model)
    assert all(
        type(module).__module__.startswith(("timm.", "torch.")) for module in model.modules()
    )


def test_block_is_freed_with_its_last_reference() -> None:
    model = make_network()
    assert limit_last_block_to_class_token(model)
    block = weakref.ref(model.blocks[-1])
    gc.disable()  # a reference cycle would keep the block's GPU memory
    try:
        del model
        assert block() is None
    finally:
        gc.enable()


def test_pre_logits_and_feature_input_stay_the_same() -> None:
    full = make_network().eval()
    short = with_short_last_block(full)
    with torch.no_grad():
        expected_BD = compute_pre_logits(full, random_images())
        torch.testing.assert_close(
            compute_pre_logits(short, random_images()), expected_BD, rtol=0, atol=1e-5
        )
        logits_BK = full(random_images())
        assert enable_feature_input(short, (32, 32), training=False) is None
        torch.testing.assert_close(short(expected_BD), logits_BK)
        torch.testing.assert_close(short(random_images()), logits_BK, rtol=0, atol=1e-5)


def test_shortened_networks_have_no_attention_maps() -> None:
    """Attention maps need all queries, which the short last block does not compute."""
    full = make_network().eval()
    assert len(attention_maps(full, random_images())) == DEPTH
    assert limit_last_block_to_class_token(full)
    assert attention_maps(full, random_images()) == []


def test_gradient_checkpointing_still_works() -> None:
    full = make_network().train()
    short = with_short_last_block(full)
    short.set_grad_checkpointing()
    expected, actual = compute_loss(full), compute_loss(short)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    actual.backward()
    assert all(parameter.grad is not None for parameter in short.parameters())


# --- unfused attention --------------------------------------------------------------------------


def make_attention(**args: Any) -> Attention:
    torch.manual_seed(0)
    args = {"num_heads": 3, "qkv_bias": True, **args}
    return Attention(WIDTH, **args).double()


def with_unfused_attention(module: nn.Module) -> Any:
    """Return a copy that computes attention without the fused kernel."""
    unfused = copy.deepcopy(module)
    use_unfused_attention(unfused)
    return unfused


def random_tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        2, TOKENS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True
    )


def output_and_gradients(module: nn.Module, **args: Any) -> list[Tensor]:
    """Return the output of a module, and all gradients of a sum over it."""
    torch.manual_seed(2)  # the same dropout masks
    tokens_BND = random_tokens()
    output_BND = module(tokens_BND, **args)
    inputs = [
        tokens_BND,
        *(parameter for parameter in module.parameters() if parameter.requires_grad),
    ]
    return [output_BND, *torch.autograd.grad((output_BND * output_BND.cos()).sum(), inputs)]


ATTENTION_ARGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"num_heads": 1},
    "heads of another width": {"attn_head_dim": 7},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "output dropout": {"proj_drop": 0.3},
    "attention dropout": {"attn_drop": 0.3},
    "query and key norm": {"qk_norm": True, "norm_layer": nn.LayerNorm},
    "output norm": {"scale_norm": True, "norm_layer": nn.LayerNorm},
}
UNCHANGED = {"query and key norm", "output norm"}
if "gated" in inspect.signature(Attention).parameters:  # not in every version of timm
    ATTENTION_ARGS["gates"] = {"gated": True}
    UNCHANGED.add("gates")


@pytest.mark.parametrize("case", ATTENTION_ARGS)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_equal_timm(case: str, training: bool) -> None:
    timm_module = make_attention(**ATTENTION_ARGS[case]).train(training)
    timm_module.fused_attn = False  # fused attention draws its dropout mask differently
    our_module = with_unfused_attention(timm_module)
    assert (type(our_module) is Attention) is (case in UNCHANGED)
    torch.testing.assert_close(
        output_and_gradients(our_module), output_and_gradients(timm_module), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("args", [{"is_causal": True}, {"attn_mask": torch.eye(TOKENS).bool()}])
def test_respects_attention_masks(args: dict[str, Any]) -> None:
    timm_module = make_attention()
    our_module = with_unfused_attention(timm_module)
    expected, actual = (
        output_and_gradients(timm_module, **args),
        output_and_gradients(our_module, **args),
    )
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(our_module(random_tokens(), **args), our_module(random_tokens()))


def test_gradients_pass_through_frozen_weights() -> None:
    timm_module = make_attention()
    timm_module.qkv.requires_grad_(False)
    expected, actual = (
        output_and_gradients(timm_module),
        output_and_gradients(with_unfused_attention(timm_module)),
    )
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_network_gradients_stay_the_same(checkpointing: bool) -> None:
    timm_module = make_network().double().train()
    our_module = with_unfused_attention(timm_module)
    assert (
        sum(
            type(module) is not Attention
            for module in our_module.modules()
            if isinstance(module, Attention)
        )
        == 2
    )
    assert our_module.state_dict().keys() == timm_module.state_dict().keys()
    our_module.set_grad_checkpointing(checkpointing)
    expected, actual = (
        torch.autograd.grad(compute_loss(module), list(module.parameters()))
        for module in (timm_module, our_module)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_attention_maps_stay_the_same() -> None:
    timm_module = make_network().eval()
    expected, actual = (
        attention_maps(model, random_images())
        for model in (timm_module, with_unfused_attention(timm_module))
    )
    assert len(actual) == DEPTH
    torch.testing.assert_close(actual, expected)


def test_bf16_results_are_bit_identical_to_timm() -> None:
    timm_module = make_attention().float()
    timm_module.fused_attn = False
    results = []
    for module in (timm_module, with_unfused_attention(timm_module)):
        tokens_BND = random_tokens().detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output_BND = module(tokens_BND)
        assert output_BND.dtype == torch.bfloat16
        inputs = [tokens_BND, *module.parameters()]
        results.append([output_BND, *torch.autograd.grad(output_BND.square().sum(), inputs)])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_does_not_modify_the_projection_of_a_single_token() -> None:
    our_module, projections = with_unfused_attention(make_attention()), []
    our_module.qkv.register_forward_hook(lambda module, inputs, output: projections.append(output))
    tokens_BND = random_tokens()[:1, :1]
    our_module(tokens_BND)
    assert torch.equal(
        projections[0], F.linear(tokens_BND, our_module.qkv.weight, our_module.qkv.bias)
    )


# --- copies, and the equivalence check ------------------------------------------------------------


@pytest.mark.parametrize("replace", [with_short_last_block, with_unfused_attention])
def test_copies_use_their_own_weights(replace: Any) -> None:
    original = replace(make_network().eval())
    copied = copy.deepcopy(original)
    expected = original(random_images())
    with torch.no_grad():
        copied.blocks[-1].attn.qkv.weight.zero_()
    assert torch.equal(original(random_images()), expected)
    assert not torch.equal(copied(random_images()), expected)


class ScaledResidual(nn.Module):
    """A residual layer whose zero scale can hide differences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, tokens_BND: Tensor) -> Tensor:
        result: Tensor = tokens_BND + self.scale * self.drop(self.linear(tokens_BND))
        return result


def same_forward(module: Any, tokens_BND: Tensor) -> Tensor:
    linear_BND = nn.functional.linear(tokens_BND, module.linear.weight, module.linear.bias)
    result: Tensor = tokens_BND + module.scale * module.drop(linear_BND)
    return result


def first_token_forward(module: Any, tokens_BND: Tensor) -> Tensor:
    return same_forward(module, tokens_BND[:, :1])


def forward_without_bias(module: Any, tokens_BND: Tensor) -> Tensor:
    result: Tensor = tokens_BND + module.scale * (tokens_BND @ module.linear.weight.mT)
    return result


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_is_equivalent_is_not_fooled_by_zero_weights(grad_enabled: bool) -> None:
    with torch.set_grad_enabled(grad_enabled):
        assert is_equivalent(ScaledResidual(), same_forward, 8)
        assert is_equivalent(ScaledResidual(), first_token_forward, 8)
        assert not is_equivalent(ScaledResidual(), forward_without_bias, 8)


def test_is_equivalent_detects_hooks() -> None:
    changed = ScaledResidual()
    changed.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    assert not is_equivalent(changed, same_forward, 8)


def test_is_equivalent_has_no_side_effects() -> None:
    module = ScaledResidual().train()
    module.linear.eval()
    weights_before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rng_state = torch.get_rng_state()
    assert is_equivalent(module, same_forward, 8)
    assert [child.training for child in module.modules()] == [True, False, True]
    assert all(
        torch.equal(weights_before[name], tensor) for name, tensor in module.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), rng_state)


# --- oneDNN -------------------------------------------------------------------------------------


class OperationRecorder(TorchDispatchMode):
    """Records the names of the executed operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="only relevant with MKL")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_convnext", "test_mambaout"])
def test_onednn_gives_the_same_logits(name: str) -> None:
    model = (
        make_network(name) if "vit" in name else timm.create_model(name, num_classes=NUM_CLASSES)
    )
    onednn_model = copy.deepcopy(model.eval())
    use_onednn_linear(onednn_model)
    assert onednn_model.state_dict().keys() == model.state_dict().keys()
    with torch.inference_mode():
        expected_BK = model(random_images())
        with OperationRecorder() as recorder:
            logits_BK = onednn_model(random_images())
        # sums in another order
        torch.testing.assert_close(logits_BK, expected_BK, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(onednn_model(random_images()), model(random_images()))
    assert {"mkldnn._linear_pointwise.default"} <= recorder.names
    assert not any("addmm" in name for name in recorder.names)


def test_onednn_does_not_change_gradients() -> None:
    original = make_network()
    onednn_model = copy.deepcopy(original)
    use_onednn_linear(onednn_model)
    for model in (original, onednn_model):
        compute_loss(model).backward()
    assert torch.equal(original.head.weight.grad, onednn_model.head.weight.grad)
