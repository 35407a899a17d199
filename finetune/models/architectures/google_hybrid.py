"""Google's ResNet-ViT hybrids, registered with timm, and conversion of their ResNet weights."""

# C channels, D width, h w kernel in pixels

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.layers import GroupNormAct, StdConv2dSame
from timm.layers.padding import pad_same
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from timm.models.vision_transformer_hybrid import HybridEmbed
from torch import Tensor

__all__ = ["convert_backbone", "vit_hybrid"]

default_cfgs = generate_default_cfgs(
    {
        "vit_hybrid": {
            "input_size": (3, 224, 224),
            "fixed_input_size": True,
            "first_conv": "patch_embed.backbone.stem.conv",
            "classifier": "head",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        }
    }
)
_UNIT_PATTERN = re.compile(r"block(\d+)/unit(\d+)/(conv|gn)(\d|_proj)/(kernel|scale|bias)")


class _StandardizedConv(StdConv2dSame):
    """Standardized convolution that adds eps to the weights' std; timm adds it to the variance."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        std = self.weight.std(dim=(1, 2, 3), keepdim=True, correction=0)
        weight = (self.weight - mean) / (std + 1e-5)
        if self.same_pad:
            x = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@register_model
def vit_hybrid(
    pretrained: bool = False,
    *,
    layers: Sequence[int] = (3, 4, 9),
    channels: Sequence[int] = (256, 512, 1024),
    stem_chs: int = 64,
    **kwargs: Any,
) -> VisionTransformer:
    """ViT on the feature map of a ResNet with group norm, as in Google's checkpoints.

    The defaults are the ResNet of R50+ViT-B/16; R26+ViT-S/32 has layers (2, 2, 2, 2). timm's
    hybrids (vit_base_r50_s16_224 and others) differ in two small constants.

    Args:
        layers: number of bottleneck blocks in each stage.
        channels: output channels of each stage; inside its bottleneck blocks, a quarter as many.
        stem_chs: output channels of the stem.
    Source: vision_transformer, vit_jax/models_resnet.py.
    """
    backbone = ResNetV2(
        layers=list(layers),
        channels=tuple(channels),
        stem_chs=stem_chs,
        num_classes=0,
        global_pool="",
        preact=False,
        stem_type="same",
        conv_layer=_StandardizedConv,
        norm_layer=partial(GroupNormAct, num_groups=32, eps=1e-6),
    )
    kwargs.setdefault("patch_size", 1)
    return build_model_with_cfg(
        VisionTransformer,
        "vit_hybrid",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        embed_layer=partial(HybridEmbed, backbone=backbone),
        **kwargs,
    )


def convert_backbone(
    flat_params: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Convert the ResNet of a checkpoint to timm's layout; infer all sizes from the tensors.

    Args:
        flat_params: the checkpoint's tensors by name, without an `opt/target/` or `params/` prefix.
    Returns: the state dict, the keyword arguments of `vit_hybrid`, and the stride of the feature
        map in pixels.
    Raises: KeyError for a missing tensor.
    Source: vision_transformer, vit_jax/models_resnet.py.
    """
    root, top = "patch_embed.backbone", "patch_embed.backbone.stem"
    state = {
        f"{top}.conv.weight": _to_conv_weight(flat_params["conv_root/kernel"]),
        f"{top}.norm.weight": flat_params["gn_root/scale"].flatten(),
        f"{top}.norm.bias": flat_params["gn_root/bias"].flatten(),
    }
    layers: dict[int, int] = {}
    channels: dict[int, int] = {}
    for name, tensor in flat_params.items():
        match = _UNIT_PATTERN.fullmatch(name)
        if match is None:
            continue
        stage, unit, number = int(match[1]), int(match[2]), match[4]
        layers[stage] = max(layers.get(stage, 0), unit)
        kind = "conv" if match[3] == "conv" else "norm"
        part = f"downsample.{kind}" if number == "_proj" else f"{kind}{number}"
        suffix = "bias" if match[5] == "bias" else "weight"
        value = _to_conv_weight(tensor) if kind == "conv" else tensor.flatten()
        state[f"{root}.stages.{stage - 1}.blocks.{unit - 1}.{part}.{suffix}"] = value
        if match[3] + number == "conv3":
            channels[stage] = value.shape[0]
    if not layers:
        raise KeyError("block1/unit1/conv1/kernel")
    args = {
        "layers": [layers[stage] for stage in sorted(layers)],
        "channels": [channels[stage] for stage in sorted(layers)],
        "stem_chs": state[f"{top}.conv.weight"].shape[0],
    }
    return state, args, 4 * 2 ** (len(layers) - 1)


def _to_conv_weight(kernel_hwCD: Tensor) -> Tensor:
    return kernel_hwCD.permute(3, 2, 0, 1).contiguous()
