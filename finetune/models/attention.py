"""What a transformer attends to: its attention weights, and their rollout over the image."""

# B batch, L query tokens, N tokens, C channels, H W pixels, h w patches

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["attention_maps", "attention_rollout"]

_SOFTMAX = {Tensor.softmax, torch.softmax, F.softmax}


def attention_maps(model: nn.Module, images_BCHW: Tensor) -> list[Tensor]:
    """The attention weights of every block, as the network computes them for these images.

    They are read while the network runs as it is: neither a module nor an attention path is
    changed, so that several threads may do this at once and the logits are those of any other
    call.

    Args:
        model: in evaluation mode.
        images_BCHW: as the network takes them.
    Returns: a (B, heads, N, N) for each block, first block first, rows summing to 1; empty for a
        network whose tokens do not all attend to one another.
    """
    found = _watch(model, images_BCHW, lambda weights: weights)
    return [] if found is None else found[0]


def attention_rollout(model: nn.Module, images_BCHW: Tensor) -> Tensor | None:
    """How much of each patch the classifier reads, if attention alone moved what is in the tokens.

    In each block half stands for the attention, averaged over the heads, and half for the residual
    connection; the product of the blocks gives the share of every patch in every token, and the
    tokens that the classifier reads give the answer.

    Args:
        model: in evaluation mode.
        images_BCHW: as the network takes them.
    Returns: (B, h, w), not negative; what is missing from a sum of 1 came from the class token and
        other tokens that are no patch. None for a network without such attention.
    Source: Abnar and Zuidema 2020, Quantifying Attention Flow in Transformers, section 3.
    """
    # averaged at once: the heads of a large network would take half a gigabyte per image
    found = _watch(model, images_BCHW, lambda weights: weights.mean(dim=1))
    if found is None:
        return None
    layers, pool_BLN, (height, width) = found
    rollout_BNN = _with_residual(layers[0])
    for attention_BNN in layers[1:]:
        rollout_BNN = _with_residual(attention_BNN) @ rollout_BNN
    if pool_BLN is not None:
        rollout_BNN = pool_BLN @ rollout_BNN
    rows = slice(None) if pool_BLN is not None else _rows_read(model)
    seen_BN = rollout_BNN[:, rows].mean(dim=1)
    prefix = seen_BN.shape[1] - height * width
    return seen_BN[:, prefix:].unflatten(1, (height, width))


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


Found = tuple[list[Tensor], Tensor | None, tuple[int, int]]


@torch.no_grad()
def _watch(model: nn.Module, images_BCHW: Tensor, keep: Callable[[Tensor], Tensor]) -> Found | None:
    """Run the network and keep its attention.

    Returns: one kept tensor for each block; that of a pooling by attention, if there is one; the
        grid of patches (h, w). None when this is not what the network is made of.
    """
    blocks, prefix = getattr(model, "blocks", None), getattr(model, "num_prefix_tokens", None)
    if not isinstance(blocks, nn.Module) or prefix is None or not _reads_tokens(model):
        return None
    grid = _grid(model, images_BCHW)
    if grid is None:
        return None
    with _Watch(keep, len(images_BCHW), grid[0] * grid[1] + prefix, prefix) as watch:
        model(images_BCHW)
    if watch.strange or len(watch.blocks) != len(list(blocks.children())):
        return None
    if (model.global_pool == "map") != (len(watch.pools) == 1):
        return None
    return watch.blocks, watch.pools[0] if watch.pools else None, grid


def _reads_tokens(model: nn.Module) -> bool:
    return getattr(model, "global_pool", None) in ("token", "avg", "avgmax", "max", "map")


def _grid(model: nn.Module, images_BCHW: Tensor) -> tuple[int, int] | None:
    """Patches in height and width, also where the network takes images of any size."""
    embed: Any = getattr(model, "patch_embed", None)
    if not hasattr(embed, "dynamic_feat_size"):
        return None
    height, width = embed.dynamic_feat_size((images_BCHW.shape[-2], images_BCHW.shape[-1]))
    return int(height), int(width)


class _Watch(TorchFunctionMode):
    """Sees each attention of the thread that entered it, however it is computed.

    Fused attention does not give its weights away, so they are computed once more beside it from
    the same queries and keys; where they are computed anyway, they are taken as they are.
    """

    def __init__(
        self, keep: Callable[[Tensor], Tensor], batch: int, tokens: int, prefix: int
    ) -> None:
        super().__init__()
        self.blocks: list[Tensor] = []
        self.pools: list[Tensor] = []
        self.strange = False
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
            self._note(_weights(*args, **kwargs))
        elif func in _SOFTMAX and result.ndim == 4:
            self._note(result)
        return result

    def _note(self, weights: Tensor) -> None:
        batch, _, queries, keys = weights.shape
        if batch == self._batch and queries == keys == self._tokens:
            self.blocks.append(self._keep(weights.float()))
        elif batch == self._batch and keys in (self._tokens, self._tokens - self._prefix):
            # a pooling by attention may leave the class token out
            self.pools.append(F.pad(weights.float().mean(dim=1), (self._tokens - keys, 0)))
        else:
            self.strange = True  # windows, or another set of tokens


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
    """What fused attention multiplies its values with. Returns: (B, heads, L, N)."""
    del value, dropout_p  # the one is not weighted here, the other is no part of the weights
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
