"""resize_posemb.py against scipy, timm and arrays from Google's loading code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from refusals import refused
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from finetune.models.weights.resize_posemb import (
    RESIZE_METHODS,
    default_resize_method,
    resize_posemb,
    square_grid,
)

# float32 input and output, float64 between: half a unit in the last place of values below 4.
TOLERANCE = 1e-6


def random_posemb(height: int, width: int, *, num_prefix: int = 1, depth: int = 8) -> torch.Tensor:
    return torch.randn(1, num_prefix + height * width, depth)


def scipy_zoom(
    posemb: torch.Tensor, source: tuple[int, int], target: tuple[int, int]
) -> np.ndarray:
    grid = posemb[0].double().numpy().reshape(*source, -1)
    factors = (target[0] / source[0], target[1] / source[1], 1)
    return zoom(grid, factors, order=1).reshape(1, target[0] * target[1], -1)


class TestPaper:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 12, 13, 15, 16, 18, 20, 24, 28, 32, 37])
    def test_equals_google_at_square_sizes(self, shared: Path, size: int) -> None:
        with np.load(shared / "oracles" / "oracle_vit.npz") as oracle:
            source, expected = oracle["posemb14"], oracle[f"posemb14_to_{size}"]
        resized = resize_posemb(torch.from_numpy(source), (size, size))
        assert resized.shape == expected.shape
        np.testing.assert_allclose(resized.numpy(), expected, atol=TOLERANCE, rtol=0)

    @pytest.mark.parametrize("grid", [(24, 16), (9, 4), (10, 20), (14, 28)])
    def test_equals_zoom_at_oblong_sizes(self, shared: Path, grid: tuple[int, int]) -> None:
        with np.load(shared / "oracles" / "oracle_vit.npz") as oracle:
            source = oracle["posemb14"]
            expected = oracle[f"posemb14_ext_{grid[0]}x{grid[1]}"]
        resized = resize_posemb(torch.from_numpy(source), grid)
        np.testing.assert_allclose(resized.numpy(), expected, atol=TOLERANCE, rtol=0)

    def test_equals_google_without_a_class_token(self, shared: Path) -> None:
        with np.load(shared / "oracles" / "oracle_vit.npz") as oracle:
            source, expected = oracle["posemb14"][:, 1:], oracle["posemb14_notok_to_24"]
        resized = resize_posemb(torch.from_numpy(source), (24, 24), num_prefix_tokens=0)
        np.testing.assert_allclose(resized.numpy(), expected, atol=TOLERANCE, rtol=0)

    @pytest.mark.parametrize(
        "source, target",
        [((14, 14), (24, 24)), ((8, 8), (3, 11)), ((6, 4), (9, 5)), ((2, 18), (6, 6))],
    )
    def test_equals_scipy(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        posemb = random_posemb(*source, num_prefix=0)
        resized = resize_posemb(posemb, target, num_prefix_tokens=0, source_grid=source)
        expected = scipy_zoom(posemb, source, target)
        np.testing.assert_allclose(resized.numpy(), expected, atol=TOLERANCE, rtol=0)

    def test_keeps_the_corners(self) -> None:
        posemb = random_posemb(5, 5, num_prefix=0)
        resized = resize_posemb(posemb, (9, 13), num_prefix_tokens=0)
        before, after = posemb.unflatten(1, (5, 5)), resized.unflatten(1, (9, 13))
        corners = [(0, 0), (0, -1), (-1, 0), (-1, -1)]
        assert all(
            torch.equal(before[0, row, column], after[0, row, column]) for row, column in corners
        )

    def test_computes_in_float64(self) -> None:
        # Large values: float32 arithmetic would miss by about 1e-1, float64 only rounds once.
        posemb = random_posemb(7, 7, num_prefix=0) * 1e6
        resized = resize_posemb(posemb, (11, 11), num_prefix_tokens=0)
        expected = torch.from_numpy(scipy_zoom(posemb, (7, 7), (11, 11))).float()
        assert torch.equal(resized, expected)


class TestTimm:
    @pytest.mark.parametrize("grid", [(24, 24), (7, 7), (24, 16), (9, 4)])
    @pytest.mark.parametrize("num_prefix", [0, 1, 5])
    def test_equals_timm(self, grid: tuple[int, int], num_prefix: int) -> None:
        posemb = random_posemb(14, 14, num_prefix=num_prefix)
        resized = resize_posemb(posemb, grid, method="timm", num_prefix_tokens=num_prefix)
        expected = resample_abs_pos_embed(posemb, list(grid), num_prefix_tokens=num_prefix)
        assert torch.equal(resized, expected)

    def test_differs_from_paper(self) -> None:
        posemb = random_posemb(14, 14)
        paper = resize_posemb(posemb, (24, 24), method="paper")
        assert not torch.allclose(resize_posemb(posemb, (24, 24), method="timm"), paper, atol=1e-3)


class TestDinov2:
    @pytest.mark.parametrize("grid", [(16, 16), (8, 8), (40, 24)])
    def test_equals_dinov2(self, grid: tuple[int, int]) -> None:
        posemb = random_posemb(37, 37)
        table_1Dhw = posemb[:, 1:].transpose(1, 2).reshape(1, -1, 37, 37)
        scale = ((grid[0] + 0.1) / 37, (grid[1] + 0.1) / 37)
        expected = torch.nn.functional.interpolate(table_1Dhw, scale_factor=scale, mode="bicubic")
        resized = resize_posemb(posemb, grid, method="dinov2")
        torch.testing.assert_close(
            resized[:, 1:], expected.flatten(2).transpose(1, 2), atol=1e-5, rtol=0
        )


class TestAll:
    @pytest.mark.parametrize("method", RESIZE_METHODS)
    @pytest.mark.parametrize("num_prefix", [1, 2, 5])
    def test_keeps_prefix_tokens(self, method: str, num_prefix: int) -> None:
        posemb = random_posemb(14, 14, num_prefix=num_prefix)
        resized = resize_posemb(posemb, (6, 9), method=method, num_prefix_tokens=num_prefix)
        assert resized.shape == (1, num_prefix + 54, 8)
        assert torch.equal(resized[:, :num_prefix], posemb[:, :num_prefix])

    @pytest.mark.parametrize("method", RESIZE_METHODS)
    def test_returns_the_input_for_the_same_grid(self, method: str) -> None:
        posemb = random_posemb(4, 6)
        assert resize_posemb(posemb, (4, 6), method=method, source_grid=(4, 6)) is posemb

    @pytest.mark.parametrize("method", RESIZE_METHODS)
    def test_resizes_to_another_grid_of_equally_many_patches(self, method: str) -> None:
        posemb = random_posemb(6, 6)
        resized = resize_posemb(posemb, (4, 9), method=method)
        assert resized.shape == posemb.shape
        assert not torch.equal(resized, posemb)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_keeps_the_dtype(self, dtype: torch.dtype) -> None:
        assert resize_posemb(random_posemb(4, 4).to(dtype), (6, 6)).dtype == dtype

    def test_rejects_an_unknown_source_grid(self) -> None:
        with refused("weights.wrong_shape", "24 position embeddings"):
            resize_posemb(random_posemb(6, 4), (9, 9))
        with refused("weights.wrong_shape", "(5, 5)"):
            resize_posemb(random_posemb(6, 4), (9, 9), source_grid=(5, 5))


@pytest.mark.parametrize(
    "name, method",
    [
        ("vit_base_patch16_224.augreg2_in21k_ft_in1k", "paper"),
        ("vit_base_patch16_224.orig_in21k", "paper"),
        ("vit_base_r50_s16_224.orig_in21k", "paper"),
        ("vit_base_patch16_siglip_256.v2_webli", "paper"),
        ("vit_base_patch14_dinov2.lvd142m", "timm"),
        ("vit_base_patch16_224.mae", "timm"),
        ("vit_base_patch16_clip_224.openai", "timm"),
        ("deit3_base_patch16_224.fb_in1k", "timm"),
    ],
)
def test_default_method_of_pretrained_weights(name: str, method: str) -> None:
    assert timm.get_pretrained_cfg(name, allow_unregistered=False) is not None
    assert default_resize_method(*name.split(".")) == method


def test_square_grid() -> None:
    assert square_grid(196) == (14, 14)
    assert square_grid(195) is None
    assert square_grid(0) is None
