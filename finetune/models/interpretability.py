"""ViT analysis: attention maps, rollout and distances, patch filters, position similarity."""

# B batch, L query tokens, N tokens (in distances: patches), D width, C channels, H W pixels,
# h w grid of patches (in filters: pixels; in hNN: heads)

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
from finetune.models.head import as_name_tuple

__all__ = [
    "attention_distances",
    "attention_maps",
    "attention_rollout",
    "attention_weights",
    "patch_filters",
    "position_similarity",
    "uniform_attention_distance",
]

_SOFTMAX_FUNCTIONS = {Tensor.softmax, torch.softmax, F.softmax}
_TOKEN_POOLINGS = ("token", "avg", "avgmax", "max", "map")  # values of timm's global_pool


def attention_maps(model: nn.Module, images_BCHW: Tensor) -> list[Tensor]:
    """Return the attention weights of every block for a batch of images.

    The network is not modified, so several threads may call this function at the same time.

    Args:
        model: a network in evaluation mode.
        images_BCHW: preprocessed images.
    Returns: one tensor (B, heads, N, N) per block, first block first, with rows that sum to 1;
        empty for a network without global self-attention.
    """
    attention = _record_attention(model, images_BCHW, lambda weights: weights)
    return [] if attention is None else attention[0]


def attention_rollout(model: nn.Module, images_BCHW: Tensor) -> Tensor | None:
    """Compute attention rollout: how much each patch contributes to the pooled features.

    The attention matrix of each block is first averaged over heads, then averaged with the identity
    matrix to include the residual connection. The product of these matrices over all blocks is the
    contribution of every input token to every output token. The rows of the output tokens that the
    classifier pools are averaged.

    Args:
        model: a network in evaluation mode.
        images_BCHW: preprocessed images.
    Returns: (B, h, w), not negative. The values of an image sum to at most 1; the rest is the
        contribution of the class token and other prefix tokens. None for a network without global
        self-attention.
    Source: Abnar and Zuidema 2020, Quantifying Attention Flow in Transformers, section 3.
    """
    # average heads while recording: all heads of a large network take half a GB per image
    attention = _record_attention(model, images_BCHW, lambda weights: weights.mean(dim=1))
    if attention is None:
        return None
    layers, pool_BLN, (height, width) = attention
    rollout_BNN = _add_residual(layers[0])
    for attention_BNN in layers[1:]:
        rollout_BNN = _add_residual(attention_BNN) @ rollout_BNN
    if pool_BLN is not None:
        rollout_BNN = pool_BLN @ rollout_BNN
    rows = slice(None) if pool_BLN is not None else _pooled_tokens(model)
    shares_BN = rollout_BNN[:, rows].mean(dim=1)
    prefix = shares_BN.shape[1] - height * width
    return shares_BN[:, prefix:].unflatten(1, (height, width))


def _add_residual(attention_BNN: Tensor) -> Tensor:
    identity = torch.eye(attention_BNN.shape[-1], device=attention_BNN.device)
    mixed = attention_BNN + identity
    return mixed / mixed.sum(dim=-1, keepdim=True)


def _pooled_tokens(model: Any) -> slice:
    """Return the tokens that the classifier pools: class token, DeiT's two tokens, or patches."""
    if hasattr(model, "dist_token"):
        return slice(0, 2)
    if model.global_pool == "token":
        return slice(0, 1)
    skipped = 0 if getattr(model, "pool_include_prefix", False) else model.num_prefix_tokens
    return slice(skipped, None)


@torch.no_grad()
def _record_attention(
    model: nn.Module, images_BCHW: Tensor, reduce: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], Tensor | None, tuple[int, int]] | None:
    """Run the network and record its attention.

    Args:
        reduce: function applied to the attention weights of each block, (B, heads, N, N).
    Returns: None if any block has no global self-attention. Otherwise: one reduced tensor per
        block; the weights of attention pooling, or None if the network pools without attention; and
        the grid of patches, (h, w).
    """
    blocks, prefix = getattr(model, "blocks", None), getattr(model, "num_prefix_tokens", None)
    if not isinstance(blocks, nn.Module) or prefix is None:
        return None
    grid = _patch_grid(model, images_BCHW)
    if grid is None or getattr(model, "global_pool", None) not in _TOKEN_POOLINGS:
        return None
    recorder = _AttentionRecorder(reduce, len(images_BCHW), grid[0] * grid[1] + prefix, prefix)
    with recorder:
        model(images_BCHW)
    if recorder.has_local_attention or len(recorder.block_attention) != len(
        list(blocks.children())
    ):
        return None
    if (model.global_pool == "map") != (len(recorder.pooling_attention) == 1):
        return None
    return (
        recorder.block_attention,
        recorder.pooling_attention[0] if recorder.pooling_attention else None,
        grid,
    )


