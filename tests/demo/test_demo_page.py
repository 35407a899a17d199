"""Markup of the demo page: its content, and that names never become markup."""

from __future__ import annotations

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
from PIL import Image

from finetune.demo import markup as page
from finetune.demo.predictor import DemoPrediction
from finetune.formatting import TOO_FEW_IMAGES_NOTE

HOSTILE_NAME = "<img src=x onerror=alert(1)>\"'&"
INPUT_HWC = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def make_prediction(attention_HW: np.ndarray | None = None, name: str = "cat") -> DemoPrediction:
    return DemoPrediction(
        top=[(name, 0.75), ("dog", 0.25)], input_HWC=INPUT_HWC, attention_HW=attention_HW
    )


def embedded_images(text: str) -> list[np.ndarray]:
    sources = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded)))) for encoded in sources]


def test_result_shows_classes_and_the_model_input() -> None:
    text = page.render_result(make_prediction(np.eye(4, dtype=np.float32)))
    assert "cat" in text
    assert "75.0 %" in text
    assert text.index("cat") < text.index("dog")
    input_image, background, heatmap = embedded_images(text)
    assert np.array_equal(input_image, INPUT_HWC)
    assert np.array_equal(background, INPUT_HWC)
    assert heatmap.shape[2] == 4
    assert "32 × 24 pixels" in text
    assert "Attention rollout" in text


def test_an_image_of_no_known_class_is_marked() -> None:
    prediction = make_prediction()
    marked = dataclasses.replace(prediction, is_unknown=True)
    note = "none of the known classes"
    assert note in page.render_result(marked)
    assert note not in page.render_result(prediction)


def test_result_without_attention() -> None:
    text = page.render_result(make_prediction())
    assert len(embedded_images(text)) == 1
    assert "needs a model with global attention" in text


@pytest.mark.parametrize("name", [HOSTILE_NAME, "${1+1}", "{{x}}"])
def test_names_are_escaped(name: str) -> None:
    texts = [
        page.render_result(make_prediction(name=name)),
        page.render_header(name, [name]),
        page.render_footer([name], [name]),
        page.render_error(name),
    ]
    for text in texts:
        assert "<img src=x" not in text
        assert "onerror=alert(1)>" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;" in page.render_error(HOSTILE_NAME)


def test_too_few_images_note_is_a_warning() -> None:
    text = page.render_header("birds", ["3 classes", TOO_FEW_IMAGES_NOTE])
    assert text.count('class="ft-warning"') == 1
    assert f'<li class="ft-warning">{TOO_FEW_IMAGES_NOTE}</li>' in text
    assert "ft-warning" in page.stylesheet()


def test_heatmap_is_brightest_at_the_most_attended_patch() -> None:
    attention_HW = np.full((4, 6), 0.1, np.float32)
    attention_HW[1, 4] = 0.9
    heatmap = page.render_heatmap(attention_HW, (40, 60))
    assert heatmap.shape == (256, 384, 4)
    light = heatmap[..., :3].astype(int).sum(axis=2)
    row, column = np.unravel_index(int(light.argmax()), light.shape)
    assert (row // 64, column // 64) == (1, 4)
    assert heatmap[..., 3].min() > 100  # the image below stays visible everywhere
    assert heatmap[..., 3].max() < 255


def test_uniform_attention_gives_a_uniform_heatmap() -> None:
    heatmap = page.render_heatmap(np.full((3, 3), 0.25, np.float32), (24, 24))
    assert len(np.unique(heatmap.reshape(-1, 4), axis=0)) == 1


def test_extreme_probabilities_are_shown_as_bounds() -> None:
    prediction = DemoPrediction(
        top=[("cat", 0.99999), ("dog", 0.00001)], input_HWC=INPUT_HWC, attention_HW=None
    )
    assert "&gt; 99.9 %" in page.render_result(prediction)
    assert "&lt; 0.1 %" in page.render_result(prediction)


def test_stylesheet_loads_nothing_external() -> None:
    text = page.stylesheet()
    assert ".ft-head" in text
    assert "url(" not in text
    assert "@import" not in text
    assert "</style" not in text
