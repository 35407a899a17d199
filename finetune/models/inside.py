"""What is inside a vision transformer, as arrays: filters, positions, distances of attention."""

# B batch, N patches, D width, C channels, h w patches

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.errors import WeightsError
from finetune.models.architectures.position_embeddings import position_table
from finetune.models.attention import attention_maps
from finetune.models.head import as_names

__all__ = ["attention_distances", "even_distance", "patch_filters", "position_similarity"]


def patch_filters(network: nn.Module, *, components: int = 28) -> np.ndarray:
    """The principal components of the first layer's filters, as small RGB images.

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
    raise WeightsError(f"{type(network).__name__}: its first layer does not read RGB patches")


def position_similarity(network: Any) -> np.ndarray:
    """How much alike the position embeddings of any two patches are.

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
        raise WeightsError(f"{kind}: has no table of position embeddings for a grid of patches")
    height, width = int(grid[0]), int(grid[1])
    prefix = table.shape[1] - height * width
    if prefix < 0:
        raise WeightsError(f"{kind}: {table.shape[1]} positions for {height} x {width} patches")
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
    """How far each head looks: the distance from patch to patch, weighted by its attention.

    What a patch gives to class tokens has no place in the image; the rest is scaled to 1.

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
        apart_NN = _apart(network, image_1CHW)
        rows = [_weighted(attention[0], apart_NN) for attention in maps]
        totals.append(np.stack(rows))
    if not totals:
        raise WeightsError(
            f"{type(network).__name__}: its patches do not all attend to one another"
        )
    return np.mean(totals, axis=0)


def even_distance(network: Any, images_BCHW: Tensor) -> float:
    """The distance of a head that attends to all patches alike, in pixels.

    Args:
        network: with attention between all patches.
        images_BCHW: their size matters.
    """
    return float(_apart(network, images_BCHW).mean())


def _apart(network: Any, images_BCHW: Tensor) -> Tensor:
    """(N, N): pixels between the centres of any two patches."""
    size = (images_BCHW.shape[-2], images_BCHW.shape[-1])
    height, width = (int(side) for side in network.patch_embed.dynamic_feat_size(size))
    rows, columns = (torch.arange(side, dtype=torch.float64) for side in (height, width))
    down, across = torch.meshgrid(rows * size[0] / height, columns * size[1] / width, indexing="ij")
    places_N2 = torch.stack([down.flatten(), across.flatten()], dim=1).to(images_BCHW.device)
    return torch.cdist(places_N2, places_N2, compute_mode="donot_use_mm_for_euclid_dist")


def _weighted(attention_hNN: Tensor, apart_NN: Tensor) -> np.ndarray:
    """(heads,): the mean over the patches that ask."""
    patches = apart_NN.shape[0]
    seen = attention_hNN[:, -patches:, -patches:].double()
    seen = seen / seen.sum(dim=-1, keepdim=True)
    mean: np.ndarray = (seen * apart_NN).sum(dim=-1).mean(dim=-1).cpu().numpy()
    return mean
