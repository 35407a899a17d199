"""ShiftViT: a vision transformer with channel shifts in place of attention, registered with timm.

The argument `shift` selects a version. "paper" shifts one twelfth of the channels by one token in
each of the four directions. "document" reproduces the code of the Keras tutorial on ShiftViT. That
code shifts nothing: for each direction it zeroes one edge in twelve channels. In both versions, the
shortcut starts after the shift, and no norm precedes the pooling.
"""

# B batch, H W height and width of the token grid (of an image: in pixels), C channels, K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, DropPath, Mlp, PatchEmbed, calculate_drop_path_rates
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from torch import Tensor, nn

from finetune.errors import did_you_mean

__all__ = ["SHIFT_VERSIONS", "ShiftViT", "shift_channels", "shiftvit_tiny_patch4_48", "zero_edges"]

SHIFT_VERSIONS = ("document", "paper")
_EPS = 1e-5

default_cfgs = generate_default_cfgs(
    {
        "shiftvit_tiny_patch4_48": {
            "input_size": (3, 48, 48),
            "num_classes": 10,
            "first_conv": "patch_embed.proj",
            "classifier": "head.fc",
            "mean": (0.0, 0.0, 0.0),  # the network takes pixel values from 0 to 1
            "std": (1.0, 1.0, 1.0),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
        }
    }
)


def zero_edges(x_BHWC: Tensor, num_channels: int) -> Tensor:
    """Zero one edge in each of the first four channel groups, without shifting them.

    The zeroed edges of the four groups are the last column, the first column, the last row and the
    first row.

    Args:
        x_BHWC: (B, H, W, C), C at least 4 * num_channels.
        num_channels: number of channels in each group.
    Returns: (B, H, W, C), a new tensor.
    Source: Keras, code examples, "A Vision Transformer without Attention".
    """
    _, height, width, channels = x_BHWC.shape
    cleared_HWC = torch.zeros(height, width, channels, dtype=torch.bool, device=x_BHWC.device)
    edges = (cleared_HWC[:, -1:], cleared_HWC[:, :1], cleared_HWC[-1:], cleared_HWC[:1])
    for group, edge in enumerate(edges):
        edge[..., group * num_channels : (group + 1) * num_channels] = True
    return x_BHWC.masked_fill(cleared_HWC, 0)


def shift_channels(x_BHWC: Tensor, num_channels: int) -> Tensor:
    """Shift each of the first four channel groups by one token; fill the edge with zeros.

    The four groups shift left, right, up and down, in this order; other channels do not change.

    Args:
        x_BHWC: (B, H, W, C), C at least 4 * num_channels.
        num_channels: number of channels in each group.
    Returns: (B, H, W, C), a new tensor.
    Source: Wang et al., "When Shift Operation Meets Vision Transformer" (2022), section 3.
    """
    groups, rest = x_BHWC.split([4 * num_channels, x_BHWC.shape[-1] - 4 * num_channels], dim=-1)
    left, right, up, down = nn.functional.pad(groups, (0, 0, 1, 1, 1, 1)).chunk(4, dim=-1)
    shifted = (left[:, 1:-1, 2:], right[:, 1:-1, :-2], up[:, 2:, 1:-1], down[:, :-2, 1:-1])
    return torch.cat([*shifted, rest], dim=-1)


class _Block(nn.Module):
    """Shift, then a residual MLP; the shortcut starts after the shift."""

    def __init__(
        self,
        width: int,
        *,
        shift: str,
        num_div: int,
        mlp_ratio: float,
        drop_rate: float,
        drop_path_rate: float,
    ) -> None:
        super().__init__()
        self.shift = zero_edges if shift == "document" else shift_channels
        # in the tutorial's code, num_div is the number of channels per group, not of groups
        self.group_width = num_div if shift == "document" else width // num_div
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=nn.GELU, drop=drop_rate)
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else nn.Identity()

    def forward(self, x_BHWC: Tensor) -> Tensor:
        shifted = self.shift(x_BHWC, self.group_width)
        out: Tensor = shifted + self.drop_path(self.mlp(self.norm(shifted)))
        return out


class _PatchMerging(nn.Module):
    """Merge 2 x 2 tokens into one token of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.reduction = nn.Conv2d(width, 2 * width, kernel_size=2, stride=2, bias=False)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        height, width = x_BHWC.shape[1:3]
        x_BCHW = self.norm(x_BHWC).permute(0, 3, 1, 2)
        # pad odd sides with zeros on the right and at the bottom, like "same" padding in Keras
        x_BCHW = nn.functional.pad(x_BCHW, (0, width % 2, 0, height % 2))
        out: Tensor = self.reduction(x_BCHW).permute(0, 2, 3, 1)
        return out


class _Stage(nn.Module):
    """Patch merging, then blocks of constant width."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x_BHWC: Tensor) -> Tensor:
        x_BHWC = self.downsample(x_BHWC)
        if self.grad_checkpointing:
            return checkpoint_seq(self.blocks, x_BHWC)
        return self.blocks(x_BHWC)


