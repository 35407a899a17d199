"""Weights on the Hub that `finetune train SOURCE` names, and downloads with --download."""

from __future__ import annotations

import threading
from typing import NamedTuple

import timm
import torch
from huggingface_hub import HfApi, is_offline_mode

__all__ = ["SuggestedWeights", "is_on_hub", "suggest_weights"]

TIMEOUT_SECONDS = 2.0  # for the Hub's answer


class SuggestedWeights(NamedTuple):
    """Weights of timm on the Hub.

    Attributes:
        name: name of the weights, as in `model.name` of a recipe.
        megabytes: size of the download.
    """

    name: str
    megabytes: int


# DINOv2 has the best frozen features of its size, but needs images of at least 100 pixels: its
# patches are 14 pixels wide. The ConvNeXts are the best that a CPU can fine-tune in minutes.
_FOR_GPU = SuggestedWeights("vit_base_patch14_dinov2.lvd142m", 346)
_FOR_CPU = SuggestedWeights("vit_small_patch14_dinov2.lvd142m", 88)
_SMALL_FOR_GPU = SuggestedWeights("convnext_tiny.in12k_ft_in1k", 114)
_SMALL_FOR_CPU = SuggestedWeights("convnext_nano.in12k_ft_in1k", 62)
_SMALL_SIDE = 100  # pixels


def suggest_weights(median_side: int, device: torch.device) -> SuggestedWeights:
    """Return the weights that we expect to be best for images of this size on this device."""
    is_small = median_side < _SMALL_SIDE
    if device.type == "cpu":
        return _SMALL_FOR_CPU if is_small else _FOR_CPU
    return _SMALL_FOR_GPU if is_small else _FOR_GPU


def is_on_hub(weights: SuggestedWeights) -> bool:
    """True if the Hub answers within two seconds that it has the weights.

    Sends no request in offline mode.
    """
    if is_offline_mode():
        return False
    config = timm.get_pretrained_cfg(weights.name)
    assert config is not None
    repository = str(config.hf_hub_id)
    found: list[bool] = []

    def ask() -> None:
        try:
            HfApi().model_info(repository, timeout=TIMEOUT_SECONDS)
        except Exception:  # no connection, no such repository, no answer: nothing to suggest
            return
        found.append(True)

    # in a thread: the lookup of the host name has no timeout
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    return bool(found)
