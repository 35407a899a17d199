"""The demo's markup: what it says, and that names never become markup."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from finetune.demo import markup as page
from finetune.demo.predictor import DemoPrediction
from finetune.formatting import TOO_FEW_IMAGES_NOTE

EVIL = "<img src=x onerror=alert(1)>\"'&"
SEEN = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def reading(looked: np.ndarray | None = None, name: str = "cat") -> DemoPrediction:
    return DemoPrediction(top=[(name, 0.75), ("dog", 0.25)], input_HWC=SEEN, attention_HW=looked)


def pictures(text: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in found]


def test_a_result_shows_classes_and_exactly_what_the_model_saw() -> None:
    text = page.render_result(reading(np.eye(4, dtype=np.float32)))
    assert "cat" in text
    assert "75.0 %" in text
    assert text.index("cat") < text.index("dog")
    seen, under, heat = pictures(text)
    assert np.array_equal(seen, SEEN)
    assert np.array_equal(under, SEEN)
    assert heat.shape[2] == 4
    assert "32 × 24 pixels" in text
    assert "Where it looked" in text


def test_without_attention_it_says_so() -> None:
    text = page.render_result(reading())
    assert len(pictures(text)) == 1
    assert "no map of where it looked" in text
    assert "heat" not in text


@pytest.mark.parametrize("name", [EVIL, "${1+1}", "{{x}}"])
def test_names_are_text(name: str) -> None:
    texts = [
        page.render_result(reading(name=name)),
        page.render_header(name, [name]),
        page.render_footer([name], [name]),
        page.render_error(name),
    ]
    for text in texts:
        assert "<img src=x" not in text
        assert "onerror=alert(1)>" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;" in page.render_error(EVIL)


def test_too_few_images_are_marked() -> None:
    text = page.render_header("birds", ["3 classes", TOO_FEW_IMAGES_NOTE])
    assert text.count('class="ft-warning"') == 1
    assert f'<li class="ft-warning">{TOO_FEW_IMAGES_NOTE}</li>' in text
    assert "ft-warning" in page.stylesheet()


def test_the_brightest_place_is_where_it_looked_most() -> None:
    looked = np.full((4, 6), 0.1, np.float32)
    looked[1, 4] = 0.9
    heat = page.render_heatmap(looked, (40, 60))
    assert heat.shape == (256, 384, 4)
    light = heat[..., :3].astype(int).sum(axis=2)
    row, column = np.unravel_index(int(light.argmax()), light.shape)
    assert (row // 64, column // 64) == (1, 4)
    assert heat[..., 3].min() > 100  # the picture under it stays visible everywhere
    assert heat[..., 3].max() < 255


def test_an_even_map_is_even() -> None:
    heat = page.render_heatmap(np.full((3, 3), 0.25, np.float32), (24, 24))
    assert len(np.unique(heat.reshape(-1, 4), axis=0)) == 1


def test_no_more_certainty_than_there_is() -> None:
    one = DemoPrediction(
        top=[("cat", 0.99999), ("dog", 0.00001)], input_HWC=SEEN, attention_HW=None
    )
    assert "&gt; 99.9 %" in page.render_result(one)
    assert "&lt; 0.1 %" in page.render_result(one)


def test_the_style_asks_for_nothing_from_elsewhere() -> None:
    text = page.stylesheet()
    assert ".ft-head" in text
    assert "url(" not in text
    assert "@import" not in text
    assert "</style" not in text
