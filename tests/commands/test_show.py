"""`show`: which figures a model has, what they show, and why others are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from networks import build_network, random_images, save_random_network
from PIL import Image
from refusals import refused
from small_datasets import random_png, write_file

from finetune.commands.show import (
    draw_attention_distances,
    draw_attention_rollout,
    draw_patch_filters,
    draw_position_similarity,
    show_model,
)
from finetune.errors import WeightsError
from finetune.models.interpretability import attention_rollout


@pytest.fixture
def image_folder_args(tmp_path: Path) -> list[str]:
    for number in range(3):
        write_file(tmp_path / "in" / f"{number}.png", random_png(number, (40, 50)))
    return [str(tmp_path / "in")]


def test_vit_has_all_four_figures(tmp_path: Path, image_folder_args: list[str]) -> None:
    out = tmp_path / "deep" / "out"
    result = show_model("embedded:vit_nano", image_folder_args, out=out)
    names = [Path(file).name for file in result["files"]]
    assert names == ["filters.png", "positions.png", "rollout.png", "distances.png"]
    assert result["skipped"] == {}
    assert len(result["images"]) == 3
    for file in result["files"]:
        with Image.open(file) as image:
            assert min(image.size) > 300
            assert len(np.unique(np.asarray(image.convert("L")))) > 20  # not a blank image


def test_without_images_only_weights_are_shown(tmp_path: Path) -> None:
    result = show_model("embedded:vit_nano", out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["filters.png", "positions.png"]
    assert result["skipped"] == dict.fromkeys(
        ("rollout", "distances"), "needs images; give image files"
    )


def test_missing_figures_are_skipped_with_a_reason(
    tmp_path: Path, image_folder_args: list[str]
) -> None:
    result = show_model(
        save_random_network(tmp_path, "convnext"), image_folder_args, out=tmp_path / "out"
    )
    assert [Path(file).name for file in result["files"]] == ["filters.png"]
    assert "no table of position embeddings" in result["skipped"]["positions"]
    assert "do not all attend" in result["skipped"]["rollout"]
    assert "do not all attend" in result["skipped"]["distances"]


def test_nothing_to_show_is_refused(
    tmp_path: Path, image_folder_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Figure:
        raise WeightsError("none here")

    monkeypatch.setattr("finetune.commands.show.draw_patch_filters", refuse)
    with refused("weights.unsupported", "nothing to show"):
        show_model(
            save_random_network(tmp_path, "convnext"), image_folder_args, out=tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_unreadable_image_and_unwritable_out_are_refused(tmp_path: Path) -> None:
    with refused("data.unreadable", "nowhere.png"):
        show_model("embedded:vit_nano", [str(tmp_path / "nowhere.png")], out=tmp_path / "out")
    (tmp_path / "file").write_text("")
    with refused("setup.not_writable", "--out", "below"):
        show_model("embedded:vit_nano", out=tmp_path / "file" / "below")


def test_rollout_figure_multiplies_the_image_by_the_rollout() -> None:
    model = build_network("vit").model.eval()
    torch.nn.init.normal_(model.blocks[0].attn.qkv.weight, std=0.5)
    x, white = random_images(32), np.ones((2, 32, 32, 3))
    figure = draw_attention_rollout(
        model, x, white, names=["one.png", "a $name$ with a dollar.png"]
    )
    images = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    assert len(images) == 4
    assert np.array_equal(images[0], white[0])
    overlay = images[3][..., 0]
    assert overlay.min() == pytest.approx(0.12)
    assert overlay.max() == pytest.approx(1.0)
    rollout = attention_rollout(model, x)
    assert rollout is not None
    row, column = np.unravel_index(int(rollout[1].argmax()), (4, 4))
    patches = overlay.reshape(4, 8, 4, 8).mean(axis=(1, 3))
    assert np.unravel_index(int(patches.argmax()), (4, 4)) == (row, column)
    titles = [axes.get_title("left") for axes in figure.axes if axes.get_title("left")]
    assert titles == ["one.png", "a $name$ with a dollar.…"]


def test_position_similarity_shows_every_patch() -> None:
    model = build_network("vit").model.eval()
    figure = draw_position_similarity(model)
    grid = np.asarray(figure.axes[0].images[0].get_array().filled(np.nan))
    assert grid.shape == (4 * 5 - 1, 4 * 5 - 1)
    assert np.isnan(grid[4]).all()  # the line between two tiles
    assert grid[5 + 1, 5 * 2 + 2] == pytest.approx(
        1.0
    )  # the similarity of patch (1, 2) with itself


def test_attention_distances_have_one_dot_per_head() -> None:
    model = build_network("vit").model.eval()
    figure = draw_attention_distances(model, random_images(32))
    dots = np.asarray(figure.axes[0].collections[0].get_offsets())
    assert dots.shape == (2 * 2, 2)
    assert set(dots[:, 0]) == {1, 2}
    assert figure.axes[0].get_ylabel() == "pixels"


def test_figures_are_not_registered_with_pyplot() -> None:
    import matplotlib.pyplot as plt

    draw_patch_filters(build_network("vit").model)
    assert plt.get_fignums() == []
