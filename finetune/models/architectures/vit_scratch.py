"""A ViT trained from scratch, with fixed sinusoidal positions; and its position-embedding study.

As the review describes it: patches flattened as (channel, row, column), pre-LN blocks, dropout on
attention weights and in the head only, and a head that ends in a LayerNorm over the K logits. The
blocks, the class token, the patches and the head leave 2,048 of the printed 302,520,350 parameters
over: one more LayerNorm over D, which is here where pre-LN networks have it, after the last block.
"""

# B batch, N tokens (class token first), D width, G heads, C channels (of a head), K classes,
# H W pixels

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed, use_fused_attn
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetune.errors import RecipeError
from finetune.models.architectures.position_embeddings import (
    Relative,
    attach,
    check,
    position_table,
    resize,
)

__all__ = ["ScratchViT", "vit_scratch_large_patch8_32"]

default_cfgs = generate_default_cfgs(
    {
        "vit_scratch_large_patch8_32": {
            "input_size": (3, 32, 32),
            "num_classes": 10,
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",  # with its LayerNorm, whose size follows the classes too
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        }
    }
)


class _Attention(nn.Module):
    """Self-attention with dropout on its weights, and no other."""

    def __init__(self, width: int, num_heads: int, attn_drop_rate: float) -> None:
        super().__init__()
        self.num_heads, self.fused_attn = num_heads, bool(use_fused_attn())
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_drop = nn.Dropout(attn_drop_rate)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens_BND: Tensor, relative: Relative | None) -> Tensor:
        heads = self.qkv(tokens_BND).unflatten(-1, (3, self.num_heads, -1))
        query_BGNC, key_BGNC, value_BGNC = heads.permute(2, 0, 3, 1, 4).unbind(0)
        bias = None if relative is None else relative(query_BGNC).to(query_BGNC.dtype)
        if self.fused_attn:
            rate = self.attn_drop.p if self.training else 0.0
            read_BGNC = F.scaled_dot_product_attention(
                query_BGNC, key_BGNC, value_BGNC, attn_mask=bias, dropout_p=rate
            )
        else:
            scores_BGNN = (query_BGNC * query_BGNC.shape[-1] ** -0.5) @ key_BGNC.mT
            scores_BGNN = scores_BGNN if bias is None else scores_BGNN + bias
            read_BGNC = self.attn_drop(scores_BGNN.softmax(dim=-1)) @ value_BGNC
        return self.proj(read_BGNC.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """Pre-LN attention and MLP, with position embeddings of its own if it has any."""

    pos_embed: Tensor | nn.Module | None

    def __init__(self, width: int, num_heads: int, mlp_width: int, attn_drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = _Attention(width, num_heads, attn_drop_rate)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = Mlp(width, mlp_width, act_layer=nn.GELU)

    def forward(self, tokens_BND: Tensor, shared: Tensor | nn.Module | None) -> Tensor:
        """Transform tokens; `shared` positions, of all blocks, replace the block's own."""
        position = self.pos_embed if shared is None else shared
        relative = position if isinstance(position, Relative) else None
        table_1ND = position_table(position)
        if table_1ND is not None:
            tokens_BND = tokens_BND + table_1ND
        tokens_BND = tokens_BND + self.attn(self.norm1(tokens_BND), relative)
        return tokens_BND + self.mlp(self.norm2(tokens_BND))


class ScratchViT(nn.Module):
    """The review's ViT; the same network carries the study of position embeddings.

    Linear layers start as torch has them, the class token from U[0, 1).

    Args:
        img_size: pixels, or (height, width).
        patch_size: pixels; divides both sides.
        in_chans: channels of an image.
        num_classes: K; 0 for no head.
        embed_dim: D.
        depth: blocks.
        num_heads: divides D.
        mlp_ratio: hidden width of an MLP, in D.
        position: one of `position_embeddings.KINDS`.
        where: one of `position_embeddings.PLACES`; None for the usual place. At every layer the
            positions are added to what enters each block, the first included, and not in the
            stem; "shared" means that all blocks have the same ones, which a fixed table always is.
        drop_rate: dropout in the head.
        attn_drop_rate: dropout on attention weights.
    Raises: RecipeError for values that do not go together.
    Source: paper review, the ViT from scratch; ViT paper, appendix D.4.
    """

    global_pool = "token"
    num_prefix_tokens = 1
    pos_embed: Tensor | nn.Module | None

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 8,
        in_chans: int = 3,
        num_classes: int = 10,
        embed_dim: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        position: str = "sinusoidal",
        where: str | None = None,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.where = check(position, where)
        if embed_dim % num_heads:
            raise RecipeError(
                f"num_heads: {num_heads} does not divide embed_dim, {embed_dim}; correct one",
                code="recipe.conflict",
            )
        self.in_chans, self.drop_rate = in_chans, drop_rate
        self.num_features = self.embed_dim = self.head_hidden_size = embed_dim
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.rand(1, 1, embed_dim))
        rest = (embed_dim, num_heads, int(embed_dim * mlp_ratio), attn_drop_rate)
        self.blocks = nn.ModuleList(_Block(*rest) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-5)
        self.reset_classifier(num_classes)
        for holder in (self, *self.blocks):
            has = (holder is self) != (self.where == "every_layer")
            attach(
                holder,
                position if has else "none",
                grid=self.patch_embed.grid_size,
                width=embed_dim,
                head_width=embed_dim // num_heads,
            )

    def forward_features(self, images_BCHW: Tensor) -> Tensor:
        """Compute all tokens after the last LayerNorm: (B, N, D)."""
        patches_BND = self.patch_embed(images_BCHW)
        first_B1D = self.cls_token.expand(patches_BND.shape[0], -1, -1)
        tokens_BND = torch.cat([first_B1D, patches_BND], dim=1)
        if self.where == "stem":
            table_1ND = position_table(self.pos_embed)
            tokens_BND = tokens_BND if table_1ND is None else tokens_BND + table_1ND
        shared = self.pos_embed if self.where == "every_layer_shared" else None
        for block in self.blocks:
            if self.grad_checkpointing:
                tokens_BND = checkpoint(block, tokens_BND, shared, use_reentrant=False)
            else:
                tokens_BND = block(tokens_BND, shared)
        return self.norm(tokens_BND)

    def forward_head(self, tokens_BND: Tensor, pre_logits: bool = False) -> Tensor:
        """Compute logits (B, K); with `pre_logits` or without classes, the class token (B, D)."""
        if pre_logits or not self.num_classes:
            return tokens_BND[:, 0]
        return self.head(tokens_BND)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute logits of images of the network's own size."""
        return self.forward_head(self.forward_features(images_BCHW))

    def get_classifier(self) -> nn.Module:
        """Return the whole head, whose last linear layer zero initialisation sets to zero."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head, on the same device; the class token is the only pooling."""
        if global_pool not in (None, "token"):
            raise RecipeError(
                f"global_pool: '{global_pool}'; this network's head reads 'token'; use that",
                code="recipe.wrong_value",
            )
        self.num_classes = num_classes
        self.head: nn.Module = (
            _Head(self.embed_dim, num_classes, self.drop_rate) if num_classes else nn.Identity()
        ).to(self.cls_token)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: the class token and all learned positions."""
        names = [name for name, _ in self.named_parameters()]
        return {name for name in names if "pos_embed" in name.split(".") or name == "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's grouping: the stem with what all blocks share, then block after block."""
        blocks = r"^blocks\.(\d+)"
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": blocks if coarse else [(blocks, None), (r"^norm", (99999,))],
        }


