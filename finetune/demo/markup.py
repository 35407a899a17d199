"""Render the HTML of the demo page, and the attention rollout as a heatmap over the image."""

# C channels, H W pixels

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from importlib import resources

import numpy as np
from PIL import Image

from finetune.demo.predictor import DemoPrediction
from finetune.formatting import TOO_FEW_IMAGES_NOTE, format_probability

__all__ = [
    "EMPTY_RESULT",
    "NO_LABEL_TEXT",
    "render_class",
    "render_error",
    "render_footer",
    "render_header",
    "render_heatmap",
    "render_result",
    "stylesheet",
]

# Dark violet, magenta, orange, pale yellow: lightness increases evenly, so the colormap can be read
# with color blindness.
_HEATMAP_COLORS = np.array([(24, 12, 60), (122, 28, 109), (237, 105, 37), (252, 246, 168)], float)
_HEATMAP_OPACITY = (0.5, 0.78)  # for the lowest and the highest attention
_HEATMAP_PIXELS = 384
NO_LABEL_TEXT = "No label reaches its threshold"
_UNKNOWN_TEXT = "Probably none of the known classes"
_PIXELATED_BELOW_PIXELS = 160  # smaller model inputs are enlarged without smoothing

EMPTY_RESULT = (
    '<div class="ft-empty"><p class="ft-empty-head">Upload an image to classify it</p>'
    "<p>The predictions appear here, with the model input and the attention rollout.</p></div>"
)


def stylesheet() -> str:
    """Return the CSS of the page."""
    return resources.files("finetune.demo").joinpath("style.css").read_text(encoding="utf-8")


def render_header(title: str, facts: Sequence[str]) -> str:
    """Render the header of the page.

    Args:
        title: the model's name.
        facts: short facts, such as "10 classes"; TOO_FEW_IMAGES_NOTE is styled as a warning.
    """
    warning = ' class="ft-warning"'
    items = "".join(
        f"<li{warning if fact == TOO_FEW_IMAGES_NOTE else ''}>{html.escape(fact)}</li>"
        for fact in facts
    )
    return (
        f'<header class="ft-head"><h1>{html.escape(title)}</h1>'
        f'<ul class="ft-facts" aria-label="About this model">{items}</ul></header>'
    )


def render_footer(class_names: Sequence[str], notes: Sequence[str]) -> str:
    """Render the footer: a collapsed list of all classes, and notes."""
    names = "".join(f"<li>{html.escape(name)}</li>" for name in class_names)
    paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f'<footer class="ft-foot"><details><summary>All {len(class_names)} classes'
        f"</summary><ul>{names}</ul></details>{paragraphs}</footer>"
    )


def render_error(message: str) -> str:
    """Render an error message instead of a result."""
    return (
        '<div class="ft-refusal" role="alert"><p class="ft-empty-head">'
        f"The image could not be classified</p><p>{html.escape(message)}</p></div>"
    )


