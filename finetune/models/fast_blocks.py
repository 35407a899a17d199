"""Attention as plain products of matrices, which a CPU multiplies fastest in bf16.

timm's own products copy queries, keys and values one by one into the order that the products need,
and their gradients back again. Here all three are copied at once, each way.
"""

# B batch, N tokens, D width, G heads, C width of a head, 3 query, key and value, E = 3 G C

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.models.trial import computes_alike

__all__ = ["multiply_plainly"]


def multiply_plainly(network: nn.Module) -> None:
    """Let a network's attention be computed without timm's fused kernel, and trained as here.

    Logits and gradients stay what they are, but for the order of sums; second derivatives there are
    none any more. Where no gradient is asked for, attention weights are dropped out, or attention
    is not timm's plain one, the products are timm's. Names, copies and wrappers of the network stay
    as they are.

    Args:
        network: in float32.
    """
    for module in network.modules():
        if getattr(module, "fused_attn", False):
            module.fused_attn = False  # type: ignore[assignment]
        if type(module) is not Attention or type(module.qkv) is not nn.Linear:
            continue
        if computes_alike(module, _PlainAttention.forward, module.qkv.in_features):
            # a class, not a method of the module's own, which would hold the module for ever
            module.__class__ = _PlainAttention


class _PlainAttention(Attention):
    """timm's attention, of which only the way to compute it differs."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """What timm's attention gives. Returns: (B, N, D) from (B, N, D)."""
        dropped = self.training and self.attn_drop.p > 0
        if attn_mask is not None or is_causal or dropped or not torch.is_grad_enabled():
            result: Tensor = Attention.forward(self, x, attn_mask, is_causal)
            return result
        result = _Read.apply(self.qkv(x), self.num_heads, self.scale)
        result = self.proj_drop(self.proj(result))
        return result


class _Read(torch.autograd.Function):
    """What each token reads from all: softmax(scale q kᵀ) v for each head."""

    @staticmethod
    def forward(ctx: Any, qkv_BNE: Tensor, heads: int, scale: float) -> Tensor:
        """Returns: (B, N, G C)."""
        parts_3BGNC = qkv_BNE.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
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
        """Returns: the gradient of queries, keys and values, (B, N, E), from (B, N, G C)."""
        parts_3BGNC, weights_BGNN = ctx.saved_tensors
        query_BGNC, key_BGNC, value_BGNC = parts_3BGNC
        heads = parts_3BGNC.shape[2]
        grad_BGNC = grad_BNE.unflatten(2, (heads, -1)).transpose(1, 2).contiguous()
        grads_3BGNC = torch.empty_like(parts_3BGNC)
        by_weights_BGNN = grad_BGNC @ value_BGNC.mT
        by_scores_BGNN = torch._softmax_backward_data(
            by_weights_BGNN, weights_BGNN, -1, weights_BGNN.dtype
        )
        torch.matmul(by_scores_BGNN, key_BGNC, out=grads_3BGNC[0]).mul_(ctx.scale)
        torch.matmul(by_scores_BGNN.mT, query_BGNC, out=grads_3BGNC[1])
        torch.matmul(weights_BGNN.mT, grad_BGNC, out=grads_3BGNC[2])
        return grads_3BGNC.permute(1, 3, 0, 2, 4).flatten(2), None, None
