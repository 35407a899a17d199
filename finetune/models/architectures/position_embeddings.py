"""Position embeddings of the study: their kinds, and the places where they are added.

Added to the tokens: a learned vector for each position ("learned_1d"), for each row and column of
the grid ("learned_2d"), or a fixed table of sines and cosines ("sinusoidal"). Added to the
attention scores: a learned vector for each distance between two positions ("relative").
"""

# B batch, N tokens (class token first), D width, G heads, C channels of a head, h w grid of patches

from __future__ import annotations

import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from finetune.errors import RecipeError, nearest

__all__ = [
    "KINDS",
    "PLACES",
    "Learned2D",
    "Relative",
    "attach",
    "check",
    "position_table",
    "resize",
    "sinusoidal_table",
]

KINDS = ("none", "learned_1d", "learned_2d", "relative", "sinusoidal")
PLACES = ("stem", "every_layer", "every_layer_shared")

_STD = 0.02  # of learned positions at the start, as the ViT paper's code has it


def check(kind: str, where: str | None) -> str:
    """Check a kind and its place.

    Args:
        kind: one of KINDS.
        where: one of PLACES; None for the kind's usual place: every layer for "relative", whose
            home is the attention, else the stem.
    Returns: one of PLACES.
    Raises: RecipeError for an unknown name, or a place that the kind cannot have.
    """
    if kind not in KINDS:
        raise _unknown("position", kind, KINDS)
    if where is None:
        return "every_layer" if kind == "relative" else "stem"
    if where not in PLACES:
        raise _unknown("where", where, PLACES)
    if (kind, where) == ("relative", "stem"):
        raise RecipeError(
            "where: relative positions are part of the attention, which the stem has not; use "
            "every_layer or every_layer_shared",
            code="recipe.conflict",
        )
    return where


def _unknown(key: str, value: str, choices: tuple[str, ...]) -> RecipeError:
    hint = f"{nearest(value, choices) or '.'} Use one of: {', '.join(choices)}"
    return RecipeError(f"{key}: unknown '{value}'{hint}", code="recipe.unknown_name")


def sinusoidal_table(num_positions: int, width: int) -> Tensor:
    """Sines at the even columns and cosines at the odd ones; nothing is drawn.

    Position p, even column j: sin(p / 10000^(j/D)); odd column j: cos(p / 10000^((j-1)/D)).

    Args:
        num_positions: rows, the class token's position 0 included.
        width: D, even or odd.
    Returns: (N, D), computed in float64 and rounded once to float32.
    Source: Vaswani et al. 2017, Attention is all you need, section 3.5.
    """
    positions_N1 = torch.arange(num_positions, dtype=torch.float64)[:, None]
    columns_D = torch.arange(width)
    exponents_D = (columns_D - columns_D % 2).double() / width
    angles_ND = positions_N1 / torch.pow(10000.0, exponents_D)
    return torch.where(columns_D % 2 == 0, angles_ND.sin(), angles_ND.cos()).float()


