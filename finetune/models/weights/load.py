"""Put weights into a network: resize what may be resized, load all or nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, cast

import timm
from torch import Tensor, nn

from finetune.errors import WeightsError
from finetune.models.head import as_names, classifier_names
from finetune.models.weights.rename import matched
from finetune.models.weights.resize_posemb import resize_grid, square_grid
from finetune.models.weights.timm_config import Weights

__all__ = ["load", "stride"]

_log = logging.getLogger(__name__)


def load(
    model: nn.Module,
    weights: Weights,
    create_args: Mapping[str, Any],
    *,
    posemb: str,
    keep_head: bool,
) -> tuple[nn.Module, str]:
    """Put the weights into the network, all of them or none.

    What fits after the position embeddings are resized is loaded as it is; anything else (another
    layout, relative position tables at another size) goes through timm's own conversion, strictly.

    Args:
        weights: without tensors they leave the network as it is.
        create_args: what `model` was created with, `num_classes` included.
        posemb: "paper" or "timm".
        keep_head: False leaves the network's fresh head in place.
    Returns: the network, and how position embeddings were resized: none, paper or timm.
    Raises: WeightsError naming the tensors that do not fit.
    """
    if weights.state is None:
        return model, "none"
    state, own = dict(weights.state), model.state_dict()
    num_classes = create_args["num_classes"]
    if not keep_head or not num_classes:
        # The head's place is filled with the fresh one, so that loading can be strict.
        for module in classifier_names(model):
            for key in [k for k in state if k.startswith(f"{module}.")]:
                del state[key]
            state |= {k: v for k, v in own.items() if k.startswith(f"{module}.")}
    resized = _resize_position(model, state, weights, posemb)
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
        raise _does_not_fit(state, own, weights, error, head=head) from error
    # The configuration would keep the weights in memory a second time.
    cast(dict[str, Any], model.pretrained_cfg).pop("state_dict", None)
    after = model.state_dict()
    if resized != "none":
        after["pos_embed"].copy_(state["pos_embed"])  # ours, whatever timm made of the grid
    elsewhere = _resized_by_timm(state, after, weights, posemb)
    return model, "timm" if elsewhere else resized


def _resized_by_timm(
    state: Mapping[str, Tensor], after: Mapping[str, Tensor], weights: Weights, posemb: str
) -> bool:
    """True if timm resized position tables; warns if the user asked for another method."""
    stems = as_names(weights.config.get("first_conv"))  # patch kernels are not positions
    changed = [
        name
        for name, tensor in state.items()
        if name in after and tensor.shape != after[name].shape and not name.startswith(stems)
    ]
    if changed and posemb != "timm":
        _log.warning(
            "model.posemb: '%s' does not apply to %s of %s; timm's own resizing was used",
            posemb,
            changed[0],
            weights.architecture,
        )
    return bool(changed)


def _resize_position(
    model: nn.Module, state: dict[str, Tensor], weights: Weights, method: str
) -> str:
    """Resize the learned position embeddings in `state` to the network's grid, where it has any."""
    source, target = state.get("pos_embed"), getattr(model, "pos_embed", None)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    grid = grid or getattr(model, "tokens_spatial_shape", None)  # of Hiera
    if source is None or not isinstance(target, Tensor) or grid is None:
        return "none"
    num_prefix = target.shape[1] - grid[0] * grid[1]
    if source.ndim != 3 or target.ndim != 3 or num_prefix < 0 or source.shape[1] <= num_prefix:
        return "none"
    source_grid = _source_grid(model, weights, source.shape[1] - num_prefix)
    if source_grid == tuple(grid):
        return "none"
    state["pos_embed"] = resize_grid(
        source, tuple(grid), method=method, num_prefix=num_prefix, source_grid=source_grid
    )
    return method


def _source_grid(model: nn.Module, weights: Weights, num_patches: int) -> tuple[int, int] | None:
    """The weights' own grid: from the image size that they record, else a square."""
    size, step = weights.model_args.get("img_size"), stride(model)
    size = size or tuple(weights.config.get("input_size", ()))[-2:]
    if size and step:
        height, width = (size, size) if isinstance(size, int) else size
        below, across = _kernel_ratio(model, weights)
        grid = (int(height / step[0] / below), int(width / step[1] / across))
        if grid[0] * grid[1] == num_patches:
            return grid
    return square_grid(num_patches)


def _kernel_ratio(model: nn.Module, weights: Weights) -> tuple[float, float]:
    """Patch size of the weights over that of the network, (vertical, horizontal)."""
    name = "patch_embed.proj.weight"
    theirs, ours = (weights.state or {}).get(name), model.state_dict().get(name)
    if theirs is None or ours is None or theirs.ndim != 4 or ours.ndim != 4:
        return 1.0, 1.0
    return theirs.shape[2] / ours.shape[2], theirs.shape[3] / ours.shape[3]


def _does_not_fit(
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    weights: Weights,
    error: Exception,
    *,
    head: Collection[str],
) -> WeightsError:
    """Name three tensors of each kind that does not fit; advise a rename if only names differ."""
    shapes = [k for k in own if k in state and state[k].shape != own[k].shape]
    kinds = {
        ("weights.wrong_shape", "tensors of another shape:"): [
            f"{k} {tuple(state[k].shape)} for {tuple(own[k].shape)}" for k in shapes
        ],
        ("weights.missing_tensors", "missing:"): [k for k in own if k not in state],
        ("weights.unknown_tensors", "not of this network:"): [k for k in state if k not in own],
    }
    kinds = {kind: names for kind, names in kinds.items() if names}
    parts = [f"{len(names)} {text} {', '.join(names[:3])}" for (_, text), names in kinds.items()]
    detail = "; ".join(parts) or str(error).splitlines()[0]
    code = next((code for code, _ in kinds), "weights.wrong_shape")
    advice = "check model.name and model.args"
    if "rename" in weights.provenance:
        advice += ", and the patterns of model.rename"
    elif pairs := matched(weights.state or {}, own, free=head):
        code = "weights.other_names"
        renames = [f"{theirs} is {ours}" for theirs, ours in pairs if theirs != ours]
        advice = (
            f"every shape fits in order under other names ({', '.join(renames[:2])}, …): write "
            f"them as `regex: replacement` into a file for model.rename, or see what `python -m "
            f"finetune.models.weights.rename FILE {weights.architecture}` makes of them"
        )
    return WeightsError(
        f"{weights.provenance.get('source')}: the weights do not fit {weights.architecture} "
        f"({detail}); {advice}",
        code=code,
    )


def stride(model: nn.Module) -> tuple[int, int] | None:
    """Pixels from one token to the next, (vertical, horizontal); None without a token grid."""
    embed = getattr(model, "patch_embed", None)
    if embed is None or not hasattr(embed, "patch_size"):
        return None
    proj = getattr(embed, "proj", None)
    overlaps = getattr(proj, "stride", None) != getattr(proj, "kernel_size", None)
    if overlaps and not hasattr(embed, "feat_ratio"):  # it pads, and so takes any size
        return None
    ratio = embed.feat_ratio() if hasattr(embed, "feat_ratio") else embed.patch_size
    vertical, horizontal = (ratio, ratio) if isinstance(ratio, int) else ratio
    return int(vertical), int(horizontal)
