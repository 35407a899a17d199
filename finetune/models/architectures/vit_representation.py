"""A ViT with the pre-training representation layer (linear + tanh), registered with timm."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

__all__ = ["vit_representation"]

default_cfgs = generate_default_cfgs(
    {
        "vit_representation": {
            "input_size": (3, 224, 224),
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        }
    }
)


def _create_vit(*, representation_size: int, **kwargs: Any) -> VisionTransformer:
    num_classes = kwargs.pop("num_classes", 1000)
    model = VisionTransformer(num_classes=0, **{"fc_norm": False, **kwargs})
    model.fc_norm = nn.Sequential(
        OrderedDict(fc=nn.Linear(model.embed_dim, representation_size), act=nn.Tanh())
    )
    model.num_classes = num_classes
    model.head_hidden_size = representation_size
    if num_classes:
        model.head = nn.Linear(representation_size, num_classes)
    return model


@register_model
def vit_representation(
    pretrained: bool = False, *, representation_size: int = 768, **kwargs: Any
) -> VisionTransformer:
    """ViT with `Linear + tanh` between the pooled token and the classifier.

    timm's VisionTransformer does not have this layer, because fine-tuning usually drops it. Here
    the layer takes the place of `fc_norm`, the optional norm after pooling, so timm's forward(),
    checkpointing and get_classifier() work unchanged. To load a saved model of this architecture in
    timm, run `import finetune.models` first.

    Args:
        representation_size: output width of the layer, which is the input width of the head.
    Source: vision_transformer, vit_jax/models_vit.py, representation_size.
    """
    return build_model_with_cfg(
        _create_vit,
        "vit_representation",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        representation_size=representation_size,
        **kwargs,
    )
