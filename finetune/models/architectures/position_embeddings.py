"""Position embeddings of `ScratchViT`: four kinds, and the layers that apply them.

Three kinds are added to the tokens: a learned vector per position ("learned_1d"), learned vectors
per row and per column of the grid ("learned_2d"), and a fixed table of sines and cosines
("sinusoidal"). "relative" instead learns one vector per distance between two positions; the product
of the query with this vector is added to the attention scores.
"""

# B batch, N tokens (class token first), D width, G heads, C channels of a head, h w grid of patches

from __future__ import annotations

import torch
from torch import Tensor, nn

from finetune.errors import did_you_mean
from finetune.models.weights.resize_posemb import resize_posemb

__all__ = [
    "POSITION_KINDS",
    "POSITION_LOCATIONS",
    "Learned2dPositionEmbedding",
    "RelativePositionEmbedding",
    "add_position_embedding",
    "position_table",
    "resize_position_embedding",
    "resolve_location",
    "sinusoidal_table",
]

POSITION_KINDS = ("none", "learned_1d", "learned_2d", "relative", "sinusoidal")
POSITION_LOCATIONS = ("stem", "every_layer", "every_layer_shared")

_INIT_STD = 0.02  # initial std of learned position embeddings, as in the ViT paper's code


def resolve_location(kind: str, where: str | None) -> str:
    """Check the kind and location of position embeddings, and fill in the default location.

    Args:
        kind: one of POSITION_KINDS.
        where: one of POSITION_LOCATIONS; None for the default: "every_layer" for kind "relative",
            which is part of the attention, and "stem" for the other kinds.
    Returns: one of POSITION_LOCATIONS.
    Raises: ValueError for an unknown name, or a location that the kind does not support.
    """
    if where is None:
        where = "every_layer" if kind == "relative" else "stem"
    choices = {"position": (kind, POSITION_KINDS), "where": (where, POSITION_LOCATIONS)}
    for argument, (value, known) in choices.items():
        if value not in known:
            hint = f"{did_you_mean(value, known) or '.'} Choose from {', '.join(known)}"
            raise ValueError(f"{argument}: unknown '{value}'{hint}")
    if (kind, where) == ("relative", "stem"):
        raise ValueError(
            "where: relative positions are part of the attention, and the stem has no "
            "attention; use every_layer or every_layer_shared"
        )
    return where


def sinusoidal_table(num_positions: int, width: int) -> Tensor:
    """Compute sinusoidal position embeddings: sines in even columns, cosines in odd columns.

    Row p, even column j: sin(p / 10000^(j/D)); odd column j: cos(p / 10000^((j-1)/D)).

    Args:
        num_positions: number of rows; row 0 is the class token.
        width: D, even or odd.
    Returns: (N, D) float32, computed in float64.
    Source: Vaswani et al. 2017, Attention is all you need, section 3.5.
    """
    positions_N1 = torch.arange(num_positions, dtype=torch.float64)[:, None]
    columns_D = torch.arange(width)
    exponents_D = (columns_D - columns_D % 2).double() / width
    angles_ND = positions_N1 / torch.pow(10000.0, exponents_D)
    return torch.where(columns_D % 2 == 0, angles_ND.sin(), angles_ND.cos()).float()


