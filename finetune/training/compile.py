"""Choose how a device computes a network: which attention, which tokens, compiled or not.

All follow from the recipe and the device alone, never from a clock or from the weights: a resumed
run computes as the run that it continues.
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

from finetune.models.fast_blocks import compute_class_token, multiply_plainly
from finetune.models.profile import survey

__all__ = ["choose_kernels", "compiles", "training_operations"]

# Seconds of training that earn compiling back. It takes half a minute to a minute, and makes the
# steps of ViT-Ti/16 at 224 pixels 5 % faster on a CPU (of a small network's none); on an H100 it
# takes 25 seconds for ViT-B/16 and makes its steps 29 % faster.
LONG_SECONDS = {"cpu": 900.0, "cuda": 120.0}
_OPERATIONS_PER_SECOND = {"cpu": 3e11, "cuda": 3e14}  # in bf16: two server cores, a recent GPU


def choose_kernels(
    network: nn.Module, *, device: torch.device, dtype: torch.dtype, sharded: bool = False
) -> None:
    """Let a network compute the same logits and gradients in the fastest way.

    Nothing is computed that the classifier does not read: see `compute_class_token`. Attention is
    timm's fused kernel but on a CPU in bf16: there it is slower than plain products of matrices at
    every length from 65 tokens to 1,025, 1.3 to 2.1 times forward and backward; in float32 it is
    as fast or faster, and needs less memory. Networks that convolve have their channels last: a
    GPU's matrix units want them so, and for a CPU see `_is_faster_with_channels_last`.

    Args:
        network: in float32, neither copied nor wrapped yet.
        sharded: by FSDP, which brings a layer's weights to that layer's own call.
    """
    if not sharded:
        compute_class_token(network)
        # most layers convolve: more than the one that makes a ViT's patches
        layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        convolves = 2 * sum(isinstance(layer, nn.Conv2d) for layer in layers) > len(layers)
        if convolves and (device.type != "cpu" or _is_faster_with_channels_last(network)):
            network.to(memory_format=torch.channels_last)
    if device.type == "cpu" and dtype == torch.bfloat16:
        multiply_plainly(network)


def _is_faster_with_channels_last(network: nn.Module) -> bool:
    """True if a CPU computes a convolutional network faster, and rightly, with channels last.

    Seconds of a training step, channels first against last, on one core of an EPYC of 2024 (torch
    2.14; least of three steps, 8 or 16 images of 64 to 128 pixels):

        float32: EfficientNet-Lite0 0.41, 0.25; ResNet-18 0.27, 0.24; ResNet-26 0.37, 0.25;
            ResNetV2-50 0.42, 0.28; MobileNetV4-S 0.13, 0.09; ConvNeXt-Atto 0.122, 0.126
        bf16: 0.46, 0.47; 0.16, 0.15; 0.16, 0.14; 0.19, 0.18; 0.16, 0.14; 0.122, 0.115
        ViT-B with a ResNet-50 before it: float32 1.17, 1.15; bf16 0.60, 0.64

    Hence hybrids keep theirs first. So do networks in which a convolution of one pixel strides over
    channels that do not fill vectors of 16: there oneDNN writes past its buffers (3 of them, from
    the pixels to RepVGG's stem: the process dies of a segmentation fault in the backward pass).
    """
    return not isinstance(network, VisionTransformer) and not any(
        isinstance(layer, nn.Conv2d)
        and max(layer.kernel_size) == 1
        and max(layer.stride) > 1
        and layer.in_channels % 16
        for layer in network.modules()
    )


def training_operations(network: nn.Module, image_size: tuple[int, int]) -> int:
    """Count the operations of a training step for one image; two make a multiply-accumulate.

    Args:
        network: on its device; only its mode is changed.
        image_size: (height, width).
    Returns: three times the forward pass's: the backward pass makes two gradients.
    """
    return 3 * 2 * int(survey(network.eval(), image_size)["macs"])


def compiles(
    choice: bool | str,
    *,
    device: torch.device,
    sharded: bool,
    images: int,
    operations: Callable[[], int],
    notice: Callable[[str], None],
) -> bool:
    """Decide whether a run's network is compiled.

    Args:
        choice: of `model.compile`: true, false, or "auto": where a long run earns it back.
        sharded: by FSDP, whose network "auto" leaves alone.
        images: that each process of the run computes, over all its steps.
        operations: counts those of one image in training.
        notice: told why a long run is not compiled.
    """
    if not isinstance(choice, str):
        return choice
    rate = _OPERATIONS_PER_SECOND.get(device.type)
    if rate is None or sharded or images * operations() < LONG_SECONDS[device.type] * rate:
        return False
    if missing := _missing_to_compile(device):
        notice(
            f"model.compile: {missing} is not installed; with that a run of this length is "
            "somewhat faster"
        )
    return not missing


def _missing_to_compile(device: torch.device) -> str | None:
    """Name the first requirement of torch.compile that this machine lacks; None if it has all."""
    if device.type == "cpu":
        return None if shutil.which(os.environ.get("CXX", "g++")) else "a C++ compiler (g++)"
    if importlib.util.find_spec("triton") is None:
        return "triton (it comes with torch's wheels for CUDA)"
    # it builds what starts its kernels, as a module of Python's
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, names)):
        return f"a C compiler ({' or '.join(names)})"
    headers = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    return None if headers.exists() else f"{headers} (python3-dev)"