class ShiftViT(nn.Module):
    """Stages of shift blocks, global average pooling, linear classifier.

    Args:
        shift: "document" (zero one edge of `num_div` channels per direction; drop path rates grow
            from 0 within each stage) or "paper" (shift C // num_div channels per direction; drop
            path rates grow from 0 over the whole network).
        num_classes: K; 0 for no classifier.
        in_chans: number of image channels.
        global_pool: "avg", or "" for no pooling.
        patch_size: side of a patch in pixels.
        embed_dim: C of the first stage; C doubles with each stage.
        depths: number of blocks in each stage.
        num_div: channels per group ("document") or number of groups ("paper"); see `shift`.
        mlp_ratio: hidden width of the MLP as a multiple of C.
        drop_rate: dropout rate before the classifier.
        proj_drop_rate: dropout rate after both layers of the MLP.
        drop_path_rate: stochastic depth rate of the last block.
    Raises: ValueError for an unknown `shift`, or if C cannot be split by `num_div`.
    Source: Wang et al., "When Shift Operation Meets Vision Transformer" (2022); Keras, code
        examples, "A Vision Transformer without Attention".
    """

    def __init__(
        self,
        shift: str = "document",
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        patch_size: int = 4,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 4, 8, 2),
        num_div: int = 12,
        mlp_ratio: float = 2.0,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        _check_channel_groups(shift, embed_dim, num_div)
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = embed_dim * 2 ** (len(depths) - 1)
        self.patch_embed = PatchEmbed(
            None, patch_size, in_chans, embed_dim, output_fmt="NHWC", strict_img_size=False
        )
        rates: Any = [calculate_drop_path_rates(drop_path_rate, depth) for depth in depths]
        if shift == "paper":
            rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        settings: dict[str, Any] = {"shift": shift, "num_div": num_div, "mlp_ratio": mlp_ratio}
        for number, paths in enumerate(rates):
            width = embed_dim * 2**number
            blocks = [
                _Block(width, **settings, drop_rate=proj_drop_rate, drop_path_rate=path)
                for path in paths
            ]
            stages.append(_Stage(_PatchMerging(width // 2) if number else nn.Identity(), blocks))
        self.stages = nn.Sequential(*stages)
        self.head = ClassifierHead(
            self.num_features, num_classes, global_pool, drop_rate, input_fmt="NHWC"
        )
        self.apply(_init_weights)

    def forward_features(self, images_BCHW: Tensor) -> Tensor:
        """Compute the output of the last stage, (B, H, W, C)."""
        out: Tensor = self.stages(self.patch_embed(images_BCHW))
        return out

    def forward_head(self, x_BHWC: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and compute logits (B, K); with `pre_logits`, the pooled features (B, C)."""
        out: Tensor = self.head(x_BHWC, pre_logits=pre_logits)
        return out

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute logits, (B, K)."""
        return self.forward_head(self.forward_features(images_BCHW))

    def get_classifier(self) -> nn.Module:
        """Return the layer that computes the logits."""
        classifier: nn.Module = self.head.fc
        return classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier with a new one; `global_pool=None` keeps the pooling."""
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)
        self.head.apply(_init_weights)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn activation checkpointing of the blocks on or off."""
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the regexes that group parameters by layer (timm's `group_matcher`).

        A patch-merging layer is grouped with the block that follows it.
        """
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^patch_embed", "blocks": r"^stages\.(\d+)" if coarse else fine}


def _check_channel_groups(shift: str, width: int, num_div: int) -> None:
    if shift not in SHIFT_VERSIONS:
        raise ValueError(
            f"shift: unknown '{shift}'{did_you_mean(shift, SHIFT_VERSIONS) or '.'} "
            f"Choose from {', '.join(SHIFT_VERSIONS)}"
        )
    if shift == "paper" and not 4 <= num_div <= width:
        raise ValueError(
            f"num_div: {num_div} is not between 4 and {width}: each of the four directions needs "
            f"at least one group, and each group at least one of the {width} channels"
        )
    # the tutorial's code splits the channels into groups of equal size
    if shift == "document" and (width < 4 * num_div or width % num_div):
        raise ValueError(
            f"embed_dim: {width} does not split into four or more groups of "
            f"num_div={num_div} channels; use a multiple of {num_div}, at least {4 * num_div}"
        )


def _init_weights(module: nn.Module) -> None:
    """Initialize like Keras by default: Xavier uniform weights, zero biases."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@register_model
def shiftvit_tiny_patch4_48(pretrained: bool = False, **kwargs: Any) -> ShiftViT:
    """`ShiftViT` for 48 px images: 11,690,602 parameters with 10 classes."""
    model: ShiftViT = build_model_with_cfg(
        ShiftViT, "shiftvit_tiny_patch4_48", pretrained, **kwargs
    )
    return model
