"""models/architectures/position_embeddings.py: kinds, places, and resizing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from refusals import refused
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import nn

from finetune.models.architectures.position_embeddings import (
    POSITION_KINDS,
    POSITION_LOCATIONS,
    Learned2dPositionEmbedding,
    RelativePositionEmbedding,
    add_position_embedding,
    position_table,
    resize_position_embedding,
    resolve_location,
    sinusoidal_table,
)


def entry(position: int, column: int, width: int) -> float:
    """One entry of the fixed table, by the standard library's sine."""
    if column % 2 == 0:
        return math.sin(position / 10000 ** (column / width))
    return math.cos(position / 10000 ** ((column - 1) / width))


class TestSinusoidal:
    @pytest.mark.parametrize("count, width", [(17, 1024), (5, 7), (1, 2)])
    def test_equals_the_formula_to_the_last_bit(self, count: int, width: int) -> None:
        expected = [[entry(p, j, width) for j in range(width)] for p in range(count)]
        table = sinusoidal_table(count, width)
        assert table.dtype == torch.float32
        # both are rounded from float64, so a difference of one float64 bit may show in few entries
        wrong = (table.numpy() != np.array(expected).astype(np.float32)).mean()
        assert wrong < 1e-4
        assert np.abs(table.double().numpy() - np.array(expected)).max() <= 2**-25

    def test_the_class_token_is_at_position_zero(self) -> None:
        assert sinusoidal_table(3, 6)[0].tolist() == [0, 1, 0, 1, 0, 1]

    def test_nothing_is_drawn(self) -> None:
        before = torch.get_rng_state()
        sinusoidal_table(17, 64)
        add_position_embedding(nn.Module(), "sinusoidal", grid=(4, 4), width=64, head_width=16)
        assert torch.equal(torch.get_rng_state(), before)
        add_position_embedding(nn.Module(), "learned_1d", grid=(4, 4), width=64, head_width=16)
        assert not torch.equal(torch.get_rng_state(), before)  # the comparison can fail


class TestLearned2D:
    def test_a_patch_has_its_columns_and_its_rows_half(self) -> None:
        module = Learned2dPositionEmbedding((2, 3), 8)
        table = module()[0]
        assert table.shape == (7, 8)
        assert torch.equal(table[0], module.class_position[0])
        for row in range(2):
            for column in range(3):
                patch = table[1 + 3 * row + column]
                assert torch.equal(patch[:4], module.columns[column])
                assert torch.equal(patch[4:], module.rows[row])

    def test_an_odd_width_has_no_halves(self) -> None:
        with refused("recipe.conflict", "embed_dim: 7"):
            Learned2dPositionEmbedding((2, 2), 7)


class TestRelative:
    def test_each_pair_reads_the_vector_of_its_distance(self) -> None:
        module = RelativePositionEmbedding(4, 3)
        nn.init.normal_(module.offsets)
        query = torch.randn(2, 5, 4, 3)
        bias = module(query)
        assert bias.shape == (2, 5, 4, 4)
        for p in range(4):
            for q in range(4):
                vector = module.offsets[p - q + 3]
                expected = (query[:, :, p] * vector).sum(-1) / math.sqrt(3)
                torch.testing.assert_close(bias[:, :, p, q], expected)

    def test_every_distance_has_a_vector_that_is_used(self) -> None:
        module = RelativePositionEmbedding(4, 3)
        assert module.offsets.shape == (7, 3)
        assert sorted(set(module.index.flatten().tolist())) == list(range(7))
        assert set(module.state_dict()) == {"offsets"}


class TestPlaces:
    def test_usual_places(self) -> None:
        usual = {kind: resolve_location(kind, None) for kind in POSITION_KINDS}
        assert usual.pop("relative") == "every_layer"
        assert set(usual.values()) == {"stem"}
        assert [resolve_location("learned_2d", place) for place in POSITION_LOCATIONS] == list(
            POSITION_LOCATIONS
        )

    @pytest.mark.parametrize(
        "kind, where, code, named",
        [
            ("learned1d", None, "unknown_name", ["position", "'learned1d'", "'learned_1d'"]),
            ("none", "stm", "unknown_name", ["where", "'stm'", "'stem'"]),
            ("relative", "stem", "conflict", ["where", "every_layer or every_layer_shared"]),
        ],
    )
    def test_what_cannot_be(
        self, kind: str, where: str | None, code: str, named: list[str]
    ) -> None:
        with refused(f"recipe.{code}", *named):
            resolve_location(kind, where)

    @pytest.mark.parametrize(
        "kind, names, shape",
        [
            ("none", set(), None),
            ("sinusoidal", set(), (1, 7, 8)),  # a table that follows from the grid is in no file
            ("learned_1d", {"pos_embed"}, (1, 7, 8)),
            (
                "learned_2d",
                {"pos_embed.rows", "pos_embed.columns", "pos_embed.class_position"},
                (1, 7, 8),
            ),
            ("relative", {"pos_embed.offsets"}, None),
        ],
    )
    def test_what_is_attached(
        self, kind: str, names: set[str], shape: tuple[int, ...] | None
    ) -> None:
        holder = nn.Module()
        add_position_embedding(holder, kind, grid=(2, 3), width=8, head_width=4)
        assert set(holder.state_dict()) == names
        table = position_table(holder.pos_embed)
        assert (None if table is None else table.shape) == shape


class TestResize:
    def test_a_learned_table_keeps_its_class_token(self) -> None:
        table = torch.randn(1, 5, 6)
        moved = resize_position_embedding("blocks.3.pos_embed", table, (4, 3))
        assert moved.shape == (1, 13, 6)
        assert torch.equal(moved[:, 0], table[:, 0])

    def test_rows_and_columns_move_as_a_table_made_of_them_would(self) -> None:
        rows = torch.randn(4, 3)
        repeated_1ND = rows[:, None].expand(4, 4, 3).flatten(0, 1)[None]
        expected = resample_abs_pos_embed(repeated_1ND, [8, 8], num_prefix_tokens=0)
        expected_hwD = expected.unflatten(1, (8, 8))[0]
        moved = resize_position_embedding("pos_embed.rows", rows, (8, 2))
        torch.testing.assert_close(moved, expected_hwD[:, 0])
        assert resize_position_embedding("pos_embed.columns", rows, (8, 2)).shape == (2, 3)

    def test_distances_stay_for_the_loader_to_refuse(self) -> None:
        offsets = torch.randn(9, 4)
        assert resize_position_embedding("blocks.0.pos_embed.offsets", offsets, (4, 4)) is offsets


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "relative"])
def test_learned_positions_start_as_the_papers_code_has_them(kind: str) -> None:
    holder = torch.nn.Module()
    add_position_embedding(holder, kind, grid=(16, 16), width=512, head_width=512)
    for parameter in holder.parameters():
        assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1)
