"""Look into a network: `finetune show` draws where it looks and what its first layers learned."""

# B batch, C channels, H W pixels, h w patches

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from finetune.commands.predict_io import find_files
from finetune.data.decode import decode, planes
from finetune.errors import DataError, WeightsError
from finetune.files import make_folder
from finetune.models.attention import (
    attention_distances,
    attention_rollout,
    even_distance,
    patch_filters,
    position_similarity,
)
from finetune.models.build import build
from finetune.report.style import COLORS, blank, legible, save_png, style
from finetune.report.thumbnails import visible
from finetune.run.pipeline import pipeline_of
from finetune.transforms.pipeline import Pipeline

__all__ = [
    "draw_distances",
    "draw_filters",
    "draw_positions",
    "draw_rollout",
    "read_images",
    "show",
]

MOST_IMAGES = 12
# From unlike over nothing to alike: of COLORS, seen apart with every kind of colour vision.
_SIGNED = LinearSegmentedColormap.from_list(
    "signed",
    [
        (0.0, COLORS["val"]),
        (0.3, "#f5d9c0"),
        (0.5, "#ffffff"),
        (0.68, "#c3d9ef"),
        (0.9, COLORS["train"]),
        (1.0, "#0b2f5c"),
    ],
)
_DIMMED = 0.12  # what remains of a part of the image that was not looked at


def show(
    model: str | Path, images: Sequence[str | Path] = (), *, out: str | Path
) -> dict[str, Any]:
    """Draw the pictures that this network has, one PNG for each.

    Args:
        model: run directory, model folder, `hf-hub:owner/name@revision` or timm name.
        images: files, folders and patterns, the first 12 of them; without any there are only the
            pictures of the weights.
        out: folder for filters.png, positions.png, rollout.png and distances.png.
    Returns: {"files": what was written, "skipped": picture to why there is none, "images"}.
    Raises: WeightsError for a network without any of these pictures; DataError for an image that
        cannot be read; SetupError if the folder cannot be written.
    """
    built = build(str(model))
    network = built.model.eval()
    pipeline = pipeline_of(model, built.preprocessing)
    paths, batch_BCHW = read_images(images, pipeline)
    prepared = built.preprocessing
    drawings: dict[str, Callable[[], Figure]] = {
        "filters": lambda: draw_filters(network),
        "positions": lambda: draw_positions(network),
    }
    skipped: dict[str, str] = {}
    if paths:
        names = [path.name for path in paths]
        pixels = visible(batch_BCHW, mean=prepared.mean, std=prepared.std)
        drawings["rollout"] = lambda: draw_rollout(network, batch_BCHW, pixels, names=names)
        drawings["distances"] = lambda: draw_distances(network, batch_BCHW)
    else:
        skipped |= dict.fromkeys(("rollout", "distances"), "needs images; name some")
    folder, files = Path(out), []
    for name, draw in drawings.items():
        try:
            figure = draw()
        except WeightsError as error:
            skipped[name] = str(error)
            continue
        make_folder(folder, option="--out")
        save_png(figure, folder / f"{name}.png")
        files.append(str(folder / f"{name}.png"))
    if not files:
        raise WeightsError(
            f"{model}: nothing to show ({'; '.join(skipped.values())})", code="weights.unsupported"
        )
    return {"files": files, "skipped": skipped, "images": [str(path) for path in paths]}


def read_images(images: Sequence[str | Path], pipeline: Pipeline) -> tuple[list[Path], Tensor]:
    """Read the first 12 images, as the network takes them.

    Args:
        images: files, folders and patterns.
        pipeline: of the network, see `make_pipeline`.
    Returns: their paths, and (B, C, H, W) on the CPU.
    Raises: DataError for an image that cannot be read.
    """
    files = find_files(images)[:MOST_IMAGES] if images else []
    prepared = []
    for path, error in files:
        if error is not None:
            raise DataError(f"{path}: {error}; name another", code="data.unreadable")
        try:
            pixels_CHW = planes(decode(path, size=pipeline.decode_size))
        except DataError as cause:
            raise DataError(f"{cause}; name another", code="data.unreadable") from None
        prepared.append(pipeline(pixels_CHW[None], device=torch.device("cpu"))[0])
    batch_BCHW = torch.stack(prepared) if prepared else torch.empty(0, 3, 1, 1)
    return [Path(path) for path, _ in files], batch_BCHW


# --- the pictures --------------------------------------------------------------------------------


