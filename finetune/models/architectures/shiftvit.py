"""ShiftViT: a vision transformer with shifted channels for attention, registered with timm.

`shift` picks a version: "paper" moves a twelfth of the channels by one pixel in each direction;
"document", the code of the widely read tutorial on it, clears an edge of twelve channels in each
direction and moves nothing. Both take the shortcut after the shift and have no norm before the
pooling.
"""

# B batch, H W tokens in a column and a row (pixels where an image is meant), C channels, K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, DropPath, Mlp, PatchEmbed, calculate_drop_path_rates
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from torch import Tensor, nn

from finetune.errors import RecipeError, nearest

__all__ = ["SHIFTS", "ShiftViT", "clear_edges", "shift_channels", "shiftvit_tiny_patch4_48"]

SHIFTS = ("document", "paper")
_EPS = 1e-5

default_cfgs = generate_default_cfgs(
    {
        "shiftvit_tiny_patch4_48": {
            "input_size": (3, 48, 48),
            "num_classes": 10,
            "first_conv": "patch_embed.proj",
            "classifier": "head.fc",
            "mean": (0.0, 0.0, 0.0),  # pixel values go in as they are, from 0 to 1
            "std": (1.0, 1.0, 1.0),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
        }
    }
)


def clear_edges(x_BHWC: Tensor, num_channels: int) -> Tensor:
    """Set an edge to zero in each of the first four groups of channels; nothing moves.

    The groups lose, in this order, their last column, first column, last row and first row.

    Args:
        x_BHWC: (B, H, W, C), C at least 4 * num_channels.
        num_channels: in each group.
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
    """Move each of the first four groups of channels by one place; zeros come in at the edge.

    The groups move, in this order, left, right, up and down; the other channels stay.

    Args:
        x_BHWC: (B, H, W, C), C at least 4 * num_channels.
        num_channels: in each group.
    Returns: (B, H, W, C), a new tensor.
    Source: Wang et al., "When Shift Operation Meets Vision Transformer" (2022), section 3.
    """
    moving, staying = x_BHWC.split([4 * num_channels, x_BHWC.shape[-1] - 4 * num_channels], dim=-1)
    left, right, up, down = nn.functional.pad(moving, (0, 0, 1, 1, 1, 1)).chunk(4, dim=-1)
    moved = (left[:, 1:-1, 2:], right[:, 1:-1, :-2], up[:, 2:, 1:-1], down[:, :-2, 1:-1])
    return torch.cat([*moved, staying], dim=-1)


class _Block(nn.Module):
    """Shift, then a residual MLP whose shortcut starts after the shift."""

    def __init__(
        self, width: int, *, shift: str, num_div: int, mlp_ratio: float, drop: float, path: float
    ) -> None:
        super().__init__()
        self.shift = clear_edges if shift == "document" else shift_channels
        # the document took the number of groups for the number of channels in one
        self.group_width = num_div if shift == "document" else width // num_div
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=nn.GELU, drop=drop)
        self.drop_path = DropPath(path) if path else nn.Identity()

    def forward(self, x_BHWC: Tensor) -> Tensor:
        shifted = self.shift(x_BHWC, self.group_width)
        out: Tensor = shifted + self.drop_path(self.mlp(self.norm(shifted)))
        return out


class _Merge(nn.Module):
    """Merge four tokens into one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.reduction = nn.Conv2d(width, 2 * width, kernel_size=2, stride=2, bias=False)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        height, width = x_BHWC.shape[1:3]
        x_BCHW = self.norm(x_BHWC).permute(0, 3, 1, 2)
        # zeros on the right and at the bottom of an odd side: "same" of the document's framework
        x_BCHW = nn.functional.pad(x_BCHW, (0, width % 2, 0, height % 2))
        out: Tensor = self.reduction(x_BCHW).permute(0, 2, 3, 1)
        return out