def _patch_grid(model: nn.Module, images_BCHW: Tensor) -> tuple[int, int] | None:
    """Return the grid of patches (height, width) for these images; None without patch_embed."""
    embed: Any = getattr(model, "patch_embed", None)
    if not hasattr(embed, "dynamic_feat_size"):
        return None
    height, width = embed.dynamic_feat_size((images_BCHW.shape[-2], images_BCHW.shape[-1]))
    return int(height), int(width)


class _AttentionRecorder(TorchFunctionMode):
    """Records the weights of every attention call in the current thread.

    Fused attention does not return its weights, so they are recomputed from its queries and keys.
    For unfused attention the output of softmax is recorded.
    """

    def __init__(
        self,
        reduce: Callable[[Tensor], Tensor],
        batch_size: int,
        num_tokens: int,
        num_prefix_tokens: int,
    ) -> None:
        super().__init__()
        self.block_attention: list[Tensor] = []
        self.pooling_attention: list[Tensor] = []
        self.has_local_attention = False  # attention within windows or other subsets of tokens
        self._reduce = reduce
        self._batch_size = batch_size
        self._num_tokens = num_tokens
        self._num_prefix_tokens = num_prefix_tokens

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
            self._record(attention_weights(*args, **kwargs))
        elif func in _SOFTMAX_FUNCTIONS and result.ndim == 4:
            self._record(result)
        return result

    def _record(self, weights: Tensor) -> None:
        batch, _, queries, keys = weights.shape
        if batch == self._batch_size and queries == keys == self._num_tokens:
            self.block_attention.append(self._reduce(weights.float()))
        elif batch == self._batch_size and keys in (
            self._num_tokens,
            self._num_tokens - self._num_prefix_tokens,
        ):
            # attention pooling may skip the class token
            self.pooling_attention.append(
                F.pad(weights.float().mean(dim=1), (self._num_tokens - keys, 0))
            )
        else:
            self.has_local_attention = True


def attention_weights(
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
    """Compute attention weights from the arguments of F.scaled_dot_product_attention.

    Returns: (B, heads, L, N).
    """
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


def patch_filters(network: nn.Module, *, num_components: int = 28) -> np.ndarray:
    """Compute the principal components of the first layer's filters, as small RGB images.

    Args:
        network: a network whose first layer reads RGB patches.
        num_components: number of components, largest variance first; at most the number of filters
            minus 1.
    Returns: (num_components, height, width, 3), each component scaled to [0, 1], where 0.5
        stands for 0.
    Raises: WeightsError if the first layer does not read RGB patches.
    Source: ViT paper, figure 7 (left).
    """
    weight_DChw = _first_layer_weight(network)
    number, channels, height, width = weight_DChw.shape
    flat = weight_DChw.double().flatten(1).numpy()
    _, _, axes = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    axes = axes[: min(num_components, number - 1)]
    # the sign of a component is arbitrary: make the largest value positive
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    axes = axes * np.sign(largest)
    scaled = 0.5 + 0.5 * axes / np.abs(axes).max(axis=1, keepdims=True)
    return scaled.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)


def _first_layer_weight(network: Any) -> Tensor:
    """Return the weight of the first layer, (D, 3, h, w).

    A linear layer reads patches flattened from (3, h, w), so its weight is reshaped.
    """
    names = as_name_tuple(getattr(network, "pretrained_cfg", {}).get("first_conv"))
    for name in (*names, "patch_embed.proj", "patch_embed"):
        try:
            weight = network.get_submodule(name).weight.detach().cpu()
        except AttributeError:  # no such module, or a module without a weight
            continue
        if weight.ndim == 4 and weight.shape[1] == 3:
            return weight
        side = round((weight.shape[-1] / 3) ** 0.5)
        if weight.ndim == 2 and 3 * side * side == weight.shape[1]:
            return weight.unflatten(1, (3, side, side))
    raise WeightsError(
        f"{type(network).__name__}: the first layer does not read RGB patches; choose another "
        f"network",
        code="weights.unsupported",
    )


