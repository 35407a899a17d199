"""The demo predictor: confidences of `predict`, pixels of the pipeline, and attention map."""

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
from finetune.evaluation.unknown_classes import UnknownClassScore
from finetune.inference import Classifier
from finetune.models.interpretability import attention_rollout


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    return Classifier.load(
        save_small_model(tmp_path_factory.mktemp("models") / "vit"), device="cpu"
    )


@pytest.fixture
def rotated_jpeg(tmp_path: Path) -> Path:
    """A JPEG with an EXIF rotation: red above blue once upright."""
    pixels = np.zeros((40, 64, 3), np.uint8)
    pixels[:, :32, 0] = 255
    pixels[:, 32:, 2] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "turned.jpg"
    Image.fromarray(pixels).save(file, exif=exif, quality=95)
    return file


def test_matches_classifier_predict(classifier: Classifier, rotated_jpeg: Path) -> None:
    prediction = DemoPredictor(classifier).predict(rotated_jpeg)
    (row,) = classifier.predict(rotated_jpeg, top_k=TOP_K)
    assert [name for name, _ in prediction.top] == [
        expected["label"] for expected in row["predictions"]
    ]
    assert [confidence for _, confidence in prediction.top] == [
        expected["confidence"] for expected in row["predictions"]
    ]
    assert sorted(name for name, _ in prediction.top) == sorted(ODD_NAMES)


@pytest.mark.parametrize("threshold", [-1e6, 1e6])
def test_images_of_no_known_class(
    classifier: Classifier, rotated_jpeg: Path, threshold: float
) -> None:
    width = classifier.network.num_features
    score = UnknownClassScore(torch.zeros(width), torch.eye(width, 2).half(), 1.0, threshold)
    marking = Classifier(
        classifier.network,
        classifier.pipeline,
        classifier.class_names,
        device="cpu",
        unknown_score=score,
    )
    assert DemoPredictor(marking).predict(rotated_jpeg).is_unknown is (threshold < 0)
    assert not DemoPredictor(classifier).predict(rotated_jpeg).is_unknown


def test_input_pixels_are_upright_and_from_the_pipeline(
    classifier: Classifier, rotated_jpeg: Path
) -> None:
    prediction = DemoPredictor(classifier).predict(rotated_jpeg)
    height, width = classifier.pipeline.image_size
    assert prediction.input_HWC.shape == (height, width, 3)
    top, bottom = prediction.input_HWC[: height // 4], prediction.input_HWC[-height // 4 :]
    assert top[..., 0].mean() > 200 > 50 > top[..., 2].mean()
    assert bottom[..., 2].mean() > 200 > 50 > bottom[..., 0].mean()
    pixels = torch.from_numpy(decode_image(rotated_jpeg)).permute(2, 0, 1)[None]
    normalized = classifier.pipeline(pixels)[0]
    denormalized = normalized * 0.5 + 0.5  # the network's mean and std
    input_pixels = torch.from_numpy(prediction.input_HWC).permute(2, 0, 1) / 255
    # rounded to whole levels, and clipped where the resampling overshoots
    assert float((denormalized.clamp(0, 1) - input_pixels).abs().max()) <= 0.51 / 255


def test_attention_map_matches_the_rollout(classifier: Classifier, rotated_jpeg: Path) -> None:
    prediction = DemoPredictor(classifier).predict(rotated_jpeg)
    pixels = torch.from_numpy(decode_image(rotated_jpeg)).permute(2, 0, 1)[None]
    expected = attention_rollout(classifier.network, classifier.pipeline(pixels))
    assert expected is not None
    assert prediction.attention_HW is not None
    assert np.array_equal(prediction.attention_HW, expected[0].numpy())


def test_network_without_attention_has_no_map(tmp_path: Path, rotated_jpeg: Path) -> None:
    model = save_small_model(tmp_path / "resnet", "resnet")
    assert (
        DemoPredictor(Classifier.load(model, device="cpu")).predict(rotated_jpeg).attention_HW
        is None
    )


def test_temperature_softens_confidences(classifier: Classifier, rotated_jpeg: Path) -> None:
    soft = Classifier(
        classifier.network,
        classifier.pipeline,
        classifier.class_names,
        device="cpu",
        temperature=4.0,
    )
    sharp, softer = (
        DemoPredictor(classifier).predict(rotated_jpeg).top,
        DemoPredictor(soft).predict(rotated_jpeg).top,
    )
    assert [name for name, _ in softer] == [name for name, _ in sharp]
    assert softer[0][1] < sharp[0][1]
    assert softer[0][1] == soft.predict(rotated_jpeg, top_k=1)[0]["predictions"][0]["confidence"]


def test_invalid_image_error_hides_the_path(classifier: Classifier, tmp_path: Path) -> None:
    predictor = DemoPredictor(classifier)
    page, many, cut = tmp_path / "page.png", tmp_path / "many.png", tmp_path / "cut.jpg"
    page.write_text("<html>moved</html>")
    Image.new("1", (9000, 9000)).save(many)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8)).save(cut)
    cut.write_bytes(cut.read_bytes()[:900])
    for file, message in ((page, "HTML page"), (many, "9000 x 9000 pixels"), (cut, "truncated")):
        with pytest.raises(DataError, match=message) as caught:
            predictor.predict(file)
        assert caught.value.code.startswith("data.")
        assert str(tmp_path) not in str(caught.value)
        assert not str(caught.value).startswith("file")


def test_non_finite_weights_are_an_error(tmp_path: Path, rotated_jpeg: Path) -> None:
    classifier = Classifier.load(save_small_model(tmp_path / "vit"), device="cpu")
    with torch.no_grad():
        next(classifier.network.parameters()).fill_(float("nan"))
    with refused("weights.not_finite"):
        DemoPredictor(classifier).predict(rotated_jpeg)


def test_concurrent_predictions_are_independent(classifier: Classifier, tmp_path: Path) -> None:
    predictor, files = DemoPredictor(classifier), []
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (30 + number, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        files.append(tmp_path / f"{number}.png")
    sequential = [predictor.predict(file) for file in files]
    with ThreadPoolExecutor(6) as pool:
        concurrent = list(pool.map(predictor.predict, files))
    assert len({prediction.top[0][1] for prediction in sequential}) == 12
    for expected, actual in zip(sequential, concurrent, strict=True):
        assert expected.top == actual.top
        assert np.array_equal(expected.input_HWC, actual.input_HWC)
        assert expected.attention_HW is not None
        assert actual.attention_HW is not None
        assert np.array_equal(expected.attention_HW, actual.attention_HW)