def draw_rollout(
    network: Any, images_BCHW: Tensor, pixels_BHWC: np.ndarray, *, names: Sequence[str] = ()
) -> Figure:
    """Draw each image beside itself, lit where the classifier reads it, by the square root.

    Args:
        network: in evaluation mode.
        images_BCHW: as the network takes them.
        pixels_BHWC: the same images in [0, 1].
        names: under the images.
    Raises: WeightsError for a network without attention between all patches.
    Source: Abnar and Zuidema 2020; ViT paper, figure 6.
    """
    seen = attention_rollout(network, images_BCHW)
    if seen is None:
        kind = type(network).__name__
        raise WeightsError(
            f"{kind}: its patches do not all attend to one another", code="weights.unsupported"
        )
    height, width = pixels_BHWC.shape[1:3]
    smooth_B1HW = torch.nn.functional.interpolate(
        seen[:, None], size=(height, width), mode="bicubic", align_corners=False
    )
    light_BHW = smooth_B1HW[:, 0].clamp_min(0).numpy()
    # From the least to the most, since the residual connections light every part a little; the
    # root keeps one strong patch from leaving the rest in the dark.
    light_BHW = light_BHW - light_BHW.min(axis=(1, 2), keepdims=True)
    light_BHW = np.sqrt(light_BHW / np.maximum(light_BHW.max(axis=(1, 2), keepdims=True), 1e-12))
    count = len(pixels_BHWC)
    columns = min(3, count)
    rows = math.ceil(count / columns)
    tall = 190 * height / width
    with style():
        figure = blank(columns * 2 * 196, rows * (tall + 34) + 30)
        figure.suptitle(
            "Attention rollout", x=0.012, ha="left", size=13.5, weight="bold", color=COLORS["ink"]
        )
        grid = figure.subplots(rows, columns * 2, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for index in range(count):
            left, right = grid[index // columns, 2 * (index % columns) :][:2]
            plain, light = pixels_BHWC[index], light_BHW[index][..., None]
            for axes, image in ((left, plain), (right, plain * (_DIMMED + (1 - _DIMMED) * light))):
                axes.imshow(image, interpolation="nearest", vmin=0, vmax=1)
            if names:
                left.set_title(legible(names[index], 24), size=11, weight="normal", pad=5)
        figure.set_label(f"Attention rollout over {count} images: bright where the network looks")
    return figure


def draw_filters(network: Any, *, components: int = 28) -> Figure:
    """Draw the principal components of the filters that read the patches.

    Args:
        network: any whose first layer reads RGB patches.
        components: how many, the strongest first.
    Raises: WeightsError for another first layer.
    Source: ViT paper, figure 7 (left).
    """
    filters = patch_filters(network, components=components)
    columns = min(7, len(filters))
    rows = math.ceil(len(filters) / columns)
    with style():
        figure = blank(columns * 72 + 16, rows * 72 + 44)
        figure.set_layout_engine("constrained", wspace=0.04, hspace=0.04)
        height, width = filters.shape[1:3]
        figure.suptitle(
            f"Filters of the first layer, {height} x {width} px: first {len(filters)} components",
            **{"x": 0.015, "ha": "left", "size": 12.5, "weight": "bold", "color": COLORS["ink"]},
        )
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            axes.set_axis_off()
            if index < len(filters):
                axes.imshow(filters[index], interpolation="nearest", vmin=0, vmax=1)
        figure.set_label(f"The first {len(filters)} principal components of the first layer")
    return figure


def draw_positions(network: Any) -> Figure:
    """Draw, for each patch, how much alike its position embedding is to all others.

    Args:
        network: with a table of position embeddings on a grid.
    Raises: WeightsError if it has none.
    Source: ViT paper, figure 7 (middle).
    """
    alike = position_similarity(network)
    height, width = alike.shape[:2]
    # one picture instead of a hundred axes: each patch's map with a white line around it
    gap = 1 if max(height, width) <= 16 else 2
    board = np.full((height * (height + gap) - gap, width * (width + gap) - gap), np.nan)
    for row, column in np.ndindex(height, width):
        top, left = row * (height + gap), column * (width + gap)
        board[top : top + height, left : left + width] = alike[row, column]
    with style():
        figure = blank(620, 560 * height / width + 20)
        axes = figure.subplots()
        image = axes.imshow(board, cmap=_SIGNED, vmin=-1, vmax=1, interpolation="nearest")
        axes.set_title("Similarity of position embeddings")
        for axis, count in ((axes.xaxis, width), (axes.yaxis, height)):
            every = max(1, math.ceil(count / 12))
            places = range(0, count, every)
            axis.set_ticks([place * (count + gap) + (count - 1) / 2 for place in places])
            axis.set_ticklabels([str(place + 1) for place in places])
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, shrink=0.82, aspect=28, ticks=[-1, -0.5, 0, 0.5, 1])
        bar.outline.set_visible(False)
        bar.set_label("cosine", color=COLORS["muted"])
        figure.set_label(f"Cosine between the position embeddings of {height} x {width} patches")
    return figure


def draw_distances(network: Any, images_BCHW: Tensor) -> Figure:
    """Draw how far each head of each block looks.

    Args:
        network: in evaluation mode.
        images_BCHW: as the network takes them.
    Raises: WeightsError for a network without attention between all patches.
    Source: ViT paper, figure 7 (right).
    """
    distances = attention_distances(network, images_BCHW)
    blocks, heads = distances.shape
    with style():
        figure = blank(560, 380)
        axes = figure.subplots()
        places = np.arange(1, blocks + 1)
        axes.plot(
            *(places, distances.mean(axis=1)), color=COLORS["val"], linewidth=1.6, label="mean"
        )
        dots: Any = {"s": 26, "alpha": 0.6, "linewidth": 0, "label": "a head", "zorder": 3}
        each = np.sort(distances, axis=1).ravel()
        axes.scatter(np.repeat(places, heads), each, color=COLORS["train"], **dots)
        even = even_distance(network, images_BCHW)
        dashes: Any = {"linewidth": 1, "linestyle": (0, (3, 3)), "label": "even attention"}
        axes.axhline(even, color=COLORS["muted"], **dashes)
        axes.set_ylim(0, 1.18 * max(even, float(distances.max())))
        axes.set_title("Mean attention distance")
        axes.set(xlabel="block", ylabel="pixels")
        axes.grid(axis="y")
        axes.set_xlim(0.5, blocks + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, handlelength=1.3)
        count = len(images_BCHW)
        figure.set_label(
            f"Mean attention distance of {heads} heads in {blocks} blocks, {count} images"
        )
    return figure
