"""The last block of a network whose classifier reads the class token alone.

What that block makes of the other tokens is never read: their queries, keys and values, their way
through the MLP and all gradients of these. Without them, one of a network's blocks is nearly free.
"""

# B batch, N tokens, D width, G heads, C width of a head, 3 query, key and value

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from finetune.models.trial import computes_alike

__all__ = ["compute_class_token"]


def compute_class_token(network: nn.Module) -> bool:
    """Let the last block compute the class token alone, if the logits depend on no other.

    Logits and gradients stay what they are, but for the order of sums and the draws of dropout in
    this block. `forward_features` gives one token then, the last block's attention has one query,
    and no mask is taken. Names, copies and wrappers of the network stay as they are.

    Args:
        network: in float32; left alone unless it is timm's ViT with a class token that alone is
            read, and of plain blocks (without norms of queries and keys, for instance).
    Returns: whether it does so now; the values of the weights make no difference.
    """
    if type(network) is not VisionTransformer:
        return False
    if network.global_pool != "token" or network.cls_token is None or not len(network.blocks):
        return False
    block = network.blocks[-1]
    if not _is_known(block):
        return False
    # a class, not a method of the block's own, which would hold the block for ever
    block.__class__ = _ClassTokenBlock
    return True


def _is_known(block: Any) -> bool:
    """Whether the block computes what a `_ClassTokenBlock` does."""
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    if type(block.attn.qkv) is not nn.Linear:
        return False
    return computes_alike(block, _ClassTokenBlock.forward, block.attn.qkv.in_features)


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
    """What the first token reads from all. Returns: (B, 1, D).

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
