"""A ViT for training from scratch, with a choice of position embeddings (sinusoidal by default).

The network follows the description in the paper review: patches flattened as (channel, row,
column), pre-LN blocks, dropout only on attention weights and in the head, and a head that ends in a
LayerNorm over the K logits. The review reports 302,520,350 parameters. Blocks, class token, patch
embedding and head together have 2,048 fewer. This is the size of one LayerNorm over D = 1024, which
we put after the last block, as is usual in pre-LN networks.
"""

# B batch, N tokens (class token first), D width, G heads, C channels (in attention: head width),
# K classes, H W pixels

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed, use_fused_attn
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetune.models.architectures.position_embeddings import (
    RelativePositionEmbedding,
    add_position_embedding,
    position_table,
    resize_position_embedding,
    resolve_location,
)

__all__ = ["ScratchViT", "vit_scratch_large_patch8_32"]

default_cfgs = generate_default_cfgs(
    {
        "vit_scratch_large_patch8_32": {
            "input_size": (3, 32, 32),
            "num_classes": 10,
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",  # includes its LayerNorm, whose width is K
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        }
    }
)


class _Attention(nn.Module):
    """Self-attention with dropout on the attention weights only."""

    def __init__(self, width: int, num_heads: int, attn_drop_rate: float) -> None:
        super().__init__()
        self.num_heads, self.fused_attn = num_heads, bool(use_fused_attn())
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_drop = nn.Dropout(attn_drop_rate)
        self.proj = nn.Linear(width, width)

    def forward(
        self, tokens_BND: Tensor, relative_position: RelativePositionEmbedding | None
    ) -> Tensor:
        heads = self.qkv(tokens_BND).unflatten(-1, (3, self.num_heads, -1))
        query_BGNC, key_BGNC, value_BGNC = heads.permute(2, 0, 3, 1, 4).unbind(0)
        bias = (
            None
            if relative_position is None
            else relative_position(query_BGNC).to(query_BGNC.dtype)
        )
        if self.fused_attn:
            rate = self.attn_drop.p if self.training else 0.0
            output_BGNC = F.scaled_dot_product_attention(
                query_BGNC, key_BGNC, value_BGNC, attn_mask=bias, dropout_p=rate
            )
        else:
            scores_BGNN = (query_BGNC * query_BGNC.shape[-1] ** -0.5) @ key_BGNC.mT
            scores_BGNN = scores_BGNN if bias is None else scores_BGNN + bias
            output_BGNC = self.attn_drop(scores_BGNN.softmax(dim=-1)) @ value_BGNC
        return self.proj(output_BGNC.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """Pre-LN attention and MLP, optionally with the block's own position embeddings."""

    pos_embed: Tensor | nn.Module | None

    def __init__(self, width: int, num_heads: int, mlp_width: int, attn_drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = _Attention(width, num_heads, attn_drop_rate)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = Mlp(width, mlp_width, act_layer=nn.GELU)

    def forward(self, tokens_BND: Tensor, shared_pos_embed: Tensor | nn.Module | None) -> Tensor:
        """Transform tokens (B, N, D).

        `shared_pos_embed`, which all blocks share, replaces the block's own `pos_embed` if given.
        """
        position = self.pos_embed if shared_pos_embed is None else shared_pos_embed
        relative = position if isinstance(position, RelativePositionEmbedding) else None
        table_1ND = position_table(position)
        if table_1ND is not None:
            tokens_BND = tokens_BND + table_1ND
        tokens_BND = tokens_BND + self.attn(self.norm1(tokens_BND), relative)
        return tokens_BND + self.mlp(self.norm2(tokens_BND))


class ScratchViT(nn.Module):
    """The ViT of the paper review; also used to compare position embeddings.

    Linear layers have torch's default initialization; the class token is drawn from U[0, 1).

    Args:
        img_size: image size in pixels, or (height, width).
        patch_size: side of a patch in pixels; must divide both sides of the image.
        in_chans: number of image channels.
        num_classes: K; 0 for no head.
        embed_dim: D.
        depth: number of blocks.
        num_heads: number of attention heads; must divide D.
        mlp_ratio: hidden width of an MLP as a multiple of D.
        position: one of `position_embeddings.POSITION_KINDS`.
        where: one of `position_embeddings.POSITION_LOCATIONS`; None for the default of `position`.
            With "every_layer", each block, including the first, adds its own position embeddings to
            its input, and the stem adds none. With "every_layer_shared" all blocks share one set;
            for the fixed "sinusoidal" table this makes no difference.
        drop_rate: dropout rate in the head.
        attn_drop_rate: dropout rate on attention weights.
    Raises: ValueError for values that conflict.
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
        self.where = resolve_location(position, where)
        if embed_dim % num_heads:
            raise ValueError(
                f"num_heads: {num_heads} does not divide embed_dim={embed_dim}; change one of them"
            )
        self.in_chans, self.drop_rate = in_chans, drop_rate
        self.num_features = self.embed_dim = self.head_hidden_size = embed_dim
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.rand(1, 1, embed_dim))
        block_args = (embed_dim, num_heads, int(embed_dim * mlp_ratio), attn_drop_rate)
        self.blocks = nn.ModuleList(_Block(*block_args) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-5)
        self.reset_classifier(num_classes)
        for module in (self, *self.blocks):
            has_positions = (module is self) != (self.where == "every_layer")
            add_position_embedding(
                module,
                position if has_positions else "none",
                grid=self.patch_embed.grid_size,
                width=embed_dim,
                head_width=embed_dim // num_heads,
            )

    def forward_features(self, images_BCHW: Tensor) -> Tensor:
        """Compute all tokens after the last LayerNorm: (B, N, D)."""
        patches_BND = self.patch_embed(images_BCHW)
        class_tokens_B1D = self.cls_token.expand(patches_BND.shape[0], -1, -1)
        tokens_BND = torch.cat([class_tokens_B1D, patches_BND], dim=1)
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
        """Compute logits (B, K); with `pre_logits` or zero classes, the class token (B, D)."""
        if pre_logits or not self.num_classes:
            return tokens_BND[:, 0]
        return self.head(tokens_BND)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute logits (B, K) for images of size `img_size`."""
        return self.forward_head(self.forward_features(images_BCHW))

    def get_classifier(self) -> nn.Module:
        """Return the whole head; `zero_head` sets its last linear layer to zero."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head, on the same device; only class-token pooling is supported."""
        assert global_pool in (None, "token")
        self.num_classes = num_classes
        self.head: nn.Module = (
            _Head(self.embed_dim, num_classes, self.drop_rate) if num_classes else nn.Identity()
        ).to(self.cls_token)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn activation checkpointing of the blocks on or off."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay.

        These are the class token and all learned position embeddings.
        """
        names = [name for name, _ in self.named_parameters()]
        return {name for name in names if "pos_embed" in name.split(".") or name == "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's parameter groups: stem (with shared position embeddings), then blocks."""
        blocks = r"^blocks\.(\d+)"
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": blocks if coarse else [(blocks, None), (r"^norm", (99999,))],
        }


class _Head(nn.Module):
    """Linear, GELU and dropout on all tokens; then LayerNorm over the class token's logits.

    If the linear layer is initialized to zero, the input of the LayerNorm is GELU(0) = 0 and its
    output is its bias, 0: all logits are 0 and the first loss is ln K. The LayerNorm then divides
    by sqrt(eps), so the first gradient of the linear layer is about 300 times as large as without a
    LayerNorm.
    """

    def __init__(self, width: int, num_classes: int, drop_rate: float) -> None:
        super().__init__()
        self.fc = nn.Linear(width, num_classes)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop_rate)
        self.norm = nn.LayerNorm(num_classes, eps=1e-5)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        outputs_BNK = self.drop(self.act(self.fc(tokens_BND)))
        return self.norm(outputs_BNK[:, 0])


def _checkpoint_filter_fn(state: Mapping[str, Tensor], model: ScratchViT) -> dict[str, Tensor]:
    """Resize position embeddings from another image size so that timm can load the weights."""
    own, fitted = model.state_dict(), {}
    for name, tensor in state.items():
        if name not in own or own[name].shape == tensor.shape:
            fitted[name] = tensor
        elif not name.startswith("head."):  # timm keeps the new head if K differs
            fitted[name] = resize_position_embedding(name, tensor, model.patch_embed.grid_size)
    return fitted


@register_model
def vit_scratch_large_patch8_32(pretrained: bool = False, **kwargs: Any) -> ScratchViT:
    """`ScratchViT` for 32 px images, 8 px patches: 302,520,350 parameters, 5.15 GMACs at K = 10."""
    return build_model_with_cfg(
        ScratchViT,
        "vit_scratch_large_patch8_32",
        pretrained,
        pretrained_filter_fn=_checkpoint_filter_fn,
        **kwargs,
    )