class Learned2dPositionEmbedding(nn.Module):
    """Learned position embeddings per row and per column of the grid, each of width D / 2.

    The embedding of a patch is the vector of its column, followed by that of its row. The class
    token is not in the grid and has its own vector of width D.

    Args:
        grid: (h, w) in patches.
        width: D, even.
    Source: Dosovitskiy et al. 2020 (ViT), appendix D.4, two-dimensional positional embedding.
    """

    def __init__(self, grid: tuple[int, int], width: int) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(
                f"embed_dim: {width} is odd, but learned_2d splits it in half; use an even number"
            )
        self.rows = nn.Parameter(torch.randn(grid[0], width // 2) * _INIT_STD)
        self.columns = nn.Parameter(torch.randn(grid[1], width // 2) * _INIT_STD)
        self.class_position = nn.Parameter(torch.randn(1, width) * _INIT_STD)

    def forward(self) -> Tensor:
        """Return the table: (1, 1 + h*w, D)."""
        height, width = len(self.rows), len(self.columns)
        columns = self.columns[None].expand(height, -1, -1)
        rows = self.rows[:, None].expand(-1, width, -1)
        patches_ND = torch.cat([columns, rows], dim=-1).flatten(0, 1)
        return torch.cat([self.class_position, patches_ND])[None]


class RelativePositionEmbedding(nn.Module):
    """Learned relative position embeddings: one vector per distance, used as an additional key.

    This is our interpretation of the paper. Positions are counted along the sequence (one
    dimension, class token at 0), and the distance of query p and key q is p - q. The product of
    query p with the vector of this distance, scaled like the attention scores, is added to the
    scores before softmax. All heads share the vectors.

    Args:
        num_positions: N.
        head_width: C.
    Source: Dosovitskiy et al. 2020 (ViT), appendix D.4, relative positional embeddings; Shaw et
        al. 2018, equation 4.
    """

    index: Tensor

    def __init__(self, num_positions: int, head_width: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.randn(2 * num_positions - 1, head_width) * _INIT_STD)
        positions_N = torch.arange(num_positions)
        index_NN = positions_N[:, None] - positions_N[None, :] + num_positions - 1
        self.register_buffer("index", index_NN, persistent=False)

    def forward(self, query_BGNC: Tensor) -> Tensor:
        """Return the bias of the attention scores: (B, G, N, N)."""
        by_distance = (query_BGNC * query_BGNC.shape[-1] ** -0.5) @ self.offsets.T
        index = self.index.expand(*query_BGNC.shape[:2], -1, -1)
        return by_distance.gather(-1, index)


def add_position_embedding(
    module: nn.Module, kind: str, *, grid: tuple[int, int], width: int, head_width: int
) -> None:
    """Set the attribute `pos_embed` of a network or block to None, a table or a module.

    Args:
        module: the network or block. A fixed table becomes a non-persistent buffer, because it can
            be recomputed from the grid.
        kind: one of POSITION_KINDS.
        grid: (h, w) in patches.
        width: D.
        head_width: C.
    """
    num_positions = 1 + grid[0] * grid[1]
    if kind == "none":
        module.register_parameter("pos_embed", None)
    elif kind == "sinusoidal":
        table_1ND = sinusoidal_table(num_positions, width)[None]
        module.register_buffer("pos_embed", table_1ND, persistent=False)
    elif kind == "learned_1d":
        module.pos_embed = nn.Parameter(torch.randn(1, num_positions, width) * _INIT_STD)
    elif kind == "learned_2d":
        module.pos_embed = Learned2dPositionEmbedding(grid, width)
    else:
        module.pos_embed = RelativePositionEmbedding(num_positions, head_width)


def position_table(pos_embed: Tensor | nn.Module | None) -> Tensor | None:
    """Return the table (1, N, D) that `pos_embed` adds to the tokens; None if there is none."""
    if isinstance(pos_embed, Learned2dPositionEmbedding):
        table: Tensor = pos_embed()
        return table
    return pos_embed if isinstance(pos_embed, Tensor) else None


def resize_position_embedding(name: str, tensor: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize learned position embeddings to another grid, as timm does: antialiased bicubic.

    Args:
        name: name of the tensor in a state dict.
        tensor: position embeddings of a square grid.
        grid: target (h, w) in patches.
    Returns: position embeddings of the target grid. Embeddings of kind "relative" are returned
        unchanged, so that loading them fails with a shape mismatch. Resizing would be wrong: if the
        grid width changes, the same distance along the sequence is another offset in the image.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "pos_embed":
        return resize_posemb(tensor, grid, method="timm")
    if leaf in ("rows", "columns"):
        # resize as a row (1, n): for a column (n, 1), torch 2.15 returns one value everywhere
        target_grid = (1, grid[0] if leaf == "rows" else grid[1])
        return resize_posemb(
            tensor[None],
            target_grid,
            method="timm",
            num_prefix_tokens=0,
            source_grid=(1, len(tensor)),
        )[0]
    return tensor
