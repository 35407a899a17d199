"""Prediction: the same pixels and logits as evaluation, for any list of files and any names."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import timm
import torch
from networks import forget_checksums
from PIL import Image, ImageColor, ImageSequence
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune import inference
from finetune.commands.contact_sheet import ERROR_COLOR
from finetune.commands.predict import predict
from finetune.commands.prediction_output import format_predictions
from finetune.data.decode import decode_image
from finetune.data.loader import ImageLoader
from finetune.data.open_source import open_source
from finetune.data.pixel_store import build_pixel_store
from finetune.errors import WeightsError
from finetune.evaluation.unknown_classes import UnknownClassScore
from finetune.evaluation.validation_scores import ValidationScores
from finetune.inference import Classifier
from finetune.model_checksums import add_checksums
from finetune.models.features import compute_pre_logits
from finetune.models.save import BuiltModel, save_model
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
NAMES = ["blue", "green", "=red"]
SIZES: dict[str, Any] = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in timm's hub format, with a random head that separates images."""
    torch.manual_seed(3)
    network = timm.create_model("vit_tiny_patch16_224", img_size=24, num_classes=3, **SIZES)
    torch.nn.init.normal_(network.get_classifier().weight, std=2.0)  # type: ignore[operator]
    preprocessing = Preprocessing(
        image_size=(24, 24),
        mean=MEAN,
        std=STD,
        interpolation="bilinear",
        crop_pct=0.75,
        crop_mode="center",
    )
    built = BuiltModel(
        model=network,
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": 24, **SIZES},
        preprocessing=preprocessing,
        provenance={},
        class_names=None,
    )
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, built, network.state_dict(), class_names=NAMES, preprocessing=preprocessing)
    return folder


