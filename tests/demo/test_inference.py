"""One picture read: the numbers of `predict`, the pixels of the pipeline, the map of attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_server import ODD_NAMES, save_small_model
from PIL import Image
from refusals import refused

from finetune.data.decode import decode_image
from finetune.demo.predictor import TOP_K, DemoPredictor
from finetune.errors import DataError
from finetune.inference import Classifier
from finetune.models.interpretability import attention_rollout


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    return Classifier.load(
        save_small_model(tmp_path_factory.mktemp("models") / "vit"), device="cpu"
    )


@pytest.fixture
def turned(tmp_path: Path) -> Path:
    """A JPEG that its camera says to turn: red above blue once upright."""
    pixels = np.zeros((40, 64, 3), np.uint8)
    pixels[:, :32, 0] = 255
    pixels[:, 32:, 2] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "turned.jpg"
    Image.fromarray(pixels).save(file, exif=exif, quality=95)
    return file


def test_it_answers_as_predict_does(classifier: Classifier, turned: Path) -> None:
    reading = DemoPredictor(classifier).predict(turned)
    (row,) = classifier.predict(turned, top_k=TOP_K)
    assert [name for name, _ in reading.top] == [one["label"] for one in row["predictions"]]
    assert [share for _, share in reading.top] == [one["confidence"] for one in row["predictions"]]
    assert sorted(name for name, _ in reading.top) == sorted(ODD_NAMES)


def test_it_sees_the_upright_pixels_of_the_pipeline(classifier: Classifier, turned: Path) -> None:
    reading = DemoPredictor(classifier).predict(turned)
    height, width = classifier.pipeline.image_size
    assert reading.input_HWC.shape == (height, width, 3)
    top, bottom = reading.input_HWC[: height // 4], reading.input_HWC[-height // 4 :]
    assert top[..., 0].mean() > 200 > 50 > top[..., 2].mean()
    assert bottom[..., 2].mean() > 200 > 50 > bottom[..., 0].mean()
    pixels = torch.from_numpy(decode_image(turned)).permute(2, 0, 1)[None]
    normalised = classifier.pipeline(pixels)[0]
    back = normalised * 0.5 + 0.5  # the network's mean and std
    seen = torch.from_numpy(reading.input_HWC).permute(2, 0, 1) / 255
    # rounded to whole levels, and clipped where the resampling overshoots
    assert float((back.clamp(0, 1) - seen).abs().max()) <= 0.51 / 255


def test_it_looked_where_the_rollout_says(classifier: Classifier, turned: Path) -> None:
    reading = DemoPredictor(classifier).predict(turned)
    pixels = torch.from_numpy(decode_image(turned)).permute(2, 0, 1)[None]
    expected = attention_rollout(classifier.network, classifier.pipeline(pixels))
    assert expected is not None
    assert reading.attention_HW is not None
    assert np.array_equal(reading.attention_HW, expected[0].numpy())


def test_a_network_without_attention_has_no_map(tmp_path: Path, turned: Path) -> None:
    model = save_small_model(tmp_path / "resnet", "resnet")
    assert DemoPredictor(Classifier.load(model, device="cpu")).predict(turned).attention_HW is None


def test_a_temperature_softens(classifier: Classifier, turned: Path) -> None:
    soft = Classifier(
        classifier.network,
        classifier.pipeline,
        classifier.class_names,
        device="cpu",
        temperature=4.0,
    )
    sharp, softer = (
        DemoPredictor(classifier).predict(turned).top,
        DemoPredictor(soft).predict(turned).top,
    )
    assert [name for name, _ in softer] == [name for name, _ in sharp]
    assert softer[0][1] < sharp[0][1]
    assert softer[0][1] == soft.predict(turned, top_k=1)[0]["predictions"][0]["confidence"]


def test_what_is_no_picture_is_refused_without_its_name(
    classifier: Classifier, tmp_path: Path
) -> None:
    reader = DemoPredictor(classifier)
    page, many, cut = tmp_path / "page.png", tmp_path / "many.png", tmp_path / "cut.jpg"
    page.write_text("<html>moved</html>")
    Image.new("1", (9000, 9000)).save(many)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8)).save(cut)
    cut.write_bytes(cut.read_bytes()[:900])
    for file, named in ((page, "HTML page"), (many, "9000 x 9000 pixels"), (cut, "truncated")):
        with pytest.raises(DataError, match=named) as caught:
            reader.predict(file)
        assert caught.value.code.startswith("data.")
        assert str(tmp_path) not in str(caught.value)
        assert not str(caught.value).startswith("file")


def test_damaged_weights_are_named(tmp_path: Path, turned: Path) -> None:
    classifier = Classifier.load(save_small_model(tmp_path / "vit"), device="cpu")
    with torch.no_grad():
        next(classifier.network.parameters()).fill_(float("nan"))
    with refused("weights.not_finite"):
        DemoPredictor(classifier).predict(turned)


def test_threads_get_their_own_answers(classifier: Classifier, tmp_path: Path) -> None:
    reader, files = DemoPredictor(classifier), []
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (30 + number, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        files.append(tmp_path / f"{number}.png")
    alone = [reader.predict(file) for file in files]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(reader.predict, files))
    assert len({reading.top[0][1] for reading in alone}) == 12
    for one, other in zip(alone, together, strict=True):
        assert one.top == other.top
        assert np.array_equal(one.input_HWC, other.input_HWC)
        assert one.attention_HW is not None
        assert other.attention_HW is not None
        assert np.array_equal(one.attention_HW, other.attention_HW)
