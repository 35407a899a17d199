"""`finetune show`: draw attention rollout and distances, patch filters, position embeddings."""

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

from finetune.data.decode import decode_image, hwc_to_chw
from finetune.data.image_paths import find_images
from finetune.errors import DataError, WeightsError
from finetune.files import make_writable_folder
from finetune.models.build import build_model
from finetune.models.interpretability import (
    attention_distances,
    attention_rollout,
    patch_filters,
    position_similarity,
    uniform_attention_distance,
)
from finetune.report.figure_style import (
    COLORS,
    create_figure,
    matplotlib_style,
    save_png,
    shorten_label,
)
from finetune.report.thumbnails import denormalize
from finetune.run.model import load_eval_pipeline
from finetune.transforms.pipeline import Pipeline

__all__ = [
    "draw_attention_distances",
    "draw_attention_rollout",
    "draw_patch_filters",
    "draw_position_similarity",
    "read_images",
    "show_model",
]

MAX_IMAGES = 12
# from dissimilar to similar through white; distinguishable with every type of color vision
_DIVERGING_COLORMAP = LinearSegmentedColormap.from_list(
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
_MIN_BRIGHTNESS = 0.12  # brightness of the least attended patch


def show_model(
    model: str | Path, images: Sequence[str | Path] = (), *, out: str | Path
) -> dict[str, Any]:
    """Draw each figure that the network supports into a PNG file.

    Args:
        model: run directory, model folder, `hf-hub:owner/name@revision` or timm name.
        images: files, folders and glob patterns; the first 12 images are used. Without images,
            only the filters and position embeddings are drawn.
        out: folder for filters.png, positions.png, rollout.png and distances.png.
    Returns: a dict with keys "files" (the written files), "skipped" (the reason by figure name) and
        "images" (the images used).
    Raises: WeightsError if the network supports none of the figures; DataError for an unreadable
        image; SetupError if the folder cannot be written.
    """
    built = build_model(str(model))
    network = built.model.eval()
    pipeline = load_eval_pipeline(model, built)
    paths, batch_BCHW = read_images(images, pipeline)
    preprocessing = built.preprocessing
    drawings: dict[str, Callable[[], Figure]] = {
        "filters": lambda: draw_patch_filters(network),
        "positions": lambda: draw_position_similarity(network),
    }
    skipped: dict[str, str] = {}
    if paths:
        names = [path.name for path in paths]
        pixels = denormalize(batch_BCHW, mean=preprocessing.mean, std=preprocessing.std)
        drawings["rollout"] = lambda: draw_attention_rollout(
            network, batch_BCHW, pixels, names=names
        )
        drawings["distances"] = lambda: draw_attention_distances(network, batch_BCHW)
    else:
        skipped |= dict.fromkeys(("rollout", "distances"), "needs images; give image files")
    folder, files = Path(out), []
    for name, draw in drawings.items():
        try:
            figure = draw()
        except WeightsError as error:
            skipped[name] = str(error)
            continue
        make_writable_folder(folder, option="--out")
        save_png(figure, folder / f"{name}.png")
        files.append(str(folder / f"{name}.png"))
    if not files:
        raise WeightsError(
            f"{model}: nothing to show ({'; '.join(skipped.values())})", code="weights.unsupported"
        )
    return {"files": files, "skipped": skipped, "images": [str(path) for path in paths]}


def read_images(images: Sequence[str | Path], pipeline: Pipeline) -> tuple[list[Path], Tensor]:
    """Read and preprocess the first 12 images.

    Args:
        images: files, folders and glob patterns.
        pipeline: the evaluation transforms of the network.
    Returns: the paths of the images, and a tensor (B, C, H, W) on the CPU.
    Raises: DataError for an unreadable image.
    """
    files = find_images(images)[:MAX_IMAGES] if images else []
    prepared = []
    for path, error in files:
        if error is not None:
            raise DataError(f"{path}: {error}; choose another image", code="data.unreadable")
        try:
            pixels_CHW = hwc_to_chw(decode_image(path, decode_size=pipeline.decode_size))
        except DataError as cause:
            raise DataError(f"{cause}; choose another image", code="data.unreadable") from None
        prepared.append(pipeline(pixels_CHW[None], device=torch.device("cpu"))[0])
    batch_BCHW = torch.stack(prepared) if prepared else torch.empty(0, 3, 1, 1)
    return [Path(path) for path, _ in files], batch_BCHW


# --- figures -------------------------------------------------------------------------------------


def draw_attention_rollout(
    network: Any, images_BCHW: Tensor, pixels_BHWC: np.ndarray, *, names: Sequence[str] = ()
) -> Figure:
    """Draw each image next to its attention rollout: brighter where the classifier attends.

    Brightness is the square root of the rollout.

    Args:
        network: the network, in evaluation mode.
        images_BCHW: the network's input.
        pixels_BHWC: the same images in [0, 1], to draw.
        names: titles of the images.
    Raises: WeightsError for a network without global attention between all patches.
    Source: Abnar and Zuidema 2020; ViT paper, figure 6.
    """
    rollout = attention_rollout(network, images_BCHW)
    if rollout is None:
        class_name = type(network).__name__
        raise WeightsError(
            f"{class_name}: its patches do not all attend to one another; choose a ViT",
            code="weights.unsupported",
        )
    height, width = pixels_BHWC.shape[1:3]
    upsampled_B1HW = torch.nn.functional.interpolate(
        rollout[:, None], size=(height, width), mode="bicubic", align_corners=False
    )
    brightness_BHW = upsampled_B1HW[:, 0].clamp_min(0).numpy()
    # scaled from minimum to maximum, because residual connections give every patch some attention;
    # the square root keeps one strong patch from darkening the rest
    brightness_BHW = brightness_BHW - brightness_BHW.min(axis=(1, 2), keepdims=True)
    brightness_BHW = np.sqrt(
        brightness_BHW / np.maximum(brightness_BHW.max(axis=(1, 2), keepdims=True), 1e-12)
    )
    count = len(pixels_BHWC)
    columns = min(3, count)
    rows = math.ceil(count / columns)
    image_height = 190 * height / width
    with matplotlib_style():
        figure = create_figure(columns * 2 * 196, rows * (image_height + 34) + 30)
        figure.suptitle(
            "Attention rollout", x=0.012, ha="left", size=13.5, weight="bold", color=COLORS["ink"]
        )
        grid = figure.subplots(rows, columns * 2, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for index in range(count):
            left, right = grid[index // columns, 2 * (index % columns) :][:2]
            original, brightness = pixels_BHWC[index], brightness_BHW[index][..., None]
            for axes, image in (
                (left, original),
                (right, original * (_MIN_BRIGHTNESS + (1 - _MIN_BRIGHTNESS) * brightness)),
            ):
                axes.imshow(image, interpolation="nearest", vmin=0, vmax=1)
            if names:
                left.set_title(shorten_label(names[index], 24), size=11, weight="normal", pad=5)
        figure.set_label(f"Attention rollout over {count} images: brighter where it attends")
    return figure


def draw_patch_filters(network: Any, *, num_components: int = 28) -> Figure:
    """Draw the principal components of the patch embedding filters.

    Args:
        network: a network whose first layer reads RGB patches.
        num_components: number of components, the strongest first.
    Raises: WeightsError if the network has no such first layer.
    Source: ViT paper, figure 7 (left).
    """
    filters = patch_filters(network, num_components=num_components)
    columns = min(7, len(filters))
    rows = math.ceil(len(filters) / columns)
    with matplotlib_style():
        figure = create_figure(columns * 72 + 16, rows * 72 + 44)
        figure.set_layout_engine("constrained", wspace=0.04, hspace=0.04)
        height, width = filters.shape[1:3]
        figure.suptitle(
            f"Filters of the first layer, {height} x {width} px: first {len(filters)} components",
            x=0.015,
            ha="left",
            size=12.5,
            weight="bold",
            color=COLORS["ink"],
        )
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            axes.set_axis_off()
            if index < len(filters):
                axes.imshow(filters[index], interpolation="nearest", vmin=0, vmax=1)
        figure.set_label(f"The first {len(filters)} principal components of the first layer")
    return figure


def draw_position_similarity(network: Any) -> Figure:
    """Draw the cosine similarity of each patch's position embedding to all others.

    Args:
        network: a network with learned position embeddings on a grid.
    Raises: WeightsError if the network has no such embeddings.
    Source: ViT paper, figure 7 (middle).
    """
    similarity = position_similarity(network)
    height, width = similarity.shape[:2]
    # one image instead of a hundred axes: each patch's map with a white border
    gap = 1 if max(height, width) <= 16 else 2
    board = np.full((height * (height + gap) - gap, width * (width + gap) - gap), np.nan)
    for row, column in np.ndindex(height, width):
        top, left = row * (height + gap), column * (width + gap)
        board[top : top + height, left : left + width] = similarity[row, column]
    with matplotlib_style():
        figure = create_figure(620, 560 * height / width + 20)
        axes = figure.subplots()
        image = axes.imshow(
            board, cmap=_DIVERGING_COLORMAP, vmin=-1, vmax=1, interpolation="nearest"
        )
        axes.set_title("Similarity of position embeddings")
        for axis, count in ((axes.xaxis, width), (axes.yaxis, height)):
            tick_step = max(1, math.ceil(count / 12))
            positions = range(0, count, tick_step)
            axis.set_ticks([position * (count + gap) + (count - 1) / 2 for position in positions])
            axis.set_ticklabels([str(position + 1) for position in positions])
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.spines[:].set_visible(False)
        colorbar = figure.colorbar(
            image, ax=axes, shrink=0.82, aspect=28, ticks=[-1, -0.5, 0, 0.5, 1]
        )
        colorbar.outline.set_visible(False)
        colorbar.set_label("cosine", color=COLORS["muted"])
        figure.set_label(f"Cosine between the position embeddings of {height} x {width} patches")
    return figure


def draw_attention_distances(network: Any, images_BCHW: Tensor) -> Figure:
    """Draw the mean attention distance of each head in each block.

    Args:
        network: the network, in evaluation mode.
        images_BCHW: the network's input.
    Raises: WeightsError for a network without global attention between all patches.
    Source: ViT paper, figure 7 (right).
    """
    distances = attention_distances(network, images_BCHW)
    blocks, heads = distances.shape
    with matplotlib_style():
        figure = create_figure(560, 380)
        axes = figure.subplots()
        block_numbers = np.arange(1, blocks + 1)
        axes.plot(
            block_numbers,
            distances.mean(axis=1),
            color=COLORS["val"],
            linewidth=1.6,
            label="mean",
        )
        axes.scatter(
            np.repeat(block_numbers, heads),
            np.sort(distances, axis=1).ravel(),
            color=COLORS["train"],
            s=26,
            alpha=0.6,
            linewidth=0,
            label="a head",
            zorder=3,
        )
        uniform_distance = uniform_attention_distance(network, images_BCHW)
        axes.axhline(
            uniform_distance,
            color=COLORS["muted"],
            linewidth=1,
            linestyle=(0, (3, 3)),
            label="even attention",
        )
        axes.set_ylim(0, 1.18 * max(uniform_distance, float(distances.max())))
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
