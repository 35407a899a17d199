"""Inside a transformer: attention weights, rollout and distances, filters, position embeddings."""

# B batch, L query tokens, N tokens (patches, in distances), D width, C channels, H W pixels,
# h w patches (pixels of a filter)

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from finetune.errors import WeightsError
from finetune.models.architectures.position_embeddings import position_table
from finetune.models.head import as_names

__all__ = [
    "attention_distances",
    "attention_maps",
    "attention_rollout",
    "even_distance",
    "patch_filters",
    "position_similarity",
]

_SOFTMAX = {Tensor.softmax, torch.softmax, F.softmax}
_POOLS = ("token", "avg", "avgmax", "max", "map")  # of timm's that read tokens


def attention_maps(model: nn.Module, images_BCHW: Tensor) -> list[Tensor]:
    """Read the attention weights of every block, as the network computes them for these images.

    Neither a module nor an attention path is changed, so that several threads may do this at once
    and the logits are those of any other call.

    Args:
        model: in evaluation mode.
        images_BCHW: as the network takes them.
    Returns: a (B, heads, N, N) for each block, first block first, rows summing to 1; empty for a
        network whose tokens do not all attend to one another.
    """
    attention = _read_attention(model, images_BCHW, lambda weights: weights)
    return [] if attention is None else attention[0]


def attention_rollout(model: nn.Module, images_BCHW: Tensor) -> Tensor | None:
    """Compute the share of each patch in what the classifier reads, from attention alone.

    In each block half stands for the attention, averaged over the heads, and half for the residual
    connection; the product of the blocks gives the share of every patch in every token, which is
    averaged over the tokens that the classifier reads.

    Args:
        model: in evaluation mode.
        images_BCHW: as the network takes them.
    Returns: (B, h, w), not negative; the rest to a sum of 1 came from the class token and other
        tokens that are no patch. None for a network without such attention.
    Source: Abnar and Zuidema 2020, Quantifying Attention Flow in Transformers, section 3.
    """
    # averaged at once: the heads of a large network would take half a gigabyte per image
    attention = _read_attention(model, images_BCHW, lambda weights: weights.mean(dim=1))
    if attention is None:
        return None
    layers, pool_BLN, (height, width) = attention
    rollout_BNN = _with_residual(layers[0])
    for attention_BNN in layers[1:]:
        rollout_BNN = _with_residual(attention_BNN) @ rollout_BNN
    if pool_BLN is not None:
        rollout_BNN = pool_BLN @ rollout_BNN
    rows = slice(None) if pool_BLN is not None else _rows_read(model)
    shares_BN = rollout_BNN[:, rows].mean(dim=1)
    prefix = shares_BN.shape[1] - height * width
    return shares_BN[:, prefix:].unflatten(1, (height, width))


def _with_residual(attention_BNN: Tensor) -> Tensor:
    identity = torch.eye(attention_BNN.shape[-1], device=attention_BNN.device)
    mixed = attention_BNN + identity
    return mixed / mixed.sum(dim=-1, keepdim=True)


def _rows_read(model: Any) -> slice:
    """The tokens that the classifier reads: the class token, DeiT's two, or the patches."""
    if hasattr(model, "dist_token"):
        return slice(0, 2)
    if model.global_pool == "token":
        return slice(0, 1)
    skipped = 0 if getattr(model, "pool_include_prefix", False) else model.num_prefix_tokens
    return slice(skipped, None)


@torch.no_grad()
def _read_attention(
    model: nn.Module, images_BCHW: Tensor, keep: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], Tensor | None, tuple[int, int]] | None:
    """Run the network and keep its attention.

    Returns: one kept tensor for each block; that of a pooling by attention, if there is one; the
        grid of patches (h, w). None for a network that is not built of such blocks.
    """
    blocks, prefix = getattr(model, "blocks", None), getattr(model, "num_prefix_tokens", None)
    if not isinstance(blocks, nn.Module) or prefix is None:
        return None
    grid = _grid(model, images_BCHW)
    if grid is None or getattr(model, "global_pool", None) not in _POOLS:
        return None
    recorder = _AttentionRecorder(keep, len(images_BCHW), grid[0] * grid[1] + prefix, prefix)
    with recorder:
        model(images_BCHW)
    if recorder.is_other or len(recorder.blocks) != len(list(blocks.children())):
        return None
    if (model.global_pool == "map") != (len(recorder.pools) == 1):
        return None
    return recorder.blocks, recorder.pools[0] if recorder.pools else None, grid


