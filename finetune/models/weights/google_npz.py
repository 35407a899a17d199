"""Convert Google's ViT checkpoints (.npz) to the layout of timm's VisionTransformer."""

# D width, h w patch in pixels, C channels, A attention heads, E width of one head

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from finetune.errors import WeightsError
from finetune.models.architectures.google_hybrid import convert_backbone
from finetune.models.weights.resize_posemb import square_grid
from finetune.models.weights.timm_config import registered_config

__all__ = ["convert_checkpoint", "google_pretrained_config"]

PARAM_PREFIXES = ("", "opt/target/", "params/")
BLOCK_PATTERN = re.compile(r"Transformer/encoderblock_(\d+)/(.+)")


def convert_checkpoint(
    tensors: Mapping[str, Tensor], *, source: str, args: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Convert a checkpoint to timm's names and layout; infer all sizes from the tensors.

    Supports both ways in which flax numbers modules (`LayerNorm_2`, `MlpBlock_3` before linen;
    `LayerNorm_1`, `MlpBlock_0` in linen). Google's models use the tanh approximation of GELU and,
    if they have no class token, average pooling after the last LayerNorm. Both become keyword
    arguments of timm's network, so plain timm gets the same logits from a saved model.

    Args:
        tensors: content of the .npz, {name: array}.
        source: name of the weights as the user gave it, for messages.
        args: `architecture` (default vit_base_patch16_224, with sizes from the tensors) and
            `pre_logits` (True keeps the tanh layer before the head; by default it is dropped, as
            the paper does for fine-tuning).
    Returns: timm's architecture name, its keyword arguments, and the state dict.
    Raises: WeightsError if the file is not a ViT checkpoint from Google, or if `pre_logits` is set
        for a ResNet-ViT hybrid, which has no such layer.
    Source: vision_transformer, vit_jax/models_vit.py and vit_jax/checkpoint.py.
    """
    prefixes = [p for p in PARAM_PREFIXES if f"{p}embedding/kernel" in tensors]
    if len(prefixes) > 1:
        raise WeightsError(
            f"{source}: has several sets of weights (prefixes "
            f"{' and '.join(map(repr, prefixes))}); keep one of them",
            code="weights.other_names",
        )
    prefix = prefixes[0] if prefixes else ""
    flat_params = {
        name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)
    }
    hybrid = "conv_root/kernel" in flat_params  # it starts with a ResNet
    if hybrid and args.get("pre_logits"):
        raise WeightsError(
            f"{source}: model.args.pre_logits: a ResNet-ViT hybrid has no tanh layer before its "
            f"head; remove the key",
            code="weights.unsupported",
        )
    backbone: dict[str, Any] = {}
    stride = 1
    try:
        state, num_heads = _convert_state_dict(flat_params)
        if hybrid:
            convolutions, backbone, stride = convert_backbone(flat_params)
            state |= convolutions
        if args.get("pre_logits"):
            state |= _convert_dense(flat_params, "pre_logits", "fc_norm.fc")
        model_args = _infer_model_args(state, num_heads, stride) | backbone
    except KeyError as error:
        raise WeightsError(
            f"{source}: not a ViT checkpoint from Google: the tensor {error} is missing; for other "
            f"networks use timm's .safetensors",
            code="weights.missing_tensors",
        ) from error
    except (RuntimeError, IndexError, ValueError) as error:  # a tensor has an unexpected shape
        raise WeightsError(
            f"{source}: not a ViT checkpoint from Google: a tensor has an unexpected shape "
            f"({str(error).splitlines()[0]}); download it again",
            code="weights.wrong_shape",
        ) from error
    architecture = args.get("architecture") or ("vit_hybrid" if hybrid else "vit_base_patch16_224")
    if args.get("pre_logits"):
        architecture = "vit_representation"
        model_args["representation_size"] = state["fc_norm.fc.weight"].shape[0]
    return architecture, model_args, state


def google_pretrained_config(
    architecture: str, model_args: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return timm's pretrained configuration with Google's preprocessing and image size.

    Source: vision_transformer, vit_jax/input_pipeline.py (whole image, bilinear, [-1, 1]).
    """
    config = registered_config(architecture)
    for key in ("tag", "license"):  # they describe timm's own weights file
        config.pop(key, None)
    size = model_args.get("img_size")
    if size is not None:
        config["input_size"] = (3, *size)
    config |= {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "bilinear"}
    config |= {"crop_pct": 1.0, "crop_mode": "squash", "fixed_input_size": True}
    config["num_classes"] = state["head.weight"].shape[0] if "head.weight" in state else 0
    config["classifier"] = "head"
    if architecture != "vit_hybrid":
        config["first_conv"] = "patch_embed.proj"
    return config


def _infer_model_args(
    state: Mapping[str, Tensor], num_heads: int, backbone_stride: int
) -> dict[str, Any]:
    """Infer timm's keyword arguments; `backbone_stride` is the ResNet's stride, 1 without one."""
    width, _, *patch_size = state["patch_embed.proj.weight"].shape
    args: dict[str, Any] = {
        "patch_size": patch_size[0] if patch_size[0] == patch_size[1] else patch_size,
        "embed_dim": width,
        "depth": len([name for name in state if name.endswith("attn.qkv.weight")]),
        "num_heads": num_heads,
        "mlp_ratio": state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        "act_layer": "gelu_tanh",
    }
    if "cls_token" not in state:
        args |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    if "pos_embed" not in state:
        args["pos_embed"] = "none"
    else:
        grid = square_grid(state["pos_embed"].shape[1] - ("cls_token" in state))
        if grid is not None:
            args["img_size"] = [
                grid[0] * patch_size[0] * backbone_stride,
                grid[1] * patch_size[1] * backbone_stride,
            ]
    return args


def _convert_state_dict(flat_params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    state = {
        # hwCD -> DChw
        "patch_embed.proj.weight": flat_params["embedding/kernel"].permute(3, 2, 0, 1),
        "patch_embed.proj.bias": flat_params["embedding/bias"],
        **_convert_norm(flat_params, "Transformer/encoder_norm", "norm"),
    }
    if "cls" in flat_params:
        state["cls_token"] = flat_params["cls"]
    if "Transformer/posembed_input/pos_embedding" in flat_params:
        state["pos_embed"] = flat_params["Transformer/posembed_input/pos_embedding"]
    if "head/kernel" in flat_params:
        state |= _convert_dense(flat_params, "head", "head")
    blocks: dict[int, dict[str, Tensor]] = {}
    for name, tensor in flat_params.items():
        if match := BLOCK_PATTERN.fullmatch(name):
            blocks.setdefault(int(match[1]), {})[match[2]] = tensor
    if not blocks:
        raise KeyError("Transformer/encoderblock_0")
    num_heads = 0
    for index, block in blocks.items():
        converted, num_heads = _convert_block(block, f"blocks.{index}")
        state |= converted
    return {name: tensor.contiguous() for name, tensor in state.items()}, num_heads


def _convert_block(block: Mapping[str, Tensor], target: str) -> tuple[dict[str, Tensor], int]:
    """Convert one encoder block; identify its modules by type and order, not by flax's numbers.

    Returns: the state dict of the block, and its number of attention heads.
    """
    parts = sorted({name.split("/")[0] for name in block})
    norms = [part for part in parts if part.startswith("LayerNorm_")]
    attention = next((p for p in parts if p.startswith("MultiHeadDotProductAttention_")), "")
    mlp = next((p for p in parts if p.startswith("MlpBlock_")), "MlpBlock_0")
    if len(norms) != 2 or not attention:
        raise KeyError("MultiHeadDotProductAttention or LayerNorm of an encoder block")
    roles = ("query", "key", "value")
    kernels_DAE = [block[f"{attention}/{role}/kernel"] for role in roles]
    out_AED = block[f"{attention}/out/kernel"]
    return {
        **_convert_norm(block, norms[0], f"{target}.norm1"),
        **_convert_norm(block, norms[1], f"{target}.norm2"),
        f"{target}.attn.qkv.weight": torch.cat([kernel.flatten(1).T for kernel in kernels_DAE]),
        f"{target}.attn.qkv.bias": torch.cat(
            [block[f"{attention}/{role}/bias"].flatten() for role in roles]
        ),
        f"{target}.attn.proj.weight": out_AED.flatten(0, 1).T,
        f"{target}.attn.proj.bias": block[f"{attention}/out/bias"],
        **_convert_dense(block, f"{mlp}/Dense_0", f"{target}.mlp.fc1"),
        **_convert_dense(block, f"{mlp}/Dense_1", f"{target}.mlp.fc2"),
    }, kernels_DAE[0].shape[1]


def _convert_dense(tensors: Mapping[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    weight = tensors[f"{source}/kernel"].T.contiguous()
    return {f"{target}.weight": weight, f"{target}.bias": tensors[f"{source}/bias"]}


def _convert_norm(tensors: Mapping[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    return {
        f"{target}.weight": tensors[f"{source}/scale"],
        f"{target}.bias": tensors[f"{source}/bias"],
    }