def write_image(path: str | Path, seed: int = 0, size: tuple[int, int] = (30, 40)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")
    return Path(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five images of different sizes in two folders, a text file, and two unreadable files."""
    folder = tmp_path / "photos"
    for number in range(3):
        write_image(folder / f"{number}.png", number, (20 + 7 * number, 33))
    write_image(folder / "below" / "deep" / "3.PNG", 3)
    write_image(folder / "below" / "4.png", 4)
    (folder / "notes.txt").write_text("no image")
    (folder / "5-empty.jpg").touch()
    (folder / "6-page.png").write_text("<html>moved</html>")
    return folder


def test_predictions_match_evaluation(model: Path, image_folder: Path) -> None:
    """Reads the same files through `ImageLoader`, as `eval` does, and through the classifier."""
    classifier = Classifier.load(model, device="cpu")
    split = open_source(f"folder:{image_folder}").splits["test"]
    store = build_pixel_store(
        split,
        keep="memory",
        device=torch.device("cpu"),
        num_workers=0,
        unreadable="stop",
        local_world_size=1,
        progress=False,
    )
    loader = ImageLoader(store, classifier.pipeline, num_classes=3, device=torch.device("cpu"))
    (batch,) = loader.eval_batches(batch_size=100)
    with torch.inference_mode():
        expected_BK = classifier.network(batch.images_BCHW).double().softmax(1)
    files = {Path(split.name_of(i)).name: row for i, row in enumerate(expected_BK.tolist())}
    assert len(files) == 12
    rows = classifier.predict(image_folder / "test", top_k=3, batch_size=5)
    assert len(rows) == 12
    for row in rows:
        confidences = {
            prediction["index"]: prediction["confidence"] for prediction in row["predictions"]
        }
        # other batch sizes sum in another order: float32 rounding of logits of about 10
        assert [confidences[i] for i in range(3)] == pytest.approx(
            files[Path(row["path"]).name], abs=1e-5
        )


def test_unusual_files_are_decoded_as_in_evaluation(model: Path, tmp_path: Path) -> None:
    """Covers EXIF rotation, transparency and 16-bit gray."""
    rotated = Image.new("RGB", (50, 30), (200, 10, 10))
    exif = rotated.getexif()
    exif[0x0112] = 6
    rotated.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("RGBA", (30, 30), (0, 0, 255, 0)).save(tmp_path / "clear.png")
    Image.fromarray(np.full((30, 30), 40_000, np.uint16)).save(tmp_path / "deep.png")
    classifier = Classifier.load(model, device="cpu")
    inputs_seen: list[torch.Tensor] = []
    classifier.network.register_forward_pre_hook(lambda _, inputs: inputs_seen.append(inputs[0]))
    rows = classifier.predict(tmp_path)
    (images,) = inputs_seen
    assert [Path(row["path"]).name for row in rows] == ["clear.png", "deep.png", "turned.jpg"]
    assert images.shape == (3, 3, 24, 24)
    white = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(images[0], white.view(3, 1, 1).expand(3, 24, 24))
    gray = round(40_000 * 255 / 65_535) / 255
    scaled = (gray - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(images[1], scaled.view(3, 1, 1).expand(3, 24, 24))


def test_rows_are_sorted_and_do_not_depend_on_the_batch_size(model: Path, photos: Path) -> None:
    classifier = Classifier.load(model, device="cpu")
    rows = classifier.predict(photos, top_k=2)
    names = [os.path.relpath(row["path"], photos) for row in rows]
    expected = "0.png 1.png 2.png 5-empty.jpg 6-page.png below/4.png below/deep/3.PNG"
    assert names == expected.split()
    sizes: list[int] = []
    classifier.network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    batches = {1: [1] * 5, 2: [1, 1, 1, 2], 3: [1, 1, 3], 100: [5], None: [5]}
    for batch_size, expected_sizes in batches.items():
        sizes.clear()
        other_rows = classifier.predict([photos], top_k=2, batch_size=batch_size)
        assert sorted(sizes) == expected_sizes
        assert [row["path"] for row in other_rows] == [row["path"] for row in rows]
        for other_row, expected_row in zip(other_rows, rows, strict=True):
            assert other_row.keys() == expected_row.keys()
            for a, b in zip(
                other_row.get("predictions", []), expected_row.get("predictions", []), strict=True
            ):
                assert a["label"] == b["label"]
                assert a["confidence"] == pytest.approx(b["confidence"], abs=1e-5)
    readable = [row for row in rows if "error" not in row]
    assert len(readable) == 5
    assert len({row["predictions"][0]["confidence"] for row in readable}) == 5
    for row in readable:
        first, second = row["predictions"]
        assert first["label"] == NAMES[first["index"]]
        assert 1 > first["confidence"] > second["confidence"] > 0
    errors = {Path(row["path"]).name: row["error"] for row in rows if "error" in row}
    assert errors.keys() == {"5-empty.jpg", "6-page.png"}
    assert "zero bytes" in errors["5-empty.jpg"]
    assert errors["6-page.png"].startswith("an HTML page")


def test_top_k_is_limited_to_the_number_of_classes(model: Path, photos: Path) -> None:
    (row,) = Classifier.load(model, device="cpu").predict(str(photos / "0.png"), top_k=50)
    assert sorted(one["index"] for one in row["predictions"]) == [0, 1, 2]
    assert sum(one["confidence"] for one in row["predictions"]) == pytest.approx(1, abs=1e-12)


def test_ties_are_sorted_by_class_index(model: Path, photos: Path) -> None:
    classifier = Classifier.load(model, device="cpu")
    torch.nn.init.zeros_(classifier.network.get_classifier().weight)  # type: ignore[operator]
    torch.nn.init.zeros_(classifier.network.get_classifier().bias)  # type: ignore[operator]
    (row,) = classifier.predict([photos / "0.png"])
    assert [one["index"] for one in row["predictions"]] == [0, 1, 2]


def test_pil_images_are_classified_like_their_files(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    classifier = Classifier.load(model, device="cpu")
    files = [photos / f"{number}.png" for number in range(2)]
    expected = [row["predictions"] for row in classifier.predict(files)]
    rows = classifier.predict([Image.open(files[0]), files[1]])
    assert [row["predictions"] for row in rows] == expected
    assert [row["path"] for row in rows] == [None, str(files[1])]
    (broken,) = classifier.predict(Image.new("F", (3, 3), 2.0))
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "frames.tif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "frames.tif") as opened:
        with refused("data.ambiguous", "image.copy()"):
            classifier.predict(ImageSequence.Iterator(opened))
        copies = classifier.predict(frame.copy() for frame in ImageSequence.Iterator(opened))
    assert copies == classifier.predict(frames)
    assert broken.pop("error").startswith("gray values from 2 to 2")
    assert broken == {"path": None}


def test_missing_file_gives_an_error_row(model: Path, photos: Path) -> None:
    rows = Classifier.load(model, device="cpu").predict(["gone.png", photos / "0.png", "no*.png"])
    assert ["error" in row for row in rows] == [True, False, True]
    assert rows[0]["error"] == "no such file"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_secrets_in_urls_are_masked(model: Path) -> None:
    [row] = Classifier.load(model).predict("https://me:pw@host.invalid/a.png?sig=abc")
    assert row["path"] == "https://***@host.invalid/a.png?***"
    assert "error" in row


def test_file_names_that_are_not_utf8_keep_their_bytes(model: Path, tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path / "in") + b"/caf\xe9.png"
    os.mkdir(tmp_path / "in")
    os.rename(write_image(tmp_path / "plain.png"), raw)
    for suffix in ("csv", "jsonl"):
        out = tmp_path / f"rows.{suffix}"
        rows = predict(str(model), [str(tmp_path / "in")], out=out)
        assert [os.fsencode(row["path"]) for row in rows] == [raw]
        assert "predictions" in rows[0]
    assert b"caf\xe9.png," in (tmp_path / "rows.csv").read_bytes()
    line = json.loads((tmp_path / "rows.jsonl").read_text("ascii"))
    assert os.fsencode(line["path"]) == raw
    format_predictions(rows).encode("utf-8")


def test_file_list_on_standard_input(
    model: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [f"{photos}/1.png", f"{photos}/0.png"]
    stdin = SimpleNamespace(buffer=io.BytesIO("\n".join(paths).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    rows = predict(str(model), ["-", f"{photos}/2.png"])
    assert [row["path"] for row in rows] == [*paths, f"{photos}/2.png"]


def test_run_directory_uses_its_own_eval_transform(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(model)
    (run / "run.json").write_text('{"status": "done"}')
    (run / "recipe.yaml").write_text(
        "model: {name: vit_tiny_patch16_224}\n"
        "data: {source: 'embedded:digits', eval: 'resize((24, 24))', decode_size: 24}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    loaded = Classifier.load(run, device="cpu")
    assert loaded.pipeline.transform_spec == "resize((24, 24))"
    photo = photos / "large.jpg"
    write_image(photo, size=(100, 130))
    Image.open(photo).save(photo, "JPEG")
    small_HWC = decode_image(photo, decode_size=24)
    assert small_HWC.shape == (25, 33, 3)
    input_B3hw = loaded.pipeline([torch.from_numpy(small_HWC).permute(2, 0, 1)])
    (row,) = loaded.predict(photo, top_k=1)
    expected = loaded.logits(input_B3hw).softmax(1).max()
    assert row["predictions"][0]["confidence"] == pytest.approx(float(expected), abs=1e-6)
    # the weights' crop_pct is 0.75: 24 of 32 px
    assert Classifier.load(model, device="cpu").pipeline.transform_spec == (
        "resize(32) | center_crop((24, 24))"
    )


def with_temperature(model: Path, folder: Path, temperature: float) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["calibration"] = {"temperature": temperature, "split": "val"}
    (folder / "config.json").write_text(json.dumps(add_checksums(config, folder)), "utf-8")
    return folder


def test_calibrated_confidences_use_the_temperature(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    calibrated_model = with_temperature(model, tmp_path / "warm", 2.5)
    image = photos / "0.png"
    confidences = {}
    for calibrated in (False, True):
        classifier = Classifier.load(calibrated_model, device="cpu", calibrated=calibrated)
        inputs = classifier.pipeline([torch.from_numpy(decode_image(image)).permute(2, 0, 1)])
        logits = classifier.logits(inputs)
        assert logits.dtype == torch.float32
        with torch.inference_mode():
            assert torch.equal(logits, classifier.network(inputs)), (
                "logits() ignores the temperature"
            )
        scaled = logits.double() / (2.5 if calibrated else 1)
        (row,) = classifier.predict(image)
        confidences[calibrated] = [one["confidence"] for one in row["predictions"]]
        expected = scaled.softmax(1)[0].sort(descending=True).values.tolist()
        assert confidences[calibrated] == pytest.approx(expected, abs=1e-12)
    assert confidences[False][0] > confidences[True][0] + 0.01


def test_calibrated_without_temperature_is_refused(model: Path) -> None:
    with refused("weights.no_temperature", f"finetune eval {model} --fit-temperature"):
        Classifier.load(model, calibrated=True)


def test_rows_are_returned_before_later_files_are_decoded(
    model: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, two_cores: None
) -> None:
    """Predictions are streamed: the first batch is returned before the rest is decoded."""
    opened: list[str] = []

    def counting_decode(path: str, **kwargs: Any) -> np.ndarray:
        opened.append(path)
        return decode_image(path, **kwargs)

    monkeypatch.setattr("finetune.inference.decode_image", counting_decode)
    paths = [(str(photos / "0.png"), None)] * 100
    rows = Classifier.load(model, device="cpu").iter_predictions(paths, batch_size=4)
    assert "predictions" in next(rows)
    assert 4 <= len(opened) <= 3 * 4  # one batch per core, plus the returned one
    assert len(list(rows)) == 99
    assert len(opened) == 100


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Use two threads, as on a machine with two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_core(two_cores: None) -> None:
    torch.set_num_threads(1)


class WaitForSecondBatch(torch.nn.Module):
    """A model whose forward pass waits until a second batch is in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=20)
        self.threads: list[int] = []

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        self.barrier.wait()
        return images_BCHW.mean((2, 3))


def test_each_core_computes_its_own_batch(model: Path, photos: Path, two_cores: None) -> None:
    pipeline = Classifier.load(model, device="cpu").pipeline
    classifier = Classifier(WaitForSecondBatch(), pipeline, NAMES, device="cpu")
    paths = [(str(photos / f"{number}.png"), None) for number in (0, 1, 2, 0)]
    rows = list(classifier.iter_predictions(paths, batch_size=1))
    assert [row["path"] for row in rows] == [path for path, _ in paths]
    assert rows[0]["predictions"] == rows[3]["predictions"] != rows[1]["predictions"]
    assert classifier.network.threads == [1] * 4
    assert torch.get_num_threads() == 2


def test_gpu_preprocesses_a_batch_together(
    model: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; a CPU preprocesses one image at a time, which is as fast."""
    classifier, sizes = Classifier.load(model, device="cpu"), []
    pipeline = classifier.pipeline
    classifier.pipeline = lambda images, **k: sizes.append(len(images)) or pipeline(images, **k)
    classifier.pipeline.decode_size = None
    one_by_one = classifier.predict(photos)
    assert sizes == [1] * 5
    sizes.clear()
    monkeypatch.delitem(inference.PREPROCESS_BYTES_BY_DEVICE, "cpu")
    in_one_batch = classifier.predict(photos)
    assert sizes == [5]
    # an image takes about 3,000 bytes
    monkeypatch.setattr(inference, "DEFAULT_PREPROCESS_BYTES", 3960)
    sizes.clear()
    classifier.predict(photos)
    assert sizes == [2, 2, 1]
    for row, batch_row in zip(one_by_one, in_one_batch, strict=True):
        for a, b in zip(row.get("predictions", []), batch_row.get("predictions", []), strict=True):
            assert a["label"] == b["label"]
            # resizing sums in another order
            assert a["confidence"] == pytest.approx(b["confidence"], abs=1e-5)


@pytest.mark.parametrize("grouped", [False, True])
def test_image_that_the_transform_refuses_gives_an_error_row(
    grouped: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inference.PREPROCESS_BYTES_BY_DEVICE, "cpu", 2**20 if grouped else 1)
    sizes = {"image_size": (24, 24), "mean": MEAN, "std": STD}
    network = Classifier.load(model, device="cpu").network
    classifier = Classifier(network, Pipeline("normalise", train=False, **sizes), NAMES)
    for number, side in enumerate((24, 30, 24)):
        write_image(tmp_path / f"{number}.png", number, (side, side))
    rows = classifier.predict(tmp_path)
    assert ["error" in row for row in rows] == [False, True, False]
    assert "30" in rows[1]["error"]
    assert rows[0]["predictions"] != rows[2]["predictions"]


def test_closing_the_iterator_stops_a_running_batch(
    model: Path, photos: Path, one_core: None
) -> None:
    """A batch of a large model can take minutes on a CPU; closing stops it between two layers."""
    started, last_layer_batches = threading.Event(), []

    class SlowLayer(torch.nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            if started.is_set():
                assert inference._WORKER.stop.wait(20)
            started.set()
            return images_BCHW

    class LastLayer(torch.nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            last_layer_batches.append(len(images_BCHW))
            return images_BCHW.mean((2, 3))

    network = torch.nn.Sequential(SlowLayer(), LastLayer())
    pipeline = Classifier.load(model, device="cpu").pipeline
    classifier = Classifier(network, pipeline, NAMES, device="cpu")
    rows = classifier.iter_predictions([(str(photos / "0.png"), None)] * 50, batch_size=2)
    assert "predictions" in next(rows)
    rows.close()
    assert last_layer_batches == [2]
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_failed_prediction_keeps_the_old_files(model: Path, photos: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    forget_checksums(shutil.copytree(model, broken))
    tensors = load_file(broken / "model.safetensors")
    # finite weights whose outputs are not finite
    save_file(
        {k: torch.full_like(v, 3e38) for k, v in tensors.items()}, broken / "model.safetensors"
    )
    for name in ("rows.csv", "sheet.png"):
        (tmp_path / name).write_text("path,error\n")
    with pytest.raises(WeightsError, match="not finite"):
        predict(str(broken), [str(photos)], out=tmp_path / "rows.csv", sheet=tmp_path / "sheet.png")
    for name in ("rows.csv", "sheet.png"):
        assert (tmp_path / name).read_text() == "path,error\n"
    assert not list(tmp_path.glob(".*"))


def test_contact_sheet_is_written_in_addition_to_the_rows(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    sheet = tmp_path / "sheet.PNG"
    rows = predict(str(model), [str(photos)], out=tmp_path / "rows.csv", sheet=sheet)
    assert len(rows) == 7
    with Image.open(sheet) as image:
        image.load()
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    # the color of the two unreadable files
    assert (pixels == ImageColor.getrgb(ERROR_COLOR)).all(axis=1).any()
    assert (tmp_path / "rows.csv").read_text("utf-8").count("\n") == 8


def test_out_of_memory_suggests_batch_size(model: Path, photos: Path) -> None:
    def raise_out_of_memory(images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    classifier = Classifier.load(model, device="cpu")
    classifier.network.forward = raise_out_of_memory  # type: ignore[method-assign]
    with refused("setup.memory", "5 images", "--batch-size"):
        classifier.predict(photos)


def test_flip_tta_averages_the_logits_of_both_directions(model: Path, photos: Path) -> None:
    plain, averaged = (Classifier.load(model, device="cpu", tta=tta) for tta in (None, "flip"))
    images = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    logits, flipped = plain.logits(images), plain.logits(images.flip(3))
    assert (logits - flipped).abs().max() > 0.1
    torch.testing.assert_close(averaged.logits(images), (logits + flipped) / 2)
    (row,) = predict(str(model), [str(photos / "0.png")], tta="flip")
    assert row == averaged.predict(photos / "0.png")[0]
    assert row != plain.predict(photos / "0.png")[0]


@pytest.mark.parametrize("tta", [None, "flip"])
def test_features_are_the_pre_logits_of_each_image(
    model: Path, photos: Path, tmp_path: Path, tta: Any
) -> None:
    file = tmp_path / "features.parquet"
    rows = predict(str(model), [str(photos)], features=file, out=tmp_path / "rows.jsonl", tta=tta)
    without_features = predict(str(model), [str(photos)], tta=tta)
    assert sum("error" in row for row in rows) == 2
    for row, expected in zip(rows, without_features, strict=True):
        assert row.get("error") == expected.get("error")
        confidences, expected_confidences = (
            {p["label"]: p["confidence"] for p in each.get("predictions", [])}
            for each in (row, expected)
        )
        assert confidences == pytest.approx(expected_confidences, abs=1e-5)
    table = pq.read_table(file).to_pylist()
    assert [entry["path"] for entry in table] == [row["path"] for row in rows]
    classifier = Classifier.load(model, device="cpu")
    for entry, row in zip(table, rows, strict=True):
        if "error" in row:
            assert entry["features"] is None
            continue
        image = torch.from_numpy(decode_image(row["path"])).permute(2, 0, 1)
        with torch.no_grad():
            images_BCHW = classifier.pipeline(image[None])
            expected_BD = compute_pre_logits(classifier.network, images_BCHW)
            if tta is not None:
                flipped_BD = compute_pre_logits(classifier.network, images_BCHW.flip(3))
                expected_BD = (expected_BD + flipped_BD) / 2
        assert entry["features"] == pytest.approx(expected_BD[0].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "option, suffix",
    [("out", ".csv or .jsonl"), ("sheet", ".png"), ("features", ".parquet")],
)
def test_invalid_output_path_is_refused_before_loading_the_model(
    option: str, suffix: str, tmp_path: Path
) -> None:
    for name in ("rows.jpg", "rows", "csv", "png"):
        with refused("recipe.wrong_value", f"--{option}", suffix):
            predict("no such model", ["x"], **{option: name})
    with refused("setup.not_writable", f"--{option}", "gone"):
        predict("no such model", ["x"], **{option: tmp_path / "gone" / f"x{suffix.split()[0]}"})


@pytest.mark.parametrize("arguments", [{"top_k": 0}, {"batch_size": 0}])
def test_counts_below_one_are_refused(model: Path, arguments: dict[str, Any]) -> None:
    with refused("recipe.wrong_value", next(iter(arguments)), "got 0"):
        Classifier.load(model, device="cpu").predict([], **arguments)


@pytest.mark.parametrize("name", ["labels.csv", "metadata.jsonl"])
def test_only_predictions_are_overwritten(model: Path, tmp_path: Path, name: str) -> None:
    write_image(tmp_path / "photo.png")
    labels = {"labels.csv": "path,label\nphoto.png,a\n", "metadata.jsonl": '{"file_name": "a"}\n'}
    (tmp_path / name).write_text(labels[name])
    with refused("recipe.conflict", name):
        predict(str(model), [str(tmp_path)], out=tmp_path / name)
    assert (tmp_path / name).read_text() == labels[name]
    (tmp_path / name).write_bytes(b"")
    for _ in range(2):
        predict(str(model), [str(tmp_path)], out=tmp_path / name)
    if name == "labels.csv":  # the columns of 1,000 predictions
        names = [f"label_{number},confidence_{number}" for number in range(1000)]
        (tmp_path / name).write_text(f"path,{','.join(names)},error\n")
        predict(str(model), [str(tmp_path)], out=tmp_path / name)


def test_warns_of_classes_with_the_same_name(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(model, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"green"', '"blue"'))
    forget_checksums(tmp_path / "model")
    Classifier.load(tmp_path / "model")
    assert "1 class has the name of another one" in caplog.text


def test_weights_without_a_classifier_give_only_features(tmp_path: Path) -> None:
    network = timm.create_model("vit_tiny_patch16_224", img_size=24, num_classes=0, **SIZES)
    preprocessing = Preprocessing((24, 24), (0.5,) * 3, (0.5,) * 3, "bicubic", 0.9, "center")
    args = {"img_size": 24, **SIZES}
    built = BuiltModel(network, "vit_tiny_patch16_224", args, preprocessing, {}, None)
    save_model(tmp_path, built, network.state_dict(), class_names=[], preprocessing=preprocessing)
    with pytest.raises(WeightsError, match="no classifier"):
        Classifier.load(tmp_path)
    # but their features can be written
    write_image(tmp_path / "photo.png")
    (row,) = predict(str(tmp_path), [str(tmp_path / "photo.png")], features=tmp_path / "f.parquet")
    assert row["predictions"] == []
    (entry,) = pq.read_table(tmp_path / "f.parquet").to_pylist()
    assert len(entry["features"]) == 16


def with_validation_scores(
    model: Path, folder: Path, *, num_images: int, errors: int = 0, max_log_odds: float = 4.0
) -> Path:
    """Copy a model, with scores of validation images; the least certain ones are errors."""
    log_odds = np.linspace(0, max_log_odds, num_images, dtype=np.float32)
    nonconformity = np.where(np.arange(num_images) < errors, 2.0, 0.0).astype(np.float32)
    scores = ValidationScores(log_odds, nonconformity, np.arange(num_images) % 3, "val")
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["validation_scores"] = scores.to_config()
    (folder / "config.json").write_text(json.dumps(add_checksums(config, folder)), "utf-8")
    return folder


def test_max_error_abstains_below_the_threshold(model: Path, photos: Path, tmp_path: Path) -> None:
    tops = [
        row["predictions"][0]["confidence"]
        for row in predict(str(model), [str(photos)])
        if "error" not in row
    ]
    median = float(np.median(tops))
    scored = with_validation_scores(
        model,
        tmp_path / "scored",
        num_images=400,
        errors=200,
        max_log_odds=2 * np.log(median / (1 - median)),
    )
    out = tmp_path / "rows.csv"
    rows = predict(str(scored), [str(photos)], max_error=0.05, out=out, device="cpu")
    classifier = Classifier.load(scored, device="cpu", max_error=0.05)
    assert classifier.selective is not None
    assert 180 < classifier.selective.num_answered < 220
    readable = [row for row in rows if "error" not in row]
    for row in readable:
        confidence = row["predictions"][0]["confidence"]
        log_odds = np.log(confidence / (1 - confidence))
        assert row["abstained"] == (log_odds <= classifier.selective.threshold)
    assert {row["abstained"] for row in readable} == {True, False}
    header, *lines = out.read_text().splitlines()
    assert header.startswith("path,abstained,label_1,")
    cells = {line.split(",")[0]: line.split(",")[1] for line in lines}
    assert all(cells[row["path"]] == str(row["abstained"]).lower() for row in readable)
    table = format_predictions(rows)
    assert table.count("abstained (") == sum(row["abstained"] for row in readable)


def test_coverage_adds_a_set_with_the_predicted_class(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    scored = with_validation_scores(model, tmp_path / "scored", num_images=90, errors=30)
    out = tmp_path / "rows.jsonl"
    rows = predict(str(scored), [str(photos)], coverage=0.9, calibrated=False, out=out)
    lines = {row["path"]: row for row in map(json.loads, out.read_text().splitlines())}
    sizes = set()
    for row in rows:
        if "error" in row:
            continue
        assert row["prediction_set"][0] == row["predictions"][0]
        expected = [one for one in row["predictions"] if one["confidence"] >= np.exp(-2.0)]
        assert row["prediction_set"] == (expected or row["predictions"][:1])
        assert lines[row["path"]]["prediction_set"] == row["prediction_set"]
        sizes.add(len(row["prediction_set"]))
    assert len(sizes) > 1
    assert "{" in format_predictions(rows)


def test_unknown_marks_images_above_the_threshold(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    loaded = Classifier.load(model, device="cpu", with_features=True)
    rows = [row for row in loaded.predict(photos) if "error" not in row]
    features = torch.from_numpy(np.stack([row["features"] for row in rows]))
    with torch.inference_mode():
        energies = loaded.network.get_classifier()(features).logsumexp(1)  # type: ignore[operator]
    score = UnknownClassScore(features.mean(0), torch.eye(16, 2).half(), 0.5, 0.0)
    scores = score.compute(features, energies)
    scored = with_validation_scores(model, tmp_path / "scored", num_images=10)
    config = json.loads((scored / "config.json").read_text("utf-8"))
    entry = dataclasses.replace(score, threshold=float(scores.median())).to_config()
    config["validation_scores"]["unknown_class"] = entry
    (scored / "config.json").write_text(json.dumps(add_checksums(config, scored)), "utf-8")
    marked = predict(str(scored), [str(photos)], mark_unknown=True, out=tmp_path / "rows.csv")
    flags = {row["path"]: row["unknown"] for row in marked if "error" not in row}
    expected = {
        row["path"]: value
        for row, value in zip(rows, (scores > scores.median()).tolist(), strict=True)
    }
    assert flags == expected
    assert set(flags.values()) == {True, False}
    assert (tmp_path / "rows.csv").read_text().startswith("path,unknown,label_1,")
    assert format_predictions(marked).count("unknown class (") == sum(flags.values())
    assert "unknown" not in predict(str(scored), [str(photos)])[0]


def test_promises_that_a_model_cannot_make_are_refused(model: Path, tmp_path: Path) -> None:
    command = f"finetune eval {model} --fit-temperature"
    with refused("weights.no_validation_scores", "--max-error", command):
        Classifier.load(model, max_error=0.02)
    with refused("weights.no_validation_scores", "--coverage", command):
        Classifier.load(model, coverage=0.9)
    with refused("weights.no_validation_scores", "--unknown", command):
        Classifier.load(model, mark_unknown=True)
    few = with_validation_scores(model, tmp_path / "few", num_images=60)
    with refused("data.too_few_images", "149", "60 images", "0.05"):
        Classifier.load(few, max_error=0.02)
    with refused("data.too_few_images", "--coverage 0.99", "99", "60 images"):
        Classifier.load(few, coverage=0.99)
    with refused("data.too_few_images", "--unknown", "100", "60 images"):
        Classifier.load(few, mark_unknown=True)
    with refused("recipe.conflict", "--max-error", "--tta"):
        Classifier.load(few, max_error=0.1, tta="flip")
    with refused("recipe.wrong_value", "--coverage"):
        Classifier.load(few, coverage=float("nan"))
