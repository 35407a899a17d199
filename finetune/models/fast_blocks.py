"""Parts of a timm ViT computed faster, to the same result: the last block, attention on a CPU."""

# B batch, N tokens, D width, G heads, C width of a head, 3 query, key and value, E = 3 G C

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["compute_class_token", "computes_alike", "multiply_by_onednn", "multiply_plainly"]

_TOKENS = 5
_TOLERANCE = 1e-4  # of the largest value: products of other shapes sum in another order


def computes_alike(module: nn.Module, forward: Callable[[Any, Tensor], Tensor], width: int) -> bool:
    """True if a copy of a module gives the same result by another forward.

    Its weights are random: in those of the module itself a norm, or a small layer scale, could hide
    the difference until they are trained.

    Args:
        module: tokens (B, N, D) to tokens; left as it is.
        forward: the module and its tokens to the same result, or the first tokens of it.
        width: D of its tokens.
    """
    draws = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module).to("cpu", torch.float32).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=draws)
            if parameter.ndim == 1:
                parameter.mul_(parameter.shape[-1] ** 0.5)
    tokens_BND = torch.randn(2, _TOKENS, width, generator=draws)
    with torch.enable_grad():  # as in training
        actual_BND = forward(twin, tokens_BND).detach()
    expected_BND = twin(tokens_BND)[:, : actual_BND.shape[1]].detach()
    error, largest = (actual_BND - expected_BND).abs().max(), expected_BND.abs().max()
    return bool(error <= _TOLERANCE * largest)


def compute_class_token(network: nn.Module) -> bool:
    """Let the last block compute the class token alone, if the logits depend on no other token.

    Logits and gradients stay what they are, but for the order of sums and the draws of dropout in
    this block. `forward_features` gives one token then, the last block's attention has one query,
    and no mask is taken. Names, copies and wrappers of the network stay as they are.

    Args:
        network: in float32; left alone unless it is timm's ViT with a class token that alone is
            read, and of plain blocks (without norms of queries and keys, for instance).
    Returns: True if it does so now; the values of the weights make no difference.
    """
    if type(network) is not VisionTransformer:
        return False
    if network.global_pool != "token" or network.cls_token is None or not len(network.blocks):
        return False
    block = network.blocks[-1]
    if type(block) is not Block:
        return False
    if not _is_replaceable(block, _ClassTokenBlock.forward, attention=block.attn):
        return False
    # a class, not a method of the block's own, which would hold the block for ever
    block.__class__ = _ClassTokenBlock
    return True


def _is_replaceable(
    module: nn.Module, forward: Callable[[Any, Tensor], Tensor], *, attention: Any
) -> bool:
    """True if the attention is timm's plain one and the module computes the same by `forward`."""
    if type(attention) is not Attention or type(attention.qkv) is not nn.Linear:
        return False
    return computes_alike(module, forward, attention.qkv.in_features)


class _ClassTokenBlock(Block):
    """timm's block, of which only the first token is computed."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The block's first token, without any mask. Returns: (B, 1, D) from (B, N, D)."""
        token_B1D = x[:, :1]
        read_B1D = _attend(self.attn, self.norm1(x))
        token_B1D = token_B1D + self.drop_path1(self.ls1(read_B1D))
        token_B1D = token_B1D + self.drop_path2(self.ls2(self.mlp(self.norm2(token_B1D))))
        return token_B1D


def _attend(attn: Any, tokens_BND: Tensor) -> Tensor:
    """Attention of the first token to all. Returns: (B, 1, D).

    One query needs neither keys nor values of the tokens: it is taken through the keys' weights
    once, and what it reads through the values'. The keys' bias adds the same to all its scores.
    """
    heads, biases_3GC = (3, attn.num_heads, -1), None
    to_query_GCD, to_key_GCD, to_value_GCD = attn.qkv.weight.unflatten(0, heads)
    query_BGC = torch.einsum("bd,gcd->bgc", tokens_BND[:, 0], to_query_GCD)
    if attn.qkv.bias is not None:
        biases_3GC = attn.qkv.bias.unflatten(0, heads)
        query_BGC = query_BGC + biases_3GC[0]
    query_BGD = torch.einsum("bgc,gcd->bgd", query_BGC * attn.scale, to_key_GCD)
    weights_BGN = attn.attn_drop((query_BGD @ tokens_BND.mT).softmax(dim=-1))
    read_BGC = torch.einsum("bgd,gcd->bgc", weights_BGN @ tokens_BND, to_value_GCD)
    if biases_3GC is not None:
        read_BGC = read_BGC + weights_BGN.sum(dim=-1, keepdim=True) * biases_3GC[2]
    result: Tensor = attn.proj_drop(attn.proj(read_BGC.flatten(1)[:, None]))
    return result


def multiply_plainly(network: nn.Module) -> None:
    """Let a network's attention be computed without timm's fused kernel, and trained as here.

    Logits and gradients stay what they are, but for the order of sums; there are no second
    derivatives. Without gradients, with dropout on attention weights, and for attention that is not
    timm's plain one, timm's code computes the products. Names, copies and wrappers of the network
    stay as they are.

    Args:
        network: in float32.
    """
    for module in network.modules():
        if getattr(module, "fused_attn", False):
            module.fused_attn = False  # type: ignore[assignment]
        if _is_replaceable(module, _PlainAttention.forward, attention=module):
            # a class, not a method of the module's own, which would hold the module for ever
            module.__class__ = _PlainAttention


def multiply_by_onednn(network: nn.Module) -> None:
    """Let oneDNN multiply by a network's weights on a CPU where no gradient is asked for.

    MKL, which torch takes for float32, leaves AVX-512 unused on processors that are not Intel's:
    on an EPYC of 2024 oneDNN does twice as much a second. Logits stay what they are, but for the
    order of sums.

    Args:
        network: on a CPU. Names, copies and wrappers of it stay as they are.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = _OneDnnLinear


class _OneDnnLinear(nn.Linear):
    """torch's linear layer, of which only the way to compute it differs."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer. Returns: (…, out) from (…, in)."""
        kinds = {input.dtype, self.weight.dtype}
        on_cpu = input.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        if torch.is_grad_enabled() or kinds != {torch.float32} or not on_cpu:
            return super().forward(input)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.weight, self.bias, "none", [], ""
        )
        return result


class _PlainAttention(Attention):
    """timm's attention, of which only the way to compute it differs."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Compute timm's attention. Returns: (B, N, D) from (B, N, D)."""
        dropped = self.training and self.attn_drop.p > 0
        if attn_mask is not None or is_causal or dropped or not torch.is_grad_enabled():
            result: Tensor = Attention.forward(self, x, attn_mask, is_causal)
            return result
        result = _Read.apply(self.qkv(x), self.num_heads, self.scale)
        result = self.proj_drop(self.proj(result))
        return result


class _Read(torch.autograd.Function):
    """Attention of each token to all: softmax(scale q kᵀ) v for each head."""

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