class _Head(nn.Module):
    """On all tokens Linear, GELU, dropout; then the class token's logits through a LayerNorm.

    With the linear layer at zero GELU(0) = 0 reaches the LayerNorm, which leaves its bias of 0: all
    logits are 0 and the first loss is ln K. The LayerNorm divides by sqrt(eps) there, so the first
    gradient of that layer is some 300 times that of the same head without it.
    """

    def __init__(self, width: int, num_classes: int, rate: float) -> None:
        super().__init__()
        self.fc = nn.Linear(width, num_classes)
        self.act = nn.GELU()
        self.drop = nn.Dropout(rate)
        self.norm = nn.LayerNorm(num_classes, eps=1e-5)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        outputs_BNK = self.drop(self.act(self.fc(tokens_BND)))
        return self.norm(outputs_BNK[:, 0])


def _fit(state: Mapping[str, Tensor], model: ScratchViT) -> dict[str, Tensor]:
    """Weights of another image size or with other classes, for timm to load."""
    own, fitted = model.state_dict(), {}
    for name, tensor in state.items():
        if name not in own or own[name].shape == tensor.shape:
            fitted[name] = tensor
        elif not name.startswith("head."):  # timm asks for the fresh head where classes differ
            fitted[name] = resize(name, tensor, model.patch_embed.grid_size)
    return fitted


@register_model
def vit_scratch_large_patch8_32(pretrained: bool = False, **kwargs: Any) -> ScratchViT:
    """`ScratchViT` of 8 px patches, 32 px images: 302,520,350 parameters, 5.15 GMACs at K = 10."""
    return build_model_with_cfg(
        ScratchViT, "vit_scratch_large_patch8_32", pretrained, pretrained_filter_fn=_fit, **kwargs
    )