class _Stage(nn.Module):
    """Merging, then blocks of one width."""

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
    """Four stages of shift blocks, global average pooling, a linear classifier.

    Args:
        shift: "document" (an edge of `num_div` channels is cleared in each direction; drop path
            grows from 0 within each stage) or "paper" (C // num_div channels are moved in each
            direction; drop path grows over the whole depth).
        num_classes: K; 0 for none.
        in_chans: channels of an image.
        global_pool: "avg", or "" for none.
        patch_size: pixels, a side.
        embed_dim: C of the first stage; each further one has twice as many.
        depths: blocks of each stage.
        num_div: see `shift`.
        mlp_ratio: width of the hidden layer of the MLP, in C.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after both layers of the MLP.
        drop_path_rate: stochastic depth of the last block, per sample.
    Raises: RecipeError for an unknown `shift`, or fewer channels than the groups take.
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
        _check(shift, embed_dim, num_div)
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = embed_dim * 2 ** (len(depths) - 1)
        self.patch_embed = PatchEmbed(
            None, patch_size, in_chans, embed_dim, output_fmt="NHWC", strict_img_size=False
        )
        rates: Any = [calculate_drop_path_rates(drop_path_rate, depth) for depth in depths]
        if shift == "paper":  # over the whole depth, not from 0 in each stage
            rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages, self.feature_info = [], []
        settings: dict[str, Any] = {"shift": shift, "num_div": num_div, "mlp_ratio": mlp_ratio}
        for number, paths in enumerate(rates):
            width = embed_dim * 2**number
            blocks = [_Block(width, **settings, drop=proj_drop_rate, path=path) for path in paths]
            stages.append(_Stage(_Merge(width // 2) if number else nn.Identity(), blocks))
            place = {"num_chs": width, "reduction": patch_size * 2**number}
            self.feature_info.append({**place, "module": f"stages.{number}"})
        self.stages = nn.Sequential(*stages)
        self.head = ClassifierHead(
            self.num_features, num_classes, global_pool, drop_rate, input_fmt="NHWC"
        )
        self.apply(_initialise)

    def forward_features(self, images_BCHW: Tensor) -> Tensor:
        """Compute the tokens of the last stage, (B, H, W, C)."""
        out: Tensor = self.stages(self.patch_embed(images_BCHW))
        return out

    def forward_head(self, x_BHWC: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the tokens and classify them, (B, K); with `pre_logits` (B, C)."""
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
        """Replace the classifier by a new one; `global_pool` None keeps the pooling."""
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)
        self.head.apply(_initialise)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: none."""
        return set()

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the blocks in the backward pass."""
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's grouping into stem and blocks; merging belongs to the block after it."""
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^patch_embed", "blocks": r"^stages\.(\d+)" if coarse else fine}


def _check(shift: str, width: int, num_div: int) -> None:
    if shift not in SHIFTS:
        raise RecipeError(
            f"shift: unknown '{shift}'{nearest(shift, SHIFTS)} Choose from {', '.join(SHIFTS)}.",
            code="recipe.unknown_name",
        )
    if shift == "paper" and not 4 <= num_div <= width:
        raise RecipeError(
            f"num_div: {num_div} groups of {width} channels; the four directions need a group each "
            f"and a group needs a channel: use a number from 4 to {width}",
            code="recipe.conflict",
        )
    # the document's framework splits into equal groups, and refuses others
    if shift == "document" and (width < 4 * num_div or width % num_div):
        raise RecipeError(
            f"embed_dim: {width} is not four or more groups of num_div={num_div} channels; use a "
            f"multiple of {num_div} from {4 * num_div} on",
            code="recipe.conflict",
        )


def _initialise(module: nn.Module) -> None:
    """Draw weights as the document's framework does by default; biases are 0."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@register_model
def shiftvit_tiny_patch4_48(pretrained: bool = False, **kwargs: Any) -> ShiftViT:
    """`ShiftViT` for 48-pixel images: 11,690,602 parameters at 10 classes."""
    model: ShiftViT = build_model_with_cfg(
        ShiftViT, "shiftvit_tiny_patch4_48", pretrained, **kwargs
    )
    return model
