"""Faster replacements with the same result: last ViT block, attention, and linear layers on CPU."""

# B batch, N tokens, D width, G heads, C head width, 3: query, key and value, E = 3 * G * C

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = [
    "is_equivalent",
    "limit_last_block_to_class_token",
    "use_onednn_linear",
    "use_unfused_attention",
]

_NUM_TOKENS = 5
_TOLERANCE = 1e-4  # relative to the largest value; summation order may differ


def is_equivalent(module: nn.Module, forward: Callable[[Any, Tensor], Tensor], width: int) -> bool:
    """Check whether a replacement forward gives the same result as the module's own.

    The check runs on a deep copy with random weights, because with the current weights a norm or a
    small layer scale could hide a difference that appears later in training.

    Args:
        module: a module that maps tokens (B, N, D) to tokens (B, N, D); it is not changed.
        forward: the replacement, called with a module and its tokens; it may return only the first
            output tokens.
        width: D.
    """
    generator = torch.Generator().manual_seed(0)
    copied = copy.deepcopy(module).to("cpu", torch.float32).eval()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            if parameter.ndim == 1:
                parameter.mul_(parameter.shape[-1] ** 0.5)
    tokens_BND = torch.randn(2, _NUM_TOKENS, width, generator=generator)
    with torch.enable_grad():  # test the code path of training
        actual_BND = forward(copied, tokens_BND).detach()
    expected_BND = copied(tokens_BND)[:, : actual_BND.shape[1]].detach()
    error, largest = (actual_BND - expected_BND).abs().max(), expected_BND.abs().max()
    return bool(error <= _TOLERANCE * largest)


def limit_last_block_to_class_token(network: nn.Module) -> bool:
    """Make the last block compute only the class token, if the logits depend on no other token.

    Logits and gradients do not change, except for summation order and the random draws of dropout
    in this block. Afterwards `forward_features` returns one token, the last block's attention has
    one query, and the block accepts no mask. Parameter names do not change, and deep copies and
    wrappers (DDP, EMA) of the network keep working.

    Args:
        network: a float32 network. Only timm's VisionTransformer with class-token pooling and plain
            blocks (for example without query and key norms) is changed.
    Returns: True if the block was replaced. This depends only on the architecture, never on the
        weights.
    """
    if type(network) is not VisionTransformer:
        return False
    if network.global_pool != "token" or network.cls_token is None or not len(network.blocks):
        return False
    block = network.blocks[-1]
    if type(block) is not Block:
        return False
    if not _can_replace_forward(block, _ClassTokenBlock.forward, attention=block.attn):
        return False
    # replace the class, not the method: a bound method would form a reference cycle
    block.__class__ = _ClassTokenBlock
    return True


def _can_replace_forward(
    module: nn.Module, forward: Callable[[Any, Tensor], Tensor], *, attention: Any
) -> bool:
    """Check that `attention` is timm's plain Attention and `forward` gives the same result."""
    if type(attention) is not Attention or type(attention.qkv) is not nn.Linear:
        return False
    return is_equivalent(module, forward, attention.qkv.in_features)


class _ClassTokenBlock(Block):
    """timm's Block, computed for the first token only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Compute the first token. Returns: (B, 1, D) from (B, N, D)."""
        token_B1D = x[:, :1]
        attended_B1D = _class_token_attention(self.attn, self.norm1(x))
        token_B1D = token_B1D + self.drop_path1(self.ls1(attended_B1D))
        token_B1D = token_B1D + self.drop_path2(self.ls2(self.mlp(self.norm2(token_B1D))))
        return token_B1D


def _class_token_attention(attn: Any, tokens_BND: Tensor) -> Tensor:
    """Compute the attention of the first token to all tokens. Returns: (B, 1, D).

    With a single query, computing keys and values for all tokens would be wasteful. Instead, the
    query is multiplied by the key weights, and the attention-weighted mean of the tokens by the
    value weights. The key bias adds the same constant to all scores, so softmax cancels it.
    """
    heads, biases_3GC = (3, attn.num_heads, -1), None
    to_query_GCD, to_key_GCD, to_value_GCD = attn.qkv.weight.unflatten(0, heads)
    query_BGC = torch.einsum("bd,gcd->bgc", tokens_BND[:, 0], to_query_GCD)
    if attn.qkv.bias is not None:
        biases_3GC = attn.qkv.bias.unflatten(0, heads)
        query_BGC = query_BGC + biases_3GC[0]
    query_BGD = torch.einsum("bgc,gcd->bgd", query_BGC * attn.scale, to_key_GCD)
    weights_BGN = attn.attn_drop((query_BGD @ tokens_BND.mT).softmax(dim=-1))
    output_BGC = torch.einsum("bgd,gcd->bgc", weights_BGN @ tokens_BND, to_value_GCD)
    if biases_3GC is not None:
        output_BGC = output_BGC + weights_BGN.sum(dim=-1, keepdim=True) * biases_3GC[2]
    result: Tensor = attn.proj_drop(attn.proj(output_BGC.flatten(1)[:, None]))
    return result