def render_result(prediction: DemoPrediction) -> str:
    """Render the classes with their confidences, the model input and the attention heatmap."""
    list_class, labels_html = "ft-top", ""
    if prediction.thresholds is None:
        rows = "".join(map(render_class, prediction.top))
    else:
        rows = "".join(map(render_class, prediction.top, prediction.thresholds))
        top_and_threshold = zip(prediction.top, prediction.thresholds, strict=True)
        labels = ", ".join(
            name for (name, confidence), threshold in top_and_threshold if confidence >= threshold
        )
        list_class = "ft-top ft-several"
        labels_html = f'<p class="ft-labels">{html.escape(labels or NO_LABEL_TEXT)}</p>'
    if prediction.is_unknown:
        labels_html = f'<p class="ft-labels">{_UNKNOWN_TEXT}</p>'
    height, width = prediction.input_HWC.shape[:2]
    pixelated_class = " ft-coarse" if max(height, width) < _PIXELATED_BELOW_PIXELS else ""
    input_img = _img_tag(
        _png_data_uri(prediction.input_HWC), "The image after resizing and cropping"
    )
    size_text = f"{width} × {height} pixels"
    figures = [
        _figure_tag(input_img, f"<span>Model input</span><span>{size_text}</span>", pixelated_class)
    ]
    note_html = ""
    if prediction.attention_HW is None:
        note_html = (
            '<p class="ft-note">Attention rollout needs a model with global attention, '
            "such as a ViT.</p>"
        )
    else:
        heatmap_img = _img_tag(
            _png_data_uri(render_heatmap(prediction.attention_HW, (height, width))), ""
        )
        caption = (
            "<span>Attention rollout: where the network looks</span>"
            '<span class="ft-scale" aria-hidden="true">low<i></i>high</span>'
        )
        label = "Heatmap over the model input: bright patches received the most attention"
        overlay = (
            f'<span class="ft-stack" role="img" aria-label="{label}">'
            f"{input_img}{heatmap_img}</span>"
        )
        figures.append(_figure_tag(overlay, caption, pixelated_class))
    return (
        f'<section class="ft-result" aria-live="polite">{labels_html}'
        f'<ol class="{list_class}">{rows}</ol>'
        f'<div class="ft-figures">{"".join(figures)}</div>{note_html}</section>'
    )


def render_class(name_and_confidence: tuple[str, float], threshold: float | None = None) -> str:
    """Render a class with its confidence bar; for multi-label, with a mark at its threshold."""
    (name, confidence), class_attribute, threshold_mark, hidden_text = (
        name_and_confidence,
        "",
        "",
        "",
    )
    if threshold is not None:
        class_attribute = ' class="ft-predicted"' if confidence >= threshold else ""
        threshold_mark = f'<b style="left:{100 * threshold:.2f}%"></b>'
        hidden_text = f'<span class="ft-hidden">, threshold {format_probability(threshold)}</span>'
    return (
        f'<li{class_attribute}><span class="ft-name">{html.escape(name)}</span>'
        f'<span class="ft-share">{html.escape(format_probability(confidence))}{hidden_text}</span>'
        f'<span class="ft-bar" aria-hidden="true"><i style="width:{100 * confidence:.2f}%"></i>'
        f"{threshold_mark}</span></li>"
    )


def render_heatmap(attention_HW: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
    """Upsample an attention map smoothly and color it, as an overlay for the image.

    Args:
        attention_HW: one value per patch; the minimum becomes dark and the maximum bright.
        image_size: (height, width) in pixels; only the aspect ratio matters.
    Returns: (H, W, 4) uint8, RGBA.
    """
    value_range = float(attention_HW.max() - attention_HW.min())
    level = (
        (attention_HW - attention_HW.min()) / value_range
        if value_range > 0
        else np.zeros_like(attention_HW)
    )
    scale = _HEATMAP_PIXELS / max(image_size)
    target_size = (max(1, round(image_size[1] * scale)), max(1, round(image_size[0] * scale)))
    smooth = Image.fromarray(level.astype(np.float32)).resize(target_size, Image.Resampling.BICUBIC)
    color_position = np.clip(np.asarray(smooth), 0, 1) * (len(_HEATMAP_COLORS) - 1)
    color_indices = np.arange(len(_HEATMAP_COLORS))
    channels = [
        np.interp(color_position, color_indices, _HEATMAP_COLORS[:, channel])
        for channel in range(3)
    ]
    opacity = 255 * np.interp(color_position, (0, len(_HEATMAP_COLORS) - 1), _HEATMAP_OPACITY)
    return np.rint(np.stack([*channels, opacity], axis=-1)).astype(np.uint8)


def _png_data_uri(pixels: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def _img_tag(uri: str, alt_text: str) -> str:
    return f'<img src="{uri}" alt="{html.escape(alt_text)}">'


def _figure_tag(content: str, caption: str, pixelated_class: str) -> str:
    figure = f"{content}<figcaption>{caption}</figcaption>"
    return f'<figure class="ft-figure{pixelated_class}">{figure}</figure>'
