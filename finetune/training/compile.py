"""Choose how a device computes a network: attention kernel, memory format, torch.compile.

The choices depend on the recipe and the device only, never on timing or weights, so a resumed run
computes exactly like the original run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from finetune.log import logger
from finetune.models.fast_layers import limit_last_block_to_class_token, use_unfused_attention
from finetune.models.summary import summarize_model

__all__ = ["choose_kernels", "missing_compile_dependency", "should_compile", "training_flops"]

# Shorter training does not pay for compilation. On a CPU, compilation takes 30 to 60 seconds and
# makes the steps of ViT-Ti/16 at 224 pixels 5 % faster (small networks gain nothing); on an H100,
# it takes 25 seconds for ViT-B/16 and makes its steps 29 % faster.
MIN_TRAINING_SECONDS = {"cpu": 900.0, "cuda": 120.0}
_FLOPS_PER_SECOND = {"cpu": 3e11, "cuda": 3e14}  # in bf16: two server cores, a recent GPU


def choose_kernels(
    network: nn.Module, *, device: torch.device, dtype: torch.dtype, sharded: bool = False
) -> None:
    """Switch a network to the fastest kernels that give the same logits and gradients.

    Tokens that the classifier does not read are not computed: see
    `limit_last_block_to_class_token`. Attention uses timm's fused kernel, except on a CPU in bf16:
    there the fused kernel is 1.3 to 2.1 times slower than plain matrix products (forward and
    backward, 65 to 1,025 tokens). In float32 it is as fast or faster, and needs less memory.
    Convolutional networks use channels-last memory: GPU matrix units need it; for a CPU see
    `_is_faster_with_channels_last`.

    Args:
        network: float32 network, before it is copied for the EMA or wrapped.
        sharded: True with FSDP, which gathers a layer's weights only when that layer is called;
            then only the attention kernel is chosen.
    """
    if not sharded:
        limit_last_block_to_class_token(network)
        # Most layers must be convolutions: a ViT has one, the patch embedding.
        layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        is_convolutional = 2 * sum(isinstance(layer, nn.Conv2d) for layer in layers) > len(layers)
        if is_convolutional and (device.type != "cpu" or _is_faster_with_channels_last(network)):
            network.to(memory_format=torch.channels_last)
    if device.type == "cpu" and dtype == torch.bfloat16:
        use_unfused_attention(network)


def _is_faster_with_channels_last(network: nn.Module) -> bool:
    """True if a CPU computes a convolutional network faster, and correctly, with channels last.

    Seconds per training step, channels first, then last, on one core of a 2024 EPYC (torch 2.14;
    fastest of three steps, 8 or 16 images of 64 to 128 pixels):

        float32: EfficientNet-Lite0 0.41, 0.25; ResNet-18 0.27, 0.24; ResNet-26 0.37, 0.25;
            ResNetV2-50 0.42, 0.28; MobileNetV4-S 0.13, 0.09; ConvNeXt-Atto 0.122, 0.126
        bf16, same order: 0.46, 0.47; 0.16, 0.15; 0.16, 0.14; 0.19, 0.18; 0.16, 0.14; 0.122, 0.115
        ViT-B with a ResNet-50 stem: float32 1.17, 1.15; bf16 0.60, 0.64

    So hybrids stay channels first. Networks with a strided 1x1 convolution whose input channels are
    no multiple of 16 stay channels first too: oneDNN writes past its buffers there. For example,
    RepVGG's stem has 3 input channels, and its backward pass ends in a segmentation fault.
    """
    return not isinstance(network, VisionTransformer) and not any(
        isinstance(layer, nn.Conv2d)
        and max(layer.kernel_size) == 1
        and max(layer.stride) > 1
        and layer.in_channels % 16
        for layer in network.modules()
    )


def training_flops(network: nn.Module, image_size: tuple[int, int]) -> int:
    """Count the FLOPs of a training step for one image; a multiply-accumulate counts as two.

    Args:
        network: network on its device; it is set to evaluation mode.
        image_size: (height, width).
    Returns: three times the FLOPs of the forward pass, since the backward pass computes two
        gradients.
    """
    return 3 * 2 * int(summarize_model(network.eval(), image_size)["macs"])


def should_compile(
    setting: bool | str,
    *,
    device: torch.device,
    sharded: bool,
    num_images: int,
    count_flops: Callable[[], int],
) -> bool:
    """Decide whether to compile the network.

    Args:
        setting: the value of `model.compile`: true, false, or "auto" (compile if the run is long
            enough to save time).
        sharded: True with FSDP, for which "auto" does not compile.
        num_images: number of images that each process trains on, over all steps.
        count_flops: function that returns the training FLOPs of one image.
    """
    if not isinstance(setting, str):
        return setting
    flops_per_second = _FLOPS_PER_SECOND.get(device.type)
    if (
        flops_per_second is None
        or sharded
        or num_images * count_flops() < MIN_TRAINING_SECONDS[device.type] * flops_per_second
    ):
        return False
    if missing := missing_compile_dependency(device):
        logger.warning(
            f"model.compile: not used, because {missing} is not installed; install it to speed up "
            "a run of this length"
        )
    return not missing


def missing_compile_dependency(device: torch.device) -> str | None:
    """Return the first missing dependency of torch.compile, or None."""
    if device.type == "cpu":
        return None if shutil.which(os.environ.get("CXX", "g++")) else "a C++ compiler (g++)"
    if importlib.util.find_spec("triton") is None:
        return "triton (it comes with torch's wheels for CUDA)"
    # triton builds the launchers of its kernels as a Python extension module
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"a C compiler ({' or '.join(compilers)})"
    headers = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    return None if headers.exists() else f"{headers} (python3-dev)"