def use_unfused_attention(network: nn.Module) -> None:
    """Replace timm's fused attention with an unfused one that has a custom backward pass.

    Logits and gradients do not change, except for summation order; second derivatives are not
    supported. timm's own unfused code still runs when gradients are disabled, with a mask, with
    dropout on attention weights, and in attention classes other than timm's plain Attention.
    Parameter names do not change, and deep copies and wrappers (DDP, EMA) of the network keep
    working.

    Args:
        network: a float32 network.
    """
    for module in network.modules():
        if getattr(module, "fused_attn", False):
            module.fused_attn = False  # type: ignore[assignment]
        if _can_replace_forward(module, _UnfusedAttention.forward, attention=module):
            # replace the class, not the method: a bound method would form a reference cycle
            module.__class__ = _UnfusedAttention


def use_onednn_linear(network: nn.Module) -> None:
    """Make linear layers use oneDNN on a CPU when gradients are disabled.

    torch's default for float32 is MKL, which does not use AVX-512 on non-Intel processors: on a
    2024 EPYC, oneDNN is twice as fast. Logits do not change, except for summation order.

    Args:
        network: a network on a CPU. Parameter names do not change, and deep copies and wrappers
            keep working.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = _OneDnnLinear


class _OneDnnLinear(nn.Linear):
    """nn.Linear that uses oneDNN when gradients are disabled."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features)."""
        dtypes = {input.dtype, self.weight.dtype}
        on_cpu = input.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        if torch.is_grad_enabled() or dtypes != {torch.float32} or not on_cpu:
            return super().forward(input)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.weight, self.bias, "none", [], ""
        )
        return result


class _UnfusedAttention(Attention):
    """timm's Attention with an unfused forward and a custom backward pass."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Compute self-attention: (B, N, D) to (B, N, D)."""
        has_dropout = self.training and self.attn_drop.p > 0
        if attn_mask is not None or is_causal or has_dropout or not torch.is_grad_enabled():
            result: Tensor = Attention.forward(self, x, attn_mask, is_causal)
            return result
        result = _UnfusedAttentionFunction.apply(self.qkv(x), self.num_heads, self.scale)
        result = self.proj_drop(self.proj(result))
        return result


class _UnfusedAttentionFunction(torch.autograd.Function):
    """Attention of all tokens to all tokens: softmax(scale q kᵀ) v for each head."""

    @staticmethod
    def forward(ctx: Any, qkv_BNE: Tensor, num_heads: int, scale: float) -> Tensor:
        """Compute attention from packed queries, keys and values. Returns: (B, N, G * C)."""
        parts_3BGNC = qkv_BNE.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
        parts_3BGNC = parts_3BGNC.clone(memory_format=torch.contiguous_format)
        query_BGNC, key_BGNC, value_BGNC = parts_3BGNC
        query_BGNC.mul_(scale)
        weights_BGNN = (query_BGNC @ key_BGNC.mT).softmax(dim=-1)
        ctx.save_for_backward(parts_3BGNC, weights_BGNN)
        ctx.scale = scale
        return (weights_BGNN @ value_BGNC).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNE: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of `qkv_BNE`, (B, N, E); `grad_BNE` has the shape (B, N, G * C)."""
        parts_3BGNC, weights_BGNN = ctx.saved_tensors
        query_BGNC, key_BGNC, value_BGNC = parts_3BGNC
        heads = parts_3BGNC.shape[2]
        grad_BGNC = grad_BNE.unflatten(2, (heads, -1)).transpose(1, 2).contiguous()
        grads_3BGNC = torch.empty_like(parts_3BGNC)
        grad_weights_BGNN = grad_BGNC @ value_BGNC.mT
        grad_scores_BGNN = torch._softmax_backward_data(
            grad_weights_BGNN, weights_BGNN, -1, weights_BGNN.dtype
        )
        torch.matmul(grad_scores_BGNN, key_BGNC, out=grads_3BGNC[0]).mul_(ctx.scale)
        torch.matmul(grad_scores_BGNN.mT, query_BGNC, out=grads_3BGNC[1])
        torch.matmul(weights_BGNN.mT, grad_BGNC, out=grads_3BGNC[2])
        return grads_3BGNC.permute(1, 3, 0, 2, 4).flatten(2), None, None
