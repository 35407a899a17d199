"""models/architectures/position_embeddings.py: kinds, locations, and resizing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
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


def sinusoidal_entry(position: int, column: int, width: int) -> float:
    """Compute one entry of the fixed table with the standard library."""
    if column % 2 == 0:
        return math.sin(position / 10000 ** (column / width))
    return math.cos(position / 10000 ** ((column - 1) / width))


class TestSinusoidal:
    @pytest.mark.parametrize("count, width", [(17, 1024), (5, 7), (1, 2)])
    def test_equals_the_formula_up_to_rounding(self, count: int, width: int) -> None:
        expected = [
            [sinusoidal_entry(position, column, width) for column in range(width)]
            for position in range(count)
        ]
        table = sinusoidal_table(count, width)
        assert table.dtype == torch.float32
        # both are rounded from float64, so one differing float64 bit changes few float32 entries
        share_differing = (table.numpy() != np.array(expected).astype(np.float32)).mean()
        assert share_differing < 1e-4
        assert np.abs(table.double().numpy() - np.array(expected)).max() <= 2**-25

    def test_the_class_token_is_at_position_zero(self) -> None:
        assert sinusoidal_table(3, 6)[0].tolist() == [0, 1, 0, 1, 0, 1]

    def test_does_not_use_the_random_state(self) -> None:
        rng_state = torch.get_rng_state()
        sinusoidal_table(17, 64)
        add_position_embedding(nn.Module(), "sinusoidal", grid=(4, 4), width=64, head_width=16)
        assert torch.equal(torch.get_rng_state(), rng_state)
        add_position_embedding(nn.Module(), "learned_1d", grid=(4, 4), width=64, head_width=16)
        # control: learned tables do use it
        assert not torch.equal(torch.get_rng_state(), rng_state)


class TestLearned2D:
    def test_patches_concatenate_column_and_row_vectors(self) -> None:
        module = Learned2dPositionEmbedding((2, 3), 8)
        table = module()[0]
        assert table.shape == (7, 8)
        assert torch.equal(table[0], module.class_position[0])
        for row in range(2):
            for column in range(3):
                patch = table[1 + 3 * row + column]
                assert torch.equal(patch[:4], module.columns[column])
                assert torch.equal(patch[4:], module.rows[row])

    def test_rejects_an_odd_width(self) -> None:
        with pytest.raises(ValueError, match="embed_dim: 7"):
            Learned2dPositionEmbedding((2, 2), 7)


class TestRelative:
    def test_bias_of_a_pair_uses_the_vector_of_its_offset(self) -> None:
        module = RelativePositionEmbedding(4, 3)
        nn.init.normal_(module.offsets)
        query = torch.randn(2, 5, 4, 3)
        bias = module(query)
        assert bias.shape == (2, 5, 4, 4)
        for query_position in range(4):
            for key_position in range(4):
                offset_vector = module.offsets[query_position - key_position + 3]
                expected = (query[:, :, query_position] * offset_vector).sum(-1) / math.sqrt(3)
                torch.testing.assert_close(bias[:, :, query_position, key_position], expected)

    def test_every_offset_has_a_used_vector(self) -> None:
        module = RelativePositionEmbedding(4, 3)
        assert module.offsets.shape == (7, 3)
        assert sorted(set(module.index.flatten().tolist())) == list(range(7))
        assert set(module.state_dict()) == {"offsets"}


class TestLocations:
    def test_default_locations(self) -> None:
        defaults = {kind: resolve_location(kind, None) for kind in POSITION_KINDS}
        assert defaults.pop("relative") == "every_layer"
        assert set(defaults.values()) == {"stem"}
        assert [
            resolve_location("learned_2d", location) for location in POSITION_LOCATIONS
        ] == list(POSITION_LOCATIONS)

    @pytest.mark.parametrize(
        "kind, location, expected",
        [
            ("learned1d", None, "position: unknown 'learned1d'; did you mean 'learned_1d'"),
            ("none", "stm", "where: unknown 'stm'; did you mean 'stem'"),
            ("relative", "stem", "use every_layer or every_layer_shared"),
        ],
    )
    def test_rejects_unknown_and_conflicting_values(
        self, kind: str, location: str | None, expected: str
    ) -> None:
        with pytest.raises(ValueError, match=expected):
            resolve_location(kind, location)

    @pytest.mark.parametrize(
        "kind, names, shape",
        [
            ("none", set(), None),
            ("sinusoidal", set(), (1, 7, 8)),  # a table that follows from the grid is not saved
            ("learned_1d", {"pos_embed"}, (1, 7, 8)),
            (
                "learned_2d",
                {"pos_embed.rows", "pos_embed.columns", "pos_embed.class_position"},
                (1, 7, 8),
            ),
            ("relative", {"pos_embed.offsets"}, None),
        ],
    )
    def test_parameters_and_table_of_each_kind(
        self, kind: str, names: set[str], shape: tuple[int, ...] | None
    ) -> None:
        module = nn.Module()
        add_position_embedding(module, kind, grid=(2, 3), width=8, head_width=4)
        assert set(module.state_dict()) == names
        table = position_table(module.pos_embed)
        assert (None if table is None else table.shape) == shape


class TestResize:
    def test_a_learned_table_keeps_its_class_token(self) -> None:
        table = torch.randn(1, 5, 6)
        resized = resize_position_embedding("blocks.3.pos_embed", table, (4, 3))
        assert resized.shape == (1, 13, 6)
        assert torch.equal(resized[:, 0], table[:, 0])

    def test_rows_and_columns_resize_like_their_table(self) -> None:
        rows = torch.randn(4, 3)
        repeated_1ND = rows[:, None].expand(4, 4, 3).flatten(0, 1)[None]
        expected = resample_abs_pos_embed(repeated_1ND, [8, 8], num_prefix_tokens=0)
        expected_hwD = expected.unflatten(1, (8, 8))[0]
        resized = resize_position_embedding("pos_embed.rows", rows, (8, 2))
        torch.testing.assert_close(resized, expected_hwD[:, 0])
        assert resize_position_embedding("pos_embed.columns", rows, (8, 2)).shape == (2, 3)

    def test_relative_offsets_are_not_resized(self) -> None:
        offsets = torch.randn(9, 4)
        assert resize_position_embedding("blocks.0.pos_embed.offsets", offsets, (4, 4)) is offsets


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "relative"])
def test_learned_positions_have_the_initial_std_of_the_paper(kind: str) -> None:
    module = torch.nn.Module()
    add_position_embedding(module, kind, grid=(16, 16), width=512, head_width=512)
    for parameter in module.parameters():
        assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1)
