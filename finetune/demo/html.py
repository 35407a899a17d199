"""The demo's markup, its colours, and the heat map over a picture."""

# C channels, H W pixels

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from importlib import resources

import numpy as np
from PIL import Image

from finetune.demo.inference import Reading
from finetune.text import TOO_FEW, confidence

__all__ = ["EMPTY", "footer", "header", "heat_map", "refusal", "result", "style"]

# Dark violet, magenta, orange, pale yellow: the lightness rises evenly, so that the order of the
# colours can be told without telling colours apart.
_HEAT = np.array([(24, 12, 60), (122, 28, 109), (237, 105, 37), (252, 246, 168)], float)
_HEAT_OPACITY = (0.5, 0.78)  # where it looked least the picture stays visible, and is darkened
_HEAT_PIXELS = 384
_NONE = "No label reaches its threshold"
_FEW_PIXELS = 160  # below this the pixels of the input are shown as squares

EMPTY = (
    '<div class="ft-empty"><p class="ft-empty-head">What is in the picture?</p>'
    "<p>The most likely classes will appear here, and what the model saw of it.</p></div>"
)


def style() -> str:
    """The page's style sheet."""
    return resources.files("finetune.demo").joinpath("style.css").read_text(encoding="utf-8")


def header(title: str, facts: Sequence[str]) -> str:
    """The head of the page.

    Args:
        title: the model's name.
        facts: short figures, such as "10 classes"; that there are too few images is amber.
    """
    warning = ' class="ft-warning"'
    items = "".join(
        f"<li{warning if fact == TOO_FEW else ''}>{html.escape(fact)}</li>" for fact in facts
    )
    return (
        f'<header class="ft-head"><h1>{html.escape(title)}</h1>'
        f'<ul class="ft-facts" aria-label="About this model">{items}</ul></header>'
    )


def footer(class_names: Sequence[str], notes: Sequence[str]) -> str:
    """The foot of the page: all classes, folded away, and what happens to pictures."""
    names = "".join(f"<li>{html.escape(name)}</li>" for name in class_names)
    paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f'<footer class="ft-foot"><details><summary>The {len(class_names)} classes it knows'
        f"</summary><ul>{names}</ul></details>{paragraphs}</footer>"
    )


def refusal(message: str) -> str:
    """The reason why there is no result, in its place."""
    return (
        '<div class="ft-refusal" role="alert"><p class="ft-empty-head">'
        f"This picture was not classified</p><p>{html.escape(message)}</p></div>"
    )


def result(reading: Reading) -> str:
    """The classes with their confidences, and the picture as the model saw it."""
    kind, said = "ft-top", ""
    if reading.thresholds is None:
        rows = "".join(map(_row, reading.top))
    else:
        rows = "".join(map(_row, reading.top, reading.thresholds))
        pairs = zip(reading.top, reading.thresholds, strict=True)
        labels = ", ".join(name for (name, share), threshold in pairs if share >= threshold)
        kind, said = "ft-top ft-several", f'<p class="ft-labels">{html.escape(labels or _NONE)}</p>'
    height, width = reading.seen_HWC.shape[:2]
    coarse = " ft-coarse" if max(height, width) < _FEW_PIXELS else ""
    seen = _image(_png(reading.seen_HWC), "The picture as the model saw it")
    size = f"{width} × {height} pixels"
    figures = [_figure(seen, f"<span>What the model saw</span><span>{size}</span>", coarse)]
    note = ""
    if reading.looked_HW is None:
        note = (
            '<p class="ft-note">This network has no attention over the whole picture, so there is '
            "no map of where it looked.</p>"
        )
    else:
        heat = _image(_png(heat_map(reading.looked_HW, (height, width))), "")
        caption = (
            "<span>Where it looked</span>"
            '<span class="ft-scale" aria-hidden="true">less<i></i>more</span>'
            '<span class="ft-hidden">: attention rollout, scaled to this picture</span>'
        )
        label = "The same picture under a heat map that is brightest where the model looked most"
        both = f'<span class="ft-stack" role="img" aria-label="{label}">{seen}{heat}</span>'
        figures.append(_figure(both, caption, coarse))
    return (
        f'<section class="ft-result" aria-live="polite">{said}<ol class="{kind}">{rows}</ol>'
        f'<div class="ft-figures">{"".join(figures)}</div>{note}</section>'
    )


def _row(pair: tuple[str, float], threshold: float | None = None) -> str:
    """A class with its bar and, where a picture may have several, its threshold marked."""
    (name, share), kind, mark, hidden = pair, "", "", ""
    if threshold is not None:
        kind = ' class="ft-said"' if share >= threshold else ""
        mark = f'<b style="left:{100 * threshold:.2f}%"></b>'
        hidden = f'<span class="ft-hidden">, a label from {confidence(threshold)} on</span>'
    return (
        f'<li{kind}><span class="ft-name">{html.escape(name)}</span>'
        f'<span class="ft-share">{html.escape(confidence(share))}{hidden}</span>'
        f'<span class="ft-bar" aria-hidden="true"><i style="width:{100 * share:.2f}%"></i>{mark}'
        "</span></li>"
    )


def heat_map(looked_HW: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Colour a map of the patches, smoothly, to be laid over the picture.

    Args:
        looked_HW: one value for each patch; the least becomes the darkest, the most the brightest.
        size: the picture's (height, width) in pixels; only its ratio matters.
    Returns: (H, W, 4) uint8, RGBA.
    """
    spread = float(looked_HW.max() - looked_HW.min())
    level = (looked_HW - looked_HW.min()) / spread if spread > 0 else np.zeros_like(looked_HW)
    scale = _HEAT_PIXELS / max(size)
    target = (max(1, round(size[1] * scale)), max(1, round(size[0] * scale)))
    smooth = Image.fromarray(level.astype(np.float32)).resize(target, Image.Resampling.BICUBIC)
    place = np.clip(np.asarray(smooth), 0, 1) * (len(_HEAT) - 1)
    stops = np.arange(len(_HEAT))
    colours = [np.interp(place, stops, _HEAT[:, channel]) for channel in range(3)]
    opacity = 255 * np.interp(place, (0, len(_HEAT) - 1), _HEAT_OPACITY)
    return np.rint(np.stack([*colours, opacity], axis=-1)).astype(np.uint8)


def _png(pixels: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def _image(address: str, text: str) -> str:
    return f'<img src="{address}" alt="{html.escape(text)}">'


def _figure(inside: str, caption: str, coarse: str) -> str:
    return f'<figure class="ft-figure{coarse}">{inside}<figcaption>{caption}</figcaption></figure>'