def position_similarity(network: Any) -> np.ndarray:
    """Compute the cosine similarity between the position embeddings of all pairs of patches.

    Args:
        network: a network with a table of position embeddings for a grid of patches; those of
            prefix tokens are ignored.
    Returns: (h, w, h, w): the first two indices select one patch, the last two the other.
    Raises: WeightsError if the network has no such table.
    Source: ViT paper, figure 7 (middle).
    """
    table, embed = _find_position_table(network), getattr(network, "patch_embed", None)
    height, width = getattr(embed, "grid_size", None) or (0, 0)
    num_patches = height * width
    if table is None or table.ndim != 3 or not 0 < num_patches <= table.shape[1]:
        cause = "has no table of position embeddings for a grid of patches; choose a ViT"
        if table is None and getattr(network, "rope", None) is not None:
            cause = "has rotary position embeddings, so no table to draw; plot its attention"
        raise WeightsError(f"{type(network).__name__}: {cause}", code="weights.unsupported")
    prefix = table.shape[1] - num_patches
    vectors_ND = table[0, prefix:].detach().cpu().double().numpy()
    norms_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    unit_ND = vectors_ND / np.maximum(norms_N1, 1e-12)
    return (unit_ND @ unit_ND.T).reshape(height, width, height, width)


def _find_position_table(network: Any) -> Tensor | None:
    """Return the position table that is added in the stem or in the first block, or None."""
    for module in (network, *list(getattr(network, "blocks", ()))[:1]):
        table = position_table(getattr(module, "pos_embed", None))
        if table is not None:
            return table
    return None


def attention_distances(network: Any, images_BCHW: Tensor) -> np.ndarray:
    """Compute the mean attention distance of each head: patch distances weighted by attention.

    Attention to prefix tokens such as the class token is dropped, and the remaining weights are
    normalized to a sum of 1.

    Args:
        network: a network in evaluation mode.
        images_BCHW: preprocessed images; they are processed one at a time to save memory.
    Returns: (blocks, heads), in pixels, averaged over all patches and images.
    Raises: WeightsError for a network without global self-attention.
    Source: ViT paper, figure 7 (right) and appendix D.7.
    """
    totals: list[np.ndarray] = []
    for image_1CHW in images_BCHW.split(1):  # the attention maps of one large image take 200 MB
        maps = attention_maps(network, image_1CHW)
        if not maps:
            break
        distances_NN = _patch_distances(network, image_1CHW)
        rows = [_mean_distance(attention[0], distances_NN) for attention in maps]
        totals.append(np.stack(rows))
    if not totals:
        raise WeightsError(
            f"{type(network).__name__}: its patches do not all attend to one another; choose a ViT",
            code="weights.unsupported",
        )
    return np.mean(totals, axis=0)


def uniform_attention_distance(network: Any, images_BCHW: Tensor) -> float:
    """Return the attention distance of a head with uniform attention, in pixels."""
    return float(_patch_distances(network, images_BCHW).mean())


def _patch_distances(network: Any, images_BCHW: Tensor) -> Tensor:
    """Return (N, N): the distance in pixels between the centers of any two patches."""
    grid = network.patch_embed.dynamic_feat_size(images_BCHW.shape[-2:])
    axes = [
        torch.arange(patches, dtype=torch.float64) * pixels / patches
        for patches, pixels in zip(grid, images_BCHW.shape[-2:], strict=True)
    ]
    centers_N2 = torch.cartesian_prod(*axes).to(images_BCHW.device)
    return torch.cdist(centers_N2, centers_N2, compute_mode="donot_use_mm_for_euclid_dist")


def _mean_distance(attention_hNN: Tensor, distances_NN: Tensor) -> np.ndarray:
    """Return (heads,): the weighted distance, averaged over the query patches."""
    patches = len(distances_NN)
    weights_hNN = attention_hNN[:, -patches:, -patches:].double()
    weights_hNN = weights_hNN / weights_hNN.sum(dim=-1, keepdim=True)
    mean: np.ndarray = (weights_hNN * distances_NN).sum(dim=-1).mean(dim=-1).cpu().numpy()
    return mean