def _grid(model: nn.Module, images_BCHW: Tensor) -> tuple[int, int] | None:
    """Patches in height and width, also where the network takes images of any size."""
    embed: Any = getattr(model, "patch_embed", None)
    if not hasattr(embed, "dynamic_feat_size"):
        return None
    height, width = embed.dynamic_feat_size((images_BCHW.shape[-2], images_BCHW.shape[-1]))
    return int(height), int(width)


class _AttentionRecorder(TorchFunctionMode):
    """Records each attention of the thread that entered it, fused or not.

    Fused attention does not return its weights, so they are computed once more from the same
    queries and keys; the results of a softmax are taken as they are.
    """

    def __init__(
        self, keep: Callable[[Tensor], Tensor], batch: int, tokens: int, prefix: int
    ) -> None:
        super().__init__()
        self.blocks: list[Tensor] = []
        self.pools: list[Tensor] = []
        self.is_other = False  # windows, or another set of tokens
        self._keep, self._batch, self._tokens, self._prefix = keep, batch, tokens, prefix

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._record(_weights(*args, **kwargs))
        elif func in _SOFTMAX and result.ndim == 4:
            self._record(result)
        return result

    def _record(self, weights: Tensor) -> None:
        batch, _, queries, keys = weights.shape
        if batch == self._batch and queries == keys == self._tokens:
            self.blocks.append(self._keep(weights.float()))
        elif batch == self._batch and keys in (self._tokens, self._tokens - self._prefix):
            # a pooling by attention may leave the class token out
            self.pools.append(F.pad(weights.float().mean(dim=1), (self._tokens - keys, 0)))
        else:
            self.is_other = True


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Weights that fused attention multiplies its values with. Returns: (B, heads, L, N)."""
    del value, dropout_p
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.float() * factor) @ key.float().transpose(-2, -1)
    if is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
    return scores.softmax(dim=-1)


def patch_filters(network: nn.Module, *, components: int = 28) -> np.ndarray:
    """Compute the principal components of the first layer's filters, as small RGB images.

    Args:
        network: any whose first layer reads RGB patches.
        components: how many, the strongest first; there are at most as many as filters.
    Returns: (components, height, width, 3), each scaled to [0, 1] with 0.5 at its mean.
    Raises: WeightsError if the first layer is not of this kind.
    Source: ViT paper, figure 7 (left).
    """
    weight_DChw = _first_layer(network)
    number, channels, height, width = weight_DChw.shape
    flat = weight_DChw.double().flatten(1).numpy()
    _, _, axes = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    axes = axes[: min(components, number - 1)]
    # the sign of a component means nothing: the largest value becomes positive
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    axes = axes * np.sign(largest)
    scaled = 0.5 + 0.5 * axes / np.abs(axes).max(axis=1, keepdims=True)
    return scaled.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)


def _first_layer(network: Any) -> Tensor:
    """(D, 3, h, w), also of a first layer that is linear in patches of (channel, row, column)."""
    names = as_names(getattr(network, "pretrained_cfg", {}).get("first_conv"))
    for name in (*names, "patch_embed.proj", "patch_embed"):
        try:
            weight = network.get_submodule(name).weight.detach().cpu()
        except AttributeError:  # no such module, or one without a weight of its own
            continue
        if weight.ndim == 4 and weight.shape[1] == 3:
            return weight
        side = round((weight.shape[-1] / 3) ** 0.5)
        if weight.ndim == 2 and 3 * side * side == weight.shape[1]:
            return weight.unflatten(1, (3, side, side))
    raise WeightsError(
        f"{type(network).__name__}: its first layer does not read RGB patches; choose another "
        f"network",
        code="weights.unsupported",
    )


def position_similarity(network: Any) -> np.ndarray:
    """Compute the cosine similarity of the position embeddings of any two patches.

    Args:
        network: with position embeddings on a grid; those of class tokens are left out.
    Returns: (h, w, h, w), the cosine between the patch of the first two and that of the last two.
    Raises: WeightsError if there are none.
    Source: ViT paper, figure 7 (middle).
    """
    table, embed = _positions(network), getattr(network, "patch_embed", None)
    grid = getattr(embed, "grid_size", None)
    kind = type(network).__name__
    if table is None or table.ndim != 3 or grid is None:
        cause = "has no table of position embeddings for a grid of patches; choose a ViT"
        if table is None and getattr(network, "rope", None) is not None:
            cause = "its positions are rotary, so there is no table to draw; see its attention"
        raise WeightsError(f"{kind}: {cause}", code="weights.unsupported")
    height, width = int(grid[0]), int(grid[1])
    prefix = table.shape[1] - height * width
    if prefix < 0:
        raise WeightsError(
            f"{kind}: {table.shape[1]} positions for {height} x {width} patches; choose a ViT",
            code="weights.unsupported",
        )
    vectors_ND = table[0, prefix:].detach().cpu().double().numpy()
    norms_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    unit_ND = vectors_ND / np.maximum(norms_N1, 1e-12)
    return (unit_ND @ unit_ND.T).reshape(height, width, height, width)


def _positions(network: Any) -> Tensor | None:
    """The table that is added in the stem, or else before the first block."""
    for holder in (network, *list(getattr(network, "blocks", ()))[:1]):
        table = position_table(getattr(holder, "pos_embed", None))
        if table is not None:
            return table
    return None


def attention_distances(network: Any, images_BCHW: Tensor) -> np.ndarray:
    """Compute the mean distance of each head's attention: patch to patch, weighted by it.

    Attention to class tokens is left out, and the rest is scaled to a sum of 1.

    Args:
        network: in evaluation mode.
        images_BCHW: as the network takes them; one goes through at a time.
    Returns: (blocks, heads), in pixels, averaged over all patches and images.
    Raises: WeightsError for a network without attention between all patches.
    Source: ViT paper, figure 7 (right) and appendix D.7.
    """
    totals: list[np.ndarray] = []
    for image_1CHW in images_BCHW.split(1):  # the maps of one large image take 200 MB
        maps = attention_maps(network, image_1CHW)
        if not maps:
            break
        distances_NN = _patch_distances(network, image_1CHW)
        rows = [_weighted_mean(attention[0], distances_NN) for attention in maps]
        totals.append(np.stack(rows))
    if not totals:
        raise WeightsError(
            f"{type(network).__name__}: its patches do not all attend to one another; choose a ViT",
            code="weights.unsupported",
        )
    return np.mean(totals, axis=0)


def even_distance(network: Any, images_BCHW: Tensor) -> float:
    """Return the distance of a head that attends to all patches alike, in pixels."""
    return float(_patch_distances(network, images_BCHW).mean())


def _patch_distances(network: Any, images_BCHW: Tensor) -> Tensor:
    """(N, N): pixels between the centres of any two patches."""
    grid = network.patch_embed.dynamic_feat_size(images_BCHW.shape[-2:])
    axes = [
        torch.arange(patches, dtype=torch.float64) * pixels / patches
        for patches, pixels in zip(grid, images_BCHW.shape[-2:], strict=True)
    ]
    centres_N2 = torch.cartesian_prod(*axes).to(images_BCHW.device)
    return torch.cdist(centres_N2, centres_N2, compute_mode="donot_use_mm_for_euclid_dist")


def _weighted_mean(attention_hNN: Tensor, distances_NN: Tensor) -> np.ndarray:
    """(heads,): the mean over the query patches."""
    patches = len(distances_NN)
    weights_hNN = attention_hNN[:, -patches:, -patches:].double()
    weights_hNN = weights_hNN / weights_hNN.sum(dim=-1, keepdim=True)
    mean: np.ndarray = (weights_hNN * distances_NN).sum(dim=-1).mean(dim=-1).cpu().numpy()
    return mean
