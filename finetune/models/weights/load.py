"""Load weights into a network: resize position embeddings, then load strictly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import timm
from torch import Tensor, nn

from finetune.errors import WeightsError
from finetune.log import logger
from finetune.models.head import as_name_tuple, classifier_names
from finetune.models.weights.rename import match_by_shape
from finetune.models.weights.resize_posemb import resize_posemb, square_grid
from finetune.models.weights.timm_config import Weights

__all__ = ["load_weights", "token_stride"]


def load_weights(
    model: nn.Module,
    weights: Weights,
    create_args: Mapping[str, Any],
    *,
    posemb: str,
    keep_head: bool,
) -> tuple[nn.Module, str]:
    """Load all weights into the network, or raise an error.

    If names and shapes match once the position embeddings are resized, the state dict is loaded
    directly. Otherwise (another tensor layout, relative position tables of another size) timm
    converts it and loads it strictly.

    Args:
        weights: pretrained weights; if their `state` is None, the network is returned unchanged.
        create_args: keyword arguments that created `model`, including `num_classes`.
        posemb: method for position embeddings, one of RESIZE_METHODS.
        keep_head: True loads the pretrained head, False keeps the head of `model`.
    Returns: the network with the weights (a new one if timm loaded them), and how position
        embeddings were resized: "none" or one of RESIZE_METHODS.
    Raises: WeightsError with the names of the tensors that do not match.
    """
    if weights.state is None:
        return model, "none"
    state, own = dict(weights.state), model.state_dict()
    num_classes = create_args["num_classes"]
    if not keep_head or not num_classes:
        # replace the pretrained head with the new one, so that loading can be strict
        for module in classifier_names(model):
            for key in [k for k in state if k.startswith(f"{module}.")]:
                del state[key]
            state |= {k: v for k, v in own.items() if k.startswith(f"{module}.")}
    resized = _resize_position_embeddings(model, state, weights, posemb)
    if {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in own.items()}:
        model.load_state_dict(state)
        return model, resized
    config = {**(weights.pretrained_cfg or {}), "state_dict": state, "num_classes": num_classes}
    if not keep_head:
        config["label_offset"] = 0
    try:
        model = timm.create_model(
            weights.architecture, pretrained=True, pretrained_cfg=config, **create_args
        )
    except (RuntimeError, KeyError, ValueError, AssertionError, AttributeError) as error:
        head = classifier_names(model)
        raise _mismatch_error(state, own, weights, error, head_names=head) from error
    # pretrained_cfg would keep a second copy of the weights in memory
    cast(dict[str, Any], model.pretrained_cfg).pop("state_dict", None)
    after = model.state_dict()
    if resized != "none":
        after["pos_embed"].copy_(state["pos_embed"])  # overwrite what timm resized
    by_timm = _was_resized_by_timm(state, after, weights, posemb)
    return model, "timm" if by_timm else resized


def _was_resized_by_timm(
    state: Mapping[str, Tensor], loaded: Mapping[str, Tensor], weights: Weights, posemb: str
) -> bool:
    """True if timm resized position tables; warn if `posemb` asks for another method."""
    stems = as_name_tuple(weights.config.get("first_conv"))  # patch kernels are not position tables
    changed = [
        name
        for name, tensor in state.items()
        if name in loaded and tensor.shape != loaded[name].shape and not name.startswith(stems)
    ]
    if changed and posemb != "timm":
        logger.warning(
            "model.posemb: '%s' does not apply to %s of %s; timm's own resizing was used",
            posemb,
            changed[0],
            weights.architecture,
        )
    return bool(changed)


def _resize_position_embeddings(
    model: nn.Module, state: dict[str, Tensor], weights: Weights, method: str
) -> str:
    """Resize learned position embeddings in `state` to the network's grid, in place.

    Returns: the method used; "none" if nothing was resized.
    """
    source, target = state.get("pos_embed"), getattr(model, "pos_embed", None)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    grid = grid or getattr(model, "tokens_spatial_shape", None)  # Hiera
    if source is None or not isinstance(target, Tensor) or grid is None:
        return "none"
    num_prefix = target.shape[1] - grid[0] * grid[1]
    if source.ndim != 3 or target.ndim != 3 or num_prefix < 0 or source.shape[1] <= num_prefix:
        return "none"
    source_grid = _source_grid(model, weights, source.shape[1] - num_prefix)
    if source_grid == tuple(grid):
        return "none"
    state["pos_embed"] = resize_posemb(
        source, tuple(grid), method=method, num_prefix_tokens=num_prefix, source_grid=source_grid
    )
    return method


def _source_grid(model: nn.Module, weights: Weights, num_patches: int) -> tuple[int, int] | None:
    """Return the grid of the weights' position embeddings, (height, width).

    The grid follows from the image size in the configuration of the weights, if that gives
    `num_patches`. Otherwise it is a square, or None if `num_patches` is not a square number.
    """
    size, stride = weights.model_args.get("img_size"), token_stride(model)
    size = size or tuple(weights.config.get("input_size", ()))[-2:]
    if size and stride:
        height, width = (size, size) if isinstance(size, int) else size
        rows, columns = height / stride[0], width / stride[1]
        # the weights may have another patch size than the network
        name = "patch_embed.proj.weight"
        theirs, ours = (weights.state or {}).get(name), model.state_dict().get(name)
        if theirs is not None and ours is not None and theirs.ndim == ours.ndim == 4:
            rows = rows * ours.shape[2] / theirs.shape[2]
            columns = columns * ours.shape[3] / theirs.shape[3]
        if int(rows) * int(columns) == num_patches:
            return int(rows), int(columns)
    return square_grid(num_patches)


def _mismatch_error(
    state: Mapping[str, Tensor],
    model_state: Mapping[str, Tensor],
    weights: Weights,
    error: Exception,
    *,
    head_names: Collection[str],
) -> WeightsError:
    """Return an error that lists up to three tensors per kind of mismatch.

    If only the names differ, it suggests model.rename.
    """
    shapes = [k for k in model_state if k in state and state[k].shape != model_state[k].shape]
    kinds = {
        ("weights.wrong_shape", "tensors of another shape:"): [
            f"{k} {tuple(state[k].shape)} for {tuple(model_state[k].shape)}" for k in shapes
        ],
        ("weights.missing_tensors", "missing:"): [k for k in model_state if k not in state],
        ("weights.unknown_tensors", "not in this network:"): [
            k for k in state if k not in model_state
        ],
    }
    kinds = {kind: names for kind, names in kinds.items() if names}
    parts = [f"{len(names)} {text} {', '.join(names[:3])}" for (_, text), names in kinds.items()]
    detail = "; ".join(parts) or str(error).splitlines()[0]
    code = next((code for code, _ in kinds), "weights.wrong_shape")
    advice = "check model.name and model.args"
    if "rename" in weights.provenance:
        advice += ", and the patterns of model.rename"
    elif pairs := match_by_shape(weights.state or {}, model_state, head_names=head_names):
        code = "weights.other_names"
        renames = [f"{theirs} is {ours}" for theirs, ours in pairs if theirs != ours]
        advice = (
            f"all shapes match in order, only the names differ ({', '.join(renames[:3])}, …): "
            "rename them with model.rename, a mapping or file of `regex: replacement` lines"
        )
    return WeightsError(
        f"{weights.provenance.get('source')}: the weights do not fit {weights.architecture} "
        f"({detail}); {advice}",
        code=code,
    )


def token_stride(model: nn.Module) -> tuple[int, int] | None:
    """Return the distance between neighboring tokens in pixels, (vertical, horizontal).

    None for a network without a token grid, or whose overlapping patches accept any image size.
    """
    embed = getattr(model, "patch_embed", None)
    if embed is None or not hasattr(embed, "patch_size"):
        return None
    proj = getattr(embed, "proj", None)
    overlaps = getattr(proj, "stride", None) != getattr(proj, "kernel_size", None)
    if overlaps and not hasattr(embed, "feat_ratio"):  # overlapping patches pad the image
        return None
    ratio = embed.feat_ratio() if hasattr(embed, "feat_ratio") else embed.patch_size
    vertical, horizontal = (ratio, ratio) if isinstance(ratio, int) else ratio
    return int(vertical), int(horizontal)
