"""Google's ViT checkpoints (.npz) in the layout of timm's VisionTransformer."""

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

__all__ = ["config_of", "convert"]

PREFIXES = ("opt/target/", "params/")
BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/(.+)")


def convert(
    tensors: Mapping[str, Tensor], *, source: str, args: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Translate a checkpoint; every size is read off the tensors.

    Both of flax's numberings are understood (`LayerNorm_2`, `MlpBlock_3` before linen,
    `LayerNorm_1`, `MlpBlock_0` since). Google's GELU is the tanh approximation and its average
    pooling comes after the last LayerNorm; both go into the arguments, so that a saved folder
    means the same to plain timm.

    Args:
        tensors: the .npz, name to array.
        source: how the user wrote it, for messages.
        args: `architecture` (default vit_base_patch16_224, resized) and `pre_logits` (True keeps
            the tanh layer before the head; the default drops it, as the paper does to fine-tune).
    Returns: timm's architecture, its keyword arguments, and the state dict.
    Raises: WeightsError if the file is not such a checkpoint, or is of a hybrid that should keep
        a layer which it does not have.
    Source: vision_transformer, vit_jax/models_vit.py and vit_jax/checkpoint.py.
    """
    prefix = next((p for p in PREFIXES if f"{p}embedding/kernel" in tensors), "")
    flat = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    hybrid = "conv_root/kernel" in flat  # it begins with a ResNet
    if hybrid and args.get("pre_logits"):
        raise WeightsError(
            f"{source}: a hybrid of ResNet and ViT, which keeps no layer before its head; leave "
            f"model.args.pre_logits out",
            code="weights.unsupported",
        )
    backbone: dict[str, Any] = {}
    step = 1
    try:
        state, num_heads = _state(flat)
        if hybrid:
            convolutions, backbone, step = convert_backbone(flat)
            state |= convolutions
        if args.get("pre_logits"):
            state |= _dense(flat, "pre_logits", "fc_norm.fc")
        model_args = _arguments(state, num_heads, step) | backbone
    except KeyError as error:
        raise WeightsError(
            f"{source}: not a ViT checkpoint of Google's, it has no tensor {error}; for other "
            f"networks give timm's .safetensors",
            code="weights.missing_tensors",
        ) from error
    except (RuntimeError, IndexError, ValueError) as error:  # a tensor of another shape
        raise WeightsError(
            f"{source}: not a ViT checkpoint of Google's, a tensor has another shape "
            f"({str(error).splitlines()[0]}); get it again",
            code="weights.wrong_shape",
        ) from error
    architecture = args.get("architecture") or ("vit_hybrid" if hybrid else "vit_base_patch16_224")
    if args.get("pre_logits"):
        architecture = "vit_representation"
        model_args["representation_size"] = state["fc_norm.fc.weight"].shape[0]
    return architecture, model_args, state


def config_of(
    architecture: str, model_args: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The pretrained configuration of a checkpoint: Google's preprocessing, the file's own size.

    Source: vision_transformer, vit_jax/input_pipeline.py (whole image, bilinear, [-1, 1]).
    """
    config = registered_config(architecture)
    for key in ("tag", "license"):  # of timm's own file
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


def _arguments(state: Mapping[str, Tensor], num_heads: int, step: int) -> dict[str, Any]:
    """timm's keyword arguments; `step`: pixels of the image behind one that a patch reads."""
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
            args["img_size"] = [grid[0] * patch_size[0] * step, grid[1] * patch_size[1] * step]
    return args


def _state(flat: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    state = {
        "patch_embed.proj.weight": flat["embedding/kernel"].permute(3, 2, 0, 1),  # hwCD -> DChw
        "patch_embed.proj.bias": flat["embedding/bias"],
        **_norm(flat, "Transformer/encoder_norm", "norm"),
    }
    if "cls" in flat:
        state["cls_token"] = flat["cls"]
    if "Transformer/posembed_input/pos_embedding" in flat:
        state["pos_embed"] = flat["Transformer/posembed_input/pos_embedding"]
    if "head/kernel" in flat:
        state |= _dense(flat, "head", "head")
    blocks: dict[int, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        if match := BLOCK.fullmatch(name):
            blocks.setdefault(int(match[1]), {})[match[2]] = tensor
    if not blocks:
        raise KeyError("Transformer/encoderblock_0")
    num_heads = 0
    for index, block in blocks.items():
        converted, num_heads = _block(block, f"blocks.{index}")
        state |= converted
    return {name: tensor.contiguous() for name, tensor in state.items()}, num_heads


def _block(block: Mapping[str, Tensor], target: str) -> tuple[dict[str, Tensor], int]:
    """One encoder block; its parts are told apart by kind and order, not by flax's numbers."""
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
        **_norm(block, norms[0], f"{target}.norm1"),
        **_norm(block, norms[1], f"{target}.norm2"),
        f"{target}.attn.qkv.weight": torch.cat([kernel.flatten(1).T for kernel in kernels_DAE]),
        f"{target}.attn.qkv.bias": torch.cat(
            [block[f"{attention}/{role}/bias"].flatten() for role in roles]
        ),
        f"{target}.attn.proj.weight": out_AED.flatten(0, 1).T,
        f"{target}.attn.proj.bias": block[f"{attention}/out/bias"],
        **_dense(block, f"{mlp}/Dense_0", f"{target}.mlp.fc1"),
        **_dense(block, f"{mlp}/Dense_1", f"{target}.mlp.fc2"),
    }, kernels_DAE[0].shape[1]


def _dense(tensors: Mapping[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    weight = tensors[f"{source}/kernel"].T.contiguous()
    return {f"{target}.weight": weight, f"{target}.bias": tensors[f"{source}/bias"]}


def _norm(tensors: Mapping[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    return {
        f"{target}.weight": tensors[f"{source}/scale"],
        f"{target}.bias": tensors[f"{source}/bias"],
    }