class Learned2D(nn.Module):
    """A vector for each row and each column of the grid, half the width each.

    A patch gets its column's vector followed by its row's. The class token has no place in the
    grid and gets a vector of its own.

    Args:
        grid: (h, w) in patches.
        width: D, even.
    Source: Dosovitskiy et al. 2020 (ViT), appendix D.4, two-dimensional positional embedding.
    """

    def __init__(self, grid: tuple[int, int], width: int) -> None:
        super().__init__()
        if width % 2:
            raise RecipeError(
                f"embed_dim: {width} is odd; learned_2d needs two halves", code="recipe.conflict"
            )
        self.rows = nn.Parameter(torch.randn(grid[0], width // 2) * _STD)
        self.columns = nn.Parameter(torch.randn(grid[1], width // 2) * _STD)
        self.class_position = nn.Parameter(torch.randn(1, width) * _STD)

    def forward(self) -> Tensor:
        """The table: (1, 1 + h*w, D)."""
        height, width = len(self.rows), len(self.columns)
        columns = self.columns[None].expand(height, -1, -1)
        rows = self.rows[:, None].expand(-1, width, -1)
        patches_ND = torch.cat([columns, rows], dim=-1).flatten(0, 1)
        return torch.cat([self.class_position, patches_ND])[None]


class Relative(nn.Module):
    """A learned vector for each distance between two positions, read by the query.

    Our reading of the paper: positions are counted along the sequence (one dimension, the class
    token at 0); the distance of query p and key q is p - q; its vector acts as a second key for
    the same query, and that product is added to the scores before the softmax. The vectors are
    shared by the heads, and the product is scaled as the scores are.

    Args:
        num_positions: N.
        head_width: C.
    Source: Dosovitskiy et al. 2020 (ViT), appendix D.4, relative positional embeddings; Shaw et
        al. 2018, equation 4.
    """

    index: Tensor

    def __init__(self, num_positions: int, head_width: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.randn(2 * num_positions - 1, head_width) * _STD)
        place_N = torch.arange(num_positions)
        index_NN = place_N[:, None] - place_N[None, :] + num_positions - 1
        self.register_buffer("index", index_NN, persistent=False)

    def forward(self, query_BGNC: Tensor) -> Tensor:
        """Terms that are added to the attention scores: (B, G, N, N)."""
        by_distance = (query_BGNC * query_BGNC.shape[-1] ** -0.5) @ self.offsets.T
        index = self.index.expand(*query_BGNC.shape[:2], -1, -1)
        return by_distance.gather(-1, index)


def attach(
    holder: nn.Module, kind: str, *, grid: tuple[int, int], width: int, head_width: int
) -> None:
    """Give a network, or one of its blocks, its `pos_embed`: None, a table or a module.

    Args:
        holder: gets the attribute. A fixed table is a buffer that no file holds, since it follows
            from the grid.
        kind: one of KINDS.
        grid: (h, w) in patches.
        width: D.
        head_width: C.
    """
    num_positions = 1 + grid[0] * grid[1]
    if kind == "none":
        holder.register_parameter("pos_embed", None)
    elif kind == "sinusoidal":
        table_1ND = sinusoidal_table(num_positions, width)[None]
        holder.register_buffer("pos_embed", table_1ND, persistent=False)
    elif kind == "learned_1d":
        holder.pos_embed = nn.Parameter(torch.randn(1, num_positions, width) * _STD)
    elif kind == "learned_2d":
        holder.pos_embed = Learned2D(grid, width)
    else:
        holder.pos_embed = Relative(num_positions, head_width)


def position_table(position: Tensor | nn.Module | None) -> Tensor | None:
    """Return the table of a `pos_embed` of `attach`, (1, N, D); None where nothing is added."""
    if isinstance(position, Learned2D):
        table: Tensor = position()
        return table
    return position if isinstance(position, Tensor) else None


def resize(name: str, tensor: Tensor, grid: tuple[int, int]) -> Tensor:
    """Move learned positions to another grid, as timm does: bicubic, with antialias.

    Args:
        name: of the tensor in a state dict.
        tensor: a square grid's.
        grid: target (h, w) in patches.
    Returns: the positions of that grid. Vectors of distances, which are counted along rows of
        patches and mean nothing at another size, come back unchanged, for the loader to refuse.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "pos_embed":
        return resample_abs_pos_embed(tensor, list(grid), num_prefix_tokens=1)
    if leaf in ("rows", "columns"):
        target = grid[0] if leaf == "rows" else grid[1]
        # as one row: torch 2.15 resizes a single column, (…, n, 1), to the same value everywhere
        line = resample_abs_pos_embed(
            tensor[None], [1, target], [1, len(tensor)], num_prefix_tokens=0
        )
        return line[0]
    return tensor
